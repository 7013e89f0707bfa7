"""Answers to balise 3 of 10_learning_rate_and_large_batch: AdamW and what decays."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", whole=True)

# the formulas one by one, steps as tensors, a state of its own
TENSORS = """
def parameter_groups(model, weight_decay):
    decays, stays = {}, {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                (decays if p.dim() >= 2 else stays)[p] = name
    return ({"params": list(stays), "weight_decay": 0}, {"params": list(decays), "weight_decay": weight_decay})

class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            ps = [p for p in group["params"] if p.grad is not None]
            if len(ps) == 0:
                continue
            gs = [p.grad for p in ps]
            for p in ps:
                if p not in self.state:
                    self.state[p] = {"step": torch.tensor(0.0), "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                self.state[p]["step"] += 1
            ms, vs, ts = ([self.state[p][key] for p in ps] for key in ("m", "v", "step"))
            b1, b2 = group["betas"]
            torch._foreach_mul_(ms, b1)
            torch._foreach_add_(ms, gs, alpha=1 - b1)
            torch._foreach_mul_(vs, b2)
            torch._foreach_addcmul_(vs, gs, gs, 1 - b2)
            m_hat = torch._foreach_div(ms, [1 - b1 ** t.item() for t in ts])
            v_hat = torch._foreach_div(vs, [1 - b2 ** t.item() for t in ts])
            torch._foreach_sqrt_(v_hat)
            torch._foreach_add_(v_hat, group["eps"])
            torch._foreach_div_(m_hat, v_hat)
            torch._foreach_add_(m_hat, ps, alpha=group["weight_decay"])
            torch._foreach_add_(ps, m_hat, alpha=-group["lr"])
"""
bank.text(3, None, TENSORS.replace("""                self.state[p]["step"] += 1
""", """                self.state[p]["step"] = self.state[p].get("step", 0) + 1
""").replace('"step": torch.tensor(0.0), ', "").replace("t.item()", "t"))  # fmt: skip
bank.text(3, None, TENSORS.replace("""                self.state[p]["step"] += 1
""", "").replace("            b1, b2 = group", """            torch._foreach_add_(ts, 1)
            b1, b2 = group"""))  # as torch: a list of counts  # fmt: skip
# new tensors, written back at the end
COPIED = """
def parameter_groups(model, weight_decay):
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for _, p in model.named_parameters():
        if p.requires_grad:
            groups[p.ndim < 2]["params"] += [p]
    return groups

class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weights, gradients, steps, means, squares = ready(self, group, "mean", "square")
            if not weights:
                continue
            rate, (beta1, beta2) = group["lr"], group["betas"]
            new = torch._foreach_lerp(gradients, means, beta1)
            torch._foreach_copy_(means, new)
            torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)
            mean_hat = torch._foreach_div(means, [1 - beta1**t for t in steps])
            below = torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))
            below = torch._foreach_add(below, group["eps"])
            shrunk = torch._foreach_mul(weights, 1 - rate * group["weight_decay"])
            torch._foreach_copy_(weights, torch._foreach_addcdiv(shrunk, mean_hat, below, -rate))
"""
bank.text(3, None, COPIED)

bank.hint(
    3,
    "groups-form",
    'Return a list of groups: dicts with the keys "params" and "weight_decay", each with its own value, and the '
    "model's parameters themselves.",
)
bank.slip(3, "groups-form", (', "weight_decay": weight_decay}', "}"))
bank.slip(3, "groups-form", ("    return [\n        {", "    return {\n        0: {"), ("        {\"params\": [weight for weight in trained if weight.ndim < 2]", "        1: {\"params\": [weight for weight in trained if weight.ndim < 2]"), (' "weight_decay": 0.0},\n    ]', ' "weight_decay": 0.0},\n    }'))  # fmt: skip
bank.variant(3, "groups-form", COPIED, ("    return groups", '    return groups[0]["params"], groups[1]["params"]'))

bank.hint(3, "frozen-inside", "Frozen parameters are in a group: {got}. Take only those that have requires_grad.")
bank.slip(3, "frozen-inside", (" if weight.requires_grad]", "]"))
bank.variant(3, "frozen-inside", COPIED, ("if p.requires_grad:", "if p is not None:"))

bank.hint(3, "tied-twice", "A tied parameter is in the groups twice, so it would be updated twice per step. "
                           "model.parameters() lists each parameter once; a walk over the modules does not.")  # fmt: skip
bank.slip(3, "tied-twice", ("in model.parameters() if", "in [p for m in model.modules() for p in m.parameters(recurse=False)] if"))  # fmt: skip
bank.variant(3, "tied-twice", COPIED, ("model.named_parameters()", "model.named_parameters(remove_duplicate=False)"))

bank.hint(3, "parameters-missing", "These parameters are in no group and will not be trained: {got}.")
bank.slip(3, "parameters-missing", ("weight.ndim > 1]", "weight.ndim == 2]"))
bank.slip(3, "parameters-missing", ("weight.ndim < 2]", "weight.ndim == 1]"))
bank.variant(3, "parameters-missing", COPIED, ("if p.requires_grad:", "if p.requires_grad and p.ndim:"))

bank.hint(3, "vectors-decay", "A vector or a scalar decays. Biases, gains of norms and the like have fewer than "
                              "two dimensions; you can't tell them by their names.")  # fmt: skip
bank.slip(
    3, "vectors-decay", ('weight.ndim < 2], "weight_decay": 0.0', 'weight.ndim < 2], "weight_decay": weight_decay')
)
bank.variant(
    3, "vectors-decay", COPIED, ("for _, p in", "for name, p in"), ("groups[p.ndim < 2]", 'groups["bias" in name]')
)
bank.variant(3, "vectors-decay", COPIED, ("for _, p in", "for name, p in"), ("groups[p.ndim < 2]", 'groups["bias" in name or "norm" in name]'))  # fmt: skip

bank.hint(
    3,
    "matrices-do-not-decay",
    "A matrix or a kernel does not decay by the given `weight_decay`. You can tell it by its dimensions: two or more.",
)
bank.slip(
    3, "matrices-do-not-decay", ("weight.ndim > 1]", "weight.ndim == 2]"), ("weight.ndim < 2]", "weight.ndim != 2]")
)
bank.slip(3, "matrices-do-not-decay", ('"weight_decay": weight_decay', '"weight_decay": 0.01'))
bank.slip(3, "matrices-do-not-decay", ("    trained = [weight for weight in model.parameters() if weight.requires_grad]\n", "    named = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}\n    trained = list(named)\n"),
          ("weight.ndim > 1]", 'weight.ndim > 1 and named[weight].endswith("weight")]'), ("weight.ndim < 2]", 'weight.ndim < 2 or not named[weight].endswith("weight")]'))  # fmt: skip
bank.variant(3, "matrices-do-not-decay", COPIED, ("groups[p.ndim < 2]", "groups[p.ndim > 1]"))

bank.hint(3, "wrong-step", "The weights after a step don't follow Adam's formulas, even without decay. In the "
                           "first step, t = 1, m̂ is g and v̂ is g², so each weight moves by about α.")  # fmt: skip
bank.slip(3, "wrong-step", ("-rate * root", "-2 * rate * root"))
bank.slip(3, "wrong-step", ("_foreach_addcdiv_(weights, means", "_foreach_addcmul_(weights, means"))
bank.variant(3, "wrong-step", COPIED, ("mean_hat, below, -rate", "mean_hat, below, -3 * rate"))

bank.hint(3, "not-corrected", "The averages begin at 0, so the early ones are too small. Divide them by 1 - βᵗ.")
bank.slip(3, "not-corrected", ("[math.sqrt(1 - beta2**step) for step in steps]", "[1.0] * len(steps)"), ("root / (1 - beta1**step)", "root"))  # fmt: skip
bank.variant(3, "not-corrected", COPIED, ("torch._foreach_div(means, [1 - beta1**t for t in steps])", "means"), ("torch._foreach_div(squares, [1 - beta2**t for t in steps])", "squares"))  # fmt: skip

bank.hint(
    3,
    "mean-not-corrected",
    "You correct the average of the squares, but not that of the gradients. Divide it by 1 - β₁ᵗ.",
)
bank.slip(3, "mean-not-corrected", ("root / (1 - beta1**step)", "root"))
bank.variant(3, "mean-not-corrected", COPIED, ("torch._foreach_div(means, [1 - beta1**t for t in steps])", "means"))

bank.hint(3, "square-not-corrected", "You correct the average of the gradients, but not that of their squares. "
                                     "Divide it by 1 - β₂ᵗ, under the root.")  # fmt: skip
bank.slip(3, "square-not-corrected", ("[math.sqrt(1 - beta2**step) for step in steps]", "[1.0] * len(steps)"))
bank.variant(
    3, "square-not-corrected", COPIED, ("torch._foreach_div(squares, [1 - beta2**t for t in steps])", "squares")
)

bank.hint(3, "uphill", "The weights move along the gradient, uphill. Subtract the step.")
bank.slip(3, "uphill", ("[-rate * root", "[rate * root"))
bank.variant(3, "uphill", COPIED, ("mean_hat, below, -rate", "mean_hat, below, rate"))

bank.hint(
    3,
    "square-whole",
    "v takes in the whole square of the gradient. Its weight is 1 - β₂, just as the gradient's weight in m is 1 - β₁.",
)
bank.slip(3, "square-whole", ("squares, gradients, gradients, 1 - beta2)", "squares, gradients, gradients, 1)"))
bank.variant(3, "square-whole", COPIED, ("torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)", "torch._foreach_mul_(squares, beta2)\n            torch._foreach_addcmul_(squares, gradients, gradients, 1.0)"))  # fmt: skip

bank.hint(3, "buffers-corrected", "You write the correction into the averages themselves, so it is still there at "
                                  "the next step. Divide into new tensors, with a function whose name has no "
                                  "underscore at the end.")  # fmt: skip
bank.slip(3, "buffers-corrected", ("            below = torch._foreach_sqrt(squares)\n", "            torch._foreach_div_(squares, [1 - beta2**step for step in steps])\n            roots = [1.0] * len(steps)\n            below = torch._foreach_sqrt(squares)\n"), ("rates = [-rate * root / (1 - beta1**step)", "rates = [-rate / (1 - beta1**step)"))  # fmt: skip
bank.slip(3, "buffers-corrected", ("            below = torch._foreach_sqrt(squares)\n", "            torch._foreach_div_(squares, [1 - beta2**step for step in steps])\n            torch._foreach_div_(means, [1 - beta1**step for step in steps])\n            roots = [1.0] * len(steps)\n            below = torch._foreach_sqrt(squares)\n"), ("rates = [-rate * root / (1 - beta1**step)", "rates = [-rate"))  # fmt: skip
bank.variant(3, "buffers-corrected", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "squares\n            torch._foreach_div_(squares, [1 - beta2**t for t in steps])\n            below = torch._foreach_sqrt(squares)"))  # fmt: skip

bank.hint(3, "square-of-the-mean", "v averages the squares of the gradients, not the squares of their averages m.")
bank.slip(3, "square-of-the-mean", ("squares, gradients, gradients,", "squares, means, means,"))
bank.variant(
    3, "square-of-the-mean", COPIED, ("torch._foreach_mul(gradients, gradients)", "torch._foreach_mul(means, means)")
)

bank.hint(
    3,
    "beta-for-one-minus-beta",
    "The old average has the weight β, the new gradient 1 - β. You have swapped them.",
)
bank.slip(3, "beta-for-one-minus-beta", ("gradients, 1 - beta1", "gradients, beta1"), ("_foreach_mul_(squares, beta2)", "_foreach_mul_(squares, 1 - beta2)"), ("gradients, gradients, 1 - beta2", "gradients, gradients, beta2"))  # fmt: skip
bank.slip(3, "beta-for-one-minus-beta", ("gradients, 1 - beta1", "gradients, beta1"))
bank.variant(3, "beta-for-one-minus-beta", COPIED, ("_foreach_lerp(gradients, means, beta1)", "_foreach_lerp(means, gradients, beta1)"))  # fmt: skip

bank.hint(3, "without-root", "You divide the step by v̂: the root is missing.")
bank.slip(3, "without-root", ("torch._foreach_sqrt(squares)", "torch._foreach_mul(squares, 1.0)"), ("math.sqrt(1 - beta2**step)", "1 - beta2**step"))  # fmt: skip
bank.variant(3, "without-root", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "torch._foreach_div(squares, [1 - beta2**t for t in steps])"))  # fmt: skip

bank.hint(
    3, "wrong-decay", "Without decay the steps are right; with it they are not. θ shrinks by αλθ, separately from "
                      "Adam's step."
)
bank.slip(3, "wrong-decay", ('1 - rate * group["weight_decay"]', '1 - 3 * rate * group["weight_decay"]'))
bank.variant(3, "wrong-decay", COPIED, ('1 - rate * group["weight_decay"]', '1 + rate * group["weight_decay"]'))

bank.hint(3, "decay-in-the-gradient", "You add the decay to the gradient, as Adam with L2 does, so it is divided "
                                      "by √v̂. Decoupled decay stays out of m and v.")  # fmt: skip
L2 = 'gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])\n            '
bank.slip(3, "decay-in-the-gradient", ("torch._foreach_lerp_(means", L2 + "torch._foreach_lerp_(means"), ('            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n', ""))  # fmt: skip
bank.variant(3, "decay-in-the-gradient", COPIED, ("new = ", L2 + "new = "), ('torch._foreach_mul(weights, 1 - rate * group["weight_decay"])', "weights"))  # fmt: skip

bank.hint(3, "no-decay", "The weights do not decay.")
bank.slip(3, "no-decay", ('            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n', ""))
bank.variant(3, "no-decay", COPIED, ('torch._foreach_mul(weights, 1 - rate * group["weight_decay"])', "weights"))

bank.hint(
    3,
    "decay-without-rate",
    "The decay is αλθ, as in PyTorch. Without the rate α it is far too large, and no schedule lowers it.",
)
bank.slip(3, "decay-without-rate", ('1 - rate * group["weight_decay"]', '1 - group["weight_decay"]'))
bank.variant(3, "decay-without-rate", COPIED, ('1 - rate * group["weight_decay"]', '1 - group["weight_decay"]'))

bank.hint(
    3,
    "decay-last",
    "You apply the decay to the weights after Adam's step, so it shrinks the step too. Shrink the weights first.",
)
bank.slip(3, "decay-last", ('            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n            torch._foreach_addcdiv_(weights, means, below, rates)\n', '            torch._foreach_addcdiv_(weights, means, below, rates)\n            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n'))  # fmt: skip
bank.variant(3, "decay-last", COPIED, ('torch._foreach_mul(weights, 1 - rate * group["weight_decay"])', "weights"), (
    "torch._foreach_copy_(weights, torch._foreach_addcdiv(shrunk, mean_hat, below, -rate))",
    'torch._foreach_copy_(weights, torch._foreach_mul(torch._foreach_addcdiv(shrunk, mean_hat, below, -rate), 1 - rate * group["weight_decay"]))'))  # fmt: skip

bank.hint(
    3, "wrong-eps", "Steps are right when ε is small, and wrong when it is large. Add ε to √v̂, after the root."
)
bank.slip(3, "wrong-eps", ('[group["eps"] * root for root in roots]', '[3 * group["eps"] * root for root in roots]'))
bank.variant(3, "wrong-eps", COPIED, ('torch._foreach_add(below, group["eps"])', "below"))

bank.hint(3, "eps-inside", "You add ε under the root, as some texts do. As in PyTorch, add it to the root.")
bank.slip(3, "eps-inside", ("            below = torch._foreach_sqrt(squares)\n", "            below = torch._foreach_mul(squares, 1.0)\n"), ('[group["eps"] * root for root in roots])', '[group["eps"] * root**2 for root in roots])\n            torch._foreach_sqrt_(below)'))  # fmt: skip
bank.variant(3, "eps-inside", COPIED, ("below = torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))\n            below = torch._foreach_add(below, group[\"eps\"])",
             "below = torch._foreach_sqrt(torch._foreach_add(torch._foreach_div(squares, [1 - beta2**t for t in steps]), group[\"eps\"]))"))  # fmt: skip

bank.hint(
    3, "eps-before-correction", "You add ε to √v, and the sum is then divided by √(1 - β₂ᵗ). Add ε to the "
                                "corrected root."
)
bank.slip(3, "eps-before-correction", ('[group["eps"] * root for root in roots]', 'group["eps"]'))
bank.variant(3, "eps-before-correction", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "torch._foreach_sqrt(squares)"), (
    'torch._foreach_add(below, group["eps"])', 'torch._foreach_div(torch._foreach_add(below, group["eps"]), [math.sqrt(1 - beta2**t) for t in steps])'))  # fmt: skip

bank.hint(3, "wrong-groups", "With one group everything was right, with several it is not. Each group has its own "
                             "options, rates change from step to step, and a parameter may have no gradient.")  # fmt: skip
bank.slip(3, "wrong-groups", ('group["weight_decay"]', 'self.param_groups[0]["weight_decay"]'))
bank.variant(3, "wrong-groups", COPIED, ('group["eps"]', 'self.param_groups[0]["eps"]'), ('= group["lr"], group["betas"]', '= self.param_groups[0]["lr"], group["betas"]'))  # fmt: skip

bank.hint(3, "first-rate", 'A scheduler writes the rate into group["lr"] of each group. Read it there at each step.')
bank.slip(3, "first-rate", ('rate, (beta1, beta2) = group["lr"]', 'rate, (beta1, beta2) = self.defaults["lr"]'))
bank.variant(3, "first-rate", COPIED, ('= group["lr"], group["betas"]', '= self.defaults["lr"], group["betas"]'))

bank.hint(3, "one-count", "All parameters share one step count. A parameter that had no gradient for some steps "
                          "has taken fewer: correct its averages by its own count.")  # fmt: skip
bank.slip(3, "one-count", ("            torch._foreach_lerp_(means", '            group["t"] = group.get("t", 0) + 1\n            steps = [group["t"]] * len(weights)\n            torch._foreach_lerp_(means'))  # fmt: skip
bank.variant(3, "one-count", COPIED, ("            new = ", "            self.t = getattr(self, 't', 0) + (group is self.param_groups[0])\n            steps = [self.t] * len(weights)\n            new = "))  # fmt: skip
bank.slip(3, "one-count", ("[math.sqrt(1 - beta2**step) for step in steps]", "[math.sqrt(1 - beta2 ** steps[0])] * len(steps)"), ("(1 - beta1**step)", "(1 - beta1 ** steps[0])"))  # fmt: skip

bank.slip(3, "not-resumed", ("            torch._foreach_lerp_(means", "            if not hasattr(self, 'kept'):\n                self.kept = {}\n            squares = [self.kept.setdefault(id(w), torch.zeros_like(w)) for w in weights]\n            torch._foreach_lerp_(means"))  # fmt: skip
bank.variant(3, "not-resumed", COPIED, ("            new = ", "            self.c = getattr(self, 'c', {})\n            for w in weights:\n                self.c[w] = self.c.get(w, 0) + 1\n            steps = [self.c[w] for w in weights]\n            new = "))  # fmt: skip

bank.slip(3, "gradients-changed", ("torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)", "torch._foreach_mul_(gradients, gradients)\n            torch._foreach_add_(squares, gradients, alpha=1 - beta2)"))  # fmt: skip
bank.variant(
    3,
    "gradients-changed",
    COPIED,
    ("            shrunk =", "            torch._foreach_zero_(gradients)\n            shrunk ="),
)

bank.slip(3, "weights-moved", ("torch._foreach_addcdiv_(weights, means, below, rates)", "for weight, new in zip(weights, torch._foreach_addcdiv(weights, means, below, rates)):\n                weight.data = new"))  # fmt: skip
bank.variant(3, "weights-moved", COPIED, ("torch._foreach_copy_(weights, torch._foreach_addcdiv(shrunk, mean_hat, below, -rate))", "for w, new in zip(weights, torch._foreach_addcdiv(shrunk, mean_hat, below, -rate)):\n                w.data = new"))  # fmt: skip

bank.slip(
    3,
    "an-operator-each",
    ("torch._foreach_mul_(squares, beta2)", "for square in squares:\n                square.mul_(beta2)"),
)
bank.variant(
    3,
    "an-operator-each",
    COPIED,
    ('below = torch._foreach_add(below, group["eps"])', 'below = [one + group["eps"] for one in below]'),
)

bank.slip(3, "hidden-sync", ('rate, (beta1, beta2) = group["lr"], group["betas"]\n', 'rate, (beta1, beta2) = group["lr"], group["betas"]\n            if any(bool(n > 1e9) for n in torch._foreach_norm(gradients)[:1]):\n                continue\n'))  # fmt: skip

BORROWED = """
class AdamW(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, lr, betas, eps, weight_decay, foreach=True)
"""
bank.text(3, "optimizer-borrowed", COPIED[: COPIED.index("class AdamW")] + BORROWED)

bank.slip(3, "groups-form", ("[weight for weight in trained if weight.ndim > 1]", "[name for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1]"))  # fmt: skip
bank.slip(3, "optimizer-borrowed", ("torch._foreach_lerp_(means, gradients, 1 - beta1)", "torch._fused_adamw_(weights, gradients, means, squares, [], [torch.tensor(float(s)) for s in steps], amsgrad=False, lr=rate, beta1=beta1, beta2=beta2, weight_decay=group['weight_decay'], eps=group['eps'], maximize=False)\n            continue"))  # fmt: skip

bank.hint(3, "nothing-moves", "The weights do not change. A function whose name has no underscore at the end "
                              "returns new tensors and leaves the old ones as they are.")  # fmt: skip
bank.slip(3, "nothing-moves", ("torch._foreach_lerp_(means", "torch._foreach_lerp(means"))
bank.variant(3, "nothing-moves", COPIED, ("            torch._foreach_copy_(weights, torch._foreach_addcdiv(", "            torch._foreach_addcdiv("), ("mean_hat, below, -rate))", "mean_hat, below, -rate)"))  # fmt: skip

bank.hint(
    3,
    "squares-pile-up",
    "v adds up all the squares. First multiply the old average by β₂, in place (with an underscore at the end of "
    "the name).",
)
bank.slip(3, "squares-pile-up", ("torch._foreach_mul_(squares, beta2)", "torch._foreach_mul(squares, beta2)"))
bank.variant(3, "squares-pile-up", COPIED, ("torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)", "torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)"))  # fmt: skip

bank.hint(
    3, "gradient-not-weighted", "m adds the whole gradient, as SGD's momentum does. Here the gradient has the "
                                "weight 1 - β₁."
)
bank.slip(3, "gradient-not-weighted", ("torch._foreach_lerp_(means, gradients, 1 - beta1)", "torch._foreach_mul_(means, beta1)\n            torch._foreach_add_(means, gradients)"))  # fmt: skip
bank.variant(
    3,
    "gradient-not-weighted",
    COPIED,
    ("torch._foreach_lerp(gradients, means, beta1)", "torch._foreach_add(gradients, means, alpha=beta1)"),
)

bank.hint(
    3,
    "correction-not-rooted",
    "You divide √v by 1 - β₂ᵗ. Either correct v before the root, or take the root of the correction too.",
)
bank.slip(3, "correction-not-rooted", ("math.sqrt(1 - beta2**step)", "1 - beta2**step"))
bank.variant(3, "correction-not-rooted", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "torch._foreach_div(torch._foreach_sqrt(squares), [1 - beta2**t for t in steps])"))  # fmt: skip

bank.hint(3, "along-the-gradient", "The step follows this batch's gradient. It must follow the average m.")
bank.slip(3, "along-the-gradient", ("addcdiv_(weights, means, below", "addcdiv_(weights, gradients, below"))
bank.variant(3, "along-the-gradient", TENSORS, ("m_hat = torch._foreach_div(ms,", "m_hat = torch._foreach_div(gs,"))
