"""Answers to balise 6 of 13_zero_under_the_hood: bfloat16 parameters with float32 masters of the shards."""

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 6, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

PAIRS = '''
class MasterShards(ShardedGradients):
    """Masters in a loop over the groups, a dictionary of gradients, a gather of its own."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        super().__init__(parameters, optimizer_class, **options)
        self.pairs = []
        for group in self.optimizer.param_groups:
            mine = []
            for own in group["params"]:
                master = own.detach().clone().to(torch.float32).requires_grad_()
                self.pairs.append((own, master))
                mine.append(master)
            group["params"] = mine
        of = {id(own): master for own, master in self.pairs}
        self.masters = [of[id(part.own)] for part in self.parts]

    @property
    def shards(self):
        return self.masters

    def reduce(self):
        super().reduce()
        for own, master in self.pairs:
            master.grad = own.grad.to(master.dtype)
            own.grad = None

    def update(self):
        self.optimizer.step()
        for own, master in self.pairs:
            own.data.copy_(master.data)
        for part in self.parts:
            all_gather(part.flat, part.own.detach())

    def zero_grad(self):
        super().zero_grad()
        for _, master in self.pairs:
            master.grad = None
'''
bank.text(None, PAIRS)


ANEW = '''
class MasterShards(ShardedGradients):
    """An optimizer of its own, made anew from the groups of the old one."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, capacity=CAPACITY, **options):
        super().__init__(parameters, optimizer_class, capacity=capacity, **options)
        self.masters = [torch.nn.Parameter(part.own.float().detach()) for part in self.parts]
        number = {part.own: k for k, part in enumerate(self.parts)}
        groups = [{**g, "params": [self.masters[number[p]] for p in g["params"]]} for g in self.optimizer.param_groups]
        self.optimizer = optimizer_class(groups, **options)

    @property
    def shards(self):
        return self.masters

    def reduce(self):
        super().reduce()
        for part, master in zip(self.parts, self.masters):
            master.grad = torch.empty_like(master).copy_(part.own.grad)

    def update(self):
        self.optimizer.step()
        with torch.no_grad():
            for part, master in zip(self.parts, self.masters):
                all_gather(part.flat, master.to(torch.bfloat16))

    def zero_grad(self):
        for master in self.masters:
            master.grad = None
        super().zero_grad()
'''
bank.text(None, ANEW)


AFTER_STEP = '''
class MasterShards(ShardedGradients):
    """The masters take the place of own for the time of the step: super().update() does the rest."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        super().__init__(parameters, optimizer_class, **options)
        self.masters = []
        for part in self.parts:
            for group in self.optimizer.param_groups:
                for k, p in enumerate(group["params"]):
                    if p is part.own:
                        group["params"][k] = nn.Parameter(p.detach().to(torch.float32, copy=True))
                        self.masters.append(group["params"][k])
        def rounded(*_):
            with torch.no_grad():
                for part, master in zip(self.parts, self.masters):
                    part.own.copy_(master)
        self.optimizer.register_step_post_hook(rounded)

    @property
    def shards(self):
        return self.masters

    def reduce(self):
        super().reduce()
        for part, master in zip(self.parts, self.masters):
            gradient, part.own.grad = part.own.grad, None
            master.grad = gradient.float()

    def zero_grad(self):
        super().zero_grad()
        self.optimizer.zero_grad()
'''
bank.text(None, AFTER_STEP)


STEP = "        self.optimizer.step()\n"
MADE = "        self.masters = list("
BACK = "            part.own.copy_(master)\n"
GATHER = "            all_gather(part.flat, part.own.detach())\n"
GRADIENT = "master.grad = part.own.grad.float()"

hint(
    "no-masters",
    "There is no list of masters: {error}. Make it in __init__: self.masters, with a float32 copy of each part's own.",
)
slip("no-masters", ("self.masters = list(master_of.values())", "masters = list(master_of.values())"))
variant("no-masters", PAIRS, ("        self.masters = [of[id(part.own)] for part in self.parts]\n", ""))

hint("masters-count", "There are {got} masters for {expected} parts. Make one for each part, in the same order.")
slip("masters-count", ("list(master_of.values())", "list(master_of.values())[:1]"))
variant("masters-count", ANEW, ("return self.masters", "return self.masters[:-1]"))

hint(
    "masters-not-float32",
    "A master is in {got}. It must keep what bfloat16 cannot: make it a float32 copy of own.",
)
slip("masters-not-float32", (".detach().float())", ".detach().clone())"))
slip("masters-not-float32", (".detach().float())", ".detach().double())"))
slip("masters-not-float32", ("nn.Parameter(part.own.detach().float())", "part.own"), ("part.own.grad = None", "pass"))
variant("masters-not-float32", PAIRS, (".to(torch.float32)", ".to(torch.float16)"))

hint(
    "masters-whole",
    "A master has {got} elements, but its shard has {expected}. Each master is a float32 copy of its own part's "
    "`own`, and of nothing more.",
)
slip("masters-whole", ("part.own.detach().float()", "part.flat.detach().float()"))
variant(
    "masters-whole",
    ANEW,
    ("part.own.float().detach()", "torch.cat([p.detach().float().reshape(-1) for p in part.parameters])"),
)

hint("no-master-gradient", "After reduce() a master has no gradient. Convert part.own.grad, which came from the "
                              "ranks, to float32 and store it in master.grad: clipping and the optimizer look for "
                              "it there.")  # fmt: skip
slip(
    "no-master-gradient",
    ("            master.grad = part.own.grad.float()\n            part.own.grad = None\n", "            pass\n"),
)
variant("no-master-gradient", AFTER_STEP, ("master.grad = gradient.float()", "master.gradient = gradient.float()"))

hint(
    "gradient-elsewhere",
    "A gradient has the dtype of the tensor it belongs to: own.grad is bfloat16, master.grad is float32. Cast in "
    "between.",
)
slip(
    "gradient-elsewhere",
    (GRADIENT, "part.own.grad = part.own.grad.float()"),
    ("            part.own.grad = None\n", ""),
)
variant(
    "gradient-elsewhere", PAIRS, ("master.grad = own.grad.to(master.dtype)", "own.grad = own.grad.to(master.dtype)")
)

hint("wrong-master-gradient", "After reduce() the gradients of the masters are not the mean over the ranks.")
slip("wrong-master-gradient", ("part.own.grad.float()", "part.own.grad.float().abs()"))
variant("wrong-master-gradient", AFTER_STEP, ("gradient.float()", "-gradient.float()"))

hint(
    "divided-again",
    "After reduce() the gradients of the masters are the mean divided by world_size a second time. Stage 2 has "
    "already divided.",
)
slip("divided-again", ("part.own.grad.float()", "part.own.grad.float() / dist.get_world_size()"))
variant("divided-again", ANEW, ("copy_(part.own.grad)", "copy_(part.own.grad / dist.get_world_size())"))

hint("gradients-added", "After the first step, the gradients of the masters are the sum over all steps so far. "
                           "Each reduce() must set a new one.")  # fmt: skip
slip("gradients-added", (
    "            master.grad = part.own.grad.float()\n",
    "            new = part.own.grad.float()\n            self.kept = getattr(self, 'kept', {})\n"
    "            self.kept[master] = master.grad = self.kept[master] + new if master in self.kept else new\n",
))  # fmt: skip
variant(
    "gradients-added",
    AFTER_STEP,
    ("gradient, part.own.grad = part.own.grad, None", "part.sum = gradient = part.own.grad + getattr(part, 'sum', 0)"),
)

hint("optimizer-on-bf16", "The masters do not move. Either the optimizer still has the bfloat16 shards (give it "
                             "the masters, each in the group of its part), or its updates are overwritten: read "
                             "the parameter from its master, never the other way round.")  # fmt: skip
slip(
    "optimizer-on-bf16",
    ('            group["params"] = [master_of[own] for own in group["params"]]\n', "            pass\n"),
)
slip("optimizer-on-bf16", (STEP, "        pass\n"))
variant("optimizer-on-bf16", PAIRS, ('            group["params"] = mine\n', ""))

hint("masters-remade", "Small updates are lost. Each one moves the master by less than half a step of bfloat16, "
                          "and then you read the master back from the rounded parameter. Make the masters once, "
                          "and never read them from the parameters again.")  # fmt: skip
slip(
    "masters-remade",
    (STEP, "        for part, master in zip(self.parts, self.masters):\n            master.copy_(part.own)\n" + STEP),
)
variant(
    "masters-remade",
    PAIRS,
    ("            own.grad = None\n", "            own.grad = None\n            master.data = own.data.float()\n"),
)

hint(
    "group-options-lost",
    "The masters of the second group did not get that group's options (lr, weight_decay): keep the groups apart.",
)
slip("group-options-lost", (
    '        for group in self.optimizer.param_groups:\n            group["params"] = [master_of[own] for own in group["params"]]\n',
    "        self.optimizer = optimizer_class(self.masters, **{k: options[k] for k in options if k != 'capacity'})\n",
))  # fmt: skip
variant("group-options-lost", ANEW, ('[{**g, "params":', '[{"params":'))

hint("wrong-masters", "The masters differ from those of the same optimizer in one process, in float32.")
slip("wrong-masters", (STEP, STEP + STEP))
slip("wrong-masters", (STEP, STEP + "        self.optimizer.state.clear()\n"))
variant("wrong-masters", ANEW, (STEP, "        self.masters[0].grad.zero_()\n" + STEP))

hint(
    "parameters-widened",
    "A parameter is in {got} now. The model computes, stores and sends bfloat16; only the masters are float32.",
)
slip("parameters-widened", (
    BACK + GATHER,
    "            part.flat = torch.empty(len(part.flat), dtype=torch.float32)\n            all_gather(part.flat, master.detach())\n"
    "            for p, view in zip(part.parameters, unflatten(part.flat, part.parameters)):\n                p.data = view\n",
))  # fmt: skip
variant("parameters-widened", PAIRS, ("            all_gather(part.flat, part.own.detach())\n",
        "            all_gather(part.flat, part.own.detach())\n            for p in part.parameters:\n                p.data = p.data.float()\n"))  # fmt: skip

hint("not-rounded-back", "The masters are right, but the parameters do not move: round each master into its "
                            "part's own (copy_) before you gather the parameters.")  # fmt: skip
slip("not-rounded-back", (BACK, ""))
slip(
    "not-rounded-back",
    (BACK, "            part.own = nn.Parameter(master.bfloat16())\n"),
    (GATHER, "            part.own.detach()\n"),
)
variant("not-rounded-back", AFTER_STEP, ("part.own.copy_(master)", "part.own.clone().copy_(master)"))

hint(
    "others-not-gathered",
    "A rank has new values only in its own shards: gather the parameters of the other ranks too.",
)
slip("others-not-gathered", (GATHER, ""))
variant("others-not-gathered", ANEW, ("all_gather(part.flat, master.to(torch.bfloat16))", "part.own.copy_(master)"))

hint(
    "gathered-too-early",
    "The parameters of the other ranks are those of the previous step: gather after you have rounded the masters "
    "into own.",
)
slip("gathered-too-early", (BACK + GATHER, GATHER + BACK))
variant("gathered-too-early", AFTER_STEP, ("    def zero_grad(self):", "    def update(self):\n        for part in self.parts:\n"
        "            all_gather(part.flat, part.own.detach())\n        self.optimizer.step()\n\n    def zero_grad(self):"))  # fmt: skip

hint("wrong-parameters", "The masters are right, but the parameters of rank {rank} are not their rounded "
                            "values. Round each master into its part's own (copy_), then gather.")  # fmt: skip
slip("wrong-parameters", ("part.own.copy_(master)", "part.own.copy_(master * 1.05)"))
variant("wrong-parameters", ANEW, ("master.to(torch.bfloat16)", "(-master).to(torch.bfloat16)"))

hint("messages-in-float32", "Rank {rank} sent {got:.0f} bytes in a step; gradients and parameters at two bytes "
                               "each make at most {expected:.0f}. Round first, then send.")  # fmt: skip
slip("messages-in-float32", (
    BACK + GATHER, "            whole = torch.empty(len(part.flat))\n            all_gather(whole, master.detach())\n            part.flat.copy_(whole)\n",
))  # fmt: skip
variant("messages-in-float32", ANEW, ("                all_gather(part.flat, master.to(torch.bfloat16))",
        "                pieces = [torch.empty_like(master) for _ in range(dist.get_world_size())]\n"
        "                dist.all_gather(pieces, master)\n                part.flat.copy_(torch.cat(pieces))"))  # fmt: skip

hint("held-too-much", "Between two steps a rank holds {got} bytes for {n} parameters on {size} ranks: 2 for "
                         "each parameter, 12 for each one in its own shard and a little more make {expected:.0f}. "
                         "Are there float32 gradients that nothing freed? Is a master a view of a full copy, which "
                         "stays alive with it? Is own no longer a view of flat (write into it with copy_)?")  # fmt: skip
slip("held-too-much", (STEP, STEP + "        self.last = [m.grad for m in self.masters]\n"))
slip("held-too-much", (MADE, "        self.copies = [part.flat.float() for part in self.parts]\n" + MADE))
slip(
    "held-too-much",
    (MADE, "        self.copies = [part.flat.float().numpy().copy() for part in self.parts]\n" + MADE),
)
slip("held-too-much", ("part.own.copy_(master)", "part.own.data = master.data.bfloat16()"))
slip("held-too-much", ("nn.Parameter(part.own.detach().float())",
     "nn.Parameter(part.flat.detach().float().chunk(dist.get_world_size())[dist.get_rank()])"))  # fmt: skip
variant(
    "held-too-much",
    PAIRS,
    ("        for _, master in self.pairs:\n            master.grad = None\n", "        pass\n"),
)

slip("copy-outside", (MADE, "        KEPT[id(self)] = [part.flat.float().numpy().copy() for part in self.parts]\n" + MADE),
     ("class MasterShards(", "KEPT = {}\n\n\nclass MasterShards("))  # fmt: skip
bank.text("rank-failed", "class MasterShards:\n    def __init__(self, model):\n        self.model = model\n")

hint(
    "masters-not-on-gpu",
    "On GPUs, something is in the CPU's memory: {error}. A master is on the device of "
    "its shard: part.own.detach().float().",
)
slip("masters-not-on-gpu", ("part.own.detach().float()", "part.own.detach().cpu().float()"))
variant("masters-not-on-gpu", PAIRS, ("own.detach().clone().to(torch.float32)", "own.detach().cpu().to(torch.float32)"))
