"""Answers to balise 3 of 13_zero_under_the_hood: stage 1, a shard of the optimizer states on each rank."""

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 3, whole=True)
slip, text, hint, variant = bank.slip, bank.text, bank.hint, bank.variant

MADE = 'parts = self.make_parts(group["params"])'
REDUCED = "flat = flatten(gradients, dist.get_world_size()).div_(dist.get_world_size())"
SCATTERED = "reduce_scatter(part.own.grad, flat)"
GATHERED = "all_gather(part.flat, part.own.detach())"

# ---------------------------------------------------------------- right answers of another design

BY_OWNER = '''
class ShardedOptimizer:
    """Gradients live in a flat tensor of their own; each owner collects its shard by reduce, and broadcasts it."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        self.parts = []
        groups = param_groups(parameters)
        for group in groups:
            self.parts.append(self.make_parts(group.pop("params"))[0])
            group["params"] = [self.parts[-1].own]
        self.optimizer = optimizer_class(groups, **options)

    def make_parts(self, parameters):
        return [Part(parameters)]

    @property
    def shards(self):
        return [part.own for part in self.parts]

    def reduce(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        for part in self.parts:
            flat = torch.zeros_like(part.flat)
            for p, view in zip(part.parameters, unflatten(flat, part.views)):
                if p.grad is not None:
                    view.copy_(p.grad)
            for owner in range(size):
                dist.reduce(shard(flat, owner, size), dst=owner)
            part.own.grad = shard(flat, rank, size).clone() / size

    def update(self):
        self.optimizer.step()
        size = dist.get_world_size()
        for part in self.parts:
            for owner in range(size):
                dist.broadcast(shard(part.flat, owner, size), src=owner)

    def step(self):
        self.reduce()
        self.update()

    def zero_grad(self):
        self.optimizer.zero_grad()
        for part in self.parts:
            for p in part.parameters:
                p.grad = None
'''
text(None, BY_OWNER)

OWN_MEMORY = '''
class ShardedOptimizer:
    """The shard has a memory of its own; lists of pieces; averages by ReduceOp.AVG."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        groups = param_groups(parameters)
        self.parts = [part for group in groups for part in self.make_parts(group["params"])]
        for part in self.parts:
            part.own = nn.Parameter(part.own.detach().clone())
        self.optimizer = optimizer_class(
            [dict(group, params=[part.own]) for group, part in zip(groups, self.parts)], **options
        )

    def make_parts(self, parameters):
        return [Part(parameters)]

    @property
    def shards(self):
        return [part.own for part in self.parts]

    @torch.no_grad()
    def reduce(self):
        size = dist.get_world_size()
        for part in self.parts:
            whole = []
            for p in part.parameters:
                whole.append(p.grad if p.grad is not None else torch.zeros_like(p))
                p.grad = None
            pieces = [piece.contiguous() for piece in flatten(whole, size).chunk(size)]
            mine = torch.empty_like(part.own)
            dist.reduce_scatter(mine, pieces)
            part.own.grad = mine / size

    @torch.no_grad()
    def update(self):
        self.optimizer.step()
        for part in self.parts:
            pieces = list(part.flat.chunk(dist.get_world_size()))
            dist.all_gather(pieces, part.own)

    def step(self):
        self.reduce()
        self.update()

    def zero_grad(self):
        for part in self.parts:
            part.own.grad = None
            for p in part.parameters:
                p.grad = None
'''
text(None, OWN_MEMORY)

ALL_TO_ALL = '''
class ShardedOptimizer:
    """All-to-all and a sum in the place of the reduce-scatter; asynchronous gathers."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        self.parts = []
        self.optimizer = None
        for group in param_groups(parameters):
            new = self.make_parts(group.pop("params"))
            self.parts.extend(new)
            own = {"params": [part.own for part in new], **group}
            if self.optimizer is None:
                self.optimizer = optimizer_class([own], **options)
            else:
                self.optimizer.add_param_group(own)

    def make_parts(self, parameters):
        return [Part(parameters)]

    @property
    def shards(self):
        return [part.own for part in self.parts]

    def reduce(self):
        size = dist.get_world_size()
        for part in self.parts:
            flat = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in part.parameters], size)
            arrived = torch.empty_like(flat)
            dist.all_to_all_single(arrived, flat)
            part.own.grad = arrived.view(size, -1).mean(dim=0)

    def update(self):
        self.optimizer.step()
        works = [all_gather(part.flat, part.own.detach().clone(), async_op=True) for part in self.parts]
        for work in works:
            work.wait()

    def step(self):
        self.reduce()
        self.update()

    def zero_grad(self):
        for part in self.parts:
            part.own.grad = None
            for p in part.parameters:
                p.grad = None
'''
text(None, ALL_TO_ALL)
slip(None, (REDUCED, "flat = flatten(gradients, dist.get_world_size())"),
     (SCATTERED, "reduce_scatter(part.own.grad, flat, op=dist.ReduceOp.AVG)"))  # fmt: skip
slip(None, ("            part.own.grad = torch.empty_like(part.own)\n            reduce_scatter(part.own.grad, flat)",
     "            part.own.grad = torch.empty_like(part.own)\n            reduce_scatter(part.own.grad, flat)\n"
     "            for p in part.parameters:\n                p.grad = None"))  # fmt: skip
slip(None, ("all_gather(part.flat, part.own.detach())", "all_gather(part.flat, part.own.data)"))

# ---------------------------------------------------------------- wrong ones: the hint, what is recorded, other designs

slip("nothing-travels", (SCATTERED, "part.own.grad.copy_(shard(flat, dist.get_rank(), dist.get_world_size()))"),
     (GATHERED, "pass"))  # fmt: skip
variant("nothing-travels", OWN_MEMORY, ("dist.reduce_scatter(mine, pieces)", "mine.copy_(pieces[dist.get_rank()])"),
        ("dist.all_gather(pieces, part.own)", "pieces[dist.get_rank()].copy_(part.own)"))  # fmt: skip

hint("local-gradient", "own.grad is a shard of the rank's own gradient: it ignores the rows of the other ranks.")
slip("local-gradient", (REDUCED, "flat = flatten(gradients, dist.get_world_size())"),
     (SCATTERED, "part.own.grad.copy_(shard(flat, dist.get_rank(), dist.get_world_size()))"))  # fmt: skip
slip("local-gradient", (SCATTERED, "part.own.grad.copy_(shard(flat, dist.get_rank(), dist.get_world_size()))"))
variant("local-gradient", OWN_MEMORY, ("dist.reduce_scatter(mine, pieces)", "mine.copy_(pieces[dist.get_rank()])"))

slip("sum-not-mean", (REDUCED, "flat = flatten(gradients, dist.get_world_size())"))
variant("sum-not-mean", OWN_MEMORY, ("mine / size", "mine"))

slip("mean-divided-twice", (SCATTERED, "reduce_scatter(part.own.grad, flat, op=dist.ReduceOp.AVG)"))
variant("mean-divided-twice", OWN_MEMORY, ("mine / size", "mine / size / size"))

slip("not-gathered", (GATHERED, "pass"))
slip("not-gathered", (GATHERED, "all_gather(torch.empty_like(part.flat), part.own.detach())"))
variant("not-gathered", OWN_MEMORY, ("dist.all_gather(pieces, part.own)", "pieces[dist.get_rank()].copy_(part.own)"))

hint(
    "no-step",
    "After three steps the shards still hold their old values. Call self.optimizer.step() to update them, then "
    "gather them.",
)
slip("no-step", ("        self.optimizer.step()\n", ""))
variant("no-step", OWN_MEMORY, ("        self.optimizer.step()\n", ""))

hint(
    "views-lost",
    "The shards were updated, but the model's parameters ({name}) do not follow: they are not views of the "
    "gathered tensor. Keep p.data a view of the flat tensor, and gather into that tensor.",
)
slip("views-lost", (MADE, MADE + '\n            for p in group["params"]:\n                p.data = p.data.clone()'))
slip("views-lost", (GATHERED, "part.flat = torch.empty_like(part.flat); all_gather(part.flat, part.own.detach())"),
     (MADE, MADE + "\n            for p in group[\"params\"]:\n                p.data = p.data.clone()"))  # fmt: skip
variant("views-lost", ALL_TO_ALL, ("            self.parts.extend(new)", "            self.parts.extend(new)\n"
        "            for p in new[0].parameters:\n                p.data = p.data.clone()"))  # fmt: skip

hint(
    "wrong-shard",
    "The gathered parameters are not the shards in rank order. Does every rank use its own shard, shard(flat, "
    "rank, world_size)?",
)
slip("wrong-shard", (GATHERED, "mine = shard(part.flat, 0, dist.get_world_size()); dist.broadcast(mine, src=0); "
     "all_gather(part.flat, mine.clone())"))  # fmt: skip
variant("wrong-shard", ALL_TO_ALL, ("works = [all_gather(part.flat, part.own.detach().clone(), async_op=True) for part in self.parts]",
        "works = []\n        for part in self.parts:\n            first = part.own.detach().clone()\n            dist.broadcast(first, src=0)\n"
        "            part.flat.copy_(first.repeat(dist.get_world_size()))"))  # fmt: skip

slip("none-gradient", ("torch.zeros_like(p) if p.grad is None else p.grad for", "p.grad for"))
variant("none-gradient", OWN_MEMORY, ("p.grad if p.grad is not None else torch.zeros_like(p)", "p.grad"))

hint(
    "gradient-left-out",
    "A collective refused the sizes: {error}. The flat gradient must be as long as the flat parameters, padding "
    "included; a parameter without a gradient counts as zero, in its place. Or two arguments are swapped: the "
    "result comes first.",
)
slip("gradient-left-out", ("for p in part.parameters]\n", "for p in part.parameters if p.grad is not None]\n"))
variant("gradient-left-out", OWN_MEMORY, ("whole.append(p.grad if p.grad is not None else torch.zeros_like(p))",
        "whole += [p.grad] if p.grad is not None else []"))  # fmt: skip

slip("no-shard-gradient", ("part.own.grad = torch.empty_like(part.own)\n            reduce_scatter(part.own.grad, flat)",
     "mine = torch.empty_like(part.own)\n            reduce_scatter(mine, flat)"))  # fmt: skip
variant("no-shard-gradient", OWN_MEMORY, ("part.own.grad = mine / size", "part.gradient = mine / size"))

slip("wrong-shard-gradient", (REDUCED, REDUCED + "\n            flat = flat.abs()"))
variant("wrong-shard-gradient", OWN_MEMORY, ("mine / size", "mine * mine / size"))

hint("gathered-in-reduce", "After reduce(), own.grad is a whole gradient of {found} elements, not a shard of {due}.")
slip("gathered-in-reduce", (SCATTERED, "dist.all_reduce(flat); part.own.grad = flat"), (GATHERED, "pass"),
     (MADE, MADE + "\n            for part in parts:\n                part.own = nn.Parameter(part.flat)"))  # fmt: skip
variant("gathered-in-reduce", ALL_TO_ALL, ("            self.parts.extend(new)",
        "            new[0].own = nn.Parameter(new[0].flat)\n            self.parts.extend(new)"),
        ("dist.all_to_all_single(arrived, flat)", "dist.all_reduce(flat)"), ("arrived.view(size, -1).mean(dim=0)", "flat / size"),
        ("works = [all_gather(part.flat, part.own.detach().clone(), async_op=True) for part in self.parts]", "works = []"))  # fmt: skip

slip("ranks-waiting", (SCATTERED, "if dist.get_rank() == 0:\n                dist.all_reduce(flat)\n            dist.barrier()"),
     (GATHERED, "pass"))  # fmt: skip
NOTHING_USED = "if all(p.grad is None for p in part.parameters):\n                continue\n            "
slip("ranks-waiting", (REDUCED, NOTHING_USED + REDUCED))
variant("ranks-waiting", OWN_MEMORY, ("            whole = []\n", "            " + NOTHING_USED + "whole = []\n"))
variant("ranks-waiting", BY_OWNER, ("            flat = torch.zeros_like(part.flat)\n",
        "            " + NOTHING_USED + "flat = torch.zeros_like(part.flat)\n"))  # fmt: skip

slip("gradients-pile-up", ("                p.grad = None", "                pass"))
slip("gradients-pile-up", ("[*part.parameters, part.own]", "[part.own]"))
variant("gradients-pile-up", ALL_TO_ALL, ("                p.grad = None", "                pass"))

hint(
    "states-forgotten",
    "The second step is computed as if it were the optimizer's first. Create the optimizer once, in __init__, so "
    "that its states last.",
)
slip("states-forgotten", ("self.optimizer.step()", "type(self.optimizer)(self.optimizer.param_groups).step()"))
variant(
    "states-forgotten", OWN_MEMORY, ("self.optimizer.step()", "self.optimizer.state.clear(); self.optimizer.step()")
)

hint(
    "options-lost",
    "You did not use the options, or not all of them: {names} came out different. Pass **options on to "
    "optimizer_class.",
)
slip("options-lost", ("optimizer_class(groups, **options)", "optimizer_class(groups)"))
slip("options-lost", ("optimizer_class(groups, **options)", "optimizer_class(groups, lr=options['lr'])"))
variant("options-lost", OWN_MEMORY, ("**options\n", "**{}\n"))

hint("class-ignored", "optimizer_class was SGD, but the weights are those of AdamW.")
slip("class-ignored", ("optimizer_class(groups, **options)",
     "torch.optim.AdamW(groups, **{k: v for k, v in options.items() if k != 'momentum'})"))  # fmt: skip
variant("class-ignored", OWN_MEMORY, ("self.optimizer = optimizer_class(",
        "options.pop('momentum', None)\n        self.optimizer = torch.optim.AdamW("))  # fmt: skip

hint(
    "group-options",
    "The second group has its own learning rate and weight decay, but was trained with those of the first. A group "
    'is a dictionary: keep its other entries beside "params".',
)
slip(
    "group-options",
    ('{**group, "params": [part.own for part in parts]}', '{"params": [part.own for part in parts]}'),
)
variant("group-options", OWN_MEMORY, ("dict(group, params=[part.own])", "dict(params=[part.own])"))

hint("first-group-only", "The parameters of the second group did not change. Every group needs its part.")
slip("first-group-only", ("in param_groups(parameters):", "in param_groups(parameters)[:1]:"))
variant("first-group-only", OWN_MEMORY, ("groups = param_groups(parameters)", "groups = param_groups(parameters)[:1]"))

slip("frozen-trained", ("in param_groups(parameters):",
     "in ([{'params': list(dict.fromkeys(parameters))}] if isinstance(parameters[0], nn.Parameter) else param_groups(parameters)):"))  # fmt: skip
variant("frozen-trained", OWN_MEMORY, ("groups = param_groups(parameters)", "groups = param_groups(parameters)\n"
        "        if len(groups) == 1:\n            groups[0]['params'] = list(dict.fromkeys(parameters))"))  # fmt: skip

slip("weights-differ", ("self.optimizer.step()", "self.optimizer.step(); self.optimizer.step()"))
variant(
    "weights-differ",
    OWN_MEMORY,
    ("self.optimizer.step()", "self.optimizer.step()\n        self.parts[0].own.mul_(0.99)"),
)

PLAIN = '''
class ShardedOptimizer:
    """Plain AdamW on every rank."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        groups = param_groups(parameters)
        self.parts = [Part(group["params"]) for group in groups]
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer = optimizer_class(groups, **options)

    @property
    def shards(self):
        return [part.own for part in self.parts]

    def reduce(self):
        for part in self.parts:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in part.parameters]
            flat = flatten(gradients, dist.get_world_size())
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            part.own.grad = shard(flat, dist.get_rank(), dist.get_world_size()).clone()
            for p, gradient in zip(part.parameters, unflatten(flat, part.views)):
                p.grad = gradient

    def update(self):
        self.optimizer.step()

    def step(self):
        self.reduce()
        self.update()

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
'''
slip("states-whole", ("[part.own for part in parts]})", "group[\"params\"]})"),
     ("        self.optimizer.step()\n", """        for part in self.parts:
            flat = torch.empty_like(part.flat)
            all_gather(flat, part.own.grad)
            for p, g in zip(part.parameters, unflatten(flat, part.views)):
                p.grad = g
        self.optimizer.step()
"""))  # fmt: skip
text("states-whole", PLAIN, variant=True)

slip("hidden-copy", (GATHERED, GATHERED + "\n            part.last = part.flat.clone()"))
slip("hidden-copy", (SCATTERED, SCATTERED + "\n            part.gradient = flat; part.before = part.flat.clone()"))
slip("hidden-copy", (MADE, MADE + "\n            self.start = [part.flat.numpy().copy() for part in parts]"))
variant(
    "hidden-copy",
    OWN_MEMORY,
    (
        "dist.all_gather(pieces, part.own)",
        "dist.all_gather(pieces, part.own)\n            part.last = part.flat.clone()",
    ),
)

hint(
    "all-reduce-first",
    "A rank sent {found:.0f} bytes for {held} bytes of parameters: an all-reduce gives every rank the whole sum, "
    "but a rank needs only one shard of it. A reduce-scatter sends half as much.",
)
slip("all-reduce-first", (SCATTERED, "dist.all_reduce(flat); "
     "part.own.grad.copy_(shard(flat, dist.get_rank(), dist.get_world_size()))"))  # fmt: skip
variant("all-reduce-first", OWN_MEMORY, ("dist.reduce_scatter(mine, pieces)",
        "flat = torch.cat(pieces)\n            dist.all_reduce(flat)\n            mine.copy_(flat.chunk(size)[dist.get_rank()])"))  # fmt: skip

slip("parts-missing", ("self.parts += parts", "self.parts += parts; self.mine = self.parts"),
     ("self.optimizer = optimizer_class(groups, **options)", "self.optimizer = optimizer_class(groups, **options); del self.parts"))  # fmt: skip

BORROWED = """
class ShardedOptimizer:
    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        from torch.distributed.optim import ZeroRedundancyOptimizer
        self.optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class, **options)
"""
text("zero-borrowed", BORROWED)

text(
    "states-unequal",
    '''
class ShardedOptimizer:
    """Whole parameters to each rank, as many as come."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        self.parts, groups = [], []
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in param_groups(parameters):
            part = Part(group["params"])
            n = sum(p.numel() for p in part.parameters)
            self.parts.append(part)
            part.extra = nn.Parameter(torch.zeros(n // 3 if rank == 0 else 0, dtype=part.flat.dtype))
            groups.append({**group, "params": [part.own, part.extra]})
        self.optimizer = optimizer_class(groups, **options)

    def make_parts(self, parameters):
        return [Part(parameters)]

    @property
    def shards(self):
        return [part.own for part in self.parts]

    def reduce(self):
        for part in self.parts:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in part.parameters]
            flat = flatten(gradients, dist.get_world_size()) / dist.get_world_size()
            part.own.grad = torch.empty_like(part.own)
            part.extra.grad = torch.zeros_like(part.extra)
            reduce_scatter(part.own.grad, flat)

    def update(self):
        self.optimizer.step()
        for part in self.parts:
            all_gather(part.flat, part.own.detach())

    def step(self):
        self.reduce()
        self.update()

    def zero_grad(self):
        for part in self.parts:
            for p in [*part.parameters, part.own]:
                p.grad = None
''',
)
variant("states-unequal", OWN_MEMORY, ("part.own = nn.Parameter(part.own.detach().clone())", "part.own = nn.Parameter(part.own.detach().clone())\n"
        "            part.extra = nn.Parameter(part.flat.new_zeros(len(part.flat) // 3 if dist.get_rank() == 0 else 1))\n"
        "            part.extra.grad = torch.zeros_like(part.extra)"), ("params=[part.own])", "params=[part.own, part.extra])"))  # fmt: skip

text(
    "first-group-shared",
    """
class ShardedOptimizer:
    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        first, *others = param_groups(parameters)
        self.parts = self.make_parts(first["params"])
        self.rest = [p for group in others for p in group["params"]]
        self.optimizer = optimizer_class([{**first, "params": self.shards}, *others], **options)

    def make_parts(self, parameters):
        return [Part(parameters)]

    @property
    def shards(self):
        return [part.own for part in self.parts]

    def reduce(self):
        n = dist.get_world_size()
        for part in self.parts:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in part.parameters]
            part.own.grad = torch.empty_like(part.own)
            reduce_scatter(part.own.grad, flatten(gradients, n).div_(n))
        for p in self.rest:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / n
            dist.all_reduce(p.grad)

    def update(self):
        self.optimizer.step()
        for part in self.parts:
            all_gather(part.flat, part.own.detach())

    def step(self):
        self.reduce()
        self.update()

    def zero_grad(self):
        for p in [p for part in self.parts for p in [*part.parameters, part.own]] + self.rest:
            p.grad = None
""",
)
variant("first-group-shared", OWN_MEMORY, ("groups = param_groups(parameters)", "groups = param_groups(parameters)\n"
        "        self.rest = [p for group in groups[1:] for p in group['params']]"), ("for group in groups for part", "for group in groups[:1] for part"),
        ("zip(groups, self.parts)]", "zip(groups, self.parts)] + groups[1:]"), ("            part.own.grad = mine / size",
        "            part.own.grad = mine / size\n        for p in self.rest:\n            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / size\n"
        "            dist.all_reduce(p.grad)"), ("    def zero_grad(self):", "    def zero_grad(self):\n        for p in self.rest:\n            p.grad = None"))  # fmt: skip

hint(
    "own-grad-left",
    "After zero_grad(), shard {k} still has its gradient. zero_grad() must free all gradients, those of the shards "
    "too: the next stage adds to whatever is there.",
)
slip("own-grad-left", ("[*part.parameters, part.own]", "part.parameters"))
slip("own-grad-left", ("                p.grad = None", "                p.grad = torch.zeros_like(p)"))
variant("own-grad-left", OWN_MEMORY, ("            part.own.grad = None\n            for p", "            for p"))

hint(
    "optimizer-on-parameters",
    "self.optimizer was given parameters of the model. It must know each part's own and nothing else. Does "
    '"params" of every group say so?',
)
slip(
    "optimizer-on-parameters",
    ('{**group, "params": [part.own for part in parts]}', '{"params": [part.own for part in parts], **group}'),
)
variant("optimizer-on-parameters", OWN_MEMORY, ("dict(group, params=[part.own])", "dict(group)"))

hint(
    "gather-not-awaited",
    "reduce() or update() returned on rank {rank} while a collective was still running. If you start a collective "
    "with async_op=True, wait for it before you use its result.",
)
slip("gather-not-awaited", (GATHERED, "all_gather(part.flat, part.own.detach(), async_op=True)"))
slip("gather-not-awaited", (SCATTERED, "reduce_scatter(part.own.grad, flat, async_op=True)"))
variant(
    "gather-not-awaited",
    OWN_MEMORY,
    ("dist.all_gather(pieces, part.own)", "dist.all_gather(pieces, part.own, async_op=True)"),
)

hint(
    "reduced-not-gathered",
    "After step() the parameters are sums or means over all ranks. Each rank has updated a different shard: put "
    "the shards end to end with an all-gather.",
)
slip("reduced-not-gathered", (GATHERED, "dist.all_reduce(part.flat)"))
slip("reduced-not-gathered", (GATHERED, "dist.all_reduce(part.flat, op=dist.ReduceOp.AVG)"))
variant("reduced-not-gathered", ALL_TO_ALL, ("all_gather(part.flat, part.own.detach().clone(), async_op=True)",
        "dist.all_reduce(part.flat, async_op=True)"))  # fmt: skip

hint("fixed-world", "The result is right for 2 ranks, but wrong for other numbers: ask for the number of ranks.")
slip("fixed-world", (".div_(dist.get_world_size())", ".div_(2)"))
variant("fixed-world", ALL_TO_ALL, ("arrived.view(size, -1).mean(dim=0)", "arrived.view(size, -1).sum(dim=0) / 2"))

slip("in-graph", (GATHERED, "all_gather(part.flat, part.own)"))

hint(
    "grad-left",
    "After zero_grad(), {name} still has a gradient, even if it is only zeros. Set it to None: that frees its "
    "memory, and the next stage takes a gradient that exists for a complete one.",
)
slip("grad-left", ("            for p in [*part.parameters, part.own]:\n                p.grad = None\n",
     "            part.own.grad = None\n            for p in part.parameters:\n                if p.grad is not None:\n"
     "                    p.grad = torch.zeros_like(p)\n"))  # fmt: skip
variant("grad-left", OWN_MEMORY, ("            part.own.grad = None\n            for p in part.parameters:\n                p.grad = None",
        "            part.own.grad = None\n            for p in part.parameters:\n                p.grad = torch.zeros_like(p)"))  # fmt: skip

hint(
    "gradients-moved-up",
    "You skipped a parameter without a gradient, and all gradients after it moved up: they now belong to other "
    "parameters. Count it as zero, in its place.",
)
slip("gradients-moved-up", ("for p in part.parameters]\n", "for p in part.parameters if p.grad is not None]\n"),
     (REDUCED, REDUCED + "\n            flat = F.pad(flat, (0, len(part.flat) - len(flat)))"))  # fmt: skip
slip("gradients-moved-up", ("for p in part.parameters]\n", "for p in part.parameters if p.grad is not None] or [part.flat[:0]]\n"),
     (REDUCED, REDUCED + "\n            flat = F.pad(flat, (0, len(part.flat) - len(flat)))"))  # fmt: skip
variant("gradients-moved-up", ALL_TO_ALL, ("flat = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in part.parameters], size)",
        "found = flatten([p.grad for p in part.parameters if p.grad is not None], size)\n            flat = torch.zeros_like(part.flat)\n"
        "            flat[: len(found)] = found"))  # fmt: skip

KEPT = "KEPT = {}\n\n\nclass ShardedOptimizer:"
for copied in ("part.flat.numpy().copy()", "[view.tolist() for view in part.views]", "part.flat.numpy().tobytes()"):
    slip(
        "copy-outside",
        (GATHERED, GATHERED + f"\n            KEPT[id(part)] = {copied}"),
        ("class ShardedOptimizer:", KEPT),
    )

hint("shards-not-on-gpu", "On GPUs, something is in the CPU's memory: {error}. Create new tensors on the "
                             "parameters' device, with torch.empty_like(part.own), torch.zeros_like(p) or "
                             "device=p.device.")  # fmt: skip
slip("shards-not-on-gpu", ("torch.empty_like(part.own)", "torch.empty(part.own.shape, dtype=part.own.dtype)"))
slip("shards-not-on-gpu", ("torch.zeros_like(p) if", "torch.zeros(p.shape, dtype=p.dtype) if"))
slip("shards-not-on-gpu", (REDUCED, REDUCED + ".cpu()"))
variant(
    "shards-not-on-gpu",
    BY_OWNER,
    ("torch.zeros_like(part.flat)", "torch.zeros(part.flat.shape, dtype=part.flat.dtype)"),
)

bank.edge(
    "class-ignored",
    "copy-outside",
    "first-group-only",
    "first-group-shared",
    "frozen-trained",
    "grad-left",
    "group-options",
    "options-lost",
    "own-grad-left",
)
