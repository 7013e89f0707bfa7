"""Balises 1 and 2: stages, GPipe, 1F1B."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules")

SHARE = "share = layers[len(layers) * rank // n : len(layers) * (rank + 1) // n]"
SCALE = 'scale_grads=reduction == "mean"'
BROADCAST = (
    "    dist.broadcast(loss, src=dist.get_world_size() - 1)  # here and below, the last rank holds the last stage\n"
)
LAST = '        loss = found.mean() if reduction == "mean" else found.sum()\n'

# Wrong answers to balise 1.
bank.slip(1, "whole-model-held", (SHARE, "share = layers"))
bank.slip(1, "layers-lost", (SHARE, "share = layers[len(layers) // n * rank : len(layers) // n * (rank + 1)]"))
bank.slip(
    1,
    "shares-uneven",
    (SHARE, "size = len(layers) // n\n    share = layers[size * rank : size * (rank + 1) if rank < n - 1 else None]"),
)
bank.slip(1, "shares-not-neighbours", (SHARE, "share = layers[rank::n]"), ("nn.Sequential(*share)", "Any(share)"),
          ("def make_stage", "class Any(nn.Module):\n    def __init__(self, layers):\n        super().__init__()\n"
           "        self.layers = nn.ModuleList(layers)\n\n    def forward(self, x):\n        out = x\n"
           "        for layer in self.layers:\n            wide = layer.weight.shape[1]\n"
           "            out = layer(out[:, :1].expand(-1, wide) if out.shape[1] != wide else out)\n"
           "        return out\n\n\ndef make_stage"))  # fmt: skip
bank.slip(1, "micro-batches-ignored", ("ScheduleGPipe(stage, n_micro_batches,", "ScheduleGPipe(stage, 4,"))
bank.slip(
    1, "micro-batches-ignored", ("ScheduleGPipe(stage, n_micro_batches,", "ScheduleGPipe(stage, dist.get_world_size(),")
)
bank.slip(1, "not-gpipe", ("ScheduleGPipe(stage", "Schedule1F1B(stage"))
bank.slip(1, "gradients-not-scaled", (SCALE, "scale_grads=False"))
bank.slip(1, "sum-scaled", (", " + SCALE, ""))
bank.slip(1, "gradients-not-scaled", (SCALE, 'scale_grads=reduction == "sum"'))
bank.slip(1, "old-gradients", ("        stage.submod.zero_grad()\n", "        pass\n"))
bank.slip(1, "other-loss", ("n_micro_batches, loss_fn, scale", "n_micro_batches, nn.MSELoss(), scale"))
bank.slip(1, "wrong-gradients", ("    loss = torch.zeros((), device", "    for stage in stages:\n        for p in stage.submod.parameters():\n"
                                 "            p.grad /= dist.get_world_size() + 0.5\n    loss = torch.zeros((), device"))  # fmt: skip
bank.slip(1, "loss-on-last-only", (BROADCAST, ""))
bank.slip(1, "loss-on-last-only", (BROADCAST + "    return loss\n", "    return loss if last else None\n"))
bank.slip(1, "loss-not-averaged", (LAST, "        loss = found.sum()\n"))
bank.slip(1, "sum-averaged", (LAST, "        loss = found.mean()\n"))
bank.slip(1, "loss-of-one-micro-batch", (LAST, "        loss = found[-1]\n"))
bank.slip(1, "loss-with-graph", ("part.detach() for part", "part for part"),
          (BROADCAST, "    shared = loss.detach().clone()\n    dist.broadcast(shared, src=dist.get_world_size() - 1)\n"
           "    loss = loss if last else shared\n"))  # fmt: skip
bank.slip(1, "loss-from-untrusted", ("    loss = torch.zeros((), device=x.device, dtype=x.dtype)\n", "    loss = 0 * x.sum()\n"),
          (BROADCAST, "    dist.all_reduce(loss)\n"))  # fmt: skip
bank.slip(
    1,
    "collective-broke",
    ("loss = torch.zeros((), device=x.device, dtype=x.dtype)", "loss = torch.zeros((), device=x.device)"),
)
bank.slip(1, "loss-not-scalar", ("    return loss\n", "    return [loss]\n"))
bank.slip(1, "loss-not-scalar", ("    return loss\n", "    return float(loss)\n"))
bank.slip(1, "wrong-loss", ("    return loss\n", "    return loss / dist.get_world_size()\n"))
bank.slip(
    1,
    "ranks-wait",
    (
        BROADCAST,
        "    if last:\n    " + BROADCAST + "    else:\n        dist.recv(loss, src=dist.get_world_size() - 1)\n",
    ),
)
bank.slip(1, "no-stage", ("    return PipelineStage(nn.Sequential(*share).to(device), rank, n, device)\n",
                          "    return nn.Sequential(*share).to(device)\n"),
          ("return ScheduleGPipe(stage, n_micro_batches, loss_fn, " + SCALE + ")", "return stage"))  # fmt: skip
bank.slip(1, "rank-failed", ("    losses = []\n    schedule.step(*((x,) if first else ()), target=y if last else None, losses=losses)\n",
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


bank.several(1, None, balanced_stage, gpipe, step_all_reduced)
bank.several(1, None, split_by_tensor, gpipe, step_with_objects)
bank.several(1, None, balanced_stage, gpipe_with_own_scale, step_of_scaled)

# Wrong answers to balise 2.
LOOP = "        if batch_size % m == 0 and (n_stages - 1) / (m + n_stages - 1) <= bubble:\n"
bank.slip(2, "does-not-divide", ("batch_size % m == 0 and ", ""))
bank.slip(2, "bubble-of-work", ("(n_stages - 1) / (m + n_stages - 1) <= bubble", "(n_stages - 1) / m <= bubble"))
bank.slip(2, "size-returned", ("            return m\n", "            return batch_size // m\n"))
bank.slip(2, "more-than-needed", ("(n_stages - 1) / (m + n_stages - 1)", "n_stages / (m + n_stages - 1)"))
bank.slip(
    2,
    "bubble-of-zero",
    ("range(1, batch_size + 1)", "range(max(1, int((n_stages - 1) * (1 - bubble) / bubble)), batch_size + 1)"),
)
bank.slip(2, "more-than-needed", ("(n_stages - 1) / (m + n_stages - 1)", "n_stages / (m + n_stages)"))
bank.slip(2, "more-than-needed", ("range(1, batch_size + 1)", "range(batch_size, 0, -1)"))
bank.slip(2, "equal-refused", ("<= bubble", "< bubble and n_stages > 1 or n_stages == 1"))
bank.slip(2, "equal-refused", ("<= bubble", "< bubble"))
bank.slip(2, "nothing-raised", ("    raise ValueError(", "    return batch_size\n    raise ValueError("))
bank.slip(2, "bubble-too-large", (LOOP, "        if batch_size % m == 0 and m >= n_stages:\n"))
bank.slip(2, "bubble-too-large", ("/ (m + n_stages - 1) <=", "* 100 // (m + n_stages - 1) / 100 <="))
bank.slip(2, "found-nothing", ("range(1, batch_size + 1)", "range(1, 4 * n_stages)"))
bank.slip(2, "found-nothing", ("range(1, batch_size + 1)", "range(1, batch_size)"))
bank.slip(2, "not-a-number", ("            return m\n", "            return [m]\n"))
bank.slip(2, "gpipe-memory", ("Schedule1F1B(", "ScheduleGPipe("))
bank.slip(2, "other-number", ("Schedule1F1B(stage, n_micro_batches,", "Schedule1F1B(stage, 4,"))
bank.slip(2, "other-number", ("Schedule1F1B(stage, n_micro_batches,", "Schedule1F1B(stage, 8,"))
bank.slip(2, "mean-not-scaled", (SCALE, "scale_grads=False"))
bank.slip(2, "sum-divided", (", " + SCALE, ""))
bank.slip(2, "not-the-gradients", ("n_micro_batches, loss_fn, scale", "n_micro_batches, nn.MSELoss(), scale"))
bank.slip(2, "no-schedule", ("return Schedule1F1B(stage, n_micro_batches, loss_fn, " + SCALE + ")", "return stage"))


# Right answers to balise 2.
def choose_by_formula(n_stages, bubble, batch_size):
    divisors = sorted(d for d in range(1, batch_size + 1) if not batch_size % d)
    fitting = [m for m in divisors if (n_stages - 1) * (1 - bubble) <= bubble * m + 1e-12]
    if not fitting:
        raise ValueError("no number of micro-batches is enough")
    return min(fitting)


def choose_by_simulation(n_stages, bubble, batch_size):
    from dlojz_tp import planner

    if n_stages == 1:
        return 1
    for m in range(1, batch_size + 1):
        if batch_size % m == 0 and 1 - m / (m + n_stages - 1) <= bubble + 1e-12:
            return m
    raise ValueError(f"nothing below {planner.__name__}")


def f1b_keywords(stage, n_micro_batches, loss_fn, reduction="mean"):
    return Schedule1F1B(stage, n_microbatches=n_micro_batches, loss_fn=loss_fn, scale_grads=(reduction != "sum"))


def f1b_own_scale(stage, n_micro_batches, loss_fn, reduction="mean"):
    factor = 1 / n_micro_batches if reduction == "mean" else 1.0

    def scaled(output, target):
        return loss_fn(output, target) * factor

    return Schedule1F1B(stage, n_micro_batches, scaled, scale_grads=False)


def f1b_interleaved_of_one(stage, n_micro_batches, loss_fn, reduction="mean"):
    """Interleaved with one chunk keeps more than 1F1B on the first ranks."""
    return ScheduleInterleaved1F1B([stage], n_micro_batches, loss_fn, scale_grads=reduction == "mean")


bank.several(2, None, choose_by_formula, f1b_keywords)
bank.several(2, None, choose_by_simulation, f1b_own_scale)
bank.several(2, "too-many-in-flight", choose_by_formula, f1b_interleaved_of_one)

# What only GPUs show.
bank.slip(1, "stage-not-on-gpu", ("nn.Sequential(*share).to(device)", "nn.Sequential(*share)"))
bank.slip(1, "stage-not-on-gpu", ("nn.Sequential(*share).to(device)", "nn.Sequential(*share).cpu()"), variant=True)
bank.slip(1, "others-on-gpu", (SHARE, "layers = [layer.to(device) for layer in layers]\n    " + SHARE))
bank.slip(
    1,
    "others-on-gpu",
    (SHARE, "whole = nn.Sequential(*layers).to(device)\n    share = whole[len(layers) * rank // n : len(layers) * (rank + 1) // n]"),
    variant=True,
)  # fmt: skip
bank.slip(1, None, (SHARE, SHARE + "\n    for layer in share:\n        layer.to(device)"))
bank.slip(1, "loss-not-on-gpu", ("torch.zeros((), device=x.device, dtype", "torch.zeros((), dtype"))
bank.slip(1, "loss-not-on-gpu", (BROADCAST, "    loss = torch.tensor(loss.item(), dtype=x.dtype)\n" + BROADCAST))
bank.slip(1, "loss-not-on-gpu", (BROADCAST, "    loss = loss.cpu()\n" + BROADCAST), variant=True)
bank.slip(1, "loss-overwritten", ("src=dist.get_world_size() - 1", "src=0"))
bank.slip(1, "loss-overwritten", ("dist.broadcast(loss, src=dist.get_world_size() - 1)", "dist.reduce(loss, dst=0)"))

bank.text(
    2,
    "more-than-needed",
    '''
def choose_micro_batches(n_stages, bubble, batch_size):
    """The smallest divisor of `batch_size` that keeps the bubble's share at or under `bubble`; ValueError if none."""
    import math
    if bubble > 0 or n_stages == 1:
        least = max(1, math.ceil((n_stages - 1) * (1 - bubble) / bubble)) if n_stages > 1 else 1
        for m in range(least, batch_size + 1):
            if batch_size % m == 0:
                return m
    raise ValueError(f"{batch_size} samples on {n_stages} stages always have a bubble above {bubble:.0%}")


def make_1f1b(stage, n_micro_batches, loss_fn, reduction="mean"):
    """The 1F1B schedule; arguments as of make_gpipe."""
    return Schedule1F1B(stage, n_micro_batches, loss_fn, scale_grads=reduction == 'mean')
''',
)
bank.slip(1, "layers-changed", ("    return PipelineStage(", "    layers[:] = share\n    return PipelineStage("))
