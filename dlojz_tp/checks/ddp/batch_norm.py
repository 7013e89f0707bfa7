"""Balise 3: batch norm over the batches of all ranks, forward and backward."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.probes.ranks import by_world
from dlojz_tp.probes.traffic import Traffic
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "not-summed": "AllReduceSum must return the sum of the ranks' tensors on every rank.",
    "all-reduce-input-changed": "AllReduceSum changed its input. all_reduce works in place: give it a copy.",
    "incoming-gradient-changed": "backward changed the gradient it was given, which may be used elsewhere. Give "
                                 "all_reduce a copy here too.",
    "gradient-of-own-rank": "The sum over all ranks depends on this rank's tensor, and so does the loss of every "
                            "rank. backward has to sum the gradients of all ranks.",
    "gradient-averaged": "You average the gradients. Each rank's loss depends on the sum, so the gradients add up.",
    "own-statistics": "The statistics are those of the rank's own batch. Compute mean and variance over the "
                      "batches of all ranks.",
    "variances-averaged": "Your variance is the mean of the ranks' variances. It leaves out how far the ranks' "
                          "means are apart: exchange the sums of x and of x², and the number of values.",
    "equal-batches-assumed": "The result is right where all ranks have equally many images of the same size, but "
                             "wrong elsewhere. Sum the number of values over the ranks too.",
    "count-rounded": "The number of values is rounded: in 16 bits you can count only to 2,048 (float16) or 256 "
                     "(bfloat16). Count in float32.",
    "normalised-wrong": "The output is not that of one batch norm over all ranks' images.",
    "unbiased-normalised": "You normalise the output with the unbiased variance, over n − 1. Use this for "
                           "running_var only; the output takes the mean of the squares, over n.",
    "eps-ignored": "You use another eps for the output. The layer has its own: self.eps.",
    "momentum-inverted": "You give the old value of {name} the weight momentum. It is the weight of the new value: "
                         "(1 − momentum) · old + momentum · new.",
    "momentum-ignored": "You update {name} with another momentum than the layer's: use self.momentum.",
    "scale-forgotten": "The normalised values must still be multiplied by weight and shifted by bias.",
    "statistics-not-differentiated": "The output is right, but the gradient of the input is not. Mean and variance "
                                     "depend on the input too: do not detach them, and do not compute them under "
                                     "no_grad.",
    "other-losses-left-out": "The output is right, but the gradient of the input is not: it includes only the loss "
                             "of its own rank. The sums of this rank enter the losses of all ranks. A plain "
                             "dist.all_reduce hides this from autograd, AllReduceSum.apply does not.",
    "input-gradient-wrong": "The gradient of the input is not that of one batch norm over all ranks' images.",
    "weight-gradient-wrong": "The gradient of the {name} is wrong. DDP averages it later: do not exchange it here.",
    "running-not-updated": "In training, running_mean and running_var must move towards the batch's statistics.",
    "running-keeps-graph": "running_mean and running_var keep their graph, which grows with every step. Update "
                           "them under torch.no_grad().",
    "running-biased": "running_var stores the unbiased variance, the sum of squares over n − 1. The output uses n.",
    "running-wrong": "{name} is not that of one batch norm over all ranks' images.",
    "eval-uses-batch": "In eval mode, normalise with the running statistics, not with the batch's.",
    "eval-talks": "In eval mode there is nothing to exchange, but you call {calls} collectives.",
    "activations-exchanged": "A rank sent {sent} bytes. Sums for each channel are enough: about {fair} bytes.",
    "too-many-messages": "You call {calls} collectives in forward and backward. All that a rank has to send fits "
                         "into one tensor: its sums and its count (or mean, variance and count, which are combined "
                         "afterwards). Call one in each direction.",
    "norm-not-on-gpu": "On GPUs, you exchange a tensor in the CPU's memory: {error}. Create a rank's own count on "
                       "the device of x, by x.new_tensor for example.",
    "norm-dtype": "The output is in {dtype}, but the input was in {wanted}.",
}

CHANNELS, EPS, MOMENTUM = 3, 0.003, 0.25


def balise_3(all_reduce_sum, sync_batch_norm):
    """The function alone; then the layer in worlds of 1 to 4 against nn.BatchNorm2d on the whole batch, in float64."""
    torch.set_num_threads(1)  # small truths: threads would only wait for each other; judge() puts the number back
    yield from by_world(_judge, _normalised, all_reduce_sum, sync_batch_norm, timeout=20)
    yield "the same where each rank has a GPU"
    on_gpus(_on_gpu, sync_batch_norm, known=left_on_cpu("norm-not-on-gpu"))


def _on_gpu(_, sync_batch_norm):
    norm = sync_batch_norm(CHANNELS).to(launch.device())
    x = _images(dist.get_rank(), "uneven").float().to(launch.device()).requires_grad_()
    norm(x).square().sum().backward()


def _judge(size, ranks):
    yield "AllReduceSum: the sum over the ranks forward, the sum of their gradients backward"
    _right_sums(size, ranks)
    yield "the output is that of one batch norm over all ranks' images, equally many on each rank"
    _right_outputs(size, ranks, "even")
    yield "the same with batches of different sizes"
    _right_outputs(size, ranks, "uneven")
    yield "gradients of input, weight and bias"
    for case in ("even", "uneven"):
        _right_gradients(size, ranks, case)
    yield "running statistics after two batches; eval mode uses them and exchanges nothing"
    _right_running(size, ranks)
    yield "a few numbers for each channel are exchanged, in few messages"
    _right_messages(size, ranks)


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


def _normalised(all_reduce_sum, sync_batch_norm):
    rank = dist.get_rank()
    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    with Withheld() as running:
        total = all_reduce_sum.apply(x)
        value = total.detach().clone()
        (total * (rank + 1.0)).sum().backward()
        gradient = None if x.grad is None else x.grad.clone()
    running.left()
    incoming = torch.tensor([rank + 1.0, 1.0], dtype=torch.float64)
    other = before.clone().requires_grad_()
    torch.autograd.grad(all_reduce_sum.apply(other), other, grad_outputs=incoming, allow_unused=True)
    found = {
        "gradient changed": not close(incoming, torch.tensor([rank + 1.0, 1.0], dtype=torch.float64)),
        "sum": value,
        "sum gradient": gradient,
        "changed": not torch.equal(before, x.detach()),
    }
    for case in ("even", "uneven"):
        norm = _prepare(sync_batch_norm(CHANNELS))
        x = _images(rank, case).requires_grad_()
        with Withheld() as running, Traffic() as traffic:
            out = norm(x)
            (out * _upstream(rank, case)).sum().backward()
        running.left()
        found["keeps graph"] = norm.running_mean.requires_grad or norm.running_var.requires_grad
        gradients = {"input": x.grad, "weight": norm.weight.grad, "bias": norm.bias.grad}
        found[case] = {"out": out.detach(), **gradients, "calls": traffic.names(), "sent": traffic.volume()}
    norm.train()
    with torch.no_grad():
        norm(_images(rank, case, step=1))
    found["running"] = {"running_mean": norm.running_mean.clone(), "running_var": norm.running_var.clone()}
    norm.eval()
    with torch.no_grad(), Traffic() as traffic:
        out = norm(_images(rank, case))
    found["eval"] = (out, norm.running_mean.clone(), traffic.names())
    found["dtype"] = sync_batch_norm(CHANNELS + 2)(torch.ones(rank + 2, CHANNELS + 2, 2, 3)).dtype  # other channels
    return found


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
    return out.detach().split(sizes), x.grad.split(sizes), norm


def _right_sums(size, ranks):
    total = sum(torch.tensor([1.0 + rank, 2.0], dtype=torch.float64) for rank in range(size))
    gradient = torch.full((2,), size * (size + 1) / 2, dtype=torch.float64)
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}"
        if not close(found["sum"], total):
            raise Wrong("not-summed", expected=total, got=found["sum"], where=where)
        if found["changed"]:
            raise Wrong("all-reduce-input-changed", where=where)
        got = found["sum gradient"]
        if got is None or not close(got, gradient):
            averaged = got is not None and size > 1 and close(got, gradient / size)
            slug = "gradient-averaged" if averaged else "gradient-of-own-rank"
            raise Wrong(slug, expected=gradient, got=got if got is not None else "no gradient", where=where)
        if found["gradient changed"]:
            raise Wrong("incoming-gradient-changed", where=where)


def _right_outputs(size, ranks, case):
    outs, *_ = _truth(size, case)
    for rank, found in enumerate(ranks):
        got, where = found[case]["out"], f"rank {rank} of {size}, {len(outs[rank])} images"
        if close(got, outs[rank], 1e-7):
            continue
        raise Wrong(_mistake(size, rank, case, got), expected=outs[rank], got=got, where=where)


def _mistake(size, rank, case, got):
    parts = [_images(r, case) for r in range(size)]
    x, own = torch.cat(parts), parts[rank]
    weight, bias = (
        p.detach().view(1, -1, 1, 1)
        for p in (_prepare(nn.BatchNorm2d(CHANNELS)).weight, _prepare(nn.BatchNorm2d(CHANNELS)).bias)
    )

    def normalised(mean, var, eps=EPS):
        return (own - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + eps).sqrt()

    def moments(values):
        return values.mean((0, 2, 3)), values.var((0, 2, 3), unbiased=False)

    each = [moments(part) for part in parts]
    means, variances = torch.stack([m for m, _ in each]), torch.stack([v for _, v in each])
    squares = torch.stack([(part**2).mean((0, 2, 3)) for part in parts])
    if close(got, normalised(*moments(x)), 1e-7):
        return "scale-forgotten"
    for dtype in (torch.float16, torch.bfloat16):
        counts = torch.tensor([part[:, 0].numel() for part in parts], dtype=dtype)
        totals = sum(counts), counts.double().sum(), torch.tensor(x[:, 0].numel(), dtype=dtype)
        off = [x[:, 0].numel() / float(total) for total in totals]
        mean, square = x.mean((0, 2, 3)), x.square().mean((0, 2, 3))
        if any(close(got, normalised(mean * k, square * k - (mean * k) ** 2) * weight + bias, 1e-7) for k in off):
            return "count-rounded"
    if close(got, normalised(x.mean((0, 2, 3)), x.var((0, 2, 3))) * weight + bias, 1e-7):
        return "unbiased-normalised"
    if any(close(got, normalised(*moments(x), eps) * weight + bias, 1e-7) for eps in (0.0, 1e-5, 1e-6, 1e-8)):
        return "eps-ignored"
    if size > 1:
        known = {
            "own-statistics": moments(own),
            "variances-averaged": (means.mean(0), variances.mean(0)),
            "equal-batches-assumed": (means.mean(0), squares.mean(0) - means.mean(0) ** 2),
        }
        for slug, (mean, var) in known.items():
            if close(got, normalised(mean, var) * weight + bias, 1e-7):
                return slug
        if case == "uneven":
            return "equal-batches-assumed"
    return "normalised-wrong"


def _right_gradients(size, ranks, case):
    _, inputs, norm = _truth(size, case)
    for rank, found in enumerate(ranks):
        got, where = found[case]["input"], f"rank {rank} of {size}"
        if got is None or not close(got, inputs[rank], 1e-7):
            slug = "statistics-not-differentiated" if got is None else _named_gradient(size, rank, case, got)
            raise Wrong(slug, expected=inputs[rank], got=got if got is not None else "no gradient", where=where)
    for name in ("weight", "bias"):
        parts = [found[case][name] for found in ranks]
        wanted = getattr(norm, name).grad
        if any(part is None for part in parts) or not close(sum(parts), wanted, 1e-7):
            raise Wrong("weight-gradient-wrong", expected=wanted, where=f"{size} ranks, summed", name=name)


def _named_gradient(size, rank, case, got):
    """Whether the gradient is the one that takes mean and variance for constants, or the parts that other ranks have in them."""
    norm = _prepare(nn.BatchNorm2d(CHANNELS))
    parts = [_images(r, case) for r in range(size)]
    for slug, constant in (("statistics-not-differentiated", True), ("other-losses-left-out", False)):
        own = parts[rank].clone().requires_grad_()
        x = torch.cat([*parts[:rank], own.detach() if constant else own, *parts[rank + 1 :]])
        mean, var = (value.view(1, -1, 1, 1) for value in (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)))
        out = (own - mean) / (var + EPS).sqrt() * norm.weight.detach().view(1, -1, 1, 1)
        (gradient,) = torch.autograd.grad((out * _upstream(rank, case)).sum(), own)
        if close(got, gradient, 1e-7):
            return slug
    return "input-gradient-wrong"


def _right_running(size, ranks):
    *_, norm = _truth(size, "uneven")
    n = sum(_images(rank, "uneven")[:, 0].numel() for rank in range(size))
    fresh, kept = nn.BatchNorm2d(CHANNELS).double(), (1 - MOMENTUM) ** 2
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}"
        if found["keeps graph"]:
            raise Wrong("running-keeps-graph", where=where)
        for name, got in found["running"].items():
            wanted = getattr(norm, name)
            if close(got, wanted, 1e-7):
                continue
            slug = "running-wrong"
            if close(got, getattr(fresh, name), 1e-12):
                slug = "running-not-updated"
            elif name == "running_var" and close((got - kept) * n / (n - 1) + kept, wanted, 1e-7):
                slug = "running-biased"
            elif close(got, _moved(size, 0.1)[name], 1e-7):
                slug = "momentum-ignored"
            elif close(got, _moved(size, 1 - MOMENTUM)[name], 1e-7):
                slug = "momentum-inverted"
            raise Wrong(slug, expected=wanted, got=got, where=where, name=name)
        out, after, calls = found["eval"]
        x = _images(rank, "uneven")
        mean, var = (getattr(norm, name).view(1, -1, 1, 1) for name in ("running_mean", "running_var"))
        wanted = (x - mean) / (var + EPS).sqrt() * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)
        if not close(out, wanted.detach(), 1e-7) or not close(after, norm.running_mean, 1e-7):
            raise Wrong("eval-uses-batch", expected=wanted.detach(), got=out, where=where)
        if calls:
            raise Wrong("eval-talks", where=where, calls=len(calls))
        if found["dtype"] != torch.float32:
            raise Wrong("norm-dtype", where=where, dtype=found["dtype"], wanted=torch.float32)


def _moved(size, momentum):
    """The running statistics after the two uneven batches, with this momentum."""
    norm = nn.BatchNorm2d(CHANNELS, momentum=momentum).double()
    for step in (0, 1):
        norm(torch.cat([_images(rank, "uneven", step) for rank in range(size)]))
    return norm.state_dict()


def _right_messages(size, ranks):
    fair = 2 * 8 * (2 * CHANNELS + 1)  # bytes: two sums a channel and a count, each way, in float64
    for rank, found in enumerate(ranks):
        for case in ("even", "uneven"):
            where, seen = f"rank {rank} of {size}, {case} batches", found[case]
            if seen["sent"] > 2 * fair:
                raise Wrong("activations-exchanged", where=where, sent=seen["sent"], fair=fair)
            if len(seen["calls"]) > 2:
                raise Wrong("too-many-messages", where=where, calls=len(seen["calls"]))
