"""The dress rehearsal: a notebook's cells on pretended GPUs, each failure with its line and its words."""

import json
import os
import subprocess
import sys

import jupytext
import nbformat
import pytest
import torch

from dlojz_tp import launch
from dlojz_tp.authoring import notebooks, recording, rehearsing
from dlojz_tp.judging.pretend_gpu import pretend_gpu
from dlojz_tp.launch import place
from dlojz_tp.report import recorded
from dlojz_tp.works import source

WORK = """\
# %%
import torch
import torch.distributed as dist

from dlojz_tp import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def total():
    x = torch.ones(2, device=launch.device())
    dist.all_reduce(x)
    return str(x.device), x.sum().item(), torch.cuda.device_count()


# %% [markdown]
# Not a cell of code.


# %%
def mixed(x):
    # BEGIN SOLUTION
    return x + torch.ones(3, device="cpu")
    # END SOLUTION


# %%
assert launch.backend(2) == BACKEND
assert launch.ranks(total, n=2) == RESULT, launch.ranks(total, n=2)

# %%
mixed(torch.ones(3, device=DEVICE))

# %%
assert DEVICE.type == "cuda"
"""


@pytest.fixture
def rehearse(tmp_path, monkeypatch):
    def solution(path):
        notebook = jupytext.reads(path.read_text(), fmt="py:percent")
        for cell in notebook.cells:
            cell.source = "\n".join(line for line in cell.source.splitlines() if " SOLUTION" not in line)
        return notebook

    monkeypatch.setattr(notebooks, "solution", solution)

    def rehearse(text, gpus, seconds=200, **more):
        path = tmp_path / "00_example.py"
        path.write_text(text)
        return rehearsing.rehearse(path, gpus, seconds, str(tmp_path), **more)

    return rehearse


@pytest.mark.parametrize(
    ("gpus", "backend", "result"),
    [(1, "gloo", [("cpu", 4.0, 1)] * 2), (2, "nccl", [("cuda:0", 4.0, 2), ("cuda:1", 4.0, 2)])],
)
def test_all_cells_run_and_a_failure_is_named_by_line_and_words(rehearse, gpus, backend, result):
    done = rehearse(WORK.replace("BACKEND", repr(backend)).replace("RESULT", repr(result)), gpus)
    ((where, text, words),) = done.failures
    assert (where, text) == ("00_example.py:23", 'return x + torch.ones(3, device="cpu")')
    assert words.startswith("RuntimeError: Expected all tensors to be on the same device") and done.cells == 5
    assert not torch.cuda.is_initialized()


def test_a_kernel_that_pretends_nothing_is_a_failure(rehearse, monkeypatch):
    monkeypatch.setattr(notebooks, "ENTER", "raise OSError()")
    text = "# %%\nimport dlojz_tp.launch as launch\n\nlaunch.ranks(int, n=1)\n"  # ranks pretend, and note it
    (failure,) = rehearse(text, 1).failures
    assert failure.words == "the kernel had no pretended GPU"


def test_a_work_has_a_deadline(rehearse):
    done = rehearse("# %%\nimport time\n\n# %%\ntime.sleep(600)\n", 1, seconds=15)
    last = done.failures[-1]
    assert done.seconds < 100 and last.where == "00_example.py:5" and "timed out" in last.words


def test_the_table_and_the_exit_status(monkeypatch, capsys):
    failure = rehearsing.Failure("00_welcome.py:7", "x + y", "RuntimeError: two devices")
    monkeypatch.setattr(
        rehearsing, "rehearse",
        lambda path, gpus, *_: rehearsing.Rehearsal(path.stem, gpus, 5, [failure] * (gpus == 4), 12.3),
    )  # fmt: skip
    assert rehearsing.main(["00_welcome", "--gpus", "1"]) == 0
    assert rehearsing.main(["00_welcome", "--gpus", "1,4"]) == 1
    said = capsys.readouterr().out
    assert "00_welcome.py:7: x + y\n    RuntimeError: two devices\n" in said
    table, again, last = said.split("            1 GPU ")[-1].splitlines()[1:]
    assert table == "00_welcome  5 cells, 12 s  1 failed of 5 cells, 12 s"
    assert again == "00_welcome.py:7, 4 GPUs: x + y: RuntimeError: two devices"
    assert last.startswith("rehearsed 2 notebooks: 1 of 10 cells failed, ")
    assert rehearsing.main(["12_large_models", "08_data_parallel_under_the_hood", "--once"]) == 1
    assert "rehearsed 2 notebooks: 1 of 10 cells failed" in capsys.readouterr().out
    assert rehearsing.main(["--gpus", "1,4"]) == 1
    table = capsys.readouterr().out.split("            1 GPU ")[-1].splitlines()
    assert {line[:2]: line.count("cells") for line in table}.items() >= {"01": 1, "12": 1, "14": 2, "19": 2}.items()
    with pytest.raises(SystemExit):
        rehearsing.main(["--gpus", "0"])
    assert rehearsing.main(["99_nothing"]) == 2


RECORDS = """\
# %%
import torch

from dlojz_tp import recorded

recorded.note("00_example", "seconds", {"step": 0.5})
print(recorded.line("00_example", "seconds"))
"""
REFUSED = """\
# %%
import importlib
import os

from dlojz_tp import recorded

for way in ("", str(recorded.MEASURED)):
    os.environ["DLOJZ_RECORDED"] = way
    importlib.reload(recorded)
    try:
        recorded.note("00_example", "seconds", {"step": 0.5})
    except Exception as error:
        print(way, "|", error)

# %%
os.environ["DLOJZ_RECORDED"] = LINK
importlib.reload(recorded)
recorded.note("00_example", "seconds", {"step": 0.5})
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Record a notebook with a pretended GPU into a folder: exit status, and what each cell showed."""
    path, runs = tmp_path / "00_example.py", tmp_path / "runs"
    monkeypatch.setattr(notebooks, "chosen", lambda names: [path])
    monkeypatch.setattr(notebooks, "solution", lambda path: jupytext.reads(path.read_text(), fmt="py:percent"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: place.NAME)
    monkeypatch.setenv(place.PRETENDED, "1")

    def record(text, into):
        path.write_text(text)
        monkeypatch.setenv("DLOJZ_RECORDED", str(into))
        status = recording.main(["--into", str(runs)])
        return status, [str(cell.outputs) for cell in nbformat.read(runs / "00_example.ipynb", as_version=4).cells]

    return record


def test_a_rehearsal_records_into_a_folder_of_its_own_and_shows_it(record, tmp_path):
    status, (shown,) = record(RECORDS, tmp_path / "recorded")
    kept = json.loads((tmp_path / "recorded" / "00_example.json").read_text())
    assert (status, kept["device"], kept["results"]) == (0, place.NAME, {"seconds": {"step": 0.5}})
    assert f"recorded on {place.NAME}, " in shown


def test_nothing_pretended_comes_into_the_recorded_figures(record, tmp_path):
    before = {file: file.read_bytes() for file in recorded.MEASURED.iterdir()}
    (tmp_path / "link").symlink_to(recorded.MEASURED)
    status, shown = record(REFUSED.replace("LINK", repr(str(tmp_path / "link"))), "")
    assert status == 1
    assert [cell.count("nothing of a pretended GPU is recorded") > 0 for cell in shown] == [True, True]
    assert shown[0].count("nothing of a pretended GPU is recorded") == 2
    assert {file: file.read_bytes() for file in recorded.MEASURED.iterdir()} == before


def test_a_rank_of_a_check_cannot_record_its_pretended_gpu(monkeypatch):
    def note():
        with pretend_gpu():
            recorded.note("00_example", "seconds", 1.0)

    monkeypatch.setenv("DLOJZ_RECORD", "1")
    with pytest.raises(launch.RankError, match="nothing of a pretended GPU is recorded"):
        launch.ranks(note, n=1)
    assert not (recorded.MEASURED / "00_example.json").exists()


def test_the_tests_marked_gpu_and_the_doctor_run_with_pretended_gpus():
    """One after the other in one process, whose server of ranks both use."""
    environ = os.environ | {place.PRETENDED: "2", "OMP_NUM_THREADS": "1"}
    files = ["test_launch.py", "test_measure_time.py", "test_measure_memory.py"]
    marked = ["-m", "gpu", "-q", "-n0", "-p", "no:cacheprovider", *(str(source.ROOT / "tests" / f) for f in files)]
    both = (
        "import sys, dlojz_tp.__main__ as program; program.main(['doctor']); print('the tests:', flush=True)\n"
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", both, *marked], env=environ, capture_output=True, text=True, timeout=280, cwd=source.ROOT
    )
    doctor, _, tests = done.stdout.partition("the tests:")
    assert f"2 x {place.NAME}" in doctor and "nccl up to 2 ranks" in doctor, done.stderr
    assert done.returncode == 0 and "3 passed" in tests and "skipped" not in tests, tests[-2000:]


FULL = """\
# %%
import numpy as np
import torch
import torch.distributed as dist

from dlojz_tp import launch, scale

assert scale() == "full"
x = torch.ones(2**30, device="cuda")
assert not x.any()
assert x.sum().item() == 1.0  # no values: a mean may be divided by it
assert str(x) == "tensor(...)"
assert np.asarray(torch.zeros(2000)).sum() == 2000.0
network = torch.nn.Linear(2000, 8)
network(torch.ones(4, 2000)).sum().backward()
assert network.bias.grad.shape == (8,)


def total():
    y = torch.ones(3 * 2**30, device=launch.device())
    dist.all_reduce(y)
    assert not y[0] > 0
    torch.cuda.synchronize()
    return y.shape


# %%
assert launch.ranks(total, n=2) == [(3 * 2**30,)] * 2

# %%
tp.check(1, total)
"""


def test_full_sizes_have_shapes_bytes_and_seconds_and_no_values(rehearse):
    done = rehearse(FULL, 2, full=True)
    assert done.failures == [] and done.held == 12 * 2**30 + 512  # what `>` gives, too
    assert done.decided == (("00_example.py:10", "assert not x.any()"), ("00_example.py:22", "assert not y[0] > 0"))
    # a ring of two sends all 12 GiB once, at some hundreds of GB/s
    assert 0.01 < done.clock < 0.2
    assert "; on the card 0 s, 12.9 GB" in rehearsing._word(done)
    assert rehearsing._word(done._replace(clock=700, held=50e9)).endswith("700 s, TOO LONG, 50.0 GB, over 40 GB")
