"""Balise 4: a dynamic loss scaler, beside PyTorch's own on the same overflows."""

import math
from unittest import mock

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.mixed_precision.spies import SpySGD, parameters
from dlojz_tp.checks.mixed_precision.traces import known_traces, random_overflows
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.operations import Operations, in_words, syncs

HINTS = {
    "library-scaler": "You call PyTorch's GradScaler. Write your own: you will race against it.",
    "loss-detached": "scale(loss) lost the graph, so backward() can't start from it.",
    "scale-not-applied": "scale(loss) must be the loss times the scale.",
    "loss-overwritten": "scale() changed the loss itself. Return a new tensor.",
    "never-divided": "After unscale_ the gradients are still scaled.",
    "divided-twice": "You call unscale_ before step, and step divides the gradients a second time.",
    "unscaled-by-nobody": "If unscale_ was not called before, step() must do it. Here it stepped with scaled "
                          "gradients.",
    "first-group-only": "You looked only at the first parameter group. An optimizer may have several.",
    "inf-missed": "A gradient is {kind} in {where_word} parameter, but the optimizer stepped all the same.",
    "nan-missed": "A gradient is NaN, but the optimizer stepped all the same. NaN is not infinite: torch.isfinite "
                  "detects both.",
    "finite-taken-for-overflow": "All gradients are finite, the largest is 1e30, but the step was skipped. Their "
                                 "squares overflow, and float16's largest number is no limit in float32: check "
                                 "whether the values themselves are finite.",
    "always-skipped": "All gradients are finite, but the optimizer did not step.",
    "second-unscale-allowed": "A second unscale_ before update() must raise RuntimeError, as in PyTorch. Otherwise "
                              "it divides again.",
    "unscale-refused": "After update() a new step begins, so unscale_ must be allowed again: {error}",
    "none-gradient": "Leave out a parameter without a gradient (None): {error}",
    "scale-not-a-number": "get_scale() must return the scale as a Python float.",
    "no-backoff": "After an overflow, multiply the scale by backoff_factor.",
    "no-growth": "After growth_interval good steps in a row, multiply the scale by growth_factor.",
    "counter-not-reset-by-overflow": "An overflow ends the run of good steps: count from 0 again.",
    "counter-not-reset-by-growth": "After it has grown, the scale grows again only after another growth_interval "
                                   "good steps.",
    "grows-too-late": "The scale grows one step too late: the step that completes growth_interval good steps counts.",
    "grows-too-early": "The scale grows one step too early.",
    "factors-hard-coded": "The factors are arguments. Here growth_factor is {growth} and backoff_factor is {backoff}.",
    "growth-capped": "The scale grew to {got_scale:g} and no further. Only overflows limit it.",
    "overflow-remembered": "After the first overflow, every step counts as an overflow. Clear that record in update().",
    "scale-moved-in-step": "The scale changed before update(), so a second optimizer in the same step would be "
                           "unscaled wrongly.",
    "wrong-trace": "The scale is not the one that torch.amp.GradScaler has after the same steps.",
    "weights-differ": "The scales agree, but the weights do not: they differ from those of SGD on the true gradients.",
    "read-in-unscale": "unscale_ reads a value from the device ({error}), so the CPU waits there. Keep the result "
                       "as a tensor until step() has to decide.",
    "scaler-not-on-gpu": "On a GPU, a tensor is in the CPU's memory: {error}. Create the tensors you check the "
                         "gradients with on the gradients' device.",
    "many-reads": "You read {n} values from the device in a step with three gradients. One is enough: combine the "
                  "results of the checks on the device, read once, and keep the value.",
}

FIRST = 1024.0


def balise_4(scaler_class):
    """Each method by itself; random overflows beside PyTorch's scaler; values read."""
    with mock.patch.object(torch.amp.GradScaler, "__init__", _refuse):
        yield "scale: the loss times the scale, with its graph"
        _scales(scaler_class)
        yield "unscale_: gradients are divided in all groups, None is left out"
        _unscales(scaler_class)
        yield "step: skipped for inf, -inf and NaN in any parameter, and for nothing else"
        _skips(scaler_class)
        yield "unscale_ before step: gradients are divided once; a second call is an error until update()"
        _once(scaler_class)
    yield "the scale follows torch.amp.GradScaler on random overflows"
    for seed, options in enumerate(_OPTIONS):
        _trace(scaler_class, seed, options)
    yield "at most one value is read in a step"
    _reads(scaler_class)
    yield "also where the gradients are on a GPU"
    on_gpus(_on_gpu, scaler_class, known=left_on_cpu("scaler-not-on-gpu"), n=1)


_OPTIONS = [
    {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3},
    {"init_scale": 2.0**16, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2},
    {"init_scale": 48.0, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 1},
    {"init_scale": 0.5, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5},  # goes below 1
    {"init_scale": 2.0**20, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 1},  # far beyond usual caps
]


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


def _scale_of(scaler) -> float:
    value = scaler.get_scale()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float):
        raise Wrong("scale-not-a-number", got=value)
    return float(value)


def _scales(scaler_class):
    scaler = _new(scaler_class)
    x = torch.tensor(3.0, requires_grad=True)
    loss = x * 2
    got = scaler.scale(loss)
    if got is None:
        raise Wrong("nothing-returned")
    if loss.item() != 6.0:
        raise Wrong("loss-overwritten", expected=6.0, got=loss)
    if not close(got, torch.tensor(6.0 * FIRST)):
        raise Wrong("scale-not-applied", expected=6.0 * FIRST, got=got)
    if not got.requires_grad:
        raise Wrong("loss-detached")
    if _scale_of(scaler) != FIRST:
        raise Wrong("wrong-trace", expected=FIRST, got=_scale_of(scaler), where="before any step")


def _unscales(scaler_class):
    work, gradients = _Work(_new(scaler_class)), _gradients()
    work.backward(gradients)
    work.call("unscale_")
    right = [close(p.grad, g, 1e-5) for p, g in zip(work.p, gradients)]
    if right == [True, True, False]:
        raise Wrong("first-group-only", where="the gradients of the second group")
    if not all(right):
        raise Wrong("never-divided", expected=gradients[0], got=work.p[0].grad)


def _skips(scaler_class):
    for place, value in ((0, math.inf), (1, -math.inf), (2, math.inf), (1, math.nan), (2, math.nan)):
        work = _Work(_new(scaler_class))
        work.backward(_gradients())
        work.spoil(place, value)
        work.call("step")
        if work.optimizer.steps:
            if math.isnan(value):
                raise Wrong("nan-missed", where=f"parameter {place + 1}")
            slug = "first-group-only" if place == 2 else "inf-missed"
            word = ("the first", "the second", "the third")[place]
            raise Wrong(slug, kind=value, where_word=word, got="a step", expected="no step")
    for gradients in (_gradients(), [g * 1e30 for g in _gradients()]):
        work = _Work(_new(scaler_class))
        work.backward([g / FIRST for g in gradients])
        work.call("step")
        if not work.optimizer.steps:
            raise Wrong("always-skipped" if gradients[0].abs().max() < 1e9 else "finite-taken-for-overflow")
    work = _Work(_new(scaler_class))
    work.backward(_gradients())
    work.call("step")
    if close(work.optimizer.grads[0], _gradients()[0] * FIRST, 1e-4):
        raise Wrong("unscaled-by-nobody", expected=_gradients()[0], got=work.optimizer.grads[0])


def _once(scaler_class):
    work = _Work(_new(scaler_class))
    work.backward(_gradients())
    work.call("unscale_")
    work.call("step")
    if not close(work.optimizer.grads[0], _gradients()[0], 1e-4):
        raise Wrong("divided-twice", expected=_gradients()[0], got=work.optimizer.grads[0])
    work.scaler.update()
    work.backward(_gradients(1))
    try:
        work.call("unscale_")
    except RuntimeError as error:
        raise Wrong("unscale-refused", error=str(error)) from error
    try:
        work.call("unscale_")
    except RuntimeError:
        return
    except Exception as error:
        raise Wrong("second-unscale-allowed", expected="RuntimeError", got=type(error).__name__) from error
    raise Wrong("second-unscale-allowed", expected="RuntimeError", got="no error")


def _trace(scaler_class, seed, options):
    """The same steps with PyTorch's scaler and the answer: scales, skipped steps, weights."""
    overflows = random_overflows(seed, options["growth_interval"])
    mine, theirs = _Work(scaler_class(**options)), _Work(torch.amp.GradScaler("cpu", **options))
    scales = []
    for k, bad in enumerate(overflows):
        for work in (mine, theirs):
            work.backward(_gradients(k))
            if bad:
                work.spoil(k % 3, (math.inf, math.nan, -math.inf)[k // 3 % 3])
            before = _scale_of(work.scaler)
            if k % 4 == 1:
                work.call("unscale_")
            work.call("step")
            if _scale_of(work.scaler) != before:
                raise Wrong("scale-moved-in-step", expected=before, got=_scale_of(work.scaler), where=f"step {k + 1}")
            work.scaler.update()
        scales.append((_scale_of(mine.scaler), _scale_of(theirs.scaler)))
    got, wanted = ([pair[i] for pair in scales] for i in (0, 1))
    if not close(got, wanted, 1e-5):
        k = next(k for k in range(len(got)) if not close(got[k], wanted[k], 1e-5))
        known = known_traces(overflows, cap=got[k], **options)
        slug = next((s for s, trace in known.items() if close(got, trace, 1e-5)), "wrong-trace")
        raise Wrong(slug, expected=wanted[k], got=got[k], where=f"after step {k + 1}, overflows at "
                    f"{[n + 1 for n in range(k + 1) if overflows[n]]}", growth=options["growth_factor"],
                    backoff=options["backoff_factor"], got_scale=got[k])  # fmt: skip
    if mine.optimizer.steps != theirs.optimizer.steps:
        raise Wrong("wrong-trace", expected=f"{theirs.optimizer.steps} updates", got=f"{mine.optimizer.steps}")
    for p, q in zip(mine.p, theirs.p):
        if not close(p, q, 1e-4):
            raise Wrong("weights-differ", expected=q, got=p)


def _reads(scaler_class):
    work = _Work(_new(scaler_class))
    for explicit in (False, True):
        work.backward(_gradients())
        with Operations() as operations:
            if explicit:
                work.call("unscale_")
            work.call("step")
            work.scaler.update()
        reads = [name for name in syncs(operations) if name not in ("aten.item", "aten.is_nonzero")]
        if len(reads) > 1:
            raise Wrong("many-reads", n=len(reads))
    assert len(parameters(work.optimizer)) == 4
    work = _Work(_new(scaler_class))
    work.backward(_gradients())
    with Operations() as operations:
        work.call("unscale_")
    if reads := syncs(operations):
        raise Wrong("read-in-unscale", error=in_words(reads))
