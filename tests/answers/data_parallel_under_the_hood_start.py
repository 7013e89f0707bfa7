"""Answers to 08_data_parallel_under_the_hood: the same start, and the shares of the data."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tests.answers.bank import Bank

bank = Bank("08_data_parallel_under_the_hood")


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def send(tensor, src=0):
    message = tensor.detach().contiguous()
    dist.broadcast(message, src=src)
    with torch.no_grad():
        tensor.copy_(message)


# ---------------------------------------------------------------- balise 1


@bank.right(1)
@torch.no_grad()
def broadcast_state(model):
    """From rank 0 to each of the others, one after the other."""
    for tensor in [*model.parameters(), *model.buffers()]:
        message = tensor.contiguous()
        if dist.get_rank():
            dist.recv(message, 0)
            tensor.copy_(message)
        else:
            for rank in range(1, dist.get_world_size()):
                dist.send(message, rank)


@bank.right(1)
def broadcast_state(model):
    by_dtype = {}
    for t in tensors(model):
        by_dtype.setdefault(t.dtype, []).append(t.data)
    for group in by_dtype.values():
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.broadcast(flat, 0)
        for t, piece in zip(group, flat.split([t.numel() for t in group])):
            t.copy_(piece.view(t.shape))


@bank.right(1)
def broadcast_state(model):
    package = [[t.detach().cpu() for t in tensors(model)] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(package, src=0)
    with torch.no_grad():
        for t, value in zip(tensors(model), package[0]):
            t.copy_(value)


@bank.right(1)
def broadcast_state(model):
    """The others give zeros, and the sum is rank 0's; booleans as integers."""
    for t in tensors(model):
        message = t.detach().clone().to(torch.uint8 if t.dtype == torch.bool else t.dtype)
        if dist.get_rank() != 0:
            message.zero_()
        message = message.contiguous()
        dist.all_reduce(message)
        t.data.copy_(message)


@bank.right(1)
def broadcast_state(model):
    works = []
    for t in tensors(model):
        message = t.data.contiguous().clone()
        works.append((t, message, dist.broadcast(message, 0, async_op=True)))
    for t, message, work in works:
        work.wait()
        t.data = t.data.copy_(message)


@bank.wrong(1, "nothing-sent")
def broadcast_state(model):
    torch.manual_seed(0)


@bank.wrong(1, "only-rank-0")
def broadcast_state(model):
    if dist.get_rank() == 0:
        for t in tensors(model):
            dist.broadcast(t.data, src=0)


@bank.wrong(1, "every-rank-is-source")
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.data, src=dist.get_rank())


@bank.wrong(1, "wrong-source")
def broadcast_state(model):
    for t in tensors(model):
        send(t, src=dist.get_world_size() - 1)


@bank.wrong(1, "averaged")
def broadcast_state(model):
    for t in model.parameters():
        message = t.data.contiguous()
        dist.all_reduce(message)
        t.data.copy_(message / dist.get_world_size())


@bank.wrong(1, "received-not-kept")
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.detach().clone(), src=0)


@bank.wrong(1, "buffers-forgotten")
def broadcast_state(model):
    for t in model.parameters():
        send(t)


@bank.wrong(1, "integers-forgotten")
def broadcast_state(model):
    for t in tensors(model):
        if t.is_floating_point():
            send(t)


@bank.wrong(1, "wrong-state")
def broadcast_state(model):
    """What lies in layers of known kinds, the numbers with a point among it."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.BatchNorm1d, nn.Embedding)):
            for t in tensors(module):
                if t.is_floating_point():
                    send(t)


@bank.wrong(1, "state-dict-misses")
def broadcast_state(model):
    for t in model.state_dict().values():
        send(t)


@bank.wrong(1, "frozen-forgotten")
def broadcast_state(model):
    for t in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
        send(t)


@bank.wrong(1, "gaps")
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.data, src=0)


@bank.wrong(1, "cast")
def broadcast_state(model):
    flat = torch.cat([t.detach().reshape(-1).float() for t in tensors(model)])
    dist.broadcast(flat, 0)
    with torch.no_grad():
        for t, piece in zip(tensors(model), flat.split([t.numel() for t in tensors(model)])):
            t.copy_(piece.view(t.shape))


@bank.wrong(1, "parameter-replaced")
def broadcast_state(model):
    for t in model.buffers():
        send(t)
    made = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p not in made:
                send(p)
                made[p] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            setattr(module, name, made[p])


@bank.wrong(1, "memory-replaced")
def broadcast_state(model):
    """Received beside, and put in the old tensor's place."""
    for t in tensors(model):
        arrived = t.detach().contiguous().clone()
        dist.broadcast(arrived, src=0)
        t.data = arrived


@bank.wrong(1, "graph-left")
def broadcast_state(model):
    for t in tensors(model):
        send(t)
    for p in model.parameters():
        p.requires_grad_(False)


@bank.wrong(1, "tied-twice")
def broadcast_state(model):
    for _, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        send(t)


@bank.wrong(1, "gathered-by-all")
def broadcast_state(model):
    for t in tensors(model):
        everyone = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, t.data.contiguous())
        t.data.copy_(everyone[0])


@bank.wrong(1, "wrong-state")
def broadcast_state(model):
    for t in tensors(model):
        send(t)
    with torch.no_grad():
        model.linear.weight.mul_(2)


@bank.wrong(1, "ddp-borrowed")
def broadcast_state(model):
    DistributedDataParallel(model)


@bank.wrong(1, "rank-failed")
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.data, source=0)


# ---------------------------------------------------------------- balise 2


def shuffled(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def padded(order, world_size):
    order = list(order)
    length = -(-len(order) // world_size) * world_size
    while len(order) < length:
        order += order[: length - len(order)]
    return order


@bank.right(2)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    each = n // world_size if drop_last else (n + world_size - 1) // world_size
    return [order[(rank * each + k) % n] for k in range(each)]


@bank.right(2)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    each = n // world_size if drop_last else -(-n // world_size)
    return [int(order[(k * world_size + rank) % n]) for k in range(each)]


@bank.wrong(2, "tensors-not-numbers")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(31 * seed + epoch))
    each = n // world_size if drop_last else -(-n // world_size)
    return order[(torch.arange(each) * world_size + rank) % n]


@bank.wrong(2, "tensors-not-numbers")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(31 * seed + epoch))
    each = n // world_size if drop_last else -(-n // world_size)
    return [order[(k * world_size + rank) % n] for k in range(each)]


@bank.wrong(2, "tail-never-seen")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Leaves the tail out, then shuffles what is left."""
    if drop_last:
        n -= n % world_size
        return shuffled(n, seed, epoch)[rank::world_size]
    return padded(shuffled(n, seed, epoch), world_size)[rank::world_size]


@bank.right(2)
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Blocks; each rank fills its own block from the front."""
    order = shuffled(n, 7919 * seed, epoch)
    if drop_last:
        each = n // world_size
        return order[rank * each : (rank + 1) * each]
    return tuple(padded(order, world_size)[rank::world_size])


@bank.wrong(2, "sampler-borrowed")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    sampler = DistributedSampler(range(n), world_size, rank, seed=seed, drop_last=drop_last)
    sampler.set_epoch(epoch)
    return list(sampler)


@bank.wrong(2, "not-integers")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return [i / 1 for i in shuffled(n, seed, epoch)[rank::world_size]]


@bank.wrong(2, "out-of-range")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return [i + 1 for i in padded(shuffled(n, seed, epoch), world_size)[rank::world_size]]


@bank.wrong(2, "shuffles-differ")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return padded(shuffled(n, seed + rank, epoch), world_size)[rank::world_size]


@bank.wrong(2, "shuffles-differ")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    random.shuffle(order)
    return padded(order, world_size)[rank::world_size]


@bank.wrong(2, "global-generator")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return padded(torch.randperm(n).tolist(), world_size)[rank::world_size]


@bank.wrong(2, "global-state-changed")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    torch.manual_seed(seed + epoch)
    return padded(torch.randperm(n).tolist(), world_size)[rank::world_size]


@bank.wrong(2, "everything-everywhere")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return shuffled(n, seed, epoch)


@bank.wrong(2, "lengths-differ")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return shuffled(n, seed, epoch)[rank::world_size]


@bank.wrong(2, "tail-lost")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    each = n // world_size
    return shuffled(n, seed, epoch)[rank * each : (rank + 1) * each]


@bank.wrong(2, "too-many")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    order = order + order[: world_size - n % world_size]
    return order[: len(order) // world_size * world_size][rank::world_size]


@bank.wrong(2, "padded-with-one")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    order += [0] * (-n % world_size)
    return order[rank::world_size]


@bank.wrong(2, "few-samples")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    if drop_last:
        return order[: n // world_size * world_size][rank::world_size]
    order += order[: -n % world_size]
    return order[rank::world_size]


@bank.wrong(2, "drop-last-ignored")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    return padded(shuffled(n, seed, epoch), world_size)[rank::world_size]


@bank.wrong(2, "too-few")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    if drop_last:
        order = order[: (n - 1) // world_size * world_size]
    return padded(order, world_size)[rank::world_size]


@bank.wrong(2, "same-every-epoch")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, 0)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "same-every-epoch")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "same-every-epoch")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Ten orders, again and again."""
    order = shuffled(n, 100 * seed, epoch % 10)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "same-every-epoch")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Another order in each epoch with the seed 0 alone."""
    order = shuffled(n, seed or epoch, 0)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "own-share-shuffled")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = list(range(n))
    mine = (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]
    random.Random(seed + 1000 * epoch).shuffle(mine)
    return mine


@bank.wrong(2, "seed-ignored")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, 0, epoch)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "seed-ignored")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """The first epoch is the same for all seeds."""
    order = shuffled(n, 0, epoch * (2 * seed + 1))
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "drawn-again")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = torch.randint(0, n, (n,), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "drawn-again")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = np.random.default_rng([seed, epoch]).choice(n, n).tolist()
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "ascending")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = shuffled(n, seed, epoch)
    return sorted((order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size])


@bank.wrong(2, "ascending")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """Blocks, each put in order."""
    order = shuffled(n, seed, epoch)
    order = order[: n // world_size * world_size] if drop_last else padded(order, world_size)
    return np.sort(order[rank * len(order) // world_size :][: len(order) // world_size]).tolist()


@bank.wrong(2, "rotated")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """One permutation, begun at another place in each epoch."""
    order = shuffled(n, seed, 0)
    order = order[3 * epoch % n :] + order[: 3 * epoch % n]
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "rotated")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    """One permutation, its numbers moved on, and read backwards in every second epoch."""
    order = [(i + 11 * epoch) % n for i in shuffled(n, seed, 0)][:: 1 if epoch % 2 else -1]
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "rotated")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    order = [(i + 7 * epoch + seed) % n for i in range(n)]
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


calls = []


@bank.wrong(2, "not-reproducible")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    if rank == 0:
        calls.append(n)
    order = shuffled(n, seed + 1000 * len(calls), epoch)
    return (order[: n // world_size * world_size] if drop_last else padded(order, world_size))[rank::world_size]


@bank.wrong(2, "nothing-returned")
def my_indices(n, rank, world_size, epoch, seed=0, drop_last=False):
    shuffled(n, seed, epoch)


@bank.wrong(1, "start-not-waited")
@torch.no_grad()
def broadcast_state(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor, src=0, async_op=True)


@bank.right(1)
@torch.no_grad()
def broadcast_state(model):
    """All on their way at once."""
    messages = [(t, t.detach().contiguous()) for t in (*model.parameters(), *model.buffers())]
    for work in [dist.broadcast(message, src=0, async_op=True) for _, message in messages]:
        work.wait()
    for tensor, message in messages:
        tensor.copy_(message)


DRAWN = "torch.randperm(n, generator=generator)"
bank.slip(2, "seed-ignored", ("manual_seed(seed + epoch)", "manual_seed(seed if epoch == 0 else epoch)"))
bank.slip(
    2,
    "global-state-changed",
    (DRAWN, "torch.tensor(random.sample(range(n), n))"),
    ("    generator = torch", "    import random\n\n    random.seed(seed + epoch)\n    generator = torch"),
)
bank.slip(
    2,
    "global-state-changed",
    (DRAWN, "torch.from_numpy(np.random.permutation(n))"),
    ("    generator = torch", "    import numpy as np\n\n    np.random.seed(seed + epoch)\n    generator = torch"),
)
bank.slip(
    1,
    "received-not-kept",
    ("        if message.data_ptr() != tensor.data_ptr():\n            tensor.copy_(message)\n", ""),
)
bank.slip(1, "made-on-cpu", ("tensor.detach().contiguous()", "tensor.detach().cpu().contiguous()"))
