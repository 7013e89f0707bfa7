"""Answers to balise 7 of 07_data_augmentation: the draw, the step."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from dlojz_tp.works import source
from tests.answers.bank import Bank

bank = Bank("07_data_augmentation")


# balise 7
def full(*changes):
    """The solutions of the balises before come with each slip."""
    balises = source.find("07_data_augmentation").balises
    given = "\n\n".join(balises[k].code for k in (2, 3, 4, 5, 6))
    return ("class MixOrCut(nn.Module):", given + "\n\n\nclass MixOrCut(nn.Module):"), *changes


DRAW = "mix = mixup if torch.rand(()) < 0.5 else cutmix  # drawn on the CPU: nobody waits"
EVAL = "        if not self.training:\n            return images, labels if labels.dim() == 2 else F.one_hot(labels, self.classes).float()\n"
STEP = "    images, soft = mix(images, labels)\n"
bank.slip(
    7,
    "not-a-module",
    *full(("class MixOrCut(nn.Module):", "class MixOrCut:"), ("super().__init__()", "self.training = True")),
)
bank.slip(
    7,
    "nothing-returned",
    *full(
        (
            "        return mix(images, labels, self.classes, self.alpha)",
            "        mix(images, labels, self.classes, self.alpha)",
        )
    ),
)
bank.slip(
    7,
    "mixer-form",
    *full(
        (
            "return mix(images, labels, self.classes, self.alpha)",
            "return mix(images, labels, self.classes, self.alpha)[0]",
        )
    ),
)
bank.slip(7, "mixes-in-eval", *full((EVAL, "")))
bank.slip(7, "eval-labels-hard", *full((EVAL, "        if not self.training:\n            return images, labels\n")))
bank.slip(7, "never-mixup", *full((DRAW, "mix = cutmix")))
bank.slip(7, "never-cutmix", *full((DRAW, "mix = mixup")))
bank.slip(
    7,
    "takes-turns",
    *full(
        ("self.classes, self.alpha = classes, alpha", "self.classes, self.alpha, self.calls = classes, alpha, 0"),
        (DRAW, "self.calls += 1\n        mix = mixup if self.calls % 2 else cutmix"),
    ),
)
bank.slip(7, "never-mixed", *full(("if not self.training:", "if self.training:")))
bank.slip(7, "unfair", *full(("torch.rand(()) < 0.5", "torch.rand(()) < 0.1")))
bank.slip(
    7,
    "chosen-for-each-image",
    *full(
        (
            "return mix(images, labels, self.classes, self.alpha)",
            "a, b = mixup(images, labels, self.classes, self.alpha), cutmix(images, labels, self.classes, self.alpha)\n        which = torch.rand(len(images), device=images.device) < 0.5\n        return torch.where(which.view(-1, 1, 1, 1), a[0], b[0]), torch.where(which[:, None], a[1], b[1])",
        )
    ),
)
bank.slip(
    7,
    "not-reproducible",
    *full(
        (DRAW, "mix = mixup if np.random.rand() < 0.5 else cutmix"),
        ("class MixOrCut", "import numpy as np\n\n\nclass MixOrCut"),
    ),
)
bank.slip(
    7,
    "always-the-same",
    *full((DRAW, "torch.manual_seed(int(images.device.type == 'x'))\n        " + DRAW)),
)
bank.slip(7, "draw-waits", *full(("torch.rand(()) < 0.5", "torch.rand((), device=images.device) < 0.5")))
bank.slip(7, "step-not-mixed", *full((STEP, "    soft = labels\n")))
bank.slip(7, "step-mixed-twice", *full((STEP, STEP + "    images, soft = mix(images, soft)\n")))
bank.slip(
    7, "step-hard-loss", *full(("soft_cross_entropy(model(images), soft)", "soft_cross_entropy(model(images), labels)"))
)
bank.slip(7, "step-old-gradients", *full(("    optimizer.zero_grad()\n", "")))
bank.slip(7, "step-no-update", *full(("    loss.backward()\n    optimizer.step()\n", "    loss.backward()\n")))
bank.slip(
    7,
    "step-no-update",
    *full(
        ("    optimizer.zero_grad()\n", ""),
        ("    optimizer.step()\n", "    optimizer.zero_grad()\n    optimizer.step()\n"),
    ),
)
bank.slip(7, "step-wrong-loss", *full(("return loss.detach()", "return loss.detach() / len(images)")))
bank.slip(7, "step-wrong-loss", *full(("return loss.detach()", "return torch.zeros((), device=device)")))
bank.slip(
    7,
    "alpha-ignored",
    *full(("return mix(images, labels, self.classes, self.alpha)", "return mix(images, labels, self.classes, 1.0)")),
)
bank.slip(
    7, "alpha-ignored", *full(("self.classes, self.alpha = classes, alpha", "self.classes, self.alpha = classes, 0.2"))
)
bank.slip(
    7,
    "step-wrong-weights",
    *full(("soft_cross_entropy(model(images), soft)", "soft_cross_entropy(model(images), soft, 0.1)")),
)
bank.slip(
    7,
    "step-mixes-on-cpu",
    *full(
        (
            "    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)\n" + STEP,
            STEP + "    images, soft = images.to(device, non_blocking=True), soft.to(device, non_blocking=True)\n",
        )
    ),
)
bank.slip(
    7,
    "other-device",
    *full(("    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)\n", "")),
)
bank.slip(7, "step-form", *full(("return loss.detach()", "return loss")))
bank.slip(7, "step-form", *full(("return loss.detach()", "return loss.item()")))
bank.slip(7, "step-syncs", *full(("return loss.detach()", "print(loss.item())\n    return loss.detach()")))
bank.slip(7, None, *full((DRAW, "mix = (mixup, cutmix)[int(torch.randint(2, (1,)))]")))


def solutions():
    """mixup and cutmix of the course, for answers that use them."""
    balises = source.find("07_data_augmentation").balises
    namespace = {"__name__": "__main__", "torch": torch, "F": F, "nn": nn}
    for k in (2, 3, 4, 5):
        exec(balises[k].code, namespace)
    return namespace["mixup"], namespace["cutmix"]


class Both(nn.Module):
    """Draws with a generator on the CPU that follows torch's seed; soft labels by a table."""

    def __init__(self, classes, alpha):
        super().__init__()
        self.classes, self.alpha, self.ways = classes, alpha, solutions()

    def forward(self, images, labels):
        if labels.dim() == 1:
            labels = torch.eye(self.classes, device=images.device)[labels]
        if self.training:
            chosen = torch.empty(()).bernoulli_(0.5).item()
            return self.ways[int(chosen)](images, labels, self.classes, self.alpha)
        return images, labels


def train_step(model, mix, images, labels, optimizer, device):
    x, y = mix(images.to(device), labels.to(device))
    optimizer.zero_grad(set_to_none=True)
    loss = -(y * model(x).log_softmax(1)).sum(1).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


bank.several(7, None, Both, train_step)


bank.slip(7, "step-changes-mode", *full((STEP, "    mix.train()\n" + STEP)))
bank.slip(7, "step-changes-mode", *full((STEP, STEP + "    model.eval()\n")))
bank.slip(7, "step-two-forwards", *full(("    loss.backward()\n", "    logits = model(images)\n    loss.backward()\n")))


class Library(nn.Module):
    """torchvision's transforms: one λ, one box for the whole batch."""

    def __init__(self, classes, alpha):
        super().__init__()
        ways = [v2.MixUp(alpha=alpha, num_classes=classes), v2.CutMix(alpha=alpha, num_classes=classes)]
        self.classes, self.mix = classes, v2.RandomChoice(ways)

    def forward(self, images, labels):
        if self.training:
            return self.mix(images, labels)
        return images, F.one_hot(labels, self.classes).float()


class Queued(nn.Module):
    """Draws once for both ways with torch.multinomial; each way keeps its arguments."""

    def __init__(self, classes, alpha):
        super().__init__()
        self.ways = [functools.partial(way, classes=classes, alpha=alpha) for way in solutions()]
        self.register_buffer("names", torch.eye(classes), persistent=False)

    def forward(self, images, labels):
        if not self.training:
            return images, self.names.to(labels.device)[labels] if labels.ndim < 2 else labels
        way = self.ways[torch.multinomial(torch.ones(2), 1).item()]
        return way(images, labels)


def careful_step(model, mix, images, labels, optimizer, device):
    model.zero_grad()
    with torch.no_grad():
        images, soft = mix(*(t.to(device, non_blocking=True) for t in (images, labels)))
    logits = model(images)
    loss = torch.mean(torch.sum(-soft * F.log_softmax(logits, dim=-1), dim=-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.data


bank.several(7, "lambda-of-batch", Library, train_step)
bank.several(7, None, Queued, careful_step)


class DrawnThere(nn.Module):
    """Drawn on the device: both are computed, and torch.where takes one of them."""

    def __init__(self, classes, alpha):
        super().__init__()
        self.classes, self.alpha, self.ways = classes, alpha, solutions()

    def forward(self, images, labels):
        if not self.training:
            return images, labels.float() if labels.dim() > 1 else F.one_hot(labels, self.classes).float()
        chosen = torch.rand((), device=images.device) < 0.5
        made = (way(images, labels, self.classes, self.alpha) for way in self.ways)
        return tuple(torch.where(chosen, a, b) for a, b in zip(*made))


bank.several(7, None, DrawnThere, train_step)


bank.slip(7, "classes-forgotten", *full(("F.one_hot(labels, self.classes).float()\n", "F.one_hot(labels).float()\n")))
bank.slip(7, "step-hard-loss", *full((STEP, "    images, _ = mix(images, labels)\n    soft = labels\n")))
bank.slip(7, "step-wrong-weights", *full((STEP, "    _, soft = mix(images, labels)\n")))

bank.slip(
    7,
    "eval-soft-labels",
    *full((EVAL.split("\n")[1], "            return images, F.one_hot(labels, self.classes).float()")),
)
bank.slip(
    7,
    "mixed-by-both",
    *full(
        (
            "return mix(images, labels, self.classes, self.alpha)",
            "images, labels = mixup(images, labels, self.classes, self.alpha)\n        return cutmix(images, labels, self.classes, self.alpha)",
        )
    ),
)
bank.slip(
    7,
    "often-unmixed",
    *full(
        (
            "        " + DRAW,
            "        draw = torch.rand(()) * 3\n        if draw < 1:\n            return images, F.one_hot(labels, self.classes).float()\n        mix = mixup if draw < 2 else cutmix",
        )
    ),
)
bank.slip(
    7,
    "step-no-update",
    *full(
        ("    optimizer.zero_grad()\n", ""),
        ("    optimizer.step()\n", "    optimizer.zero_grad()\n    optimizer.step()\n"),
    ),
)
bank.slip(7, "step-mixes-on-cpu", *full((", labels.to(device, non_blocking=True)\n", ", labels\n")))
bank.slip(7, None, *full((DRAW, "mix = mixup if torch.randn(()).item() < 0 else cutmix")))
