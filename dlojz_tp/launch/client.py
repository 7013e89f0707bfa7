"""The parent's side of the fork server: start it, ask it for ranks, end it."""

import atexit
import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from dlojz_tp.launch import proc
from dlojz_tp.launch.errors import LaunchError
from dlojz_tp.launch.place import INSIDE
from dlojz_tp.launch.server import PRELOAD_ALL, PRELOAD_IF_USED
from dlojz_tp.works import temporary

# The server takes the parent's import path, and never its __main__: a script without a guard must not run twice.
# Imports leave next to no garbage: to look for it meanwhile would take a sixth of their time.
BOOT = (
    "import gc, json, sys; gc.disable(); spec = json.loads(sys.argv[1]); sys.path[:] = spec['path']; "
    "from dlojz_tp.launch.server import main; main(spec)"
)
# One thread, and no CUDA context even where an import asks whether there is a GPU.
CALM = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Threads that spin while they wait take the cores of other ranks, and of other trainees.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def _files() -> set[tuple]:
    """Name, time and size of each source file of the course, as they are on the disk."""
    found, folders = set(), [str(PACKAGE)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):  # an editor's
                    continue
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    found.add((entry.path, entry.stat().st_mtime_ns, entry.stat().st_size))
    return found


PACKAGE = Path(__file__).resolve().parent.parent
try:
    _FILES = _files()  # when this process began
except OSError:
    _FILES = set()  # they were being replaced: what was imported is mixed


def updated() -> bool:
    """Whether the course's files were changed since this process began: ranks and later imports have the new ones."""
    try:
        return _files() != _FILES
    except OSError:
        return True  # it is being replaced just now


class Updated(LaunchError):
    """The fork server would have other files than this process."""

    todo = "restart the kernel."


@dataclass
class Server:
    """A running fork server: its process, the socket to it, and a private folder."""

    process: subprocess.Popen
    sock: socket.socket
    folder: Path
    launches: int = 0
    modules: tuple[str, ...] = ()  # what `warm` has asked it for
    unread: bytearray = field(default_factory=bytearray)


class ServerGone(LaunchError):
    """The fork server ended by itself, or was stopped; the next launch starts a new one."""


lock = threading.Lock()  # one launch at a time; a second thread waits its turn
_starting = threading.Lock()
_server: Server | None = None  # of launches
_taken: list[Server] = []  # of ranks that stay, or did
_spare: list[Server] = []  # of them, those that have no ranks now


def warm(*modules: str) -> None:
    """Start the fork server, without waiting for it, so that the first launch finds torch imported.

    modules: what it imports then, beside what this process has. Safe to call many times and from any thread; inside a
    rank it does nothing.
    """
    if INSIDE in os.environ:
        return
    with contextlib.suppress(LaunchError):  # the launch will say why
        server = get()
        if modules:
            server.modules = modules
            ask(server, {"do": "import", "modules": [*used(), *modules]})


def used() -> list[str]:
    """What the fork server should import too: modules that this process has and ranks are likely to need."""
    below = sorted(name for name in list(sys.modules) if name.startswith(PRELOAD_ALL))
    return [name for name in PRELOAD_IF_USED if name in sys.modules] + below


def get() -> Server:
    """Return the running server, started now where there is none."""
    global _server
    with _starting:
        if _server is not None and _server.process.poll() is not None:
            server, _server = _server, None
            _drop(server)
        if _server is None:
            with one_line():
                _server = _start()
        return _server


@contextlib.contextmanager
def one_line():
    """Inside, what the machine refuses (files, a full disk, no loopback) is a LaunchError of one line."""
    try:
        yield
    except OSError as error:
        raise _cannot_start(error) from error


def _cannot_start(error: OSError) -> LaunchError:
    helps = {
        errno.ENOSPC: "free space, or set TMPDIR to a folder on another disk",
        errno.EFBIG: "files may not grow here: raise `ulimit -f`",
        errno.EMFILE: "too many files are open: restart the kernel, or raise `ulimit -n`",
        errno.ENFILE: "too many files are open on this machine",
        errno.EAGAIN: "too many processes: end some, or raise `ulimit -u`",
        errno.ENOMEM: "too little memory: restart the kernels of other notebooks",
        errno.EADDRINUSE: "no port is free: end other programs of yours",
        errno.EADDRNOTAVAIL: "there is no loopback device, or no port is free: python -m dlojz_tp doctor",
    }
    todo = helps.get(error.errno, "python -m dlojz_tp doctor says what this machine lacks")
    return LaunchError(f"the ranks cannot be started ({error.strerror or error}): {todo}")


def take() -> Server:
    """Return a running server for ranks that stay; launches get another one. End with `give_back` or `close`."""
    global _server
    while _spare:
        server = _spare.pop()
        if server.process.poll() is None:
            return server
        close(server)
    with lock:
        server = get()
        with _starting:
            _server = None
            _taken.append(server)
    return server


def give_back(server: Server) -> None:
    """Keep a server without ranks for whatever needs one next."""
    global _server
    if server not in _taken:
        return  # it was closed meanwhile
    with _starting:
        if _server is None:
            _taken.remove(server)
            _server = server
        else:
            _spare.append(server)


def close(server: Server | None = None) -> None:
    """End a server, that of launches if none is named, and all its ranks; whatever needs one starts a new one."""
    global _server
    with _starting:
        server = server or _server
        # first of all: whatever interrupts this, nobody asks a server that goes
        _server = None if server is _server else _server
        for servers in (_taken, _spare):
            servers[:] = [other for other in servers if other is not server]
        if server is not None:
            _drop(server)


def _close_all() -> None:
    for server in [*_taken, _server]:
        close(server)


def _start() -> Server:
    if updated():
        raise Updated("the course was updated since this kernel was started: restart the kernel")
    # mode 0700: nobody else can join the rendezvous
    folder = Path(tempfile.mkdtemp(prefix=temporary.prefix("launch")))
    ours, theirs = socket.socketpair()
    spec = {"path": [p for p in sys.path if isinstance(p, str)], "fd": theirs.fileno(), "folder": str(folder)}
    with theirs, (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, json.dumps(spec)],  # -P: a json.py at hand is not read
            env=os.environ | CALM | {INSIDE: "server"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
        )
    return Server(process, ours, folder)


def _drop(server: Server) -> None:
    # The closed socket tells the server to kill its ranks and to end.
    server.sock.close()
    try:
        server.process.wait(timeout=0 if proc.stopped(server.process.pid) else 2)
    except subprocess.TimeoutExpired:
        server.process.kill()  # its ranks die with it
        server.process.wait()
    shutil.rmtree(server.folder, ignore_errors=True)


def new_folder(server: Server) -> Path:
    """Make the private folder of the next launch."""
    server.launches += 1
    if not server.folder.is_dir():  # somebody has cleaned the temporary folder meanwhile
        server.folder.mkdir(mode=0o700)
    folder = server.folder / str(server.launches)
    folder.mkdir(mode=0o700)
    return folder


def ask(server: Server, request: dict, fds: list[int] = ()) -> None:
    """Send a request, with file descriptors that the server takes over."""
    try:
        socket.send_fds(server.sock, [json.dumps(request).encode() + b"\n"], list(fds))
    except OSError as error:
        raise _gone(server) from error


def hear(server: Server, limit: float | None = None) -> list[dict]:
    """Wait for news from the server, for `limit` seconds at most, and return it."""
    chunk = b""
    if not select.select([server.sock], [], [], limit)[0]:
        raise ServerGone("the process that starts the ranks does not answer; the next launch starts a new one")
    with contextlib.suppress(ConnectionError):
        chunk = server.sock.recv(65536)
    if not chunk:
        raise _gone(server)
    server.unread += chunk
    *lines, rest = bytes(server.unread).split(b"\n")
    server.unread[:] = rest
    return [json.loads(line) for line in lines]


def check(server: Server, folder: Path) -> None:
    """ServerGone where the server is stopped, or the folder of a launch is gone."""
    if proc.stopped(server.process.pid):
        raise ServerGone("the process that starts the ranks was stopped by a signal; the next launch starts a new one")
    if not folder.is_dir():
        raise ServerGone(
            f"the folder of this launch is gone, in {server.folder.parent}: has somebody cleaned it? The next launch "
            "makes a new one"
        )


def _gone(server: Server) -> ServerGone:
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(timeout=2)
    words = ""
    with contextlib.suppress(OSError, IndexError):
        words = (server.folder / "server.log").read_text(errors="replace").strip().splitlines()[-1][:300]
    if server.process.returncode == -signal.SIGKILL:
        words = words or "it was killed, often because the system is out of memory"
    return ServerGone("the process that starts the ranks has ended" + f" ({words})" * bool(words))


def _forget() -> None:
    # In a fork of the parent (a DataLoader worker, say) the server belongs to the parent.
    global _server, lock, _starting
    lock, _starting = threading.Lock(), threading.Lock()
    for server in filter(None, [*_taken, _server]):
        server.sock.close()
        server.process.returncode = 0  # not this process's child: nothing to wait for
    _server = None
    _taken.clear()
    _spare.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget)
