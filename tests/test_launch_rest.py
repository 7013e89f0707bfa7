"""Ranks that wait for each other are told early; who only sleeps, starves, or could still be moved never is."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.probes.ranks import on_ranks
from dlojz_tp.launch import rest
from dlojz_tp.launch.rest import STILL_S, asleep, closed, has_limits, only_a_rank_ends
from dlojz_tp.launch.stacks import Frame
from dlojz_tp.launch.started import Rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a thread does")
OTHER = "/lib/torch/distributed/"
named = pytest.mark.skipif(not rest.NAMED, reason="gloo's own thread has no name here: the deadline decides")


def told(fn, n=2, timeout=60.0) -> launch.RankError:
    launch.ranks(abs, -1, n=1)  # the server is warm from here on
    began = time.monotonic()
    with pytest.raises(launch.RankError) as caught:
        launch.ranks(fn, n=n, timeout=timeout)
    assert time.monotonic() - began < 30
    return caught.value


def one_is_through():
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2))


def both_receive():
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


def different_groups():
    """One waits for a collective, the other for a message."""
    work = dist.all_reduce(torch.ones(2), async_op=True) if dist.get_rank() else dist.irecv(torch.zeros(1), 1)
    work.wait()


def one_backward_more():
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(2 + dist.get_rank()):
        net(torch.ones(1, 2)).sum().backward()


@named
@pytest.mark.parametrize(
    ("fn", "waits", "returned"),
    [
        (one_is_through, {1: "all_reduce"}, [0]),
        (both_receive, {0: "recv", 1: "recv"}, []),
        (different_groups, {0: "wait", 1: "wait"}, []),
        (one_backward_more, {1: "backward"}, [0]),
    ],
)
def test_a_deadlock_is_told_long_before_the_deadline(fn, waits, returned):
    error = told(fn)
    assert (error.kind, error.waits, error.returned, error.still) == ("hung", waits, returned, STILL_S)
    assert f"still waiting after {STILL_S:g} s in which nothing moved, in " in error.summary


def two_receive():
    if dist.get_world_size() == 2:
        both_receive()


@named
def test_ranks_that_only_wait_for_their_next_world_do_not_count():
    with pytest.raises(launch.RankError) as caught:
        on_ranks(two_receive, sizes=(2, 3, 4), timeout=60)
    assert (caught.value.world_size, caught.value.waits, caught.value.still) == (2, {0: "recv", 1: "recv"}, STILL_S)


@pytest.fixture
def hasty(monkeypatch):
    """Looks so soon that a pause of a second is long."""
    monkeypatch.setattr(rest, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(rest, "LOOK_S", 0.05)


def sleeps():
    time.sleep(dist.get_rank())


def sends_later():
    """A thread of its own sends when the main thread has long been waiting."""
    if dist.get_rank() == 0:
        threading.Timer(1, dist.send, (torch.ones(1), 1)).start()
    dist.recv(torch.zeros(1), 1 - dist.get_rank())
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 0)


def looks_again_and_again():
    if dist.get_rank() == 0:
        time.sleep(1)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed():
        time.sleep(0.01)


def sleeps_in_compiled_code():
    """Which a signal would end early."""
    if dist.get_rank() == 0:
        assert ctypes.CDLL(None).usleep(1_000_000) == 0


def waits_for_a_program():
    if dist.get_rank() == 0:
        subprocess.run(["sleep", "1"], check=True)


@pytest.mark.parametrize(
    "before", [sleeps, sends_later, looks_again_and_again, sleeps_in_compiled_code, waits_for_a_program]
)
def test_a_rank_that_comes_late_is_waited_for(hasty, before):
    def job():
        before()
        dist.barrier()
        return "through"

    assert launch.ranks(job, n=2, timeout=60) == ["through"] * 2


def test_a_child_process_could_still_do_something(hasty):
    def job():
        child = subprocess.Popen(["sleep", "600"])
        both_receive()
        return child

    error = told(job, timeout=3)
    assert (error.kind, error.still) == ("hung", 0.0) and "still waiting after 3 s in recv" in error.summary


def test_ranks_that_starve_are_not_told(hasty):
    """Two ranks that exchange all the time share a core with four other programs."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]

    def job():
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), [core])
        go_on = torch.ones(1)
        while go_on:
            go_on.fill_(time.process_time() < 0.3)
            dist.broadcast(go_on, 0)
        return "through"

    try:
        assert launch.ranks(job, n=2, timeout=60) == ["through"] * 2
    finally:
        for other in others:
            other.kill()
            other.wait()


def a_rank(pid, **more):
    return Rank(0, None, 0, b"", pid=pid, **more)


def write(folder, thread, name="python", state="S (sleeping)", tracer=0, turns=(5, 2)):
    folder = folder / "11" / "task" / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text(
        f"Name:\t{name}\nState:\t{state}\nTracerPid:\t{tracer}\n"
        f"voluntary_ctxt_switches:\t{turns[0]}\nnonvoluntary_ctxt_switches:\t{turns[1]}\n"
    )


def test_what_the_system_tells_of_threads(tmp_path):
    write(tmp_path, 11)
    write(tmp_path, 12, name="gloo_tcp_loop", state="R (running)", turns=(99, 1))
    assert asleep([a_rank(11)], tmp_path) == ({"11": 5}, {"12": 99})
    assert asleep([a_rank(11, waits=True)], tmp_path) == ({}, {"11": 5, "12": 99})
    write(tmp_path, 13, state="R (running)")  # it computes, or others have the core
    assert asleep([a_rank(11)], tmp_path) is None
    write(tmp_path, 13, state="D (disk sleep)")
    assert asleep([a_rank(11)], tmp_path) is None
    write(tmp_path, 13, tracer=7)  # a debugger
    assert asleep([a_rank(11)], tmp_path) is None
    assert asleep([a_rank(11)], tmp_path / "another system") is None


def test_who_could_still_move_the_ranks(tmp_path):
    def process(pid, parent, session, state="S"):
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a name) {state} {parent} {pid} {session} 0")

    def under_way(sent, unread, inode):
        (tmp_path / "11" / "net").mkdir(exist_ok=True)
        text = f"head\n0: 0100007F:C3B5 00000000:0000 01 {sent:08X}:{unread:08X} 00:0 0 0 0 {inode} 1\n"
        (tmp_path / "11" / "net" / "tcp").write_text(text)

    process(10, 1, 10)  # the server
    process(11, 10, 11)  # the rank
    process(19, 1, 19)  # a stranger
    fds = tmp_path / "11" / "fd"
    fds.mkdir()
    (fds / "3").symlink_to("socket:[77]")
    under_way(0, 0, 77)
    assert closed([11], 10, tmp_path)
    under_way(1, 0, 77)
    assert not closed([11], 10, tmp_path)
    under_way(0, 1, 77)
    assert not closed([11], 10, tmp_path)
    under_way(9, 9, 78)  # another program's
    assert closed([11], 10, tmp_path)
    for place in (
        (12, 11, 12),
        (12, 1, 11),
        (12, 10, 12),
    ):  # a child; one that lost its parent; one that left the session
        process(*place)
        assert not closed([11], 10, tmp_path)
    process(12, 11, 11, state="Z")
    assert closed([11], 10, tmp_path)
    (fds / "4").symlink_to("/dev/nvidia0")
    assert not closed([11], 10, tmp_path)


def test_words_for_a_limit_of_its_own(tmp_path):
    task = tmp_path / "task"
    task.write_bytes(b"... recv ...")
    assert not has_limits(task)
    task.write_bytes(b"... " + rest.LIMITS + b" ...")
    assert has_limits(task)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([OTHER + "distributed_c10d.py all_reduce"], True),
        ([OTHER + "distributed_c10d.py monitored_barrier"], False),
        ([OTHER + "distributed_c10d.py init_process_group"], False),
        (["/lib/torch/_ops.py __call__", OTHER + "_functional_collectives.py wait_tensor"], True),
        (["work.wait()"], True),
        ([rest.PACKAGE + "judging/probes/withheld.py _wait", "work.wait()"], True),
        (["time.sleep(9) or work.wait()"], False),
        (["store.wait(['key'])"], False),
        (["work.wait(timeout=limit)"], False),
        (["time.sleep(9)"], False),
        (["/lib/python3/threading.py wait", "event.wait()"], False),
        ([], False),
    ],
)
def test_which_waits_only_a_rank_ends(tmp_path, frames, expected):
    def frame(number, text):
        file, _, name = text.rpartition(" ") if text.startswith("/") else ("", "", "")
        if not file:
            path = tmp_path / f"{number}.py"
            path.write_text(text + "\n")
            file, name = str(path), "job"
        return Frame(file, 1, name)

    assert only_a_rank_ends([frame(*pair) for pair in enumerate(frames)]) == expected
