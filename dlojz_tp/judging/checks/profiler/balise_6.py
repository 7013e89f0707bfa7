"""Balise 6: three loops named and mended. Judged by operators, waits and what autograd keeps, not by seconds."""

import copy
import functools
import gc
import re

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most, judged, within
from dlojz_tp.judging.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.judging.probes.memory import KeptForBackward
from dlojz_tp.judging.probes.networks import batches, network
from dlojz_tp.measure.operations import Operations, in_words, syncs

NAMES = ("values are read", "many tiny operators", "a graph is kept", "debugging is on", "work is done twice",
         "made on the processor, then moved")  # fmt: skip
AILMENTS = {"A": "many tiny operators", "B": "a graph is kept", "C": "debugging is on"}
SYMPTOMS = {
    "A": "with four times the images, four times the operators; no value is read, nothing stays allocated",
    "B": "the memory that stays allocated grows with the number of batches, and no backward pass will ever use it",
    "C": "nothing stays allocated; after each function of the backward pass, something compares its result with "
    "itself (isnan, ne, any) and reads one value; the loop itself reads none",
}


def _diagnosed(diagnosis):
    """The names; then those that do not exist, and the name of each loop."""
    names = diagnosis()
    yield {"names": names}
    yield {"unknown": [name for name in names.values() if name not in NAMES], **names}


DIAGNOSIS = [
    Look("each loop has the right name", "names", "a dictionary with A, B and C", "no-diagnosis",
         holds=lambda seen, _: isinstance(seen, dict) and set(seen) == set(AILMENTS)),
    Look("", "unknown", [], "no-diagnosis", fields=lambda seen, _: {"expected": str(NAMES), "got": seen[0]}),
    *(
        Look("", loop, name, "misdiagnosed",
             fields=lambda seen, _, loop=loop: {"loop": loop, "name": seen, "symptoms": SYMPTOMS[loop]})
        for loop, name in AILMENTS.items()
    ),
]  # fmt: skip


# ---------------------------------------------------------------- A


def _contrast(images, contrast, dims=(2, 3), limit=3.0):
    images = images.double()
    mean = images.mean(dim=dims, keepdim=True)
    return ((images - mean) * contrast.double()[:, None, None, None] + mean).clamp(-limit, limit)


def _images():
    """(where, images, contrast)."""
    generator = torch.Generator().manual_seed(4)
    cases = {  # the second is as wide as it has images, and as many channels
        "5 images of 3 × 6 × 7": (5, 3, 6, 7), "3 images of 3 × 3 × 3": (3, 3, 3, 3), "1 image": (1, 3, 4, 5),
        "2 images of 7 channels": (2, 7, 3, 4),
    }  # fmt: skip
    for where, shape in cases.items():
        images = 2 * torch.randn(shape, generator=generator) + torch.arange(shape[1])[:, None, None]
        contrast = 0.5 + 2 * torch.rand(shape[0], generator=generator)
        for kind in (images, images.transpose(2, 3), images.to(memory_format=torch.channels_last)):
            yield where, kind, contrast


def _changed(mended_a, images, contrast):
    try:
        got, error = mended_a(images, contrast), ""
    except RuntimeError as refused:
        got, error = "", str(refused)
        if "must match the size" not in error and "not broadcastable" not in error:
            raise
    yield {"error": error, "returned": got is not None, "images": images, "result": got}


def _contrast_looks(images, contrast):
    return [
        Look("A: the same images as slow_a", "error", "", functools.partial(_sizes_slug, images.shape)),
        Look("", "returned", True, "nothing-returned"),
        Look("", "images", images.clone(), "images-changed"),
        Look("", "result", _contrast(images, contrast), functools.partial(_contrast_slug, images, contrast),
             holds=lambda seen, due: isinstance(seen, torch.Tensor) and close(seen, due, 1e-4)),
    ]  # fmt: skip


def _sizes_slug(shape, seen, _):
    sizes = set(re.findall(r"\((\d+)\)", seen))
    means = "must match the size" in seen and str(shape[1]) in sizes and str(shape[0]) not in sizes
    return "mean-lost-dimensions" if means else "contrast-broadcast"


def _contrast_slug(images, contrast, got, _):
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


def _operators(mended_a):
    """How many it starts, by (images, channels), and which of them wait."""
    counts, waits = {}, []
    for n, channels in ((2, 3), (16, 3), (16, 12)):
        images = torch.randn(n, channels, 4, 5)
        with Operations() as operations:
            mended_a(images, torch.rand(n))
        counts[n, channels] = operations.total
        waits += [in_words(syncs(operations))] if syncs(operations) else []
    return {"operators": counts, "A waits": (waits + [""])[0]}


def _most(seen, due):
    (m, channels), many = max(seen.items(), key=lambda entry: entry[1])
    return {"n": 2, "few": seen[2, 3], "m": m, "channels": channels, "many": many}


def _off_gpu(mended_a):
    """How it leaves a GPU, or waits for it, in words."""
    seen, kind = on_one_gpu(_mended_on_gpu, mended_a) or (Seen(), "cuda")
    if seen.misplaced:
        return seen.error
    if seen.reads or seen.waits:
        return ", ".join(dict.fromkeys(seen.reads)) or "something is copied to the device"
    return "" if kind == "cuda" else f"the result is on {kind}"


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


def _validated(mended_b):
    data = batches(8, 8, 3)
    model = _Watched().train()
    next(model.parameters()).requires_grad_(False)  # frozen before, and afterwards
    learns = [p.requires_grad for p in model.parameters()]
    got = mended_b(model, data)
    recording = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    kind = "Tensor" if isinstance(got, torch.Tensor) else type(got).__name__
    as_before = recording and [p.requires_grad for p in model.parameters()] == learns
    yield {"B returned": got is not None, "B training": any(model.modes), "B kind": kind,
           "B calls": model.calls, "B as before": as_before}  # fmt: skip
    truth = copy.deepcopy(model.body).double().eval()
    with torch.no_grad():
        losses = torch.stack([F.cross_entropy(truth(images.double()), labels) for images, labels in data])
    yield {"mean": {"got": got, "losses": losses, "expected": losses.mean()}}


def _is_mean(seen, _):
    return close(seen["got"], seen["expected"], 1e-4)


def _mean_slug(seen, _):
    sizes = torch.tensor([8, 8, 3])
    over_images = close(seen["got"], (seen["losses"] * sizes).sum() / sizes.sum(), 1e-4)
    return "mean-over-images" if over_images else "mean-wrong"


def _kept(mended_b):
    model, saved = _Watched(), KeptForBackward()
    with saved:
        got = mended_b(model, batches(4, 4, 4, 4, 2))
    if saved.alive:
        gc.collect()  # what only hangs in a circle is not kept
    with Operations() as operations:  # apart: its log keeps lists of tensors
        mended_b(model, batches(4, 4, 4, 4, 2))
    yield {"alive": saved.alive, "saved": (saved.made, len(model.body))}
    yield {"B graph": got.requires_grad, "B reads": len(syncs(operations))}
    yield _on_gpu("B", mended_b)


SGD = {"lr": 0.05, "momentum": 0.9}


def _trained(mended_c):
    data, model = batches(6, 6, 5, 4), _Watched()
    model.body[4].p = 0.0
    with Operations() as operations:
        got = mended_c(model, data, torch.optim.SGD(model.parameters(), **SGD))
    on = torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(False)
    kind = "a tensor of shape (n,)" if isinstance(got, torch.Tensor) and got.shape == (4,) else type(got).__name__
    yield {"C returned": got is not None, "C kind": kind, "C debugging": any(model.debugging), "losses": got,
           "C training": all(model.modes), "C reads": len(syncs(operations)), "C calls": model.calls,
           "on": "on" if on else "off"}  # fmt: skip
    yield {"weights": [p.detach().clone() for p in model.parameters()], "C graph": got.requires_grad}
    yield _on_gpu("C", lambda model, data: mended_c(model, data, torch.optim.SGD(model.parameters(), **SGD)))


@functools.cache
def _plainly_trained():
    """(losses, weights) of a plain loop."""
    truth, losses = _Watched().double(), []
    truth.body[4].p = 0.0
    optimizer = torch.optim.SGD(truth.parameters(), **SGD)
    for images, labels in batches(6, 6, 5, 4):
        loss = F.cross_entropy(truth(images.double()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), [p.detach() for p in truth.parameters()]


def _on_gpu(name, loop):
    """B or C where all is on a GPU: nothing is left on the CPU, and not every batch is waited for."""
    seen = on_one_gpu(_loop_on_gpu, loop) or Seen()
    return {f"{name} off GPU": seen.misplaced and (seen.error or ""), f"{name} reads on GPU": len(seen.reads)}


def _loop_on_gpu(gpu, device, loop):
    data = [tuple(tensor.to(device) for tensor in batch) for batch in batches(6, 6, 5, 4)]
    return watched(gpu, loop, network(dropout=0.3).to(device), data)


def _debugged(mended_c):
    """Once more with the switch on before the call: inside it must be off."""
    model = _Watched()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        mended_c(model, batches(4, 4), torch.optim.SGD(model.parameters(), lr=0.05))
        on, checks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
    return {"still debugging": any(model.debugging), "switch": f"{'on' if on else 'off'}, with check_nan={checks}"}


def observe(mended_a, mended_b, mended_c):
    """A on half precision, how many operators it starts; what B and C return, leave behind, record and wait for."""
    yield {"half": str(mended_a(torch.randn(2, 7, 3, 4).bfloat16(), torch.rand(2).bfloat16()).dtype)}
    yield _operators(mended_a)
    yield {"A off GPU": _off_gpu(mended_a)}
    for part in (_validated(mended_b), _kept(mended_b), _trained(mended_c)):
        yield from part
    yield _debugged(mended_c)


def _loop(loop, batches, shape=""):
    """What is said of B or C: how often, or of which kind."""
    return lambda seen, _: {"loop": loop, "n": seen, "kind": seen, "error": seen, "batches": batches, "shape": shape}


def _saved(seen, _):
    return {"n": seen[0], "layers": seen[1]}


def _gpu_looks(name, loop):
    return [
        Look("", f"{name} off GPU", False, "loop-off-device", fields=_loop(loop, 4)),
        Look("", f"{name} reads on GPU", 2, "traded-for-waits", holds=at_most, fields=_loop(loop, 4)),
    ]


LOOKS = [
    Look("A: the same images as slow_a", "half", "torch.bfloat16", "other-dtype"),
    Look("A: a fixed number of operators, on the device of the images", "A waits", "", "off-device", fields="error"),
    Look("", "operators", "as many as for two images", "still-tiny", fields=_most,
         holds=lambda seen, _: max(seen.values()) <= seen[2, 3] + 2),
    Look("", "A off GPU", "", "off-device", fields="error"),
    Look("B: the mean loss, with the model in eval mode", "B returned", True, "nothing-returned"),
    Look("", "B training", False, "trains-in-validation"),
    Look("", "B kind", "Tensor", "not-a-tensor", fields=_loop("mended_b", 3, "()")),
    Look("", "mean", "the mean over the batches", _mean_slug, holds=_is_mean, fields=lambda seen, _: seen),
    Look("", "B calls", 3, "passes-again", holds=at_most, fields=_loop("mended_b", 3)),
    Look("", "B as before", True, "recording-left-off"),
    Look("B: autograd records nothing, and no value is read", "alive", 0, "graph-still-kept", fields="n"),
    Look("", "saved", 0, "still-recorded", holds=lambda seen, due: seen[0] == due, fields=_saved),
    Look("", "B graph", False, "graph-still-kept", fields={"n": 0}),
    Look("", "B reads", 2, "traded-for-waits", holds=at_most, fields=_loop("mended_b", 5)),
    *_gpu_looks("B", "mended_b"),
    Look("C: the losses and weights of a plain loop", "C returned", True, "nothing-returned"),
    Look("", "C kind", "a tensor of shape (n,)", "not-a-tensor", fields=_loop("mended_c", 4, "(n,)")),
    Look("", "C debugging", False, "still-debugging", fields={"when": ""}),
    Look("", "C training", True, "mode-in-training"),
    Look("", "C reads", 2, "traded-for-waits", holds=at_most, fields=_loop("mended_c", 4)),
    Look("", "C calls", 4, "passes-again", holds=at_most, fields=_loop("mended_c", 4)),
    Look("", "losses", lambda _: _plainly_trained()[0], "losses-wrong", holds=within(5e-4)),
    Look("", "weights", lambda _: _plainly_trained()[1], "weights-not-trained", holds=within(5e-4)),
    Look("", "C graph", False, "losses-with-graph"),
    Look("", "on", "off", "switch-flipped"),
    *_gpu_looks("C", "mended_c"),
    Look("C: no debugging, even if it was on before", "still debugging", False, "still-debugging",
         fields={"when": " if it was on before the call, and slow_c leaves it on"}),
    Look("", "switch", "on, with check_nan=False", "switch-flipped"),
]  # fmt: skip


def balise_6(diagnosis, mended_a, mended_b, mended_c):
    """The names; then each mended loop against its truth, and against its ailment."""
    yield from judged(DIAGNOSIS, _diagnosed, diagnosis)
    for where, images, contrast in _images():
        yield from judged(_contrast_looks(images, contrast), _changed, mended_a, images, contrast, where=where)
    yield from judged(LOOKS, observe, mended_a, mended_b, mended_c)
