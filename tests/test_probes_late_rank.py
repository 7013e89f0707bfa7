"""A rank that comes late for certain."""

import time

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.probes.late_rank import Waits


def test_the_late_rank_goes_on_when_the_other_one_waits_or_has_said_another_word():
    def both():
        seen = []
        with Waits("here") as waits:
            if dist.get_rank() == 1:
                seen.append(waits.others_wait(limit=60))
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 1:
                seen.append(waits.others_wait(limit=60, besides=("back",)))
            else:
                waits.tell("back")
        return seen, waits.count

    assert launch.ranks(both, n=2) == [([], 1), ([True, True], 1)]


def test_the_late_rank_does_not_wait_for_ever():
    def both():
        with Waits("here") as waits:
            start = time.monotonic()
            in_time = waits.others_wait(limit=0.05)
            meanwhile = waits.others_wait(limit=60, meanwhile=lambda: True)
        return in_time, meanwhile, time.monotonic() - start < 30

    assert launch.ranks(both, n=2) == [(False, False, True)] * 2
