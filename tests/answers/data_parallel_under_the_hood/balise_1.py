"""Answers to balise 1 of 08_data_parallel_under_the_hood: the same start everywhere."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.answers.bank import Bank

bank = Bank("08_data_parallel_under_the_hood", 1)


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def send(tensor, src=0):
    message = tensor.detach().contiguous()
    dist.broadcast(message, src=src)
    with torch.no_grad():
        tensor.copy_(message)


@bank.right()
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


@bank.right()
def broadcast_state(model):
    by_dtype = {}
    for t in tensors(model):
        by_dtype.setdefault(t.dtype, []).append(t.data)
    for group in by_dtype.values():
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.broadcast(flat, 0)
        for t, piece in zip(group, flat.split([t.numel() for t in group])):
            t.copy_(piece.view(t.shape))


@bank.right()
def broadcast_state(model):
    package = [[t.detach().cpu() for t in tensors(model)] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(package, src=0)
    with torch.no_grad():
        for t, value in zip(tensors(model), package[0]):
            t.copy_(value)


@bank.right()
def broadcast_state(model):
    """The others give zeros, and the sum is rank 0's; booleans as integers."""
    for t in tensors(model):
        message = t.detach().clone().to(torch.uint8 if t.dtype == torch.bool else t.dtype)
        if dist.get_rank() != 0:
            message.zero_()
        message = message.contiguous()
        dist.all_reduce(message)
        t.data.copy_(message)


@bank.right()
def broadcast_state(model):
    works = []
    for t in tensors(model):
        message = t.data.contiguous().clone()
        works.append((t, message, dist.broadcast(message, 0, async_op=True)))
    for t, message, work in works:
        work.wait()
        t.data = t.data.copy_(message)


bank.hint("nothing-sent", "Rank {rank} sent nothing and received nothing. The values of rank 0 must be sent to the "
          "others: dist.broadcast(t, src=0).")  # fmt: skip


@bank.wrong("nothing-sent", variant=True)
def broadcast_state(model):
    torch.manual_seed(0)


bank.hint("only-rank-0", "Only rank 0 calls the collective. Every rank must call a broadcast: rank 0 sends, the others "
          "receive.")  # fmt: skip


@bank.wrong("only-rank-0", variant=True)
def broadcast_state(model):
    if dist.get_rank() == 0:
        for t in tensors(model):
            dist.broadcast(t.data, src=0)


bank.hint("every-rank-is-source", "All ranks wait in broadcast, and none receives: {error}. The source must be rank 0 "
          "on every rank, and all ranks must take the tensors in the same order.")  # fmt: skip


@bank.wrong("every-rank-is-source", variant=True)
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.data, src=dist.get_rank())


bank.hint("wrong-source", "All ranks got the values of rank {source}. Send those of rank 0.")


@bank.wrong("wrong-source", variant=True)
def broadcast_state(model):
    for t in tensors(model):
        send(t, src=dist.get_world_size() - 1)


bank.hint("averaged", "The ranks hold the mean over the ranks. They must all hold the values of rank 0: a mean is no "
          "rank's initialisation, and it shrinks the weights.")  # fmt: skip


@bank.wrong("averaged", variant=True)
def broadcast_state(model):
    for t in model.parameters():
        message = t.data.contiguous()
        dist.all_reduce(message)
        t.data.copy_(message / dist.get_world_size())


bank.hint("received-not-kept", "The ranks exchanged values, but rank {rank} still holds its own: a copy received the "
          "others. Copy it back into the parameter, under torch.no_grad().")  # fmt: skip


@bank.wrong("received-not-kept")
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.detach().clone(), src=0)


bank.hint("buffers-forgotten", "The parameters agree, but the buffers don't ({name}). Batch norm would normalise "
          "differently on each rank: broadcast model.buffers() too.")  # fmt: skip


@bank.wrong("buffers-forgotten", variant=True)
def broadcast_state(model):
    for t in model.parameters():
        send(t)


bank.hint("integers-forgotten", "{name} holds integers or booleans, and you left it out. It is a part of the state "
          "like any other.")  # fmt: skip


@bank.wrong("integers-forgotten", variant=True)
def broadcast_state(model):
    for t in tensors(model):
        if t.is_floating_point():
            send(t)


bank.hint("wrong-state", "{name} on rank {rank} differs from rank 0's.")


@bank.wrong("wrong-state")
def broadcast_state(model):
    """What lies in layers of known kinds, the numbers with a point among it."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.BatchNorm1d, nn.Embedding)):
            for t in tensors(module):
                if t.is_floating_point():
                    send(t)


bank.hint("state-dict-misses", "{name} is a buffer with persistent=False: state_dict() leaves it out. model.buffers() "
          "has all buffers.")  # fmt: skip


@bank.wrong("state-dict-misses", variant=True)
def broadcast_state(model):
    for t in model.state_dict().values():
        send(t)


bank.hint("frozen-forgotten", "{name} has requires_grad=False, and you left it out. The forward pass uses it all the "
          "same.")  # fmt: skip


@bank.wrong("frozen-forgotten", variant=True)
def broadcast_state(model):
    for t in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
        send(t)


bank.hint("gaps", "{name} is a view with gaps, a part of a larger table, and it came out wrong. A collective sends "
          "contiguous memory from the place where a tensor begins: send t.contiguous(), and copy what arrives into t.")  # fmt: skip


@bank.wrong("gaps", variant=True)
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.data, src=0)


bank.hint("cast", "{name} came back rounded: you sent it in a coarser dtype. Tensors of different dtypes can't share a "
          "message.")  # fmt: skip


@bank.wrong("cast", variant=True)
def broadcast_state(model):
    flat = torch.cat([t.detach().reshape(-1).float() for t in tensors(model)])
    dist.broadcast(flat, 0)
    with torch.no_grad():
        for t, piece in zip(tensors(model), flat.split([t.numel() for t in tensors(model)])):
            t.copy_(piece.view(t.shape))


bank.hint("parameter-replaced", "{name} is a new object. An optimizer that was created earlier still holds the old "
          "one: write into the existing tensor.")  # fmt: skip


@bank.wrong("parameter-replaced", variant=True)
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


bank.hint("memory-replaced", "{name} is at another place in memory than before: t.data = … drops the old memory, which "
          "a larger table or a flat buffer may still share. Write into it with copy_.")  # fmt: skip


@bank.wrong("memory-replaced", variant=True)
def broadcast_state(model):
    """Received beside, and put in the old tensor's place."""
    for t in tensors(model):
        arrived = t.detach().contiguous().clone()
        dist.broadcast(arrived, src=0)
        t.data = arrived


bank.hint("graph-left", "{name} has become part of a graph ({error}), or lost requires_grad. Copy under "
          "torch.no_grad().")  # fmt: skip


@bank.wrong("graph-left", variant=True)
def broadcast_state(model):
    for t in tensors(model):
        send(t)
    for p in model.parameters():
        p.requires_grad_(False)


bank.hint("tied-twice", "You sent {sent} bytes; the model holds {held}. A tied parameter has two names but one memory. "
          "model.parameters() returns it once; a loop over model.modules() meets parameters several times, because "
          "modules contain other modules.")  # fmt: skip


@bank.wrong("tied-twice", variant=True)
def broadcast_state(model):
    for _, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        send(t)


bank.hint("gathered-by-all", "Each rank sent {sent:.0f} bytes; the model holds {held}. An all-gather brings the state "
          "of every rank to every rank, and then you throw away all but one: it takes N times the memory and N − 1 "
          "times the messages. You need only the state of rank 0: use a broadcast.")  # fmt: skip


@bank.wrong("gathered-by-all", variant=True)
def broadcast_state(model):
    for t in tensors(model):
        everyone = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, t.data.contiguous())
        t.data.copy_(everyone[0])


@bank.wrong("wrong-state", variant=True)
def broadcast_state(model):
    for t in tensors(model):
        send(t)
    with torch.no_grad():
        model.linear.weight.mul_(2)


@bank.wrong("ddp-borrowed")
def broadcast_state(model):
    DistributedDataParallel(model)


@bank.wrong("rank-failed")
def broadcast_state(model):
    for t in tensors(model):
        dist.broadcast(t.data, source=0)


bank.hint("start-not-waited", "When your code returned on rank {rank}, a broadcast was still running. With "
          "async_op=True, wait for the handle that it returns before you use the tensor.")  # fmt: skip


@bank.wrong("start-not-waited", variant=True)
@torch.no_grad()
def broadcast_state(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor, src=0, async_op=True)


@bank.right()
@torch.no_grad()
def broadcast_state(model):
    """All on their way at once."""
    messages = [(t, t.detach().contiguous()) for t in (*model.parameters(), *model.buffers())]
    for work in [dist.broadcast(message, src=0, async_op=True) for _, message in messages]:
        work.wait()
    for tensor, message in messages:
        tensor.copy_(message)


bank.slip(
    "received-not-kept",
    ("        if message.data_ptr() != tensor.data_ptr():\n            tensor.copy_(message)\n", ""),
    variant=True,
)

bank.slip("made-on-cpu", ("tensor.detach().contiguous()", "tensor.detach().cpu().contiguous()"))
