"""One calm line while the first ranks of a session take long to start; it goes when they are up."""

import math
import sys
import time

AFTER_S = 0.7  # a start that is quicker needs no word
TEXT = "starting the ranks, once: a few seconds, more on a busy machine"


def in_notebook() -> bool:
    """Whether this process shows what it prints in a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None  # IPython in a terminal has none


class Notice:
    """Shows TEXT in a notebook, from AFTER_S seconds on until it is closed. wanted: False shows nothing."""

    def __init__(self, wanted: bool):
        self._due = time.monotonic() + AFTER_S if wanted else math.inf
        self._shown = None

    def left(self) -> float:
        """Show the line if it is time; seconds until then."""
        if time.monotonic() >= self._due:
            self._due = math.inf
            self._show()
        return self._due - time.monotonic()

    def _show(self):
        if in_notebook():
            from IPython.display import display

            from dlojz_tp.cards.render import line

            self._shown = display(line(TEXT), display_id=True)

    def close(self):
        """Take the line away."""
        self._due = math.inf
        if self._shown is not None:
            self._shown.update({"text/plain": "", "text/html": ""}, raw=True)
            self._shown = None
