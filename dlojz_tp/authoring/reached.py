"""What of a Python file matters to some of its names: statements, as trees without comments, docstrings and layout."""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path

from dlojz_tp.works.source import ROOT

LEFT_OUT = {"ctx", "kind", "type_comment"}
DEFS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def tree(node) -> list | str:
    """A syntax tree as nested lists, the same from all versions of Python and whatever the layout."""
    if isinstance(node, ast.AST):
        fields = [(name, tree(value)) for name, value in ast.iter_fields(node) if name not in LEFT_OUT]
        return [type(node).__name__, *((name, value) for name, value in fields if value not in ("None", []))]
    return [tree(one) for one in node if not _says_only(one)] if isinstance(node, list) else repr(node)


def from_names(path: Path, names: set[str], folder: Path) -> list:
    """The trees that `names` of a module need, with what they import from other modules in `folder`."""
    found, seen, waiting = [], set(), [(path, frozenset(names))]
    while waiting:
        path, names = waiting.pop()
        if (path, names) in seen:
            continue
        seen.add((path, names))
        nodes = statements(path, lambda node, names=names: not names or bool(binds(node) & names))
        used = names | _used(nodes)
        for node in nodes:
            inside = _imported(node, used, folder) if isinstance(node, ast.ImportFrom) else []
            waiting += inside
            found += [] if inside else [tree(node)]
    return found


def statements(path: Path, chosen: Callable[[ast.AST], bool]) -> list[ast.AST]:
    """The statements at the top of a file that are chosen, and those that bind a name which these use.

    One that binds nothing may do something to anything: it counts as if it was chosen, unless it calls `bank`.
    """
    nodes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if not _says_only(node)]
    kept = [chosen(node) or not (binds(node) or bank_calls(node)) for node in nodes]
    while True:
        used = _used(node for node, keep in zip(nodes, kept) if keep)
        grown = [keep or bool(binds(node) & used) and not bank_calls(node) for node, keep in zip(nodes, kept)]
        if grown == kept:
            return [node for node, keep in zip(nodes, kept) if keep]
        kept = grown


def binds(node: ast.AST) -> set[str]:
    """The names that a statement gives a module."""
    if isinstance(node, DEFS):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def bank_calls(node: ast.AST) -> list[ast.Call]:
    """The calls `bank.hint(...)`, `bank.slip(...)`, … in a statement of a bank of answers."""
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    return [one for one in calls if isinstance(one.func.value, ast.Name) and one.func.value.id == "bank"]


def _says_only(node) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _used(nodes: Iterable[ast.AST]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _imported(node: ast.ImportFrom, used: set[str], folder: Path) -> list[tuple[Path, frozenset[str]]]:
    """(file, names) of what a statement imports, of the names `used`, from modules in `folder`; no names: all of it."""
    base, found = ROOT.joinpath(*(node.module or "").split(".")), []
    for alias in (one for one in node.names if (one.asname or one.name) in used):
        for place, names in ((base / alias.name, ()), (base, {alias.name})):
            path = next((one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()), None)
            if path and folder in path.parents:
                found.append((path, frozenset(names)))
                break
    return found
