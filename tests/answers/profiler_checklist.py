"""Answers to balises 7 and 8 of 04_profiler: items of the checklist."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", whole=True)

# ---------------------------------------------------------------- balise 7, right

bank.text(
    7,
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
    7,
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
bank.slip(7, None, ("norm.running_mean -= layer.bias.detach()", "norm.running_mean.data -= layer.bias.data"))

# ---------------------------------------------------------------- balise 7, wrong

bank.slip(7, "bias-left", ("                layer.bias = None\n", ""))
bank.slip(7, "bias-left", ("nn.Linear, nn.modules.conv._ConvNd", "nn.Linear"))
bank.slip(7, "bias-zeroed", ("layer.bias = None", "layer.bias.data.zero_()"))
bank.slip(
    7,
    "bias-zeroed",
    ("                layer.bias = None", "                nn.init.zeros_(layer.bias).requires_grad_(False)"),
)
bank.slip(7, "nested-left", ("model.modules()", "[model]"))
bank.slip(7, "nested-left", ("model.modules()", "[model, *model.children()]"))
bank.slip(7, "bias-left", ("nn.modules.batchnorm._BatchNorm", "nn.BatchNorm3d"))
bank.slip(7, "nested-left", ("nn.modules.batchnorm._BatchNorm", "nn.BatchNorm2d"))
bank.slip(7, "bias-left", ("nn.modules.conv._ConvNd", "nn.Conv2d"))
bank.slip(
    7,
    "wrong-bias-out",
    ("isinstance(norm, nn.modules.batchnorm._BatchNorm)", "True"),
    ("norm.running_mean is not None", 'getattr(norm, "running_mean", None) is not None'),
)
bank.slip(
    7,
    "wrong-bias-out",
    ("nn.modules.batchnorm._BatchNorm", "(nn.modules.batchnorm._BatchNorm, nn.GroupNorm)"),
    ("norm.running_mean is not None", 'getattr(norm, "running_mean", None) is not None'),
)
bank.text(
    7,
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
)
bank.slip(7, "norm-bias-out", ("isinstance(layer, linear)", 'hasattr(layer, "bias")'))
bank.slip(7, "bias-deleted", ("layer.bias = None", 'delattr(layer, "bias")'))
bank.slip(7, "not-a-sequence", ("isinstance(block, nn.Sequential)", "isinstance(block, nn.Sequential | nn.ModuleList)"),
          ("list(block)", "list(block.children())"))  # fmt: skip
bank.text(
    7,
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
)
bank.slip(7, "norm-bias-out", ("                layer.bias = None", "                norm.bias = None"))
bank.slip(
    7, "eval-differs", ("                    norm.running_mean -= layer.bias.detach()", "                    pass")
)
bank.slip(
    7,
    "buffer-lost",
    (
        "norm.running_mean -= layer.bias.detach()",
        "norm.running_mean = nn.Parameter(norm.running_mean - layer.bias, requires_grad=False)",
    ),
)
bank.slip(7, "eval-other", ("-= layer.bias.detach()", "-= norm.momentum * layer.bias.detach()"))
bank.slip(7, "eval-other", ("norm.running_mean -= layer.bias.detach()", "norm.running_mean.zero_()"))
bank.slip(7, "eval-other", ("-= layer.bias.detach()", "+= layer.bias.detach() / norm.running_var.sqrt()"))
bank.slip(7, "eval-sign", ("norm.running_mean -=", "norm.running_mean +="))
bank.slip(7, "graph-in-buffer", ("layer.bias.detach()", "layer.bias"))
bank.slip(
    7,
    "graph-in-buffer",
    ("norm.running_mean -= layer.bias.detach()", "norm.running_mean = norm.running_mean - layer.bias"),
)
bank.slip(
    7,
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
    bank.slip(7, "no-running-mean", (GUARDED, unguarded))
bank.slip(7, "no-bias-there", ("                and layer.bias is not None\n", ""))
bank.slip(
    7, "model-not-returned", ("    for block in model", "    model = copy.deepcopy(model)\n    for block in model")
)
bank.slip(7, "nothing-returned", ("    return model\n", ""))
bank.slip(7, "mode-changed", ("    return model\n", "    return model.eval()\n"))
bank.slip(7, "mode-changed", ("    return model\n", "    return model.train()\n"))
bank.slip(
    7,
    "weights-lost",
    (
        "                layer.bias = None\n",
        "                layer.bias = None\n                layer.reset_parameters()\n",
    ),
)
bank.text(
    7,
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
bank.slip(
    7,
    "train-differs",
    (
        "                layer.bias = None\n",
        "                layer.bias = None\n                norm.momentum = norm.momentum\n                norm.register_forward_hook(lambda m, i, o: o * 2 if m.training else o)\n",
    ),
)
bank.slip(
    7,
    "trained-differs",
    ("                layer.bias = None\n", "                layer.bias = None\n                norm.momentum = 0.9\n"),
)

# ---------------------------------------------------------------- balise 8, right

SAVES = """

def autotuner_saves(shapes, search, usual, best):
    return len(shapes) * (usual - best) - len(set(shapes)) * search
"""
bank.text(
    8,
    None,
    """
def reserve(model, batch_of, lengths):
    state, others = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    twin = copy.deepcopy(model)
    inputs, labels = batch_of(sorted(lengths)[-1])
    nn.CrossEntropyLoss()(twin(inputs), labels).backward()
    torch.set_rng_state(state)
    if others:
        torch.cuda.set_rng_state_all(others)


def autotuner_saves(shapes, search, usual, best):
    seen, saved = {}, 0.0
    for shape in shapes:
        if tuple(shape) not in seen:
            saved -= search
        seen[tuple(shape)] = True
        saved += usual - best
    return saved
""",
)
bank.text(
    8,
    "not-in-state-dict",
    """
def reserve(model, batch_of, lengths):
    before = copy.deepcopy(model.state_dict())
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
    del loss
    model.load_state_dict(before)
    for p in model.parameters():
        p.grad = None


def autotuner_saves(shapes, search, usual, best):
    from collections import Counter
    return sum(n * (usual - best) - search for n in Counter(map(tuple, shapes)).values())
""",
)
bank.text(  # modules one by one, with the buffers that state_dict() leaves out
    8,
    None,
    """
def reserve(model, batch_of, lengths):
    before = [(m, name, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        F.cross_entropy(model(inputs), labels).backward()
    for m, name, b in before:
        getattr(m, name).data.copy_(b)
    for p in model.parameters():
        p.grad = None
"""
    + SAVES,
)
bank.text(
    8,
    None,
    """
def reserve(model, batch_of, lengths):
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        inputs, labels = batch_of(max(lengths))
        loss = -model(inputs).log_softmax(1)[torch.arange(len(labels)), labels].mean()
        torch.autograd.grad(loss, list(model.parameters()))
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
"""
    + SAVES,
)

# ---------------------------------------------------------------- balise 8, wrong

bank.slip(8, "never-ran", ("        F.cross_entropy(model(inputs), labels).backward()\n", ""))
bank.slip(8, "not-longest", ("max(lengths)", "min(lengths)"))
bank.slip(8, "not-longest", ("max(lengths)", "lengths[0]"))
bank.slip(8, "not-longest", ("max(lengths)", "19"))
bank.slip(8, "every-length", ("        inputs, labels = batch_of(max(lengths))\n        F.cross_entropy(model(inputs), labels).backward()\n",
                              "        for length in sorted(lengths, reverse=True):\n            inputs, labels = batch_of(length)\n            F.cross_entropy(model(inputs), labels).backward()\n"))  # fmt: skip
bank.slip(
    8,
    "not-recorded",
    (
        "        F.cross_entropy(model(inputs), labels).backward()\n",
        "        with torch.no_grad():\n            model(inputs)\n",
    ),
)
bank.slip(
    8, "part-of-batch", ("F.cross_entropy(model(inputs), labels)", "F.cross_entropy(model(inputs[:2]), labels[:2])")
)
bank.slip(8, "backward-in-part", ("F.cross_entropy(model(inputs), labels).backward()", "torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(model.parameters())[-1])"))
bank.slip(8, "batch-kept", ("F.cross_entropy(model(inputs), labels).backward()", "reserve.loss = F.cross_entropy(model(inputs), labels)\n        reserve.loss.backward(retain_graph=True)"))
bank.slip(8, "batch-kept", ("        F.cross", "        reserve.batch = inputs\n        F.cross"))
bank.slip(8, "no-backward", ("labels).backward()", "labels)"))
bank.slip(8, "other-mode", ("    buffers = [", "    model.eval()\n    buffers = ["))
bank.slip(8, "left-in-mode", ("    buffers = [", "    model.train()\n    buffers = ["))
bank.slip(
    8,
    "parameters-changed",
    (
        "    model.zero_grad(set_to_none=True)\n",
        "    torch.optim.SGD(model.parameters(), lr=0.1).step()\n    model.zero_grad(set_to_none=True)\n",
    ),
)
bank.slip(8, "gradients-left", ("    model.zero_grad(set_to_none=True)\n", ""))
bank.slip(8, "gradients-left", ("set_to_none=True", "set_to_none=False"))
bank.slip(8, "statistics-changed", ("            buffer.copy_(before)\n", "            pass\n"))
bank.slip(8, "statistics-changed", ("buffer.clone()", "buffer"))
bank.slip(
    8,
    "not-in-state-dict",
    ("in model.buffers()]", "in model.state_dict().values()]"),
)
bank.text(
    8,
    "statistics-changed",
    """
def reserve(model, batch_of, lengths):
    before = model.state_dict()
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before)
"""
    + SAVES,
)
bank.text(
    8,
    "buffers-replaced",
    """
def reserve(model, batch_of, lengths):
    kept = {name: buffer.clone() for name, buffer in model.norm.named_buffers()}
    with torch.random.fork_rng():
        inputs, labels = batch_of(max(lengths))
        F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad(set_to_none=True)
    for name, buffer in kept.items():
        setattr(model.norm, name, buffer)
"""
    + SAVES,
)
bank.slip(8, "random-changed", ("with torch.random.fork_rng():", "if True:"))
bank.slip(8, "random-changed", ("fork_rng():", "fork_rng(devices=[]):"))  # the processor's alone
bank.slip(8, None, ("fork_rng():", "fork_rng([p.device for p in model.parameters() if p.is_cuda][:1]):"))
bank.slip(8, "random-changed", ("with torch.random.fork_rng():", "torch.manual_seed(0)\n    if True:"))
bank.slip(
    8,
    "random-changed",
    (
        "    with torch.random.fork_rng():\n        inputs, labels = batch_of(max(lengths))\n",
        "    inputs, labels = batch_of(max(lengths))\n    with torch.random.fork_rng():\n",
    ),
)
bank.slip(
    8,
    "cache-emptied",
    (
        "    model.zero_grad(set_to_none=True)\n",
        "    model.zero_grad(set_to_none=True)\n    torch.cuda.empty_cache()\n",
    ),
)
bank.slip(
    8,
    "goes-on-differently",
    (
        "    buffers = [",
        '    for m in model.modules():\n        if hasattr(m, "momentum"):\n            m.momentum = 0.0\n    buffers = [',
    ),
)
bank.slip(
    8,
    "goes-on-differently",
    ("    model.zero_grad(set_to_none=True)\n", "    model.zero_grad(set_to_none=True)\n    model.dropout.p = 0.0\n"),
)
bank.slip(8, "not-loss", ("F.cross_entropy(model(inputs), labels).backward()", "model(inputs).sum().backward()"))
bank.slip(8, "not-loss", ("labels).backward()", 'labels, reduction="sum").backward()'))
bank.slip(
    8,
    "random-changed",
    ("    with torch.random.fork_rng():", "    seed = torch.initial_seed()\n    if True:"),
    ("    model.zero_grad(", "    torch.manual_seed(seed)\n    model.zero_grad("),
)
bank.slip(8, "search-by-elements", ("set(shapes)", "{torch.Size(shape).numel() for shape in shapes}"))
bank.slip(
    8,
    "no-losses",
    (
        "return len(shapes) * (usual - best) - len(set(shapes)) * search",
        "return max(0.0, len(shapes) * (usual - best) - len(set(shapes)) * search)",
    ),
)
bank.slip(8, "search-each-step", ("len(set(shapes)) * search", "len(shapes) * search"))
bank.slip(8, "search-once", ("len(set(shapes)) * search", "search"))
bank.slip(8, "search-forgotten", (" - len(set(shapes)) * search", ""))
bank.slip(
    8,
    "search-when-changed",
    ("len(set(shapes)) * search", "(1 + sum(a != b for a, b in zip(shapes, shapes[1:]))) * search"),
)
bank.slip(8, "search-by-length", ("len(set(shapes))", "len({shape[1:] for shape in shapes})"))
bank.slip(8, "one-step-only", ("len(shapes) * (usual - best)", "(usual - best)"))
bank.slip(
    8,
    "sign",
    (
        "return len(shapes) * (usual - best) - len(set(shapes)) * search",
        "return len(set(shapes)) * search - len(shapes) * (usual - best)",
    ),
)
bank.slip(8, "saves-wrong", ("(usual - best)", "(usual / best)"))
bank.slip(8, "saves-wrong", ("len(shapes) * (usual", "(len(shapes) - len(set(shapes))) * (usual"))
bank.slip(
    8,
    "no-number",
    ("return len(shapes) * (usual - best) - len(set(shapes)) * search", 'return f"{len(shapes) * (usual - best)} s"'),
)
bank.slip(8, "nothing-returned", ("return len(shapes)", "saved = len(shapes)"))


bank.slip(
    8,
    "every-batch-made",
    (
        "inputs, labels = batch_of(max(lengths))",
        "inputs, labels = max(map(batch_of, lengths), key=lambda b: b[0].shape[1])",
    ),
)
bank.slip(
    7,
    "layer-replaced",
    ("                layer.bias = None\n", "                layer.bias = None\n                layer.weight = nn.Parameter(layer.weight.detach().clone())\n"),
)  # fmt: skip
