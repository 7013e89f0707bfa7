"""Balise 1: the step in float16 with loss scaling. What it does is seen by spies, and by PyTorch's own scaler."""

import torch

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.compare import close
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.mixed_precision import forms, spies
from dlojz_tp.judging.checks.mixed_precision.forms import CPU, SIZES, said, tensors
from dlojz_tp.judging.probes.networks import batches
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.measure.operations import Operations, in_words, syncs

_, LOSSES, FIRST = spies.loop(spies.watched_network(), batches(*SIZES))
NORM = spies.global_norm(FIRST)
LIMIT = NORM / 50  # small, so that clipping value by value shows
WEIGHTS, _, _ = spies.loop(spies.watched_network(), batches(*SIZES), LIMIT)


def observe(step):
    """A spy for the scaler, a small and a large max_norm, three steps, PyTorch's scaler for overflows, a GPU."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    data, as_given, left = batches(*SIZES), step, []
    step = _with_autocast_off(step, left)
    run = _Run(step, LIMIT)
    with Operations() as operations, spies.autocast_seen() as asked:
        answer = run(data[0])
    waits = syncs(operations) + ["scaler.get_scale"] * run.scaler.log.count("get_scale")
    yield {"left on": bool(left), "reads": in_words(waits) if waits else ""}
    yield forms.first_step(answer, run.model, asked)
    yield {"log": [*run.scaler.log], "alone": run.optimizer.alone, "unscaled": run.scaler.seen.get("unscale_"),
           "updated": any(g is not None and g.any() for g in run.optimizer.grads or [])}  # fmt: skip
    yield {"clipped": (run.scaler.seen["step"], _limit_hint(run, data[0]))}
    gentle = _Run(step, 50 * NORM)  # the gradients must be left alone
    gentle(data[0])
    yield {"gentle": gentle.scaler.seen["step"]}
    adds_up = _adds_up(step, data)
    yield {"adds up": adds_up}
    run = _Run(forms.clearing(step) if adds_up else step, LIMIT)
    yield forms.trained(run, run.model, run.optimizer, WEIGHTS, 0.05)
    yield from _observe_overflow(run.step, data[0])
    yield {"left on at all": bool(left)}
    yield forms.on_a_gpu(lambda *args: as_given(*args[:4], spies.SpyScaler(), args[4], 1.0))


def _with_autocast_off(step, left):
    """The step, and autocast is off once it has returned. left: gets True where it was on."""

    def off(*args):
        answer = step(*args)
        if torch.is_autocast_enabled("cpu"):
            for _ in range(torch.autocast_increment_nesting()):  # as if it had been left
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled("cpu", False)
            left.append(True)
        return answer

    return off


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
            answer = self.step(self.model, *batch, self.optimizer, self.scaler, CPU, self.limit)
        except (RuntimeError, AssertionError) as error:
            if "unscale_() has already been called" in str(error) and "step" in self.scaler.log:
                first = self.scaler.log.count("scale") == 1
                slug = "never-unscaled" if first else "no-scaler-update"
                raise Wrong(slug, scale=spies.SCALE, got=str(error)) from error
            raise
        return answer


def _parallel(some, others):
    """Whether gradients have one direction."""
    return _near([g / spies.global_norm(some) for g in some], [g / spies.global_norm(others) for g in others])


def _near(gradients, others):
    return spies.distance(gradients, others) < 0.05


def _unclipped(gradients, limit):
    """Whether their norm is neither the limit nor the scaled limit."""
    return all(abs(spies.global_norm(gradients) / one - 1) > 0.1 for one in (limit, limit * spies.SCALE))


def _limit_hint(run, batch):
    """The hint for gradients that were not clipped as they should be."""
    got, log = run.scaler.seen["step"], run.scaler.log
    if any(g is None for g in got):
        return "no-gradients"
    if _near(got, FIRST):
        there = any(p.grad is not None for p in run.model.parameters())
        late = there and spies.global_norm(spies.gradients(run.optimizer)) < 1.05 * LIMIT
        return "clipped-after-step" if late else "not-clipped"
    if _near(got, [g * LIMIT / NORM for g in FIRST]):
        return ""
    if "unscale_" not in log:
        return "never-unscaled"
    if _near(got, [g.clamp(-LIMIT, LIMIT) for g in FIRST]):
        return "clipped-by-value"
    if _near(got, [g * min(1.0, LIMIT / g.norm().item()) for g in FIRST]):
        return "clipped-each"
    norm = spies.global_norm(got)
    if not _parallel(got, FIRST) or abs(norm / LIMIT - 1) <= 0.02:
        return "wrong-clipping"
    if norm < LIMIT:
        return "other-norm"
    other = _Run(run.step, 2 * LIMIT)  # does the norm become another one where max_norm does?
    other(batch)
    return "other-norm" if abs(spies.global_norm(other.scaler.seen["step"]) / norm - 1) > 0.1 else "max-norm-ignored"


def _adds_up(step, data):
    """Whether the gradients of a first step are in those of a second: without scale and clipping, it shows."""
    run = _Run(step, 1e9)
    run.scaler.value = 1.0
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run(data[0])
    one = run.scaler.seen["step"]
    run(data[0])
    return spies.distance(run.scaler.seen["step"], [2 * g for g in one]) < 0.1


def _observe_overflow(step, batch):
    """PyTorch's scaler with a scale that overflows once: skipped, shrunk; then a normal step."""
    model, error = spies.watched_network(), ""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=1000)
    optimizer = spies.SpySGD(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    overflow = next(model.parameters()).register_hook(lambda gradient: gradient * float("inf"))  # in float32, too
    try:
        step(model, *batch, optimizer, scaler, CPU, 1e6)
    except (RuntimeError, ValueError, AssertionError, FloatingPointError) as raised:
        error = str(raised).split("\n")[0] or type(raised).__name__
        scaler.update()
    overflow.remove()
    moved = spies.global_norm(spies.moved(model.parameters(), before))
    yield {"error": error, "applied": bool(optimizer.steps or moved != 0), "scale": scaler.get_scale()}
    step(model, *batch, optimizer, scaler, CPU, 1e6)
    moved = spies.global_norm(spies.moved(model.parameters(), before))
    yield {"after": moved if optimizer.steps == 1 else 0.0}


def _loss(o):
    """The loss, without its scale."""
    loss = tensors(o["answer"])[0]
    return loss / spies.SCALE if close(loss, torch.tensor(LOSSES[0] * spies.SCALE), 2e-2) else loss


def _order(claim):
    """Looks at the calls of the scaler."""
    return [
        Look(claim, lambda o: bool(set(o["log"]) & {"scale", "unscale_", "step"}), True, "scaler-unused"),
        Look("", "alone", 0, "optimizer-stepped-alone"),
        Look("", lambda o: "scale" in o["log"], True, "loss-not-scaled"),
        Look("", lambda o: "step" in o["log"], True, "no-update"),
        Look("", "updated", True, "no-gradients"),
        Look("", lambda o: "update" in o["log"], True, "no-scaler-update"),
        recognised("", _called_twice),
        Look("", lambda o: o["log"].index("update") > o["log"].index("step"), True, "update-too-early"),
        recognised("", _as_unscaled),
    ]  # fmt: skip


def _called_twice(o):
    counts = {name: o["log"].count(name) for name in ("step", "update")}
    return next((("called-twice", {"name": name, "n": n}) for name, n in counts.items() if n > 1), None)


def _as_unscaled(o):
    """The mistake in gradients as they are when unscale_ is called."""
    gradients = o["unscaled"]
    if gradients is None or not spies.global_norm(gradients) > 0:
        return None
    norm = spies.global_norm(gradients)
    ratio = norm / NORM
    about = {"factor": ratio / spies.SCALE, "got": f"norm {norm:.3g}"}
    if 0.9 < ratio < 1.1:
        return "loss-not-scaled", about
    if not 0.9 < ratio / spies.SCALE < 1.1 and _parallel(gradients, FIRST) and _unclipped(gradients, LIMIT):
        return "loss-factor", about
    return ("clipped-before-unscale", about) if ratio < 0.9 * spies.SCALE else None


def _clipped(o):
    got, slug = o["clipped"]
    return slug and (slug, _norms(got, LIMIT, LIMIT))


def _gentle_hint(got, _):
    if not _parallel(got, FIRST):
        return "wrong-clipping"
    return "always-normalised" if spies.global_norm(got) > NORM else "max-norm-ignored"


def _norms(got, wanted, limit):
    norm = spies.global_norm(got) if all(g is not None for g in got) else 0.0
    about = {"norm": norm, "limit": limit, "scale": spies.SCALE}
    return about | {"expected": f"global norm {wanted:.4g}", "got": f"global norm {norm:.4g}"}


LOOKS = [
    Look("it returns the loss and the logits, both detached from the graph", "left on", False, "autocast-left-on"),
    *forms.returned(""),
    *forms.forward("the forward pass runs under autocast in float16; weights and loss are in float32", torch.float16),
    Look("", lambda o: close(tensors(o["answer"])[0], torch.tensor(LOSSES[0] * spies.SCALE), 2e-2), False,
         "scaled-loss-returned"),
    *forms.mean_loss(LOSSES[0], 2e-2, _loss),
    *forms.numbers(torch.float16, _loss),
    *_order("scale, backward, unscale_, step, update, in this order"),
    recognised("between unscale_ and step, the gradients are clipped by their global norm", _clipped),
    Look("", "gentle", FIRST, _gentle_hint, holds=_near, fields=lambda seen, _: _norms(seen, NORM, 50 * NORM)),
    Look("after three steps the weights match those of a float64 loop", "adds up", False, "gradients-add-up"),
    *forms.steps(torch.float16, 0.05),
    Look("with torch.amp.GradScaler, an overflow doesn't change the weights, and the scale shrinks", "error", "",
         "overflow-raises", fields=said(error=str)),
    Look("", "applied", False, "overflow-applied"),
    Look("", "scale", 2.0**10, "scale-not-backed-off", holds=lambda seen, due: seen == due),
    Look("", "after", "", "overflow-applied", holds=lambda seen, _: 0 < seen < float("inf"),
         fields=said(expected="a normal update after the overflow", got="the weights moved by {:.3g}".format)),
    Look("", "left on at all", False, "autocast-left-on"),
    Look("nothing waits for the device: no value is read in the step", "reads", "", "hidden-sync",
         fields=said(error=str)),
    *forms.gpu(torch.float16, "on another device: autocast of its type, images and labels moved once, non-blocking"),
]  # fmt: skip


def balise_1(step):
    yield from judged(LOOKS, observe, step)
