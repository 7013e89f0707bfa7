"""What the machine does to the grader is no fail: a busy machine, processes killed or stopped from outside."""

import os
import signal

import pytest

from dlojz_tp.grading import command, lanes, watched
from dlojz_tp.works import source
from tests.test_grading import RIGHT

WRONG = "def describe_machine():\n    return 3\n"
LATE = RIGHT.replace("    cuda =", "    import time\n    time.sleep(2)\n    cuda =", 1)
SPINS = "def describe_machine():\n    while True:\n        pass\n"


def judged(tmp_path, text, numbers=(1,), **options):
    path = tmp_path / "answers.py"
    path.write_text(text)
    ((_, found),) = command.run(source.find("00_welcome"), [path], list(numbers), **options)
    return found


def hit(monkeypatch, number, times, keeper=False):
    """Send a signal, from this process, to each of the first `times` forks, or to their keepers."""
    sent = []
    hear = watched.Child.hear

    def then_hit(self, seconds):
        news = hear(self, seconds)
        if news and "pid" in news and len(sent) < times:
            sent.append(number)
            os.kill(self.pid if keeper else news["pid"], number)
        return news

    monkeypatch.setattr(watched.Child, "hear", then_hit)
    return sent


@pytest.mark.parametrize("keeper", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_killed_once_from_outside_it_is_judged_again(tmp_path, monkeypatch, number, keeper):
    sent = hit(monkeypatch, number, 1, keeper)
    right, wrong = judged(tmp_path, RIGHT)[0], judged(tmp_path, WRONG)[0]
    assert (right.verdict, wrong.verdict, len(sent)) == ("pass", "fail", 1)


@pytest.mark.parametrize("keeper", [False, True])
def test_killed_again_and_again_there_is_no_verdict(tmp_path, monkeypatch, keeper):
    sent = hit(monkeypatch, signal.SIGKILL, 99, keeper)
    found = judged(tmp_path, LATE)[0]
    assert found.verdict == "could not judge" and "SIGKILL" in found.got and len(sent) == 2


def test_stopped_from_outside_it_is_judged_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes.busy, "factor", lambda: 1.0)
    sent = hit(monkeypatch, signal.SIGSTOP, 1)
    assert judged(tmp_path, LATE, grace=12)[0].passed and len(sent) == 1


@pytest.mark.parametrize(
    "ending",
    ["os.abort()", "os._exit(3)", "os.kill(os.getpid(), 9)", "os.killpg(0, 15)", "ctypes.string_at(0)"],
)
def test_an_answer_that_ends_its_own_process_fails(tmp_path, ending):
    found = judged(tmp_path, f"import ctypes, os\ndef describe_machine():\n    {ending}\n")[0]
    assert (found.verdict, found.slug) == ("fail", "left")


def test_a_file_that_vanishes_while_others_are_judged_has_no_verdict(tmp_path):
    found = command.judge_file(source.find("00_welcome"), tmp_path / "gone.ipynb", 1)
    assert found.verdict == "could not judge" and "cannot be read (No such file or directory)" in found.got


def test_imports_that_take_long_are_no_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "START", 0.1)
    monkeypatch.setattr(lanes.busy, "factor", lambda: 1.0)
    found = judged(tmp_path, RIGHT)[0]
    assert found.verdict == "could not judge" and "too busy" in found.got


def test_seconds_without_a_core_do_not_count(tmp_path, monkeypatch):
    """An answer that is late because others have the cores passes; one that never has its seconds gets no verdict."""
    monkeypatch.setattr(lanes.busy, "factor", lambda: 1.0)
    monkeypatch.setattr(lanes.patience, "shares", lambda pids: {pid: lanes.patience.Share(0.1, 9.0) for pid in pids})
    assert judged(tmp_path, LATE, grace=2)[0].passed
    monkeypatch.setattr(lanes, "MOST", 1.5)
    found = judged(tmp_path, LATE, grace=1)[0]
    assert found.verdict == "could not judge" and "too busy" in found.got


@pytest.mark.parametrize(("second", "word"), [("right", "pass"), ("endless", "could not judge")])
def test_endless_answers_share_the_time_of_their_file(tmp_path, monkeypatch, second, word):
    monkeypatch.setattr(lanes, "BUDGET", 5.0)
    monkeypatch.setattr(lanes, "LEAST", 5.0)
    monkeypatch.setattr(lanes.busy, "factor", lambda: 1.0)
    head, rest = RIGHT.split("def distributed_sum")
    spins = "import torch.distributed as dist\nimport time\n" + SPINS + "def distributed_sum" + rest
    if second == "endless":
        never = "while True:\n    distributed_sum = distributed_sum\n"
        spins = spins.split("def distributed_sum")[0] + f"def distributed_sum(values):\n    return 1\n{never}"
    found = judged(tmp_path, spins, (1, 2), grace=6)
    assert [verdict.verdict for verdict in found] == ["fail", word] and found[0].slug == "endless"
    assert word == "pass" or "(1)" in found[1].got
