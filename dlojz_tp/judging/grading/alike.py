"""Which answers are the same but for names, comments and layout."""

import ast
import builtins
import hashlib
from collections import defaultdict

from dlojz_tp.judging.grading import slicing
from dlojz_tp.works.source import Work

SMALL = 80  # nodes of the syntax tree: who writes a shorter answer well often writes it as others do


def mark(nodes: list[ast.stmt], work: Work, number: int) -> tuple[str, int]:
    """What equal answers to a balise have in common: a hash, and how many nodes of the syntax tree an answer has.

    nodes: the statements of the file. Counted are those that define the answer, without what the course gives.
    """
    given = {slicing._text(node) for node in slicing._given(work.cells)}
    answers = work.balises[number].answers
    seen = slicing.seen_by_check(nodes, number)
    own = [
        node
        for node in slicing.needed(seen, set(answers))
        if not isinstance(node, ast.Import | ast.ImportFrom) and slicing._text(node) not in given
    ]
    tree = ast.parse("\n".join(slicing._text(node) for node in own))  # a copy, to be changed
    _plain(tree)
    _renamed(tree, set(answers))
    text = ast.dump(tree, annotate_fields=False)
    return hashlib.sha256(text.encode()).hexdigest(), sum(1 for _ in ast.walk(tree))


def _plain(tree: ast.AST):
    """Take out docstrings and annotations."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
            node.body = [_without_annotation(n) for n in kept if not (isinstance(n, ast.AnnAssign) and n.value is None)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None


def _without_annotation(node: ast.stmt) -> ast.stmt:
    return ast.Assign([node.target], node.value) if isinstance(node, ast.AnnAssign) else node


def _renamed(tree: ast.Module, answers: set[str]):
    """Number the names that the code binds itself, in the order in which a top-level statement has them."""
    rename = _Rename(tree, answers)
    for node in tree.body:
        rename.inner, rename.numbers = _local([node]), {}
        rename.visit(node)


def _local(nodes) -> set[str]:
    """The variables and arguments that are bound anywhere in these statements."""
    names = set()
    for node in (inside for top in nodes for inside in ast.walk(top)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            names.add(node.name)
    return names


TORCHS = {"forward", "backward", "step", "zero_grad", "state_dict", "load_state_dict"}  # methods that torch calls


class _Rename(ast.NodeTransformer):
    """Renames in place. inner, numbers: of the top-level statement that is visited."""

    def __init__(self, tree: ast.Module, answers: set[str]):
        self.inner: set[str] = set()
        self.numbers: dict[str, str] = {}
        self._answers, self._outer_numbers, self._attribute_numbers = answers, {}, {}
        defs = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        tops = [node for node in tree.body if node not in defs]
        self._outer = ({node.name for node in defs} | _local(tops)) - answers
        self._arguments = {node.name: [a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)]
                           for node in defs if not isinstance(node, ast.ClassDef)}  # fmt: skip
        self._attributes = {
            n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._attributes |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        self._attributes -= TORCHS

    def _name(self, name):
        if not name or name in self._answers or hasattr(builtins, name):
            return name
        if name in self._outer:
            return self._outer_numbers.setdefault(name, f"outer{len(self._outer_numbers)}")
        return self.numbers.setdefault(name, f"v{len(self.numbers)}") if name in self.inner else name

    def _attribute(self, name):
        if name not in self._attributes or name.startswith("__"):
            return name
        return self._attribute_numbers.setdefault(name, f"a{len(self._attribute_numbers)}")

    def visit_Name(self, node):  # noqa: N802  (these are the names that ast looks for)
        node.id = self._name(node.id)
        return node

    def visit_arg(self, node):
        node.arg = self._name(node.arg)
        return node

    def visit_Attribute(self, node):  # noqa: N802
        node.attr = self._attribute(node.attr)
        return self.generic_visit(node)

    def visit_Call(self, node):  # noqa: N802
        known = self._arguments.get(getattr(node.func, "id", ""), [])
        for given in node.keywords:
            given.arg = f"argument{known.index(given.arg)}" if given.arg in known else given.arg
        return self.generic_visit(node)

    def visit_ClassDef(self, node):  # noqa: N802
        node.name = self._name(node.name)
        for method in node.body:
            if isinstance(method, ast.FunctionDef):
                method.name = self._attribute(method.name)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node):  # noqa: N802
        node.name = self._name(node.name)
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node):  # noqa: N802
        node.name = self._name(node.name)
        return self.generic_visit(node)


def groups(marks: dict[tuple[str, str, int], tuple[str, int]]) -> list[dict]:
    """Equal answers of several trainees, the longest first.

    marks: {(trainee, work, balise): mark}, of answers that are the trainee's own; short ones are left out.
    """
    by_mark = defaultdict(set)
    for (trainee, work, number), (digest, size) in marks.items():
        if size >= SMALL:
            by_mark[work, number, digest, size].add(trainee)
    found = [
        {"work": work, "balise": number, "nodes": size, "trainees": sorted(who)}
        for (work, number, _, size), who in by_mark.items()
        if len(who) > 1
    ]
    return sorted(found, key=lambda one: (-one["nodes"], one["work"], one["balise"]))
