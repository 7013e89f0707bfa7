"""Tracebacks without the machinery, and where a hung rank stands."""

import contextlib
import linecache
import os
import re
import signal
import site
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Makes a rank write its stacks.
STACK_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
LONGEST_TEXT = 20_000  # characters
LONGEST_MESSAGE = 2_000
LONGEST_LINE = 90
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
QUOTED = re.compile(r'File "([^"\n]+)"')
QUOTED_LINE = re.compile(r'^  (?:File )?"?([^"\n]+?)"?, line (\d+).*\n    (.+)', re.MULTILINE)
WAIT = re.compile(r"\.wait\(")
# Frames that only wrap the function a user called.
WRAPPERS = ("c10d_logger.py", "_contextlib.py")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str


@dataclass(frozen=True)
class Stand:
    """Where a rank stands: the user's line, and the torch function it waits in (None: in the user's own code)."""

    frame: Frame | None
    waits_in: str | None

    def __str__(self) -> str:
        if self.frame is None:
            return "at an unknown line"
        where = f"line {self.frame.line} of {self.frame.name.replace('<module>', 'the cell')}"
        if text := source(self.frame):
            where += f": `{text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE] + ' …'}`"
        return f"in {self.waits_in} ({where})" if self.waits_in else f"at {where}"


@cache
def not_theirs() -> tuple[str, ...]:
    """What the names of files begin with that no user has written: Python's own, of libraries, of this package."""
    import numpy
    import torch

    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")} | {site.getusersitepackages()}
    # an environment may see the packages of another one
    folders |= {str(Path(library.__file__).parent.parent) for library in (torch, numpy)}
    folders.add(str(Path(__file__).resolve().parent.parent))
    return "<frozen", *(folder + os.sep for folder in folders)


def is_trainee(file: str) -> bool:
    """True for code of the user: no library, not the standard library, not this package."""
    return not file.startswith(not_theirs())


def is_ours(file: str) -> bool:
    return os.path.dirname(os.path.abspath(file)) == os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def message(error: BaseException) -> str:
    """What an exception says; a tensor that is no key of a dictionary by its shape, for its numbers fill the screen."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if hasattr(key, "shape"):
        return f"{type(key).__name__} of shape {tuple(key.shape)}"
    text = str(error)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} … ({len(text):,} characters)"


def headline(error: BaseException) -> str:
    """The first line of what an exception says, and the next ones where the first only announces them."""
    lines = [line.strip() for line in message(error).splitlines() if line.strip()]
    if not lines:
        return ""
    if lines[0].endswith(":"):
        return " ".join(lines[:2])
    return " ".join(lines[:3]) if "validation error" in lines[0] else lines[0]


def trainee_traceback(error: BaseException) -> str:
    """Format an exception with the user's own lines only (all but the launcher's where there are none)."""
    try:
        shown = traceback.TracebackException.from_exception(error)
        part = shown
        while part is not None:
            frames = [f for f in part.stack if is_trainee(f.filename)]
            if not frames:
                frames = [f for f in part.stack if not is_ours(f.filename) and f.filename != "<string>"]
            part.stack = traceback.StackSummary.from_list(frames)
            part = part.__cause__ or part.__context__
        text = "".join(shown.format()).rstrip().replace(str(error), message(error))
    except Exception:
        text = type(error).__name__  # an exception whose own __str__ raises
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}\n... (cut)"


def parse(dump: str) -> list[Frame]:
    """Read a faulthandler dump and return the main thread's frames, innermost first.

    The rank wrote the main thread's id on the first line of the file. The last dump counts.
    """
    head, _, rest = dump.partition("\n")
    main = head.removeprefix("main ").strip()
    frames: list[Frame] = []
    reading = False
    for line in rest.splitlines():
        if "most recent call first" in line:
            reading = main in line
            frames = [] if reading else frames
        elif reading and (match := FRAME.match(line)):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
    return frames


def threads(dump: str) -> int:
    """How many threads a faulthandler dump shows at a line of Python: those of compiled code have none."""
    return len(re.findall(r"most recent call first\):\n  File", dump))


def stand(frames: list[Frame]) -> Stand:
    """Say where the rank stands, from its frames, innermost first."""
    calls: list[Frame] = []
    for frame in frames:
        if is_trainee(frame.file):
            named = [f for f in calls if not f.file.endswith(WRAPPERS) and f"{os.sep}torch{os.sep}" in f.file]
            # Waiting for an asynchronous collective leaves no frame of its own: the user's line tells.
            return Stand(frame, named[-1].name if named else "wait" if WAIT.search(source(frame)) else None)
        calls.append(frame)
    # No line of the user at all: a library function was launched as it is.
    named = [f for f in calls if not f.file.endswith(WRAPPERS) and not is_ours(f.file) and f.file != "<string>"]
    return Stand(named[-1], named[-1].name) if named else Stand(None, None)


def show(frames: list[Frame]) -> str:
    """Format frames as a traceback, outermost first, the user's lines only where there are some."""
    kept = [f for f in frames if is_trainee(f.file) and f.file != "<string>"] or frames
    lines = []
    for f in reversed(kept):
        lines.append(f'  File "{f.file}", line {f.line}, in {f.name}')
        if text := source(f):
            lines.append(f"    {text}")
    return "\n".join(lines)


def with_cells(text: str) -> str:
    """A traceback with IPython's own names, `Cell In[3]`, for the files that its cells seem to lie in."""
    with contextlib.suppress(KeyError, AttributeError):  # no IPython here, or an old one
        names = sys.modules["IPython"].get_ipython().compile.format_code_name
        return QUOTED.sub(lambda file: " ".join(names(file[1]) or ()) or file[0], text)
    return text


def source(frame: Frame | None) -> str:
    """The source line of a frame, or an empty text."""
    return linecache.getline(frame.file, frame.line).strip() if frame else ""


def chain(error: BaseException | None):
    """An exception, and those that caused it; of a rank's, the one raised there."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        cause = getattr(error, "cause", None)  # of a RankError; another class may call what it likes so
        error = (cause if isinstance(cause, BaseException) else None) or error.__cause__ or error.__context__
