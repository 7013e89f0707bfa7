"""Checks of 00_welcome."""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import torch

from dlojz_tp import launch
from dlojz_tp.checking import Operations, Traffic, Wrong, close, elements_read, nearest

HINTS = {
    "not-a-dict": "Return a dictionary with the keys device, gpus, cores and torch.",
    "keys-missing": "The dictionary has no {missing}. Look at the spelling of the keys.",
    "device-hard-coded": "The device does not follow the machine. Ask torch.cuda.is_available() each time: the same "
    "notebook runs with and without a GPU.",
    "device-wrong": 'The device is the word "cuda" where a GPU can be used and "cpu" elsewhere.',
    "gpus-not-counted": "That says whether there is a GPU, not how many. torch.cuda.device_count() counts them.",
    "gpus-wrong": "torch.cuda.device_count() is the number of GPUs that this process may use: 0 on a laptop.",
    "cores-of-the-node": "These are the cores of the whole node. A batch system gives your process some of them only; "
    "os.sched_getaffinity(0) is the set you may use. Starting one thread for each core of the node slows everybody down.",
    "cores-not-counted": "That is the set of cores. Its length is asked for.",
    "threads-not-cores": "That is the number of threads torch was told to use. Ask the system for the cores you may use.",
    "cores-wrong": "Count the cores that this process may use: the length of os.sched_getaffinity(0).",
    "wrong-version": "The version of torch itself is torch.__version__.",
    "no-communication": "No rank talked to another. Each rank has only summed what it saw; the parts must be added up with "
    "dist.all_reduce.",
    "all-the-work": "The result is right, but rank {rank} read {read} of {n} values. Each rank should read about {fair}: "
    "take a slice first, then sum.",
    "rank-0-only": "One rank did all the work and told the others. Each rank has to sum its own share.",
    "own-share": "This is the sum of the rank's own share. The shares of all ranks must still be added up.",
    "reduce-not-all-reduce": "Rank 0 has the sum, the others do not. reduce() tells one rank, all_reduce() tells all.",
    "mean-not-sum": "This is the sum divided by the number of ranks. Use ReduceOp.SUM, and do not divide.",
    "counted-by-every-rank": "Each value was counted once by every rank, so the sum is world_size times too large. Let "
    "each rank sum its own share only.",
    "tail-dropped": "The last values are missing: n // world_size drops the rest of the division. "
    "values[rank::world_size] or torch.tensor_split keep it.",
    "few-values": "It fails where there are fewer values than ranks: torch.chunk may return fewer pieces than asked for. "
    "torch.tensor_split returns them all, some of them empty.",
    "whole-tensor-sent": "Rank {rank} sent {sent} bytes. A sum is one number: add up your share first, then all-reduce.",
    "input-changed": "The function changed its input. all_reduce works in place: give it a tensor of your own.",
    "rounded": "Large integers came back rounded: they went through a float. Keep the dtype of the values.",
    "wrong-shape": "Return one number: a tensor without dimensions, shape ().",
    "wrong-sum": "The sum over all ranks is not the sum of the values. Is every value in exactly one rank's share?",
}


def balise_1(describe_machine):
    """Run the answer on pretended machines: the cores really restricted, the GPUs invented."""
    yield "it returns a dictionary with device, gpus, cores and torch"
    machine = describe_machine()
    if machine is None:
        raise Wrong("nothing-returned")
    if not isinstance(machine, dict):
        raise Wrong("not-a-dict", got=machine)
    missing = [key for key in ("device", "gpus", "cores", "torch") if key not in machine]
    if missing:
        raise Wrong("keys-missing", expected="device, gpus, cores, torch", got=machine, missing=" and no ".join(missing))
    if str(machine["torch"]) != str(torch.__version__):
        raise Wrong("wrong-version", expected=str(torch.__version__), got=machine["torch"])

    wanted = [(1, 0), (2, 4), (1, 1)]
    seen = launch.ranks(_on_pretended_machines, describe_machine, wanted, n=1)[0]
    yield "the device follows the machine"
    for cores, gpus, got in seen:
        expected = "cuda" if gpus else "cpu"
        if str(got["device"]).split(":")[0] != expected:
            known = all(str(other["device"]) == str(got["device"]) for _, _, other in seen)
            slug = "device-hard-coded" if known and str(got["device"]) in ("cuda", "cpu") else "device-wrong"
            raise Wrong(slug, expected=expected, got=got["device"], where=_words(cores, gpus))
    yield "it counts the GPUs: 0, 1 and 4"
    for cores, gpus, got in seen:
        if got["gpus"] != gpus or isinstance(got["gpus"], bool):
            slug = "gpus-not-counted" if got["gpus"] is (gpus > 0) else "gpus-wrong"
            raise Wrong(slug, expected=gpus, got=got["gpus"], where=_words(cores, gpus))
    yield "it counts the cores that this process may use"
    for cores, gpus, got in seen:
        found = got["cores"]
        if isinstance(found, set | frozenset | list | tuple):
            raise Wrong("cores-not-counted", expected=cores, got=found, where=_words(cores, gpus))
        if found != cores:
            slug = {_NODE_CORES: "cores-of-the-node", _THREADS: "threads-not-cores"}.get(found, "cores-wrong")
            raise Wrong(slug, expected=cores, got=found, where=_words(cores, gpus))


_NODE_CORES, _THREADS = 96, 7  # numbers that no real answer gives by accident


def _words(cores, gpus):
    return f"a process with {cores} of the node's {_NODE_CORES} cores and {gpus} GPUs"


def _on_pretended_machines(describe_machine, wanted):
    import psutil

    mine = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(_THREADS)
    properties = SimpleNamespace(name="pretended GPU", total_memory=80 * 2**30)
    seen = []
    for cores, gpus in wanted:
        with contextlib.ExitStack() as pretend:
            os.sched_setaffinity(0, mine[:cores])
            for target, name, value in (
                (torch.cuda, "is_available", gpus > 0),
                (torch.cuda, "device_count", gpus),
                (torch.cuda, "get_device_name", "pretended GPU"),
                (torch.cuda, "get_device_properties", properties),
                (torch.accelerator, "is_available", gpus > 0),
                (torch.accelerator, "device_count", gpus),
                (torch.accelerator, "current_accelerator", torch.device("cuda") if gpus else None),
                (os, "cpu_count", _NODE_CORES),
                (psutil, "cpu_count", _NODE_CORES),
            ):
                pretend.enter_context(mock.patch.object(target, name, lambda *_, value=value, **__: value))
            seen.append((len(mine[:cores]), gpus, dict(describe_machine())))
    return seen


def balise_2(distributed_sum):
    """Sums over 1 to 4 ranks of inputs that do not divide, are shorter than the world, are large integers."""
    yield "the sum of 12 values over 1, 2, 3 and 4 ranks"
    try:
        worlds = launch.worlds(_sums, distributed_sum, sizes=(1, 2, 3, 4), timeout=20)
    except launch.RankError as error:
        if error.kind == "raised" and "IndexError" in str(error):
            raise Wrong("few-values", got=str(error).split("\n")[0]) from error
        raise
    _compare(worlds, "easy")
    yield "sizes that do not divide: 10, 7 and 1003 values"
    for case in ("rest", "seven", "many"):
        _compare(worlds, case)
    yield "fewer values than ranks"
    _compare(worlds, "one")
    yield "integers beyond 2⁵³, a strided input, float64"
    for case in ("large", "strided", "double"):
        _compare(worlds, case)
    yield "the input is left as it was"
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            if got["changed"]:
                raise Wrong("input-changed", where=f"rank {rank} of {size}")
    yield "the work is shared: each rank reads its part and sends one number"
    for size, ranks in worlds.items():
        _shared(size, ranks)


def _inputs():
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(1003, generator=generator)
    return {
        "easy": torch.arange(1.0, 13.0),
        "rest": torch.arange(1.0, 11.0),
        "seven": torch.tensor([3.0, -1.0, 4.0, -1.0, 5.0, -9.0, 2.5]),
        "many": many,
        "one": torch.tensor([2.5]),
        "large": torch.tensor([2**53 + 1, 2, 4, 8, 16]),
        "strided": torch.arange(20.0)[::2],
        "double": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64),
    }


def _sums(distributed_sum):
    """On a rank: the answer's sums, and what it read and sent for the longest input."""
    results, changed = {}, False
    for case, values in _inputs().items():
        before = values.clone()
        with Operations() as operations, Traffic() as traffic:
            results[case] = distributed_sum(values)
        changed |= not torch.equal(before, values)
        if case == "many":
            read, sent, calls = elements_read(operations, values), traffic.volume(), traffic.names()
    results = {case: got.detach() if isinstance(got, torch.Tensor) else got for case, got in results.items()}
    return {"sums": results, "changed": changed, "read": read, "sent": sent, "calls": calls}


def _compare(worlds, case):
    values = _inputs()[case]
    truth = values.sum()
    for size, ranks in worlds.items():
        sums = [got["sums"][case] for got in ranks]
        for rank, got in enumerate(sums):
            if got is None:
                raise Wrong("nothing-returned")
            if isinstance(got, torch.Tensor) and got.shape != ():
                raise Wrong("wrong-shape", expected=truth, got=got, where=f"rank {rank} of {size}")
            exact = not truth.is_floating_point()
            if close(got, truth) and not (exact and int(got) != int(truth)):
                continue
            where = f"rank {rank} of {size}, {len(values)} values"
            raise Wrong(_mistake(values, sums, rank, size, ranks), expected=truth, got=got, where=where)


def _mistake(values, sums, rank, size, ranks):
    truth, got = values.sum(), sums[rank]
    if not ranks[0]["calls"] and size > 1:
        return "no-communication"
    if values.dtype == torch.int64 and close(float(got), float(truth), 1e-9):
        return "rounded"
    if close(sums[0], truth) and rank:
        return "reduce-not-all-reduce"
    shares = {
        "strided": values[rank::size].sum(),
        "split": values.tensor_split(size)[rank].sum(),
    }
    if size > 1 and any(close(got, share) for share in shares.values()):
        return "own-share"
    whole = len(values) // size * size
    return nearest(
        got,
        {
            "mean-not-sum": truth / size,
            "counted-by-every-rank": truth * size,
            "tail-dropped": values[:whole].sum(),
        },
        "wrong-sum",
    )


def _shared(size, ranks):
    n = len(_inputs()["many"])
    allowed = n // size + n % size  # the last rank may take the rest of the division
    busy = [rank for rank, got in enumerate(ranks) if got["read"] > 0]
    for rank, got in enumerate(ranks):
        where = f"rank {rank} of {size}, {n} values"
        if size > 1 and not got["calls"]:
            raise Wrong("no-communication", where=where)
        if got["sent"] > 4 * n // 2:
            raise Wrong("whole-tensor-sent", where=where, rank=rank, sent=got["sent"])
        if got["read"] > allowed:
            slug = "rank-0-only" if size > 1 and len(busy) == 1 else "all-the-work"
            raise Wrong(slug, where=where, rank=rank, read=got["read"], n=n, fair=-(-n // size))
