"""Balise 3: a model without graph breaks, against the plain computation in float64."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, within
from dlojz_tp.judging.checks.compile.fresh import Graphs, fresh
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.shared_looks import recognised


def drawn(rows, seed):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


with seeded(0):
    W, B, V, C = (p.detach() for layer in (nn.Linear(16, 32), nn.Linear(32, 4)) for p in layer.parameters())
LONELY = W * (torch.arange(32) == 0)[:, None] * torch.sign(W[0] @ drawn(1, 5)[0])
NAMES = "first.weight", "first.bias", "second.weight", "second.bias"
# without a bias h is as small as x; where of 32 activations one is not 0, it is 1 after the division by the norm
WEIGHTS = {
    "usual": dict(zip(NAMES, (W, B, 3 * V, C))),
    "small": dict(zip(NAMES, (W, 0 * B, V, C))),
    "lonely": dict(zip(NAMES, (LONELY, 0 * B, 10 * V, C))),
}
SCENES = {
    "8 rows": ("usual", drawn(8, 1)),
    "5 rows": ("usual", drawn(5, 2)),
    "1 row": ("usual", drawn(1, 3)),
    "6 rows of 1e-5": ("small", 1e-5 * drawn(6, 4)),
    "6 rows of 1e-10": ("small", 1e-10 * drawn(6, 4)),
    "1 row, one activation": ("lonely", drawn(1, 5)),
    "8 rows, all numbers zero": ("small", torch.zeros(8, 16)),
}
INPUTS = [drawn(8, seed) for seed in range(20, 26)]
PEAKED = [drawn(8, 6), drawn(3, 7), *INPUTS]


def plain(kind, x):
    """What Chatty computes, in float64 from leaves: logits, gradients, the largest activation."""
    leaves = {name: p.double().requires_grad_() for name, p in (WEIGHTS[kind] | {"x": x}).items()}
    h = leaves["x"] @ leaves["first.weight"].T + leaves["first.bias"]
    h = F.gelu(h / h.square().sum().sqrt() if h.any() else h)
    # the comparison in the network's own precision: with one more digit an element could fall on the other side
    share = (h.detach().float() > h.detach().float().mean()).double().mean()
    logits = (h @ leaves["second.weight"].T + leaves["second.bias"]) * (1 + share)
    return {"logits": logits.detach(), "gradients": gradients(logits, leaves), "peak": h.detach().max().float()}


def gradients(logits, leaves):
    """Of a sum in which each logit has a weight of its own; zeros where there is none."""
    if logits.requires_grad:
        (logits * torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).view(logits.shape)).sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()}


def run(model, x, call):
    """Logits and gradients of a model; call: the model, or what compiles it."""
    model.zero_grad(set_to_none=True)
    logits = call(x := x.clone().requires_grad_())
    if not isinstance(logits, torch.Tensor):
        return {"logits": logits, "gradients": {}}
    return {"logits": logits.detach(), "gradients": gradients(logits, dict(model.named_parameters()) | {"x": x})}


TRUTH = {scene: plain(*given) for scene, given in SCENES.items()}
ZEROS = list(SCENES)[-1]
COMPILED = [plain("small", x) for x in INPUTS]


def odd(seen, due):
    """The first gradient that is wrong: its name, or "". Tiny numbers have large gradients; other parameters none."""
    for name, gradient in seen.items():
        right = due.get(name, torch.zeros_like(gradient))
        scale = max(1.0, right.abs().max().item())
        if not close(gradient.double() / scale, right.double() / scale, 1e-3):
            return name
    return ""


def agrees(seen, due):
    return close(seen["logits"], due["logits"], 1e-4) and not odd(seen["gradients"], due["gradients"])


def unlike(model):
    """What is not as in Chatty, in words."""
    if not isinstance(model, nn.Module):
        return f"an instance is {type(model).__name__}, not a torch.nn.Module"
    for name, shape in {"first": (32, 16), "second": (4, 32)}.items():
        layer = getattr(model, name, None)
        weight = getattr(layer, "weight", None)
        if weight is None or tuple(weight.shape) != shape or getattr(layer, "bias", None) is None:
            return f"`{name}` is {layer}"
    return ""


def observe(mended):
    models = {kind: mended() for kind in WEIGHTS}
    model, small = models["usual"], models["small"]
    yield {"layers": unlike(model)}
    more = {name for name, _ in model.named_parameters()} - {*NAMES}
    yield {"buffers": {name: tuple(one.shape) for name, one in model.named_buffers()}, "more": sorted(more)}
    with torch.no_grad():
        for kind, name in ((kind, name) for kind in WEIGHTS for name in NAMES):
            models[kind].get_parameter(name).copy_(WEIGHTS[kind][name])
    for scene, (kind, x) in SCENES.items():
        found = run(models[kind], x, models[kind])
        yield {f"{scene}: {key}": value for key, value in found.items()}
    shapes, values = [], []
    for k, x in enumerate(PEAKED):
        model.train(k < 6)(x.clone())
        lost = "peak" not in dict(model.named_buffers())
        shapes.append(f"peak is {type(getattr(model, 'peak', None)).__name__}" if lost else tuple(model.peak.shape))
        values.append(number(model.peak))
    yield {"shapes": shapes, "peaks": values, "graph": model.peak.requires_grad}
    with fresh():
        found = compiled(small, [*INPUTS, SCENES[ZEROS][1]] if agrees(found, TRUTH[ZEROS]) else INPUTS)
    yield found


def number(peak):
    """The peak as a tensor (), also where its shape is (1,)."""
    return peak.detach().float().reshape(() if peak.numel() == 1 else peak.shape).clone()


def compiled(model, inputs):
    """What Dynamo makes of the model."""
    x, graphs = drawn(8, 8).requires_grad_(), Graphs()
    counters.clear()
    # not with fullgraph=True: newer versions then carry numbers and shapes that depend on data through the graph
    call = torch.compile(model, backend=graphs)
    call(x)
    if counters["graph_break"] or len(graphs.captured) > 1:
        return explained(model, x)
    if not graphs.captured or not graphs.runs:
        return {"traced": False}
    found, peaks = [run(model, x, call) for x in inputs], []
    for x in INPUTS:
        with torch.no_grad():
            model.peak.zero_()
        call(x.clone().requires_grad_())
        peaks.append(number(model.peak))
    grown = any(isinstance(value, list) and value for value in vars(model).values())
    graphs = len(graphs.captured), "peak-list" if grown else "graph-again"
    return {"traced": True, "breaks": [], "compiled": found, "compiled peaks": peaks, "graphs": graphs}


def explained(model, x):
    """What stopped Dynamo: its words, and the line of code."""
    told = next((reason.splitlines()[0] for reason in counters["graph_break"]), "no reason is given")
    torch._dynamo.reset()
    found, breaks = torch._dynamo.explain(model)(x), []
    for reason in found.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        line = (frame.line or f"line {frame.lineno}").strip() if frame else "a place that it does not name"
        breaks.append((reason.reason, line))
    return {"traced": found.graph_count > 0, "breaks": breaks or [(told, "a call that it does not follow")]}


REASONS = {  # hint: words in what Dynamo says of a break
    "still-prints": ("builtin operator `print`", "builtin print", "print", "logging"),
    "still-item": (".item()", "tolist", "_local_scalar_dense", "aten.item"),
    "still-branches": ("generic_jump", "data-dependent branching", "data dependent branching", "Data-dependent"),
    "still-selects": ("Dynamic shape operator", "dynamic shape operator", "nonzero", "masked_select"),
}


def stopped(seen):
    """Hint and fields of the first break that is known; of the last if none is; nothing where there is no break."""
    for said, line in seen["breaks"]:
        told = {"line": line, "expected": []}
        for slug, words in REASONS.items():
            if any(word in said for word in words):
                return slug, told
    return seen["breaks"] and ("breaks-left", told | {"reason": said.splitlines()[0]})


def many_graphs(seen):
    n, slug = seen["graphs"]
    return n > 1 and (slug, {"expected": 1, "n": 2 * len(INPUTS) + 1, "n_graphs": n})


def looks_at(scene, claim="", unknown="logits-differ", most=1e-4):
    """unknown: the hint for logits that no known mistake gives."""

    def of_gradients(seen):
        found = seen[f"{scene}: gradients"]
        if not (name := odd(found, TRUTH[scene]["gradients"])):
            return None
        zeros = "nan-gradients" if found[name].isnan().any() else "zero-gradients"
        return zeros if scene == ZEROS else "gradients-differ", {"where": f"{scene}: gradient of {name}"}

    def of_logits(seen, due):
        return "nan-logits" if torch.is_tensor(seen) and seen.isnan().any() else unknown

    return [
        Value(claim, f"{scene}: logits", TRUTH[scene]["logits"], of_logits, holds=within(most),
              fields={"where": scene}),
        recognised("", of_gradients),
    ]  # fmt: skip


LOOKS = [
    Look("Chatty's layers, and the buffer `peak`", "layers", "", "layers-differ",
         fields="error"),
    Look("", "buffers", {"peak": ()}, "no-buffer", holds=lambda seen, _: seen.get("peak") == ()),
    Look("", "more", [], "more-state", fields=lambda seen, _: {"what": ", ".join(seen)}),
    *looks_at("8 rows", "Chatty's logits and gradients, for ordinary and for tiny numbers"),
    *looks_at("5 rows"),
    *looks_at("1 row"),
    *looks_at("6 rows of 1e-5", unknown="epsilon"),
    *looks_at("6 rows of 1e-10", unknown="epsilon"),
    *looks_at("1 row, one activation", most=5e-6),
    *looks_at(ZEROS, "all numbers are zero: the branch that is not taken"),
    Look("the largest activation is in the buffer, without a graph", "shapes", [()] * len(PEAKED),
         lambda seen, _: "peak-lost" if any(isinstance(one, str) for one in seen) else "no-buffer"),
    Look("", "peaks", [plain("usual", x)["peak"] for x in PEAKED], "peak-wrong", holds=within(1e-4)),
    Look("", "graph", False, "peak-graph"),
    Look("Dynamo captures one graph", "traced", True, "not-traced"),
    recognised("", stopped),
    Look("", "compiled", [*COMPILED, TRUTH[ZEROS]], "compiled-differs", holds=lambda *pair: all(map(agrees, *pair)),
         fields=silent),
    Look("", "compiled peaks", [one["peak"] for one in COMPILED], "compiled-differs", holds=within(1e-4)),
    recognised("", many_graphs),
]  # fmt: skip


def balise_3(Mended):  # noqa: N803  (the answer is a class)
    yield from judged(LOOKS, observe, Mended)
