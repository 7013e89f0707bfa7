"""Deadlines hold, large results and prints do no harm, and what the machine refuses is one line."""

import errno
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.launch import client, collect, loading, patience, rank, rest, wire
from dlojz_tp.works import temporary

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.usefixtures("small_servers")


def test_a_stopped_server_is_found_and_replaced():
    launch.ranks(abs, 1)
    os.kill(client.get().process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(launch.LaunchError, match="stopped by a signal"):
        launch.ranks(abs, 1, n=1, timeout=5)
    assert time.monotonic() - began < 30
    assert launch.ranks(abs, -1, n=1) == [1]


def test_a_stopped_server_ends_with_its_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, time
        from dlojz_tp import launch
        from dlojz_tp.launch import client
        launch.ranks(abs, 1, n=1)
        print(client.get().process.pid, client.get().folder, flush=True)
        os.kill(client.get().process.pid, signal.SIGSTOP)
        time.sleep(600)
    """)
    )
    parent = subprocess.Popen(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    pid, folder = parent.stdout.readline().split()
    server = psutil.Process(int(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs([server], timeout=10)[1] == [] and not Path(folder).exists()


def test_a_folder_that_goes_while_ranks_join_is_found(monkeypatch):
    ask = client.ask

    def and_clean(server, request, fds=()):
        if request["do"] == "launch":
            Path(request["folder"], "task").unlink()
            Path(request["folder"]).rmdir()
        ask(server, request, fds)

    launch.ranks(abs, 1)
    with monkeypatch.context() as patched, pytest.raises((launch.LaunchError, launch.RankError)):
        patched.setattr(client, "ask", and_clean)
        launch.ranks(abs, 1, n=2)
    assert launch.ranks(abs, -1, n=1) == [1]


def test_a_result_that_never_loads_meets_the_deadline():
    class Slow:
        def __reduce__(self):
            return time.sleep, (600,)

    began = time.monotonic()
    with pytest.raises(launch.RankError, match="does not load within 1 s"):
        launch.ranks(Slow, n=1, timeout=1)
    assert time.monotonic() - began < 60  # and not the ten minutes that it would take


class Odd:
    """Unpickled, it does what it was told to, on the rank that it comes from as well or not."""

    def __init__(self, act, also_there=True):
        self.act, self.there = act, None if also_there else os.getpid()

    def __reduce__(self):
        return _odd, (self.act, self.there)


def _odd(act, there):
    if os.getpid() != there:
        act()
    return "loaded"


class OddError(ValueError):
    def __init__(self, odd):
        super().__init__("too few rows")
        self.odd = odd

    def __reduce__(self):
        return OddError, (self.odd,)


def for_ever():
    time.sleep(600)


def interrupt():
    raise KeyboardInterrupt


def leave():
    sys.exit(3)


@pytest.mark.parametrize("also_there", [True, False])
@pytest.mark.parametrize("act", [for_ever, interrupt, leave])
def test_an_exception_that_does_not_load_is_told_by_its_text(act, also_there):
    def fails():
        raise OddError(Odd(act, also_there))

    launch.ranks(abs, 1, n=1)
    began = time.monotonic()
    with pytest.raises(launch.RankError, match="raised OddError: too few rows") as caught:
        launch.ranks(fails, n=1)
    assert caught.value.cause is None and time.monotonic() - began < 25


@pytest.mark.parametrize("act", [interrupt, leave])
def test_a_result_that_raises_anything_when_it_is_loaded_is_unsendable(act):
    with pytest.raises(launch.RankError, match="cannot be loaded here") as caught:
        launch.ranks(Odd, act, n=1)
    assert caught.value.kind == "unsendable"
    assert launch.ranks(abs, -1, n=1) == [1]


def test_stop_ends_the_loading_of_a_result():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what runs in the background
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        loading.load(pickle.dumps(Odd(for_ever)), 60)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_result_that_is_dribbled_is_a_hang(monkeypatch):
    def dribbles():
        rank._parent.sendall(wire.HEADER.pack(wire.THROUGH, 0))
        rank._parent.sendall(wire.HEADER.pack(wire.RETURNED, 1 << 40))
        while True:
            rank._parent.sendall(b"x" * 100)
            time.sleep(0.1)

    launch.ranks(abs, 1)
    monkeypatch.setattr(collect, "QUIET_S", 2)
    began = time.monotonic()
    with pytest.raises(launch.RankError, match="hung"):
        launch.ranks(dribbles, n=1, timeout=1)
    assert time.monotonic() - began < 30


def test_a_result_that_takes_long_to_send_is_no_hang(monkeypatch):
    class Large:
        def __reduce__(self):
            time.sleep(2)  # as gigabytes take
            return str, ("sent",)

    launch.ranks(abs, 1)
    with monkeypatch.context() as patched:
        patched.setattr(patience, "MOST", 1)  # who sends has had its time, however long that takes
        assert launch.ranks(Large, n=1, timeout=0.5) == ["sent"]
    monkeypatch.setattr(collect, "QUIET_S", 0.2)
    with pytest.raises(launch.RankError, match="hung"):
        launch.ranks(Large, n=1, timeout=0.5)


def test_endless_prints_are_cut(monkeypatch, capsys):
    monkeypatch.setattr(collect, "MOST_PRINTED", 2**20)

    def talk():
        for _ in range(1200):
            print("x" * 1999)
        dist.barrier()
        return "done"

    assert launch.ranks(talk, n=2) == ["done"] * 2
    out = capsys.readouterr().out
    assert len(out) < 2.2 * 2**20 and out.count("the rest is left out") == 2


def test_a_long_message_is_shortened():
    def fail():
        raise ValueError("x" * 50_000_000)

    with pytest.raises(launch.RankError) as caught:
        launch.ranks(fail, n=1)
    assert len(str(caught.value)) < 50_000 and "50,000,000 characters" in str(caught.value)


def test_a_stopped_rank_is_said_to_be_stopped():
    def job():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(launch.RankError, match="rank 1 of 2 was stopped by a signal"):
        launch.ranks(job, n=2, timeout=1)


@pytest.mark.parametrize(("number", "says"), [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "TMPDIR")])
def test_what_the_machine_refuses_is_one_line(monkeypatch, number, says):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    launch.ranks(abs, 1)
    monkeypatch.setattr(client, "new_folder", refuse)
    with pytest.raises(launch.LaunchError, match=says) as caught:
        launch.ranks(abs, 1)
    assert "\n" not in str(caught.value) and caught.value._render_traceback_() == [f"LaunchError: {caught.value}"]


def test_output_that_nobody_reads_is_not_the_ranks_failure(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", Closed())
        with pytest.raises(BrokenPipeError):
            launch.ranks(print, "a line", n=1)
    assert launch.ranks(abs, -1, n=1) == [1]


def test_what_dead_programs_left_is_removed(tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here, mine = temporary._place(), temporary.label()
    another_start = mine.rpartition("-")[0] + "-1"
    for owner in (f"{here}-{ended.pid}-5", another_start, mine, f"other-{ended.pid}-5", f"{here}-x-5", "strange"):
        (tmp_path / f"dlojz-launch-{owner}-abc").mkdir()
    monkeypatch.setattr(temporary.tempfile, "tempdir", str(tmp_path))
    assert temporary.prefix("launch") == f"dlojz-launch-{mine}-"
    left = {path.name.removeprefix("dlojz-launch-") for path in tmp_path.iterdir()}
    assert left == {f"{mine}-abc", f"other-{ended.pid}-5-abc", f"{here}-x-5-abc", "strange-abc"}


def test_a_container_leaves_the_folder_of_a_program_outside_alone(tmp_path):
    """With the same host name and the same /tmp, the numbers of processes are others."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no other PID namespace can be made here")
    mine = tmp_path / f"{temporary.prefix('launch')}abc"
    mine.mkdir()
    look = "from dlojz_tp.works import temporary; print(temporary.prefix('launch'))"
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*apart, sys.executable, "-c", look], env=env, capture_output=True, text=True, check=True)
    assert mine.is_dir() and done.stdout.split("-")[2] != mine.name.split("-")[2]


def own_group():
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)


def monitored():
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=1))


@pytest.mark.parametrize("fn", [own_group, monitored])
def test_a_limit_of_its_own_raises_as_ever(monkeypatch, fn):
    """Looks are so soon that ranks without a limit would be said to wait for each other."""
    monkeypatch.setattr(rest, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(rest, "LOOK_S", 0.05)
    with pytest.raises(launch.RankError) as caught:
        launch.ranks(fn, n=2, timeout=60)
    assert (caught.value.kind, caught.value.rank) == ("raised", 0)
