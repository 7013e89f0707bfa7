"""Answers to balise 1 of 17_tensor_slicing: two conjugate functions."""

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("17_tensor_slicing", 1, whole=True)


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, async_op=True).wait()
        return gradient


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
        dist.all_reduce(out, op=dist.ReduceOp.SUM)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


bank.several(None, Copied, Summed)


class CopiedWhole(torch.autograd.Function):
    """Copies, and reduces a flat copy."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        flat = gradient.flatten().clone()
        dist.all_reduce(flat)
        return flat.reshape(ctx.shape)


class SummedSkipping(torch.autograd.Function):
    """Nothing to send where there is one rank."""

    @staticmethod
    def forward(ctx, x):
        if dist.get_world_size() == 1:
            return x.view_as(x)
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view_as(gradient)


bank.several(None, CopiedWhole, SummedSkipping)

bank.several(None, Copied, SummedSkipping)

COPY_BACKWARD = "        return total(gradient)"

SUM_FORWARD = "        return total(x)"

SUM_BACKWARD = "        return gradient"


bank.hint("no-reduce-backward", "The gradient of CopyToRanks is only this rank's gradient. Each rank used x for "
          "another part of the work, so their gradients must be added up.")  # fmt: skip
bank.slip("no-reduce-backward", (COPY_BACKWARD, COPY_BACKWARD.replace("total(gradient)", "gradient")), variant=True)

bank.slip(
    "rank-failed", (COPY_BACKWARD, "        return total(gradient) if gradient.any() else gradient")
)  # nothing to add

bank.hint("reduced-not-returned", "You called an all-reduce, but the result is this rank's own {what}. Return the "
          "reduced tensor, and wait for it if the call is asynchronous.")  # fmt: skip
bank.slip(
    "reduced-not-returned", (COPY_BACKWARD, COPY_BACKWARD.replace("total(gradient)", "total(gradient) * 0 + gradient"))
)

bank.hint("doubled-backward", "The gradient of SumOverRanks is {n} times too large, because you added it up over the "
          "ranks. Every rank already holds the whole gradient of the sum, and d(sum)/dx is 1.")  # fmt: skip
bank.slip(
    "doubled-backward",
    (SUM_BACKWARD, "        return total(gradient)"),
    ("return total(x)", "return total(x)"),
    variant=True,
)

bank.hint("not-summed-forward", "SumOverRanks returned this rank's own x. Forward must return the sum over the ranks.")
bank.slip("not-summed-forward", (SUM_FORWARD, SUM_FORWARD.replace("total(x)", "x.view_as(x)")), variant=True)

bank.slip("reduced-not-returned", ("return total(x)", "total(x)\n        return x.clone()"), variant=True)

bank.hint("swapped", "You swapped the two: CopyToRanks communicates in backward, SumOverRanks in forward.")
bank.slip("swapped", ("return x.view_as(x)", "return SumOverRanks.forward(ctx, x)"), (COPY_BACKWARD, COPY_BACKWARD.replace("total(gradient)", "gradient")), variant=True)  # fmt: skip

bank.hint("copy-communicates", "CopyToRanks sends something in forward. It should communicate only in backward.")
bank.slip("copy-communicates", ("return x.view_as(x)", "return total(x) / dist.get_world_size()"), variant=True)

bank.hint("copy-changes", "In forward, CopyToRanks must return its input: all ranks already hold the same x. Yours "
          "returns something else.")  # fmt: skip
bank.slip("copy-changes", ("return x.view_as(x)", "return x / dist.get_world_size()"), variant=True)

bank.hint("mean-instead", "This is the mean over the ranks. Partial results are added up, without a division.")
bank.slip("mean-instead", ("return result", "return result / dist.get_world_size()"))

bank.slip("mean-instead", ("dist.all_reduce(result)", "dist.all_reduce(result)\n    if x.shape[:1] == (3,): result /= dist.get_world_size()"), variant=True)  # fmt: skip

bank.hint("rank-zero-only", "Rank 0 has the sum, but rank {rank} does not. reduce() and gather() give the result to "
          "one rank, all_reduce() to all.")  # fmt: skip
bank.slip("rank-zero-only", ("dist.all_reduce(result)", "dist.reduce(result, dst=0)"))

bank.hint("operand-overwritten", "{what} was overwritten: all_reduce works in place. Others may still need the "
          "tensor (a tanh keeps its output for backward, a residual shares its gradient). "
          "Reduce a copy.", edge=True)  # fmt: skip
bank.slip("operand-overwritten", ("result = x.clone(memory_format=torch.contiguous_format)", "result = x"))

bank.slip("operand-overwritten", ("result = x.clone(memory_format=torch.contiguous_format)", "result = x.contiguous()"))

bank.slip("operand-overwritten", ("return total(gradient)", "dist.all_reduce(gradient)\n        return gradient"))

bank.slip("operand-overwritten", ("return total(x)", "dist.all_reduce(x)\n        return x.clone()"), variant=True)

bank.hint("sum-not-waited", "The result changed after you returned it: the all-reduce was not finished yet. Wait for "
          "it.", edge=True)  # fmt: skip
bank.slip("sum-not-waited", ("dist.all_reduce(result)", "dist.all_reduce(result, async_op=True)"))

bank.slip("sum-not-waited", (SUM_FORWARD, "        result = x.contiguous().clone()\n        dist.all_reduce(result, async_op=True)\n        return result"), variant=True)  # fmt: skip

bank.hint("layout-mixed", "The result is right for contiguous tensors, but wrong for transposed or expanded ones. A "
          "collective sends the memory in its stored order. Make the "
          "tensor contiguous first.", edge=True)  # fmt: skip
bank.slip(
    "layout-mixed", ("result = x.clone(memory_format=torch.contiguous_format)", "result = x.clone()"), variant=True
)

bank.hint("dtype-changed", "The result has the dtype {dtype}, which is not that of the input.", edge=True)
bank.slip("dtype-changed", ("dist.all_reduce(result)", "result = result.float() if result.dtype == torch.bfloat16 else result\n    dist.all_reduce(result)"), variant=True)  # fmt: skip

bank.hint("too-much-sent", "{name} calls {calls} {way}. One all-reduce of the input is enough. Gathering everything "
          "and adding it up here sends more, and holds every rank's tensor at once.")  # fmt: skip
bank.slip("too-much-sent", ("dist.all_reduce(result)", "for row in result.view(-1, result.shape[-1]) if result.ndim else [result]:\n        dist.all_reduce(row)"))  # fmt: skip

bank.slip("too-much-sent", ("dist.all_reduce(result)\n    return result", "every = [torch.empty_like(result) for _ in range(dist.get_world_size())]\n    dist.all_gather(every, result)\n    return sum(every)"))  # fmt: skip

bank.hint("functions-wrong", "{what} is not what it should be.")
bank.slip("functions-wrong", ("dist.all_reduce(result)", "dist.all_reduce(result, op=dist.ReduceOp.MAX)"))

bank.slip("functions-wrong", (SUM_BACKWARD, "        return gradient * dist.get_rank()"), ("return total(gradient)", "return total(gradient)"), variant=True)  # fmt: skip

HALVES = """flat = torch.nn.functional.pad(result.flatten(), (0, -result.numel() % dist.get_world_size()))
    part = flat.new_empty(len(flat) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, flat)
    dist.all_gather_into_tensor(flat, part)
    result = flat[: result.numel()].view(result.shape)"""

bank.slip(None, ("dist.all_reduce(result)", HALVES))

bank.slip(
    "too-much-sent", ("dist.all_reduce(result)", "dist.reduce(result, 0)\n    dist.broadcast(result, 0)"), variant=True
)

bank.slip("rank-zero-only", ("dist.all_reduce(result)", "parts = [torch.empty_like(result) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None\n    dist.gather(result, parts)\n    result = sum(parts) if parts else result"), variant=True)  # fmt: skip

bank.slip("nothing-returned", ("return x.view_as(x)", "x.view_as(x)"))


bank.hint("sum-sends-back", "SumOverRanks calls {call} in backward, but nothing has to travel there: every rank "
          "already holds the gradient of the sum.")  # fmt: skip
bank.slip(
    "sum-sends-back",
    ("        return gradient\n", "        return total(gradient) / dist.get_world_size()\n"),
    variant=True,
)

bank.slip("nothing-returned", ("        return total(gradient)\n", "        total(gradient)\n"))

bank.slip(
    None,
    (
        "    @staticmethod\n    def backward(ctx, gradient):\n        return total",
        "    @staticmethod\n    @torch.autograd.function.once_differentiable\n    def backward(ctx, gradient):\n        return total",
    ),
)
