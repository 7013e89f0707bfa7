"""Balise 4: sizes that Tensor Cores like, and a linear layer that is padded inside and unchanged outside."""

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, one_of, shape, within
from dlojz_tp.judging.checks.tensor_cores_channels_last.numbers import number, of_each, read, several
from dlojz_tp.measure.operations import Operations

SIZES = {  # (size, dtype, alignment in bytes)
    "the padded size, aligned to 16 bytes: float32, bfloat16, int8": [
        (50257, torch.bfloat16, 16), (50257, torch.float32, 16), (50257, torch.int8, 16), (1001, torch.float16, 16),
    ],
    "sizes that already fit; other alignments": [
        (1024, torch.float32, 16), (8, torch.float16, 16), (50257, torch.bfloat16, 128), (37, torch.float32, 128),
        (130, torch.int8, 128), (1, torch.bfloat16, 16), (1000, torch.float64, 64),
    ],
}  # fmt: skip
OUTPUTS = {
    "the layer gives the same output, of the same shape": [(13, (5,), True), (13, (2, 3), False), (16, (4,), True)]
}
DTYPES = {"dtype and device are those of the given layer": [(torch.bfloat16, 16), (torch.float64, 128)]}
PRODUCTS = "aten.mm", "aten.addmm", "aten.bmm", "aten.linear"
AS_BEFORE = "a module, and the given layer as before"
MADE = {
    "no module": "not-a-module",
    "on another device": "device-changed",
    "another given layer": "given-layer-changed",
}


def observe(padded_size, PaddedLinear):  # noqa: N803  (the answer is a class)
    """Sizes; the layer: outputs, what runs inside, what it shares, gradients, other kinds of layers."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    for case in sum(SIZES.values(), []):
        yield {case: read(padded_size(*case))}
    made = functools.partial(_made, PaddedLinear)
    for case in sum(OUTPUTS.values(), []):
        padded = yield from made(case, _layer(case[0], case[2]))
        got = padded(_randn(4, *case[1], 6))
        yield {("shape", case): got if got is None else tuple(got.shape), ("output", case): got}
    yield from _inside(made)
    for n_out in (13, 16):
        layer = _layer(n_out)
        before, padded = copy.deepcopy(layer), (yield from made(f"own {n_out}", layer))
        with torch.no_grad():
            for p in padded.parameters():
                p.add_(1.0)
        kept = [torch.equal(p, q) for p, q in zip(layer.parameters(), before.parameters(), strict=True)]
        yield {f"shared {n_out}": not all(kept)}
    yield from _steps((yield from made("gradients", _layer(13))), _layer(13).double())
    for case in sum(DTYPES.values(), []):
        padded = yield from made(case, nn.Linear(6, 9, dtype=case[0]), case[1])
        found = list(padded.parameters())
        yield {("dtypes", case): [p.dtype for p in found]}
        yield {("rows", case): any(p.dim() == 2 and 16 in p.shape for p in found)}
        yield {("call", case): _called(padded.eval(), torch.ones(2, 6, dtype=case[0]))}
    padded = yield from made("meta", nn.Linear(6, 9, device="meta"))
    yield {"devices": [p.device.type for p in padded.parameters()]}


def _layer(n_out, bias=True):
    torch.manual_seed(3)
    return nn.Linear(6, n_out, bias=bias)


def _randn(seed, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _made(PaddedLinear, key, layer, alignment=16):  # noqa: N803
    """The padded layer; yields what came of making it, in words."""
    before = copy.deepcopy(layer)
    try:
        padded = PaddedLinear(layer, alignment)
    except RuntimeError as error:
        if layer.weight.is_meta and "meta" in str(error).split("\n")[0]:
            yield {("made", key): "on another device"}
        raise
    same = layer.weight.shape == before.weight.shape and layer.out_features == before.out_features
    same = same and (layer.weight.is_meta or torch.equal(layer.weight, before.weight))
    same = same and all(
        one.requires_grad == two.requires_grad for one, two in zip(layer.parameters(), before.parameters())
    )
    of_layer = AS_BEFORE if same else "another given layer"
    yield {("made", key): of_layer if isinstance(padded, nn.Module) else "no module"}
    return padded


def _inside(made):
    """Sizes of the products and of the parameters; with another alignment, with and without a bias."""
    padded, x = (yield from made("inside", _layer(13))), torch.randn(5, 6)
    with Operations() as operations:
        padded(x)
    yield {"products": [out[3] for name, *_, out in operations.log if name in PRODUCTS]}
    yield {"sizes": shape([*padded.parameters()])}
    padded = yield from made(128, _layer(13), 128)
    yield {"rows": [max(p.shape) for p in padded.parameters() if p.dim() == 2]}
    for n_out, bias in ((16, True), (13, False)):
        padded = yield from made(f"bias {bias}", _layer(n_out, bias))
        yield {f"held, bias {bias}": sum(p.numel() for p in padded.parameters())}


def _steps(padded, plain):
    """Two steps of training beside the given layer: the added rows before each, and the gradients of both."""
    x, labels = _randn(5, 7, 6).requires_grad_(), torch.arange(7) * 2 % 13
    exact = x.detach().double().requires_grad_()
    optimizer, reference = (torch.optim.SGD(one.parameters(), lr=0.5, weight_decay=0.1) for one in (padded, plain))
    for step in range(2):
        rows = [p.detach() if p.shape[0] > 6 else p.detach().T for p in padded.parameters() if p.dim() in (1, 2)]
        yield {("added", step): any(one[13:].any() for one in rows)}
        optimizer.zero_grad()
        reference.zero_grad()
        loss = F.cross_entropy(padded(x), labels)
        yield {("graph", step): loss.requires_grad}
        loss.backward()
        F.cross_entropy(plain(exact), labels).backward()
        found = next(p.grad for p in padded.parameters() if p.dim() == 2)
        found = torch.empty(0) if found is None else found if found.shape[0] == 16 else found.T
        yield {("gradient", step): (found[:13], plain.weight.grad), ("added gradient", step): bool(found[13:].any())}
        yield {("input", step): (torch.empty(0) if x.grad is None else x.grad, exact.grad)}
        optimizer.step()
        reference.step()


def _called(padded, x):
    """Shape and dtype of an output of 9, or the error in words."""
    try:
        got = padded(x)
    except RuntimeError as error:
        return f"fails ({error})".split("\n")[0]
    return tuple(got.shape), got.dtype


def _sizes(claim, case):
    size, dtype, alignment = case
    multiple = alignment // dtype.itemsize
    truth = next(n for n in range(size, size + alignment + 1) if n * dtype.itemsize % alignment == 0)
    where, fraction = f"size {size}, {_name(dtype)}, {alignment} bytes", (truth - size) / size
    mistakes = [
        ("bytes-as-elements", math.ceil(size / alignment) * alignment),
        ("size-rounded-down", size // multiple * multiple), ("size-rounded-down", round(size / multiple) * multiple),
        ("aligned-padded", (size // multiple + 1) * multiple),
        *(("dtype-ignored", math.ceil(size / fixed) * fixed) for fixed in (8, 4, 64)),
        ("power-of-two", 2 ** math.ceil(math.log2(size))),
    ]  # fmt: skip
    of_extra = [
        ("extra-of-padded", (truth - size) / truth), ("ratio-not-extra", truth / size),
        ("extra-in-elements", truth - size), ("extra-in-percent", 100 * fraction),
    ]  # fmt: skip
    yield several(claim, case, 2, "not-size-and-extra", "(size, fraction)")
    yield number("", lambda o: o[case][0], truth, mistakes, "wrong-size", where, "{:,}")
    yield number("", lambda o: o[case][1], fraction, of_extra, "wrong-extra", where)


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _is_made(claim, key):
    return Look(claim, ("made", key), AS_BEFORE, lambda seen, _: MADE[seen])


def _outputs(claim, case):
    n_out, lead, bias = case
    where = f"{n_out} outputs, float32, input {'×'.join(map(str, (*lead, 6)))}, {'with' if bias else 'without'} bias"

    def shape_hint(seen, due):
        return "padding-visible" if seen[:-1] == due[:-1] and seen[-1] > n_out else "wrong-shape"

    def hint(seen, due):
        lost = bias and close(seen, due - _layer(n_out).bias.detach().double(), 1e-5)
        return "bias-made-up" if not bias else "bias-lost" if lost else "wrong-columns"

    def truth(_):
        return _layer(n_out, bias).double()(_randn(4, *lead, 6).double()).detach()

    yield _is_made(claim, case)
    yield Look("", ("shape", case), (*lead, n_out), shape_hint, fields={"where": where})
    yield Look("", ("output", case), truth, hint, holds=within(1e-5), fields={"where": where})


def _is_padded(seen, _):
    return not seen or any(16 in one for one in seen)


def _has_padded(seen, _):
    return (16, 6) in seen or (6, 16) in seen


def _step(step):
    def both(what, hint):
        def fields(seen, _):
            return {"expected": seen[1].float(), "got": seen[0] if seen[0].numel() else "no gradient"}

        return Look(
            "", (what, step), "as of the given layer", hint, holds=lambda seen, _: close(*seen, 1e-4), fields=fields
        )

    return [
        Look("", ("added", step), False, "padding-not-zero"), Look("", ("graph", step), True, "gradient-differs"),
        both("gradient", "gradient-differs"), Look("", ("added gradient", step), False, "padding-not-zero"),
        both("input", "input-gradient-differs"),
    ]  # fmt: skip


def _dtypes(claim, case):
    dtype, alignment = case

    def of_call(seen, _):
        return "padding-visible" if not isinstance(seen, str) and seen[0] != (2, 9) else "result-dtype"

    def fields(seen, _):
        what = seen if isinstance(seen, str) else f"gives {seen[1]}"
        return {"dtype": _name(dtype), "what": what}

    yield _is_made(claim, case)
    yield Look("", ("dtypes", case), [dtype], "dtype-changed", holds=one_of)
    yield Look(
        "",
        ("rows", case),
        True,
        "padded-for-float32",
        fields=lambda *_: {"dtype": _name(dtype), "alignment": alignment},
    )
    yield Look("", ("call", case), ((2, 9), dtype), of_call, fields=fields)


LOOKS = [
    *of_each(SIZES, _sizes), *of_each(OUTPUTS, _outputs),
    _is_made("inside, the product has the padded size; the padding is done once, not in each call", "inside"),
    Look("", "products", "16 columns", "not-padded", holds=_is_padded,
         fields=lambda seen, due: {"got": f"{seen[0][-1]} columns", "width": 13}),
    Look("", "sizes", "a parameter of 16×6", lambda seen, _: "pads-each-call" if seen else "weights-not-parameters",
         holds=_has_padded),
    _is_made("", 128),
    Look("", "rows", [32], lambda seen, _: "given-layer-kept" if 32 in seen and len(seen) > 1 else "alignment-ignored"),
    _is_made("", "bias True"), Look("", "held, bias True", 16 * 7, "wrong-columns"),
    _is_made("", "bias False"),
    Look("", "held, bias False", 16 * 6, lambda seen, due: "bias-made-up" if seen > due else "wrong-columns"),
    _is_made("the given layer stays as it is, even where nothing is padded", "own 13"),
    Look("", "shared 13", False, "weights-shared"),
    _is_made("", "own 16"), Look("", "shared 16", False, "weights-shared"),
    _is_made("the gradients of the real rows are equal; the padding is zero and stays zero", "gradients"),
    *_step(0), *_step(1), *of_each(DTYPES, _dtypes), _is_made("", "meta"),
    Look("", "devices", ["meta"], "device-changed", holds=one_of),
]  # fmt: skip


def balise_4(padded_size, PaddedLinear):  # noqa: N803
    yield from judged(LOOKS, observe, padded_size, PaddedLinear)
