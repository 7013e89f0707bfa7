"""Answers to balise 10 of 15_pipeline_under_the_hood: data × pipeline."""

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("15_pipeline_under_the_hood", 10, whole=True)

bank.hint(
    "sent-to-all",
    "The gradients are right, but {got} bytes of them went to ranks of other stages, which have no use for them. "
    "Average within the data group.",
)
bank.instead(
    "sent-to-all",
    '''
def hybrid_step(step, parameters, x, targets, replica, data_group):
    """Wrong: every rank sends its gradients to all ranks of the world, and keeps those of its stage."""
    n, members = dist.get_world_size(data_group), dist.get_process_group_ranks(data_group)
    part = x.tensor_split(n)[replica]
    loss = step(part, targets.tensor_split(n)[replica])
    share = len(part) / len(x)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, ([None if p.grad is None else p.grad * share for p in parameters], None if loss is None else loss * share))
    for k, p in enumerate(parameters):
        if p.grad is not None:
            p.grad = sum(every[r][0][k] for r in members)
    return None if loss is None else sum(every[r][1] for r in members)
''',
)


other = Bank("15_pipeline_under_the_hood", 10)


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


other.several(None, grid_by_mesh, step_in_one_message)
other.several(None, grid_of_all_groups, step_by_gather)
other.several(None, grid_local, step_by_ones)


# --- the grid ---

GROUPS = """    for s in range(n_stages):
        group = dist.new_group([r * n_stages + s for r in range(n_replicas)])
        if s == stage:
            mine = group
"""


SAME = "[r * n_stages + s for r in range(n_replicas)]"


RANKS = "[replica * n_stages + s for s in range(n_stages)]"


bank.hint(
    "groups-not-everywhere",
    "The ranks are stuck, or one gave up: {error}. All ranks of a group must make the "
    "same calls in the same order. new_group(), and all_reduce() without group=, are "
    "calls of the whole world: every rank creates every group, even those that it isn't "
    "in.",
)
other.slip(
    "groups-not-everywhere",
    (GROUPS, "    mine = dist.new_group([r * n_stages + stage for r in range(n_replicas)])\n"),
)
other.slip(
    "groups-not-everywhere",
    ("for s in range(n_stages):\n", "for s in [stage, *(s for s in range(n_stages) if s != stage)]:\n"),
)
bank.hint(
    "not-a-grid",
    "make_grid returns four things: the stage, the replica, the list of this pipeline's ranks, and a "
    "process group. Here: {what}.",
)
other.slip("not-a-grid", (f"return stage, replica, {RANKS}, mine", "return stage, replica, mine"))
other.slip("not-a-grid", (f"return stage, replica, {RANKS}, mine", "pass"), variant=True)
bank.hint(
    "no-group-kept",
    "{error}: this rank never found its own group in the loop. Are stage and replica swapped?",
)
other.slip("no-group-kept", ("replica, stage = divmod", "stage, replica = divmod"))
other.slip("no-group-kept", ("if s == stage:", "if s == stage + n_stages:"), variant=True)
bank.hint(
    "stage-replica-swapped",
    "Rank {rank} of {size} has stage and replica swapped: rank = replica × n_stages + "
    "stage, so that neighbours in a pipeline are neighbouring ranks.",
)
other.slip("stage-replica-swapped", ("    return stage, replica", "    return replica, stage"))
other.slip("stage-replica-swapped", ("divmod(dist.get_rank(), n_stages)\n    n_replicas = dist.get_world_size() // n_stages",
          "divmod(dist.get_rank(), n_stages)\n    n_replicas = dist.get_world_size() // n_stages\n    "
          "stage, replica = divmod(dist.get_rank(), n_replicas)"), variant=True)  # fmt: skip
bank.hint(
    "wrong-cell",
    "Rank {rank} of {size} is on the wrong stage or in the wrong replica: rank = replica × n_stages + stage.",
)
other.slip("wrong-cell", ("replica, stage = divmod(dist.get_rank(), n_stages)", "replica, stage = divmod(dist.get_rank(), n_stages)\n"
          "    replica += 1"))  # fmt: skip
other.slip("wrong-cell", ("return stage, replica,", "return stage, replica + 1,"), variant=True)
bank.hint(
    "wrong-pipeline",
    "The pipeline of rank {rank} is {expected}, the ranks that hold the stages of its replica, "
    "starting with stage 0; here it is {got}.",
)
other.slip("wrong-pipeline", (RANKS, "list(range(n_stages))"))
other.slip("wrong-pipeline", (RANKS, "[r * n_stages + stage for r in range(n_replicas)]"))
other.slip("wrong-pipeline", (RANKS, "[s * n_replicas + replica for s in range(n_stages)]"), variant=True)
bank.hint(
    "not-in-group",
    "Rank {rank} isn't in the group that it returned, or it returned none. All ranks create all "
    "groups; a rank keeps the one that it is in, and mustn't lose it in later turns of a loop.",
)
other.slip("not-in-group", ("        if s == stage:\n            mine = group\n", "        mine = group\n"))
other.slip("not-in-group", ("if s == stage:", "if s == 0:"))
other.slip(
    "not-in-group",
    ("        if s == stage:\n            mine = group\n", "        mine = group if s == stage else None\n"),
    variant=True,
)
bank.hint(
    "group-along-pipeline",
    "The data group of rank {rank} holds the stages of one pipeline. These are different "
    "layers, whose gradients have nothing to do with each other. The group must hold the "
    "ranks with the same stage.",
)
other.slip("group-along-pipeline", (GROUPS, "    for r in range(n_replicas):\n        group = dist.new_group([r * n_stages + s "
          "for s in range(n_stages)])\n        if r == replica:\n            mine = group\n"))  # fmt: skip
other.slip("group-along-pipeline", (GROUPS, "    rows = torch.arange(dist.get_world_size()).view(-1, n_stages).tolist()\n"
          "    mine = [dist.new_group(row) for row in rows][replica]\n"), variant=True)  # fmt: skip
bank.hint(
    "group-is-world",
    "The data group of rank {rank} is the whole world. It must hold only the ranks with the same stage.",
)
other.slip("group-is-world", (GROUPS, "    mine = dist.group.WORLD\n"))
other.slip("group-is-world", (SAME, "list(range(dist.get_world_size()))"), variant=True)
bank.hint(
    "wrong-group",
    "The data group of rank {rank} isn't the group of the ranks with its stage.",
)
other.slip("wrong-group", (GROUPS, "    for r in range(dist.get_world_size()):\n        group = dist.new_group([r])\n"
          "        if r == dist.get_rank():\n            mine = group\n"))  # fmt: skip
other.slip("wrong-group", (GROUPS, "    mine = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]\n"), variant=True)  # fmt: skip


# --- the step ---

SHARE = "value *= len(rows) / len(x)"


REDUCE = "dist.all_reduce(value, group=data_group)"


bank.hint(
    "whole-batch-everywhere",
    "Replica {replica} ran the whole batch. Each replica takes its own rows: use "
    "tensor_split with the number of replicas.",
)
other.slip("whole-batch-everywhere", ("rows = x.tensor_split(n_replicas)[replica]", "rows = x"),
          ("targets.tensor_split(n_replicas)[replica]", "targets"))  # fmt: skip
other.slip("whole-batch-everywhere", ("tensor_split(n_replicas)[replica]", "tensor_split(1)[0]"), variant=True)
bank.hint(
    "share-by-rank",
    "Rank {rank} ran one rank's share of the rows. All ranks of a pipeline work on the same rows, "
    "those of their replica: split by the number of replicas, not of ranks.",
)
other.slip("share-by-rank", ("x.tensor_split(n_replicas)[replica]", "x.tensor_split(dist.get_world_size())[dist.get_rank()]"),
          ("targets.tensor_split(n_replicas)[replica]", "targets.tensor_split(dist.get_world_size())[dist.get_rank()]"), variant=True)  # fmt: skip
bank.hint(
    "other-rows",
    "Replica {replica} ran rows {got}; its own are {expected}, x.tensor_split(number of "
    "replicas)[replica]. They are consecutive, even when the batch doesn't divide evenly.",
)
other.slip("other-rows", ("[replica]", "[0]"))
other.slip("other-rows", ("tensor_split(n_replicas)", "chunk(n_replicas)"))
other.slip("other-rows", ("rows = x.tensor_split(n_replicas)[replica]", "b = len(x) // n_replicas\n    rows = x[b * replica :][:b]"),
          ("targets.tensor_split(n_replicas)[replica]", "targets[b * replica :][:b]"))  # fmt: skip
other.slip("other-rows", ("rows = x.tensor_split(n_replicas)[replica]", "rows = x[replica::n_replicas]"),
          ("targets.tensor_split(n_replicas)[replica]", "targets[replica::n_replicas]"), variant=True)  # fmt: skip
bank.hint(
    "targets-of-others",
    "The targets don't belong to the rows that came with them.",
)
other.slip("targets-of-others", ("targets.tensor_split(n_replicas)[replica]", "targets[: len(rows)]"), variant=True)
bank.hint(
    "step-twice",
    "step() was called {n} times. Call it once: its gradients add up.",
)
other.slip(
    "step-twice",
    ("    loss = step(", "    step(rows, targets.tensor_split(n_replicas)[replica])\n    loss = step("),
)
other.slip("step-twice", ("    loss = step(", "    for _ in range(2):\n        loss = step("), variant=True)
bank.hint(
    "replica-only",
    "These are the gradients of this replica's rows alone: nothing was summed over the data group, "
    "or the sum went into a new tensor. Change p.grad in place.",
)
other.slip("replica-only", (REDUCE, "pass"))
other.slip("replica-only", ("            value *= len(rows) / len(x)\n            dist.all_reduce(value, group=data_group)\n",
          "            summed = value * len(rows) / len(x)\n            dist.all_reduce(summed, group=data_group)\n"), variant=True)  # fmt: skip
bank.hint(
    "replicas-summed",
    "The replicas' means were added up. Weight each one by its rows over all rows.",
)
other.slip("replicas-summed", (SHARE, "pass"))
other.slip("replicas-summed", (SHARE, "value *= 1.0"), variant=True)
bank.hint(
    "replicas-alike",
    "This is right for equal shares and wrong for unequal ones: weight each by its rows over all rows.",
)
other.slip("replicas-alike", (SHARE, "value /= n_replicas"))
other.slip("replicas-alike", (SHARE, "value.div_(dist.get_world_size(data_group))"), variant=True)
bank.hint(
    "divided-by-world",
    "You divide the gradients by the number of ranks. They are a mean over the batch, and only "
    "the replicas share the batch.",
)
other.slip("divided-by-world", (SHARE, "value /= dist.get_world_size()"))
other.slip(
    "divided-by-world", (SHARE, "value *= len(rows) / len(x) * n_replicas / dist.get_world_size()"), variant=True
)
bank.hint(
    "summed-over-world",
    "The gradients of all stages were added together: all_reduce without group= runs over the whole world.",
)
other.slip("summed-over-world", ("    for value in [loss, *(p.grad for p in parameters)]", "    for value in [p.grad for p in parameters]"),
          (REDUCE, "dist.all_reduce(value)"))  # fmt: skip
other.slip("summed-over-world", ("    for value in [loss, *(p.grad for p in parameters)]", "    for value in [p.grad for p in parameters]"),
          (REDUCE, "dist.all_reduce(value)"), (SHARE, "value /= dist.get_world_size()"), variant=True)  # fmt: skip
other.slip("groups-not-everywhere", (REDUCE, "dist.all_reduce(value)"))
other.slip(
    "groups-not-everywhere",
    (REDUCE, "dist.all_reduce(value, group=None if value is loss else data_group)"),
    variant=True,
)
bank.hint(
    "reduce-not-waited",
    "When hybrid_step returned, an all-reduce was still running. Call wait() for each one "
    "that you started with async_op.",
)
other.slip("reduce-not-waited", (REDUCE, "value.work = dist.all_reduce(value, group=data_group, async_op=True)"))
bank.hint(
    "weighted-twice",
    "The gradients are weighted twice, before the sum and after it.",
)
other.slip("weighted-twice", (REDUCE, REDUCE + "\n            value /= n_replicas"))
other.slip("weighted-twice", (SHARE, "value *= (len(rows) / len(x)) ** 2"), variant=True)
bank.hint(
    "grad-none",
    "For a frozen parameter, p.grad is None: {error}",
)
other.slip("grad-none", ("        if value is not None:\n    ", "        if True:\n    "),
          ("for value in [loss, *(p", "for value in [*(p"))  # fmt: skip
other.slip("grad-none", ("        if value is not None:\n", "        if value is not loss or loss is not None:\n"), variant=True)  # fmt: skip
bank.hint(
    "updated-inside",
    "The weights changed inside the step. The update comes after it, once the gradients of all replicas are there.",
)
other.slip("updated-inside", ("    return loss\n", "    torch.optim.SGD(parameters, lr=0.1).step()\n    return loss\n"))
other.slip("updated-inside", ("    return loss\n", "    with torch.no_grad():\n        for p in parameters:\n"
          "            p -= 0.0 if p.grad is None else 0.1 * p.grad\n    return loss\n"), variant=True)  # fmt: skip
bank.hint(
    "wrong-hybrid",
    "The gradients differ from those of one process with the whole batch.",
)
other.slip("wrong-hybrid", (SHARE, "value *= -len(rows) / len(x)"))
bank.hint(
    "weighted-late",
    "You weight the gradients by the rank's share of the rows after the sum. Weight each by its "
    "own share first, then add them.",
)
other.slip("weighted-late", (SHARE, "pass"), (REDUCE, REDUCE + "\n            value *= len(rows) / len(x)"))
other.slip("weighted-late", (SHARE, "share = len(rows) / len(x)"), (REDUCE, REDUCE + "\n            value.mul_(share)"), variant=True)  # fmt: skip
other.slip(
    "wrong-hybrid",
    ("    return loss\n", "    for p in parameters:\n        p.grad = None\n    return loss\n"),
    variant=True,
)
bank.hint(
    "frozen-filled",
    "A frozen parameter had p.grad None and now has a tensor there. An optimizer with weight "
    "decay or momentum would move it: leave None as it is.",
)
other.slip("frozen-filled", ("    for value in [loss,", "    for p in parameters:\n        if p.grad is None:\n"
          "            p.grad = torch.zeros_like(p)\n    for value in [loss,"))  # fmt: skip
other.slip("frozen-filled", ("    for value in [loss,", "    for p in parameters:\n        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
          "    for value in [loss,"), variant=True)  # fmt: skip
other.slip("sent-to-all", ("[loss, *(p", "[torch.zeros(()) if loss is None else loss, *(p"),
          (REDUCE, "every = [None] * dist.get_world_size()\n            dist.all_gather_object(every, value)\n            "
           "value.copy_(sum(every[r] for r in dist.get_process_group_ranks(data_group)))"), variant=True)  # fmt: skip
other.slip("reduce-not-waited", ("        if value is not None:\n", "        if value is loss and loss is not None:\n            value *= len(rows) / len(x)\n"
          "            dist.all_reduce(value, group=data_group, async_op=True)\n        elif value is not None:\n"), variant=True)  # fmt: skip
bank.hint(
    "loss-of-replica",
    "That is the loss of this replica's rows. Every replica contributes to the loss of the batch.",
)
other.slip("loss-of-replica", ("[loss, *(p.grad for p in parameters)]", "[p.grad for p in parameters]"))
other.slip("loss-of-replica", ("[loss, *(p.grad for p in parameters)]", "[p.grad for p in parameters if p.grad is not None]"), variant=True)  # fmt: skip
bank.hint(
    "loss-unweighted",
    "The replicas' losses were added or averaged without weighting them by their rows.",
)
other.slip("loss-unweighted", ("    for value in [loss, *(p", "    if loss is not None:\n        dist.all_reduce(loss, group=data_group)"
          "\n    for value in [*(p"))  # fmt: skip
other.slip("loss-unweighted", ("    for value in [loss, *(p", "    if loss is not None:\n        loss = loss / n_replicas\n"
          "        dist.all_reduce(loss, group=data_group)\n    for value in [*(p"), variant=True)  # fmt: skip
bank.hint(
    "wrong-hybrid-loss",
    "The last stage must return the mean loss of the whole batch, as a tensor or a number; "
    "the others must return None.",
)
other.slip("wrong-hybrid-loss", ("    return loss\n", "    return None\n"))
other.slip("wrong-hybrid-loss", ("    return loss\n", "    return 0.0 if loss is None else loss\n"))
other.slip("wrong-hybrid-loss", ("    return loss\n", "    return [loss]\n"), variant=True)
bank.add(other)
