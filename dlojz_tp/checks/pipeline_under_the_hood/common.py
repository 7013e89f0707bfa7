"""What the checks of this work share: a small model in stages, its truth in one process, ranks and their failures."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.pipeline_under_the_hood.sends import Sends, right_tags, tags_that_differ
from dlojz_tp.probes import ranks
from dlojz_tp.probes.networks import mark
from dlojz_tp.probes.ranks import hung, killed_by
from dlojz_tp.probes.seeded import seeded
from dlojz_tp.probes.traffic import Traffic, sent

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


def truth(rows: int, weights=None, pieces: int = 1):
    """Loss and gradients of all layers in one process.

    weights: of the losses of the `pieces` micro-batches; None for their shares of the rows, which is right.
    """
    model = nn.Sequential(*layers())
    x, targets = batch(rows)
    losses = [loss_function(model(a), t) for a, t in zip(x.tensor_split(pieces), targets.tensor_split(pieces))]
    shares = [len(t) / rows for t in targets.tensor_split(pieces)] if weights is None else weights
    sum(w * loss for w, loss in zip(shares, losses, strict=True)).backward()
    return [loss.item() for loss in losses], [[p.grad for p in layer.parameters()] for layer in model]


def of_stage(gradients, index: int, n_stages: int) -> list[torch.Tensor]:
    """What of the layers' gradients belongs to a stage."""
    start, stop = bounds(n_stages)[index]
    return [gradient for layer in gradients[start:stop] for gradient in layer]


def firsts(index: int, size: int, rows: int, pieces: int = 1) -> list[float]:
    """The first number of what each micro-batch brings to a stage."""
    x, _ = batch(rows)
    with torch.no_grad():
        given = nn.Sequential(*layers()[: bounds(size)[index][0]])(x)
    return [float(part.flatten()[0]) for part in given.tensor_split(pieces)]


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
    left = sends.finish()
    kind = type(loss).__name__
    return {
        "loss": float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss if kind == "float" else None,
        "stage": place.stage, "rank": dist.get_rank(), "kind": kind, "graph": isinstance(loss, torch.Tensor) and loss.requires_grad,
        "gradients": gradients, "seen": stage.seen, "sent": sent(log.events), "open": left,
        "tags": tags_that_differ(),
        "changed": any(not torch.equal(a, b.detach()) for a, b in zip(before, stage.parameters(), strict=True)),
    }  # fmt: skip


def right_step(worlds, rows: int, pieces: int = 1, even: bool = True):
    """Raise Wrong unless gradients and loss of all stages of all worlds are those of one process."""
    losses, gradients = truth(rows, pieces=pieces)
    loss = sum(value * share for value, share in zip(losses, shares(rows, pieces), strict=True))
    for size, stages in worlds.items():
        for rank, got in enumerate(stages):
            where = f"stage {rank} of {size}, batch of {rows}" + (f" in {pieces} micro-batches" if pieces > 1 else "")
            expected, found = of_stage(gradients, rank, size), got["gradients"][0]
            names = [name for name, *_ in got["sent"] if name not in ("send", "recv", "recv_any_source")]
            if names:
                raise Wrong("collective-used", name=names[0], where=where)
            if got["changed"]:
                raise Wrong("weights-changed", stage=rank, where=where)
            if any(gradient is None for gradient in found):
                raise Wrong("no-backward" if rank == size - 1 else "chain-cut", stage=rank, n_stages=size, where=where)
            if not close(found, expected, 1e-6):
                slug = _known(found, rank, size, rows, pieces, even)
                worst = max(range(len(found)), key=lambda k: (found[k] - expected[k]).abs().max().item())
                factor = (found[worst] * expected[worst]).sum().item() / expected[worst].square().sum().item()
                scaled = slug == "wrong-gradients" and close(found, [factor * g for g in expected], 1e-6)
                slug = "gradients-scaled" if scaled and factor else slug
                raise Wrong(slug, expected=expected[worst], got=found[worst], where=where, stage=rank, factor=factor)
            if len(got["gradients"]) > 1 and not close(got["gradients"][1], [2 * g for g in expected], 1e-6):
                raise Wrong("gradients-cleared", where=where)
            _right_loss(got, rank == size - 1, loss, losses, rank, where)
            if got["open"]:
                raise Wrong("sends-not-waited", n=got["open"], where=where)
            right_tags(got["tags"], where)


def _right_loss(got, last, loss, losses, stage, where):
    if not last:
        if got["kind"] != "NoneType":
            raise Wrong("loss-everywhere", stage=stage, kind=got["kind"], where=where)
        return
    if got["loss"] is None:
        raise Wrong("loss-missing", kind=got["kind"], where=where)
    if not close(got["loss"], loss, 1e-6):
        of_one = any(close(got["loss"], value * w, 1e-6) for value in losses for w in (1, 1 / len(losses)))
        slug = "loss-of-one" if of_one and len(losses) > 1 else "wrong-loss"
        slug = "loss-not-scaled" if close(got["loss"], sum(losses), 1e-6) else slug
        raise Wrong(slug, expected=loss, got=got["loss"], where=where)
    if got["graph"]:
        raise Wrong("loss-with-graph", where=where)


def shares(rows: int, pieces: int) -> list[float]:
    """The micro-batches' parts of the batch."""
    return [len(part) / rows for part in torch.arange(rows).tensor_split(pieces)]


def _known(found, rank, size, rows, pieces, even):
    """The known mistake that gives these gradients."""

    def are(gradients):
        return close(found, of_stage(gradients, rank, size), 1e-6)

    if pieces > 1 and are(truth(rows, [1.0] * pieces, pieces)[1]):
        return "not-scaled"
    if not even and are(truth(rows, [1 / pieces] * pieces, pieces)[1]):
        return "uneven-weights"
    if pieces > 1 and any(
        are(truth(rows, [w * (j == k) for j, w in enumerate(shares(rows, pieces))], pieces)[1]) for k in (0, pieces - 1)
    ):
        return "gradients-of-one"
    if rank < size - 1:
        numbers = list(range(pieces))
        orders = [numbers[::-1], numbers[1:] + numbers[:1], numbers[-1:] + numbers[:-1]]
        if pieces > 1 and even and any(close(found, crossed(rank, size, rows, pieces, o), 1e-6) for o in orders):
            return "gradient-of-another"
        if close(found, crossed(rank, size, rows, pieces, None), 1e-6):
            return "gradient-of-ones"
    return "wrong-gradients"


def crossed(rank, size, rows, pieces, order):
    """A stage's gradients if micro-batch k gets the gradient of micro-batch order[k]; order None: of ones."""
    model, (_, stop) = layers(), bounds(size)[rank]
    x, targets = batch(rows)
    cut = [nn.Sequential(*model[:stop])(a) for a in x.tensor_split(pieces)]
    received = [y.detach().requires_grad_() for y in cut]
    for y, t in zip(received, targets.tensor_split(pieces), strict=True):
        (loss_function(nn.Sequential(*model[stop:])(y), t) * len(t) / rows).backward()
    for k, y in enumerate(cut):
        y.backward(torch.ones_like(y) if order is None else received[order[k]].grad)
    return of_stage([[p.grad for p in layer.parameters()] for layer in model], rank, size)
