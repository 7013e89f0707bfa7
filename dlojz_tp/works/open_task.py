"""The cell of a balise with nothing given: names, signatures and docstrings, and the rest is the trainee's.

It is taken from the trainee notebook's own cell by its syntax tree, so it needs no solutions.
"""

import ast
import json

from dlojz_tp.works import source


def stub(balise: source.Balise) -> str:
    """What a trainee starts from to write all of a balise: its answers without any of their code."""
    lines = balise.code.splitlines()
    nodes = [node for node in ast.parse(balise.code).body if getattr(node, "name", None) in balise.answers]
    return "\n\n\n".join(_bare(node, lines, balise.number) for node in nodes)


def opened(notebook: bytes, name: str) -> bytes:
    """A trainee notebook in which each balise starts from its stub. name: of the work."""
    content, balises = json.loads(notebook), source.of_notebook(name, notebook.decode()).balises
    for cell in content["cells"]:
        for tag in cell["metadata"].get("tags", []):
            if tag.startswith("balise-"):
                cell["source"] = stub(balises[int(tag[7:])]).splitlines(keepends=True)
    return json.dumps(content).encode()


def _bare(node, lines, number) -> str:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    told = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    last = told.end_lineno if told else node.body[0].lineno - 1
    head = "\n".join(lines[first - 1 : max(last, node.lineno)])
    inner = " " * (node.col_offset + 4)
    if not isinstance(node, ast.ClassDef):
        return f"{head}\n{inner}todo({number})"
    kept = [each for each in node.body if each is not told and isinstance(each, ast.AnnAssign)]
    fields = [inner + ast.get_source_segment("\n".join(lines), each) for each in kept]
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and not _private(each.name)]
    parts = ["\n".join([head, *fields]), *(_bare(each, lines, number) for each in methods)]
    return "\n\n".join(parts)


def _private(name) -> bool:
    return name.startswith("_") and not name.endswith("__")
