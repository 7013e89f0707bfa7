"""What breaks in the machine or in the course is no verdict on an answer."""

import errno
import os
import shutil
import signal
import tempfile
from types import SimpleNamespace

import pytest

from dlojz_tp import course, launch, progress
from dlojz_tp.cards import render
from dlojz_tp.judging.checking import verdict_of, verdicts
from dlojz_tp.judging.grading import command
from dlojz_tp.launch import client
from dlojz_tp.works import source

pytestmark = pytest.mark.usefixtures("small_servers")


def judged(check):
    return verdict_of(check, (None,), number=1, title="Try", hints={})


def on_a_sick_machine(injure, times=1):
    """A check that launches ranks; `injure(server)` runs before, as often as said."""
    left = [times]

    def check(_):
        yield "a sum over ranks"
        launch.ranks(abs, 1)
        if left[0]:
            left[0] -= 1
            injure(client.get())
        assert launch.ranks(abs, -1, n=1) == [1]

    return check


def kill(server):
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()


def stop(server):
    os.kill(server.process.pid, signal.SIGSTOP)


def clean(server):
    shutil.rmtree(server.folder)


@pytest.mark.parametrize("injure", [kill, stop, clean])
def test_a_new_server_helps(injure):
    assert judged(on_a_sick_machine(injure)).verdict == "pass"


def test_where_it_does_not_help_nothing_is_judged(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    launch.ranks(abs, 1)
    monkeypatch.setattr(client, "new_folder", full)
    found = judged(on_a_sick_machine(kill, times=0))
    assert found.verdict == "could not judge" and "No space left" in found.got and "TMPDIR" in found.got
    shown = repr(render.verdict(found))
    assert "says nothing of your code" in shown and "No space left" in shown and "✗" not in shown
    assert "No space left" in render.verdict(found)._repr_html_()


@pytest.mark.parametrize(("folder", "helps"), [("/dev/shm", "shm-size"), (tempfile.gettempdir(), "TMPDIR")])
def test_what_fails_where_nothing_can_be_written_is_not_judged(monkeypatch, folder, helps):
    """A loader's worker that finds the shared memory full tells the screen, and nobody else."""
    real = os.statvfs(folder)
    full = SimpleNamespace(f_blocks=real.f_blocks, f_bavail=10, f_frsize=4096, f_flag=real.f_flag)
    look = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: full if str(path) == folder else look(path))

    def check(answer):
        yield "a batch comes"
        if answer is None:
            raise verdicts.Wrong("raised", error="a loader that gave nothing")

    assert judged(check).verdict == "could not judge" and f"{folder} is full" in judged(check).got
    assert helps in judged(check).hint
    assert verdict_of(check, (1,), number=1, title="Try", hints={}).passed, "what holds, holds"
    monkeypatch.undo()
    assert judged(check).verdict == "fail"


@pytest.mark.parametrize(
    "error", [NameError("x"), ImportError("no timm"), OSError(errno.EMFILE, "Too many open files")]
)
def test_a_fault_of_the_course_is_not_the_answers(error):
    text = "def check(_):\n    yield 'something'\n    raise error\n"
    names = {"error": error}
    exec(compile(text, course.verdicts.__file__, "exec"), names)  # a line of the course, not of an answer
    found = judged(names["check"])
    assert found.verdict == "could not judge" and str(error) in found.got


def test_a_damaged_record_of_mistakes_is_told(monkeypatch, tmp_path):
    def damaged(*_):
        raise ValueError("Expecting value: line 1")

    work = source.find("00_welcome")
    monkeypatch.setattr(course.mistakes, "load", damaged)
    found = course.judge(work, 1, (abs,))
    assert found.verdict == "could not judge" and "Expecting value" in found.got


def test_it_is_not_counted_and_has_a_status_of_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path))
    monkeypatch.delenv("DLOJZ_STRICT", raising=False)
    monkeypatch.setattr(progress, "_here", {})
    work = source.find("00_welcome")
    progress.record(work.name, 1, "pass")
    lost = course.Verdict(1, "t", "could not judge", got="a full disk", hint="free space")
    monkeypatch.setattr(course, "judge", lambda *_: lost)
    course.Course(work, {}).check(1, *[abs] * len(work.balises[1].answers))
    assert progress.load(work.name) == {1: "pass"} and "a full disk" in capsys.readouterr().out
    monkeypatch.setattr(command, "run", lambda _work, files, _numbers: [(file, [lost]) for file in files])
    assert command.main([work.name, str(source.SOLUTIONS / f"{work.name}.py"), "--balise", "1"]) == 3
    assert "could not judge" in capsys.readouterr().out
