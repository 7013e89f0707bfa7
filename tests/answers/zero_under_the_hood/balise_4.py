"""Answers to balise 4 of 13_zero_under_the_hood: stage 2, gradients that leave bucket by bucket during backward."""

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 4, whole=True)
slip, text, hint, variant = bank.slip, bank.text, bank.hint, bank.variant

READY = "if all(q.grad is not None for q in part.parameters):"
LAST_WAIT = "                self.send(part)\n        self.wait()\n"
FREED = "        for p in part.parameters:\n            p.grad = None\n"
MEAN = ".div_(dist.get_world_size())"
ADDED = "part.own.grad = arriving if part.own.grad is None else part.own.grad + arriving"
START = "self.running.append((part, arriving, flat, reduce_scatter(arriving, flat, async_op=True)))"
FINISH = """        for part in self.parts:
            if part.own.grad is None or any(p.grad is not None for p in part.parameters):
                self.send(part)
"""
SEEN = (
    "self.seen = getattr(self, 'seen', set()) | {p}\n"
    "        if all(q in self.seen for q in part.parameters):\n            self.seen -= set(part.parameters)"
)
LEFT = "part.own.grad is None or any(p.grad is not None for p in part.parameters)"
HOOKED = "            p.register_post_accumulate_grad_hook(self.ready)\n"

# ---------------------------------------------------------------- right answers of another design

TWO_UNDER_WAY = '''
class ShardedGradients(ShardedOptimizer):
    """Up to two buckets under way; all-to-all; closures."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, capacity=CAPACITY, **options):
        self.capacity, self.flying = capacity, []
        ShardedOptimizer.__init__(self, parameters, optimizer_class, **options)
        for part in self.parts:
            part.count = 0
            for p in part.parameters:
                p.register_post_accumulate_grad_hook(self.hook_of(part))

    def hook_of(self, part):
        def hook(_):
            part.count += 1
            if part.count == len(part.parameters):
                self.send(part)
        return hook

    def make_parts(self, parameters):
        return [Part(b) for b in make_buckets(parameters, self.capacity)]

    def send(self, part):
        part.count = 0
        size = dist.get_world_size()
        flat = flatten([v.new_zeros(v.shape) if p.grad is None else p.grad for p, v in zip(part.parameters, part.views)], size)
        for p in part.parameters:
            p.grad = None
        arrived = torch.empty_like(flat)
        self.flying.append((part, arrived, dist.all_to_all_single(arrived, flat, async_op=True)))
        if len(self.flying) > 1:
            self.land()

    def land(self):
        part, arrived, work = self.flying.pop(0)
        work.wait()
        mean = arrived.view(dist.get_world_size(), -1).mean(0)
        part.own.grad = mean if part.own.grad is None else part.own.grad.add_(mean)

    def reduce(self):
        while self.flying:
            self.land()
        for part in self.parts:
            if part.count or part.own.grad is None:
                self.send(part)
        while self.flying:
            self.land()
'''
text(None, TWO_UNDER_WAY)

ZEROS = '''
class ShardedGradients(ShardedOptimizer):
    """Own gradients begin as zeros; every bucket flushed in a fixed order at the end."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, capacity=CAPACITY, **options):
        self.capacity = capacity
        super().__init__(parameters, optimizer_class, **options)
        self.work = None
        for part in self.parts:
            for p in part.parameters:
                p.register_post_accumulate_grad_hook(lambda _, part=part: self.look(part))

    def make_parts(self, parameters):
        return [Part(bucket) for bucket in make_buckets(parameters, self.capacity)]

    def zero_grad(self):
        super().zero_grad()
        for part in self.parts:
            part.own.grad = torch.zeros_like(part.own)

    def look(self, part):
        if None not in [p.grad for p in part.parameters]:
            self.send(part)

    def send(self, part):
        self.settle()
        flat = torch.cat([torch.zeros(v.numel(), dtype=v.dtype) if p.grad is None else p.grad.flatten()
                          for p, v in zip(part.parameters, part.views)])
        flat = torch.nn.functional.pad(flat, (0, len(part.flat) - len(flat)))
        for p in part.parameters:
            p.grad = None
        mine = torch.empty_like(part.own)
        self.work = part, mine, flat, reduce_scatter(mine, flat, async_op=True)

    def settle(self):
        if self.work is not None:
            part, mine, _, work = self.work
            work.wait()
            part.own.grad.add_(mine, alpha=1 / dist.get_world_size())
            self.work = None

    def reduce(self):
        for part in self.parts:
            if [p for p in part.parameters if p.grad is not None]:
                self.send(part)
        self.settle()
'''
text(None, ZEROS)
slip(None, (ADDED, "part.own.grad = arriving if part.own.grad is None else part.own.grad.add_(arriving)"))
slip(None, (MEAN, ""), ("reduce_scatter(arriving, flat, async_op=True)",
     "reduce_scatter(arriving, flat, op=dist.ReduceOp.AVG, async_op=True)"))  # fmt: skip

# ---------------------------------------------------------------- wrong ones: the hint, what is recorded, other designs

hint("none-handle", "None was used as something else: {error}. Without async_op=True a collective returns None, "
                       "which has no wait(); and own.grad is None until the first gradient is put there.")  # fmt: skip
slip("none-handle", ("reduce_scatter(arriving, flat, async_op=True)", "reduce_scatter(arriving, flat)"))
variant(
    "none-handle",
    TWO_UNDER_WAY,
    ("all_to_all_single(arrived, flat, async_op=True)", "all_to_all_single(arrived, flat)"),
)

hint("hook-before-grad", "The hook received something other than a parameter with a complete gradient: {error} "
                            "A hook of register_hook receives the gradient before it is in p.grad; "
                            "register_post_accumulate_grad_hook calls f(p) afterwards.")  # fmt: skip
slip("hook-before-grad", ("p.register_post_accumulate_grad_hook(self.ready)", "p.register_hook(lambda g, p=p: self.ready(p) and None)"),
     (READY, "if p.grad.ndim >= 0 and all(q.grad is not None for q in part.parameters):"))  # fmt: skip
slip("hook-before-grad", ("register_post_accumulate_grad_hook", "register_hook"))
variant("hook-before-grad", ZEROS, ("p.register_post_accumulate_grad_hook(lambda _, part=part: self.look(part))",
        "p.register_hook(lambda g, p=p, part=part: p.grad.abs() is None or self.look(part))"))  # fmt: skip

slip("nothing-travels", (START, "arriving.copy_(shard(flat, dist.get_rank(), dist.get_world_size()))"),
     ("part.own.grad is None or any", "part.own.grad is None or True or any"), ("    def reduce(self):", "    def update(self):\n        self.optimizer.step()\n\n    def reduce(self):"),
     (LAST_WAIT, "                self.send(part)\n        for part in self.parts:\n            part.own.grad = torch.zeros_like(part.own)\n"))  # fmt: skip

slip("no-shard-gradient", ("    def reduce(self):", "    def reduce(self):\n        pass\n\n    def step(self):\n        self.late()\n        self.update()\n\n    def late(self):"),
     ("            part.own.grad = arriving if part.own.grad is None else part.own.grad + arriving\n", "            pass\n"))  # fmt: skip

hint("shards-not-waited", "When reduce() returned on rank {rank}, a reduce-scatter was still running. Wait for "
                             "each one before you use its result, and before reduce() ends.")  # fmt: skip
slip("shards-not-waited", ("            work.wait()\n", ""), (ADDED, "part.own.grad = arriving"))
slip("shards-not-waited", (FINISH + "        self.wait()\n", FINISH))
variant("shards-not-waited", TWO_UNDER_WAY, ("                self.send(part)\n        while self.flying:\n            self.land()\n",
        "                self.send(part)\n"))  # fmt: skip
variant("shards-not-waited", ZEROS, ("            work.wait()\n", ""))

hint("bucket-left", "After reduce(), a shard has no gradient. A bucket with an unused parameter never becomes "
                       "complete: reduce() must send what backward left, with zeros for what is missing, even if a "
                       "whole bucket was unused. Or own.grad was freed again: send must release only its own "
                       "bucket's p.grad.")  # fmt: skip
slip("bucket-left", (FINISH, ""))
slip("late-buckets", ("if all(q.grad is not None for q in part.parameters):", "if p is part.parameters[-1]:"))
slip("bucket-left", (LEFT, "all(p.grad is not None for p in part.parameters)"))
slip("bucket-left", ("part.own.grad is None or any", "any"))  # a bucket that is not used at all
variant("bucket-left", TWO_UNDER_WAY, ("if part.count or part.own.grad is None:", "if part.count:"))
variant(
    "bucket-left",
    TWO_UNDER_WAY,
    ("            if part.count or part.own.grad is None:\n                self.send(part)\n", "            pass\n"),
)

hint("incomplete-lost", "The gradients of a bucket with an unused parameter are missing from own.grad: the "
                           "bucket never becomes complete, or its gradients were freed with another bucket's. "
                           "reduce() must send what backward left, with zeros for what is missing.")  # fmt: skip
slip("incomplete-lost", (FINISH, "        for part in self.parts:\n            if part.own.grad is None:\n"
     "                part.own.grad = torch.zeros_like(part.own)\n"))  # fmt: skip
variant("incomplete-lost", ZEROS, ("if [p for p in part.parameters if p.grad is not None]:", "if False:"))

hint(
    "added-twice",
    "What arrived on rank {rank} was added to own.grad more than once. wait() must forget what it has waited for.",
)
slip("added-twice", ("        self.running.clear()\n", ""))
variant("added-twice", ZEROS, ("            self.work = None\n\n    def reduce", "\n    def reduce"),
        ("                self.send(part)\n        self.settle()", "                self.send(part)\n        self.settle()\n        self.settle()"))  # fmt: skip

hint("local-gradient", "own.grad is a shard of the rank's own gradient: it ignores the rows of the other ranks.")
slip("local-gradient", ("reduce_scatter(arriving, flat, async_op=True)", "reduce_scatter(torch.empty_like(arriving), flat, async_op=True)"),
     ("        arriving = torch.empty_like(part.own)\n", "        arriving = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()\n"))  # fmt: skip
variant("local-gradient", TWO_UNDER_WAY, ("arrived = torch.empty_like(flat)", "arrived = flat.chunk(size)[dist.get_rank()].repeat(size).div_(size)"),
        ("dist.all_to_all_single(arrived, flat, async_op=True)", "dist.all_to_all_single(torch.empty_like(flat), flat, async_op=True)"))  # fmt: skip

hint("second-backward", "With one backward pass per step all is right, but with two it is not. The second must "
                           "add to what the first left in own.grad, and only after work.wait(): before that, "
                           "nothing has arrived.")  # fmt: skip
slip("second-backward", (ADDED, "part.own.grad = arriving"))
variant("second-backward", TWO_UNDER_WAY, ("mean if part.own.grad is None else part.own.grad.add_(mean)", "mean"))

slip("sum-not-mean", (MEAN, ""))
variant("sum-not-mean", ZEROS, ("add_(mine, alpha=1 / dist.get_world_size())", "add_(mine)"))

slip("mean-divided-twice", ("reduce_scatter(arriving, flat, async_op=True)",
     "reduce_scatter(arriving, flat, op=dist.ReduceOp.AVG, async_op=True)"))  # fmt: skip
variant("mean-divided-twice", TWO_UNDER_WAY, (".mean(0)", ".mean(0) / dist.get_world_size()"))

slip("none-gradient", (FREED, "        for p in part.parameters:\n            p.grad.zero_()\n"))

slip("gradients-pile-up", ("    def make_parts(self", "    def zero_grad(self):\n        for part in self.parts:\n"
     "            for p in part.parameters:\n                p.grad = None\n\n    def make_parts(self"))  # fmt: skip
variant("gradients-pile-up", ZEROS, ("        super().zero_grad()\n        for part in self.parts:\n            part.own.grad = torch.zeros_like(part.own)",
        "        for part in self.parts:\n            if part.own.grad is None:\n                part.own.grad = torch.zeros_like(part.own)"))  # fmt: skip

slip(
    "not-gathered",
    ("    def reduce(self):", "    def update(self):\n        self.optimizer.step()\n\n    def reduce(self):"),
)
variant(
    "not-gathered",
    TWO_UNDER_WAY,
    ("    def reduce(self):", "    def update(self):\n        self.optimizer.step()\n\n    def reduce(self):"),
)

hint("grad-all-reduced", "A rank sent {found:.0f} bytes for {held} bytes of gradients: more than a "
                            "reduce-scatter and an all-gather need. Did you use an all-reduce? Or was a bucket "
                            "sent more than once: before all of its gradients were there, or because p.grad was "
                            "not reset to None?")  # fmt: skip
slip("grad-all-reduced", (START, "work = dist.all_reduce(flat, async_op=True)\n        work.wait()\n"
     "        arriving.copy_(shard(flat, dist.get_rank(), dist.get_world_size()))\n"
     "        self.running.append((part, arriving, None, work))"))  # fmt: skip
variant("grad-all-reduced", ZEROS, ("self.work = part, mine, flat, reduce_scatter(mine, flat, async_op=True)",
        "work = dist.all_reduce(flat, async_op=True)\n        self.work = part, flat.chunk(dist.get_world_size())[dist.get_rank()], flat, work"))  # fmt: skip

hint("one-each-parameter", "{got} reduce-scatters were started for gradients that fill {expected} buckets: use "
                              "one for each bucket, not one for each parameter.")  # fmt: skip
slip("one-each-parameter", ("make_buckets(parameters, self.capacity)", "[[p] for p in reversed(parameters)]"))
variant("one-each-parameter", TWO_UNDER_WAY, ("make_buckets(parameters, self.capacity)", "make_buckets(parameters, 1)"))

hint("capacity-ignored", "{got} reduce-scatters were started for gradients that fill {expected} buckets: "
                            "make_parts() must make a Part for each bucket, of at most self.capacity bytes.")  # fmt: skip
slip("capacity-ignored", ("[Part(bucket) for bucket in make_buckets(parameters, self.capacity)]", "[Part(parameters)]"),
     (READY, "if p is part.parameters[0]:"), ("        self.wait()\n        gradients", "        gradients"))  # fmt: skip
slip("capacity-ignored", ("make_buckets(parameters, self.capacity)", "make_buckets(parameters, 25 * 2**20)"))
variant(
    "capacity-ignored",
    TWO_UNDER_WAY,
    ("[Part(b) for b in make_buckets(parameters, self.capacity)]", "[Part(parameters[::-1])]"),
)

hint("after-backward", "Nothing was sent before backward had ended. Send a bucket from a hook, as soon as its "
                          "last gradient is there: only then can it be freed early.")  # fmt: skip
slip("after-backward", (HOOKED, "            pass\n"))
variant(
    "after-backward",
    ZEROS,
    (
        "                p.register_post_accumulate_grad_hook(lambda _, part=part: self.look(part))",
        "                pass",
    ),
)

hint("sent-and-kept", "With several buckets the weights are right, but with a single bucket they are not: in "
                         "the second backward pass, what the first one sent is sent again, or lost. Free p.grad as "
                         "soon as its bucket is sent, not when its sum has arrived.")  # fmt: skip
slip(
    "sent-and-kept",
    (FREED, ""),
    (
        "        self.running.clear()\n",
        "            for p in part.parameters:\n                p.grad = None\n        self.running.clear()\n",
    ),
)
variant("sent-and-kept", ZEROS, ("        for p in part.parameters:\n            p.grad = None\n", ""),
        ("            work.wait()\n", "            work.wait()\n            for p in part.parameters:\n                p.grad = None\n"))  # fmt: skip
slip("not-asynchronous", (READY, "self.wait()\n        " + READY))

hint("not-again", "In the first step buckets were sent during backward, but in the second none were. Reset "
                     "whatever tells that a bucket is complete when the bucket is sent.")  # fmt: skip
slip("not-again", (READY, "self.seen = getattr(self, 'seen', set()) | {p}\n        if self.seen.issuperset(part.parameters) "
     "and len(self.seen) <= len(self.home) and p not in getattr(self, 'gone', set()):\n"
     "            self.gone = getattr(self, 'gone', set()) | set(part.parameters)"))  # fmt: skip
variant("not-again", TWO_UNDER_WAY, ("        part.count = 0\n        size", "        size"),
        ("        while self.flying:\n            self.land()\n        for part in self.parts:\n            if part.count or part.own.grad is None:",
         "        while self.flying:\n            self.land()\n        for part in self.parts:\n            if part.own.grad is None or any(p.grad is not None for p in part.parameters):"))  # fmt: skip

hint("late-buckets", "When backward reached the first layer, {early} of {n} buckets had been sent: a bucket "
                        "waits although it is complete, or was sent before it was complete. Any of its parameters "
                        "may be the last to get its gradient.")  # fmt: skip
slip("late-buckets", (READY, "if p is self.parts[-1].parameters[0] and not all(q.grad is not None for q in part.parameters):\n"
     "            return\n        if p is self.parts[-1].parameters[-1] or p is self.parts[-1].parameters[0]:\n"
     "            for other in self.parts:\n                if all(q.grad is not None for q in other.parameters):\n"
     "                    self.send(other)\n        if False:"))  # fmt: skip
slip("late-buckets", (  # hooks for the first group only
    "        for p in self.home:\n" + HOOKED,
    """        first = {id(own) for own in self.optimizer.param_groups[0]["params"]}
        for p, part in self.home.items():
            if id(part.own) in first:
                p.register_post_accumulate_grad_hook(self.ready)
"""))  # fmt: skip
variant("late-buckets", ZEROS, ("        if None not in [p.grad for p in part.parameters]:\n            self.send(part)",
        "        full = [other for other in self.parts if None not in [p.grad for p in other.parameters]]\n"
        "        if len(full) > 10:\n            for other in full:\n                self.send(other)"))  # fmt: skip

hint("not-asynchronous", "You waited for each reduce-scatter right where you started it: backward stood still "
                            "while it was running. Start it with async_op=True, and wait when the next bucket is "
                            "ready.")  # fmt: skip
slip("not-asynchronous", (START, START + "\n        self.wait()"))
BLOCKING = '''
class ShardedGradients(ShardedOptimizer):
    """Blocking; counts what is missing."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, capacity=CAPACITY, **options):
        self.capacity = capacity
        super().__init__(parameters, optimizer_class, **options)
        self.missing = {part: set(part.parameters) for part in self.parts}
        for part in self.parts:
            for p in part.parameters:
                p.register_post_accumulate_grad_hook(lambda p, part=part: self.arrived(part, p))

    def make_parts(self, parameters):
        return list(map(Part, make_buckets(parameters, self.capacity)))

    def arrived(self, part, p):
        self.missing[part].discard(p)
        if not self.missing[part]:
            self.send(part)

    def send(self, part):
        size = dist.get_world_size()
        flat = part.flat.new_zeros(part.flat.shape)
        for p, view in zip(part.parameters, unflatten(flat, part.views)):
            if p.grad is not None:
                torch.div(p.grad, size, out=view)
                p.grad = None
        self.missing[part] = set(part.parameters)
        mine = torch.empty_like(part.own)
        reduce_scatter(mine, flat)
        if part.own.grad is None:
            part.own.grad = mine
        else:
            part.own.grad += mine

    def reduce(self):
        for part in self.parts:
            if len(self.missing[part]) < len(part.parameters) or part.own.grad is None:
                self.send(part)
'''
text("not-asynchronous", BLOCKING, variant=True)
variant("not-asynchronous", TWO_UNDER_WAY, ("if len(self.flying) > 1:", "if self.flying:"))

hint("sent-twice", "The gradients are those of a bucket that was sent twice: its p.grad were still there, so "
                      "reduce() sent it again. Once a bucket is sent, set each p.grad to None.")  # fmt: skip
slip("sent-twice", (FREED, ""))
ONLY_A_NAME = "        for p in part.parameters:\n            gradient = p.grad\n            del gradient\n"
slip("sent-twice", (FREED, ONLY_A_NAME), variant=True)

hint(
    "gradients-kept",
    "After reduce(), {got} parameters still hold their whole gradients. Set p.grad to None once the bucket is sent.",
)
slip("gradients-kept", (FREED, ""), (READY, SEEN), (LEFT, "part.own.grad is None"))
FREED_THERE = "        for p in part.parameters:\n            p.grad = None\n"
variant("gradients-kept", TWO_UNDER_WAY, (FREED_THERE, ""))

hint("freed-late", "When backward ended, {got} parameters still held their gradients. Free a gradient when it "
                      "is sent, not at the end: p.grad = None in the hook.")  # fmt: skip
slip("freed-late", (FREED, ""), (READY, SEEN), (LEFT, "part.own.grad is None"),
     (LAST_WAIT, "                self.send(part)\n        self.wait()\n        for part in self.parts:\n"
      "            for p in part.parameters:\n                p.grad = None\n"))  # fmt: skip

variant("freed-late", TWO_UNDER_WAY, (FREED_THERE, ""), ("                self.send(part)\n        while self.flying:\n            self.land()\n",
        "                self.send(part)\n        while self.flying:\n            self.land()\n        for part in self.parts:\n"
        "            for p in part.parameters:\n                p.grad = None\n"))  # fmt: skip

hint("flats-kept", "p.grad is freed, but at the peak of backward {got} bytes more than before were alive, where "
                      "{expected:.0f} at most are expected: the flat tensors stay alive. Release each one when its "
                      "reduce-scatter is done: wait for the previous one.")  # fmt: skip
slip("flats-kept", ("        self.wait()\n        gradients", "        gradients"))
slip("flats-kept", ("        self.running.clear()\n", "        self.old = getattr(self, 'old', []) + self.running\n        self.running = []\n"),
     (LAST_WAIT, "                self.send(part)\n        self.wait()\n        self.old = []\n"))  # fmt: skip
variant("flats-kept", TWO_UNDER_WAY, ("if len(self.flying) > 1:", "if len(self.flying) > 99:"))

hint("buckets-kept", "After reduce(), {got} bytes more are alive than before backward; the gradients of one "
                        "shard, and a bucket or two, make {expected:.0f}. Something still holds the buckets' flat "
                        "tensors: empty the list of running collectives. Also, own.grad must not be a view of such "
                        "a tensor.")  # fmt: skip
slip("buckets-kept", (START, START + "\n        self.last = [*getattr(self, 'last', [])[-3:], flat]"))
variant(
    "buckets-kept",
    ZEROS,
    (
        "            self.work = None\n\n    def reduce",
        "            self.done = getattr(self, 'done', ()) + self.work[2:3]\n            self.work = None\n\n    def reduce",
    ),
)

COPIES = "\n        self.copies = [(part.flat.clone(), part.flat.clone()) for part in self.parts]"
INIT = "super().__init__(parameters, optimizer_class, **options)"
slip("hidden-copy", (INIT, INIT + COPIES))
variant("hidden-copy", ZEROS, (INIT, INIT + COPIES))

KEPT = "KEPT = {}\n\n\nclass ShardedGradients("
for copied in ("[g.numpy().copy() for g in gradients]", "[g.tolist() for g in gradients]"):
    slip("copy-outside", ("        flat = flatten", f"        KEPT[id(part)] = {copied}\n        flat = flatten"),
         ("class ShardedGradients(", KEPT))  # fmt: skip
