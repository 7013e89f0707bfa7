"""Answers to balise 5 of 21_fine_tuning: LoRA."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 5, whole=True)
# fmt: off

# adapters drawn by nn.Linear, products written with @, names from named_modules
BY_PATHS = """
class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        for p in linear.parameters():
            p.requires_grad = False
        down = nn.Linear(linear.in_features, rank, bias=False)
        self.A = nn.Parameter(down.weight.data.to(linear.weight))
        self.B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))

    def forward(self, x):
        down = x @ self.A.T
        return self.linear(x) + (down @ self.B.T) * self.scale


def with_lora(model, names, rank, alpha):
    for p in model.parameters():
        p.requires_grad = False
    for path, module in list(model.named_modules()):
        parent, _, last = path.rpartition(".")
        if isinstance(module, nn.Linear) and last in names:
            setattr(model.get_submodule(parent), last, LoRALinear(module, rank, alpha))
    return model


def lora_numbers(shapes, rank):
    numbers = 0
    for out, inside in shapes:
        numbers += rank * inside
        numbers += rank * out
    return numbers, numbers * 2 * 4
"""
bank.text(None, BY_PATHS)

# bounds by hand, einsum, the scale on x, recursion
BY_RECURSION = """
class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        W = linear.weight
        W.requires_grad = False
        if linear.bias is not None:
            linear.bias.requires_grad = False
        bound = 1 / math.sqrt(W.shape[1])
        A = (2 * torch.rand(rank, W.shape[1]) - 1) * bound
        self.register_parameter("A", nn.Parameter(A.to(W.device, W.dtype)))
        self.register_parameter("B", nn.Parameter(torch.zeros(W.shape[0], rank).to(W.device, W.dtype)))

    def forward(self, x):
        y = F.linear(x, self.linear.weight)
        y = y + torch.einsum("...i,ri,or->...o", self.scale * x, self.A, self.B)
        return y if self.linear.bias is None else y + self.linear.bias


def with_lora(model, names, rank, alpha):
    model.requires_grad_(False)
    def visit(module):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and name in set(names):
                setattr(module, name, LoRALinear(child, rank, alpha))
            else:
                visit(child)
    visit(model)
    return model


def lora_numbers(shapes, rank):
    numbers = sum(rank * sum(shape) for shape in shapes)
    return [torch.tensor(numbers), 8.0 * numbers]
"""
bank.text(None, BY_RECURSION)
bank.slip(None, ("self.linear(x) + self.scale * F.linear(F.linear(x, self.A), self.B)", "F.linear(F.linear(x, self.A), self.B).mul(self.scale).add(self.linear(x))"))
bank.slip(None, ("self.scale * F.linear(F.linear(x, self.A), self.B)", "(self.scale * F.linear(F.linear(x.float(), self.A.float()), self.B.float())).to(x.dtype)"))

bank.slip("nothing-returned", ("return self.linear(x)", "self.linear(x)"))
bank.slip("nothing-returned", ("    return model\n", ""))

bank.slip("raised", ("like = {", "like = dict[rank], {"))
bank.slip("raised", ("list(module.named_children())", "module.named_children"))

bank.hint("needs-bias", "`nn.Linear(..., bias=False)` has None as its bias, and your layer then raises an "
                           "error. `linear.requires_grad_(False)` freezes whatever is there.")
bank.slip("needs-bias", ("linear.requires_grad_(False)", "linear.weight.requires_grad = linear.bias.requires_grad = False"))
bank.variant("needs-bias", BY_RECURSION, ("        if linear.bias is not None:\n            linear", "        linear"))

bank.hint("adapter-form", "The attributes `A`, of shape (rank, in), and `B`, of shape (out, rank), must have "
                             "the dtype and the device of linear's weight: the model may already be on a GPU.")
bank.slip("adapter-form", ("torch.empty(rank, linear.in_features", "torch.empty(linear.in_features, rank"))
bank.slip("adapter-form", ("torch.zeros(linear.out_features, rank", "torch.zeros(rank, linear.out_features"))
bank.slip("adapter-form", (", **like", ""))
bank.slip("adapter-form", ("self.A", "self.down"))
bank.variant("adapter-form", BY_PATHS, ("down.weight.data.to(linear.weight)", "down.weight.data"))
bank.variant("adapter-form", BY_RECURSION, ("torch.zeros(W.shape[0], rank)", "torch.zeros(W.shape[1], rank)"))
bank.slip("adapter-form", (', "device": linear.weight.device', ""))
bank.variant("adapter-form", BY_RECURSION, (".to(W.device, W.dtype)", ".to(W.dtype)"))

bank.hint("not-parameters", "`A` and `B` are not parameters here. With `nn.Parameter(tensor)` they learn, and "
                               "`model.parameters()` finds them.")
bank.slip("not-parameters", ("self.B = nn.Parameter(torch.zeros(linear.out_features, rank, **like))", 'self.register_buffer("B", torch.zeros(linear.out_features, rank, **like))'))
bank.slip("not-parameters", ("self.B = nn.Parameter(torch.zeros(linear.out_features, rank, **like))", "self.B = torch.zeros(linear.out_features, rank, **like).requires_grad_()"))
bank.variant("not-parameters", BY_RECURSION, ('self.register_parameter("A", nn.Parameter(A.to(W.device, W.dtype)))', 'self.register_buffer("A", A.to(W.device, W.dtype))'))

bank.hint("base-learns", "Something other than `A` and `B` learns. Freeze the weight, the bias and, in a model, "
                            "embeddings, norms and all other layers: the optimizer then keeps nothing for them.")
bank.slip("base-learns", ("        linear.requires_grad_(False)\n", ""))
bank.slip("base-learns", ("linear.requires_grad_(False)", "linear.weight.requires_grad_(False)"))
bank.variant("base-learns", BY_RECURSION, ("            linear.bias.requires_grad = False", "            pass"))

bank.hint("adapter-asleep", "`A` or `B` doesn't learn. Freeze first, then create the adapters.")
bank.slip("adapter-asleep", ("        linear.requires_grad_(False)\n", ""), ("rank, **like))\n", "rank, **like))\n        self.requires_grad_(False)\n"))
bank.slip("adapter-asleep", ("    model.requires_grad_(False)\n", ""), ("    return model\n", "    return model.requires_grad_(False)\n"))
bank.variant("adapter-asleep", BY_RECURSION, ("    visit(model)\n", "    visit(model)\n    model.requires_grad_(False)\n"))

bank.hint("b-not-zero", "`B` should start at zero, so that the model at first computes what it did before. Here "
                           "the very first output is different.")
bank.slip("b-not-zero", ("torch.zeros(", "torch.randn("))
bank.slip("b-not-zero", ("nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, linear.in_features, **like), a=math.sqrt(5)))", "nn.Parameter(torch.zeros(rank, linear.in_features, **like))"), ("torch.zeros(linear.out", "torch.randn(linear.out"))
bank.variant("b-not-zero", BY_PATHS, ("linear.weight.new_zeros(linear.out_features, rank)", "linear.weight.detach()[:, :1].repeat(1, rank)"))

bank.hint("a-zero", "With `A` and `B` both zero, both gradients are zero, and nothing ever learns. Draw `A` at random.")
bank.slip("a-zero", ("nn.init.kaiming_uniform_(torch.empty(rank, linear.in_features, **like), a=math.sqrt(5))", "torch.zeros(rank, linear.in_features, **like)"))
bank.variant("a-zero", BY_RECURSION, ("* bound", "* 0"))

bank.hint("wrong-draw", "Draw `A` as `nn.Linear` draws its weight: uniformly between -1 / √in and 1 / √in, "
                           "where `in` is the last dimension of `A`.", edge=True)
bank.slip("wrong-draw", (", a=math.sqrt(5))", ")"))
bank.slip("wrong-draw", ("kaiming_uniform_(torch.empty(rank, linear.in_features, **like), a=math.sqrt(5))", "normal_(torch.empty(rank, linear.in_features, **like))"))
bank.slip("wrong-draw", ("kaiming_uniform_(torch.empty(rank, linear.in_features, **like), a=math.sqrt(5))", "normal_(torch.empty(rank, linear.in_features, **like), std=(3 * linear.in_features) ** -0.5)"))
bank.variant("wrong-draw", BY_RECURSION, ("(2 * torch.rand(rank, W.shape[1]) - 1)", "torch.rand(rank, W.shape[1])"))
bank.variant("wrong-draw", BY_RECURSION, ("1 / math.sqrt(W.shape[1])", "1 / math.sqrt(rank)"))
bank.slip("wrong-output", ("F.linear(x, self.A)", "F.linear(F.dropout(x, 0.1, self.training), self.A)"))
bank.variant("wrong-output", BY_PATHS, ("        down = x @ self.A.T\n", "        down = x @ self.A.T\n        self.scale = self.scale * 1.1\n"))

bank.hint("wrong-scale", "The change B A x should be multiplied by alpha / rank, once. Here it has another "
                            "factor, which the verdict shows.")
bank.slip("wrong-scale", ("self.scale * ", ""))
bank.slip("wrong-scale", ("self.scale * ", "self.scale * self.scale * "))
bank.slip("wrong-scale", ("self.scale * ", "self.scale * len(self.A) ** 2 * "))
bank.slip("wrong-scale", ("self.scale * ", "1 / len(self.A) * "))
bank.slip("wrong-scale", ("self.scale * F", "0 * F"))
bank.variant("wrong-scale", BY_PATHS, ("down = x @ self.A.T", "down = self.scale * x @ self.A.T"))
bank.variant("wrong-scale", BY_RECURSION, ("self.scale * x", "x * self.A.shape[0]"))

bank.hint("wrong-output", "The output should be linear(x) + alpha / rank · B (A x), with the weight and the "
                             "bias of `linear`. It should be the same in both modes, and on each call.")
bank.slip("wrong-output", ("return self.linear(x)", "return x @ self.linear.weight.T"))
bank.slip("wrong-output", ("return self.linear(x)", "return (self.linear(x) + 0.01)"))
bank.slip("wrong-output", ("return self.linear(x) + ", "return (self.linear(x) + "), ("self.B)", "self.B)).float()"))
bank.variant("wrong-output", BY_RECURSION, ("y if self.linear.bias is None else y + self.linear.bias", "y if self.linear.bias is None else y + 2 * self.linear.bias"))

bank.hint("full-matrix", "`forward` forms a matrix as large as the weight. Compute A x first, then apply B to "
                            "it: both products are thin.")
bank.slip("full-matrix", ("F.linear(F.linear(x, self.A), self.B)", "F.linear(x, self.B @ self.A)"))
bank.slip("full-matrix", ("self.linear(x) + self.scale * F.linear(F.linear(x, self.A), self.B)", "F.linear(x, self.linear.weight + self.scale * self.B @ self.A, self.linear.bias)"))
bank.variant("full-matrix", BY_PATHS, ("down = x @ self.A.T", "down = self.A.T"), ("(down @ self.B.T) * self.scale", "x @ (down @ self.B.T) * self.scale"))
bank.variant("full-matrix", BY_RECURSION, ('torch.einsum("...i,ri,or->...o", self.scale * x, self.A, self.B)', 'x @ torch.einsum("ri,or->io", self.A, self.B) * self.scale'))

bank.hint("wrong-gradient", "The output is right, but the gradients of `A`, `B` and x are not. All three should "
                               "get theirs: don't use `detach`, `.data` or `no_grad`.")
bank.slip("wrong-gradient", ("F.linear(F.linear(x, self.A), self.B)", "F.linear(F.linear(x, self.A).detach(), self.B)"))
bank.slip("wrong-gradient", ("F.linear(F.linear(x, self.A), self.B)", "F.linear(F.linear(x.detach(), self.A), self.B)"))
bank.slip("wrong-gradient", ("F.linear(F.linear(x, self.A), self.B)", "F.linear(F.linear(x, self.A.data), self.B)"))
bank.variant("wrong-gradient", BY_PATHS, ("return self.linear(x)", "with torch.no_grad():\n            y = self.linear(x)\n        return y"))

bank.hint("not-linear", "with_lora raises an error for a model in which other modules, such as a convolution or "
                           "a container, have these names. Replace only an nn.Linear.")
bank.slip("not-linear", (" and isinstance(child, nn.Linear)", ""))
bank.variant("not-linear", BY_PATHS, ("isinstance(module, nn.Linear) and ", ""))

bank.hint("another-model", "with_lora must change the model that it is given, and return it.")
bank.slip("another-model", ("    model.requires_grad_(False)\n", "    model = copy.deepcopy(model).requires_grad_(False)\n"))
bank.variant("another-model", BY_PATHS, ("    return model\n", "    return list(model.modules())\n"))

bank.hint("top-level", "You replace only the model's direct children. Layers are deeper: in blocks, and in what "
                          "these contain.")
bank.slip("top-level", ("list(model.modules())", "[model]"))
bank.variant("top-level", BY_RECURSION, ("                visit(child)", "                pass"))
bank.variant("top-level", BY_PATHS, ("last in names", "path in names"))
bank.slip("wrong-names", ("name in names and", "any(one in name for one in names) and"))
bank.variant("wrong-names", BY_PATHS, ("last in names", "path.endswith(tuple(names))"))

bank.hint("wrong-names", "Replace each nn.Linear whose own name, the last part of its path, is in `names`, and "
                            "no other module. It may be inside a module with such a name, too.")
bank.slip("wrong-names", ("name in names and ", ""))
bank.variant("wrong-names", BY_RECURSION, ("if isinstance(child, nn.Linear) and name in set(names):\n                setattr", "if name in set(names):\n                if isinstance(child, nn.Linear): setattr"))
bank.variant("wrong-names", BY_PATHS, ("isinstance(module, nn.Linear) and last in names", "isinstance(module, nn.Linear) and last == names[0]"))

bank.hint("rank-and-alpha", "Create each LoRALinear with the rank and the alpha that with_lora gets, in this order.")
bank.slip("rank-and-alpha", ("LoRALinear(child, rank, alpha)", "LoRALinear(child, alpha, rank)"))
bank.variant("rank-and-alpha", BY_PATHS, ("LoRALinear(module, rank, alpha)", "LoRALinear(module, rank, 2 * rank)"))
bank.slip("base-learns", ("    model.requires_grad_(False)\n", ""))
bank.variant("base-learns", BY_PATHS, ("for p in model.parameters():\n", "for p in (p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()):\n"))
bank.slip("wrong-numbers", ("return numbers, 8 * numbers", "return numbers"))
bank.variant("wrong-numbers", BY_PATHS, ("numbers * 2 * 4", "numbers * 4, numbers * 4"))

bank.hint("wrong-numbers", "First return how many numbers learn, then the bytes. For a weight of (out, in), A "
                              "has rank · in numbers and B has rank · out. Add them up over all weights.")
bank.slip("wrong-numbers", ("(inputs + outputs)", "inputs"))
bank.slip("wrong-numbers", ("(inputs + outputs)", "outputs"))
bank.slip("wrong-numbers", ("(inputs + outputs)", "inputs * outputs"))
bank.variant("wrong-numbers", BY_PATHS, ("        numbers += rank * out\n", ""))

bank.hint("wrong-bytes", "Adam keeps two averages for each number that learns, in float32: 2 · 4 bytes. Don't "
                            "count the gradients or the numbers themselves.", edge=True)
bank.slip("wrong-bytes", ("8 * numbers", "4 * numbers"))
bank.slip("wrong-bytes", ("8 * numbers", "16 * numbers"))
bank.variant("wrong-bytes", BY_PATHS, ("numbers * 2 * 4", "numbers * 2"))
