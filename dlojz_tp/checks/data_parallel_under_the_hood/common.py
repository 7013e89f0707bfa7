"""What the checks of this work share: ranks and their failures, and what is said of gradients that are not averaged."""

import functools

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking import Wrong
from dlojz_tp.checking.borrowed import Borrowed, refusing
from dlojz_tp.probes import ranks
from dlojz_tp.probes.networks import rows, same
from dlojz_tp.probes.traffic import on_the_wire

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


def undisturbed(ranks, size):
    """Raise Wrong where a rank wrote what a running collective works on. ranks: how often, of each."""
    for rank, count in enumerate(ranks):
        if count:
            raise Wrong("written-in-flight", rank=rank, where=f"rank {rank} of {size}")


NO_HANDLE = ("'NoneType' object has no attribute 'wait'", "no-handle")
PLACED_TWICE = (("KeyError", ", in place\n"), "placed-twice")  # before any other sign of a KeyError
_usual = {"usual": ((Borrowed, "ddp-borrowed"), NO_HANDLE, PLACED_TWICE)}
on_ranks, by_world = (functools.partial(run, **_usual) for run in (ranks.on_ranks, ranks.by_world))


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


def judge_held(worlds, peak):
    """Raise Wrong if a rank's peak memory, `peak(got)` in bytes, grows with the number of ranks."""
    less, more = (max((peak(got), rank) for rank, got in enumerate(worlds[size])) for size in (2, 4))
    if more[0] > 1.25 * less[0] + 64:  # parts padded to a multiple of the world's size are a few bytes
        raise Wrong(
            "gathered", large=4, small=2, rank=more[1], more=more[0], less=less[0], where=f"rank {more[1]} of 4"
        )


def reduced(events, size: int) -> int:
    """The bytes whose all-reduces make as much travel, on average over the ranks of a world of `size`."""
    return 0 if size == 1 else round(on_the_wire(events) * size / (2 * (size - 1)))


def share(step: int) -> torch.Tensor:
    """This rank's rows of the batch, on its device."""
    return rows(step)[dist.get_rank() :: dist.get_world_size()].to(launch.device())


def compare(got, truth, local, *, rank, size, calls, later=None, where="", default="wrong-gradient"):
    """Raise Wrong unless the gradients `got` of one rank are `truth`; the hint says what they are instead.

    local: the rank's own gradients. calls: what it sent. later: its gradients when all that it sent has come back.
    """
    if all(same(g, t) for g, t in zip(got, truth, strict=True)):
        return
    wrong = [k for k, (g, t) in enumerate(zip(got, truth, strict=True)) if not same(g, t)]

    def are(values):
        """Whether all that is wrong is one of these instead."""
        return all(got[k] is not None and values[k] is not None and same(got[k], values[k]) for k in wrong)

    slug = default
    if size > 1 and not calls:
        slug = "no-communication"
    elif later is not None and not all(same(a, b) for a, b in zip(later, got, strict=True)):
        slug = "not-waited"
    elif size > 1 and are([t if t is None else t * size for t in truth]):
        slug = "not-divided"
    elif size > 1 and are([t if t is None else t / size for t in truth]):
        slug = "divided-twice"
    elif (
        size > 1
        and {call[0] for call in calls} != {"broadcast"}
        and (are(local) or are([v if v is None else v / size for v in local]))
    ):
        slug = "not-copied-back"
    k = wrong[0]
    raise Wrong(
        slug, expected=truth[k], got="no gradient (None)" if got[k] is None else got[k], rank=rank,
        where=f"rank {rank} of {size}, parameter {k}{where}",
    )  # fmt: skip
