"""What the checks of this work share: a small model in stages, its truth in one process, ranks and their failures."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, filled, judged, nothing, silent
from dlojz_tp.judging.checks.pipeline_under_the_hood.sends import TAGS, Sends, tags_that_differ
from dlojz_tp.judging.probes import ranks
from dlojz_tp.judging.probes.networks import mark
from dlojz_tp.judging.probes.ranks import hung, killed_by
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.shared_looks import mistake_look
from dlojz_tp.judging.probes.traffic import Traffic, sent

WIDTHS = (5, 7, 4, 6, 3, 8, 2)  # of the activations between the layers, so that no two stages are alike
HINTS = {
    "ranks-hang": "The ranks wait for each other: {error}. Does each receive have a matching send, and each send a "
                  "matching receive, in the same lane and order, with the right neighbour? A send that isn't "
                  "waited for before the function ends may be lost.",
    "inputs-everywhere": "A stage got an input of the wrong width ({error}). Only the first stage takes the "
                         "inputs; the others receive what the previous stage has sent. place.before may be rank 0, "
                         "which counts as false: compare with `is None`.",
    "library-pipeline": "torch.distributed.pipelining does this work for you. Here you write it yourself.",
    "not-its-input": "Stage {stage} ran on something other than the previous stage's output. Each rank computes "
                     "its own layers, on the activations that it received.",
    "collective-used": "{name} was called. A pipeline needs only messages between neighbours.",
    "sends-not-waited": "{n} sends were started and never waited for. Call wait() on each once the gradient is "
                        "back, and on all of them before you return, or a message may be lost.",
    "chain-cut": "Stage {stage} of {n_stages} has no gradients. Its graph ends at the tensor that it received: "
                 "call y.backward() with the gradient that the next stage sends back.",
    "sizes-differ": "A message and its buffer differ in size ({error}). An activation's shape is in its header, "
                    "where only the first `dims` sizes count; a gradient has the shape of this stage's output. And "
                    "look up everything that belongs to micro-batch k by k.",
    "gradient-forgotten": "Only the loss is a single number. A stage that doesn't have the loss hands backward() "
                          "the gradient that it received: y.backward(gradient). place.behind may be rank 0, which "
                          "counts as false: compare with `is None`. ({error})",
    "no-graph": "There is no graph to go back through ({error}). The forward must build one: no torch.no_grad() "
                "around it, and backward() starts at the stage's output, not at a detached copy.",
    "no-backward": "Stage {stage} of {n_stages} has no gradients: it has the loss, but no backward() started from it.",
    "no-gradient-to-send": "There is no gradient to send back ({error}). Send back the gradient of x, the tensor "
                           "that you received. It exists once you have called y.backward() with the gradient that "
                           "arrives.",
    "gradients-cleared": "A second call starts over. Gradients must add up in p.grad, as they do with backward().",
    "weights-changed": "The weights of a stage changed. All micro-batches of a step must see the same weights: the "
                       "update comes after the step and isn't made here.",
    "loss-missing": "The last stage must return the loss; here it returned {kind}.",
    "loss-everywhere": "Stage {stage} returned {kind}. Only the last stage knows the loss: the others must return "
                       "None.",
    "loss-with-graph": "The returned loss still has its graph, which keeps the last stage's activations alive: "
                       "detach() it.",
    "wrong-loss": "That isn't the loss of the whole batch.",
    "loss-of-one": "That is the loss of one micro-batch. Every micro-batch contributes to the mean over the batch.",
    "loss-not-scaled": "That is the sum of the micro-batches' losses. The mean over the batch weights each one by "
                       "its share of the rows.",
    "wrong-gradients": "The gradients of stage {stage} differ from those of the model in one process.",
    "gradients-of-one": "These are the gradients of one micro-batch alone. Backward adds to p.grad: nothing may "
                        "clear it between the micro-batches.",
    "gradients-scaled": "The gradients of stage {stage} are {factor:.4g} times those of the model in one process: "
                        "something is scaled or counted where it shouldn't be.",
    "gradient-of-ones": "Backward started from the sum of the output, not from the gradient that the next stage sent.",
    "not-scaled": "The gradients are too large by a factor equal to the number of micro-batches: each "
                  "micro-batch's loss is a mean over its own rows. Weight it by its share of the batch.",
    "uneven-weights": "This is right when the batch divides evenly and wrong when it doesn't: a micro-batch with "
                      "fewer rows counts less. Weight each loss by its rows over all rows.",
    "gradient-of-another": "The gradients of stage {stage} combine (x, y) of one micro-batch with the gradient of "
                           "another. Both must have the same number. A receive that is started early takes "
                           "whatever the neighbour sends next.",
}  # fmt: skip


_USUAL = (
    (hung, "ranks-hang"), ("shapes cannot be multiplied", "inputs-everywhere"),
    ("NoneType' object has no attribute 'contiguous", "no-gradient-to-send"),
    ("modified by an inplace operation", "weights-changed"), ("only for scalar outputs", "gradient-forgotten"),
    ("does not have a grad_fn", "no-graph"), (killed_by("SIGABRT"), "sizes-differ"),
)  # fmt: skip
on_ranks = functools.partial(ranks.on_ranks, usual=_USUAL)
by_worlds = functools.partial(ranks.by_worlds, usual=_USUAL)


class Stage(nn.Sequential):
    """Some layers; `seen` lists ("F", rows, first number of x) of each forward and ("B", None, same) of its backward.

    Hooks on the first and the last layer see it, so that an answer may also call the layers one by one.
    """

    def __init__(self, *layers):
        super().__init__(*layers)
        self.seen = []
        layers[0].register_forward_pre_hook(self._began)
        layers[-1].register_forward_hook(self._ended)

    def _began(self, _layer, given):
        self.seen.append(("F", len(given[0]), float(given[0].detach().flatten()[0])))

    def _ended(self, _layer, _given, y):
        first = self.seen[-1][-1]
        return mark(y, lambda _: self.seen.append(("B", None, first)), "")


def layers() -> list[nn.Module]:
    """Six layers in float64, always alike."""
    with seeded(11):
        pairs = zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
        return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in pairs]


def bounds(n_stages: int) -> list[tuple[int, int]]:
    """Where the layers are cut: contiguous, about equally many."""
    cuts = [round(s * (len(WIDTHS) - 1) / n_stages) for s in range(n_stages + 1)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def my_stage(index: int, n_stages: int) -> Stage:
    """A stage of these layers on this rank's device."""
    start, stop = bounds(n_stages)[index]
    return Stage(*layers()[start:stop]).to(launch.device())


class Place:
    """Where a rank stands, with the attributes that the notebook's Place has; no rank can tell its neighbours by itself."""

    def __init__(self, rank: int, n_stages: int):
        order = {3: (1, 0, 2), 4: (2, 0, 3, 1)}.get(n_stages, range(n_stages))  # the rank of each stage
        self.stage, self.n_stages = order.index(rank), n_stages
        self.before = order[self.stage - 1] if self.stage > 0 else None
        self.behind = order[self.stage + 1] if self.stage < n_stages - 1 else None


def batch(rows: int):
    """Inputs (rows, 5) and targets (rows, 2) in float64; rows of very different weight."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTHS[0], generator=generator, dtype=torch.float64)
    y = torch.randn(rows, WIDTHS[-1], generator=generator, dtype=torch.float64)
    return x, y * torch.linspace(0.5, 4, rows).double()[:, None]


def loss_function(y, targets):
    """Mean over the rows."""
    return (y - targets).square().sum(dim=1).mean()


@functools.cache
def truth(rows: int, pieces: int, weights: tuple):
    """Losses of the micro-batches, and gradients of all layers, in one process; weights: of the losses."""
    model = nn.Sequential(*layers())
    x, targets = batch(rows)
    losses = [loss_function(model(a), t) for a, t in zip(x.tensor_split(pieces), targets.tensor_split(pieces))]
    sum(w * loss for w, loss in zip(weights, losses, strict=True)).backward()
    return [loss.item() for loss in losses], [[p.grad for p in layer.parameters()] for layer in model]


def row_counts(rows: int, pieces: int) -> list[int]:
    """Rows of the micro-batches."""
    return [rows // pieces + (k < rows % pieces) for k in range(pieces)]


def due_at(stage: int, n_stages: int, rows: int, pieces: int) -> SimpleNamespace:
    """What is due at a stage, of a step with a batch of `rows` in micro-batches, and where that is."""
    shares = tuple(n / rows for n in row_counts(rows, pieces))
    losses, gradients = truth(rows, pieces, shares)
    where = f"stage {stage} of {n_stages}, batch of {rows}" + f" in {pieces} micro-batches" * (pieces > 1)
    return SimpleNamespace(
        stage=stage, n_stages=n_stages, rows=rows, pieces=pieces, last=stage == n_stages - 1, where=where, shares=shares,
        losses=losses, loss=sum(value * share for value, share in zip(losses, shares, strict=True)),
        gradients=of_stage(gradients, stage, n_stages),
    )  # fmt: skip


def of_stage(gradients, index: int, n_stages: int) -> list[torch.Tensor]:
    """What of the layers' gradients belongs to a stage."""
    start, stop = bounds(n_stages)[index]
    return [gradient for layer in gradients[start:stop] for gradient in layer]


def firsts(at) -> list[float]:
    """The first number of what each micro-batch brings to a stage."""
    x, _ = batch(at.rows)
    with torch.no_grad():
        given = nn.Sequential(*layers()[: bounds(at.n_stages)[at.stage][0]])(x)
    return [float(part.flatten()[0]) for part in given.tensor_split(at.pieces)]


def run_step(answer, step, rows: int, calls: int = 1):
    """On a rank: `step(stage, place, inputs, targets)`, `calls` times; what it returned and left, and what it sent.

    answer: the function that `step` calls.
    """
    place = Place(dist.get_rank(), dist.get_world_size())
    stage = my_stage(place.stage, place.n_stages)
    before = [p.detach().clone() for p in stage.parameters()]
    x, targets = (tensor.to(launch.device()) for tensor in batch(rows))
    gradients, sends = [], Sends(place)
    with Traffic() as log, sends.watched(answer):
        for _ in range(calls):
            loss = step(stage, place, x, targets)
            gradients.append([None if p.grad is None else p.grad.detach().cpu().clone() for p in stage.parameters()])
    left, log = sends.finish(), sent(log.events)
    one, kind = isinstance(loss, torch.Tensor) and loss.numel() == 1, type(loss).__name__
    value = float(loss.detach()) if one else loss if kind == "float" else None
    return {
        "loss": value, "kind": kind, "instead": kind if value is None else "", "stage": place.stage, "calls": calls,
        "graph": isinstance(loss, torch.Tensor) and loss.requires_grad, "seen": stage.seen, "rank": dist.get_rank(),
        "gradients": gradients[0], "again": gradients[1:], "missing": [gradient is None for gradient in gradients[0]],
        "open": left, "tags": tags_that_differ(),
        "collectives": [name for name, *_ in log if name not in ("send", "recv", "recv_any_source")],
        "bytes": sum(call.bytes for call in log if call.name == "send"), "faults": sorted(sends.faults),
        "changed": any(not torch.equal(a, b.detach()) for a, b in zip(before, stage.parameters(), strict=True)),
    }  # fmt: skip


def stage_look(see, holds, hint, fields=None) -> Look:
    """A Look at what a rank did: what is due is `at`, where it stands and what is due there; fields: as for Look."""

    def all_fields(seen, at):
        return vars(at) | silent(seen, at) | filled(fields, seen, at)

    return Look("", see, itself, hint, holds=holds, fields=all_fields)


def stage_mistake(see, find) -> Look:
    """A `stage_look` at a mistake that find(seen, at) recognises: nothing where all is right, else (hint, fields)."""

    def with_place(seen, at):
        found = find(seen, at)
        return found and (found[0], vars(at) | silent(seen, at) | found[1])

    return mistake_look("", see, itself, with_place)


def itself(got):
    """A look's `see`: all that was observed."""
    return got


def beside(due):
    """Fields of a `stage_look`: what was seen, and due(at)."""
    return lambda seen, at: {"expected": due(at), "got": seen}


def stages(worlds, rows: int, pieces: int = 1) -> list:
    """(what a stage did, what is due there) of all worlds."""
    return [(got, due_at(stage, n, rows, pieces)) for n, found in worlds.items() for stage, got in enumerate(found)]


def looked(claim: str, looks: list[Look], pairs) -> Iterator[str]:
    """Judge some of these `stages`."""
    looks = [replace(looks[0], claim=claim), *looks[1:]]
    for got, at in pairs:
        yield from judged(looks, lambda got=got: got, at=at, where=at.where)


def right_step(claim: str, worlds, rows: int, pieces: int = 1) -> Iterator[str]:
    """Judge whether gradients and loss of all stages of all worlds are those of one process."""
    for got, at in stages(worlds, rows, pieces):
        yield from looked(claim, GRADIENTS, [(got, at)])
        if close(got["gradients"], at.gradients, 1e-6):  # a mistake at the edge makes the rest wrong as well
            yield from looked(claim, STEP, [(got, at)])


def _mistake(found, at) -> str:
    """The known mistake that gives these gradients."""

    def weighted(slug, *weights):
        return slug, of_stage(truth(at.rows, at.pieces, weights)[1], at.stage, at.n_stages)

    n, numbers = at.pieces, list(range(at.pieces))
    known = [weighted("not-scaled", *[1.0] * n), weighted("uneven-weights", *[1 / n] * n)]
    known += [weighted("gradients-of-one", *(w * (j == k) for j, w in enumerate(at.shares))) for k in (0, n - 1)]
    if not at.last:
        orders = [numbers[::-1], numbers[1:] + numbers[:1], numbers[-1:] + numbers[:-1]] if at.rows % n == 0 else []
        known += [("gradient-of-another", crossed(at, order)) for order in orders]
        known.append(("gradient-of-ones", crossed(at, None)))
    if factor := _worst(found, at)["factor"]:
        known.append(("gradients-scaled", [factor * g for g in at.gradients]))
    return next((slug for slug, gradients in known if close(found, gradients, 1e-6)), "wrong-gradients")


def _worst(found, at) -> dict:
    """Fields: the gradient that is farthest from its truth, and how many times as large it is."""
    got, due = max(zip(found, at.gradients, strict=True), key=lambda pair: (pair[0] - pair[1]).abs().max().item())
    return {"expected": due, "got": got, "factor": (got * due).sum().item() / due.square().sum().item()}


def crossed(at, order):
    """A stage's gradients if micro-batch k gets the gradient of micro-batch order[k]; order None: of ones."""
    model, (_, stop) = layers(), bounds(at.n_stages)[at.stage]
    x, targets = batch(at.rows)
    cut = [nn.Sequential(*model[:stop])(a) for a in x.tensor_split(at.pieces)]
    received = [y.detach().requires_grad_() for y in cut]
    for y, t in zip(received, targets.tensor_split(at.pieces), strict=True):
        (loss_function(nn.Sequential(*model[stop:])(y), t) * len(t) / at.rows).backward()
    for k, y in enumerate(cut):
        y.backward(torch.ones_like(y) if order is None else received[order[k]].grad)
    return of_stage([[p.grad for p in layer.parameters()] for layer in model], at.stage, at.n_stages)


def _not_the_loss(loss, at) -> str:
    of_one = [value * w for value in at.losses for w in (1, 1 / at.pieces)] if at.pieces > 1 else []
    slug = "loss-of-one" if any(close(loss, value, 1e-6) for value in of_one) else "wrong-loss"
    return "loss-not-scaled" if close(loss, sum(at.losses), 1e-6) else slug


GRADIENTS = [
    Look("", "collectives", [], "collective-used", fields=lambda seen, _: {"name": seen[0]}),
    Look("", "changed", False, "weights-changed"),
    stage_look("missing", nothing, lambda _, at: "no-backward" if at.last else "chain-cut"),
    stage_look("gradients", lambda seen, at: close(seen, at.gradients, 1e-6), _mistake, _worst),
]
STEP = [
    stage_look("again", lambda seen, at: close(seen, [[2 * g for g in at.gradients]][: len(seen)], 1e-6),
               "gradients-cleared"),
    stage_look("kind", lambda seen, at: at.last or seen == "NoneType", "loss-everywhere", "kind"),
    stage_look("instead", lambda kind, at: not at.last or not kind, "loss-missing", "kind"),
    stage_look("loss", lambda seen, at: not at.last or close(seen, at.loss, 1e-6), _not_the_loss,
               beside(attrgetter("loss"))),
    Look("", "graph", False, "loss-with-graph"),
    Look("", "open", 0, "sends-not-waited", fields="n"),
    *(Look("", lambda got, slug=slug: slug in got["faults"], False, slug) for slug in ("no-lane", "waited-twice")),
    TAGS,
]  # fmt: skip
