"""Run a function in a process of its own that leaves nothing behind, however it ends and however this one does.

Two processes: a keeper without torch, and its fork that runs the function. The keeper ends when this process does, and
then kills what the function has started: its group, its ranks, its daemons.
"""

import contextlib
import hashlib
import hmac
import importlib
import json
import multiprocessing.connection
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from dlojz_tp.cards.plain import plain
from dlojz_tp.launch import proc, server

BOOT = (
    "import json, sys; spec = json.loads(sys.argv[1]); sys.path[:] = spec['path']; "
    "from dlojz_tp.grading.watched import keep; keep(spec)"
)
SEAL = hashlib.sha256().digest_size
MOST_ERRORS = 20_000  # bytes of the answers' standard error that are shown
LEAVE_S = 4.0  # for the server that starts ranks to end by itself, and to remove its files
END_S = LEAVE_S + server.KILL_LIMIT_S + 1


class Ended(Exception):
    """The process ended before it had said all; the message says how."""


class Child:
    """The parent's end of a running function. pipe: what it says comes there; to wait for, not to read from."""

    def __init__(self, keeper: subprocess.Popen, pipe: multiprocessing.connection.Connection, key: bytes):
        self._keeper, self.pipe, self._key = keeper, pipe, key

    def hear(self, seconds: float):
        """The next value that the function gave to `say`; None if it is silent for `seconds`. Raises Ended."""
        try:
            if not self.pipe.poll(seconds):
                return None
            said = self.pipe.recv_bytes()
            if not hmac.compare_digest(_signed(self._key, said[SEAL:]), said):
                raise ValueError("not by the function's own `say`")
            return json.loads(said[SEAL:])
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(END_S)
            raise Ended(_how(self._keeper.returncode)) from None
        except (OSError, ValueError):  # other code has written into the pipe
            raise Ended("it wrote where the verdicts go") from None


@contextlib.contextmanager
def child(function, *args):
    """Start `function(say, *args)`, a function of a module, with arguments that JSON carries; gives its Child.

    What it writes to its standard output is lost. It is ended with the block.
    """
    ours, theirs = multiprocessing.connection.Pipe(duplex=False)
    spec = {"path": [p for p in sys.path if isinstance(p, str)], "fd": theirs.fileno(), "parent": os.getpid()}
    spec |= {"module": function.__module__, "name": function.__name__, "args": args}
    with ours:
        with theirs:
            keeper = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, json.dumps(spec)],  # -P: a json.py at hand is not read
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
            )
        key = secrets.token_bytes(32)
        with contextlib.suppress(BrokenPipeError), keeper.stdin:
            keeper.stdin.write(key)
        echo = threading.Thread(target=_echo, args=(keeper.stderr,), daemon=True)
        echo.start()
        try:
            yield Child(keeper, ours, key)
        finally:
            keeper.terminate()
            try:
                keeper.wait(END_S)
            except subprocess.TimeoutExpired:
                keeper.kill()  # the function dies with it
                keeper.wait()
            echo.join(1)


def keepers() -> set[int]:
    """In the function: the processes that keep it, and that listen to it."""
    keeper = os.getppid()
    found = {keeper}
    with contextlib.suppress(OSError, ValueError):
        found.add(int(proc.fields(Path(f"/proc/{keeper}"))[1]))
    return found - {0, 1}


def _signed(key: bytes, said: bytes) -> bytes:
    """What is said, behind its seal: other code of the process may find the pipe, and must not be believed."""
    return hmac.digest(key, said, "sha256") + said


def _echo(stream):
    """Show the first MOST_ERRORS bytes of the child's standard error, and read the rest away."""
    left = MOST_ERRORS
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(plain(chunk[:left].decode(errors="replace")))
                if left and len(chunk) >= left:
                    sys.stderr.write("\n... (the rest of what the answers write is left out)\n")
            left = max(0, left - len(chunk))


def _how(code: int | None) -> str:
    with contextlib.suppress(ValueError, TypeError):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit status {code}"


def keep(spec: dict):
    """The keeper: fork the function's process, wait for its end or the parent's, and leave nothing. Does not return."""
    function = 0
    key = sys.stdin.buffer.read(32)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def end(number, _frame):
        _sweep(function)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    server.prctl(server.PR_SET_CHILD_SUBREAPER, 1)  # what the function leaves behind becomes this process's child
    server.prctl(server.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != spec["parent"]:
        os._exit(1)
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    function = os.fork()
    if not function:
        _work(spec, keeper, key)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(spec["fd"])
    ended = os.waitid(os.P_PID, function, os.WEXITED | os.WNOWAIT)  # its number stays its own until all is swept
    _sweep(function)
    os._exit(ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status)


def _work(spec: dict, keeper: int, key: bytes):
    try:
        os.setsid()  # its own group, to be killed with all that it starts
        server.prctl(server.PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if os.getppid() != keeper:
            return
        pipe = multiprocessing.connection.Connection(spec["fd"], readable=False)
        os.set_inheritable(spec["fd"], False)  # a process that the function starts must not hold it open
        function = getattr(importlib.import_module(spec["module"]), spec["name"])
        seal, send, encode = _signed, pipe.send_bytes, json.dumps  # whatever the answers put in their places
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            function(lambda value: send(seal(key, encode(value).encode())), *spec["args"])
            pipe.close()
            if client := sys.modules.get("dlojz_tp.launch.client"):
                client.close()
        os._exit(0)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)  # never fall back into the keeper, nor wait for threads that answers have started


def _sweep(function: int):
    """Kill the function's process with its group, and all else that it has started."""
    if function:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(function, signal.SIGKILL)  # it may not have its group yet
            os.killpg(function, signal.SIGKILL)
    limit = time.monotonic() + LEAVE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < limit and any(map(_starts_ranks, server._children())):
            os.waitpid(-1, os.WNOHANG)
            time.sleep(0.01)
    server.kill_children()


def _starts_ranks(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"dlojz_tp.launch.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
