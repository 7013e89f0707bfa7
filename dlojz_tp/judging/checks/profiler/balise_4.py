"""Balise 4: the step without waits. Its numbers on the CPU, its behaviour on a GPU, which is only pretended."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking import close, mistake_of
from dlojz_tp.judging.checking.looks import Look, at_most, judged
from dlojz_tp.judging.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.judging.probes.networks import batches, network
from dlojz_tp.measure.operations import Operations, in_words, syncs

MAX_NORM = 5.0  # as in the notebook
LR = 0.02
SCALES = (12.0, 0.1, 8.0, 0.3)  # of the images: long gradients, then short ones


def _step_on_gpu(gpu, device, flowing_step):
    """What is noted during a step on the GPU, from pinned memory, as loaders give it; where results are, if not there."""
    model = _network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    images, labels = (tensor.pin_memory() for tensor in batches(4)[0])
    got = []
    seen = watched(gpu, lambda: got.extend(flowing_step(model, images, labels, optimizer, device)))
    kinds = [one.device.type for one in got if isinstance(one, torch.Tensor)]
    return seen, next((kind for kind in kinds if kind != "cuda"), "")


def _waits(seen):
    """(slug, what waits) of a step on a GPU."""
    if seen.pinned:
        return "pinned-in-step", ""
    slug = "mask-as-index" if any("how many elements" in read for read in seen.reads) else "reads-a-value"
    return (slug, ", ".join(dict.fromkeys(seen.reads))) if seen.reads else ("", "")


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


def _call(flowing_step, model, batch, optimizer, seed):
    """A step on the CPU: what it returns, and how it fails at images without a label, or at another device."""
    torch.manual_seed(seed)
    images, labels = (tensor.clone() for tensor in batch)
    calls, unknown, refused, got = model.calls, "", ("", ""), None
    try:
        with Operations() as operations:
            got = flowing_step(model, images, labels, optimizer, torch.device("cpu"))
    except (RuntimeError, AssertionError, IndexError) as error:
        text = str(error).split("\n")[0]
        beyond = any(words in text for words in ("out of bounds", "out of range", "non-negative"))  # one_hot, gather
        if beyond and (labels < 0).any():
            unknown = text
        elif any(words in text for words in ("NVIDIA", "CUDA", "accelerator")):
            waits = _waits((on_one_gpu(_step_on_gpu, flowing_step) or [Seen()])[0])
            refused = waits if waits[0] else ("own-device", text[:80])
        else:
            raise
    changed = got is not None and bool(images._version or labels._version)  # an operator in place counts it up
    return {"changed": changed, "unknown": unknown, "refused": refused, "returned": got is not None, "got": got,
            "calls": model.calls - calls, "reads": sorted(set(syncs(operations)))}  # fmt: skip


def _slug(seen, _):
    return seen[0]


def _error(seen, _):
    return {"error": seen if isinstance(seen, str) else seen[1]}


def _call_looks(claim):
    return [
        Look(claim, "changed", False, "batch-changed"),
        Look("", "unknown", "", "unknown-in-loss", fields=_error),
        Look("", "refused", ("", ""), _slug, fields=_error),
        # what is refused is told above
        Look("", lambda o: o["returned"] or bool(o["unknown"]), True, "nothing-returned"),
    ]


def _formed(flowing_step, batch):
    """The form of what a step returns."""
    model = _network()
    found = _call(flowing_step, model, batch, torch.optim.SGD(model.parameters(), lr=LR), seed=0)
    yield found
    got = found["got"]
    yield {"three": len(got) if isinstance(got, tuple | list) else type(got).__name__}
    yield {"kinds": [type(value).__name__ if not isinstance(value, torch.Tensor) else "Tensor" for value in got]}
    yield {"graphs": [value.requires_grad for value in got], "dims": [value.dim() for value in got],
           "training": all(module.training for module in model.modules())}  # fmt: skip


RESULTS = "The loss", "The number of right answers", "The length"


def _kind(seen, due):
    k = next(k for k, kind in enumerate(seen) if kind != due[k])
    return {"what": RESULTS[k], "kind": seen[k]}


FORM = [
    *_call_looks("it returns three tensors with no dimension and no graph"),
    Look("", "three", 3, "not-three-results"), Look("", "kinds", ["Tensor"] * 3, "numbers-returned", fields=_kind),
    Look("", "graphs", [False] * 3, "graph-returned"), Look("", "dims", [0] * 3, "not-three-results"),
    Look("", "training", True, "mode-switched"),
]  # fmt: skip


def _train(claim, flowing_step, data):
    """Some steps, up to one that has a mistake at the edge in its numbers: it spoils all that follow."""
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for number, (batch, wanted) in enumerate(zip(data, _truth(model, data), strict=True)):
        step, looks, mistake = _call(flowing_step, model, batch, optimizer, seed=number), _call_looks(claim), ""
        if step["got"] is not None:
            loss, right, norm = (float(value.detach()) for value in step["got"])
            step["norm"] = norm
            step["numbers"] = {"loss": loss, "right": right, "norm": norm, "weights": list(model.parameters())}
            mistake, fields = _mistake(step["numbers"], wanted, batch[1], number)
            looks += (FIRST_STEP if number == 0 else []) + _number_looks(wanted, mistake, fields)
        yield from judged(looks, lambda seen=step: seen, where=f"step {number + 1}, {len(batch[1])} images")
        if mistake or step["got"] is None:
            return


def _reads_slug(reads, _):
    return "mask-as-index" if set(reads) <= {"aten.nonzero", "aten.masked_select"} else "reads-a-value"


FIRST_STEP = [
    Look("", "calls", 1, "network-twice", holds=at_most, fields="n"),
    Look("", "reads", [], _reads_slug, fields=lambda seen, _: {"error": in_words(seen)}),
]


def _number_looks(wanted, mistake, fields):
    """At the length, which may be that of the shortened gradients, and at what is wrong else."""
    return [
        Look("", "norm", wanted["norm"], "norm-after", holds=lambda norm, _: not _after(norm, wanted)),
        Look("", "numbers", wanted, mistake, holds=lambda *_: not mistake, fields=fields),
    ]


def _after(norm, wanted):
    return not close(norm, wanted["norm"], 2e-3) and close(norm, wanted["norm"] * wanted["clipped"], 2e-3)


def _mistake(seen, wanted, labels, number):
    """(slug, fields) of what is wrong first in a step, beside a length after the shortening."""
    loss, right, norm = seen["loss"], seen["right"], seen["norm"]
    if not close(loss, wanted["loss"], 2e-4):
        return _loss_slug(loss, wanted, len(labels)), {"expected": wanted["loss"], "got": loss}
    if not close(right, float(wanted["right"])):
        unlabelled = int((labels == -1).sum())
        slug = "count-unknown" if abs(right - wanted["right"]) == unlabelled else "count-wrong"
        return slug, {"expected": wanted["right"], "got": right}
    if not close(norm, wanted["norm"], 2e-3) and not _after(norm, wanted):
        slug = "gradients-gone" if norm == 0 else "gradients-not-cleared" if number else "norm-wrong"
        return slug, {"expected": wanted["norm"], "got": norm}
    if all(close(p, w, 5e-4) for p, w in zip(seen["weights"], wanted["weights"], strict=True)):
        return "", {}
    slug, length = _weights_slug(seen["weights"], wanted, number)
    return slug, {"length": length, "expected": "", "got": f"length of the gradients {wanted['norm']:.2f}"}


def _loss_slug(loss, wanted, n):
    known = {"unknown-as-class": wanted["all"], "mean-over-all": wanted["sum"] / n}
    slug = mistake_of(loss, known, "", 2e-4) or mistake_of(loss, {"shift-missing": wanted["unshifted"]}, "", 2e-5)
    return slug or ("shift-wrong" if abs(loss - wanted["loss"]) < 0.2 * abs(wanted["loss"]) else "loss-wrong")


def _weights_slug(weights, wanted, number):
    """(slug, length to which the gradients were shortened)."""
    if number:
        return "always-shortened" if number == 1 and wanted["clipped"] == 1.0 else "weights-wrong", 0.0
    # from the common start, one step of plain SGD: the direction and length of the update are known
    start = list(_network().parameters())
    update = torch.cat([(p.detach() - s.detach()).double().flatten() for p, s in zip(weights, start)])
    truth = torch.cat([(w - s.detach().double()).flatten() for w, s in zip(wanted["weights"], start)])
    cosine = F.cosine_similarity(update, truth, dim=0).item()
    ratio = (update.norm() / truth.norm()).item()
    if cosine > 0.9999 and close(ratio, 1 / wanted["clipped"], 1e-2):
        return "never-shortened", 0.0
    if not ratio:
        return "no-update", 0.0
    if cosine > 0.9999 and not close(ratio, 2.9, 1e-2):  # a second update, with momentum, gives 2.9
        return "other-limit", MAX_NORM * ratio
    return "each-shortened" if 0.05 < cosine < 0.9999 else "weights-wrong", 0.0


def _on_gpu(flowing_step):
    """What is read on a GPU; the copies there, but for Python numbers; what is wrong else, in words."""
    seen, away = on_one_gpu(_step_on_gpu, flowing_step) or (None, "")
    yield {"waits": _waits(seen or Seen())}
    # of batches of four images
    batches_there = [copy for copy in seen.there if copy.bytes != copy.item] if seen else []
    error = f"{len(seen.there)} copies were seen, but images and labels make two" if seen else ""
    elsewhere = "own-device" if seen and (seen.other_gpu or len(seen.there) > 1) else "batch-not-moved"
    yield {
        "misplaced": (elsewhere, seen.error) if seen and seen.misplaced else ("", ""),
        "copies": (len(batches_there), len(seen.there)) if seen else (2, 2),
        "moved": ("batch-not-moved", error) if seen and len(batches_there) < 2 else ("", ""),
        "blocking": (sum(not copy.non_blocking for copy in batches_there), len(seen.there) if seen else 2),
        "numbers": len(seen.there) - len(batches_there) if seen else 0, "unpinned": seen.unpinned if seen else [],
        "races": [race.what for race in seen.races] if seen else [], "away": away,
    }  # fmt: skip


def _few(seen, due):
    """A look's `holds`, at (copies of one kind, all copies)."""
    return seen[0] <= due


GPU = [
    Look("nothing is read in the step, even where torch sees a GPU", "waits", ("", ""), _slug, fields=_error),
    Look("two copies to the device, which don't block; everything else is created there", "misplaced", ("", ""), _slug,
         fields=_error),
    Look("", "copies", 2, "made-on-processor", holds=_few, fields=lambda seen, _: {"n": seen[1]}),
    Look("", "moved", ("", ""), _slug, fields=_error),
    Look("", "blocking", 0, "copy-blocks", holds=_few, fields=lambda seen, _: {"blocking": seen[0], "n": seen[1]}),
    Look("", "numbers", 0, "number-copied"),
    Look("", "unpinned", [], "no-longer-pinned", fields=lambda seen, _: {"line": seen[0]}),
    Look("", "races", [], "streams-unordered", fields=lambda seen, _: {"error": seen[0]}),
    Look("", "away", "", "results-elsewhere"),
]  # fmt: skip


def balise_4(flowing_step):
    """Long and short gradients, images without label, batch of one; then a GPU that is not there."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    plain = [(images * 2 * SCALES[0], labels) for images, labels in batches(8, 6, 5)]
    yield from judged(FORM, _formed, flowing_step, plain[0])
    claim = "the loss, the right answers and the length of the gradients are those of hesitant_step"
    yield from _train(claim, flowing_step, plain)
    yield from _train("they are so with images without a label, and where gradients are short", flowing_step, _data())
    yield from judged(GPU, _on_gpu, flowing_step)
