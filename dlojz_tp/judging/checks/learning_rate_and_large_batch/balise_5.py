"""Balise 5: trust ratios by layer, and the steps of LARS and LAMB: what is exempt, zero norms, the momentum."""

import copy

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged
from dlojz_tp.judging.checks.learning_rate_and_large_batch.stepping import (
    Training,
    few_and_many,
    follow,
    kept,
    no_more_for_many,
    operators,
    own_work,
    truth,
    without_values,
)

DRAWN = torch.Generator().manual_seed(8)
WEIGHTS = [
    torch.randn(shape, generator=DRAWN) * scale for shape, scale in (((3, 4), 20), ((5, 2, 3), 0.3), ((1, 1), 7))
]
UPDATES = [torch.randn(one.shape, generator=DRAWN) * scale for one, scale in zip(WEIGHTS, (0.1, 3, 1))]
ZEROS = [0 * WEIGHTS[0], WEIGHTS[1], 0 * WEIGHTS[2]], [UPDATES[0], 0 * UPDATES[1], 0 * UPDATES[2]]


def ratio(weight, update, decay=0.0, coefficient=1.0):
    """One layer, in float64."""
    weight, update = (float(one.double().square().sum()) ** 0.5 for one in (weight, update))
    return coefficient * weight / (update + decay * weight) if weight and update else 1.0


def _ratios(weights, updates, *options):
    return torch.tensor([ratio(*pair, *options) for pair in zip(weights, updates)])


def of_lars(weight, steps, momentum, weight_decay, coefficient):
    """One parameter of LARS."""
    buffer = torch.zeros_like(weight)
    for gradient, rate in steps:
        if weight.ndim > 1:
            share = ratio(weight, gradient, weight_decay, coefficient)
            gradient = share * (gradient + weight_decay * weight)
        buffer = momentum * buffer + gradient
        weight = weight - rate * buffer
        yield weight


def of_lamb(weight, steps, betas, eps, weight_decay):
    """One parameter of LAMB."""
    mean = square = 0.0
    for t, (gradient, rate) in enumerate(steps, 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        update = mean / (1 - betas[0] ** t) / ((square / (1 - betas[1] ** t)).sqrt() + eps)
        if weight.ndim > 1:
            update = update + weight_decay * weight
            update = update * ratio(weight, update)
        weight = weight - rate * update
        yield weight


def lars(lr=0.3, momentum=0.6, weight_decay=0.0, coefficient=0.2):
    return {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "coefficient": coefficient}


def lamb(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.0):
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


MANY = {"rates": (0.1, 1.0, 0.5, 0.2), "absent": ((0, 0), (1, 1), (1, 3), (0, 5), (1, 5), (2, 5), (3, 5))}
LAYERS = ((4, 3), (2, 5), (3, 2, 2))


def _trainings(options, other):
    shapes = (((2, 3), (4,), (3, 2)), options(weight_decay=0.4)), (((5,), (3, 3), (2, 2)), other)
    return {
        # the ratio of a matrix is above 1, and that of a kernel
        "plain": Training(((LAYERS, options()),), sizes=(30.0, 0.3, 50.0)),
        "decay": Training(((LAYERS, options(weight_decay=0.7)),)),
        "vectors": Training((((*LAYERS, (4,), ()), options(weight_decay=0.7)), (((3,),), options(weight_decay=0.5)))),
        "zeros": Training(((LAYERS, options(weight_decay=0.3)),), zero=(0,), still=((0, 0), (0, 1), (1, 1))),
        "groups": Training(shapes, **MANY),
    }


LARS = _trainings(lars, lars(0.7, 0.9, 0.1, 0.05))
LAMB = _trainings(lamb, lamb(0.03, (0.6, 0.8), 1e-2, 0.1))
SHAPES = [(3, 4), (4,), (2, 2)]


def observe(trust_ratios, lars, lamb):
    got = trust_ratios([one.clone() for one in WEIGHTS], [one.clone() for one in UPDATES])
    yield {"form": form(got)}
    yield {"ratios": got}
    yield {"with options": trust_ratios(*copy.deepcopy((WEIGHTS, UPDATES)), 0.5, 0.02)}
    yield {"zero ratios": trust_ratios(*copy.deepcopy(ZEROS), 0.5, 0.02)}
    for name, trainings, optimizer in (("LARS", LARS, lars), ("LAMB", LAMB, lamb)):
        for case, training in trainings.items():
            yield {f"{name} {case}": follow(training, optimizer)}
        yield {f"{name} resumed": follow(trainings["groups"], optimizer, resume=2)}
        held = kept(trainings["groups"], optimizer)
        yield {f"{name} gradients": held["gradients"], f"{name} moved": held["moved"]}
        yield {f"{name} operators": operators(optimizer, SHAPES)}
        yield {f"{name} without values": without_values(optimizer, SHAPES)}


CLAIMS = {
    "plain": "three steps, without decay",
    "decay": "with decay",
    "vectors": "vectors and scalars are exempt",
    "zeros": "weights or gradients of zero",
    "groups": "several groups, changing rates, gradients that are None",
}


def _looks(name, trainings, rule):
    slug = name.lower()
    return [
        *(Value(f"{name}: {CLAIMS[case]}", f"{name} {case}", truth(training, rule), f"wrong-{slug}-{case}")
          for case, training in trainings.items()),
        Value("the same after stopping and resuming from the state_dict", f"{name} resumed", truth(trainings["groups"], rule), "not-resumed"),
        Look("gradients stay the same, weights change in place", f"{name} gradients", 0, "gradients-changed"),
        Look("", f"{name} moved", False, "weights-moved"),
        Look("as many operators for 12 parameters as for 3", f"{name} operators", [0, 0], "an-operator-each",
             holds=no_more_for_many, fields=few_and_many(SHAPES)),
        Look("no value is read back to the CPU", f"{name} without values", True, "weights-moved"),
    ]  # fmt: skip


LOOKS = [
    Look("one ratio a layer", "form", "float32 (3,)", "ratios-form"),
    Value("the values of the ratios", "ratios", _ratios(WEIGHTS, UPDATES), "wrong-ratios"),
    Value("with a decay and a coefficient", "with options", _ratios(WEIGHTS, UPDATES, 0.5, 0.02), "wrong-options"),
    Value("1 where a norm is zero", "zero ratios", torch.ones(3), "wrong-zero-ratios"),
    *_looks("LARS", LARS, of_lars),
    *_looks("LAMB", LAMB, of_lamb),
]


def balise_5(trust_ratios, lars, lamb):
    with own_work():
        yield from judged(LOOKS, observe, trust_ratios, lars, lamb)
