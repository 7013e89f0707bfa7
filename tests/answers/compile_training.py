"""Answers to 06_compile, balise 6: a compiled training step."""

import torch

from tests.answers.bank import Bank

bank = Bank("06_compile")

LR = '    for group in optimizer.param_groups:\n        group["lr"] = torch.as_tensor(group["lr"])\n'
FORWARD = "torch.compile(loss_of, backend=backend, fullgraph=True)"
UPDATE = "torch.compile(optimizer.step, backend=backend)"
BODY = "        optimizer.zero_grad(set_to_none=True)\n        loss = forward(*batch)\n"

bank.slip(6, "nothing-returned", ("    return step\n", ""))
bank.slip(6, "nothing-returned", ("        return loss.detach()\n", ""))
bank.slip(6, "no-step", ("    return step\n", "    return torch.tensor(0.0)\n"))
bank.slip(6, "loss-called", ("torch.compile(loss_of,", "torch.compile(loss_of(),"))
bank.slip(6, "step-loss", ("return loss.detach()", "return loss.detach().reshape(1)"))
bank.slip(6, "step-loss", ("return loss.detach()", "return loss.detach(), batch"))
bank.slip(6, "loss-keeps-graph", ("return loss.detach()", "return loss"))
bank.slip(6, "loss-read", ("return loss.detach()", "return loss.item()"))
bank.slip(6, "loss-wrong", ("return loss.detach()", "with torch.no_grad():\n            return forward(*batch)"))
bank.slip(6, "loss-wrong", ("return loss.detach()", "return loss.detach() / len(batch[0])"))
bank.slip(6, "backend-ignored", (FORWARD, "torch.compile(loss_of, fullgraph=True)"))
bank.slip(6, "backend-ignored", (UPDATE, "torch.compile(optimizer.step)"))
bank.slip(6, "nothing-compiled", (FORWARD, "loss_of"), (UPDATE, "optimizer.step"))
bank.slip(6, "nothing-compiled", ("loss = forward(*batch)", "loss = loss_of(*batch)"), ("update()", "optimizer.step()"))
bank.slip(6, "loss-uncompiled", (FORWARD, "loss_of"))
bank.slip(6, "optimizer-uncompiled", (UPDATE, "optimizer.step"))
bank.slip(6, "optimizer-uncompiled", ("        update()", "        optimizer.step()"))
bank.slip(6, "break-tolerated", (", fullgraph=True", ""))
bank.slip(
    6,
    "compiled-anew",
    (
        BODY,
        "        torch._dynamo.reset()\n        forward = torch.compile(loss_of, backend=backend, fullgraph=True)\n"
        + BODY,
    ),
)
bank.slip(6, "lr-recompiles", (LR, ""))
bank.slip(
    6, "lr-recompiles", (LR, '    optimizer.param_groups[0]["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])\n')
)
bank.slip(
    6,
    "lr-recompiles",
    (
        "        update()\n",
        '        for group in optimizer.param_groups:\n            group["lr"] = float(group["lr"])\n        update()\n',
    ),
)
bank.slip(6, "fell-back", (LR, "    torch._dynamo.config.recompile_limit = 1\n"))
bank.slip(
    6,
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
bank.slip(6, "never-cleared", ("        optimizer.zero_grad(set_to_none=True)\n", ""))
bank.slip(6, "no-update", ("        update()\n", ""))
bank.slip(
    6,
    "no-update",
    (
        "        loss.backward()\n        update()\n",
        "        loss.backward()\n        optimizer.zero_grad()\n        update()\n",
    ),
)
bank.slip(6, "two-updates", ("        update()\n", "        update()\n        optimizer.step()\n"))
bank.slip(
    6,
    "other-optimizer",
    (LR, LR + "    mine = torch.optim.SGD([p for g in optimizer.param_groups for p in g['params']], lr=0.1)\n"),
    (UPDATE, "torch.compile(mine.step, backend=backend)"),
)
bank.slip(
    6,
    "weights-differ",
    (
        "        update()\n",
        "        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g['params']], 0.01)\n        update()\n",
    ),
)
bank.slip(6, "weights-differ", ("loss.backward()", "(2 * loss).backward()"))
bank.slip(
    6,
    "buffers-differ",
    (BODY, "        with torch.no_grad(), torch.random.fork_rng():\n            forward(*batch)\n" + BODY),
)
bank.slip(6, "buffers-differ", (BODY, "        with torch.random.fork_rng():\n            loss_of(*batch)\n" + BODY))
bank.slip(
    6,
    "raised",
    (
        "        loss.backward()\n",
        "        with torch.no_grad():\n            loss = forward(*batch)\n        loss.backward()\n",
    ),
)

bank.slip(6, None, ("(set_to_none=True)", "()"))
bank.slip(6, None, ("(set_to_none=True)", "(set_to_none=False)"))
bank.slip(
    6,
    None,
    ("torch.as_tensor(group", "torch.tensor(group"),
    (UPDATE, "torch.compile(optimizer.step, backend=backend, fullgraph=False)"),
)


bank.slip(
    6,
    None,
    (LR, ""),
    ("fullgraph=True", "fullgraph=True, dynamic=True"),
    ("step, backend", "step, dynamic=True, backend"),
)


@bank.right(6)
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


@bank.right(6)
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


@bank.right(6)
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


bank.slip(
    6,
    "optimizer-fullgraph",
    (
        "torch.compile(optimizer.step, backend=backend)",
        "torch.compile(optimizer.step, backend=backend, fullgraph=True)",
    ),
)
bank.slip(6, "step-replaced", ("    update = torch.compile(", "    optimizer.step = update = torch.compile("))
bank.slip(
    6,
    "step-replaced",
    (f"    update = {UPDATE}\n", f"    optimizer.step = {UPDATE}\n"),
    ("        update()\n", "        optimizer.step()\n"),
)
bank.slip(6, "loss-wrong", ("        loss.backward()\n", "        loss = forward(*batch)\n        loss.backward()\n"))
