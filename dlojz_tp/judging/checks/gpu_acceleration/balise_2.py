"""Balise 2: the training step. Its numbers on the CPU, its behaviour on a GPU, which is only pretended."""

import gc
import weakref
from unittest import mock

import torch
import torch.nn.functional as F

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.compare import close, mistake_of
from dlojz_tp.judging.checking.looks import Look, judged, silent, within
from dlojz_tp.judging.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.judging.probes.networks import batches, held_mode, network, plain_steps
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.operations import Operations, in_words, syncs

HINTS = {  # balise 4 gives it, too
    "model-moved": "You move the model inside the function, which costs time in every call. Move it once, before "
    "the loop.",
}

SIZES = 8, 8, 5
TRAINED, LOSSES = plain_steps(network(), batches(*SIZES))
TRUTH = dict(TRAINED.named_parameters())
with torch.no_grad():
    LOGITS = network()(batches(*SIZES)[0][0])


def observe(train_step):
    """Three steps on the CPU, steps of networks in eval mode, a step on a GPU, what a step leaves behind."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    data, model = batches(*SIZES), held_mode(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Operations() as operations:
        answer = _call(train_step, model, data[0], optimizer)
    after = [p.detach().clone() for p in model.parameters()]
    graded = any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    yield {"answer": tuple(answer) if isinstance(answer, list) else answer}
    yield {"modes": all(model.modes), "calls": model.calls, "syncs": syncs(operations)}
    asleep, before = held_mode(network().eval()), dict(network().named_buffers())
    _call(train_step, asleep, data[0], torch.optim.SGD(asleep.parameters(), lr=0.1))
    buffers = any(not torch.equal(value, before[name]) for name, value in asleep.named_buffers())
    yield {"switched": any(asleep.modes) or buffers}
    yield {"stuck": None if _changed(after) else _stuck(train_step, model, data[1], optimizer, graded)}
    for batch in data[1:]:
        _call(train_step, model, batch, optimizer)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    yield {"weights": (weights, _right(weights, TRUTH) or _steps(train_step)[0])}
    asleep = held_mode(network().eval())
    _call(train_step, asleep, data[0], torch.optim.SGD(asleep.parameters(), lr=0.1))
    yield {"learns in eval": _changed(asleep.parameters())}
    yield _observe_gpu(train_step)
    yield {"alive": _alive(train_step)}


def _call(train_step, model, batch, optimizer):
    """A step on the CPU, where cuda() and pin_memory() change nothing: what they do on a GPU is looked at there."""
    try:
        with mock.patch.multiple(torch.Tensor, cuda=lambda x, *_, **__: x, pin_memory=lambda x, *_: x):
            return train_step(model, *batch, optimizer, torch.device("cpu"))
    except (RuntimeError, AssertionError) as error:
        text = str(error).split("\n")[0]
        if any(word in text for word in ("CUDA", "NVIDIA", "cuda", "accelerator")):
            for _ in judged(WAITS, _observe_gpu, train_step):
                pass
            raise Wrong("device-ignored", error=text) from error
        if "modified by an inplace operation" in text:
            raise Wrong("step-before-backward", got=text) from error
        raise


def _changed(weights):
    """Whether weights of the network are no longer as they were made."""
    return not all(torch.equal(a, b) for a, b in zip(weights, network().parameters(), strict=True))


def _right(weights, truth):
    return all(close(weights[name], p, 1e-4) for name, p in truth.items())


def _stuck(train_step, model, batch, optimizer, graded):
    """The hint for weights that a step leaves as they were. graded: whether there are gradients after it."""
    if not graded:
        return "gradients-cleared" if all(_steps(train_step)) else "no-update"
    _call(train_step, model, batch, optimizer)
    return "step-before-backward" if _changed(model.parameters()) else "no-update"


def _steps(train_step):
    """Whether the answer calls step() of its optimizer at all, and whether it makes gradients."""
    model, called, made = network(), [], []
    for p in model.parameters():
        p.register_hook(made.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda *_, **__: called.append(1)
    _call(train_step, model, batches(4)[0], optimizer)
    return bool(called), bool(made)


def _alive(train_step):
    """Whether a token that hangs on the graph of the network's output is there after the step."""
    model, tokens = network(), []

    def watch(_module, _inputs, output):
        if output.requires_grad:
            token = set()
            output.register_hook(lambda _gradient, token=token: None)
            tokens.append(weakref.ref(token))

    model.register_forward_hook(watch)
    _call(train_step, model, batches(4)[0], torch.optim.SGD(model.parameters(), lr=0.1))
    if any(token() is not None for token in tokens):
        gc.collect()
    return any(token() is not None for token in tokens)


def _observe_gpu(train_step):
    seen, moves = on_one_gpu(_step_on_gpu, train_step) or (Seen(), 0)
    blocking = sum(not copy.non_blocking for copy in seen.there)
    return {"gpu": seen, "moves": moves, "copies": len(seen.there), "blocking": blocking, "pinned": seen.pinned,
            "reads": seen.reads, "races": [race.what for race in seen.races], "unpinned": seen.unpinned}  # fmt: skip


def _step_on_gpu(gpu, device, train_step):
    """What is noted during a step on the GPU, and how often the model is moved; from pinned memory, as loaders give it."""
    model = network().to(device)
    model.moves = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = (tensor.pin_memory() for tensor in batches(4)[0])
    return watched(gpu, train_step, model, images, labels, optimizer, device), model.moves


def _is_tensor(seen, _):
    return isinstance(seen[0], torch.Tensor)


def _returned(k, what):
    """Looks at one of the two: a tensor, without its graph."""
    yield Look("", lambda o: (o["answer"][k],), "a tensor", "loss-not-tensor", holds=_is_tensor, fields=_kind)
    yield Look("", lambda o: o["answer"][k].requires_grad, False, "graph-kept", fields={"what": what})


def _kind(seen, _):
    return {"got": seen[0], "kind": type(seen[0]).__name__}


def _loss_hint(seen, due):
    labels = batches(*SIZES)[0][1]
    known = {"sum-not-mean-loss": due * len(labels), "softmax-twice": F.cross_entropy(LOGITS.softmax(dim=1), labels)}
    return mistake_of(seen, known, "wrong-loss", 1e-4)


def _weights_hint(seen, _):
    weights, own_step = seen
    added, _ = plain_steps(network(), batches(*SIZES), add_up=True)
    if _right(weights, dict(added.named_parameters())):
        return "gradients-add-up"
    return "wrong-weights" if own_step else "optimizer-unused"


def _weights_fields(seen, truth):
    name, due = next((name, p) for name, p in truth.items() if not close(seen[0][name], p, 1e-4))
    return {"expected": due.float(), "got": seen[0][name], "where": f"{name} after three steps"}


def _misplaced(o):
    """How an answer fails on another device."""
    slug = "device-ignored" if o["gpu"].other_gpu else "not-moved"
    return o["gpu"].misplaced and (slug, {"error": o["gpu"].error})


WAITS = [
    Look("", "pinned", [], "pinned-in-step", fields=silent),
    Look("", "reads", [], "hidden-sync", fields=lambda seen, _: silent(seen, _) | {
        "error": ", ".join(dict.fromkeys(seen)), "where": "a machine with a GPU"}),
    Look("", lambda o: any(copy.way == "to cpu" for copy in o["gpu"].copies), False, "left-the-device"),
]  # fmt: skip
LOOKS = [
    Look("it returns the loss and the logits, both without their graph", "answer", "(loss, logits)", "no-loss",
         holds=lambda seen, _: isinstance(seen, tuple) and len(seen) == 2),
    *_returned(0, "loss"), *_returned(1, "logits"),
    Look("the loss is the batch's mean cross-entropy, the logits are the network's", "modes", True, "eval-mode"),
    Look("", "calls", 1, "forward-twice", holds=lambda seen, _: seen <= 1, fields="n"),
    Look("", lambda o: o["answer"][0].detach(), torch.tensor(LOSSES[0]), _loss_hint, holds=within(1e-4)),
    Look("", lambda o: o["answer"][1].detach(), LOGITS, "wrong-logits", holds=within(1e-4)),
    Look("", "switched", False, "switched-to-train"),
    Look("after three steps the weights are those of a plain loop in float64", "stuck", None, lambda seen, _: seen,
         fields=silent),
    Look("", "weights", TRUTH, _weights_hint, holds=lambda seen, truth: _right(seen[0], truth), fields=_weights_fields),
    Look("", "learns in eval", True, "no-step-in-eval"),
    Look("nothing waits for the device: no value is read in the step", "syncs", [], "hidden-sync",
         fields=lambda seen, _: {"error": in_words(seen)} | silent(seen, _)),
    *WAITS,
    Look("nothing of the step's graph stays alive afterwards", "alive", False, "graph-kept",
         fields={"what": "loss, or the logits, kept outside the step"}),
    recognised("on another device: images and labels moved once, non-blocking; the model not at all", _misplaced),
    Look("", "moves", 0, "model-moved"),
    Look("", "copies", 2, "moved-twice", holds=lambda seen, _: seen <= 2, fields="n"),
    Look("", "races", [], "streams-unordered", fields=lambda seen, _: {"error": seen[0]} | silent(seen, _)),
    Look("", "blocking", 0, "blocking", fields=lambda seen, _: {"got": f"{seen} copies block"}),
    Look("", "unpinned", [], "no-longer-pinned", fields=lambda seen, _: {"line": seen[0]} | silent(seen, _)),
]  # fmt: skip


def balise_2(train_step):
    yield from judged(LOOKS, observe, train_step)
