"""Answers to 06_compile, balise 6: a compiled training step."""

import torch

from tests.answers.bank import Bank

bank = Bank("06_compile", 6)


LR = '    for group in optimizer.param_groups:\n        group["lr"] = torch.as_tensor(group["lr"])\n'
FORWARD = "torch.compile(loss_of, backend=backend, fullgraph=True)"
UPDATE = "torch.compile(optimizer.step, backend=backend)"
BODY = "        optimizer.zero_grad(set_to_none=True)\n        loss = forward(*batch)\n"

bank.slip("nothing-returned", ("    return step\n", ""))
bank.slip("nothing-returned", ("        return loss.detach()\n", ""))
bank.hint("no-step", "Return the function step, not the result of a step.")
bank.slip("no-step", ("    return step\n", "    return torch.tensor(0.0)\n"), variant=True)
bank.hint("loss-called", "loss_of was called without a batch. Pass the function itself: torch.compile(loss_of, …).")
bank.slip("loss-called", ("torch.compile(loss_of,", "torch.compile(loss_of(),"), variant=True)
bank.hint("step-loss", "step must return the loss, a tensor of shape (); it returned {got}.", edge=True)
bank.slip("step-loss", ("return loss.detach()", "return loss.detach().reshape(1)"))
bank.slip("step-loss", ("return loss.detach()", "return loss.detach(), batch"), variant=True)
bank.hint("loss-keeps-graph", "The loss still has its graph: any code that keeps the loss also keeps the activations. "
          "Return loss.detach().", edge=True)  # fmt: skip
bank.slip("loss-keeps-graph", ("return loss.detach()", "return loss"), variant=True)
bank.hint("loss-read", "step returns a Python number, so it would wait for the GPU in every step. Return a tensor.", edge=True)  # fmt: skip
bank.slip("loss-read", ("return loss.detach()", "return loss.item()"), variant=True)
bank.hint("loss-wrong", "The loss differs from what loss_of gives before the update.")
bank.slip("loss-wrong", ("return loss.detach()", "with torch.no_grad():\n            return forward(*batch)"))
bank.slip("loss-wrong", ("return loss.detach()", "return loss.detach() / len(batch[0])"))
bank.hint("backend-ignored", "torch.compile was called without the given backend, so it used Inductor.", edge=True)
bank.slip("backend-ignored", (FORWARD, "torch.compile(loss_of, fullgraph=True)"))
bank.slip("backend-ignored", (UPDATE, "torch.compile(optimizer.step)"), variant=True)
bank.hint("nothing-compiled", "Nothing was compiled: the backend was never called.")
bank.slip("nothing-compiled", (FORWARD, "loss_of"), (UPDATE, "optimizer.step"))
bank.slip(
    "nothing-compiled",
    ("loss = forward(*batch)", "loss = loss_of(*batch)"),
    ("update()", "optimizer.step()"),
    variant=True,
)
bank.hint("loss-uncompiled", "The loss was not compiled: no graph contains the model.")
bank.slip("loss-uncompiled", (FORWARD, "loss_of"), variant=True)
bank.hint("optimizer-uncompiled", "optimizer.step was not compiled: no graph updates the weights.")
bank.slip("optimizer-uncompiled", (UPDATE, "optimizer.step"))
bank.slip("optimizer-uncompiled", ("        update()", "        optimizer.step()"), variant=True)
bank.hint("break-tolerated", "loss_of has a graph break, but it still ran. fullgraph=True turns the break into an "
          "error that names the line.", edge=True)  # fmt: skip
bank.slip("break-tolerated", (", fullgraph=True", ""), variant=True)
bank.hint("compiled-anew", "Every step compiles again, although nothing has changed. Compile once, outside step.")
bank.slip(
    "compiled-anew",
    (
        BODY,
        "        torch._dynamo.reset()\n        forward = torch.compile(loss_of, backend=backend, fullgraph=True)\n"
        + BODY,
    ),
    variant=True,
)
bank.hint("lr-recompiles", "When the learning rate changed, the update was compiled anew: the rate is a Python number, "
          "and a guard checks it. Make it a tensor, in every group.")  # fmt: skip
bank.slip("lr-recompiles", (LR, ""))
bank.slip(
    "lr-recompiles", (LR, '    optimizer.param_groups[0]["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])\n')
)
bank.slip(
    "lr-recompiles",
    (
        "        update()\n",
        '        for group in optimizer.param_groups:\n            group["lr"] = float(group["lr"])\n        update()\n',
    ),
    variant=True,
)
bank.hint("fell-back", "In the last steps fewer graphs ran than before: a part of the step has gone back to uncompiled "
          "code. Avoid recompilations instead of limiting them.")  # fmt: skip
bank.slip("fell-back", (LR, "    torch._dynamo.config.recompile_limit = 1\n"), variant=True)
bank.hint("lr-no-effect", "The weights follow a constant learning rate: what the scheduler writes into "
          "optimizer.param_groups is not what the update uses.")  # fmt: skip
bank.slip(
    "lr-no-effect",
    (
        "    def step(*batch):",
        '    rates = [group["lr"].clone() for group in optimizer.param_groups]\n\n    def step(*batch):',
    ),
    (
        "        update()\n",
        '        for group, rate in zip(optimizer.param_groups, rates):\n            group["lr"] = rate.clone()\n        update()\n',
    ),
)
bank.hint("never-cleared", "The gradients add up over all steps. Clear them in each step.")
bank.slip("never-cleared", ("        optimizer.zero_grad(set_to_none=True)\n", ""))
bank.hint("no-update", "The weights have not moved: call backward, then the optimizer's step.")
bank.slip("no-update", ("        update()\n", ""))
bank.slip(
    "no-update",
    (
        "        loss.backward()\n        update()\n",
        "        loss.backward()\n        optimizer.zero_grad()\n        update()\n",
    ),
    variant=True,
)
bank.hint("two-updates", "You made two updates in a step.")
bank.slip("two-updates", ("        update()\n", "        update()\n        optimizer.step()\n"))
bank.hint("other-optimizer", "The given optimizer has not taken a step: use it, with its state.")
bank.slip(
    "other-optimizer",
    (LR, LR + "    mine = torch.optim.SGD([p for g in optimizer.param_groups for p in g['params']], lr=0.1)\n"),
    (UPDATE, "torch.compile(mine.step, backend=backend)"),
    variant=True,
)
bank.hint("weights-differ", "After {n} steps the weights differ from those of the uncompiled step.")
bank.slip(
    "weights-differ",
    (
        "        update()\n",
        "        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g['params']], 0.01)\n        update()\n",
    ),
)
bank.slip("weights-differ", ("loss.backward()", "(2 * loss).backward()"), variant=True)
bank.hint("buffers-differ", "The batch norm statistics differ from those of the uncompiled step: forward must run once "
          "a step, in training mode.", edge=True)  # fmt: skip
bank.slip(
    "buffers-differ",
    (BODY, "        with torch.no_grad(), torch.random.fork_rng():\n            forward(*batch)\n" + BODY),
)
bank.slip(
    "buffers-differ",
    (BODY, "        with torch.random.fork_rng():\n            loss_of(*batch)\n" + BODY),
    variant=True,
)
bank.slip(
    "raised",
    (
        "        loss.backward()\n",
        "        with torch.no_grad():\n            loss = forward(*batch)\n        loss.backward()\n",
    ),
)

bank.slip(None, ("(set_to_none=True)", "()"))
bank.slip(None, ("(set_to_none=True)", "(set_to_none=False)"))
bank.slip(
    None,
    ("torch.as_tensor(group", "torch.tensor(group"),
    (UPDATE, "torch.compile(optimizer.step, backend=backend, fullgraph=False)"),
)
bank.slip(
    None,
    (LR, ""),
    ("fullgraph=True", "fullgraph=True, dynamic=True"),
    ("step, backend", "step, dynamic=True, backend"),
)


@bank.right()
def make_compiled_step(loss_of, optimizer, backend="inductor"):
    """Decorators, the update in a function of its own, gradients cleared at the end."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)

    @torch.compile(backend=backend, fullgraph=True)
    def loss(*batch):
        return loss_of(*batch)

    @torch.compile(backend=backend)
    def update():
        optimizer.step()

    def step(*batch):
        value = loss(*batch)
        value.backward()
        update()
        optimizer.zero_grad()
        return value.detach().clone()

    return step


@bank.right()
class make_compiled_step:  # noqa: N801, F811
    """An object that can be called; torch.autograd.grad in place of backward."""

    def __init__(self, loss_of, optimizer, backend="inductor"):
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"])
        self.loss = torch.compile(loss_of, fullgraph=True, backend=backend)
        self.update = torch.compile(lambda: optimizer.step(), backend=backend)

    def __call__(self, *batch):
        loss = self.loss(*batch)
        for p, gradient in zip(self.parameters, torch.autograd.grad(loss, self.parameters), strict=True):
            p.grad = gradient
        self.update()
        return loss.detach()


@bank.right()
def make_compiled_step(loss_of, optimizer, backend="inductor"):  # noqa: F811
    """The learning rate goes through a tensor of its own; the groups keep Python numbers outside of the update."""
    rates = [torch.tensor(float(group["lr"])) for group in optimizer.param_groups]
    forward = torch.compile(loss_of, backend=backend, fullgraph=True)
    update = torch.compile(optimizer.step, backend=backend)

    def step(*batch):
        optimizer.zero_grad()
        loss = forward(*batch)
        loss.backward()
        numbers = [group["lr"] for group in optimizer.param_groups]
        for group, rate, number in zip(optimizer.param_groups, rates, numbers, strict=True):
            group["lr"] = rate.fill_(number)
        update()
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["lr"] = number
        return loss.detach()

    return step


bank.hint("optimizer-fullgraph", "The update fails at a graph break, although the loss has none: PyTorch's optimizers "
          "break the graph in their own step(). Compile it without fullgraph.")  # fmt: skip
bank.slip(
    "optimizer-fullgraph",
    (
        "torch.compile(optimizer.step, backend=backend)",
        "torch.compile(optimizer.step, backend=backend, fullgraph=True)",
    ),
    variant=True,
)
bank.hint("step-replaced", "You replaced optimizer.step, and a scheduler that is created afterwards fails: it needs "
          "the optimizer's own method ({error}). Keep what torch.compile returns under a separate name.", edge=True)  # fmt: skip
bank.slip("step-replaced", ("    update = torch.compile(", "    optimizer.step = update = torch.compile("))
bank.slip(
    "step-replaced",
    (f"    update = {UPDATE}\n", f"    optimizer.step = {UPDATE}\n"),
    ("        update()\n", "        optimizer.step()\n"),
    variant=True,
)
bank.slip(
    "loss-wrong",
    ("        loss.backward()\n", "        loss = forward(*batch)\n        loss.backward()\n"),
    variant=True,
)
CLEAR = "        optimizer.zero_grad("
bank.slip("never-cleared", (CLEAR, "        if not optimizer.state:\n    " + CLEAR), variant=True)
bank.slip("two-updates", ("        update()\n", "        update()\n        update()\n"), variant=True)
RATES = '    rates = [float(group["lr"]) for group in optimizer.param_groups]\n'
SET = '        for group, rate in zip(optimizer.param_groups, rates):\n            group["lr"] = torch.tensor(rate)\n'
bank.slip(
    "lr-no-effect",
    ("    def step(*", RATES + "    def step(*"),
    ("        update()\n", SET + "        update()\n"),
    variant=True,
)
