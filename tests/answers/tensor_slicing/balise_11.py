"""Answers to 17_tensor_slicing: data parallelism over tensor groups."""

import random

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.answers.bank import Bank, before

bank = Bank("17_tensor_slicing", 11, whole=True)
RIGHT = before(bank.work, 12)
STEP = RIGHT["step_2d"]


def make_sampler(dataset, grid):
    return RIGHT["make_sampler"](dataset, grid)


def mean(tensor, grid):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor, group=grid.data.group)
    return tensor / grid.data.size


# samplers


def sampled(slug, variant=False):
    """Decorator: this sampler, with a right step."""
    return lambda sampler: bank.several(slug, sampler, STEP, variant=variant)


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


bank.hint("sampler-by-global-rank", "Ranks {peers} hold slices of one copy of the model but see different samples: "
          "their partial sums do not belong together. Choose the share by the *data* rank: grid.data.rank of "
          "grid.data.size.")  # fmt: skip


@sampled("sampler-by-global-rank")
def make_sampler_default(dataset, grid):
    return DistributedSampler(dataset)


@sampled("sampler-by-global-rank")
def make_sampler_global(dataset, grid):
    return list(range(len(dataset)))[dist.get_rank() :: dist.get_world_size()]


@sampled("sampler-by-global-rank", variant=True)
def make_sampler_mixed(dataset, grid):
    return DistributedSampler(dataset, num_replicas=grid.data.size * grid.tensor.size, rank=dist.get_rank())


bank.hint("sampler-by-tensor-rank", "You choose the share by the tensor rank. All ranks of a tensor group must see "
          "the same samples; split the samples over the data ranks.")  # fmt: skip


@sampled("sampler-by-tensor-rank", variant=True)
def make_sampler_tensor(dataset, grid):
    return DistributedSampler(dataset, num_replicas=grid.tensor.size, rank=grid.tensor.rank)


bank.hint("sampler-shuffles-differ", "Ranks {peers} hold slices of one copy of the model but see samples in "
          "different orders: each shuffles differently. Use a seed that is the same on all ranks, whatever their "
          "random state.")  # fmt: skip


@sampled("sampler-shuffles-differ")
def make_sampler_own_shuffle(dataset, grid):
    mine = list(range(grid.data.rank, len(dataset), grid.data.size))
    return torch.utils.data.SubsetRandomSampler(mine, generator=torch.Generator().manual_seed(dist.get_rank()))


bank.hint("sampler-no-share", "Every data rank sees all samples. Each should see only its share.")


@sampled("sampler-no-share")
def make_sampler_all(dataset, grid):
    return torch.utils.data.SequentialSampler(dataset)


@sampled("sampler-no-share", variant=True)
def make_sampler_only_order(dataset, grid):
    order = list(range(len(dataset)))
    random.Random(grid.data.rank).shuffle(order)
    return order


bank.hint("sampler-lengths", "The data ranks see {lengths} samples. A rank with one more batch waits forever for the "
          "others.")  # fmt: skip


@sampled("sampler-lengths", variant=True)
def make_sampler_uneven(dataset, grid):
    return list(range(len(dataset)))[grid.data.rank :: grid.data.size]


bank.hint("sampler-incomplete", "The data ranks' shares overlap, or leave samples out.")


@sampled("sampler-incomplete", variant=True)
def make_sampler_drawn(dataset, grid):
    """Each data rank draws from all samples."""
    generator = torch.Generator().manual_seed(grid.data.rank)
    return torch.randperm(len(dataset), generator=generator)[: max(1, len(dataset) // grid.data.size)].tolist() or [0]


bank.hint("sampler-not-indices", "Yield an *index* for each sample, a number from 0 to {last}, as a sampler does for "
          "the DataLoader. You yield {what}: samples, or batches.")  # fmt: skip


@sampled("sampler-not-indices")
def make_sampler_samples(dataset, grid):
    each = len(dataset) // grid.data.size
    return dataset[grid.data.rank * each : (grid.data.rank + 1) * each]


@sampled("sampler-not-indices")
def make_sampler_loader(dataset, grid):
    mine = DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank)
    return torch.utils.data.DataLoader(dataset, sampler=mine)


@sampled("sampler-not-indices", variant=True)
def make_sampler_batches(dataset, grid):
    mine = DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank)
    return torch.utils.data.BatchSampler(mine, 2, drop_last=False)


bank.hint("sampler-rank", "{error}. num_replicas and rank must be those of the data group: grid.data.size and "
          "grid.data.rank.")  # fmt: skip


@sampled("sampler-rank", variant=True)
def make_sampler_rank_of_world(dataset, grid):
    return DistributedSampler(dataset, num_replicas=grid.data.size, rank=dist.get_rank())


@sampled("nothing-returned")
def make_sampler_silent(dataset, grid):
    DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank)


# steps


def stepped(slug, variant=False):
    """Decorator: this step, with a right sampler."""
    return lambda step: bank.several(slug, make_sampler, step, variant=variant)


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

bank.hint("data-summed", "The gradient is the *sum* over the {n} data ranks. The loss is a mean over the global "
          "batch, so divide by the number of data ranks.")  # fmt: skip
bank.slip("data-summed", (SIZE, ""))
bank.hint("divided-by-world", "You divided the sum over the data ranks by the size of the world, or twice. The sum "
          "has {n} terms, one for each data rank: divide by their number, once.")  # fmt: skip
bank.slip("divided-by-world", (SIZE, "/ dist.get_world_size()"), variant=True)
bank.hint("averaged-over-world", "You added up the gradients of all ranks of the world. Tensor ranks hold different "
          "slices, so their gradients have nothing to do with each other. Reduce over the data group.")  # fmt: skip
bank.slip("averaged-over-world", (SIZE, "/ dist.get_world_size()"), (REDUCE, "    dist.all_reduce(message)\n"))
bank.slip("averaged-over-world", (REDUCE, "    dist.all_reduce(message)\n"), variant=True)
bank.hint("averaged-over-tensor", "You added up the gradients over the tensor group, whose ranks hold different "
          "slices. Reduce over the data group.")  # fmt: skip
bank.slip("averaged-over-tensor", (REDUCE, "    dist.all_reduce(message, group=grid.tensor.group)\n"))
bank.slip("averaged-over-tensor", (SIZE, "/ grid.tensor.size"),
    (REDUCE, "    dist.all_reduce(message, group=grid.tensor.group)\n"),
    variant=True,
)  # fmt: skip
bank.hint("data-silent", "Nothing travels between the data ranks: each copy of the model trains only on its own "
          "share.")  # fmt: skip
bank.slip("data-silent", (REDUCE, ""), (SIZE, ""))
bank.hint("data-not-written", "The data ranks exchanged values, but the optimizer saw this rank's own gradients. You "
          "reduced a copy, or did not wait for the result. It has to be in p.grad before the step.")  # fmt: skip
bank.slip("data-not-written", (LOOP, ""), variant=True)
bank.hint("averaged-after-step", "You average the gradients after the optimizer's step, so the step used this rank's "
          "own gradients. Average before the step.")  # fmt: skip
bank.slip(
    "averaged-after-step", ("    optimizer.step()\n", ""), (BACKWARD, BACKWARD + "    optimizer.step()\n"), variant=True
)
bank.hint("gradients-kept", "The gradients still include those of the previous step. Set them to zero first.")
bank.slip("gradients-kept", ("    optimizer.zero_grad()\n", ""), variant=True)
bank.slip(
    "none-divided",
    (USED, ""),
    ("*(p.grad for p in model.parameters())", "*(p.grad / 1 for p in model.parameters())"),
)
bank.hint("no-step", "You called the optimizer's step {n} times in one training step, not once.")
bank.slip("no-step", ("    optimizer.step()\n", ""), variant=True)
bank.hint("loss-of-share", "This is only the loss of this rank's own share. Return the mean over the data ranks, "
          "which is the loss of the global batch.")  # fmt: skip
bank.slip(
    "loss-of-share",
    ("return means[0]", "return loss_of(model, batch) * 0 + first"),
    (BACKWARD, BACKWARD + "    first = loss.item()\n"),
    variant=True,
)
bank.hint("loss-summed", "This loss is too large by a factor of {n}: you compute a sum over ranks instead of a mean.")
bank.slip("loss-summed", ("return means[0]", "return means[0] * grid.data.size"), variant=True)
bank.hint("loss-wrong", "The loss is not the mean over the global batch.")
bank.slip("loss-wrong", ("return means[0]", "return loss_of(model, batch)"))
bank.slip("loss-wrong", ("return means[0]", "return means[1]"), variant=True)
bank.slip("nothing-returned", ("    return means[0]", "    means[0]"))


bank.hint("weights-2d", "The gradients are right when the optimizer steps, but afterwards the weights are not those "
          "of one process.")  # fmt: skip


@stepped("weights-2d", variant=True)
def step_with_decay(model, batch, loss_of, optimizer, grid):
    """Averages the weights as well, over the world."""
    loss = STEP(model, batch, loss_of, optimizer, grid)
    for p in model.parameters():
        p.data *= 0.99
    return loss


bank.hint("too-much-2d", "Besides those of its tensor group, a rank sends {sent} bytes; {enough} are enough for the "
          "gradients. Send each gradient once. The ranks of a tensor group already agree on what they hold in "
          "common.")  # fmt: skip


@stepped("too-much-2d")
def step_twice(model, batch, loss_of, optimizer, grid):
    """Weights are averaged after each step, too."""
    loss = STEP(model, batch, loss_of, optimizer, grid)
    for p in model.parameters():
        p.data = mean(p.data, grid)
    return loss


@stepped("too-much-2d", variant=True)
def step_common(model, batch, loss_of, optimizer, grid):
    """Averages the whole model once more over the tensor group where the shapes are whole: the norms, the heads."""
    loss = STEP(model, batch, loss_of, optimizer, grid)
    for _ in range(4):
        for p in [*model.norm.parameters(), *model.head.parameters()]:
            p.data = grid.tensor.sum(p.data) / grid.tensor.size
    return loss


bank.hint("gradient-2d", "The gradient is not that of the global batch.")


@stepped("gradient-2d", variant=True)
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


@stepped("data-summed", variant=True)
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


bank.hint("rows-2d", "This rank computed the loss of {n} rows in a step, but its share has {share}. Each data rank "
          "computes only its own rows, once. Send gradients, not the batch.")  # fmt: skip


@stepped("rows-2d")
def step_whole_batch(model, batch, loss_of, optimizer, grid):
    """Gathers the batch: every copy of the model computes all of it."""
    optimizer.zero_grad()
    loss = loss_of(model, grid.data.gather(batch, 0))
    loss.backward()
    optimizer.step()
    return loss.detach()


@stepped("rows-2d", variant=True)
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


@stepped("data-silent", variant=True)
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


bank.hint("weights-averaged", "You average the weights after the step. Only for plain gradient descent is that the "
          "same. Adam divides by each rank's own second moments and trains differently. Average the gradients, "
          "before the step.")  # fmt: skip


@stepped("weights-averaged", variant=True)
def step_weights(model, batch, loss_of, optimizer, grid):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(mean(p, grid))
    return mean(loss, grid)


bank.hint("gradient-of-one", "This is only the gradient of data rank 0: it was sent to the others, and theirs are "
          "lost. Average them.")  # fmt: skip


@stepped("gradient-of-one", variant=True)
def step_broadcast(model, batch, loss_of, optimizer, grid):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.broadcast(p.grad, dist.get_global_rank(grid.data.group, 0), group=grid.data.group)
    optimizer.step()
    return mean(loss, grid)


bank.hint("gradients-lost", "There are no gradients left when the optimizer steps: you set them to zero after "
          "backward.")  # fmt: skip
bank.slip(
    "gradients-lost",
    ("    optimizer.zero_grad()\n", ""),
    (BACKWARD, BACKWARD + "    optimizer.zero_grad()\n"),
    variant=True,
)
bank.hint("data-not-waited", "This is this rank's own gradient, divided: the values of the other data ranks had not "
          "arrived yet. Wait for them, then divide.")  # fmt: skip
bank.slip(
    "data-not-waited",
    (REDUCE, "    other = message.clone()\n    dist.all_reduce(other, group=grid.data.group)\n"),
    variant=True,
)


bank.hint("no-gradient-2d", "A frozen or unused parameter has p.grad None. Leave it out.")


@stepped("no-gradient-2d", variant=True)
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
bank.hint("none-filled", "{name} has no gradient (p.grad is None), but you gave the optimizer zeros for it. With "
          "weight decay or momentum, it then moves frozen or unused parameters. Leave None.")  # fmt: skip
bank.slip("none-filled",
    (BACKWARD, BACKWARD + "    for p in model.parameters():\n        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"),
)  # fmt: skip
bank.slip("none-filled", ("    optimizer.zero_grad()\n", "    for p in model.parameters():\n        p.grad = torch.zeros_like(p) if p.requires_grad else None\n"), variant=True)  # fmt: skip

ONE = "    dist.all_reduce(message, group=grid.data.group)"
bank.slip("reduced-in-place", (ONE, "    message = dist.all_reduce(message, group=grid.data.group)"))
OF_DATA = "DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank"
bank.slip("sampler-shuffles-differ", (OF_DATA, f"{OF_DATA}, seed=dist.get_rank()"), variant=True)
bank.slip(
    "none-divided",
    (ONE, "    message = dist.all_reduce(message.clone(), group=grid.data.group) / grid.data.size"),
)
bank.slip("ranks-as-group", ("group=grid.data.group", "group=grid.data"))
bank.slip("group-as-op", ("group=grid.data.group", "grid.data.group"))
