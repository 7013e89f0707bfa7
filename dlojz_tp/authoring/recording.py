"""Run the solutions at full size on a GPU, and record what they measure there."""

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from dlojz_tp.authoring import notebooks
from dlojz_tp.launch import place
from dlojz_tp.report.recorded import FOLDER
from dlojz_tp.works.source import SOLUTIONS

DONE = "done"
RUNS = SOLUTIONS.parent / "build" / "gpu"


# the works whose figures are worth most come first; those over ranks want as many GPUs
WORTH = (*range(10), 13, 14, 17, 15, 16, 10, 12, 22, 23, 21, 25, 19, 20, 11)
RANKS = (8, 9, *range(13, 21))
MOST_S, LEAST_S = 180, 30  # of one work where the time of all is limited


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp record [--into FOLDER] [--minutes M] [NAME ...]`: 0 if all went well, 1 if not, 2 for an
    unknown name.

    Each solution is executed in a separate kernel at full size; what it measures goes to `solutions/recorded/`, where
    all notebooks look for it, and beside it what a model of this card says, with its errors. The executed notebooks are
    put aside, also those in which a cell failed: the ones in `solutions/` stay as they are. One that fails does not
    keep the others from running. With one GPU, works over ranks are left out unless they are named.

    --minutes: no work begins when they are over, and none takes longer than three. What was recorded until then stays.
    The same command goes on with what is left: works that weren't begun, then those that failed.
    """
    import torch

    from dlojz_tp.training import gains

    parser = argparse.ArgumentParser(prog="python -m dlojz_tp record", description=__doc__)
    parser.add_argument("names", nargs="*", help="practical works (default: all)")
    parser.add_argument("--into", type=Path, default=RUNS, help=f"folder of the executed notebooks (default: {RUNS})")
    parser.add_argument("--minutes", type=float, default=0, help="for all works together (default: no limit)")
    options = parser.parse_args(argv)
    paths = notebooks.chosen(options.names)
    if paths is None:
        return 2
    if not torch.cuda.is_available():
        print("nothing to record: torch finds no GPU here (python -m dlojz_tp doctor says why)", file=sys.stderr)
        return 1
    cards = torch.cuda.device_count()
    print(f"{cards} × {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if cards == 1 and not options.names:
        others = [path.stem for path in paths if int(path.stem[:2]) in RANKS]
        print(f"left out, they want two GPUs or more: {', '.join(others)}", flush=True)
        paths = [path for path in paths if path.stem not in others]
    options.into.mkdir(parents=True, exist_ok=True)
    if options.minutes:
        paths = left(paths, options.into)
    failed, end = [], time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as state:  # gains of this run alone
        for number, path in enumerate(paths):
            start = time.monotonic()
            if options.minutes and end - start < LEAST_S:
                rest = ", ".join(each.stem for each in paths[number:])
                print(f"time is up; the same command goes on with {rest}", flush=True)
                break
            seconds = min(MOST_S, end - start) if options.minutes else None
            said = _run(path, options.into / f"{path.stem}.ipynb", state, seconds)
            print(f"{path.stem}: {said or DONE}, {time.monotonic() - start:.0f} s", flush=True)
            failed += [path.stem] * bool(said)
            if beside := gains.beside(path.stem):
                print(f"  {beside}", flush=True)
    print(f"figures: {FOLDER}\nnotebooks: {options.into}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def left(paths: list[Path], into: Path) -> list[Path]:
    """The works to record still, by worth: those without an executed notebook, then those that failed there."""
    tries = {path: _tried(path, into / f"{path.stem}.ipynb") for path in paths}
    worth = {f"{number:02}": rank for rank, number in enumerate(WORTH)}
    todo = [path for path in paths if tries[path] != DONE]
    return sorted(todo, key=lambda path: (tries[path] is not None, worth.get(path.stem[:2], len(WORTH))))


def _tried(path: Path, target: Path) -> str | None:
    """How this source's last run ended: DONE, or something else; None if there was none with this torch and GPU."""
    with contextlib.suppress(OSError, ValueError):
        kept = nbformat.read(target, as_version=4).metadata["dlojz_tp"]
        if kept["source_sha256"] == notebooks.source_hash(path) and kept.get("on") == _here():
            return kept["ended"]
    return None


def _here() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _run(path: Path, target: Path, state: str, seconds: float | None) -> str | None:
    """Execute one solution and write it to `target`, within `seconds`; None, or what went wrong in one line."""
    end, options = time.monotonic() + (seconds or 0), {}
    if seconds:
        options["timeout_func"] = lambda _: max(1.0, end - time.monotonic())
    try:
        notebook = notebooks.solution(path)
        about = notebook.metadata.setdefault("dlojz_tp", {})
        about.update(on=_here(), ended="failed")
        size = "small" if place.pretended() else "full"
        with notebooks.environment(DLOJZ_RECORD="1", DLOJZ_SCALE=size, DLOJZ_STATE=state):
            try:
                notebooks.execute(notebook, **options)
                about["ended"] = DONE
            finally:
                notebooks.write(notebook, target)
    except Exception as error:  # the others are still to run
        return f"failed, {_in_one_line(error)}"
    return None


def _in_one_line(error: Exception) -> str:
    name, text = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    return f"{name}: {(text.strip().splitlines() or [''])[0]}"
