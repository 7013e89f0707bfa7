"""Answers to balise 8 of 21_fine_tuning: a LoRA layer on a packed base, and the bits that it holds."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 8, whole=True)

# a checkpoint unpacks again in backward
BY_CHECKPOINT = """
from torch.utils.checkpoint import checkpoint


class QLoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.scale, self.bias = alpha / rank, linear.bias
        if linear.bias is not None:
            linear.bias.requires_grad = False
        codes, scales, steps, mean, self.shape = to_nf4(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("steps", steps)
        self.register_buffer("mean", mean)
        out, inputs = linear.weight.shape
        self.A = nn.Parameter(linear.weight.new_empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5))
        self.B = nn.Parameter(linear.weight.new_zeros(out, rank))

    def base(self, x):
        weight = from_nf4(Packed(self.codes, self.scales, self.steps, self.mean, self.shape))
        return F.linear(x, weight.to(x.dtype), self.bias)

    def forward(self, x):
        return checkpoint(self.base, x, use_reentrant=False) + x @ self.A.mT @ self.B.mT * self.scale


def held_bits(model):
    bits = numbers = 0
    for layer in model.modules():
        if type(layer) is QLoRALinear:
            bits += sum(8 * t.element_size() * t.numel() for t in (layer.codes, layer.scales, layer.steps, layer.mean))
            numbers += layer.A.shape[1] * layer.B.shape[0]
    return bits / numbers
"""
bank.text(None, BY_CHECKPOINT)

# autograd saves a word in place of the weight
BY_HOOKS = """
class QLoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.scale, self.bias = alpha / rank, linear.bias
        packed = to_nf4(linear.weight.detach())
        self.shape = tuple(linear.weight.shape)
        for name in packed._fields[:-1]:
            self.register_buffer("packed_" + name, getattr(packed, name).clone())
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.adapt = nn.ParameterList()
        self.A = nn.Parameter(torch.empty_like(linear.weight[:1]).repeat(rank, 1))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)
        self.B = nn.Parameter(torch.zeros_like(linear.weight[:, :1]).repeat(1, rank))

    def weight(self, dtype):
        return from_nf4(Packed(self.packed_codes, self.packed_scales, self.packed_steps, self.packed_mean, self.shape)).to(dtype)

    def forward(self, x):
        def pack(tensor):
            return ("weight", tensor.shape, tensor.dtype) if tensor.numel() == math.prod(self.shape) and not tensor.requires_grad else tensor

        def unpack(saved):
            if not isinstance(saved, tuple):
                return saved
            weight = self.weight(saved[2])
            return weight if weight.shape == saved[1] else weight.T

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = x @ self.weight(x.dtype).T
        if self.bias is not None:
            y = y + self.bias
        return y + self.scale * ((x @ self.A.T) @ self.B.T)


def held_bits(model):
    layers = [m for m in model.modules() if isinstance(m, QLoRALinear)]
    held = [8 * b.nbytes for m in layers for n, b in m.named_buffers() if n.startswith("packed_")]
    return sum(held) / sum(m.shape[0] * m.shape[1] for m in layers)
"""
bank.text(None, BY_HOOKS)
bank.text(None, BY_CHECKPOINT.replace("use_reentrant=False", "use_reentrant=True"))
bank.slip(None, ("return gradient @ from_nf4(ctx.packed).to(gradient.dtype), None", "return (gradient @ from_nf4(ctx.packed).to(gradient.dtype) if ctx.needs_input_grad[0] else None), None"))  # fmt: skip

APPLIED = "_PackedLinear.apply(x, packed)"
REGISTERED = "self.register_buffer(name, getattr(packed, name))"
UNPACKED = "F.linear(x, from_nf4(packed).to(x.dtype))"

bank.slip("nothing-returned", ("return y if self.bias is None else y + self.bias", "y if self.bias is None else y + self.bias"))  # fmt: skip

bank.hint("other-learns", "A, of shape (rank, in), and B, of shape (out, rank), must learn, and nothing else: "
                             "the bias needs `requires_grad_(False)`. Compare names and shapes below.")  # fmt: skip
bank.slip("other-learns", ("self.bias.requires_grad_(False)", "pass"), ("LoRALinear(linear,", "LoRALinear(copy.deepcopy(linear),"))  # fmt: skip
bank.variant("other-learns", BY_CHECKPOINT, ("linear.bias.requires_grad = False", "pass"))
bank.slip("other-learns", ("self.A, self.B = adapter.A, adapter.B", "self.A, self.B = adapter.A.detach(), adapter.B"))  # fmt: skip
bank.slip("other-learns", ("adapter = LoRA", "self.linear = linear\n        adapter = LoRA"), ("        adapter = LoRALinear(linear, rank, alpha)", "        adapter = LoRALinear(linear, rank, alpha)\n        linear.weight.requires_grad_()"))  # fmt: skip
bank.variant("other-learns", BY_CHECKPOINT, ("new_zeros(out, rank)", "new_zeros(out, rank), False"))

bank.hint("other-start", "At first nothing changes: B is zero. Draw A as nn.Linear draws a weight, uniformly "
                            "between ±1/√in.")  # fmt: skip
bank.slip("other-start", ("self.A, self.B = adapter.A, adapter.B", "self.A, self.B = adapter.A, nn.Parameter(torch.randn_like(adapter.B))"))  # fmt: skip
bank.slip("other-start", ("self.A, self.B = adapter.A, adapter.B", "self.A, self.B = nn.Parameter(torch.randn_like(adapter.A)), adapter.B"))  # fmt: skip
bank.variant("other-start", BY_CHECKPOINT, ("new_zeros(out, rank)", "new_zeros(out, rank).normal_()"))
bank.variant("other-start", BY_HOOKS, ("nn.init.kaiming_uniform_(self.A, a=5**0.5)", "nn.init.zeros_(self.A)"))

bank.hint("full-weight", "The layer holds more than the packed weight, A, B and the bias. Does an attribute, "
                            "such as `linear` or an adapter, still refer to the full weight, or to an unpacked "
                            "copy?")  # fmt: skip
bank.slip("full-weight", ("adapter = LoRALinear", "self.adapter = adapter = LoRALinear"))
bank.slip("full-weight", ("self.scale, self.bias = alpha / rank, linear.bias", "self.scale, self.bias, self.linear = alpha / rank, linear.bias, linear"))  # fmt: skip
bank.slip("full-weight", ("self.shape = packed.shape", "self.shape = packed.shape\n        self.weight = from_nf4(packed)"))  # fmt: skip
bank.variant("full-weight", BY_CHECKPOINT, ("        out, inputs", "        self.given = [linear]\n        out, inputs"))  # fmt: skip
bank.variant("full-weight", BY_HOOKS, ("        self.adapt = nn.ParameterList()", "        self.weight_of = lambda w=linear.weight.detach().bfloat16(): w"))  # fmt: skip

bank.hint("out-form", "x of shape (..., in) becomes (..., out), in the dtype of x. from_nf4 returns float32: "
                         "convert the weight to x's dtype where you use it. A and B have the dtype of the linear "
                         "layer's weight.")  # fmt: skip
bank.slip("out-form", ("return y if self.bias is None else y + self.bias", "return (y if self.bias is None else y + self.bias).flatten(0, -2)"))  # fmt: skip
bank.variant("out-form", BY_CHECKPOINT, ("* self.scale\n", "* torch.tensor([self.scale], dtype=torch.float64)\n"))
bank.slip("out-form", ("return x @ from_nf4(packed).to(x.dtype).T", "return x @ from_nf4(packed).T"))
bank.slip("out-form", ("self.A, self.B = adapter.A, adapter.B", "self.A, self.B = nn.Parameter(adapter.A.float()), nn.Parameter(adapter.B.float())"))  # fmt: skip
bank.variant("out-form", BY_CHECKPOINT, ("weight.to(x.dtype), self.bias", "weight, self.bias"))

bank.hint("wrong-forward", "y = x Wᵀ + bias + alpha / rank · B A x, with W as from_nf4 returns it. Which part "
                              "is missing or has another factor?")  # fmt: skip
bank.slip("wrong-forward", ("return y if self.bias is None else y + self.bias", "return y"))
bank.slip("wrong-forward", ("+ self.scale * F.linear(", "+ F.linear("))
bank.slip("wrong-forward", ("alpha / rank, linear.bias", "rank / alpha, linear.bias"))
bank.slip("wrong-forward", ("self.scale * F.linear(F.linear(x, self.A), self.B)", "0 * F.linear(F.linear(x, self.A), self.B)"))  # fmt: skip
bank.variant("wrong-forward", BY_CHECKPOINT, ("weight.to(x.dtype), self.bias", "weight.to(x.dtype)"))
bank.variant("wrong-forward", BY_HOOKS, ("self.scale * ((x", "((x"))

bank.hint("no-gradient", "No gradient reaches {what}. Only the packed tensors and the bias are constants; x, A "
                            "and B are part of the graph.")  # fmt: skip
bank.slip("no-gradient", (APPLIED, "(x.detach() @ from_nf4(packed).to(x.dtype).T)"), ("F.linear(F.linear(x,", "F.linear(F.linear(x.detach(),"))  # fmt: skip
bank.slip("no-gradient", ('"""x (..., in) to (..., out)."""', "x = x.detach()"))
bank.variant("no-gradient", BY_CHECKPOINT, ("checkpoint(self.base, x, use_reentrant=False) + x @ self.A.mT", "checkpoint(self.base, x, use_reentrant=False) + x @ self.A.detach().mT"))  # fmt: skip

bank.hint("wrong-gradient", "A gradient is wrong. The one of x goes through the packed weight, g · W, and "
                               "through the adapter, alpha / rank · g B A.")  # fmt: skip
bank.slip("wrong-gradient", ("return gradient @ from_nf4(ctx.packed).to(gradient.dtype), None", "return None, None"))
bank.slip("wrong-gradient", (APPLIED, "_PackedLinear.apply(x.detach(), packed)"))
bank.slip("wrong-gradient", ("F.linear(F.linear(x, self.A), self.B)", "F.linear(F.linear(x.detach(), self.A), self.B)"))
bank.variant("wrong-gradient", BY_CHECKPOINT, ("checkpoint(self.base, x, use_reentrant=False)", "self.base(x.detach())"))  # fmt: skip

bank.hint("saved-for-backward", "Between forward and backward, something as large as the weight stays in "
                                   "memory: {got[0]:,} bytes. The gradient of x needs the weight, and autograd "
                                   "saves what backward needs. Unpack the weight again in backward instead, and "
                                   "don't form the product of B and A.")  # fmt: skip
bank.slip("saved-for-backward", (APPLIED, UNPACKED))
bank.slip("saved-for-backward", ("F.linear(F.linear(x, self.A), self.B)", "F.linear(x, self.B @ self.A)"))
bank.slip("saved-for-backward", ("ctx.packed = packed", "ctx.packed, ctx.weight = packed, from_nf4(packed)"))
bank.slip("saved-for-backward", (APPLIED, "x @ from_nf4(packed).to(x.dtype).T"), ("+ self.scale *", "+ 1.0 * self.scale *"))  # fmt: skip
bank.variant("saved-for-backward", BY_CHECKPOINT, ("checkpoint(self.base, x, use_reentrant=False)", "self.base(x)"))
bank.variant("saved-for-backward", BY_HOOKS, ('return ("weight", tensor.shape, tensor.dtype) if', "return tensor if"))

bank.hint("kept-for-good", "After backward, something as large as the weight is still in memory: {got[1]:,} "
                              "bytes. Unpack the weight in each call, and keep it nowhere.")  # fmt: skip
bank.slip("kept-for-good", (APPLIED, UNPACKED.replace("from_nf4(packed)", "self.weight")), ("        y = F", '        if not hasattr(self, "weight"):\n            self.weight = from_nf4(packed)\n        y = F'))  # fmt: skip
bank.variant("kept-for-good", BY_CHECKPOINT, ("        return F.linear(x, weight", "        self.last = weight\n        return F.linear(x, weight"))  # fmt: skip

bank.hint("not-in-state", "The packed weight is not in the state_dict, so another layer that loads it computes "
                             "something else. Register each tensor of the Packed as a buffer, and compute with the "
                             "buffers.")  # fmt: skip
bank.slip("not-in-state", (REGISTERED, "setattr(self, name, getattr(packed, name))"))
bank.slip("not-in-state", (REGISTERED, "self.register_buffer(name, getattr(packed, name), persistent=False)"))
bank.variant("not-in-state", BY_CHECKPOINT, ('self.register_buffer("scales", scales)', "self.scales = scales"))

bank.hint("left-behind", "Some tensors don't move with `.to(device)`. Keep only the buffers, and build the "
                            "Packed from them in forward.")  # fmt: skip
bank.slip("left-behind", ("self.shape = packed.shape", "self.shape, self.packed = packed.shape, packed"))
bank.variant("left-behind", BY_CHECKPOINT, ("        out, inputs", "        self.codes_too = (codes,)\n        out, inputs"))  # fmt: skip

bank.hint("wrong-bits", "Take the bits (8 for each byte) of codes, scales, steps and mean of all QLoRALinear "
                           "layers, and divide by the number of all their weights. A, B, biases and other layers "
                           "don't count.")  # fmt: skip
bank.slip("wrong-bits", ("in layer.named_buffers()", "in [*layer.named_buffers(), *layer.named_parameters()]"))
bank.slip("wrong-bits", ("for layer in layers for name, tensor in layer.named_buffers()", "for name, tensor in model.named_buffers()"))  # fmt: skip
bank.slip("wrong-bits", ("return 8 * held / sum(math.prod(layer.shape) for layer in layers)", "return sum(8 * sum(t.nbytes for t in layer.buffers()) / math.prod(layer.shape) for layer in layers) / len(layers)"))  # fmt: skip
bank.slip("wrong-bits", ("return 8 * held", "return held"))
bank.slip("wrong-bits", ("tensor.nbytes for", "layer.codes.nbytes / 4 for"))
bank.slip("wrong-bits", ("in model.modules()", "in model.children()"), ("    held =", "    layers = layers or [model]\n    held ="))  # fmt: skip
bank.variant("wrong-bits", BY_CHECKPOINT, ("layer.codes, layer.scales, layer.steps, layer.mean", "layer.codes, layer.scales"))  # fmt: skip
bank.variant("wrong-bits", BY_HOOKS, ("m.shape[0] * m.shape[1] for m in layers", "p.numel() for p in model.parameters()"))  # fmt: skip
