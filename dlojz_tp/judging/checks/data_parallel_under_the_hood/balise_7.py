"""Balise 7: parameters that took no part this time, frozen and tied ones."""

from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import (
    NO_HANDLE,
    by_world,
    not_mean,
    nothing_overwritten,
    on_each,
    own_work,
    reduced,
)
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.networks import gradients, mark, rows, same
from dlojz_tp.judging.probes.ranks import hung, killed_by
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.traffic import Traffic, sent, until, volume
from dlojz_tp.judging.probes.withheld import Withheld

CAPACITY = 420  # bytes: heads a and b each fill a bucket, the spare one shares the first with the shift

KNOWN = (
    NO_HANDLE,
    (hung, "waits-for-ever"),
    (killed_by("SIGABRT"), "waits-for-ever"),
    ("doesn't require gradient", "frozen-hook"),
    ("NoneType", "unused-none"),
)


class Heads(nn.Module):
    """A trunk whose first and third layer share a weight, two heads and a spare one, one frozen scale."""

    def __init__(self):
        super().__init__()
        with seeded(11):
            self.tied, self.middle = (nn.Parameter(torch.randn(16, 16).double() / 4) for _ in range(2))
            self.scales = nn.ParameterList(nn.Parameter(torch.rand(16).double() + 0.5) for _ in range(3))
            self.scales[1].data.copy_(self.scales[0].data)  # equal values do not tie
            self.frozen = nn.Parameter(torch.rand(16).double() + 0.5, requires_grad=False)
            self.heads = nn.ParameterDict({k: nn.Parameter(torch.randn(16, 3).double()) for k in ("a", "b", "spare")})
            self.shift = nn.Parameter(torch.rand(3).double())
        self.tell = lambda text: None

    def named(self) -> list[nn.Parameter]:
        """All parameters in the order of the layers; the tied one is named twice."""
        s, h = self.scales, self.heads
        trunk = [self.tied, s[0], self.middle, s[1], self.tied, s[2], self.frozen]
        return [*trunk, h["a"], h["b"], h["spare"], self.shift]

    def forward(self, x, heads):
        for k, (weight, scale) in enumerate(zip((self.tied, self.middle, self.tied), self.scales, strict=True)):
            x = mark(torch.tanh(x @ weight) * scale, self.tell, f"layer {k}")
        x = x * self.frozen
        return sum((x @ self.heads[k] + self.shift).square().sum(dim=1).mean() for k in heads)


WORDS = {
    "one head": "all ranks use head a",
    "by rank": "even ranks use head a, odd ranks head b",
    "other head": "all ranks use head b, after zero_grad(set_to_none=False)",
    "collected": "head a in the first micro-batch, head b in the last",
    "all": "all heads are used",
}
FROZEN, HEADS = 6, (7, 8)  # places in named()


def heads_of(case, rank):
    """The heads of each micro-batch."""
    mine = "ab"[rank % 2]
    return {"one head": ["a"], "by rank": [mine], "other head": ["b"], "collected": ["a", "b"]}.get(
        case, [("a", "b", "spare")]
    )


def run_backward(model, x, heads, reducer=None):
    """One step over the micro-batches that `heads` lists; all but the last inside no_sync()."""
    parts = x.split(-(-len(x) // len(heads)))
    for k, (part, used) in enumerate(zip(parts, heads, strict=True)):
        loss = model(part, used) * len(part) / len(x)
        if reducer is not None and k < len(parts) - 1:
            with reducer.no_sync():
                loss.backward()
        else:
            loss.backward()


@cache
def own_of(step, case, rank, size):
    """What one rank's rows give alone, zeros for what it does not use; None for the frozen parameter."""
    model = Heads()
    run_backward(model, rows(step, width=16)[rank::size], heads_of(case, rank))
    return [
        torch.zeros_like(p) if g is None and p.requires_grad else g
        for p, g in zip(model.named(), gradients(model.named()), strict=True)
    ]


def observe(Reducer):  # noqa: N803
    model, found, rank = Heads().to(launch.device()), {}, dist.get_rank()
    with own_work():
        reducer = Reducer(model.named(), CAPACITY)
        for step, case in enumerate(WORDS):
            model.zero_grad(set_to_none=case != "other head")
            log = Traffic()
            model.tell = log.mark
            with Withheld(lambda log=log: log.mark("waits")) as running, log:
                x = rows(step, width=16)[rank :: dist.get_world_size()].to(launch.device())
                run_backward(model, x, heads_of(case, rank), reducer)
                log.mark("backward ended")
                reducer.finish()
                now = gradients(model.named())
            running.left()
            found[case] = {"now": now, "later": gradients(model.named()), "events": log.events}
            found[case]["overwritten"] = running.overwritten
    return found


def look_at_step(step, claim):
    case = list(WORDS)[step]

    def find(ranks, rank):
        size, got = len(ranks), ranks[rank][case]
        own = [own_of(step, case, one, size) for one in range(size)]
        truth = [None if g[0] is None else torch.stack(g).mean(dim=0) for g in zip(*own, strict=True)]
        if got["now"][FROZEN] is not None:
            return "frozen-gradient", {"got": got["now"][FROZEN]}
        wrong = not_mean(got, truth, own[rank], rank, size, f", {WORDS[case]}")
        if not wrong:
            return None
        slug, fields = wrong
        if slug == "no-communication" and sent(ranks[rank]["one head" if step else "all"]["events"]):
            # it does send, but not in this step
            return "second-step" if step == 1 else "bucket-left-out", fields | {"k": 0, "step": step + 1}
        # a slip that touches every parameter keeps its own hint
        if slug in ("wrong-gradient", "not-copied-back") or same(got["now"][0], truth[0]):
            slug = mistake(ranks, own, truth, case, rank, fields["k"])
            fields["error"] = fields["got"] if isinstance(fields["got"], str) else "another gradient"
        return slug, fields

    return on_each(claim, find)


def mistake(ranks, own, truth, case, rank, k):
    """The hint for a gradient that is not the mean; k: the number of the first such parameter."""
    size, g = len(ranks), ranks[rank][case]["now"][k]
    if case == "collected" and k in HEADS and (g is None or same(g, torch.zeros_like(truth[k]))):
        return "collected-lost"
    if g is None or (case == "by rank" and same(g, torch.zeros_like(truth[k]))):
        return "ranks-disagree"
    users = sum(bool(mine[k].count_nonzero()) for mine in own)
    if 0 < users < size and same(g, truth[k] * size / users):
        return "divided-by-users"
    if same(g, own[rank][k]) or same(g, own[rank][k] / size):
        return "bucket-left-out"
    if case == "by rank" and k in HEADS:
        for heads in product(HEADS, repeat=size):
            if same(g, torch.stack([mine[head] for mine, head in zip(own, heads)]).mean(dim=0)):
                return "buckets-swapped"
    return "stale" if users < size else "wrong-gradient"


def economy(ranks, rank):
    """Whether each parameter is sent once, in buckets that start in time."""
    model, events = Heads(), ranks[rank]["all"]["events"]
    unique = {id(p): p for p in model.named() if p.requires_grad}.values()
    held, travelled, calls = sum(p.nbytes for p in unique), reduced(events, len(ranks)), sent(events)
    fields = {"sent": travelled, "held": held, "n": len(calls), "capacity": CAPACITY}
    if travelled > held + 600:
        return "tied-sent-twice" if travelled <= held + 600 + model.tied.nbytes else "sent-again", fields
    if len(calls) > 9:
        return "one-each", fields
    if len(until(events, "waits")) < len(until(events, "backward ended")):
        return "blocking", fields
    return ("overlap-lost", fields) if calls and volume(until(events, "layer 0")) <= CAPACITY else None


FIRST, *OTHERS = WORDS.values()
LOOKS = [
    look_at_step(0, f"{FIRST}, the spare head is never used, a scale is frozen"),
    *(look_at_step(step, words) for step, words in enumerate(OTHERS, 1)),
    on_each("a tied parameter is sent once, and the buckets still start during backward", economy),
    nothing_overwritten(lambda got: sum(step["overwritten"] for step in got.values())),
]


def on_gpu(_, Reducer):  # noqa: N803
    used, unused = (nn.Parameter(torch.ones(3, device=launch.device())) for _ in range(2))
    reducer = Reducer([used, unused], 1000)
    used.sum().backward()
    reducer.finish()


def balise_7(Reducer):  # noqa: N803
    """Five steps in which not every parameter takes part, on 1 to 4 ranks."""
    yield LOOKS[0].claim
    yield from by_world(LOOKS, observe, Reducer, known=KNOWN)
    yield "the same where each rank has a GPU"
    on_gpus(on_gpu, Reducer, known=left_on_cpu("made-on-cpu"))
