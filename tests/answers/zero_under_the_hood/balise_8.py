"""Answers to balise 8 of 13_zero_under_the_hood: masters and states in CPU memory."""

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 8, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

RIGHT = """
class OffloadedShards(MasterShards):
    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        super().__init__(parameters, optimizer_class, **options)
        for master in self.masters:
            master.data = master.data.to("cpu")

    def reduce(self):
        ShardedGradients.reduce(self)
        for part, master in zip(self.parts, self.masters):
            {reduce}
            part.own.grad = None

    def update(self):
        self.optimizer.step()
        for part, master in zip(self.parts, self.masters):
            {update}
            all_gather(part.flat, part.own.detach())
"""


def offloaded(
    slug, reduce="master.grad = part.own.grad.cpu().float()", update="part.own.data.copy_(master.data)", **others
):
    code = RIGHT.format(reduce=reduce, update=update)
    for old, new in others.get("changes", ()):
        assert old in code
        code = code.replace(old, new)
    bank.text(slug, code)


offloaded(None)
offloaded(None, "master.grad = part.own.grad.to(device='cpu', dtype=torch.float32)",
          "part.own.data = part.own.data.copy_(master.detach().bfloat16())")  # fmt: skip
offloaded(None, "master.grad = torch.empty(master.shape).copy_(part.own.grad)",
          "part.own.detach().copy_(master.detach().to(torch.bfloat16).to(part.own.device))")  # fmt: skip

AT_ONCE = '''
class OffloadedShards(MasterShards):
    """All at once."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        super().__init__(parameters, optimizer_class, **options)
        for master in self.masters:
            master.data = torch.empty_like(master, device="cpu").copy_(master.data)

    def reduce(self):
        ShardedGradients.reduce(self)
        on_cpu = torch.cat([part.own.grad for part in self.parts]).cpu()
        for part, master, gradient in zip(self.parts, self.masters, on_cpu.split([len(m) for m in self.masters])):
            master.grad, part.own.grad = gradient.float(), None

    @torch.no_grad()
    def update(self):
        self.optimizer.step()
        torch._foreach_copy_([part.own.data for part in self.parts], [m.data for m in self.masters])
        for part in self.parts:
            all_gather(part.flat, part.own.detach())
'''
bank.text(None, AT_ONCE)


PINNED = '''
class OffloadedShards(MasterShards):
    """Pinned buffers, copies that do not block, and a wait."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        super().__init__(parameters, optimizer_class, **options)
        gpu = self.parts[0].own.is_cuda
        self.buffers = [torch.empty(part.own.shape, dtype=part.own.dtype, pin_memory=gpu) for part in self.parts]
        for master in self.masters:
            master.data = master.data.cpu()

    def reduce(self):
        ShardedGradients.reduce(self)
        for part, buffer in zip(self.parts, self.buffers):
            buffer.copy_(part.own.grad, non_blocking=True)
            part.own.grad = None
        measure.synchronize(self.parts[0].own.device)
        for buffer, master in zip(self.buffers, self.masters):
            master.grad = buffer.float()

    @torch.no_grad()
    def update(self):
        self.optimizer.step()
        for part, buffer, master in zip(self.parts, self.buffers, self.masters):
            buffer.copy_(master)
            part.own.copy_(buffer, non_blocking=True)
            all_gather(part.flat, part.own.detach())
'''
bank.text(None, PINNED)


EVENT = '''
class OffloadedShards(MasterShards):
    """An event in place of a full synchronisation, masters made on the CPU from the start."""

    def __init__(self, parameters, optimizer_class=torch.optim.AdamW, **options):
        ShardedGradients.__init__(self, parameters, optimizer_class, **options)
        of = {part.own: nn.Parameter(part.own.detach().cpu().float()) for part in self.parts}
        self.masters = list(of.values())
        for group in self.optimizer.param_groups:
            group["params"] = [of[own] for own in group["params"]]

    def reduce(self):
        ShardedGradients.reduce(self)
        arriving = [part.own.grad.to("cpu", non_blocking=True) for part in self.parts]
        if self.parts[0].own.is_cuda:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        for part, master, gradient in zip(self.parts, self.masters, arriving):
            master.grad, part.own.grad = gradient.float(), None
'''
bank.text(None, EVENT)
offloaded(None, update="part.own.data.copy_(master.data.bfloat16().pin_memory(), non_blocking=True)")

MOVED = 'master.data = master.data.to("cpu")'
FREED = "            part.own.grad = None\n"
GATHER = "            all_gather(part.flat, part.own.detach())\n"

hint(
    "masters-on-gpu",
    "A master is on the GPU, or a gradient in CPU memory was combined with a tensor on the "
    "GPU. Masters, their gradients and the states belong in CPU memory; own and own.grad are "
    "on the GPU.",
)
offloaded("masters-on-gpu", changes=[(MOVED, "pass")], reduce="master.grad = part.own.grad.float()")
offloaded("masters-on-gpu", changes=[(MOVED, 'master.data.to("cpu")')], reduce="master.grad = part.own.grad.float()")
slip("masters-on-gpu", ("            master.data = master.data.cpu()", "            pass"))
variant(
    "masters-on-gpu",
    AT_ONCE,
    ('torch.empty_like(master, device="cpu").copy_(master.data)', "torch.empty_like(master).copy_(master.data)"),
)

hint(
    "gradient-elsewhere",
    "A gradient has the dtype of the tensor it belongs to: own.grad is bfloat16, "
    "master.grad is float32. Cast in between.",
)
slip("gradient-elsewhere", ("master.grad = part.own.grad.cpu().float()", "master.grad = part.own.grad.cpu()"))
variant(
    "gradient-elsewhere",
    EVENT,
    ("master.grad, part.own.grad = gradient.float(), None", "master.grad, part.own.grad = gradient, None"),
)

hint("states-on-gpu", "A state of the optimizer, {name}, is on the GPU. States are created on the device of the "
                         "tensors that the optimizer was given: give it the masters on the CPU from the "
                         "start.")  # fmt: skip
ON_GPU = """        for master in self.masters:
            gradient, master.grad = master.grad, None
            master.data = master.data.to("cuda")
            master.grad = gradient.to("cuda")
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
            master.data = master.data.to("cpu")
"""
offloaded("states-on-gpu", changes=[("        self.optimizer.step()\n", ON_GPU)])
variant("states-on-gpu", PINNED, ("        self.optimizer.step()\n", ON_GPU))

hint(
    "gradient-left-on-gpu",
    "The masters are on the CPU, but their gradients are not: {error}. Bring each gradient to the CPU in reduce().",
)
offloaded("gradient-left-on-gpu", "master.grad = part.own.grad.float()")
offloaded("gradient-left-on-gpu", changes=[("ShardedGradients.reduce(self)", "super().reduce()")])
variant("gradient-left-on-gpu", AT_ONCE, ("for part in self.parts]).cpu()", "for part in self.parts])"))

hint("mixed-collective", "A collective was given tensors on the CPU and on the GPU at once. Copy the rounded "
                            "master into part.own, which stays a view of part.flat on the GPU, and gather "
                            "that.")  # fmt: skip
slip("mixed-collective", ("        super().update()\n", "        self.optimizer.step()\n        for part, master in zip(self.parts, self.masters):\n"
     "            part.own.data = master.data.bfloat16()\n            all_gather(part.flat, part.own.detach())\n"))  # fmt: skip
variant(
    "mixed-collective",
    PINNED,
    ("            all_gather(part.flat, part.own.detach())", "            all_gather(part.flat, buffer)"),
)

hint("read-before-arrival", "Values were read before they had arrived: a copy to the CPU with non_blocking=True "
                               "returns at once. Synchronise before the optimizer reads them, or use a blocking "
                               "copy.")  # fmt: skip
offloaded("read-before-arrival", 'master.grad = part.own.grad.to("cpu", non_blocking=True).float()')
variant("read-before-arrival", PINNED, ("        measure.synchronize(self.parts[0].own.device)\n", ""),
        ("pin_memory=gpu)", "pin_memory=True)"))  # fmt: skip

hint("old-masters", "self.masters do not move: update() takes no step, or the optimizer updates other tensors. "
                       "Move the masters that it knows, by master.data, or replace them in its param_groups.")  # fmt: skip
slip("old-masters", ("        for master in self.masters:\n            master.data = master.data.cpu()\n",
     "        self.masters = [nn.Parameter(m.detach().to(\"cpu\")) for m in self.masters]\n"))  # fmt: skip
variant(
    "old-masters",
    EVENT,
    ('            group["params"] = [of[own] for own in group["params"]]\n', "            pass\n"),
)

hint("offload-wrong-weights", "The masters differ from those of balise 6, which computes the same on the GPU.")
offloaded("offload-wrong-weights", "master.grad = part.own.grad.cpu().float() / dist.get_world_size()")
offloaded("offload-wrong-weights", "master.grad = part.own.grad.cpu().float() * 2")
variant(
    "offload-wrong-weights",
    AT_ONCE,
    ("        self.optimizer.step()\n", "        self.optimizer.step()\n        self.optimizer.step()\n"),
)

hint(
    "offload-no-update",
    "The parameters on the GPU do not move. Copy each rounded master back into own, then gather.",
)
offloaded("offload-no-update", update="part.own.data")
offloaded("offload-no-update", update="part.own.cpu().copy_(master.data)")
variant("offload-no-update", PINNED, ("            part.own.copy_(buffer, non_blocking=True)\n", ""))

hint("offload-wrong-parameters", "The masters are right, but the parameters of rank {rank} are not their "
                                    "rounded values. Copy each master into part.own, on the GPU, then gather.")  # fmt: skip
offloaded("offload-wrong-parameters", update="part.own.data.copy_(-master.data)")
variant("offload-wrong-parameters", PINNED, ("        for part, buffer, master in zip(self.parts, self.buffers, self.masters):\n            buffer.copy_(master)",
        "        for part, buffer, master in zip(self.parts, self.buffers, self.masters):\n            buffer.copy_(master * 2)"))  # fmt: skip

hint("moved-off-gpu", "Parameter {got} is no longer on the GPU. Only masters and states move.")
TAKEN = "            for p in part.parameters:\n                p.data = p.data.cpu()\n"
offloaded("moved-off-gpu", changes=[(GATHER, GATHER + TAKEN)])
variant("moved-off-gpu", AT_ONCE, (GATHER, GATHER + TAKEN))

hint("float32-to-cpu", "{got} bytes went to the CPU in a step, but the bfloat16 shard has {expected}. Send it "
                          "as it is, and convert it on the CPU. A non-blocking copy converts on the GPU: cast in a "
                          "separate step.")  # fmt: skip
offloaded("float32-to-cpu", "master.grad = part.own.grad.float().cpu()")
# a copy that casts and does not block, waited for as it should be
WAITED = [(FREED, FREED + "        measure.synchronize(self.parts[0].own.device)\n")]
PINNED_COPY = "torch.empty_like(master, pin_memory=part.own.is_cuda).copy_(part.own.grad, non_blocking=True)"
offloaded("float32-to-cpu", f"master.grad = {PINNED_COPY}", changes=WAITED)
offloaded("float32-to-cpu", 'master.grad = part.own.grad.to("cpu", torch.float32, non_blocking=True)', changes=WAITED)
variant("float32-to-cpu", AT_ONCE, ("for part in self.parts]).cpu()", "for part in self.parts]).float().cpu()"))

hint("more-to-cpu", "{got} bytes went to the CPU in a step, but this rank's shard of the gradients has "
                       "{expected}. Reduce first, then send only the shard: the other ranks own the rest, and no "
                       "parameters go to the CPU.")  # fmt: skip
offloaded("more-to-cpu", "whole = torch.empty_like(part.flat); all_gather(whole, part.own.grad); "
          "master.grad = shard(whole.cpu(), dist.get_rank(), dist.get_world_size()).float()")  # fmt: skip
offloaded("more-to-cpu", "master.grad = part.own.grad.cpu().float(); part.flat.cpu()")
variant(
    "more-to-cpu",
    AT_ONCE,
    ("        on_cpu =", "        torch.cat([part.own.grad for part in self.parts]).cpu()\n        on_cpu ="),
)

hint("float32-to-gpu", "{got} bytes went back to the GPU in a step, but the bfloat16 shard has {expected}. "
                          "Round on the CPU: a blocking copy_ into a bfloat16 tensor does that; with "
                          "non_blocking=True it rounds on the GPU.")  # fmt: skip
offloaded("float32-to-gpu", update="part.own.data.copy_(master.data.to(part.own.device))")
offloaded("float32-to-gpu", update="part.own.data = part.own.data.copy_(master.data.cuda().bfloat16())")
offloaded("float32-to-gpu", update="part.own.data.copy_(master.data, non_blocking=True)")
variant(
    "float32-to-gpu",
    PINNED,
    ("part.own.copy_(buffer, non_blocking=True)", "part.own.copy_(buffer.float().to(part.own.device))"),
)

hint(
    "more-to-gpu",
    "{got} bytes went back to the GPU in a step, but only this rank's shard of the parameters must: {expected}.",
)
offloaded(
    "more-to-gpu",
    update="part.own.data.copy_(master.data); self.all = [m.data.bfloat16().cuda() for m in self.masters]; del self.all",
)
variant(
    "more-to-gpu",
    PINNED,
    (
        "            part.own.copy_(buffer, non_blocking=True)\n",
        "            part.own.copy_(buffer, non_blocking=True)\n            part.own.copy_(buffer)\n",
    ),
)

hint(
    "kept-on-gpu",
    "Between two steps the GPU holds {got} bytes; the parameters have {expected}. What else stays there?",
)
offloaded("kept-on-gpu", update="part.own.data.copy_(master.data); part.spare = part.flat.clone()")
offloaded("kept-on-gpu", changes=[(FREED, "            part.last, part.own.grad = part.own.grad, None\n")])
variant(
    "kept-on-gpu",
    PINNED,
    ("            part.own.grad = None\n", "            part.last, part.own.grad = part.own.grad, None\n"),
)

hint("gradient-kept-on-gpu", "After step() the GPU holds {got} bytes; the parameters have {expected}. The "
                                "shard's gradient is on the CPU now: release the one on the GPU.")  # fmt: skip
offloaded("gradient-kept-on-gpu", changes=[(FREED, "")])
variant("gradient-kept-on-gpu", PINNED, ("            part.own.grad = None\n", ""))

hint("whole-on-cpu", "Between two steps this rank keeps {got} bytes, in CPU memory and on the GPU; the "
                        "parameters, and the masters and states of its own shard, make at most {expected:.0f}. The "
                        "other ranks keep the rest.")  # fmt: skip
slip("whole-on-cpu", ("            master.data = master.data.cpu()\n",
     "            master.data = master.data.cpu()\n        self.start = [part.flat.cpu().float() for part in self.parts]\n"))  # fmt: skip
variant(
    "whole-on-cpu",
    PINNED,
    (
        "        for master in self.masters:\n",
        "        self.all = [torch.zeros(len(part.flat)) for part in self.parts]\n        for master in self.masters:\n",
    ),
)
