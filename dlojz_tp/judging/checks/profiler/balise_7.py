"""Balise 7: no bias before a batch norm. The same function in both modes, the same training, fewer parameters."""

import torch
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, silent, within
from dlojz_tp.judging.probes.seeded import seeded


class _Branch(nn.Module):
    """A block that is no Sequential, with one inside."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6))
        self.first, self.norm = nn.Conv2d(6, 6, 1), nn.GroupNorm(2, 6)

    def forward(self, x):
        return x + self.norm(self.first(self.block(x)))


class _Loose(nn.Module):
    """Two layers beside each other, which do not run one after the other."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.conv, self.norm = layers, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu()) + self.norm(self.conv(x).relu())


def _chain():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(),
        nn.BatchNorm2d(4),
    )  # fmt: skip


def _nested():
    return nn.Sequential(
        nn.Sequential(nn.Sequential(nn.Conv2d(3, 6, 3, padding=2, dilation=2), nn.BatchNorm2d(6)), _Branch()),
        nn.AdaptiveAvgPool2d(1),
        nn.Sequential(
            nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5))
        ),
    )


def _signals():
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.ConvTranspose1d(4, 3, 2), nn.BatchNorm1d(3, momentum=None)
    )


def _keepers():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 1), nn.Dropout(0.0), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.LayerNorm([4, 6, 6]),
        nn.GroupNorm(2, 4), nn.BatchNorm2d(4), _Loose(nn.ModuleList([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)])),
        nn.Conv2d(4, 2, 1),
    )  # fmt: skip


def _no_statistics():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))


def _no_bias():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4, track_running_stats=False),
    )  # fmt: skip


def _seeded(make):
    """A model whose batch norms have learnt, and whose biases matter."""
    with seeded(7):
        model = make()
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if name == "bias" or isinstance(module, nn.modules.batchnorm._BatchNorm):
                    p.data = torch.rand_like(p) + 0.5
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.copy_(torch.randn_like(module.running_mean))
                module.running_var.copy_(0.5 + torch.rand_like(module.running_var))
    return model


def _images(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


MODELS = {  # how it is made, the shape of its images, which layers lose their bias
    "chain": (_chain, (4, 3, 8, 8), ["0"]),
    "nested": (_nested, (5, 3, 8, 8), ["0.0.0", "0.1.block.0", "2.1", "2.3.0"]),
    "signals": (_signals, (4, 2, 12), ["0", "3"]),
    "keepers": (_keepers, (4, 3, 8, 8), []),
    "no statistics": (_no_statistics, (4, 3, 8, 8), ["0"]),
    "no bias": (_no_bias, (4, 3, 8, 8), []),
}


REFUSED = {"no statistics": "no-running-mean", "no bias": "no-bias-there"}  # by an answer that expects them
CLAIMS = {
    "a convolution and its batch norm: the bias is gone, and the function is the same in eval mode": ["chain"],
    "the same in training mode, and after training steps": [],
    "blocks within blocks; linear, grouped, one-dimensional and transposed layers": ["nested", "signals"],
    "biases that have an effect stay": ["keepers"],
    "batch norms without statistics, and layers without a bias": list(REFUSED),
}


def observe(without_bias, name):
    """What becomes of a model in eval mode, after the error of an answer that refuses it."""
    parts, error = _changed(without_bias, *MODELS[name]), ""
    if name in REFUSED:
        try:
            parts = list(parts)
        except (TypeError, AttributeError) as refused:
            parts, error = [], str(refused)
    yield {"refused": error}
    yield from parts


def _changed(without_bias, make, shape, gone):
    original, model = _seeded(make).eval(), _seeded(make).eval()
    layers, weights = dict(model.named_modules()), dict(model.named_parameters())
    got = without_bias(model)
    returned = "the model" if got is model else None if got is None else type(got).__name__
    yield {"returned": returned, "layers": [name for name, one in model.named_modules() if one is not layers.get(name)]}
    kept = dict(model.named_buffers()).keys() & model.state_dict().keys()
    yield {
        "strange": list(_strange(original, model, gone)), "left": list(_left(model, gone)),
        "lost": [name for name, _ in original.named_buffers() if name not in kept],
        "parameters": [name for name, p in model.named_parameters() if p is not weights.get(name)],
        "graph": any(buffer.requires_grad for buffer in model.buffers()),
        "modes": {module.training for module in model.modules()},
    }  # fmt: skip
    out, deleted = None, ""
    try:
        out = model(_images(shape)).detach()
    except AttributeError as error:
        if "bias" not in str(error):
            raise
        deleted = str(error)
    yield {"deleted": deleted}
    yield {"computed": {"got": out, "mean": _first_mean(original, model)}}


def _strange(original, model, gone):
    """The parameters that are not as before, beside the biases that must go: how, and of which layer."""
    after, modules = dict(model.named_parameters()), dict(model.named_modules())
    order = [name for name, module in modules.items() if not list(module.children())]
    for name, before in original.named_parameters():
        layer, _, what = name.rpartition(".")
        if (layer in gone and what == "bias") or (name in after and close(after[name], before)):
            continue
        how = "gone" if name not in after else "zero" if what == "bias" and not after[name].any() else "changed"
        following = order[order.index(layer) + 1 :]
        then = f"a {type(modules[following[0]]).__name__} does" if following else "nothing does"
        yield {"name": name, "how": how, "next": "it is zero now" if how == "zero" else then,
               "kind": type(modules[layer]).__name__, "row": isinstance(modules[layer.rpartition(".")[0]], nn.Sequential)}  # fmt: skip


def _left(model, gone):
    """The layers that still have a bias, and what kind of."""
    parameters = dict(model.named_parameters())
    for layer in gone:
        module = model.get_submodule(layer)
        if getattr(module, "bias", None) is not None:
            learns = f"{layer}.bias" in parameters and bool(module.bias.any())
            yield {"name": layer, "kind": type(module).__name__, "learns": learns}


def _first_mean(original, model):
    """The first running mean that is not what the bias before it asks for: "before", "added", or "other"."""
    layers = list(zip(original.modules(), model.modules(), strict=True))
    for (before, after), (old, new) in zip(layers, layers[1:]):
        bias, mean = getattr(before, "bias", None), getattr(old, "running_mean", None)
        if bias is None or mean is None or after.bias is not None or close(new.running_mean, mean - bias):
            continue
        if close(new.running_mean, mean + bias):
            return "added"
        return "before" if close(new.running_mean, mean) else "other"
    return "other"


def _trained(without_bias):
    """The chain in training mode: what it computes, and what it does in eval mode after two training steps."""
    model, x = without_bias(_seeded(_chain).train()), _images((6, 3, 8, 8))
    yield {"modes": {module.training for module in model.modules()}}
    yield {"out": model(x).detach()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for k in range(2):
        optimizer.zero_grad()
        (model(x + k) * torch.linspace(-1, 1, 4)[:, None, None]).square().mean().backward()
        optimizer.step()
    yield {"trained": model.eval()(x).detach()}


def _strange_slug(seen, _):
    first = seen[0]
    if first["how"] != "gone":
        return "wrong-bias-out" if first["how"] == "zero" else "weights-lost"
    if first["name"].endswith("weight") or not ("Conv" in first["kind"] or first["kind"] == "Linear"):
        return "norm-bias-out"
    return "wrong-bias-out" if first["row"] else "not-a-sequence"


def _left_slug(seen, _):
    return "bias-zeroed" if not seen[0]["learns"] else "nested-left" if "." in seen[0]["name"] else "bias-left"


def _first(seen, due):
    """The fields of the first in a list."""
    return (seen[0] if isinstance(seen[0], dict) else {"name": seen[0] or "the model"}) | silent(seen, due)


def _mean_slug(seen, _):
    return {"added": "eval-sign", "before": "eval-differs", "other": "eval-other"}[seen["mean"]]


def _same_function(seen, due):
    return close(seen["got"], due, 1e-4)


def _looks(claim, name):
    """At a model in eval mode."""
    make, shape, _ = MODELS[name]

    def truth(_):
        return _seeded(make).eval()(_images(shape)).detach()

    return [
        Look(claim, "refused", "", REFUSED.get(name), fields="error"),
        Look("", "returned", "the model", "model-not-returned"),
        Look("", "layers", [], "layer-replaced", fields=_first),
        Look("", "strange", [], _strange_slug, fields=_first), Look("", "left", [], _left_slug, fields=_first),
        Look("", "lost", [], "buffer-lost", fields=_first),
        Look("", "parameters", [], "layer-replaced", fields=_first),
        Look("", "graph", False, "graph-in-buffer"),
        Look("", "modes", {False}, "mode-changed", fields={"before": "eval"}),
        Look("", "deleted", "", "bias-deleted", fields="error"),
        Look("", "computed", truth, _mean_slug, holds=_same_function, fields=lambda seen, _: seen),
    ]  # fmt: skip


def _training_looks(claim):
    truth = {}
    for part in _trained(lambda model: model):
        truth |= part
    return [
        Look(claim, "modes", {True}, "mode-changed", fields={"before": "training"}),
        Look("", "out", truth["out"], "train-differs", holds=within(1e-4)),
        Look("", "trained", truth["trained"], "trained-differs", holds=within(1e-3)),
    ]


def balise_7(without_bias):
    """A chain of layers; nested ones; layers that must keep their bias; batch norms without statistics."""
    for claim, names in CLAIMS.items():
        if not names:
            yield from judged(_training_looks(claim), _trained, without_bias)
        for name in names:
            yield from judged(_looks(claim, name), observe, without_bias, name)
