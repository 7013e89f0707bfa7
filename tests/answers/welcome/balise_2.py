"""Answers to balise 2 of 00_welcome: sum a tensor over ranks."""

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("00_welcome", 2)


@bank.right()
def distributed_sum(values):
    part = values.tensor_split(dist.get_world_size())[dist.get_rank()].sum()
    dist.all_reduce(part, op=dist.ReduceOp.SUM)
    return part


@bank.right()
def distributed_sum(values):
    rank, world = dist.get_rank(), dist.get_world_size()
    each = len(values) // world
    end = len(values) if rank == world - 1 else (rank + 1) * each
    part = values[rank * each : end].sum()
    parts = [torch.zeros_like(part) for _ in range(world)]
    dist.all_gather(parts, part)
    return torch.stack(parts).sum()


@bank.right()
def distributed_sum(values):
    total = torch.zeros((), dtype=values.dtype)
    for i in range(dist.get_rank(), len(values), dist.get_world_size()):
        total += values[i]
    dist.reduce(total, dst=0)
    dist.broadcast(total, src=0)
    return total


@bank.right()
def distributed_sum(values):
    total = values.new_zeros(())
    total += values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(total)
    return total


@bank.right()
def distributed_sum(values):
    mine = list(range(dist.get_rank(), len(values), dist.get_world_size()))
    total = torch.zeros_like(values[:1]).sum() + values[mine].sum()
    dist.all_reduce(total)
    return total


@bank.right()
def distributed_sum(values):
    mine = torch.arange(len(values))[dist.get_rank() :: dist.get_world_size()]
    total = values.index_select(0, mine).sum()
    dist.all_reduce(total)
    return total


@bank.right()
def distributed_sum(values):
    total = torch.as_tensor(values.numpy()[dist.get_rank() :: dist.get_world_size()].sum(), dtype=values.dtype)
    dist.all_reduce(total)
    return total


@bank.right()
def distributed_sum(values):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values[dist.get_rank() :: dist.get_world_size()].sum())
    return torch.stack(parts).sum()


bank.hint("not-a-tensor", "You returned {kind}. Return the sum as a tensor of shape (): to get a Python number, the "
          "program has to wait for the device.", edge=True)  # fmt: skip


@bank.wrong("not-a-tensor", variant=True)
def distributed_sum(values):
    total = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(total)
    return total.item()


bank.hint("wrong-dtype", "The values are {wanted}, but their sum is {found}. Keep the dtype of the values.", edge=True)


@bank.wrong("wrong-dtype", variant=True)
def distributed_sum(values):
    dtype = torch.float64 if values.is_floating_point() else values.dtype
    total = values[dist.get_rank() :: dist.get_world_size()].sum(dtype=dtype)
    dist.all_reduce(total)
    return total


bank.hint("rounded", "The sum is rounded: you converted the values to a coarser dtype. Keep their dtype.", edge=True)


@bank.wrong("rounded", variant=True)
def distributed_sum(values):
    total = values[dist.get_rank() :: dist.get_world_size()].sum()
    total = total.float() if total.is_floating_point() else total
    dist.all_reduce(total)
    return total.to(values.dtype)


bank.hint("whole-tensor-sent", "Rank {rank} sent {sent} bytes. A sum is one number: add up your share first, then "
          "all-reduce.")  # fmt: skip


@bank.wrong("whole-tensor-sent")
def distributed_sum(values):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty(len(share), dtype=values.dtype) for share in values.tensor_split(world)]
    longest = max(len(part) for part in parts)
    padded = [values.new_zeros(longest) for _ in parts]
    mine = values.new_zeros(longest)
    share = values.tensor_split(world)[rank]
    mine[: len(share)] = share
    dist.all_gather(padded, mine)
    return torch.cat(padded).sum()


bank.hint("index-too-far", "There is no value at this index: {error}. A rank's share ends at the last value at the "
          "latest, and it may be empty.")  # fmt: skip


@bank.wrong("index-too-far", variant=True)
def distributed_sum(values):
    total = values.new_zeros(())
    for i in range(dist.get_rank(), len(values) + 1, dist.get_world_size()):
        total += values[i]
    dist.all_reduce(total)
    return total


bank.hint("wrong-sum", "The sum over all ranks is not the sum of the values. Is every value in the share of exactly "
          "one rank?")  # fmt: skip


@bank.wrong("wrong-sum")
def distributed_sum(values):
    total = values[dist.get_rank()].clone()
    dist.all_reduce(total)
    return total


bank.hint("unequal-shares", "This works only when n is a multiple of world_size ({error}). values[rank::world_size] "
          "and torch.tensor_split give shares of different lengths.", edge=True)  # fmt: skip


@bank.wrong("unequal-shares", variant=True)
def distributed_sum(values):
    total = values.view(dist.get_world_size(), -1)[dist.get_rank()].sum()
    dist.all_reduce(total)
    return total


bank.hint("no-communication", "The ranks don't communicate. Each rank only sums the values it read; add up these "
          "partial sums with dist.all_reduce.")  # fmt: skip


@bank.wrong("no-communication")
def distributed_sum(values):
    return values[dist.get_rank() :: dist.get_world_size()].sum()


@bank.wrong("no-communication", variant=True)
def distributed_sum(values):
    return values.sum()


bank.hint("wrong-shape", "Return one number: a tensor without dimensions, shape ().")


@bank.wrong("wrong-shape", variant=True)
def distributed_sum(values):
    return values


bank.hint("counted-by-every-rank", "Every rank counted every value, so the sum is world_size times too large. Let "
          "each rank sum only its own share, and add up these sums once.")  # fmt: skip


@bank.wrong("counted-by-every-rank", variant=True)
def distributed_sum(values):
    total = values.sum()
    dist.all_reduce(total)
    return total


def everybody(sum_of):
    """Every rank sums all."""

    def distributed_sum(values):
        total = sum_of(values)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total

    return distributed_sum


def one_for_all(sum_of):
    """Rank 0 does it."""

    def distributed_sum(values):
        total = torch.zeros((), dtype=values.dtype)
        if dist.get_rank() == 0:
            total += sum_of(values)
        dist.broadcast(total, src=0)
        return total

    return distributed_sum


def by_numpy(values):
    """Where nobody looks."""
    return torch.as_tensor(values.numpy().sum())


bank.hint("rank-0-only", "One rank did all the work and sent the result to the others. Each rank must sum its own "
          "share.")  # fmt: skip
bank.hint("all-the-work", "The result is right, but rank {rank} read {read} of {n} values. Each rank should read "
          "about {fair}: take a slice first, then sum it.")  # fmt: skip
for sum_of in (torch.sum, by_numpy):
    bank.wrong("all-the-work", variant=True)(everybody(sum_of))
    bank.wrong("rank-0-only")(one_for_all(sum_of))


@bank.wrong("rank-0-only", variant=True)
def distributed_sum(values):
    total = torch.zeros((), dtype=values.dtype)
    if dist.get_rank() == 0:
        total = torch.tensor(sum(values.tolist()), dtype=values.dtype)
    dist.broadcast(total, src=0)
    return total


bank.hint("own-share", "You return the sum of this rank's share. The sums of all ranks must still be added up.")


@bank.wrong("own-share", variant=True)
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part.clone())
    return part


bank.hint("reduce-not-all-reduce", "Rank 0 has the sum, the other ranks don't. reduce() gives the sum to one rank, "
          "all_reduce() to all of them.")  # fmt: skip


@bank.wrong("reduce-not-all-reduce", variant=True)
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.reduce(part, dst=0)
    return part


bank.hint("mean-not-sum", "You return the sum divided by the number of ranks. Use ReduceOp.SUM, and don't divide.")


@bank.wrong("mean-not-sum", variant=True)
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part)
    return part / dist.get_world_size()


bank.hint("tail-dropped", "The last values are missing: n // world_size drops the remainder of the division. "
          "values[rank::world_size] and torch.tensor_split keep it.", edge=True)  # fmt: skip


@bank.wrong("tail-dropped")
def distributed_sum(values):
    rank, each = dist.get_rank(), len(values) // dist.get_world_size()
    part = values[rank * each : (rank + 1) * each].sum()
    dist.all_reduce(part)
    return part


@bank.wrong("tail-dropped", variant=True)
def distributed_sum(values):
    each = len(values) // dist.get_world_size()
    total = values.narrow(0, dist.get_rank() * each, each).sum()
    dist.all_reduce(total)
    return total


bank.hint("few-values", "Your code fails when there are fewer values than ranks: torch.chunk may return fewer pieces "
          "than you ask for. torch.tensor_split always returns all of them; some may be empty.", edge=True)  # fmt: skip


@bank.wrong("few-values", variant=True)
def distributed_sum(values):
    part = values.chunk(dist.get_world_size())[dist.get_rank()].sum()
    dist.all_reduce(part)
    return part


@bank.wrong("whole-tensor-sent", variant=True)
def distributed_sum(values):
    mine = torch.zeros_like(values)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine[rank::world] = values[rank::world]
    dist.all_reduce(mine)
    return mine.sum()


bank.hint("input-changed", "The function changed its input. all_reduce works in place: give it a new tensor.", edge=True)  # fmt: skip


@bank.wrong("input-changed", variant=True)
def distributed_sum(values):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = values[rank::world]
    mine[:1] = mine.sum(dim=0, keepdim=True) if len(mine) else mine[:1]
    total = mine[0].clone() if len(mine) else torch.zeros((), dtype=values.dtype)
    dist.all_reduce(total)
    return total


@bank.wrong("rounded")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].double().sum()
    dist.all_reduce(part)
    return part


@bank.wrong("wrong-sum", variant=True)
def distributed_sum(values):
    world = 4
    part = values[dist.get_rank() :: world].sum()
    dist.all_reduce(part)
    return part


@bank.wrong("rank-failed")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part, op="sum")
    return part


@bank.wrong("nothing-returned")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part)


@bank.wrong("rank-failed")  # the others wait for ever
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    if len(values) < dist.get_world_size() and dist.get_rank() == 1:
        return part
    dist.all_reduce(part)
    return part


bank.hint("sum-not-waited", "Rank {rank} went on before the sum had arrived: with async_op=True, all_reduce only "
          "starts. Call wait() on the handle that it returns.")  # fmt: skip
bank.slip("sum-not-waited", ("dist.all_reduce(total)", "dist.all_reduce(total, async_op=True)"), variant=True)

bank.slip(None, ("dist.all_reduce(total)", "dist.all_reduce(total, async_op=True).wait()"))
