"""Answers to 15_pipeline_under_the_hood: pipelines side by side."""

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood")


# --- right ones ---


def grid_by_mesh(n_stages):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size() // n_stages, n_stages), mesh_dim_names=("replica", "stage"))
    replica, stage = mesh.get_coordinate()
    return stage, replica, mesh.mesh[replica].tolist(), mesh["replica"].get_group()


def grid_of_all_groups(n_stages):
    """Groups of the pipelines as well; they are made first."""
    ranks = torch.arange(dist.get_world_size()).view(-1, n_stages)
    rank = dist.get_rank()
    for row in ranks.tolist():
        dist.new_group(row)
    groups = [dist.new_group(column) for column in ranks.T.tolist()]
    stage, replica = rank % n_stages, rank // n_stages
    return [stage, replica, ranks[replica].tolist(), groups[stage]]


def grid_local(n_stages):
    """Only its members make a group, and say so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    same = list(range(rank % n_stages, size, n_stages))
    group = dist.new_group(same, use_local_synchronization=True)
    first = rank - rank % n_stages
    return rank % n_stages, rank // n_stages, range(first, first + n_stages), group


def step_in_one_message(step, parameters, x, targets, replica, data_group):
    """All gradients in one flat tensor; the weights go into the rows before."""
    n = dist.get_world_size(data_group)
    rows, wanted = x.tensor_split(n)[replica], targets.tensor_split(n)[replica]
    loss = step(rows, wanted)
    share = rows.shape[0] / x.shape[0]
    moving = [p for p in parameters if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in moving] + ([loss.reshape(1)] if loss is not None else [])) * share
    dist.all_reduce(flat, group=data_group)
    for p, part in zip(moving, flat.split([p.numel() for p in moving] + [1] * (loss is not None))):
        p.grad = part.view_as(p)
    return None if loss is None else flat[-1].item()


def step_by_gather(step, parameters, x, targets, replica, data_group):
    n = dist.get_world_size(data_group)
    sizes = [len(part) for part in torch.arange(len(x)).tensor_split(n)]
    start = sum(sizes[:replica])
    loss = step(x[start : start + sizes[replica]], targets[start : start + sizes[replica]])

    def mean(value):
        parts = [torch.empty_like(value) for _ in range(n)]
        dist.all_gather(parts, value.contiguous(), group=data_group)
        return sum(part * size for part, size in zip(parts, sizes)) / len(x)

    for p in parameters:
        if p.requires_grad:
            p.grad = mean(p.grad)
    return loss if loss is None else mean(loss)


def step_by_ones(step, parameters, x, targets, replica, data_group):
    """The number of rows is added up as well."""
    n = dist.get_world_size(data_group)
    rows = x.tensor_split(n)[replica]
    loss = step(rows, targets.tensor_split(n)[replica])
    count = torch.tensor(float(len(rows)), dtype=torch.float64)
    dist.all_reduce(count, group=data_group)
    values = [p.grad for p in parameters if p.grad is not None] + ([] if loss is None else [loss])
    works = [dist.all_reduce(value.mul_(len(rows)), group=data_group, async_op=True) for value in values]
    for work, value in zip(works, values):
        work.wait()
        value /= count.to(value.device)
    return loss


bank.several(10, None, grid_by_mesh, step_in_one_message)
bank.several(10, None, grid_of_all_groups, step_by_gather)
bank.several(10, None, grid_local, step_by_ones)

# --- the grid ---

GROUPS = """    for s in range(n_stages):
        group = dist.new_group([r * n_stages + s for r in range(n_replicas)])
        if s == stage:
            mine = group
"""
SAME = "[r * n_stages + s for r in range(n_replicas)]"
RANKS = "[replica * n_stages + s for s in range(n_stages)]"
bank.slip(
    10,
    "groups-not-everywhere",
    (GROUPS, "    mine = dist.new_group([r * n_stages + stage for r in range(n_replicas)])\n"),
)
bank.slip(
    10,
    "groups-not-everywhere",
    ("for s in range(n_stages):\n", "for s in [stage, *(s for s in range(n_stages) if s != stage)]:\n"),
)
bank.slip(10, "not-a-grid", (f"return stage, replica, {RANKS}, mine", "return stage, replica, mine"))
bank.slip(10, "not-a-grid", (f"return stage, replica, {RANKS}, mine", "pass"))
bank.slip(10, "no-group-kept", ("replica, stage = divmod", "stage, replica = divmod"))
bank.slip(10, "stage-replica-swapped", ("    return stage, replica", "    return replica, stage"))
bank.slip(10, "stage-replica-swapped", ("divmod(dist.get_rank(), n_stages)\n    n_replicas = dist.get_world_size() // n_stages",
          "divmod(dist.get_rank(), n_stages)\n    n_replicas = dist.get_world_size() // n_stages\n    "
          "stage, replica = divmod(dist.get_rank(), n_replicas)"))  # fmt: skip
bank.slip(10, "wrong-cell", ("replica, stage = divmod(dist.get_rank(), n_stages)", "replica, stage = divmod(dist.get_rank(), n_stages)\n"
          "    replica += 1"))  # fmt: skip
bank.slip(10, "wrong-pipeline", (RANKS, "list(range(n_stages))"))
bank.slip(10, "wrong-pipeline", (RANKS, "[r * n_stages + stage for r in range(n_replicas)]"))
bank.slip(10, "wrong-pipeline", (RANKS, "[s * n_replicas + replica for s in range(n_stages)]"))
bank.slip(10, "not-in-group", ("        if s == stage:\n            mine = group\n", "        mine = group\n"))
bank.slip(10, "not-in-group", ("if s == stage:", "if s == 0:"))
bank.slip(10, "not-in-group", ("        if s == stage:\n            mine = group\n", "        mine = group if s == stage else None\n"))
bank.slip(10, "group-along-pipeline", (GROUPS, "    for r in range(n_replicas):\n        group = dist.new_group([r * n_stages + s "
          "for s in range(n_stages)])\n        if r == replica:\n            mine = group\n"))  # fmt: skip
bank.slip(10, "group-is-world", (GROUPS, "    mine = dist.group.WORLD\n"))
bank.slip(10, "group-is-world", (SAME, "list(range(dist.get_world_size()))"))
bank.slip(10, "wrong-group", (GROUPS, "    for r in range(dist.get_world_size()):\n        group = dist.new_group([r])\n"
          "        if r == dist.get_rank():\n            mine = group\n"))  # fmt: skip

# --- the step ---

SHARE = "value *= len(rows) / len(x)"
REDUCE = "dist.all_reduce(value, group=data_group)"
bank.slip(10, "whole-batch-everywhere", ("rows = x.tensor_split(n_replicas)[replica]", "rows = x"),
          ("targets.tensor_split(n_replicas)[replica]", "targets"))  # fmt: skip
bank.slip(10, "share-by-rank", ("x.tensor_split(n_replicas)[replica]", "x.tensor_split(dist.get_world_size())[dist.get_rank()]"),
          ("targets.tensor_split(n_replicas)[replica]", "targets.tensor_split(dist.get_world_size())[dist.get_rank()]"))  # fmt: skip
bank.slip(10, "other-rows", ("[replica]", "[0]"))
bank.slip(10, "other-rows", ("tensor_split(n_replicas)", "chunk(n_replicas)"))
bank.slip(10, "other-rows", ("rows = x.tensor_split(n_replicas)[replica]", "b = len(x) // n_replicas\n    rows = x[b * replica :][:b]"),
          ("targets.tensor_split(n_replicas)[replica]", "targets[b * replica :][:b]"))  # fmt: skip
bank.slip(10, "other-rows", ("rows = x.tensor_split(n_replicas)[replica]", "rows = x[replica::n_replicas]"),
          ("targets.tensor_split(n_replicas)[replica]", "targets[replica::n_replicas]"))  # fmt: skip
bank.slip(10, "targets-of-others", ("targets.tensor_split(n_replicas)[replica]", "targets[: len(rows)]"))
bank.slip(
    10,
    "step-twice",
    ("    loss = step(", "    step(rows, targets.tensor_split(n_replicas)[replica])\n    loss = step("),
)
bank.slip(10, "replica-only", (REDUCE, "pass"))
bank.slip(10, "replica-only", ("            value *= len(rows) / len(x)\n            dist.all_reduce(value, group=data_group)\n",
          "            summed = value * len(rows) / len(x)\n            dist.all_reduce(summed, group=data_group)\n"))  # fmt: skip
bank.slip(10, "replicas-summed", (SHARE, "pass"))
bank.slip(10, "replicas-alike", (SHARE, "value /= n_replicas"))
bank.slip(10, "divided-by-world", (SHARE, "value /= dist.get_world_size()"))
bank.slip(10, "divided-by-world", (SHARE, "value *= len(rows) / len(x) * n_replicas / dist.get_world_size()"))
bank.slip(10, "summed-over-world", ("    for value in [loss, *(p.grad for p in parameters)]", "    for value in [p.grad for p in parameters]"),
          (REDUCE, "dist.all_reduce(value)"))  # fmt: skip
bank.slip(10, "summed-over-world", ("    for value in [loss, *(p.grad for p in parameters)]", "    for value in [p.grad for p in parameters]"),
          (REDUCE, "dist.all_reduce(value)"), (SHARE, "value /= dist.get_world_size()"))  # fmt: skip
bank.slip(10, "groups-not-everywhere", (REDUCE, "dist.all_reduce(value)"))
bank.slip(10, "groups-not-everywhere", (REDUCE, "dist.all_reduce(value, group=None if value is loss else data_group)"))
bank.slip(10, "reduce-not-waited", (REDUCE, "value.work = dist.all_reduce(value, group=data_group, async_op=True)"))
bank.slip(10, "weighted-twice", (REDUCE, REDUCE + "\n            value /= n_replicas"))
bank.slip(10, "weighted-twice", (SHARE, "value *= (len(rows) / len(x)) ** 2"))
bank.slip(10, "grad-none", ("        if value is not None:\n    ", "        if True:\n    "),
          ("for value in [loss, *(p", "for value in [*(p"))  # fmt: skip
bank.slip(
    10, "updated-inside", ("    return loss\n", "    torch.optim.SGD(parameters, lr=0.1).step()\n    return loss\n")
)
bank.slip(10, "wrong-hybrid", (SHARE, "value *= -len(rows) / len(x)"))
bank.slip(10, "weighted-late", (SHARE, "pass"), (REDUCE, REDUCE + "\n            value *= len(rows) / len(x)"))
bank.slip(
    10, "wrong-hybrid", ("    return loss\n", "    for p in parameters:\n        p.grad = None\n    return loss\n")
)
bank.slip(10, "frozen-filled", ("    for value in [loss,", "    for p in parameters:\n        if p.grad is None:\n"
          "            p.grad = torch.zeros_like(p)\n    for value in [loss,"))  # fmt: skip
bank.slip(10, "reduce-not-waited", ("        if value is not None:\n", "        if value is loss and loss is not None:\n            value *= len(rows) / len(x)\n"
          "            dist.all_reduce(value, group=data_group, async_op=True)\n        elif value is not None:\n"))  # fmt: skip
bank.slip(10, "loss-of-replica", ("[loss, *(p.grad for p in parameters)]", "[p.grad for p in parameters]"))
bank.slip(10, "loss-unweighted", ("    for value in [loss, *(p", "    if loss is not None:\n        dist.all_reduce(loss, group=data_group)"
          "\n    for value in [*(p"))  # fmt: skip
bank.slip(10, "wrong-hybrid-loss", ("    return loss\n", "    return None\n"))
bank.slip(10, "wrong-hybrid-loss", ("    return loss\n", "    return 0.0 if loss is None else loss\n"))
bank.slip(10, "wrong-hybrid-loss", ("    return loss\n", "    return [loss]\n"))
