"""What a collective or a message writes is held back until somebody waits for it, so that a forgotten wait shows."""

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.probes.withheld import Withheld
from dlojz_tp.measure import LiveBytes


def ways_to_wait():
    waits, found = [], {}
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    with Withheld(lambda: waits.append(1)) as running:

        def reduced(wait):
            x = torch.full((3,), 1.0 + rank)
            work = dist.all_reduce(x, async_op=True)
            before = x.tolist()
            wait(work)
            return before == [1.0 + rank] * 3, x.tolist()

        def asked(work):
            while not work.is_completed():
                pass

        found["wait"] = reduced(lambda work: work.wait())
        found["future"] = reduced(lambda work: work.get_future().wait())
        found["asked"] = reduced(asked)
        whole = torch.zeros(2)
        dist.all_gather(list(whole.split(1)), torch.full((1,), 1.0 + rank))
        found["gather"] = whole.tolist()
        came = torch.zeros(2)
        ops = [dist.P2POp(dist.isend, torch.full((2,), 1.0 + rank), other), dist.P2POp(dist.irecv, came, other)]
        works = dist.batch_isend_irecv(ops)
        before = came.tolist()
        for work in works:
            work.wait()
        found["message"] = before == [0.0, 0.0], came.tolist() == [1.0 + other] * 2
        told = len(waits)
        x = torch.full((3,), 1.0 + rank)
        dist.all_reduce(x, async_op=True)
        dist.barrier()
        found["forgotten"] = x.tolist() == [1.0 + rank] * 3, len(waits) == told
        left = running.left()
    return found | {"left": (left, x.tolist())}


def test_what_nobody_waited_for_is_not_there_yet():
    three = [3.0] * 3
    for found in launch.ranks(ways_to_wait, n=2):
        for way in ("wait", "future", "asked"):
            assert found[way] == (True, three), way
        assert found["gather"] == [1.0, 2.0]
        assert found["message"] == found["forgotten"] == (True, True)
        assert found["left"] == (1, three)


def changed_by_a_sum(x):
    with Withheld() as running:
        dist.all_reduce(x)
        before = dist.Work.wait
    return x.tolist(), running.left(), before is not dist.Work.wait


def test_a_collective_that_waits_is_as_ever_and_nothing_stays_behind():
    assert launch.ranks(changed_by_a_sum, torch.ones(2), n=2)[1] == ([2.0, 2.0], 0, True)


def living_meanwhile():
    x = torch.ones(1000)
    with Withheld() as running, LiveBytes().track(x) as live:
        work = dist.all_reduce(x, async_op=True)
        held = live.live
        work.wait()
    return held, running.forgotten()


def test_copies_are_not_seen_by_who_looks_at_memory():
    assert launch.ranks(living_meanwhile, n=2) == [(4000, 0)] * 2


def waits_for_an_older_one():
    with Withheld():
        older = dist.all_reduce(torch.ones(2), async_op=True)
        older.wait()
    with Withheld() as running:
        own = dist.all_reduce(torch.ones(2), async_op=True)
        own.wait()
        own.wait()
        before = running.old
        older.wait()
    return before, running.old


def test_who_waits_for_what_was_started_before_is_counted():
    assert launch.ranks(waits_for_an_older_one, n=2) == [(0, 1)] * 2
