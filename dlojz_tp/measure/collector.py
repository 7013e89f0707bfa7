"""Python's garbage collector comes by when it likes."""

import contextlib
import gc


@contextlib.contextmanager
def no_collector():
    """Inside, what hangs in a circle is freed by gc.collect() alone."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextlib.contextmanager
def earlier_set_aside():
    """Inside, what was there before is not looked through: a full collection takes hardly any time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
