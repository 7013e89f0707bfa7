"""One calm line while something takes long in a notebook, such as the start of the first ranks; it goes with it."""

import contextlib
import math
import sys
import threading
import time

AFTER_S = 0.7  # a start that is quicker needs no word
TEXT = "starting the ranks, once: a few seconds, more on a busy machine"


def in_notebook() -> bool:
    """Whether this process shows what it prints in a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None  # IPython in a terminal has none


class Notice:
    """Shows `text` in a notebook, from `after` seconds on until it is closed. wanted: False shows nothing."""

    def __init__(self, wanted: bool, text: str = TEXT, after: float = AFTER_S):
        self._due = time.monotonic() + after if wanted else math.inf
        self._text, self._shown = text, None

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

            self._shown = display(line(self._text), display_id=True)

    def close(self):
        """Take the line away."""
        self._due = math.inf
        if self._shown is not None:
            self._shown.update({"text/plain": "", "text/html": ""}, raw=True)
            self._shown = None


@contextlib.contextmanager
def said_after(seconds: float, text: str):
    """Inside, a calm line in a notebook once it has taken `seconds`, whatever runs; it goes with the block."""
    if not in_notebook():
        yield
        return
    notice, over = Notice(True, text, seconds), threading.Event()

    def wait():
        if not over.wait(seconds):
            notice.left()

    waiting = threading.Thread(target=wait, name="dlojz notice", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        over.set()
        waiting.join(1)  # it may be showing the line just now
        notice.close()
