"""Balise 5: all-reduces that run while backward goes on."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.checks.data_parallel_under_the_hood.bucket_errors import KNOWN
from dlojz_tp.judging.checks.data_parallel_under_the_hood.chain_gradients import CAPACITY, HELD, RATE, local, plain
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import (
    by_world,
    not_mean,
    nothing_overwritten,
    on_each,
    own_work,
    reduced,
    share,
)
from dlojz_tp.judging.probes.networks import Chain, gradients
from dlojz_tp.judging.probes.traffic import Traffic, sent, until, volume
from dlojz_tp.judging.probes.withheld import Withheld

PATIENCE = 4  # seconds that the last rank waits for the other's backward, should that wait in a way which nobody sees

HINTS = {
    "blocking": "Rank 0 waits for another rank inside backward: its all-reduce blocks. Start it with "
                "async_op=True, keep the handle that it returns, and wait in finish().",
    "sent-again": "You sent as much as all-reduces of {sent} bytes need, but the gradients have {held} bytes. Send "
                  "each gradient once in each step.",
    "second-step": "The first step is right, step {step} is not. finish() must reset the count of the missing "
                   "gradients and the list of running operations.",
}  # fmt: skip


def observe(Overlap, steps_to_do=4):  # noqa: N803
    first_of_two, last = dist.get_world_size() == 2, dist.get_rank() == 1
    model, steps, ended = Chain().to(launch.device()), [], True
    parameters = list(model.parameters())
    with own_work():
        order = list(parameters)
        order[6], order[8] = order[8], order[6]  # weights of two buckets
        order[4:6] = order[5], order[4]  # a layer's bias before its weight: not in the order of arrival
        reducer = Overlap(order, CAPACITY)
        for step in range(steps_to_do):
            if step:
                model.zero_grad(set_to_none=step != 2)
            # two ranks show it; with more, a wrong answer would only cost more time
            backward = Backward() if step == 0 and first_of_two else None
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
            found = {"now": now, "later": gradients(parameters), "events": log.events, "changed": changed}
            steps.append(found | {"old": running.old, "overwritten": running.overwritten})
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p -= RATE * p.grad
    return {"steps": steps, "others ended": ended}


class Backward:
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


def early(ranks, rank):
    """Whether the first step starts a few all-reduces, in time."""
    events, size = ranks[rank]["steps"][0]["events"], len(ranks)
    n, travelled = len(sent(events)), reduced(events, size)
    fields = {"n": n, "held": HELD, "capacity": CAPACITY, "sent": travelled}
    if not n:  # one rank alone may send nothing
        return None
    if n > 2 * (HELD // CAPACITY) + 2:
        return "no-buckets", fields
    if travelled > 1.05 * HELD + 64:
        return "sent-again", fields
    if n == 1:
        return "one-bucket", fields
    if not sent(until(events, "backward ended")):
        return "no-overlap", fields
    in_time = volume(until(events, "layer 0"))
    return ("late-start", {"early": in_time, "total": HELD}) if in_time < HELD // 2 else None


def step_is_mean(step):
    """A look at a step after the first."""

    def find(ranks, rank):
        if step >= len(ranks[rank]["steps"]):
            return None
        wrong = not_mean(
            ranks[rank]["steps"][step], plain(4)[step], plain(4)[step], rank, len(ranks), f", step {step + 1}"
        )
        return wrong and ("zeroed-in-place" if step == 2 else "second-step", wrong[1] | {"step": step + 1})

    return on_each("the second, third and fourth step, with both ways to zero the gradients", find)


def handles(ranks, rank):
    old = [(step["old"], k) for k, step in enumerate(ranks[rank]["steps"][1:], 2) if step["old"]]
    return ("handles-kept", {"n": old[0][0], "step": old[0][1]}) if old else None


def first_is_mean(ranks, rank):
    size = len(ranks)
    return not_mean(ranks[rank]["steps"][0], plain(4)[0], local(rank, size), rank, size)


LOOKS = [
    on_each("on 2, 3 and 4 ranks, and on one rank: the gradient of the whole batch when finish() returns",
            first_is_mean),
    on_each("", lambda ranks, rank:
            ("weights-changed", {}) if any(step["changed"] for step in ranks[rank]["steps"]) else None),
    on_each("a few all-reduces of buckets, the first long before backward ends", early),
    Look("backward ends even if another rank has not begun: nothing blocks in it", lambda ranks: ranks[-1]["others ended"],
         True, "blocking", fields={"where": "rank 0"}),
    *map(step_is_mean, (1, 2, 3)),
    on_each("", handles),
    nothing_overwritten(lambda got: sum(step["overwritten"] for step in got["steps"])),
]  # fmt: skip


def balise_5(Overlap):  # noqa: N803
    """Four steps on 1 to 4 ranks; in the first, of two ranks one begins backward when the other has ended its own."""
    yield LOOKS[0].claim
    try:
        yield from by_world(LOOKS, observe, Overlap, known=KNOWN)
    except Wrong as wrong:  # at the edge: the second step
        fails(wrong)
        yield from by_world(LOOKS, observe, Overlap, 1, known=KNOWN)
