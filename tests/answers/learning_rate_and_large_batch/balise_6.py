"""Answers to balise 6 of 10_learning_rate_and_large_batch: Newton-Schulz and Muon."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 6, whole=True)

# products on the right side, transposed twice; the state by hand, momentum as a sum
PLAIN = """
def orthogonalise(matrices, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    turned = matrices.size(1) > matrices.size(2)
    y = matrices.transpose(1, 2) if turned else matrices
    y = y / (y.square().sum((1, 2), keepdim=True).sqrt() + 1e-12)
    for _ in range(steps):
        gram = torch.bmm(y, y.transpose(1, 2))
        y = a * y + torch.bmm(b * gram + c * torch.bmm(gram, gram), y)
    return y.transpose(1, 2).contiguous() if turned else y

class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, momentum=0.95, weight_decay=0.01, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, dtype=dtype))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            ws = [w for w in group["params"] if w.grad is not None]
            for shape in sorted({w.shape for w in ws}):
                same = [w for w in ws if w.shape == shape]
                for w in same:
                    if "sum" not in self.state[w]:
                        self.state[w]["sum"] = torch.zeros_like(w)
                sums, gs = [self.state[w]["sum"] for w in same], [w.grad for w in same]
                torch._foreach_mul_(sums, group["momentum"])
                torch._foreach_add_(sums, gs)
                ahead = torch.stack(torch._foreach_add(gs, sums, alpha=group["momentum"])).to(group["dtype"])
                update = orthogonalise(ahead).to(same[0].dtype) * (0.2 * max(shape) ** 0.5)
                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(same, list(update), alpha=-group["lr"])
"""
bank.text(None, PLAIN)
bank.text(None, PLAIN.replace("1e-12", "1e-6"))  # as others protect the zeros
bank.text(None, PLAIN.replace("y.square().sum((1, 2), keepdim=True).sqrt() + 1e-12", "y.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-20)").replace(
    "a * y + torch.bmm(b * gram + c * torch.bmm(gram, gram), y)", "a * y + b * (gram @ y) + c * (gram @ (gram @ y))"))  # fmt: skip
bank.slip(None, ("0.2 * max(shape) ** 0.5 * rate)", "rate * 0.2 * math.sqrt(max(*shape)))"))

bank.hint("orthogonal-form", "Return matrices of the same shape and dtype, (n, rows, columns).")
bank.slip("orthogonal-form", ("return x.mT if tall else x", "return (x.mT if tall else x)[0]"))
bank.slip("orthogonal-form", ("    x = x / torch", "    x = x.float()\n    x = x / torch"))
bank.variant("orthogonal-form", PLAIN, ("if turned else y\n\n", "if turned else list(y)\n\n"))

bank.hint("wrong-orthogonal", "The iteration is X ← a X + b A X + c A² X with a, b, c = 3.4445, -4.775, 2.0315, "
                                 "and A = X Xᵀ for each matrix separately, from X₀ = M / ‖M‖. {round}")  # fmt: skip
bank.slip("wrong-orthogonal", ("a, b, c = 3.4445, -4.7750, 2.0315", "a, b, c = 1.5, -0.5, 0.0"))
bank.slip("wrong-orthogonal", ("range(steps)", "range(steps - 1)"))
bank.slip("wrong-orthogonal", ("beta=b, alpha=c", "beta=c, alpha=b"), variant=True)
bank.slip("wrong-orthogonal", ("squares, squares, squares, beta", "squares, squares, x, beta"), variant=True)
bank.slip("wrong-orthogonal", ("squares = x @ x.mT", "squares = matrices @ matrices.mT"), variant=True)
bank.variant("wrong-orthogonal", PLAIN, ("range(steps)", "range(steps + 1)"))

bank.hint("one-norm-for-all", "You divide all matrices of the batch by one norm, so small ones stay small. Each "
                                 "has its own: dim=(-2, -1), keepdim=True.")  # fmt: skip
bank.slip("one-norm-for-all", (", dim=(-2, -1), keepdim=True", ""))
bank.variant("one-norm-for-all", PLAIN, ("sum((1, 2), keepdim=True)", "sum()"))

bank.hint(
    "norm-of-rows",
    "You divide each row by its own norm. The Frobenius norm is over the rows and columns of a matrix.",
)
bank.slip("norm-of-rows", ("dim=(-2, -1)", "dim=-1"))
bank.variant("norm-of-rows", PLAIN, ("sum((1, 2), keepdim=True)", "sum(2, keepdim=True)"))

bank.hint("not-divided", "The iteration works for singular values up to 1. Divide each matrix by its norm first.")
bank.slip("not-divided", ("    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)\n", ""))
bank.variant("not-divided", PLAIN, ("    y = y / (y.square().sum((1, 2), keepdim=True).sqrt() + 1e-12)\n", ""))

bank.hint(
    "decomposed",
    "You decompose the matrices (an SVD, or their largest singular value), which is far too slow for a step. Use "
    "rounds of the iteration: only products of matrices.",
)
SVD = (
    "    u, s, v = torch.linalg.svd({x}, full_matrices=False)\n    {x} = torch.where(s[:, :1, None] > 0, u @ v, 0.0)\n"
)
bank.slip("decomposed", ("    for _ in range(steps):\n", SVD.format(x="x") + "    for _ in range(0):\n"))
bank.variant("decomposed", PLAIN, ("    for _ in range(steps):\n", "    u, _, v = torch.linalg.svd(y, full_matrices=False)\n    return u @ v\n    for _ in range(steps):\n"))  # fmt: skip
bank.slip("decomposed", ("torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)", "torch.linalg.matrix_norm(x, 2, keepdim=True)"))  # fmt: skip
bank.variant(
    "decomposed", PLAIN, ("y.square().sum((1, 2), keepdim=True).sqrt()", "torch.linalg.svdvals(y)[:, :1, None]")
)

bank.hint(
    "input-changed",
    "You changed the matrices that were passed in. They are the momentum: divide into a new tensor.",
)
bank.slip("input-changed", ("x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)", "x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7))"))  # fmt: skip
bank.variant("input-changed", PLAIN, ("y = y / (y.square().sum((1, 2), keepdim=True).sqrt() + 1e-12)", "y /= y.square().sum((1, 2), keepdim=True).sqrt() + 1e-12"))  # fmt: skip

bank.hint("not-turned-back", "For tall matrices you return the transpose. Transpose once more at the end.")
bank.slip("not-turned-back", ("return x.mT if tall else x", "return x"))
bank.variant("not-turned-back", PLAIN, ("y.transpose(1, 2).contiguous() if turned else y\n", "y\n"))

bank.hint("rounds-ignored", "steps is the number of rounds. With 3, the result is not that of three rounds.")
bank.slip("rounds-ignored", ("range(steps)", "range(5)"))
bank.variant("rounds-ignored", PLAIN, ("range(steps)", "range(5)"))

bank.hint("wrong-zeros", "A matrix of zeros must stay zero, but 0 / 0 is NaN. Keep the norm above a small number.")
bank.slip("wrong-zeros", (".clamp(min=1e-7)", ""))
bank.variant("wrong-zeros", PLAIN, (" + 1e-12)", ")"))

bank.hint("other-dtype", "You compute in another dtype than that of the input: {got} instead of {expected}.")
bank.slip(
    "other-dtype",
    ("    tall = ", "    matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))\n    tall = "),
)
bank.variant("other-dtype", PLAIN, ("    turned = ", "    matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))\n    turned = "))  # fmt: skip

bank.hint("long-side", "Your products take {times} times the multiplications that are needed. For a wide X, A = "
                          "X Xᵀ is the small square and Xᵀ X the large one. Transpose tall matrices first.")  # fmt: skip
bank.slip("long-side", ("tall = matrices.shape[-2] > matrices.shape[-1]", "tall = False"))
bank.variant("long-side", PLAIN, ("turned = matrices.size(1) > matrices.size(2)", "turned = False"))

bank.hint("one-by-one", "Four matrices take {many} operators, one takes {few}. Work on all of them at once: "
                           "products of (n, …) tensors are batched.")  # fmt: skip
bank.text("one-by-one", PLAIN.replace("def orthogonalise(", "def each(").replace("class Muon", "def orthogonalise(matrices, steps=5):\n    return torch.cat([each(one[None], steps) for one in matrices])\n\nclass Muon"))  # fmt: skip
bank.slip(
    "one-by-one", ("        squares = x @ x.mT\n", "        squares = torch.stack([one @ one.mT for one in x])\n")
)
bank.variant(
    "one-by-one", PLAIN, ("torch.bmm(y, y.transpose(1, 2))", "torch.stack([torch.mm(one, one.t()) for one in y])")
)

bank.hint("wrong-muon", "Three steps with one (6, 3) matrix, without weight decay, end at the wrong weights. {step}")  # fmt: skip
bank.slip("wrong-muon", ("orthogonalise(stacked)", "orthogonalise(stacked, 3)"))
bank.slip("wrong-muon", ("-0.2 * max(shape) ** 0.5", "-((0.2 * max(shape)) ** 0.5)"))
bank.slip("wrong-muon", ("-0.2 * max(shape) ** 0.5", "-0.2 * max(shape)"))
bank.slip("wrong-muon", ("alpha=-0.2 * max(shape) ** 0.5 * rate", "alpha=-0.2 * max(shape) ** 0.5 * rate * momentum"))
bank.variant("wrong-muon", PLAIN, ("orthogonalise(ahead)", "orthogonalise(ahead, 4)"))

bank.hint("no-nesterov", "You orthogonalise the momentum itself. Look one step ahead: (1 - μ) g + μ B.")
bank.slip("no-nesterov", ("ahead = torch._foreach_lerp(gradients, means, momentum)", "ahead = means"))
bank.variant("no-nesterov", PLAIN, ('torch._foreach_add(gs, sums, alpha=group["momentum"])', "sums"))

bank.hint("shares-exchanged", "You have swapped μ and 1 - μ: B keeps μ of the old, and the step ahead takes μ "
                                 "of B. lerp's weight is that of its second argument.")  # fmt: skip
bank.slip("shares-exchanged", ("(means, gradients, 1 - momentum)", "(means, gradients, momentum)"))
bank.slip("shares-exchanged", ("(gradients, means, momentum)", "(gradients, means, 1 - momentum)"))
bank.slip("shares-exchanged", ("(means, gradients, 1 - momentum)", "(means, gradients, momentum)"), ("(gradients, means, momentum)", "(gradients, means, 1 - momentum)"))  # fmt: skip
bank.variant("shares-exchanged", PLAIN, ('alpha=group["momentum"])).to', 'alpha=1 - group["momentum"])).to'), (  # (1 - μ) B, and μ g
    "torch._foreach_add_(sums, gs)", "torch._foreach_add_(sums, gs, alpha=1 - group['momentum'])"), ("torch._foreach_add(gs, sums,", "torch._foreach_add(torch._foreach_mul(gs, group['momentum']), sums,"))  # fmt: skip

bank.hint("sum-and-mean", "B is a sum in one of your formulas and a mean in the other. As a mean it gets (1 - "
                             "μ) g, and so does the step ahead.")  # fmt: skip
bank.slip("sum-and-mean", ("            torch._foreach_lerp_(means, gradients, 1 - momentum)\n", "            torch._foreach_mul_(means, momentum)\n            torch._foreach_add_(means, gradients)\n"))  # fmt: skip
bank.slip("sum-and-mean", ("torch._foreach_lerp(gradients, means, momentum)", "torch._foreach_add(gradients, means, alpha=momentum)"))  # fmt: skip
bank.variant("sum-and-mean", PLAIN, ("torch._foreach_add_(sums, gs)", "torch._foreach_add_(sums, gs, alpha=1 - group['momentum'])"))  # fmt: skip

bank.hint("no-momentum", "You orthogonalise the gradient itself: where is the momentum?")
bank.slip("no-momentum", ("ahead = torch._foreach_lerp(gradients, means, momentum)", "ahead = gradients"))
bank.variant("no-momentum", PLAIN, ('torch._foreach_add(gs, sums, alpha=group["momentum"])', "gs"))

bank.hint("not-orthogonal", "You subtract the momentum itself. Orthogonalise it first.")
bank.slip("not-orthogonal", ("orthogonalise(stacked)", "stacked"))
bank.variant("not-orthogonal", PLAIN, ("orthogonalise(ahead)", "(ahead * (1 - group['momentum']))"))

bank.hint("no-scale", "You don't multiply the update by 0.2 √max(rows, columns).")
bank.slip("no-scale", ("-0.2 * max(shape) ** 0.5 * rate", "-rate"))
bank.variant("no-scale", PLAIN, (" * (0.2 * max(shape) ** 0.5)", ""))

bank.hint(
    "other-scale",
    "You multiply the update by √max(1, rows / columns), Muon's original scale. Here it is 0.2 √max(rows, columns).",
)
bank.slip("other-scale", ("-0.2 * max(shape) ** 0.5 * rate", "-(max(1, shape[0] / shape[1]) ** 0.5) * rate"))
bank.slip("other-scale", ("-0.2 * max(shape) ** 0.5 * rate", "-((shape[0] / shape[1]) ** 0.5) * rate"))
bank.variant("other-scale", PLAIN, ("(0.2 * max(shape) ** 0.5)", "max(1, shape[0] / shape[1]) ** 0.5"))

bank.hint("wrong-sizes", "One tall matrix was right, but several shapes, or decay, are not. Each matrix has its "
                            "own update, and its own √max(rows, columns).")  # fmt: skip
bank.slip("wrong-sizes", ("max(shape)", "shape[0]"))
bank.slip("wrong-sizes", ("updates = orthogonalise(stacked).to(weights[places[0]].dtype).unbind()", "updates = orthogonalise(stacked).to(weights[places[0]].dtype).unbind()[::-1]"))  # fmt: skip
bank.hint(
    "number-as-side",
    "You take the scale from the stack, so the number of matrices counts as a side. Use 0.2 √max(rows, columns).",
)
bank.slip("number-as-side", ("max(shape)", "max(stacked.shape)"))
bank.variant("number-as-side", PLAIN, ("max(shape)", "max(ahead.shape)"))
bank.variant("wrong-sizes", PLAIN, ("max(shape)", "shape[0]"))

bank.hint("shorter-side", "You take the scale from the shorter side. Use 0.2 √max(rows, columns).")
bank.slip("shorter-side", ("max(shape)", "shape[1]"))
bank.variant("shorter-side", PLAIN, ("max(shape)", "min(shape)"))

bank.hint("no-decay", "The weights do not decay.")
bank.slip("no-decay", ('torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])', "pass"))
bank.variant("no-decay", PLAIN, ('torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])', "pass"))

bank.hint("decay-in-the-gradient", "You add the decay to the gradient, so it becomes part of the matrix that is "
                                      "made orthogonal. Decoupled decay shrinks the weights separately.")  # fmt: skip
bank.slip("decay-in-the-gradient", ("            torch._foreach_lerp_(means", '            gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])\n            torch._foreach_lerp_(means'), (
    'torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])', "pass"))  # fmt: skip
bank.variant("decay-in-the-gradient", PLAIN, ("[w.grad for w in same]", '[w.grad + group["weight_decay"] * w for w in same]'), (
    'torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])', "pass"))  # fmt: skip

bank.hint(
    "decay-after",
    "You shrink the weights after the step, so the step decays too. Shrink them before it.",
)
bank.slip("decay-after", ('            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n', ""), ("updates, alpha=-0.2 * max(shape) ** 0.5 * rate)\n", 'updates, alpha=-0.2 * max(shape) ** 0.5 * rate)\n            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n'))  # fmt: skip
bank.variant("decay-after", PLAIN, ('                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])\n', ""), (
    'list(update), alpha=-group["lr"])\n', 'list(update), alpha=-group["lr"])\n                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])\n'))  # fmt: skip

bank.hint("decay-without-rate", "The decay is αλw. Without the rate α it is far too large, and no schedule lowers it.")
bank.slip("decay-without-rate", ('1 - rate * group["weight_decay"]', '1 - group["weight_decay"]'))
bank.variant("decay-without-rate", PLAIN, ('1 - group["lr"] * group["weight_decay"]', '1 - group["weight_decay"]'))

bank.hint("wrong-groups", "With one group everything was right, with several it is not. Each group has its own "
                             "options, rates change from step to step, and a parameter may have no gradient.")  # fmt: skip
bank.slip("wrong-groups", ('group["lr"], group["momentum"]', 'group["lr"], self.param_groups[0]["momentum"]'))
bank.slip("wrong-groups", ('= group["lr"], group["momentum"]', '= self.defaults["lr"], group["momentum"]'))
bank.variant("wrong-groups", PLAIN, ('1 - group["lr"] * group["weight_decay"]', '1 - group["lr"] * self.param_groups[0]["weight_decay"]'))  # fmt: skip

bank.slip("not-resumed", ("            torch._foreach_lerp_(means", '            self.kept = getattr(self, "kept", {})\n            means = [self.kept.setdefault(id(w), torch.zeros_like(w)) for w in weights]\n            torch._foreach_lerp_(means'))  # fmt: skip

bank.hint("dtype-ignored", "The group asks for {asked}, but some of your products are in {got}.")
bank.slip("dtype-ignored", ('.to(group["dtype"])\n', ".to(torch.float64)\n"))
bank.variant(
    "dtype-ignored", PLAIN, ('alpha=group["momentum"])).to(group["dtype"])', 'alpha=group["momentum"])).double()')
)
bank.slip("dtype-ignored", ('.to(group["dtype"])\n', ".bfloat16()\n"))

bank.slip("gradients-changed", ("ahead = torch._foreach_lerp(gradients, means, momentum)", "torch._foreach_lerp_(gradients, means, momentum)\n            ahead = gradients"))  # fmt: skip
bank.slip("an-operator-each", ("            for shape, places in shapes.items():\n", "            for shape, places in [(shape, [k]) for shape, several in shapes.items() for k in several]:\n"))  # fmt: skip
bank.slip("weights-moved", ("torch._foreach_add_([weights[k] for k in places], updates, alpha=-0.2 * max(shape) ** 0.5 * rate)", "for k, update in zip(places, updates):\n                    weights[k].data = weights[k] - 0.2 * max(shape) ** 0.5 * rate * update"))  # fmt: skip

bank.hint("uphill", "The weights move along the update, uphill. Subtract it.")
bank.slip("uphill", ("alpha=-0.2 *", "alpha=0.2 *"))
bank.variant(
    "uphill",
    PLAIN,
    ("torch._foreach_add_(same, list(update), alpha=-group", "torch._foreach_add_(same, list(update), alpha=group"),
)

bank.hint(
    "only-divided",
    "You divide the matrices by their norms and do nothing else: the rounds are missing, or you don't keep their "
    "result.",
)
bank.slip("only-divided", ("        x = torch.baddbmm(x, torch", "        torch.baddbmm(x, torch"))
bank.variant("only-divided", PLAIN, ("range(steps)", "range(0)"))
bank.slip("other-dtype", ("x = x / torch", "x = x.float() / torch"))
bank.slip("other-dtype", ("x = x / torch", "x = x.bfloat16() / torch"), ("return x.mT if tall else x", "return (x.mT if tall else x).to(matrices.dtype)"))  # fmt: skip

bank.hint("no-rate", "You leave the rate out of the update. It multiplies the update, as it does the decay.")
bank.slip("no-rate", ("max(shape) ** 0.5 * rate", "max(shape) ** 0.5"))
bank.variant("no-rate", PLAIN, ('list(update), alpha=-group["lr"]', "list(update), alpha=-1"))
