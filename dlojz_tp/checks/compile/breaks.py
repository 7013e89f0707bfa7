"""Balise 3: a model without graph breaks, against the plain computation in float64."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.compile.fresh import Graphs, fresh

HINTS = {
    "layers-differ": "Mended must keep Chatty's layers under their names, first (16 to 32) and second (32 to 4): "
                     "{error}",
    "no-buffer": "There is no buffer `peak` of shape (). Create one with register_buffer in __init__.",
    "more-state": "{what} is more than Chatty's two layers and the buffer `peak`.",
    "logits-differ": "The logits are not those of Chatty.",
    "scale-missing": "The logits lack the last factor: 1 + the share of activations above their mean.",
    "share-as-count": "The last factor is 1 + the *share* of activations above the mean, not their number.",
    "one-missing": "The last factor is 1 + the share of activations above their mean: the 1 is missing.",
    "row-means": "The mean is taken over all activations of the batch, not for each row.",
    "not-above": "An activation that equals the mean is not above it: use >, not >=.",
    "tanh-gelu": "F.gelu computes the exact GELU unless you ask for the tanh approximation.",
    "never-divided": "The numbers are not divided by their norm when it is larger than 0.",
    "row-norms": "The norm is taken over all numbers of the batch together, not for each row.",
    "no-gelu-here": "The activation is missing: apply F.gelu after the division.",
    "gelu-before": "Apply the activation after the division by the norm, not before it.",
    "gradients-differ": "The logits are right, but their gradients are not: a part was cut off from the graph "
                        "(detach, no_grad, .data).",
    "nan-logits": "When all numbers are zero, the logits are NaN: zero is divided by zero.",
    "nan-gradients": "When all numbers are zero, some gradients are NaN. torch.where sends gradients through both "
                     "sides, and 0 × ∞ is NaN: make the divisor harmless *before* you take the root, and before "
                     "the division.",
    "zero-gradients": "When all numbers are zero, some gradients are wrong. Chatty divides by nothing then: h "
                      "stays as it is, and so does its gradient.",
    "epsilon": "You add a small number to the norm, or keep the norm above one. Small numbers then come out too "
               "small: the logits must be those of Chatty for every input.",
    "still-prints": "Dynamo stops at a print: {line}",
    "still-item": "Dynamo stops where a number leaves its tensor: {line}",
    "still-branches": "Dynamo stops where Python's `if` depends on the numbers in a tensor: {line}. Compute both sides, and "
    "choose with torch.where.",
    "still-selects": "Dynamo stops where the shape of a result depends on the numbers: {line}. You can count "
                     "elements without taking any out.",
    "breaks-left": "The graph still breaks at {line}. Dynamo says: {reason}",
    "not-traced": "Dynamo captured nothing: it was told to leave this function alone. Nothing can be fused then.",
    "compiled-differs": "The compiled network gives different results from the uncompiled one.",
    "graph-again": "{n} inputs of one shape gave {n_graphs} graphs: something that a guard checks changes with "
                   "each call.",
    "peak-wrong": "The buffer `peak` must hold the largest activation of the last call, as `second` receives it.",
    "peak-list": "A Python list grows with each call, and a guard checks it. Keep only the last number, in the buffer.",
    "peak-graph": "The buffer `peak` still has its graph, which keeps the activations of its step alive. Call "
                  "detach() on it.",
    "peak-lost": "`peak` is no longer a buffer after a call: to(device) would leave it behind.",
}


def balise_3(Mended):  # noqa: N803  (the answer is a class)
    """Both sides of the branch; values and gradients; then what Dynamo says."""
    yield "Chatty's layers, and the buffer `peak`"
    model = _model(Mended)
    yield "Chatty's logits and gradients, for ordinary and for tiny numbers"
    for x in (_random(8, 1), _random(5, 2), _random(1, 3)):
        _same(model, x)
    small = _model(Mended, bias=0.0)
    _same(small, 1e-5 * _random(6, 4))
    _same(small, 1e-10 * _random(6, 4))
    _same(_lonely(Mended), _random(1, 5), tol=5e-6)
    yield "all numbers are zero: the branch that is not taken"
    _same(small, torch.zeros(4, 16))
    yield "the largest activation is in the buffer, without a graph"
    _peak(model)
    yield "Dynamo captures one graph"
    with fresh():
        _one_graph(small)


def _random(rows, seed):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def _model(mended, bias=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mended()
    if not isinstance(model, nn.Module):
        raise Wrong("layers-differ", error=f"an instance is {type(model).__name__}, not a torch.nn.Module")
    for name, shape in {"first": (32, 16), "second": (4, 32)}.items():
        layer = getattr(model, name, None)
        weight = getattr(layer, "weight", None)
        if weight is None or tuple(weight.shape) != shape or getattr(layer, "bias", None) is None:
            raise Wrong("layers-differ", error=f"`{name}` is {layer}")
    buffers = dict(model.named_buffers())
    if "peak" not in buffers or buffers["peak"].shape != ():
        raise Wrong("no-buffer", got=f"buffers: {({k: tuple(v.shape) for k, v in buffers.items()}) or 'none'}")
    names = {"first.weight", "first.bias", "second.weight", "second.bias"}
    more = sorted({n for n, _ in model.named_parameters()} - names)
    if more:
        raise Wrong("more-state", what=", ".join(more))
    with torch.no_grad():
        if bias is not None:
            model.first.bias.fill_(bias)
        else:
            model.second.weight.mul_(3)
    return model


def _lonely(mended):
    """A network of whose 32 activations one is not 0: divided by its norm it is 1, where approximations show."""
    model = _model(mended, bias=0.0)
    with torch.no_grad():
        model.first.weight[1:] = 0.0
        model.second.weight.mul_(10)
        model.first.weight[0] *= torch.sign(model.first.weight[0] @ _random(1, 5)[0])
    return model


def _plain(model, x):
    """What Chatty computes, in float64, from leaves: (logits, leaves, h, whether all is zero)."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    leaves["x"] = x.detach().double().requires_grad_()
    h = leaves["x"] @ leaves["first.weight"].T + leaves["first.bias"]
    zero = not h.detach().any()
    if not zero:
        h = h / h.square().sum().sqrt()
    h = F.gelu(h)
    # the comparison in the network's own precision: with one more digit an element could fall on the other side
    share = (h.detach().float() > h.detach().float().mean()).double().mean()
    return (h @ leaves["second.weight"].T + leaves["second.bias"]) * (1 + share), leaves, h.detach(), zero


def _gradients(model, run, x):
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    logits = run(x)
    if not isinstance(logits, torch.Tensor):
        raise Wrong("nothing-returned" if logits is None else "logits-differ", expected="logits (b, 4)", got=logits)
    if logits.requires_grad:
        (logits * _weights(logits.shape, torch.float32)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return logits.detach(), {name: torch.zeros(()) if g is None else g for name, g in found.items()}


def _weights(shape, dtype):
    return torch.linspace(-1, 2, shape.numel(), dtype=dtype).view(shape)


def _same(model, x, run=None, slug="", tol=1e-4):
    expected, leaves, _, zero = _plain(model, x)
    (expected * _weights(expected.shape, torch.float64)).sum().backward()
    got, gradients = _gradients(model, model if run is None else run, x)
    where = f"{len(x)} rows" + (", all numbers zero" if zero else "")
    if got.shape != expected.shape or not close(got, expected.detach(), tol):
        raise Wrong(slug or _why(model, x, got, expected, zero), expected=expected.detach(), got=got, where=where)
    for name, gradient in gradients.items():
        truth = leaves[name].grad
        truth = torch.zeros_like(leaves[name]) if truth is None else truth
        if gradient.isnan().any():
            raise Wrong("nan-gradients" if zero else slug or "gradients-differ", where=f"{where}: gradient of {name}")
        scale = max(1.0, truth.abs().max().item())  # tiny numbers have large gradients
        if gradient.shape != truth.shape or not close(gradient.double() / scale, truth / scale, 1e-3):
            wrong = slug or ("zero-gradients" if zero else "gradients-differ")
            raise Wrong(wrong, expected=truth, got=gradient, where=f"{where}: gradient of {name}")


def _why(model, x, got, expected, zero):
    if got.isnan().any():
        return "nan-logits"
    if got.shape != expected.shape:
        return "logits-differ"
    first = (x.double() @ model.first.weight.double().T + model.first.bias.double()).detach()
    norm = first.norm() if first.any() else torch.ones(())
    weight, bias = model.second.weight.double().detach(), model.second.bias.double().detach()

    def logits(h, factor=None):
        return (h @ weight.T + bias) * (1 + (h > h.mean()).double().mean() if factor is None else factor)

    above = (first / norm).float().double()
    above = F.gelu(above) >= F.gelu(above).mean()
    if zero and close(got, logits(F.gelu(first), 1 + above.double().mean()), 1e-4):
        return "not-above"
    if not zero and x.abs().max() < 1e-8:  # what is right for 1e-5 already
        return "epsilon"
    h = F.gelu(first / norm)
    rows = F.gelu(first / first.norm(dim=1, keepdim=True).clamp_min(1e-12))
    known = {
        "tanh-gelu": logits(F.gelu(first / norm, approximate="tanh")),
        "one-missing": logits(h, (h > h.mean()).double().mean()),
        "row-means": logits(h, 1 + (h > h.mean(dim=1, keepdim=True)).double().mean()),
        "scale-missing": logits(h, 1.0),
        "share-as-count": logits(h, 1 + (h > h.mean()).double().sum()),
        "never-divided": logits(F.gelu(first)),
        "row-norms": logits(rows),
        "no-gelu-here": logits(first / norm),
        "gelu-before": logits(F.gelu(first) / F.gelu(first).norm().clamp_min(1e-30)),
    }
    for slug, value in known.items():
        if close(got, value, 1e-5):
            return slug
    if x.abs().max() < 1e-3 and not zero:
        return "epsilon"
    return "logits-differ"


def _peak(model):
    for k, x in enumerate((_random(8, 6), _random(3, 7), *(_random(8, seed) for seed in range(20, 26)))):
        model.train(k < 6)(x)
        if "peak" not in dict(model.named_buffers()):
            raise Wrong("peak-lost", got=f"peak is {type(getattr(model, 'peak', None)).__name__}")
        truth = _plain(model, x)[2].max()
        if model.peak.shape != () or not close(model.peak.detach().float(), truth.float(), 1e-4):
            raise Wrong("peak-wrong", expected=truth, got=model.peak)
    if model.peak.requires_grad or model.peak.grad_fn is not None:
        raise Wrong("peak-graph")


_REASONS = {  # hint: words in what Dynamo says of a break
    "still-prints": ("builtin operator `print`", "builtin print", "print", "logging"),
    "still-item": (".item()", "tolist", "_local_scalar_dense", "aten.item"),
    "still-branches": ("generic_jump", "data-dependent branching", "data dependent branching", "Data-dependent"),
    "still-selects": ("Dynamic shape operator", "dynamic shape operator", "nonzero", "masked_select"),
}


def _one_graph(model):
    x = _random(8, 8).requires_grad_()
    graphs = Graphs()
    counters.clear()
    # not with fullgraph=True: newer versions then carry numbers and shapes that depend on data through the graph
    compiled = torch.compile(model, backend=graphs)
    compiled(x)
    if counters["graph_break"] or len(graphs.captured) > 1:
        raise _explained(model, x)
    if not graphs.captured or not graphs.runs:
        raise Wrong("not-traced")
    inputs = [_random(8, seed) for seed in range(20, 26)]
    for x in inputs:
        _same(model, x, compiled, "compiled-differs")
    _same(model, torch.zeros(8, 16), compiled, "compiled-differs")
    for x in inputs:
        with torch.no_grad():
            model.peak.zero_()
        compiled(x.requires_grad_())
        if not close(model.peak.float(), _plain(model, x)[2].max().float(), 1e-4):
            raise Wrong(
                "compiled-differs", expected=_plain(model, x)[2].max(), got=model.peak, where="the buffer `peak`"
            )
    if len(graphs.captured) > 1:
        slug = "peak-list" if any(isinstance(v, list) and len(v) for v in vars(model).values()) else "graph-again"
        raise Wrong(slug, n=2 * len(inputs) + 1, n_graphs=len(graphs.captured))


def _explained(model, x):
    """What stopped Dynamo, by the line of code and its own words."""
    told = next((reason.splitlines()[0] for reason in counters["graph_break"]), "no reason is given")
    torch._dynamo.reset()
    found = torch._dynamo.explain(model)(x)
    if not found.graph_count:
        return Wrong("not-traced")
    if not found.break_reasons:
        return Wrong("breaks-left", line="a call that it does not follow", reason=told)
    for reason in found.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        line = (frame.line or f"line {frame.lineno}").strip() if frame else "a place that it does not name"
        for slug, words in _REASONS.items():
            if any(word in reason.reason for word in words):
                return Wrong(slug, line=line)
    return Wrong("breaks-left", line=line, reason=reason.reason.splitlines()[0])
