"""Balise 6, on two ranks of which one is slow: what the events tell, what is kept, when a send starts."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch, planner
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.pipeline_under_the_hood.common import Place, loss_function
from dlojz_tp.measure import LiveBytes

HINTS = {
    "waiting-counted": "A {kind} of {truth:.0f} ms has an event of {got:.0f} ms: it holds the wait for a message. Read the clock "
    "after what it needs has come, and again before anything is sent.",
    "clock-too-early": "A {kind} of {truth:.0f} ms has an event of {got:.1f} ms. Read the clock right before and right after "
    "stage(x), and the same for y.backward().",
    "sends-late": "Stage 1 got its first micro-batch when stage 0 was through with all its forwards. Start each send as soon as "
    "its activation is there, or no two stages work at the same time.",
    "activations-not-freed": "Stage 0 of 2 held {got:.1f} micro-batches' activations at its peak, where 1F1B needs {allowed}. Take a "
    "micro-batch out of what you keep in its backward, and do not retain its graph.",
}
WIDE, ROWS = 2048, 32
ACTIVATION = WIDE * ROWS * 4  # bytes of the middle of a micro-batch
# seconds that (forward, backward) of a stage rest; in both cases one stage has to wait for the other
SLOW_LAST = (0.0, 0.0), (0.06, 0.0)
SLOW_FIRST = (0.05, 0.0), (0.01, 0.05)
MOST = 4.5  # activations at the peak: two are in flight, a third is made, and a gradient of the same size beside them
EXTRA = 0.02  # seconds of an event beyond the rest, at most: a stage computes in less, and waits for longer


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

    def forward(self, x):
        return _Rest.apply(self.layers(x), self.naps, self.log)


def resting(run_schedule):
    """On one of two ranks: (peak of living bytes in activations, events and rests of 1F1B, those of GPipe)."""
    rank = dist.get_rank()
    kept, *slow_last = _run(run_schedule, rank, SLOW_LAST[rank], planner.one_f_one_b(2, 6)[rank])
    _, *slow_first = _run(run_schedule, rank, SLOW_FIRST[rank], planner.gpipe(2, 3)[rank])
    return kept, slow_last, slow_first


def _run(run_schedule, rank, naps, actions):
    stage = _Resting(naps).to(launch.device())
    m = len(actions) // 2
    x = torch.ones(m * ROWS, 8, device=launch.device())
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)  # gradients are there, so that what is new are activations
    dist.barrier()
    with LiveBytes() as live:
        _, events = run_schedule(list(actions), stage, Place(rank, 2), x, x, loss_function, m)
    return live.peak / ACTIVATION, [(kind, end - begin) for _, kind, _, _, begin, end in events], stage.log


def timed(ranks):
    """Judge what `resting` found on both ranks."""
    for case, schedule in ((1, "1F1B, a slow last stage"), (2, "GPipe, a slow first stage")):
        for rank, found in enumerate(ranks):
            for kind in "FB":
                _spans(*found[case], kind, f"stage {rank} of 2, {schedule}")
    first, last = ([span for span in found[2][1] if span[0] == "F"] for found in ranks)
    if last[0][1] > first[-1][2]:
        raise Wrong("sends-late", where="GPipe, 2 stages, 3 micro-batches")
    if ranks[0][0] > MOST:
        raise Wrong("activations-not-freed", got=ranks[0][0] - 1, allowed=2, where="1F1B, 6 micro-batches")


def _spans(events, log, kind, where):
    """The events of one kind last as long as what was done."""
    truth = statistics.median(end - begin for what, begin, end in log if what == kind)
    got = statistics.median(seconds for what, seconds in events if what == kind)
    words = {"kind": "forward" if kind == "F" else "backward", "truth": 1e3 * truth, "got": 1e3 * got, "where": where}
    if got < 0.8 * truth:
        raise Wrong("clock-too-early", **words)
    if got > truth + EXTRA:
        raise Wrong("waiting-counted", **words)
