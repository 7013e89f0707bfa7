"""What happens inside a rank, from the fork to its last message."""

import contextlib
import ctypes
import faulthandler
import functools
import io
import linecache
import os
import pickle
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from dlojz_tp.launch import lanes, loading, place, stacks, wire
from dlojz_tp.launch.joining import join_group

# The process group must outlive our own deadline, which explains a hang better than the backend does.
GROUP_TIMEOUT_MARGIN_S = 600
LOST_PEER = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "connection refused", "socket closed",
    "remote process exited", "remote error", "connection was closed", "unbound buffer",
)  # fmt: skip


MOST_CAUSE = 1 << 20  # bytes of an exception that travels itself, beside its text
STARTING = " while it started"
JOINING = " while it joined the other ranks"
_parent: socket.socket | None = None  # for the messages of this rank


class Unsendable(Exception):
    """A value cannot be pickled; args: it, and the error."""


def parent() -> socket.socket:
    """On a rank: the socket to the process that asked for it."""
    return _parent


def send_part(value) -> None:
    """On a rank: send a value to the caller of `run.in_parts` at once, and go on when the caller wants more.

    So a caller that ends with this value pays nothing for what the rank would do next. It may take its time over the
    value: the deadline stands still meanwhile. Errors: Unsendable, which is for `_run`.
    """
    try:
        data = wire.pack(value)
    except Exception as error:
        raise Unsendable(value, error) from error
    wire.send(_parent, wire.PART, data)
    _parent.recv(1)


@contextlib.contextmanager
def waits_for_others():
    """Inside, on a rank that has nothing to do until others are through: no other one waits for it meanwhile."""
    wire.send(_parent, wire.WAITS)
    yield
    wire.send(_parent, wire.WAITS)


def main(rank: int, request: dict, conn_fd: int, out_fd: int) -> None:
    """Run the task of one rank and send its result or its error. Does not return.

    Arguments: rank; request, from the parent (n, folder, backend, timeout in seconds); conn_fd, a socket for the
    messages; out_fd, the pipe for all that the rank prints.
    """
    global _parent
    conn = _parent = socket.socket(fileno=conn_fd)
    conn.setblocking(True)
    _redirect(out_fd)
    tell_signals()
    folder = Path(request["folder"])
    prepare_stack_dump(folder / f"stack-{rank}")
    tag, data = _run(rank, request, folder, conn)
    flush()
    with contextlib.suppress(OSError):
        wire.send(conn, tag, data)
        # Stay until all ranks are done: a rank that leaves early breaks its neighbours' collectives.
        conn.recv(1)
        if request["backend"] == "nccl" and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    # No interpreter shutdown: the destructors of a process group can abort there.
    os._exit(0)


def _run(rank: int, request: dict, folder: Path, conn: socket.socket) -> tuple[bytes, bytes]:
    """Return the message that tells how the task ended."""
    me, doing = os.getpid(), STARTING
    try:
        task = _enter_world(rank, request, folder)
        doing = " while it loaded the function"
        fn, args, kwargs = pickle.loads(task)
        doing = JOINING
        _join(rank, request, folder)
        _tell_limits(request["timeout"])
        wire.send(conn, wire.UP, str(os.getpid()).encode())
        place.pretend(request["backend"])
        doing = ""
        value = fn(*args, **kwargs)
        if request["backend"] == "nccl":
            torch.cuda.synchronize()  # an error of the GPU shows here, not when the result is copied
        place.leave()
    except Unsendable as error:
        return wire.FAILED, pickle.dumps(unsendable(*error.args))
    except BaseException as error:
        report = describe(error, doing)
        if doing in (STARTING, JOINING) and report["kind"] == "raised":
            report["kind"] = "unjoined"
        return wire.FAILED, pickle.dumps(report)
    finally:
        if os.getpid() != me:
            os._exit(0)  # the function forked and both came back: only the rank itself reports
    try:
        wire.send(conn, wire.THROUGH)  # from here on the time goes into sending
        return wire.RETURNED, wire.pack(value)
    except Exception as error:
        return wire.FAILED, pickle.dumps(unsendable(value, error))


def unsendable(value, error: Exception) -> dict:
    """The report of a rank whose result cannot be pickled."""
    what = wire.culprit(value, "result") or f"result, {type(value).__name__}"
    summary = f"returned a value that cannot be sent back: {what}"
    return {"kind": "unsendable", "summary": summary, "text": f"{type(error).__name__}: {error}"}


def _redirect(out_fd: int) -> None:
    # At the level of file descriptors, so that prints from C and from child processes follow.
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out_fd, 1), (out_fd, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(out_fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: PTH123, SIM115
    sys.stdout = sys.__stdout__ = _line_writer(1)
    sys.stderr = sys.__stderr__ = _line_writer(2)


def _line_writer(fd: int) -> io.TextIOWrapper:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: PTH123, SIM115


def flush() -> None:
    """Write out what is still in the buffers of Python and of C."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what C code printed


def prepare_stack_dump(path: Path) -> None:
    """Write this process's stacks to `path` when it gets stacks.STACK_SIGNAL or crashes."""
    file = path.open("w")
    file.write(f"main {threading.main_thread().ident:#018x}\n")
    file.flush()
    faulthandler.enable(file)
    faulthandler.register(stacks.STACK_SIGNAL, file, all_threads=True)


def tell_signals() -> None:
    """From here on, tell the parent of each signal that the function sends: it is not to blame for any other one.

    SIGABRT waits meanwhile, so that nobody else can end the rank with it; abort() itself lets it through.
    Source: abort(3), `sys.addaudithook` with the events "os.kill", "os.killpg" and "signal.pthread_kill".
    """
    me = os.getpid()

    def noted(event, args):
        if event in ("os.kill", "os.killpg", "signal.pthread_kill") and os.getpid() == me and args[1]:
            other = event != "signal.pthread_kill" and args[0] > 0
            if args[1] == signal.SIGABRT:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGABRT])
            with contextlib.suppress(OSError):
                wire.send(_parent, wire.SIGNALS, str(args[0] if other else me).encode())

    sys.addaudithook(noted)
    # it has no event of its own
    signal.raise_signal = sys.modules["_signal"].raise_signal = lambda signalnum: os.kill(os.getpid(), signalnum)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGABRT])


def _tell_limits(seconds: float) -> None:
    """From here on, tell the parent of a process group whose own time limit ends a wait before `seconds` are over."""

    def telling(set_up):
        @functools.wraps(set_up)
        def told(*args, **kwargs):
            limits = [one for one in (*args, *kwargs.values()) if isinstance(one, timedelta)]
            if any(limit.total_seconds() < seconds for limit in limits):
                wire.send(_parent, wire.LIMITED)
            return set_up(*args, **kwargs)

        return told

    for name in ("_new_process_group_helper", "_set_pg_timeout"):  # all ways to a group, or to another limit, lead here
        setattr(dist.distributed_c10d, name, telling(getattr(dist.distributed_c10d, name)))


def _enter_world(rank: int, request: dict, folder: Path) -> bytes:
    """Take over the parent's environment, folder and import path. Returns the pickled task."""
    with (folder / "task").open("rb") as file:
        world = pickle.load(file)
        task = file.read()
    mine, due = dict(os.environ), world["env"]
    for name in mine.keys() - due.keys():
        del os.environ[name]
    for name, value in due.items() - mine.items():  # what a rank does not touch needs no copy of its page
        os.environ[name] = value
    use_gpu = request["backend"] == "nccl"
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), place.INSIDE: "rank"})
    os.environ[place.DEVICE] = f"cuda:{rank}" if use_gpu else "cpu"
    adopt(world)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    numpy.random.seed()  # a fork would repeat the server's draws on each rank
    return task


def adopt(world: dict) -> None:
    """Take over the surroundings of the process that asked for the ranks (see run.surroundings)."""
    sys.path[:] = world["path"]
    sys.argv[:] = world["argv"]
    linecache.cache.update(world["lines"])
    with contextlib.suppress(OSError):
        os.chdir(world["cwd"])


def _join(rank: int, request: dict, folder: Path) -> None:
    n, backend = request["n"], place.joins(request["backend"])
    gpu = None
    if backend == "nccl":
        gpu = place.device()
        torch.cuda.set_device(gpu)
    join_group(
        backend,
        # A file in a private folder: no port to collide with another notebook, no other user can join.
        store=dist.FileStore(str(folder / "store"), n),
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=request["timeout"] + GROUP_TIMEOUT_MARGIN_S),
        device_id=gpu,
    )
    if backend == "nccl":
        lanes.open_lanes()


def describe(error: BaseException, doing: str) -> dict:
    """Turn an exception into plain values that always travel."""
    chain = list(stacks.chain(error))
    report = {
        "kind": "raised",
        "summary": f"raised {_headline(error)}{doing}",
        "text": stacks.trainee_traceback(error),
        "lost_peer": any(isinstance(e, (RuntimeError, OSError)) and _names_lost_peer(e) for e in chain),
        "cause": _pickled(error),
    }
    if isinstance(error, KeyboardInterrupt):
        report["signal"] = "SIGINT"
    if isinstance(error, SystemExit):
        report |= {"kind": "exited", "summary": f"called sys.exit({'' if error.code is None else repr(error.code)})"}
    balise = sys.modules.get("dlojz_tp.works.balise")
    undone = [e for e in chain if balise and isinstance(e, balise.BaliseNotDone)]
    if undone:
        report["balise"] = (getattr(undone[0], "number", None), getattr(undone[0], "title", None))
    return report


def _headline(error: BaseException) -> str:
    try:
        text = stacks.headline(error)
    except Exception:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _names_lost_peer(error: BaseException) -> bool:
    with contextlib.suppress(Exception):
        text = str(error).lower()
        return any(sign in text for sign in LOST_PEER)
    return False


def _pickled(error: BaseException) -> bytes | None:
    """The exception itself, where it survives a round trip."""
    try:
        data = bytes(wire.pack(error))
        if len(data) > MOST_CAUSE:
            return None
        loading.load(data, loading.CAUSE_S)
        return data
    except Exception:
        return None
