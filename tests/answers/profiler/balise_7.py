"""Answers to balise 7 of 04_profiler: no bias before a batch norm."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 7, whole=True)

bank.text(
    None,
    """
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def without_bias(model):
    if isinstance(model, nn.Sequential):
        for before, after in zip(model[:-1], model[1:]):
            bias = getattr(before, "bias", None)
            if isinstance(after, NORMS) and bias is not None and not isinstance(before, NORMS + (nn.GroupNorm, nn.LayerNorm)):
                if after.track_running_stats:
                    with torch.no_grad():
                        after.running_mean.sub_(bias)
                before.register_parameter("bias", None)
    for child in model.children():
        without_bias(child)
    return model
""",
)

bank.text(
    None,
    """
@torch.no_grad()
def without_bias(model):
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    for block in filter(lambda m: isinstance(m, nn.Sequential), model.modules()):
        previous = None
        for layer in block.children():
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and isinstance(previous, kinds):
                if previous.bias is not None:
                    if layer.running_mean is not None:
                        layer.running_mean.copy_(layer.running_mean - previous.bias)
                    previous.bias = None
            previous = layer
    return model
""",
)

bank.slip(None, ("norm.running_mean -= layer.bias.detach()", "norm.running_mean.data -= layer.bias.data"))

bank.hint("bias-left", "{name}, a {kind}, still has its bias, although a batch norm follows directly.")
bank.slip("bias-left", ("                layer.bias = None\n", ""))

bank.slip("bias-left", ("nn.Linear, nn.modules.conv._ConvNd", "nn.Linear"))

bank.hint("bias-zeroed", "{name} still has a bias, now zero. It is still read, added, differentiated and updated. "
          "Remove it.")  # fmt: skip
bank.slip("bias-zeroed", ("layer.bias = None", "layer.bias.data.zero_()"))

bank.slip(
    "bias-zeroed",
    ("                layer.bias = None", "                nn.init.zeros_(layer.bias).requires_grad_(False)"),
    variant=True,
)

bank.hint("nested-left", "{name} still has its bias. It is in an nn.Sequential inside another module, or is of "
          "another type than the layers that lost theirs.")  # fmt: skip
bank.slip("nested-left", ("model.modules()", "[model]"))

bank.slip("nested-left", ("model.modules()", "[model, *model.children()]"))

bank.slip("bias-left", ("nn.modules.batchnorm._BatchNorm", "nn.BatchNorm3d"))

bank.slip("nested-left", ("nn.modules.batchnorm._BatchNorm", "nn.BatchNorm2d"), variant=True)

bank.slip("bias-left", ("nn.modules.conv._ConvNd", "nn.Conv2d"), variant=True)

bank.hint("wrong-bias-out", "{name} has lost its bias although no batch norm follows directly: {next}. The model now "
          "computes another function.")  # fmt: skip
bank.slip(
    "wrong-bias-out",
    ("isinstance(norm, nn.modules.batchnorm._BatchNorm)", "True"),
    ("norm.running_mean is not None", 'getattr(norm, "running_mean", None) is not None'),
)

bank.slip(
    "wrong-bias-out",
    ("nn.modules.batchnorm._BatchNorm", "(nn.modules.batchnorm._BatchNorm, nn.GroupNorm)"),
    ("norm.running_mean is not None", 'getattr(norm, "running_mean", None) is not None'),
)

bank.text(
    "wrong-bias-out",
    '''
def without_bias(model):
    """All convolutions of a block that holds a batch norm somewhere."""
    for block in model.modules():
        if isinstance(block, nn.Sequential) and any("BatchNorm" in type(m).__name__ for m in block):
            for layer in block:
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    layer.bias = None
    return model
''',
    variant=True,
)

bank.hint("norm-bias-out", "{name} is gone. Only the biases of linear layers and convolutions have no effect before "
          "a batch norm.")  # fmt: skip
bank.slip("norm-bias-out", ("isinstance(layer, linear)", 'hasattr(layer, "bias")'))

bank.hint("bias-deleted", "forward() asks for the bias and finds no such attribute: {error}. Set it to None instead "
          "of deleting it.")  # fmt: skip
bank.slip("bias-deleted", ("layer.bias = None", 'delattr(layer, "bias")'), variant=True)

bank.hint("not-a-sequence", "{name} is gone, but its layer is in no nn.Sequential. Only the forward() of another "
          "module says in which order its layers run: here a ReLU comes between.")  # fmt: skip
bank.slip("not-a-sequence", ("isinstance(block, nn.Sequential)", "isinstance(block, nn.Sequential | nn.ModuleList)"),
          ("list(block)", "list(block.children())"))  # fmt: skip

bank.text(
    "not-a-sequence",
    """
def without_bias(model):
    leaves = [m for m in model.modules() if not list(m.children())]
    for layer, norm in zip(leaves, leaves[1:]):
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)) and isinstance(norm, nn.modules.batchnorm._BatchNorm):
            if layer.bias is not None:
                if norm.running_mean is not None:
                    norm.running_mean -= layer.bias.detach()
                layer.bias = None
    return model
""",
    variant=True,
)

bank.slip("norm-bias-out", ("                layer.bias = None", "                norm.bias = None"), variant=True)

bank.hint("eval-differs", "In eval mode, the model computes something else: the batch norm's running mean still "
          "includes the bias.")  # fmt: skip
bank.slip(
    "eval-differs",
    ("                    norm.running_mean -= layer.bias.detach()", "                    pass"),
    variant=True,
)

bank.hint("buffer-lost", "{name} is no longer a buffer in the model's state: a checkpoint or .to(device) would miss "
          "it, or an optimizer would train it. Write into the existing buffer.")  # fmt: skip
bank.slip(
    "buffer-lost",
    (
        "norm.running_mean -= layer.bias.detach()",
        "norm.running_mean = nn.Parameter(norm.running_mean - layer.bias, requires_grad=False)",
    ),
    variant=True,
)

bank.hint("eval-other", "In eval mode, the model computes something else. Only the running mean of the batch norm "
          "changes, by the bias.")  # fmt: skip
bank.slip("eval-other", ("-= layer.bias.detach()", "-= norm.momentum * layer.bias.detach()"))

bank.slip("eval-other", ("norm.running_mean -= layer.bias.detach()", "norm.running_mean.zero_()"))

bank.slip("eval-other", ("-= layer.bias.detach()", "+= layer.bias.detach() / norm.running_var.sqrt()"), variant=True)

bank.hint("eval-sign", "In eval mode, the model computes something else: you corrected the running mean in the wrong "
          "direction.")  # fmt: skip
bank.slip("eval-sign", ("norm.running_mean -=", "norm.running_mean +="), variant=True)

bank.hint("graph-in-buffer", "The running mean is now attached to the graph of the old bias. Correct it with "
          "detach() or under no_grad.")  # fmt: skip
bank.slip("graph-in-buffer", ("layer.bias.detach()", "layer.bias"))

bank.slip(
    "graph-in-buffer",
    ("norm.running_mean -= layer.bias.detach()", "norm.running_mean = norm.running_mean - layer.bias"),
    variant=True,
)

bank.hint("no-running-mean", "A batch norm with track_running_stats=False has no running mean: {error}")
bank.slip(
    "no-running-mean",
    (
        "                if norm.running_mean is not None:\n                    norm",
        "                if True:\n                    norm",
    ),
)

GUARDED = "if norm.running_mean is not None:\n                    norm.running_mean -= layer.bias.detach()"

for unguarded in (
    "norm.running_mean.data -= layer.bias.data",
    "norm.running_mean.sub_(layer.bias.detach())",
    "norm.running_mean.copy_(norm.running_mean - layer.bias.detach())",
):
    bank.slip("no-running-mean", (GUARDED, unguarded), variant=True)

bank.hint("no-bias-there", "A layer without a bias comes before a batch norm: {error}")
bank.slip("no-bias-there", ("                and layer.bias is not None\n", ""), variant=True)

bank.hint("model-not-returned", "Return the given model, changed in place.")
bank.slip(
    "model-not-returned",
    ("    for block in model", "    model = copy.deepcopy(model)\n    for block in model"),
    variant=True,
)

bank.slip("nothing-returned", ("    return model\n", ""))

bank.hint("mode-changed", "The model arrived in {before} mode and is now in the other one.")
bank.slip("mode-changed", ("    return model\n", "    return model.eval()\n"))

bank.slip("mode-changed", ("    return model\n", "    return model.train()\n"), variant=True)

bank.hint("weights-lost", "The weights of {name} have changed.")
bank.slip(
    "weights-lost",
    (
        "                layer.bias = None\n",
        "                layer.bias = None\n                layer.reset_parameters()\n",
    ),
    variant=True,
)

bank.hint("layer-replaced", "You replaced {name} with another object. An optimizer or a hook that knows the old one "
          "would keep using that.")  # fmt: skip
bank.text(
    "layer-replaced",
    """
def without_bias(model):
    for block in model.modules():
        if isinstance(block, nn.Sequential):
            for i in range(len(block) - 1):
                if isinstance(block[i], nn.Conv2d) and isinstance(block[i + 1], nn.BatchNorm2d):
                    old = block[i]
                    new = nn.Conv2d(old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=False)
                    new.weight = old.weight
                    block[i + 1].running_mean -= old.bias.detach()
                    block[i] = new
    return model
""",
)

bank.hint("train-differs", "In training mode, the model computes something else.")
bank.slip(
    "train-differs",
    (
        "                layer.bias = None\n",
        "                layer.bias = None\n                norm.momentum = norm.momentum\n                norm.register_forward_hook(lambda m, i, o: o * 2 if m.training else o)\n",
    ),
    variant=True,
)

bank.hint("trained-differs", "After two training steps, the model computes something else in eval mode.")
bank.slip(
    "trained-differs",
    ("                layer.bias = None\n", "                layer.bias = None\n                norm.momentum = 0.9\n"),
    variant=True,
)

bank.slip("layer-replaced",
    ("                layer.bias = None\n", "                layer.bias = None\n                layer.weight = nn.Parameter(layer.weight.detach().clone())\n"),
    variant=True)  # fmt: skip
