"""launch.ranks and launch.worlds where all goes well: what is sent, what comes back, what is printed, what is left."""

import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.launch import client, lanes, place, wire


def notebook(source: str) -> dict:
    """Run cells as a notebook does: in a namespace called __main__ that no module holds."""
    namespace = {"__name__": "__main__"}
    exec(textwrap.dedent(source), namespace)
    return namespace


def left_running() -> list[psutil.Process]:
    return psutil.Process(client.get().process.pid).children(recursive=True)


def where() -> tuple:
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def total(x: torch.Tensor) -> torch.Tensor:
    x = x * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def test_results_come_in_rank_order():
    assert launch.ranks(where, n=3) == [(r, 3, launch.backend(3)) for r in range(3)]


def test_a_function_with_an_attribute_config_travels():
    # torch.distributed.config, which is no plain module, goes along with it
    cell = notebook("import torch.distributed as dist\ndef f(model): return dist.get_rank(), model.config")
    assert launch.ranks(cell["f"], SimpleNamespace(config=3), n=2) == [(0, 3), (1, 3)]


def test_an_autograd_function_that_is_once_differentiable_travels():
    cell = notebook("""
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient

def f():
    x = torch.ones(3, requires_grad=True)
    Twice.apply(x).sum().backward()
    return x.grad.tolist()
""")
    assert launch.ranks(cell["f"], n=1) == [[2.0, 2.0, 2.0]]


def test_functions_classes_and_globals_of_a_notebook_travel():
    cells = notebook("""
        import torch, torch.distributed as dist
        factor = 10
        def helper(x):
            return factor * x
        class Point:
            def __init__(self, x):
                self.x = helper(x)
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def forward(self, x):
                return self.layer(x).sum()
        def job(model, *, shift):
            model(torch.ones(3, 2)).backward()
            dist.all_reduce(model.layer.bias.grad)
            return Point(dist.get_rank() + shift), model, model.layer.bias.grad
    """)
    results = launch.ranks(cells["job"], cells["Model"](), n=2, shift=1)
    assert [type(p) is cells["Point"] for p, *_ in results] == [True, True]
    assert [p.x for p, *_ in results] == [10, 20]
    assert type(results[0][1]) is cells["Model"]
    assert results[1][2].item() == 6.0


def test_cached_functions_of_a_notebook_travel_without_their_cache():
    cells = notebook("""
        import functools
        calls = []
        @functools.lru_cache(maxsize=50)
        def fib(n):
            calls.append(n)
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        fib(20)
        def job():
            return fib(30), fib.cache_info().maxsize, len(calls)
    """)
    assert launch.ranks(cells["job"], n=1) == [(832040, 50, 21 + 31)]
    assert launch.ranks(cells["fib"], 10, n=1) == [55]


def test_a_launch_starts_without_the_state_of_the_last():
    cells = notebook("""
        seen = []
        def job():
            seen.append(1)
            return len(seen)
    """)
    assert launch.ranks(cells["job"]) == launch.ranks(cells["job"]) == [1, 1]
    assert cells["seen"] == []


def test_worlds_runs_each_size():
    assert launch.worlds(where) == {n: [(r, n, launch.backend(4)) for r in range(n)] for n in (1, 2, 3, 4)}
    results = launch.worlds(total, torch.ones(2), sizes=(3, 1))
    assert list(results) == [3, 1]
    assert results[3][2].tolist() == [6, 6]


def test_a_warm_launch_is_quicker_than_a_cold_one():
    cold = (
        "import time; from dlojz_tp import launch; begin = time.perf_counter()\n"
        "launch.ranks(int, n=2); print(time.perf_counter() - begin)"
    )
    first = float(subprocess.run([sys.executable, "-c", cold], capture_output=True, text=True, timeout=240).stdout)
    launch.ranks(int, n=2)
    begin = time.perf_counter()
    launch.ranks(int, n=2)
    assert time.perf_counter() - begin < first  # a ratio of about 40 on an idle machine


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(1000.0)[::7],
        torch.tensor(3),
        torch.empty(0, 3),
        torch.ones(1, 1).expand(4, 5),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
    ],
    ids=range(11),
)
def test_tensors_come_back_by_value(tensor):
    (back,) = launch.ranks(lambda x: x, tensor, n=1)
    torch.testing.assert_close(back, tensor, rtol=0, atol=0)
    assert (back.dtype, back.requires_grad) == (tensor.dtype, tensor.requires_grad)
    if tensor.layout is torch.strided and tensor.is_contiguous(memory_format=torch.contiguous_format) is False:
        dense = torch.empty_like(tensor, memory_format=torch.preserve_format)
        assert back.stride() == dense.stride()
    with torch.no_grad():
        back.copy_(back.clone())  # writable


def test_a_small_view_of_a_large_tensor_is_small():
    from dlojz_tp.launch import wire

    assert len(wire.pack(torch.zeros(1_000_000)[:2])) < 1000


@pytest.mark.parametrize("constant", [torch.channels_last, torch.strided, torch.sparse_coo], ids=str)
def test_constants_of_torch_go_by_name(constant):
    """A memory format has no module: pickle takes the first loaded one that holds it, whether a rank has it or not."""
    from dlojz_tp.launch import wire

    sent = wire.pack(constant)
    assert pickle.loads(sent) is constant
    assert b"getattr" in bytes(sent)


def test_large_results_and_arguments():
    big = torch.arange(13_000_000, dtype=torch.float32)  # 52 MB
    back = launch.ranks(lambda x: x + dist.get_rank(), big, n=2)
    assert torch.equal(back[1], big + 1)


def test_environment_of_a_rank(monkeypatch, tmp_path):
    monkeypatch.setenv("DLOJZ_TEST_WORD", "hello")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "DLOJZ_TEST_WORD")

    def look():
        import beside

        return [os.environ[k] for k in names], str(Path.cwd()), torch.get_num_threads(), sys.argv, beside.answer()

    env, cwd, threads, argv, answer = launch.ranks(look, n=2)[1]
    assert env == ["1", "1", "2", "127.0.0.1", "hello"]
    assert (cwd, argv, answer) == (str(tmp_path), sys.argv, 42)
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2)


def test_the_group_can_be_made_again_from_the_environment():
    def again():
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return total(torch.ones(1)).item()

    assert launch.ranks(again, n=2) == [3.0, 3.0]


def test_a_rank_that_leaves_the_group_at_once_breaks_no_other():
    """The slower rank would still be connecting: without a wait, one launch in ten ended so."""
    for _ in range(20):
        assert launch.ranks(dist.destroy_process_group, n=3) == [None] * 3


def test_device_and_backend():
    kind = "cuda" if launch.backend(2) == "nccl" else "cpu"
    assert [d.type for d in launch.ranks(launch.device, n=2)] == [kind, kind]
    with pytest.raises(RuntimeError, match="runs on ranks"):
        launch.device()


def meet_in_lanes() -> tuple:
    """Both ranks begin with a send on one lane and receive on the other."""
    before = launch.lane("gradients") is dist.group.WORLD
    lanes.open_lanes()  # as ranks with NCCL do
    other, there, back = 1 - dist.get_rank(), *(launch.lane(name) for name in lanes.NAMES)
    if dist.get_rank():
        there, back = back, there
    work = dist.isend(torch.full((3,), float(dist.get_rank())), other, group=there)
    dist.recv(got := torch.empty(3), other, group=back)
    work.wait()
    return before, len({id(there), id(back), id(dist.group.WORLD)}), got.tolist()


def test_what_the_parent_has_of_the_course_is_there_when_a_rank_begins():
    """Imported by the server, once: else each rank of each launch pays for it."""
    import dlojz_tp.judging.checks.welcome
    import dlojz_tp.planner.pipeline  # noqa: F401

    namespace = notebook(
        """
        import sys
        def there():
            return {name for name in ("dlojz_tp.judging.checks.welcome", "dlojz_tp.planner") if name in sys.modules}
        """
    )
    assert launch.ranks(namespace["there"], n=1) == [{"dlojz_tp.judging.checks.welcome", "dlojz_tp.planner"}]


def test_ranks_can_use_gpus_after_their_server_has_imported_what_asks_for_them():
    """This module computes its truth with an optimizer, and a step asks the driver."""
    client.warm("dlojz_tp.judging.checks.large_models.balise_6")
    names = "dlojz_tp.judging.checks.large_models"
    assert launch.ranks(lambda: (names in sys.modules, torch.cuda._is_in_bad_fork()), n=1) == [(True, False)]


def test_lanes():
    assert launch.ranks(meet_in_lanes, n=2) == [(True, 3, [1.0] * 3), (True, 3, [0.0] * 3)]
    with pytest.raises(ValueError, match="a lane is one of"):
        launch.lane("sideways")
    with pytest.raises(RuntimeError, match="on ranks"):
        launch.lane("gradients")


def test_too_few_gpus_are_said_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(place, "_said", set())
    assert [launch.backend(n) for n in (1, 2, 4)] == ["nccl", "gloo", "gloo"]
    assert capsys.readouterr().out.count("NCCL needs one GPU a rank") == 1


def test_a_function_may_name_what_is_also_a_module_of_torch():
    namespace = {"__name__": "__main__", "torch": torch}
    exec("def f(n=None):\n    return torch.ones(1).item() if n is None else n.classes", namespace)
    assert launch.ranks(namespace["f"], n=1) == [1.0]


def test_prints_reach_the_caller_as_whole_lines_in_order(capsys):
    def talk():
        rank = dist.get_rank()
        for i in range(50):
            print(f"line {i} of {rank}", end="")
            print(" é", file=sys.stdout)
        print("err", file=sys.stderr)
        os.system("echo from a child")
        import ctypes

        ctypes.CDLL(None).printf(b"from C\n")
        print("no end", end="")

    launch.ranks(talk, n=2)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert [x for x in mine if x.startswith("line")] == [f"line {i} of {rank} é" for i in range(50)]
        assert "err" in mine and "from a child" in mine
        assert "no endfrom C" in mine or ("no end" in mine and "from C" in mine)
    assert all(line.startswith("[rank ") for line in lines)
    launch.worlds(lambda: print("x"), sizes=(2,))
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0 of 2] x", "[rank 1 of 2] x"]


@pytest.mark.parametrize("text", ["x" * 99 + "\n", "x" * 100], ids=["lines", "no line end"])
def test_ten_megabytes_of_prints(capsys, text):
    launch.ranks(lambda: sys.stdout.write(text * 100_000) and None, n=2)
    assert capsys.readouterr().out.count("x") == 2 * 100_000 * text.count("x")


def test_a_function_that_closes_its_stdout():
    def close():
        sys.stdout.close()
        os.close(1)
        return dist.get_rank()

    assert launch.ranks(close) == [0, 1]


def test_children_of_a_rank_go_with_it():
    def leave_children():
        import subprocess

        import torch.distributed as dist

        for own_session in (False, True):
            subprocess.Popen(["sleep", "600"], start_new_session=own_session)
        if not os.fork():
            time.sleep(600)
        return dist.get_rank()

    assert launch.ranks(leave_children) == [0, 1]
    assert left_running() == []


def test_a_function_that_forks_and_comes_back_twice():
    assert launch.ranks(lambda: os.fork() * 0 + dist.get_rank()) == [0, 1]
    assert left_running() == []


def test_a_copy_of_a_rank_that_comes_back_last_says_nothing():
    def twice():
        if not os.fork():
            time.sleep(0.3)  # its rank has said its result by then
        elif dist.get_rank():
            time.sleep(0.6)  # the parent still listens to both
        return dist.get_rank()

    assert launch.ranks(twice) == [0, 1]


def test_many_launches_leak_nothing():
    launch.ranks(where)
    server = psutil.Process(client.get().process.pid)
    before = psutil.Process().num_fds(), server.num_fds(), len(list(client.get().folder.iterdir()))
    for _ in range(20):
        launch.ranks(where)
    assert (psutil.Process().num_fds(), server.num_fds(), len(list(client.get().folder.iterdir()))) == before
    assert left_running() == [] and server.num_threads() == 1


def test_launches_from_two_threads_while_another_computes():
    stop, results = threading.Event(), {}

    def compute():
        x = torch.randn(200, 200)
        while not stop.is_set():
            x = torch.tanh(x @ x)

    threads = [threading.Thread(target=lambda i=i: results.update({i: launch.ranks(where)})) for i in range(2)]
    worker = threading.Thread(target=compute)
    for thread in (worker, *threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    worker.join(10)
    assert results[0] == results[1] and len(results[0]) == 2


def test_a_forked_child_of_the_parent_gets_its_own_server():
    launch.ranks(where)
    mine = client.get().process.pid
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, b"%d" % (client._server is None and launch.warm() is None and client.get().process.pid))
            client.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 100)) not in (0, mine)
    os.close(read), os.close(write)
    assert len(launch.ranks(where)) == 2 and client.get().process.pid == mine


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_gloos_threads_give_way_and_no_others():
    def policies():
        tasks = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        return os.sched_getscheduler(0), {os.sched_getscheduler(task) for task, name in tasks.items() if "gloo" in name}

    assert launch.ranks(policies, n=2) == [(os.SCHED_OTHER, {os.SCHED_BATCH})] * 2


def test_what_is_packed_is_collected_without_a_word(monkeypatch):
    """Python 3.13 complains of a stream whose buffer is still given out when both go in a circle."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    circle = [wire.pack("a value")]
    circle.append(circle)
    del circle
    gc.collect()
    assert not told


def test_warm_many_times():
    pids = set()
    for _ in range(5):
        launch.warm()
        pids.add(client.get().process.pid)
    assert len(pids) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rank_uses_the_gpu_while_the_parent_does():
    mine = torch.ones(4, device="cuda")

    def job(x):
        y = torch.full((4,), 2.0, device="cuda") + x.to("cuda")
        dist.all_reduce(z := torch.ones(2, device=launch.device()))
        return y, z, launch.device().type

    n = torch.cuda.device_count()
    for count in {1, n, n + 1}:
        kind = "cuda" if count <= n else "cpu"
        results = launch.ranks(job, mine, n=count, timeout=60)
        for y, z, device in results:
            assert (y.device.type, z.device.type, device) == ("cpu", "cpu", kind)
            assert y.tolist() == [3.0] * 4 and z.tolist() == [count] * 2
    assert mine.sum().item() == 4
