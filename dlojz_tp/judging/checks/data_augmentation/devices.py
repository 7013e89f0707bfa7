"""What every batched augmentation promises: no loop over images, no synchronisation, the input's device, a draw each time."""

import torch
from torch.utils._pytree import tree_leaves

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.judging.probes.shared_looks import stays
from dlojz_tp.measure.operations import Operations

HINTS = {
    "loop-over-images": "{got[0]} operations ran for 4 images and {got[1]} for 32, so there is a loop over the "
    "images. On a GPU, each operation is a kernel that has to be launched.",
    "validates": "torch.distributions checks its arguments, and on a GPU that makes the CPU wait: pass "
    "validate_args=False.",
    "waits": "On a GPU, this makes the CPU wait: {error}. Keep numbers as tensors on the device.",
    "other-device": "A tensor isn't on the device of the inputs: {error}",
    "images-changed": "You changed the images that you were given. Other code that uses them now sees mixed images.",
    "labels-changed": "You changed the labels that you were given.",
    "inference-tensors": "The result was made in inference mode, so no network can be trained on it: autograd "
    "refuses it. Use torch.no_grad(), or nothing: there is no gradient here.",
    "not-reproducible": "After the same torch.manual_seed, the batches are mixed differently. Draw with torch and "
    "its global state, not with random or numpy, nor with a generator of your own.",
    "always-the-same": "Two batches in a row are mixed in the same way. Do you set the seed inside?",
}


def in_inference(tree) -> bool:
    """Whether a tensor in nested results was made in inference mode."""
    return any(isinstance(t, torch.Tensor) and t.is_inference() for t in tree_leaves(tree))


INFERENCE = Look("", "inference", False, "inference-tensors")


def observe_batches(call, make_inputs):
    """Parts of an observation: operations for 4 and for 32 images, the device. make_inputs(batch): arguments of `call`."""
    totals = []
    for batch in (4, 32):
        inputs = make_inputs(batch)
        with Operations() as operations:
            call(*inputs)
        totals.append(operations.total)
    yield {"operations": totals, "device": on_gpu(call, *make_inputs(4))}


BATCHES = [
    Look("no loop over the images, on their device, nothing read back", "operations", "as many for 32 images as for 4",
         "loop-over-images", holds=lambda seen, _: seen[1] <= seen[0] + 6),
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
    Look("the same after the same torch.manual_seed, another mix in each call", "again", True, "not-reproducible"),
    Look("", "alike", False, "always-the-same"),
]
