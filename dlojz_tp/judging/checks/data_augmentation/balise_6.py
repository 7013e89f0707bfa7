"""Balise 6: the loss on soft labels, against PyTorch's own in float64; what is right about a mixed image."""

import copy

import torch
import torch.nn.functional as F

from dlojz_tp.judging.checking.looks import Look, Value, judged, shape, tried, within
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.judging.probes.shared_looks import stays
from dlojz_tp.measure.operations import Operations

LIBRARY = {"cross_entropy", "cross_entropy_loss", "kl_div", "nll_loss"}
LOGITS, DRAWN = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SOFT = 0.3 * DRAWN.softmax(1) + 0.7 * F.one_hot(torch.arange(7) % 5, 5)
CASES = [
    *((LOGITS, SOFT, smoothing) for smoothing in (0.0, 0.1, 0.5, 1.0)),
    (LOGITS[:3, :4], DRAWN[:3, 1:].softmax(1), 0.2),
]
INTEGERS = LOGITS, torch.arange(7) % 4, 0.1  # the last class does not occur
LARGE = (LOGITS * 500).float(), SOFT.float()
HALF = (LOGITS.repeat(40, 1) * 3).bfloat16(), SOFT.repeat(40, 1).float()
TOP1 = [torch.cat([s[:3] / 4 + F.one_hot(LOGITS[:3].argmax(1), 5), s[3:]]) for s in (SOFT.roll(k, 0) for k in range(3))]
TOP1.append(0.4 * TOP1[0] + 0.12)  # the largest mass may be below one half


def observe(soft_cross_entropy, top1):
    """Losses, of integer labels, of large logits and in bfloat16 too; the gradient; accuracies; a GPU."""
    given, whole, large, half, hard = copy.deepcopy((CASES, INTEGERS, LARGE, HALF, TOP1))
    half_top1 = HALF[0].clone(), HALF[1].clone()
    with Operations() as operations:
        losses = [soft_cross_entropy(*given[0][:2]), *(soft_cross_entropy(*case) for case in given[1:])]
        integers = tried(soft_cross_entropy, *whole)
    same = [[a.equal(b) for a, b in zip(one, case[:2])] for one, case in zip(given, CASES)]
    yield {"logits kept": all(one for one, _ in same), "labels kept": all(one for _, one in same)}
    yield {"library": sorted(operations.functions & LIBRARY), "shapes": shape(losses), "losses": losses}
    logits = LOGITS.clone().requires_grad_()
    got = soft_cross_entropy(logits, SOFT.clone(), 0.1)
    yield {"integers": integers, "gradient": tried(lambda: torch.autograd.grad(got, logits)[0])}
    yield {"large": soft_cross_entropy(*large), "half": soft_cross_entropy(*half)}
    accuracies = [top1(LOGITS.clone(), labels) for labels in hard]
    yield {"top1 shapes": shape(accuracies), "top1": accuracies, "top1 of half": top1(*half_top1)}
    both = lambda logits, labels: (soft_cross_entropy(logits, labels, 0.1), top1(logits, labels))  # noqa: E731
    yield {"device": on_gpu(both, LOGITS.float(), SOFT.float())}


def _right(logits, labels, smoothing=0.0):
    return F.cross_entropy(logits.double(), labels.double(), label_smoothing=smoothing)


LOOKS = [
    Look("the mean cross-entropy with soft labels", "library", [], "library-loss", fields={"expected": ""}),
    Look("", "logits kept", True, "logits-changed"),
    Look("", "labels kept", True, "labels-changed"),
    Look("", "shapes", [()] * 5, "loss-shape"),
    Value("with label smoothing, as PyTorch defines it", "losses", [_right(*case) for case in CASES], "wrong-soft-loss",
          holds=within(1e-6)),
    Look("integer labels", "integers", F.cross_entropy(*INTEGERS[:2], label_smoothing=0.1), "integer-labels",
         holds=within(1e-6)),
    Look("its gradient; logits of hundreds; bfloat16", "gradient", (LOGITS.softmax(1) - 0.9 * SOFT - 0.02) / 7,
         lambda seen, _: "no-gradient" if isinstance(seen, str) else "wrong-gradient", holds=within(1e-6)),
    Look("", "large", _right(*LARGE), "softmax-then-log", holds=within(1e-3)),
    Look("", "half", _right(*HALF), "half-precision-loss", holds=within(1e-4)),
    Look("top-1 accuracy under mixed labels", "top1 shapes", [()] * 4, "top1-shape"),
    Value("", "top1", [(LOGITS.argmax(1) == soft.argmax(1)).double().mean() for soft in TOP1], "top1-wrong",
          holds=within(1e-5)),
    Look("", "top1 of half", (HALF[0].argmax(1) == HALF[1].argmax(1)).double().mean(), "half-precision-loss", holds=within(1e-4)),
    stays("on the device of the logits, nothing read back", "loss-waits"),
]  # fmt: skip


def balise_6(soft_cross_entropy, top1):
    yield from judged(LOOKS, observe, soft_cross_entropy, top1)
