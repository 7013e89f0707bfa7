"""Balise 3: layer norm over long rows: passes, blocks, numbers far from zero; gradients without atomics."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent, within
from dlojz_tp.judging.checks.triton_kernels.watching import KERNEL_LOOKS, kernel_parts, looks_at, watched

N, ROWS, BLOCK = 300, 6, 64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, N, generator=GENERATOR) * torch.linspace(0.5, 2, ROWS)[:, None] + 0.7
WEIGHT, BIAS = torch.linspace(0.5, 2, N), torch.linspace(-1, 1, N)
GRAD = torch.randn(ROWS, N, generator=GENERATOR)
ZEROS = "aten.zeros", "aten.new_zeros", "aten.zeros_like", "aten.zero_"  # for partial sums
OTHERS = {"rows shorter than a block": 10, "rows of two blocks": 2 * BLOCK, "rows of a block and one": BLOCK + 1}


def due(x, eps=1e-5):
    """(result, mean, rstd) in float64, as float32."""
    x, n = x.double(), x.shape[1]
    mean, variance = x.mean(1), x.var(1, correction=0)
    rstd = 1 / (variance + eps).sqrt()
    normal = (x - mean[:, None]) * rstd[:, None]
    return [one.float() for one in (normal * WEIGHT[:n] + BIAS[:n], mean, rstd)]


def grads_due():
    _, mean, rstd = due(X)
    normal = (X.double() - mean[:, None]) * rstd[:, None]
    return [(GRAD * normal).sum(0).float(), GRAD.double().sum(0).float()]


def observe(layer_norm, layer_norm_grads):
    result, seen, _ = yield from kernel_parts(layer_norm, X, WEIGHT, BIAS, eps=0.1, block=BLOCK)
    yield {"values": result[0], "means": result[1], "rstds": result[2]}
    yield {"passes": int(seen.reads(seen.given[0]).max())}
    yield {"widest": max(len(one.elements) for one in seen.log)}
    for name, n in OTHERS.items():
        result, seen, _ = watched(layer_norm, X[:2, :n].contiguous(), WEIGHT[:n], BIAS[:n], block=BLOCK)
        yield {f"{name}, inside": not seen.outside, name: list(result)}
    yield {"far": list(watched(layer_norm, X + 3000, WEIGHT, BIAS, block=BLOCK)[0])}
    _, mean, rstd = due(X)
    result, seen, _ = yield from kernel_parts(layer_norm_grads, GRAD, X, mean, rstd, name="gradients ", allowed=ZEROS)
    yield {"gradients": list(result)}
    yield {"gradients read": [int((seen.reads(one) > 1).sum()) for one in seen.given[:2]]}
    yield {"atomics": any(one.kind == "atomic" for one in seen.log)}
    short = watched(layer_norm_grads, GRAD[:1, :3].contiguous(), X[:1, :3].contiguous(), mean[:1], rstd[:1])
    yield {"gradients of one row": list(short[0])}


def of_others(name, n):
    told = {"where": name, "what": name}
    yield Look(f"right for {name}", f"{name}, inside", True, "wrong-there",
               fields=told | {"expected": "", "got": ""})  # fmt: skip
    yield Value("", name, due(X[:2, :n]), "wrong-there", holds=within(1e-4), fields=told)


LOOKS = [
    Look("the result, means and rstd", "form", [form(X), *[form(X[:, 0])] * 2], "another-form"),
    *KERNEL_LOOKS,
    Value("the mean of each row", "means", due(X)[1], "wrong-mean", holds=within(1e-4)),
    Value("1 / sqrt(variance + eps)", "rstds", due(X, 0.1)[2], "wrong-rstd", holds=within(1e-4)),
    Value("the normalised rows", "values", due(X, 0.1)[0], "wrong-norm", holds=within(1e-4)),
    Look("x is read twice at most", "passes", 2, "third-pass", holds=at_most, fields="n"),
    Look("never more than a block at once", "widest", BLOCK, "row-at-once", holds=at_most,
         fields=lambda seen, due: {"n": seen, "block": due}),
    *[look for name, n in OTHERS.items() for look in of_others(name, n)],
    Value("rows around 3000", "far", due(X + 3000), "cancels", holds=within(5e-3)),
    Look("gradients of weight and bias", "gradients form", [form(WEIGHT)] * 2, "another-form"),
    Look("without atomics", "atomics", False, "sums-in-any-order", fields=silent),
    *looks_at("gradients ", KERNEL_LOOKS),
    Value("their values", "gradients", grads_due(), "wrong-gradients", holds=within(1e-4)),
    Look("x and the gradient are read once", "gradients read", 0, "rows-read-again", holds=at_most, fields=silent),
    Value("of one short row", "gradients of one row",
          [GRAD[0, :3] * (X[0, :3] - due(X)[1][0]) * due(X)[2][0], GRAD[0, :3]], "wrong-there", holds=within(1e-4),
          fields={"where": "one row of 3 elements", "what": "one row of 3 elements"}),
]  # fmt: skip


def balise_3(layer_norm, layer_norm_grads):
    yield from judged(LOOKS, observe, layer_norm, layer_norm_grads)
