"""Answers to 15_pipeline_under_the_hood: asynchronous stages."""

import copy

import torch

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood")


# --- right ones ---


@bank.right(9)
class AsyncStage:
    """A copy of the whole module for each micro-batch; buffers are shared by all copies."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.flying, self.history = stage, optimizer, {}, []

    def forward(self, k, x):
        x = x.detach().clone().requires_grad_()
        twin = copy.deepcopy(self.stage, {id(b): b for b in self.stage.buffers()})
        y = twin(x)
        self.flying[k] = twin, x, y, len(self.history)
        return y.detach()

    def backward(self, k, gradient):
        twin, x, y, version = self.flying.pop(k)
        twin.zero_grad()
        torch.autograd.backward(y, gradient)
        for mine, old in zip(self.stage.parameters(), twin.parameters()):
            mine.grad = None if old.grad is None else old.grad.clone()
        self.optimizer.step()
        self.history.append([k, version, len(self.history)])
        return x.grad


@bank.right(9)
class AsyncStage:
    """One copy for each version, shared by the micro-batches that use it; backward runs forward again with it."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.history = stage, optimizer, []
        self.version, self.versions, self.inputs = 0, {}, {}

    def forward(self, k, x):
        if self.version not in self.versions:
            self.versions[self.version] = [p.detach().clone() for p in self.stage.parameters()]
        self.inputs[k] = self.version, x
        with torch.no_grad():
            return self.stage(x)

    def swap(self, values):
        for p, value in zip(self.stage.parameters(), values):
            p.data = value

    def backward(self, k, gradient):
        version, x = self.inputs.pop(k)
        newest = [p.data for p in self.stage.parameters()]
        self.swap(self.versions[version])
        x = x.detach().requires_grad_()
        self.optimizer.zero_grad()
        self.stage(x).backward(gradient)
        self.swap(newest)
        self.optimizer.step()
        self.history.append((k, version, self.version))
        self.version += 1
        for old in set(self.versions) - {v for v, _ in self.inputs.values()} - {self.version}:
            del self.versions[old]
        return x.grad


@bank.right(9)
class AsyncStage:
    """Gradients through torch.autograd.grad, the stash a list of the micro-batches in flight."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.history, self.stash = stage, optimizer, [], []

    def forward(self, k, x):
        names = [name for name, _ in self.stage.named_parameters()]
        values = [p.detach().clone().requires_grad_() for p in self.stage.parameters()]
        x = x.detach().requires_grad_()
        y = torch.func.functional_call(self.stage, dict(zip(names, values)), x)
        self.stash.append((k, len(self.history), values, x, y))
        return y.detach()

    def backward(self, k, gradient):
        number = next(i for i, entry in enumerate(self.stash) if entry[0] == k)
        _, version, values, x, y = self.stash.pop(number)
        of_x, *found = torch.autograd.grad(y, [x, *values], gradient, allow_unused=True)
        for p, g in zip(self.stage.parameters(), found):
            p.grad = g if p.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append((k, version, len(self.history)))
        return of_x


COPIES = "{name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in parameters}"
TAKE = "version, weights, x, y = self.stash.pop(k)"
GIVE = """        for name, p in self.stage.named_parameters():
            p.grad = weights[name].grad
"""
STEP = "        self.optimizer.step()\n"
bank.slip(9, None, (".detach().clone()", ".clone().detach()"))
bank.slip(
    9, None, ("        y.backward(gradient)\n", "        self.optimizer.zero_grad()\n        y.backward(gradient)\n")
)
bank.slip(9, None, ("return x.grad\n", "return x.grad if gradient.dim() else None\n"))

OWN_BUFFERS = "        buffers = {name: b.clone() for name, b in self.stage.named_buffers()}\n"
CALL = "        y = torch.func.functional_call(self.stage, weights, (x,))\n"
bank.slip(9, None, (CALL, OWN_BUFFERS + CALL.replace("weights,", "weights | buffers,") + "        for name, b in self.stage.named_buffers():\n"
          "            b.copy_(buffers[name])\n"))  # fmt: skip

# --- wrong ones ---

bank.slip(9, "statistics-lost", (CALL, OWN_BUFFERS + CALL.replace("weights,", "weights | buffers,")))


@bank.wrong(9, "statistics-lost")
class AsyncStage:
    """A copy of the whole module for each micro-batch."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.flying, self.history = stage, optimizer, {}, []

    def forward(self, k, x):
        x = x.detach().clone().requires_grad_()
        twin = copy.deepcopy(self.stage)
        y = twin(x)
        self.flying[k] = twin, x, y, len(self.history)
        return y.detach()

    def backward(self, k, gradient):
        twin, x, y, version = self.flying.pop(k)
        twin.zero_grad()
        torch.autograd.backward(y, gradient)
        for mine, old in zip(self.stage.parameters(), twin.parameters()):
            mine.grad = None if old.grad is None else old.grad.clone()
        self.optimizer.step()
        self.history.append([k, version, len(self.history)])
        return x.grad


bank.slip(9, "collected", (GIVE, GIVE.replace("            p.grad", "            if weights[name].grad is not None:\n                p.grad")))
bank.slip(9, "collected", (GIVE, "        used = {n: w.grad for n, w in weights.items() if w.grad is not None}\n        "
          "for name, gradient in used.items():\n            self.stage.get_parameter(name).grad = gradient\n"))  # fmt: skip

PLAIN = ("y = torch.func.functional_call(self.stage, weights, (x,))", "y = self.stage(x)")
bank.slip(9, "changed-in-place", PLAIN, (GIVE, ""), (STEP, STEP + "        self.optimizer.zero_grad()\n"))
bank.slip(9, "changed-in-place", (".detach().clone()", ".detach()"))
bank.slip(9, "changed-in-place", (COPIES, "dict(self.stage.named_parameters())"), (GIVE, ""),
          (STEP, STEP + "        self.optimizer.zero_grad()\n"))  # fmt: skip


@bank.wrong(9, "newest-weights")
class AsyncStage:
    """Keeps the input, and runs forward again with what the weights are by then."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.inputs, self.history = stage, optimizer, {}, []

    def forward(self, k, x):
        self.inputs[k] = x
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x = self.inputs.pop(k).detach().requires_grad_()
        self.optimizer.zero_grad()
        self.stage(x).backward(gradient)
        self.optimizer.step()
        self.history.append((k, 0, len(self.history)))
        return x.grad


bank.slip(9, "newest-weights", ("        y.backward(gradient)\n", "        for name, p in self.stage.named_parameters():\n            "
          "weights[name].data.copy_(p.data)\n        x.grad = None\n        "
          "torch.func.functional_call(self.stage, weights, (x,)).backward(gradient)\n"))  # fmt: skip


@bank.wrong(9, "stashed-references")
class AsyncStage:
    """Changes the weights behind autograd's back: saved activations are old, saved weights are new."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.stash, self.history = stage, optimizer, {}, []

    def forward(self, k, x):
        x = x.detach().requires_grad_()
        y = self.stage(x)
        self.stash[k] = x, y
        return y.detach()

    def backward(self, k, gradient):
        x, y = self.stash.pop(k)
        self.optimizer.zero_grad()
        y.backward(gradient)
        for p in self.stage.parameters():
            p.data -= self.optimizer.param_groups[0]["lr"] * p.grad
        self.history.append((k, 0, len(self.history)))
        return x.grad


@bank.wrong(9, "newest-weights")
class AsyncStage:
    """The stash is a state_dict: references, which the updates change."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.stash, self.history = stage, optimizer, {}, []

    def forward(self, k, x):
        self.stash[k] = x, dict(self.stage.state_dict())
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x, weights = self.stash.pop(k)
        x = x.detach().requires_grad_()
        self.optimizer.zero_grad()
        torch.func.functional_call(self.stage, {n: w.requires_grad_() for n, w in weights.items()}, x).backward(
            gradient
        )
        for name, p in self.stage.named_parameters():
            p.grad = weights[name].grad
        self.optimizer.step()
        self.history.append((k, 0, len(self.history)))
        return x.grad


bank.slip(9, "first-version", ("weights = {", "self.first = getattr(self, 'first', None) or {"),
          ("        y = torch.func", "        weights = {n: w.detach().clone().requires_grad_() for n, w in self.first.items()}\n"
           "        y = torch.func"))  # fmt: skip
bank.slip(9, "rolled-back", (STEP, "        with torch.no_grad():\n            for name, p in self.stage.named_parameters():\n"
          "                p.copy_(weights[name])\n" + STEP))  # fmt: skip
bank.slip(9, "no-update", (STEP, ""))
bank.slip(9, "no-update", (GIVE, ""))
bank.slip(9, "no-update", (STEP, "        self.optimizer.zero_grad()\n" + STEP))
bank.slip(
    9, "collected", ("p.grad = weights[name].grad", "p.grad = weights[name].grad + (0 if p.grad is None else p.grad)")
)
bank.slip(
    9,
    "momentum-lost",
    (STEP, "        torch.optim.SGD(self.stage.parameters(), lr=self.optimizer.defaults['lr']).step()\n"),
)
bank.slip(9, "momentum-lost", (STEP, "        with torch.no_grad():\n            for p in self.stage.parameters():\n"
          "                p -= self.optimizer.defaults['lr'] * p.grad\n"))  # fmt: skip
bank.slip(9, "momentum-wrong", (STEP, "        self.optimizer.defaults.setdefault('again', 0)\n        "
          "lr, momentum = self.optimizer.defaults['lr'], self.optimizer.defaults['momentum']\n        "
          "torch.optim.SGD(self.stage.parameters(), lr=lr * (1 - momentum)).step()\n"))  # fmt: skip
bank.slip(9, "wrong-micro-batch", ("self.stash.pop(k)", "self.stash.pop(max(self.stash))"))
bank.slip(9, "wrong-micro-batch", ("self.stash.pop(k)", "self.stash.popitem()[1]"))
bank.slip(9, "frozen-moved", ("p.grad = weights[name].grad", "p.grad = weights[name].grad.clone()"))
bank.slip(9, "frozen-moved", (STEP, STEP + "        for p in self.stage.parameters():\n            if not p.requires_grad:\n"
          "                p.data -= 0.1\n"))  # fmt: skip
bank.slip(9, "wrong-stale-output", ("return y.detach()", "return y.detach() * 0.5"))
bank.slip(9, "wrong-stale-gradient", ("return x.grad\n", "return x.grad / len(x)\n"))
bank.slip(9, "no-input-gradient", ("return x.grad\n", "return None\n"))
bank.slip(9, "no-input-gradient", (".requires_grad_(x.is_floating_point())", ""))
bank.slip(9, "wrong-update", (STEP, "        if k < 8:\n            self.optimizer.step()\n"))
bank.slip(9, "wrong-update", (STEP, "        if k % 2:\n            self.optimizer.step()\n"))
bank.slip(9, "wrong-update", ("y.backward(gradient)", "(y * gradient).mean().backward()"))
bank.slip(9, "incoming-not-used", ("y.backward(gradient)", "y.backward(torch.ones_like(y))"))
bank.slip(
    9,
    "wrong-micro-batch",
    ("self.stash[k] = self.version", "self.stash[0] = self.version"),
    ("self.stash.pop(k)", "self.stash[0]"),
)
bank.slip(9, "output-with-graph", ("return y.detach()", "return y"))
bank.slip(9, "nothing-returned", ("return y.detach()", "y.detach()"))
bank.slip(9, "never-freed", ("self.stash.pop(k)", "self.stash[k]"))
bank.slip(9, "never-freed", (TAKE, TAKE + "\n        self.__dict__.setdefault('old', []).append(weights)"))
bank.slip(9, "history-missing", ("        self.history.append((k, version, self.version))\n", ""))
bank.slip(
    9, "history-missing", ("self.history.append((k, version, self.version))", "self.history.append((k, version))")
)
bank.slip(
    9,
    "history-wrong",
    ("self.history.append((k, version, self.version))", "self.history.append((k, self.version, version))"),
)
bank.slip(9, "history-wrong", ("        self.version += 1\n", ""))
bank.slip(
    9,
    "history-wrong",
    ("self.history.append((k, version, self.version))", "self.history.append((k, self.version, self.version))"),
)
bank.slip(
    9,
    "frozen-gradient",
    (
        "p.grad = weights[name].grad",
        "p.grad = torch.zeros_like(p) if weights[name].grad is None else weights[name].grad",
    ),
)
bank.slip(9, "frozen-gradient", (".requires_grad_(p.requires_grad)", ".requires_grad_()"))
bank.slip(
    9, "callers-x", ("x = x.detach().requires_grad_(x.is_floating_point())", "x.requires_grad_(x.is_floating_point())")
)
bank.slip(9, "callers-x", ("self.stash[k] = self.version, weights, x, y", "self.stash[k] = self.version, weights, given"),
          ("        x = x.detach()", "        given = x\n        x = x.detach()"),
          (TAKE, "version, weights, x = self.stash.pop(k)\n        x.requires_grad_()\n        "
           "y = torch.func.functional_call(self.stage, weights, (x,))"))  # fmt: skip
bank.slip(9, "callers-x", ("        x = x.detach()", "        x -= x.mean()\n        x = x.detach()"))


@bank.wrong(9, "last-stash")
class AsyncStage:
    """One stash for all micro-batches: that of the last forward."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer, self.inputs, self.history = stage, optimizer, {}, []

    def forward(self, k, x):
        self.inputs[k], self.last = x.detach(), {n: p.detach().clone() for n, p in self.stage.named_parameters()}
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x, weights = self.inputs.pop(k).requires_grad_(), {n: w.detach().requires_grad_() for n, w in self.last.items()}
        torch.func.functional_call(self.stage, weights, (x,)).backward(gradient)
        for name, p in self.stage.named_parameters():
            p.grad = weights[name].grad
        self.optimizer.step()
        self.history.append((k, 0, len(self.history)))
        return x.grad


bank.slip(
    9,
    "wrong-micro-batch",
    ("self.stash[k] = self.version", "self.last = self.version"),
    ("self.stash.pop(k)", "self.last"),
)
bank.slip(9, "copies-not-on-gpu", ("p.detach().clone()", "p.detach().cpu().clone()"))
