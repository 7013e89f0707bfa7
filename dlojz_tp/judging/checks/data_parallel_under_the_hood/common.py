"""What the checks of this work share: ranks and their failures, and what is said of gradients that are not averaged."""

import functools
from dataclasses import replace

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking.borrowed import Borrowed, refusing
from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.probes import ranks
from dlojz_tp.judging.probes.networks import rows, same
from dlojz_tp.judging.probes.shared_looks import first_found, recognised
from dlojz_tp.judging.probes.traffic import on_the_wire, sent

HINTS = {
    "ddp-borrowed": "{what} does this work for you. In this exercise you do it yourself: use broadcast, "
    "all_reduce, send and receive.",
    "no-communication": "Rank {rank} sent nothing. Every rank must call the same collectives in the same order.",
    "not-divided": "You return the sum over the ranks. The mean gradient of the whole batch is this sum divided by "
    "world_size.",
    "divided-twice": "You divided the mean by world_size again. Divide once: before the sum or after it.",
    "not-waited": "When your code returned on rank {rank}, an all-reduce was still running: the gradients changed "
    "afterwards. Wait for each asynchronous operation before you use its result.",
    "not-copied-back": "The ranks exchanged values, but rank {rank} still holds its own gradients, at least for "
    "some parameters. Do you reduce each p.grad itself? If you reduce a copy, write the sum "
    "back into p.grad after the wait. If p.grad is to be a part of a bucket, it must be there "
    "before the bucket is sent, and every bucket must be sent.",
    "wrong-gradient": "The gradients are not the mean over the ranks.",
    "weights-changed": "The parameters themselves changed. Average only their gradients.",
    "no-handle": "Without async_op=True, a collective returns None when it is done, and None has no wait(): "
    "{error}. With async_op=True, the collective runs in the background and returns a handle.",
    "placed-twice": "A gradient was placed into its bucket a second time (KeyError in place). A tied parameter, "
    "which has two names, needs one hook. Inside no_sync() nothing is placed, so the backward of a "
    "micro-batch must be inside `with reducer.no_sync():`. After finish(), every bucket must be "
    "missing all its parameters again. A lambda made in a loop over p uses the loop's last p: use "
    "the argument that the hook receives.",
    "written-in-flight": "The result is right only by luck: on rank {rank} a tensor was written while its "
    "collective was still running. Nobody knows what the network reads or writes in the "
    "meantime. Wait first, then write; each running collective needs its own tensor.",
    "made-on-cpu": "On GPUs, a tensor is in the CPU's memory: {error}. NCCL can't send it from there, and autograd "
    "doesn't accept it as a gradient. Make each new tensor (zeros, a buffer, a copy) on the device "
    "of the tensor that it stands for: torch.zeros_like(p), device=p.device.",
    "gathered": "With {large} ranks, rank {rank} held {more} bytes in addition to its gradients, with {small} "
    "ranks {less}: it collects the gradients of all ranks. An all-reduce adds them up on the way, so "
    "the memory of a rank doesn't grow with N.",
}


def on_each(claim, find):
    """A look at all ranks of a world, or of worlds {size: ranks}: what find(ranks, rank) finds; see `recognised`."""

    def found(seen):
        for world in seen.values() if isinstance(seen, dict) else [seen]:
            for rank in range(len(world)):
                yield find(world, rank), {"rank": rank, "where": f"rank {rank} of {len(world)}"}

    return recognised(claim, lambda seen: first_found(found(seen)))


def nothing_overwritten(overwritten):
    """A look: no rank writes what a running collective works on. overwritten(got): how often it did."""
    return on_each("", lambda ranks, rank: ("written-in-flight", {}) if overwritten(ranks[rank]) else None)


def case_by_case(cases, looks, observe, answer):
    """The claims of a table that judges observe(answer, case) for each case. cases: {claim: those of that line}."""
    for claim, some in cases.items():
        for case in some:
            yield from judged([replace(looks[0], claim=claim), *looks[1:]], observe, answer, case, where=str(case))


NO_HANDLE = ("'NoneType' object has no attribute 'wait'", "no-handle")
PLACED_TWICE = (("KeyError", ", in place\n"), "placed-twice")  # before any other sign of a KeyError
_usual = {"usual": ((Borrowed, "ddp-borrowed"), NO_HANDLE, PLACED_TWICE)}
on_ranks = functools.partial(ranks.on_ranks, **_usual)


def by_world(looks, observe, *answers, **more):
    """The claims of a table, world after world, each once; it ends at the first world with a mistake."""

    def judge(size, seen):
        return judged(looks, lambda: seen, at=size, where=f"{size} rank{'s' * (size > 1)}")

    return ranks.by_world(judge, observe, *answers, **_usual, **more)


def own_work():
    """Inside, DistributedDataParallel and what it uses to copy a model raise Borrowed."""
    from torch.distributed import utils
    from torch.nn import parallel

    return refusing(
        (parallel.DistributedDataParallel, "__init__", "DistributedDataParallel"),
        (dist, "all_reduce_coalesced", "all_reduce_coalesced"),
        (utils, "_sync_module_states", "_sync_module_states"),
        (utils, "_sync_params_and_buffers", "_sync_params_and_buffers"),
    )


def reduced(events, size: int) -> int:
    """The bytes whose all-reduces make as much travel, on average over the ranks of a world of `size`."""
    return 0 if size == 1 else round(on_the_wire(events) * size / (2 * (size - 1)))


def share(step: int) -> torch.Tensor:
    """This rank's rows of the batch, on its device."""
    return rows(step)[dist.get_rank() :: dist.get_world_size()].to(launch.device())


def not_mean(got, truth, local, rank, size, where=""):
    """None if the gradients of one rank are `truth`; else the hint that says what they are instead, and its fields.

    got: "now", "later" (when all that it sent has come back), "events". local: the rank's own gradients.
    """
    now, calls = got["now"], sent(got["events"])
    wrong = [k for k, pair in enumerate(zip(now, truth, strict=True)) if not same(*pair)]
    if not wrong:
        return None

    def are(values, factor=1):
        """Whether all that is wrong is one of these instead."""
        pairs = [(now[k], values[k]) for k in wrong]
        return all(a is not None and b is not None and same(a, b * factor) for a, b in pairs)

    slug = "wrong-gradient"
    if size > 1 and not calls:
        slug = "no-communication"
    elif not all(same(a, b) for a, b in zip(got["later"], now, strict=True)):
        slug = "not-waited"
    elif size > 1 and are(truth, size):
        slug = "not-divided"
    elif size > 1 and are(truth, 1 / size):
        slug = "divided-twice"
    elif size > 1 and {call[0] for call in calls} != {"broadcast"} and (are(local) or are(local, 1 / size)):
        slug = "not-copied-back"
    k = wrong[0]
    given = "no gradient (None)" if now[k] is None else now[k]
    return slug, {"expected": truth[k], "got": given, "k": k, "where": f"rank {rank} of {size}, parameter {k}{where}"}
