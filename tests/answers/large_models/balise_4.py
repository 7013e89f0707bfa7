"""Answers to balise 4 of 12_large_models: what each layer keeps, and the memory of a transformer by formula."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", 4, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# one list of all that was kept, taken apart at the end; sizes as products, tensor by tensor
LISTS = """
def kept_bytes(layers, x):
    kept = []

    def pack(at):
        def note(t):
            kept.append((at, t))
            return t
        return note

    for at, layer in enumerate(layers):
        with torch.autograd.graph.saved_tensors_hooks(pack(at), lambda t: t):
            x = layer(x)
    there = [t for layer in layers for t in layer.state_dict(keep_vars=True).values()]
    known, sizes = {t.untyped_storage()._cdata for t in there}, [0] * len(layers)
    for at, t in kept:
        key, size = t.untyped_storage()._cdata, t.untyped_storage().nbytes()
        if key not in known:
            known.add(key)
            sizes[at] += size
    return sizes


def predict_memory(config, batch):
    tokens = 1 + (config.image[0] // config.patch) * (config.image[1] // config.patch)
    d, wide = config.width, config.ffn_width
    per_layer = (d * 3 * d + 3 * d) + (d * d + d) + (d * wide + wide) + (wide * d + d) + 2 * 2 * d
    weights = (
        config.layers * per_layer
        + config.channels * config.patch**2 * d + d + d + tokens * d
        + 2 * d
        + d * config.classes + config.classes
    )
    x = batch * tokens * d * 4
    small = batch * tokens * 4
    block = {"norms": 2 * (2 * x + 2 * small), "qkv": 3 * x, "attention": x + small * config.heads, "gelu": 2 * x * wide / d}
    ends = batch * config.channels * config.image[0] * config.image[1] * 4 + 2 * x + 2 * small + 4 * batch * config.classes
    return {
        "activations": ends + config.layers * sum(block.values()),
        "parameters": weights * 4,
        "gradients": weights * 4,
        "optimizer states": weights * 8,
    }
"""
bank.text(None, LISTS)

# a stack of contexts; the planner's bytes for the states, the largest terms for the activations
COARSE = """
def kept_bytes(layers, x):
    there = {id(p.untyped_storage()) for layer in layers for p in itertools.chain(layer.parameters(), layer.buffers())}
    held, out = {}, []
    for layer in layers:
        before = sum(s.nbytes() for s in held.values())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.setdefault(id(t.untyped_storage()), t.untyped_storage()), t)[1], lambda t: t):
            x = layer(x)
        held = {key: s for key, s in held.items() if key not in there}
        out.append(sum(s.nbytes() for s in held.values()) - before)
    return out


def predict_memory(config, batch):
    with torch.device("meta"):
        states = planner.state_bytes(sum(p.numel() for p in ViT(config).parameters()), mixed_precision=False)
    s, d = config.patches + 1, config.width
    numbers = config.layers * s * (8 * d + 2 * config.ffn_width + config.heads + 4) + 2 * s * d
    numbers += config.channels * config.patches * config.patch**2 + config.classes
    return dict(zip(("parameters", "gradients", "optimizer states", "activations"), (states.parameters, states.gradients, states.optimizer, 4 * batch * numbers)))
"""
bank.text(None, "import itertools\n" + COARSE)

SEEN = (
    "    seen = {t.untyped_storage().data_ptr() for layer in layers for t in [*layer.parameters(), *layer.buffers()]}\n"
)
ADD = "            found[-1] += storage.nbytes()\n"
FIRST = "            seen.add(storage.data_ptr())\n"

slip("nothing-returned", ("    return found\n", ""))
hint("kept-form", "kept_bytes returns a list with one number for each layer.")
slip("kept-form", ("    return found\n", "    return sum(found)\n"))
variant("kept-form", LISTS, ("return sizes", "return dict(enumerate(sizes))"))

hint("wrong-kept", "In “{stack}”, layers[{layer}] keeps {true} bytes, not {bytes}.")
slip("wrong-kept", (ADD, "            found[-1] += storage.nbytes() // 2\n"))
variant("wrong-kept", LISTS, ("sizes[at] += size", "sizes[-1 - at] += size"))

hint("counted-twice", "In “{stack}”, you count {bytes} bytes for layers[{layer}]; {true} is right. A storage "
                         "that is kept twice, by one layer or by two, is in memory once. Remember the storages' "
                         "addresses, data_ptr(). (An object's id() is soon reused, and a view has its "
                         "own address.)")  # fmt: skip
slip("counted-twice", (FIRST, ""))
slip("counted-twice", ("            found.append(0)\n", "            found.append(0)\n            seen = {t.untyped_storage().data_ptr() for t in [*layer.parameters(), *layer.buffers()]}\n"), (
    "    def note(tensor):\n", "    def note(tensor):\n        nonlocal seen\n"))  # fmt: skip
variant("counted-twice", LISTS, ("            known.add(key)\n", ""))
slip("counted-twice", ("if storage.data_ptr() not in seen", "if id(tensor) not in seen"), ("seen.add(storage.data_ptr())", "seen.add(id(tensor))"), (
    "    def note(tensor):\n        storage = tensor.untyped_storage()\n", "    parameters, hold = set(seen), []\n\n    def note(tensor):\n        hold.append(tensor)\n        storage = tensor.untyped_storage()\n        if storage.data_ptr() in parameters:\n            return tensor\n"))  # fmt: skip

hint("parameters-counted", "In “{stack}”, you count {bytes} bytes for layers[{layer}]; {true} is right. Weights "
                              "are kept for backward too, but they are in memory anyway, and counted elsewhere. "
                              "Leave out the storages of all parameters.")  # fmt: skip
slip("parameters-counted", (SEEN, "    seen = set()\n"))
slip(
    "parameters-counted",
    (
        "        storage = tensor.untyped_storage()\n        if ",
        "        storage = tensor.untyped_storage()\n        if not isinstance(tensor, nn.Parameter) and ",
    ),
    (SEEN, "    seen = set()\n"),
)
variant("parameters-counted", LISTS, ("{t.untyped_storage()._cdata for t in there}", "set()"))

hint(
    "buffers-counted",
    "In “{stack}”, you count {bytes} bytes for layers[{layer}]; {true} is right. A buffer is in memory anyway, "
    "like a parameter. Leave it out.",
)
slip("buffers-counted", ("[*layer.parameters(), *layer.buffers()]", "layer.parameters()"))
variant("buffers-counted", LISTS, ("layer.state_dict(keep_vars=True).values()", "layer.parameters()"))

hint("bytes-of-views", "In “{stack}”, you count {bytes} bytes for layers[{layer}]; {true} is right. The layer "
                          "keeps a view, and a view keeps its whole storage alive. Count the "
                          "storage's bytes.")  # fmt: skip
slip("bytes-of-views", ("storage.nbytes()", "tensor.nbytes"))
slip("bytes-of-views", ("storage.nbytes()", "4 * tensor.numel()"))
variant("bytes-of-views", LISTS, ("t.untyped_storage().nbytes()", "t.numel() * t.element_size()"))

hint("four-bytes", "In “{stack}”, you count {bytes} bytes for layers[{layer}]; {true} is right. Not every "
                      "number has four bytes: one of a mask has one, one in float64 has eight.")  # fmt: skip
slip("four-bytes", ("storage.nbytes()", "4 * (storage.nbytes() // tensor.element_size())"))
variant("four-bytes", LISTS, ("t.untyped_storage().nbytes()", "t.untyped_storage().nbytes() // t.itemsize * 4"))

hint("outputs-counted", "In “{stack}”, you count {bytes} bytes for layers[{layer}]; {true} is right. A layer "
                           "keeps neither simply its input nor simply its output. Ask autograd, with saved-tensor "
                           "hooks.")  # fmt: skip
OUTPUTS = (
    LISTS.split("def kept_bytes")[0]
    + "def kept_bytes(layers, x):\n    sizes = []\n    for layer in layers:\n        x = layer(x)\n        sizes.append(x.nbytes)\n    return sizes\n\n\ndef predict_memory"
    + LISTS.split("def predict_memory")[1]
)
bank.text("outputs-counted", OUTPUTS)
variant("outputs-counted", OUTPUTS, ("x.nbytes", "x.untyped_storage().nbytes()"))

INPUTS = OUTPUTS.replace(
    "        x = layer(x)\n        sizes.append(x.nbytes)\n", "        sizes.append(x.nbytes)\n        x = layer(x)\n"
)
bank.text("outputs-counted", INPUTS)
variant("outputs-counted", INPUTS, ("x.nbytes", "x.numel() * x.element_size()"))

hint("sums-so-far", "In “{stack}”, you count {bytes} bytes for layers[{layer}]; {true} is right. Yours looks "
                       "like the sum of this layer and those before it. Start at 0 for each layer.")  # fmt: skip
slip("sums-so-far", ("found.append(0)", "found.append(found[-1] if found else 0)"))
variant("sums-so-far", LISTS, ("return sizes", "return [sum(sizes[: i + 1]) for i in range(len(sizes))]"))

hint(
    "parts-form",
    'predict_memory returns a dictionary with the keys "parameters", "gradients", "optimizer states" and "activations".',
)
slip("parts-form", ('"optimizer states"', '"states"'))
variant("parts-form", LISTS, ('"optimizer states"', '"optimizer"'))

hint("model-run", "predict_memory ran the model. It must predict: use formulas, and compute nothing with the model.")
slip(
    "model-run",
    ("    s, d, f, h", "    model = ViT(config)\n    model(torch.zeros(batch, 3, *config.image))\n    s, d, f, h"),
    (
        'with torch.device("meta"):\n        n = sum(p.numel() for p in ViT(config).parameters())',
        'with torch.device("meta"):\n        n = sum(p.numel() for p in ViT(config).parameters())\n    torch.set_default_device("meta")',
    ),
)
variant(
    "model-run",
    LISTS,
    (
        "    tokens = 1 +",
        "    with torch.device('meta'):\n        ViT(config)(torch.zeros(batch, 3, 224, 224))\n    tokens = 1 +",
    ),
)

hint("weights-allocated", "predict_memory allocated large tensors. It must also work for a model of 100 billion "
                             "parameters: build the model on the meta device, or count by formula.")  # fmt: skip
slip("weights-allocated", ('torch.device("meta")', 'torch.device("cpu")'))
variant("weights-allocated", LISTS, ("    tokens = 1 +", "    ViT(config)\n    tokens = 1 +"))

hint(
    "wrong-parameters",
    "For four transformers, your bytes of the parameters, divided by the true ones, give {ratios}.",
)
slip("wrong-parameters", ('"parameters": 4 * n', '"parameters": n'))
variant("wrong-parameters", LISTS, ("+ d + d + tokens * d", "+ d + d"))
hint(
    "wrong-gradients",
    "For four transformers, your bytes of the gradients, divided by the true ones, give {ratios}. Each parameter "
    "has one gradient, in float32.",
)
slip("wrong-gradients", ('"gradients": 4 * n', '"gradients": 2 * n'))
variant("wrong-gradients", LISTS, ('"gradients": weights * 4', '"gradients": weights * 8'))
hint(
    "wrong-states",
    "For four transformers, your bytes of the optimizer states, divided by the true ones, give {ratios}. AdamW "
    "keeps two numbers for each parameter.",
)
slip("wrong-states", ('"optimizer states": 8 * n', '"optimizer states": 4 * n'))
slip("wrong-states", ('"optimizer states": 8 * n', '"optimizer states": 12 * n'))
variant("wrong-states", LISTS, ('"optimizer states": weights * 8', '"optimizer states": weights * 16'))

hint(
    "wrong-activations",
    "For four transformers (one with many tokens, one with few, one mostly head, one mostly image), your "
    "activations divided by the measured ones give {ratios}. Go through the table, operation by operation.",
)
slip("wrong-activations", ("head = norm + s * d + config.classes", "head = 9 * config.classes"))
slip("wrong-activations", ("norm = s * (d + 2)", "norm = s * 2 * d"))
variant("wrong-activations", LISTS, ("config.layers * sum", "2 * sum"))


def activations(slug, text, change, other):
    """A hint for a term of the formula: a slip of the solution, and the same in the other design."""
    hint(slug, text + " Your bytes divided by the measured ones: {ratios}.")
    slip(slug, change)
    variant(slug, LISTS, other)


activations("gelu-once", "After the wide linear layer, two tensors of width ffn_width are kept: GELU's input, and its output, which the next layer reads.",
            ("s * (d + f + f)", "s * (d + f)"), ("2 * x * wide / d", "x * wide / d"))  # fmt: skip
activations("scores-counted", "Fused attention keeps no scores: only one number for each head and token, not one for each pair of tokens.",
            ("d + h)", "d + h * s)"), ("small * config.heads", "small * config.heads * tokens"))  # fmt: skip
activations("sums-counted", "A sum keeps nothing: its output is the input of the next norm, and is counted there.",
            ("config.layers * (norm", "config.layers * (2 * s * d + norm"), ('"qkv": 3 * x', '"qkv": 3 * x + x + x'))  # fmt: skip
activations("norm-outputs-missing", "In each block, one tensor of the size of its input is missing. A layer norm's output is the input of a linear layer, and is kept beside the norm's own input. The output of attention is kept too.",
            ("3 * d + d + h", "3 * d + h"), ("2 * (2 * x", "2 * (1.5 * x"))  # fmt: skip
activations("qkv-once", "In each block, two tensors of the size of its input are missing. Queries, keys and values are three such tensors. Each of the two norms keeps its input, and the linear layer after it keeps the norm's output.",
            ("3 * d + d + h", "d + d + h"), ('"qkv": 3 * x', '"qkv": x'))  # fmt: skip
slip("qkv-once", ("s * (d + 3 * d + d + h)", "s * (3 * d + d + h)"), ("s * (d + f + f)", "s * (f + f)"))
slip("qkv-once", ("norm = s * (d + 2)", "norm = s * 2"))
activations("no-image", "The convolution keeps its input, the image.",
            ("image = config", "image = 0 * config"), ("ends = batch *", "ends = 0 * batch *"))  # fmt: skip
activations("no-batch", "Activations are kept for each image of the batch.",
            ("4 * batch * kept", "4 * kept"), ("        \"activations\": ends + config.layers * sum(block.values())", "        \"activations\": (ends + config.layers * sum(block.values())) / batch"))  # fmt: skip
activations("numbers-not-bytes", "The unit is wrong: give bytes, four for each number in float32.",
            ("4 * batch * kept", "batch * kept"), ("        \"activations\": ends + config.layers * sum(block.values())", "        \"activations\": (ends + config.layers * sum(block.values())) // 4"))  # fmt: skip
activations("no-class-token", "With the class token, there is one token more than there are patches.",
            ("config.patches + 1", "config.patches"), ("    x = batch", "    tokens -= 1\n    x = batch"))  # fmt: skip
activations("no-logits", "The cross-entropy keeps one number for each class.",
            (" + config.classes", ""), (" + 4 * batch * config.classes", ""))  # fmt: skip
activations("ends-missing", "After the blocks, the norm keeps its input, all tokens, and the head keeps the norm's whole output, because the class token is a view of it.",
            ("head = norm + s * d", "head = s * d"), ("* 4 + 2 * x + 2 * small", "* 4 + x"))  # fmt: skip
slip("ends-missing", ("head = norm + s * d", "head = norm + d"))
slip("ends-missing", ("head = norm + s * d", "head = d"))
slip("norm-outputs-missing", ("(norm + attention + norm", "(norm + attention"))
activations(
    "one-block",
    "You count one block; there are config.layers.",
    ("config.layers * (norm", "(norm"),
    ("config.layers * sum", "sum"),
)

ESTIMATED = (
    LISTS.split("def predict_memory")[0]
    + """def predict_memory(config, batch):
    make = lambda parameters: torch.optim.AdamW(parameters)
    found = measure.estimate_memory(lambda: ViT(config), (config.channels, *config.image), batch, make)
    states = {"parameters": found.parameters, "gradients": found.parameters, "optimizer states": 2 * found.parameters}
    return states | {"activations": found.activations}
"""
)
bank.text("model-run", ESTIMATED, variant=True)

activations("small-terms", "A small term is missing. Beside its input, a layer norm keeps a mean and a deviation for each token, and fused attention keeps one number for each head and token.",
            ("s * (d + 2)", "s * d"), ("2 * (2 * x + 2 * small)", "2 * (2 * x)"))  # fmt: skip
slip("small-terms", ("3 * d + d + h)", "3 * d + d)"))
slip("small-terms", ("3 * d + d + h)", "3 * d + d)"), ("s * (d + 2)", "s * d"))
slip("small-terms", ("3 * d + d + h)", "3 * d + d + 1)"))
slip("small-terms", ("s * (d + 2)", "s * (d + 1)"))
variant("small-terms", LISTS, ("x + small * config.heads", "x"))

bank.edge(
    "buffers-counted",
    "bytes-of-views",
    "counted-twice",
    "ends-missing",
    "four-bytes",
    "no-class-token",
    "no-image",
    "no-logits",
    "small-terms",
)

bank.edge("gelu-once", "sums-counted")
