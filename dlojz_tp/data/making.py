"""What the commands that make data sets share: whole or not at all, one at a time, and one line for what goes wrong.

Standard library only.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from dlojz_tp.data import folders
from dlojz_tp.works import temporary

from . import made
from .places import data_root

DAY = 86400  # seconds: no set takes so long


class CannotMake(Exception):
    """The set cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Recipe:
    """How one command makes its set. A manifest is a dict; "versions" in it may differ without harm.

    command: its name. read: the manifest of a folder, as `made.read`. files: their paths in the folder, in order.
    build: writes all files into a new folder and may add entries to the manifest. summary: what was made, in words.
    """

    command: str
    read: Callable[[Path], dict]
    files: Callable[[dict], list[str]]
    build: Callable[[Path, dict], None]
    summary: Callable[[dict], str]


def state_of(recipe: Recipe, out: Path, wanted: dict, force: bool) -> str:
    """Say what is at `out`: "nothing", "ready", "unsealed" or "replace".

    "unsealed" is ready, except for the manifest's own checksum. Raises CannotMake for what must not be touched.
    """
    if not os.path.lexists(out):
        return "nothing"
    if not out.is_dir():
        raise CannotMake(f"{out} is not a folder: give another --out")
    if not any(out.iterdir()):
        return "nothing"
    try:
        found = recipe.read(out)
    except (OSError, ValueError) as error:
        why = f"no {made.NAME}" if isinstance(error, FileNotFoundError) else str(error)
        raise CannotMake(f"{out} is no set made by this command ({why}): move it away, or give --out") from error
    differ = [key for key, value in wanted.items() if key != "versions" and found.get(key) != value]
    if differ and not force:
        raise CannotMake(f"{out} holds a set with another {', '.join(differ)}: give --force to replace it, or --out")
    if not differ and not force:
        with contextlib.suppress(OSError):  # a file that cannot be read counts as damaged
            if made.sums(out, recipe.files(found))["sha256"] == found["sha256"]:
                ours = os.access(out, os.W_OK) and os.access(out.parent, os.W_OK)
                return "unsealed" if made.SEAL not in found and ours else "ready"
    foreign = made.foreign_file(out, recipe.files(found))
    if foreign:
        raise CannotMake(f"{out} must be replaced but holds {foreign}, not made by this command: move it away first")
    return "replace"


@contextlib.contextmanager
def locked(out: Path):
    """Let one run at a time make the set, but where the file system has no locks."""
    with (out.parent / f".{out.name}.lock").open("w") as file:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another run is making {out}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(recipe: Recipe, out: Path, wanted: dict, force: bool) -> str:
    """Make the set at `out` unless it is there; returns the line to print.

    Args: wanted, the manifest without what is known only when the set is made: checksum and length.
    """
    ready = f"{out} is already there with these parameters: nothing to do"
    making = f".{out.name}.making-"
    temporary.remove_ended(out.parent, making, unknown_after=DAY)  # what interrupted runs left
    if state_of(recipe, out, wanted, force) == "ready":
        return ready
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out):
        state = state_of(recipe, out, wanted, force)
        if state == "ready":
            return ready
        start = time.perf_counter()
        work = Path(tempfile.mkdtemp(prefix=f"{making}{temporary.label()}-", dir=out.parent))
        try:
            if state == "unsealed":
                (work / made.NAME).write_text(_complete(recipe, out, recipe.read(out)))
                (work / made.NAME).replace(out / made.NAME)
                return f"{out} is already there with these parameters; {made.NAME} has its own checksum now"
            manifest = dict(wanted)
            (work / "new").mkdir()
            recipe.build(work / "new", manifest)
            (work / "new" / made.NAME).write_text(_complete(recipe, work / "new", manifest))
            if state == "replace":
                out.rename(work / "old")
            (work / "new").rename(out)
        finally:
            with contextlib.suppress(OSError):  # stopped between the two: the old set is better than none
                if (work / "old").is_dir() and not os.path.lexists(out):
                    (work / "old").rename(out)
            shutil.rmtree(work, ignore_errors=True)
    return f"made {out}: {recipe.summary(manifest)}, {time.perf_counter() - start:.1f} s"


def _complete(recipe: Recipe, folder: Path, manifest: dict) -> str:
    """Add to the manifest what is known only when the files are there: checksums and lengths. Returns its text."""
    manifest |= made.sums(folder, recipe.files(manifest))
    manifest[made.SEAL] = made.seal(manifest)
    return json.dumps(manifest, indent=1) + "\n"


def number(low: int, high: int) -> Callable[[str], int]:
    """A type for argparse: a whole number between two others."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return parse


def decimal(low: float, high: float) -> Callable[[str], float]:
    """A type for argparse: a number such as 4 or 0.5 between two others."""

    def parse(text: str) -> float:
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or not low <= float(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a number from {low:g} to {high:g}, got {text!r}")
        return float(text)

    return parse


def parser(command: str, description: str, name: str) -> argparse.ArgumentParser:
    """A parser with --out (default: the folder `name` among the data sets), --seed and --force.

    A wrong argument is one line on stderr and exit status 2.
    """
    try:
        place = data_root() / name
    except RuntimeError:
        place = Path(os.environ["DLOJZ_DATA"]) / name  # of nobody: refused as --out is
    found = argparse.ArgumentParser(description=description, allow_abbrev=False)
    found.add_argument("--out", type=Path, default=place, help="folder [%(default)s]")
    found.add_argument("--seed", type=number(0, 10**18 - 1), help="another seed, another draw [0]")
    found.add_argument("--force", action="store_true", help="replace a set made by this command")
    found.error = lambda message: found.exit(2, f"{command}: {message} (--help shows all)\n")
    return found


def run(recipe: Recipe, args: argparse.Namespace, wanted: Callable[[], dict]) -> int:
    """Make the set that the arguments ask for; returns the exit status: 0, or 1 with one line on stderr."""
    out = args.out
    try:
        out = folders.resolve(out, "--out")
        say(make(recipe, out, wanted(), args.force))
        return 0
    except (CannotMake, folders.NoFolder) as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted: nothing was made; run the command again"
    except OSError as error:
        problem = folders.explain(error, out, "--out")
    print(f"{recipe.command}: {problem}", file=sys.stderr)
    return 1


def say(line: str) -> None:
    """Print a line; where nobody can read it, the set is made all the same."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer


def stop_cleanly() -> None:
    """Clean up on SIGTERM as after Ctrl-C."""

    def stop(signum, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def in_threads(work: Callable, tasks: Iterable, threads: int, stop: threading.Event | None = None) -> None:
    """Call work(task) for each of the tasks, in so many threads. All have ended when this returns or raises.

    Ctrl-C and SIGTERM are only noted here, and raise KeyboardInterrupt in the end: in the middle of a lock's own code
    an exception would leave it locked, and the threads waiting. stop: set when it ends, also early, for `work` to see.
    """
    noted: list[int] = []
    stops = signal.SIGINT, signal.SIGTERM
    before = {one: signal.signal(one, lambda number, _: noted.append(number)) for one in stops}
    pool = ThreadPoolExecutor(threads)
    try:
        for future in [pool.submit(work, task) for task in tasks]:
            while not (noted or future.done()):
                wait([future], timeout=0.1)
            if noted:
                break
            future.result()
    finally:
        if stop is not None:
            stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        for one, handler in before.items():
            signal.signal(one, handler)
    if noted:
        raise KeyboardInterrupt
