"""The banks of answers, `tests/answers/WORK`: they aren't in the package, and are read from their files."""

import functools
import importlib.util
import sys
from pathlib import Path

import cloudpickle

from dlojz_tp.works.source import ROOT, Work

FOLDER = ROOT / "tests" / "answers"


def of(work: Work):
    """The answers to a work, with their hints and with the marks of mistakes at the edge."""
    return _gathered(work.name, work.module, tuple(work.balises))


def file(work: Work, number: int) -> Path:
    """Where the answers to a balise are."""
    return FOLDER / work.module / f"balise_{number}.py"


@functools.cache
def _gathered(name: str, module: str, balises: tuple[int, ...]):
    for folder in (FOLDER.parent, FOLDER):
        _package(folder)
    found = importlib.import_module("tests.answers.bank").Bank(name)
    found.add(*(importlib.import_module(f"tests.answers.{module}.balise_{number}").bank for number in balises))
    for each in [each for path, each in sys.modules.items() if path.startswith(f"tests.answers.{module}.")]:
        cloudpickle.register_pickle_by_value(each)  # several answers share a name, so ranks must get them by value
    return found


def _package(folder: Path):
    """Give Python a folder of the repository as a package, from where it is; nothing else there can be imported."""
    name = ".".join(folder.relative_to(ROOT).parts)
    if name not in sys.modules:
        made = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(made)
        made.loader.exec_module(sys.modules[name])
