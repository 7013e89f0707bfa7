"""Balise 4: a dynamic loss scaler: each method by itself, then beside PyTorch's own on the same overflows."""

import functools
import math
from unittest import mock

import torch
from torch import nn

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.compare import close, mistake_of
from dlojz_tp.judging.checking.looks import Look, at_most, judged, silent, within
from dlojz_tp.judging.checks.mixed_precision.spies import SpySGD
from dlojz_tp.judging.checks.mixed_precision.traces import known_traces, random_overflows
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.operations import Operations, in_words, syncs

FIRST = 1024.0
_OPTIONS = [
    {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3},
    {"init_scale": 2.0**16, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2},
    {"init_scale": 48.0, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 1},
    {"init_scale": 0.5, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5},  # goes below 1
    {"init_scale": 2.0**20, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 1},  # far beyond usual caps
]
# a parameter, and a value of its gradient
SPOILT = (0, math.inf), (1, -math.inf), (2, math.inf), (1, math.nan), (2, math.nan)


def _refuse(self, *args, **kwargs):
    raise Wrong("library-scaler")


def _on_gpu(_, scaler_class):
    p = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), _new(scaler_class)
    scaler.scale((p * 2).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


class _Work:
    """Three parameters in two groups and one without a gradient; SGD that counts its steps."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.p = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (4, 3, 5, 2)]
        self.optimizer = SpySGD([{"params": self.p[:2]}, {"params": self.p[2:]}])

    def backward(self, gradients):
        self.optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(self.p[:3], gradients))  # the fourth takes no part
        self.scaler.scale(loss).backward()

    def spoil(self, place, value):
        with torch.no_grad():
            self.p[place].grad[-1] = value

    def call(self, name):
        try:
            return getattr(self.scaler, name)(self.optimizer)
        except (TypeError, AttributeError) as error:
            if "NoneType" in str(error):
                raise Wrong("none-gradient", error=str(error)) from error
            raise


def _gradients(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) for n in (4, 3, 5)]


def _new(scaler_class, **options):
    return scaler_class(**({**_OPTIONS[0], "init_scale": FIRST, "growth_interval": 100} | options))


def _scale_of(scaler):
    """The scale as a float; what is no number as it is."""
    value = scaler.get_scale()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else value


def observe(scaler_class):
    """Each method by itself, where PyTorch's scaler is refused; steps with random overflows; values read."""
    parts = _observe_methods(scaler_class)
    while True:
        with mock.patch.object(torch.amp.GradScaler, "__init__", _refuse):
            part = next(parts, None)
        if part is None:
            break
        yield part
    for number, options in enumerate(_OPTIONS):
        yield {f"trace {number}": _trace(scaler_class(**options), number)}
    work = _Work(_new(scaler_class))
    for explicit in (False, True):
        work.backward(_gradients())
        with Operations() as operations:
            if explicit:
                work.call("unscale_")
            work.call("step")
            work.scaler.update()
        reads = [name for name in syncs(operations) if name not in ("aten.item", "aten.is_nonzero")]
        yield {f"reads, unscale_ {explicit}": len(reads)}
    work = _Work(_new(scaler_class))
    work.backward(_gradients())
    with Operations() as operations:
        work.call("unscale_")
    yield {"reads in unscale_": syncs(operations)}


def _observe_methods(scaler_class):
    scaler = _new(scaler_class)
    loss = torch.tensor(3.0, requires_grad=True) * 2
    got = scaler.scale(loss)
    yield {"loss": None if got is None else loss.item(), "scaled": got}
    yield {"scale": _scale_of(scaler)}

    def work(gradients, *calls, spoil=()):
        made = _Work(_new(scaler_class))
        made.backward(gradients)
        if spoil:
            made.spoil(*spoil)
        for name in calls:
            made.call(name)
        return made

    yield {"unscaled": tuple(p.grad for p in work(_gradients(), "unscale_").p[:3])}
    for one in SPOILT:
        yield {f"steps {one}": work(_gradients(), "step", spoil=one).optimizer.steps}
    for size in (1, 1e30):
        yield {f"steps {size}": work([g * size / FIRST for g in _gradients()], "step").optimizer.steps}
    yield {"by step": work(_gradients(), "step").optimizer.grads[0]}
    made = work(_gradients(), "unscale_", "step")
    yield {"once": made.optimizer.grads[0]}
    made.scaler.update()
    made.backward(_gradients(1))
    yield {"again": _raised(made, RuntimeError)}
    yield {"twice": _raised(made, Exception)}


def _raised(work, kind):
    """The error of one more unscale_, if it is of this kind."""
    try:
        work.call("unscale_")
    except kind as error:
        return error
    return None


def _trace(scaler, number):
    """Steps with overflows: scales, updates, weights; the first step that changed the scale, if one did."""
    options, work, scales = _OPTIONS[number], _Work(scaler), []
    for k, bad in enumerate(random_overflows(number, options["growth_interval"])):
        work.backward(_gradients(k))
        if bad:
            work.spoil(k % 3, (math.inf, math.nan, -math.inf)[k // 3 % 3])
        before = _scale_of(scaler)
        if k % 4 == 1:
            work.call("unscale_")
        work.call("step")
        if _scale_of(scaler) != before:
            return {"moved": {"expected": before, "got": _scale_of(scaler), "where": f"step {k + 1}"}}
        scaler.update()
        scales.append(_scale_of(scaler))
    return {"moved": {}, "scales": scales, "updates": work.optimizer.steps, "weights": [p.detach() for p in work.p]}


_theirs = functools.cache(lambda number: _trace(torch.amp.GradScaler("cpu", **_OPTIONS[number]), number))


def _traces(number):
    """Looks at the steps with one set of options."""
    key, options = f"trace {number}", _OPTIONS[number]
    overflows = random_overflows(number, options["growth_interval"])

    def first(seen, due):
        return next(k for k in range(len(due)) if not close(seen[k], due[k], 1e-5))

    def hint(seen, due):
        return mistake_of(seen, known_traces(overflows, cap=seen[first(seen, due)], **options), "wrong-trace", 1e-5)

    def fields(seen, due):
        k = first(seen, due)
        where = f"after step {k + 1}, overflows at {[n + 1 for n in range(k + 1) if overflows[n]]}"
        said = {"expected": due[k], "got": seen[k], "where": where, "got_scale": seen[k]}
        return said | {"growth": options["growth_factor"], "backoff": options["backoff_factor"]}

    def beside(name, slug, **more):
        """A look at what PyTorch's scaler gives, too."""

        def theirs(_):
            return _theirs(number)[name]

        return Look("", lambda o: o[key][name], theirs, slug, **more)

    yield recognised("the scale follows torch.amp.GradScaler on random overflows",
                     lambda o: o[key]["moved"] and ("scale-moved-in-step", o[key]["moved"]))  # fmt: skip
    yield beside("scales", hint, holds=within(1e-5), fields=fields)
    yield beside("updates", "wrong-trace")
    yield beside("weights", "weights-differ", holds=within(1e-4))


def _skipped(place, value):
    """The look at a step with a gradient that is not finite."""
    slug = "nan-missed" if math.isnan(value) else "first-group-only" if place == 2 else "inf-missed"
    about = {"kind": value, "where_word": ("the first", "the second", "the third")[place],
    "where": f"parameter {place + 1}",
             "expected": "no step", "got": "a step"}  # fmt: skip
    claim = "step: skipped for inf, -inf and NaN in any parameter, and for nothing else"
    return Look(claim, f"steps {(place, value)}", 0, slug, fields=about)


LOOKS = [
    Look("scale: the loss times the scale, with its graph", "loss", 6.0, "loss-overwritten"),
    Look("", "scaled", torch.tensor(6.0 * FIRST), "scale-not-applied"),
    Look("", lambda o: o["scaled"].requires_grad, True, "loss-detached"),
    Look("", lambda o: type(o["scale"]).__name__, "float", "scale-not-a-number"),
    Look("", "scale", FIRST, "wrong-trace", fields={"where": "before any step"}),
    Look("unscale_: gradients are divided in all groups, None is left out", "unscaled", tuple(_gradients()),
         lambda seen, due: "first-group-only" if close(seen[:2], due[:2], 1e-5) else "never-divided",
         holds=within(1e-5)),
    *(_skipped(*one) for one in SPOILT),
    Look("", "steps 1", 1, "always-skipped", holds=lambda seen, _: seen > 0, fields=silent),
    Look("", "steps 1e+30", 1, "finite-taken-for-overflow", holds=lambda seen, _: seen > 0, fields=silent),
    Look("", "by step", _gradients()[0], "unscaled-by-nobody",
         holds=lambda seen, due: not close(seen, due * FIRST, 1e-4)),
    Look("unscale_ before step: gradients are divided once; a second call is an error until update()",
         "once", _gradients()[0],
         "divided-twice", holds=within(1e-4)),
    Look("", "again", None, "unscale-refused", fields=lambda seen, _: {"error": str(seen), "got": ""}),
    Look("", lambda o: isinstance(o["twice"], RuntimeError), True, "second-unscale-allowed"),
    *(look for number in range(len(_OPTIONS)) for look in _traces(number)),
    *(Look("at most one value is read in a step", f"reads, unscale_ {explicit}", 1, "many-reads", holds=at_most,
           fields="n") for explicit in (False, True)),
    Look("", "reads in unscale_", [], "read-in-unscale",
         fields=lambda seen, _: {"error": in_words(seen), "got": "", "expected": ""}),
]  # fmt: skip


def balise_4(scaler_class):
    yield from judged(LOOKS, observe, scaler_class)
    yield "also where the gradients are on a GPU"
    on_gpus(_on_gpu, scaler_class, known=left_on_cpu("scaler-not-on-gpu"), n=1)
