"""Answers to balise 7 of 07_data_augmentation: the draw, the step."""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from dlojz_tp.works import source
from tests.answers.bank import Bank

bank = Bank("07_data_augmentation", 7)


def full(*changes):
    """The solutions of the balises before come with each slip."""
    balises = source.find("07_data_augmentation").balises
    given = "\n\n".join(balises[k].code for k in (2, 3, 4, 5, 6))
    return ("class MixOrCut(nn.Module):", given + "\n\n\nclass MixOrCut(nn.Module):"), *changes


DRAW = "mix = mixup if torch.rand(()) < 0.5 else cutmix  # drawn on the CPU: nothing waits"
EVAL = "        if not self.training:\n            return images, labels if labels.dim() == 2 else F.one_hot(labels, self.classes).float()\n"
STEP = "    images, soft = mix(images, labels)\n"


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


OTHER = (
    "import functools\n\n\n"
    + "\n\n".join(source.find("07_data_augmentation").balises[k].code for k in (2, 3, 4, 5))
    + '''
class MixOrCut(nn.Module):
    """Draws once for both ways with torch.multinomial; each way keeps its arguments."""

    def __init__(self, classes, alpha):
        super().__init__()
        self.ways = [functools.partial(way, classes=classes, alpha=alpha) for way in (mixup, cutmix)]
        self.register_buffer("names", torch.eye(classes), persistent=False)

    def forward(self, images, labels):
        if not self.training:
            return images, self.names.to(labels.device)[labels] if labels.ndim < 2 else labels
        way = self.ways[torch.multinomial(torch.ones(2), 1).item()]
        return way(images, labels)


def train_step(model, mix, images, labels, optimizer, device):
    model.zero_grad()
    with torch.no_grad():
        images, soft = mix(*(t.to(device, non_blocking=True) for t in (images, labels)))
    logits = model(images)
    loss = torch.mean(torch.sum(-soft * F.log_softmax(logits, dim=-1), dim=-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.data
'''
)
bank.text(None, OTHER)
bank.slip(None, *full((DRAW, "mix = (mixup, cutmix)[int(torch.randint(2, (1,)))]")))
bank.several(None, Both, train_step)
bank.several(None, DrawnThere, train_step)
bank.slip(None, *full((DRAW, "mix = mixup if torch.randn(()).item() < 0 else cutmix")))

bank.hint("not-a-module", "MixOrCut must be an nn.Module: train() and eval() switch it on and off.")
bank.slip(
    "not-a-module",
    *full(("class MixOrCut(nn.Module):", "class MixOrCut:"), ("super().__init__()", "self.training = True")),
)
bank.variant(
    "not-a-module",
    OTHER,
    ("class MixOrCut(nn.Module):", "class MixOrCut:\n    training = True\n    train = eval = lambda self: self\n"),
    ('self.register_buffer("names", torch.eye(classes), persistent=False)', "self.names = torch.eye(classes)"),
)

bank.slip(
    "nothing-returned",
    *full(
        (
            "        return mix(images, labels, self.classes, self.alpha)",
            "        mix(images, labels, self.classes, self.alpha)",
        )
    ),
)

bank.hint("mixer-form", "MixOrCut must return images of the same shape and soft labels (batch, classes).")
bank.slip(
    "mixer-form",
    *full(
        (
            "return mix(images, labels, self.classes, self.alpha)",
            "return mix(images, labels, self.classes, self.alpha)[0]",
        )
    ),
)
bank.variant("mixer-form", OTHER, ("return way(images, labels)", "return way(images, labels)[1], labels"))

bank.hint("mixes-in-eval", "In eval mode, nothing is mixed: return the images unchanged and the labels as one-hot.")
bank.slip("mixes-in-eval", *full((EVAL, "")))
bank.variant("mixes-in-eval", OTHER, ("if not self.training:", "if images is None:"))

bank.hint(
    "eval-labels-hard",
    "In eval mode, the labels must be soft too (batch, classes), so that the loss is the same function.",
)
bank.slip("eval-labels-hard", *full((EVAL, "        if not self.training:\n            return images, labels\n")))
bank.variant(
    "eval-labels-hard",
    OTHER,
    ("return images, self.names.to(labels.device)[labels] if labels.ndim < 2 else labels", "return images, labels"),
)

bank.hint(
    "eval-labels-dtype",
    "In eval mode, the labels came back as {got}: one-hot labels must be float32, like mixed ones.",
)
bank.slip("eval-labels-dtype", *full((EVAL, EVAL.replace(".float()", ""))))
bank.variant("eval-labels-dtype", OTHER, ("torch.eye(classes)", "torch.eye(classes, dtype=torch.float64)"))

bank.hint("never-mixup", "MixUp was never drawn in 300 batches.")
bank.slip("never-mixup", *full((DRAW, "mix = cutmix")))
bank.variant("never-mixup", OTHER, ("torch.ones(2)", "torch.tensor([0.0, 1.0])"))

bank.hint("never-cutmix", "CutMix was never drawn in 300 batches.")
bank.slip("never-cutmix", *full((DRAW, "mix = mixup")))
bank.variant("never-cutmix", OTHER, ("for way in (mixup, cutmix)", "for way in (mixup, mixup)"))

bank.hint(
    "takes-turns",
    "MixUp and CutMix follow each other in a pattern: {got:.0%} of the batches use a different one from the batch "
    "before, where a fair draw gives about half.",
)
bank.slip(
    "takes-turns",
    *full(
        ("self.classes, self.alpha = classes, alpha", "self.classes, self.alpha, self.calls = classes, alpha, 0"),
        (DRAW, "self.calls += 1\n        mix = mixup if self.calls % 2 else cutmix"),
    ),
)
bank.variant(
    "takes-turns",
    OTHER,
    ("way = self.ways[torch.multinomial(torch.ones(2), 1).item()]", "way = self.ways[0]\n        self.ways.reverse()"),
)
bank.hint("never-mixed", "In training mode, nothing was mixed.")
bank.slip("never-mixed", *full(("if not self.training:", "if self.training:")))
bank.variant(
    "never-mixed",
    OTHER,
    ("return way(images, labels)", "way(images, labels)\n        return images, self.names.to(labels.device)[labels]"),
)

bank.hint("unfair", "MixUp was drawn in {got:.0%} of 300 batches. Each of the two must be drawn half of the time.")
bank.slip("unfair", *full(("torch.rand(()) < 0.5", "torch.rand(()) < 0.1")))
bank.slip("unfair", *full(("torch.rand(()) < 0.5", "torch.randn(()) < 0.5")))
bank.variant("unfair", OTHER, ("torch.ones(2)", "torch.tensor([0.2, 0.8])"))

bank.hint(
    "chosen-for-each-image",
    "Some images of one batch were mixed by MixUp, others by CutMix. Draw one of the two for the whole batch.",
)
bank.slip(
    "chosen-for-each-image",
    *full(
        (
            "return mix(images, labels, self.classes, self.alpha)",
            "a, b = mixup(images, labels, self.classes, self.alpha), cutmix(images, labels, self.classes, self.alpha)\n        which = torch.rand(len(images), device=images.device) < 0.5\n        return torch.where(which.view(-1, 1, 1, 1), a[0], b[0]), torch.where(which[:, None], a[1], b[1])",
        )
    ),
)
bank.variant(
    "chosen-for-each-image",
    OTHER,
    (
        "        return way(images, labels)",
        "        half = len(images) // 2\n        parts = [f(images[k : k + half], labels[k : k + half]) for f, k in zip(self.ways, (0, half))]\n        return tuple(torch.cat(pair) for pair in zip(*parts))",
    ),
)

bank.slip(
    "not-reproducible",
    *full(
        (DRAW, "mix = mixup if np.random.rand() < 0.5 else cutmix"),
        ("class MixOrCut", "import numpy as np\n\n\nclass MixOrCut"),
    ),
)
bank.variant(
    "not-reproducible",
    OTHER,
    ("torch.multinomial(torch.ones(2), 1).item()", "random.randrange(2)"),
    ("import functools\n", "import functools\nimport random\n"),
)

bank.slip(
    "always-the-same",
    *full((DRAW, "torch.manual_seed(int(images.device.type == 'x'))\n        " + DRAW)),
)
bank.variant("always-the-same", OTHER, ("        way =", "        torch.manual_seed(3)\n        way ="))

bank.hint("draw-waits", "The draw makes the CPU wait: {error}. Draw the choice on the CPU.")
bank.slip("draw-waits", *full(("torch.rand(()) < 0.5", "torch.rand((), device=images.device) < 0.5")))
bank.variant("draw-waits", OTHER, ("torch.ones(2)", "torch.ones(2, device=images.device)"))

bank.hint("step-not-mixed", "The step trained on the original images: it must pass them through `mix`.")
bank.slip("step-not-mixed", *full((STEP, "    soft = labels\n")))
bank.variant(
    "step-not-mixed",
    OTHER,
    (
        "images, soft = mix(*(t.to(device, non_blocking=True) for t in (images, labels)))",
        "images, soft = images.to(device), F.one_hot(labels.to(device), 4)",
    ),
)

bank.hint("step-mixed-twice", "The step called `mix` {got} times for one batch.")
bank.slip("step-mixed-twice", *full((STEP, STEP + "    images, soft = mix(images, soft)\n")))
bank.variant(
    "step-mixed-twice",
    OTHER,
    ("in (images, labels)))\n", "in (images, labels)))\n        images, soft = mix(images, soft)\n"),
)

bank.hint("step-hard-loss", "The step didn't use the soft labels that `mix` returned.")
bank.slip(
    "step-hard-loss", *full(("soft_cross_entropy(model(images), soft)", "soft_cross_entropy(model(images), labels)"))
)
bank.slip("step-hard-loss", *full((STEP, "    images, _ = mix(images, labels)\n    soft = labels\n")))
bank.variant("step-hard-loss", OTHER, ("-soft * F.log_softmax", "-F.one_hot(labels, 4) * F.log_softmax"))

bank.hint(
    "step-old-gradients",
    "The first step is right, the second isn't: gradients of the first were still there.",
)
bank.slip("step-old-gradients", *full(("    optimizer.zero_grad()\n", "")))
bank.variant("step-old-gradients", OTHER, ("    model.zero_grad()\n", ""), ("    optimizer.zero_grad()\n", ""))

bank.hint(
    "step-no-update",
    "The weights didn't change: you don't call optimizer.step(), or not after backward(), or no gradient reaches "
    "the weights, or you clear the gradients between backward() and step().",
)
bank.slip("step-no-update", *full(("    loss.backward()\n    optimizer.step()\n", "    loss.backward()\n")))
bank.slip(
    "step-no-update",
    *full(
        ("    optimizer.zero_grad()\n", ""),
        ("    optimizer.step()\n", "    optimizer.zero_grad()\n    optimizer.step()\n"),
    ),
)
bank.slip(
    "step-no-update",
    *full(
        ("    optimizer.zero_grad()\n", ""),
        ("    optimizer.step()\n", "    optimizer.zero_grad()\n    optimizer.step()\n"),
    ),
)
bank.variant(
    "step-no-update",
    OTHER,
    ("    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    optimizer.step()\n"),
)

bank.hint(
    "step-wrong-loss",
    "The step is right, but the loss that it returns isn't the mean cross-entropy of the mixed batch before the "
    "update.",
)
bank.slip("step-wrong-loss", *full(("return loss.detach()", "return loss.detach() / len(images)")))
bank.slip("step-wrong-loss", *full(("return loss.detach()", "return torch.zeros((), device=device)")))
bank.variant("step-wrong-loss", OTHER, ("return loss.data", "return loss.data * len(images)"))

bank.hint(
    "alpha-ignored",
    "With α = 50, the λ of {got[0][0]} are spread as if α were smaller: from {got[0][1]:.2f} to {got[0][2]:.2f}. "
    "Do you use self.alpha?",
)
bank.slip(
    "alpha-ignored",
    *full(("return mix(images, labels, self.classes, self.alpha)", "return mix(images, labels, self.classes, 1.0)")),
)
bank.slip(
    "alpha-ignored", *full(("self.classes, self.alpha = classes, alpha", "self.classes, self.alpha = classes, 0.2"))
)
bank.variant("alpha-ignored", OTHER, ("alpha=alpha", "alpha=1.0"))

bank.hint("step-wrong-weights", "After the step, the weights differ from those of one step on the mixed batch.")
bank.slip(
    "step-wrong-weights",
    *full(("soft_cross_entropy(model(images), soft)", "soft_cross_entropy(model(images), soft, 0.1)")),
)
bank.slip("step-wrong-weights", *full((STEP, "    _, soft = mix(images, labels)\n")))
bank.variant("step-wrong-weights", OTHER, ("torch.mean(torch.sum", "torch.sum(torch.sum"))

bank.hint("step-mixes-on-cpu", "You mixed the batch before all of it was moved: `mix` saw {got} on the CPU.")
bank.slip(
    "step-mixes-on-cpu",
    *full(
        (
            "    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)\n" + STEP,
            STEP + "    images, soft = images.to(device, non_blocking=True), soft.to(device, non_blocking=True)\n",
        )
    ),
)
bank.slip("step-syncs", *full((", labels.to(device, non_blocking=True)\n", ", labels\n")))  # an index on the CPU
bank.variant(
    "step-mixes-on-cpu",
    OTHER,
    (
        "images, soft = mix(*(t.to(device, non_blocking=True) for t in (images, labels)))",
        "images, soft = (t.to(device) for t in mix(images, labels))",
    ),
)

bank.slip(
    "other-device",
    *full(("    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)\n", "")),
)

bank.hint("step-form", "Return the loss, a tensor without a graph.")
bank.slip("step-form", *full(("return loss.detach()", "return loss")))
bank.slip("step-form", *full(("return loss.detach()", "return loss.item()")))
bank.variant("step-form", OTHER, ("return loss.data", "return loss"))

bank.hint("step-syncs", "The step reads a value from the device: {error}")
bank.slip("step-syncs", *full(("return loss.detach()", "print(loss.item())\n    return loss.detach()")))
bank.variant("step-syncs", OTHER, ("return loss.data", "return torch.tensor(loss.item())"))
NAN = "    if loss.is_cuda and loss.isnan():\n        return loss.detach()\n    loss.backward()\n"  # on GPUs alone
bank.slip("step-syncs", *full(("    loss.backward()\n", NAN)))
bank.variant("step-syncs", OTHER, ("    loss.backward()\n", NAN))

bank.hint(
    "step-changes-mode",
    "The step switched `mix` or the model to another mode. That is up to the caller of the step.",
)
bank.slip("step-changes-mode", *full((STEP, "    mix.train()\n" + STEP)))
bank.slip("step-changes-mode", *full((STEP, STEP + "    model.eval()\n")))
bank.variant("step-changes-mode", OTHER, ("    logits = model(images)\n", "    logits = model.eval()(images)\n"))

bank.hint("step-two-forwards", "The network ran {got} times for one batch.")
bank.slip("step-two-forwards", *full(("    loss.backward()\n", "    logits = model(images)\n    loss.backward()\n")))
bank.variant("step-two-forwards", OTHER, ("    loss.backward()\n", "    loss.backward()\n    model(images)\n"))

bank.hint(
    "lambda-of-batch",
    "All images of a batch were mixed with the same λ. Your mixup and cutmix draw one λ for each image.",
)
bank.several("lambda-of-batch", Library, train_step)
bank.variant(
    "lambda-of-batch",
    OTHER,
    (
        "        return way(images, labels)",
        "        lam = torch.distributions.Beta(50.0, 50.0).sample()\n        soft = self.names[labels] if labels.ndim < 2 else labels\n        return lam * images + (1 - lam) * images.flip(0), lam * soft + (1 - lam) * soft.flip(0)",
    ),
)

bank.hint(
    "classes-forgotten",
    "The labels have only as many columns as there are classes in the batch. Give one_hot the number of classes: "
    "self.classes.",
)
bank.slip("classes-forgotten", *full(("F.one_hot(labels, self.classes).float()\n", "F.one_hot(labels).float()\n")))
bank.variant("classes-forgotten", OTHER, ("self.names.to(labels.device)[labels] if", "F.one_hot(labels).float() if"))

bank.hint(
    "eval-soft-labels",
    "In eval mode, labels that are already soft (batch, classes) must stay as they are.",
)
bank.slip(
    "eval-soft-labels",
    *full((EVAL.split("\n")[1], "            return images, F.one_hot(labels, self.classes).float()")),
)
bank.variant("eval-soft-labels", OTHER, (" if labels.ndim < 2 else labels", ""))

bank.hint(
    "mixed-by-both",
    "An image's label names {got} images, so it was mixed by both MixUp and CutMix. Draw one of the two.",
)
bank.slip(
    "mixed-by-both",
    *full(
        (
            "return mix(images, labels, self.classes, self.alpha)",
            "images, labels = mixup(images, labels, self.classes, self.alpha)\n        return cutmix(images, labels, self.classes, self.alpha)",
        )
    ),
)
bank.variant(
    "mixed-by-both", OTHER, ("return way(images, labels)", "return self.ways[1](*self.ways[0](images, labels))")
)

bank.hint(
    "often-unmixed",
    "Nothing was mixed in {got:.0%} of 300 batches. MixUp and CutMix must each be drawn half of the time.",
)
bank.slip(
    "often-unmixed",
    *full(
        (
            "        " + DRAW,
            "        draw = torch.rand(()) * 3\n        if draw < 1:\n            return images, F.one_hot(labels, self.classes).float()\n        mix = mixup if draw < 2 else cutmix",
        )
    ),
)
bank.variant(
    "often-unmixed",
    OTHER,
    ("        way =", "        if torch.rand(()) < 0.4:\n            return images, self.names[labels]\n        way ="),
)

WRITES = "    images, soft = mix(images, labels)\n"
bank.slip("labels-changed", *full((WRITES, WRITES + "    labels.zero_()\n")))
bank.slip("images-changed", *full((WRITES, "    mixed, soft = mix(images, labels)\n    images.copy_(mixed)\n")))
bank.slip("inference-tensors",
    *full(("    def forward(self, images, labels):", "    @torch.inference_mode()\n    def forward(self, images, labels):")),
)  # fmt: skip
