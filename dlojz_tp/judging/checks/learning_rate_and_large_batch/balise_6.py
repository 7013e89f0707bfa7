"""Balise 6: orthogonal matrices by Newton-Schulz, batched, on the short side; and steps of Muon, shape by shape."""

import functools

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, within
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
from dlojz_tp.measure.operations import Operations, Products

A, B, C = 3.4445, -4.7750, 2.0315
DRAWN = torch.Generator().manual_seed(4)


def _drawn(*shape):
    """Matrices of very different sizes."""
    scales = 10.0 ** torch.arange(-1, shape[0] - 1).reshape(-1, 1, 1)
    return torch.randn(shape, generator=DRAWN, dtype=torch.float64) * scales


SQUARE, WIDE, TALL = _drawn(3, 4, 4), _drawn(2, 3, 7), _drawn(2, 7, 3)
ZERO = torch.stack([torch.zeros(3, 5), torch.eye(3, 5)])


def orthogonal(matrix, steps=5):
    """One matrix, float64, by its singular values: another way than the iteration."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm().clamp(min=1e-7)
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return u @ s.diag() @ v


def _each(matrices, steps=5):
    return torch.stack([orthogonal(one, steps) for one in matrices])


def rule(weight, steps, momentum, weight_decay, dtype):
    """One matrix of Muon."""
    mean = 0.0
    for gradient, rate in steps:
        mean = momentum * mean + (1 - momentum) * gradient
        update = orthogonal((1 - momentum) * gradient + momentum * mean)
        weight = weight - rate * (weight_decay * weight + 0.2 * max(weight.shape) ** 0.5 * update)
        yield weight


def options(lr=0.3, momentum=0.7, weight_decay=0.0, dtype=torch.float64):
    return {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype}


PLAIN = Training(((((6, 3),), options()),))
SIZES = Training(((((5, 3), (2, 6), (3, 3), (5, 3), (1, 4), *7 * ((2, 3),)), options(weight_decay=0.5)),))
GROUPS = Training(
    ((((3, 4), (4, 2)), options(0.5, 0.9, 0.4)), (((4, 2), (3, 4), (3, 4)), options(0.2, 0.5, 0.1))),
    rates=(0.2, 1.0, 0.5, 0.3),
    absent=((0, 0), (1, 1), (2, 1), (0, 4), (1, 4), (2, 4), (3, 4)),
)
SHAPES = [(3, 4), (4, 3), (3, 3)]


def observe(orthogonalise, muon):
    given = SQUARE.clone()
    with Operations() as operations:
        got = orthogonalise(given)
    slow = any(word in name for name in operations.calls for word in ("svd", "eig", "linalg_qr"))
    yield {"form": form(got), "decomposed": slow}
    yield {"products in": [_products_in(orthogonalise, dtype) for dtype in (torch.float32, torch.float64)]}
    yield {"square": [got, orthogonalise(SQUARE.clone(), 1)], "input": bool(torch.equal(given, SQUARE))}
    yield {"wide": orthogonalise(WIDE.clone())}
    tall = orthogonalise(TALL.clone())
    yield {"tall form": form(tall)}
    yield {"tall": tall}
    yield {"three": orthogonalise(SQUARE.clone(), 3), "zero": orthogonalise(ZERO.clone())}
    yield {"dtypes": form([orthogonalise(SQUARE.to(dtype)) for dtype in (torch.bfloat16, torch.float32)])}
    with Products() as products:
        orthogonalise(torch.ones(2, 40, 4))
    counts = []
    for n in (1, 4):
        with Operations() as operations:
            orthogonalise(SQUARE[:1].repeat(n, 1, 1))
        counts.append(operations.total)
    yield {"multiplications": products.multiplications, "orthogonalise operators": counts}
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        with Products() as products:
            weights = _step_in(muon, dtype)
        found[str(dtype)] = sorted({str(one) for one in products.dtypes} - {str(dtype)})
    yield {"others": found, "weights": form(weights)}
    for name, training in (("plain", PLAIN), ("sizes", SIZES), ("groups", GROUPS)):
        yield {f"muon {name}": follow(training, muon)}
    yield {"resumed": follow(GROUPS, muon, resume=2)}
    yield kept(GROUPS, muon)
    yield {"operators": operators(functools.partial(muon, dtype=torch.float32), SHAPES)}
    yield {"without values": without_values(muon, SHAPES)}


def _products_in(orthogonalise, dtype):
    """The dtypes of its products; of none, the one that it is given."""
    with Products() as products:
        orthogonalise(SQUARE.clone().to(dtype))
    return " and ".join(sorted({str(one).removeprefix("torch.") for one in products.dtypes or [dtype]}))


def _step_in(muon, dtype):
    weight = torch.nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.eye(3, 4)
    muon([weight], dtype=dtype).step()
    return weight.detach()


ENOUGH = (
    5 * 2 * (4 * 4 * 40 + 4 * 4 * 4 + 4 * 40 * 4)
)  # five rounds of two matrices 40×4, turned; some order them otherwise

NEARLY = within(1e-4)  # a small number may be added to the norm


def _one_round(seen, due):
    """A look's `fields`: in words, what one round makes of square matrices."""
    x = SQUARE / SQUARE.norm(dim=(1, 2), keepdim=True)
    squares = x @ x.mT
    terms = torch.stack([x, squares @ x, squares @ squares @ x]).flatten(1).T
    if NEARLY(seen[1], due[1]):
        return {
            "round": "One round is right, five are not. Each round starts with the X of the previous round, and "
            "computes A from it."
        }
    shares = torch.linalg.lstsq(terms, seen[1].flatten().nan_to_num(0, 0, 0)[:, None]).solution.flatten()
    if NEARLY(seen[1].flatten(), terms @ shares):
        a, b, c = (round(share, 4) + 0.0 for share in shares.tolist())
        return {"round": f"Your round computes {a:g} X {b:+g} A X {c:+g} A² X."}
    return {
        "round": "Your round is not a sum of this form. Is each product a matrix product (@)? Is A computed from "
        "X, and is it to the left of X?"
    }


def _square_right(seen, due):
    return {
        "round": "Square matrices come out right, others don't. Is A = X Xᵀ computed from the wide X, and is A "
        "to the left of X?"
    }


def _one_step(seen, due):
    """A look's `fields`: in words, how far the first step of PLAIN goes along the orthogonal gradient."""
    moved, gradient = PLAIN.weights()[0].flatten() - seen[0], PLAIN.gradient(0, 0)
    along = orthogonal(gradient).flatten()
    length, asked = (
        float(one.double() @ along / (along @ along)) for one in (moved, PLAIN.weights()[0].flatten() - due[0])
    )
    if abs(length - asked) < 1e-4 * asked:
        return {"step": "The first step is right: check the momentum."}
    if NEARLY(moved.double(), length * along):
        return {
            "step": f"The first step is {length:.4g} times the orthogonal matrix; the factor should be α · 0.2 √6 "
            f"= {asked:.4g}."
        }
    return {"step": "The first step is not in the direction of the orthogonal matrix."}


def _twice(seen, due):
    return seen <= 2 * due


LOOKS = [
    Look("matrices of the same shape and dtype", "form", "float64 (3, 4, 4)", "orthogonal-form"),
    Look("by matrix products", "decomposed", False, "decomposed"),
    Look("computed in the dtype of its input", "products in", ["float32", "float64"], "other-dtype"),
    Value("square ones", "square", [_each(SQUARE), _each(SQUARE, 1)], "wrong-orthogonal", holds=NEARLY, fields=_one_round),
    Look("the input stays", "input", True, "input-changed"),
    Value("wide ones", "wide", _each(WIDE), "wrong-orthogonal", holds=NEARLY, fields=_square_right),
    Look("tall ones", "tall form", "float64 (2, 7, 3)", "not-turned-back"),
    Value("", "tall", _each(TALL), "wrong-orthogonal", holds=NEARLY, fields=_square_right),
    Value("three rounds", "three", _each(SQUARE, 3), "rounds-ignored", holds=NEARLY),
    Value("zeros", "zero", _each(ZERO), "wrong-zeros", holds=NEARLY),
    Look("bfloat16 stays bfloat16", "dtypes", ["bfloat16 (3, 4, 4)", "float32 (3, 4, 4)"], "other-dtype"),
    Look("no more multiplications than on the short side", "multiplications", ENOUGH, "long-side", holds=_twice,
         fields=lambda seen, due: {"times": round(seen / due, 1), "expected": f"{due} multiplications", "got": seen}),
    Look("all matrices in one call", "orthogonalise operators", [0, 0], "one-by-one", holds=no_more_for_many,
         fields=lambda seen, due: {"few": seen[0], "many": seen[1], "expected": f"{seen[0]} operators", "got": seen[1]}),
    Look("a step in the group's dtype, and in no other", "others", {"torch.bfloat16": [], "torch.float64": []}, "dtype-ignored",
         fields=lambda seen, due: {"asked": next(one for one in seen if seen[one]), "got": max(seen.values())}),
    Look("", "weights", "float32 (3, 4)", "weights-moved"),
    Value("three steps with one matrix", "muon plain", truth(PLAIN, rule), "wrong-muon", fields=_one_step),
    Value("several shapes, with decay", "muon sizes", truth(SIZES, rule), "wrong-sizes"),
    Value("several groups, changing rates, gradients that are None", "muon groups", truth(GROUPS, rule), "wrong-groups"),
    Value("the same after stopping and resuming from the state_dict", "resumed", truth(GROUPS, rule), "not-resumed"),
    Look("gradients stay the same, weights change in place", "gradients", 0, "gradients-changed"),
    Look("", "moved", False, "weights-moved"),
    Look("as many operators for 12 matrices as for 3", "operators", [0, 0], "an-operator-each",
         holds=no_more_for_many, fields=few_and_many(SHAPES)),
    Look("no value is read back to the CPU", "without values", True, "weights-moved"),
]  # fmt: skip


def balise_6(orthogonalise, muon):
    with own_work():
        yield from judged(LOOKS, observe, orthogonalise, muon)
