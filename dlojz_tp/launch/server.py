"""The fork server: a process that has torch imported, and forks ranks from itself.

It never computes: no CUDA context, no thread pool, so a fork of it is a clean process. It owns the ranks: it reaps
them, kills them on request, and kills them all when the parent goes.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time

from dlojz_tp.launch import large_pages

# What ranks use first in this course and what is slow to import. A rank then finds it in memory.
PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.optim",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.debug",
    "torch.utils.flop_counter",
    "dlojz_tp.launch.rank",
)
# Imported as soon as a parent that has them asks for ranks: once here instead of once a rank.
PRELOAD_IF_USED = ("torchvision", "torchvision.transforms.v2", "torchvision.models", "matplotlib.pyplot")
PRELOAD_ALL = "dlojz_tp."  # what such a name begins with

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_LIMIT_S = 5.0
NOT_BEGUN = 70  # the exit code of a rank that could not even open its files
PARENT_CHECK_S = 1.0
FEW = 6  # launches: who has had so many will have more, and large pages pay
LIBC = ctypes.CDLL(None)


def prctl(option: int, value: int) -> None:
    """Set a process attribute on Linux; nothing elsewhere."""
    if sys.platform == "linux":
        LIBC.prctl(option, value, 0, 0, 0)


def main(spec: dict) -> None:
    """Serve until the parent goes. `spec`: fd (socket to the parent), folder (private, removed at the end)."""
    parent = os.getppid()
    sock = socket.socket(fileno=spec["fd"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Orphans of a rank, daemons included, become children of the server, which can then kill them.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # a stopped server goes on when its parent dies, and then ends
    for name in PRELOAD:
        importlib.import_module(name)
    from torch.distributed.distributed_c10d import BackendConfig

    BackendConfig("gloo")  # torch looks for backends in the folders of all packages: once here instead of once a rank
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.clear_lru_cache()  # as each rank does, and all it frees costs
    gc.enable()  # off since the first import: see client.BOOT
    try:
        _serve(sock, parent)
    finally:
        shutil.rmtree(spec["folder"], ignore_errors=True)


def _serve(sock: socket.socket, parent: int) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up pipe needs a handler, even an empty one
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    own_fds = [sock.fileno(), wake_read, wake_write, selector.fileno()]
    ranks: dict[int, int] = {}  # process id -> rank
    unread = b""
    fds: list[int] = []
    launches = 0
    gc.collect()
    try:
        while os.getppid() == parent:
            ready = {key.fd for key, _ in selector.select(PARENT_CHECK_S)}
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                _reap(ranks, sock)
            if sock.fileno() in ready:
                chunk, new_fds, _, _ = socket.recv_fds(sock, 65536, 256)
                if not chunk:
                    return
                fds += new_fds
                *lines, unread = (unread + chunk).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    _answer(request, ranks, sock, fds, own_fds)
                    if request["do"] == "kill":  # what each launch ends with
                        launches += 1
                        if launches == FEW:
                            large_pages.collapse()
    except ConnectionError:
        return  # the parent went in the middle of a message
    finally:
        _kill(ranks)


def _answer(request: dict, ranks: dict[int, int], sock: socket.socket, fds: list[int], own_fds: list[int]) -> None:
    with _no_gpu():
        for name in request.get("modules", ()):
            with contextlib.suppress(Exception):  # a rank that needs it will say what is wrong with it
                importlib.import_module(name)
    if request["do"] == "launch":
        gc.freeze()  # the collector of a rank then leaves the shared pages alone
        try:
            for rank in range(request["n"]):
                ranks[_fork(rank, request, fds, own_fds)] = rank
        except OSError as error:
            _say(sock, {"failed": f"cannot start {request['n']} processes: {error}"})
        finally:
            for fd in fds:
                os.close(fd)
            fds.clear()
    elif request["do"] == "signal":
        for pid, rank in ranks.items():
            if rank in request["ranks"]:
                os.kill(pid, request["number"])
    elif request["do"] == "kill":
        _say(sock, {"done": _kill(ranks)})


@contextlib.contextmanager
def _no_gpu():
    """Inside, torch finds no GPU. A module may compute as it is imported, and an optimizer's step asks for GPUs: CUDA
    refuses to work in a fork of a process that has asked its driver."""
    binding = importlib.import_module("torch._C")
    count = getattr(binding, "_cuda_getDeviceCount", None)  # builds without CUDA have none
    if count:
        binding._cuda_getDeviceCount = lambda: 0
    try:
        yield
    finally:
        if count:
            binding._cuda_getDeviceCount = count


def _fork(rank: int, request: dict, fds: list[int], own_fds: list[int]) -> int:
    """Fork one rank. `fds` holds its socket and its output pipe at 2 * rank and 2 * rank + 1."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # its own process group: its children can be killed with it
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            return os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mine = fds[2 * rank : 2 * rank + 2]
        for fd in own_fds + [fd for fd in fds if fd not in mine]:
            os.close(fd)
        from dlojz_tp.launch import rank as inside

        inside.main(rank, request, *mine)
    finally:
        os._exit(NOT_BEGUN)  # never fall back into the server's loop


def _reap(ranks: dict[int, int], sock: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in ranks:
                _say(sock, {"ended": ranks.pop(pid), "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _kill(ranks: dict[int, int]) -> bool:
    """Kill every rank with its process group, then whatever they left. True when nothing is left."""
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have its group yet
            os.killpg(pid, signal.SIGKILL)
    ranks.clear()
    return kill_children()


def kill_children() -> bool:
    """Kill every child of this process, and those that become its children then. True when nothing is left."""
    limit = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < limit:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if not pid:
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
    return False


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 (a hot loop)
            return [int(pid) for pid in file.read().split()]
    except OSError:
        import psutil

        return [child.pid for child in psutil.Process().children()]


def _say(sock: socket.socket, news: dict) -> None:
    sock.sendall(json.dumps(news).encode() + b"\n")
