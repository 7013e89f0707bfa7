"""Answers to 17_tensor_slicing: data parallelism over tensor groups."""

import random

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.answers.bank import Bank, before

bank = Bank("17_tensor_slicing", whole=True)
RIGHT = before(bank.work, 12)
STEP = RIGHT["step_2d"]


def make_sampler(dataset, grid):
    return RIGHT["make_sampler"](dataset, grid)


def mean(tensor, grid):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor, group=grid.data.group)
    return tensor / grid.data.size


# samplers


def sampled(slug):
    """Decorator: this sampler, with a right step."""
    return lambda sampler: bank.several(11, slug, sampler, STEP)


@sampled(None)
def make_sampler_strided(dataset, grid):
    return range(grid.data.rank, len(dataset) - len(dataset) % grid.data.size, grid.data.size)


@sampled(None)
def make_sampler_shuffled(dataset, grid):
    """Drawn alike by all, the tail dropped, blocks of neighbours in the permutation."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(3))
    each = len(dataset) // grid.data.size
    return order[grid.data.rank * each : (grid.data.rank + 1) * each]


@sampled(None)
def make_sampler_dropping(dataset, grid):
    return DistributedSampler(dataset, grid.data.size, grid.data.rank, shuffle=False, drop_last=True)


@sampled("sampler-by-global-rank")
def make_sampler_default(dataset, grid):
    return DistributedSampler(dataset)


@sampled("sampler-by-global-rank")
def make_sampler_global(dataset, grid):
    return list(range(len(dataset)))[dist.get_rank() :: dist.get_world_size()]


@sampled("sampler-by-global-rank")
def make_sampler_mixed(dataset, grid):
    return DistributedSampler(dataset, num_replicas=grid.data.size * grid.tensor.size, rank=dist.get_rank())


@sampled("sampler-by-tensor-rank")
def make_sampler_tensor(dataset, grid):
    return DistributedSampler(dataset, num_replicas=grid.tensor.size, rank=grid.tensor.rank)


@sampled("sampler-shuffles-differ")
def make_sampler_own_shuffle(dataset, grid):
    mine = list(range(grid.data.rank, len(dataset), grid.data.size))
    return torch.utils.data.SubsetRandomSampler(mine, generator=torch.Generator().manual_seed(dist.get_rank()))


@sampled("sampler-no-share")
def make_sampler_all(dataset, grid):
    return torch.utils.data.SequentialSampler(dataset)


@sampled("sampler-no-share")
def make_sampler_only_order(dataset, grid):
    order = list(range(len(dataset)))
    random.Random(grid.data.rank).shuffle(order)
    return order


@sampled("sampler-lengths")
def make_sampler_uneven(dataset, grid):
    return list(range(len(dataset)))[grid.data.rank :: grid.data.size]


@sampled("sampler-incomplete")
def make_sampler_drawn(dataset, grid):
    """Each data rank draws from all samples."""
    generator = torch.Generator().manual_seed(grid.data.rank)
    return torch.randperm(len(dataset), generator=generator)[: max(1, len(dataset) // grid.data.size)].tolist() or [0]


@sampled("sampler-not-indices")
def make_sampler_samples(dataset, grid):
    each = len(dataset) // grid.data.size
    return dataset[grid.data.rank * each : (grid.data.rank + 1) * each]


@sampled("sampler-not-indices")
def make_sampler_loader(dataset, grid):
    mine = DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank)
    return torch.utils.data.DataLoader(dataset, sampler=mine)


@sampled("sampler-not-indices")
def make_sampler_batches(dataset, grid):
    mine = DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank)
    return torch.utils.data.BatchSampler(mine, 2, drop_last=False)


@sampled("sampler-rank")
def make_sampler_rank_of_world(dataset, grid):
    return DistributedSampler(dataset, num_replicas=grid.data.size, rank=dist.get_rank())


@sampled("nothing-returned")
def make_sampler_silent(dataset, grid):
    DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank)


# steps


def stepped(slug):
    """Decorator: this step, with a right sampler."""
    return lambda step: bank.several(11, slug, make_sampler, step)


@stepped(None)
def step_one_by_one(model, batch, loss_of, optimizer, grid):
    """One message a gradient, zeroed at the end."""
    loss = loss_of(model, batch)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=grid.data.group)
            p.grad.div_(grid.data.size)
    optimizer.step()
    optimizer.zero_grad()
    return mean(loss, grid).item()


@stepped(None)
def step_scaled(model, batch, loss_of, optimizer, grid):
    """The loss is divided, so its sum is the mean; asynchronous messages started by hooks."""
    works = []

    def send(p):
        works.append(dist.all_reduce(p.grad, group=grid.data.group, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(send) for p in model.parameters() if p.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(model, batch) / grid.data.size
    loss.backward()
    for work in works:
        work.wait()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, group=grid.data.group)
    return total


@stepped(None)
def step_through_ranks(model, batch, loss_of, optimizer, grid):
    """grid.data.sum, also for the loss; its mean over the whole world is the same number."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    for p in filter(lambda p: p.grad is not None, model.parameters()):
        p.grad = grid.data.sum(p.grad) / grid.data.size
    optimizer.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    return shown / dist.get_world_size()


BACKWARD = "    loss.backward()\n"
SIZE = "/ grid.data.size"
REDUCE = "    dist.all_reduce(message, group=grid.data.group)\n"
LOOP = "    for tensor, mean in zip(means, message.split([tensor.numel() for tensor in means])):\n        tensor.copy_(mean.view_as(tensor))\n"
USED = " if p.grad is not None"

bank.slip(11, "data-summed", (SIZE, ""))
bank.slip(11, "divided-by-world", (SIZE, "/ dist.get_world_size()"))
bank.slip(11, "averaged-over-world", (SIZE, "/ dist.get_world_size()"), (REDUCE, "    dist.all_reduce(message)\n"))
bank.slip(11, "averaged-over-world", (REDUCE, "    dist.all_reduce(message)\n"))
bank.slip(11, "averaged-over-tensor", (REDUCE, "    dist.all_reduce(message, group=grid.tensor.group)\n"))
bank.slip(11, "averaged-over-tensor", (SIZE, "/ grid.tensor.size"),
    (REDUCE, "    dist.all_reduce(message, group=grid.tensor.group)\n"),
)  # fmt: skip
bank.slip(11, "data-silent", (REDUCE, ""), (SIZE, ""))
bank.slip(11, "data-not-written", (LOOP, ""))
bank.slip(11, "averaged-after-step", ("    optimizer.step()\n", ""), (BACKWARD, BACKWARD + "    optimizer.step()\n"))
bank.slip(11, "gradients-kept", ("    optimizer.zero_grad()\n", ""))
bank.slip(
    11,
    "none-divided",
    (USED, ""),
    ("*(p.grad for p in model.parameters())", "*(p.grad / 1 for p in model.parameters())"),
)
bank.slip(11, "no-step", ("    optimizer.step()\n", ""))
bank.slip(
    11,
    "loss-of-share",
    ("return means[0]", "return loss_of(model, batch) * 0 + first"),
    (BACKWARD, BACKWARD + "    first = loss.item()\n"),
)
bank.slip(11, "loss-summed", ("return means[0]", "return means[0] * grid.data.size"))
bank.slip(11, "loss-wrong", ("return means[0]", "return loss_of(model, batch)"))
bank.slip(11, "loss-wrong", ("return means[0]", "return means[1]"))
bank.slip(11, "nothing-returned", ("    return means[0]", "    means[0]"))


@stepped("weights-2d")
def step_with_decay(model, batch, loss_of, optimizer, grid):
    """Averages the weights as well, over the world."""
    loss = STEP(model, batch, loss_of, optimizer, grid)
    for p in model.parameters():
        p.data *= 0.99
    return loss


@stepped("too-much-2d")
def step_twice(model, batch, loss_of, optimizer, grid):
    """Weights are averaged after each step, too."""
    loss = STEP(model, batch, loss_of, optimizer, grid)
    for p in model.parameters():
        p.data = mean(p.data, grid)
    return loss


@stepped("too-much-2d")
def step_common(model, batch, loss_of, optimizer, grid):
    """Averages the whole model once more over the tensor group where the shapes are whole: the norms, the heads."""
    loss = STEP(model, batch, loss_of, optimizer, grid)
    for _ in range(4):
        for p in [*model.norm.parameters(), *model.head.parameters()]:
            p.data = grid.tensor.sum(p.data) / grid.tensor.size
    return loss


@stepped("gradient-2d")
def step_norm_only(model, batch, loss_of, optimizer, grid):
    """Only parameters of one dimension are averaged."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None and p.ndim == 1:
            p.grad = mean(p.grad, grid)
    optimizer.step()
    return mean(loss, grid)


@stepped("data-summed")
def step_sums(model, batch, loss_of, optimizer, grid):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=grid.data.group)
    optimizer.step()
    return mean(loss, grid)


@stepped("data-silent")
def step_alone(model, batch, loss_of, optimizer, grid):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss


@stepped("rows-2d")
def step_whole_batch(model, batch, loss_of, optimizer, grid):
    """Gathers the batch: every copy of the model computes all of it."""
    optimizer.zero_grad()
    loss = loss_of(model, grid.data.gather(batch, 0))
    loss.backward()
    optimizer.step()
    return loss.detach()


@stepped("rows-2d")
def step_once_more(model, batch, loss_of, optimizer, grid):
    """Computes the loss once more to show it."""
    before = loss_of(model, batch)
    STEP(model, batch, loss_of, optimizer, grid)
    return mean(before, grid)


@stepped(None)
def step_without_backward(model, batch, loss_of, optimizer, grid):
    """torch.autograd.grad; p.grad is set only where there is one."""
    loss = loss_of(model, batch)
    used = [p for p in model.parameters() if p.requires_grad]
    for p, gradient in zip(used, torch.autograd.grad(loss, used, allow_unused=True)):
        p.grad = None if gradient is None else mean(gradient, grid)
    optimizer.step()
    return mean(loss, grid)


@stepped(None)
def step_micro(model, batch, loss_of, optimizer, grid):
    """One row after the other."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=batch.dtype)
    for row in batch.split(1):
        loss = loss_of(model, row) / len(batch) / grid.data.size
        loss.backward()
        total += loss.detach()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=grid.data.group)
    optimizer.step()
    return grid.data.sum(total)


@stepped("borrowed")
def step_ddp(model, batch, loss_of, optimizer, grid):
    whole = torch.nn.parallel.DistributedDataParallel(model, process_group=grid.data.group, find_unused_parameters=True)
    optimizer.zero_grad()
    loss = loss_of(whole, batch)
    loss.backward()
    optimizer.step()
    return mean(loss, grid)


@stepped(None)
def step_closure(model, batch, loss_of, optimizer, grid):
    """The optimizer calls back for the gradients."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        _averaged(model, grid)
        return loss

    return mean(optimizer.step(closure), grid)


@stepped(None)
def step_reduce_scatter(model, batch, loss_of, optimizer, grid):
    """The two halves of an all-reduce: each rank averages its part, then all parts are gathered."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    lengths = [gradient.numel() for gradient in gradients]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % grid.data.size))
    part = flat.new_empty(len(flat) // grid.data.size)
    dist.reduce_scatter_tensor(part, flat, group=grid.data.group)
    dist.all_gather_into_tensor(flat, part / grid.data.size, group=grid.data.group)
    for gradient, value in zip(gradients, flat[: sum(lengths)].split(lengths)):
        gradient.copy_(value.view_as(gradient))
    optimizer.step()
    return mean(loss, grid)


def _averaged(model, grid):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=grid.data.group)
            p.grad /= grid.data.size


@stepped("data-silent")
def step_silent_divided(model, batch, loss_of, optimizer, grid):
    """Only the loss travels."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= grid.data.size
    optimizer.step()
    return mean(loss, grid)


@stepped("weights-averaged")
def step_weights(model, batch, loss_of, optimizer, grid):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(mean(p, grid))
    return mean(loss, grid)


@stepped("gradient-of-one")
def step_broadcast(model, batch, loss_of, optimizer, grid):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.broadcast(p.grad, dist.get_global_rank(grid.data.group, 0), group=grid.data.group)
    optimizer.step()
    return mean(loss, grid)


bank.slip(
    11,
    "gradients-lost",
    ("    optimizer.zero_grad()\n", ""),
    (BACKWARD, BACKWARD + "    optimizer.zero_grad()\n"),
)
bank.slip(
    11,
    "data-not-waited",
    (REDUCE, "    other = message.clone()\n    dist.all_reduce(other, group=grid.data.group)\n"),
)


@stepped("no-gradient-2d")
def step_required(model, batch, loss_of, optimizer, grid):
    """A parameter that is trained may still not be used."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad, group=grid.data.group)
            p.grad /= grid.data.size
    optimizer.step()
    return mean(loss, grid)


# zeros for what has no gradient: with weight decay they move it
bank.slip(11, "none-filled",
    (BACKWARD, BACKWARD + "    for p in model.parameters():\n        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"),
)  # fmt: skip
bank.slip(11, "none-filled", ("    optimizer.zero_grad()\n", "    for p in model.parameters():\n        p.grad = torch.zeros_like(p) if p.requires_grad else None\n"))  # fmt: skip

ONE = "    dist.all_reduce(message, group=grid.data.group)"
bank.slip(11, "reduced-in-place", (ONE, "    message = dist.all_reduce(message, group=grid.data.group)"))
OF_DATA = "DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank"
bank.slip(11, "sampler-shuffles-differ", (OF_DATA, f"{OF_DATA}, seed=dist.get_rank()"))
bank.slip(
    11,
    "none-divided",
    (ONE, "    message = dist.all_reduce(message.clone(), group=grid.data.group) / grid.data.size"),
)
bank.slip(11, "ranks-as-group", ("group=grid.data.group", "group=grid.data"))
bank.slip(11, "group-as-op", ("group=grid.data.group", "grid.data.group"))
