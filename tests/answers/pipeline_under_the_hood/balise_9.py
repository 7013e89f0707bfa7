"""Answers to balise 9 of 15_pipeline_under_the_hood: an asynchronous stage."""

import copy

import torch

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 9, whole=True)

bank.hint("version-stuck", "After {n} updates, `version` is {got_text} on stage {stage} of {p}. It must count the "
          "updates.")  # fmt: skip
bank.instead(
    "version-stuck",
    '''
class AsyncStage:
    """Wrong: version is not counted (the history is counted elsewhere)."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer = stage, optimizer
        self.version = 0
        self.stash = {}
        self.history = []

    def forward(self, k, x):
        self.stash[k] = x, {n: p.detach().clone() for n, p in self.stage.named_parameters()}, len(self.history)
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x, weights, used = self.stash.pop(k)
        x = x.detach().requires_grad_()
        for n, p in self.stage.named_parameters():
            weights[n] = weights[n].requires_grad_(p.requires_grad)
        torch.func.functional_call(self.stage, weights, (x,)).backward(gradient)
        gradients = [w.grad for w in weights.values()]
        for p, g in zip(self.stage.parameters(), gradients):
            p.grad = g
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append((k, used, len(self.history)))
        return x.grad
''',
)

bank.hint("optimizer-unused", "The optimizer that you were given has made no step. Its state (momentum, for example) "
          "and its options matter: let it make the update.")  # fmt: skip
bank.instead(
    "optimizer-unused",
    '''
class AsyncStage:
    """Cheat: the optimizer is never asked: plain SGD with its numbers, momentum by hand."""

    def __init__(self, stage, optimizer):
        self.stage, self.optimizer = stage, optimizer
        self.version = 0
        self.stash = {}
        self.history = []

    def forward(self, k, x):
        self.stash[k] = x, {n: p.detach().clone() for n, p in self.stage.named_parameters()}, self.version
        with torch.no_grad():
            return self.stage(x)

    def backward(self, k, gradient):
        x, weights, used = self.stash.pop(k)
        x = x.detach().requires_grad_()
        for n, p in self.stage.named_parameters():
            weights[n] = weights[n].requires_grad_(p.requires_grad)
        torch.func.functional_call(self.stage, weights, (x,)).backward(gradient)
        gradients = [w.grad for w in weights.values()]
        group = self.optimizer.param_groups[0]
        if not hasattr(self, "speed"):
            self.speed = {}
        with torch.no_grad():
            for p, g in zip(self.stage.parameters(), gradients):
                if g is not None:
                    self.speed[p] = group["momentum"] * self.speed[p] + g if p in self.speed else g.clone()
                    p -= group["lr"] * self.speed[p]
        self.history.append((k, used, self.version))
        self.version += 1
        return x.grad
''',
)


other = Bank("15_pipeline_under_the_hood", 9)


# --- right ones ---


@other.right()
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


@other.right()
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


@other.right()
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


other.slip(None, (".detach().clone()", ".clone().detach()"))
other.slip(
    None, ("        y.backward(gradient)\n", "        self.optimizer.zero_grad()\n        y.backward(gradient)\n")
)
other.slip(None, ("return x.grad\n", "return x.grad if gradient.dim() else None\n"))


OWN_BUFFERS = "        buffers = {name: b.clone() for name, b in self.stage.named_buffers()}\n"


CALL = "        y = torch.func.functional_call(self.stage, weights, (x,))\n"


other.slip(None, (CALL, OWN_BUFFERS + CALL.replace("weights,", "weights | buffers,") + "        for name, b in self.stage.named_buffers():\n"
          "            b.copy_(buffers[name])\n"))  # fmt: skip


# --- wrong ones ---

bank.hint("statistics-lost", "The stage's running statistics didn't move: forward moved those of a copy. Copy only "
          "the parameters; the buffers stay the stage's own.")  # fmt: skip
other.slip("statistics-lost", (CALL, OWN_BUFFERS + CALL.replace("weights,", "weights | buffers,")))


@other.wrong("statistics-lost", variant=True)
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


bank.hint("collected", "The gradients of earlier micro-batches are still in p.grad. Each update must use the gradient "
          "of one micro-batch alone.")  # fmt: skip
other.slip(
    "collected",
    (
        GIVE,
        GIVE.replace("            p.grad", "            if weights[name].grad is not None:\n                p.grad"),
    ),
)
other.slip("collected", (GIVE, "        used = {n: w.grad for n, w in weights.items() if w.grad is not None}\n        "
          "for name, gradient in used.items():\n            self.stage.get_parameter(name).grad = gradient\n"), variant=True)  # fmt: skip


PLAIN = ("y = torch.func.functional_call(self.stage, weights, (x,))", "y = self.stage(x)")


bank.hint("changed-in-place", "The graph of an earlier forward holds the weights themselves, and the optimizer has "
          "changed them since: {error} Let each forward run on copies that nothing changes.")  # fmt: skip
other.slip("changed-in-place", PLAIN, (GIVE, ""), (STEP, STEP + "        self.optimizer.zero_grad()\n"))
other.slip("changed-in-place", (".detach().clone()", ".detach()"))
other.slip("changed-in-place", (COPIES, "dict(self.stage.named_parameters())"), (GIVE, ""),
          (STEP, STEP + "        self.optimizer.zero_grad()\n"), variant=True)  # fmt: skip


bank.hint("newest-weights", "The gradient of micro-batch {k} comes from a forward and backward with the newest "
          "weights. Its output was computed, and sent on, with older ones: backward must belong "
          "to that output.")  # fmt: skip


@other.wrong("newest-weights")
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


other.slip("newest-weights", ("        y.backward(gradient)\n", "        for name, p in self.stage.named_parameters():\n            "
          "weights[name].data.copy_(p.data)\n        x.grad = None\n        "
          "torch.func.functional_call(self.stage, weights, (x,)).backward(gradient)\n"))  # fmt: skip


bank.hint("stashed-references", "The backward of micro-batch {k} multiplied by weights that are newer than those of "
          "its forward. You stash the parameters themselves, or views of them, and the optimizer changes these in "
          "place: clone() them.")  # fmt: skip


@other.wrong("stashed-references")
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


other.slip("stashed-references", (".detach().clone()", ".data"), variant=True)


@other.wrong("newest-weights", variant=True)
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


bank.hint("first-version", "Every forward uses the initial weights. A forward must take the newest ones.")
other.slip("first-version", ("weights = {", "self.first = getattr(self, 'first', None) or {"),
          ("        y = torch.func", "        weights = {n: w.detach().clone().requires_grad_() for n, w in self.first.items()}\n"
           "        y = torch.func"))  # fmt: skip
other.slip(
    "first-version",
    ("class Async", "import copy\n\n\nclass Async"),
    ("        self.history = []", "        self.history, self.first = [], copy.deepcopy(stage)"),
    ("parameters = self.stage.", "parameters = self.first."),
    variant=True,
)
bank.hint("rolled-back", "The update started from the old, stashed weights, so what other micro-batches have taught "
          "since is lost. The gradient comes from the old weights, but the update goes to the newest.")  # fmt: skip
other.slip("rolled-back", (STEP, "        with torch.no_grad():\n            for name, p in self.stage.named_parameters():\n"
          "                p.copy_(weights[name])\n" + STEP))  # fmt: skip
other.slip("rolled-back", (GIVE, GIVE + "            p.data = weights[name].detach().clone()\n"), variant=True)
bank.hint("no-update", "The weights haven't changed. Each backward ends with an optimizer step, and step() must find "
          "the gradient in p.grad of the stage's own parameters.")  # fmt: skip
other.slip("no-update", (STEP, ""))
other.slip("no-update", (GIVE, ""))
other.slip("no-update", (STEP, "        self.optimizer.zero_grad()\n" + STEP), variant=True)
other.slip(
    "collected", ("p.grad = weights[name].grad", "p.grad = weights[name].grad + (0 if p.grad is None else p.grad)")
)
bank.hint("momentum-lost", "This is right without momentum and wrong with it: the optimizer forgets. Keep the one "
          "that you were given, on the stage's own parameters.")  # fmt: skip
other.slip(
    "momentum-lost",
    (STEP, "        torch.optim.SGD(self.stage.parameters(), lr=self.optimizer.defaults['lr']).step()\n"),
)
other.slip("momentum-lost", (STEP, "        with torch.no_grad():\n            for p in self.stage.parameters():\n"
          "                p -= self.optimizer.defaults['lr'] * p.grad\n"), variant=True)  # fmt: skip
bank.hint("momentum-wrong", "This is right without momentum and wrong with it. Let the optimizer that you were given "
          "make the update.")  # fmt: skip
other.slip("momentum-wrong", (STEP, "        self.optimizer.defaults.setdefault('again', 0)\n        "
          "lr, momentum = self.optimizer.defaults['lr'], self.optimizer.defaults['momentum']\n        "
          "torch.optim.SGD(self.stage.parameters(), lr=lr * (1 - momentum)).step()\n"))  # fmt: skip
other.slip("momentum-wrong", (STEP, "        self.optimizer.param_groups[0]['nesterov'] = True\n" + STEP), variant=True)
bank.hint("wrong-micro-batch", "The backward of micro-batch {k} used what belongs to another one. Several are in "
          "flight: look yours up by its number.")  # fmt: skip
other.slip("wrong-micro-batch", ("self.stash.pop(k)", "self.stash.pop(max(self.stash))"))
other.slip("wrong-micro-batch", ("self.stash.pop(k)", "self.stash.popitem()[1]"))
bank.hint("frozen-moved", "With a frozen parameter (requires_grad False), something fails or the parameter moves: "
          "{error}")  # fmt: skip
other.slip("frozen-moved", ("p.grad = weights[name].grad", "p.grad = weights[name].grad.clone()"))
other.slip("frozen-moved", (STEP, STEP + "        for p in self.stage.parameters():\n            if not p.requires_grad:\n"
          "                p.data -= 0.1\n"), variant=True)  # fmt: skip
bank.hint("wrong-stale-output", "The output of micro-batch {k} doesn't come from the newest weights.")
other.slip("wrong-stale-output", ("return y.detach()", "return y.detach() * 0.5"))
other.slip("wrong-stale-output", ("return y.detach()", "return y.detach() + 1"), variant=True)
bank.hint("wrong-stale-gradient", "The gradient of the input of micro-batch {k} doesn't come from the weights of its "
          "forward.")  # fmt: skip
other.slip("wrong-stale-gradient", ("return x.grad\n", "return x.grad / len(x)\n"))
other.slip("wrong-stale-gradient", ("return x.grad\n", "return 2 * x.grad\n"), variant=True)
bank.hint("no-input-gradient", "backward({k}, …) returned no gradient for the input. The previous stage waits for "
          "it.")  # fmt: skip
other.slip("no-input-gradient", ("return x.grad\n", "return None\n"))
other.slip("no-input-gradient", (".requires_grad_(x.is_floating_point())", ""), variant=True)
bank.hint("wrong-update", "The weights are wrong after an update, though everything before it was right: each "
          "backward ends with one optimizer step, with the gradient of that micro-batch.")  # fmt: skip
other.slip("wrong-update", (STEP, "        if k < 8:\n            self.optimizer.step()\n"))
other.slip("wrong-update", (STEP, "        if k % 2:\n            self.optimizer.step()\n"), variant=True)
other.slip("wrong-update", ("y.backward(gradient)", "(y * gradient).mean().backward()"))
bank.hint("incoming-not-used", "Backward started from ones. It must go on from the gradient that it is given.")
other.slip("incoming-not-used", ("y.backward(gradient)", "y.backward(torch.ones_like(y))"))
other.slip("incoming-not-used", ("y.backward(gradient)", "y.sum().backward()"), variant=True)
other.slip(
    "wrong-micro-batch",
    ("self.stash[k] = self.version", "self.stash[0] = self.version"),
    ("self.stash.pop(k)", "self.stash[0]"),
)
bank.hint("output-with-graph", "The output that forward returns still has its graph. It goes to another rank: return "
          "y.detach().")  # fmt: skip
other.slip("output-with-graph", ("return y.detach()", "return y"))
other.slip("output-with-graph", ("return y.detach()", "return 1 * y"), variant=True)
other.slip("nothing-returned", ("return y.detach()", "y.detach()"))
bank.hint("never-freed", "After {n} micro-batches, stage {stage} of {p} holds {copies:.1f} copies of its weights, but "
          "at most {most} are in flight. A stash is needed until its backward and no longer: "
          "take it out then (pop).")  # fmt: skip
other.slip("never-freed", ("self.stash.pop(k)", "self.stash[k]"))
other.slip("never-freed", (TAKE, TAKE + "\n        self.__dict__.setdefault('old', []).append(weights)"), variant=True)
bank.hint("history-missing", "After each backward, history gets (micro-batch, version of its forward, version that it "
          "updates); here it is {got_text}.")  # fmt: skip
other.slip("history-missing", ("        self.history.append((k, version, self.version))\n", ""))
other.slip(
    "history-missing",
    ("self.history.append((k, version, self.version))", "self.history.append((k, version))"),
    variant=True,
)
bank.hint("history-wrong", "Micro-batch {k} on stage {stage} of {p} ran forward after {expected_version} updates, and "
          "its own update came after {expected_update}. So history gets ({k}, {expected_version}, {expected_update}), "
          "but here it has {got}. Note the version in forward, and add one after each step.")  # fmt: skip
other.slip(
    "history-wrong",
    ("self.history.append((k, version, self.version))", "self.history.append((k, self.version, version))"),
)
other.slip("history-wrong", ("        self.version += 1\n", ""))
other.slip(
    "history-wrong",
    ("self.history.append((k, version, self.version))", "self.history.append((k, self.version, self.version))"),
    variant=True,
)
bank.hint("frozen-gradient", "A frozen parameter has a gradient after backward, but its p.grad must stay None: zeros "
          "are a gradient too. A copy should require one only if the parameter does: "
          "requires_grad_(p.requires_grad).")  # fmt: skip
other.slip(
    "frozen-gradient",
    (
        "p.grad = weights[name].grad",
        "p.grad = torch.zeros_like(p) if weights[name].grad is None else weights[name].grad",
    ),
)
other.slip("frozen-gradient", (".requires_grad_(p.requires_grad)", ".requires_grad_()"), variant=True)
bank.hint("callers-x", "The x that was given to forward {what}. It is the caller's: x.detach() makes a tensor of your "
          "own, requires_grad_() changes the one that it is called on.")  # fmt: skip
other.slip(
    "callers-x", ("x = x.detach().requires_grad_(x.is_floating_point())", "x.requires_grad_(x.is_floating_point())")
)
other.slip("callers-x", ("self.stash[k] = self.version, weights, x, y", "self.stash[k] = self.version, weights, given"),
          ("        x = x.detach()", "        given = x\n        x = x.detach()"),
          (TAKE, "version, weights, x = self.stash.pop(k)\n        x.requires_grad_()\n        "
           "y = torch.func.functional_call(self.stage, weights, (x,))"))  # fmt: skip
other.slip("callers-x", ("        x = x.detach()", "        x -= x.mean()\n        x = x.detach()"), variant=True)


bank.hint("last-stash", "The backward of micro-batch {k} used the weights that the last forward stashed. Several "
          "micro-batches are in flight, each with the weights of its own forward: stash them "
          "under its number.")  # fmt: skip


@other.wrong("last-stash")
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


other.slip(
    "wrong-micro-batch",
    ("self.stash[k] = self.version", "self.last = self.version"),
    ("self.stash.pop(k)", "self.last"),
    variant=True,
)
bank.hint("copies-not-on-gpu", "On a GPU, a copy is in the CPU's memory: {error}. p.detach().clone() is on the same "
          "device as p.")  # fmt: skip
other.slip("copies-not-on-gpu", ("p.detach().clone()", "p.detach().cpu().clone()"))
other.slip("copies-not-on-gpu", ("p.detach().clone()", "torch.tensor(p.tolist(), dtype=p.dtype)"), variant=True)
other.slip(
    "last-stash",
    ("self.stash[k] = ", "self.last = weights\n        self.stash[k] = "),
    (TAKE, TAKE + "\n        weights = {n: w.detach().requires_grad_(w.requires_grad) for n, w in self.last.items()}\n"
     + CALL.rstrip("\n")),
    variant=True,
)  # fmt: skip
other.slip(
    "optimizer-unused",
    (STEP, "        if not self.history:\n"
     "            options = {n: self.optimizer.defaults[n] for n in ('lr', 'momentum')}\n"
     "            self.own = torch.optim.SGD(self.stage.parameters(), **options)\n        self.own.step()\n"),
    variant=True,
)  # fmt: skip
other.slip(
    "version-stuck",
    ("self.stash[k] = self.version", "self.stash[k] = len(self.history)"),
    ("self.version))\n        self.version += 1", "len(self.history)))"),
    variant=True,
)
bank.add(other)
