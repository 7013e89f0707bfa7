"""Answers to 15_pipeline_under_the_hood: activation memory and recomputation."""

import weakref

import torch

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood")


# --- right ones ---


class Meter:
    """Another meter: a holder with __del__, plain dictionary; weights are known by name."""

    def __init__(self, left_out=()):
        self.weights = [t.untyped_storage().data_ptr() for t in left_out]
        self.count, self.sizes, self.peak = {}, {}, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @property
    def now(self):
        return sum(self.sizes.values())

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        return Holder(self, tensor)

    def unpack(self, holder):
        return holder.tensor


class Holder:
    def __init__(self, meter, tensor):
        self.meter, self.tensor = meter, tensor.detach()
        self.address = tensor.untyped_storage().data_ptr()
        if self.address not in meter.weights:
            meter.count[self.address] = meter.count.get(self.address, 0) + 1
            meter.sizes[self.address] = tensor.untyped_storage().nbytes()
            meter.peak = max(meter.peak, meter.now)

    def __del__(self):
        if self.address not in self.meter.weights:
            self.meter.count[self.address] -= 1
            if self.meter.count[self.address] == 0:
                del self.meter.count[self.address], self.meter.sizes[self.address]


class Alive:
    """Holds weak references to all holders and looks through them."""

    def __init__(self, left_out=()):
        self.weights, self.holders, self.peak = {t.untyped_storage().data_ptr() for t in left_out}, weakref.WeakSet(), 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    @property
    def now(self):
        storages = [box.tensor.untyped_storage() for box in list(self.holders)]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self.weights}.values())

    def pack(self, tensor):
        box = Box(tensor.detach())
        self.holders.add(box)
        self.peak = max(self.peak, self.now)
        return box


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


def where(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def go_on(device, state):
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class Again(torch.autograd.Function):
    """Gives the parameters' gradients back, through torch.autograd.grad."""

    @staticmethod
    def forward(ctx, stage, x, state, *parameters):
        ctx.stage, ctx.state = stage, state
        ctx.save_for_backward(x, *parameters)
        return stage(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        x = x.detach()
        if ctx.needs_input_grad[1]:
            x.requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            go_on(x.device, ctx.state)
            y = ctx.stage(x)
        asked = [t for t in (x, *parameters) if t.requires_grad]
        found = iter(torch.autograd.grad(y, asked, gradient))
        first = next(found) if x.requires_grad else None
        return None, first, None, *(next(found) if p.requires_grad else None for p in parameters)


def recompute_functional(stage, x):
    return Again.apply(stage, x, where(x.device), *stage.parameters())


def recompute_lazily(stage, x):
    """Nothing is saved but numbers; the first one that is asked for makes all of them again."""
    state, saved, numbers, version = where(x.device), {}, iter(range(10**9)), x._version

    def unpack(number):
        if x._version != version:
            raise RuntimeError("x was changed in place")
        if not saved:
            again = iter(range(10**9))

            def keep(tensor):
                saved[next(again)] = tensor.detach()

            with torch.random.fork_rng(), torch.enable_grad():
                go_on(x.device, state)
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda _: None):
                    stage(x.detach().requires_grad_(x.requires_grad))
        return saved.pop(number) if number in saved else None

    with torch.autograd.graph.saved_tensors_hooks(lambda _: next(numbers), unpack):
        return stage(x)


class Dummy(torch.autograd.Function):
    """A dummy that needs a gradient, in the parameters' place."""

    @staticmethod
    def forward(ctx, x, dummy, stage):
        ctx.x, ctx.stage, ctx.state = x.detach().clone(), stage, where(x.device)
        with torch.no_grad():
            return stage(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x
        before = where(x.device)
        go_on(x.device, ctx.state)
        if x.is_floating_point():
            x.requires_grad_(True)
        with torch.enable_grad():
            torch.autograd.backward(ctx.stage(x), gradient)
        go_on(x.device, before)
        return x.grad if ctx.needs_input_grad[0] else None, None, None


def recompute_dummy(stage, x):
    return Dummy.apply(x, torch.zeros((), requires_grad=True), stage)


bank.several(7, None, Meter, recompute_functional)
bank.several(7, None, Alive, recompute_lazily)
bank.several(7, None, Meter, recompute_dummy)
bank.slip(7, None, ("weakref.finalize(kept, self.dropped, address, size)", "kept.__class__ = type('K', (Kept,), "
          "{'__del__': lambda k, a=address, s=size: self.dropped(a, s)})"))  # fmt: skip
bank.slip(7, None, ("random_state(x.device)\n        ctx.save", "random_state(launch.device())\n        ctx.save"),
          ("set_random_state(x.device, ctx.state)", "set_random_state(launch.device(), ctx.state)"))  # fmt: skip
bank.slip(7, None, ("            if self.holders[address] == 1:\n                self.now += size", "            if "
          "self.holders[address] < 2:\n                self.now = self.now + size"))  # fmt: skip

# --- the meter ---

bank.slip(7, "wrong-bytes", ("if address not in self.left_out:", "if address in self.left_out:"))
bank.slip(7, "nothing-counted", ("self.now += size", "pass"))
bank.slip(7, "parameters-counted", ("if address not in self.left_out:", "if True:"))
bank.slip(7, "parameters-counted", ("if address not in self.left_out:", "if id(tensor) not in self.left_out:"))
bank.slip(7, "parameters-counted", ("if address not in self.left_out:", "if not isinstance(tensor, nn.Parameter):"))
bank.slip(7, "storage-counted-twice", ("if self.holders[address] == 1:", "if True:"))
bank.slip(7, "storage-counted-twice", ("tensor.untyped_storage()\n", "tensor.untyped_storage()\n        "
          "weights = tensor.untyped_storage().data_ptr() in self.left_out\n"),
          ("storage.data_ptr(), storage.nbytes()", "id(kept), storage.nbytes()"),
          ("if address not in self.left_out:", "if not weights:"))  # fmt: skip
bank.slip(7, "storage-counted-twice", ("address, size = storage.data_ptr()", "address, size = tensor.data_ptr()"))
bank.slip(7, "elements-counted", ("storage.nbytes()", "tensor.numel()"))
bank.slip(7, "view-bytes", ("storage.nbytes()", "tensor.numel() * tensor.element_size()"))
bank.slip(7, "view-bytes", ("storage.nbytes()", "tensor.nbytes"))
bank.slip(7, "wrong-bytes", ("storage.nbytes()", "2 * storage.nbytes()"))
bank.slip(7, "wrong-bytes", ("storage.nbytes()", "storage.nbytes() / 2**20"))
bank.slip(7, "saved-for-ever", ("self.now -= size", "pass"))
bank.slip(7, "saved-for-ever", ("weakref.finalize(kept, self.dropped, address, size)", "pass"))
bank.slip(7, "own-graph", ("Kept(tensor.detach())", "Kept(tensor)"))
bank.slip(7, "peak-of-all", ("self.peak = max(self.peak, self.now)", "self.peak += size"))
bank.slip(7, "peak-lost", ("self.peak = max(self.peak, self.now)", "self.peak = self.now"),
          ("self.now -= size", "self.now -= size\n            self.peak = self.now"))  # fmt: skip
bank.slip(7, "peak-lost", ("self.peak = max(self.peak, self.now)", "self.peak = self.now"))
bank.slip(7, "peak-lost", ("self.peak = max(self.peak, self.now)", "pass"))
bank.slip(7, "freed-when-read",
          ("return kept.tensor", "self.dropped(kept.address, kept.size)\n        return kept.tensor"),
          ("weakref.finalize(kept, self.dropped, address, size)", "pass"),
          ("        return kept\n", "        kept.address, kept.size = address, size\n        return kept\n"),
          ("self.holders[address] -= 1", "self.holders[address] -= 1\n        if address in self.left_out:\n"
           "            return"))  # fmt: skip
bank.slip(7, "first-one-gone",
          ("        self.holders[address] -= 1\n        if not self.holders[address]:",
           "        if self.holders.pop(address, 0):"))  # fmt: skip
bank.slip(7, "given-back-twice", ("        if not self.holders[address]:\n    ", ""))
bank.slip(7, "seen-for-ever", ("self.holders[address] -= 1\n        if not self.holders[address]:",
          "self.gone = getattr(self, 'gone', Counter())\n        self.gone[address] += 1\n        "
          "if self.gone[address] == self.holders[address]:"))  # fmt: skip
bank.slip(7, "seen-for-ever", ("if self.holders[address] == 1:", "if address not in self.__dict__.setdefault('seen', set()):"
          "\n                self.seen.add(address)"))  # fmt: skip
bank.slip(7, "copy-kept", ("Kept(tensor.detach())", "Kept(tensor.detach().clone())"))
bank.slip(7, "copy-kept", ("Kept(tensor.detach())", "Kept(tensor.detach() * 1)"))
bank.slip(7, "hooks-spoil", ("return kept.tensor", "return torch.ones_like(kept.tensor)"))
bank.slip(7, "hooks-spoil", ("return kept.tensor", "return kept.tensor.half().double()"))
bank.slip(7, "hooks-spoil", ("return kept.tensor", "return kept.tensor * 1.0000001 + 0.01"))

# --- recomputation ---

bank.slip(7, "library-checkpoint", ("return Recompute.apply(stage, x, *stage.parameters())",
          "from torch.utils.checkpoint import checkpoint\n    return checkpoint(stage, x, use_reentrant=False)"))  # fmt: skip
bank.slip(7, "all-kept", ("return Recompute.apply(stage, x, *stage.parameters())", "return stage(x)"))
bank.slip(7, "all-kept", ("return stage(x)", "with torch.enable_grad():\n            "
          "ctx.y = stage(x.detach().requires_grad_())\n        return ctx.y.detach()"))  # fmt: skip
bank.slip(7, "first-stage-no-graph", ("Recompute.apply(stage, x, *stage.parameters())", "Recompute.apply(stage, x)"))
bank.slip(7, "ids-no-gradient", ("requires_grad_(ctx.needs_input_grad[1])", "requires_grad_()"))
bank.slip(7, "other-output", ("        return stage(x)\n", "        return stage(x).relu()\n"))
bank.slip(7, "nothing-returned", ("    return Recompute.apply", "    Recompute.apply"))
bank.slip(7, "input-gradient-lost", ("return None, x.grad, *", "return None, None, *"))
bank.slip(7, "input-gradient-lost", (".detach().requires_grad_(ctx.needs_input_grad[1])", ".detach()"))
bank.slip(
    7, "incoming-ignored", ("y = ctx.stage(x)", "y = ctx.stage(x).sum()"), ("y.backward(gradient)", "y.backward()")
)
bank.slip(
    7,
    "no-second-graph",
    ("        with torch.enable_grad():\n            y = ctx.stage(x)", "        y = ctx.stage(x)"),
)
bank.slip(7, "incoming-ignored", ("y.backward(gradient)", "y.backward(torch.ones_like(y))"))
bank.slip(7, "parameters-twice", ("y.backward(gradient)", "y.backward(gradient, retain_graph=True)\n        "
          "parameters = list(ctx.stage.parameters())"),
          ("*[None] * (len(ctx.needs_input_grad) - 2)", "*torch.autograd.grad(y, parameters, gradient)"))  # fmt: skip
bank.slip(
    7, "parameters-twice", ("*[None] * (len(ctx.needs_input_grad) - 2)", "*(p.grad for p in ctx.stage.parameters())")
)
bank.slip(7, "parameters-lost", ("y.backward(gradient)", "x.grad, = torch.autograd.grad(y, [x], gradient)")
          )  # fmt: skip
bank.slip(7, "overwritten", ("y.backward(gradient)", "ctx.stage.zero_grad()\n        y.backward(gradient)"))
bank.slip(7, "frozen-fails", ("y.backward(gradient)", "parameters = list(ctx.stage.parameters())\n        "
          "found = torch.autograd.grad(y, parameters + [x] * x.requires_grad, gradient)"),
          ("return None, x.grad, *[None] * (len(ctx.needs_input_grad) - 2)",
           "return None, found[-1] if x.requires_grad else None, *found[: len(parameters)]"))  # fmt: skip
bank.slip(
    7, "x-not-detached", (".saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])", ".saved_tensors[0]")
)
KEEP, TAKE = "ctx.save_for_backward(x)", "ctx.saved_tensors[0]"
bank.slip(7, "change-not-seen", (KEEP, "ctx.x = x"), (TAKE, "ctx.x"))
bank.slip(7, "change-not-seen", (KEEP, "ctx.x = x.detach()"), (TAKE, "ctx.x"))
bank.slip(7, "wrong-recomputed", ("y.backward(gradient)", "y.backward(gradient / len(gradient))"))
bank.slip(7, "wrong-recomputed", ("return None, x.grad, *", "return None, gradient, *"))
bank.slip(
    7, "not-recomputed", ("            y = ctx.stage(x)\n", "            ctx.stage(x)\n            y = ctx.stage(x)\n")
)
bank.slip(7, "runs-for-ever", ("y = ctx.stage(x)", "y = recompute(ctx.stage, x)"))
bank.slip(
    7, "runs-for-ever", ("y = ctx.stage(x)", "y = Recompute.apply(ctx.stage, x, *ctx.stage.parameters())"), variant=True
)
bank.slip(7, "other-mask", ("        set_random_state(x.device, ctx.state)\n", ""))
bank.slip(7, "other-mask", ("ctx.stage, ctx.state = stage, random_state(x.device)\n        ctx.save_for_backward(x)\n        "
          "return stage(x)", "ctx.stage = stage\n        ctx.save_for_backward(x)\n        y = stage(x)\n        "
          "ctx.state = random_state(x.device)\n        return y"))  # fmt: skip
bank.slip(7, "other-mask", ("ctx.stage, ctx.state = stage,", "ctx.stage = stage\n        Recompute.state ="),
          ("ctx.state", "Recompute.state"))  # fmt: skip
# the CPU's generator alone
bank.slip(7, "other-mask", ("        set_random_state(x.device, ctx.state)\n", "        torch.set_rng_state(ctx.state)\n"),
          ("stage, random_state(x.device)", "stage, torch.get_rng_state()"))  # fmt: skip
bank.slip(7, "other-mask", ('device) if device.type == "cuda" else torch.get_rng_state()', "None) if False else torch.get_rng_state()"),
          ('if device.type == "cuda":\n        torch.cuda.set', "if False:\n        torch.cuda.set"), variant=True)  # fmt: skip
bank.slip(7, "stream-rewound", ("        set_random_state(x.device, now)\n", "        if x.device.type == 'cpu':\n            torch.set_rng_state(now)\n"))
bank.slip(7, "stream-rewound", ("        set_random_state(x.device, now)\n", ""))
bank.slip(7, "stream-rewound", ("        now = random_state(x.device)\n", "        now = ctx.state\n"))
bank.slip(
    7,
    "through-x",
    (".detach().requires_grad_(ctx.needs_input_grad[1])", ""),
    ("return None, x.grad, *", "return None, None, *"),
)
