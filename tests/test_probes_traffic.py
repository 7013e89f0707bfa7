"""What crosses between ranks is counted: in steps of which it is known."""

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.probes.known_traffic import SENT, bytes_sent, steps
from dlojz_tp.judging.probes.traffic import Traffic, counted_waits, on_the_wire


def each_step():
    found = {}
    for name, step in steps().items():
        with Traffic() as log:
            step()
        found[name] = on_the_wire(log.events), len(log.calls), log.names()
    return found


def test_the_bytes_of_known_steps():
    for size, ranks in launch.worlds(each_step, sizes=(1, 2, 3)).items():
        for found in ranks:
            assert {name: sent for name, (sent, *_) in found.items()} == {name: bytes_sent(name, size) for name in SENT}
            assert found["asynchronous"][1:] == (2, ["all_reduce", "all_reduce"])
            assert found["a barrier"][1] == 0 and "barrier" in found["a barrier"][2][0]


def test_waits_are_counted():
    def some():
        with counted_waits() as waits:
            works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
            for work in works[:2]:
                work.wait()
            return len(waits), [work.wait() for work in works[2:]] and len(waits)

    assert launch.ranks(some, n=2) == [(2, 3)] * 2
