"""Answers to balise 1 of 02_mixed_precision: the step in float16."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision", 1)


def moved(images, labels, device):
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def forward(model, images, labels, device, dtype=torch.float16):
    with torch.autocast(device.type, dtype=dtype):
        logits = model(images)
        return F.cross_entropy(logits, labels), logits


def variant(
    zero=True,
    dtype=torch.float16,
    unscale="before",
    clip="global",
    scaled=True,
    update="after",
    step="scaler",
    after=None,
):
    """A step with one thing done otherwise."""

    def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
        images, labels = moved(images, labels, device)
        if zero:
            optimizer.zero_grad()
        loss, logits = forward(model, images, labels, device, dtype)
        (scaler.scale(loss) if scaled else loss).backward()
        if update == "early":
            scaler.update()
        parameters = list(model.parameters())
        if unscale == "before":
            scaler.unscale_(optimizer)
        if clip == "global":
            clip_grad_norm_(parameters, max_norm)
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, max_norm)
        elif clip == "each":
            for p in parameters:
                clip_grad_norm_([p], max_norm)
        elif clip == "one":
            clip_grad_norm_(parameters, 1.0)
        elif clip == "fixed":
            clip_grad_norm_(parameters, 0.2)
        elif clip == "always":
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            for p in parameters:
                p.grad.mul_(max_norm / norm)
        elif clip == "root":
            norm = torch.stack([p.grad.norm() for p in parameters]).sum()
            for p in parameters:
                p.grad.mul_((max_norm / norm).clamp(max=1.0))
        if unscale == "after":
            scaler.unscale_(optimizer)
        if step == "scaler":
            scaler.step(optimizer)
        elif step == "alone":
            optimizer.step()
        if clip == "late":
            clip_grad_norm_(parameters, max_norm)
        if update == "after":
            scaler.update()
        if after:
            return after(loss, logits, scaler)
        return loss.detach(), logits.detach()

    return fp16_step


# ---------------------------------------------------------------- right


@bank.right()
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    """Backward under autocast, loss outside of it in float32, the clipping by hand."""
    images, labels = moved(images, labels, device)
    for p in model.parameters():
        p.grad = None
    with torch.amp.autocast(device_type=device.type, dtype=torch.float16):
        logits = model(images)
    loss = nn.CrossEntropyLoss()(logits.float(), labels)
    with torch.autocast(device.type, torch.float16):
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(factor)
    scaler.step(optimizer)
    scaler.update()
    return [loss.detach(), logits.detach().float()]


@bank.right()
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    """Gradients asked for one by one; cleared at the end; the optimizer's own list of parameters."""
    x = torch.empty_like(images, device=device).copy_(images, non_blocking=True)
    y = torch.empty_like(labels, device=device).copy_(labels, non_blocking=True)
    loss, logits = forward(model, x, y, device)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p, g in zip(parameters, torch.autograd.grad(scaler.scale(loss), parameters), strict=True):
        p.grad = g
    scaler.unscale_(optimizer)
    clip_grad_norm_(parameters, max_norm=max_norm, foreach=False)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        return loss.clone(), logits.clone()


@bank.right()
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    """Autocast as a decorator; gradients set to zero, not to None; norm and clipping apart."""
    images, labels = moved(images, labels, device)
    optimizer.zero_grad(set_to_none=False)

    @torch.autocast(device.type, dtype=torch.float16)
    def run():
        logits = model(images)
        return F.nll_loss(F.log_softmax(logits.float(), dim=1), labels), logits

    loss, logits = run()
    torch.autograd.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.data, logits.data


@bank.right()
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    """The images are cast in the copy; torch.where instead of clamp; loss under autocast."""
    images = images.to(device, torch.float16, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    model.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grads = [p.grad for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    torch._foreach_mul_(grads, torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm)))
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


# ---------------------------------------------------------------- wrong: what comes back


bank.wrong("nothing-returned")(variant(after=lambda loss, logits, scaler: None))
bank.wrong("not-loss-and-logits")(variant(after=lambda loss, logits, scaler: loss.detach()))
bank.wrong("number-returned")(variant(after=lambda loss, logits, scaler: (loss.item(), logits.detach())))
bank.wrong("graph-kept")(variant(after=lambda loss, logits, scaler: (loss, logits.detach())))
bank.wrong("graph-kept")(variant(after=lambda loss, logits, scaler: (loss.detach(), logits)))
bank.wrong("scaled-loss-returned")(
    variant(after=lambda loss, logits, scaler: (scaler.scale(loss).detach(), logits.detach()))
)
bank.wrong("wrong-logits")(variant(after=lambda loss, logits, scaler: (loss.detach(), logits.detach().softmax(1))))
bank.wrong("hidden-sync")(
    variant(
        after=lambda loss, logits, scaler: (loss.detach() / scaler.get_scale() * scaler.get_scale(), logits.detach())
    )
)

# ---------------------------------------------------------------- wrong: the order

bank.hint("clipped-before-unscale", "You clip the gradients while they are still scaled. Change the order: call "
          "unscale_ first, so that max_norm limits the true gradients.")  # fmt: skip
bank.wrong("clipped-before-unscale", variant=True)(variant(unscale="after"))
bank.hint("never-unscaled", "You don't call unscale_ before the clipping. The norm is measured on gradients that "
          "are {scale:.0f} times too large, so nearly every step is clipped. (If you divide yourself, the scaler "
          "doesn't know: step() divides again.)")  # fmt: skip
bank.wrong("never-unscaled")(variant(unscale="never"))
bank.hint("not-clipped", "The gradients are not clipped: at the update their global norm is {norm:.3g}, but "
          "max_norm is {limit:.3g}.")  # fmt: skip
bank.wrong("not-clipped")(variant(unscale="never", clip="none"))
bank.wrong("not-clipped", variant=True)(variant(clip="none"))
bank.hint("clipped-after-step", "The optimizer stepped before the gradients were clipped.")
bank.wrong("clipped-after-step", variant=True)(variant(clip="late"))
bank.hint("clipped-by-value", "You cut off each number separately. Clipping by the global norm keeps the "
          "direction: multiply all numbers by one factor.")  # fmt: skip
bank.wrong("clipped-by-value", variant=True)(variant(clip="value"))
bank.hint("clipped-each", "You clip each parameter by its own norm. The global norm is the norm of all gradients "
          "as one vector.")  # fmt: skip
bank.wrong("clipped-each", variant=True)(variant(clip="each"))
bank.hint("always-normalised", "The norm is below max_norm here, but you changed the gradients all the same. Never "
          "make them larger.")  # fmt: skip
bank.wrong("always-normalised", variant=True)(variant(clip="always"))
bank.hint("max-norm-ignored", "The global norm of the clipped gradients, the root of the sum of all squares, is "
          "{norm:.3g}. max_norm is an argument, and here it is {limit:.3g}.")  # fmt: skip
bank.wrong("max-norm-ignored")(variant(clip="fixed"))
bank.wrong("max-norm-ignored", variant=True)(variant(clip="one"))
bank.hint("other-norm", "You clip by another norm than the root of the sum of all squares, or to a limit derived "
          "from max_norm instead of max_norm itself. The clipped gradients have the norm {norm:.3g}, and max_norm "
          "is {limit:.3g}.")  # fmt: skip
bank.wrong("other-norm")(variant(clip="root"))
bank.hint("wrong-clipping", "The gradients at the update are not those of a float64 loop, clipped by their global "
          "norm.")  # fmt: skip
bank.slip("wrong-clipping", ("    nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n", "    for group in optimizer.param_groups:\n        nn.utils.clip_grad_norm_(group['params'], max_norm)\n"))  # fmt: skip
bank.hint("loss-not-scaled", "backward() did not start from scaler.scale(loss), so small gradients are still lost.")
bank.wrong("loss-not-scaled")(variant(scaled=False))
bank.hint("no-scaler-update", "You never call scaler.update(), so the scale can neither shrink after an overflow "
          "nor grow.")  # fmt: skip
bank.wrong("no-scaler-update", variant=True)(variant(update="never"))
bank.hint("update-too-early", "You call scaler.update() before scaler.step(). update() ends the step, so the "
          "scaler forgets what unscale_ found.")  # fmt: skip
bank.wrong("update-too-early", variant=True)(variant(update="early"))
bank.hint("optimizer-stepped-alone", "You call optimizer.step() outside the scaler, so it also runs when a "
          "gradient is infinite. Let scaler.step(optimizer) decide.")  # fmt: skip
bank.wrong("optimizer-stepped-alone")(variant(step="alone"))
bank.wrong("no-update")(variant(step="never"))
bank.wrong("gradients-add-up")(variant(zero=False))
bank.wrong("wrong-dtype")(variant(dtype=torch.bfloat16))
bank.wrong("wrong-dtype")(variant(dtype=None))


@bank.wrong("loss-not-scaled", variant=True)
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss)  # its result is not used
    loss.backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("optimizer-stepped-alone", variant=True)
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


bank.hint("scaler-unused", "You don't use the given scaler. Call its scale() before backward(), and its step() and "
          "update() after.")  # fmt: skip


@bank.wrong("scaler-unused")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    loss.backward()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach(), logits.detach()


@bank.wrong("scaler-unused", variant=True)
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("no-gradients")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    optimizer.zero_grad()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("no-autocast")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    with torch.autocast(device.type, dtype=torch.float16):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("weights-converted")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    model.half()
    optimizer.zero_grad()
    logits = model(images.half())
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("loss-in-half")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        logits = model(images)
    loss = F.cross_entropy(logits, labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("sum-not-mean")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("wrong-loss")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        logits = model(images)
        loss = F.cross_entropy(logits.softmax(dim=1), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("wrong-clipping", variant=True)
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(list(model.parameters())[:1], max_norm)  # the first parameter alone
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("wrong-weights")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():  # a weight decay that nobody asked for
        for p in model.parameters():
            p.mul_(0.98)
    return loss.detach(), logits.detach()


@bank.wrong("hidden-sync")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    if norm > max_norm:
        for p in model.parameters():
            p.grad.mul_(max_norm / norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("hidden-sync")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    if torch.isfinite(loss):
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


bank.hint("overflow-applied", "The gradients were infinite, but the weights changed. scaler.step(optimizer) skips "
          "such a step.")  # fmt: skip


@bank.wrong("overflow-applied", variant=True)
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    for p in model.parameters():  # "so that no step is lost"
        torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


bank.hint("scale-not-backed-off", "After an overflow the scale must be smaller. Do you call scaler.update() in "
          "every step?")  # fmt: skip


@bank.wrong("scale-not-backed-off", variant=True)
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update(2.0**16)  # a scale of one's own
    return loss.detach(), logits.detach()


@bank.wrong("device-hard-coded")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("device-hard-coded")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(str(device), dtype=torch.float16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("device-hard-coded")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):  # on a CPU: off
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("step-not-moved")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    return fp16_rest(model, images, labels, optimizer, scaler, device, max_norm)


@bank.wrong("step-blocks")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    return fp16_rest(model, images.to(device), labels.to(device), optimizer, scaler, device, max_norm)


def fp16_rest(model, images, labels, optimizer, scaler, device, max_norm):
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("forward-twice")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    loss, _ = fp16_rest(model, images, labels, optimizer, scaler, device, max_norm)
    with torch.no_grad():
        return loss, model(images)


@bank.wrong("no-autocast")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
        logits = model(images)
    loss = F.cross_entropy(model(images), labels)  # this one learns, in float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits


@bank.wrong("eval-mode")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    return fp16_rest(model.eval(), images, labels, optimizer, scaler, device, max_norm)


bank.hint("overflow-raises", "An overflow is part of the method, not an error: {error}", edge=True)


@bank.wrong("overflow-raises")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    loss, logits = forward(model, images, labels, device)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


@bank.wrong("loss-in-half")
def fp16_step(model, images, labels, optimizer, scaler, device, max_norm):
    """Logits in float16 meet the loss outside autocast; its result is widened."""
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        logits = model(images)
    loss = F.cross_entropy(logits, labels).float()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), logits.detach()


bank.slip("no-longer-pinned", ("images = images.to(device", "images = images.half().to(device"))
bank.slip(
    "no-longer-pinned",
    ("labels = labels.to(device", "labels = labels.contiguous().clone().to(device"),
    variant=True,
)
bank.slip(
    "hidden-sync",
    ("    scaler.update()\n", "    scaler.update()\n    if loss.is_cuda and loss.isnan():\n        raise ValueError\n"),
)

STEP, UPDATE = "    scaler.step(optimizer)\n", "    scaler.update()\n"
CLIP, UNSCALE = "    nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n", "    scaler.unscale_(optimizer)\n"
BACKWARD = "    scaler.scale(loss).backward()\n"
bank.slip("overflow-raises", ("max_norm)\n", "max_norm, error_if_nonfinite=True)\n"), variant=True)
bank.slip("never-unscaled", (UNSCALE, ""), (STEP, STEP + UNSCALE), variant=True)
bank.hint("called-twice", "You call scaler.{name}() {n} times in a step. Call it once: each step() updates the "
          "weights, and update() ends the step.")  # fmt: skip
bank.slip("called-twice", (UPDATE, UPDATE + UPDATE))
bank.slip("called-twice", (STEP, STEP + STEP), variant=True)
bank.hint("loss-factor", "Before the clipping, the gradients are {factor:.3g} times those of the loss. Call "
          "backward() once, on scaler.scale(loss): the loss is a mean already.")  # fmt: skip
bank.slip("loss-factor", (BACKWARD, BACKWARD.replace("loss", "loss / len(images)")))
bank.slip("loss-factor", (BACKWARD, BACKWARD.replace("loss", "loss * len(images)")))
bank.slip("loss-factor", (BACKWARD, BACKWARD.replace("()\n", "(retain_graph=True)\n") + BACKWARD), variant=True)
bank.slip("other-norm", ("model.parameters(), max_norm)", "model.parameters(), max_norm, norm_type=1)"))
bank.slip("other-norm", ("model.parameters(), max_norm)", "model.parameters(), max_norm**0.5)"), variant=True)

FORWARD = """    with torch.autocast(device.type, dtype=torch.float16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
"""
bank.hint("autocast-left-on", "Autocast is still on when the step returns, so everything that follows is rounded, "
          "including the optimizer. `with` ends it.", edge=True)  # fmt: skip
bank.slip(
    "autocast-left-on",
    (FORWARD, FORWARD.replace("with ", "").replace("16):", "16).__enter__()").replace("        ", "    ")),
    variant=True,
)

bank.edge("graph-kept", "number-returned", "hidden-sync", "device-hard-coded", "step-not-moved", "step-blocks")
bank.edge("no-longer-pinned", "eval-mode", "scaled-loss-returned", "loss-in-half")
bank.edge("gradients-add-up")
