"""The package's rooms: nothing imports upwards, and no file imports itself by way of others."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import dlojz_tp

PACKAGE = Path(dlojz_tp.__file__).parent
# from the ground up, those of a line beside each other; see the package's docstring
FLOORS = [
    {"scale", "frameworks"},
    {"works", "models"},
    {"cards", "planner", "data", "measure"},
    {"launch"},
    {"report", "parallel", "judging.pretend_gpu"},
    {"modelled_gpu"},
    {"training", "judging.checking", "progress"},
    {"judging.probes", "classroom", "guesses"},
    {"judging.contest"},
    {"judging.checks"},
    {"course", "index"},
    {"commands", "judging.grading", "authoring"},
    {"__init__", "__main__", "judging"},
]


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, at its top or in a function: "launch.run"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            base = ".".join(["dlojz_tp", *path.relative_to(PACKAGE).parts[: -node.level], *base.split(".")]).rstrip(".")
        if base.split(".")[0] == "dlojz_tp":
            inside = base.removeprefix("dlojz_tp").lstrip(".")
            for alias in node.names:
                whole = f"{inside}.{alias.name}".lstrip(".")
                found.add(whole if _is_module(whole) else inside)
    return found - {""}


def _is_module(name: str) -> bool:
    path = PACKAGE / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def graph() -> dict[str, set[str]]:
    """Of each module, those that it imports."""
    return {_name(path): imports(path) for path in PACKAGE.rglob("*.py") if "lab_settings" not in path.parts}


def room(name: str) -> str:
    """Where a module lives: the first part of its name, and the second of what judges."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "judging" else 1])


def test_every_room_has_a_floor():
    assert {room(name) for name in graph()} == set().union(*FLOORS)


def test_nothing_imports_upwards():
    level = {each: floor for floor, rooms in enumerate(FLOORS) for each in rooms}
    upwards = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if room(other) != room(name) and level[room(other)] >= level[room(name)]
    ]
    assert not upwards, upwards


def test_no_circles():
    graphlib.TopologicalSorter(graph()).prepare()  # CycleError names the files


@functools.cache
def checks() -> dict[Path, ast.Module]:
    """The syntax of each file of the checks."""
    paths = (PACKAGE / "judging" / "checks").rglob("*.py")
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def _own(node):
    """The nodes of a function, without those of functions inside of it."""
    for inside in ast.iter_child_nodes(node):
        if not isinstance(inside, ast.FunctionDef | ast.Lambda):
            yield inside
            yield from _own(inside)


def test_no_observation_pauses_inside_a_with():
    """When a look fails it is left there, and collected later: `no_grad` would then end amid a trainee's step."""
    found = []
    for path, tree in checks().items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name.startswith(("observe", "_observe")):
                blocks = [node for node in _own(function) if isinstance(node, ast.With)]
                found += [
                    f"{path.name}:{block.lineno}"
                    for block in blocks
                    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(block))
                ]
    assert found == []


def test_what_two_balises_share_has_a_file_of_its_own():
    borrowed = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in checks().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and re.search(r"\.balise_\d+$", node.module or "")
    ]
    assert not borrowed, "imports from the check of a balise: what it shares gets a name"


ROWS = "Look", "Value", "each_rank", "mistake_look", "recognised"


def test_a_row_has_one_lambda_at_most():
    crowded = []
    for path, tree in checks().items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ROWS:
                values = [*call.args, *(keyword.value for keyword in call.keywords)]
                if sum(isinstance(value, ast.Lambda) for value in values) > 1:
                    crowded.append(f"{path.relative_to(PACKAGE)}:{call.lineno}")
    assert not crowded, "a second lambda gets a name"
