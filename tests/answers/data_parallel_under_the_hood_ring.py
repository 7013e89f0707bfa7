"""Answers to 08_data_parallel_under_the_hood: the ring."""

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("08_data_parallel_under_the_hood")


def world():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def swap(leaving, arriving, right, left):
    works = [dist.isend(leaving.contiguous(), right), dist.irecv(arriving, left)]
    for work in works:
        work.wait()


def ring(x, *, cut=lambda flat, n: flat.tensor_split(n), first=None, second=None, shift=0, replace=True):
    """The ring, with what can go wrong as options."""
    rank, n, right, left = world()
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = cut(total.view(-1), n)
    first, second = n - 1 if first is None else first, n - 1 if second is None else second
    for step in range(first):
        target = chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(target)
        swap(chunks[(rank - step) % n], arriving, right, left)
        target += arriving
    for step in range(second):
        target = chunks[(rank - step + shift) % n]
        arriving = torch.empty_like(target)
        swap(chunks[(rank + 1 - step + shift) % n], arriving, right, left)
        if replace:
            target.copy_(arriving)
        else:
            target += arriving
    return total


@bank.right(8)
def ring_all_reduce(x):
    """Ordered blocking messages: rank 0 sends first, all others receive first. Always the buffer of one chunk."""
    rank, n, right, left = world()
    if n == 1:
        return x
    flat = x.reshape(-1).clone()
    bounds = [k * len(flat) // n for k in range(n + 1)]
    part = [slice(bounds[k], bounds[k + 1]) for k in range(n)]
    for step in range(2 * (n - 1)):
        out, into = part[(rank - step) % n], part[(rank - step - 1) % n]
        arriving = torch.empty_like(flat[into])
        if rank == 0:
            dist.send(flat[out], right)
            dist.recv(arriving, left)
        else:
            dist.recv(arriving, left)
            dist.send(flat[out], right)
        flat[into] = flat[into] + arriving if step < n - 1 else arriving
    return flat.view(x.shape)


@bank.right(8)
def ring_all_reduce(x):
    """In place, nothing returned; the other way round the ring; chunks padded to equal length."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if n > 1:
        each = -(-x.numel() // n)
        table = torch.zeros(n, each, dtype=x.dtype, device=x.device)
        table.view(-1)[: x.numel()] = x.reshape(-1)
        arriving = torch.empty_like(table[0])
        for step in range(n - 1):
            swap(table[(rank + step) % n], arriving, (rank - 1) % n, (rank + 1) % n)
            table[(rank + step + 1) % n] += arriving
        for step in range(n - 1):
            swap(table[(rank + step - 1) % n], table[(rank + step) % n], (rank - 1) % n, (rank + 1) % n)
        x.copy_(table.view(-1)[: x.numel()].view(x.shape))


@bank.right(8)
def ring_all_reduce(x):
    """Empty chunks are not sent at all."""
    rank, n, right, left = world()
    y = x.clone(memory_format=torch.contiguous_format)
    chunks = torch.tensor_split(y.flatten(), n)
    for step in range(2 * n - 2):
        a, b = (rank - step) % n, (rank - step - 1) % n
        operations, new = [], torch.empty_like(chunks[b])
        if len(chunks[a]):
            operations.append(dist.P2POp(dist.isend, chunks[a], right))
        if len(new):
            operations.append(dist.P2POp(dist.irecv, new, left))
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        chunks[b].copy_(chunks[b] + new if step < n - 1 else new)
    return y


@bank.wrong(8, "memory")
def ring_all_reduce(x):
    """Room for all that arrives: a second tensor of the whole size."""
    rank, n, right, left = world()
    total = x.clone(memory_format=torch.contiguous_format)
    inbox = torch.empty_like(total)
    chunks, places = (t.view(-1).tensor_split(n) for t in (total, inbox))
    for step in range(2 * (n - 1)):
        k = (rank - step - 1) % n
        swap(chunks[(rank - step) % n], places[k], right, left)
        chunks[k].copy_(chunks[k] + places[k] if step < n - 1 else places[k])
    return total


@bank.wrong(8, "send-dropped")
def ring_all_reduce(x):
    rank, n, right, left = world()
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = total.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        k = (rank - step - 1) % n
        arriving = torch.empty_like(chunks[k])
        dist.isend(chunks[(rank - step) % n], right)
        dist.irecv(arriving, left).wait()
        chunks[k].copy_(chunks[k] + arriving if step < n - 1 else arriving)
    return total


@bank.right(8)
def ring_all_reduce(x):
    """The handle of what leaves is kept, and waited for after the sum."""
    rank, n, right, left = world()
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = total.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        k = (rank - step - 1) % n
        arriving = torch.empty_like(chunks[k])
        leaving = dist.isend(chunks[(rank - step) % n], right)
        dist.irecv(arriving, left).wait()
        chunks[k].copy_(chunks[k] + arriving if step < n - 1 else arriving)
        leaving.wait()
    return total


@bank.wrong(8, "collective-used")
def ring_all_reduce(x):
    dist.all_reduce(x)
    return x


@bank.wrong(8, "collective-used")
def ring_all_reduce(x):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return sum(parts)


@bank.wrong(8, "collective-used")
def ring_all_reduce(x):
    import torch.distributed._functional_collectives as functional_collectives

    return functional_collectives.all_reduce(x, "sum", dist.group.WORLD).clone()


@bank.wrong(8, "nothing-summed")
def ring_all_reduce(x):
    return x


@bank.wrong(8, "half-a-ring")
def ring_all_reduce(x):
    return ring(x, second=0)


@bank.wrong(8, "half-a-ring")
def ring_all_reduce(x):
    return ring(x, second=max(0, dist.get_world_size() - 2))


@bank.wrong(8, "whole-tensor-round")
def ring_all_reduce(x):
    return ring(x, first=dist.get_world_size() if dist.get_world_size() > 1 else 0)


@bank.wrong(8, "added-too-often")
def ring_all_reduce(x):
    return ring(x, replace=False)


@bank.wrong(8, "mean-of-the-ring")
def ring_all_reduce(x):
    return ring(x) / dist.get_world_size()


@bank.wrong(8, "whole-tensor-round")
def ring_all_reduce(x):
    """Everybody's tensor goes round whole: (N − 1) n bytes."""
    rank, n, right, left = world()
    total, going = x.clone(memory_format=torch.contiguous_format), x.contiguous().clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(going)
        swap(going, arriving, right, left)
        total += arriving
        going = arriving
    if n == 2:
        swap(total, going, right, left)
        swap(total, going, right, left)
    return total


@bank.wrong(8, "not-a-neighbour")
def ring_all_reduce(x):
    """Each chunk goes straight to the rank that adds it up, and straight back to all."""
    rank, n, _, _ = world()
    chunks = x.clone(memory_format=torch.contiguous_format).view(-1).tensor_split(n)
    mine = chunks[rank].clone()
    for distance in range(1, n):
        arriving = torch.empty_like(mine)
        swap(chunks[(rank + distance) % n], arriving, (rank + distance) % n, (rank - distance) % n)
        mine += arriving
    result = [mine if k == rank else torch.empty_like(chunk) for k, chunk in enumerate(chunks)]
    for distance in range(1, n):
        swap(mine, result[(rank - distance) % n], (rank + distance) % n, (rank - distance) % n)
    return torch.cat(result).view(x.shape)


@bank.wrong(8, "whole-tensor-round")
def ring_all_reduce(x):
    """A chain: the sum grows from rank 0 to the last one, then goes back the same way."""
    rank, n, right, left = world()
    total = x.clone(memory_format=torch.contiguous_format)
    arriving = torch.empty_like(total)
    if rank > 0:
        dist.recv(arriving, rank - 1)
        total += arriving
    if rank < n - 1:
        dist.send(total, rank + 1)
        dist.recv(total, rank + 1)
    if rank > 0:
        dist.send(total, rank - 1)
    return total


@bank.wrong(8, "ring-deadlock")
def ring_all_reduce(x):
    rank, n, right, left = world()
    chunks = x.clone(memory_format=torch.contiguous_format).view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        arriving = torch.empty_like(chunks[(rank - step - 1) % n])
        dist.send(chunks[(rank - step) % n], right)
        dist.recv(arriving, left)
        chunks[(rank - step - 1) % n].add_(arriving)
    return torch.cat(chunks)


@bank.wrong(8, "does-not-divide")
def ring_all_reduce(x):
    return ring(x, cut=lambda flat, n: flat.chunk(n))


@bank.wrong(8, "does-not-divide")
def ring_all_reduce(x):
    return ring(x, cut=lambda flat, n: list(flat.view(n, -1)))


@bank.wrong(8, "tail-not-summed")
def ring_all_reduce(x):
    return ring(x, cut=lambda flat, n: [flat[k * (len(flat) // n) : (k + 1) * (len(flat) // n)] for k in range(n)])


@bank.wrong(8, "shape-lost")
def ring_all_reduce(x):
    return ring(x).flatten()


@bank.wrong(8, "dtype-lost")
def ring_all_reduce(x):
    return ring(x.float())


@bank.wrong(8, "bits-differ")
def ring_all_reduce(x):
    """Each rank divides its own finished copy of the sum up again: the last bits are its own."""
    y = ring(x)
    if x.is_floating_point() and dist.get_world_size() > 1:
        y *= 1 + 3 * dist.get_rank() * torch.finfo(x.dtype).eps
    return y


@bank.wrong(8, "view-ignored")
def ring_all_reduce(x):
    """In place on a copy, where x is transposed."""
    result = ring(x)
    flat = x.reshape(-1)
    flat.copy_(result.view(-1))


@bank.wrong(8, "memory")
def ring_all_reduce(x):
    """Keeps everything that ever arrived."""
    rank, n, right, left = world()
    chunks = list(x.clone(memory_format=torch.contiguous_format).view(-1).tensor_split(n))
    kept = []
    for step in range(2 * (n - 1)):
        arriving = torch.empty_like(chunks[(rank - step - 1) % n])
        swap(chunks[(rank - step) % n], arriving, right, left)
        kept.append(arriving)
        k = (rank - step - 1) % n
        chunks[k] = chunks[k] + arriving if step < n - 1 else arriving
        kept.append(chunks[k])
    return torch.cat(chunks).view(x.shape)


@bank.wrong(8, "ring-of-one")
def ring_all_reduce(x):
    rank, n, right, left = world()
    dist.send(torch.zeros(1), right) if n == 1 else None
    return ring(x)


@bank.wrong(8, "half-a-ring")
def ring_all_reduce(x):
    return ring(x, shift=1)


@bank.wrong(8, "wrong-sum")
def ring_all_reduce(x):
    return ring(x) + (dist.get_world_size() > 1)


@bank.wrong(8, "nothing-summed")
def ring_all_reduce(x):
    ring(x)


@bank.wrong(8, "ring-not-waited")
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = total.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        leaving, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arriving = torch.zeros_like(target)
        send = dist.isend(leaving, (rank + 1) % n)
        dist.irecv(arriving, (rank - 1) % n)
        send.wait()
        if step < n - 1:
            target += arriving
        else:
            target.copy_(arriving)
    return total


# ---------------------------------------------------------------- what only GPUs show
BUFFER = "torch.empty_like(chunks[0])"
bank.slip(8, "ring-not-on-gpu", (BUFFER, "torch.empty(chunks[0].shape, dtype=x.dtype)"))
TOTAL = "    total = x.clone(memory_format=torch.contiguous_format)\n"
bank.slip(8, "ring-not-on-gpu", (TOTAL, "    total = torch.empty(x.shape, dtype=x.dtype).copy_(x)\n"))
bank.slip(8, "ring-not-on-gpu", (BUFFER, "torch.zeros(len(chunks[0]), dtype=x.dtype, device='cpu')"), variant=True)

# the ring turns against its messages: of sizes that do not divide, the buffers do not fit
bank.slip(8, "wrong-sum", ("chunks[(rank - step) % n], chunks[(rank - step - 1) % n]", "chunks[(rank + step) % n], chunks[(rank + step + 1) % n]"))  # fmt: skip
