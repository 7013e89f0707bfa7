"""Balise 1: a stage on each rank, GPipe, and a step whose loss and gradients are those of one process."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.borrowed import replaced
from dlojz_tp.judging.checking.looks import Look, nothing, silent
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.checks.pipeline_schedules import running
from dlojz_tp.judging.checks.pipeline_schedules.orders import fault_look
from dlojz_tp.judging.probes.gpus import MIXED, NO_BACKEND, on_gpus
from dlojz_tp.judging.probes.shared_looks import each_rank

M = 6  # micro-batches
NUMBER = "one number"


def observe(make_stage, make_gpipe, pipeline_step, dtype=torch.float64):
    """On a rank: what `running.observe` gives, the changed lists of layers, and the losses.

    Where a loss is NaN on any rank, the numbers are those of a second run, in which what must not be used is 0.
    """
    lefts, nans = [], [None] * dist.get_world_size()

    def make(layers, n_micro_batches, loss_fn, reduction):
        layers = [layer.to(dtype) for layer in layers]
        given = list(layers)
        stage = make_stage(layers, torch.device("cpu"))
        if len(given) != len(layers) or any(a is not b for a, b in zip(given, layers)):
            lefts.append(len(layers))
        schedule = make_gpipe(stage, n_micro_batches, loss_fn, reduction)
        fault = "no-stage", {"got": f"{type(stage).__name__} and {type(schedule).__name__}"}
        return None if hasattr(stage, "submod") and hasattr(schedule, "step") else fault, [stage], schedule

    def step(stages, schedule, x, y, reduction):
        return pipeline_step(stages, schedule, x.to(dtype), y.to(dtype), reduction)

    with replaced(dist, "reduce", partial(_to_one_alone, dist.reduce)):
        run = partial(running.observe, make, step, M, _misfit)
        found = run()
        found |= {"lefts": list(lefts), "nan": [bool(loss.isnan()) for loss in _losses(found) if _form(loss) == NUMBER]}
        dist.all_gather_object(nans, found["nan"])
        losses = _losses(run(trap=0.0) if any(map(any, nans)) else found)
    for name, loss in zip(running.STEPS, losses):
        number = loss.detach().double().reshape(()) if _form(loss) == NUMBER else None
        graph = number is not None and loss.requires_grad
        found |= {f"{name}: form": _form(loss), f"{name}: loss": number, f"{name}: graph": graph}
    return found


def _to_one_alone(reduce, tensor, dst=None, *args, **kwargs):
    """gloo leaves the sum on other ranks too; nothing promises that."""
    work = reduce(tensor, dst, *args, **kwargs)
    if dist.get_rank() != (kwargs.get("group_dst") if dst is None else dst):
        _ = work and work.wait()
        tensor.detach().zero_()
    return work


def _losses(found):
    return [found[f"{name}: loss"] for name in running.STEPS if f"{name}: loss" in found]


def _form(loss):
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return NUMBER
    return loss if loss is None else type(loss).__name__


def _misfit(held):
    """What is wrong with the layers of the ranks, so that they cannot run: see `running.observe`."""
    shares = [stages[0][1] for stages in held]
    flat = [number for share in shares for number in share]
    whole = [rank for rank, share in enumerate(shares) if len(set(share)) == running.LAYERS]
    fields = {"got": str(shares)}
    if whole and len(shares) > 1:
        return "whole-model-held", {"rank": whole[0]} | fields
    if sorted(flat) != list(range(running.LAYERS)):
        return "layers-lost", fields
    return None if flat == sorted(flat) else ("shares-not-neighbours", fields)


def _gradient_look(claim, name, *mistakes):
    look = running.gradient_look(claim, name, "wrong-gradients", *mistakes)

    def hint(seen, due):
        slug, last = seen[-1]
        return "other-loss" if slug == "wrong-gradients" and _strange(last[f"{name}: loss"]) else look.hint(seen, due)

    return replace(look, hint=hint)


def _strange(loss):
    """Whether the loss is none of those that a right loss_fn can give, whatever is done with it."""
    known = [factor * running.truth(name)[0] for name in running.STEPS for factor in (1, M, 1 / M, 0)]
    return loss is not None and not any(close(loss, value, 2e-5) for value in known)


def _loss_looks(name):
    reduction, step = name.split()
    due = running.truth(name)[0]

    def form(seen, _):
        rank = next(rank for rank, one in enumerate(seen) if one != NUMBER)
        if seen[rank] is not None:
            return "loss-not-scalar"
        return "loss-on-last-only" if rank < len(seen) - 1 else "nothing-returned"

    def mistake(seen, _):
        rank, loss = next((rank, loss) for rank, loss in enumerate(seen) if not close(loss, due, 1e-5))
        if loss == 0 and close(seen[-1], 0.0):
            return "loss-overwritten"
        if rank < len(seen) - 1 and close(loss, 0.0):
            return "loss-on-last-only"
        known = {"loss-of-one-micro-batch": _of_one(reduction, int(step)), "loss-not-averaged": [due * M]}
        known |= {"sum-averaged": [due / M]} if reduction == "sum" else {}
        return next((slug for slug, some in known.items() if any(close(loss, one, 1e-5) for one in some)), "wrong-loss")

    return [
        Look("", f"{name}: form", NUMBER, form, holds=lambda seen, due: set(seen) == {due}),
        Look("", f"{name}: loss", due, mistake, holds=lambda seen, due: all(close(loss, due, 1e-5) for loss in seen)),
        each_rank("", f"{name}: graph", False, "loss-with-graph", fields=silent),
    ]


def _of_one(reduction, step):
    """The losses of the micro-batches of a step."""
    net = torch.nn.Sequential(*running.make_layers())
    parts = zip(*(tensor.chunk(M) for tensor in running.batch(step)))
    return [running.LOSSES[reduction](net(x), y).item() for x, y in parts]


def _rows(got, due):
    return {"found": len(got), "rows": "/".join(map(str, sorted(set(got)))) or "no", "wanted": len(due)}


SCALED, OLD = ("gradients-not-scaled", lambda g, _: M * g), "old-gradients"
LOOKS = [
    fault_look("7 layers on 1, 2, 3 and 4 ranks: neighbours, shares that differ by at most one"),
    each_rank("", "lefts", [], "layers-changed",
              fields=lambda got, _: {"n": running.LAYERS, "left": got[0]} | silent(got, _)),
    running.even_look(lambda ranks: [len(rank["held"][0][1]) for rank in ranks], "shares-uneven"),
    each_rank("6 micro-batches of 4 samples, all forwards first", "mean 2: rows", [running.BATCH // M] * M,
              "micro-batches-ignored", fields=_rows),
    each_rank("", "mean 2: order", "F" * M + "B" * M, "not-gpipe", holds=lambda got, _: "BF" not in got),
    _gradient_look("the gradients of a single process, for a mean and for a sum, also in a second step", "mean 1",
                   SCALED),
    _gradient_look("", "mean 2", SCALED, (OLD, lambda g, before: g + before / M), (OLD, lambda g, before: g + before)),
    _gradient_look("", "sum 1", ("sum-scaled", lambda g, _: g / M)),
    each_rank("the loss of the whole batch, on every rank", "nan", False, "loss-from-untrusted",
              holds=nothing, fields={"expected": "a number", "got": "nan"}),
    *(look for name in running.STEPS for look in _loss_looks(name)),
]  # fmt: skip


def balise_1(make_stage, make_gpipe, pipeline_step):
    """Worlds of 1 to 4 ranks, 7 layers; a mean twice, a sum once; in float32 where a collective knows nothing else."""
    answers = make_stage, make_gpipe, pipeline_step
    try:
        yield from running.judged_on_ranks(LOOKS, observe, *answers, sizes=(2, 3, 4, 1))
    except Wrong as wrong:
        if wrong.slug != "collective-broke":
            raise
        fails(wrong)
        yield from running.judged_on_ranks(LOOKS, partial(observe, dtype=torch.float32), *answers, sizes=(2, 3, 4, 1))
    yield "the same where each of two ranks has a GPU"
    on_gpus(_on_gpu, *answers, known=((MIXED, "stage-not-on-gpu"), (NO_BACKEND, "loss-not-on-gpu")))


def _on_gpu(_, make_stage, make_gpipe, pipeline_step):
    layers = running.make_layers()
    stage = make_stage(layers, launch.device())
    own = {id(p) for p in stage.submod.parameters()}
    others = [k for k, layer in enumerate(layers) if any(p.is_cuda and id(p) not in own for p in layer.parameters())]
    if others:
        raise Wrong("others-on-gpu", found=others)
    x, y = (tensor.to(launch.device()) for tensor in running.batch(1))
    pipeline_step([stage], make_gpipe(stage, 2, running.loss_mean, "mean"), x, y, "mean")
