"""Balise 6, on two ranks: what the events tell, what is kept, when a send starts.

Nothing is timed here. The clock is one of our own, which goes on by a known time when a stage computes and when a
message has been waited for, and hardly at all otherwise: so what an event holds can be read from it, on any machine.
"""

import contextlib
import gc
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from dlojz_tp import launch, planner
from dlojz_tp.checking import Wrong, pretended
from dlojz_tp.checks.pipeline_under_the_hood.common import Place, loss_function
from dlojz_tp.checks.pipeline_under_the_hood.sends import Sends
from dlojz_tp.measure import LiveBytes

HINTS = {
    "waiting-counted": "A {kind} of {truth:.0f} ms has an event of {got:.0f} ms, which includes the wait for a "
    "message. Read the clock after everything it needs has arrived, and again before anything "
    "is sent.",
    "clock-too-early": "A {kind} of {truth:.0f} ms has an event of {got:.1f} ms. Read the clock right before and "
    "right after stage(x), and do the same for y.backward().",
    "other-clock": "The times in the events aren't those of clock(). Take the begin and end of each event from "
    "clock() at that moment: on a GPU no other clock knows when the device works.",
    "message-inside": "The event of {kind} {k} includes the start of a message. Read the clock before anything is "
    "sent, and after everything it needs has been received.",
    "micro-batches-kept": "After the backwards of {n} micro-batches, stage 1 of 2 still holds what it received for "
    "{got} of them. Nothing may hold a micro-batch after its backward: take it out of where "
    "you keep it (pop), don't keep it in a second list, and add each loss as y.detach(), "
    "because a sum of losses holds all their graphs.",
    "sends-late": "Stage 0 sent its first activation only after all its forwards. Start each send as soon as its "
    "activation is there, or no two stages work at the same time.",
    "activations-not-freed": "Stage 0 of 2 held {got:.1f} micro-batches' activations at its peak, but 1F1B needs "
    "only {allowed}. Nothing may hold a micro-batch's graph after its backward: no "
    "retain_graph, no y or loss with its graph in a list.",
}
WIDE, ROWS = 2048, 32
ACTIVATION = WIDE * ROWS * 4  # bytes of the middle of a micro-batch
FORWARD, BACKWARD, MESSAGE, READING = 0.006, 0.009, 0.04, 1e-6  # seconds by which the clock goes on
MOST = 4.5  # activations at the peak: two are in flight, a third is made, and a gradient of the same size beside them


class _Clock:
    """A clock that goes on when it is told, and a little when it is read, so that no two readings are alike."""

    def __init__(self):
        self.now, self.told, self.thread = 1000.0, [], threading.get_ident()  # told: what the notebook's clock() gave

    def goes_on(self, seconds):
        """Whether it did: what other threads do or wait for goes on beside."""
        here = threading.get_ident() == self.thread
        self.now += seconds if here else 0.0
        return here

    def read(self, *_):
        self.now += READING
        if sys._getframe(1).f_code.co_name == "clock":
            self.told.append(self.now)
        return self.now

    def read_ns(self, *_):
        return round(1e9 * self.read())

    @contextlib.contextmanager
    def shown(self, *answers):
        """Inside, Python's clocks are this one, also under a name in the answers; a message received takes its time."""
        names = [name for name in ("perf_counter", "monotonic", "time", "clock_gettime") if hasattr(time, name)]
        changes = [(time, name, self.read) for name in names] + [(time, f"{name}_ns", self.read_ns) for name in names]
        for name in ("send", "recv"):
            waiting = self._waiting(getattr(dist, name))
            changes += [(dist, name, waiting), (distributed_c10d, name, waiting)]
        with pretended(changes, *answers):
            yield

    def _waiting(self, message):
        def through(*args, **kwargs):
            found = message(*args, **kwargs)
            self.goes_on(MESSAGE)
            return found

        return through


class _Noted(Sends):
    """Notes on a clock when sends and receives start, and lets the clock go on when one was waited for."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.begun = clock, []  # (name, when)

    def began(self, name):
        if self.clock.goes_on(READING):
            self.begun.append((name, self.clock.now))

    def waited(self):
        self.clock.goes_on(MESSAGE)


class _Takes(torch.autograd.Function):
    """y; forward and backward take some time. `log` gets (kind, begin, end) of each."""

    @staticmethod
    def forward(ctx, y, clock, log):
        ctx.clock, ctx.log = clock, log
        _go_on("F", FORWARD, clock, log)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        _go_on("B", BACKWARD, ctx.clock, ctx.log)
        return gradient, None, None


def _go_on(kind, seconds, clock, log):
    log.append((kind, clock.now, clock.now + seconds))
    clock.now += seconds


class _Stage(nn.Module):
    """Two layers with a wide middle. What is sent is narrow: a send may hold it until the end."""

    def __init__(self, clock):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDE), nn.Tanh(), nn.Linear(WIDE, 8))
        self.clock, self.log = clock, []
        self.inputs, self.held = [], 0  # of all micro-batches; how many of the earlier ones still have their memory

    def forward(self, x):
        gc.collect()  # what an answer's cycles hold goes now, and not at some time
        self.held = sum(not earlier.expired() for earlier in self.inputs)
        self.inputs.append(StorageWeakRef(x.untyped_storage()))
        return _Takes.apply(self.layers(x), self.clock, self.log)


def on_the_clock(run_schedule):
    """On one of two ranks: what `_run` found with 1F1B and with GPipe."""
    rank = dist.get_rank()
    return [_run(run_schedule, rank, orders[rank]) for orders in (planner.one_f_one_b(2, 6), planner.gpipe(2, 3))]


def _run(run_schedule, rank, actions):
    """{peak of living bytes in activations, events, what was computed, messages begun, earlier inputs at the end}"""
    clock = _Clock()
    stage, sends = _Stage(clock).to(launch.device()), _Noted(clock)
    m = len(actions) // 2
    x = torch.ones(m * ROWS, 8, device=launch.device())
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)  # gradients are there, so that what is new are activations
    with LiveBytes() as live, clock.shown(run_schedule), sends.watched(run_schedule):
        _, events = run_schedule(list(actions), stage, Place(rank, 2), x, x, loss_function, m)
    told = all(when in clock.told for *_, begin, end in events for when in (begin, end))
    return {
        "peak": live.peak / ACTIVATION, "told": told, "events": [(kind, k, begin, end) for _, kind, k, _, begin, end in events],
        "log": stage.log, "begun": sends.begun, "held": stage.held,
    }  # fmt: skip


def judged(ranks):
    """Judge what `on_the_clock` found on both ranks."""
    for case, schedule in enumerate(("1F1B", "GPipe")):
        for rank, found in enumerate(ranks):
            where = f"stage {rank} of 2, {schedule}"
            if not found[case]["told"]:
                raise Wrong("other-clock", got=found[case]["events"][:2], where=where)
            for kind, k, begin, end in found[case]["events"]:
                _lasts(kind, k, end - begin, where)
    computed, sent = ranks[0][1]["log"], [when for name, when in ranks[0][1]["begun"] if name == "isend"]
    through = max(end for kind, _, end in computed if kind == "F")
    if sent and min(sent) > through:
        raise Wrong("sends-late", where="GPipe, 2 stages, 3 micro-batches")
    for case, schedule in enumerate(("1F1B", "GPipe")):
        for rank, found in enumerate(ranks):
            for kind, k, begin, end in found[case]["events"]:
                if any(begin < when < end for _, when in found[case]["begun"]):
                    raise Wrong("message-inside", kind=kind, k=k, where=f"stage {rank} of 2, {schedule}")
    (first, _), (last, _) = ranks
    if first["peak"] > MOST:
        raise Wrong("activations-not-freed", got=first["peak"] - 1, allowed=2, where="1F1B, 6 micro-batches")
    if last["held"] > 3:
        raise Wrong("micro-batches-kept", got=last["held"], n=5, where="1F1B, 6 micro-batches")


def _lasts(kind, k, got, where):
    """An event lasts as long as what was done; a message that was waited for takes longer than either."""
    truth = FORWARD if kind == "F" else BACKWARD
    words = {"kind": "forward" if kind == "F" else "backward", "truth": 1e3 * truth, "got": 1e3 * got}
    where = f"{kind} {k}, {where}"
    if got < 0.8 * truth:
        raise Wrong("clock-too-early", where=where, **words)
    if got > 1.2 * truth:
        raise Wrong("waiting-counted", where=where, **words)
