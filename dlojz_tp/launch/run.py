"""ranks() and worlds(): what the user calls."""

import contextlib
import linecache
import math
import operator
import os
import pickle
import shutil
import socket
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

from dlojz_tp.launch import client, loading, place, proc

MOST_RANKS = 64
LEAVE_LIMIT_S = 3.0  # for NCCL to take its communicators down
END_LIMIT_S = 8.0  # for the server to kill all ranks, for which it takes five at most
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def ranks(fn, *args, n: int = 2, timeout: float = 30, **kwargs) -> list:
    """Run a function on `n` processes of this machine, with torch.distributed initialised in each.

    Each rank is a fresh process: it starts without the variables of earlier launches, in the current folder, with
    this process's environment and import path, plus RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. What
    it prints appears here, each line after "[rank 1] ". Tensors arrive and come back by value, on the CPU, without
    their `.grad` (as everywhere in torch: return gradients by themselves). A rank ends when the function has returned
    on all ranks; threads and child processes it left running end with it, and exit handlers do not run.

    Arguments:
        fn: the function. One from a notebook or a script is sent by value with the globals it uses, one from an
            importable module by name. An argument of its own called `n` or `timeout` needs functools.partial.
        args, kwargs: its arguments, the same on all ranks.
        n: number of ranks, 1 to 64.
        timeout: seconds the ranks have, counted from when all of them are ready. Where other programs take the cores,
            the time in which the ranks could not run does not count. Ranks that all wait for each other are told after
            about three seconds (with gloo, on Linux, from torch 2.13 on).
    Returns the list of results, in rank order.
    Errors: RankError when a rank raises, dies, exits, hangs or returns what cannot be sent; BaliseNotDone where the
        function needs a balise that is not written; LaunchError where the machine kept them from running, or somebody
        else ended one; TypeError when `fn` or an argument cannot be sent; ValueError
        for a wrong `n` or `timeout`; RuntimeError inside a rank.
    """
    n = count(n, "n")
    task = check_task(fn, args, kwargs, timeout)
    return _all(_launch(task, n, place.backend(n), timeout, label="rank {rank}"))


def in_parts(fn, *args, n: int = 2, timeout: float = 30) -> Iterator[tuple[int, object]]:
    """As `ranks`, but what a rank sends with `rank.send_part` is handed over at once: yields (rank, value).

    The rank goes on once the next one is asked for.
    A caller that stops listening, by leaving the loop early or by `close()`, ends the ranks. No other launch may begin
    before.
    """
    task = check_task(fn, args, {}, timeout)
    for rank, part in _launch(task, n, place.backend(n), timeout, label="rank {rank}"):
        yield rank, loaded(rank, n, part, timeout, "sent")


def worlds(fn, *args, sizes=(1, 2, 3, 4), timeout: float = 30, **kwargs) -> dict[int, list]:
    """Run a function in several world sizes, one after the other, as `ranks` does in each.

    The same backend serves all sizes: NCCL where the largest one has a GPU a rank. Printed lines start with
    "[rank 1 of 4] ".

    Arguments:
        fn, args, kwargs: as for `ranks`.
        sizes: the numbers of ranks.
        timeout: seconds for each world size.
    Returns world size -> list of results in rank order.
    Errors: as for `ranks`; the first world size that fails ends it, and the error names it.
    """
    sizes = [count(n, "each of sizes") for n in sizes]
    if not sizes:
        raise ValueError("sizes must name at least one world size")
    task = check_task(fn, args, kwargs, timeout)
    backend = place.backend(max(sizes))
    return {n: _all(_launch(task, n, backend, timeout, label=f"rank {{rank}} of {n}")) for n in sizes}


def _all(launched: Generator) -> list:
    """What a launch returns in the end."""
    while True:
        try:
            next(launched)
        except StopIteration as end:
            return end.value


def count(n, name: str) -> int:
    """A number of ranks; ValueError where it is none, with the `name` of the argument."""
    with contextlib.suppress(TypeError):
        if not isinstance(n, bool) and 1 <= operator.index(n) <= MOST_RANKS:
            return operator.index(n)
    raise ValueError(f"{name} must be a whole number of ranks, from 1 to {MOST_RANKS}, not {n!r}")


def check_task(fn, args: tuple, kwargs: dict, timeout: float) -> memoryview:
    """Pickle a call; errors as of `ranks`."""
    if place.INSIDE in os.environ:
        raise RuntimeError("this code already runs on a rank: launch.ranks and launch.worlds cannot be nested")
    check_callable(fn)
    check_timeout(timeout)
    client.warm()  # a cold server starts while this process imports torch
    return packed(fn, args, kwargs)


def check_timeout(timeout: float) -> None:
    """Raise ValueError where these are no seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")


def check_callable(fn) -> None:
    """Raise TypeError where `fn` is not a function."""
    if not callable(fn):
        raise TypeError(f"the first argument must be a function, not {type(fn).__name__} (pass f, not f())")


def packed(fn, args: tuple, kwargs: dict) -> memoryview:
    """Pickle a call by value; TypeError that names the part which cannot be sent."""
    from dlojz_tp.launch import wire

    try:
        return wire.pack((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        parts = [(fn, f"the function {name}")]
        parts += [(arg, f"argument {i + 1}") for i, arg in enumerate(args)]
        parts += [(arg, f"argument {key}") for key, arg in kwargs.items()]
        found = next(filter(None, (wire.culprit(*part) for part in parts)), type(error).__name__)
        raise TypeError(f"{name} cannot be sent to the ranks because of {found}: {error}") from None


def _launch(task: memoryview, n: int, backend: str, timeout: float, label: str) -> Generator:
    """Yields (rank, pickled part) as they come; returns the results in rank order."""
    with client.lock:
        try:
            return (yield from _launch_on(client.get(), task, n, backend, timeout, label))
        except client.ServerGone:
            client.close()
            raise


def _launch_on(server: client.Server, task: memoryview, n: int, backend: str, timeout: float, label: str) -> Generator:
    from dlojz_tp.launch import collect

    with started(server, task, n, backend, timeout, label) as (members, folder):
        yield from collect.watch(members, server, folder, timeout)
        if backend == "nccl":
            _let_leave(members)
    return [_result(r, n, timeout) for r in members]


@contextlib.contextmanager
def started(server: client.Server, task: memoryview, n: int, backend: str, timeout: float, label: str):
    """Inside, ranks that start with a pickled call; gives them, and the private folder of the launch.

    label: what printed lines start with, {rank} in it. At the end nothing is left of them.
    """
    from dlojz_tp.launch import collect

    with client.one_line():
        folder = client.new_folder(server)
    members: list[collect.Rank] = []
    theirs: list[int] = []
    try:
        with client.one_line():
            with (folder / "task").open("wb") as file:
                pickle.dump(_world(n), file)
                file.write(task)
            for rank in range(n):
                near, far = socket.socketpair()
                near.setblocking(False)
                out_read, out_write = os.pipe()
                os.set_blocking(out_read, False)
                theirs += [far.detach(), out_write]
                members.append(collect.Rank(rank, near, out_read, f"[{label.format(rank=rank)}] ".encode()))
        request = {"do": "launch", "n": n, "folder": str(folder), "backend": backend, "timeout": timeout}
        request["modules"] = client.used()
        try:
            client.ask(server, request, theirs)
            _close_all(theirs)
            yield members, folder
        finally:
            _end(members, server)
    finally:
        _close_all(theirs)
        for r in members:
            r.conn.close()
            os.close(r.out)
        shutil.rmtree(folder, ignore_errors=True)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _world(n: int) -> dict:
    """What a rank takes over from this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // n) if hasattr(os, "sched_getaffinity") else 1
    own = {
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,  # for code that calls init_process_group again; the ranks meet in a file
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "TP_SOCKET_IFNAME": LOOPBACK,
    }
    return {"env": dict(os.environ) | {key: str(value) for key, value in own.items()}} | surroundings()


def surroundings() -> dict:
    """The import path, arguments, folder and notebook source of this process, for a rank to take over."""
    # The source of notebook cells, which lies in no file, for tracebacks and for tools that read source.
    lines = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return {
        "path": [p for p in sys.path if isinstance(p, str)],
        "argv": list(sys.argv),
        "cwd": str(Path.cwd()),
        "lines": lines,
    }


def _let_leave(members: list) -> None:
    """Tell the ranks that all are done, and wait for them to take their process group down."""
    for r in members:
        r.conn.setblocking(True)
        r.conn.settimeout(LEAVE_LIMIT_S)
        with contextlib.suppress(OSError):
            r.conn.sendall(b"x")
    for r in members:
        with contextlib.suppress(OSError):
            while r.conn.recv(4096):
                pass


def _end(members: list, server: client.Server) -> None:
    """Kill the ranks and all they started, and print what they still had to say."""
    from dlojz_tp.launch import collect

    if proc.stopped(server.process.pid):
        return client.close(server)  # it cannot answer; its ranks die with it
    try:
        client.ask(server, {"do": "kill"})
        while not any("done" in news for news in client.hear(server, END_LIMIT_S)):
            pass
        for r in members:
            while collect.echo(r):
                pass
    except BaseException:
        client.close(server)  # a second interrupt, say: the server goes, and takes all ranks with it
        raise


def _result(r, n: int, seconds: float):
    return loaded(r.rank, n, r.result, seconds, "returned")


def loaded(rank: int, n: int, data: bytes, seconds: float, how: str):
    """The value that a rank of `n` has sent; RankError where it does not load. how: "returned" or "sent"."""
    from dlojz_tp.launch.errors import RankError

    try:
        return loading.load(data, seconds + len(data) / loading.SLOWEST)
    except loading.Unloadable as error:
        raise RankError(rank, n, "unsendable", f"{how} a value that {error.what}", error.text) from None
