"""Unpickle what a rank has sent. A pickle runs its writer's code: it may never end, or raise anything."""

import functools
import pickle
import signal
import threading

from dlojz_tp.launch import busy
from dlojz_tp.launch.alarm import Overdue, deadline

SLOWEST = 50e6  # bytes a second of a large value, on a busy machine
CAUSE_S = 2.0  # for an exception that travels itself: its text is there anyway


class Unloadable(Exception):
    """It cannot be loaded: the end of a sentence, and the error as text."""

    def __init__(self, what: str, text: str = ""):
        super().__init__(what, text)
        self.what, self.text = what, text


def load(source, seconds: float):
    """The value in a pickle, bytes or an open file, within `seconds`, more on a busy machine; in the main thread alone.

    Errors: Unloadable, whatever was raised; KeyboardInterrupt where somebody has pressed Ctrl-C or Stop meanwhile.
    """
    pressed = []
    before = signal.getsignal(signal.SIGINT)
    listens = threading.current_thread() is threading.main_thread() and callable(before)
    if listens:
        signal.signal(signal.SIGINT, lambda *args: (pressed.append(args), before(*args)))
    try:
        with deadline(seconds, over=functools.partial(busy.Clock().passed, seconds)):
            return pickle.load(source) if hasattr(source, "read") else pickle.loads(source)
    except Overdue:
        raise Unloadable(f"does not load within {seconds:.0f} s") from None
    except BaseException as error:
        if pressed:
            raise
        raise Unloadable("cannot be loaded here", f"{type(error).__name__}: {error}") from None
    finally:
        if listens:
            signal.signal(signal.SIGINT, before)
