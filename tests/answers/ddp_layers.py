"""Answers to balises 3, 4 and 5 of 09_ddp: batch norm, heads that take turns, accumulation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.answers.bank import Bank

bank = Bank("09_ddp")

# balise 3
FORWARD = "        total = x.clone()\n        dist.all_reduce(total)\n"
BACKWARD = "        total = gradient.clone()\n        dist.all_reduce(total)\n        return total"
bank.slip(3, "not-summed", (FORWARD, "        total = x.clone()\n"))
bank.slip(3, "not-summed", (FORWARD, FORWARD + "        total /= dist.get_world_size()\n"))
bank.slip(3, "all-reduce-input-changed", ("total = x.clone()", "total = x"))
bank.slip(3, "gradient-of-own-rank", (BACKWARD, "        return gradient"))
bank.slip(3, "gradient-averaged", (BACKWARD, BACKWARD + " / dist.get_world_size()"))
bank.slip(
    3,
    "own-statistics",
    (
        "AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))",
        "torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])",
    ),
)
bank.slip(
    3,
    "variances-averaged",
    ("sums = AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))", "sums = AllReduceSum.apply(torch.cat([x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)])) / dist.get_world_size()"),
    ("        n = sums[-1].detach()\n", "        n = count\n"),
    ("mean, square = (sums[:-1] / n).view(2, -1)", "mean, var = sums.view(2, -1)"),
    ("        var = square - mean**2\n", ""),
)  # fmt: skip
bank.slip(3, "equal-batches-assumed", ("n = sums[-1].detach()", "n = count * dist.get_world_size()"))
bank.slip(3, "rank-failed", ("(sums[:-1] / n).view(2, -1)", "(sums[:6] / n).view(2, 3)"))
bank.slip(3, "unbiased-normalised", ("var = square - mean**2", "var = (square - mean**2) * n / (n - 1)"))
bank.slip(3, "normalised-wrong", ("torch.rsqrt(var + self.eps)", "torch.rsqrt(var + 1e-2)"))
bank.slip(3, "eps-ignored", ("torch.rsqrt(var + self.eps)", "torch.rsqrt(var + 1e-5)"))
bank.slip(3, "eps-ignored", ("torch.rsqrt(var + self.eps)", "torch.rsqrt(var)"))
bank.slip(3, "momentum-ignored", ("self.momentum", "0.1"))
bank.slip(3, "scale-forgotten", ("self.weight * torch.rsqrt", "torch.rsqrt"), ("self.bias - mean", "-mean"))
bank.slip(
    3,
    "statistics-not-differentiated",
    ("mean, square = (sums[:-1] / n).view(2, -1)", "mean, square = (sums[:-1] / n).detach().view(2, -1)"),
)
bank.slip(3, "input-gradient-wrong", ("var = square - mean**2", "var = (square - mean**2).detach()"))
bank.slip(3, "weight-gradient-wrong", ("scale = self.weight *", "scale = self.weight.detach() *"))
bank.slip(
    3,
    "running-not-updated",
    (
        "            self.running_mean.lerp_(mean, self.momentum)\n            self.running_var.lerp_(var * n / (n - 1), self.momentum)\n",
        "",
    ),
)
bank.slip(3, "running-biased", ("var * n / (n - 1)", "var"))
bank.slip(
    3,
    "momentum-inverted",
    ("self.running_mean.lerp_(mean, self.momentum)", "self.running_mean.lerp_(mean, 1 - self.momentum)"),
)
bank.slip(3, "momentum-inverted", ("* n / (n - 1), self.momentum)", "* n / (n - 1), 1 - self.momentum)"))
bank.slip(3, "running-wrong", ("lerp_(mean, self", "lerp_(mean * n / (n - 1), self"))
bank.slip(
    3,
    "eval-uses-batch",
    ("        if not self.training:\n            return super().forward(x)\n", ""),
    ("        with torch.no_grad():\n", "        if self.training:\n"),
    ("self.running_mean.lerp_(mean, self.momentum)", "self.running_mean.lerp_(mean.detach(), self.momentum)"),
    (
        "self.running_var.lerp_(var * n / (n - 1), self.momentum)",
        "self.running_var.lerp_((var * n / (n - 1)).detach(), self.momentum)",
    ),
)
bank.slip(
    3,
    "eval-talks",
    (
        "        if not self.training:\n            return super().forward(x)\n        count = x.new_tensor([x.numel() / x.shape[1]])\n",
        "        count = x.new_tensor([x.numel() / x.shape[1]])\n",
    ),
    (
        "        n = sums[-1].detach()\n",
        "        if not self.training:\n            return super().forward(x)\n        n = sums[-1].detach()\n",
    ),
)
bank.slip(
    3,
    "norm-dtype",
    (
        "        return x * scale[:, None, None] + shift[:, None, None]",
        "        return (x * scale[:, None, None] + shift[:, None, None]).double()",
    ),
)


class GoodSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x, op=dist.ReduceOp.SUM)
        return x

    @staticmethod
    def backward(ctx, grad):
        return GoodSum.apply(grad)


class ManyMessages(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        c = x.shape[1]
        n = GoodSum.apply(torch.tensor(float(x.numel() // c), dtype=x.dtype))
        mean = torch.stack([GoodSum.apply(x[:, k].sum()) for k in range(c)]) / n
        centred = x - mean.view(1, -1, 1, 1)
        var = torch.stack([GoodSum.apply(centred[:, k].square().sum()) for k in range(c)]) / n
        with torch.no_grad():
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (var * n / (n - 1) - self.running_var)
        scale = self.weight / (var + self.eps).sqrt()
        return centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class Gathers(nn.BatchNorm2d):
    """Every rank gets all images of all ranks: right numbers, and no gain."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor(len(x)))
        start = int(sum(sizes[: dist.get_rank()]))
        padded = x.new_zeros(int(sum(sizes)), *x.shape[1:])
        padded = torch.cat([padded[:start], x, padded[start + len(x) :]])
        everything = GoodSum.apply(padded)
        out = F.batch_norm(
            everything, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
        )
        own = torch.zeros(len(everything), 1, 1, 1, dtype=x.dtype)
        own[start : start + len(x)] = 1
        return (out * own)[start : start + len(x)]


class TwoPasses(nn.BatchNorm2d):
    """Mean first, then squares of differences: no cancellation, but two messages each way."""

    def forward(self, x):
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        first = GoodSum.apply(torch.cat([x.sum(dim=(0, 2, 3)), torch.full((1,), x[:, 0].numel()).to(x)]))
        n = first[-1].item()
        mean = (first[:-1] / n)[None, :, None, None]
        var = GoodSum.apply((x - mean).pow(2).sum(dim=(0, 2, 3))) / n
        self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean.detach().flatten())
        self.running_var.mul_(1 - self.momentum).add_(self.momentum * var.detach() * n / (n - 1))
        normalised = (x - mean) / torch.sqrt(var + self.eps)[None, :, None, None]
        return self.weight[None, :, None, None] * normalised + self.bias[None, :, None, None]


class OneByOne(nn.BatchNorm2d):
    """Sums, squares and the number of values, each in a message of its own."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        n = GoodSum.apply(x.new_tensor(x.numel() / x.shape[1]))
        mean = GoodSum.apply(x.sum((0, 2, 3))) / n
        var = GoodSum.apply(x.square().sum((0, 2, 3))) / n - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        normalised = (x - mean[:, None, None]) * torch.rsqrt(var + self.eps)[:, None, None]
        return normalised * self.weight[:, None, None] + self.bias[:, None, None]


class Merged(nn.BatchNorm2d):
    """Each rank's mean, variance and count are summed as moments; F.batch_norm normalises with what came out."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        own = torch.tensor(float(x[:, 0].numel()), dtype=x.dtype, device=x.device)
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        packed = GoodSum.apply(torch.stack([own * mean, own * (var + mean**2), own.expand_as(mean)]))
        count = packed[2].detach()
        mean = packed[0] / count
        var = packed[1] / count - mean**2
        self.num_batches_tracked.add_(1)
        for kept, new in ((self.running_mean, mean), (self.running_var, var * count / (count - 1))):
            kept.copy_((1 - self.momentum) * kept + self.momentum * new.detach())
        shape = (1, self.num_features, 1, 1)
        return self.bias.view(shape) + (x - mean.view(shape)) * (self.weight / (var + self.eps) ** 0.5).view(shape)


bank.several(3, "too-many-messages", GoodSum, ManyMessages)
bank.several(3, "too-many-messages", GoodSum, OneByOne)
bank.several(3, None, GoodSum, Merged)
bank.several(3, "activations-exchanged", GoodSum, Gathers)
bank.several(3, "too-many-messages", GoodSum, TwoPasses)
bank.slip(
    3,
    "too-many-messages",
    ("AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))", "AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))]))\n        dist.all_reduce(count)"),
    ("n = sums[-1].detach()", "n = count"),
    ("(sums[:-1] / n)", "(sums / n)"),
)  # fmt: skip


class Shifted(nn.BatchNorm2d):
    """Squares of differences from a point that all ranks know, the running mean: no cancellation, one message."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        start = self.running_mean.clone()[:, None, None]
        d = x - start
        total = GoodSum.apply(
            torch.cat([d.sum((0, 2, 3)), d.square().sum((0, 2, 3)), d.new_full((1,), d[:, 0].numel())])
        )
        first, second, n = *total[:-1].chunk(2), total[-1].detach()
        shift, var = first / n, second / n - (first / n) ** 2
        self.running_mean += self.momentum * shift.detach()
        self.running_var += self.momentum * ((second - first**2 / n) / (n - 1) - self.running_var).detach()
        out = (d - shift[:, None, None]) / (var + self.eps).sqrt()[:, None, None]
        return out * self.weight[:, None, None] + self.bias[:, None, None]


bank.several(3, None, GoodSum, Shifted)
bank.slip(
    3,
    None,
    (
        "x.new_tensor([x.numel() / x.shape[1]])",
        "torch.full((1,), x.shape[0] * x.shape[2] * x.shape[3], dtype=x.dtype, device=x.device)",
    ),
)


# balise 4
@bank.wrong(4, "unused-parameters")
def make_parallel(network, device):
    return DDP(network.to(device))


@bank.wrong(4, "ranks-apart")
def make_parallel(network, device):
    """A DDP for the trunk, and one for each head: that of another head waits on another rank."""
    network.to(device)
    network.trunk = DDP(network.trunk)
    network.heads = nn.ModuleList(DDP(head) for head in network.heads)
    return network


@bank.wrong(4, "ranks-apart")
def make_parallel(network, device):
    """By hand, and each rank exchanges what it has used."""

    def exchange(_):
        for p in network.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    for p in network.parameters():
        dist.broadcast(p.data, 0)
    network.trunk.bias.register_post_accumulate_grad_hook(exchange)
    return network


@bank.wrong(4, "ranks-apart")
def make_parallel(network, device):
    """Averages the weights of the head in use before each forward; the line that fails names an option of DDP."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, task):
            for p in [*network.trunk.parameters(), *network.heads[task].parameters()]:
                dist.all_reduce(p.data)  # no find_unused_parameters here
                p.data /= dist.get_world_size()
            return network(x, task)

    return Averaged()


@bank.wrong(4, "static-graph")
def make_parallel(network, device):
    return DDP(network.to(device), static_graph=True)


@bank.wrong(4, "heads-apart")
def make_parallel(network, device):
    return network.to(device)


@bank.wrong(4, "heads-apart")
def make_parallel(network, device):
    for p in network.parameters():
        dist.broadcast(p.data, 0)
    return network


@bank.wrong(4, "not-callable-network")
def make_parallel(network, device):
    ddp = DDP(network.to(device), find_unused_parameters=True)
    forward = ddp.forward
    ddp.forward = lambda x: forward(x, 0)
    return ddp


@bank.wrong(4, "head-frozen")
def make_parallel(network, device):
    for head in network.heads:
        head.requires_grad_(False)
    return DDP(network.to(device), find_unused_parameters=True)


@bank.wrong(4, "heads-wrong-output")
def make_parallel(network, device):
    class AllHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, task):
            outs = [self.network(x, k) for k in range(len(self.network.heads))]
            return outs[0] + 0 * sum(out.sum() for out in outs)

    return DDP(AllHeads())


@bank.wrong(4, "other-head-trained")
def make_parallel(network, device):
    class AllHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, task):
            outs = [self.network(x, k) for k in range(len(self.network.heads))]
            small = sum(out.sum() for out in outs)
            return outs[task] + (small - small.detach()) * torch.arange(outs[task].shape[1])

    return DDP(AllHeads())


@bank.wrong(4, "heads-wrong-weights")
def make_parallel(network, device):
    ddp = DDP(network.to(device), find_unused_parameters=True)
    for p in network.parameters():
        p.register_hook(lambda g: g * dist.get_world_size())
        p.register_hook(lambda g: g + 0.01)
    return ddp


@bank.wrong(4, "parameters-lost")
def make_parallel(network, device):
    ddp = DDP(network.to(device), find_unused_parameters=True)
    return lambda x, task: ddp(x, task)


@bank.wrong(4, "parameters-lost")
def make_parallel(network, device):
    class Apart(nn.Module):
        """The trunk is called, and no part of what is returned."""

        def __init__(self):
            super().__init__()
            self.heads, self.hidden = network.heads, [network.to(device).trunk]

        def forward(self, x, task):
            return self.heads[task](torch.tanh(self.hidden[0](x)))

    return DDP(Apart(), find_unused_parameters=True)


bank.slip(4, "heads-other-gpu", ("device_ids = [device] if", "device_ids = [0] if"))
bank.slip(4, "network-not-on-device", ("network.to(device)", "network"))
bank.slip(4, "network-not-on-device", ("network.to(device), device_ids=device_ids", "network"))


@bank.right(4)
def make_parallel(network, device):
    """Each part wrapped by itself, under another name; an unused head is called, and its output counts nothing."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = DDP(network.to(device).trunk)
            self.tops = nn.ModuleList(DDP(head) for head in network.heads)

        def forward(self, x, task):
            hidden = torch.tanh(self.body(x))
            outs = [top(hidden) for top in self.tops]
            return outs[task] + 0 * sum(out.sum() for out in outs)

    return Parts()


@bank.right(4)
def make_parallel(network, device):
    """All heads are in the graph, those of other tasks with a gradient of zero."""

    class AllHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network.to(device)

        def forward(self, x, task):
            idle = sum(p.sum() for head in self.network.heads for p in head.parameters())
            return self.network(x, task) + 0 * idle

    return DDP(AllHeads())


@bank.right(4)
def make_parallel(network, device):
    """No DDP: averaged by hand after backward, zero for what took no part."""
    network = network.to(device)
    for p in network.parameters():
        dist.broadcast(p.data, src=0)
    parameters = list(network.parameters())

    def average(*_):
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    network.register_forward_hook(
        lambda m, _, out: (
            out.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(average)) and None
        )
    )
    return network


# balise 5
NO_SYNC = "        with contextlib.nullcontext() if i == len(micro_batches) else model.no_sync():\n"
bank.slip(5, "exchange-each-time", (NO_SYNC, "        with contextlib.nullcontext():\n"))
bank.slip(5, "never-exchanged", ("if i == len(micro_batches) else", "if i > 1 else"))
bank.slip(
    5,
    "forward-outside",
    (NO_SYNC, ""),
    ('            loss = F.cross_entropy(model(x), y, reduction="sum") / samples\n            loss.backward()', '        loss = F.cross_entropy(model(x), y, reduction="sum") / samples\n        with contextlib.nullcontext() if i == len(micro_batches) else model.no_sync():\n            loss.backward()'),
)  # fmt: skip
bank.slip(
    5,
    "never-exchanged",
    ("contextlib.nullcontext() if i == len(micro_batches) else model.no_sync()", "model.no_sync()"),
)
bank.slip(5, "bypassed", ("F.cross_entropy(model(x)", "F.cross_entropy(model.module(x)"))
bank.slip(
    5, "sum-of-losses", ('F.cross_entropy(model(x), y, reduction="sum") / samples', "F.cross_entropy(model(x), y)")
)
bank.slip(5, "averaged-twice", ("            loss.backward()", "            (loss / dist.get_world_size()).backward()"))
bank.slip(5, "summed-over-ranks", ('reduction="sum") / samples', 'reduction="sum") / samples * dist.get_world_size()'))
bank.slip(
    5,
    "micro-means",
    ('F.cross_entropy(model(x), y, reduction="sum") / samples', "F.cross_entropy(model(x), y) / len(micro_batches)"),
)
bank.slip(
    5, "several-updates", ("            loss.backward()", "            loss.backward()\n        optimizer.step()")
)
bank.slip(5, "no-optimizer-step", ("            loss.backward()\n    optimizer.step()", "            loss.backward()"))
bank.slip(5, "old-gradients", ("    optimizer.zero_grad()\n", ""))
bank.slip(5, "wrong-accumulation", ('reduction="sum") / samples', 'reduction="sum") / samples * 1.5'))
bank.slip(5, "wrong-accumulation", ("in enumerate(micro_batches, 1)", "in list(enumerate(micro_batches, 1))[-1:]"))
bank.slip(5, "rate-not-number", ("return target\n", "return [target]\n"))
bank.slip(5, "nothing-returned", ("    return base + (target - base) * step / warmup_steps", ""))
bank.slip(5, "rate-not-scaled", ("target = base * batch / base_batch", "target = base"))
bank.slip(5, "rate-square-root", ("target = base * batch / base_batch", "target = base * (batch / base_batch) ** 0.5"))
bank.slip(5, "rate-no-warm-up", ("if step >= warmup_steps:", "if True:"))
bank.slip(
    5, "rate-from-zero", ("return base + (target - base) * step / warmup_steps", "return target * step / warmup_steps")
)
bank.slip(
    5, "rate-off-by-one", ("(target - base) * step / warmup_steps", "(target - base) * (step + 1) / warmup_steps")
)
bank.slip(
    5,
    "rate-goes-on",
    ("    if step >= warmup_steps:\n        return target\n", "    if not warmup_steps:\n        return target\n"),
)
bank.slip(
    5,
    "rate-no-warm-up-asked",
    ("    if step >= warmup_steps:\n        return target\n", ""),
    ("step / warmup_steps", "min(1, step / warmup_steps)"),
)
bank.slip(5, "rate-inverted", ("target = base * batch / base_batch", "target = base * base_batch / batch"))
bank.slip(
    5,
    None,
    ("for i, (x, y) in enumerate(micro_batches, 1):", "for i, (x, y) in enumerate(micro_batches[:], start=1):"),
    ("    optimizer.zero_grad()\n", "    model.zero_grad(set_to_none=True)\n"),
)


def accumulate(model, micro_batches, optimizer):
    """The flag of DDP, set by hand; the mean of the whole by weights; cleared after the step."""
    optimizer.zero_grad(set_to_none=False)
    total = sum(x.shape[0] for x, _ in micro_batches)
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (F.cross_entropy(model(x), y) * (x.shape[0] / total)).backward()
    x, y = micro_batches[-1]
    (F.cross_entropy(model(x), y) * (x.shape[0] / total)).backward()
    optimizer.step()
    optimizer.zero_grad()


def learning_rate(step, base, base_batch, batch, warmup_steps):
    scale = batch / base_batch
    done = min(step, warmup_steps) / warmup_steps if warmup_steps else 1.0
    return base * (1 + (scale - 1) * done)


bank.several(5, None, accumulate, learning_rate)


def accumulate_all_at_once(model, micro_batches, optimizer):
    optimizer.zero_grad()
    x, y = (torch.cat(part) for part in zip(*micro_batches))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def accumulate_one_graph(model, micro_batches, optimizer):
    optimizer.zero_grad()
    n = sum(len(y) for _, y in micro_batches)
    with model.no_sync():
        losses = [F.cross_entropy(model(x), y, reduction="sum") / n for x, y in micro_batches[:-1]]
    x, y = micro_batches[-1]
    (sum(losses) + F.cross_entropy(model(x), y, reduction="sum") / n).backward()
    optimizer.step()


bank.several(5, "not-accumulated", accumulate_all_at_once, learning_rate)
bank.several(5, "not-accumulated", accumulate_one_graph, learning_rate)
bank.slip(5, "rate-whole-numbers", ("base * batch / base_batch", "base * (batch // base_batch)"))
bank.slip(5, "rate-whole-numbers", ("base * batch / base_batch", "base * (batch // base_batch or batch / base_batch)"))
bank.slip(5, "rate-whole-numbers", ("base * batch / base_batch", "base * max(round(batch / base_batch), batch / base_batch)"))
bank.slip(5, "rate-whole-numbers", ("base * batch / base_batch", "base * int(batch / base_batch)"), variant=True)
bank.slip(
    5,
    "rate-smaller-batch",
    (
        "    if step >= warmup_steps:\n        return target\n    return base + (target - base) * step / warmup_steps",
        "    return min(target, base + (target - base) * step / warmup_steps) if warmup_steps else target",
    ),
)
bank.slip(
    3,
    "running-keeps-graph",
    ("        with torch.no_grad():\n            self.num", "        if True:\n            self.num"),
    (
        "self.running_mean.lerp_(mean, self.momentum)",
        "self.running_mean = torch.lerp(self.running_mean, mean, self.momentum)",
    ),
)


class WithContext(torch.autograd.Function):
    """Forward without ctx, as PyTorch allows since 2.0."""

    @staticmethod
    def forward(x):
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Normalise(torch.autograd.Function):
    """The whole layer by hand: moments gathered, backward from the formula, as libraries do it."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        c = x.shape[1]
        own = torch.cat([x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False), x.new_tensor([x.numel() / c])])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        means, variances, counts = torch.stack(parts).split([c, c, 1], dim=1)
        n = counts.sum()
        mean = (means * counts).sum(0) / n
        var = ((variances + (means - mean) ** 2) * counts).sum(0) / n
        inverse = torch.rsqrt(var + eps)
        normal = (x - mean[:, None, None]) * inverse[:, None, None]
        ctx.save_for_backward(normal, weight, inverse, n)
        ctx.mark_non_differentiable(mean, var, n)
        return normal * weight[:, None, None] + bias[:, None, None], mean, var, n

    @staticmethod
    def backward(ctx, gradient, *_):
        normal, weight, inverse, n = ctx.saved_tensors
        own = torch.stack([gradient.sum((0, 2, 3)), (gradient * normal).sum((0, 2, 3))])
        first, second = total = own.clone()
        dist.all_reduce(total)
        part = gradient - (first[:, None, None] + normal * second[:, None, None]) / n
        return part * (weight * inverse)[:, None, None], own[1], own[0], None


class LikeLibraries(nn.BatchNorm2d):
    def forward(self, x):
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        out, mean, var, n = Normalise.apply(x, self.weight, self.bias, self.eps)
        self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * mean
        self.running_var = (1 - self.momentum) * self.running_var + self.momentum * var * n / (n - 1)
        return out


bank.several(3, None, WithContext, LikeLibraries)


def accumulate_then_divide(model, micro_batches, optimizer):
    """Sums of losses; the gradients divided at the end; DDP's flag set by hand."""
    optimizer.zero_grad(set_to_none=True)
    samples = 0
    for left, (x, y) in zip(range(len(micro_batches) - 1, -1, -1), micro_batches):
        model.require_backward_grad_sync = left == 0
        F.cross_entropy(model(x), y, reduction="sum").backward()
        samples += y.numel()
    for p in model.parameters():
        p.grad.div_(samples)
    optimizer.step()


def rate_between(step, base, base_batch, batch, warmup_steps):
    part = 1.0 if warmup_steps == 0 else min(step / warmup_steps, 1.0)
    return (1 - part) * base + part * base * (batch / base_batch)


bank.several(5, None, accumulate_then_divide, rate_between)

bank.slip(3, "incoming-gradient-changed", ("total = gradient.clone()", "total = gradient"))


# gradients that a plain all-reduce does not see, an exchange that comes too early, what accumulation most often goes wrong by
bank.slip(
    3,
    "other-losses-left-out",
    (
        "sums = AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))",
        "sums = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])\n        dist.all_reduce(sums)",
    ),
)
bank.slip(
    3,
    "statistics-not-differentiated",
    ("        count = ", "        with torch.no_grad():\n            first, second = x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))\n        count = "),
    ("torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])", "torch.cat([first, second, count])"),
)  # fmt: skip
bank.slip(5, "exchanged-too-early", ("if i == len(micro_batches) else", "if i == 1 else"))
bank.slip(
    5,
    "cleared-each-time",
    ("            loss.backward()", "            optimizer.zero_grad()\n            loss.backward()"),
)
bank.slip(
    5,
    "cleared-each-time",
    ("            loss = F", "            model.zero_grad()\n            loss = F"),
    ('y, reduction="sum") / samples', "y) / len(micro_batches)"),
)
bank.slip(5, "sum-not-divided", ('reduction="sum") / samples', 'reduction="sum")'))
RISE = "base + (target - base) * step / warmup_steps"
bank.slip(5, "rate-geometric", (RISE, "base * (batch / base_batch) ** (step / warmup_steps)"))
bank.slip(5, "rate-wrong", (RISE, "base + (target - base) * (step / warmup_steps) ** 2"))


@bank.wrong(4, "heads-apart")
def make_parallel(network, device):
    """Only the part that all steps share is averaged."""
    network.to(device)
    network.trunk = DDP(network.trunk)
    return network


bank.slip(3, "equal-batches-assumed", ("x.numel() / x.shape[1]", "len(x) * 729.0"))
for kind in ("torch.half", "torch.bfloat16"):
    bank.slip(3, "count-rounded", ("x.new_tensor([x.numel() / x.shape[1]])", f"x.new_tensor([x.numel() / x.shape[1]], dtype={kind})"))

bank.slip(
    3, "norm-not-on-gpu", ("x.new_tensor([x.numel() / x.shape[1]])", "torch.tensor([x.numel() / x.shape[1]], dtype=x.dtype)")
)
