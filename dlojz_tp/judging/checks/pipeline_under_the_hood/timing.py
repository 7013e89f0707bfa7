"""Balise 6, on two ranks: what the events tell, what is kept, when a send starts.

Nothing is timed here. The clock is one of our own, which goes on by a known time when a stage computes and when a
message has been waited for, and hardly at all otherwise: so what an event holds can be read from it, on any machine.
"""

import contextlib
import gc
import sys
import threading
import time
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from dlojz_tp import launch, planner
from dlojz_tp.judging.checking import pretended
from dlojz_tp.judging.checking.looks import Look, at_most, silent
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import Place, loss_function
from dlojz_tp.judging.checks.pipeline_under_the_hood.sends import Sends
from dlojz_tp.measure import LiveBytes

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
    sends.finish()
    told = all(when in clock.told for *_, begin, end in events for when in (begin, end))
    return {
        "peak": live.peak / ACTIVATION, "told": told, "events": [(kind, k, begin, end) for _, kind, k, _, begin, end in events],
        "log": stage.log, "begun": sends.begun, "held": stage.held,
    }  # fmt: skip


def _of_runs(claim, wrong, hint):
    """Looks at both schedules on both stages. wrong(run): the fields of the hint; {} where nothing is wrong."""
    for (case, schedule), rank in product(enumerate(("1F1B", "GPipe")), (0, 1)):

        def fields(seen, due, where=f"stage {rank} of 2, {schedule}"):
            return silent(seen, due) | {"where": where} | seen

        yield Look(claim, lambda ranks, rank=rank, case=case: wrong(ranks[rank][case]), {}, hint, fields=fields)


def _other_times(run):
    return {} if run["told"] else {"got": run["events"][:2]}


def _lasts(run):
    """An event lasts as long as what was done; a message that was waited for takes longer than either."""
    for kind, _, begin, end in run["events"] if run["told"] else []:
        truth = FORWARD if kind == "F" else BACKWARD
        if not 0.8 * truth <= end - begin <= 1.2 * truth:
            return {"kind": "forward" if kind == "F" else "backward", "truth": 1e3 * truth, "got": 1e3 * (end - begin)}
    return {}


def _message_inside(run):
    within = ({"kind": e[0], "k": e[1]} for e in run["events"] if any(e[2] < when < e[3] for _, when in run["begun"]))
    return next(within, {})


def _late(ranks) -> bool:
    """Whether stage 0 of GPipe began no send before its last forward was through."""
    sent = [when for name, when in ranks[0][1]["begun"] if name == "isend"]
    return bool(sent) and min(sent) > max(end for kind, _, end in ranks[0][1]["log"] if kind == "F")


def _held(peak, _):
    return {"got": peak - 1, "allowed": 2, "where": "1F1B, 6 micro-batches"}


EVENTS = "events: one per action, with only the computing in it; activations freed in their backward"
LOOKS = [  # at what `on_the_clock` found on both ranks
    *_of_runs(EVENTS, _other_times, "other-clock"),
    *_of_runs(EVENTS, _lasts, lambda seen, _: "clock-too-early" if seen["got"] < seen["truth"] else "waiting-counted"),
    Look("", _late, False, "sends-late", fields={"where": "GPipe, 2 stages, 3 micro-batches"}),
    *_of_runs(EVENTS, _message_inside, "message-inside"),
    Look("", lambda ranks: ranks[0][0]["peak"], MOST, "activations-not-freed", holds=at_most, fields=_held),
    Look("", lambda ranks: ranks[1][0]["held"], 3, "micro-batches-kept", holds=at_most,
         fields={"n": 5, "where": "1F1B, 6 micro-batches"}),
]  # fmt: skip
