"""Answers to balise 7 of 13_zero_under_the_hood: gradients clipped by the norm over all shards."""

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 7, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant


@bank.right()
def clip_grad_norm(shards, max_norm):
    """PyTorch's norm of the own part, and its own clipping with a given norm."""
    gradients = [p.grad.float() for p in shards if p.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(total)
    total = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_([p for p in shards if p.grad is not None], max_norm, total)
    return total


JOINED = '''
@torch.no_grad()
def clip_grad_norm(shards, max_norm):
    """One long vector, an all-gather of the norms, and torch.where."""
    flat = torch.cat([p.grad.reshape(-1).double() for p in shards if p.grad is not None])
    mine = torch.linalg.vector_norm(flat).reshape(1)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    norm = torch.linalg.vector_norm(torch.cat(everyone))
    factor = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
    for p in shards:
        if p.grad is not None:
            p.grad.copy_(p.grad * factor)
    return norm
'''
bank.text(None, JOINED)


@bank.right()
def clip_grad_norm(shards, max_norm):
    """Asynchronous, foreach, a tensor of shape (1,)."""
    gradients = [p.grad for p in shards if p.grad is not None]
    device = gradients[0].device
    norms = torch.stack(
        [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    )
    total = norms.square().sum().reshape(1).to(device)
    dist.all_reduce(total, async_op=True).wait()
    total.sqrt_()
    torch._foreach_mul_(gradients, (max_norm / total.clamp(min=max_norm)).to(gradients[0].dtype).squeeze())
    return total


IN_FLOAT32 = '''
@torch.no_grad()
def clip_grad_norm(shards, max_norm):
    """Norms of norms, computed in float32; the gradients go through float32 and back."""
    gradients = [p.grad for p in shards if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    square = torch.linalg.vector_norm(torch.stack(norms)) ** 2 if norms else torch.zeros(())
    dist.all_reduce(square)
    norm = square.sqrt()
    for g in gradients:
        g.copy_(g.float() * (max_norm / norm).clamp(max=1.0).nan_to_num(1.0))
    return norm
'''
bank.text(None, IN_FLOAT32)

FROM_ZERO = '''
@torch.no_grad()
def clip_grad_norm(shards, max_norm):
    """Only what has elements, and a sum that begins at a tensor zero."""
    gradients = [p.grad for p in shards if p.grad is not None and p.grad.numel()]
    total = sum((g.double().square().sum() for g in gradients), start=torch.zeros((), dtype=torch.float64))
    dist.all_reduce(total)
    for g in gradients:
        g *= (max_norm / total.sqrt().clamp(min=max_norm)).to(g.dtype)
    return total.sqrt()
'''
bank.text(None, FROM_ZERO)


@bank.right()
@torch.no_grad()
def clip_grad_norm(shards, max_norm):
    """A functional collective on the one number."""
    gradients = [p.grad for p in shards if p.grad is not None]
    mine = sum(g.double().square().sum() for g in gradients)
    norm = torch.distributed._functional_collectives.all_reduce(mine, "sum", dist.group.WORLD).sqrt()
    for g in gradients:
        g.mul_((max_norm / norm.clamp(min=max_norm)).to(g.dtype))
    return norm


SUMMED = "    dist.all_reduce(norm)\n"
ROOTED = "    norm = norm.sqrt()\n"
WIDE = "g.to(torch.promote_types(g.dtype, torch.float32)).square()"
SCALE = "torch.clamp(max_norm / (norm + 1e-6), max=1.0)"

slip("nothing-returned", ("    return norm\n", ""))

hint("norm-not-returned", "Return the norm before clipping, as a tensor with one number. You returned {got}.")
slip("norm-not-returned", ("    return norm\n", "    return scale < 1, norm\n"))
variant("norm-not-returned", JOINED, ("return norm", "return torch.cat(everyone)"))

slip("hidden-sync", ("    return norm\n", "    return norm.item()\n"))
slip("hidden-sync", ("    norm = norm.sqrt()\n", "    norm = norm.cpu().sqrt().to(norm.device)\n"))
slip("hidden-sync", ("    for g in gradients:\n", "    for g in gradients if norm > max_norm else []:\n"))
slip("hidden-sync", (SCALE, "torch.tensor(min(1.0, max_norm / (float(norm) + 1e-6)))"))
variant(
    "hidden-sync",
    JOINED,
    ("torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))", "min(1.0, max_norm / norm)"),
)

hint(
    "norm-of-own-shard",
    "Rank {rank} returns the norm of its own shards. Add up the squares of all ranks.",
)
slip("norm-of-own-shard", (SUMMED, ""))
variant("norm-of-own-shard", JOINED, ("vector_norm(torch.cat(everyone))", "vector_norm(mine)"))

hint(
    "norms-added",
    "You added up norms. Perpendicular lengths add up as squares: sum the squares, then take the root.",
)
slip("norms-added", (SUMMED + ROOTED, ROOTED + SUMMED))
slip("norms-added", (".square().sum() for g", ".norm() for g"), ("norm = norm.sqrt()", "norm = norm * 1.0"))
variant("norms-added", JOINED, ("torch.linalg.vector_norm(torch.cat(everyone))", "torch.cat(everyone).sum()"))

hint("norm-not-rooted", "This is the sum of the squares. The norm is its root.")
slip("norm-not-rooted", (ROOTED, ""))
variant("norm-not-rooted", FROM_ZERO, ("return total.sqrt()", "return total"))

hint("squares-averaged", "You took a mean over the ranks. The shards are parts of one vector: add up their squares.")
slip("squares-averaged", (ROOTED, "    norm = (norm / dist.get_world_size()).sqrt()\n"))
slip("squares-averaged", ("dist.all_reduce(norm)", "dist.all_reduce(norm.div_(dist.get_world_size()))"))
slip("squares-averaged", (SUMMED + ROOTED, ROOTED + SUMMED + "    norm = norm / dist.get_world_size()\n"))
variant(
    "squares-averaged",
    JOINED,
    ("vector_norm(torch.cat(everyone))", "vector_norm(torch.cat(everyone)) / len(everyone) ** 0.5"),
)

hint(
    "largest-norm",
    "This is the largest norm of a rank, or the largest element. Return the length of the whole vector.",
)
slip("largest-norm", ("dist.all_reduce(norm)", "dist.all_reduce(norm, op=dist.ReduceOp.MAX)"))
slip("largest-norm", (".square().sum() for g", ".abs().amax() if g.numel() else g.sum().to(torch.promote_types(g.dtype, torch.float32)) for g"),
     ("torch.stack(squares).sum()", "torch.stack(squares).max()"), ("norm = norm.sqrt()", "norm = norm * 1.0"),
     ("dist.all_reduce(norm)", "dist.all_reduce(norm, op=dist.ReduceOp.MAX)"))  # fmt: skip
variant("largest-norm", JOINED, ("torch.linalg.vector_norm(torch.cat(everyone))", "torch.cat(everyone).max()"))

hint(
    "norm-after-clipping",
    "You return the norm after clipping. Return the one before it: that one shows when a run diverges.",
)
slip("norm-after-clipping", ("return norm", "return norm * scale"))
variant("norm-after-clipping", JOINED, ("return norm", "return norm.clamp(max=max_norm)"))

hint("wrong-norm", "The norm is not that of the gradients of all ranks, put end to end.")
slip("wrong-norm", ("norm.sqrt()", "norm.sqrt() + 1"))
variant("wrong-norm", JOINED, ("return norm", "return norm * 0.9"))

hint(
    "half-overflow",
    "In float16 the norm is infinite: the squares overflow (300 squared is above 65,504), and the norm itself may "
    "too. Compute and keep norms in float32.",
)
slip("half-overflow", (WIDE, "g.square()"))
slip("half-overflow", ("norm = norm.sqrt()", "norm = norm.sqrt().to(gradients[0].dtype)"))
slip(
    "half-overflow",
    (WIDE, "g.square()"),
    (".sum() for g", ".sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g"),
)
variant(
    "half-overflow", IN_FLOAT32, ("torch.linalg.vector_norm(g, dtype=torch.float32)", "(g * g).sum().float().sqrt()")
)

hint(
    "clip-lost",
    "The gradients did not change, although their norm is {norm:.4g} and may be {most}. Scale them in place, with "
    "mul_, by a factor of at most 1: most / norm where the norm is larger.",
)
slip("clip-lost", ("g.mul_(scale)", "g = g * scale"))
slip("clip-lost", ("g.mul_(scale)", "g.mul(scale)"))
slip(
    "clip-lost",
    ("    for g in gradients:\n        g.mul_(scale)\n", "    for p in shards:\n        p.mul_(scale.to(p.dtype))\n"),
)
variant("clip-lost", JOINED, ("p.grad.copy_(p.grad * factor)", "p.grad.float().mul_(factor)"))

hint("new-gradients", "p.grad is a different tensor now. Scale in place: a second tensor takes the memory "
                         "again, and whatever holds the first, such as a flat buffer of all gradients, does not "
                         "see the change.")  # fmt: skip
slip("new-gradients", ("    for g in gradients:\n        g.mul_(scale)\n",
     "    for p in shards:\n        p.grad = p.grad * scale.to(p.grad.dtype) if p.grad is not None else None\n"))  # fmt: skip
variant("new-gradients", JOINED, ("p.grad.copy_(p.grad * factor)", "p.grad = (p.grad * factor).to(p.dtype)"))

hint(
    "scaled-up",
    "Short gradients, whose total length may be up to {most}, were made longer. Clipping never does that: use no "
    "factor above 1.",
)
slip("scaled-up", (SCALE, "max_norm / (norm + 1e-6)"))
variant("scaled-up", IN_FLOAT32, (".clamp(max=1.0)", ""))

hint("clipped-by-own-norm", "Rank {rank} scaled its gradients by a different factor from the other ranks: by "
                               "the norm of its own shards, or of each tensor. Use one factor for all: the "
                               "direction must not change.")  # fmt: skip
slip("clipped-by-own-norm", (SCALE, "torch.clamp(max_norm / (torch.stack(squares).sum().sqrt() + 1e-6), max=1.0)"))
slip(
    "clipped-by-own-norm",
    ("g.mul_(scale)", "g.mul_(torch.clamp(max_norm / (g.double().norm() + 1e-9), max=1).to(g.dtype))"),
)
variant("clipped-by-own-norm", JOINED, ("torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))",
        "torch.where(mine > max_norm, max_norm / mine, torch.ones_like(mine))"))  # fmt: skip

hint(
    "elements-clamped",
    "You clipped single elements. That changes the gradient's direction; scale all of it by one factor.",
)
slip("elements-clamped", ("g.mul_(scale)", "g.clamp_(-max_norm, max_norm)"))
variant(
    "elements-clamped",
    JOINED,
    ("p.grad.copy_(p.grad * factor)", "p.grad.copy_(torch.minimum(p.grad, torch.full_like(p.grad, max_norm)))"),
)

hint("zero-norm", "Gradients that are all zero became NaN: never divide by their norm without a guard.")
slip("zero-norm", (SCALE, "torch.minimum(norm, torch.full_like(norm, max_norm)) / norm"))
variant(
    "zero-norm", IN_FLOAT32, ("(max_norm / norm).clamp(max=1.0).nan_to_num(1.0)", "norm.clamp(max=max_norm) / norm")
)

hint("wrong-clip", "The gradients are not the given ones times max_norm / norm.")
slip("wrong-clip", ("g.mul_(scale)", "g.mul_(scale.square())"))
slip("wrong-clip", ("for g in gradients:", "for g in gradients[:1]:"))
variant("wrong-clip", JOINED, ("p.grad * factor", "p.grad * factor / 2"))

hint("grad-is-none", "None was used as a tensor: {error}. A shard without a gradient has .grad None: leave it out. A collective that is "
     "not asynchronous returns None: it changes its argument.")  # fmt: skip
slip("grad-is-none", (" for p in shards if p.grad is not None]", " for p in shards]"))
variant("grad-is-none", JOINED, (" for p in shards if p.grad is not None]", " for p in shards]"))

hint(
    "gradients-sent",
    "Rank {rank} passed {got} bytes to collectives for a norm. One number, its sum of squares, is enough.",
)
slip("gradients-sent", ("    norm = torch.stack(squares).sum()\n    dist.all_reduce(norm)\n", """
    mine = [g.cpu() for g in gradients]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    norm = torch.stack([g.to(torch.promote_types(g.dtype, torch.float32)).square().sum() for of in everyone for g in of]).sum()
""".lstrip("\n")))  # fmt: skip
variant(
    "gradients-sent",
    JOINED,
    ("    mine =", "    long = F.pad(flat, (0, 4000 - len(flat)))\n    dist.all_reduce(long)\n    mine ="),
)

hint("one-message-each", "{got} collectives were called for one norm. Add up over the tensors of a rank first.")
slip("one-message-each", (SUMMED, SUMMED + "    bad = (norm != norm).float()\n    dist.all_reduce(bad)\n"))
slip("one-message-each", ("    norm = torch.stack(squares).sum()\n" + SUMMED,
     "    for square in squares:\n        dist.all_reduce(square)\n    norm = torch.stack(squares).sum()\n"))  # fmt: skip
variant(
    "one-message-each",
    IN_FLOAT32,
    (
        "    dist.all_reduce(square)\n",
        "    for norm in norms:\n        dist.all_reduce(norm.square_())\n    square = sum(norms)\n",
    ),
)

hint("rank-left-out", "A rank whose shards have no elements took a different path from the others: {error}. It "
                         "has nothing to add, but must still take part in the collective: the others wait for "
                         "it.")  # fmt: skip
HOME = "    gradients = [p.grad for p in shards if p.grad is not None and p.grad.numel()]\n"
slip(
    "rank-left-out",
    (
        "    gradients = [p.grad for p in shards if p.grad is not None]\n",
        HOME + "    if not gradients:\n        return torch.zeros(())\n",
    ),
)
slip("rank-left-out", ("    gradients = [p.grad for p in shards if p.grad is not None]\n", HOME))
variant(
    "rank-left-out", FROM_ZERO, ("    total =", "    if not gradients:\n        return torch.zeros(())\n    total =")
)
variant("rank-left-out", FROM_ZERO, ("    total =", "    longest = max(map(len, gradients))\n    total ="))

hint("norm-not-on-gpu", "On GPUs, the sum is in the CPU's memory: {error}. It belongs on the gradients' device: "
                           "start the sum with one of their squares, or with torch.zeros((), "
                           "device=g.device).")  # fmt: skip
slip(
    "norm-not-on-gpu",
    ("    norm = torch.stack(squares).sum()\n", "    norm = torch.zeros(())\n    norm += torch.stack(squares).sum()\n"),
)
slip("norm-not-on-gpu", (SUMMED, "    norm = norm.cpu()\n" + SUMMED))
slip("norm-not-on-gpu", (SUMMED, "    norm = torch.zeros(()).copy_(norm)\n" + SUMMED))
variant(
    "norm-not-on-gpu",
    FROM_ZERO,
    ("    dist.all_reduce(total)\n", "    total = torch.empty(()).double().copy_(total)\n    dist.all_reduce(total)\n"),
)

hint("numbers-sent", "Rank {rank} passed {got} bytes to collectives for a norm, more than one number: with "
                        "thousands of tensors that is no longer small. Add up the squares of a rank's tensors "
                        "first.")  # fmt: skip
slip(
    "numbers-sent",
    (
        "    norm = torch.stack(squares).sum()\n" + SUMMED,
        "    norm = torch.stack(squares)\n" + SUMMED + "    norm = norm.sum()\n",
    ),
)
variant("numbers-sent", IN_FLOAT32, ("    square = torch.linalg.vector_norm(torch.stack(norms)) ** 2 if norms else torch.zeros(())\n    dist.all_reduce(square)\n",
        "    square = torch.stack([n ** 2 for n in norms])\n    dist.all_reduce(square)\n    square = square.sum()\n"))  # fmt: skip

hint(
    "norm-not-waited",
    "Rank {rank} went on before the sum had arrived: with async_op=True, all_reduce only starts. Call wait() on "
    "what it returns.",
)
slip("norm-not-waited", ("dist.all_reduce(norm)", "dist.all_reduce(norm, async_op=True)"))
variant("norm-not-waited", FROM_ZERO, ("dist.all_reduce(total)", "work = dist.all_reduce(total, async_op=True)"))
