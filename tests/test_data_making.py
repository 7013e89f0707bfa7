"""Work in threads: what stops it is told once all of them have ended."""

import os
import signal
import threading
import time

import pytest

from dlojz_tp.data import making


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [3, None])
def test_a_signal_raises_once_no_thread_works(signum, at):
    """Sent while the tasks are handed out, or by one of them."""
    before, stop, running, done = signal.getsignal(signum), threading.Event(), [], []

    def tasks():
        for k in range(200):
            if k == at:
                os.kill(os.getpid(), signum)
            yield k

    def work(k):
        running.append(k)
        if at is None and k == 3:
            os.kill(os.getpid(), signum)
        time.sleep(0.01)
        running.remove(k)
        done.append(k)

    with pytest.raises(KeyboardInterrupt):
        making.in_threads(work, tasks(), 4, stop)
    assert not running and stop.is_set() and len(done) < 100
    assert signal.getsignal(signum) is before


def test_an_error_is_raised_and_the_rest_left():
    done = []

    def work(k):
        time.sleep(0.005)
        if k == 2:
            raise OSError("no space")
        done.append(k)

    with pytest.raises(OSError, match="no space"):
        making.in_threads(work, range(200), 2)
    assert len(done) < 100


def test_all_is_done():
    done = []
    making.in_threads(done.append, range(50), 3)
    assert sorted(done) == list(range(50))
