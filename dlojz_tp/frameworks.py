"""The libraries of the extra `frameworks`: whether one is here, and what is said where it is not."""

import importlib.util

NAMES = ("deepspeed", "accelerate", "lightning_fabric")
INSTALL = "python -m pip install -e '.[frameworks]'"


class NotInstalled(Exception):
    """A check needs a library that is not here: nothing can be said of the answer."""

    todo = f"{INSTALL} brings it; then restart the kernel. All other balises are judged without it."


def here(name: str) -> bool:
    """Whether the library can be imported; a folder that is called so is none."""
    return getattr(importlib.util.find_spec(name), "origin", None) is not None


def need(*names: str) -> None:
    """For the first line of a check. Raises NotInstalled for a library that is not here."""
    for name in names:
        if not here(name):
            raise NotInstalled(f"{name} is not installed here")
