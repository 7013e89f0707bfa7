"""Balise 7: parameters that took no part this time, frozen and tied ones."""

from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.data_parallel_under_the_hood.common import (
    NO_HANDLE,
    by_world,
    compare,
    own_work,
    reduced,
    undisturbed,
)
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.networks import gradients, mark, rows, same
from dlojz_tp.probes.ranks import hung, killed_by
from dlojz_tp.probes.seeded import seeded
from dlojz_tp.probes.traffic import Traffic, sent, until, volume
from dlojz_tp.probes.withheld import Withheld

CAPACITY = 420  # bytes: heads a and b each fill a bucket, the spare one shares the first with the shift

HINTS = {
    "waits-for-ever": "The ranks stood still or stopped with an error. Either a rank waits for a hook that never "
                      "fires, or the ranks started different buckets. All ranks must start the same buckets in the "
                      "same order, whichever parameters they used (the order of a set differs from rank to rank). "
                      "{error}",
    "frozen-hook": "A frozen parameter (requires_grad False) never gets a gradient and accepts no hook. Skip it.",
    "unused-none": "A parameter that was not used on this rank has p.grad None: {error}",
    "bucket-left-out": "A bucket was never started: parameter {k} still has the rank's own gradient. "
                       "start_complete must go on while the next bucket is complete, up to the last bucket; "
                       "finish() places what is missing, and then calls start_complete again.",
    "buckets-swapped": "Parameter {k} has the gradient of another head. Rank 0 and rank 1 used different heads, so "
                       "their buckets were complete in a different order: start the buckets strictly one after the "
                       "other.",
    "ranks-disagree": "Parameter {k} was used on only one rank, and the other ranks hold {error}. Afterwards all "
                      "ranks must hold the same mean, or their weights drift apart.",
    "divided-by-users": "You divided parameter {k} by the number of ranks that used it. A rank that didn't use it "
                        "contributes zero: divide by world_size.",
    "stale": "Not every rank used parameter {k} in this step, and a rank that didn't use it sent something other "
             "than zero: perhaps what an earlier step left in the bucket.",
    "collected-lost": "Parameter {k} was used in the first micro-batch, but not in the last one. Its hook did not "
                      "fire in the last one, but its gradient had been collected in p.grad, and it counts.",
    "tied-sent-twice": "You sent as much as all-reduces of {sent} bytes need, for {held} bytes of gradients. A "
                       "parameter with two names is one parameter.",
    "frozen-gradient": "A frozen parameter now has a gradient. Leave it None: with zeros, weight decay would "
                       "shrink the parameter.",
    "overlap-lost": "Every parameter was used, but no all-reduce was started before backward had reached the first "
                    "layer.",
    "one-each": "{n} collectives in one step are too many for {held} bytes in buckets of {capacity} bytes. Start "
                "one for each bucket.",
}  # fmt: skip
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
        return [
            self.tied,
            s[0],
            self.middle,
            s[1],
            self.tied,
            s[2],
            self.frozen,
            h["a"],
            h["b"],
            h["spare"],
            self.shift,
        ]

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


def _heads(case, rank):
    """The heads of each micro-batch."""
    mine = "ab"[rank % 2]
    return {"one head": ["a"], "by rank": [mine], "other head": ["b"], "collected": ["a", "b"]}.get(
        case, [("a", "b", "spare")]
    )


def balise_7(Reducer):  # noqa: N803
    """Five steps in which not every parameter takes part, on 1 to 4 ranks."""
    yield f"{WORDS['one head']}, the spare head is never used, a scale is frozen"
    yield from by_world(_judge_all, _steps, Reducer, known=KNOWN)
    yield "the same where each rank has a GPU"
    on_gpus(_on_gpu, Reducer, known=left_on_cpu("made-on-cpu"))


def _on_gpu(_, Reducer):  # noqa: N803
    used, unused = (nn.Parameter(torch.ones(3, device=launch.device())) for _ in range(2))
    reducer = Reducer([used, unused], 1000)
    used.sum().backward()
    reducer.finish()


def _judge_all(size, ranks):
    for step, (case, words) in enumerate(WORDS.items()):
        yield from [words] if step else []
        own = [_own(step, case, rank, size) for rank in range(size)]
        for rank in range(size):
            _judge(ranks, own, step, case, rank)
    yield "a tied parameter is sent once, and the buckets still start during backward"
    for rank, got in enumerate(ranks):
        _economy(got["all"]["events"], rank, size)
    undisturbed([sum(step["overwritten"] for step in got.values()) for got in ranks], size)


def _backward(model, x, heads, reducer=None):
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
def _own(step, case, rank, size):
    """What one rank's rows give alone, zeros for what it does not use; None for the frozen parameter."""
    model = Heads()
    _backward(model, rows(step, width=16)[rank::size], _heads(case, rank))
    return [
        torch.zeros_like(p) if g is None and p.requires_grad else g
        for p, g in zip(model.named(), gradients(model.named()), strict=True)
    ]


def _steps(Reducer):  # noqa: N803
    model, found, rank = Heads().to(launch.device()), {}, dist.get_rank()
    with own_work():
        reducer = Reducer(model.named(), CAPACITY)
        for step, case in enumerate(WORDS):
            model.zero_grad(set_to_none=case != "other head")
            log = Traffic()
            model.tell = log.mark
            with Withheld(lambda log=log: log.mark("waits")) as running, log:
                x = rows(step, width=16)[rank :: dist.get_world_size()].to(launch.device())
                _backward(model, x, _heads(case, rank), reducer)
                log.mark("backward ended")
                reducer.finish()
                now = gradients(model.named())
            running.left()
            found[case] = {"now": now, "later": gradients(model.named()), "events": log.events, "overwritten": running.overwritten}
    return found


def _judge(ranks, own, step, case, rank):
    size = len(ranks)
    truth = [None if g[0] is None else torch.stack(g).mean(dim=0) for g in zip(*own, strict=True)]
    got = ranks[rank][case]
    if got["now"][FROZEN] is not None:
        raise Wrong("frozen-gradient", got=got["now"][FROZEN], where=f"rank {rank} of {size}")
    try:
        compare(
            got["now"], truth, own[rank], rank=rank, size=size, calls=sent(got["events"]), later=got["later"],
            where=f", {WORDS[case]}",
        )  # fmt: skip
    except Wrong as wrong:
        if wrong.slug == "no-communication" and sent(ranks[rank]["one head" if step else "all"]["events"]):
            # it does send, but not in this step
            wrong.slug, wrong.fields["k"], wrong.fields["step"] = (
                "second-step" if step == 1 else "bucket-left-out",
                0,
                step + 1,
            )
        # a slip that touches every parameter keeps its own hint
        elif wrong.slug in ("wrong-gradient", "not-copied-back") or same(got["now"][0], truth[0]):
            wrong.slug, wrong.fields["k"] = _mistake(ranks, own, truth, step, case, rank)
            wrong.fields["error"] = wrong.got if isinstance(wrong.got, str) else "another gradient"
        raise


def _mistake(ranks, own, truth, step, case, rank):
    """The slug for gradients that are not `truth`, and the number of the first such parameter."""

    size, now = len(ranks), ranks[rank][case]["now"]
    k = next(k for k, (g, t) in enumerate(zip(now, truth, strict=True)) if not same(g, t))
    g = now[k]
    if case == "collected" and k in HEADS and (g is None or same(g, torch.zeros_like(truth[k]))):
        return "collected-lost", k
    if g is None or (case == "by rank" and same(g, torch.zeros_like(truth[k]))):
        return "ranks-disagree", k
    users = sum(bool(mine[k].count_nonzero()) for mine in own)
    if 0 < users < size and same(g, truth[k] * size / users):
        return "divided-by-users", k
    if same(g, own[rank][k]) or same(g, own[rank][k] / size):
        return "bucket-left-out", k
    if case == "by rank" and k in HEADS:
        for heads in product(HEADS, repeat=size):
            if same(g, torch.stack([mine[head] for mine, head in zip(own, heads)]).mean(dim=0)):
                return "buckets-swapped", k
    return ("stale" if users < size else "wrong-gradient"), k


def _economy(events, rank, size):
    model = Heads()
    unique = {id(p): p for p in model.named() if p.requires_grad}.values()
    held = sum(p.numel() * p.element_size() for p in unique)
    calls, where = sent(events), f"rank {rank} of {size}"
    travelled, enough = reduced(events, size), held + 600
    if travelled > enough:
        slug = "tied-sent-twice" if travelled <= enough + model.tied.nbytes else "sent-again"
        raise Wrong(slug, sent=travelled, held=held, where=where)
    if len(calls) > 9:
        raise Wrong("one-each", n=len(calls), held=held, capacity=CAPACITY, where=where)
    if len(until(events, "waits")) < len(until(events, "backward ended")):
        raise Wrong("blocking", where=where)
    if calls and volume(until(events, "layer 0")) <= CAPACITY:
        raise Wrong("overlap-lost", where=where)
