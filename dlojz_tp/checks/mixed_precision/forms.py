"""What both steps of mixed precision share: what they return, where autocast is, how they behave on a device."""

import torch
import torch.nn.functional as F

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.mixed_precision import spies
from dlojz_tp.probes.gpus import on_one_gpu, watched
from dlojz_tp.probes.networks import batches

HINTS = {
    "not-loss-and-logits": "Return two things: the loss and the logits.",
    "number-returned": "You return the {what} as {kind}. Making a Python number waits for the device in every "
                       "step: return the tensor.",
    "graph-kept": "The {what} is still attached to its graph, which keeps every activation of the step. Return it "
                  "detached.",
    "no-autocast": "The forward pass did not run under autocast.",
    "wrong-dtype": "Autocast was on, but in {got_dtype}. The default is bfloat16 on a CPU and float16 on a GPU: name the dtype.",
    "weights-converted": "You converted the weights to {got_dtype}. Autocast makes 16-bit copies for each step: "
                         "the weights themselves stay in float32.",
    "loss-in-half": "You compute the loss in {got_dtype}. Under autocast, cross_entropy computes in float32; "
                    "outside, it uses the dtype of the logits.",
    "forward-twice": "The network ran {n} times in the step. Once is enough: logits and loss come from the same forward pass.",
    "eval-mode": "You switched the model to eval(). A training step must not change the mode.",
    "wrong-logits": "The logits are not the network's output for this batch before the update.",
    "scaled-loss-returned": "You return the scaled loss. Return the true loss, so that it can be logged.",
    "sum-not-mean": "This loss is the sum over the batch. By default, cross_entropy gives the mean.",
    "wrong-loss": "The loss is not the mean cross-entropy of the batch before the update.",
    "no-update": "The weights did not change: the optimizer never stepped.",
    "no-gradients": "There are no gradients at the update. Call backward() before it, and don't call zero_grad() "
                    "in between.",
    "gradients-add-up": "The first step is right, but the next is not: gradients add up until zero_grad() clears them.",
    "wrong-weights": "The weights differ from those of a float64 loop by more than half precision can explain.",
    "step-not-moved": "Images and labels were not both moved to `device`: {error}",
    "device-hard-coded": "You use autocast for {asked!r}, but the device is of type {kind!r}. Use device.type.",
    "no-longer-pinned": "On a GPU, a copy blocks in spite of non_blocking=True{line}: what it copies is no longer "
                        "the loader's pinned memory. Copy first, and convert on the device.",
    "step-blocks": "A copy blocks until it is done. With non_blocking=True (and pinned memory) the CPU goes on "
                   "while the copy runs.",
}


def returned(answer):
    """The loss and the logits, or Wrong."""
    if answer is None:
        raise Wrong("nothing-returned")
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("not-loss-and-logits", expected="(loss, logits)", got=answer)
    for what, value in zip(("loss", "logits"), answer, strict=True):
        if not isinstance(value, torch.Tensor):
            raise Wrong("number-returned", got=value, kind=type(value).__name__, what=what)
        if value.requires_grad:
            raise Wrong("graph-kept", got=f"requires_grad=True, {value.grad_fn}", what=what)
    return answer


def state_of_forward(model, loss, dtype, asked):
    """Autocast on and in `dtype`, weights and gradients in float32, the loss too. asked: its device types in the step."""
    if not model.states:
        raise Wrong("no-autocast", got="the network was not called")
    learning = [state for state in model.states if state[3]] or model.states
    on, found, weights, _ = learning[0]
    now = {p.dtype for p in model.parameters()} | {weights}
    if now != {torch.float32}:
        raise Wrong("weights-converted", got_dtype=_name((now - {torch.float32}).pop()))
    if not on:
        elsewhere = [kind for kind in asked if kind != "cpu"]
        if elsewhere and len(elsewhere) == len(asked):
            raise Wrong("device-hard-coded", asked=elsewhere[0], kind="cpu", got=elsewhere[0])
        raise Wrong("no-autocast", expected=f"autocast on, {_name(dtype)}", got="autocast off")
    if found != dtype:
        raise Wrong("wrong-dtype", got_dtype=_name(found), expected=_name(dtype))
    if len(model.states) > 1:
        raise Wrong("forward-twice", n=len(model.states))
    if not model.training:
        raise Wrong("eval-mode")
    if loss.dtype != torch.float32:
        raise Wrong("loss-in-half", got_dtype=_name(loss.dtype))


def loss_in_float32(losses, dtype):
    """Losses of several steps that are all numbers of `dtype` were computed in it, whatever they were cast to later."""
    if all(torch.equal(loss, loss.to(dtype).to(loss.dtype)) for loss in losses):
        raise Wrong("loss-in-half", got_dtype=_name(dtype), expected="float32, with all its digits", got=losses[0])


def loss_of_logits(loss, logits, labels, dtype):
    """Of these very logits: one that was computed in 16 bits on the way differs by a rounding, another by more or less."""
    due = F.cross_entropy(logits.float(), labels)
    if close(loss, due, 2e-5):
        return
    half = logits.detach().to(dtype)
    single = (F.cross_entropy(half, labels, reduction="none"), F.cross_entropy(half.float(), labels, reduction="none").to(dtype))
    rounded = (F.cross_entropy(half, labels), F.nll_loss(F.log_softmax(half, 1), labels), *(one.float().mean() for one in single))
    near = any(close(loss, one.float(), 2e-5) for one in rounded)
    raise Wrong("loss-in-half" if near else "wrong-loss", got_dtype=_name(dtype), expected=due, got=loss)


def right_logits(logits, images):
    """The logits are those of the network before the update, as half precision gives them."""
    with torch.no_grad():
        wanted = spies.watched_network().double()(images.double())
    if logits.shape != wanted.shape or spies.distance([logits], [wanted]) > 0.05:
        raise Wrong("wrong-logits", expected=wanted.float(), got=logits)


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def runs_on_gpu(step, dtype):
    """A step on a GPU: the device's type and autocast's dtype there, copies, no value read."""
    if not (found := on_one_gpu(_step_on_gpu, step)):
        return
    seen, asked, states = found
    wrong = [kind for kind in asked if kind != "cuda"]
    if wrong:
        raise Wrong("device-hard-coded", asked=wrong[0], kind="cuda", got=wrong[0])
    for on, cast, *_ in states:  # where none is given, it is another one than on a CPU
        if on and cast != dtype:
            raise Wrong("wrong-dtype", got_dtype=_name(cast), expected=_name(dtype), where="a machine with a GPU")
    if seen.reads:
        raise Wrong("hidden-sync", error=", ".join(dict.fromkeys(seen.reads)), where="a machine with a GPU")
    if seen.misplaced:
        raise Wrong("step-not-moved", error=seen.error)
    if len(seen.there) < 2:
        raise Wrong("step-not-moved", error=f"{len(seen.there)} copies were seen, but images and labels make two")
    blocking = sum(not copy.non_blocking for copy in seen.there)
    if blocking:
        raise Wrong("step-blocks", got=f"{blocking} of {len(seen.there)} copies block")
    if seen.unpinned:
        raise Wrong("no-longer-pinned", line=seen.unpinned[0])


def _step_on_gpu(gpu, device, step):
    """What is noted in a step on the GPU, what autocast is asked for, the network's states; from pinned memory."""
    model = spies.watched_network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = (tensor.pin_memory() for tensor in batches(4)[0])
    with spies.autocast_seen() as asked:
        return watched(gpu, step, model, images, labels, optimizer, device), asked, model.states
