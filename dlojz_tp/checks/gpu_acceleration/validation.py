"""Balise 4: validation, judged on a network that notices how it is called."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlojz_tp.checking import Wrong, close, nearest
from dlojz_tp.checks.gpu_acceleration.metrics import two_numbers
from dlojz_tp.probes.gpus import on_one_gpu, watched
from dlojz_tp.probes.networks import Moved, network
from dlojz_tp.probes.operations import Operations, syncs

HINTS = {
    "not-two-floats": "Return two Python floats: the mean loss and the accuracy.",
    "train-mode": "The network ran in training mode: dropout is on, and batch norm learns from the validation images. "
    "Call model.eval() first.",
    "gradients-recorded": "The forward pass records what a backward pass would need, which wastes memory. Use "
                          "torch.inference_mode() or torch.no_grad().",
    "mode-not-restored": "Afterwards the model is still in eval mode, and training continues without dropout. "
                         "Restore the mode that it had before.",
    "mode-forced": "The model came in eval mode and left in training mode. Remember model.training, and restore it.",
    "validation-unweighted": "This is a mean over batches. The last batch is smaller: weight each batch by its "
                             "number of images.",
    "validation-percent": "The accuracy is a fraction between 0 and 1, not a percentage.",
    "first-batch-only": "Only one batch was evaluated. Is the return inside the loop?",
    "begins-anew": "Each iter(loader) starts again, so you evaluated the first batch {n} times. Loop over the "
                   "loader itself: for images, labels in loader.",
    "not-averaged": "This is a sum over the images or the batches. Divide by the number of images.",
    "validation-wrong": "The {what} over the whole validation set is wrong.",
    "sync-each-batch": "You read {n} values from the device for {batches} batches. Use your RunningMetrics, and "
                       "read once at the end.",
    "waits-each-batch": "{error}: {n} calls for {batches} batches, and each makes the CPU wait for the GPU. Leave them out.",
    "frozen-trained": "A parameter that had requires_grad=False now has requires_grad=True, so a frozen layer "
                      "would be trained. Disable gradient recording, and leave the parameters' flags alone.",
    "validation-not-moved": "A tensor is not on `device`: {error}. Images, labels and your sums must all be there.",
    "gradients-left-off": "Afterwards {what}: the next training step would fail or learn nothing. Disable "
                          "gradients only during validation, with a context manager or a decorator.",
    "loader-bypassed": "You never read the loader. Loop over `loader`: its batch size, workers and transforms were "
                       "chosen for validation.",
    "batches-split": "You call the network {n} times for 3 batches. Call it once per batch: a GPU needs many "
                     "images at a time.",
    "twice": "{what}. Once is enough: this doubles the validation time.",
    "weights-changed": "Validation changed the network's weights.",
}


def balise_4(evaluate):
    """Uneven batches; the network in both modes; a GPU."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    model, loader, cpu = _Noticing(), _Loader(8), torch.device("cpu")
    before = copy.deepcopy(model.state_dict())
    yield "the network runs in eval mode, without recording gradients"
    model.train()
    with torch.enable_grad():
        got = evaluate(model, loader, cpu)
        recording = torch.is_grad_enabled()
    after_training = all(module.training for module in model.modules())
    if any(training for training, _, _ in model.seen):
        raise Wrong("train-mode")
    if any(grad for _, grad, _ in model.seen):
        raise Wrong("gradients-recorded")
    yield "mean loss and accuracy over 19 images in batches of 8, 8 and 3"
    _right_values(got, loader.passes)
    yield "one pass: the loader is read once, each image seen once"
    images = sum(n for _, _, n in model.seen)
    if images > 19:
        raise Wrong("twice", what=f"The network was called with {images} images, and there are 19")
    if loader.passes > 1:
        raise Wrong("twice", what=f"The loader was read {loader.passes} times")
    if not loader.passes:
        raise Wrong("loader-bypassed")
    if len(model.seen) > 3:
        raise Wrong("batches-split", n=len(model.seen))
    yield "gradients are recorded again afterwards"
    if not recording:
        raise Wrong("gradients-left-off", what="torch.is_grad_enabled() is False")
    if not all(p.requires_grad for p in model.parameters()):
        raise Wrong("gradients-left-off", what="the network's parameters have requires_grad=False")
    yield "the model keeps the mode it came in, its weights and statistics unchanged"
    if not after_training:
        raise Wrong("mode-not-restored", expected="training is True in all modules", got="False")
    model.eval()
    model.body[0].requires_grad_(False)
    with torch.enable_grad():
        evaluate(model, loader, cpu)
        recording = torch.is_grad_enabled()
    if any(module.training for module in model.modules()):
        raise Wrong("mode-forced", expected="model.training is False", got="True")
    if not recording:
        raise Wrong("gradients-left-off", what="torch.is_grad_enabled() is False, for a network in eval mode")
    if any(p.requires_grad for p in model.body[0].parameters()):
        raise Wrong("frozen-trained")
    if any(not torch.equal(before[k], v) for k, v in model.state_dict().items()):
        raise Wrong("weights-changed")
    yield "few values are read from the device: not one per batch"
    with Operations() as operations:
        evaluate(model, _Loader(1), cpu)
    if len(syncs(operations)) > 6:
        raise Wrong("sync-each-batch", n=len(syncs(operations)), batches=19)
    on_gpu = on_one_gpu(_validated_on_gpu, evaluate)
    if on_gpu and len(on_gpu[0].reads) > 6:
        found = on_gpu[0].reads
        calls = sorted({call for call in found if "synchronize" in call or "empty_cache" in call})
        slug = "waits-each-batch" if calls else "sync-each-batch"
        raise Wrong(slug, n=len(found), batches=19, error=", ".join(calls))
    yield "images and labels are moved to the device"
    if on_gpu:
        _right_moves(*on_gpu)


class _Noticing(Moved, nn.Module):
    """The small network; remembers (training, gradients recorded, images) of each call, those of its copies too."""

    def __init__(self):
        super().__init__()
        self.body, self.seen = network(dropout=0.5), _Shared()

    def forward(self, images):
        training, logits = self.training or self.body[1].training, self.body(images)
        self.seen.append((training, logits.requires_grad, len(images)))
        return logits


class _Shared(list):
    """A list that a deep copy shares with its original."""

    def __deepcopy__(self, _memo):
        return self


def _images():
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(19, 3, 6, 5, generator=generator)
    with torch.no_grad():
        wished = network().eval()(images).argmax(1)
    # every batch has another accuracy, so that a mean over batches shows
    labels = torch.where(torch.arange(19) % 8 < torch.tensor([7] * 8 + [4] * 8 + [1] * 3), wished, (wished + 1) % 4)
    return images, labels


class _Loader(DataLoader):
    """The images in batches; counts how often they are read."""

    passes = 0

    def __init__(self, batch_size):
        super().__init__(TensorDataset(*_images()), batch_size=batch_size)

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def _right_values(got, passes):
    got = two_numbers(got, "not-two-floats")
    images, labels = _images()
    with torch.no_grad():
        logits = network().double().eval()(images.double())
    losses = F.cross_entropy(logits, labels, reduction="none")
    right = (logits.argmax(1) == labels).double()
    for what, value, each in zip(("loss", "accuracy"), got, (losses, right), strict=True):
        truth = each.mean()
        if close(value, truth, 1e-4):
            continue
        parts = each.split(8)
        means = torch.stack([part.mean() for part in parts])
        known = {
            "validation-unweighted": means.mean(),
            "validation-percent": 100 * truth,
            "first-batch-only": means[0],
            "not-averaged": each.sum(),
        }
        slug = nearest(value, known, "validation-wrong", 1e-4)
        if slug == "validation-wrong" and close(value, means.sum(), 1e-4):
            slug = "not-averaged"
        if slug == "first-batch-only" and passes > 1:
            slug = "begins-anew"
        raise Wrong(slug, expected=truth.item(), got=value, where=f"the {what}", what=what, n=passes)


def _validated_on_gpu(gpu, device, evaluate):
    """What is noted on the GPU, batch by batch of one image, and how often the model is moved."""
    model = _Noticing().to(device)
    model.moves = model.body.moves = 0
    return watched(gpu, evaluate, model, _Loader(1), device), model.moves + model.body.moves


def _right_moves(seen, moves):
    if seen.misplaced:
        raise Wrong("validation-not-moved", error=seen.error)
    if moves:
        raise Wrong("model-moved", expected="0 moves", got=f"{moves}")
    if len(seen.there) < 2:  # batch by batch, or all at once: both are right
        raise Wrong("validation-not-moved", error=f"{len(seen.there)} copies of images and labels were seen")
