"""Answers to balise 1 of 16_pipeline_schedules: a stage on each rank, and a step with GPipe."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.answers.bank import Bank
from tests.answers.pipeline_schedules.step import SCALE

bank = Bank("16_pipeline_schedules", 1)

SHARE = "share = layers[len(layers) * rank // n : len(layers) * (rank + 1) // n]"

BROADCAST = (
    "    dist.broadcast(loss, src=dist.get_world_size() - 1)  # here and below, the last rank holds the last stage\n"
)

LAST = '        loss = found.mean() if reduction == "mean" else found.sum()\n'

# Wrong answers to balise 1.

bank.hint(
    "whole-model-held",
    "Rank {rank} holds all layers. Each rank must hold only its own share: that is the purpose of a pipeline.",
)
bank.slip("whole-model-held", (SHARE, "share = layers"), variant=True)

bank.hint(
    "layers-lost",
    "Some layers are on no rank, or on two. Rank r of n takes the layers from len(layers) * r // n up to, but not "
    "including, len(layers) * (r + 1) // n.",
)
bank.slip(
    "layers-lost", (SHARE, "share = layers[len(layers) // n * rank : len(layers) // n * (rank + 1)]"), variant=True
)

bank.hint(
    "shares-uneven",
    "The largest share has {most} layers, the smallest {least}. They may differ by at most one.",
    edge=True,
)
bank.slip(
    "shares-uneven",
    (SHARE, "size = len(layers) // n\n    share = layers[size * rank : size * (rank + 1) if rank < n - 1 else None]"),
    variant=True,
)

bank.hint(
    "shares-not-neighbours",
    "A stage holds neighbouring layers, in order, and rank 0 holds the first ones: activations go from rank to rank.",
)
bank.slip("shares-not-neighbours", (SHARE, "share = layers[rank::n]"), ("nn.Sequential(*share)", "Any(share)"),
          ("def make_stage", "class Any(nn.Module):\n    def __init__(self, layers):\n        super().__init__()\n"
           "        self.layers = nn.ModuleList(layers)\n\n    def forward(self, x):\n        out = x\n"
           "        for layer in self.layers:\n            wide = layer.weight.shape[1]\n"
           "            out = layer(out[:, :1].expand(-1, wide) if out.shape[1] != wide else out)\n"
           "        return out\n\n\ndef make_stage"), variant=True)  # fmt: skip

bank.hint(
    "micro-batches-ignored",
    "A stage did {found} forwards of {rows} samples in a step, but {wanted} were asked for: pass n_micro_batches to "
    "the schedule.",
)
bank.slip("micro-batches-ignored", ("ScheduleGPipe(stage, n_micro_batches,", "ScheduleGPipe(stage, 4,"))

bank.slip(
    "micro-batches-ignored",
    ("ScheduleGPipe(stage, n_micro_batches,", "ScheduleGPipe(stage, dist.get_world_size(),"),
    variant=True,
)

bank.hint(
    "not-gpipe",
    "A backward began before the last forward, as in another schedule. GPipe does all forwards first.",
)
bank.slip("not-gpipe", ("ScheduleGPipe(stage", "Schedule1F1B(stage"), variant=True)

bank.hint(
    "gradients-not-scaled",
    "The gradients are n_micro_batches times too large. Each micro-batch gives the mean over its own samples, and "
    "the mean over the batch is the mean of these. See scale_grads.",
)
bank.slip("gradients-not-scaled", (SCALE, "scale_grads=False"))

bank.hint(
    "sum-scaled",
    "For a loss that is a sum, the gradients are divided by the number of micro-batches. A sum over the batch is the "
    "sum of the micro-batches' sums: scale_grads is for means.",
    edge=True,
)
bank.slip("sum-scaled", (", " + SCALE, ""), variant=True)

bank.slip("gradients-not-scaled", (SCALE, 'scale_grads=reduction == "sum"'), variant=True)

bank.hint(
    "old-gradients",
    "The first step is right, but the second is not: it still contains the old gradients. And a schedule that scales "
    "gradients scales *everything* in .grad. First clear the gradients of each stage's submod.",
    edge=True,
)
bank.slip("old-gradients", ("        stage.submod.zero_grad()\n", "        pass\n"), variant=True)

bank.hint("other-loss", "The gradients are not those of the given loss function. Pass loss_fn to the schedule.")
bank.slip("other-loss", ("n_micro_batches, loss_fn, scale", "n_micro_batches, nn.MSELoss(), scale"), variant=True)

bank.hint("wrong-gradients", "The gradients are not those of a single process on the whole batch.")
bank.slip("wrong-gradients", ("    loss = torch.zeros((), device", "    for stage in stages:\n        for p in stage.submod.parameters():\n"
                                 "            p.grad /= dist.get_world_size() + 0.5\n    loss = torch.zeros((), device"), variant=True)  # fmt: skip

bank.hint(
    "loss-on-last-only",
    "Only the rank of the last stage knows the loss. The others need it too: use a collective, and wait for it.",
)
bank.slip("loss-on-last-only", (BROADCAST, ""))

bank.slip("loss-on-last-only", (BROADCAST + "    return loss\n", "    return loss if last else None\n"), variant=True)

bank.hint(
    "loss-not-averaged",
    "That is the sum of the micro-batches' losses, each of which is a mean over its samples. The loss of the batch "
    "is the mean of these losses.",
)
bank.slip("loss-not-averaged", (LAST, "        loss = found.sum()\n"), variant=True)

bank.hint(
    "sum-averaged",
    "With a loss that is a sum, the loss of the batch is the sum over the micro-batches, not their mean.",
    edge=True,
)
bank.slip("sum-averaged", (LAST, "        loss = found.mean()\n"), variant=True)

bank.hint(
    "loss-of-one-micro-batch",
    "That is the loss of one micro-batch. The list has one loss for each micro-batch: use them all.",
)
bank.slip("loss-of-one-micro-batch", (LAST, "        loss = found[-1]\n"), variant=True)

bank.hint("loss-with-graph", "The loss still has its graph, which keeps activations alive. Detach it.", edge=True)
bank.slip("loss-with-graph", ("part.detach() for part", "part for part"),
          (BROADCAST, "    shared = loss.detach().clone()\n    dist.broadcast(shared, src=dist.get_world_size() - 1)\n"
           "    loss = loss if last else shared\n"), variant=True)  # fmt: skip

bank.hint(
    "loss-from-untrusted",
    "The loss is NaN. On this rank, x or y must not be used: x is valid only on the first stage's rank, and y only "
    "on the last stage's.",
    edge=True,
)
bank.slip("loss-from-untrusted", ("    loss = torch.zeros((), device=x.device, dtype=x.dtype)\n", "    loss = 0 * x.sum()\n"),
          (BROADCAST, "    dist.all_reduce(loss)\n"), variant=True)  # fmt: skip

bank.slip(
    "collective-broke",
    ("loss = torch.zeros((), device=x.device, dtype=x.dtype)", "loss = torch.zeros((), device=x.device)"),
)

bank.hint("loss-not-scalar", "Return the loss of the whole batch as a tensor with one value.")
bank.slip("loss-not-scalar", ("    return loss\n", "    return [loss]\n"))

bank.slip("loss-not-scalar", ("    return loss\n", "    return float(loss)\n"), variant=True)

bank.hint("wrong-loss", "That is not the loss of the whole batch.")
bank.slip("wrong-loss", ("    return loss\n", "    return loss / dist.get_world_size()\n"), variant=True)

bank.slip(
    "ranks-wait",
    (
        BROADCAST,
        "    if last:\n    " + BROADCAST + "    else:\n        dist.recv(loss, src=dist.get_world_size() - 1)\n",
    ),
)

bank.hint("no-stage", "make_stage returns a PipelineStage, and make_gpipe a schedule with a method `step`.")
bank.slip("no-stage", ("    return PipelineStage(nn.Sequential(*share).to(device), rank, n, device)\n",
                          "    return nn.Sequential(*share).to(device)\n"),
          ("return ScheduleGPipe(stage, n_micro_batches, loss_fn, " + SCALE + ")", "return stage"), variant=True)  # fmt: skip

bank.slip("rank-failed", ("    losses = []\n    schedule.step(*((x,) if first else ()), target=y if last else None, losses=losses)\n",
                             "    losses = []\n    schedule.step(target=y if last else None, losses=losses)\n"))  # fmt: skip


# Right answers to balise 1.
def balanced_stage(layers, device):
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = [len(layers) // n + (r < len(layers) % n) for r in range(n)]
    begin = sum(sizes[:rank])
    module = nn.Sequential(*layers[begin : begin + sizes[rank]])
    module.to(device)
    return PipelineStage(module, stage_index=rank, num_stages=n, device=device)


def split_by_tensor(layers, device):
    share = torch.tensor_split(torch.arange(len(layers)), dist.get_world_size())[dist.get_rank()].tolist()
    module = nn.Sequential()
    for i in share:
        module.append(layers[i])
    return PipelineStage(module.to(device), dist.get_rank(), dist.get_world_size(), device)


def gpipe(stage, n_micro_batches, loss_fn, reduction="mean"):
    if reduction == "mean":
        return ScheduleGPipe(stage, n_microbatches=n_micro_batches, loss_fn=loss_fn)
    return ScheduleGPipe(stage, n_microbatches=n_micro_batches, loss_fn=loss_fn, scale_grads=False)


def gpipe_with_own_scale(stage, n_micro_batches, loss_fn, reduction="mean"):
    divisor = n_micro_batches if reduction == "mean" else 1
    return ScheduleGPipe(stage, n_micro_batches, lambda output, y: loss_fn(output, y) / divisor, scale_grads=False)


def step_with_objects(stages, schedule, x, y, reduction="mean"):
    rank, n = dist.get_rank(), dist.get_world_size()
    for stage in stages:
        for p in stage.submod.parameters():
            p.grad = None
    losses, what = [], []
    if rank == 0 and n == 1:
        schedule.step(x, target=y, losses=losses)
    elif rank == 0:
        schedule.step(x)
    elif rank == n - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    if losses:
        total = sum(loss.item() for loss in losses)
        what = [total / len(losses) if reduction == "mean" else total]
    else:
        what = [None]
    dist.broadcast_object_list(what, src=n - 1)
    return torch.tensor(what[0])


def step_all_reduced(stages, schedule, x, y, reduction="mean"):
    for stage in stages:
        stage.submod.zero_grad(set_to_none=False)
    losses = []
    args = [x] if stages[0].is_first else []
    schedule.step(*args, target=y if stages[-1].is_last else None, losses=losses)
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    for loss in losses:
        total += torch.stack([loss.detach().double(), torch.ones_like(loss, dtype=torch.float64)])
    dist.all_reduce(total)
    return (total[0] / total[1] if reduction == "mean" else total[0]).to(x.dtype)


def step_of_scaled(stages, schedule, x, y, reduction="mean"):
    for stage in stages:
        stage.submod.zero_grad()
    losses = []
    last = stages[-1].is_last
    schedule.step(*((x,) if stages[0].is_first else ()), target=y if last else None, losses=losses)
    loss = torch.stack(losses).detach().sum() if last else torch.zeros((), dtype=x.dtype, device=x.device)
    dist.all_reduce(loss)
    return loss


bank.several(None, balanced_stage, gpipe, step_all_reduced)

bank.several(None, split_by_tensor, gpipe, step_with_objects)

bank.several(None, balanced_stage, gpipe_with_own_scale, step_of_scaled)

# What only GPUs show.

bank.hint(
    "stage-not-on-gpu",
    "On GPUs, the layers and their inputs are not on the same device: {error}. make_stage must move its share of the "
    "layers to `device`; PipelineStage does not.",
    edge=True,
)
bank.slip("stage-not-on-gpu", ("nn.Sequential(*share).to(device)", "nn.Sequential(*share)"))

bank.slip("stage-not-on-gpu", ("nn.Sequential(*share).to(device)", "nn.Sequential(*share).cpu()"), variant=True)

bank.hint(
    "others-on-gpu",
    "On GPUs, this rank's memory also holds layers {found}, which belong to other ranks. First take the share, then "
    "move it: a model that needs a pipeline does not fit on one GPU.",
)
bank.slip("others-on-gpu", (SHARE, "layers = [layer.to(device) for layer in layers]\n    " + SHARE))

bank.slip("others-on-gpu",
    (SHARE, "whole = nn.Sequential(*layers).to(device)\n    share = whole[len(layers) * rank // n : len(layers) * (rank + 1) // n]"),
    variant=True,
)  # fmt: skip

bank.slip(None, (SHARE, SHARE + "\n    for layer in share:\n        layer.to(device)"))

bank.hint(
    "loss-not-on-gpu",
    "On GPUs, the loss is sent from the CPU's memory, which NCCL cannot do: {error}. Make the tensor on x.device.",
    edge=True,
)
bank.slip("loss-not-on-gpu", ("torch.zeros((), device=x.device, dtype", "torch.zeros((), dtype"))

bank.slip("loss-not-on-gpu", (BROADCAST, "    loss = torch.tensor(loss.item(), dtype=x.dtype)\n" + BROADCAST))

bank.slip("loss-not-on-gpu", (BROADCAST, "    loss = loss.cpu()\n" + BROADCAST), variant=True)

bank.hint(
    "loss-overwritten",
    "In the end, not even the last stage's rank knows the loss. Either the value came from a rank that has none (the "
    "src of a broadcast must be the last stage's rank), or the sum went to one rank only (reduce).",
)
bank.slip("loss-overwritten", ("src=dist.get_world_size() - 1", "src=0"))

bank.slip(
    "loss-overwritten",
    ("dist.broadcast(loss, src=dist.get_world_size() - 1)", "dist.reduce(loss, dst=0)"),
    variant=True,
)

bank.hint(
    "layers-changed",
    "You changed the list of {n} layers that you were given: {left} are left in it. The next stage made from it "
    "lacks the others.",
    edge=True,
)
bank.slip(
    "layers-changed", ("    return PipelineStage(", "    layers[:] = share\n    return PipelineStage("), variant=True
)


bank.edge("collective-broke")
