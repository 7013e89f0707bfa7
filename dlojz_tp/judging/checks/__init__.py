"""The checks of the practical works: a package each, named like the work without its number.

WORK/balise_N.py has `balise_N(answers)`: a generator that yields what it is about to look at and raises
`checking.Wrong(slug)`. Other modules of the package have what several balises share, and each is named for what it has.
Hints are on record, in WORK/mistakes/N.json; those that several balises may give are {slug: text} in HINTS of a module.
See CONTRIBUTING.md.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def check(work: str, number: int) -> Callable:
    """The check of a balise. work: as its package is called. Raises ImportError if there is none."""
    return getattr(importlib.import_module(f"{__name__}.{work}.balise_{number}"), f"balise_{number}")


def names(work: str) -> list[str]:
    """The names of all modules of a work's package."""
    folders = [str(Path(folder, work)) for folder in __path__]
    return [f"{__name__}.{work}.{found.name}" for found in pkgutil.iter_modules(folders)]


@functools.cache
def modules(work: str) -> list[ModuleType]:
    """These modules, imported."""
    return [importlib.import_module(name) for name in names(work)]


def hints(work: str) -> dict[str, str]:
    """The HINTS of a work's modules in one. Raises ValueError where two use a name: one hint would hide the other."""
    found: dict[str, str] = {}
    for module in modules(work):
        own = getattr(module, "HINTS", {})
        if double := sorted(found.keys() & own.keys()):
            raise ValueError(f"{module.__name__} has hints that another module has too: {', '.join(double)}")
        found |= own
    return found
