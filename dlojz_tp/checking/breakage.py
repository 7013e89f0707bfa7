"""What breaks in the machine or in the course is no verdict on an answer: what it was, and what to do."""

import errno

from dlojz_tp.launch import LaunchError, RankError, stacks

AGAIN = "Nothing is counted. Run this cell again; if it comes back: {todo}"
MEMORY = "restart the kernels of other notebooks, they hold memory."
DISK = "free space, or set TMPDIR to a folder on another disk before you start JupyterLab."
FILES = "close other programs, or ask for a higher limit (ulimit -n, ulimit -u)."
REPORT = "The course has a fault here, please report it. Your code is not to blame."

# never the answer's doing; behind a colon what helps
MACHINE = {errno.ENOSPC: DISK, errno.EDQUOT: DISK, errno.EROFS: DISK}
# of an answer's own line they may be its doing
IN_OUR_LINES = {
    errno.EMFILE: FILES, errno.ENFILE: FILES, errno.EAGAIN: FILES, errno.ENOMEM: MEMORY, errno.EFBIG: DISK,
    errno.EADDRINUSE: FILES, errno.EADDRNOTAVAIL: FILES, errno.ENETDOWN: FILES,
}  # fmt: skip
WORDS = {"No space left on device": DISK, "No usable temporary directory": DISK, "can't start new thread": FILES}


def broken(error: BaseException, in_answer: bool) -> tuple[str, str] | None:
    """What broke around an answer: (what, what to do); None where the answer itself may have failed.

    in_answer: whether a line of the answer's stands in the traceback.
    """
    if isinstance(error, LaunchError):
        return f"{error}", AGAIN.format(todo="`python -m dlojz_tp doctor` says what this machine lacks.")
    if isinstance(error, RankError) and error.kind == "unjoined":
        return error.summary, AGAIN.format(todo="ask whether the loopback device is up (python -m dlojz_tp doctor).")
    for part in stacks.chain(error):
        said = f"{type(part).__name__}: {part}".split("\n")[0][:300]
        number = getattr(part, "errno", None) if isinstance(part, OSError) else None
        todo = MACHINE.get(number) or (None if in_answer else IN_OUR_LINES.get(number))
        todo = todo or next((todo for words, todo in WORDS.items() if words in str(part)), None)
        if todo:
            return said, AGAIN.format(todo=todo)
    if not in_answer and isinstance(error, (NameError, ImportError, SyntaxError, LookedAtNothing)):
        return f"{type(error).__name__}: {error}", REPORT
    return None


class LookedAtNothing(Exception):
    """A check that yields no claim is no check."""
