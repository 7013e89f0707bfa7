"""Balise 3: batch norm over the batches of all ranks, forward and backward."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import close, mistake_of
from dlojz_tp.judging.checking.looks import Look, at_most, silent, within
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.shared_looks import each_rank, judged_on_ranks
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.judging.probes.withheld import Withheld

CHANNELS, EPS, MOMENTUM = 3, 0.003, 0.25
CASES = "even", "uneven"


def _images(rank, case, step=0):
    """Images of one rank, (3, 3, 27, 27) or (rank + 1, 3, 2, 3); each rank has another mean and spread.

    A channel has 2,187 values in the first: 16 bits have no such number.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = (3, CHANNELS, 27, 27) if case == "even" else (rank + 1, CHANNELS, 2, 3)
    return torch.randn(sizes, generator=generator, dtype=torch.float64) * (1 + rank / 2) + 3 * rank - step


def _upstream(rank, case):
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(_images(rank, case).shape, generator=generator, dtype=torch.float64)


def _prepare(norm):
    norm.eps, norm.momentum = EPS, MOMENTUM
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
        norm.bias.copy_(torch.tensor([0.1, 0.0, -0.3]))
    return norm.double()


def observe(all_reduce_sum, sync_batch_norm):
    """On a rank: the function alone; then the layer on two batches, and in eval mode."""
    rank = dist.get_rank()
    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    with Withheld() as running:
        total = all_reduce_sum.apply(x)
        value = total.detach().clone()
        (total * (rank + 1.0)).sum().backward()
        gradient = "no gradient" if x.grad is None else x.grad.clone()
    running.left()
    incoming = torch.tensor([rank + 1.0, 1.0], dtype=torch.float64)
    other = before.clone().requires_grad_()
    torch.autograd.grad(all_reduce_sum.apply(other), other, grad_outputs=incoming, allow_unused=True)
    found = {"sum": value, "changed": not torch.equal(before, x.detach()), "sum gradient": gradient,
             "gradient changed": not close(incoming, torch.tensor([rank + 1.0, 1.0], dtype=torch.float64))}  # fmt: skip
    for case in CASES:
        norm = _prepare(sync_batch_norm(CHANNELS))
        x = _images(rank, case).requires_grad_()
        with Withheld() as running, Traffic() as traffic:
            out = norm(x)
            (out * _upstream(rank, case)).sum().backward()
        running.left()
        found["keeps graph"] = norm.running_mean.requires_grad or norm.running_var.requires_grad
        for name, p in (("input", x), ("weight", norm.weight), ("bias", norm.bias)):
            found[f"{case} {name}"] = "no gradient" if p.grad is None else p.grad
        found |= {case: out.detach(), f"{case} calls": len(traffic.names()), f"{case} sent": traffic.volume()}
    norm.train()
    with torch.no_grad():
        norm(_images(rank, case, step=1))
    found |= {"running_mean": norm.running_mean.clone(), "running_var": norm.running_var.clone()}
    norm.eval()
    with torch.no_grad(), Traffic() as traffic:
        out = norm(_images(rank, case))
    dtype = sync_batch_norm(CHANNELS + 2)(torch.ones(rank + 2, CHANNELS + 2, 2, 3)).dtype  # other channels
    return found | {
        "eval": out,
        "mean after eval": norm.running_mean.clone(),
        "eval calls": len(traffic.names()),
        "dtype": dtype,
    }


@functools.cache
def _truth(size, case):
    """One nn.BatchNorm2d over all ranks' images: (outputs, input gradients, the layer after two batches)."""
    norm = _prepare(nn.BatchNorm2d(CHANNELS))
    parts = [_images(rank, case) for rank in range(size)]
    x = torch.cat(parts).requires_grad_()
    out = norm(x)
    (out * torch.cat([_upstream(rank, case) for rank in range(size)])).sum().backward()
    with torch.no_grad():
        norm(torch.cat([_images(rank, case, step=1) for rank in range(size)]))
    sizes = [len(part) for part in parts]
    return [*out.detach().split(sizes)], [*x.grad.split(sizes)], norm


def _first(seen, due):
    """The first rank that differs from its truth."""
    return next((rank for rank, pair in enumerate(zip(seen, due)) if not close(*pair, 1e-7)), 0)


def _at(seen, due):
    rank = _first(seen, due)
    return {"where": f"rank {rank} of {len(seen)}", "expected": due[rank], "got": seen[rank]}


def _each(claim, key, due, hint, *, name=""):
    """A Look at what each rank has; due(size): a list of the ranks' own truths, or one of all."""

    def truths(size):
        return due(size) if isinstance(due(size), list) else [due(size)] * size

    return Look(claim, key, truths, hint, holds=within(1e-7), fields=lambda *both: _at(*both) | {"name": name})


def _sum_gradient(seen, due):
    rank, size = _first(seen, due), len(seen)
    return "gradient-averaged" if size > 1 and close(seen[rank], due[rank] / size) else "gradient-of-own-rank"


def _outputs(case):
    def hint(seen, due):
        """By which wrong statistics, or with which wrong numbers, the first wrong output was made."""
        rank, size = _first(seen, due), len(seen)
        parts, norm = [_images(r, case) for r in range(size)], _prepare(nn.BatchNorm2d(CHANNELS))

        def made(mean, var, eps=EPS, weight=norm.weight, bias=norm.bias):
            return F.batch_norm(parts[rank], mean, var, weight, bias, eps=eps)

        x, each = torch.cat(parts), [_moments(part) for part in parts]
        (mean, var, square), means = _moments(x), [torch.stack(several).mean(0) for several in zip(*each)]
        rounded = [total for dtype in (torch.float16, torch.bfloat16) for total in _counts(parts, dtype)]
        known = [
            ("scale-forgotten", made(mean, var, weight=None, bias=None)),
            *(("count-rounded", made(mean * k, square * k - (mean * k) ** 2)) for k in rounded),
            ("unbiased-normalised", made(mean, x.var((0, 2, 3)))),
            *(("eps-ignored", made(mean, var, eps)) for eps in (0.0, 1e-5, 1e-6, 1e-8)),
            ("own-statistics", made(*each[rank][:2])), ("variances-averaged", made(*means[:2])),
            ("equal-batches-assumed", made(means[0], means[2] - means[0] ** 2)),
        ]  # fmt: skip
        other = "equal-batches-assumed" if size > 1 and case == "uneven" else "normalised-wrong"
        return next((slug for slug, value in known if close(seen[rank], value, 1e-7)), other)

    return hint


def _moments(x):
    """Mean, variance and mean of the squares of each channel."""
    return x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False), x.square().mean((0, 2, 3))


def _counts(parts, dtype):
    """The number of values, in parts of what comes out where it is counted in this dtype."""
    counts = torch.tensor([part[:, 0].numel() for part in parts], dtype=dtype)
    n = sum(part[:, 0].numel() for part in parts)
    return [n / float(total) for total in (sum(counts), counts.double().sum(), torch.tensor(n, dtype=dtype))]


def _gradient(case):
    def hint(seen, due):
        """Whether the first wrong one takes for constants mean and variance, or what other ranks have in them."""
        rank, norm = _first(seen, due), _prepare(nn.BatchNorm2d(CHANNELS))
        if isinstance(seen[rank], str):
            return "statistics-not-differentiated"
        parts = [_images(r, case) for r in range(len(seen))]
        for slug, constant in (("statistics-not-differentiated", True), ("other-losses-left-out", False)):
            own = parts[rank].clone().requires_grad_()
            x = torch.cat([*parts[:rank], own.detach() if constant else own, *parts[rank + 1 :]])
            mean, var = (value.view(1, -1, 1, 1) for value in _moments(x)[:2])
            out = (own - mean) / (var + EPS).sqrt() * norm.weight.detach().view(1, -1, 1, 1)
            (gradient,) = torch.autograd.grad((out * _upstream(rank, case)).sum(), own)
            if close(seen[rank], gradient, 1e-7):
                return slug
        return "input-gradient-wrong"

    return hint


def _sum_is(seen, due):
    return not any(isinstance(g, str) for g in seen) and close(sum(seen), due, 1e-7)


def _of_all(case, name):
    """A look at the gradient of the weight or the bias, summed over the ranks."""

    def about(seen, _):
        return {"got": "", "where": f"{len(seen)} ranks, summed", "name": name}

    return Look("", f"{case} {name}", lambda size: getattr(_truth(size, case)[2], name).grad, "weight-gradient-wrong",
                holds=_sum_is, fields=about)  # fmt: skip


def _running(name):
    def hint(seen, due):
        rank, size = _first(seen, due), len(seen)
        got, kept = seen[rank], (1 - MOMENTUM) ** 2
        n = sum(_images(r, "uneven")[:, 0].numel() for r in range(size))
        if close(got, getattr(nn.BatchNorm2d(CHANNELS).double(), name), 1e-12):
            return "running-not-updated"
        if name == "running_var" and close((got - kept) * n / (n - 1) + kept, due[rank], 1e-7):
            return "running-biased"
        known = {"momentum-ignored": _moved(size, 0.1)[name], "momentum-inverted": _moved(size, 1 - MOMENTUM)[name]}
        return mistake_of(got, known, "running-wrong", 1e-7)

    return _each("", name, lambda size: getattr(_truth(size, "uneven")[2], name), hint, name=name)


def _moved(size, momentum):
    """The running statistics after the two uneven batches, with this momentum."""
    norm = nn.BatchNorm2d(CHANNELS, momentum=momentum).double()
    for step in (0, 1):
        norm(torch.cat([_images(rank, "uneven", step) for rank in range(size)]))
    return norm.state_dict()


def _evaluated(size):
    norm = _truth(size, "uneven")[2].eval()
    with torch.no_grad():
        return [norm(_images(rank, "uneven")) for rank in range(size)]


FAIR = 2 * 8 * (2 * CHANNELS + 1)  # bytes: two sums a channel and a count, each way, in float64


def _messages(claim, case):
    return [
        each_rank(claim, f"{case} sent", 2 * FAIR, "activations-exchanged", holds=at_most,
                  fields=lambda got, due: {"sent": got, "fair": FAIR} | silent(got, due)),
        each_rank("", f"{case} calls", 2, "too-many-messages", holds=at_most,
                  fields=lambda got, due: {"calls": got} | silent(got, due)),
    ]  # fmt: skip


LOOKS = [
    each_rank("AllReduceSum: the sum over the ranks forward, the sum of their gradients backward", "sum",
              lambda size: torch.tensor([size * (size + 1) / 2, 2.0 * size], dtype=torch.float64), "not-summed"),
    each_rank("", "changed", False, "all-reduce-input-changed", fields=silent),
    _each("", "sum gradient", lambda size: torch.full((2,), size * (size + 1) / 2, dtype=torch.float64), _sum_gradient),
    each_rank("", "gradient changed", False, "incoming-gradient-changed", fields=silent),
    _each("the output is that of one batch norm over all ranks' images, equally many on each rank", "even",
          lambda size: _truth(size, "even")[0], _outputs("even")),
    _each("the same with batches of different sizes", "uneven",
          lambda size: _truth(size, "uneven")[0], _outputs("uneven")),
    _each("gradients of input, weight and bias", "even input", lambda size: _truth(size, "even")[1], _gradient("even")),
    _of_all("even", "weight"), _of_all("even", "bias"),
    _each("", "uneven input", lambda size: _truth(size, "uneven")[1], _gradient("uneven")),
    _of_all("uneven", "weight"), _of_all("uneven", "bias"),
    each_rank("running statistics after two batches; eval mode uses them and exchanges nothing",
              "keeps graph", False, "running-keeps-graph", fields=silent),
    _running("running_mean"), _running("running_var"),
    _each("", "eval", _evaluated, "eval-uses-batch"),
    _each("", "mean after eval", lambda size: _truth(size, "uneven")[2].running_mean, "eval-uses-batch"),
    each_rank("", "eval calls", 0, "eval-talks", fields=lambda got, due: {"calls": got} | silent(got, due)),
    each_rank("", "dtype", torch.float32, "norm-dtype", fields=lambda got, due: {"dtype": got, "wanted": due}),
    *_messages("a few numbers for each channel are exchanged, in few messages", "even"), *_messages("", "uneven"),
]  # fmt: skip


def _on_gpu(_, sync_batch_norm):
    norm = sync_batch_norm(CHANNELS).to(launch.device())
    x = _images(dist.get_rank(), "uneven").float().to(launch.device()).requires_grad_()
    norm(x).square().sum().backward()


def balise_3(all_reduce_sum, sync_batch_norm):
    """The function alone; then the layer in worlds of 1 to 4 against nn.BatchNorm2d on the whole batch, in float64."""
    yield from judged_on_ranks(LOOKS, observe, all_reduce_sum, sync_batch_norm, timeout=20)
    yield "the same where each rank has a GPU"
    on_gpus(_on_gpu, sync_batch_norm, known=left_on_cpu("norm-not-on-gpu"))
