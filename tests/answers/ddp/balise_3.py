"""Answers to balise 3 of 09_ddp: batch norm over all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("09_ddp", 3)

# balise 3
FORWARD = "        total = x.clone()\n        dist.all_reduce(total)\n"

BACKWARD = "        total = gradient.clone()\n        dist.all_reduce(total)\n        return total"

bank.hint("not-summed", "AllReduceSum must return the sum of the ranks' tensors on every rank.")
bank.slip("not-summed", (FORWARD, "        total = x.clone()\n"))

bank.slip("not-summed", (FORWARD, FORWARD + "        total /= dist.get_world_size()\n"), variant=True)

bank.hint("all-reduce-input-changed", "AllReduceSum changed its input. all_reduce works in place: give it a copy.")
bank.slip("all-reduce-input-changed", ("total = x.clone()", "total = x"), variant=True)

bank.hint("gradient-of-own-rank", "The sum over all ranks depends on this rank's tensor, and so does the loss of "
          "every rank. backward has to sum the gradients of all ranks.")  # fmt: skip
bank.slip("gradient-of-own-rank", (BACKWARD, "        return gradient"), variant=True)

bank.hint("gradient-averaged", "You average the gradients. Each rank's loss depends on the sum, so the gradients add "
          "up.")  # fmt: skip
bank.slip("gradient-averaged", (BACKWARD, BACKWARD + " / dist.get_world_size()"), variant=True)

bank.hint("own-statistics", "The statistics are those of the rank's own batch. Compute mean and variance over the "
          "batches of all ranks.")  # fmt: skip
bank.slip(
    "own-statistics",
    (
        "AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))",
        "torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])",
    ),
    variant=True,
)

bank.hint("variances-averaged", "Your variance is the mean of the ranks' variances. It leaves out how far the ranks' "
          "means are apart: exchange the sums of x and of x², and the number of values.")  # fmt: skip
bank.slip("variances-averaged",
    ("sums = AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))", "sums = AllReduceSum.apply(torch.cat([x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)])) / dist.get_world_size()"),
    ("        n = sums[-1].detach()\n", "        n = count\n"),
    ("mean, square = (sums[:-1] / n).view(2, -1)", "mean, var = sums.view(2, -1)"),
    ("        var = square - mean**2\n", ""),
    variant=True,
)  # fmt: skip

bank.hint("equal-batches-assumed", "The result is right where all ranks have equally many images of the same size, "
          "but wrong elsewhere. Sum the number of values over the ranks too.")  # fmt: skip
bank.slip("equal-batches-assumed", ("n = sums[-1].detach()", "n = count * dist.get_world_size()"))

bank.slip("rank-failed", ("(sums[:-1] / n).view(2, -1)", "(sums[:6] / n).view(2, 3)"))

bank.hint("unbiased-normalised", "You normalise the output with the unbiased variance, over n − 1. Use this for "
          "running_var only; the output takes the mean of the squares, over n.")  # fmt: skip
bank.slip("unbiased-normalised", ("var = square - mean**2", "var = (square - mean**2) * n / (n - 1)"), variant=True)

bank.hint("normalised-wrong", "The output is not that of one batch norm over all ranks' images.")
bank.slip("normalised-wrong", ("torch.rsqrt(var + self.eps)", "torch.rsqrt(var + 1e-2)"), variant=True)

bank.hint("eps-ignored", "You use another eps for the output. The layer has its own: self.eps.")
bank.slip("eps-ignored", ("torch.rsqrt(var + self.eps)", "torch.rsqrt(var + 1e-5)"))

bank.slip("eps-ignored", ("torch.rsqrt(var + self.eps)", "torch.rsqrt(var)"), variant=True)

bank.hint("momentum-ignored", "You update {name} with another momentum than the layer's: use self.momentum.")
bank.slip("momentum-ignored", ("self.momentum", "0.1"), variant=True)

bank.hint("scale-forgotten", "The normalised values must still be multiplied by weight and shifted by bias.")
bank.slip("scale-forgotten", ("self.weight * torch.rsqrt", "torch.rsqrt"), ("self.bias - mean", "-mean"), variant=True)

bank.hint("statistics-not-differentiated", "The output is right, but the gradient of the input is not. Mean and "
          "variance depend on the input too: do not detach them, and do not compute them under no_grad.")  # fmt: skip
bank.slip(
    "statistics-not-differentiated",
    ("mean, square = (sums[:-1] / n).view(2, -1)", "mean, square = (sums[:-1] / n).detach().view(2, -1)"),
)

bank.hint("input-gradient-wrong", "The gradient of the input is not that of one batch norm over all ranks' images.")
bank.slip("input-gradient-wrong", ("var = square - mean**2", "var = (square - mean**2).detach()"), variant=True)

bank.hint("weight-gradient-wrong", "The gradient of the {name} is wrong. DDP averages it later: do not exchange it "
          "here.")  # fmt: skip
bank.slip("weight-gradient-wrong", ("scale = self.weight *", "scale = self.weight.detach() *"), variant=True)

bank.hint("running-not-updated", "In training, running_mean and running_var must move towards the batch's statistics.")
bank.slip(
    "running-not-updated",
    (
        "            self.running_mean.lerp_(mean, self.momentum)\n            self.running_var.lerp_(var * n / (n - 1), self.momentum)\n",
        "",
    ),
    variant=True,
)

bank.hint("running-biased", "running_var stores the unbiased variance, the sum of squares over n − 1. The output "
          "uses n.")  # fmt: skip
bank.slip("running-biased", ("var * n / (n - 1)", "var"), variant=True)

bank.hint("momentum-inverted", "You give the old value of {name} the weight momentum. It is the weight of the new "
          "value: (1 − momentum) · old + momentum · new.")  # fmt: skip
bank.slip(
    "momentum-inverted",
    ("self.running_mean.lerp_(mean, self.momentum)", "self.running_mean.lerp_(mean, 1 - self.momentum)"),
)

bank.slip("momentum-inverted", ("* n / (n - 1), self.momentum)", "* n / (n - 1), 1 - self.momentum)"), variant=True)

bank.hint("running-wrong", "{name} is not that of one batch norm over all ranks' images.")
bank.slip("running-wrong", ("lerp_(mean, self", "lerp_(mean * n / (n - 1), self"), variant=True)

bank.hint("eval-uses-batch", "In eval mode, normalise with the running statistics, not with the batch's.")
bank.slip(
    "eval-uses-batch",
    ("        if not self.training:\n            return super().forward(x)\n", ""),
    ("        with torch.no_grad():\n", "        if self.training:\n"),
    ("self.running_mean.lerp_(mean, self.momentum)", "self.running_mean.lerp_(mean.detach(), self.momentum)"),
    (
        "self.running_var.lerp_(var * n / (n - 1), self.momentum)",
        "self.running_var.lerp_((var * n / (n - 1)).detach(), self.momentum)",
    ),
    variant=True,
)

bank.hint("eval-talks", "In eval mode there is nothing to exchange, but you call {calls} collectives.")
bank.slip(
    "eval-talks",
    (
        "        if not self.training:\n            return super().forward(x)\n        count = x.new_tensor([x.numel() / x.shape[1]])\n",
        "        count = x.new_tensor([x.numel() / x.shape[1]])\n",
    ),
    (
        "        n = sums[-1].detach()\n",
        "        if not self.training:\n            return super().forward(x)\n        n = sums[-1].detach()\n",
    ),
    variant=True,
)

bank.hint("norm-dtype", "The output is in {dtype}, but the input was in {wanted}.")
bank.slip(
    "norm-dtype",
    (
        "        return x * scale[:, None, None] + shift[:, None, None]",
        "        return (x * scale[:, None, None] + shift[:, None, None]).double()",
    ),
    variant=True,
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


bank.hint("too-many-messages", "You call {calls} collectives in forward and backward. All that a rank has to send "
          "fits into one tensor: its sums and its count (or mean, variance and count, which are combined "
          "afterwards). Call one in each direction.")  # fmt: skip
bank.several("too-many-messages", GoodSum, ManyMessages)

bank.several("too-many-messages", GoodSum, OneByOne)

bank.several(None, GoodSum, Merged)

bank.hint("activations-exchanged", "A rank sent {sent} bytes. Sums for each channel are enough: about {fair} bytes.")
bank.several("activations-exchanged", GoodSum, Gathers, variant=True)

bank.several("too-many-messages", GoodSum, TwoPasses)

bank.slip("too-many-messages",
    ("AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))", "AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))]))\n        dist.all_reduce(count)"),
    ("n = sums[-1].detach()", "n = count"),
    ("(sums[:-1] / n)", "(sums / n)"),
    variant=True,
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


bank.several(None, GoodSum, Shifted)

bank.slip(
    None,
    (
        "x.new_tensor([x.numel() / x.shape[1]])",
        "torch.full((1,), x.shape[0] * x.shape[2] * x.shape[3], dtype=x.dtype, device=x.device)",
    ),
)

bank.hint("running-keeps-graph", "running_mean and running_var keep their graph, which grows with every step. Update "
          "them under torch.no_grad().")  # fmt: skip
bank.slip(
    "running-keeps-graph",
    ("        with torch.no_grad():\n            self.num", "        if True:\n            self.num"),
    (
        "self.running_mean.lerp_(mean, self.momentum)",
        "self.running_mean = torch.lerp(self.running_mean, mean, self.momentum)",
    ),
    variant=True,
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


bank.several(None, WithContext, LikeLibraries)

bank.hint("incoming-gradient-changed", "backward changed the gradient it was given, which may be used elsewhere. "
          "Give all_reduce a copy here too.")  # fmt: skip
bank.slip("incoming-gradient-changed", ("total = gradient.clone()", "total = gradient"), variant=True)

# gradients that a plain all-reduce does not see, an exchange that comes too early, what accumulation most often goes wrong by
bank.hint("other-losses-left-out", "The output is right, but the gradient of the input is not: it includes only the "
          "loss of its own rank. The sums of this rank enter the losses of all ranks. A plain dist.all_reduce hides "
          "this from autograd, AllReduceSum.apply does not.")  # fmt: skip
bank.slip(
    "other-losses-left-out",
    (
        "sums = AllReduceSum.apply(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))",
        "sums = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])\n        dist.all_reduce(sums)",
    ),
    variant=True,
)

bank.slip("statistics-not-differentiated",
    ("        count = ", "        with torch.no_grad():\n            first, second = x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))\n        count = "),
    ("torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count])", "torch.cat([first, second, count])"),
    variant=True,
)  # fmt: skip

bank.slip("equal-batches-assumed", ("x.numel() / x.shape[1]", "len(x) * 729.0"), variant=True)

bank.hint("count-rounded", "The number of values is rounded: in 16 bits you can count only to 2,048 (float16) or 256 "
          "(bfloat16). Count in float32.")  # fmt: skip
for kind in ("torch.half", "torch.bfloat16"):
    bank.slip(
        "count-rounded",
        ("x.new_tensor([x.numel() / x.shape[1]])", f"x.new_tensor([x.numel() / x.shape[1]], dtype={kind})"),
        variant=True,
    )

bank.hint("norm-not-on-gpu", "On GPUs, you exchange a tensor in the CPU's memory: {error}. Create a rank's own count "
          "on the device of x, by x.new_tensor for example.")  # fmt: skip
bank.slip(
    "norm-not-on-gpu",
    ("x.new_tensor([x.numel() / x.shape[1]])", "torch.tensor([x.numel() / x.shape[1]], dtype=x.dtype)"),
    variant=True,
)
