"""A trainee's `random.py` or `torch.py`: Python looks into the current folder first, and takes it for the module."""

import os
import sys
from importlib.machinery import PathFinder

COURSE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
HARMLESS = {"test", "tests", "conftest", "setup"}  # usual names, of modules that no program of the course imports


def lines(folder: str | os.PathLike) -> list[str]:
    """One line for each file of `folder` that has the name of a module found elsewhere; none for a missing folder."""
    here = os.path.realpath(folder)
    path = [entry for entry in sys.path if os.path.realpath(entry) != here]
    try:
        names = sorted(os.listdir(here))
    except OSError:
        return []
    found = []
    for name in names:
        whole = os.path.join(here, name)
        package = os.path.isfile(os.path.join(whole, "__init__.py"))
        module = name if package else name.removesuffix(".py")
        if not package and (module == name or os.path.isdir(whole)):
            continue
        if module in HARMLESS or not module.isidentifier() or whole == COURSE:
            continue
        spec = PathFinder.find_spec(module, path)
        if spec is not None and spec.origin is not None:  # a mere folder has no origin
            found.append(
                f"{whole} hides the module {module} from notebooks and programs in its folder: give it another name"
            )
    return found


def step_aside() -> None:
    """Say on stderr which modules the current folder hides. `python -m` puts it first: here it becomes the last."""
    if sys.flags.safe_path and "" not in sys.path:
        return
    first = sys.path[0] if sys.path else ""
    for line in lines(first or os.curdir):
        print(f"dlojz_tp: {line}", file=sys.stderr)
    # argv is so while `python -m` looks for what it shall run; the course's own folder has to stay
    if sys.argv[:1] == ["-m"] and os.path.realpath(first) != os.path.dirname(COURSE):
        sys.path.append(sys.path.pop(0))
