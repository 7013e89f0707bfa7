"""Balise 6: the loss on soft labels, and what is right about a mixed image."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dlojz_tp.checking import Wrong, close, nearest
from dlojz_tp.checks.data_augmentation.devices import stays_on_device
from dlojz_tp.probes.operations import Operations, syncs

HINTS = {
    "library-loss": "That calls PyTorch's own {name}. Write the sum over classes with log_softmax.",
    "loss-shape": "The loss is one number, a tensor of shape ().",
    "loss-summed-up": "This is the sum over the images. Take the mean.",
    "loss-mean-of-all": "This is a mean over images and classes. Sum over the classes, then take the mean over the images.",
    "softmax-then-log": "With logits of hundreds the loss comes out wrong: softmax(x) rounds to 0 there, and its logarithm is lost, "
    "whatever is added to it. log_softmax does both at once.",
    "no-log": "These are the probabilities themselves: the logarithm is missing.",
    "no-softmax": "The logits are no logarithms of probabilities yet: log_softmax makes them so.",
    "softmax-over-images": "The probabilities of a class add up to 1 over the images. It is the classes of an image whose sum is 1: dim=1.",
    "divided-by-classes": "The sum was divided by the number of classes. It is a mean over the images.",
    "entropy-subtracted": "That is the divergence from the labels (Kullback-Leibler), their own entropy subtracted.",
    "smoothing-keeps-mass": "The mass s was given to all classes, and not taken from y: (1 − s) y comes first.",
    "sign": "The loss has the wrong sign.",
    "labels-argmaxed": "The soft labels were turned into one class each. All their mass counts.",
    "no-smoothing": "With soft labels, the smoothing changes nothing.",
    "smoothing-too-strong": "Smoothing moves the mass s to all classes alike, s / classes each, the right one included.",
    "wrong-soft-loss": "The loss is not the mean cross-entropy with these soft labels.",
    "integer-labels": "Integer labels (batch,) are labels, too: turn them into soft ones. {error}",
    "no-gradient": "The loss has no gradient for the logits.",
    "wrong-gradient": "The loss is right, its gradient is not.",
    "half-precision-loss": "With bfloat16 logits the loss is {got_error:.3%} off: compute it in float32.",
    "loss-waits": "On a GPU this makes the CPU wait: {error}",
    "top1-shape": "top1 returns one number as a tensor on the device of the logits, so that nothing waits.",
    "top1-percent": "The accuracy is a fraction between 0 and 1.",
    "top1-count": "That is the number of images. The fraction of them is asked for.",
    "top1-mass": "That is the label mass of the predicted class. Count the images where the most probable class has the "
    "largest mass.",
    "top1-wrong": "The fraction of images whose largest logit and largest label mass are in the same class is another one.",
}


def balise_6(soft_cross_entropy, top1):
    """Against PyTorch's own loss in float64, its gradient, extreme logits, half precision."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    soft = torch.rand(7, 5, generator=generator, dtype=torch.float64).softmax(1)
    soft = 0.3 * soft + 0.7 * F.one_hot(torch.arange(7) % 5, 5)
    yield "the mean cross-entropy with soft labels"
    soft_cross_entropy = _without_library(soft_cross_entropy)
    _right_loss(soft_cross_entropy(logits, soft), logits, soft, 0.0)
    yield "with label smoothing, as PyTorch defines it"
    for smoothing in (0.1, 0.5, 1.0):
        _right_loss(soft_cross_entropy(logits, soft, smoothing), logits, soft, smoothing)
    other, mixed = torch.randn(3, 11, generator=generator).double(), torch.rand(3, 11, generator=generator).double()
    _right_loss(soft_cross_entropy(other, mixed.softmax(1), 0.2), other, mixed.softmax(1), 0.2)
    yield "integer labels"
    _right_integers(soft_cross_entropy, logits)
    yield "its gradient; logits of hundreds; bfloat16"
    _right_numbers(soft_cross_entropy, logits, soft)
    yield "top-1 accuracy under mixed labels"
    _right_top1(top1, logits, soft)
    yield "on the device of the logits, nothing read back"
    with Operations() as operations:
        soft_cross_entropy(logits.float(), soft.float(), 0.1)
        top1(logits, soft)
    if syncs(operations):
        raise Wrong("loss-waits", error=", ".join(sorted(set(syncs(operations)))))
    stays_on_device(lambda x, y: soft_cross_entropy(x, y, 0.1), logits.float(), soft.float())
    stays_on_device(top1, logits.float(), soft.float())


def _without_library(loss):
    """The answer, watched at each call: it must not hand the work to PyTorch's own losses."""

    def watched(*args):
        with _Library() as library:
            got = loss(*args)
        if library.seen:
            raise Wrong("library-loss", name=library.seen[0])
        return got

    return watched


class _Library(TorchFunctionMode):
    """Notes calls of PyTorch's losses."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (F.cross_entropy, torch._C._nn.cross_entropy_loss, F.kl_div, F.nll_loss):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _right_loss(got, logits, soft, smoothing):
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, torch.Tensor) or got.shape != ():
        raise Wrong("loss-shape", got=got)
    wanted = F.cross_entropy(logits, soft, label_smoothing=smoothing)
    if close(got, wanted, 1e-6):
        return
    log_p, n = logits.log_softmax(1), logits.shape[1]
    hard, mass = soft.argmax(1), (1 - smoothing) * soft + smoothing / n
    other = soft * (1 - smoothing) + smoothing / (n - 1) * (1 - F.one_hot(hard, n))
    known = {
        "sign": -wanted,
        "loss-summed-up": wanted * len(logits),
        "loss-mean-of-all": wanted / n,
        "no-smoothing": F.cross_entropy(logits, soft) if smoothing else torch.tensor(torch.nan),
        "labels-argmaxed": F.cross_entropy(logits, hard, label_smoothing=smoothing),
        "smoothing-too-strong": -(other * log_p).sum(1).mean(),
        "smoothing-keeps-mass": -((soft + smoothing / n) * log_p).sum(1).mean()
        if smoothing
        else torch.tensor(torch.nan),
        "no-log": -(mass * log_p.exp()).sum(1).mean(),
        "no-softmax": -(mass * logits).sum(1).mean(),
        "softmax-over-images": -(mass * logits.log_softmax(0)).sum(1).mean(),
        "divided-by-classes": wanted * len(logits) / n,
        "entropy-subtracted": wanted + (mass * mass.log()).sum(1).mean(),
    }
    slug = nearest(got, known, "wrong-soft-loss", 1e-6)
    for each in (smoothing, smoothing / (n - 1)):
        if slug == "wrong-soft-loss" and close(got, -((soft * (1 - smoothing) + each) * log_p).sum(1).mean(), 1e-6):
            slug = "smoothing-too-strong"
    raise Wrong(slug, expected=wanted, got=got, where=f"smoothing {smoothing}")


def _right_integers(soft_cross_entropy, logits):
    labels = torch.arange(len(logits)) % (logits.shape[1] - 1)  # the last class does not occur
    try:
        got = soft_cross_entropy(logits, labels, 0.1)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise Wrong("integer-labels", error=str(error).split("\n")[0]) from error
    wanted = F.cross_entropy(logits, labels, label_smoothing=0.1)
    if not close(got, wanted, 1e-6):
        raise Wrong("integer-labels", expected=wanted, got=got, error="Another number came.")


def _right_numbers(soft_cross_entropy, logits, soft):
    mine, truth = (logits.clone().requires_grad_() for _ in range(2))
    loss = soft_cross_entropy(mine, soft, 0.1)
    if not loss.requires_grad:
        raise Wrong("no-gradient")
    loss.backward()
    F.cross_entropy(truth, soft, label_smoothing=0.1).backward()
    if not close(mine.grad, truth.grad, 1e-6):
        raise Wrong("wrong-gradient", expected=truth.grad, got=mine.grad)
    large = (logits * 500).float()
    got, wanted = soft_cross_entropy(large, soft.float()), F.cross_entropy(large.double(), soft)
    if not torch.isfinite(got) or not close(got, wanted.float(), 1e-3):
        raise Wrong("softmax-then-log", expected=wanted, got=got)
    half = (logits.repeat(40, 1) * 3).bfloat16()
    labels = soft.repeat(40, 1).float()
    got, wanted = soft_cross_entropy(half, labels).double(), F.cross_entropy(half.double(), labels.double())
    error = ((got - wanted) / wanted).abs().item()
    if error > 1e-4:
        raise Wrong("half-precision-loss", expected=wanted, got=got, got_error=error)


def _right_top1(top1, logits, soft):
    for shift in (0, 1, 2):
        labels = soft.roll(shift, 0)
        labels[:3] = labels[:3] / 4 + F.one_hot(logits[:3].argmax(1), labels.shape[1])
        got = top1(logits, labels)
        if got is None:
            raise Wrong("nothing-returned")
        if not isinstance(got, torch.Tensor) or got.shape != ():
            raise Wrong("top1-shape", got=got)
        predicted = logits.argmax(1)
        wanted = (predicted == labels.argmax(1)).double().mean()
        if close(got.double(), wanted, 1e-5):
            continue
        mass = labels.gather(1, predicted[:, None]).mean()
        known = {"top1-percent": 100 * wanted, "top1-count": len(logits) * wanted, "top1-mass": mass}
        raise Wrong(nearest(got.double(), known, "top1-wrong", 1e-5), expected=wanted, got=got)
