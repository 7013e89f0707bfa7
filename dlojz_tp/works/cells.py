"""Read a notebook cell as IPython does: magics (`%time`), shell commands (`!ls`) and help (`obj?`) beside Python."""

import ast
import contextlib
import re
import symtable
from collections.abc import Callable

OPENED = ("time", "timeit", "capture", "prun")  # cell magics whose body is Python that runs in the notebook
_OF_RANKS = re.compile(r"\s*(?:# )?%%ranks\b([^\n]*)")  # commented in a source, as jupytext writes it
_GIVEN = re.compile(r"--give[ =]+(\w+)")
_TODO = re.compile(r"^\s+todo\((\d+)\)", re.MULTILINE)
_BINDING = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+|class[ \t]+|import[ \t]+|from[ \t].*\bimport[ \t]+.*?)(\w+)"
    r"|^(\w+)[ \t]*(?::[^=\n]*)?=(?!=)"
    r"|\bas[ \t]+(\w+)",
    re.MULTILINE,
)


def parse(code: str, python: Callable[[str], list[ast.stmt]]) -> list[ast.stmt]:
    """The statements of a cell; none for a cell of another language.

    python: parses plain Python. What it raises for the cell as it is written passes through.
    """
    try:
        return python(code)  # first: a line that only looks like a magic is Python, and stays
    except Exception as error:
        refused = error
    body = code.lstrip("\n")
    while found := re.match(r"%%(\w+)[^\n]*\n?", body):
        if found[1] not in OPENED:
            return []
        body = body[found.end() :].lstrip("\n")
    if body != code:
        try:
            return python(body)
        except Exception as error:
            refused = error
    with contextlib.suppress(Exception):  # the reason to show speaks of the trainee's lines, not of the changed ones
        return python(_without_magics(body))
    raise refused


def _without_magics(code: str) -> str:
    """The cell in plain Python: magics are calls, and what `%time` runs is a statement of the cell."""
    from IPython.core.inputtransformer2 import TransformerManager

    changed = TransformerManager().transform_cell(code)
    if "get_ipython().run_line_magic('time'" not in changed:
        return changed
    return ast.unparse(_OpenTime().visit(ast.parse(changed)))


class _OpenTime(ast.NodeTransformer):
    def visit_Expr(self, node):  # noqa: N802  (the name that ast looks for)
        with contextlib.suppress(SyntaxError, ValueError):
            if ast.unparse(node).startswith("get_ipython().run_line_magic('time'"):
                return ast.parse(node.value.args[1].value).body or node
        return node


def of_ranks(code: str) -> bool:
    """Whether a cell begins with `%%ranks`: its names are those of the ranks, not the notebook's."""
    return bool(_OF_RANKS.match(code))


def _given_by_ranks(code: str) -> set[str]:
    return set(_GIVEN.findall(_OF_RANKS.match(code)[1]))


def holes_in(code: str) -> list[int]:
    """The balises whose `todo(number)` is still in the code, each once."""
    return [*dict.fromkeys(map(int, _TODO.findall(code)))]


def names_in(code: str) -> frozenset[str]:
    """The names that a cell which does not parse seems to bind, as its lines look."""
    if of_ranks(code):
        return frozenset(_given_by_ranks(code))
    return frozenset(name for found in _BINDING.findall(code) for name in found if name)


def names_made_by(code: str) -> set[str]:
    """The names that a cell binds at its top level, loops and `with` blocks included; functions' inner names not."""
    if of_ranks(code):
        return _given_by_ranks(code)
    try:
        table = symtable.symtable(code, "cell", "exec")
    except SyntaxError:
        return set()
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
