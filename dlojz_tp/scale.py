"""Two switches for every notebook: its sizes, and whether its figures count."""

import os


def scale() -> str:
    """Return "full" on a machine with a GPU, else "small" (a notebook within a minute on two cores).

    The environment variable DLOJZ_SCALE overrides it. Raises ValueError for any other word.
    """
    wanted = os.environ.get("DLOJZ_SCALE", "").strip().lower()
    if wanted in ("small", "full"):
        return wanted
    if wanted:
        raise ValueError(f"DLOJZ_SCALE is {wanted!r}: set it to small or full, or unset it")
    import torch  # late: commands that only ask for an override need no torch

    return "full" if torch.cuda.is_available() else "small"


def brief() -> bool:
    """Whether it is enough that a notebook runs: then a few steps and rounds are timed, and the times say nothing.

    The tests ask for it with DLOJZ_BRIEF=1; nobody else should.
    """
    return os.environ.get("DLOJZ_BRIEF") == "1"
