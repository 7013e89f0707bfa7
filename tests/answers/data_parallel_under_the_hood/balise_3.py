"""Answers to balise 3 of 08_data_parallel_under_the_hood: average the gradients, one by one."""

import os
import signal

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tests.answers.bank import Bank
from tests.answers.data_parallel_under_the_hood.buckets import in_two_halves, mean

bank = Bank("08_data_parallel_under_the_hood", 3)

bank.edge("sent-rounded", "made-on-cpu")


@bank.right()
def average_gradients(parameters):
    works = []
    for p in parameters:
        if p.grad is not None:
            works.append((p, dist.all_reduce(p.grad, async_op=True)))
    for p, work in works:
        work.wait()
        p.grad.mul_(1 / dist.get_world_size())


@bank.wrong("gathered")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is None:
            continue
        all_of_them = [
            torch.empty_like(p.grad, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())
        ]
        dist.all_gather(all_of_them, p.grad.contiguous())
        p.grad = torch.stack(all_of_them).mean(dim=0)


@bank.right()
def average_gradients(parameters):
    gradients = [p.grad for p in parameters if p.grad is not None]
    for dtype in {g.dtype: 0 for g in gradients}:
        same = [g for g in gradients if g.dtype == dtype]
        flat = mean(_flatten_dense_tensors(same))
        for g, piece in zip(same, _unflatten_dense_tensors(flat, same)):
            g.copy_(piece)


@bank.right()
def average_gradients(parameters):
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        gradient.copy_(in_two_halves(gradient.reshape(-1)).view(gradient.shape))


@bank.right()
def average_gradients(parameters):
    """To rank 0, and from there to all: as many bytes in all."""
    for p in parameters:
        if p.grad is not None:
            dist.reduce(p.grad, dst=0)
            dist.broadcast(p.grad, src=0)
            p.grad /= dist.get_world_size()


@bank.wrong("gathered")
def average_gradients(parameters):
    """One rank collects, adds up and tells the others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for p in parameters:
        if p.grad is not None:
            found = [torch.empty(p.shape, dtype=p.dtype) for _ in range(n)] if rank == 0 else None
            dist.gather(p.grad.contiguous(), found)
            p.grad = torch.stack(found).mean(0) if rank == 0 else p.grad.contiguous()
            dist.broadcast(p.grad, src=0)


bank.hint("none-filled", "A parameter without a gradient (frozen or unused) now has one, perhaps of zeros. Leave it "
          "None: otherwise, with weight decay or momentum, the optimizer goes on "
          "moving the parameter.", edge=True)  # fmt: skip
bank.slip(
    "none-filled",
    ("        if p.grad", "        p.grad = p.new_zeros(p.shape) if p.grad is None else p.grad\n        if p.grad"),
    variant=True,
)


@bank.wrong("none-filled")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        mean(p.grad)


@bank.wrong("not-divided")
def average_gradients(parameters):
    """A mistake of the idea after one at the edge."""
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)


@bank.wrong("no-communication")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()


@bank.wrong("not-divided")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)


@bank.wrong("divided-twice")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            mean(p.grad)


@bank.wrong("not-waited")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad, async_op=True)


@bank.wrong("not-copied-back")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            mean(p.grad.clone())


@bank.wrong("not-copied-back")
def average_gradients(parameters):
    """Only tables."""
    for p in parameters:
        if p.grad is not None and p.grad.dim() > 1:
            mean(p.grad)


@bank.wrong("ranks-apart")
def average_gradients(parameters):
    """A gradient of zeros is not sent; another rank may have more there, and waits."""
    for p in parameters:
        if p.grad is not None and p.grad.count_nonzero():
            mean(p.grad)


@bank.wrong("ddp-borrowed")
def average_gradients(parameters):
    gradients = [p.grad for p in parameters if p.grad is not None]
    for dtype in {g.dtype: 0 for g in gradients}:
        dist.all_reduce_coalesced([g for g in gradients if g.dtype == dtype])
    for g in gradients:
        g /= dist.get_world_size()


@bank.wrong("reduce-not-all-reduce")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.reduce(p.grad, dst=0)


@bank.wrong("wrong-gradient")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)


@bank.wrong("wrong-gradient")
def average_gradients(parameters):
    """Rank 0's gradients for all."""
    for p in parameters:
        if p.grad is not None:
            dist.broadcast(p.grad, src=0)


@bank.wrong("weights-changed")
def average_gradients(parameters):
    for p in parameters:
        mean(p.data)
        p.data.add_(1e-3)


@bank.wrong("no-communication")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            torch.mean(p.grad, dim=0)


@bank.wrong("rank-failed")
def average_gradients(parameters):
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


@bank.wrong("ranks-apart")
def average_gradients(parameters):
    """Ranks that skip a parameter which others reduce."""
    for k, p in enumerate(parameters):
        if p.grad is not None and (k or dist.get_rank()):
            mean(p.grad)


@bank.wrong("no-gradient")
def average_gradients(parameters):
    for p in parameters:
        mean(p.grad)


@bank.wrong("sent-too-much")
def average_gradients(parameters):
    for _ in range(2):  # the second time changes nothing
        for p in parameters:
            if p.grad is not None:
                mean(p.grad)


@bank.wrong("sent-too-much")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            wide = p.grad.float() if p.grad.dtype == torch.bfloat16 else p.grad
            p.grad.copy_(mean(wide))


@bank.wrong("sent-rounded")
def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad.copy_(mean(p.grad.float()))


bank.slip(
    "no-gradient",
    ("dist.all_reduce(p.grad)", "p.grad = dist.all_reduce(p.grad)"),
    ("            p.grad /= dist.get_world_size()\n", ""),
    ("p.grad)\n", "p.grad) / dist.get_world_size()\n"),
)

bank.slip(
    "sent-too-much",
    (
        "            dist.all_reduce(p.grad)\n",
        "            wide = p.grad.double()\n            dist.all_reduce(wide)\n            p.grad.copy_(wide)\n",
    ),
)

bank.slip("ranks-apart", ("        if p.grad is not None:", "        if p.grad is not None and p.grad.any():"))

bank.slip("made-on-cpu", ("            dist.all_reduce(p.grad)", "            host = p.grad.cpu()\n            dist.all_reduce(host)\n            p.grad.copy_(host)")
)  # fmt: skip
