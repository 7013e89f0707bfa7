"""Answers to balise 3 of 10_learning_rate_and_large_batch: AdamW and what decays."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 3, whole=True)

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
bank.text(None, TENSORS.replace("""                self.state[p]["step"] += 1
""", """                self.state[p]["step"] = self.state[p].get("step", 0) + 1
""").replace('"step": torch.tensor(0.0), ', "").replace("t.item()", "t"))  # fmt: skip
bank.text(None, TENSORS.replace("""                self.state[p]["step"] += 1
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
bank.text(None, COPIED)

bank.hint(
    "groups-form",
    'Return a list of groups: dicts with the keys "params" and "weight_decay", each with its own value, and the '
    "model's parameters themselves.",
)
bank.slip("groups-form", (', "weight_decay": weight_decay}', "}"))
bank.slip("groups-form", ("    return [\n        {", "    return {\n        0: {"), ("        {\"params\": [weight for weight in trained if weight.ndim < 2]", "        1: {\"params\": [weight for weight in trained if weight.ndim < 2]"), (' "weight_decay": 0.0},\n    ]', ' "weight_decay": 0.0},\n    }'))  # fmt: skip
bank.variant("groups-form", COPIED, ("    return groups", '    return groups[0]["params"], groups[1]["params"]'))

bank.hint(
    "frozen-inside", "Frozen parameters are in a group: {got}. Take only those that have requires_grad.", edge=True
)
bank.slip("frozen-inside", (" if weight.requires_grad]", "]"))
bank.variant("frozen-inside", COPIED, ("if p.requires_grad:", "if p is not None:"))

bank.hint("tied-twice", "A tied parameter is in the groups twice, so it would be updated twice per step. "
                           "model.parameters() lists each parameter once; a walk over the modules does not.", edge=True)  # fmt: skip
bank.slip("tied-twice", ("in model.parameters() if", "in [p for m in model.modules() for p in m.parameters(recurse=False)] if"))  # fmt: skip
bank.variant("tied-twice", COPIED, ("model.named_parameters()", "model.named_parameters(remove_duplicate=False)"))

bank.hint("parameters-missing", "These parameters are in no group and will not be trained: {got}.")
bank.slip("parameters-missing", ("weight.ndim > 1]", "weight.ndim == 2]"))
bank.slip("parameters-missing", ("weight.ndim < 2]", "weight.ndim == 1]"))
bank.variant("parameters-missing", COPIED, ("if p.requires_grad:", "if p.requires_grad and p.ndim:"))

bank.hint("vectors-decay", "A vector or a scalar decays. Biases, gains of norms and the like have fewer than "
                              "two dimensions; you can't tell them by their names.", edge=True)  # fmt: skip
bank.slip("vectors-decay", ('weight.ndim < 2], "weight_decay": 0.0', 'weight.ndim < 2], "weight_decay": weight_decay'))
bank.variant(
    "vectors-decay", COPIED, ("for _, p in", "for name, p in"), ("groups[p.ndim < 2]", 'groups["bias" in name]')
)
bank.variant("vectors-decay", COPIED, ("for _, p in", "for name, p in"), ("groups[p.ndim < 2]", 'groups["bias" in name or "norm" in name]'))  # fmt: skip

bank.hint(
    "matrices-do-not-decay",
    "A matrix or a kernel does not decay by the given `weight_decay`. You can tell it by its dimensions: two or more.",
)
bank.slip("matrices-do-not-decay", ("weight.ndim > 1]", "weight.ndim == 2]"), ("weight.ndim < 2]", "weight.ndim != 2]"))
bank.slip("matrices-do-not-decay", ('"weight_decay": weight_decay', '"weight_decay": 0.01'))
bank.slip("matrices-do-not-decay", ("    trained = [weight for weight in model.parameters() if weight.requires_grad]\n", "    named = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}\n    trained = list(named)\n"),
          ("weight.ndim > 1]", 'weight.ndim > 1 and named[weight].endswith("weight")]'), ("weight.ndim < 2]", 'weight.ndim < 2 or not named[weight].endswith("weight")]'))  # fmt: skip
bank.variant("matrices-do-not-decay", COPIED, ("groups[p.ndim < 2]", "groups[p.ndim > 1]"))

bank.hint("wrong-step", "The weights after a step don't follow Adam's formulas, even without decay. In the "
                           "first step, t = 1, m̂ is g and v̂ is g², so each weight moves by about α.")  # fmt: skip
bank.slip("wrong-step", ("-rate * root", "-2 * rate * root"))
bank.slip("wrong-step", ("_foreach_addcdiv_(weights, means", "_foreach_addcmul_(weights, means"))
bank.variant("wrong-step", COPIED, ("mean_hat, below, -rate", "mean_hat, below, -3 * rate"))

bank.hint("not-corrected", "The averages begin at 0, so the early ones are too small. Divide them by 1 - βᵗ.")
bank.slip("not-corrected", ("[math.sqrt(1 - beta2**step) for step in steps]", "[1.0] * len(steps)"), ("root / (1 - beta1**step)", "root"))  # fmt: skip
bank.variant("not-corrected", COPIED, ("torch._foreach_div(means, [1 - beta1**t for t in steps])", "means"), ("torch._foreach_div(squares, [1 - beta2**t for t in steps])", "squares"))  # fmt: skip

bank.hint(
    "mean-not-corrected",
    "You correct the average of the squares, but not that of the gradients. Divide it by 1 - β₁ᵗ.",
)
bank.slip("mean-not-corrected", ("root / (1 - beta1**step)", "root"))
bank.variant("mean-not-corrected", COPIED, ("torch._foreach_div(means, [1 - beta1**t for t in steps])", "means"))

bank.hint("square-not-corrected", "You correct the average of the gradients, but not that of their squares. "
                                     "Divide it by 1 - β₂ᵗ, under the root.")  # fmt: skip
bank.slip("square-not-corrected", ("[math.sqrt(1 - beta2**step) for step in steps]", "[1.0] * len(steps)"))
bank.variant("square-not-corrected", COPIED, ("torch._foreach_div(squares, [1 - beta2**t for t in steps])", "squares"))

bank.hint("uphill", "The weights move along the gradient, uphill. Subtract the step.")
bank.slip("uphill", ("[-rate * root", "[rate * root"))
bank.variant("uphill", COPIED, ("mean_hat, below, -rate", "mean_hat, below, rate"))

bank.hint(
    "square-whole",
    "v takes in the whole square of the gradient. Its weight is 1 - β₂, just as the gradient's weight in m is 1 - β₁.",
)
bank.slip("square-whole", ("squares, gradients, gradients, 1 - beta2)", "squares, gradients, gradients, 1)"))
bank.variant("square-whole", COPIED, ("torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)", "torch._foreach_mul_(squares, beta2)\n            torch._foreach_addcmul_(squares, gradients, gradients, 1.0)"))  # fmt: skip

bank.hint("buffers-corrected", "You write the correction into the averages themselves, so it is still there at "
                                  "the next step. Divide into new tensors, with a function whose name has no "
                                  "underscore at the end.")  # fmt: skip
bank.slip("buffers-corrected", ("            below = torch._foreach_sqrt(squares)\n", "            torch._foreach_div_(squares, [1 - beta2**step for step in steps])\n            roots = [1.0] * len(steps)\n            below = torch._foreach_sqrt(squares)\n"), ("rates = [-rate * root / (1 - beta1**step)", "rates = [-rate / (1 - beta1**step)"))  # fmt: skip
bank.slip("buffers-corrected", ("            below = torch._foreach_sqrt(squares)\n", "            torch._foreach_div_(squares, [1 - beta2**step for step in steps])\n            torch._foreach_div_(means, [1 - beta1**step for step in steps])\n            roots = [1.0] * len(steps)\n            below = torch._foreach_sqrt(squares)\n"), ("rates = [-rate * root / (1 - beta1**step)", "rates = [-rate"))  # fmt: skip
bank.variant("buffers-corrected", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "squares\n            torch._foreach_div_(squares, [1 - beta2**t for t in steps])\n            below = torch._foreach_sqrt(squares)"))  # fmt: skip

bank.hint("square-of-the-mean", "v averages the squares of the gradients, not the squares of their averages m.")
bank.slip("square-of-the-mean", ("squares, gradients, gradients,", "squares, means, means,"))
bank.variant(
    "square-of-the-mean", COPIED, ("torch._foreach_mul(gradients, gradients)", "torch._foreach_mul(means, means)")
)

bank.hint(
    "beta-for-one-minus-beta",
    "The old average has the weight β, the new gradient 1 - β. You have swapped them.",
)
bank.slip("beta-for-one-minus-beta", ("gradients, 1 - beta1", "gradients, beta1"), ("_foreach_mul_(squares, beta2)", "_foreach_mul_(squares, 1 - beta2)"), ("gradients, gradients, 1 - beta2", "gradients, gradients, beta2"))  # fmt: skip
bank.slip("beta-for-one-minus-beta", ("gradients, 1 - beta1", "gradients, beta1"))
bank.variant("beta-for-one-minus-beta", COPIED, ("_foreach_lerp(gradients, means, beta1)", "_foreach_lerp(means, gradients, beta1)"))  # fmt: skip

bank.hint("without-root", "You divide the step by v̂: the root is missing.")
bank.slip("without-root", ("torch._foreach_sqrt(squares)", "torch._foreach_mul(squares, 1.0)"), ("math.sqrt(1 - beta2**step)", "1 - beta2**step"))  # fmt: skip
bank.variant("without-root", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "torch._foreach_div(squares, [1 - beta2**t for t in steps])"))  # fmt: skip

bank.hint(
    "wrong-decay",
    "Without decay the steps are right; with it they are not. θ shrinks by αλθ, separately from Adam's step.",
)
bank.slip("wrong-decay", ('1 - rate * group["weight_decay"]', '1 - 3 * rate * group["weight_decay"]'))
bank.variant("wrong-decay", COPIED, ('1 - rate * group["weight_decay"]', '1 + rate * group["weight_decay"]'))

bank.hint("decay-in-the-gradient", "You add the decay to the gradient, as Adam with L2 does, so it is divided "
                                      "by √v̂. Decoupled decay stays out of m and v.")  # fmt: skip
L2 = 'gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])\n            '
bank.slip("decay-in-the-gradient", ("torch._foreach_lerp_(means", L2 + "torch._foreach_lerp_(means"), ('            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n', ""))  # fmt: skip
bank.variant("decay-in-the-gradient", COPIED, ("new = ", L2 + "new = "), ('torch._foreach_mul(weights, 1 - rate * group["weight_decay"])', "weights"))  # fmt: skip

bank.hint("no-decay", "The weights do not decay.")
bank.slip("no-decay", ('            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n', ""))
bank.variant("no-decay", COPIED, ('torch._foreach_mul(weights, 1 - rate * group["weight_decay"])', "weights"))

bank.hint(
    "decay-without-rate",
    "The decay is αλθ, as in PyTorch. Without the rate α it is far too large, and no schedule lowers it.",
)
bank.slip("decay-without-rate", ('1 - rate * group["weight_decay"]', '1 - group["weight_decay"]'))
bank.variant("decay-without-rate", COPIED, ('1 - rate * group["weight_decay"]', '1 - group["weight_decay"]'))

bank.hint(
    "decay-last",
    "You apply the decay to the weights after Adam's step, so it shrinks the step too. Shrink the weights first.",
    edge=True,
)
bank.slip("decay-last", ('            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n            torch._foreach_addcdiv_(weights, means, below, rates)\n', '            torch._foreach_addcdiv_(weights, means, below, rates)\n            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])\n'))  # fmt: skip
bank.variant("decay-last", COPIED, ('torch._foreach_mul(weights, 1 - rate * group["weight_decay"])', "weights"), (
    "torch._foreach_copy_(weights, torch._foreach_addcdiv(shrunk, mean_hat, below, -rate))",
    'torch._foreach_copy_(weights, torch._foreach_mul(torch._foreach_addcdiv(shrunk, mean_hat, below, -rate), 1 - rate * group["weight_decay"]))'))  # fmt: skip

bank.hint(
    "wrong-eps",
    "Steps are right when ε is small, and wrong when it is large. Add ε to √v̂, after the root.",
    edge=True,
)
bank.slip("wrong-eps", ('[group["eps"] * root for root in roots]', '[3 * group["eps"] * root for root in roots]'))
bank.variant("wrong-eps", COPIED, ('torch._foreach_add(below, group["eps"])', "below"))

bank.hint("eps-inside", "You add ε under the root, as some texts do. As in PyTorch, add it to the root.", edge=True)
bank.slip("eps-inside", ("            below = torch._foreach_sqrt(squares)\n", "            below = torch._foreach_mul(squares, 1.0)\n"), ('[group["eps"] * root for root in roots])', '[group["eps"] * root**2 for root in roots])\n            torch._foreach_sqrt_(below)'))  # fmt: skip
bank.variant("eps-inside", COPIED, ("below = torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))\n            below = torch._foreach_add(below, group[\"eps\"])",
             "below = torch._foreach_sqrt(torch._foreach_add(torch._foreach_div(squares, [1 - beta2**t for t in steps]), group[\"eps\"]))"))  # fmt: skip

bank.hint(
    "eps-before-correction",
    "You add ε to √v, and the sum is then divided by √(1 - β₂ᵗ). Add ε to the corrected root.",
    edge=True,
)
bank.slip("eps-before-correction", ('[group["eps"] * root for root in roots]', 'group["eps"]'))
bank.variant("eps-before-correction", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "torch._foreach_sqrt(squares)"), (
    'torch._foreach_add(below, group["eps"])', 'torch._foreach_div(torch._foreach_add(below, group["eps"]), [math.sqrt(1 - beta2**t) for t in steps])'))  # fmt: skip

bank.hint("wrong-groups", "With one group everything was right, with several it is not. Each group has its own "
                             "options, rates change from step to step, and a parameter may have no gradient.")  # fmt: skip
bank.slip("wrong-groups", ('group["weight_decay"]', 'self.param_groups[0]["weight_decay"]'))
bank.variant("wrong-groups", COPIED, ('group["eps"]', 'self.param_groups[0]["eps"]'), ('= group["lr"], group["betas"]', '= self.param_groups[0]["lr"], group["betas"]'))  # fmt: skip

bank.hint(
    "first-rate",
    'A scheduler writes the rate into group["lr"] of each group. Read it there at each step.',
    edge=True,
)
bank.slip("first-rate", ('rate, (beta1, beta2) = group["lr"]', 'rate, (beta1, beta2) = self.defaults["lr"]'))
bank.variant("first-rate", COPIED, ('= group["lr"], group["betas"]', '= self.defaults["lr"], group["betas"]'))

bank.hint("one-count", "All parameters share one step count. A parameter that had no gradient for some steps "
                          "has taken fewer: correct its averages by its own count.", edge=True)  # fmt: skip
bank.slip("one-count", ("            torch._foreach_lerp_(means", '            group["t"] = group.get("t", 0) + 1\n            steps = [group["t"]] * len(weights)\n            torch._foreach_lerp_(means'))  # fmt: skip
bank.variant("one-count", COPIED, ("            new = ", "            self.t = getattr(self, 't', 0) + (group is self.param_groups[0])\n            steps = [self.t] * len(weights)\n            new = "))  # fmt: skip
bank.slip("one-count", ("[math.sqrt(1 - beta2**step) for step in steps]", "[math.sqrt(1 - beta2 ** steps[0])] * len(steps)"), ("(1 - beta1**step)", "(1 - beta1 ** steps[0])"))  # fmt: skip

bank.slip("not-resumed", ("            torch._foreach_lerp_(means", "            if not hasattr(self, 'kept'):\n                self.kept = {}\n            squares = [self.kept.setdefault(id(w), torch.zeros_like(w)) for w in weights]\n            torch._foreach_lerp_(means"))  # fmt: skip
bank.variant("not-resumed", COPIED, ("            new = ", "            self.c = getattr(self, 'c', {})\n            for w in weights:\n                self.c[w] = self.c.get(w, 0) + 1\n            steps = [self.c[w] for w in weights]\n            new = "))  # fmt: skip

bank.slip("gradients-changed", ("torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)", "torch._foreach_mul_(gradients, gradients)\n            torch._foreach_add_(squares, gradients, alpha=1 - beta2)"))  # fmt: skip
bank.variant(
    "gradients-changed",
    COPIED,
    ("            shrunk =", "            torch._foreach_zero_(gradients)\n            shrunk ="),
)

bank.slip("weights-moved", ("torch._foreach_addcdiv_(weights, means, below, rates)", "for weight, new in zip(weights, torch._foreach_addcdiv(weights, means, below, rates)):\n                weight.data = new"))  # fmt: skip
bank.variant("weights-moved", COPIED, ("torch._foreach_copy_(weights, torch._foreach_addcdiv(shrunk, mean_hat, below, -rate))", "for w, new in zip(weights, torch._foreach_addcdiv(shrunk, mean_hat, below, -rate)):\n                w.data = new"))  # fmt: skip

bank.slip(
    "an-operator-each",
    ("torch._foreach_mul_(squares, beta2)", "for square in squares:\n                square.mul_(beta2)"),
)
bank.variant(
    "an-operator-each",
    COPIED,
    ('below = torch._foreach_add(below, group["eps"])', 'below = [one + group["eps"] for one in below]'),
)

bank.slip("hidden-sync", ('rate, (beta1, beta2) = group["lr"], group["betas"]\n', 'rate, (beta1, beta2) = group["lr"], group["betas"]\n            if any(bool(n > 1e9) for n in torch._foreach_norm(gradients)[:1]):\n                continue\n'))  # fmt: skip

BORROWED = """
class AdamW(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, lr, betas, eps, weight_decay, foreach=True)
"""
bank.text("optimizer-borrowed", COPIED[: COPIED.index("class AdamW")] + BORROWED)

bank.slip("groups-form", ("[weight for weight in trained if weight.ndim > 1]", "[name for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1]"))  # fmt: skip
bank.slip("optimizer-borrowed", ("torch._foreach_lerp_(means, gradients, 1 - beta1)", "torch._fused_adamw_(weights, gradients, means, squares, [], [torch.tensor(float(s)) for s in steps], amsgrad=False, lr=rate, beta1=beta1, beta2=beta2, weight_decay=group['weight_decay'], eps=group['eps'], maximize=False)\n            continue"))  # fmt: skip

bank.hint("nothing-moves", "The weights do not change. A function whose name has no underscore at the end "
                              "returns new tensors and leaves the old ones as they are.")  # fmt: skip
bank.slip("nothing-moves", ("torch._foreach_lerp_(means", "torch._foreach_lerp(means"))
bank.variant("nothing-moves", COPIED, ("            torch._foreach_copy_(weights, torch._foreach_addcdiv(", "            torch._foreach_addcdiv("), ("mean_hat, below, -rate))", "mean_hat, below, -rate)"))  # fmt: skip

bank.hint(
    "squares-pile-up",
    "v adds up all the squares. First multiply the old average by β₂, in place (with an underscore at the end of "
    "the name).",
)
bank.slip("squares-pile-up", ("torch._foreach_mul_(squares, beta2)", "torch._foreach_mul(squares, beta2)"))
bank.variant("squares-pile-up", COPIED, ("torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)", "torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)"))  # fmt: skip

bank.hint(
    "gradient-not-weighted",
    "m adds the whole gradient, as SGD's momentum does. Here the gradient has the weight 1 - β₁.",
)
bank.slip("gradient-not-weighted", ("torch._foreach_lerp_(means, gradients, 1 - beta1)", "torch._foreach_mul_(means, beta1)\n            torch._foreach_add_(means, gradients)"))  # fmt: skip
bank.variant(
    "gradient-not-weighted",
    COPIED,
    ("torch._foreach_lerp(gradients, means, beta1)", "torch._foreach_add(gradients, means, alpha=beta1)"),
)

bank.hint(
    "correction-not-rooted",
    "You divide √v by 1 - β₂ᵗ. Either correct v before the root, or take the root of the correction too.",
)
bank.slip("correction-not-rooted", ("math.sqrt(1 - beta2**step)", "1 - beta2**step"))
bank.variant("correction-not-rooted", COPIED, ("torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))", "torch._foreach_div(torch._foreach_sqrt(squares), [1 - beta2**t for t in steps])"))  # fmt: skip

bank.hint("along-the-gradient", "The step follows this batch's gradient. It must follow the average m.")
bank.slip("along-the-gradient", ("addcdiv_(weights, means, below", "addcdiv_(weights, gradients, below"))
bank.variant("along-the-gradient", TENSORS, ("m_hat = torch._foreach_div(ms,", "m_hat = torch._foreach_div(gs,"))

bank.edge("gradients-changed", "not-resumed", "weights-moved")
