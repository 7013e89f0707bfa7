"""launch.ranks where things go wrong: one clear error, root cause first, in time, and nothing left running."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.launch import client

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("small_servers")


@pytest.fixture(autouse=True)
def nothing_is_left():
    launch.warm()
    yield
    assert psutil.Process(client.get().process.pid).children(recursive=True) == []


def error_of(fn, n=4, timeout=60.0, within=30.0) -> launch.RankError:
    if not client.get().launches:
        launch.ranks(abs, -1, n=1)  # the server is warm from here on
    begin = time.monotonic()
    with pytest.raises(launch.RankError) as caught:
        launch.ranks(fn, n=n, timeout=timeout)
    assert time.monotonic() - begin < within  # far from the deadline: nobody waits for it
    return caught.value


def first_line(error) -> str:
    return str(error).splitlines()[0]


def on_rank(bad: int, action):
    """A function where rank `bad` does `action` and the others wait for it in a collective."""

    def job():
        if dist.get_rank() == bad:
            action()
        dist.all_reduce(torch.ones(2))

    return job


def test_one_rank_raises():
    def fail():
        raise ValueError("bad shape\nand more")

    error = error_of(on_rank(2, fail))
    assert (error.rank, error.world_size, error.kind) == (2, 4, "raised")
    assert first_line(error) == "rank 2 of 4 raised ValueError: bad shape"
    assert isinstance(error.cause, ValueError) and "and more" in str(error)
    assert "in fail" in error.traceback and "dlojz_tp/launch" not in error.traceback


def test_all_ranks_raise_the_same():
    def fail():
        raise KeyError("x")

    assert first_line(error_of(fail, n=3)) == "rank 0 of 3 raised KeyError: 'x' (and so did ranks 1, 2)"


def test_a_tensor_that_is_no_key_is_told_by_its_shape():
    def answer():
        return {}[torch.nn.Parameter(torch.zeros(200, 30))]

    error = error_of(answer, n=1)
    assert error.summary.endswith("raised KeyError: Parameter of shape (200, 30)") and "tensor(" not in str(error)


def test_an_exception_of_a_notebook_class_keeps_its_class():
    cells = {"__name__": "__main__"}
    exec("class Mine(Exception): pass\ndef job(): raise Mine('a')", cells)
    assert type(error_of(cells["job"]).cause) is cells["Mine"]


def test_an_exception_that_cannot_be_pickled_is_still_told():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def fail():
        raise Odd(1, 2)

    error = error_of(fail, n=2)
    assert error.cause is None and "Odd: 1 and 2" in first_line(error)


def test_chained_exceptions_are_shown():
    def fail():
        try:
            {}["missing"]
        except KeyError as e:
            raise RuntimeError("no weights") from e

    error = error_of(fail, n=1)
    assert first_line(error) == "rank 0 of 1 raised RuntimeError: no weights"
    assert "KeyError: 'missing'" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_rank_is_killed(number):
    error = error_of(on_rank(1, lambda: os.kill(os.getpid(), number)))
    assert (error.rank, error.kind) == (1, "died")
    assert first_line(error).startswith(f"rank 1 of 4 was killed by {number.name}")


def test_a_segmentation_fault_shows_its_line():
    def crash():
        import ctypes

        ctypes.string_at(0)

    error = error_of(on_rank(3, crash))
    assert (error.rank, error.kind) == (3, "died")
    assert "SIGSEGV" in first_line(error) and "in crash" in error.traceback


def test_a_rank_exits():
    error = error_of(on_rank(1, lambda: os._exit(3)))
    assert (error.rank, error.kind) == (1, "exited") and "exit code 3" in first_line(error)
    error = error_of(on_rank(0, lambda: os._exit(0)))
    assert (error.rank, error.kind) == (0, "exited") and "exit code 0" in first_line(error)
    error = error_of(on_rank(2, lambda: sys.exit(4)))
    assert (error.rank, error.kind) == (2, "exited") and first_line(error) == "rank 2 of 4 called sys.exit(4)"


def test_the_root_cause_comes_before_the_neighbours_view():
    def job():
        if dist.get_rank() == 3:
            time.sleep(0.3)  # the neighbours fail first: they lose the connection
            os._exit(9)
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError as e:
            raise ValueError("my own words") from e

    error = error_of(job)
    assert (error.rank, error.kind) == (3, "exited")


def test_hung_in_a_collective_that_others_skipped():
    def job():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(2))

    error = error_of(job, timeout=0.5)
    assert (error.rank, error.kind) == (1, "hung")
    assert first_line(error).startswith("rank 1 of 4 hung: still waiting after 0.5 s in all_reduce (line ")
    assert first_line(error).endswith("`), a call that ranks 0, 2, 3 never made: they had already returned")
    assert "of job: `dist.all_reduce(torch.ones(2))`" in first_line(error)
    assert list(error.stacks) == [1] and "dist.all_reduce(torch.ones(2))" in error.stacks[1]
    assert "distributed_c10d" not in str(error)


def test_hung_in_a_loop_while_others_wait():
    def spin():
        while True:
            pass

    error = error_of(on_rank(2, spin), timeout=0.5)
    assert (error.rank, error.kind) == (2, "hung")
    assert "still running after 0.5 s" in first_line(error)
    assert "ranks 0, 1, 3 wait in all_reduce" in first_line(error)
    assert sorted(error.stacks) == [0, 1, 2, 3]


def test_hung_in_different_collectives():
    def job():
        x = torch.ones(2)
        dist.all_reduce(x) if dist.get_rank() == 0 else dist.broadcast(x, 1)
        dist.barrier()

    error = error_of(job, n=2, timeout=0.5)
    assert error.kind == "hung" and "all_reduce" in first_line(error)


def test_hung_in_an_asynchronous_collective():
    def job():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(2), async_op=True).wait()

    assert "rank 1 of 2 hung: still waiting after 0.5 s in wait" in first_line(error_of(job, n=2, timeout=0.5))


def test_hung_and_deaf_to_sigterm():
    def sleep():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)

    error = error_of(sleep, n=2, timeout=0.5)
    assert first_line(error).startswith("ranks 0, 1 of 2 hung") and "time.sleep(600)" in str(error)


def test_a_library_function_that_hangs():
    def job():
        if dist.get_rank() == 0:
            dist.barrier()

    assert "in barrier" in first_line(error_of(job, n=2, timeout=0.5))


def test_a_stopped_rank_is_killed_too():
    error = error_of(on_rank(0, lambda: os.kill(os.getpid(), signal.SIGSTOP)), n=2, timeout=0.5)
    assert error.kind == "hung" and 0 in error.stacks


def test_unsendable_results_name_the_type():
    error = error_of(lambda: {"a": 1, "loader": [iter(()), (i for i in range(3))]}, n=2)
    assert error.kind == "unsendable"
    assert "result['loader'][1], a generator" in first_line(error)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"the variable 'lock', a _thread\.lock"):
        launch.ranks(lambda: lock.acquire())
    with pytest.raises(TypeError, match=r"argument 1\['x'\], a generator"):
        launch.ranks(len, {"x": (i for i in range(2))})


def test_a_module_that_ranks_cannot_import():
    cells = {"__name__": "no_such_module"}
    exec("def job(): pass", cells)
    sys.modules["no_such_module"] = type(sys)("no_such_module")
    sys.modules["no_such_module"].job = cells["job"]
    try:
        assert "No module named 'no_such_module' while it loaded the function" in first_line(error_of(cells["job"]))
    finally:
        del sys.modules["no_such_module"]


def test_a_missing_balise_is_the_root_cause():
    from dlojz_tp.works.balise import BaliseNotDone, todo

    def job():
        if dist.get_rank() == 0:
            raise ValueError("first")
        time.sleep(0.05)
        todo(7)

    with pytest.raises(BaliseNotDone) as caught:
        launch.worlds(job, sizes=(3,))
    assert caught.value.number == 7


def test_worlds_names_the_world_size():
    def job():
        assert dist.get_world_size() != 3

    with pytest.raises(launch.RankError, match="rank 0 of 3 raised AssertionError") as caught:
        launch.worlds(job)
    assert caught.value.world_size == 3


@pytest.mark.parametrize("n", [0, -1, 65, 1.5, "2", None, True])
def test_wrong_numbers_of_ranks(n):
    with pytest.raises(ValueError, match="from 1 to 64"):
        launch.ranks(abs, n=n)
    with pytest.raises(ValueError, match="from 1 to 64"):
        launch.worlds(abs, sizes=(1, n))


def test_other_wrong_arguments():
    with pytest.raises(TypeError, match="must be a function"):
        launch.ranks(3)
    with pytest.raises(ValueError, match="timeout"):
        launch.ranks(abs, timeout=0)
    with pytest.raises(ValueError, match="at least one"):
        launch.worlds(abs, sizes=())


def test_nested_launches_are_refused():
    def job():
        launch.warm()
        launch.ranks(abs, 1)

    error = error_of(job, n=2)
    assert "cannot be nested" in first_line(error)


def test_many_children_are_all_killed():
    def job():
        for _ in range(60):
            if not os.fork():
                os.setsid()
                if not os.fork():
                    time.sleep(600)
                time.sleep(600)
        raise ValueError("enough")

    assert error_of(job, n=2).kind == "raised"


def test_a_dead_server_is_replaced():
    launch.ranks(abs, 1)
    os.kill(client.get().process.pid, signal.SIGKILL)
    with contextlib.suppress(client.ServerGone):  # where the death is not noticed in time, it is said
        launch.ranks(abs, 1)
    assert launch.ranks(abs, -1, n=1) == [1]


def test_a_server_whose_end_was_interrupted_is_replaced(monkeypatch):
    def interrupted(_server):
        raise KeyboardInterrupt

    launch.ranks(abs, 1)
    old = client.get()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(client, "_drop", interrupted)
        client.close()
    assert launch.ranks(abs, -1, n=1) == [1]
    assert client.get() is not old
    client._drop(old)


def test_ranks_die_with_the_server():
    launch.ranks(abs, 1)
    server = psutil.Process(client.get().process.pid)
    seen: list[psutil.Process] = []

    def kill_it_when_both_are_there():
        while len(seen) < 2:
            seen[:] = server.children()
            time.sleep(0.05)
        server.kill()

    threading.Thread(target=kill_it_when_both_are_there, daemon=True).start()
    with pytest.raises(client.ServerGone):
        launch.ranks(time.sleep, 600)
    assert psutil.wait_procs(seen, timeout=20)[1] == []


# Whole programs, each a process of its own.

SLEEPER = """
    import os, subprocess, sys, time
    from dlojz_tp import launch
    def job():
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        time.sleep(600)
    print(launch.ranks(job, n=2, timeout=300))
"""


def start_script(tmp_path, source: str) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text("from tests import small_server\nsmall_server.use()\n" + textwrap.dedent(source))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def started_by(parent: subprocess.Popen) -> list[psutil.Process]:
    """The fork server, the ranks and their children, once both ranks have spoken."""
    lines = [parent.stdout.readline(), parent.stdout.readline()]
    pids = {int(word) for line in lines for word in line.split()[2:]}
    found = psutil.Process(parent.pid).children(recursive=True)
    assert pids <= {p.pid for p in found} and len(pids) == 4
    return found


def test_a_script_without_a_main_guard_and_two_at_once(tmp_path):
    source = """
        import json, os, stat, torch, torch.distributed as dist
        from dlojz_tp import launch
        from dlojz_tp.launch import client
        def job():
            x = torch.ones(1)
            for _ in range(20):
                dist.all_reduce(x)
            return x.item()
        for _ in range(5):
            results = launch.ranks(job, n=2)
        folder = client.get().folder
        print(json.dumps([results, str(folder), stat.S_IMODE(os.stat(folder).st_mode)]))
    """
    parents = [start_script(tmp_path, source) for _ in range(2)]
    for parent in parents:
        out, err = parent.communicate(timeout=200)
        assert (err, parent.returncode) == ("", 0)
        results, folder, mode = json.loads(out)
        assert results == [2.0**20] * 2
        assert mode == 0o700 and not Path(folder).exists()  # private, and gone with its program


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_parent_is_interrupted_or_killed(tmp_path, number):
    parent = start_script(tmp_path, SLEEPER)
    processes = started_by(parent)
    parent.send_signal(number)
    _, err = parent.communicate(timeout=20)
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_in_a_jupyter_kernel():
    manager_module = pytest.importorskip("jupyter_client.manager")
    manager, kernel = manager_module.start_new_kernel(kernel_name="python3", cwd=str(ROOT))

    def run(code: str, seconds: float = 60, on_output=None) -> tuple[str, dict]:
        printed = []

        def hook(message):
            printed.append(message["content"].get("text", ""))
            if on_output:
                on_output("".join(printed))

        reply = kernel.execute_interactive(textwrap.dedent(code), timeout=seconds, output_hook=hook)
        return "".join(printed), reply["content"]

    try:
        printed, reply = run("""
            import os, time, torch, torch.distributed as dist
            from dlojz_tp import launch
            launch.warm()
            scale = 3
            class Box:
                def __init__(self, x): self.x = scale * x
            def job():
                x = torch.ones(2)
                dist.all_reduce(x)
                print("hello")
                return Box(x[0].item())
            boxes = launch.ranks(job, n=2)
            print([b.x for b in boxes], isinstance(boxes[0], Box))
        """)
        assert reply["status"] == "ok" and "[6.0, 6.0] True" in printed
        assert sorted(printed.splitlines())[-2:] == ["[rank 0] hello", "[rank 1] hello"]

        _, reply = run("""
            def broken():
                if dist.get_rank() == 1:
                    raise ValueError("wrong")
                dist.barrier()
            launch.ranks(broken, n=2)
        """)
        assert (reply["ename"], len(reply["traceback"])) == ("RankError", 1)
        assert reply["traceback"][0].startswith("RankError: rank 1 of 2 raised ValueError: wrong")
        assert 'raise ValueError("wrong")' in reply["traceback"][0]  # the source of the cell

        interrupted = []

        def interrupt(printed: str):
            if printed.count("\n") == 2 and not interrupted:
                interrupted.extend(int(line.split()[-1]) for line in printed.splitlines())
                manager.interrupt_kernel()

        begin = time.monotonic()
        _, reply = run(
            "def sleep():\n    print(os.getpid())\n    time.sleep(600)\nlaunch.ranks(sleep, timeout=300)",
            on_output=interrupt,
        )
        assert reply["ename"] == "KeyboardInterrupt" and time.monotonic() - begin < 100
        assert len(interrupted) == 2 and not any(psutil.pid_exists(pid) for pid in interrupted)
        printed, _ = run("print(len(launch.ranks(job, n=3)))")
        assert printed.splitlines()[-1] == "3"
        server = int(run("from dlojz_tp.launch import client; print(client.get().process.pid)")[0])
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    gone = time.monotonic() + 20
    while psutil.pid_exists(server) and time.monotonic() < gone:
        time.sleep(0.05)
    assert not psutil.pid_exists(server)
