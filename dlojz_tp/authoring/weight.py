"""What each practical work weighs: lines of its check and of its bank, hints and answers a balise, processor time.

`tests/weight.toml` has the figures that were agreed on, and a test holds them: growth is a decision.
"""

import argparse
import json
import tomllib
from pathlib import Path

from dlojz_tp.authoring import banks, notebooks
from dlojz_tp.judging.checking import mistakes
from dlojz_tp.works import source
from dlojz_tp.works.source import ROOT

AGREED = ROOT / "tests" / "weight.toml"
SECONDS = ROOT / ".pytest_cache" / "v" / "dlojz" / "cpu_seconds"  # tests/cpu_seconds.py writes it
FIGURES = ("lines of check", "lines of bank", "hints a balise", "answers a balise")
MORE = 1.05  # times the figure that was agreed on


def of(work: source.Work) -> list[float]:
    """The FIGURES of a work."""
    answers = banks.of(work).answers
    hints = {(answer.balise, answer.slug) for answer in answers if answer.slug}
    lines = [_lines((mistakes.CHECKS / work.module).rglob("*.py")), _lines((banks.FOLDER / work.module).glob("*.py"))]
    return [*lines, *(round(len(each) / len(work.balises), 1) for each in (hints, answers))]


def too_heavy(work: source.Work, agreed: dict[str, list[float]]) -> list[str]:
    """A line for each figure of a work that has outgrown the one agreed on, or for a work that has none."""
    found = of(work)
    if work.name not in agreed:
        return [f"{work.name} has no figures in {AGREED.name}: add\n{line(work.name, found)}"]
    return [
        f"{work.name}: {figure:g} {name}, and {limit:g} were agreed on, {MORE - 1:.0%} more are free. Take something "
        f"out; or, where it is worth it, change the figure in tests/{AGREED.name} and say why in the commit (python -m "
        f"dlojz_tp weight {work.name[:2]} --write changes the figures of this work)."
        for name, figure, limit in zip(FIGURES, found, agreed[work.name])
        if figure > MORE * limit
    ]


def line(name: str, figures: list[float]) -> str:
    """A line of tests/weight.toml."""
    return f"{name} = [{', '.join(f'{figure:g}' for figure in figures)}]"


def main(argv: list[str]) -> int:
    """`python -m dlojz_tp weight`: the figures of works, and their seconds if `make test-all` has run here."""
    parser = argparse.ArgumentParser(prog="python -m dlojz_tp weight", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="WORK", help="practical works (default: all)")
    parser.add_argument("--write", action="store_true", help="agree on their figures as they are now, in the file")
    options = parser.parse_args(argv)
    paths = notebooks.chosen(options.names)
    if paths is None:
        return 2
    works = {path.stem: of(source.find(path.stem)) for path in paths}
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    print("".join(f"{head:>18}" for head in (*FIGURES, "CPU seconds" if seconds else "")))
    for name, found in works.items():
        spent = sum(value for key, value in seconds.items() if key.startswith(f"{name}|"))
        figures = "".join(f"{figure:18g}" for figure in found)
        print(f"{figures}{f'{spent:.0f}' if spent else '':>18}  {name}")
    if options.write:
        text = AGREED.read_text(encoding="utf-8")
        kept = tomllib.loads(text) if options.names else {}
        head = [line for line in text.splitlines() if line.startswith("#")]
        agreed = [line(*each) for each in sorted((kept | works).items())]
        AGREED.write_text("\n".join([*head, *agreed, ""]), encoding="utf-8")
    return 0


def _lines(paths) -> int:
    return sum(len(Path(path).read_text(encoding="utf-8").splitlines()) for path in paths)
