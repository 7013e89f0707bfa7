"""Balise 5: all-reduces that run while backward goes on."""

import threading
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.data_parallel_under_the_hood.common import (
    NO_HANDLE,
    PLACED_TWICE,
    by_world,
    compare,
    own_work,
    reduced,
    share,
    undisturbed,
)
from dlojz_tp.probes.networks import Chain, gradients, rows
from dlojz_tp.probes.traffic import Traffic, sent, until, volume
from dlojz_tp.probes.withheld import Withheld

CAPACITY = 1200  # bytes: two of the chain's six layers, 576 bytes each
RATE = 0.1
PATIENCE = 4  # seconds that the last rank waits for the other's backward, should that wait in a way which nobody sees

HINTS = {
    "placed-again": "A gradient was placed into its bucket a second time (KeyError in place). After finish(), "
                    "every bucket must be missing all its parameters again. A lambda made in a loop over p uses "
                    "the loop's last p: use the argument that the hook receives.",
    "hook-too-early": "A gradient was still None when your code used it. In a hook of register_hook, p.grad does "
                      "not hold the new gradient yet; a hook of register_post_accumulate_grad_hook runs when it "
                      "does. A bucket may start only when its last gradient has arrived. Register self.ready, "
                      "without brackets.",
    "no-overlap": "All {n} all-reduces were started after backward had ended. Start the all-reduce of a bucket in "
                  "a hook, as soon as the bucket's last gradient has arrived.",
    "late-start": "Before the gradients of the first layer were computed, only {early} of {total} bytes were on "
                  "their way: a bucket waits although it is complete.",
    "blocking": "Rank 0 waits for another rank inside backward: its all-reduce blocks. Start it with "
                "async_op=True, keep the handle that it returns, and wait in finish().",
    "no-buckets": "You start {n} all-reduces for {held} bytes of gradients in buckets of {capacity} bytes. Start "
                  "one for each bucket, not one for each parameter.",
    "one-bucket": "One all-reduce carries all gradients. The capacity is {capacity} bytes: respect it, and most of "
                  "the work starts before backward ends.",
    "sent-again": "You sent as much as all-reduces of {sent} bytes need, but the gradients have {held} bytes. Send "
                  "each gradient once in each step.",
    "second-step": "The first step is right, step {step} is not. finish() must reset the count of the missing "
                   "gradients and the list of running operations.",
    "missing-no-set": "bucket.missing must be a set again: {error}. A list compares tensors element by element to "
                      "find one.",
    "handles-kept": "Step {step} waits for {n} all-reduces of earlier steps. finish() must remove what it has "
                    "waited for from the list of running operations; otherwise the list grows with each step.",
    "zeroed-in-place": "This is right after zero_grad(set_to_none=True), but wrong after "
                       "zero_grad(set_to_none=False): then backward adds to the tensor that is already in p.grad, "
                       "perhaps to a part of your bucket.",
}  # fmt: skip
KNOWN = (
    NO_HANDLE,
    ("Boolean value of Tensor", "missing-no-set"),
    (PLACED_TWICE[0], "placed-again"),
    ("NoneType", "hook-too-early"),
    (("KeyError: ", ", in ready\n"), "hook-too-early"),
)


@cache
def plain(steps: int) -> list[list]:
    """The truth: gradients of the whole batch in each step, one process, float64, SGD between the steps."""
    model, found = Chain(), []
    for step in range(steps):
        model.zero_grad()
        model(rows(step)).backward()
        found.append(gradients(model.parameters()))
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
    return found


@cache
def local(rank: int, size: int) -> list:
    """The gradients of what one rank sees in the first step."""
    model = Chain()
    model(rows(0)[rank::size]).backward()
    return gradients(model.parameters())


HELD = sum(p.numel() * p.element_size() for p in Chain().parameters())


def balise_5(Overlap):  # noqa: N803
    """Four steps on 1 to 4 ranks; in the first, of two ranks one begins backward when the other has ended its own."""
    yield "on 2, 3 and 4 ranks, and on one rank: the gradient of the whole batch when finish() returns"
    yield from by_world(_judge, _train, Overlap, known=KNOWN)


def _judge(size, ranks):
    truth = plain(4)
    for rank, got in enumerate(ranks):
        first = got["steps"][0]
        compare(
            first["now"], truth[0], local(rank, size), rank=rank, size=size, calls=sent(first["events"]),
            later=first["later"],
        )  # fmt: skip
        if any(step["changed"] for step in got["steps"]):
            raise Wrong("weights-changed", where=f"rank {rank} of {size}")
    yield "a few all-reduces of buckets, the first long before backward ends"
    for rank, got in enumerate(ranks):
        _early(got["steps"][0]["events"], rank, size)
    yield "backward ends even if another rank has not begun: nothing blocks in it"
    if not ranks[-1]["others ended"]:
        raise Wrong("blocking", where=f"rank 0 of {size}")
    yield "the second, third and fourth step, with both ways to zero the gradients"
    for rank, got in enumerate(ranks):
        for step in (1, 2, 3):
            _later_step(got["steps"][step], truth[step], step, f"rank {rank} of {size}")
    undisturbed([sum(step["overwritten"] for step in got["steps"]) for got in ranks], size)


def _train(Overlap):  # noqa: N803
    first_of_two, last = dist.get_world_size() == 2, dist.get_rank() == 1
    model, steps, ended = Chain().to(launch.device()), [], True
    parameters = list(model.parameters())
    with own_work():
        order = list(parameters)
        order[6], order[8] = order[8], order[6]  # weights of two buckets
        order[4:6] = order[5], order[4]  # a layer's bias before its weight: not in the order of arrival
        reducer = Overlap(order, CAPACITY)
        for step in range(4):
            if step:
                model.zero_grad(set_to_none=step != 2)
            # two ranks show it; with more, a wrong answer would only cost more time
            backward = _Backward() if step == 0 and first_of_two else None
            log = Traffic()
            model.tell = log.mark
            with Withheld(backward and backward.waits) as running, log:
                loss = model(share(step))
                if backward and last:
                    ended = backward.ended_elsewhere()
                loss.backward()
                log.mark("backward ended")
                if backward:
                    backward.say("ended")
                before = [p.detach().clone() for p in parameters]
                reducer.finish()
                now = gradients(parameters)
            changed = any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
            running.left()
            steps.append(
                {
                    "now": now,
                    "later": gradients(parameters),
                    "events": log.events,
                    "changed": changed,
                    "old": running.old,
                    "overwritten": running.overwritten,
                }
            )
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p -= RATE * p.grad
    return {"steps": steps, "others ended": ended}


class _Backward:
    """Of two ranks, the first one tells the last, past all collectives, how its backward goes on: once."""

    def __init__(self):
        self.store, self.told = dist.distributed_c10d._get_default_store(), False

    def say(self, word):
        """Tell it, unless something was told before."""
        if not self.told:
            self.told = True
            self.store.set(f"backward of {dist.get_rank()}", word)

    def waits(self):
        """A collective is waited for; by a thread beside backward it may be."""
        if threading.current_thread() is threading.main_thread():
            self.say("waits")

    def ended_elsewhere(self):
        """On the last rank: whether the first one's backward ends without waiting for it."""
        key = "backward of 0"
        try:
            self.store.wait([key], timedelta(seconds=PATIENCE))
        except Exception:
            return False
        return self.store.get(key) == b"ended"


def _early(events, rank, size):
    calls, where = sent(events), f"rank {rank} of {size}"
    if not calls:
        return  # one rank alone may send nothing
    fields = {"n": len(calls), "held": HELD, "capacity": CAPACITY, "where": where}
    if len(calls) > 2 * (HELD // CAPACITY) + 2:
        raise Wrong("no-buckets", **fields)
    if reduced(events, size) > 1.05 * HELD + 64:
        raise Wrong("sent-again", sent=reduced(events, size), **fields)
    before = until(events, "backward ended")
    if len(calls) == 1:
        raise Wrong("one-bucket", **fields)
    if not sent(before):
        raise Wrong("no-overlap", **fields)
    early = volume(until(events, "layer 0"))
    if early < HELD // 2:
        raise Wrong("late-start", early=early, total=HELD, **fields)


def _later_step(got, truth, step, where):
    try:
        compare(got["now"], truth, got["now"], rank=0, size=1, calls=[()], default="second-step")
    except Wrong as wrong:
        wrong.slug = "zeroed-in-place" if step == 2 else "second-step"
        wrong.fields["step"] = step + 1
        wrong.where = f"{where}, step {step + 1}"
        raise
    if got["old"]:
        raise Wrong("handles-kept", n=got["old"], step=step + 1, where=where)
