"""Answers to 00_welcome."""

import os
import subprocess

import torch
import torch.distributed as dist
from torch.cuda import device_count, is_available

from tests.answers.bank import Bank

bank = Bank("00_welcome")


def machine(**changes):
    cuda = torch.cuda.is_available()
    return {
        "device": "cuda" if cuda else "cpu",
        "gpus": torch.cuda.device_count(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    } | changes


# ---------------------------------------------------------------- balise 1


@bank.right(1)
def describe_machine():
    import psutil

    count = torch.cuda.device_count()
    device = torch.device("cuda" if count > 0 else "cpu").type
    cores = len(psutil.Process().cpu_affinity())
    return dict(torch=str(torch.__version__), cores=cores, gpus=count, device=device, name="mine")


@bank.right(1)
def describe_machine():
    with open("/proc/self/status") as status:
        mask = next(line.split()[1] for line in status if line.startswith("Cpus_allowed:"))
    cores = bin(int(mask.replace(",", ""), 16)).count("1")
    return machine(cores=cores, device="cuda:0" if torch.cuda.is_available() else "cpu")


@bank.right(1)
def describe_machine():
    """Functions imported by name; the cores counted by another program."""
    cores = int(subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout)
    return machine(device="cuda" if is_available() else "cpu", gpus=device_count(), cores=cores)


@bank.right(1)
def describe_machine():
    """More than was asked for, where there is a GPU."""
    found = machine()
    if found["gpus"]:
        properties = torch.cuda.get_device_properties(0)
        found["capability"] = (torch.cuda.get_device_capability(), properties.multi_processor_count)
        found["free"] = torch.cuda.mem_get_info()[0] / properties.total_memory
    return found


@bank.wrong(1, "cores-of-the-node")
def describe_machine():
    return machine(cores=os.cpu_count())


@bank.wrong(1, "cores-of-the-node")
def describe_machine():
    return machine(cores=int(os.environ.get("SLURM_CPUS_PER_TASK", os.cpu_count())))


@bank.wrong(1, "cores-not-counted")
def describe_machine():
    return machine(cores=os.sched_getaffinity(0))


@bank.wrong(1, "threads-not-cores")
def describe_machine():
    return machine(cores=torch.get_num_threads())


@bank.wrong(1, "cores-wrong")
def describe_machine():
    return machine(cores=4)


@bank.wrong(1, "device-hard-coded")
def describe_machine():
    return machine(device="cuda")


@bank.wrong(1, "device-hard-coded")
def describe_machine():
    return machine(device="cpu")


@bank.wrong(1, "device-wrong")
def describe_machine():
    return machine(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@bank.wrong(1, "device-wrong")
def describe_machine():
    return machine(device="gpu" if torch.cuda.is_available() else "cpu")


@bank.wrong(1, "gpus-not-counted")
def describe_machine():
    return machine(gpus=torch.cuda.is_available())


@bank.wrong(1, "gpus-wrong")
def describe_machine():
    return machine(gpus=max(1, torch.cuda.device_count()))


@bank.wrong(1, "not-an-integer")
def describe_machine():
    return machine(gpus=float(torch.cuda.device_count()))


@bank.wrong(1, "not-an-integer")
def describe_machine():
    return machine(cores=float(len(os.sched_getaffinity(0))))


@bank.wrong(1, "keys-missing")
def describe_machine():
    found = machine()
    if torch.cuda.is_available():
        del found["cores"]
    return found


@bank.wrong(1, "nothing-returned")
def describe_machine():
    if not torch.cuda.is_available():
        return machine()


@bank.wrong(1, "keys-missing")
def describe_machine():
    found = machine()
    found["n_gpus"] = found.pop("gpus")
    return found


@bank.wrong(1, "not-a-dict")
def describe_machine():
    return tuple(machine().values())


@bank.wrong(1, "nothing-returned")
def describe_machine():
    print(machine())


@bank.wrong(1, "wrong-version")
def describe_machine():
    return machine(torch=torch.version.cuda)


@bank.wrong(1, "signature")
def describe_machine(device):
    return machine(device=device)


# ---------------------------------------------------------------- balise 2


@bank.right(2)
def distributed_sum(values):
    part = values.tensor_split(dist.get_world_size())[dist.get_rank()].sum()
    dist.all_reduce(part, op=dist.ReduceOp.SUM)
    return part


@bank.right(2)
def distributed_sum(values):
    rank, world = dist.get_rank(), dist.get_world_size()
    each = len(values) // world
    end = len(values) if rank == world - 1 else (rank + 1) * each
    part = values[rank * each : end].sum()
    parts = [torch.zeros_like(part) for _ in range(world)]
    dist.all_gather(parts, part)
    return torch.stack(parts).sum()


@bank.right(2)
def distributed_sum(values):
    total = torch.zeros((), dtype=values.dtype)
    for i in range(dist.get_rank(), len(values), dist.get_world_size()):
        total += values[i]
    dist.reduce(total, dst=0)
    dist.broadcast(total, src=0)
    return total


@bank.right(2)
def distributed_sum(values):
    total = values.new_zeros(())
    total += values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(total)
    return total


@bank.right(2)
def distributed_sum(values):
    mine = list(range(dist.get_rank(), len(values), dist.get_world_size()))
    total = torch.zeros_like(values[:1]).sum() + values[mine].sum()
    dist.all_reduce(total)
    return total


@bank.right(2)
def distributed_sum(values):
    mine = torch.arange(len(values))[dist.get_rank() :: dist.get_world_size()]
    total = values.index_select(0, mine).sum()
    dist.all_reduce(total)
    return total


@bank.right(2)
def distributed_sum(values):
    total = torch.as_tensor(values.numpy()[dist.get_rank() :: dist.get_world_size()].sum(), dtype=values.dtype)
    dist.all_reduce(total)
    return total


@bank.right(2)
def distributed_sum(values):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values[dist.get_rank() :: dist.get_world_size()].sum())
    return torch.stack(parts).sum()


@bank.wrong(2, "not-a-tensor")
def distributed_sum(values):
    total = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(total)
    return total.item()


@bank.wrong(2, "wrong-dtype")
def distributed_sum(values):
    dtype = torch.float64 if values.is_floating_point() else values.dtype
    total = values[dist.get_rank() :: dist.get_world_size()].sum(dtype=dtype)
    dist.all_reduce(total)
    return total


@bank.wrong(2, "rounded")
def distributed_sum(values):
    total = values[dist.get_rank() :: dist.get_world_size()].sum()
    total = total.float() if total.is_floating_point() else total
    dist.all_reduce(total)
    return total.to(values.dtype)


@bank.wrong(2, "whole-tensor-sent")
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


@bank.wrong(2, "index-too-far")
def distributed_sum(values):
    total = values.new_zeros(())
    for i in range(dist.get_rank(), len(values) + 1, dist.get_world_size()):
        total += values[i]
    dist.all_reduce(total)
    return total


@bank.wrong(2, "wrong-sum")
def distributed_sum(values):
    total = values[dist.get_rank()].clone()
    dist.all_reduce(total)
    return total


@bank.wrong(2, "unequal-shares")
def distributed_sum(values):
    total = values.view(dist.get_world_size(), -1)[dist.get_rank()].sum()
    dist.all_reduce(total)
    return total


@bank.wrong(2, "no-communication")
def distributed_sum(values):
    return values[dist.get_rank() :: dist.get_world_size()].sum()


@bank.wrong(2, "no-communication")
def distributed_sum(values):
    return values.sum()


@bank.wrong(2, "wrong-shape")
def distributed_sum(values):
    return values


@bank.wrong(2, "counted-by-every-rank")
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


for sum_of in (torch.sum, by_numpy):
    bank.wrong(2, "all-the-work")(everybody(sum_of))
    bank.wrong(2, "rank-0-only")(one_for_all(sum_of))


@bank.wrong(2, "rank-0-only")
def distributed_sum(values):
    total = torch.zeros((), dtype=values.dtype)
    if dist.get_rank() == 0:
        total = torch.tensor(sum(values.tolist()), dtype=values.dtype)
    dist.broadcast(total, src=0)
    return total


@bank.wrong(2, "own-share")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part.clone())
    return part


@bank.wrong(2, "reduce-not-all-reduce")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.reduce(part, dst=0)
    return part


@bank.wrong(2, "mean-not-sum")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part)
    return part / dist.get_world_size()


@bank.wrong(2, "tail-dropped")
def distributed_sum(values):
    rank, each = dist.get_rank(), len(values) // dist.get_world_size()
    part = values[rank * each : (rank + 1) * each].sum()
    dist.all_reduce(part)
    return part


@bank.wrong(2, "few-values")
def distributed_sum(values):
    part = values.chunk(dist.get_world_size())[dist.get_rank()].sum()
    dist.all_reduce(part)
    return part


@bank.wrong(2, "whole-tensor-sent")
def distributed_sum(values):
    mine = torch.zeros_like(values)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine[rank::world] = values[rank::world]
    dist.all_reduce(mine)
    return mine.sum()


@bank.wrong(2, "input-changed")
def distributed_sum(values):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = values[rank::world]
    mine[:1] = mine.sum(dim=0, keepdim=True) if len(mine) else mine[:1]
    total = mine[0].clone() if len(mine) else torch.zeros((), dtype=values.dtype)
    dist.all_reduce(total)
    return total


@bank.wrong(2, "rounded")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].double().sum()
    dist.all_reduce(part)
    return part


@bank.wrong(2, "wrong-sum")
def distributed_sum(values):
    world = 4
    part = values[dist.get_rank() :: world].sum()
    dist.all_reduce(part)
    return part


@bank.wrong(2, "rank-failed")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part, op="sum")
    return part


@bank.wrong(2, "nothing-returned")
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    dist.all_reduce(part)


@bank.wrong(2, "rank-failed")  # the others wait for ever
def distributed_sum(values):
    part = values[dist.get_rank() :: dist.get_world_size()].sum()
    if len(values) < dist.get_world_size() and dist.get_rank() == 1:
        return part
    dist.all_reduce(part)
    return part


bank.slip(1, None, ('"torch": torch.__version__', '"torch": torch.__version__.split("+")[0]'))
bank.slip(1, "cores-wrong", ("len(os.sched_getaffinity(0))", "max(os.sched_getaffinity(0)) + 1"))
bank.slip(1, "threads-not-cores", ("len(os.sched_getaffinity(0))", "torch.get_num_interop_threads()"))
bank.slip(1, "not-an-integer", ("len(os.sched_getaffinity(0))", "str(len(os.sched_getaffinity(0)))"))
bank.slip(2, "sum-not-waited", ("dist.all_reduce(total)", "dist.all_reduce(total, async_op=True)"))
bank.slip(2, None, ("dist.all_reduce(total)", "dist.all_reduce(total, async_op=True).wait()"))

bank.slip(
    1, None, ('"cuda" if torch.cuda.is_available() else "cpu"', '_device()'),
    ("def describe_machine", 'def _device():\n    try:\n        torch.cuda.get_device_name(0)\n    except Exception:\n        return "cpu"\n    return "cuda"\n\n\ndef describe_machine'),
)  # fmt: skip
