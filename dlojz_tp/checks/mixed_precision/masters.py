"""Balise 5: the unit in the last place, and SGD on float32 masters."""

import gc

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.measure import LiveBytes
from dlojz_tp.probes.gpus import on_gpu

HINTS = {
    "ulp-shape": "Return one number for each value of x, in the same shape.",
    "ulp-changes-x": "You changed x itself. A method whose name ends in _ writes into its tensor.",
    "ulp-negative": "A distance is never negative. For a negative x, take the distance at its absolute value.",
    "ulp-relative": "You return a fraction of x. The distance is the same from one power of two to the next: for "
                    "1.0 and for 1.99.",
    "ulp-constant": "This is the distance at 1. It doubles with each power of two.",
    "ulp-float32": "This is the distance in float32. Use the dtype of x.",
    "ulp-half": "This is half a unit, the largest rounding error. Return the whole distance.",
    "ulp-at-power": "At a power of two, or just below one, the exponent is off by one. Logarithms are rounded, but "
                    "torch.frexp is exact.",
    "ulp-at-zero": "The next number after 0 is the smallest subnormal: {wanted:.3g}.",
    "ulp-subnormal": "Among subnormals the distance no longer shrinks: it stays {wanted:.3g}.",
    "ulp-wrong": "This is not the distance from |x| to the next larger number of its dtype.",
    "parameters-widened": "After the step a parameter is in {got_dtype}. The model computes in 16 bits: write the rounded "
    "master into the parameter.",
    "parameters-replaced": "The model's own parameters did not change. Write into them (copy_) instead of making "
                           "new ones.",
    "masters-not-kept": "Small updates are lost: the parameters don't move. Make the masters once, in float32, and "
                        "keep them. In each step, write every parameter from its master, rounded once to the "
                        "parameter's dtype.",
    "velocity-late": "The first step with momentum moves nothing. Update v with the gradient first, then the master with v.",
    "momentum-in-half": "The momentum is kept in 16 bits, so anything below half a unit is lost there too.",
    "momentum-dampened": "Add the whole new gradient to the momentum: v ← momentum · v + g, without (1 − momentum).",
    "momentum-ignored": "These are the weights of SGD without momentum.",
    "generator-used-up": "The optimizer moves nothing when you pass it model.parameters(), a generator: "
                         "list(parameters) in the line above has used the generator up. Go through self.parameters.",
    "grad-none": "Leave a parameter without a gradient as it is: {error}",
    "frozen-moved": "A parameter without a gradient moved.",
    "zero-grad-missing": "After zero_grad() the gradients are still there, so the next backward adds to them.",
    "float32-gradients-kept": "Between two steps you keep {got_bytes:.0f} bytes per parameter, but masters and "
                              "momentum take 8. Free the float32 gradients.",
    "too-much-memory": "Between two steps you keep {got_bytes:.0f} bytes per parameter, but masters and momentum "
                       "take 8.",
    "leaves-the-device": "When the parameters are on a GPU, the optimizer creates a tensor elsewhere, or the CPU "
                         "waits: {error}",
    "sgd-wrong": "The parameters are not those of SGD in float32, rounded.",
}


def balise_5(ulp, optimizer_class):
    """Bit patterns are the truth of the one, PyTorch's SGD in float64 that of the other."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield f"the unit in the last place in {_name(dtype)}"
        _ulp(ulp, dtype)
    for dtype in (torch.bfloat16, torch.float16):
        yield f"with masters, small updates add up, parameters in {_name(dtype)}"
        _small_updates(optimizer_class, dtype)
        yield f"twenty steps of SGD with momentum, parameters in {_name(dtype)}"
        _steps(optimizer_class, dtype)
    yield "parameters without a gradient, and zero_grad"
    _none(optimizer_class)
    yield "between two steps: 8 bytes per parameter, for masters and momentum"
    _memory(optimizer_class)
    yield "on a GPU: no value is read, nothing is created elsewhere"
    _elsewhere(optimizer_class)


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _next(x):
    """The distance from |x| to the next number of its dtype, from bit patterns, in float64."""
    whole = torch.int32 if x.dtype == torch.float32 else torch.int16
    size = x.abs()
    return (size.view(whole) + 1).view(x.dtype).double() - size.double()


def _ulp(ulp, dtype):
    info = torch.finfo(dtype)
    eps, tiny = info.eps, info.smallest_normal
    usual = [1.0, 1.5, 1 + eps, 3.0, 100.0, 0.3, 1e-3, 0.7]
    powers = [2.0, 2 - eps, 4.0, 4 - 2 * eps, 0.5, 0.5 - eps / 4, 0.125, 1024.0, 1024 * (1 - eps / 2), 8 - 4 * eps]
    for what, values in (
        ("", usual), ("ulp-negative", [-v for v in usual]), ("ulp-at-power", powers),
        ("ulp-at-zero", [0.0]), ("ulp-subnormal", [tiny / 2, tiny / 8, tiny * eps, -tiny / 4, tiny, 2 * tiny]),
    ):  # fmt: skip
        x = torch.tensor(values, dtype=torch.float64).to(dtype)
        wanted = _next(x)
        given = x.clone()
        got = ulp(given)
        if not torch.equal(given, x):
            raise Wrong("ulp-changes-x", expected=x.float(), got=given.float())
        if got is None:
            raise Wrong("nothing-returned")
        if not isinstance(got, torch.Tensor) or got.shape != x.shape:
            raise Wrong("ulp-shape", expected=f"shape {tuple(x.shape)}", got=got)
        got = got.detach().double()
        if bool(((got - wanted).abs() <= 1e-4 * wanted).all()):
            continue
        raise Wrong(_which(what, x, got, wanted), expected=wanted.float(), got=got.float(), where=f"{_name(dtype)}, x = {values}",
                    wanted=wanted[0].item())  # fmt: skip
    if ulp(torch.ones(2, 3, dtype=dtype)).shape != (2, 3):
        raise Wrong("ulp-shape", expected="shape (2, 3)")


def _which(what, x, got, wanted):
    size = x.double().abs()
    known = {
        "ulp-negative": -wanted,
        "ulp-half": wanted / 2,
        "ulp-constant": torch.full_like(wanted, torch.finfo(x.dtype).eps),
        "ulp-relative": torch.finfo(x.dtype).eps * size,
        "ulp-float32": _next(x.float()),
    }
    # the zero and the subnormals are a matter of their own: a mistake shown there is named after them
    slugs = [slug for slug, value in known.items() if ((got - value).abs() <= 1e-4 * value.abs()).all()]
    if slugs and what in ("", "ulp-negative"):
        return slugs[0]
    return what or "ulp-wrong"


def _model(dtype, *sizes):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, 5, generator=generator).to(dtype)) for n in sizes]


def _make(optimizer_class, params, lr, momentum):
    return optimizer_class(params, lr=lr, momentum=momentum)


def _checked(params, before, dtype):
    for p in params:
        if p.dtype != dtype:
            raise Wrong("parameters-widened", got_dtype=_name(p.dtype), expected=_name(dtype))
    return all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def _small_updates(optimizer_class, dtype):
    """Each update is a tenth of a unit in the last place; forty of them are four units."""
    params = [nn.Parameter(torch.ones(3, 4, dtype=dtype)), nn.Parameter(torch.full((2,), -1.0, dtype=dtype))]
    addresses = [id(p) for p in params]
    before = [p.detach().clone() for p in params]
    unit = torch.finfo(dtype).eps
    optimizer = _make(optimizer_class, params, unit / 10, 0.0)
    for _ in range(40):
        for p in params:
            p.grad = torch.full_like(p, -1.0 if p[0].sum() > 0 else 1.0)
        optimizer.step()
        optimizer.zero_grad()
    unmoved = _checked(params, before, dtype) and addresses == [id(p) for p in params]
    if unmoved:
        for p in params:  # an update that no rounding can hide
            p.grad = torch.full_like(p, 200.0)
        optimizer.step()
        raise Wrong("parameters-replaced" if _checked(params, before, dtype) else "masters-not-kept", expected=1 + 4 * unit,
                    got=params[0][0, 0].float())  # fmt: skip
    for p, value in zip(params, [1 + 4 * unit, -1 - 4 * unit], strict=True):
        if (p.double() - value).abs().max() > 0.6 * unit:
            raise Wrong("sgd-wrong", expected=value, got=p, where="after 40 updates of a tenth of a unit")


def _steps(optimizer_class, dtype):
    params = _model(dtype, 3, 7)
    truth = [nn.Parameter(p.detach().double()) for p in params]
    lr = 0.02
    optimizer, reference = _make(optimizer_class, params, lr, 0.9), torch.optim.SGD(truth, lr=lr, momentum=0.9)
    drawn = torch.Generator().manual_seed(2)
    before = [p.detach().clone() for p in params]
    variants = {
        "momentum-ignored": _sgd(before, lr, 0.0, 1.0),
        "momentum-dampened": _sgd(before, lr, 0.9, 0.1),
    }
    for k in range(20):
        for i, (p, q) in enumerate(zip(params, truth, strict=True)):
            p.grad = (torch.randn(p.shape, generator=drawn) + 0.3).to(dtype)
            q.grad = p.grad.double()
            for step in variants.values():
                step(i, q.grad)
        optimizer.step()
        reference.step()
        if k == 0 and _checked(params, before, dtype):
            raise Wrong("velocity-late")
    _checked(params, before, dtype)
    if _near(params, truth):
        return
    known = [slug for slug, step in variants.items() if _near(params, step.weights)]
    if not known and 5.5 < _held(optimizer_class) < 6.5:
        known = ["momentum-in-half"]
    raise Wrong(known[0] if known else "sgd-wrong", expected=truth[0].float(), got=params[0])


def _sgd(weights, lr, momentum, share):
    """Plain SGD in float64 with a mistake in its momentum, a parameter at a time."""
    weights = [w.double() for w in weights]
    velocity = [torch.zeros_like(w) for w in weights]

    def step(i, gradient):
        velocity[i] = momentum * velocity[i] + share * gradient
        weights[i] -= lr * velocity[i]

    step.weights = weights
    return step


def _near(params, truth) -> bool:
    """Whether every value is the truth, rounded: at most 0.52 units away (half a unit, and float32's own error)."""
    return all(
        bool(((p.double() - q.double()).abs() <= 0.52 * _next(q.detach().to(p.dtype))).all())
        for p, q in zip(params, truth, strict=True)
    )


def _none(optimizer_class):
    params = _model(torch.bfloat16, 2, 3)
    alone = params[1].detach().clone()
    optimizer = _make(optimizer_class, params, 0.1, 0.9)
    params[0].grad = torch.ones_like(params[0])
    try:
        optimizer.step()
    except (AttributeError, TypeError) as error:
        raise Wrong("grad-none", error=str(error)) from error
    if not close(params[1], alone):
        raise Wrong("frozen-moved", expected=alone, got=params[1])
    optimizer.zero_grad()
    if params[0].grad is not None and params[0].grad.abs().sum() > 0:
        raise Wrong("zero-grad-missing", got=params[0].grad)
    for wrapped in (iter(params), params):  # model.parameters() is a generator
        optimizer, before = _make(optimizer_class, wrapped, 0.1, 0.9), params[0].detach().clone()
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        if torch.equal(params[0], before):
            raise Wrong("generator-used-up")


def _memory(optimizer_class):
    held = _held(optimizer_class)
    if held > 9:
        slug = "float32-gradients-kept" if 11.5 < held < 12.5 else "too-much-memory"
        raise Wrong(slug, got_bytes=held, expected="8 bytes a parameter", got=f"{held:.1f}")


def _held(optimizer_class) -> float:
    """Bytes a parameter that are alive after three steps and zero_grad, but the parameters."""
    params = [nn.Parameter(torch.randn(100, 50).bfloat16()) for _ in range(4)]
    with LiveBytes().track(*params) as live:
        optimizer = _make(optimizer_class, params, 0.1, 0.9)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
            for p in params:
                p.grad = None
        gc.collect()  # what only hangs in a circle is not held
    return live.live / sum(p.numel() for p in params) - 2  # two bytes for the parameter itself


def _elsewhere(optimizer_class):
    """Two steps on a GPU."""

    def steps(weight):
        params = [nn.Parameter(weight)]
        optimizer = _make(optimizer_class, params, 0.1, 0.9)
        for _ in range(2):
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        optimizer.zero_grad()

    fault, error = on_gpu(steps, torch.ones(3, 2, dtype=torch.bfloat16))
    if fault:
        raise Wrong("leaves-the-device", error=error)
