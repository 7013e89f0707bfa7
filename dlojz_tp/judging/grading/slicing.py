"""Take the answers out of a file without running the file.

A notebook trains networks, draws figures and starts jobs. To judge an answer, only the statements that define it are
needed, and those that define what it uses. This is a backward slice over the names bound at the top level.
A statement that changes what is needed (adds a method to a class, fills a table, registers a function) is needed too.
Source: M. Weiser, "Program Slicing", 1981.
"""

import __future__

import ast
import builtins
import contextlib
import functools
import json
import linecache
import os
import stat
import symtable
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from dlojz_tp.works import cells
from dlojz_tp.works.source import NOTEBOOKS, Cell, Work, checks_in, without_markers

MOST_BYTES = 100_000_000  # of a file, pictures included
MOST_CODE = 4_000_000  # characters of a file's code: its syntax tree takes some hundred times as much memory
MOST_STATEMENTS = 1 << 17  # of a file, whose names are remembered: each is looked at for every balise


class Unreadable(Exception):
    """The file is missing or cannot be parsed; the message says why in one line."""


class Gone(Unreadable):
    """The file is missing, or the disk can't read it: nobody knows its content."""


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
    return _read(path, read(path))


def read(path: Path) -> str:
    """The text of a file that a trainee handed in. Raises Unreadable for what is no file, or too large.

    A pipe is not waited for, and of a file without end no more is read than MOST_BYTES.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise Unreadable(f"{path}: is not a file")
            if found.st_size > MOST_BYTES:
                raise Unreadable(f"{path}: is too large ({found.st_size / 1e6:.0f} MB)")
            return (file.read(MOST_BYTES) or b"").decode("utf-8-sig")
    except OSError as error:
        raise Gone(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise Unreadable(f"{path}: is not a text file in UTF-8") from None


@functools.lru_cache(maxsize=8)
def _read(path, text):
    script = path.suffix.lower() == ".py"
    codes = [(str(path), text)] if script else _notebook_cells(path, text)
    if (size := sum(len(code) for _, code in codes)) > MOST_CODE:
        raise Unreadable(f"{path}: is too large ({size / 1e6:.0f} MB of code)")
    if script:
        return _parse(str(path), text), []
    nodes, broken = [], []
    for name, code in codes:
        try:
            for node in cells.parse(code, lambda python, name=name: _parse(name, python)):
                nodes += _ran(path, node) or [node]
        except Unreadable as error:
            broken.append(Broken(str(error), cells.names_in(code)))
    return nodes, broken


def _ran(path: Path, node: ast.stmt) -> list[ast.stmt]:
    """The statements of the file beside the notebook that `%run` runs; none for any other line."""
    try:
        magic, file = node.value.func.attr == "run_line_magic", ast.literal_eval(node.value.args[1]).split()[0]
        if magic and node.value.args[0].value == "run" and file.endswith(".py"):
            return statements(path.parent / file)[0]
    except (AttributeError, IndexError, ValueError, Unreadable):
        pass
    return []


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
    """The statements that define `names` or change them and, in turn, what these use, in their order.

    `from module import *` is always kept: nobody can see what it binds. Statements that only do (a call to
    `train()`, to `tp.check()`) define nothing and are left out.
    """
    binds = [{"*"} if _is_star(node) else bound_names(node) for node in nodes]
    changes = _changes(nodes)
    wanted, kept = set(names), set()
    while True:
        grown = {i for i, bound in enumerate(binds) if bound & wanted or changes[i] & wanted or "*" in bound}
        if grown == kept:
            return [nodes[i] for i in sorted(kept)]
        for i in grown - kept:
            wanted |= used_names(nodes[i])
        kept = grown


def _changes(nodes: list[ast.stmt]) -> list[frozenset[str]]:
    """Of each statement, the names whose values it changes without binding them.

    It does so by an assignment to an attribute or an item (`Class.step = step`, `TABLE["x"] = f`), by `setattr`, by a
    method of a container (`STEPS.append(f)`), and by a decorator that is handed a name or changes one. A method of any
    other object is taken for work that defines nothing (`optimizer.step()`).
    """
    changed = [_changed(node) for node in nodes]
    tables = {name for node in nodes if _is_table(node) for name in bound_names(node)}
    made = tables | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    inside = {
        node.name: each.stored | each.called & tables
        for node, each in zip(nodes, changed, strict=True)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    modules = frozenset().union(*(bound_names(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)))
    found = []
    for node, each in zip(nodes, changed, strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):  # what its body changes, it changes when it is called
            by_decorator = (inside[name] for name in each.decorators & inside.keys())
            names = (each.decorators & made).union(*by_decorator) - {node.name}
        else:
            names = each.stored | each.called & tables if each.calls <= tables else frozenset()
        found.append(names - modules)
    return found


@dataclass(frozen=True)
class _Changed:
    """What a statement may change, as names. stored: by an assignment. called: by a method. decorators: what these use.

    calls: of the lines that only call something, the name whose method it is; "" for a function.
    """

    stored: frozenset[str]
    called: frozenset[str]
    calls: frozenset[str]
    decorators: frozenset[str]


@functools.lru_cache(maxsize=MOST_STATEMENTS)
def _changed(node: ast.stmt) -> _Changed:
    parts = [*ast.walk(node)]
    stored = {_root(part) for part in parts if isinstance(getattr(part, "ctx", None), ast.Store | ast.Del)
              and not isinstance(part, ast.Name)}  # fmt: skip
    done = [part for part in parts if isinstance(part, ast.Call)]
    stored |= {_root(call.args[0]) for call in done if ast.unparse(call.func) in SETTERS and call.args}
    alone = [part.value for part in parts if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call)]
    methods = done if isinstance(node, ast.FunctionDef | ast.ClassDef) else alone
    called = {_root(call.func) for call in methods if isinstance(call.func, ast.Attribute)}
    calls = {_root(call.func) if isinstance(call.func, ast.Attribute) else "" for call in alone
             if ast.unparse(call.func) not in SETTERS}  # fmt: skip
    arguments = {part.arg for part in parts if isinstance(part, ast.arg)}
    decorators = [part for each in getattr(node, "decorator_list", []) for part in ast.walk(each)]
    used = {part.id for part in decorators if isinstance(part, ast.Name)}
    if used and isinstance(node, ast.FunctionDef):  # `@patch` finds the class in what is annotated
        notes = [arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg) and arg.annotation]
        used |= {str(getattr(p, "id", None) or getattr(p, "value", "")) for note in notes for p in ast.walk(note)}
    return _Changed(*map(frozenset, (stored - arguments - {""}, called - arguments - {""}, calls, used)))


SETTERS = ("setattr", "delattr")
CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "SimpleNamespace"}


def _is_table(node: ast.stmt) -> bool:
    """Whether a statement binds a container."""
    value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in CONTAINERS
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def _root(node: ast.AST) -> str:
    """The name that an expression of attributes and items begins with; "" where it begins with none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


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
    """What the last `tp.check(number, ...)` of a file saw: names bound above it, not below it."""
    checks = [i for i, node in enumerate(nodes) if "check" in _text(node) and number in checks_in(_text(node))]
    if not checks:
        return nodes
    above = nodes[: checks[-1]]
    taken = frozenset().union(*map(bound_names, above))
    below = zip(nodes[checks[-1] :], _changes(nodes)[checks[-1] :], strict=True)
    return above + [node for node, changed in below if not (bound_names(node) | changed) & taken]


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


@contextlib.contextmanager
def modules_beside(path: Path):
    """Inside, a file can import the modules beside it, if nothing else has their name."""
    folder = str(path.resolve().parent)
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name, module in list(sys.modules.items()):  # the next file has its own of this name
            if str(getattr(module, "__file__", None) or "").startswith(folder + os.sep):
                del sys.modules[name]


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
    namespace: dict = {"__name__": "__main__", "__builtins__": builtins} | STAND_INS
    flags = {id(node): flag for node, flag in zip(nodes, _future_flags(nodes), strict=True)}
    for node in [*needed(given, missing), *taken]:
        if bound_names(node) == {"tp"}:  # opening the course again would hide the titles of this one
            continue
        tree, flag = ast.Module([node], type_ignores=[]), flags.get(id(node), 0)
        try:
            exec(compile(tree, node.place, "exec", flag, dont_inherit=True), namespace)
        except Exception:
            if bound_names(node) and not isinstance(node, ast.For | ast.While):
                raise
            # It failed in the notebook too. A loop binds its variable in passing: an answer may only share its name.
    return namespace


def _future_flags(nodes: list[ast.stmt]) -> list[int]:
    """Of each statement, the compiler's flags that `from __future__ import` has set above, as in a notebook."""
    flags, found = 0, []
    for node in nodes:
        found.append(flags)
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for name in node.names:
                flags |= getattr(getattr(__future__, name.name, None), "compiler_flag", 0)
    return found


class _Shell:
    """In place of the notebook's shell: whatever is asked of it, it does nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: []


STAND_INS = {"display": lambda *_, **__: None, "get_ipython": _Shell}


def untouched(nodes: list[ast.stmt], work: Work, number: int) -> bool:
    """Whether the answers to a balise still are what the course's own notebook gives."""
    try:
        given, _ = statements(NOTEBOOKS / f"{work.name}.ipynb")
    except Unreadable:
        return False
    # a hole may stand in what an answer uses, and the answer itself be given
    holes = (bound_names(node) for node in given if number in cells.holes_in(_text(node)))
    names = set(work.balises[number].answers).union(*holes)
    both = []
    for each in (nodes, given):
        last = {name: node for node in each for name in bound_names(node) & names}
        both.append({name: _text(node) for name, node in last.items()})
    return both[0] == both[1]
