"""The lab command never overwrites what a trainee touched, and opens JupyterLab on this machine only."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from dlojz_tp import index, progress
from dlojz_tp.commands import copies, lab
from dlojz_tp.works import locking, whole_file

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW, NEWER = (
    json.dumps({
        "cells": [{"cell_type": "code", "source": [f"v = {i}\n", "v"]}],
        "metadata": {}, "nbformat": 4, "nbformat_minor": 5,
    })
    for i in range(3)
)  # fmt: skip
NAME = "01_gpu.ipynb"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A checkout with one notebook; returns (course folder, work folder)."""
    monkeypatch.setattr(lab, "CHECKOUT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / NAME).write_text(OLD)
    return tmp_path / "notebooks", tmp_path / "work"


def notebooks(work):
    return {path.name: path.read_text() for path in sorted(work.glob("*.ipynb"))}


def test_first_copy_then_nothing(course):
    assert copies.sync(*course) == [f"{NAME}: copied"]
    assert notebooks(course[1]) == {NAME: OLD}
    before = {path: path.stat().st_mtime_ns for path in course[1].iterdir() if path.name != copies.LOCK}
    assert copies.sync(*course) == []
    assert before == {path: path.stat().st_mtime_ns for path in course[1].iterdir() if path.name != copies.LOCK}


def test_untouched_copy_is_replaced(course):
    copies.sync(*course)
    (course[0] / NAME).write_text(NEW)
    assert copies.sync(*course) == [f"{NAME}: brought up to date"]
    assert notebooks(course[1]) == {NAME: NEW}


def test_to_open_run_and_save_is_no_edit(course):
    folder, work = course
    copies.sync(folder, work)
    saved = json.loads((work / NAME).read_text())
    saved["metadata"] = {"kernelspec": {}, "toc": 1}
    saved["cells"][0] |= {"source": "v = 0\nv", "outputs": [{"text": "0"}], "execution_count": 3, "metadata": {"a": 1}}
    (work / NAME).write_text(json.dumps(saved))
    assert copies.sync(folder, work) == []
    (folder / NAME).write_text(NEW)
    assert copies.sync(folder, work) == [f"{NAME}: brought up to date"]
    (work / NAME).write_text(NEW.replace("v = 1", "v = 1 "))
    (folder / NAME).write_text(NEWER)
    assert "yours is kept" in copies.sync(folder, work)[0]


def test_a_copy_has_the_metadata_that_jupyterlab_writes(tmp_path):
    name = "00_welcome.ipynb"
    copies.sync(ROOT / "notebooks", tmp_path / "work")
    text = (tmp_path / "work" / name).read_text()
    from ipykernel.ipkernel import IPythonKernel

    expected = json.loads(json.dumps(IPythonKernel.language_info))
    metadata = json.loads(text)["metadata"]
    assert metadata["language_info"] == expected and metadata["dlojz_tp"]["name"] == "00_welcome"
    assert nbformat.writes(nbformat.reads(text, 4)) == text.rstrip("\n"), "written as Jupyter's server writes it"


def test_touched_copy_stays_and_the_new_version_is_offered_once(course):
    folder, work = course
    copies.sync(folder, work)
    (work / NAME).write_text("mine")
    assert copies.sync(folder, work) == []  # touched, but the course has not changed
    (folder / NAME).write_text(NEW)
    (line,) = copies.sync(folder, work)
    assert "yours is kept" in line and "01_gpu.new.ipynb" in line
    assert notebooks(work) == {NAME: "mine", "01_gpu.new.ipynb": NEW}
    assert copies.sync(folder, work) == []
    (work / "01_gpu.new.ipynb").unlink()
    assert copies.sync(folder, work) == []  # the trainee refused the offer
    (work / NAME).write_text("mine again")
    assert copies.sync(folder, work) == []
    assert notebooks(work) == {NAME: "mine again"}


def test_untouched_offer_is_renewed_and_a_touched_one_stays(course):
    folder, work = course
    copies.sync(folder, work)
    (work / NAME).write_text("mine")
    (folder / NAME).write_text(NEW)
    copies.sync(folder, work)
    (folder / NAME).write_text(NEWER)
    copies.sync(folder, work)
    assert notebooks(work) == {NAME: "mine", "01_gpu.new.ipynb": NEWER}
    (work / "01_gpu.new.ipynb").write_text("also mine")
    (folder / NAME).write_text(NEW)
    (line,) = copies.sync(folder, work)
    assert "01_gpu.new-2.ipynb" in line
    assert notebooks(work) == {NAME: "mine", "01_gpu.new.ipynb": "also mine", "01_gpu.new-2.ipynb": NEW}
    assert copies.sync(folder, work) == []


def test_deleted_copy_is_put_back(course):
    copies.sync(*course)
    (course[1] / NAME).unlink()
    assert copies.sync(*course) == [f"{NAME}: put back"]
    assert notebooks(course[1]) == {NAME: OLD}


def test_trainees_own_notebook_of_the_same_name_stays(course):
    course[1].mkdir()
    (course[1] / NAME).write_text("my own")
    (line,) = copies.sync(*course)
    assert "yours is kept" in line and notebooks(course[1]) == {NAME: "my own", "01_gpu.new.ipynb": OLD}
    assert copies.sync(*course) == []


@pytest.mark.parametrize(
    "state", [None, "", "{", "[]", "7", '{"01_gpu.ipynb": 3}', '{"01_gpu.ipynb": {"copied": 3, "offered": []}}', "\0"]
)
def test_damaged_state_never_leads_to_an_overwrite(course, state):
    folder, work = course
    copies.sync(folder, work)
    for copy in ("mine", OLD):
        (work / NAME).write_text(copy)
        (folder / NAME).write_text(NEW)
        (work / copies.WORK).unlink() if state is None else (work / copies.WORK).write_text(state)
        copies.sync(folder, work)
        assert notebooks(work) == {NAME: copy, "01_gpu.new.ipynb": NEW}
    assert copies.sync(folder, work) == []
    json.loads((work / copies.WORK).read_text())


def test_damaged_state_knows_an_unchanged_copy_again(course):
    copies.sync(*course)
    (course[1] / copies.WORK).unlink()
    assert copies.sync(*course) == []
    (course[0] / NAME).write_text(NEW)
    assert copies.sync(*course) == [f"{NAME}: brought up to date"]


def test_folder_and_dangling_link_of_the_same_name_stay(course):
    folder, work = course
    work.mkdir()
    (work / NAME).mkdir()
    (folder / "02.ipynb").write_text(OLD)
    (work / "02.ipynb").symlink_to("gone")
    copies.sync(folder, work)
    assert (work / NAME).is_dir() and (work / "02.ipynb").is_symlink()
    assert (work / "01_gpu.new.ipynb").read_text() == (work / "02.new.ipynb").read_text() == OLD


def test_file_that_appears_meanwhile_is_not_overwritten(course, monkeypatch):
    folder, work = course
    real = whole_file.beside

    def slow(*given):
        path = real(*given)
        if not (work / NAME).exists():
            (work / NAME).write_text("saved just now")
        return path

    monkeypatch.setattr(whole_file, "beside", slow)
    copies.sync(folder, work)
    assert (work / NAME).read_text() == "saved just now"
    monkeypatch.undo()
    copies.sync(folder, work)
    assert (work / NAME).read_text() == "saved just now"


def test_full_disk_is_one_line_and_loses_nothing(course, monkeypatch, capsys):
    folder, work = course
    copies.sync(folder, work)
    (folder / NAME).write_text(NEW)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copies.os, "fsync", full)
    assert lab.main(["--sync-only", "--work", str(work)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "free some space" in err
    assert notebooks(work) == {NAME: OLD} and not list(work.glob(f"{copies.TEMPORARY}*"))
    monkeypatch.undo()
    assert copies.sync(folder, work) == [f"{NAME}: brought up to date"]


def test_unwritable_work_is_one_line(course, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert lab.main(["--sync-only", "--work", str(tmp_path / "file" / "work")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--work" in err


def test_what_stands_in_the_way_is_named(course, capsys, tmp_path):
    file = tmp_path / "file.py"
    file.write_text("")
    for name in (copies.WORK, copies.LOCK):
        (tmp_path / name.strip(".") / name).mkdir(parents=True)
    assert lab.main(["--sync-only", "--work", str(tmp_path / "course.lock")]) == 0, "it goes without the lock"
    capsys.readouterr()
    for work, words in (
        ("~nosuchuser/x", "home directory"),
        (file, f"{file} is not a folder"),
        (file / "x", f"{file} is not a folder"),
        (tmp_path / "course.json", copies.WORK),
        ("/proc/x", "no file can be made in /proc"),
    ):
        assert lab.main(["--sync-only", "--work", str(work)]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err, err
    (tmp_path / "gone").mkdir()
    with contextlib.chdir(tmp_path):  # a way back for the next test
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        assert lab.main(["--sync-only", "--work", "x"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert notebooks(tmp_path / "course.json") == {}, "nothing is brought that could not be remembered"


def test_a_file_that_cannot_be_replaced_leaves_no_temporary_one(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError):
        whole_file.replace(tmp_path / "there", ".half-", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_leftovers_of_a_killed_run_go(course):
    course[1].mkdir()
    (course[1] / f"{copies.TEMPORARY}abc").write_text("half")
    copies.sync(*course)
    assert not list(course[1].glob(f"{copies.TEMPORARY}*"))


def test_no_notebooks_and_the_courses_own_folder_are_refused(course, capsys):
    assert lab.main(["--sync-only", "--work", str(course[0])]) == 1
    (course[0] / NAME).unlink()
    assert lab.main(["--sync-only"]) == 1
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("wrong", [["--port", "0"], ["--port", "70000"], ["--port", "x"], ["--prt", "1"], ["more"]])
def test_wrong_arguments_are_one_line_and_status_2(course, capsys, wrong):
    with pytest.raises(SystemExit) as stop:
        lab.main(wrong)
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1 and not course[1].exists()


def test_lock_held_too_long_is_told(course, monkeypatch, capsys):
    monkeypatch.setattr(copies, "LOCK_SECONDS", 0.2)
    course[1].mkdir()
    with locking.locked(course[1] / copies.LOCK, 0) as held:
        assert held
        assert lab.main(["--sync-only"]) == 1
    assert "another run" in capsys.readouterr().err


def test_missing_jupyterlab_and_taken_port(course, capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert lab.main(["--no-browser", "--port", str(port)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(port) in err and "--port" in err
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    assert lab.main(["--no-browser"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install" in err


def test_arguments_keep_it_on_this_machine(tmp_path):
    given = lab.lab_arguments(tmp_path, None, False, "secret")
    assert "--ServerApp.ip=127.0.0.1" in given and not any("0.0.0.0" in argument for argument in given)
    assert ("--ServerApp.allow_root=True" in given) == (os.getuid() == 0)
    assert "--ServerApp.port_retries=0" in lab.lab_arguments(tmp_path, 9999, True, "secret")


def test_the_index_is_opened_first_and_its_map_is_that_of_now(course, monkeypatch):
    monkeypatch.delenv("DLOJZ_STATE", raising=False)
    work = course[1]
    assert "--LabApp.default_url=/lab/tree/index.ipynb" in lab.lab_arguments(work, None, False, "secret")
    assert lab.main(["--sync-only"]) == 0
    first = (work / index.NAME).read_text()
    nbformat.validate(nbformat.reads(first, 4))
    (work / ".course-progress").mkdir()
    (work / ".course-progress" / "00_welcome.json").write_text('{"1": "pass"}')
    assert lab.main(["--sync-only"]) == 0
    assert "1 of " in (work / index.NAME).read_text(), "verdicts of this work folder"
    touched = json.loads((work / index.NAME).read_text())
    touched["cells"][0]["source"] += ["mine"]
    (work / index.NAME).write_text(json.dumps(touched))
    assert lab.main(["--sync-only"]) == 0
    assert json.loads((work / index.NAME).read_text()) == touched and "index.new.ipynb" not in notebooks(work)


def test_a_course_of_somebody_else_is_copied_into_the_home(course, monkeypatch):
    assert lab.usual_work() == course[1]
    monkeypatch.setattr(os, "access", lambda path, mode: path != course[0].parent)
    assert lab.usual_work() == Path("~/dlojz-tp")
    course[1].mkdir()
    assert lab.usual_work() == course[1]


CODE = """import pathlib, sys
from dlojz_tp.commands import lab
lab.CHECKOUT = pathlib.Path(sys.argv[1])
status = lab.main(sys.argv[2:])
assert "torch" not in sys.modules
sys.exit(status)"""


def launch(checkout, *arguments):
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("JUPYTER")},
        "PYTHONPATH": str(ROOT), "HOME": str(checkout), "XDG_DATA_HOME": str(checkout / "share"),
        "JUPYTER_RUNTIME_DIR": str(checkout / "runtime"), "IPYTHONDIR": str(checkout / "ipython"),
    }  # fmt: skip
    command = [sys.executable, "-c", CODE, str(checkout), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


@contextlib.contextmanager
def running(checkout):
    """Start the command; gives (process, base address, token) once its address is printed."""
    process = launch(checkout, "--no-browser")
    try:
        found = None
        while not found and (line := process.stdout.readline()):
            found = re.search(r"(http://127\.0\.0\.1:\d+/)lab/tree/index\.ipynb\?token=(\w{40,})$", line)
        assert found, "no address was printed"
        yield process, found[1], found[2]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def answer(address):
    with urllib.request.urlopen(address, timeout=10) as reply:
        return reply.status, reply.read().decode()


def test_two_at_once_copy_once(course, tmp_path):
    for number in range(30):
        (course[0] / f"{number:02d}.ipynb").write_text(OLD)
    processes = [launch(tmp_path, "--sync-only") for _ in range(3)]
    texts = [process.communicate(timeout=30)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], texts
    assert sorted(text.count(".ipynb: copied") - text.count("index.ipynb: copied") for text in texts) == [0, 0, 31]
    assert sum(text.count("index.ipynb: copied") for text in texts) == 1
    copied = notebooks(course[1])
    assert copied.pop(index.NAME) and len(copied) == 31 and set(copied.values()) == {OLD}


def test_the_map_is_drawn_anew_when_it_is_opened(course, tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    with running(tmp_path) as (_, address, token):
        opened = f"{address}api/contents/{index.NAME}?token={token}"
        progress.record("00_welcome", 1, "pass")
        before = json.loads(answer(f"{opened}&content=0")[1])
        shown = json.loads(answer(opened)[1])
        assert "1 of " in shown["content"]["cells"][1]["outputs"][0]["data"]["text/plain"]
        after = json.loads(answer(f"{opened}&content=0")[1])
        assert before["last_modified"] < shown["last_modified"] == after["last_modified"], "no change for a save"
        (tmp_path / "work" / index.NAME).write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
        assert json.loads(answer(opened)[1])["content"]["cells"] == [], "what a trainee made of it stays"


def test_lab_starts_answers_only_with_its_token_and_asks_nothing(course, tmp_path):
    with running(tmp_path) as (process, address, token), running(tmp_path) as (_, other, other_token):
        assert answer(f"{address}api?token={token}")[0] == 200
        assert (address, token) != (other, other_token) and answer(f"{other}api?token={other_token}")[0] == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            answer(f"{address}api/contents")
        assert refused.value.code == 403
        # a name that was bound anew to this machine, a page of another site
        for forged in ({"Host": "elsewhere.example"}, {"Origin": "http://elsewhere.example"}):
            request = urllib.request.Request(f"{address}api/sessions", b"{}", forged, method="POST")
            with pytest.raises(urllib.error.HTTPError) as refused:
                answer(request)
            assert refused.value.code in (403, 404), forged
        files = json.loads(answer(f"{address}api/contents?token={token}")[1])["content"]
        assert sorted(entry["name"] for entry in files) == [NAME, index.NAME]
        page = answer(f"{address}lab?token={token}")[1]
        layout = json.loads((tmp_path / "work" / lab.LAYOUT).read_text())  # under the name that the server reads
        assert json.loads(answer(f"{address}lab/api/workspaces/default?token={token}")[1])["data"] == layout["data"]
        assert re.search(r'"news":\s*\{"disabled":\s*true\}', page)
        if Path("/proc").is_dir():
            assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) is not None
