"""Balise 4: validation, judged on a network that notices how it is called."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlojz_tp.judging.checking.compare import close, mistake_of
from dlojz_tp.judging.checking.looks import Look, at_most, judged
from dlojz_tp.judging.checks.gpu_acceleration.loss_and_accuracy import pair, two_floats
from dlojz_tp.judging.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.judging.probes.networks import Moved, network
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.operations import Operations, syncs


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


def _by_image():
    """Losses and correct answers of the 19 images, in float64."""
    images, labels = _images()
    with torch.no_grad():
        logits = network().double().eval()(images.double())
    return F.cross_entropy(logits, labels, reduction="none"), (logits.argmax(1) == labels).double()


LOSSES, RIGHT = _by_image()


def observe(evaluate):
    """A network in training mode, the same in eval mode, batches of one image, a GPU."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    model, loader, cpu = _Noticing(), _Loader(8), torch.device("cpu")
    before = copy.deepcopy(model.state_dict())
    model.train()
    with torch.enable_grad():
        got = evaluate(model, loader, cpu)
        recording = torch.is_grad_enabled()
    training, grad, images = (list(each) for each in zip(*model.seen)) if model.seen else ([], [], [])
    yield {"training": any(training), "grad": any(grad), "images": sum(images), "calls": len(images), "got": pair(got)}
    yield {"passes": loader.passes, "recording": recording, "learns": all(p.requires_grad for p in model.parameters())}
    yield {"trains on": all(module.training for module in model.modules())}
    model.eval()
    model.body[0].requires_grad_(False)
    with torch.enable_grad():
        evaluate(model, loader, cpu)
        recording = torch.is_grad_enabled()
    yield {"forced": any(module.training for module in model.modules()), "recording, in eval mode": recording}
    yield {"thawed": any(p.requires_grad for p in model.body[0].parameters())}
    yield {"weights": all(torch.equal(before[name], value) for name, value in model.state_dict().items())}
    with Operations() as operations:
        evaluate(model, _Loader(1), cpu)
    yield {"reads": len(syncs(operations))}
    seen, moves = on_one_gpu(_validated_on_gpu, evaluate) or (None, 0)
    there = 2 if seen is None else len(seen.there)
    seen = seen or Seen()
    yield {"waits": seen.reads, "misplaced": seen.error * seen.misplaced, "moves": moves, "there": there}


def _validated_on_gpu(gpu, device, evaluate):
    """What is noted on the GPU, batch by batch of one image, and how often the model is moved."""
    model = _Noticing().to(device)
    model.moves = model.body.moves = 0
    return watched(gpu, evaluate, model, _Loader(1), device), model.moves + model.body.moves


def _mean(what, k, each):
    """The look at one of the two numbers. each: (19,), what it is the mean of."""
    means = torch.stack([part.mean() for part in each.split(8)])
    known = {"validation-unweighted": means.mean(), "validation-percent": 100 * each.mean(),
             "first-batch-only": means[0], "not-averaged": each.sum()}  # fmt: skip

    def hint(seen, due):
        other = "not-averaged" if close(seen[0], means.sum(), 1e-4) else "validation-wrong"
        slug = mistake_of(seen[0], known, other, 1e-4)
        return "begins-anew" if slug == "first-batch-only" and seen[1] > 1 else slug

    def right(seen, due):
        return close(seen[0], due, 1e-4)

    def fields(seen, _):
        return {"got": seen[0], "where": f"the {what}", "what": what, "n": seen[1]}

    return Look("", lambda o: (o["got"][k], o["passes"]), each.mean().item(), hint, holds=right, fields=fields)


def _what(text, field="what"):
    return lambda seen, due: {field: text.format(seen)}


def _waits(o):
    """The mistake of more than six waits, and the calls that only wait."""
    calls = ", ".join(sorted({call for call in o["waits"] if "synchronize" in call or "empty_cache" in call}))
    slug = "waits-each-batch" if calls else "sync-each-batch"
    return len(o["waits"]) > 6 and (slug, {"n": len(o["waits"]), "batches": 19, "error": calls})


LOOKS = [
    Look("the network runs in eval mode, without recording gradients", "training", False, "train-mode"),
    Look("", "grad", False, "gradients-recorded"),
    Look("mean loss and accuracy over 19 images in batches of 8, 8 and 3", "got", "(float, float)", "not-two-floats",
         holds=two_floats),
    _mean("loss", 0, LOSSES), _mean("accuracy", 1, RIGHT),
    Look("one pass: the loader is read once, each image seen once", "images", 19, "twice", holds=at_most,
         fields=_what("The network was called with {} images, and there are 19")),
    Look("", "passes", 1, "twice", holds=at_most, fields=_what("The loader was read {} times")),
    Look("", "passes", 1, "loader-bypassed"),
    Look("", "calls", 3, "batches-split", holds=at_most, fields="n"),
    Look("gradients are recorded again afterwards", "recording", True, "gradients-left-off",
         fields=_what("torch.is_grad_enabled() is False")),
    Look("", "learns", True, "gradients-left-off", fields=_what("the network's parameters have requires_grad=False")),
    Look("the model keeps the mode it came in, its weights and statistics unchanged", "trains on", True,
         "mode-not-restored"),
    Look("", "forced", False, "mode-forced"),
    Look("", "recording, in eval mode", True, "gradients-left-off",
         fields=_what("torch.is_grad_enabled() is False, for a network in eval mode")),
    Look("", "thawed", False, "frozen-trained"),
    Look("", "weights", True, "weights-changed"),
    Look("few values are read from the device: not one per batch", "reads", 6, "sync-each-batch", holds=at_most,
         fields=lambda seen, due: {"n": seen, "batches": 19}),
    recognised("", _waits),
    Look("images and labels are moved to the device", "misplaced", "", "validation-not-moved",
         fields=lambda seen, due: {"error": seen, "got": ""}),
    Look("", "moves", 0, "model-moved"),
    Look("", "there", 2, "validation-not-moved",
         holds=lambda seen, due: seen >= due,  # batch by batch, or all at once: both are right
         fields=_what("{} copies of images and labels were seen", "error")),
]  # fmt: skip


def balise_4(evaluate):
    yield from judged(LOOKS, observe, evaluate)
