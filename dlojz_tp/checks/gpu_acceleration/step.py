"""Balise 2: the training step. Its numbers on the CPU, its behaviour on a GPU, which is only pretended."""

import gc
import weakref

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.probes.networks import batches, network, plain_steps
from dlojz_tp.probes.operations import Operations, in_words, syncs

HINTS = {
    "no-loss": "Return two things: the loss and the logits.",
    "loss-not-tensor": "You return the loss as {kind}. Converting it to a Python number waits for the GPU in every "
                       "step. Return the tensor.",
    "graph-kept": "The {what} still carries its graph. Keeping it would keep every activation of the step in "
                  "memory. Return it detached.",
    "no-update": "The weights did not change. Do you call optimizer.step() after backward()?",
    "gradients-cleared": "The weights did not change, because you cleared the gradients between backward() and step().",
    "gradients-add-up": "The first step is right, but the second is not: gradients add up until zero_grad() clears "
                        "them.",
    "optimizer-unused": "The optimizer that you were given did not take the step. Call its step(). A new optimizer "
                        "in every step, or an update by hand, forgets the momentum.",
    "forward-twice": "You call the network {n} times in one step. Once is enough: the loss and the logits come "
                     "from the same pass.",
    "left-the-device": "You copy a result to the CPU. Leave the loss and the logits on the device: with "
                       "non_blocking=True, you do not know whether the numbers have arrived.",
    "pinned-in-step": "pin_memory() in the step makes one more copy of the batch while everything waits, and it "
                      "fails without a GPU. The loader does this ahead of time with pin_memory=True.",
    "step-before-backward": "The update is one step late: step() runs before backward() has computed the gradients "
                            "of this step.",
    "sum-not-mean-loss": "This loss is the sum over the batch. cross_entropy gives the mean by default.",
    "softmax-twice": "cross_entropy takes logits: it applies log-softmax itself.",
    "wrong-loss": "The loss is not the mean cross-entropy of the batch before the update.",
    "wrong-logits": "The logits are not the network's output for this batch.",
    "wrong-weights": "After three steps the weights differ from those of a plain loop.",
    "model-moved": "You move the model inside the function, which costs time in every call. Move it once, before "
                   "the loop.",
    "not-moved": "You did not move both images and labels to `device`: {error}",
    "device-ignored": "The step names a device itself. Use the one that it is given: {error}",
    "moved-twice": "You make {n} copies to the device in a step. Two are enough: the images once, the labels once.",
    "streams-unordered": "On a GPU, two streams use the same memory and neither waits for the other ({error}). The "
                         "network may read data that has not arrived yet. current_stream().wait_stream(the other) "
                         "sets the order. Without an extra stream, there is nothing to order.",
    "blocking": "A copy makes the CPU wait until it is done. With non_blocking=True (and pinned memory), the CPU "
                "continues during the copy.",
    "no-longer-pinned": "On a GPU, a copy waits in spite of non_blocking=True{line}, because its source is no "
                        "longer the loader's pinned memory. Copy first, then compute on the device.",
    "no-step-in-eval": "A network in eval mode, for example one with frozen batch norms, learned nothing. A step "
                       "must work in both modes.",
    "switched-to-train": "The model was in eval mode, and the step switched it to train(): batch norm learns, "
                         "dropout is on. Leave the choice of the mode to the loop.",
    "eval-mode": "The step switched the model to eval(): batch norm does not learn, dropout is off. A training "
                 "step must not change the mode.",
}


def balise_2(train_step):
    """Three steps against a plain loop in float64; then a step on a GPU, its waits and copies counted."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    data = batches(8, 8, 5)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    yield "it returns the loss and the logits, both without their graph"
    before = [p.detach().clone() for p in model.parameters()]
    logits_wanted = _logits(data[0][0])
    with Operations() as operations:
        answer = _call(train_step, model, *data[0], optimizer, torch.device("cpu"))
    loss, logits = _right_form(answer)
    truth, losses = plain_steps(network(), data)
    yield "the loss is the batch's mean cross-entropy, the logits are the network's"
    if not model.training:
        raise Wrong("eval-mode")
    if model.calls > 1:
        raise Wrong("forward-twice", n=model.calls)
    if not close(loss, torch.tensor(losses[0]), 1e-4):
        n = len(data[0][1])
        soft = torch.nn.functional.cross_entropy(logits_wanted.softmax(dim=1), data[0][1])
        slug = "wrong-loss"
        if close(loss, torch.tensor(losses[0] * n), 1e-4):
            slug = "sum-not-mean-loss"
        elif close(loss, soft, 1e-4):
            slug = "softmax-twice"
        raise Wrong(slug, expected=losses[0], got=loss)
    if not close(logits, logits_wanted, 1e-4):
        raise Wrong("wrong-logits", expected=logits_wanted, got=logits)
    _eval_stays(train_step, data[0])
    yield "after three steps the weights are those of a plain loop in float64"
    _right_weights(train_step, model, optimizer, data, before, truth)
    _eval_learns(train_step, data[0])
    yield "nothing waits for the device: no value is read in the step"
    if syncs(operations):
        raise Wrong("hidden-sync", error=in_words(syncs(operations)))
    on_gpu = on_one_gpu(_step_on_gpu, train_step)
    _no_waits(on_gpu)
    yield "nothing of the step's graph stays alive afterwards"
    _lets_go(train_step)
    yield "on another device: images and labels moved once, non-blocking; the model not at all"
    _right_moves(on_gpu)


def _eval_stays(train_step, batch):
    """Nor is a model in eval mode switched: batch norm would learn."""
    model = network().eval()
    before = {name: value.clone() for name, value in model.named_buffers()}
    _call(train_step, model, *batch, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    if model.training or any(not torch.equal(value, before[name]) for name, value in model.named_buffers()):
        raise Wrong("switched-to-train")


def _eval_learns(train_step, batch):
    model = network().eval()
    _call(train_step, model, *batch, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    if all(torch.equal(a, b) for a, b in zip(model.parameters(), network().parameters(), strict=True)):
        raise Wrong("no-step-in-eval")


def _call(train_step, *args):
    try:
        return train_step(*args)
    except (RuntimeError, AssertionError) as error:
        text = str(error).split("\n")[0]
        if any(word in text for word in ("CUDA", "NVIDIA", "cuda", "accelerator")):
            _no_waits(on_one_gpu(_step_on_gpu, train_step))
            raise Wrong("device-ignored", error=text) from error
        if "modified by an inplace operation" in text:
            raise Wrong("step-before-backward", got=text) from error
        raise


def _logits(images):
    model = network()
    with torch.no_grad():
        return model(images)


def _right_form(answer):
    if answer is None:
        raise Wrong("nothing-returned")
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("no-loss", expected="(loss, logits)", got=answer)
    for what, value in zip(("loss", "logits"), answer, strict=True):
        if not isinstance(value, torch.Tensor):
            raise Wrong("loss-not-tensor", got=value, kind=type(value).__name__)
        if value.requires_grad:
            raise Wrong("graph-kept", got="requires_grad=True", what=what)
    return answer


def _right_weights(train_step, model, optimizer, data, before, truth):
    after_one = [p.detach().clone() for p in model.parameters()]
    if all(torch.equal(a, b) for a, b in zip(after_one, before, strict=True)):
        if any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()):
            _call(train_step, model, *data[1], optimizer, torch.device("cpu"))
            late = any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
            raise Wrong("step-before-backward" if late else "no-update")
        raise Wrong("gradients-cleared" if all(_steps(train_step)) else "no-update")
    for images, labels in data[1:]:
        _call(train_step, model, images, labels, optimizer, torch.device("cpu"))
    for (name, got), wanted in zip(model.named_parameters(), truth.parameters(), strict=True):
        if not close(got, wanted, 1e-4):
            added, _ = plain_steps(network(), data, add_up=True)
            slug = "wrong-weights" if _steps(train_step)[0] else "optimizer-unused"
            if all(close(a, b, 1e-4) for a, b in zip(model.parameters(), added.parameters(), strict=True)):
                slug = "gradients-add-up"
            raise Wrong(slug, expected=wanted.float(), got=got, where=f"{name} after three steps")


def _steps(train_step):
    """Whether the answer calls step() of its optimizer at all, and whether it makes gradients."""
    model, called, made = network(), [], []
    for p in model.parameters():
        p.register_hook(made.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda *_, **__: called.append(1)
    train_step(model, *batches(4)[0], optimizer, torch.device("cpu"))
    return bool(called), bool(made)


def _lets_go(train_step):
    """A token hangs on the graph of the network's output: it must be gone after the step."""
    model, tokens = network(), []

    def watch(_module, _inputs, output):
        if output.requires_grad:
            token = set()
            output.register_hook(lambda _gradient, token=token: None)
            tokens.append(weakref.ref(token))

    model.register_forward_hook(watch)
    train_step(model, *batches(4)[0], torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    if any(token() is not None for token in tokens):
        gc.collect()
    if any(token() is not None for token in tokens):
        raise Wrong("graph-kept", what="loss, or the logits, kept outside the step")


def _step_on_gpu(gpu, device, train_step):
    """What is noted during a step on the GPU, and how often the model is moved; from pinned memory, as loaders give it."""
    model = network().to(device)
    model.moves = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = (tensor.pin_memory() for tensor in batches(4)[0])
    return watched(gpu, train_step, model, images, labels, optimizer, device), model.moves


def _no_waits(on_gpu):
    seen, _ = on_gpu or (Seen(), 0)
    if seen.pinned:
        raise Wrong("pinned-in-step")
    if seen.reads:
        raise Wrong("hidden-sync", error=", ".join(dict.fromkeys(seen.reads)), where="a machine with a GPU")
    if any(copy.way == "to cpu" for copy in seen.copies):
        raise Wrong("left-the-device")


def _right_moves(on_gpu):
    if not on_gpu:
        return
    seen, moves = on_gpu
    if seen.misplaced:
        raise Wrong("device-ignored" if seen.other_gpu else "not-moved", error=seen.error)
    if moves:
        raise Wrong("model-moved", expected="0 moves in a step", got=f"{moves}")
    if len(seen.there) > 2:
        raise Wrong("moved-twice", n=len(seen.there))
    if seen.races:
        raise Wrong("streams-unordered", error=seen.races[0].what)
    blocking = sum(not copy.non_blocking for copy in seen.there)
    if blocking:
        raise Wrong("blocking", got=f"{blocking} of {len(seen.there)} copies block")
    if seen.unpinned:
        raise Wrong("no-longer-pinned", line=seen.unpinned[0])
