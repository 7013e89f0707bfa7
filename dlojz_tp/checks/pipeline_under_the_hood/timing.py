"""Balise 6, on two ranks of which one is slow: what the events tell, what is kept, when a send starts."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dlojz_tp import launch, planner
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.pipeline_under_the_hood.common import Place, loss_function
from dlojz_tp.checks.pipeline_under_the_hood.sends import Sends
from dlojz_tp.measure import LiveBytes

HINTS = {
    "waiting-counted": "A {kind} of {truth:.0f} ms has an event of {got:.0f} ms: it holds the wait for a message. Read the clock "
    "after what it needs has come, and again before anything is sent.",
    "clock-too-early": "A {kind} of {truth:.0f} ms has an event of {got:.1f} ms. Read the clock right before and right after "
    "stage(x), and the same for y.backward().",
    "message-inside": "The event of {kind} {k} holds the start of a message. Read the clock before anything is sent, and after what "
    "is needed has been received.",
    "micro-batches-kept": "After the backwards of {n} micro-batches, stage 1 of 2 still holds what it had received for {got} of them. "
    "Take a micro-batch out of what you keep in its backward (pop).",
    "sends-late": "Stage 1 got its first micro-batch when stage 0 was through with all its forwards. Start each send as soon as "
    "its activation is there, or no two stages work at the same time.",
    "activations-not-freed": "Stage 0 of 2 held {got:.1f} micro-batches' activations at its peak, where 1F1B needs {allowed}. Take a "
    "micro-batch out of what you keep in its backward, and do not retain its graph.",
}
WIDE, ROWS = 2048, 32
ACTIVATION = WIDE * ROWS * 4  # bytes of the middle of a micro-batch
# what (forward, backward) of a stage rest; in both cases one stage has to wait for the other
SLOW_LAST = (0, 0), (6, 0)
SLOW_FIRST = (5, 0), (1, 5)
BRISK, PATIENT = 0.005, 0.02  # seconds of one rest: at first, and again where a busy machine may have been the reason
MOST = 4.5  # activations at the peak: two are in flight, a third is made, and a gradient of the same size beside them
EXTRA = 2.4  # rests that an event may last beyond what was rested: a stage computes in less, and waits for longer


class _Rest(torch.autograd.Function):
    """y, after a rest forward and one backward; `log` gets (kind, begin, end) of each."""

    @staticmethod
    def forward(ctx, y, naps, log):
        ctx.nap, ctx.log = naps[1], log
        _rest("F", naps[0], log)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        _rest("B", ctx.nap, ctx.log)
        return gradient, None, None


def _rest(kind, seconds, log):
    begin = time.perf_counter()
    time.sleep(seconds)
    log.append((kind, begin, time.perf_counter()))


class _Resting(nn.Module):
    """Two layers with a wide middle, and a rest. What is sent is narrow: a send may hold it until the end."""

    def __init__(self, naps):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDE), nn.Tanh(), nn.Linear(WIDE, 8))
        self.naps, self.log = naps, []
        self.inputs, self.held = [], 0  # of all micro-batches; how many of the earlier ones still have their memory

    def forward(self, x):
        self.held = sum(not earlier.expired() for earlier in self.inputs)
        self.inputs.append(StorageWeakRef(x.untyped_storage()))
        return _Rest.apply(self.layers(x), self.naps, self.log)


def resting(run_schedule, rest):
    """On one of two ranks: what `_run` found with 1F1B and with GPipe. rest: seconds."""
    rank = dist.get_rank()
    orders = planner.one_f_one_b(2, 6)[rank], planner.gpipe(2, 3)[rank]
    cases = zip((SLOW_LAST, SLOW_FIRST), orders, strict=True)
    return [_run(run_schedule, rank, [rest * n for n in naps[rank]], order) for naps, order in cases]


def _run(run_schedule, rank, naps, actions):
    """{peak of living bytes in activations, events and rests, messages begun, earlier inputs at the last forward}"""
    stage, sends = _Resting(naps).to(launch.device()), Sends()
    m = len(actions) // 2
    x = torch.ones(m * ROWS, 8, device=launch.device())
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)  # gradients are there, so that what is new are activations
    dist.barrier()
    with LiveBytes() as live, sends.watched(run_schedule):
        _, events = run_schedule(list(actions), stage, Place(rank, 2), x, x, loss_function, m)
    events = [(kind, k, begin, end) for _, kind, k, _, begin, end in events]
    return {
        "peak": live.peak / ACTIVATION, "events": events, "log": stage.log, "begun": sends.begun, "held": stage.held,
    }  # fmt: skip


def timed(ranks, again):
    """Judge what `resting` found on both ranks, with BRISK rests; where times are wrong, `again()` tries PATIENT ones."""
    try:
        _judged(ranks, BRISK)
    except Wrong as wrong:
        if wrong.slug not in ("clock-too-early", "waiting-counted", "sends-late"):
            raise
        _judged(again(), PATIENT)


def _judged(ranks, rest):
    for case, schedule in enumerate(("1F1B, a slow last stage", "GPipe, a slow first stage")):
        for rank, found in enumerate(ranks):
            for kind in "FB":
                _spans(found[case], kind, EXTRA * rest, f"stage {rank} of 2, {schedule}")
    first, last = ([span for span in found[1]["log"] if span[0] == "F"] for found in ranks)
    if last[0][1] > first[-1][2]:
        raise Wrong("sends-late", where="GPipe, 2 stages, 3 micro-batches")
    for case, schedule in enumerate(("1F1B", "GPipe")):
        for rank, found in enumerate(ranks):
            for kind, k, begin, end in found[case]["events"]:
                if any(begin < message < end for message in found[case]["begun"]):
                    raise Wrong("message-inside", kind=kind, k=k, where=f"stage {rank} of 2, {schedule}")
    (first, _), (last, _) = ranks
    if first["peak"] > MOST:
        raise Wrong("activations-not-freed", got=first["peak"] - 1, allowed=2, where="1F1B, 6 micro-batches")
    if last["held"] > 3:
        raise Wrong("micro-batches-kept", got=last["held"], n=5, where="1F1B, 6 micro-batches")


def _spans(found, kind, extra, where):
    """The events of one kind last as long as what was done."""
    truth = statistics.median(end - begin for what, begin, end in found["log"] if what == kind)
    got = statistics.median(end - begin for what, _, begin, end in found["events"] if what == kind)
    words = {"kind": "forward" if kind == "F" else "backward", "truth": 1e3 * truth, "got": 1e3 * got, "where": where}
    if got < 0.8 * truth:
        raise Wrong("clock-too-early", **words)
    if got > truth + extra:
        raise Wrong("waiting-counted", **words)
