"""Ranks that wait for each other, told long before the deadline.

A deadlock looks like nothing else: every thread of every rank sleeps, none of them has run for a while, no message is
on its way, and each rank that still works is in a call of torch.distributed that only another rank can end.
Who computes, reads a disk or wants a core does not sleep; who sleeps in code of its own stands elsewhere; a second
thread of Python, a child process, a debugger, a GPU or a time limit of the function's own could still move something.
In all these cases, and where the system does not tell, the deadline decides.
"""

import linecache
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from dlojz_tp.launch import proc, stacks
from dlojz_tp.launch.started import Rank

FIRST_LOOK_S = 0.75  # from when all ranks are up: most launches are over by then
LOOK_S = 0.25
BEFORE, AFTER = 4, 2  # looks at which nothing has moved: before the stacks are asked for, and since
STILL_S = (BEFORE + AFTER) * LOOK_S
POLLS = "gloo_tcp_loop"  # gloo's own thread, named so since torch 2.13: it looks for messages a hundred times a second
FUTEX = "202", "98"  # the system call on x86-64, on ARM
LIMITS = b"timedelta"  # who writes a time limit for torch.distributed writes this word
NAMED = torch.__version__ >= (2, 13)
COLLECTIVES = re.compile(r"_?(all_|broadcast|reduce|gather|scatter|barrier|send|recv)")
DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
OPERATORS = f"{os.sep}torch{os.sep}_ops.py", f"{os.sep}torch{os.sep}_library{os.sep}autograd.py"
OF_DDP = (  # compiled code waits in them: (file, function)
    (f"{os.sep}torch{os.sep}autograd{os.sep}graph.py", "_engine_run_backward"),
    (f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}distributed.py", "_pre_forward"),
)
Turns = dict[str, int]  # id of a thread -> how often it has gone to sleep
PACKAGE = str(Path(__file__).parent.parent) + os.sep


class Watch:
    """Looks at the ranks now and then, once all are up.

    ranks: all of them. server: process id of what forked them. folder: the launch's own. ask: has their stacks written,
    and returns rank -> the text of its stack file.
    """

    def __init__(self, ranks: list[Rank], server: int, folder: Path, ask: Callable[[], dict[int, str]]):
        self._ranks, self._server, self._task, self._ask = ranks, server, folder / "task", ask
        self._due = time.monotonic() + FIRST_LOOK_S
        self._seen: Turns | None = None
        self._polls: Turns = {}
        self._still = 0  # looks at which nothing had moved
        self._stacks: dict[int, str] = {}  # once all were found to wait for each other

    def left(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._due - time.monotonic())

    def deadlock(self) -> dict[int, str]:
        """Look, when it is due. Rank -> stack file of all at work if they wait for each other forever, else {}."""
        if self.left():
            return {}
        self._due = time.monotonic() + LOOK_S
        turns, polls = asleep(self._ranks) or (None, {})
        if turns is None or turns != self._seen:
            self._still, self._stacks = 0, {}
        elif all(n >= self._polls.get(thread, 0) + 2 for thread, n in polls.items()):
            self._still += 1
        else:
            return {}  # what has come for gloo's threads may not have been fetched since the last look
        self._seen, self._polls = turns, polls
        if self._still == BEFORE and self._closed():
            self._stacks = self._all_wait()
            # The signal that asks has woken each main thread once: who has moved besides has stopped more often.
            woken = {str(r.pid) for r in self._ranks}
            self._seen = {thread: n + (thread in woken) for thread, n in turns.items()}
        told = self._still == BEFORE + AFTER and self._stacks and self._closed()
        return {r.rank: self._stacks[r.rank] for r in self._ranks if not r.done} if told else {}

    def _waiting(self) -> list[Rank]:
        return [r for r in self._ranks if not (r.done or r.waits)]

    def _closed(self) -> bool:
        pids = [r.pid for r in self._ranks]
        return (
            all(in_futex(r.pid) for r in self._waiting())
            and closed(pids, self._server)
            and not any(r.limited for r in self._ranks)
            and not has_limits(self._task)
        )

    def _all_wait(self) -> dict[int, str]:
        """The stacks, where nothing but another rank can end what each rank waits for; else {}."""
        dumps = self._ask()
        alone = all(stacks.threads(dump) == 1 for dump in dumps.values())
        at = [stacks.parse(dumps[r.rank]) for r in self._waiting()]
        return dumps if at and alone and all(map(only_a_rank_ends, at)) else {}


def asleep(ranks: Iterable[Rank], folder: Path = Path("/proc")) -> tuple[Turns, Turns] | None:
    """How often each thread of the ranks has gone to sleep, and apart from them those that only look for messages.

    Who sleeps at two looks with the same number has not run in between. Those that look are gloo's, and the main thread
    of a rank that has said it only waits for others. None where another thread does not sleep, where a debugger holds a
    rank, or where the system does not tell.
    """
    turns: Turns = {}
    polls: Turns = {}
    try:
        for r in ranks:
            for thread in os.listdir(f"{folder}/{r.pid}/task"):  # noqa: PTH208 (hundreds of files, four times a second)
                with open(f"{folder}/{r.pid}/task/{thread}/status") as file:  # noqa: PTH123
                    text = file.read()
                often = int(_fact(text, "voluntary_ctxt_switches"))
                if _fact(text, "TracerPid") != "0":
                    return None
                if _fact(text, "Name") == POLLS or (r.waits and thread == str(r.pid)):
                    polls[thread] = often
                elif _fact(text, "State")[0] != "S":
                    return None
                else:
                    turns[thread] = often
    except (OSError, IndexError, ValueError):
        return None
    return turns, polls


def _fact(status: str, name: str) -> str:
    """What a status file of /proc has under a name; "" where it has none."""
    return status.partition(f"{name}:\t")[2].partition("\n")[0]


def closed(pids: list[int], server: int, folder: Path = Path("/proc")) -> bool:
    """Whether nobody but the ranks can move them: no child process, no GPU, no message on its way."""
    for process in folder.glob("[0-9]*"):
        try:
            state, parent, _, session, *_ = proc.fields(process)
        except (OSError, ValueError):
            continue  # it has gone meanwhile
        theirs = int(parent) in (server, *pids) or int(session) in pids
        if theirs and int(process.name) not in pids and state not in "ZX":
            return False
    try:
        opened = {str(fd.readlink()) for pid in pids for fd in (folder / str(pid) / "fd").iterdir()}
        lines = [line.split() for name in ("tcp", "tcp6") for line in _lines(folder / str(pids[0]) / "net" / name)]
    except OSError:
        return False
    under_way = {f"socket:[{line[9]}]" for line in lines if line[4].strip("0:")}  # bytes to send, bytes to read
    return not under_way & opened and not any(name.startswith("/dev/nvidia") for name in opened)


def _lines(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:] if table.exists() else []


def in_futex(pid: int) -> bool:
    """Whether the main thread waits for another thread, as all of gloo's waits do: a signal could end others early."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] in FUTEX
    except (OSError, IndexError):
        return False


def has_limits(task: Path) -> bool:
    """Whether what the ranks run speaks of time limits: a call that ends by itself with an error is no deadlock."""
    with task.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(LIMITS) >= 0


def only_a_rank_ends(frames: list[stacks.Frame]) -> bool:
    """Whether a thread (frames: innermost first) is in a wait of torch.distributed without a limit."""
    own = [f for f in frames if stacks.is_trainee(f.file)]
    if any(LIMITS.decode() in line for f in own for line in linecache.getlines(f.file)):
        return False
    # Probes hand a wait on, and leave frames of their own above it.
    frames = [f for f in frames if not f.file.endswith((*stacks.WRAPPERS, *OPERATORS))]
    while frames and frames[0].file.startswith(PACKAGE) and ".wait(" not in stacks.source(frames[0]):
        frames = frames[1:]
    if not frames:
        return False
    inner, line = frames[0], stacks.source(frames[0])
    if DISTRIBUTED in inner.file and COLLECTIVES.match(inner.name):
        return True
    if inner.name == "wait_tensor" or any(inner.file.endswith(file) and inner.name == name for file, name in OF_DDP):
        return True
    return bool(stacks.WAIT.search(line)) and not re.search("store|sleep|timeout", line, re.IGNORECASE)
