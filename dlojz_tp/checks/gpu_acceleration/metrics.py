"""Balise 3: metrics that stay on the device. Their values, and what they keep and read."""

import gc
import weakref

import torch

from dlojz_tp.checking import Wrong, close, nearest
from dlojz_tp.probes.gpus import on_one_gpu, watched
from dlojz_tp.probes.memory import attributes, held_bytes, held_storages
from dlojz_tp.probes.operations import Operations, syncs

HINTS = {
    "methods-missing": "The class needs the methods update and result: {error}",
    "not-two-numbers": "result() must return two Python floats: the mean loss and the accuracy.",
    "unweighted-loss": "This is the mean of the batches' losses. The last batch is smaller: weight each loss by "
                       "its number of images.",
    "unweighted-accuracy": "This is the mean of the batches' accuracies. Count the correct answers and the images "
                           "instead.",
    "percent": "The accuracy is a fraction between 0 and 1, not a percentage.",
    "not-divided": "This is a sum. Divide by the number of images seen.",
    "last-batch-only": "Only the last batch counts. Add to the previous sums, do not replace them.",
    "divided-by-steps": "The number of correct answers is divided by the number of steps. Divide by the number of "
                        "images.",
    "wrong-loss-mean": "The mean loss over all images is wrong.",
    "wrong-accuracy": "The accuracy over all images is wrong: compare logits.argmax(dim=1) with the labels.",
    "sync-in-update": "update() makes the CPU wait for the GPU ({error}). Add tensors on the device; read them in result().",
    "many-syncs": "result() reads {n} values from the device after {steps} steps. Add up on the device, and read "
                  "only twice.",
    "sums-on-cpu": "update() copies to the CPU. With non_blocking=True, the CPU adds up numbers that may not have "
                   "arrived yet; without it, the CPU waits. Add up on the device, and read in result().",
    "activations-kept": "After update() the batch's logits are still in memory, because you keep the loss's graph "
                        "or the batch itself. Keep detached sums.",
    "state-grows": "What the object keeps grows by {size:.0f} bytes per step. Keep sums, not batches.",
    "rounded-sum": "With bfloat16 losses, your sum stops growing: beyond 256, bfloat16 cannot count in ones. Add "
                   "up in float32.",
    "rounded-count": "The number of correct answers stops growing, or turns negative. Counting in ones, bfloat16 "
                     "only reaches 256, float16 2,048 and an int16 32,767. Count in float32 or in 64-bit integers.",
    "shared-state": "A second object continues from the sums of the first one, because all objects share the "
                    "attributes of the class. Create the sums in __init__, on self.",
    "input-changed": "update() changed the {what} that it was given. detach() shares the memory, so do not compute "
                     "in place on its result.",
    "result-changes": "A second result(), without an update in between, returns something else.",
}


def balise_3(RunningMetrics):  # noqa: N803  (the answer is a class)
    """Uneven batches, a GPU, bfloat16, a thousand steps."""
    data = _batches(8, 8, 3)
    yield "mean loss and accuracy over batches of 8, 8 and 3 images"
    metrics = _filled(RunningMetrics, data)
    got = _result(metrics)
    _right_values(got, data)
    more = _batches(5, 2)
    second = _result(_filled(RunningMetrics, more))
    added_up = close(second, _truth(data + more), 1e-4)
    if not close(second, _truth(more), 1e-4) and (added_up or not close(_result(metrics), got)):
        raise Wrong("shared-state", expected=_truth(more), got=second, where="the second object")
    yield "result() may be called twice, and update() after it"
    again = _result(metrics)
    if not close(again, got):
        raise Wrong("result-changes", expected=got, got=again)
    for batch in more:
        metrics.update(*batch)
    _right_values(_result(metrics), data + more)
    yield "update() on a GPU: everything on the device, nothing read"
    _waits_for_nothing(RunningMetrics)
    yield "it keeps no activations and does not grow"
    _keeps_nothing(RunningMetrics)
    yield "result() reads only a few values after 60 steps"
    metrics = _filled(RunningMetrics, _batches(*[4] * 60))
    with Operations() as operations:
        _result(metrics)
    if len(syncs(operations)) > 4:
        raise Wrong("many-syncs", n=len(syncs(operations)), steps=60)
    yield "600 steps in bfloat16 lose nothing"
    metrics = RunningMetrics(torch.device("cpu"))
    logits = torch.tensor([[0.0, 4.0]], dtype=torch.bfloat16)
    for _ in range(600):
        metrics.update(torch.tensor(1.0, dtype=torch.bfloat16), logits, torch.tensor([1]))
    got = _result(metrics)
    if close(got[0], 1.0, 0.02) and not close(got[1], 1.0, 0.02):
        raise Wrong("rounded-count", expected=(1.0, 1.0), got=got)
    if not close(got, (1.0, 1.0), 0.02):
        raise Wrong("rounded-sum", expected=(1.0, 1.0), got=got)
    # one batch, all right: many images in float32, one more than bfloat16 can count
    for one, most in ((logits.float().expand(70_000, 2), 0.02), (logits.expand(257, 2), 1e-3)):
        metrics = RunningMetrics(torch.device("cpu"))
        metrics.update(torch.tensor(1.0, dtype=one.dtype), one, torch.ones(len(one), dtype=torch.long))
        got = _result(metrics)
        if not close(got[1], 1.0, most):
            raise Wrong("rounded-count", expected=(1.0, 1.0), got=got)


def _batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    found = []
    for k, n in enumerate(sizes):
        logits = torch.randn(n, 5, generator=generator)
        labels = torch.randint(5, (n,), generator=generator)
        logits[: n // (k % 3 + 1), :] += 3 * torch.nn.functional.one_hot(labels[: n // (k % 3 + 1)], 5)
        found.append((torch.nn.functional.cross_entropy(logits, labels) * (k + 1), logits, labels))
    return found


def _filled(metrics_class, data):
    metrics = metrics_class(torch.device("cpu"))
    for name in ("update", "result"):
        if not callable(getattr(metrics, name, None)):
            raise Wrong("methods-missing", error=f"no method {name}")
    all_given = []
    for batch in data:
        all_given.append([tensor.clone() for tensor in batch])
        metrics.update(*all_given[-1])
    for batch, given in zip(data, all_given, strict=True):  # what an earlier call was given, too
        for what, tensor, before in zip(("loss", "logits", "labels"), given, batch, strict=True):
            if not torch.equal(tensor, before):
                raise Wrong("input-changed", expected=before, got=tensor, what=what)
    return metrics


def _result(metrics):
    return two_numbers(metrics.result(), "not-two-numbers")


def two_numbers(got, slug):
    """A loss and an accuracy as two floats; Wrong(slug) if the answer returned anything else."""
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 2 or not all(isinstance(v, float | int) for v in got):
        raise Wrong(slug, expected="(float, float)", got=got)
    return tuple(float(v) for v in got)


def _truth(data):
    losses, sizes, right = _by_batch(data)
    return [((losses * sizes).sum() / sizes.sum()).item(), (right.sum() / sizes.sum()).item()]


def _by_batch(data):
    losses = torch.stack([loss for loss, _, _ in data]).double()
    sizes = torch.tensor([len(labels) for _, _, labels in data]).double()
    right = torch.tensor([(logits.argmax(1) == labels).sum() for _, logits, labels in data]).double()
    return losses, sizes, right


def _right_values(got, data):
    losses, sizes, right = _by_batch(data)
    truth = _truth(data)
    if not close(got[0], truth[0], 1e-4):
        known = {
            "unweighted-loss": losses.mean(),
            "not-divided": lambda: (losses * sizes).sum(),
            "last-batch-only": losses[-1],
        }
        slug = nearest(got[0], known, "wrong-loss-mean", 1e-4)
        slug = "not-divided" if close(got[0], losses.sum(), 1e-4) else slug
        raise Wrong(slug, expected=truth[0], got=got[0], where="the mean loss")
    if not close(got[1], truth[1], 1e-4):
        known = {
            "percent": 100 * truth[1],
            "unweighted-accuracy": (right / sizes).mean(),
            "not-divided": right.sum(),
            "last-batch-only": right[-1] / sizes[-1],
            "divided-by-steps": right.sum() / len(data),
        }
        slug = nearest(got[1], known, "rounded-count" if close(got[1], truth[1], 0.01) else "wrong-accuracy", 1e-4)
        raise Wrong(slug, expected=truth[1], got=got[1], where="the accuracy")


def _updated_on_gpu(gpu, device, metrics_class):
    """What is noted during the first update, and during a second one."""
    metrics = metrics_class(device)
    batches = [[tensor.to(device) for tensor in batch] for batch in _batches(8, 3)]
    return [watched(gpu, metrics.update, *batch) for batch in batches]


def _waits_for_nothing(metrics_class):
    for number, seen in enumerate(on_one_gpu(_updated_on_gpu, metrics_class) or ()):
        if seen.reads:
            raise Wrong("sync-in-update", error=", ".join(dict.fromkeys(seen.reads)))
        if seen.misplaced:
            raise Wrong("wrong-device", error=seen.error)
        if any(copy.way == "to cpu" for copy in seen.copies):
            raise Wrong("sums-on-cpu")
        # the first update may make what it adds to; what every further one copies from the CPU waits each time
        if number and seen.waits:
            raise Wrong("sync-in-update", error="a blocking copy from the CPU: Python's numbers need none")


def _keeps_nothing(metrics_class):
    metrics = metrics_class(torch.device("cpu"))

    def update(metrics, size=256):
        weights = torch.randn(6, 5, requires_grad=True)
        hidden = torch.randn(size, 6) @ weights
        labels = torch.randint(5, (size,))
        loss = torch.nn.functional.cross_entropy(hidden, labels)
        metrics.update(loss, hidden, labels)
        return weakref.ref(hidden), labels

    kept, labels = update(metrics)
    if kept() is not None:
        gc.collect()
    if kept() is not None or labels.untyped_storage().data_ptr() in held_storages(_state(metrics), functions=True):
        raise Wrong("activations-kept")
    if _graph_of_loss(metrics)() is not None:
        raise Wrong("activations-kept")
    for _ in range(10):
        update(metrics)
    small = _held(metrics)
    for _ in range(40):
        update(metrics)
    grown = (_held(metrics) - small) / 40
    if grown > 64:
        raise Wrong("state-grows", size=grown)
    few = metrics_class(torch.device("cpu"))
    for _ in range(51):
        update(few, 16)
    if held_bytes(attributes(metrics)) - held_bytes(attributes(few)) > 128:  # sums do not know how large a batch is
        raise Wrong("activations-kept", got="the last batches, copied")


def _held(metrics):
    return sum(held_storages(_state(metrics), functions=True).values())


def _state(metrics):
    """All that an object can keep: its own attributes and those of its class."""
    return [attributes(metrics), *(dict(vars(kind)) for kind in type(metrics).__mro__[:-1])]


class _Saved:
    """Stands for a tensor that a graph keeps for its backward pass."""


def _graph_of_loss(metrics):
    """Update with a loss whose graph keeps a `_Saved`; return a weak reference to that."""
    saved = _Saved()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, saved), lambda packed: packed[0]):
        loss = torch.tensor(1.0, requires_grad=True) * torch.tensor(2.0, requires_grad=True)
    metrics.update(loss, torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))
    return weakref.ref(saved)
