"""What breaks in the machine or in the course is no verdict on an answer: what it was, and what to do."""

import contextlib
import errno
import os
import re
import resource
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

from dlojz_tp.launch import LaunchError, RankError, stacks

AGAIN = "Nothing is counted. Run this cell again; if it comes back: {todo}"
MEMORY = "restart the kernels of other notebooks, they hold memory."
DISK = "free space, or set TMPDIR to a folder on another disk before you start JupyterLab."
SHARED, SHARED_MEMORY = "/dev/shm", "end other programs, or give the container more shared memory (--shm-size)."
LEAST_SPACE = 1 << 20  # bytes
NOEXEC = "no program may run from the temporary folder: set TMPDIR to another folder before you start JupyterLab."
FILES = "close other programs, or ask for a higher limit (ulimit -n, ulimit -u)."
AWAY = "a disk or a network folder does not answer: tell those who look after the machine."
HALF_LOADED = "restart the kernel: Stop has interrupted an import, and left a library without some of its parts."
REPORT = "The course has a fault here, please report it. Your code is not to blame."
MIXED = "the course was updated since this kernel was started"
UPDATED = "Nothing is counted. Restart the kernel: until then, old and new files of the course are mixed."

# never the answer's doing; after a colon what helps
MACHINE = {
    errno.ENOSPC: DISK, errno.EDQUOT: DISK, errno.EROFS: DISK, errno.ENOMEM: MEMORY,
    errno.EIO: AWAY, errno.ESTALE: AWAY, errno.ETIMEDOUT: AWAY,
}  # fmt: skip
# of an answer's own line they may be its doing
IN_OUR_LINES = {
    errno.EMFILE: FILES, errno.ENFILE: FILES, errno.EAGAIN: FILES, errno.EFBIG: DISK, errno.EADDRINUSE: FILES,
    errno.EADDRNOTAVAIL: FILES, errno.ENETDOWN: FILES,
}  # fmt: skip
WORDS = {
    "No space left on device": DISK, "No usable temporary directory": DISK, "can't start new thread": FILES,
    "failed to map segment from shared object": NOEXEC, "Input/output error": AWAY, "Stale file handle": AWAY,
}  # fmt: skip
# a loader's worker that somebody else has ended; what crashes by itself has other words
WORKER = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (Killed|Terminated|Bus error|Hangup)")
# MemoryError: a rank may have had no memory left to send the exception itself
NO_MEMORY = re.compile(r"[Cc]an(no|')t allocate memory|std::bad_alloc|Unable to allocate \d|\bMemoryError\b")
ASKED = re.compile(r"allocate (?P<n>[\d.]+) (?P<unit>bytes|[KMGTPE]iB)|mmap (?P<mapped>\d+) bytes")  # torch's, numpy's
ABSURD = 0.5  # of the memory that a process can have: nothing in the course needs so much


def broken(error: BaseException, in_answer: bool, grown: int = 0) -> tuple[str, str] | None:
    """What broke around an answer: (what, what to do); None where the answer itself may have failed.

    in_answer: whether the traceback has a line of the answer. grown: bytes by which `peak()` has grown.
    """
    if isinstance(error, LaunchError):
        return f"{error}", AGAIN.format(todo=error.todo)
    if isinstance(error, RankError) and error.kind == "unjoined":
        return error.summary, AGAIN.format(todo="ask whether the loopback device is up (python -m dlojz_tp doctor).")
    for part in stacks.chain(error):
        said = f"{type(part).__name__}: {part}".split("\n")[0][:300]
        number = getattr(part, "errno", None) if isinstance(part, OSError) else None
        todo = MACHINE.get(number) or (None if in_answer else IN_OUR_LINES.get(number))
        todo = todo or next((todo for words, todo in WORDS.items() if words in str(part)), None)
        if WORKER.search(str(part)) or isinstance(part, MemoryError) or NO_MEMORY.search(str(part)):
            todo = None if max(_asked(str(part)), grown) >= ABSURD * _most() else MEMORY
        if todo:
            return said, AGAIN.format(todo=todo)
    if isinstance(error, ProbeLost):
        return f"{error}", AGAIN.format(todo="end other programs, or report it.")
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and _in_library(error):
        return f"AttributeError: {error}", AGAIN.format(todo=HALF_LOADED)
    if not in_answer and isinstance(error, (NameError, ImportError, SyntaxError, LookedAtNothing)):
        return f"{type(error).__name__}: {error}", REPORT
    return None


def out_of_space() -> tuple[str, str] | None:
    """What is full, where nothing can be written any more: (what, what to do).

    It need not raise in the answer's process. A loader's worker that finds the shared memory full writes its error to
    the screen, and the loader never returns; or the answer catches it, and its values are wrong.
    """
    for folder, todo in ((tempfile.gettempdir(), DISK), (SHARED, SHARED_MEMORY)):
        with contextlib.suppress(OSError):
            about = os.statvfs(folder)
            if about.f_blocks and about.f_bavail * about.f_frsize < LEAST_SPACE:
                return f"{folder} is full", AGAIN.format(todo=todo)
    return None


def _asked(text: str) -> int:
    """The bytes that an allocation asked for in vain, where the error tells; else 0."""
    if not (found := ASKED.search(text)):
        return 0
    power = " KMGTPE".index((found["unit"] or "bytes").removesuffix("iB").replace("bytes", " "))
    return int(float(found["n"] or found["mapped"]) * 1024**power)


def _most() -> float:
    """Bytes of memory that this process can have."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])


def peak() -> int:
    """The most bytes of addresses that this process has had so far; 0 where the system does not tell."""
    try:
        return 1024 * int(re.search(r"VmPeak:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    except (OSError, TypeError):
        return 0


def _in_library(error: BaseException) -> bool:
    """Whether a line of a library raised it, neither one of the answer's nor one of the course's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name != "__getattr__"]  # of the module
    if not frames or "getattr(" in (frames[-1].line or ""):  # a name that somebody gave, the answer maybe
        return False
    return not stacks.is_trainee(frames[-1].filename) and "dlojz_tp" not in Path(frames[-1].filename).parts


class LookedAtNothing(Exception):
    """A check that yields no claim is no check."""


class HintMissing(Exception):
    """A slug without a hint, or a hint with a field that its look doesn't give: a fault of the check or of its bank."""


class ProbeLost(Exception):
    """A probe that timed out or was ended says nothing of the answer."""
