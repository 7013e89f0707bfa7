"""Answers to balise 5 of 13_zero_under_the_hood: stage 3, parameters only while their layer computes."""

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 5, whole=True)
slip, text, hint, variant = bank.slip, bank.text, bank.hint, bank.variant

FILL = "all_gather(self.flat, self.own.detach())"
VIEWS = "            for p, view in zip(self.parameters, self.views):\n                p.data = view\n"
EMPTIED = "        for p in self.parameters:\n            p.data = self.nothing\n"
RESIZED = "        self.flat.untyped_storage().resize_(0)\n"
BEFORE = "        layer.register_forward_pre_hook(gather)\n"
AFTER = "        layer.register_forward_hook(free)\n"
BACKWARD = "        layer.register_full_backward_pre_hook(backward_begins)\n"
TIED = "units = list(dict.fromkeys(self.home[p] for p in layer.parameters()))"
UPDATE = "        self.optimizer.step()\n"

UNIT = """
class Unit(Part):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.own = nn.Parameter(self.own.detach().clone())
        self.nothing = self.flat.new_empty(0)
        self.gathered = True
        self.free()
"""

# ---------------------------------------------------------------- right answers of another design

VIEWS_STAY = (
    UNIT
    + '''
    def gather(self):
        """The parameters keep their views; only the memory below them comes and goes."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.numel() * self.flat.element_size())
            with torch.no_grad():
                dist.all_gather(list(self.flat.chunk(dist.get_world_size())), self.own)

    def free(self):
        self.flat.untyped_storage().resize_(0)


class ShardedParameters(ShardedGradients):
    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        self.running, self.parts, self.frozen, self.home = [], [], [], {}
        for layer in layers:
            self.add(layer)
        self.optimizer = optimizer_class([part.own for part in self.parts], **options)

    def add(self, layer):
        kinds = {True: [], False: []}
        for p in layer.parameters():
            if p not in self.home:
                kinds[p.requires_grad].append(p)
        for kind, group in kinds.items():
            if group:
                unit = Unit(group)
                (self.parts if kind else self.frozen).append(unit)
                for p in group:
                    self.home[p] = unit
                    if kind:
                        p.register_post_accumulate_grad_hook(self.ready)
        needed = {self.home[p]: None for p in layer.parameters()}

        def gather(*_):
            for unit in needed:
                unit.gather()

        def again(gradient):
            [unit.free() for unit in self.frozen if unit not in needed]
            gather()

        def after(module, inputs, output):
            for unit in needed:
                unit.free()
            if output.requires_grad:
                output.register_hook(again)

        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(after)

    def send(self, part):
        super().send(part)
        part.free()

    def reduce(self):
        super().reduce()
        for unit in self.frozen:
            unit.free()

    def update(self):
        self.optimizer.step()
'''
)
text(None, VIEWS_STAY)

AHEAD = (
    UNIT
    + '''
    def gather(self):
        if not self.gathered:
            self.flat.untyped_storage().resize_(len(self.flat) * self.flat.element_size())
            all_gather(self.flat, self.own.data)
            for p, view in zip(self.parameters, self.views):
                p.data = view
            self.gathered = True

    def free(self):
        for p in self.parameters:
            p.data = self.nothing
        self.flat.untyped_storage().resize_(0)
        self.gathered = False


class ShardedParameters(ShardedGradients):
    """The next layer is fetched ahead; frozen parameters leave after the layer before them in backward."""

    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        self.running, self.parts, self.frozen, self.home, self.needs = [], [], [], {}, []
        for number, layer in enumerate(layers):
            self.add(layer)
            layer.register_forward_pre_hook(lambda *_, k=number: self.fetch(k, k + 1))
            layer.register_forward_hook(lambda *_, k=number: self.drop(k))
            layer.register_full_backward_pre_hook(lambda *_, k=number: (self.drop_frozen(k + 1), self.fetch(k, k - 1)) and None)
        self.optimizer = optimizer_class(self.shards, **options)

    def fetch(self, *numbers):
        for k in numbers:
            if 0 <= k < len(self.needs):
                for unit in self.needs[k]:
                    unit.gather()

    def drop(self, k):
        for unit in self.needs[k]:
            unit.free()

    def drop_frozen(self, k):
        if k < len(self.needs):
            for unit in self.needs[k]:
                if unit in self.frozen:
                    unit.free()

    def add(self, layer):
        own = list(dict.fromkeys(p for p in layer.parameters() if p not in self.home))
        for group, units in (([p for p in own if p.requires_grad], self.parts), ([p for p in own if not p.requires_grad], self.frozen)):
            if group:
                units.append(Unit(group))
                self.home |= {p: units[-1] for p in group}
        for p in own:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.ready)
        self.needs.append(list({id(self.home[p]): self.home[p] for p in layer.parameters()}.values()))

    def send(self, part):
        super().send(part)
        part.free()

    def reduce(self):
        super().reduce()
        for unit in [*self.parts, *self.frozen]:
            if unit.gathered:
                unit.free()

    def update(self):
        self.optimizer.step()
'''
)
text(None, AHEAD)

LOOKED_UP = (
    UNIT
    + '''
    def gather(self):
        if self.parameters[0].numel() == 0:
            whole = torch.empty_like(self.own).new_empty(self.own.numel() * dist.get_world_size())
            all_gather(whole, self.own.detach())
            for p, view in zip(self.parameters, unflatten(whole, self.views)):
                p.data = view
            self.whole = whole

    def free(self):
        self.flat.untyped_storage().resize_(0)
        self.whole = None
        for p in self.parameters:
            p.data = self.nothing


class ShardedParameters(ShardedGradients):
    """p.data is replaced; what the graph would keep of parameters is looked up again in backward (saved-tensor hooks)."""

    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        self.running, self.parts, self.frozen, self.home = [], [], [], {}
        for layer in layers:
            self.add(layer)
        self.optimizer = optimizer_class(self.shards, **options)

    def add(self, layer):
        for wanted in (True, False):
            new = [p for p in dict.fromkeys(layer.parameters()) if p.requires_grad is wanted and p not in self.home]
            if new:
                unit = Unit(new)
                (self.parts if wanted else self.frozen).append(unit)
                for p in new:
                    self.home[p] = unit
                    if wanted:
                        p.register_post_accumulate_grad_hook(self.ready)
        units = list(dict.fromkeys(self.home[p] for p in layer.parameters()))

        def pack(x):
            for unit in units:
                if unit.whole is not None and x.untyped_storage().data_ptr() == unit.whole.untyped_storage().data_ptr():
                    return unit, x.shape, x.stride(), x.storage_offset()
            return x

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            unit, shape, stride, offset = packed
            unit.gather()
            return unit.whole.as_strided(shape, stride, offset)

        hooks = []

        def before(*_):
            for unit in units:
                unit.gather()
            hooks.append(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            hooks[-1].__enter__()

        def after(*_):
            hooks.pop().__exit__(None, None, None)
            for unit in units:
                unit.free()

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

        def backward(*_):
            for unit in self.frozen:
                if unit not in units:
                    unit.free()
            for unit in units:
                unit.gather()

        layer.register_full_backward_pre_hook(backward)

    def send(self, part):
        super().send(part)
        part.free()

    def reduce(self):
        super().reduce()
        for unit in self.frozen:
            unit.free()

    def update(self):
        self.optimizer.step()
'''
)
text(None, LOOKED_UP)

# ---------------------------------------------------------------- wrong ones: the hint, what is recorded

hint(
    "empty-in-forward",
    "In forward, a layer found empty parameters ({error}). gather() must run before the layer computes (so "
    "whatever frees the layer's memory must call free()). It must give the storage all its bytes (not elements) "
    "back, and leave p.data as views of the filled flat tensor.",
)
hint(
    "empty-in-backward",
    "Forward works, but in backward parameters were missing ({error}). The layer needs them again, down to its "
    "very first operation: gather in a hook of register_full_backward_pre_hook, and free nothing that it still "
    "computes with. If you do both, gather() filled another tensor: autograd looks at the old memory, which "
    "resize_ must bring back.",
)
hint(
    "freed-memory-read",
    "A rank crashed when it read freed memory ({error}). Either gather() filled a tensor whose storage has no "
    "bytes, or a layer computed while its unit was not gathered. Is it gathered before forward, and again before "
    "backward?",
)
hint(
    "tied-missing",
    "The layer whose weight is tied to another layer's found an empty parameter ({error}). It has no unit of its "
    "own, but must gather the unit that holds the weight.",
)
hint(
    "stale-parameters",
    "After the first step, forward still sees the old parameters ({names}). The gradients must reach the shards, "
    "update() must call the optimizer's step, and gather() must fetch the shards again after each update.",
)
hint(
    "frozen-decayed",
    "The frozen parameter changed. Put it in a separate unit that the optimizer does not know: weight decay would "
    "shrink it.",
)
hint(
    "frozen-known",
    "The optimizer was given the shard of a frozen layer, where it has nothing to do. Keep such a unit in "
    "self.frozen, and give the optimizer the shards of self.parts.",
)
hint(
    "unused-moved",
    "An unused parameter, or others of its layer, came out wrong ({names}). The gradients of its layer never "
    "become complete: reduce() must send what backward left, with zeros for the missing ones.",
)
hint(
    "stage3-local",
    "Nothing was reduced: each rank updates its shards with its own gradient.",
)
hint(
    "never-freed",
    "Between two steps {got} layers are whole on this rank. The parameters were never freed: call free() in a "
    "forward hook, and when the gradients have been sent.",
)
hint(
    "some-never-freed",
    "Between two steps {got} layers are still gathered on this rank. Free each layer when it is done, including "
    "the first and the last.",
)
hint(
    "frozen-whole",
    "The frozen layer is held whole. It takes memory like any other: make it a unit that is gathered and freed, "
    "but that the optimizer does not know.",
)
hint(
    "memory-not-returned",
    "p.data was emptied, but {got} bytes are still alive, where {expected:.0f} at most are expected: the flat "
    "tensor, or the graph, still holds the memory. untyped_storage().resize_(0) frees it, whatever else refers to "
    "it.",
)
hint(
    "more-than-its-numbers",
    "gather() takes more memory than the numbers need: numel() · element_size() "
    "bytes, so half as many when each number has half as many bits.",
)
slip("more-than-its-numbers", ("self.flat.numel() * self.flat.element_size()", "self.flat.numel() * 8"))
variant("more-than-its-numbers", VIEWS_STAY, ("self.flat.numel() * self.flat.element_size()", "self.flat.numel() * 8"))
hint(
    "all-at-once",
    "In forward, {got} bytes more than between two steps were alive at once, where {expected:.0f} at most are "
    "expected. Gather a layer just before it computes, and free it just after.",
)
hint(
    "kept-after-forward",
    "After forward, {got} layers are still gathered. Free each in a forward hook; backward gathers it again.",
)
hint(
    "kept-in-backward",
    "In backward, {got} bytes more than between two steps were alive at the peak, where {expected:.0f} at most are "
    "expected. Free a layer as soon as its gradients have been sent.",
)
hint(
    "frozen-kept",
    "In backward, frozen layers stay gathered. They get no gradient, so send() never frees them. Free them when "
    "the backward of another layer begins (`backward_begins` does that: is it registered?), and the last ones in "
    "reduce().",
)
hint(
    "kept-after-backward",
    "After reduce(), layers are still gathered. Free a layer in send(): its gradients are complete there, so its "
    "parameters are no longer needed.",
)
hint(
    "gathered-after-update",
    "After update(), the whole model is in memory again. In stage 3 nothing is gathered before a layer is used.",
)
hint(
    "gathered-often",
    "A rank sent {got:.0f} bytes, where {expected:.0f} at most are expected. Gather each layer once for forward "
    "and once for backward, and reduce-scatter its gradients once.",
)
hint(
    "states-not-shared",
    "The optimizer was given something other than the shards of self.parts, so its states are not those of this "
    "rank's part. Give it the own of each unit.",
)
hint(
    "gathered-again",
    "gather() was called twice, and sent data twice. If the values are already there, it must do nothing.",
)
hint(
    "gathers-nothing",
    "Rank {rank} gathers nothing: gather() must fill `flat` from the `own` of all ranks.",
)
hint(
    "gather-in-flight",
    "gather() returned while its all-gather was still running: the layer would compute with values that have not "
    "arrived. Wait for it.",
)

slip("empty-in-forward", (BEFORE, ""))
slip("empty-in-forward", (VIEWS, ""))
slip("empty-in-backward", (BACKWARD, ""))
slip(
    "empty-in-backward",
    ("        part.free()\n", "        part.free()\n        for unit in self.frozen:\n            unit.free()\n"),
)
slip(
    "weights-differ",
    ("all_gather(self.flat, self.own.detach())", "dist.all_gather_into_tensor(self.flat, 2 * self.own.detach())"),
)
slip("empty-in-forward", (EMPTIED, ""), (VIEWS, ""), (BEFORE, ""))
slip("freed-memory-read", (EMPTIED, ""), (VIEWS, ""),
     (BEFORE, "        layer.register_forward_pre_hook(lambda *_: gather() if torch.is_grad_enabled() else None)\n"))  # fmt: skip
slip("tied-missing", (TIED, "units = list(dict.fromkeys(self.home[p] for p in layer.parameters() if p not in known))"),
     ("        for trained in", "        known = set(self.home)\n        for trained in"))  # fmt: skip
slip("stale-parameters", (VIEWS, "            for p, view in zip(self.parameters, self.views):\n"
     "                p.data = getattr(p, 'first', view.clone())\n                p.first = p.data\n"), (EMPTIED, ""))  # fmt: skip
slip("stale-parameters", (EMPTIED, ""), (RESIZED, ""), ("        self.gathered = False\n", ""))
slip("frozen-decayed", ("for trained in (True, False):", "for trained in (True,):"), ("p.requires_grad == trained and ", ""),
     ("for p in new:\n                        p.register", "for p in (q for q in new if q.requires_grad):\n                        p.register"))  # fmt: skip
slip("unused-moved", ("    def update(self):", "    def reduce(self):\n        self.wait()\n        for part in self.parts:\n"
     "            if part.own.grad is None:\n                part.own.grad = torch.zeros_like(part.own)\n                for p in part.parameters:\n                    p.grad = None\n                part.free()\n\n    def update(self):"))  # fmt: skip
slip("stage3-local", ("        super().send(part)\n", "        own = flatten([torch.zeros_like(v) if p.grad is None else p.grad for p, v in zip(part.parameters, part.views)], dist.get_world_size())\n"
     "        own = shard(own, dist.get_rank(), dist.get_world_size()).clone()\n"
     "        part.own.grad = own if part.own.grad is None else part.own.grad + own\n"
     "        for p in part.parameters:\n            p.grad = None\n"))  # fmt: skip
slip("never-freed", (RESIZED, ""), (EMPTIED, ""))
slip("memory-not-returned", (RESIZED, ""))
slip("stale-parameters", (AFTER, ""), ("        part.free()\n", ""))
slip(
    "frozen-whole",
    ("for trained in (True, False):", "for trained in (True,):"),
    (TIED, "units = list(dict.fromkeys(self.home[p] for p in layer.parameters() if p in self.home))"),
)
slip("kept-after-forward", (AFTER, ""))
slip(
    "kept-after-forward",
    (AFTER, "        layer.register_forward_hook(lambda *_: free() if torch.is_grad_enabled() else None)\n"),
)
slip("kept-in-backward", ("        part.free()\n", "        self.later = getattr(self, 'later', []) + [part]\n"),
     ("    def update(self):", "    def reduce(self):\n        super().reduce()\n        for part in self.later:\n            part.free()\n        self.later = []\n\n    def update(self):"))  # fmt: skip
slip("kept-after-backward", ("        part.free()\n", "        self.later = getattr(self, 'later', []) + [part]\n        if len(self.later) > 3:\n            self.later.pop(0).free()\n"),
     ("    def update(self):\n", "    def update(self):\n        for part in self.later:\n            part.free()\n        self.later = []\n"))  # fmt: skip
slip("gathered-after-update", (UPDATE, UPDATE + "        for unit in self.parts:\n            unit.gather()\n"))
slip("all-at-once", (BEFORE, "        layer.register_forward_pre_hook("
     "lambda *_: [unit.gather() for unit in ([*self.parts, *units] if layer is self.first else units)] and None)\n"),
     ("        for trained in (True, False):", "        self.first = getattr(self, 'first', layer)\n        for trained in (True, False):"))  # fmt: skip
slip("gathered-often", (VIEWS, VIEWS + "            all_gather(self.flat, self.own.detach())\n"))
slip("states-not-shared", ("optimizer_class(self.shards, **options)",
     "optimizer_class([nn.Parameter(part.own.detach().repeat(dist.get_world_size())) for part in self.parts], **options)"),
     (UPDATE, """        for group in self.optimizer.param_groups:
            for part, whole in zip(self.parts, group["params"]):
                whole.grad = part.own.grad.repeat(dist.get_world_size())
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for part, whole in zip(self.parts, group["params"]):
                part.own.data.copy_(whole[: len(part.own)])
                whole.grad = None
"""))  # fmt: skip
slip("memory-not-returned", (RESIZED, ""), ("            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())\n",
     "            self.flat = torch.empty_like(self.own).new_empty(len(self.own) * dist.get_world_size())\n"
     "            self.views = unflatten(self.flat, [v for v in self.views])\n"))  # fmt: skip
slip("memory-not-returned", (RESIZED, "        self.flat = None\n"), ("            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())\n",
     "            self.flat = torch.empty_like(self.own).new_empty(len(self.own) * dist.get_world_size())\n"
     "            self.views = unflatten(self.flat, [torch.empty(shape) for shape in self.shapes])\n"),
     ("        self.nothing =", "        self.shapes = [p.shape for p in parameters]\n        self.nothing ="))  # fmt: skip
text(
    "never-freed",
    '''
class Unit(Part):
    def gather(self):
        pass

    def free(self):
        pass


class ShardedParameters(ShardedGradients):
    """Stage 2 under another name."""

    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        super().__init__([p for layer in layers for p in layer.parameters()], optimizer_class, **options)
        self.frozen = []
''',
)
text(
    "zero-borrowed",
    """
class Unit(Part):
    pass


class ShardedParameters(ShardedGradients):
    def __init__(self, layers, optimizer_class=torch.optim.AdamW, **options):
        from torch.distributed.fsdp import fully_shard
        for layer in layers:
            fully_shard(layer)
        self.optimizer = optimizer_class([p for layer in layers for p in layer.parameters()], **options)
""",
)
slip(
    "memory-not-returned",
    (RESIZED, "        KEPT.append(self.flat.clone() if self.flat.untyped_storage().nbytes() else None)\n" + RESIZED),
    ("class Unit", "KEPT = []\n\n\nclass Unit"),
)
slip(None, (BACKWARD, "        layer.register_forward_hook(\n"
     "            lambda m, i, out: out.register_hook(backward_begins) and None if out.requires_grad else None\n        )\n"))  # fmt: skip
slip(
    "frozen-kept",
    ("                if unit not in units:\n                    unit.free()\n", "                pass\n"),
)
slip("frozen-kept", ("                if unit not in units:\n                    unit.free()\n", "                pass\n"),
     ("        super().reduce()\n        for unit in self.frozen:\n            unit.free()\n", "        super().reduce()\n"))  # fmt: skip

# the first layer is gathered once for all, and only fetched anew after an update
slip(
    "some-never-freed",
    (
        "        def free(*_):\n            for unit in units:\n                unit.free()",
        "        def free(*_):\n            for unit in units:\n                if unit is not self.parts[0]:\n                    unit.free()",
    ),
    ("        part.free()", "        if part is not self.parts[0]:\n            part.free()"),
    (UPDATE, UPDATE + "        self.parts[0].free()\n        self.parts[0].gather()\n"),
)
# the last three layers stay between forward and backward
slip(
    "kept-after-forward",
    (
        "        def free(*_):\n            for unit in units:\n                unit.free()",
        "        def free(*_):\n            for unit in units:\n                if unit not in self.parts[-3:]:\n                    unit.free()",
    ),
)
slip("gathered-again", ("            self.gathered = True\n", ""))
slip("gathers-nothing", ("            all_gather(self.flat, self.own.detach())\n", ""))
slip(
    "gather-in-flight",
    ("all_gather(self.flat, self.own.detach())", "all_gather(self.flat, self.own.detach(), async_op=True)"),
)
slip(
    "frozen-kept",
    (
        "        super().reduce()\n        for unit in self.frozen:\n            unit.free()\n",
        "        super().reduce()\n",
    ),
)
slip("kept-after-backward", ("        super().send(part)\n        part.free()\n", "        super().send(part)\n"))
slip("gathered-after-update", ("        self.optimizer.step()\n", "        super().update()\n"))
slip("copy-outside", ("            self.gathered = True\n", "            self.gathered = True\n            KEPT[id(self)] = self.flat.tolist()\n"),
     ("class Unit(Part):", "KEPT = {}\n\n\nclass Unit(Part):"))  # fmt: skip
slip("frozen-known", ("        self.optimizer = optimizer_class(self.shards, **options)",
     "        everything = [unit.own for unit in (*self.parts, *self.frozen)]\n"
     "        self.optimizer = optimizer_class(everything, **options)"))  # fmt: skip

# ---------------------------------------------------------------- the same mistakes in another design

FETCHED = "lambda *_, k=number: self.fetch(k, k + 1))"
CLEARED = "        self.flat.untyped_storage().resize_(0)\n        self.gathered = False\n"
SENT = "        super().send(part)\n        part.free()\n"
STEPPED = "    def update(self):\n        self.optimizer.step()\n"
variant("empty-in-forward", VIEWS_STAY, ("        layer.register_forward_pre_hook(gather)\n", ""))
variant("empty-in-forward", AHEAD, (f"            layer.register_forward_pre_hook({FETCHED}\n", ""))
variant("empty-in-backward", AHEAD, ("self.fetch(k, k - 1)) and None)", "None) and None)"))
variant("freed-memory-read", VIEWS_STAY, ("        layer.register_forward_pre_hook(gather)\n",
        "        layer.register_forward_pre_hook(lambda *_: gather() if torch.is_grad_enabled() else None)\n"))  # fmt: skip
variant("tied-missing", AHEAD, ("for p in layer.parameters()}.values()", "for p in own}.values()"))
variant("stale-parameters", AHEAD, ("            all_gather(self.flat, self.own.data)\n",
        "            if not hasattr(self, 'first'):\n                all_gather(self.flat, self.own.data)\n                self.first = self.flat.tolist()\n"
        "            self.flat.copy_(torch.tensor(self.first, dtype=self.flat.dtype))\n"))  # fmt: skip
variant(
    "frozen-decayed",
    VIEWS_STAY,
    ("                (self.parts if kind else self.frozen).append(unit)", "                self.parts.append(unit)"),
)
variant(
    "frozen-known",
    VIEWS_STAY,
    ("[part.own for part in self.parts]", "[part.own for part in self.parts + self.frozen]"),
)
variant("unused-moved", AHEAD, ("        super().reduce()\n        for unit in [*self.parts", "        self.wait()\n        for part in self.parts:\n            if part.own.grad is None:\n"
        "                part.own.grad = torch.zeros_like(part.own)\n        for unit in [*self.parts"))  # fmt: skip
variant("stage3-local", VIEWS_STAY, ("        super().send(part)\n", "        mine = [torch.zeros_like(v) if p.grad is None else p.grad for p, v in zip(part.parameters, part.views)]\n"
        "        mine = flatten(mine, dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]\n"
        "        part.own.grad = mine.clone() if part.own.grad is None else part.own.grad + mine\n"
        "        for p in part.parameters:\n            p.grad = None\n"))  # fmt: skip
variant(
    "never-freed",
    AHEAD,
    ("        for p in self.parameters:\n            p.data = self.nothing\n", ""),
    (CLEARED, "        self.gathered = False\n"),
)
variant("frozen-whole", VIEWS_STAY, ("                unit = Unit(group)\n", "                if not kind:\n                    continue\n                unit = Unit(group)\n"),
        ("needed = {self.home[p]: None for p in layer.parameters()}", "needed = {self.home[p]: None for p in layer.parameters() if p in self.home}"))  # fmt: skip
variant("memory-not-returned", AHEAD, (CLEARED, "        self.gathered = False\n"))
variant(
    "memory-not-returned",
    LOOKED_UP,
    ("        self.whole = None\n", "        self.last = getattr(self, 'whole', None)\n"),
)
variant(
    "kept-after-forward", AHEAD, ("            layer.register_forward_hook(lambda *_, k=number: self.drop(k))\n", "")
)
variant("kept-in-backward", AHEAD, (SENT, "        super().send(part)\n"))
variant("kept-after-backward", VIEWS_STAY, (SENT, "        super().send(part)\n"))
variant(
    "gathered-after-update",
    VIEWS_STAY,
    (STEPPED, STEPPED + "        for part in self.parts:\n            part.gather()\n"),
)
variant("all-at-once", AHEAD, (FETCHED, "lambda *_, k=number: self.fetch(*range(k, len(self.needs))))"))
variant(
    "gathered-often",
    VIEWS_STAY,
    (
        "        def again(gradient):\n",
        "        def again(gradient):\n            for unit in needed:\n                unit.free()\n                unit.gather()\n                unit.free()\n",
    ),
)
variant("states-not-shared", VIEWS_STAY, ("optimizer_class([part.own for part in self.parts], **options)",
        "optimizer_class([nn.Parameter(part.own.detach().repeat(dist.get_world_size())) for part in self.parts], **options)"),
        (STEPPED, """    def update(self):
        for group in self.optimizer.param_groups:
            for part, whole in zip(self.parts, group["params"]):
                whole.grad = part.own.grad.repeat(dist.get_world_size())
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for part, whole in zip(self.parts, group["params"]):
                part.own.data.copy_(whole[: len(part.own)])
"""))  # fmt: skip
variant("frozen-kept", VIEWS_STAY, ("            [unit.free() for unit in self.frozen if unit not in needed]\n", ""))
variant(
    "frozen-kept",
    LOOKED_UP,
    (
        "        super().reduce()\n        for unit in self.frozen:\n            unit.free()\n",
        "        super().reduce()\n",
    ),
)
variant("some-never-freed", VIEWS_STAY, ("            for unit in needed:\n                unit.free()\n            if output",
        "            for unit in needed:\n                if unit is not self.parts[0]:\n                    unit.free()\n            if output"),
        ("        part.free()\n", "        if part is not self.parts[0]:\n            part.free()\n"),
        (STEPPED, STEPPED + "        self.parts[0].free()\n        self.parts[0].gather()\n"))  # fmt: skip
variant("gathered-again", LOOKED_UP, ("        if self.parameters[0].numel() == 0:\n", "        if True:\n"))
variant("gathers-nothing", AHEAD, ("            all_gather(self.flat, self.own.data)\n", ""))
variant(
    "gather-in-flight",
    AHEAD,
    ("all_gather(self.flat, self.own.data)", "all_gather(self.flat, self.own.data, async_op=True)"),
)

bank.edge(
    "copy-outside",
    "frozen-decayed",
    "frozen-kept",
    "frozen-known",
    "frozen-whole",
    "more-than-its-numbers",
    "some-never-freed",
    "unused-moved",
)
