"""What every batched augmentation promises: no loop over images, no synchronisation, the input's device, a draw each time."""

import traceback
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from dlojz_tp.checking import close
from dlojz_tp.checking.looks import Look, silent
from dlojz_tp.probes.devices import meta_device
from dlojz_tp.probes.operations import Operations

HINTS = {
    "loop-over-images": "{got[0]} operations ran for 4 images, {got[1]} for 32: there is a loop over the images. On a GPU each "
    "of them is a kernel that has to be started.",
    "validates": "torch.distributions checks its arguments, and on a GPU that makes the CPU wait: give it validate_args=False.",
    "waits": "On a GPU this makes the CPU wait: {error}. Keep numbers as tensors on the device.",
    "other-device": "A tensor is not on the device of the images: {error}",
    "images-changed": "The images that were given have changed. Whoever holds them sees mixed ones.",
    "labels-changed": "The labels that were given have changed.",
    "not-reproducible": "After the same torch.manual_seed the batches are mixed differently. Draw with torch, not with random or numpy.",
    "always-the-same": "Two batches in a row are mixed in the same way. Is the seed set inside?",
}
ERRORS = {  # words in errors of the meta device, which stands for a GPU
    "waits": ("item()", "out of meta", "on meta tensors", "data-dependent", "bool"),
    "other-device": ("meta", "device", "numpy"),
}


def on_meta(call, *tensors):
    """What goes wrong on tensors of the meta device, and its text: ["", ""] if nothing does.

    Once torch.compile has run in a process, distributions no longer check their arguments by default (torch/_dynamo/eval_frame.py):
    the answer is judged as in a training that has not compiled anything.
    """
    moved = [tensor.to(meta_device()) for tensor in tensors]
    try:
        with mock.patch.object(torch.distributions.Distribution, "_validate_args", __debug__):
            found = call(*moved)
    except Exception as error:
        text = str(error).split("\n")[0]
        if "meta" in text and "/distributions/" in traceback.format_exc():
            return ["validates", text]
        if slugs := [slug for slug, words in ERRORS.items() if any(word in text for word in words)]:
            return [slugs[0], text]
        raise
    left = any(isinstance(one, torch.Tensor) and one.is_cpu for one in tree_leaves(found))
    return ["other-device", "a result is on cpu"] if left else ["", ""]


def stays(claim, waits="waits"):
    """A look at what `on_meta` returned, under "device". waits: the hint where the CPU would wait."""
    return Look(claim, "device", ["", ""], lambda seen, _: waits if seen[0] == "waits" else seen[0],
                fields=lambda seen, due: {"error": seen[1]} | silent(seen, due))  # fmt: skip


def observe_batches(call, make_inputs):
    """Parts of an observation: operations for 4 and for 32 images, the device. make_inputs(batch): arguments of `call`."""
    totals = []
    for batch in (4, 32):
        inputs = make_inputs(batch)
        with Operations() as operations:
            call(*inputs)
        totals.append(operations.total)
    yield {"operations": totals, "device": on_meta(call, *make_inputs(4))}


BATCHES = [
    Look("no loop over the images, on their device, nothing read back", "operations", "as many for 32 images as for 4",
         "loop-over-images", lambda seen, _: seen[1] <= seen[0] + 6),
    stays(""),
]  # fmt: skip


def observe_seeds(call):
    """Two calls in a row after one seed, the same seed, and none: a seed set late in a call shows only in the last two."""
    runs = []
    for seed in (1, 1, None):
        if seed:
            torch.manual_seed(seed)
        runs.append([call(), call()])
    return {"again": close(*runs[:2], 1e-6), "alike": close(*runs[1:], 1e-6) or close(*runs[2], 1e-6)}


SEEDS = [
    Look("the same after the same torch.manual_seed, another mix at each call", "again", True, "not-reproducible"),
    Look("", "alike", False, "always-the-same"),
]
