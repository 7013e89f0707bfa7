"""Answers to balise 6 of 21_fine_tuning: merge, unmerge, an adapter in a file."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 6, whole=True)

# the weight is kept and given back; one file opened once
KEPT = """
def merge(model):
    for module in model.modules():
        if isinstance(module, LoRALinear) and not getattr(module, "merged", False):
            w = module.linear.weight
            module.__dict__["kept"] = w.detach().clone()
            w.data.add_(torch.einsum("or,ri->oi", module.B.data, module.A.data), alpha=module.scale)
            module.merged = True
            module.forward = functools.partial(alone, module.linear)


def alone(linear, x):
    return F.linear(x, linear.weight, linear.bias)


def unmerge(model):
    for module in model.modules():
        if isinstance(module, LoRALinear) and "kept" in vars(module):
            module.linear.weight.data.copy_(module.__dict__.pop("kept"))
            module.merged = False
            module.__dict__.pop("forward")


def save_adapter(model, path):
    state = model.state_dict()
    own = {name + end for name in adapters(model) for end in (".A", ".B")}
    save_file({name: state[name].clone(memory_format=torch.contiguous_format) for name in own}, str(path), {"base": fingerprint(model)})


def load_adapter(model, path):
    with safe_open(str(path), framework="pt") as file:
        if (file.metadata() or {}).get("base") != fingerprint(model):
            raise ValueError("another base")
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    model.load_state_dict(tensors, strict=False)
"""
bank.text(None, KEPT)

# hooks in the place of another forward; the change is computed by columns
HOOKED = """
def change(layer):
    return sum(torch.outer(layer.B[:, k], layer.A[k]) for k in range(len(layer.A))).detach() * layer.scale


def merge(model):
    for name, layer in adapters(model).items():
        if "merged" in layer.__dict__ and layer.merged:
            continue
        layer.merged = True
        with torch.no_grad():
            layer.linear.weight.copy_(layer.linear.weight + change(layer))
        layer.forward = lambda x, layer=layer: layer.linear(x)


def unmerge(model):
    for name, layer in adapters(model).items():
        if getattr(layer, "merged", None):
            layer.merged = False
            with torch.no_grad():
                layer.linear.weight.sub_(change(layer))
            layer.__dict__.pop("forward")


def save_adapter(model, path):
    tensors = {}
    for name, layer in adapters(model).items():
        tensors[name + ".A"] = layer.A.data.contiguous()
        tensors[name + ".B"] = layer.B.data.contiguous()
    save_file(tensors, path, metadata=dict(base=fingerprint(model)))


def load_adapter(model, path):
    with safe_open(path, "pt") as file:
        assert_same(file.metadata()["base"], fingerprint(model))
    found = load_file(path)
    for name, layer in adapters(model).items():
        layer.A.data[:] = found[name + ".A"]
        layer.B.data[:] = found[name + ".B"]


def assert_same(one, other):
    if one != other:
        raise ValueError("another base")
"""
COPIED = ("lambda x, layer=layer: layer.linear(x)", "layer.linear.forward")
bank.text(None, HOOKED.replace(*COPIED))

# the layer looks at its mark: what merge and unmerge do is a sum, a difference and the mark
MARKED = """
class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale, self.merged = linear.requires_grad_(False), alpha / rank, False
        self.A = nn.Parameter(torch.randn(rank, linear.in_features).to(linear.weight))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank).to(linear.weight))

    def forward(self, x):
        if self.merged:
            return self.linear(x)
        return self.linear(x) + self.scale * (x @ self.A.T @ self.B.T)


def adapters(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def turned(model, merged):
    for layer in adapters(model).values():
        if layer.merged != merged:
            sign = 1 if merged else -1
            layer.linear.weight = nn.Parameter(layer.linear.weight + sign * layer.scale * layer.B @ layer.A, requires_grad=False)
            layer.A.requires_grad_(not merged)
            layer.B.requires_grad_(not merged)
            layer.merged = merged


def merge(model):
    turned(model, True)


def unmerge(model):
    turned(model, False)
""" + KEPT[KEPT.index("\n\ndef save_adapter") :]
bank.text(None, MARKED)

# balise 5 is not done, or wrong
WRONG_LAYER = """
class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.scale = {scale}


def adapters(model):
    return {{name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}}

"""
bank.text(None, WRONG_LAYER.format(scale="todo(5)") + KEPT)
bank.text(None, WRONG_LAYER.format(scale="rank / alpha") + HOOKED.replace(*COPIED))

bank.hint("wrong-weight", "A merged weight is not W + scale · B A, with the current A and B. Add that product "
                             "to the linear.weight of each layer, once.")  # fmt: skip
bank.slip("wrong-weight", ("layer.linear.weight += layer.scale * layer.B @ layer.A", "pass"))
bank.slip("wrong-weight", ("weight += layer.scale", "weight -= layer.scale"))
bank.variant("wrong-weight", KEPT, ("w.data.add_(", "w.data.copy_(7 * w.data).add_("))

bank.hint("no-scale", "The merged weight lacks the scale. The layer computes alpha / rank · B A x, so add "
                         "exactly that.")  # fmt: skip
bank.slip("no-scale", ("weight += layer.scale * layer.B", "weight += layer.B"), ("weight -= layer.scale * layer.B", "weight -= layer.B"))  # fmt: skip
bank.variant("no-scale", MARKED, ("sign * layer.scale * layer.B", "sign * layer.B"))
bank.variant("no-scale", KEPT, (", alpha=module.scale", ""))

bank.hint("no-mark", "Each LoRALinear has its own mark: `merged` is True after merge and False after unmerge.")
bank.slip("no-mark", ("layer.merged, layer.forward = True,", "layer.is_merged, layer.forward = True,"), ('"merged", False', '"is_merged", False'), ("layer.merged = False", "layer.is_merged = False"))  # fmt: skip
bank.slip("no-mark", ("            layer.merged = False\n", ""))
bank.variant("no-mark", HOOKED, COPIED, ("        layer.merged = True\n", "        model.merged = True\n"))

bank.hint("not-linear-alone", "A merged layer doesn't compute linear(x) alone. With A and B still in forward, "
                                 "the adapter counts twice, or is computed for nothing. While a layer is merged, "
                                 "forward must be that of `linear`.")  # fmt: skip
bank.slip("not-linear-alone", ("layer.merged, layer.forward = True, layer.linear.forward", "layer.merged = True"), ("            del layer.forward\n", ""))  # fmt: skip
bank.slip("not-linear-alone", ("True, layer.linear.forward", "True, layer.linear"))
bank.slip("not-linear-alone", ("layer.forward = True, layer.linear.forward", "hook = True, layer.register_forward_hook(lambda m, given, _: m.linear(*given))"), ("del layer.forward", "layer.hook.remove()"))  # fmt: skip
bank.variant("not-linear-alone", HOOKED, COPIED, ("        layer.forward = layer.linear.forward\n", "        layer.at, layer.scale = layer.scale, 0.0\n"))  # fmt: skip
bank.variant("not-linear-alone", KEPT, ("functools.partial(alone, module.linear)", "functools.partial(type(module).forward, module)"))  # fmt: skip

bank.hint("merged-twice", "A second merge, of the model or of a part of it, adds the adapter again. Skip each "
                             "layer whose mark says that it is merged.")  # fmt: skip
bank.slip("merged-twice", ('if not getattr(layer, "merged", False)', "if True"))
bank.slip("merged-twice", ("    for layer in adapters(model).values():\n        if not getattr(layer, \"merged\", False)", "    if getattr(model, \"done\", False):\n        return\n    model.done = True\n    for layer in adapters(model).values():\n        if True"))  # fmt: skip
bank.variant("merged-twice", KEPT, (' and not getattr(module, "merged", False)', ""))

bank.hint("shared-copy", "A deep copy of a merged model is not independent of it. Does a lambda or another "
                            "function still refer to the layer that was copied? A bound method, such as "
                            "layer.linear.forward, is copied along.")  # fmt: skip
bank.text("shared-copy", HOOKED)
bank.variant(
    "shared-copy",
    KEPT,
    ("functools.partial(alone, module.linear)", "(lambda x, linear=module.linear: alone(linear, x))"),
)

bank.hint("wrong-unmerge", "After unmerge, a layer is not what it was before. Subtract what merge added, only "
                              "where the mark says that the layer is merged, and let forward use A and B again.")  # fmt: skip
bank.slip("wrong-unmerge", ("weight -= layer.scale", "weight += layer.scale"))
bank.slip("wrong-unmerge", ("weight -= layer.scale * layer.B", "weight -= layer.B"))
bank.slip("wrong-unmerge", ('if getattr(layer, "merged", False)', "if True"), ("del layer.forward", 'layer.__dict__.pop("forward", None)'))  # fmt: skip
bank.variant("wrong-unmerge", HOOKED, COPIED, ("weight.sub_", "weight.add_"))

bank.slip("wrong-unmerge", ("            del layer.forward\n", ""))
bank.variant("wrong-unmerge", KEPT, ('            module.__dict__.pop("forward")\n', ""))

bank.hint("other-parameters", "The model's parameters are not the same as before: A or B is a new object, the "
                                 "state_dict has a new name, or the base learns or is attached to a graph. "
                                 "Optimizers and files know the old ones. Change values in place, under "
                                 "torch.no_grad().")  # fmt: skip
bank.slip("other-parameters", ("@torch.no_grad()\ndef merge", "def merge"), ("layer.linear.weight += layer.scale * layer.B @ layer.A", "layer.linear.weight.add_(layer.scale * layer.B @ layer.A)"))  # fmt: skip
bank.slip("other-parameters", ("layer.linear.weight += layer.scale * layer.B @ layer.A", "layer.linear.weight = nn.Parameter(layer.linear.weight + layer.scale * layer.B @ layer.A)"))  # fmt: skip
bank.slip("other-parameters", ("        model.get_parameter(name).copy_(value)", '        owner, _, own = name.rpartition(".")\n        setattr(model.get_submodule(owner), own, nn.Parameter(value))'))  # fmt: skip
bank.slip("other-parameters", ("layer.merged, layer.forward", 'layer.register_buffer("delta", layer.B @ layer.A)\n            layer.merged, layer.forward'))  # fmt: skip
bank.variant("other-parameters", MARKED, (", requires_grad=False", ""))
bank.variant("other-parameters", KEPT, ("model.load_state_dict(tensors, strict=False)", "model.load_state_dict(tensors, strict=False, assign=True)"))  # fmt: skip

bank.hint("wrong-names", "The file must contain A and B of each LoRALinear under their names in the model, such "
                            "as `3.A`, and no other tensors. The base is not in it: that is what makes the file "
                            "small.")  # fmt: skip
bank.slip("wrong-names", ("    save_file(tensors", "    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}\n    save_file(tensors"))  # fmt: skip
bank.slip("wrong-names", ('f"{name}.{part}"', 'f"{part}.{name}"'))
bank.slip("wrong-names", ('f"{name}.{part}"', "part"))
bank.variant("wrong-names", KEPT, ('name + end for name in adapters(model) for end in (".A", ".B")', 'name for name in state if name.endswith(("A", "B", "weight"))'))  # fmt: skip

bank.hint("no-base", "The file's metadata doesn't have fingerprint(model) under the key \"base\", so nobody can "
                        "tell to which base the adapter belongs. Give save_file the argument metadata.")  # fmt: skip
bank.slip("no-base", ('metadata={"base": fingerprint(model)}', "metadata=None"))
bank.slip("no-base", ('"base": fingerprint(model)', '"base": str(path)'))
bank.variant("no-base", HOOKED, COPIED, ("dict(base=", "dict(model="))

bank.hint("wrong-values", "After saving and loading, the adapter is not what it was. You need both A and B of "
                             "each layer, unchanged, and everything else in the model must stay.")  # fmt: skip
bank.slip("wrong-values", ("layer, part).detach()", "layer, part).detach().half()"))
bank.slip(
    "wrong-values",
    ("        model.get_parameter(name).copy_(value)", "        model.get_parameter(name).clone().copy_(value)"),
)
bank.slip(
    "wrong-values",
    ("getattr(layer, part).detach()", '(getattr(layer, part).detach() * (layer.scale if part == "B" else 1))'),
)
bank.variant("wrong-values", HOOKED, COPIED, ('        layer.B.data[:] = found[name + ".B"]\n', ""))

bank.hint("other-base", "A file of another base must raise a ValueError and change nothing: here {what}. "
                           'Compare file.metadata()["base"] with fingerprint(model) before you copy.')  # fmt: skip
bank.slip(
    "other-base",
    ('            raise ValueError(f"{path} is an adapter of another base model")', "            print(path)"),
)
bank.slip("other-base", ("raise ValueError(", "raise KeyError("))
bank.slip("other-base", ('file.metadata()["base"] != fingerprint(model)', 'not file.metadata()["base"]'))
bank.variant("other-base", HOOKED, COPIED, ('    with safe_open(path, "pt") as file:\n        assert_same(file.metadata()["base"], fingerprint(model))\n', ""), ('".B"]\n\n\ndef', '".B"]\n    with safe_open(path, "pt") as file:\n        assert_same(file.metadata()["base"], fingerprint(model))\n\n\ndef'))  # fmt: skip
