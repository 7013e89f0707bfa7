"""Communications: every collective and message is seen, with its bytes, and lasts until it is complete."""

import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch, measure
from dlojz_tp.judging.pretend_gpu import pretend_gpu


def entries(found, kind):
    return [e for e in found if e["kind"] == kind]


def some_of_everything():
    warnings.simplefilter("ignore")  # all_gather_into_tensor has another name in new versions
    rank, n = dist.get_rank(), dist.get_world_size()
    with measure.Communications() as log:
        x = torch.ones(1000)
        with log.phase("collectives"):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.all_gather([torch.empty(1000) for _ in range(n)], x)
            dist.all_gather_into_tensor(torch.empty(n * 10), torch.ones(10))
        sent = dist.isend(x[:5], (rank + 1) % n)
        dist.recv(torch.empty(5), (rank - 1) % n)
        sent.wait()
        dist.barrier()
    dist.all_reduce(x)  # after the record
    return log.entries()


def test_kinds_bytes_and_peers():
    for rank, found in enumerate(launch.ranks(some_of_everything, n=3)):
        assert {e["rank"] for e in found} == {rank}
        collectives = [(e["name"], e["bytes"]) for e in entries(found, "collective")]
        assert collectives[:4] == [("all_reduce", 4000), ("broadcast", 4000), ("all_gather", 4000), ("all_gather", 40)]
        assert [name for name, _ in collectives[4:]] == ["barrier"]
        messages = [(e["name"], e["bytes"], e["peer"]) for e in entries(found, "message")]
        assert messages == [("send", 20, (rank + 1) % 3), ("recv", 20, (rank - 1) % 3)]
        assert all(e["end"] >= e["start"] for e in found)
        (phase,) = entries(found, "phase")
        assert all(phase["start"] <= e["start"] <= phase["end"] for e in entries(found, "collective")[:4])


def a_late_peer():
    with measure.Communications() as log:
        if dist.get_rank():
            time.sleep(0.1)
        works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(2)]
        called = time.perf_counter()
        for work in works:
            work.wait()
    return log.entries(), called


def test_an_asynchronous_collective_lasts_until_it_is_complete():
    (early, called), (late, _) = launch.ranks(a_late_peer, n=2)
    assert all(e["start"] <= called for e in early)
    # both ranks read the same clock: it cannot be complete before the late one has called
    assert all(mine["end"] >= other["start"] for mine, other in zip(early, late))
    assert all(e["end"] - e["start"] > 0.05 for e in early)


def with_ddp():
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)])
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.06)
    ddp(torch.ones(2, 100)).sum().backward()  # buckets are made again after the first step
    with measure.Communications() as log:
        loss = ddp(torch.ones(2, 100)).sum()
        with log.phase("backward"):
            loss.backward()
    return log.entries()


def test_ddp_is_seen():
    found = launch.ranks(with_ddp, n=2)[0]
    reduced = [e for e in found if e["name"] == "all_reduce"]
    assert sum(e["bytes"] for e in reduced) == 4 * 4 * 10_100
    assert len(reduced) > 1 and all(e["end"] is not None for e in reduced)
    (backward,) = entries(found, "phase")
    assert reduced[0]["start"] < backward["end"]


def test_alone_and_unfinished():
    def run():
        with measure.Communications() as log:
            dist.all_reduce(torch.ones(3))
        before = dist.Work.wait
        with measure.Communications():
            assert dist.Work.wait is not before
        assert dist.Work.wait is before
        return log.entries()

    (found,) = launch.ranks(run, n=1)[0]
    assert found["bytes"] == 12
    assert found["end"] >= found["start"]


def test_without_ranks_phases_still_work():
    with measure.Communications("cpu") as log, log.phase("forward"):
        torch.ones(3).sum()
    (entry,) = log.entries()
    assert entry["rank"] == 0 and entry["name"] == "forward" and entry["end"] > entry["start"]


def functional():
    import torch.distributed._functional_collectives as functional_collectives

    with measure.Communications() as log:
        total = functional_collectives.all_reduce(torch.ones(10), "sum", dist.group.WORLD)
        time.sleep(0.01)
        value = total.sum().item()  # waits
    return log.entries(), value


def test_functional_collectives_last_until_they_are_waited_for():
    for found, value in launch.ranks(functional, n=2):
        (entry,) = found
        assert value == 20
        assert (entry["name"], entry["bytes"]) == ("all_reduce", 40)
        assert entry["end"] - entry["start"] >= 0.01


def scattered():
    import torch.distributed._functional_collectives as functional_collectives

    with measure.Communications() as log:
        functional_collectives.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD).add(0)
    return [(entry["name"], entry["bytes"]) for entry in log.entries()]


def test_a_functional_reduce_scatter_hands_in_what_is_scattered():
    assert launch.ranks(scattered, n=2) == [[("reduce_scatter", 32)]] * 2


def called_back_late():
    with pretend_gpu():
        with measure.Communications("cuda") as log, log.phase("forward"):
            torch.ones(3, device="cuda")
        # a thread of PyTorch's makes callbacks, this one after the CPU has waited for the GPU
        log._let_call_back = lambda: log._found[0].update(end=log._stamp())
        return log.entries()


def test_a_callback_after_the_wait_is_waited_for_on_a_gpu():
    (entry,) = launch.ranks(called_back_late, n=1)[0]
    assert entry["end"] > entry["start"]
