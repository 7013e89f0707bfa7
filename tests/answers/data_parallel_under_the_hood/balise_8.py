"""Answers to 08_data_parallel_under_the_hood: the ring."""

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("08_data_parallel_under_the_hood", 8)


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


@bank.right()
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


@bank.right()
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


@bank.right()
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


bank.hint("memory", "You held {peak} bytes at once in addition to the tensor of {held} bytes. The sum and one chunk "
          "for what arrives are enough: cut one flat tensor into views, change them in place (+=, copy_), and reuse "
          "one buffer in all steps.")  # fmt: skip


@bank.wrong("memory")
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


bank.hint("send-dropped", "Rank {rank} threw away the handle of an isend, and waited for another message. Without its "
          "handle, a message may be lost before it is sent, and the next rank waits forever: keep the handle, and call "
          "wait() on it too.")  # fmt: skip


@bank.wrong("send-dropped", variant=True)
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


@bank.right()
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


bank.hint("collective-used", "You called {name}. Only messages between two ranks are allowed here: isend and irecv.")


@bank.wrong("collective-used")
def ring_all_reduce(x):
    dist.all_reduce(x)
    return x


@bank.wrong("collective-used")
def ring_all_reduce(x):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return sum(parts)


@bank.wrong("collective-used", variant=True)
def ring_all_reduce(x):
    import torch.distributed._functional_collectives as functional_collectives

    return functional_collectives.all_reduce(x, "sum", dist.group.WORLD).clone()


bank.hint("nothing-summed", "Rank {rank} still holds its own values, at least in part. In each step of the first "
          "round, add what arrives to the rank's own chunk.")  # fmt: skip


@bank.wrong("nothing-summed")
def ring_all_reduce(x):
    return x


bank.hint("half-a-ring", "Rank {rank} has at most some chunks of the sum. In the first round, add each chunk that "
          "arrives to the chunk at the same place, so that each rank ends with one finished chunk; a second round of N "
          "− 1 steps passes the finished chunks on.")  # fmt: skip


@bank.wrong("half-a-ring")
def ring_all_reduce(x):
    return ring(x, second=0)


@bank.wrong("half-a-ring")
def ring_all_reduce(x):
    return ring(x, second=max(0, dist.get_world_size() - 2))


bank.hint("whole-tensor-round", "Rank {rank} sent {sent} bytes, but {allowed} are enough: 2 (N − 1) messages, each "
          "with one of N chunks.")  # fmt: skip


@bank.wrong("whole-tensor-round")
def ring_all_reduce(x):
    return ring(x, first=dist.get_world_size() if dist.get_world_size() > 1 else 0)


bank.hint("added-too-often", "Some values were added more than once. The reduce-scatter has N − 1 steps, and in the "
          "second round each chunk that arrives replaces the old one.")  # fmt: skip


@bank.wrong("added-too-often", variant=True)
def ring_all_reduce(x):
    return ring(x, replace=False)


bank.hint("mean-of-the-ring", "You return the mean. Return the sum.")


@bank.wrong("mean-of-the-ring", variant=True)
def ring_all_reduce(x):
    return ring(x) / dist.get_world_size()


@bank.wrong("whole-tensor-round")
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


bank.hint("not-a-neighbour", "Rank {rank} sent to ranks {peers}. In a ring, each rank sends only to the next one.")


@bank.wrong("not-a-neighbour", variant=True)
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


@bank.wrong("whole-tensor-round", variant=True)
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


bank.hint("ring-deadlock", "The ranks wait for each other: {error}. If every rank sends before it receives, nobody "
          "receives: start isend and irecv, then wait for both.")  # fmt: skip


@bank.wrong("ring-deadlock", variant=True)
def ring_all_reduce(x):
    rank, n, right, left = world()
    chunks = x.clone(memory_format=torch.contiguous_format).view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        arriving = torch.empty_like(chunks[(rank - step - 1) % n])
        dist.send(chunks[(rank - step) % n], right)
        dist.recv(arriving, left)
        chunks[(rank - step - 1) % n].add_(arriving)
    return torch.cat(chunks)


bank.hint("does-not-divide", "Your code fails when the size is not a multiple of the number of ranks: {error}. "
          "torch.tensor_split gives N chunks, some of them one element longer; with 2 elements for 4 ranks, some are "
          "empty.")  # fmt: skip


@bank.wrong("does-not-divide")
def ring_all_reduce(x):
    return ring(x, cut=lambda flat, n: flat.chunk(n))


@bank.wrong("does-not-divide", variant=True)
def ring_all_reduce(x):
    return ring(x, cut=lambda flat, n: list(flat.view(n, -1)))


bank.hint("tail-not-summed", "The last elements are not summed: the size is not a multiple of the number of ranks.")


@bank.wrong("tail-not-summed", variant=True)
def ring_all_reduce(x):
    return ring(x, cut=lambda flat, n: [flat[k * (len(flat) // n) : (k + 1) * (len(flat) // n)] for k in range(n)])


bank.hint("shape-lost", "The result doesn't have the shape of the tensor.")


@bank.wrong("shape-lost", variant=True)
def ring_all_reduce(x):
    return ring(x).flatten()


bank.hint("dtype-lost", "The result doesn't have the dtype of the tensor.")


@bank.wrong("dtype-lost", variant=True)
def ring_all_reduce(x):
    return ring(x.float())


bank.hint("bits-differ", "The ranks' sums differ in the last bits ({error}). In a ring, each chunk is added up once, "
          "on one way round the ring, and then copied: all ranks hold the same bits.")  # fmt: skip


@bank.wrong("bits-differ", variant=True)
def ring_all_reduce(x):
    """Each rank divides its own finished copy of the sum up again: the last bits are its own."""
    y = ring(x)
    if x.is_floating_point() and dist.get_world_size() > 1:
        y *= 1 + 3 * dist.get_rank() * torch.finfo(x.dtype).eps
    return y


bank.hint("view-ignored", "This is right for a contiguous tensor, but wrong for a transposed one. Its chunks may be "
          "copies: return the result, or copy it back.")  # fmt: skip


@bank.wrong("view-ignored", variant=True)
def ring_all_reduce(x):
    """In place on a copy, where x is transposed."""
    result = ring(x)
    flat = x.reshape(-1)
    flat.copy_(result.view(-1))


@bank.wrong("memory", variant=True)
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


bank.hint("ring-of-one", "A single rank has nobody to send to: return the tensor as it is.")


@bank.wrong("ring-of-one", variant=True)
def ring_all_reduce(x):
    rank, n, right, left = world()
    dist.send(torch.zeros(1), right) if n == 1 else None
    return ring(x)


@bank.wrong("half-a-ring", variant=True)
def ring_all_reduce(x):
    return ring(x, shift=1)


bank.hint("wrong-sum", "The result is not the sum over the ranks.")


@bank.wrong("wrong-sum")
def ring_all_reduce(x):
    return ring(x) + (dist.get_world_size() > 1)


@bank.wrong("nothing-summed", variant=True)
def ring_all_reduce(x):
    ring(x)


bank.hint("ring-not-waited", "Rank {rank} started to receive a message, and used its values without waiting for them. "
          "First call wait() on the handle that irecv returns.")  # fmt: skip


@bank.wrong("ring-not-waited", variant=True)
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
bank.hint("ring-not-on-gpu", "On GPUs, a tensor of the ring is in the CPU's memory: {error}. Make the sum and the "
          "buffer on the device of x, with torch.empty_like(x) or device=x.device; NCCL sends and receives only there.")  # fmt: skip
bank.slip("ring-not-on-gpu", (BUFFER, "torch.empty(chunks[0].shape, dtype=x.dtype)"))
TOTAL = "    total = x.clone(memory_format=torch.contiguous_format)\n"
bank.slip("ring-not-on-gpu", (TOTAL, "    total = torch.empty(x.shape, dtype=x.dtype).copy_(x)\n"))
bank.slip("ring-not-on-gpu", (BUFFER, "torch.zeros(len(chunks[0]), dtype=x.dtype, device='cpu')"), variant=True)

# the ring turns against its messages: of sizes that do not divide, the buffers do not fit
bank.slip("wrong-sum", ("chunks[(rank - step) % n], chunks[(rank - step - 1) % n]", "chunks[(rank + step) % n], chunks[(rank + step + 1) % n]"), variant=True)  # fmt: skip
