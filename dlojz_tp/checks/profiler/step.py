"""Balise 4: the step without waits. Its numbers on the CPU, its behaviour on a GPU, which is only pretended."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.probes.networks import batches, network
from dlojz_tp.probes.operations import Operations, in_words, syncs

HINTS = {
    "not-three-results": "Return three tensors: the loss, the number of right answers and the length of the gradients.",
    "numbers-returned": "{what} is a {kind}: turning it into a Python number made the processor wait. Return the "
                        "tensor.",
    "graph-returned": "The loss still carries its graph, and with it all the activations. Return it detached.",
    "reads-a-value": "You read a value in the step ({error}), and the processor waits there.",
    "mask-as-index": "You index with a mask. Only the device knows how many elements it selects, so the processor "
                     "waits. Let these images go through, but count for nothing.",
    "unknown-in-loss": "Images with label -1 must not enter the loss: {error}",
    "unknown-as-class": "You count images with label -1 as images of class 0. They must not count at all: "
                        "ignore_index=-1.",
    "mean-over-all": "You divide the loss by the number of all images. It is the mean over those that have a label.",
    "batch-changed": "You changed the batch that you were given: on a CPU, .to returns the caller's own tensor. "
                     "Make a new one.",
    "loss-wrong": "The loss differs from that of hesitant_step.",
    "shift-missing": "This is the loss without the shift.",
    "shift-wrong": "The loss is close, but not the same. The shift is 0.4 × a number of torch.rand - 0.2, one for "
                   "each image; the loss is the mean over the images that have a label.",
    "count-wrong": "The number of right answers is {got:g} instead of {expected:g}.",
    "count-unknown": "You count images with label -1 as right, or leave out images that have a label.",
    "norm-after": "This is the length of the gradients after you shortened them. Return the length before.",
    "norm-wrong": "The length of all gradients together is wrong. It is the square root of the sum of all squares.",
    "gradients-not-cleared": "The length is right in the first step but not in the next: gradients add up until "
                             "you clear them.",
    "gradients-gone": "The length is 0: you look at the gradients before backward() has computed them, or after "
                      "you cleared them.",
    "never-shortened": "You don't shorten long gradients before the update.",
    "always-shortened": "You make short gradients longer. Only those longer than MAX_NORM should change.",
    "each-shortened": "You shorten gradients one by one, or number by number. It is all of them together that have "
                      "the length, and they keep their direction.",
    "other-limit": "You shorten long gradients to a length of {length:.2f}, not to MAX_NORM.",
    "no-update": "The weights did not change. Do you call optimizer.step() after backward()?",
    "weights-wrong": "After the steps, the weights differ from those of hesitant_step.",
    "made-on-processor": "There are {n} copies to the device in a step. Two are enough: images and labels. Create "
                         "everything that you draw in the step on the device.",
    "pinned-in-step": "pin_memory() in the step makes a copy on the processor while everything waits. The loader "
                      "pins the batch in advance, and random numbers are drawn on the device.",
    "number-copied": "A tensor made from a Python number on the device (torch.tensor(…, device=device)) is a copy, "
                     "and that waits. torch.full creates it there; usually the number itself is enough.",
    "copy-blocks": "{blocking} of {n} copies block: the processor waits until each is done. Use non_blocking=True.",
    "no-longer-pinned": "On a GPU, a copy waits in spite of non_blocking=True{line}: what it copies is no longer "
                        "the loader's pinned memory. Copy first, then compute on the device.",
    "streams-unordered": "On a GPU, two streams work on the same memory and neither waits for the other ({error}), "
                         "so the network may read what is not there yet. current_stream().wait_stream(the other) "
                         "sets the order, and the CPU doesn't wait.",
    "results-elsewhere": "A result is on {got}. The results should stay on the device: a copy that doesn't block "
                         "is still under way when the step returns, and one that blocks waits.",
    "batch-not-moved": "You didn't move both images and labels to `device`: {error}",
    "own-device": "The step uses a hard-coded device, or creates a tensor on another one than `device`: {error}",
    "mode-switched": "The step switches the model to eval mode. A training step leaves the mode alone.",
    "network-twice": "You called the network {n} times in a step. Once is enough.",
}
MAX_NORM = 5.0  # as in the notebook
LR = 0.02
SCALES = (12.0, 0.1, 8.0, 0.3)  # of the images: long gradients, then short ones


def balise_4(flowing_step):
    """Long and short gradients, images without label, batch of one; then a GPU that is not there."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    yield "it returns three tensors with no dimension and no graph"
    data = _data()
    truth = _truth(_network(), data)
    _right_form(flowing_step, data[0])
    yield "the loss, the right answers and the length of the gradients are those of hesitant_step"
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for number, (batch, wanted) in enumerate(zip(data, truth, strict=True)):
        calls = model.calls
        with Operations() as operations:
            got = _call(flowing_step, model, batch, optimizer, torch.device("cpu"), seed=number)
        if number == 0:
            if model.calls - calls > 1:
                raise Wrong("network-twice", n=model.calls - calls)
            _no_reads(operations)
        _right_numbers(got, wanted, batch, number)
        _right_weights(model, wanted, number)
    yield "nothing is read in the step, even where torch sees a GPU"
    seen, away = on_one_gpu(_step_on_gpu, flowing_step) or (None, "")
    _no_waits(seen or Seen())
    yield "two copies to the device, which don't block; everything else is created there"
    if seen:
        _right_copies(seen)
    if away:
        raise Wrong("results-elsewhere", expected="cuda", got=away)


def _step_on_gpu(gpu, device, flowing_step):
    """What is noted during a step on the GPU, from pinned memory, as loaders give it; where results are, if not there."""
    model = _network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    images, labels = (tensor.pin_memory() for tensor in batches(4)[0])
    got = []
    seen = watched(gpu, lambda: got.extend(flowing_step(model, images, labels, optimizer, device)))
    kinds = [one.device.type for one in got if isinstance(one, torch.Tensor)]
    return seen, next((kind for kind in kinds if kind != "cuda"), "")


def _no_waits(seen):
    if seen.pinned:
        raise Wrong("pinned-in-step")
    if any("how many elements" in read for read in seen.reads):
        raise Wrong("mask-as-index")
    if seen.reads:
        raise Wrong("reads-a-value", error=", ".join(dict.fromkeys(seen.reads)), where="a machine with a GPU")


def _right_copies(seen):
    if seen.misplaced:
        raise Wrong("own-device" if seen.other_gpu or len(seen.there) > 1 else "batch-not-moved", error=seen.error)
    numbers = [copy for copy in seen.there if copy.bytes == copy.item]  # of batches of four images
    if len(seen.there) - len(numbers) > 2:
        raise Wrong("made-on-processor", n=len(seen.there))
    if len(seen.there) - len(numbers) < 2:
        raise Wrong("batch-not-moved", error=f"{len(seen.there)} copies were seen, but images and labels make two")
    blocking = sum(not copy.non_blocking for copy in seen.there if copy not in numbers)
    if blocking:
        raise Wrong("copy-blocks", n=len(seen.there), blocking=blocking)
    if numbers:
        raise Wrong("number-copied", n=len(numbers))
    if seen.unpinned:
        raise Wrong("no-longer-pinned", line=seen.unpinned[0])
    if seen.races:
        raise Wrong("streams-unordered", error=seen.races[0].what)


def _network():
    """The small network without its batch norm, which would undo a shift that all images share."""
    model = network()
    model[1] = nn.Identity()
    return model


def _data():
    """Batches with unlabelled images; the second has gradients that are short enough, the last is one image."""
    data = []
    for k, (images, labels) in enumerate(batches(8, 6, 5, 1)):
        labels = labels.clone()
        if k != 3:
            labels[k % 3 :: 3] = -1
        data.append((images * SCALES[k], labels))
    return data


def _shift(n, seed):
    torch.manual_seed(seed)
    return (0.4 * torch.rand(n) - 0.2)[:, None, None, None]


def _truth(model, data):
    """Loss, right answers, norm and weights after each step, in float64."""
    model = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    found = []
    for seed, (images, labels) in enumerate(data):
        images = images.double()
        start = copy.deepcopy(model)
        logits = model(images + _shift(len(images), seed).double())
        known = [i for i in range(len(labels)) if labels[i] >= 0]
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        loss = losses[known].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        clipped = min(1.0, MAX_NORM / norm.item())
        for p in model.parameters():
            p.grad *= clipped
        optimizer.step()
        right = logits.argmax(1) == labels
        found.append({
            "loss": loss.item(), "right": int(right.sum()), "norm": norm.item(), "clipped": clipped,
            "weights": [p.detach().clone() for p in model.parameters()], "sum": losses[known].sum().item(),
            "all": losses.mean().item(),
            "unshifted": F.cross_entropy(start(images), labels, ignore_index=-1).item(),
        })  # fmt: skip
    return found


def _call(flowing_step, model, batch, optimizer, device, seed):
    torch.manual_seed(seed)
    images, labels = (tensor.clone() for tensor in batch)
    try:
        got = flowing_step(model, images, labels, optimizer, device)
        if images._version or labels._version:  # an operator in place counts it up
            raise Wrong("batch-changed")
    except (RuntimeError, AssertionError, IndexError) as error:
        text = str(error).split("\n")[0]
        if any(words in text for words in ("out of bounds", "out of range", "non-negative")):  # one_hot, gather
            raise Wrong("unknown-in-loss", error=text) from error
        if any(words in text for words in ("NVIDIA", "CUDA", "accelerator")):
            _no_waits((on_one_gpu(_step_on_gpu, flowing_step) or [Seen()])[0])
            raise Wrong("own-device", error=text[:80]) from error
        raise
    return got


def _right_form(flowing_step, batch):
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    got = _call(flowing_step, model, batch, optimizer, torch.device("cpu"), seed=0)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("not-three-results", expected="(loss, right answers, norm)", got=got)
    for what, value in zip(("The loss", "The number of right answers", "The length"), got, strict=True):
        if not isinstance(value, torch.Tensor):
            raise Wrong("numbers-returned", got=value, what=what, kind=type(value).__name__)
        if value.requires_grad:
            raise Wrong("graph-returned", got=f"requires_grad=True, {value.grad_fn}")
        if value.dim():
            raise Wrong("not-three-results", expected="tensors of shape ()", got=value)
    if not all(module.training for module in model.modules()):
        raise Wrong("mode-switched")


def _no_reads(operations):
    found = sorted(set(syncs(operations)))
    if found:
        slug = "mask-as-index" if set(found) <= {"aten.nonzero", "aten.masked_select"} else "reads-a-value"
        raise Wrong(slug, error=in_words(found))


def _right_numbers(got, wanted, batch, number):
    loss, right, norm = (float(value) for value in got)
    where = f"step {number + 1}, {len(batch[1])} images"
    if not close(loss, wanted["loss"], 2e-4):
        slug = "loss-wrong"
        if close(loss, wanted["all"], 2e-4):
            slug = "unknown-as-class"
        elif close(loss, wanted["sum"] / len(batch[1]), 2e-4):
            slug = "mean-over-all"
        elif close(loss, wanted["unshifted"], 2e-5):
            slug = "shift-missing"
        elif abs(loss - wanted["loss"]) < 0.2 * abs(wanted["loss"]):
            slug = "shift-wrong"
        raise Wrong(slug, expected=wanted["loss"], got=loss, where=where)
    if not close(right, float(wanted["right"])):
        unlabelled = int((batch[1] == -1).sum())
        slug = "count-unknown" if abs(right - wanted["right"]) == unlabelled else "count-wrong"
        raise Wrong(slug, expected=wanted["right"], got=right, where=where)
    if not close(norm, wanted["norm"], 2e-3):
        slug = "norm-after" if close(norm, wanted["norm"] * wanted["clipped"], 2e-3) else "norm-wrong"
        slug = "gradients-gone" if norm == 0 else "gradients-not-cleared" if number else slug
        raise Wrong(slug, expected=wanted["norm"], got=norm, where=where)


def _right_weights(model, wanted, number):
    if all(close(p, w, 5e-4) for p, w in zip(model.parameters(), wanted["weights"], strict=True)):
        return
    slug, length = "weights-wrong", 0.0
    if number == 0:  # from the common start, one step of plain SGD: the direction and length of the update are known
        start = list(_network().parameters())
        update = torch.cat([(p.detach() - s.detach()).double().flatten() for p, s in zip(model.parameters(), start)])
        truth = torch.cat([(w - s.detach().double()).flatten() for w, s in zip(wanted["weights"], start)])
        cosine = F.cosine_similarity(update, truth, dim=0).item()
        ratio = (update.norm() / truth.norm()).item()
        if cosine > 0.9999 and close(ratio, 1 / wanted["clipped"], 1e-2):
            slug = "never-shortened"
        elif not ratio:
            slug = "no-update"
        elif cosine > 0.9999 and not close(ratio, 2.9, 1e-2):  # a second update, with momentum, gives 2.9
            slug, length = "other-limit", MAX_NORM * ratio
        elif 0.05 < cosine < 0.9999:
            slug = "each-shortened"
    elif number == 1:
        slug = "always-shortened" if wanted["clipped"] == 1.0 else slug
    raise Wrong(slug, length=length, where=f"after step {number + 1}, length of the gradients {wanted['norm']:.2f}")
