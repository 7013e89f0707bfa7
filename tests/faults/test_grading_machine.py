"""What the machine does to the grader is no fail: a busy machine, processes killed or stopped from outside.

Most answers here are judged by `plain_judge`, so that a keeper starts in a tenth of a second and not in six.
"""

import os
import signal

import pytest

from dlojz_tp.judging.grading import command, keepers, watched
from dlojz_tp.works import source
from tests.faults import plain_judge
from tests.test_grading import RIGHT

WRONG = "def describe_machine():\n    return 3\n"
LATE = "import time\ndef describe_machine():\n    time.sleep({})\n    return 7\n"
SPINS = "def {}():\n    while True:\n        pass\n"


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(command, "judge_all", plain_judge.judge_all)


def judged(tmp_path, text, numbers=(1,), **options):
    path = tmp_path / "answers.py"
    path.write_text(text)
    ((_, found),) = command.run(source.find("00_welcome"), [path], list(numbers), **options)
    return found


def judged_in_turn(tmp_path, *texts):
    """The verdicts on several files, by one keeper: its imports cost more than they do."""
    paths = [tmp_path / f"{number}.py" for number in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_text(text)
    return [verdict for _, (verdict,) in command.run(source.find("00_welcome"), paths, [1])]


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


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("keeper", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_killed_once_from_outside_it_is_judged_again(tmp_path, monkeypatch, number, keeper):
    sent = hit(monkeypatch, number, 1, keeper)
    right, wrong = judged_in_turn(tmp_path, LATE.format(0.5), WRONG)
    assert (right.verdict, wrong.verdict, len(sent)) == ("pass", "fail", 1)


def test_a_check_whose_keeper_is_killed_once_is_run_again(tmp_path, monkeypatch):
    sent = hit(monkeypatch, signal.SIGKILL, 1, keeper=True)
    right, wrong = judged_in_turn(tmp_path, RIGHT, WRONG)
    assert (right.verdict, wrong.verdict, len(sent)) == ("pass", "fail", 1)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("keeper", [False, True])
def test_killed_again_and_again_there_is_no_verdict(tmp_path, monkeypatch, keeper):
    sent = hit(monkeypatch, signal.SIGKILL, 99, keeper)
    found = judged(tmp_path, LATE.format(2))[0]
    assert found.verdict == "could not judge" and "SIGKILL" in found.got and len(sent) == 2


@pytest.mark.usefixtures("plain")
def test_stopped_from_outside_it_is_judged_again(tmp_path, monkeypatch):
    monkeypatch.setattr(keepers.busy, "factor", lambda: 1.0)
    sent = hit(monkeypatch, signal.SIGSTOP, 1)
    assert judged(tmp_path, LATE.format(0.5), grace=3)[0].passed and len(sent) == 1


def test_an_answer_that_ends_its_own_process_fails(tmp_path):
    endings = ("os.abort()", "os._exit(3)", "os.kill(os.getpid(), 9)", "os.killpg(0, 15)", "ctypes.string_at(0)")
    texts = [f"import ctypes, os\ndef describe_machine():\n    {ending}\n" for ending in endings]
    found = dict(zip(endings, judged_in_turn(tmp_path, *texts)))
    assert {ending: (one.verdict, one.slug) for ending, one in found.items()} == dict.fromkeys(
        endings, ("fail", "left")
    )


def test_a_file_that_vanishes_while_others_are_judged_has_no_verdict(tmp_path):
    found = command.judge_file(source.find("00_welcome"), tmp_path / "gone.ipynb", 1)
    assert found.verdict == "could not judge" and "cannot be read (No such file or directory)" in found.got


def test_imports_that_take_long_are_no_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(keepers, "START", 0.1)
    monkeypatch.setattr(keepers.busy, "factor", lambda: 1.0)
    found = judged(tmp_path, RIGHT)[0]
    assert found.verdict == "could not judge" and "too busy" in found.got


@pytest.mark.usefixtures("plain")
def test_seconds_without_a_core_do_not_count(tmp_path, monkeypatch):
    """An answer that is late because others have the cores passes; one that never has its seconds gets no verdict."""
    monkeypatch.setattr(keepers.busy, "factor", lambda: 1.0)
    monkeypatch.setattr(
        keepers.patience, "shares", lambda pids: {pid: keepers.patience.Share(0.1, 9.0) for pid in pids}
    )
    assert judged(tmp_path, LATE.format(2), grace=1)[0].passed
    monkeypatch.setattr(keepers, "MOST", 1.5)
    found = judged(tmp_path, LATE.format(5), grace=1)[0]
    assert found.verdict == "could not judge" and "too busy" in found.got


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("second", "word"), [("right", "pass"), ("endless", "could not judge")])
def test_endless_answers_share_the_time_of_their_file(tmp_path, monkeypatch, second, word):
    monkeypatch.setattr(keepers, "BUDGET", 1.0)
    monkeypatch.setattr(keepers, "LEAST", 1.5)
    monkeypatch.setattr(keepers.busy, "factor", lambda: 1.0)
    other = "def distributed_sum():\n    return 7\n" if second == "right" else SPINS.format("distributed_sum")
    found = judged(tmp_path, SPINS.format("describe_machine") + other, (1, 2), grace=2)
    assert [verdict.verdict for verdict in found] == ["fail", word] and found[0].slug == "endless"
    assert word == "pass" or "(1)" in found[1].got
