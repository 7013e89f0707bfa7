"""Take the answers out of a file without running the file.

A notebook trains networks, draws figures and starts jobs. To judge an answer, only the statements that define it are
needed, and those that define what it uses. This is a backward slice over the names bound at the top level.
Source: M. Weiser, "Program Slicing", 1981.
"""

import ast
import builtins
import functools
import json
import linecache
import symtable
import warnings
from dataclasses import dataclass
from pathlib import Path

from dlojz_tp.works import cells
from dlojz_tp.works.source import Cell, Work, checks_in, without_markers

MOST_STATEMENTS = 1 << 17  # of a file, whose names are remembered: each is looked at for every balise


class Unreadable(Exception):
    """The file is missing or cannot be parsed; the message says why in one line."""


@dataclass(frozen=True)
class Broken:
    """A notebook cell that does not parse. why: one line. names: what it seems to bind."""

    why: str
    names: frozenset[str]


def statements(path: Path) -> tuple[list[ast.stmt], list[Broken]]:
    """The top-level statements of a `.py` or `.ipynb` file, and the notebook cells that do not parse.

    Raises Unreadable, for a `.py` file that does not parse too.
    """
    if path.suffix.lower() not in (".ipynb", ".py"):
        raise Unreadable(f"{path}: give a notebook (.ipynb) or a Python file (.py)")
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise Unreadable(f"{path}: is not a file")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise Unreadable(f"{path}: is not a text file in UTF-8") from None
    return _read(path, text)


@functools.lru_cache(maxsize=8)
def _read(path, text):
    if path.suffix.lower() == ".py":
        return _parse(str(path), text), []
    nodes, broken = [], []
    for name, code in _notebook_cells(path, text):
        try:
            nodes += cells.parse(code, lambda python, name=name: _parse(name, python))
        except Unreadable as error:
            broken.append(Broken(str(error), cells.names_in(code)))
    return nodes, broken


def _notebook_cells(path, text):
    try:
        codes = [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        codes = [code if isinstance(code, str) else "".join(code) for code in codes]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unreadable(f"{path}: is not a notebook (no list of cells in it)") from None
    return [(f"{path}, code cell {number}", code) for number, code in enumerate(codes, 1)]


def _parse(name, code):
    try:
        with warnings.catch_warnings(action="ignore"):  # of "\\d" in a text, once for each balise
            nodes = ast.parse(code, filename=name).body
        for node in nodes:
            _text(node)
            node.place = name
        if not name.lower().endswith(".py"):  # a cell: tracebacks quote its lines, as in a notebook
            linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
        return nodes
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or "?"
        reason = getattr(error, "msg", None) or str(error)
        raise Unreadable(f"{name}, line {line}: does not parse ({reason})") from None
    except (RecursionError, MemoryError):
        raise Unreadable(f"{name}: does not parse (nested too deeply)") from None


@functools.lru_cache(maxsize=MOST_STATEMENTS)
def _text(node: ast.stmt) -> str:
    return ast.unparse(node)


@functools.lru_cache(maxsize=MOST_STATEMENTS)
def bound_names(node: ast.stmt) -> frozenset[str]:
    """The names that a top-level statement binds."""
    return frozenset(cells.names_made_by(_text(node)))


@functools.lru_cache(maxsize=MOST_STATEMENTS)
def used_names(node: ast.stmt) -> frozenset[str]:
    """The global names that a statement reads, in functions defined by it too; their local names and builtins not."""
    found = set()
    tables = [symtable.symtable(_text(node), "statement", "exec")]
    while tables:
        table = tables.pop()
        whole = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (whole or s.is_global())}
        tables.extend(table.get_children())
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    return frozenset(found - set(dir(builtins)))


def needed(nodes: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """The statements that define `names` and, in turn, what they use, in their order.

    `from module import *` is always kept: nobody can see what it binds. Statements that only do (a call to
    `train()`, to `tp.check()`) define nothing and are left out.
    """
    binds = [{"*"} if _is_star(node) else bound_names(node) for node in nodes]
    wanted, kept = set(names), set()
    while True:
        grown = {i for i, bound in enumerate(binds) if bound & wanted or "*" in bound}
        if grown == kept:
            return [nodes[i] for i in sorted(kept)]
        for i in grown - kept:
            wanted |= used_names(nodes[i])
        kept = grown


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def opened(nodes: list[ast.stmt]) -> str | None:
    """The practical work that the statements open with `course.open`; None if they open none."""
    calls = [call for node in nodes if "course.open" in _text(node) for call in ast.walk(node)]
    for call in calls:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "course.open" and call.args:
            name = call.args[0]
            if isinstance(name, ast.Name):  # NAME = "02_mixed_precision" stands above
                named = [n.value for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name.id]
                name = named[-1] if named else None
            return getattr(name, "value", None)
    return None


def seen_by_check(nodes: list[ast.stmt], number: int) -> list[ast.stmt]:
    """What the last `tp.check(number, ...)` of a file saw: names that stand above it are not those bound below it."""
    checks = [i for i, node in enumerate(nodes) if "check" in _text(node) and number in checks_in(_text(node))]
    if not checks:
        return nodes
    above = nodes[: checks[-1]]
    taken = frozenset().union(*map(bound_names, above))
    return above + [node for node in nodes[checks[-1] :] if not bound_names(node) & taken]


def caught_up(nodes: list[ast.stmt], work: Work, judged: int) -> list[ast.stmt]:
    """The statements with each `tp.catch_up(n)` replaced by what it defines: the course's answers 1 to n.

    After `tp.catch_up("further")` those of balises that are further follow the holes that still stand, as in a
    notebook; not that of the balise which is judged.
    """
    found, stand_in = [], set()
    for node in nodes:
        last = _caught_up_to(node)
        if last == "further":
            stand_in = {n for n, balise in work.balises.items() if balise.further and n != judged}
            numbers = []
        else:
            numbers = range(1, last + 1) if last else stand_in & {*cells.holes_in(_text(node))}
            found += [] if last else [node]
        for number in numbers:
            if number in work.balises:
                found += _answer(number, work.balises[number].code)
    return found


def by_course(nodes: list[ast.stmt], names: tuple[str, ...]) -> bool:
    """Whether one of `names` is bound last by the course's own code."""
    last = {name: node for node in nodes for name in bound_names(node) & set(names)}
    return any(node.place.startswith(COURSE) for node in last.values())


def caught_up_below(nodes: list[ast.stmt], seen: list[ast.stmt]) -> bool:
    """Whether the course's own code binds names anew below the check, which saw only `seen` of `nodes`."""
    of_all, of_seen = (sum(node.place.startswith(COURSE) for node in each) for each in (nodes, seen))
    return of_all > of_seen


COURSE = "<catch_up, "  # begins the name of the place where the course's own answers stand


@functools.lru_cache(maxsize=64)
def _answer(number: int, code: str) -> list[ast.stmt]:
    return _parse(f"{COURSE}balise {number}>", without_markers(code))


def _caught_up_to(node: ast.stmt) -> int | str | None:
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "tp.catch_up" and len(call.args) == 1:
        wanted = call.args[0]
        if isinstance(wanted, ast.Constant) and (isinstance(wanted.value, int) or wanted.value == "further"):
            return wanted.value
    return None


@functools.lru_cache(maxsize=8)
def _given(all_cells: tuple[Cell, ...]) -> list[ast.stmt]:
    codes = [cell for cell in all_cells if cell.kind == "code" and cell.balise is None]
    nodes = [node for cell in codes for node in _parse(f"<given, line {cell.line}>", cell.text)]
    return [node for node in nodes if not bound_names(node) <= {"tp"}]


def load(nodes: list[ast.stmt], broken: list[Broken], work: Work, number: int) -> dict:
    """The namespace with the answers to balise `number` of `work`, as the statements of a file define them.

    What the file does not define itself (imports, sizes, given functions) comes from the practical work's own
    source, its solutions left out. Raises Unreadable for a cell that is needed and does not parse; an exception of the
    file's own statements passes through.
    """
    given = _given(work.cells)
    defined = frozenset().union(*map(bound_names, nodes))
    answers = set(work.balises[number].answers)
    taken = needed(nodes, answers)
    missing = frozenset().union(*map(used_names, taken)) - defined
    unknown = (answers - defined) | (missing - frozenset().union(*map(bound_names, given)))
    for cell in broken:
        if cell.names & unknown:
            raise Unreadable(cell.why)
    namespace: dict = {"__name__": "__main__", "__builtins__": builtins}
    for node in [*needed(given, missing), *taken]:
        if bound_names(node) == {"tp"}:  # opening the course again would hide the titles of this one
            continue
        exec(compile(ast.Module([node], type_ignores=[]), node.place, "exec"), namespace)
    return namespace
