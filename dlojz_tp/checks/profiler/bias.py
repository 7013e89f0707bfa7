"""Balise 7: no bias before a batch norm. The same function in both modes, the same training, fewer parameters."""

import copy

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.seeded import seeded

HINTS = {
    "model-not-returned": "Return the given model, changed in place.",
    "buffer-lost": "{name} is no longer a buffer in the model's state: a checkpoint or .to(device) would miss it, "
                   "or an optimizer would train it. Write into the existing buffer.",
    "bias-left": "{name}, a {kind}, still has its bias, although a batch norm follows directly.",
    "bias-zeroed": "{name} still has a bias, now zero. It is still read, added, differentiated and updated. Remove it.",
    "nested-left": "{name} still has its bias. It is in an nn.Sequential inside another module, or is of another "
                   "type than the layers that lost theirs.",
    "wrong-bias-out": "{name} has lost its bias although no batch norm follows directly: {next}. The model now "
                      "computes another function.",
    "norm-bias-out": "{name} is gone. Only the biases of linear layers and convolutions have no effect before a "
                     "batch norm.",
    "not-a-sequence": "{name} is gone, but its layer is in no nn.Sequential. Only the forward() of another module "
                      "says in which order its layers run: here a ReLU comes between.",
    "bias-deleted": "forward() asks for the bias and finds no such attribute: {error}. Set it to None instead of "
                    "deleting it.",
    "layer-replaced": "You replaced {name} with another object. An optimizer or a hook that knows the old one "
                      "would keep using that.",
    "weights-lost": "The weights of {name} have changed.",
    "eval-differs": "In eval mode, the model computes something else: the batch norm's running mean still includes "
                    "the bias.",
    "eval-sign": "In eval mode, the model computes something else: you corrected the running mean in the wrong "
                 "direction.",
    "train-differs": "In training mode, the model computes something else.",
    "trained-differs": "After two training steps, the model computes something else in eval mode.",
    "eval-other": "In eval mode, the model computes something else. Only the running mean of the batch norm "
                  "changes, by the bias.",
    "no-running-mean": "A batch norm with track_running_stats=False has no running mean: {error}",
    "no-bias-there": "A layer without a bias comes before a batch norm: {error}",
    "graph-in-buffer": "The running mean is now attached to the graph of the old bias. Correct it with detach() or "
                       "under no_grad.",
    "mode-changed": "The model arrived in {before} mode and is now in the other one.",
}


def balise_7(without_bias):
    """A chain of layers; nested ones; layers that must keep their bias; batch norms without statistics."""
    yield "a convolution and its batch norm: the bias is gone, and the function is the same in eval mode"
    _judge(without_bias, _chain, [(4, 3, 8, 8)], ["0"])
    yield "the same in training mode, and after training steps"
    _trains(without_bias, _chain)
    yield "blocks within blocks; linear, grouped, one-dimensional and transposed layers"
    _judge(without_bias, _nested, [(5, 3, 8, 8)], ["0.0.0", "0.1.block.0", "2.1", "2.3.0"], nested=True)
    _judge(without_bias, _signals, [(4, 2, 12)], ["0", "3"])
    yield "biases that have an effect stay"
    _judge(without_bias, _keepers, [(4, 3, 8, 8)], [])
    yield "batch norms without statistics, and layers without a bias"
    for make, gone, slug in ((_no_statistics, ["0"], "no-running-mean"), (_no_bias, [], "no-bias-there")):
        try:
            _judge(without_bias, make, [(4, 3, 8, 8)], gone)
        except (TypeError, AttributeError) as error:
            raise Wrong(slug, error=str(error)) from error


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


def _judge(without_bias, make, shapes, gone, nested=False):
    original, model = _seeded(make).eval(), _seeded(make).eval()
    layers, weights = dict(model.named_modules()), dict(model.named_parameters())
    got = without_bias(model)
    if got is not model:
        if got is None:
            raise Wrong("nothing-returned")
        raise Wrong("model-not-returned", got=type(got).__name__)
    _right_parameters(original, model, layers, gone, nested)
    for name in dict(original.named_buffers()):
        if name not in dict(model.named_buffers()) or name not in model.state_dict():
            raise Wrong("buffer-lost", name=name)
    if other := next((name for name, p in model.named_parameters() if p is not weights.get(name)), ""):
        raise Wrong("layer-replaced", name=other)
    if any(buffer.requires_grad for buffer in model.buffers()):
        raise Wrong("graph-in-buffer")
    _same_mode(model, training=False)
    for shape in shapes:
        x = _images(shape)
        try:
            wanted, out = original(x).detach(), model(x).detach()
        except AttributeError as error:
            if "bias" in str(error):
                raise Wrong("bias-deleted", error=str(error)) from error
            raise
        if not close(out, wanted, 1e-4):
            raise Wrong(_eval_slug(original, model), expected=wanted, got=out)


def _same_mode(model, training):
    if any(module.training != training for module in model.modules()):
        raise Wrong("mode-changed", before="training" if training else "eval")


def _right_parameters(original, model, layers, gone, nested):
    for name, module in model.named_modules():
        if module is not layers.get(name):
            raise Wrong("layer-replaced", name=name or "the model")
    before, after = dict(original.named_parameters()), dict(model.named_parameters())
    order = [name for name, module in model.named_modules() if not list(module.children())]
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    for name in before:
        layer, _, what = name.rpartition(".")
        if layer in gone and what == "bias":
            continue
        if name not in after:
            if what == "weight" or not ("Conv" in kinds[layer] or kinds[layer] == "Linear"):
                raise Wrong("norm-bias-out", name=name)
            if not isinstance(model.get_submodule(layer.rpartition(".")[0]), nn.Sequential):
                raise Wrong("not-a-sequence", name=name)
            following = order[order.index(layer) + 1 :]
            raise Wrong(
                "wrong-bias-out", name=name, next=f"a {kinds[following[0]]} does" if following else "nothing does"
            )
        if not close(after[name], before[name]):
            if what == "bias" and not after[name].any():
                raise Wrong("wrong-bias-out", name=name, next="it is zero now")
            raise Wrong("weights-lost", name=name, expected=before[name], got=after[name])
    for layer in gone:
        if f"{layer}.bias" in after:
            zero = not after[f"{layer}.bias"].any()
            raise Wrong(
                "bias-zeroed" if zero else "nested-left" if nested and "." in layer else "bias-left",
                name=layer,
                kind=type(model.get_submodule(layer)).__name__,
            )
        if getattr(model.get_submodule(layer), "bias", None) is not None:
            raise Wrong("bias-zeroed", name=layer, got="a bias that is not a parameter")


def _eval_slug(original, model):
    """Of the first batch norm whose running mean is not what the bias before it asks for."""
    layers = list(zip(original.modules(), model.modules(), strict=True))
    for (before, after), (old, new) in zip(layers, layers[1:]):
        bias, mean = getattr(before, "bias", None), getattr(old, "running_mean", None)
        if bias is None or mean is None or after.bias is not None or close(new.running_mean, mean - bias):
            continue
        if close(new.running_mean, mean + bias):
            return "eval-sign"
        return "eval-differs" if close(new.running_mean, mean) else "eval-other"
    return "eval-other"


def _trains(without_bias, make):
    original = _seeded(make).train()
    model = without_bias(copy.deepcopy(original))
    _same_mode(model, training=True)
    x = _images((6, 3, 8, 8))
    wanted, out = original(x), model(x)
    if not close(out, wanted, 1e-4):
        raise Wrong("train-differs", expected=wanted, got=out)
    for net in (original, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for k in range(2):
            optimizer.zero_grad()
            (net(x + k) * torch.linspace(-1, 1, 4)[:, None, None]).square().mean().backward()
            optimizer.step()
        net.eval()
    if not close(model(x), original(x), 1e-3):
        raise Wrong("trained-differs", expected=original(x), got=model(x))
