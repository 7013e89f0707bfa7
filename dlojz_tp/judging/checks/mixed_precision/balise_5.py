"""Balise 5: the unit in the last place, against bit patterns, and SGD on float32 masters, against SGD in float64."""

import gc
from functools import cache, partial

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, at_most, judged, shape, silent
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.judging.probes.shared_looks import recognised, said
from dlojz_tp.measure import LiveBytes

HALVES = torch.bfloat16, torch.float16
DTYPES = *HALVES, torch.float32
LR, MOMENTUM = 0.02, 0.9  # of twenty steps


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(dtype):
    """{what a mistake at these would be called: (numbers, x)}."""
    info = torch.finfo(dtype)
    eps, tiny = info.eps, info.smallest_normal
    usual = [1.0, 1.5, 1 + eps, 3.0, 100.0, 0.3, 1e-3, 0.7]
    powers = [2.0, 2 - eps, 4.0, 4 - 2 * eps, 0.5, 0.5 - eps / 4, 0.125, 1024.0, 1024 * (1 - eps / 2), 8 - 4 * eps]
    found = {"": usual, "ulp-negative": [-v for v in usual], "ulp-at-power": powers, "ulp-at-zero": [0.0],
             "ulp-subnormal": [tiny / 2, tiny / 8, tiny * eps, -tiny / 4, tiny, 2 * tiny]}  # fmt: skip
    return {what: (values, torch.tensor(values, dtype=torch.float64).to(dtype)) for what, values in found.items()}


def _next(x):
    """The distance from |x| to the next number of its dtype, from bit patterns, in float64."""
    whole = torch.int32 if x.dtype == torch.float32 else torch.int16
    size = x.abs()
    return (size.view(whole) + 1).view(x.dtype).double() - size.double()


def _model(dtype, *sizes):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, 5, generator=generator).to(dtype)) for n in sizes]


def _gradients(dtype):
    """Those of twenty steps, for a model of sizes 3 and 7."""
    drawn = torch.Generator().manual_seed(2)
    return [[(torch.randn(n, 5, generator=drawn) + 0.3).to(dtype) for n in (3, 7)] for _ in range(20)]


@cache
def _trained(dtype, momentum, share=1.0):
    """The weights after these in float64. share: of each gradient, that is added to the momentum."""
    weights = [p.detach().double() for p in _model(dtype, 3, 7)]
    velocity = [torch.zeros_like(w) for w in weights]
    for gradients in _gradients(dtype):
        for w, v, gradient in zip(weights, velocity, gradients, strict=True):
            v.mul_(momentum).add_(gradient.double(), alpha=share)
            w.sub_(v, alpha=LR)
    return weights


def observe(ulp, optimizer_class):
    """Units for all kinds of numbers; see also the functions below."""
    for dtype in DTYPES:
        for what, (_, given) in _values(dtype).items():
            got = ulp(given)
            double = got.detach().double() if isinstance(got, torch.Tensor) else None
            yield {(dtype, what, "x"): given.float(), (dtype, what, "shape"): shape(got), (dtype, what): double}
        yield {(dtype, "two dimensions"): shape(ulp(torch.ones(2, 3, dtype=dtype)))}

    def make(params, lr, momentum):
        return optimizer_class(params, lr=lr, momentum=momentum)

    for dtype in HALVES:
        yield from _observe_small_updates(make, dtype)
        yield from _observe_twenty_steps(make, dtype)
    yield from _observe_none(make)
    yield {"held": _held(make)}
    yield {"device": on_gpu(lambda weight: _two_steps(make, weight), torch.ones(3, 2, dtype=torch.bfloat16))}


def _moved(params, before):
    return not all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def _kind(params, dtype):
    """The dtype of the parameters; of one that has another, that."""
    return _name(next((p.dtype for p in params if p.dtype != dtype), dtype))


def _observe_small_updates(make, dtype):
    """Each update is a tenth of a unit in the last place; forty of them are four units."""
    params = [nn.Parameter(torch.ones(3, 4, dtype=dtype)), nn.Parameter(torch.full((2,), -1.0, dtype=dtype))]
    before = [p.detach().clone() for p in params]
    optimizer = make(params, torch.finfo(dtype).eps / 10, 0.0)
    for _ in range(40):
        for p in params:
            p.grad = torch.full_like(p, -1.0 if p[0].sum() > 0 else 1.0)
        optimizer.step()
        optimizer.zero_grad()
    yield {(dtype, "after 40"): _kind(params, dtype)}
    small, got = _moved(params, before), [p.detach().double() for p in params]
    if not small:
        for p in params:  # an update that no rounding can hide
            p.grad = torch.full_like(p, 200.0)
        optimizer.step()
    yield {(dtype, "moves"): [small, small or _moved(params, before)], (dtype, "small"): got}


def _observe_twenty_steps(make, dtype):
    params = _model(dtype, 3, 7)
    before = [p.detach().clone() for p in params]
    optimizer = make(params, LR, MOMENTUM)
    for k, gradients in enumerate(_gradients(dtype)):
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        if not k:
            yield {(dtype, "after 1"): _kind(params, dtype)}
            yield {(dtype, "moved at once"): _moved(params, before)}
    yield {(dtype, "after 20"): _kind(params, dtype)}
    got = [p.detach().clone() for p in params]
    yield {(dtype, "twenty"): (got, 0.0 if _near(got, _trained(dtype, MOMENTUM)) else _held(make))}


def _observe_none(make):
    """Parameters without a gradient, zero_grad, and what is given as a generator, as model.parameters() is."""
    params, error = _model(torch.bfloat16, 2, 3), ""
    optimizer = make(params, 0.1, 0.9)
    params[0].grad = torch.ones_like(params[0])
    try:
        optimizer.step()
    except (AttributeError, TypeError) as raised:
        error = str(raised) or type(raised).__name__
    yield {"none": error, "frozen": params[1].detach().clone()}
    optimizer.zero_grad()
    yield {"left": params[0].grad is not None and bool(params[0].grad.abs().sum() > 0)}
    for name, wrapped in (("generator", iter(params)), ("list", params)):
        optimizer, before = make(wrapped, 0.1, 0.9), params[0].detach().clone()
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        yield {name: _moved(params[:1], [before])}


def _held(make) -> float:
    """Bytes a parameter that are alive after three steps and zero_grad, but the parameters."""
    params = [nn.Parameter(torch.randn(100, 50).bfloat16()) for _ in range(4)]
    with LiveBytes().track(*params) as live:
        optimizer = make(params, 0.1, 0.9)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
            for p in params:
                p.grad = None
        gc.collect()  # what only hangs in a circle is not held
    return live.live / sum(p.numel() for p in params) - 2  # two bytes for the parameter itself


def _two_steps(make, weight):
    params = [nn.Parameter(weight)]
    optimizer = make(params, 0.1, 0.9)
    for _ in range(2):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    optimizer.zero_grad()


def _near(params, truth) -> bool:
    """Whether every value is the truth, rounded: at most 0.52 units away (half a unit, and float32's own error)."""
    return all(
        bool(((p.double() - q.double()).abs() <= 0.52 * _next(q.detach().to(p.dtype))).all())
        for p, q in zip(params, truth, strict=True)
    )


def _units(dtype):
    """Looks at the unit in the last place."""
    claim = f"the unit in the last place in {_name(dtype)}"
    for what, (values, x) in _values(dtype).items():
        yield Look(claim, (dtype, what, "x"), x.float(), "ulp-changes-x", holds=torch.equal)
        yield Look("", (dtype, what, "shape"), tuple(x.shape), "ulp-shape")
        about = {"where": f"{_name(dtype)}, x = {values}", "wanted": _next(x)[0].item()}
        yield Look("", (dtype, what), _next(x), partial(_which, what, x), holds=_alike,
                   fields=lambda seen, due, about=about: {"expected": due.float(),
                   "got": seen.float()} | about)  # fmt: skip
    yield Look("", (dtype, "two dimensions"), (2, 3), "ulp-shape")


def _alike(units, others) -> bool:
    return bool(((units - others).abs() <= 1e-4 * others.abs()).all())


def _which(what, x, got, wanted):
    """The mistake in units. Zero and subnormals are a matter of their own: one shown there is named after them."""
    size, eps = x.double().abs(), torch.finfo(x.dtype).eps
    known = {"ulp-negative": -wanted, "ulp-half": wanted / 2, "ulp-constant": torch.full_like(wanted, eps),
             "ulp-relative": eps * size, "ulp-float32": _next(x.float())}  # fmt: skip
    slugs = [slug for slug, value in known.items() if _alike(got, value)]
    return slugs[0] if slugs and what in ("", "ulp-negative") else what or "ulp-wrong"


def _masters(dtype):
    """Looks at what SGD does to parameters of a dtype."""
    name, unit = _name(dtype), torch.finfo(dtype).eps

    def kind(when, claim=""):
        return Look(claim, (dtype, when), name, "parameters-widened", fields="got_dtype")

    def after_twenty(o):
        (got, held), due = o[dtype, "twenty"], _trained(dtype, MOMENTUM)
        if _near(got, due):
            return None
        known = {"momentum-ignored": _trained(dtype, 0.0), "momentum-dampened": _trained(dtype, MOMENTUM, 0.1)}
        other = "momentum-in-half" if 5.5 < held < 6.5 else "sgd-wrong"
        slug = next((slug for slug, weights in known.items() if _near(got, weights)), other)
        return slug, {"expected": due[0].float(), "got": got[0]}

    return [
        kind("after 40", f"with masters, small updates add up, parameters in {name}"),
        Look("", (dtype, "moves"), [True, True],
             lambda seen, _: "masters-not-kept" if seen[1] else "parameters-replaced", fields=silent),
        Look("", (dtype, "small"), [1 + 4 * unit, -1 - 4 * unit], "sgd-wrong",
             holds=lambda seen, due: not any((p - value).abs().max() > 0.6 * unit for p, value in zip(seen, due)),
             fields={"where": "after 40 updates of a tenth of a unit"}),
        kind("after 1", f"twenty steps of SGD with momentum, parameters in {name}"),
        Look("", (dtype, "moved at once"), True, "velocity-late"),
        kind("after 20"),
        recognised("", after_twenty),
    ]  # fmt: skip


def _bytes(held, _):
    return {"got_bytes": held, "expected": "8 bytes a parameter", "got": f"{held:.1f}"}


LOOKS = [
    *(look for dtype in DTYPES for look in _units(dtype)), *(look for dtype in HALVES for look in _masters(dtype)),
    Look("parameters without a gradient, and zero_grad", "none", "", "grad-none", fields="error"),
    Look("", "frozen", _model(torch.bfloat16, 2, 3)[1].detach(), "frozen-moved"),
    Look("", "left", False, "zero-grad-missing"),
    Look("", "generator", True, "generator-used-up"), Look("", "list", True, "generator-used-up"),
    Look("between two steps: 8 bytes per parameter, for masters and momentum", "held", 9,
         lambda held, _: "float32-gradients-kept" if 11.5 < held < 12.5 else "too-much-memory",
         holds=at_most, fields=_bytes),
    Look("on a GPU: no value is read, nothing is created elsewhere", "device", ["", ""], "leaves-the-device",
         fields=said),
]  # fmt: skip


def balise_5(ulp, optimizer_class):
    yield from judged(LOOKS, observe, ulp, optimizer_class)
