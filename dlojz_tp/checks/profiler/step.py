"""Balise 4: the step without waits. Its numbers on the CPU, its behaviour on the meta device, which stands for a GPU."""

import contextlib
import copy
import importlib
import logging
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from dlojz_tp.checking import Operations, Wrong, autocast_on_meta, close, copies, meta_device, syncs
from dlojz_tp.checks.gpu_acceleration.models import batches, network
from dlojz_tp.checks.gpu_acceleration.waits import waits, waits_on_gpu

HINTS = {
    "not-three-results": "Return three tensors: loss, right answers, length of the gradients.",
    "numbers-returned": "{what} came back as {kind}: making a Python number of it was a wait. Return the tensor.",
    "graph-returned": "The loss still carries its graph, and with it all activations. Return it detached.",
    "reads-a-value": "A value is read in the step ({error}): the processor waits there.",
    "mask-as-index": "A mask as index: how many elements come out only the device knows, so the processor waits. Let those "
    "images take part, and count for nothing.",
    "unknown-in-loss": "Images with label -1 have no part in the loss: {error}",
    "mean-over-all": "The loss is divided by all images. It is the mean over those that have a label.",
    "batch-changed": "The batch that was handed in came out changed: on a CPU, .to gives the caller's own tensor. Make a new one.",
    "loss-wrong": "The loss is not that of hesitant_step.",
    "shift-missing": "This is the loss without the shift.",
    "shift-wrong": "The shift is another one: 0.4 × a number of torch.rand - 0.2, one for each image.",
    "count-wrong": "The right answers are wrong: {got} instead of {expected}.",
    "count-unknown": "Images with label -1 count as right here, or those that have a label are left out.",
    "norm-after": "This is the length of the gradients after they were shortened. It is meant before.",
    "norm-wrong": "The length of all gradients together is wrong: the root of the sum of all squares.",
    "gradients-not-cleared": "The length is right in the first step and not in the next: gradients add up until they are cleared.",
    "never-shortened": "Long gradients are not shortened before the update.",
    "always-shortened": "Short gradients are made longer: only those longer than MAX_NORM change.",
    "each-shortened": "Gradients are shortened one by one, or number by number. All together have a length, and keep their "
    "direction.",
    "weights-wrong": "After the steps the weights are not those of hesitant_step.",
    "made-on-processor": "{n} copies to the device in a step. Two are enough, images and labels: what is drawn in the step is "
    "made on the device.",
    "copy-blocks": "A copy waits until it is done: {blocking} of {n} block. non_blocking=True.",
    "batch-not-moved": "Images and labels were not both moved to `device`: {error}",
    "own-device": "The step names a device of its own, or makes a tensor on another one than `device`: {error}",
    "mode-switched": "The step switched the model to eval mode. A training step leaves the mode alone.",
    "network-twice": "The network was called {n} times in a step. Once is enough.",
}
MAX_NORM = 5.0  # as in the notebook
LR = 0.02
SCALES = (12.0, 0.1, 8.0, 0.3)  # of the images: long gradients, then short ones


def balise_4(flowing_step):
    """Long and short gradients, images without label, batch of one; then a device that is not there."""
    yield "it returns three tensors without shape and without graph"
    data = _data()
    truth = _truth(_network(), data)
    _right_form(flowing_step, data[0])
    yield "loss, right answers and length of the gradients are those of hesitant_step"
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
    yield "nothing is read in the step, also where torch sees a GPU"
    sgd = torch.optim.SGD(network().parameters(), lr=0.1)
    sgd.step = lambda *_, **__: None
    read = []
    with _quiet():
        waiting = waits_on_gpu(flowing_step, lambda model, gpu: _pretended_step(flowing_step, model, sgd, gpu, read))
    if any("nonzero" in name or "masked_select" in name for name in read):
        raise Wrong("mask-as-index")
    if waiting + read:
        raise Wrong("reads-a-value", error=", ".join(sorted({*waiting, *read})), where="a machine with a GPU")
    yield "two copies to the device, which do not block; all else is made there"
    _on_a_device(flowing_step)


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


def _pretended_step(flowing_step, model, optimizer, gpu, read):
    """A step on a fake GPU, where no backward pass can run: gradients are there all the same."""

    def backward(*_, **__):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    with mock.patch.object(torch.Tensor, "backward", backward):
        try:
            flowing_step(model, torch.zeros(4, 3, 6, 5), torch.zeros(4, dtype=torch.long), optimizer, gpu)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            read.append(str(error).split("\n")[0])


@contextlib.contextmanager
def _quiet():
    """PyTorch logs what fails on a fake device, with a traceback; here that is no news."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


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
        with waits(flowing_step) as waiting:
            got = flowing_step(model, images, labels, optimizer, device)
        if images._version or labels._version:  # an operator in place counts it up
            raise Wrong("batch-changed")
    except IndexError as error:
        if "out of bounds" in str(error) or "out of range" in str(error):
            raise Wrong("unknown-in-loss", error=str(error).split("\n")[0]) from error
        raise
    except RuntimeError as error:
        if "NVIDIA" in str(error) or "CUDA" in str(error):
            raise Wrong("own-device", error=str(error).split("\n")[0][:80]) from error
        if "non-negative" in str(error) or "out of bounds" in str(error):  # one_hot, gather
            raise Wrong("unknown-in-loss", error=str(error).split("\n")[0]) from error
        raise
    except AssertionError as error:
        if "CUDA" in str(error):
            raise Wrong("own-device", error=str(error).split("\n")[0]) from error
        raise
    if waiting:
        raise Wrong("reads-a-value", error=", ".join(sorted(set(waiting))))
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
        raise Wrong(slug, error=", ".join(found))


def _right_numbers(got, wanted, batch, number):
    loss, right, norm = (float(value) for value in got)
    where = f"step {number + 1}, {len(batch[1])} images"
    if not close(loss, wanted["loss"], 2e-4):
        slug = "loss-wrong"
        if close(loss, wanted["all"], 2e-4) or close(loss, wanted["sum"] / len(batch[1]), 2e-4):
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
        slug = "gradients-not-cleared" if number else slug
        raise Wrong(slug, expected=wanted["norm"], got=norm, where=where)


def _right_weights(model, wanted, number):
    if all(close(p, w, 5e-4) for p, w in zip(model.parameters(), wanted["weights"], strict=True)):
        return
    slug = "weights-wrong"
    if number == 0:  # from the common start, one step of plain SGD: the direction and length of the update are known
        start = list(_network().parameters())
        update = torch.cat([(p.detach() - s.detach()).double().flatten() for p, s in zip(model.parameters(), start)])
        truth = torch.cat([(w - s.detach().double()).flatten() for w, s in zip(wanted["weights"], start)])
        cosine = F.cosine_similarity(update, truth, dim=0).item()
        ratio = (update.norm() / truth.norm()).item()
        if cosine > 0.9999 and close(ratio, 1 / wanted["clipped"], 1e-2):
            slug = "never-shortened"
        elif 0.05 < cosine < 0.9999:
            slug = "each-shortened"
    elif number == 1:
        slug = "always-shortened" if wanted["clipped"] == 1.0 else slug
    raise Wrong(slug, where=f"after step {number + 1}, length of the gradients {wanted['norm']:.2f}")


def _foreach_on_meta():
    """clip_grad_norm_(foreach=True) is right on a GPU, and refused on the meta device."""
    place = importlib.import_module("torch.nn.utils.clip_grad")
    return mock.patch.object(place, "_device_has_foreach_support", lambda device: True, create=True)


def _on_a_device(flowing_step):
    device = meta_device()
    model = _network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = batches(4)[0]
    with Operations() as operations:
        try:
            with autocast_on_meta(flowing_step), waits(flowing_step), _foreach_on_meta():
                flowing_step(model, images, labels, optimizer, device)
        except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
            text = str(error).split("\n")[0]
            if any(words in text for words in ("nonzero", "data-dependent", "data dependent", "masked_select")):
                raise Wrong("mask-as-index") from error
            if "out of meta" in text or "on meta tensors" in text:
                raise Wrong("reads-a-value", error="a value or a copy from the device to the processor") from error
            moved = copies(operations, "cpu", "meta")
            if len(moved) < 2 and "meta" in text:
                raise Wrong("batch-not-moved", error=text) from error
            raise Wrong("own-device", error=text) from error
    moved = copies(operations, "cpu", "meta")
    if len(moved) > 2:
        raise Wrong("made-on-processor", n=len(moved))
    if len(moved) < 2:
        raise Wrong("batch-not-moved", error=f"{len(moved)} copies were seen, images and labels make two")
    if not all(moved):
        raise Wrong("copy-blocks", n=len(moved), blocking=moved.count(False))
