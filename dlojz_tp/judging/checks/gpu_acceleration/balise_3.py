"""Balise 3: metrics that stay on the device: uneven batches, a GPU, a thousand steps, bfloat16."""

import copy
import gc
import weakref

import torch

from dlojz_tp.judging.checking.compare import close, mistake_of
from dlojz_tp.judging.checking.looks import Look, at_most, judged, within
from dlojz_tp.judging.checks.gpu_acceleration.loss_and_accuracy import pair, two_floats
from dlojz_tp.judging.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.judging.probes.memory import attributes, held_bytes, held_storages
from dlojz_tp.measure.operations import Operations, in_words, syncs

CPU = torch.device("cpu")


def _batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    found = []
    for k, n in enumerate(sizes):
        logits = torch.randn(n, 5, generator=generator)
        labels = torch.randint(5, (n,), generator=generator)
        logits[: n // (k % 3 + 1), :] += 3 * torch.nn.functional.one_hot(labels[: n // (k % 3 + 1)], 5)
        found.append((torch.nn.functional.cross_entropy(logits, labels) * (k + 1), logits, labels))
    return found


EVEN, DATA, MORE = _batches(6, 6, 6), _batches(8, 8, 3), _batches(5, 2)


def observe(metrics_class):
    """Results for several data, one after the other; see also the functions below."""
    make, by_itself, metrics, changed = metrics_class, _by_itself(metrics_class), metrics_class(CPU), []
    yield {"methods": [name for name in ("update", "result") if not callable(getattr(metrics, name, None))]}
    metrics = _filled(make, EVEN, changed)
    yield {"changed": changed}
    got = pair(metrics.result())
    yield {"even": got}
    second = pair(_filled(make, DATA, changed).result())
    added_up = close(second, _truth(EVEN + DATA), 1e-4)
    shared = not close(second, _truth(DATA), 1e-4) and (added_up or not close(pair(metrics.result()), got))
    yield {"changed by a second object": changed, "shared": shared}
    make = by_itself if shared else make
    metrics = _filled(make, DATA, changed)
    got = pair(metrics.result())
    yield {"data": got}
    again = pair(metrics.result())
    metrics = metrics if close(again, got) else _filled(make, DATA, changed)
    yield {"again": (got, again)}
    for batch in MORE:
        metrics.update(*[tensor.clone() for tensor in batch])
    yield {"more": pair(metrics.result())}
    yield from _observe_on_gpu(metrics_class)
    yield from _observe_memory(make)
    metrics = _filled(make, _batches(*[4] * 60), changed)
    with Operations() as operations:
        metrics.result()
    yield {"changed in 60 steps": changed, "syncs": len(syncs(operations))}
    half = torch.tensor([[0.0, 4.0]], dtype=torch.bfloat16)
    yield {"600 steps": _all_right(make, half, 600)}
    # one batch: many images in float32, one more than bfloat16 can count
    yield {"70,000 images": _all_right(make, half.float().expand(70_000, 2))[1]}
    yield {"257 images": _all_right(make, half.expand(257, 2))[1]}


def _by_itself(metrics_class):
    """Makes objects of the class after its attributes have been put back: none has the sums of another."""
    first = {name: copy.deepcopy(value) for name, value in vars(metrics_class).items() if isinstance(value, _SUMS)}

    def make(device):
        for name, value in first.items():
            setattr(metrics_class, name, copy.deepcopy(value))
        return metrics_class(device)

    return make


_SUMS = torch.Tensor | list | dict | int | float  # what sums may be kept in


def _all_right(make, logits, steps=1):
    """The result after steps with a loss of 1.0 and correct answers."""
    metrics = make(CPU)
    for _ in range(steps):
        metrics.update(torch.tensor(1.0, dtype=logits.dtype), logits, torch.ones(len(logits), dtype=torch.long))
    return pair(metrics.result())


def _filled(make, data, changed):
    """An object after its updates. changed: gets what they have changed of their inputs, of earlier calls too."""
    metrics, all_given = make(CPU), []
    for batch in data:
        all_given.append([tensor.clone() for tensor in batch])
        metrics.update(*all_given[-1])
    for batch, given in zip(data, all_given, strict=True):
        names = zip(("loss", "logits", "labels"), given, batch, strict=True)
        changed += [(what, before, tensor) for what, tensor, before in names if not torch.equal(tensor, before)]
    return metrics


def _truth(data):
    losses, sizes, right = _by_batch(data)
    return [((losses * sizes).sum() / sizes.sum()).item(), (right.sum() / sizes.sum()).item()]


def _by_batch(data):
    losses = torch.stack([loss for loss, _, _ in data]).double()
    sizes = torch.tensor([len(labels) for _, _, labels in data]).double()
    right = torch.tensor([(logits.argmax(1) == labels).sum() for _, logits, labels in data]).double()
    return losses, sizes, right


def _updated_on_gpu(gpu, device, metrics_class):
    """What is noted during the first update, and during a second one."""
    metrics = metrics_class(device)
    batches = [[tensor.to(device) for tensor in batch] for batch in _batches(8, 3)]
    return [watched(gpu, metrics.update, *batch) for batch in batches]


def _observe_on_gpu(metrics_class):
    """Reads, copies and errors of the first update and of a second one."""
    for number, seen in enumerate(on_one_gpu(_updated_on_gpu, metrics_class) or (Seen(), Seen())):
        with Operations() as operations:
            if seen.misplaced:  # on the GPU, it ended before a read could show
                metrics_class(CPU).update(*_batches(8)[0])
        on_cpu = in_words(syncs(operations)) if syncs(operations) else ""
        reads, misplaced = ", ".join(dict.fromkeys(seen.reads)), seen.error * seen.misplaced
        yield {f"reads {number}": reads, f"misplaced {number}": misplaced, f"reads on the CPU {number}": on_cpu}
        yield {
            f"to cpu {number}": any(copy.way == "to cpu" for copy in seen.copies),
            f"waits {number}": bool(seen.waits),
        }


def _observe_memory(make):
    """What stays alive of a batch, of a loss's graph, of many batches."""
    metrics = make(CPU)

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
    there = labels.untyped_storage().data_ptr() in held_storages(_state(metrics), functions=True)
    yield {"kept": kept() is not None or there}
    yield {"graph": _graph_of_loss(metrics)() is not None}
    for _ in range(10):
        update(metrics)
    small = _held(metrics)
    for _ in range(40):
        update(metrics)
    yield {"grown": (_held(metrics) - small) / 40}
    few = make(CPU)
    for _ in range(51):
        update(few, 16)
    yield {"copied": held_bytes(attributes(metrics)) - held_bytes(attributes(few))}


def _held(metrics):
    return sum(held_storages(_state(metrics), functions=True).values())


def _state(metrics):
    """All that an object can keep: its own attributes and those of its class."""
    return [attributes(metrics), *(dict(vars(kind)) for kind in type(metrics).__mro__[:-1])]


def _graph_of_loss(metrics):
    """Update with a loss whose graph keeps a token; return a weak reference to that."""
    saved = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, saved), lambda packed: packed[0]):
        loss = torch.tensor(1.0, requires_grad=True) * torch.tensor(2.0, requires_grad=True)
    metrics.update(loss, torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))
    return weakref.ref(saved)


def _unchanged(key):
    return Look("", key, [], "input-changed", fields=lambda seen, due: dict(zip(("what", "expected", "got"), seen[0])))


def _both(seen, _):
    return {"expected": seen[0], "got": seen[1]}


def _means(key, data, claim=""):
    """Looks at the mean loss and at the accuracy."""
    (losses, sizes, right), due = _by_batch(data), _truth(data)
    of_loss = {"unweighted-loss": losses.mean(), "not-divided": losses @ sizes, "last-batch-only": losses[-1]}
    of_accuracy = {"percent": 100 * due[1], "unweighted-accuracy": (right / sizes).mean(), "not-divided": right.sum(),
                   "last-batch-only": right[-1] / sizes[-1], "divided-by-steps": right.sum() / len(data)}  # fmt: skip

    def loss_hint(seen, due):
        return mistake_of(seen, of_loss, "not-divided" if close(seen, losses.sum(), 1e-4) else "wrong-loss-mean", 1e-4)

    def accuracy_hint(seen, due):
        return mistake_of(seen, of_accuracy, "rounded-count" if close(seen, due, 0.01) else "wrong-accuracy", 1e-4)

    yield Look(claim, key, "(float, float)", "not-two-numbers", holds=two_floats)
    for k, what, hint in ((0, "the mean loss", loss_hint), (1, "the accuracy", accuracy_hint)):
        yield Look("", lambda o, k=k: float(o[key][k]), due[k], hint, holds=within(1e-4),
                   fields={"where": what})  # fmt: skip


def _on_gpu(number, claim=""):
    """Looks at an update on a GPU."""
    hints = {"reads": "sync-in-update", "misplaced": "wrong-device", "reads on the CPU": "sync-in-update"}
    for key, hint in hints.items():
        yield Look(claim, f"{key} {number}", "", hint, fields=lambda seen, due: {"error": seen, "got": ""})
    yield Look("", f"to cpu {number}", False, "sums-on-cpu")


LOOKS = [
    Look("mean loss and accuracy over batches of 8, 8 and 3 images", "methods", [], "methods-missing",
         fields=lambda seen, due: {"error": f"no method {seen[0]}"}),
    _unchanged("changed"), *_means("even", EVEN), _unchanged("changed by a second object"),
    Look("", "shared", False, "shared-state"), *_means("data", DATA),
    Look("result() may be called twice, and update() after it", "again", "the same", "result-changes",
         holds=lambda seen, _: close(*seen), fields=_both),
    *_means("more", DATA + MORE),
    *_on_gpu(0, "update() on a GPU: everything on the device, nothing read"), *_on_gpu(1),
    # the first update may make what it adds to; what every further one copies from the CPU waits each time
    Look("", "waits 1", False, "sync-in-update",
         fields={"error": "a blocking copy from the CPU: Python's numbers need none"}),
    Look("it keeps no activations and does not grow", "kept", False, "activations-kept"),
    Look("", "graph", False, "activations-kept"),
    Look("", "grown", 64, "state-grows", holds=at_most, fields="size"),
    Look("", "copied", 128, "activations-kept", holds=at_most),  # sums do not know how large a batch is
    Look("result() reads only a few values after 60 steps", "syncs", 4, "many-syncs", holds=at_most,
         fields=lambda seen, due: {"n": seen, "steps": 60}),
    _unchanged("changed in 60 steps"),
    Look("600 steps in bfloat16 lose nothing", "600 steps", (1.0, 1.0),
         lambda seen, due: "rounded-count" if close(seen[0], 1.0, 0.02) else "rounded-sum", holds=within(0.02)),
    Look("", "70,000 images", 1.0, "rounded-count", holds=within(0.02)),
    Look("", "257 images", 1.0, "rounded-count", holds=within(1e-3)),
]  # fmt: skip


def balise_3(RunningMetrics):  # noqa: N803  (the answer is a class)
    yield from judged(LOOKS, observe, RunningMetrics)
