"""Take the answers out of a file without running the file.

A notebook trains networks, draws figures and starts jobs. To judge an answer, only the statements that define it are
needed, and those that define what it uses. This is a backward slice over the names bound at the top level.
Source: M. Weiser, "Program Slicing", 1981.
"""

import ast
import builtins
import json
import symtable
from pathlib import Path

from dlojz_tp.source import Work


class Unreadable(Exception):
    """The file is missing or cannot be parsed; the message says why in one line."""


def statements(path: Path) -> list[ast.stmt]:
    """The top-level statements of a `.py` or `.ipynb` file, notebook magics left out.

    A notebook cell that does not parse is an error too, with its number. Raises Unreadable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise Unreadable(f"{path}: is not a text file in UTF-8") from None
    if path.suffix == ".ipynb":
        return [node for name, code in _notebook_cells(path, text) for node in _parse(name, code)]
    if path.suffix == ".py":
        return _parse(str(path), text)
    raise Unreadable(f"{path}: give a notebook (.ipynb) or a Python file (.py)")


def _notebook_cells(path, text):
    try:
        cells = json.loads(text)["cells"]
        codes = [c["source"] for c in cells if c["cell_type"] == "code"]
        codes = [code if isinstance(code, str) else "".join(code) for code in codes]
    except (ValueError, KeyError, TypeError):
        raise Unreadable(f"{path}: is not a notebook (no list of cells in it)") from None
    for number, code in enumerate(codes, 1):
        if code.startswith("%%"):  # a cell of another language
            continue
        lines = ["" if line.lstrip().startswith(("%", "!", "?")) else line for line in code.splitlines()]
        yield f"{path}, code cell {number}", "\n".join(lines)


def _parse(name, code):
    try:
        return ast.parse(code, filename=name).body
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or "?"
        reason = getattr(error, "msg", None) or str(error)
        raise Unreadable(f"{name}, line {line}: does not parse ({reason})") from None


def bound_names(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds."""
    from dlojz_tp.calm import names_made_by

    return names_made_by(ast.unparse(node))


def used_names(node: ast.AST) -> set[str]:
    """The global names that a statement reads, in functions defined by it too; their local names and builtins not."""
    found = set()
    tables = [symtable.symtable(ast.unparse(node), "statement", "exec")]
    while tables:
        table = tables.pop()
        whole = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (whole or s.is_global())}
        tables.extend(table.get_children())
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    return found - set(dir(builtins))


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


def load(path: Path, work: Work, numbers: list[int]) -> dict:
    """The namespace with the answers to balises `numbers` of `work`, as `path` defines them.

    What the file does not define itself (imports, sizes, given functions) comes from the practical work's own
    source, its solutions left out. Raises Unreadable; an exception of the file's own statements passes through.
    """
    theirs = statements(path)
    cells = [cell.text for cell in work.cells if cell.kind == "code" and cell.balise is None]
    given = [node for text in cells for node in _parse("", text) if not bound_names(node) <= {"tp"}]
    defined = set().union(*(bound_names(node) for node in theirs)) if theirs else set()
    answers = {name for number in numbers for name in work.balises[number].answers}
    nodes = needed(theirs, answers)
    missing = set().union(*(used_names(node) for node in nodes), set()) - defined
    namespace: dict = {"__name__": "__main__", "__builtins__": builtins}
    for node in [*needed(given, missing), *nodes]:
        if bound_names(node) == {"tp"}:  # opening the course again would hide the titles of this one
            continue
        module = ast.Module([node], type_ignores=[])
        exec(compile(module, str(path), "exec"), namespace)
    return namespace
