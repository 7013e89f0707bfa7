"""The package's rooms: nothing imports upwards, and no file imports itself by way of others."""

import ast
import functools
import graphlib
from pathlib import Path

import dlojz_tp

PACKAGE = Path(dlojz_tp.__file__).parent
# from the ground up, those of a line beside each other; see the package's docstring
FLOORS = [
    {"scale", "frameworks"},
    {"works", "models"},
    {"cards", "planner", "data", "measure"},
    {"launch"},
    {"report", "parallel", "pretend_gpu"},
    {"modelled_gpu"},
    {"training", "checking", "progress"},
    {"probes", "classroom", "guesses"},
    {"checks"},
    {"course", "index"},
    {"commands", "grading", "authoring"},
    {"__init__", "__main__"},
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


def test_every_room_has_a_floor():
    assert {name.split(".")[0] for name in graph()} == set().union(*FLOORS)


def test_nothing_imports_upwards():
    level = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    upwards = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if other.split(".")[0] != name.split(".")[0] and level[other.split(".")[0]] >= level[name.split(".")[0]]
    ]
    assert not upwards, upwards


def test_no_circles():
    graphlib.TopologicalSorter(graph()).prepare()  # CycleError names the files
