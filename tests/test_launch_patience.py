"""A busy machine makes no hang, and a hang is found on time."""

import os
import subprocess
import sys
import time

import pytest

from dlojz_tp import launch
from dlojz_tp.launch import patience
from dlojz_tp.launch.patience import LOOK_AGAIN_S, MOST, Share, more_time, shares

WAITS, RUNS = Share(used=0.1), Share(used=0.1, wants=True)


@pytest.mark.parametrize(
    ("first", "second", "spent", "expected"),
    [
        (WAITS, WAITS, 5.0, 0.0),  # both wait for each other
        (WAITS, RUNS, 5.0, LOOK_AGAIN_S),  # it has a core at last
        (Share(5.1, 0.0, wants=True), WAITS, 5.0, 0.0),  # a loop without an end
        (Share(4.0, 9.0, wants=True), WAITS, 13.0, 1.0),  # the same loop, on a busy machine
        (Share(5.0, 9.0, wants=True), WAITS, 13.5, 0.0),
        (Share(1.0, 2.0), Share(1.0, 1.5), 6.0, 2.5),  # one after the other was kept from running
        (Share(1.0, 2.0), Share(1.0, 1.5), 8.6, 0.0),
        (RUNS, RUNS, MOST * 5.0, LOOK_AGAIN_S),  # it is collect.watch that says when enough is enough
    ],
)
def test_who_gets_more_time(monkeypatch, first, second, spent, expected):
    monkeypatch.setattr(patience, "shares", lambda pids: {11: first, 12: second})
    assert more_time({11: True, 12: True}, spent, 5.0) == pytest.approx(expected)


def test_a_rank_that_is_through_wants_nothing(monkeypatch):
    monkeypatch.setattr(patience, "shares", lambda pids: {11: Share(9.0, 0.0, wants=True), 12: WAITS})
    assert more_time({11: False, 12: True}, 5.0, 5.0) == 0.0


def test_without_proc_the_load_decides(monkeypatch):
    monkeypatch.setattr(patience, "shares", lambda pids: {})
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * os.cpu_count(), 0.0, 0.0))
    assert more_time({11: True}, 5.0, 5.0) == pytest.approx(10.0)
    assert more_time({11: True}, 15.1, 5.0) == 0.0


def test_what_the_system_tells_of_a_process_and_its_children(tmp_path):
    def process(pid, session, state, ticks, waited):
        thread = tmp_path / str(pid) / "task" / str(pid)
        thread.mkdir(parents=True)
        for folder in (thread, thread.parent.parent):
            text = f"{pid} (a name) with ) in it) {state} 1 {pid} {session} 0 -1 0 0 0 0 0 {ticks} {ticks} 0 0 20"
            (folder / "stat").write_text(text)
        (thread / "schedstat").write_text(f"0 {waited} 1")

    process(11, 11, "S", patience.TICKS, 10**9)
    process(12, 11, "R", 0, 2 * 10**9)  # its child
    process(13, 13, "R", 0, 0)  # a stranger
    process(14, 14, "S", 0, 0)
    assert shares([11, 14], tmp_path) == {11: Share(2.0, 3.0, wants=True), 14: Share()}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be put on one core here")
def test_a_rank_that_others_keep_from_running_does_not_hang(monkeypatch):
    """Five processes share one core: what takes 0.6 s alone takes three."""
    monkeypatch.setattr(patience, "MOST", 1000)
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]

    def work():
        os.sched_setaffinity(0, [core])
        while time.process_time() < 0.6:
            pass
        return "through"

    try:
        assert launch.ranks(work, n=1, timeout=1) == ["through"]
    finally:
        for other in others:
            other.kill()
            other.wait()
