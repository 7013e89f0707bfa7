"""Run a function on one job after the other, each in a separate process that leaves nothing behind.

Two kinds of processes: a keeper, which imports what the function needs, and for each job a fork of it, which runs the
function. No job's code ever runs in the keeper: it passes on what a fork says, once, as the answer to that fork's job.
It ends when this process does, and kills what a fork has started: its group, its ranks, its daemons.
"""

import contextlib
import gc
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
from dlojz_tp.launch import large_pages, proc, server

# To look for garbage takes a sixth of the time of the imports, and they leave next to none.
BOOT = (
    "import gc, json, sys; gc.disable(); spec = json.loads(sys.argv[1]); sys.path[:] = spec['path']; "
    "from dlojz_tp.judging.grading.watched import keep; keep(spec)"
)
SEAL = hashlib.sha256().digest_size
MOST_ERRORS = 20_000  # bytes of the answers' standard error that are shown
MOST_SAID = 1 << 24  # bytes of one value
LEAVE_S = 4.0  # for the server that starts ranks to end by itself, and to remove its files
END_S = LEAVE_S + server.KILL_LIMIT_S + 1
LOOK_S = 0.05
PR_SET_DUMPABLE = 4
# The system kills with these for a fault of the process itself, also where it ignores them; from outside they are lost.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
# What a fork has imported of these, the keeper imports too, and the next fork finds it.
LEARNT = ("torch", "torchvision", "numpy", "matplotlib", "dlojz_tp")
FAULT = 71  # exit status of a fork in which what judges has failed: it raises nothing of an answer's
NOT_LEARNT = ("torch._inductor",)  # starts threads and processes: no fork could be made any more
WROTE = "it wrote where the verdicts go"


class Ended(Exception):
    """The keeper ended before it had said all; the message says how."""


class Child:
    """The parent's end of a keeper, whose process is `pid`. pipe: its news; to wait for, not to read from."""

    def __init__(self, keeper: subprocess.Popen, pipe: multiprocessing.connection.Connection, key: bytes):
        self._keeper, self.pipe, self._key, self.pid = keeper, pipe, key, keeper.pid

    def hear(self, seconds: float) -> dict | None:
        """The next news; None if there is none for `seconds`. Raises Ended.

        {"job": k, "pid": its process}: all is imported, and job k has begun; {"job": k, "said": what the function
        returned}; or {"job": k, "lost": how, "own": whether its own code ended it or touched what it says}.
        """
        try:
            if not self.pipe.poll(seconds):
                return None
            return _opened(self._key, self.pipe.recv_bytes())
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(END_S)
            raise Ended(_how(self._keeper.returncode)) from None
        except (OSError, ValueError):  # other code has written into the pipe
            raise Ended(WROTE) from None


@contextlib.contextmanager
def child(prepare, *args, jobs: list):
    """Start a keeper for `jobs`, lists of arguments; gives its Child. All is ended with the block.

    prepare: a function of a module; `prepare(*args)` imports, and returns the function that each fork calls as
    `function(note_kill, *job)`. To note_kill it gives each signal that its process is about to send to itself. JSON
    must be able to carry all arguments and values. What is written to standard output is lost.
    """
    ours, theirs = multiprocessing.connection.Pipe(duplex=False)
    spec = {"path": [p for p in sys.path if isinstance(p, str)], "fd": theirs.fileno(), "parent": os.getpid()}
    spec |= {"module": prepare.__module__, "name": prepare.__name__, "args": args, "jobs": jobs}
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
                keeper.kill()  # the fork dies with it
                keeper.wait()
            echo.join(1)


def keepers() -> set[int]:
    """In a fork: the processes that keep it, and that listen to it."""
    keeper = os.getppid()
    found = {keeper}
    with contextlib.suppress(OSError, ValueError):
        found.add(int(proc.fields(Path(f"/proc/{keeper}"))[1]))
    return found - {0, 1}


def _signed(key: bytes, value) -> bytes:
    """What is said, after its seal: other code of the process may find the pipe, and must not be believed."""
    said = json.dumps(value).encode()
    return hmac.digest(key, said, "sha256") + said


def _opened(key: bytes, said: bytes):
    """The value under the seal. Raises ValueError where it is another's."""
    if not hmac.compare_digest(hmac.digest(key, said[SEAL:], "sha256"), said[:SEAL]):
        raise ValueError("another seal")
    return json.loads(said[SEAL:])


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
    with contextlib.suppress(ValueError, TypeError):  # of a child, or as a shell has it
        return f"killed by {signal.Signals(-code if code < 0 else code - 128).name}"
    return f"exit status {code}"


def keep(spec: dict):
    """The keeper: import, fork for each job, and leave nothing, no matter which ends first. Does not return."""
    key = bytearray(32)
    os.readv(0, [key])  # not by way of sys.stdin, whose buffer would keep it
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for number in CRASHES:
        signal.signal(number, signal.SIG_IGN)
    server.prctl(server.PR_SET_CHILD_SUBREAPER, 1)  # what a fork leaves behind becomes this process's child
    server.prctl(PR_SET_DUMPABLE, 0)  # no fork reaches the pipe by way of /proc
    os.set_inheritable(spec["fd"], False)
    keeper = _Keeper(multiprocessing.connection.Connection(spec["fd"], readable=False), key)
    signal.signal(signal.SIGTERM, keeper.end)
    server.prctl(server.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != spec["parent"]:
        os._exit(1)
    try:
        function = getattr(importlib.import_module(spec["module"]), spec["name"])(*spec["args"])
        gc.enable()  # off since the first import: see BOOT
        if len(spec["jobs"]) > server.FEW:
            large_pages.collapse()
        for number, job in enumerate(spec["jobs"]):
            keeper.do(function, number, job)
        os._exit(0)
    except BrokenPipeError:  # nobody listens any more
        pass
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        _sweep(keeper.fork)
        os._exit(1)


class _Keeper:
    """What the keeper does. fork: the process at work, or the last that was."""

    def __init__(self, pipe: multiprocessing.connection.Connection, key: bytearray):
        self._pipe, self._key, self.fork = pipe, key, 0

    def end(self, number, _frame):
        """End all, on a signal."""
        _sweep(self.fork)
        os._exit(128 + number)

    def tell(self, **news):
        """Send to the parent."""
        self._pipe.send_bytes(_signed(self._key, news))

    def do(self, function, number: int, job: list):
        """One job, in a fork; in a second one where the first was killed, and not by its own code: once is chance."""
        gc.collect()
        gc.freeze()  # the collector of a fork then leaves the shared pages alone
        for _ in range(2):
            news = self._once(function, number, job)
            if news.get("own", True):
                break
        for name in map(str, news.get("modules", ())):
            if name.partition(".")[0] in LEARNT and not name.startswith(NOT_LEARNT):
                with contextlib.suppress(Exception):  # a fork that needs it will say what is wrong with it
                    importlib.import_module(name)
        self.tell(job=number, **{key: news[key] for key in ("said", "lost", "own") if key in news})

    def _once(self, function, number, job) -> dict:
        key = secrets.token_bytes(32)  # of this fork alone
        ours, theirs = multiprocessing.connection.Pipe(duplex=False)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        keeper, self.fork = os.getpid(), os.fork()
        if not self.fork:
            self._key[:] = bytes(len(self._key))  # what speaks for other jobs is not in a fork's memory
            self._pipe.close()
            ours.close()
            _work(keeper, function, job, theirs, key)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        theirs.close()
        self.tell(job=number, pid=self.fork)
        with ours:
            said, kills, wrote = _heard(ours, key, self.fork)
        ended = _ended(self.fork, LEAVE_S)
        _sweep(self.fork)
        if wrote or len(said) > 1:
            return {"lost": WROTE, "own": True}
        if said:
            return said[0]
        if not ended:
            return {"lost": WROTE, "own": True}  # closed, which is as bad
        if ended.si_code == os.CLD_EXITED:
            return {"lost": _how(ended.si_status), "own": ended.si_status != FAULT}
        own = ended.si_status in (*kills, *CRASHES) and (ended.si_status != signal.SIGBUS or signal.SIGBUS in kills)
        return {"lost": _how(128 + ended.si_status), "own": own}  # SIGBUS: a full /dev/shm, or a disk that is away


def _heard(pipe, key: bytes, fork: int) -> tuple[list[dict], list[int], bool]:
    """All that a fork says until it ends: values, signals that it sends to itself, whether other code has written."""
    said, kills = [], []
    ends = False
    while True:
        try:
            if pipe.poll(LOOK_S):
                news = _opened(key, pipe.recv_bytes(MOST_SAID))
                if "said" in news:
                    said.append(news)
                else:
                    kills.append(news["kills"])
            elif ends:  # and a process that it has left holds the pipe open
                return said, kills, False
            else:
                ends = _ended(fork, 0) is not None
        except EOFError:
            return said, kills, False
        except (OSError, ValueError, TypeError, KeyError):
            return said, kills, True


def _ended(fork: int, seconds: float):
    """How it has ended; None where it has not within `seconds`. Its number stays its own until all is swept."""
    limit = time.monotonic() + seconds
    while not (ended := os.waitid(os.P_PID, fork, os.WEXITED | os.WNOWAIT | os.WNOHANG)) and time.monotonic() < limit:
        time.sleep(0.002)
    return ended


def _work(keeper: int, function, job: list, pipe: multiprocessing.connection.Connection, key: bytes):
    try:
        server.prctl(PR_SET_DUMPABLE, 1)
        os.setsid()  # its own group, to be killed with all that it starts
        server.prctl(server.PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if os.getppid() != keeper:
            return
        seal, send = _signed, pipe.send_bytes  # whatever the answers put in their places
        before = set(sys.modules)

        def say(**news):
            send(seal(key, news))

        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            value = function(lambda number: say(kills=number), *job)
            say(said=value, modules=[name for name in list(sys.modules) if name not in before])
            pipe.close()
            if client := sys.modules.get("dlojz_tp.launch.client"):
                client.close()
        os._exit(0)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(FAULT)
    finally:
        os._exit(1)  # never fall back into the keeper, nor wait for threads that answers have started


def _sweep(fork: int):
    """Kill a fork with its group, and all else that it has started."""
    if fork:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(fork, signal.SIGKILL)  # it may not have its group yet
            os.killpg(fork, signal.SIGKILL)
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
