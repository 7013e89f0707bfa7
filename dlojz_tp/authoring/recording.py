"""Run the solutions at full size on a GPU, and record what they measure there."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from dlojz_tp.authoring import notebooks
from dlojz_tp.report.recorded import FOLDER
from dlojz_tp.works.source import SOLUTIONS

RUNS = SOLUTIONS.parent / "build" / "gpu"


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp record [--into FOLDER] [NAME ...]`: 0 if all went well, 1 if not, 2 for an unknown name.

    Each solution is executed in a separate kernel at full size; what it measures goes to `solutions/recorded/`, where
    all notebooks look for it, and beside it what a model of this card says, with its errors. The executed notebooks are
    put aside, also those in which a cell failed: the ones in `solutions/` stay as they are. One that fails does not
    keep the others from running.
    """
    import torch

    from dlojz_tp.training import gains

    parser = argparse.ArgumentParser(prog="python -m dlojz_tp record", description=__doc__)
    parser.add_argument("names", nargs="*", help="practical works (default: all)")
    parser.add_argument("--into", type=Path, default=RUNS, help=f"folder of the executed notebooks (default: {RUNS})")
    options = parser.parse_args(argv)
    paths = notebooks.chosen(options.names)
    if paths is None:
        return 2
    if not torch.cuda.is_available():
        print("nothing to record: torch finds no GPU here (python -m dlojz_tp doctor says why)", file=sys.stderr)
        return 1
    cards = torch.cuda.device_count()
    print(f"{cards} × {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if cards == 1:
        print("one GPU: what needs several ranks runs on the CPU, at small size, and is not recorded", flush=True)
    options.into.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as state:  # gains of this run alone
        for path in paths:
            start = time.monotonic()
            said = _run(path, options.into / f"{path.stem}.ipynb", state)
            print(f"{path.stem}: {said or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
            failed += [path.stem] * bool(said)
            if beside := gains.beside(path.stem):
                print(f"  {beside}", flush=True)
    print(f"figures: {FOLDER}\nnotebooks: {options.into}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(path: Path, target: Path, state: str) -> str | None:
    """Execute one solution and write it to `target`; None, or what went wrong in one line."""
    try:
        notebook = notebooks.solution(path)
        with notebooks.environment(DLOJZ_RECORD="1", DLOJZ_SCALE="full", DLOJZ_STATE=state):
            try:
                notebooks.execute(notebook)
            finally:
                notebooks.write(notebook, target)
    except Exception as error:  # the others are still to run
        return f"failed, {_in_one_line(error)}"
    return None


def _in_one_line(error: Exception) -> str:
    name, text = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    return f"{name}: {(text.strip().splitlines() or [''])[0]}"
