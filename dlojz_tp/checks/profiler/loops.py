"""Balise 6: three loops named and mended. Judged by operators, waits and what autograd keeps, not by seconds."""

import copy
import gc
import re

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.probes.memory import KeptForBackward
from dlojz_tp.probes.networks import batches, network
from dlojz_tp.probes.operations import Operations, in_words, syncs

HINTS = {
    "no-diagnosis": 'diagnosis() must return {{"A": …, "B": …, "C": …}}, with one of AILMENTS for each.',
    "misdiagnosed": "{name!r} is not the ailment of {loop}. Its symptoms: {symptoms}.",
    "still-tiny": "{few} operators for {n} images of 3 channels, but {many} for {m} images of {channels}: the "
                  "number still depends on the number of images or channels.",
    "wrong-axes": "You change the contrast around another mean. Each channel of each image has its own.",
    "contrast-broadcast": "The factors are applied along the wrong dimension: contrast[i] belongs to image i, but "
                          "a tensor of shape (b,) is aligned with the last dimension.",
    "mean-lost-dimensions": "The means have shape (b, c) and are applied along the wrong dimensions. keepdim=True "
                            "keeps the averaged dimensions, with size 1.",
    "not-limited": "The limit of ±3 is missing.",
    "contrast-wrong": "The result of mended_a differs from that of slow_a.",
    "images-changed": "mended_a changed the images that it was given. Leave them as they are.",
    "other-dtype": "The result has dtype {got}, but the images have {expected}.",
    "loop-off-device": "When model and batches are on a GPU, a tensor in {loop} is not: {error}",
    "off-device": "mended_a leaves the device, or waits for it: {error}",
    "still-recorded": "mended_b still records what a backward pass would need ({n} tensors saved for a network of "
                      "{layers} layers). detach() comes too late: recording must be off while the network computes.",
    "graph-still-kept": "What mended_b returns or keeps is still attached to a graph that holds {n} tensors.",
    "trains-in-validation": "In mended_b the model is not in eval mode.",
    "recording-left-off": "After mended_b, gradients are no longer recorded, so the next training step would learn "
                          "nothing.",
    "traded-for-waits": "{loop} reads {n} values for {batches} batches. That is a new ailment instead of the old "
                        "one. Add up tensors.",
    "mean-over-images": "This is the mean over all images. slow_b takes the mean over the batches, in which each "
                        "batch counts the same.",
    "mean-wrong": "mended_b doesn't return the mean of the losses.",
    "not-a-tensor": "{loop} returned {kind}; the slow loop returned a tensor of shape {shape}.",
    "still-debugging": "Anomaly detection is on inside mended_c{when}.",
    "switch-flipped": "After mended_c, anomaly detection is not set as before the call: whether it is on, and its "
                      "check_nan. `with torch.autograd.set_detect_anomaly(False):` restores both.",
    "mode-in-training": "mended_c switches the model to eval mode. It trains, so leave the mode alone.",
    "losses-wrong": "mended_c doesn't return the losses of slow_c.",
    "weights-not-trained": "After mended_c, the weights differ from those after slow_c.",
    "losses-with-graph": "The losses that mended_c returns still carry their graphs. Detach them.",
    "passes-again": "{loop} calls the network {n} times for {batches} batches.",
}
NAMES = ("values are read", "many tiny operators", "a graph is kept", "debugging is on", "work is done twice",
         "made on the processor, then moved")  # fmt: skip
AILMENTS = {"A": "many tiny operators", "B": "a graph is kept", "C": "debugging is on"}
SYMPTOMS = {
    "A": "with four times the images, four times the operators; no value is read, nothing stays allocated",
    "B": "the memory that stays allocated grows with the number of batches, and no backward pass will ever use it",
    "C": "nothing stays allocated; after each function of the backward pass, something compares its result with "
         "itself (isnan, ne, any) and reads one value; the loop itself reads none",
}


def balise_6(diagnosis, mended_a, mended_b, mended_c):
    """The names; then each mended loop against its truth, and against its ailment."""
    yield "each loop has the right name"
    found = diagnosis()
    if found is None:
        raise Wrong("nothing-returned")
    if not isinstance(found, dict) or set(found) != set(AILMENTS):
        raise Wrong("no-diagnosis", expected="a dictionary with A, B and C", got=found)
    strange = [value for value in found.values() if value not in NAMES]
    if strange:
        raise Wrong("no-diagnosis", expected=str(NAMES), got=strange[0])
    for loop, name in AILMENTS.items():
        if found[loop] != name:
            raise Wrong("misdiagnosed", loop=loop, name=found[loop], symptoms=SYMPTOMS[loop])
    yield "A: the same images as slow_a"
    _same_contrast(mended_a)
    yield "A: a fixed number of operators, on the device of the images"
    _few_operators(mended_a)
    yield "B: the mean loss, with the model in eval mode"
    _validation(mended_b)
    yield "B: autograd records nothing, and no value is read"
    _nothing_kept(mended_b)
    yield "C: the losses and weights of a plain loop"
    _training(mended_c)
    yield "C: no debugging, even if it was on before"
    _no_debugging(mended_c)


# ---------------------------------------------------------------- A


def _contrast(images, contrast, dims=(2, 3), limit=3.0):
    images = images.double()
    mean = images.mean(dim=dims, keepdim=True)
    return ((images - mean) * contrast.double()[:, None, None, None] + mean).clamp(-limit, limit)


def _same_contrast(mended_a):
    generator = torch.Generator().manual_seed(4)
    cases = {  # the second is as wide as it has images, and as many channels
        "5 images of 3 × 6 × 7": (5, 3, 6, 7), "3 images of 3 × 3 × 3": (3, 3, 3, 3), "1 image": (1, 3, 4, 5),
        "2 images of 7 channels": (2, 7, 3, 4),
    }  # fmt: skip
    for where, shape in cases.items():
        images = 2 * torch.randn(shape, generator=generator) + torch.arange(shape[1])[:, None, None]
        contrast = 0.5 + 2 * torch.rand(shape[0], generator=generator)
        for kind in (images, images.transpose(2, 3), images.to(memory_format=torch.channels_last)):
            before = kind.clone()
            try:
                got = mended_a(kind, contrast)
            except RuntimeError as error:
                sizes = set(re.findall(r"\((\d+)\)", str(error)))
                if "must match the size" in str(error) and str(shape[1]) in sizes and str(shape[0]) not in sizes:
                    raise Wrong("mean-lost-dimensions", got=str(error).split("\n")[0], where=where) from error
                if "must match the size" in str(error) or "not broadcastable" in str(error):
                    raise Wrong("contrast-broadcast", got=str(error).split("\n")[0], where=where) from error
                raise
            if got is None:
                raise Wrong("nothing-returned")
            if not close(kind, before):
                raise Wrong("images-changed", expected=before, got=kind, where=where)
            wanted = _contrast(kind, contrast)
            if not isinstance(got, torch.Tensor) or not close(got, wanted, 1e-4):
                raise Wrong(_contrast_slug(got, kind, contrast), expected=wanted, got=got, where=where)
    half = images.bfloat16()
    got = mended_a(half, contrast.bfloat16())
    if got.dtype != torch.bfloat16:
        raise Wrong("other-dtype", expected="torch.bfloat16", got=str(got.dtype))


def _contrast_slug(got, images, contrast):
    if not isinstance(got, torch.Tensor) or got.shape != images.shape:
        return "contrast-wrong"
    if close(got, _contrast(images, contrast, limit=1e9), 1e-4):
        return "not-limited"
    if any(
        close(got, _contrast(images, contrast, dims), 1e-4)
        for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 2, 3), (2,), (3,), (1,))
    ):
        return "wrong-axes"
    x, factor = images.double(), contrast.double()
    mean = x.mean(dim=(2, 3), keepdim=True)
    for shape in ((-1,), (-1, 1), (-1, 1, 1)):
        try:
            if close(got, ((x - mean) * factor.view(shape) + mean).clamp(-3, 3), 1e-4):
                return "contrast-broadcast"
        except RuntimeError:  # sizes that do not fit
            continue
    return "contrast-wrong"


def _few_operators(mended_a):
    counts = {}
    for n, channels in ((2, 3), (16, 3), (16, 12)):
        images = torch.randn(n, channels, 4, 5)
        with Operations() as operations:
            mended_a(images, torch.rand(n))
        counts[n, channels] = operations.total
        if syncs(operations):
            raise Wrong("off-device", error=in_words(syncs(operations)))
    if max(counts.values()) > counts[2, 3] + 2:
        (m, channels), many = max(counts.items(), key=lambda entry: entry[1])
        raise Wrong("still-tiny", n=2, few=counts[2, 3], m=m, channels=channels, many=many)
    seen, kind = on_one_gpu(_mended_on_gpu, mended_a) or (Seen(), "cuda")
    if seen.misplaced:
        raise Wrong("off-device", error=seen.error)
    if seen.reads or seen.waits:
        raise Wrong("off-device", error=", ".join(dict.fromkeys(seen.reads)) or "something is copied to the device")
    if kind != "cuda":
        raise Wrong("off-device", error=f"the result is on {kind}")


def _mended_on_gpu(gpu, device, mended_a):
    """What is noted, and the type of the device of the result."""
    given, got = (torch.rand(4, 3, 5, 6, device=device), torch.rand(4, device=device)), []
    seen = watched(gpu, lambda: got.append(mended_a(*given)))
    return seen, got[0].device.type if got else "cuda"


# ---------------------------------------------------------------- B and C


class _Watched(nn.Module):
    """The small network; notes its mode, whether anomaly detection is on, and how often it is called."""

    def __init__(self):
        super().__init__()
        self.body, self.calls, self.modes, self.debugging = network(dropout=0.3), 0, [], []

    def forward(self, images):
        self.calls += 1
        self.modes.append(self.training)
        self.debugging.append(torch.is_anomaly_enabled())
        out = self.body(images)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.debugging.append(torch.is_anomaly_enabled()))
        return out


def _validation(mended_b):
    data = batches(8, 8, 3)
    model = _Watched().train()
    next(model.parameters()).requires_grad_(False)  # frozen before, and afterwards
    learns = [p.requires_grad for p in model.parameters()]
    got = mended_b(model, data)
    recording = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    if got is None:
        raise Wrong("nothing-returned")
    if any(model.modes):
        raise Wrong("trains-in-validation")
    if not isinstance(got, torch.Tensor):
        raise Wrong("not-a-tensor", loop="mended_b", kind=type(got).__name__, shape="()", got=got)
    truth = copy.deepcopy(model.body).double().eval()
    with torch.no_grad():
        losses = torch.stack([F.cross_entropy(truth(images.double()), labels) for images, labels in data])
    if not close(got, losses.mean(), 1e-4):
        sizes = torch.tensor([len(labels) for _, labels in data])
        over_images = close(got, (losses * sizes).sum() / sizes.sum(), 1e-4)
        raise Wrong("mean-over-images" if over_images else "mean-wrong", expected=losses.mean(), got=got)
    if model.calls > len(data):
        raise Wrong("passes-again", loop="mended_b", n=model.calls, batches=len(data))
    if not recording or [p.requires_grad for p in model.parameters()] != learns:
        raise Wrong("recording-left-off")


def _nothing_kept(mended_b):
    model, saved = _Watched(), KeptForBackward()
    with saved:
        got = mended_b(model, batches(4, 4, 4, 4, 2))
    if saved.alive:
        gc.collect()  # what only hangs in a circle is not kept
    with Operations() as operations:  # apart: its log keeps lists of tensors
        mended_b(model, batches(4, 4, 4, 4, 2))
    if saved.alive:
        raise Wrong("graph-still-kept", n=saved.alive)
    if saved.made:
        raise Wrong("still-recorded", n=saved.made, layers=len(model.body))
    if got.requires_grad:
        raise Wrong("graph-still-kept", n=0)
    if len(syncs(operations)) > 2:
        raise Wrong("traded-for-waits", loop="mended_b", n=len(syncs(operations)), batches=5)
    _stays_on_gpu("mended_b", mended_b)


def _training(mended_c):
    data = batches(6, 6, 5, 4)
    model, truth = _Watched(), _Watched().double()
    model.body[4].p = truth.body[4].p = 0.0
    sgd = {"lr": 0.05, "momentum": 0.9}
    with Operations() as operations:
        got = mended_c(model, data, torch.optim.SGD(model.parameters(), **sgd))
    on = torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(False)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, torch.Tensor) or got.shape != (4,):
        raise Wrong("not-a-tensor", loop="mended_c", kind=type(got).__name__, shape="(n,)", got=got)
    if any(model.debugging):
        raise Wrong("still-debugging", when="")
    if not all(model.modes):
        raise Wrong("mode-in-training")
    if len(syncs(operations)) > 2:
        raise Wrong("traded-for-waits", loop="mended_c", n=len(syncs(operations)), batches=4)
    if model.calls > len(data):
        raise Wrong("passes-again", loop="mended_c", n=model.calls, batches=len(data))
    optimizer, losses = torch.optim.SGD(truth.parameters(), **sgd), []
    for images, labels in data:
        loss = F.cross_entropy(truth(images.double()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not close(got, torch.tensor(losses), 5e-4):
        raise Wrong("losses-wrong", expected=torch.tensor(losses), got=got)
    for p, wanted in zip(model.parameters(), truth.parameters(), strict=True):
        if not close(p, wanted, 5e-4):
            raise Wrong("weights-not-trained", expected=wanted.float(), got=p)
    if got.requires_grad:
        raise Wrong("losses-with-graph")
    if on:
        raise Wrong("switch-flipped", expected="off", got="on")
    _stays_on_gpu("mended_c", lambda model, data: mended_c(model, data, torch.optim.SGD(model.parameters(), **sgd)))


def _stays_on_gpu(name, loop):
    """B or C where all is on a GPU: nothing is left on the CPU, and not every batch is waited for."""
    seen = on_one_gpu(_loop_on_gpu, loop) or Seen()
    if seen.misplaced:
        raise Wrong("loop-off-device", loop=name, error=seen.error)
    if len(seen.reads) > 2:
        raise Wrong("traded-for-waits", loop=name, n=len(seen.reads), batches=4)


def _loop_on_gpu(gpu, device, loop):
    data = [tuple(tensor.to(device) for tensor in batch) for batch in batches(6, 6, 5, 4)]
    return watched(gpu, loop, network(dropout=0.3).to(device), data)


def _no_debugging(mended_c):
    """Once more with the switch on before the call: inside it must be off."""
    model = _Watched()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        mended_c(model, batches(4, 4), torch.optim.SGD(model.parameters(), lr=0.05))
        after = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
    if any(model.debugging):
        raise Wrong("still-debugging", when=" if it was on before the call, and slow_c leaves it on")
    if after != (True, False):
        got = f"{'on' if after[0] else 'off'}, with check_nan={after[1]}"
        raise Wrong("switch-flipped", expected="on, with check_nan=False", got=got)
