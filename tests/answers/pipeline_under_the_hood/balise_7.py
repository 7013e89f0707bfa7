"""Answers to balise 7 of 15_pipeline_under_the_hood: recompute activations."""

import weakref

import torch

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 7, whole=True)

bank.hint("library-checkpoint", "{what} does this work for you. Here you write it yourself.")
bank.instead(
    "library-checkpoint",
    '''
def recompute(stage, x):
    """Cheat: the checkpointing that PyTorch hangs on a module by hooks."""
    from torch.distributed._composable import checkpoint

    if not hasattr(stage, "wrapped"):
        checkpoint(stage)
        stage.wrapped = True
    return stage(x)
''',
)


other = Bank("15_pipeline_under_the_hood", 7)


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


other.several(None, Meter, recompute_functional)
other.several(None, Alive, recompute_lazily)
other.several(None, Meter, recompute_dummy)
other.slip(None, ("weakref.finalize(kept, self.dropped, address, size)", "kept.__class__ = type('K', (Kept,), "
          "{'__del__': lambda k, a=address, s=size: self.dropped(a, s)})"))  # fmt: skip
other.slip(None, ("random_state(x.device)\n        ctx.save", "random_state(launch.device())\n        ctx.save"),
          ("set_random_state(x.device, ctx.state)", "set_random_state(launch.device(), ctx.state)"))  # fmt: skip
other.slip(None, ("            if self.holders[address] == 1:\n                self.now += size", "            if "
          "self.holders[address] < 2:\n                self.now = self.now + size"))  # fmt: skip


# --- the meter ---

bank.hint("wrong-bytes", "These aren't the bytes that are held.")
other.slip("wrong-bytes", ("if address not in self.left_out:", "if address in self.left_out:"))
bank.hint("nothing-counted", "A forward has run inside the with block, but `now` is still 0. Count in pack().")
other.slip("nothing-counted", ("self.now += size", "pass"))
other.slip("nothing-counted", ("if self.holders[address] == 1:", "if self.holders[address] > 9:"), variant=True)
bank.hint("parameters-counted", "You count {seen} bytes, but activations take {truth}: the difference is weights. "
          "They stay in memory anyway. A linear layer saves a transposed view of its weight, which is another object "
          "with the same memory: compare addresses.")  # fmt: skip
other.slip("parameters-counted", ("if address not in self.left_out:", "if True:"))
other.slip("parameters-counted", ("if address not in self.left_out:", "if id(tensor) not in self.left_out:"))
other.slip(
    "parameters-counted", ("if address not in self.left_out:", "if not isinstance(tensor, nn.Parameter):"), variant=True
)
bank.hint("storage-counted-twice", "You count {seen} bytes, but {truth} are held. One operation's output is the next "
          "one's input: both save it, but it is one storage. Count it when its first holder comes. Identify it by "
          "untyped_storage().data_ptr(): the data_ptr() of a view is where the view begins.")  # fmt: skip
other.slip("storage-counted-twice", ("if self.holders[address] == 1:", "if True:"))
other.slip("storage-counted-twice", ("tensor.untyped_storage()\n", "tensor.untyped_storage()\n        "
          "weights = tensor.untyped_storage().data_ptr() in self.left_out\n"),
          ("storage.data_ptr(), storage.nbytes()", "id(kept), storage.nbytes()"),
          ("if address not in self.left_out:", "if not weights:"), variant=True)  # fmt: skip
other.slip("storage-counted-twice", ("address, size = storage.data_ptr()", "address, size = tensor.data_ptr()"))
bank.hint("elements-counted", "These are elements, not bytes: a float64 has 8 bytes. A storage knows its nbytes().")
other.slip("elements-counted", ("storage.nbytes()", "tensor.numel()"))
other.slip("elements-counted", ("storage.nbytes()", "storage.nbytes() // 8"), variant=True)
bank.hint("view-bytes", "A view keeps all the memory that it looks into: {truth} bytes are held here, but you count "
          "{seen}. Take size and address from untyped_storage().")  # fmt: skip
other.slip("view-bytes", ("storage.nbytes()", "tensor.numel() * tensor.element_size()"))
other.slip("view-bytes", ("storage.nbytes()", "tensor.nbytes"), variant=True)
other.slip("wrong-bytes", ("storage.nbytes()", "2 * storage.nbytes()"), variant=True)
other.slip("wrong-bytes", ("storage.nbytes()", "storage.nbytes() / 2**20"))
bank.hint("saved-for-ever", "Backward has freed what it used, but `now` didn't go down. When the graph lets go of a "
          "Kept, the Kept is gone: weakref.finalize(kept, function, …) calls a function at that moment.")  # fmt: skip
other.slip("saved-for-ever", ("self.now -= size", "pass"))
other.slip("saved-for-ever", ("weakref.finalize(kept, self.dropped, address, size)", "pass"), variant=True)
bank.hint("own-graph", "An output was dropped without its backward, and {seen} bytes are never freed: tanh saves its "
          "own result, which holds the graph that holds it. Keep tensor.detach(): the same "
          "memory, without the graph.")  # fmt: skip
other.slip("own-graph", ("Kept(tensor.detach())", "Kept(tensor)"))
other.slip("own-graph", ("        return kept\n", "        kept.tensor = tensor\n        return kept\n"), variant=True)
bank.hint("peak-of-all", "`peak` is the sum of everything that was ever saved. It must be the highest value that "
          "`now` has had.")  # fmt: skip
other.slip("peak-of-all", ("self.peak = max(self.peak, self.now)", "self.peak += size"))
other.slip(
    "peak-of-all",
    ("self.now += size", "self.now += size\n                self.all = size + getattr(self, 'all', 0)"),
    ("max(self.peak, self.now)", "self.all"),
    variant=True,
)
bank.hint("peak-lost", "`now` is right, but `peak` isn't the highest value that `now` has had.")
other.slip("peak-lost", ("self.peak = max(self.peak, self.now)", "self.peak = self.now"),
          ("self.now -= size", "self.now -= size\n            self.peak = self.now"))  # fmt: skip
other.slip("peak-lost", ("self.peak = max(self.peak, self.now)", "self.peak = self.now"))
other.slip("peak-lost", ("self.peak = max(self.peak, self.now)", "pass"), variant=True)
bank.hint("freed-when-read", "backward(retain_graph=True) reads what was saved and keeps it, so nothing is freed yet. "
          "Count down when the Kept itself goes, not in unpack().")  # fmt: skip
other.slip("freed-when-read",
          ("return kept.tensor", "self.dropped(kept.address, kept.size)\n        return kept.tensor"),
          ("weakref.finalize(kept, self.dropped, address, size)", "pass"),
          ("        return kept\n", "        kept.address, kept.size = address, size\n        return kept\n"),
          ("self.holders[address] -= 1", "self.holders[address] -= 1\n        if address in self.left_out:\n"
           "            return"))  # fmt: skip
other.slip(
    "freed-when-read",
    ("return kept.tensor", "storage = kept.tensor.untyped_storage()\n"
     "        if storage.data_ptr() not in self.left_out:\n            self.dropped(storage.data_ptr(), storage.nbytes())\n"
     "        return kept.tensor"),
    ("weakref.finalize(kept, self.dropped, address, size)", "pass"),
    variant=True,
)  # fmt: skip
bank.hint("first-one-gone", "You count {seen} bytes while {truth} are still held: a storage is free when its last "
          "holder is gone, not its first.")  # fmt: skip
other.slip("first-one-gone",
          ("        self.holders[address] -= 1\n        if not self.holders[address]:",
           "        if self.holders.pop(address, 0):"))  # fmt: skip
other.slip(
    "first-one-gone",
    (
        "        self.holders[address] -= 1\n        if not self.holders[address]:",
        "        if address in self.holders:",
    ),
    ("self.now -= size", "self.now -= size\n            del self.holders[address]"),
    variant=True,
)
bank.hint("given-back-twice", "{seen} bytes: you subtract a storage once for each of its holders. It is counted once, "
          "so subtract it once.")  # fmt: skip
other.slip("given-back-twice", ("        if not self.holders[address]:\n    ", ""))
other.slip("given-back-twice", ("if not self.holders[address]:", "if self.holders[address] >= 0:"), variant=True)
bank.hint("seen-for-ever", "The second micro-batch isn't counted in full: freed memory is reused, at the same "
          "address. Forget an address when its last holder is gone.")  # fmt: skip
other.slip("seen-for-ever", ("self.holders[address] -= 1\n        if not self.holders[address]:",
          "self.gone = getattr(self, 'gone', Counter())\n        self.gone[address] += 1\n        "
          "if self.gone[address] == self.holders[address]:"))  # fmt: skip
other.slip("seen-for-ever", ("if self.holders[address] == 1:", "if address not in self.__dict__.setdefault('seen', set()):"
          "\n                self.seen.add(address)"), variant=True)  # fmt: skip
bank.hint("copy-kept", "Backward gets a copy, and the original, which you counted, is gone by then. Keep "
          "tensor.detach(): the same memory, without the graph.")  # fmt: skip
other.slip("copy-kept", ("Kept(tensor.detach())", "Kept(tensor.detach().clone())"))
other.slip("copy-kept", ("Kept(tensor.detach())", "Kept(tensor.detach() * 1)"), variant=True)
bank.hint("hooks-spoil", "With the hooks, the gradients differ from those without: unpack() must return the tensor as "
          "it was saved.")  # fmt: skip
other.slip("hooks-spoil", ("return kept.tensor", "return torch.ones_like(kept.tensor)"))
other.slip("hooks-spoil", ("return kept.tensor", "return kept.tensor.half().double()"))
other.slip("hooks-spoil", ("return kept.tensor", "return kept.tensor * 1.0000001 + 0.01"), variant=True)


# --- recomputation ---

other.slip(
    "library-checkpoint",
    ("return Recompute.apply(stage, x, *stage.parameters())",
     "from torch.utils.checkpoint import checkpoint\n    return checkpoint(stage, x, use_reentrant=False)"),
    variant=True,
)  # fmt: skip
bank.hint("all-kept", "After the forward, {seen} bytes that were created in it are still alive; the output takes "
          "{truth}. Keep only the input: inside Recompute.forward no graph is built, and "
          "save_for_backward(x) keeps x.")  # fmt: skip
other.slip("all-kept", ("return Recompute.apply(stage, x, *stage.parameters())", "return stage(x)"))
other.slip("all-kept", ("return stage(x)", "with torch.enable_grad():\n            "
          "ctx.y = stage(x.detach().requires_grad_())\n        return ctx.y.detach()"), variant=True)  # fmt: skip
bank.hint("first-stage-no-graph", "The output of recompute doesn't require a gradient when x doesn't, as on the first "
          "stage: then the stage's weights would never learn. Hand the parameters to apply() too.")  # fmt: skip
other.slip("first-stage-no-graph", ("Recompute.apply(stage, x, *stage.parameters())", "Recompute.apply(stage, x)"))
other.slip("first-stage-no-graph", ("*stage.parameters())", "*[p.detach() for p in stage.parameters()])"), variant=True)
bank.hint("ids-no-gradient", "Token numbers are integers and can't have a gradient: {error}. Ask for one only when x "
          "needs one: ctx.needs_input_grad[1].")  # fmt: skip
other.slip("ids-no-gradient", ("requires_grad_(ctx.needs_input_grad[1])", "requires_grad_()"))
other.slip("ids-no-gradient", ("ctx.needs_input_grad[1]", "True"), variant=True)
bank.hint("other-output", "recompute(stage, x) differs from stage(x).")
other.slip("other-output", ("        return stage(x)\n", "        return stage(x).relu()\n"))
other.slip("other-output", ("        return stage(x)\n", "        return 2 * stage(x)\n"), variant=True)
other.slip("nothing-returned", ("    return Recompute.apply", "    Recompute.apply"))
bank.hint("input-gradient-lost", "No gradient came back for x, so the previous stage would learn nothing. Backward "
          "must return it in the position of x.")  # fmt: skip
other.slip("input-gradient-lost", ("return None, x.grad, *", "return None, None, *"))
other.slip("input-gradient-lost", (".detach().requires_grad_(ctx.needs_input_grad[1])", ".detach()"), variant=True)
bank.hint("incoming-ignored", "These are the gradients of the output's sum. Backward gets the gradient of the loss "
          "with respect to the output: go on from it.")  # fmt: skip
other.slip("incoming-ignored", ("y = ctx.stage(x)", "y = ctx.stage(x).sum()"), ("y.backward(gradient)", "y.backward()"))
bank.hint("no-second-graph", "You called backward() on a tensor without a graph: {error}. Inside backward, no graph "
          "is built except within torch.enable_grad(), and a sum taken after that has none either. "
          "y.backward(gradient) needs no sum.")  # fmt: skip
other.slip(
    "no-second-graph",
    ("        with torch.enable_grad():\n            y = ctx.stage(x)", "        y = ctx.stage(x)"),
)
other.slip("no-second-graph", ("y.backward(gradient)", "y.detach().backward(gradient)"), variant=True)
other.slip("incoming-ignored", ("y.backward(gradient)", "y.backward(torch.ones_like(y))"), variant=True)
bank.hint("parameters-twice", "The parameters' gradients were added twice: once inside backward, by y.backward(), and "
          "again because backward returns them. Return None for them.")  # fmt: skip
other.slip("parameters-twice", ("y.backward(gradient)", "y.backward(gradient, retain_graph=True)\n        "
          "parameters = list(ctx.stage.parameters())"),
          ("*[None] * (len(ctx.needs_input_grad) - 2)", "*torch.autograd.grad(y, parameters, gradient)"))  # fmt: skip
other.slip(
    "parameters-twice", ("*[None] * (len(ctx.needs_input_grad) - 2)", "*(p.grad for p in ctx.stage.parameters())")
)
other.slip(
    "parameters-twice",
    ("y.backward(gradient)", "y.backward(gradient, retain_graph=True)\n        y.backward(gradient)"),
    variant=True,
)
bank.hint("parameters-lost", "The stage's parameters have no gradient: the second forward's graph must reach them too.")
other.slip("parameters-lost", ("y.backward(gradient)", "x.grad, = torch.autograd.grad(y, [x], gradient)")
          )  # fmt: skip
other.slip(
    "parameters-lost",
    ("y.backward(gradient)", "y.backward(gradient, inputs=[x] * x.requires_grad or None)"),
    variant=True,
)
bank.hint("overwritten", "The second micro-batch replaced the first one's gradients in p.grad. They must add up.")
other.slip("overwritten", ("y.backward(gradient)", "ctx.stage.zero_grad()\n        y.backward(gradient)"))
other.slip(
    "overwritten",
    (
        "        y.backward(gradient)",
        "        for p in ctx.stage.parameters():\n            p.grad = None\n        y.backward(gradient)",
    ),
    variant=True,
)
bank.hint("frozen-fails", "When a parameter is frozen (requires_grad False), backward fails: {error}")
other.slip("frozen-fails", ("y.backward(gradient)", "parameters = list(ctx.stage.parameters())\n        "
          "found = torch.autograd.grad(y, parameters + [x] * x.requires_grad, gradient)"),
          ("return None, x.grad, *[None] * (len(ctx.needs_input_grad) - 2)",
           "return None, found[-1] if x.requires_grad else None, *found[: len(parameters)]"))  # fmt: skip
other.slip(
    "frozen-fails",
    ("y.backward(gradient)", "y.backward(gradient, inputs=[x] * x.requires_grad + list(ctx.stage.parameters()))"),
    variant=True,
)
bank.hint("x-not-detached", "The gradient of x is twice as large as it should be: the second forward ran on x itself, "
          "so its backward added to x.grad, and the gradient that you return was added again. Begin at a copy without "
          "history, ctx.saved_tensors[0].detach().")  # fmt: skip
other.slip(
    "x-not-detached", (".saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])", ".saved_tensors[0]")
)
other.slip("x-not-detached", ("return None, x.grad, *", "return None, 2 * x.grad, *"), variant=True)


KEEP, TAKE = "ctx.save_for_backward(x)", "ctx.saved_tensors[0]"


bank.hint("change-not-seen", "x was changed in place between forward and backward, and the gradients silently became "
          "those of another x. ctx.save_for_backward(x) notices this, and ctx.saved_tensors then raises autograd's "
          "error; an attribute such as ctx.x doesn't.")  # fmt: skip
other.slip("change-not-seen", (KEEP, "ctx.x = x"), (TAKE, "ctx.x"))
other.slip("change-not-seen", (KEEP, "ctx.x = x.detach()"), (TAKE, "ctx.x"), variant=True)
bank.hint("wrong-recomputed", "With recomputation, the stage's gradients differ from those without.")
other.slip("wrong-recomputed", ("y.backward(gradient)", "y.backward(gradient / len(gradient))"))
other.slip("wrong-recomputed", ("return None, x.grad, *", "return None, gradient, *"), variant=True)
bank.hint("not-recomputed", "The stage ran {n} times for one micro-batch. It should run once in forward and once more "
          "in backward.")  # fmt: skip
other.slip(
    "not-recomputed", ("            y = ctx.stage(x)\n", "            ctx.stage(x)\n            y = ctx.stage(x)\n")
)
other.slip("not-recomputed", ("        return stage(x)\n", "        stage(x)\n        return stage(x)\n"), variant=True)
bank.hint("runs-for-ever", "The stage ran {n} times or more: its second forward was recomputed too, and so on without "
          "end. Call ctx.stage(x) in backward, not recompute.")  # fmt: skip
other.slip("runs-for-ever", ("y = ctx.stage(x)", "y = recompute(ctx.stage, x)"))
other.slip(
    "runs-for-ever", ("y = ctx.stage(x)", "y = Recompute.apply(ctx.stage, x, *ctx.stage.parameters())"), variant=True
)
bank.hint("other-mask", "This is right without dropout and wrong with it: the second forward drew different masks. In "
          "forward, save the random state of x's device for each micro-batch, and restore it before the second "
          "forward.")  # fmt: skip
other.slip("other-mask", ("        set_random_state(x.device, ctx.state)\n", ""))
other.slip("other-mask", ("ctx.stage, ctx.state = stage, random_state(x.device)\n        ctx.save_for_backward(x)\n        "
          "return stage(x)", "ctx.stage = stage\n        ctx.save_for_backward(x)\n        y = stage(x)\n        "
          "ctx.state = random_state(x.device)\n        return y"))  # fmt: skip
other.slip("other-mask", ("ctx.stage, ctx.state = stage,", "ctx.stage = stage\n        Recompute.state ="),
          ("ctx.state", "Recompute.state"))  # fmt: skip


# the CPU's generator alone
other.slip("other-mask", ("        set_random_state(x.device, ctx.state)\n", "        torch.set_rng_state(ctx.state)\n"),
          ("stage, random_state(x.device)", "stage, torch.get_rng_state()"))  # fmt: skip
other.slip("other-mask", ('device) if device.type == "cuda" else torch.get_rng_state()', "None) if False else torch.get_rng_state()"),
          ('if device.type == "cuda":\n        torch.cuda.set', "if False:\n        torch.cuda.set"), variant=True)  # fmt: skip
bank.hint("stream-rewound", "After backward, the next random numbers differ from those without recomputation: the "
          "stream was set back and left there. Put it back to where it was.")  # fmt: skip
other.slip(
    "stream-rewound",
    (
        "        set_random_state(x.device, now)\n",
        "        if x.device.type == 'cpu':\n            torch.set_rng_state(now)\n",
    ),
)
other.slip("stream-rewound", ("        set_random_state(x.device, now)\n", ""))
other.slip("stream-rewound", ("        now = random_state(x.device)\n", "        now = ctx.state\n"), variant=True)
bank.hint("through-x", "When x is itself a result, backward went on through x's own history{error}. Begin the second "
          "forward at a copy without history, ctx.saved_tensors[0].detach(); autograd goes on from the gradient of x "
          "that you return.")  # fmt: skip
other.slip(
    "through-x",
    (".detach().requires_grad_(ctx.needs_input_grad[1])", ""),
    ("return None, x.grad, *", "return None, None, *"),
)
other.slip(
    "through-x",
    ("y = ctx.stage(x)", "y = ctx.stage(ctx.saved_tensors[0])"),
    ("return None, x.grad, *", "return None, None, *"),
    variant=True,
)
bank.add(other)
