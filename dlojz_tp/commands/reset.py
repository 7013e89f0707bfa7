"""`python -m dlojz_tp reset`: forget which balises have passed, what was guessed and what was measured."""

import argparse
import sys
from pathlib import Path

from dlojz_tp.commands import lab
from dlojz_tp.works import source, state

KINDS = "{}.json", "gains/{}.*.json", "guesses/{}.json", "races/{}.json"  # of what is kept of a work


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp reset [--work FOLDER] [NAME ...]`; notebooks stay. 2 for a work that does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m dlojz_tp reset",
        description="Forget which balises have passed, what was guessed and what was measured. Your notebooks stay as "
        "they are: to begin one again, move it away and run `lab`.",
    )
    parser.add_argument("names", metavar="NN_name", nargs="*", help="practical works (default: all)")
    parser.add_argument("--work", type=Path, help=f"the work folder [{lab.usual_work()}]")
    options = parser.parse_args(argv)
    options.names = [source.full_name(name) for name in options.names]
    if unknown := sorted(set(options.names) - set(source.names())):
        print(f"reset: no practical work is called {', '.join(unknown)}", file=sys.stderr)
        return 2
    work = (options.work or lab.usual_work()).expanduser().absolute()
    if options.work and not (work / state.WORK).is_file():
        print(f"reset: {work} is no work folder: `lab` has not made it", file=sys.stderr)
        return 2
    folder = state.folder(work)
    names = options.names or ["[0-9][0-9]_*"]
    kept = [path for kind in KINDS for name in names for path in folder.glob(kind.format(name))]
    for path in kept:
        path.unlink(missing_ok=True)
    what = ", ".join(sorted({path.name.split(".")[0] for path in kept})) or "there was nothing"
    print(f"forgotten: {what} (in {folder}); the notebooks are as they were")
    return 0
