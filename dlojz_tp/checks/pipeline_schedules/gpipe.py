"""Balise 1: a stage on each rank, GPipe, and a step whose loss and gradients are those of one process."""

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checking.borrowed import replaced
from dlojz_tp.checks.pipeline_schedules import running
from dlojz_tp.probes.gpus import MIXED, NO_BACKEND, on_gpus

HINTS = {
    "no-stage": "make_stage returns a PipelineStage, and make_gpipe a schedule with a method `step`.",
    "whole-model-held": "Rank {rank} holds all layers. Each rank must hold only its own share: that is the purpose "
                        "of a pipeline.",
    "layers-changed": "You changed the list of {n} layers that you were given: {left} are left in it. The next "
                      "stage made from it lacks the others.",
    "layers-lost": "Some layers are on no rank, or on two. Rank r of n takes the layers from len(layers) * r // n "
                   "up to, but not including, len(layers) * (r + 1) // n.",
    "shares-uneven": "The largest share has {most} layers, the smallest {least}. They may differ by at most one.",
    "shares-not-neighbours": "A stage holds neighbouring layers, in order, and rank 0 holds the first ones: "
                             "activations go from rank to rank.",
    "micro-batches-ignored": "A stage did {found} forwards of {rows} samples in a step, but {wanted} were asked "
                             "for: pass n_micro_batches to the schedule.",
    "not-gpipe": "A backward began before the last forward, as in another schedule. GPipe does all forwards first.",
    "gradients-not-scaled": "The gradients are n_micro_batches times too large. Each micro-batch gives the mean "
                            "over its own samples, and the mean over the batch is the mean of these. See "
                            "scale_grads.",
    "sum-scaled": "For a loss that is a sum, the gradients are divided by the number of micro-batches. A sum over "
                  "the batch is the sum of the micro-batches' sums: scale_grads is for means.",
    "old-gradients": "The first step is right, but the second is not: it still contains the old gradients. And a "
                     "schedule that scales gradients scales *everything* in .grad. First clear the gradients of "
                     "each stage's submod.",
    "other-loss": "The gradients are not those of the given loss function. Pass loss_fn to the schedule.",
    "wrong-gradients": "The gradients are not those of a single process on the whole batch.",
    "loss-on-last-only": "Only the rank of the last stage knows the loss. The others need it too: use a "
                         "collective, and wait for it.",
    "loss-overwritten": "In the end, not even the last stage's rank knows the loss. Either the value came from a "
                        "rank that has none (the src of a broadcast must be the last stage's rank), or the sum "
                        "went to one rank only (reduce).",
    "loss-not-averaged": "That is the sum of the micro-batches' losses, each of which is a mean over its samples. "
                         "The loss of the batch is the mean of these losses.",
    "sum-averaged": "With a loss that is a sum, the loss of the batch is the sum over the micro-batches, not their mean.",
    "loss-of-one-micro-batch": "That is the loss of one micro-batch. The list has one loss for each micro-batch: "
                               "use them all.",
    "loss-from-untrusted": "The loss is NaN. On this rank, x or y must not be used: x is valid only on the first "
                           "stage's rank, and y only on the last stage's.",
    "loss-with-graph": "The loss still has its graph, which keeps activations alive. Detach it.",
    "loss-not-scalar": "Return the loss of the whole batch as a tensor with one value.",
    "stage-not-on-gpu": "On GPUs, the layers and their inputs are not on the same device: {error}. make_stage must "
                        "move its share of the layers to `device`; PipelineStage does not.",
    "others-on-gpu": "On GPUs, this rank's memory also holds layers {found}, which belong to other ranks. First "
                     "take the share, then move it: a model that needs a pipeline does not fit on one GPU.",
    "loss-not-on-gpu": "On GPUs, the loss is sent from the CPU's memory, which NCCL cannot do: {error}. Make the "
                       "tensor on x.device.",
    "wrong-loss": "That is not the loss of the whole batch.",
}  # fmt: skip

MICRO_BATCHES = 6


def balise_1(make_stage, make_gpipe, pipeline_step):
    """Worlds of 1 to 4 ranks, 7 layers; a mean twice, a sum once."""
    yield "7 layers on 1, 2, 3 and 4 ranks: neighbours, shares that differ by at most one"
    worlds = running.on_ranks(_observed, make_stage, make_gpipe, pipeline_step, sizes=(2, 3, 4, 1))
    yield "6 micro-batches of 4 samples, all forwards first"
    for size, ranks in worlds.items():
        _right_order(size, ranks)
    yield "the gradients of a single process, for a mean and for a sum, also in a second step"
    for size, ranks in worlds.items():
        _right_gradients(size, ranks)
    yield "the loss of the whole batch, on every rank"
    for size, ranks in worlds.items():
        _right_losses(size, ranks)
    yield "the same where each of two ranks has a GPU"
    known = ((MIXED, "stage-not-on-gpu"), (NO_BACKEND, "loss-not-on-gpu"))
    on_gpus(_on_gpu, make_stage, make_gpipe, pipeline_step, known=known)


def _observed(make_stage, make_gpipe, pipeline_step):
    def make(layers, n_micro_batches, loss_fn, reduction):
        given = list(layers)
        stage = make_stage(layers, torch.device("cpu"))
        if len(given) != len(layers) or any(a is not b for a, b in zip(given, layers)):
            raise Wrong("layers-changed", n=len(given), left=len(layers))
        schedule = make_gpipe(stage, n_micro_batches, loss_fn, reduction)
        if not hasattr(stage, "submod") or not hasattr(schedule, "step"):
            raise Wrong("no-stage", got=f"{type(stage).__name__} and {type(schedule).__name__}")
        return [stage], schedule

    reduce = dist.reduce

    def to_one_alone(tensor, dst=None, *args, **kwargs):
        """gloo leaves the sum on other ranks too; nothing promises that."""
        work = reduce(tensor, dst, *args, **kwargs)
        if dist.get_rank() != (kwargs.get("group_dst") if dst is None else dst):
            _ = work and work.wait()
            tensor.detach().zero_()
        return work

    with replaced(dist, "reduce", to_one_alone):
        return running.observe(make, pipeline_step, MICRO_BATCHES, _right_shares)


def _on_gpu(_, make_stage, make_gpipe, pipeline_step):
    layers = running.make_layers()
    stage = make_stage(layers, launch.device())
    own = {id(p) for p in stage.submod.parameters()}
    others = [k for k, layer in enumerate(layers) if any(p.is_cuda and id(p) not in own for p in layer.parameters())]
    if others:
        raise Wrong("others-on-gpu", found=others)
    x, y = (tensor.to(launch.device()) for tensor in running.batch(0))
    pipeline_step([stage], make_gpipe(stage, 2, running.loss_mean, "mean"), x, y, "mean")


def _right_shares(everyones):
    size, shares = len(everyones), [stages[0][1] for stages in everyones]
    total = len(running.WIDTHS) - 1
    for rank, share in enumerate(shares):
        if size > 1 and len(set(share)) == total:
            raise Wrong("whole-model-held", got=f"layers {share}", where=f"rank {rank} of {size}", rank=rank)
    where = f"{size} ranks"
    flat = [number for share in shares for number in share]
    if sorted(flat) != list(range(total)):
        raise Wrong("layers-lost", expected=f"layers 0 to {total - 1}, each once", got=str(shares), where=where)
    if flat != sorted(flat):
        raise Wrong("shares-not-neighbours", got=str(shares), where=where)
    most, least = max(map(len, shares)), min(map(len, shares))
    if most - least > 1:
        raise Wrong("shares-uneven", got=str(shares), where=where, most=most, least=least)


def _right_order(size, ranks):
    for rank, found in enumerate(ranks):
        for _, held, _, seen in found:
            if len(seen) == 1:  # the first step of a schedule also runs a forward to find out the shapes
                continue
            first = held[0][1][0]
            events = [(kind, rows) for kind, number, rows in seen[-1][2] if number == first]
            rows = [n for kind, n in events if kind == "F"]
            where = f"rank {rank} of {size}"
            if rows != [running.BATCH // MICRO_BATCHES] * MICRO_BATCHES:
                each = "/".join(map(str, sorted(set(rows)))) or "no"
                raise Wrong("micro-batches-ignored", where=where, found=len(rows), rows=each, wanted=MICRO_BATCHES)
            kinds = "".join(kind for kind, _ in events)
            if "BF" in kinds:
                raise Wrong("not-gpipe", expected="F" * len(rows) + "B" * len(rows), got=kinds, where=where)


def _right_gradients(size, ranks):
    m = MICRO_BATCHES
    for rank, found in enumerate(ranks):
        for reduction, _, _, seen in found:
            mean = reduction == "mean"
            for step, (_, gradients, _) in enumerate(seen):
                mistakes = {"gradients-not-scaled": lambda g, _: m * g} if mean else {"sum-scaled": lambda g, _: g / m}
                if step:
                    mistakes["old-gradients"] = lambda g, before: g + before / m
                    mistakes["old-gradients "] = lambda g, before: g + before
                where = f"rank {rank} of {size}, loss a {reduction}, step {step + 1}"
                try:
                    running.right_gradients(gradients, step, reduction, mistakes, "wrong-gradients", where)
                except Wrong as wrong:
                    wrong.slug = wrong.slug.strip()
                    if wrong.slug == "wrong-gradients" and rank == size - 1 and _loss_is_strange(seen[step][0]):
                        wrong.slug = "other-loss"
                    raise


def _loss_is_strange(loss):
    """Whether the loss is none of those that a right loss_fn can give, whatever is done with it."""
    values = [running.truth(step, reduction)[0] for step in (0, 1) for reduction in ("mean", "sum")]
    factors = (1, MICRO_BATCHES, 1 / MICRO_BATCHES, 0)
    return isinstance(loss, torch.Tensor) and not any(close(loss, f * v) for f in factors for v in values)


def _right_losses(size, ranks):
    m, part = MICRO_BATCHES, running.BATCH // MICRO_BATCHES
    for rank, found in enumerate(ranks):
        for number, (reduction, _, _, seen) in enumerate(found):
            for step, (loss, _, _) in enumerate(seen):
                where = f"rank {rank} of {size}, loss a {reduction}, step {step + 1}"
                wanted = running.truth(step, reduction)[0]
                if loss is None and rank < size - 1:
                    raise Wrong("loss-on-last-only", expected=wanted, got="None", where=where)
                if loss is None:
                    raise Wrong("nothing-returned")
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise Wrong("loss-not-scalar", got=loss, where=where)
                value = loss.detach().double().reshape(())
                if value.isnan():
                    raise Wrong("loss-from-untrusted", expected=wanted, got="nan", where=where)
                if not close(value, wanted, 1e-5):
                    x, y = running.batch(step)
                    net = torch.nn.Sequential(*running.make_layers())
                    parts = [
                        running.LOSSES[reduction](net(x[i : i + part]), y[i : i + part]).item()
                        for i in range(0, len(x), part)
                    ]
                    slug = "wrong-loss"
                    last = ranks[-1][number][3][step][0]
                    if value == 0 and isinstance(last, torch.Tensor) and close(last, 0.0):
                        slug = "loss-overwritten"
                    elif value == 0 and rank < size - 1:
                        slug = "loss-on-last-only"
                    elif any(close(value, one, 1e-5) for one in parts):
                        slug = "loss-of-one-micro-batch"
                    elif close(value, wanted * m, 1e-5):
                        slug = "loss-not-averaged"
                    elif close(value, wanted / m, 1e-5):
                        slug = "sum-averaged" if reduction == "sum" else "wrong-loss"
                    elif rank < size - 1 and close(seen[step][0], 0.0):
                        slug = "loss-on-last-only"
                    raise Wrong(slug, expected=wanted, got=value, where=where)
                if loss.requires_grad:
                    raise Wrong("loss-with-graph", where=where)
