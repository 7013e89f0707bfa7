"""Balise 8: products of many experts at once: values and gradients, operations, multiplications and memory."""

import torch

from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent, tried
from dlojz_tp.judging.probes.gpus import on_one_gpu, watched
from dlojz_tp.judging.probes.memory import Memory
from dlojz_tp.measure.operations import Operations, Products

WIDTH, OUT = 16, 32
CASES = {
    "experts of all sizes": (5, 1, 0, 8, 3),
    "the first and the last without rows": (0, 4, 4, 0),
    "all rows for one": (0, 0, 9),
    "no rows": (0, 0, 0),
}
FEW, MANY = (16,) * 4, (16,) * 64
EVEN = (32,) * 8


def given(counts):
    """Rows (n, 16), matrices (e, 16, 32), counts (e,)."""
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), WIDTH, generator=generator)
    return x, torch.randn(len(counts), WIDTH, OUT, generator=generator), torch.tensor(counts)


def upstream(rows):
    return torch.cos(torch.arange(rows * OUT)).view(rows, OUT)


def truth(counts):
    """In float64, an expert after the other: what comes out, the gradient of the rows, that of the matrices."""
    x, weights, _ = given(counts)
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    out = torch.cat([rows @ weight for rows, weight in zip(x.split(counts), weights)])
    (out * upstream(len(out))).sum().backward()
    return [out.detach(), x.grad, weights.grad]


def called(grouped_product, counts):
    """What comes out, and the gradients; zeros where there is none."""
    x, weights, counts = given(counts)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = grouped_product(x, weights, counts)
    if out.requires_grad and out.shape == (len(x), OUT):
        out.backward(upstream(len(out)))
    return [out.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in (x, weights))]


def observe(grouped_product):
    got = {case: tried(called, grouped_product, counts) for case, counts in CASES.items()}
    first, *others = got.values()
    if isinstance(first, str):
        called(grouped_product, CASES[FIRST])  # it raises
    yield {"form": form(first[0]), "out": first[0], "gradients": list(first[1:])}
    yield dict(zip(OTHERS, others))
    yield {"half": tried(lambda: form(grouped_product(*(one.bfloat16() for one in given(FEW)[:2]), torch.tensor(FEW))))}
    totals = []
    for counts in (FEW, MANY):
        with Operations() as operations:
            grouped_product(*given(counts))
        totals.append(operations.total)
    yield {"operations": totals[1] - totals[0]}
    x, weights, counts = given(EVEN)
    with Products() as products, Memory() as memory:
        grouped_product(x, weights, counts)
    yield {"multiplications": products.multiplications / (len(x) * WIDTH * OUT), "bytes": memory.peak / PADDED}
    yield {"device": on_one_gpu(on_device, grouped_product) or ""}


def on_device(gpu, device, grouped_product):
    """The error of a tensor that is on the CPU; one reading of the largest count is no mistake."""
    seen = watched(gpu, grouped_product, *(one.to(device) for one in given(FEW)))
    return seen.error if seen.misplaced else ""


PADDED = 4 * sum(EVEN) * (WIDTH + OUT)  # bytes of the rows and their results
FIRST, *OTHERS = CASES
DUE = {case: truth(counts) for case, counts in CASES.items()}
LOOKS = [
    Look("one row for each", "form", f"float32 ({sum(CASES[FIRST])}, {OUT})", "product-form"),
    Value("each row times the matrix of its expert", "out", DUE[FIRST][0], "wrong-product", fields=silent),
    Value("gradients of rows and matrices", "gradients", DUE[FIRST][1:], "no-gradient", fields=silent),
    *(Look(case, case, DUE[case], "empty-experts", fields=lambda seen, due, case=case: {"where": case} | silent(seen, due)) for case in OTHERS),
    Look("no more operations for 64 experts than for 4", "operations", 0, "loops", holds=at_most, fields=lambda seen, _: {"n": seen} | silent(seen, _)),
    Look("no more multiplications than the rows need, padded to the largest count", "multiplications", 1.0, "padded-to-all", holds=at_most,
         fields=lambda seen, _: {"n": f"{seen:.0f}"} | silent(seen, _)),
    Look("nor more memory", "bytes", 4.0, "copies-weights", holds=at_most, fields=lambda seen, _: {"n": f"{seen:.0f}"} | silent(seen, _)),
    Look("rows in bfloat16", "half", f"bfloat16 ({sum(FEW)}, {OUT})", "other-dtype"),
    Look("on a GPU: what is made is there", "device", "", "other-device",
         fields=lambda seen, due: {"error": seen} | silent(seen, due)),
]  # fmt: skip


def balise_8(grouped_product):
    yield from judged(LOOKS, observe, grouped_product)
