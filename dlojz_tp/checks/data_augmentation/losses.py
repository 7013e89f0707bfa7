"""Balise 6: the loss on soft labels, against PyTorch's own in float64; what is right about a mixed image."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dlojz_tp.checking.looks import Look, Value, at_most, judged, shape, within
from dlojz_tp.checks.data_augmentation.devices import on_meta, stays
from dlojz_tp.probes.operations import Operations, syncs


def _drawn(batch, classes, generator):
    logits, soft = (torch.randn(batch, classes, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits, 0.3 * soft.softmax(1) + 0.7 * F.one_hot(torch.arange(batch) % classes, classes)


GENERATOR = torch.Generator().manual_seed(0)
LOGITS, SOFT = _drawn(7, 5, GENERATOR)
OTHERS = _drawn(3, 11, GENERATOR)
INTEGERS = torch.arange(7) % 4  # the last class does not occur
LARGE, HALF = (
    (logits, labels, F.cross_entropy(logits.double(), labels.double()))
    for logits, labels in (
        ((LOGITS * 500).float(), SOFT.float()),
        ((LOGITS.repeat(40, 1) * 3).bfloat16(), SOFT.repeat(40, 1).float()),
    )
)
TOP1 = [torch.cat([s[:3] / 4 + F.one_hot(LOGITS[:3].argmax(1), 5), s[3:]]) for s in (SOFT.roll(k, 0) for k in range(3))]


def _losses(loss):
    """Without smoothing, with three of them, and with other sizes."""
    first = [loss(LOGITS, SOFT), *(loss(LOGITS, SOFT, s) for s in (0.1, 0.5, 1.0))]
    return [*first, loss(*OTHERS, 0.2)]


def _torch(logits, labels, smoothing=0.0):
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


class _Library(TorchFunctionMode):
    """Notes calls of PyTorch's losses."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (F.cross_entropy, torch._C._nn.cross_entropy_loss, F.kl_div, F.nll_loss):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def observe(soft_cross_entropy):
    """Losses, of integer labels too; the gradient; relative errors with logits of hundreds and with bfloat16."""
    with _Library() as library:
        losses = _losses(soft_cross_entropy)
        try:
            integers = soft_cross_entropy(LOGITS, INTEGERS, 0.1)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            integers = str(error).split("\n")[0]
    yield {"library": library.seen, "shapes": shape(losses), "losses": losses, "integers": integers}
    yield {"gradient": _gradient(soft_cross_entropy)}
    for name, (logits, labels, due) in (("large", LARGE), ("half", HALF)):
        got = soft_cross_entropy(logits, labels).detach().double()
        yield {name: float(((got - due) / due).abs().nan_to_num(1e9))}


def _gradient(loss):
    logits = LOGITS.clone().requires_grad_()
    got = loss(logits, SOFT, 0.1)
    return torch.autograd.grad(got, logits)[0] if got.requires_grad else "none"


def observe_top1(top1):
    got = [top1(LOGITS, labels) for labels in TOP1]
    return {"shapes": shape(got), "top1": got}


LOOKS = [
    Look("the mean cross-entropy with soft labels", "library", [], "library-loss", fields=lambda seen, _: {"name": seen[0]}),
    Look("", "shapes", [()] * 5, "loss-shape"),
    Value("with label smoothing, as PyTorch defines it", "losses", _losses(_torch), "wrong-soft-loss", within(1e-6)),
    Look("integer labels", "integers", _torch(LOGITS, INTEGERS, 0.1), "integer-labels", within(1e-6),
         lambda seen, _: {"error": seen if isinstance(seen, str) else "Another number came."}),
    Look("its gradient; logits of hundreds; bfloat16", "gradient", _gradient(_torch),
         lambda seen, _: "no-gradient" if isinstance(seen, str) else "wrong-gradient", within(1e-6)),
    Look("", "large", 1e-3, "softmax-then-log", at_most),
    Look("", "half", 1e-4, "half-precision-loss", at_most, lambda seen, _: {"got_error": seen}),
]  # fmt: skip
LOOKS_TOP1 = [
    Look("top-1 accuracy under mixed labels", "shapes", [()] * 3, "top1-shape"),
    Value("", "top1", [(LOGITS.argmax(1) == soft.argmax(1)).double().mean() for soft in TOP1], "top1-wrong", within(1e-5)),
]  # fmt: skip


def observe_both(soft_cross_entropy, top1):
    def call(logits, labels):
        return soft_cross_entropy(logits, labels, 0.1), top1(logits, labels)

    with Operations() as operations:
        call(LOGITS.float(), SOFT.float())
    yield {"waits": ", ".join(sorted(set(syncs(operations))))}
    yield {"device": on_meta(call, LOGITS.float(), SOFT.float())}


LOOKS_BOTH = [
    Look("on the device of the logits, nothing read back", "waits", "", "loss-waits", fields=lambda seen, _: {"error": seen}),
    stays(""),
]  # fmt: skip


def balise_6(soft_cross_entropy, top1):
    yield from judged(LOOKS, observe, soft_cross_entropy)
    yield from judged(LOOKS_TOP1, observe_top1, top1)
    yield from judged(LOOKS_BOTH, observe_both, soft_cross_entropy, top1)
