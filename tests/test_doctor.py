"""The doctor tells what a machine offers, never crashes on an odd one, and says what to do about each gap."""

import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dlojz_tp import data
from dlojz_tp.commands import doctor, limits

READY = [("photo_patches", "ready", "15 classes"), ("digits", "ready", "fine"), ("imagenet", "missing", "optional")]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    for name in ("DLOJZ_SCALE", "SLURM_JOB_ID", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(data, "status", lambda: READY)
    monkeypatch.setattr(data, "verify", lambda name: "")


def rows():
    return {row.name: row for row in doctor.examine()}


def test_every_row_is_there_with_a_known_mark(capsys):
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for name in (
        "Python", "torch", "torchvision", "GPU", "backend for ranks", "cores", "memory", "shared memory",
        "disk for data", "temporary folder", "C++ compiler", "Slurm", "data: photo_patches", "JupyterLab",
        "TensorBoard", "kernels", "loopback", "course scale",
    ):  # fmt: skip
        assert sum(line[6:].startswith(f"{name} ") for line in text.splitlines()) == 1, name
    assert text.isascii() and max(map(len, text.splitlines())) <= 100
    assert {row.mark for row in doctor.examine()} <= {"ok", "note", "gap"}


def test_json_holds_the_same_rows(capsys):
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found] == [row.name for row in doctor.examine()]
    assert set(found[0]) == {"name", "mark", "value", "todo", "essential"}


def test_wrong_argument_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--jsn"])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_missing_default_set_is_essential(monkeypatch, capsys, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("DLOJZ_DATA", str(tmp_path))
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "Not ready: data: photo_patches" in text and "make_photo_patches.py" in text
    assert any(line.startswith("   -> ") and line.endswith("make_photo_patches.py") for line in text.splitlines())


def test_damaged_default_set_shows_the_command(monkeypatch):
    line = "the image set in /x is damaged: a is missing. Make it again: python make_photo_patches.py --force"
    monkeypatch.setattr(data, "status", lambda: [("photo_patches", "damaged", line)])
    row = rows()["data: photo_patches"]
    assert row.mark == "gap" and row.essential and row.todo == "python make_photo_patches.py --force"


def test_a_file_of_the_default_set_that_is_cut_short_is_found(monkeypatch):
    def cut(name):
        raise data.DataDamaged(
            "the image set in /x is damaged: a is cut short. Make it again: python x --count 2 --force"
        )

    monkeypatch.setattr(data, "verify", cut)
    row = rows()["data: photo_patches"]
    assert (row.mark, row.todo) == ("gap", "python x --count 2 --force") and "cut short" in row.value


@pytest.mark.parametrize("name", ["code_text", "search_table", "photo_cells", "pretrained"])
def test_another_missing_set_is_a_gap_but_not_essential(monkeypatch, capsys, name):
    line = f"the set is not in /x. Make it: python make_{name}.py"
    monkeypatch.setattr(data, "status", lambda: [*READY[1:], (name, "missing", line)])
    row = rows()[f"data: {name}"]
    assert row.mark == "gap" and not row.essential and row.todo == f"python make_{name}.py"
    assert row.value == "missing: the set is not in /x"
    assert doctor.main([]) == 0
    assert f"-> python make_{name}.py" in capsys.readouterr().out


def test_a_failing_probe_never_hides_the_others(monkeypatch, capsys):
    def broken():
        raise RuntimeError("line one\nline two " + "x" * 500)

    for name, (_, essential) in list(doctor.PROBES.items()):
        monkeypatch.setitem(doctor.PROBES, name, (broken, essential))
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("could not tell" in line for line in lines) == len(doctor.PROBES) and max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", ["torch", "torchvision"])
def test_library_that_does_not_import(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    row = rows()[name]
    assert row.mark == "gap" and row.todo and row.essential == (name == "torch")


def test_gpus_are_named_and_ranks_get_nccl(monkeypatch):
    import torch

    gpu = SimpleNamespace(name="Test GPU", total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    found = rows()
    assert found["GPU"].value == "4 x Test GPU, 80 GB" and found["backend for ranks"].value.startswith("nccl up to 4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "one GPU cannot carry two ranks" in rows()["backend for ranks"].value


def test_bad_scale_is_told(monkeypatch):
    monkeypatch.setenv("DLOJZ_SCALE", "huge")
    row = rows()["course scale"]
    assert row.mark == "gap" and "huge" in row.todo


def test_nothing_on_the_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    found = rows()
    assert found["C++ compiler"].mark == "gap" and found["C++ compiler"].todo and found["Slurm"].mark == "note"


def test_a_compiler_that_torch_does_not_call(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "clang++").touch(0o755)
    row = rows()["C++ compiler"]
    assert (row.mark, row.value) == ("gap", "no g++ found") and "export CXX=clang++" in row.todo
    monkeypatch.setenv("CXX", "clang++")
    assert str(tmp_path) in rows()["C++ compiler"].value


def test_inside_a_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert "inside job 4711" in rows()["Slurm"].value


def cgroup(monkeypatch, tmp_path, lines, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "proc").write_text(lines)
    real = limits.Path
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(limits, "Path", lambda name: real(tmp_path / "proc" if name == "/proc/self/cgroup" else name))


def test_limits_of_version_2_are_found_half_way_up(monkeypatch, tmp_path):
    files = {
        "job/cpu.max": "150000 100000\n", "job/step/cpu.max": "max 100000\n", "job/memory.max": "4000000000\n",
        "job/memory.current": "3000000000\n", "job/memory.stat": "anon 5\ninactive_file 1000000000\n",
        "job/step/memory.max": "max\n", "job/step/memory.current": "7\n",
    }  # fmt: skip
    cgroup(monkeypatch, tmp_path, "0::/job/step\n", files)
    assert limits.cpu_limit() == 1.5 and limits.memory_limits() == [(4_000_000_000, 2_000_000_000)]
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "cpu_limit", lambda: 1.5)
    monkeypatch.setattr(doctor, "memory_limits", lambda: [(4_000_000_000, 2_000_000_000)])
    (cores,), (memory,) = doctor._cores(), doctor._memory()
    assert cores.mark == "note" and "1.5 by the cgroup" in cores.value
    assert memory.value == "2.0 GB free of 4.0 GB" and memory.mark == "note"


def test_limits_of_version_1(monkeypatch, tmp_path):
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/job/memory.limit_in_bytes": "1000", "memory/job/memory.usage_in_bytes": "400",
    }  # fmt: skip
    cgroup(monkeypatch, tmp_path, "4:cpu,cpuacct:/job\n3:memory:/job\n", files)
    assert limits.cpu_limit() == 3 and limits.memory_limits() == [(1000, 400)]


def test_no_control_groups(monkeypatch, tmp_path):
    cgroup(monkeypatch, tmp_path, "", {})
    assert limits.cpu_limit() is None and limits.memory_limits() == []


def test_quick_from_the_shell():
    for _ in range(3):  # once more where the machine was slow in between
        done, seconds = _computed("-m", "dlojz_tp", "doctor", "--json")
        assert done.returncode in (0, 1) and json.loads(done.stdout) and "Traceback" not in done.stderr
        _, least = _computed("-c", "import torch")
        if quick := seconds < 6 * least:  # about 2.5
            break
    assert quick


def _computed(*arguments):
    """A Python with these arguments, and the processor's seconds for it: a busy machine hardly lengthens them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_who_cannot_install_is_told_whom_to_ask(monkeypatch):
    assert doctor.to_install("torch") == "pip install 'torch'"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.to_install("torch") == "ask whoever installed the course to run: pip install 'torch'"
