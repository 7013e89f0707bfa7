"""Memory that a thread lets go of late."""

import threading
import time

from dlojz_tp.judging.probes import settling
from dlojz_tp.judging.probes.settling import settle


def test_what_is_little_enough_is_told_at_once():
    looks = []
    assert settle(lambda: looks.append(1) or 7, most=7) == 7
    assert len(looks) == 1


def test_a_thread_that_still_works_is_waited_for():
    held = [100]

    def work():
        end = time.process_time() + 1.5 * settling.LOOKS * settling.PAUSE
        while time.process_time() < end:
            pass
        held.clear()

    thread = threading.Thread(target=work)
    thread.start()
    assert settle(lambda: sum(held), most=0) == 0
    thread.join()


def test_what_nobody_lets_go_of_is_told_when_all_threads_rest():
    held, end = [100], threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    start = time.monotonic()
    assert settle(lambda: sum(held), most=0, patience=120) == 100
    assert time.monotonic() - start < 60
    end.set()
    thread.join()
