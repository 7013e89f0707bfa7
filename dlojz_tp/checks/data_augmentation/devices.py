"""What every batched augmentation promises: no loop over images, no synchronisation, the input's device, no change of inputs."""

import contextlib
import traceback
from unittest import mock

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.devices import meta_device
from dlojz_tp.probes.operations import Operations

HINTS = {
    "loop-over-images": "{few} operations ran for 4 images, {many} for 32: there is a loop over the images. On a GPU each of "
    "them is a kernel that has to be started.",
    "validates": "torch.distributions checks its arguments, and on a GPU that makes the CPU wait: give it validate_args=False.",
    "waits": "On a GPU this makes the CPU wait: {error}. Keep numbers as tensors on the device.",
    "other-device": "A tensor is not on the device of the images: {error}",
    "images-changed": "The images that were given have changed. Whoever holds them sees mixed ones.",
    "labels-changed": "The labels that were given have changed.",
    "not-reproducible": "After the same torch.manual_seed the batches are mixed differently. Draw with torch, not with random or numpy.",
    "always-the-same": "Two batches in a row are mixed in the same way. Is the seed set inside?",
}


@contextlib.contextmanager
def _drawable():
    """On the meta device there is no sampler of the Dirichlet distribution, which Beta uses: shapes are enough.

    Once torch.compile has run in a process, distributions no longer check their arguments by default (torch/_dynamo/eval_frame.py):
    the answer is judged as in a training that has not compiled anything.
    """
    sample = torch._sample_dirichlet

    def drawn(concentration, *args, **kwargs):
        if concentration.device.type == "meta":
            return torch.empty_like(concentration)
        return sample(concentration, *args, **kwargs)

    checking = mock.patch.object(torch.distributions.Distribution, "_validate_args", __debug__)
    with checking, mock.patch.object(torch, "_sample_dirichlet", drawn):
        yield


def stays_on_device(call, *tensors, waits="waits"):
    """Run `call` on tensors of the meta device, which stands for a GPU; all results must be there, nothing read back.

    waits: the hint where the CPU would wait.
    """
    moved = [tensor.to(meta_device()) for tensor in tensors]
    try:
        with _drawable():
            found = call(*moved)
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError) as error:
        text = str(error).split("\n")[0]
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if any("distributions" in name for name in frames) and "meta" in text:
            raise Wrong("validates", got=text) from error
        for slug, words in ((waits, WAITING), ("other-device", ("meta", "device", "numpy"))):
            if any(word in text for word in words):
                raise Wrong(slug, error=text) from error
        raise
    for tensor in found if isinstance(found, tuple | list) else [found]:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            raise Wrong("other-device", error=f"a result is on {tensor.device}")


WAITING = "item()", "out of meta", "on meta tensors", "data-dependent", "bool"  # in errors of the meta device


def counts(call, make_inputs):
    """No more operations for 32 images than for 4."""
    totals = []
    for batch in (4, 32):
        inputs = make_inputs(batch)
        with Operations() as operations:
            call(*inputs)
        totals.append(operations.total)
    if totals[1] > totals[0] + 6:
        raise Wrong("loop-over-images", few=totals[0], many=totals[1])


def batched(call, make_inputs):
    """A part of a check: `call` has no loop over images and stays on their device. make_inputs(batch): its arguments."""
    yield "no loop over the images, on their device, nothing read back"
    counts(call, make_inputs)
    stays_on_device(call, *make_inputs(4))


def leaves_inputs(call, images, labels):
    """The inputs are afterwards what they were."""
    before = images.clone(), labels.clone()
    call(images, labels)
    if not close(images.float(), before[0].float(), 0.0):
        raise Wrong("images-changed")
    if not close(labels.float(), before[1].float(), 0.0):
        raise Wrong("labels-changed")
