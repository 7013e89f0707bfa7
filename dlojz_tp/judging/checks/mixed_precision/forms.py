"""What both steps of mixed precision share: looks at what they return, at autocast, at several steps, at a GPU."""

from functools import partial
from operator import itemgetter

import torch
import torch.nn.functional as F

from dlojz_tp.judging.checking.compare import close
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.checks.mixed_precision import spies
from dlojz_tp.judging.probes.gpus import Seen, on_one_gpu, watched
from dlojz_tp.judging.probes.networks import batches
from dlojz_tp.judging.probes.shared_looks import recognised

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


SIZES = 8, 8, 5
CPU, first = torch.device("cpu"), itemgetter(0)
with torch.no_grad():
    LOGITS = spies.watched_network().double()(batches(*SIZES)[0][0].double())  # of the first batch, before any update


def name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_step(answer, model, asked) -> dict:
    """What a step on the CPU returned and did. asked: the device types of autocast in it."""
    learning = next((state for state in model.states if state[3]), model.states[0] if model.states else None)
    kinds = {p.dtype for p in model.parameters()} | ({learning[2]} if learning else set())
    return {
        "answer": tuple(answer) if isinstance(answer, list) else answer, "forward": learning,
        "passes": len(model.states), "kinds": sorted(name(kind) for kind in kinds - {torch.float32}),
        "modes": all(model.modes), "asked": [*asked],
    }  # fmt: skip


def tensors(answer):
    """The loss and the logits, without a graph."""
    return [torch.as_tensor(value).detach() for value in answer]


def clearing(step):
    """The step, once the gradients that an earlier one has left are cleared."""

    def cleared(model, images, labels, optimizer, *more):
        optimizer.zero_grad()
        return step(model, images, labels, optimizer, *more)

    return cleared


def trained(call, model, optimizer, weights, most) -> dict:
    """Three steps, up to the first that goes wrong. weights: the true ones after each. most: how far they may be off."""
    before = [p.detach().clone() for p in model.parameters()]
    found = {"updates": [], "graded": True, "off": [0.0], "losses": []}
    for k, batch in enumerate(batches(*SIZES)):
        found["losses"].append(tensors(call(batch))[0])
        found["updates"].append(optimizer.steps)
        if optimizer.steps != k + 1:
            break
        found["graded"] &= all(g is not None for g in optimizer.grads) and spies.global_norm(optimizer.grads) != 0
        found["off"].append(spies.distance(spies.moved(model.parameters(), before), spies.moved(weights[k], before)))
        if found["off"][-1] > most:
            break
    return found


def on_a_gpu(step) -> dict:
    """A step on a GPU: what is noted, what autocast is asked for, its dtypes. The same as due where nothing is known."""
    found = on_one_gpu(_step_on_gpu, step)
    seen, asked, states = found or (Seen(), [], [])
    return {
        "gpu reads": ", ".join(dict.fromkeys(seen.reads)), "misplaced": seen.error * seen.misplaced,
        "unpinned": seen.unpinned, "not cuda": [kind for kind in asked if kind != "cuda"],
        "casts": [name(cast) for on, cast, *_ in states if on],
        "copies": len(seen.there) if found and not seen.misplaced else 2,
        "blocking": sum(not copy.non_blocking for copy in seen.there),
    }  # fmt: skip


def _step_on_gpu(gpu, device, step):
    """What is noted in a step on the GPU, what autocast is asked for, the network's states; from pinned memory."""
    model = spies.watched_network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = (tensor.pin_memory() for tensor in batches(4)[0])
    with spies.autocast_seen() as asked:
        return watched(gpu, step, model, images, labels, optimizer, device), asked, model.states


def said(**fields):
    """A look's `fields`: these alone, each a text or a function of what was seen."""
    return lambda seen, _: {"expected": "", "got": ""} | {
        key: of(seen) if callable(of) else of for key, of in fields.items()}  # fmt: skip


def returned(claim):
    """Looks at what a step returns."""
    looks = [Look(claim, "answer", "(loss, logits)", "not-loss-and-logits",
                  holds=lambda seen, _: isinstance(seen, tuple) and len(seen) == 2)]  # fmt: skip
    for k, what in enumerate(("loss", "logits")):
        looks += [
            recognised("", partial(_number, k, what)),
            Look("", lambda o, k=k: getattr(o["answer"][k], "requires_grad", False), False, "graph-kept",
                 fields=said(what=what)),
        ]  # fmt: skip
    return looks


def _number(k, what, o):
    value = o["answer"][k]
    about = {"got": value, "kind": type(value).__name__, "what": what}
    return None if isinstance(value, torch.Tensor) else ("number-returned", about)


def forward(claim, dtype):
    """Looks at autocast, on and in `dtype`; at weights and gradients in float32, the loss too."""
    return [
        Look(claim, "passes", 1, "no-autocast", holds=lambda seen, _: seen > 0,
             fields=said(got="the network was not called")),
        Look("", "kinds", [], "weights-converted", fields=said(got_dtype=first)),
        recognised("", _autocast_off),
        Look("", lambda o: name(o["forward"][1] if o["forward"][0] else dtype), name(dtype), "wrong-dtype",
             fields=said(got_dtype=str)),
        Look("", "passes", 1, "forward-twice", fields=said(n=int)),
        Look("", "modes", True, "eval-mode"),
        Look("", lambda o: name(tensors(o["answer"])[0].dtype), "float32", "loss-in-half", fields=said(got_dtype=str)),
    ]  # fmt: skip


def _autocast_off(o):
    if o["forward"][0]:
        return None
    asked = o["asked"]
    slug = "device-hard-coded" if asked and "cpu" not in asked else "no-autocast"
    return slug, {"asked": asked[0] if asked else "", "kind": "cpu", "got": "autocast off"}


def loss(o):
    """The loss that the first step returned."""
    return tensors(o["answer"])[0]


def _logits(o):
    return tensors(o["answer"])[1]


def mean_loss(due, most, loss):
    """The look at the loss of the first step. loss(o): the loss, without its scale."""

    def near(loss, wanted):
        return close(loss, torch.tensor(wanted), most)

    def wrong(o):
        got, n = loss(o), len(_logits(o))
        about = {"got": got, "expected": f"{due:.6g}"}
        return None if near(got, due) else ("sum-not-mean" if near(got, due * n) else "wrong-loss", about)

    yield recognised("", wrong)


def numbers(dtype, loss):
    """Looks at the logits, and at the loss of these very logits. loss(o): the loss, without its scale."""
    labels = batches(*SIZES)[0][1]

    def wrong(o):
        """One that was computed in 16 bits on the way differs by a rounding, another by more or less."""
        got, logits = loss(o), _logits(o)
        due = F.cross_entropy(logits.float(), labels)
        if close(got, due, 2e-5):
            return None
        half = logits.to(dtype)
        single = [F.cross_entropy(half, labels, reduction="none"),
                  F.cross_entropy(half.float(), labels, reduction="none").to(dtype)]  # fmt: skip
        rounded = [F.cross_entropy(half, labels), F.nll_loss(F.log_softmax(half, 1), labels),
                   *(one.float().mean() for one in single)]  # fmt: skip
        slug = "loss-in-half" if any(close(got.float(), one.float(), 2e-5) for one in rounded) else "wrong-loss"
        return slug, {"got_dtype": name(dtype), "expected": due, "got": got}

    return [
        Look("", _logits, LOGITS, "wrong-logits",
             holds=lambda seen, due: seen.shape == due.shape and not spies.distance([seen], [due]) > 0.05),
        recognised("", wrong),
    ]  # fmt: skip


def steps(dtype, most, *more):
    """Looks at what `trained` found; more before the last one, at losses of several steps."""

    def far(off, _):
        got = f"the update is {100 * off[-1]:.0f} % off"
        return {"expected": "", "got": got, "where": f"after step {len(off) - 1}"}

    return [
        Look("", "updates", "", "no-update", holds=lambda seen, _: seen == list(range(1, len(seen) + 1)),
             fields=said(got=lambda seen: f"{seen[-1]} updates in {len(seen)} steps")),
        Look("", "off", most, "wrong-weights", holds=lambda off, most: not max(off) > most, fields=far),
        *more,
        # all numbers of `dtype` were computed in it, whatever they were cast to later
        Look("", "losses", "float32, with all its digits", "loss-in-half",
             fields=said(got_dtype=name(dtype), got=first),
             holds=lambda seen, _: not all(torch.equal(loss, loss.to(dtype).to(loss.dtype)) for loss in seen)),
    ]  # fmt: skip


def gpu(dtype, claim=""):
    """Looks at a step on a GPU: the device's type and autocast's dtype there, copies, no value read."""
    there, kind = "a machine with a GPU", name(dtype)
    return [
        Look(claim, "not cuda", [], "device-hard-coded", fields=said(asked=first, kind="cuda")),
        # where no dtype is given, it is another one than on a CPU
        Look("", lambda o: [cast for cast in o["casts"] if cast != kind], [], "wrong-dtype",
             fields=said(got_dtype=first, expected=kind, where=there)),
        Look("", "gpu reads", "", "hidden-sync", fields=said(error=str, where=there)),
        Look("", "misplaced", "", "step-not-moved", fields=said(error=str)),
        Look("", "copies", 2, "step-not-moved", holds=lambda seen, _: seen >= 2,
             fields=said(error="{} copies were seen, but images and labels make two".format)),
        Look("", "blocking", 0, "step-blocks", fields=said(got="{} copies block".format)),
        Look("", "unpinned", [], "no-longer-pinned", fields=said(line=first)),
    ]  # fmt: skip
