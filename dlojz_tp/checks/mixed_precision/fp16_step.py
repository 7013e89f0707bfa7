"""Balise 1: the step in float16 with loss scaling. What it does is seen by spies, and by PyTorch's own scaler."""

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.mixed_precision import spies
from dlojz_tp.checks.mixed_precision.forms import (
    loss_in_float32,
    loss_of_logits,
    returned,
    right_logits,
    runs_on_gpu,
    state_of_forward,
)
from dlojz_tp.probes.networks import batches
from dlojz_tp.probes.operations import Operations, in_words, syncs

HINTS = {
    "scaler-unused": "You don't use the given scaler. Call its scale() before backward(), and its step() and "
                     "update() after.",
    "autocast-left-on": "Autocast is still on when the step returns, so everything that follows is rounded, "
                        "including the optimizer. `with` ends it.",
    "loss-not-scaled": "backward() did not start from scaler.scale(loss), so small gradients are still lost.",
    "optimizer-stepped-alone": "You call optimizer.step() outside the scaler, so it also runs when a gradient is "
                               "infinite. Let scaler.step(optimizer) decide.",
    "never-unscaled": "You don't call unscale_ before the clipping. The norm is measured on gradients that are "
                      "{scale:.0f} times too large, so nearly every step is clipped. (If you divide yourself, the "
                      "scaler doesn't know: step() divides again.)",
    "clipped-before-unscale": "You clip the gradients while they are still scaled. Change the order: call unscale_ "
                              "first, so that max_norm limits the true gradients.",
    "clipped-after-step": "The optimizer stepped before the gradients were clipped.",
    "not-clipped": "The gradients are not clipped: at the update their global norm is {norm:.3g}, but max_norm is "
                   "{limit:.3g}.",
    "clipped-by-value": "You cut off each number separately. Clipping by the global norm keeps the direction: "
                        "multiply all numbers by one factor.",
    "clipped-each": "You clip each parameter by its own norm. The global norm is the norm of all gradients as one "
                    "vector.",
    "always-normalised": "The norm is below max_norm here, but you changed the gradients all the same. Never make "
                         "them larger.",
    "max-norm-ignored": "The global norm of the clipped gradients, the root of the sum of all squares, is "
                        "{norm:.3g}. max_norm is an argument, and here it is {limit:.3g}.",
    "other-norm": "You clip by another norm than the root of the sum of all squares, or to a limit derived from "
                  "max_norm instead of max_norm itself. The clipped gradients have the norm {norm:.3g}, and "
                  "max_norm is {limit:.3g}.",
    "wrong-clipping": "The gradients at the update are not those of a float64 loop, clipped by their global norm.",
    "no-scaler-update": "You never call scaler.update(), so the scale can neither shrink after an overflow nor grow.",
    "called-twice": "You call scaler.{name}() {n} times in a step. Call it once: each step() updates the weights, "
                    "and update() ends the step.",
    "loss-factor": "Before the clipping, the gradients are {factor:.3g} times those of the loss. Call backward() "
                   "once, on scaler.scale(loss): the loss is a mean already.",
    "update-too-early": "You call scaler.update() before scaler.step(). update() ends the step, so the scaler "
                        "forgets what unscale_ found.",
    "overflow-applied": "The gradients were infinite, but the weights changed. scaler.step(optimizer) skips such a "
                        "step.",
    "overflow-raises": "An overflow is part of the method, not an error: {error}",
    "scale-not-backed-off": "After an overflow the scale must be smaller. Do you call scaler.update() in every step?",
}


def balise_1(step):
    """A spy for the scaler; float64 for the clipping; PyTorch's scaler for overflows; a GPU for waiting."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    data = batches(8, 8, 5)
    _, _, first = spies.loop(spies.watched_network(), data)
    limit = spies.global_norm(first) / 50  # small, so that clipping value by value shows
    yield "it returns the loss and the logits, both detached from the graph"
    run = _Run(step, limit)
    with Operations() as operations, spies.autocast_seen() as asked:
        loss, logits = run(data[0])
    yield "the forward pass runs under autocast in float16; weights and loss are in float32"
    state_of_forward(run.model, loss, torch.float16, asked)
    _right_loss(loss, data, logits)
    right_logits(logits, data[0][0])
    loss_of_logits(loss, logits, data[0][1], torch.float16)
    yield "scale, backward, unscale_, step, update, in this order"
    _order(run, first)
    yield "between unscale_ and step, the gradients are clipped by their global norm"
    _clipping(run, first, limit)
    _gentle(step, data, first)
    yield "after three steps the weights match those of a float64 loop"
    _weights(step, data, limit)
    yield "with torch.amp.GradScaler, an overflow doesn't change the weights, and the scale shrinks"
    _overflow(step, data)
    yield "nothing waits for the device: no value is read in the step"
    waits = syncs(operations) + ["scaler.get_scale"] * run.scaler.log.count("get_scale")
    if waits:
        raise Wrong("hidden-sync", error=in_words(waits))
    yield "on another device: autocast of its type, images and labels moved once, non-blocking"
    runs_on_gpu(lambda *args: step(*args[:4], spies.SpyScaler(), args[4], 1.0), torch.float16)


class _Run:
    """One network, its optimizer and its spy of a scaler."""

    def __init__(self, step, limit):
        self.step, self.limit = step, limit
        self.model, self.scaler = spies.watched_network(), spies.SpyScaler()
        first, *rest = self.model.parameters()  # two groups: the norm is that of both
        self.optimizer = spies.SpySGD([{"params": [first]}, {"params": rest}], self.scaler)
        self.before = [p.detach().clone() for p in self.model.parameters()]

    def __call__(self, batch):
        try:
            answer = self.step(self.model, *batch, self.optimizer, self.scaler, torch.device("cpu"), self.limit)
            if torch.is_autocast_enabled("cpu"):
                for _ in range(torch.autocast_increment_nesting()):  # as if it had been left
                    torch.autocast_decrement_nesting()
                torch.clear_autocast_cache()
                raise Wrong("autocast-left-on")
        except (RuntimeError, AssertionError) as error:
            if "unscale_() has already been called" in str(error) and "step" in self.scaler.log:
                first = self.scaler.log.count("scale") == 1
                slug = "never-unscaled" if first else "no-scaler-update"
                raise Wrong(slug, scale=spies.SCALE, got=str(error)) from error
            raise
        return returned(answer)


def _right_loss(loss, data, logits):
    _, losses, _ = spies.loop(spies.watched_network(), data[:1])
    wanted = torch.tensor(losses[0])
    if close(loss, wanted, 2e-2):
        return
    slug = "wrong-loss"
    if close(loss, wanted * spies.SCALE, 2e-2):
        slug = "scaled-loss-returned"
    elif close(loss, wanted * len(logits), 2e-2):
        slug = "sum-not-mean"
    raise Wrong(slug, expected=wanted, got=loss)


def _order(run, first):
    log = run.scaler.log
    if not log or not set(log) & {"scale", "unscale_", "step"}:
        raise Wrong("scaler-unused", got="no call of the scaler")
    order = " → ".join(log)
    if run.optimizer.alone:
        raise Wrong("optimizer-stepped-alone", got=order + " and optimizer.step() by itself")
    if "scale" not in log:
        raise Wrong("loss-not-scaled", got=order)
    if "step" not in log:
        raise Wrong("no-update", got=order)
    if not run.optimizer.grads or all(g is None or not g.any() for g in run.optimizer.grads):
        raise Wrong("no-gradients", got=order)
    if "update" not in log:
        raise Wrong("no-scaler-update", got=order)
    for name in ("step", "update"):
        if log.count(name) > 1:
            raise Wrong("called-twice", name=name, n=log.count(name), got=order)
    if log.index("update") < log.index("step"):
        raise Wrong("update-too-early", got=order)
    at_unscale = run.scaler.seen.get("unscale_")
    if at_unscale is not None and spies.global_norm(at_unscale) > 0:
        ratio = spies.global_norm(at_unscale) / spies.global_norm(first)
        if 0.9 < ratio < 1.1:
            raise Wrong("loss-not-scaled", got=f"{order}: the gradients are not {spies.SCALE:.0f} times larger")
        if not 0.9 < ratio / spies.SCALE < 1.1 and _parallel(at_unscale, first) and _unclipped(at_unscale, run.limit):
            raise Wrong("loss-factor", factor=ratio / spies.SCALE, got=order)
        if ratio < 0.9 * spies.SCALE:
            raise Wrong(
                "clipped-before-unscale", got=f"norm {spies.global_norm(at_unscale):.3g} when unscale_ is called"
            )


def _parallel(some, others):
    """Whether gradients have one direction."""
    return spies.distance([g / spies.global_norm(some) for g in some], [g / spies.global_norm(others) for g in others]) < 0.05


def _unclipped(gradients, limit):
    """Whether their norm is neither the limit nor the scaled limit."""
    return all(abs(spies.global_norm(gradients) / one - 1) > 0.1 for one in (limit, limit * spies.SCALE))


def _clipping(run, first, limit):
    got = run.scaler.seen["step"]
    if any(g is None for g in got):
        raise Wrong("no-gradients")
    norm, wanted = spies.global_norm(got), spies.global_norm(first)
    if spies.distance(got, first) < 0.05:
        late = spies.global_norm(spies.gradients(run.optimizer)) < 1.05 * limit
        late = late and any(p.grad is not None for p in run.model.parameters())
        raise Wrong("clipped-after-step" if late else "not-clipped", norm=norm, limit=limit)
    if spies.distance(got, [g * limit / wanted for g in first]) < 0.05:
        return
    if "unscale_" not in run.scaler.log:
        raise Wrong("never-unscaled", scale=spies.SCALE, got=" → ".join(run.scaler.log))
    slug = "wrong-clipping"
    if spies.distance(got, [g.clamp(-limit, limit) for g in first]) < 0.05:
        slug = "clipped-by-value"
    elif spies.distance(got, [g * min(1.0, limit / g.norm().item()) for g in first]) < 0.05:
        slug = "clipped-each"
    elif _parallel(got, first) and abs(norm / limit - 1) > 0.02:
        slug = "other-norm" if norm < limit or _follows(run, norm, limit) else "max-norm-ignored"
    raise Wrong(slug, expected=f"global norm {limit:.4g}", got=f"global norm {norm:.4g}", norm=norm, limit=limit)


def _follows(run, norm, limit):
    """Whether the norm of the clipped gradients becomes another one where max_norm does."""
    other = _Run(run.step, 2 * limit)
    other(batches(8, 8, 5)[0])
    return abs(spies.global_norm(other.scaler.seen["step"]) / norm - 1) > 0.1


def _gentle(step, data, first):
    """A large max_norm: the gradients must be left alone."""
    limit = 50 * spies.global_norm(first)
    run = _Run(step, limit)
    run(data[0])
    got = run.scaler.seen["step"]
    if spies.distance(got, first) < 0.05:
        return
    norm = spies.global_norm(got)
    aligned = _parallel(got, first)
    grown = aligned and norm > spies.global_norm(first)
    slug = "always-normalised" if grown else "max-norm-ignored" if aligned else "wrong-clipping"
    raise Wrong(slug, norm=norm, limit=limit, expected=f"global norm {spies.global_norm(first):.4g}", got=f"{norm:.4g}")


def _weights(step, data, limit):
    if _adds_up(step, data):
        raise Wrong("gradients-add-up", where="the second step")
    run = _Run(step, limit)
    weights, _, _ = spies.loop(spies.watched_network(), data, limit)
    losses = []
    for k, batch in enumerate(data):
        losses.append(run(batch)[0])
        if run.optimizer.steps != k + 1:
            raise Wrong("no-update", got=f"{run.optimizer.steps} updates in {k + 1} steps")
        got = spies.moved(run.model.parameters(), run.before)
        error = spies.distance(got, spies.moved(weights[k], run.before))
        if error > 0.05:
            raise Wrong("wrong-weights", got=f"the update is {100 * error:.0f} % off", where=f"after step {k + 1}")
    loss_in_float32(losses, torch.float16)


def _adds_up(step, data):
    """Whether the gradients of a first step are still in those of a second: without scale and clipping, it shows."""
    run = _Run(step, 1e9)
    run.scaler.value = 1.0
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run(data[0])
    one = run.scaler.seen["step"]
    run(data[0])
    return spies.distance(run.scaler.seen["step"], [2 * g for g in one]) < 0.1


def _overflow(step, data):
    """PyTorch's scaler with a scale that overflows once: skipped, shrunk; then a normal step."""
    model = spies.watched_network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=1000)
    optimizer = spies.SpySGD(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    cpu = torch.device("cpu")
    try:
        step(model, *data[0], optimizer, scaler, cpu, 1e6)
    except (RuntimeError, ValueError, AssertionError, FloatingPointError) as error:
        raise Wrong("overflow-raises", error=str(error).split("\n")[0]) from error
    if optimizer.steps or spies.global_norm(spies.moved(model.parameters(), before)) != 0:
        raise Wrong("overflow-applied", got="an update", expected="the same weights")
    if scaler.get_scale() != 2.0**10:
        raise Wrong("scale-not-backed-off", expected=2.0**10, got=scaler.get_scale())
    step(model, *data[0], optimizer, scaler, cpu, 1e6)
    moved = spies.global_norm(spies.moved(model.parameters(), before))
    if optimizer.steps != 1 or not 0 < moved < float("inf"):
        raise Wrong(
            "overflow-applied", expected="a normal update after the overflow", got=f"the weights moved by {moved:.3g}"
        )
