"""Read a practical work's one source, `solutions/NN_name.py`, and find its balises.

Where the solutions are not there, or cannot be read, the trainee notebook stands in: it has all but the solutions.
This module runs in every notebook, so it reads the percent format with the standard library alone.
The rules that a source must obey are in `dlojz_tp.authoring.rules`.
"""

import ast
import dataclasses
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from dlojz_tp.works.cells import of_ranks

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = ROOT / "solutions"
NOTEBOOKS = ROOT / "notebooks"

BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"
HEADING = re.compile(r"^#+ Balise (\d+) · (.+?)( · further)?(?: · about (\d+) min)?\s*$", re.MULTILINE)
_TITLE = re.compile(r"^# (.+?)(?: · about (\d+) min(?:, core (\d+))?)?\s*$", re.MULTILINE)
_CELL = re.compile(r"^# %%(?P<options>(?:\s.*)?)$")  # `# %%ranks` is a line of a cell
_TAG = re.compile(r"balise-(\d+)")


class UnknownWork(Exception):
    """No practical work has this name; the message lists those there are."""


@dataclass(frozen=True)
class Cell:
    """One cell of a source. text: its lines as in the file. line: number of its first line in the file."""

    kind: str  # "code", "markdown", or "ranks": code under `%%ranks`, whose names the notebook does not have
    options: str  # what follows "# %%"
    text: str
    line: int

    @property
    def balise(self) -> int | None:
        """The number of the balise written in this cell, or None."""
        found = _TAG.search(self.options)
        return int(found[1]) if found and self.kind == "code" else None


@dataclass(frozen=True)
class Balise:
    """number; title; code: the cell with the solution; answers: names that the check is given, in order.

    further: not of the core. minutes: what its heading says; 0 where it says nothing.
    """

    number: int
    title: str
    code: str
    answers: tuple[str, ...]
    further: bool = False
    minutes: int = 0

    @property
    def about(self) -> str:
        """Its mark and its minutes, as in its heading."""
        return " · further" * self.further + f" · about {self.minutes} min" * bool(self.minutes)


@dataclass(frozen=True)
class Work:
    """A practical work: name ("01_gpu_acceleration"), title, its cells, its balises by number.

    minutes, core: of all of it and of its core, as its title says; 0 where it says nothing.
    solved: whether its balises' codes are solutions, and not the holes of the trainee notebook.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    balises: dict[int, Balise]
    minutes: int = 0
    core: int = 0
    solved: bool = True

    @property
    def module(self) -> str:
        """The name without its number: the module in `dlojz_tp.judging.checks` that judges it."""
        return self.name.split("_", 1)[1]


def names() -> list[str]:
    """The names of all practical works, in order."""
    solutions = sorted(path.stem for path in SOLUTIONS.glob("[0-9][0-9]_*.py"))
    return solutions or sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def find(name: str) -> Work:
    """Read the practical work `name`. Raises UnknownWork with the names that exist."""
    known, holes = names(), _holes(name)
    if name not in known:
        if not known:
            todo = "install the course with `pip install --editable` and the folder of its clone"
            raise UnknownWork(f"no folder {NOTEBOOKS.name}/ beside the package: {todo}")
        raise UnknownWork(f"no practical work is called {name!r}; there are: {', '.join(known)}")
    try:
        work = read(SOLUTIONS / f"{name}.py")
    except (OSError, UnicodeDecodeError):  # left out, closed to others, encrypted
        if not holes.is_file():
            raise
        return guided(name)
    return work if work.balises or not holes.is_file() else guided(name)


def guided(name: str) -> Work:
    """The practical work `name` as its trainee notebook has it. Raises OSError where that cannot be read."""
    return of_notebook(name, _holes(name).read_text(encoding="utf-8"))


def _holes(name: str) -> Path:
    return NOTEBOOKS / f"{name}.ipynb"


@functools.lru_cache(maxsize=32)
def of_notebook(name: str, text: str) -> Work:
    """The practical work in the text of its trainee notebook."""
    parts = []
    for cell in json.loads(text)["cells"]:
        lines = "".join(cell["source"]).splitlines()
        if cell["cell_type"] == "markdown":
            parts += ["# %% [markdown]", *(f"# {line}" for line in lines)]
        else:
            parts += [f"# %% tags={json.dumps(cell['metadata'].get('tags', []))}", *lines]
    return dataclasses.replace(_parse(name, "\n".join(parts)), solved=False)


def full_name(name: str) -> str:
    """The work that alone has the number `name` ("09", "9"); any other name as it is."""
    found = [known for known in names() if name.isdecimal() and int(known[:2]) == int(name)]
    return found[0] if len(found) == 1 else name


def split_cells(text: str) -> list[Cell]:
    """Cut a source in percent format into its cells; what comes before the first marker is a code cell."""
    cells, options, start, lines = [], "", 1, []

    def close():
        if any(line.strip() for line in lines) or cells or options:
            text = "\n".join(lines).strip("\n")
            kind = "markdown" if "[markdown]" in options else "ranks" if of_ranks(text) else "code"
            cells.append(Cell(kind, options, text, start))

    for number, line in enumerate(text.splitlines(), 1):
        marker = _CELL.match(line)
        if marker:
            close()
            options, start, lines = marker["options"].strip(), number + 1, []
        else:
            lines.append(line)
    close()
    return cells


def read(path: Path) -> Work:
    """Parse a source file. Says nothing about its faults: see `dlojz_tp.authoring.rules.verify`."""
    return _parse(path.stem, path.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=32)  # tests ask for the same source a hundred times a balise
def _parse(name: str, text: str) -> Work:
    cells = split_cells(text)
    prose = "\n".join(uncomment(cell.text) for cell in cells if cell.kind == "markdown")
    headings = {int(number): found for number, *found in HEADING.findall(prose)}
    answers = {}
    for cell in cells:
        if cell.kind == "code":
            answers.update(checks_in(cell.text))
    balises = {}
    for cell in cells:
        if cell.balise is not None:
            title, further, minutes = headings.get(cell.balise, ("", "", ""))
            given = answers.get(cell.balise, ())
            balises[cell.balise] = Balise(cell.balise, title, cell.text, given, bool(further), int(minutes or 0))
    title = _TITLE.search(prose)
    title, minutes, core = title.groups() if title else (name, None, None)
    return Work(name, title, tuple(cells), dict(sorted(balises.items())), int(minutes or 0), int(core or minutes or 0))


def uncomment(text: str) -> str:
    """The markdown of a markdown cell: its lines without the leading "# "."""
    return "\n".join(line[2:] if line.startswith("# ") else line.lstrip("#") for line in text.splitlines())


def without_markers(code: str) -> str:
    """A cell of a balise as the solution notebook shows it: whole, without the marker lines."""
    return "\n".join(line for line in code.splitlines() if line.strip() not in (BEGIN, END))


def checks_in(code: str) -> dict[int, tuple[str, ...]]:
    """Find calls `tp.check(number, name, ...)` in a cell: {number: names of the answers}."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return {}
    found = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "check"
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "tp"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found[node.args[0].value] = tuple(a.id for a in node.args[1:] if isinstance(a, ast.Name))
    return found
