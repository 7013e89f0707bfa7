"""Answers to balise 5 of 10_learning_rate_and_large_batch: trust ratios, LARS, LAMB."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", 5, whole=True)

# matrices and vectors apart, the formulas one by one
APART = """
def trust_ratios(weights, updates, decay=0.0, coefficient=1.0):
    w, u = (torch.stack(torch._foreach_norm(one)) for one in (weights, updates))
    plain = (w == 0) | (u == 0)
    below = torch.where(plain, torch.ones_like(w), u + decay * w)
    return (coefficient * w / below).masked_fill(plain, 1)

class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, momentum=0.9, weight_decay=0.0, coefficient=0.001):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, coefficient=coefficient))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for matrices in (True, False):
                ws = [p for p in group["params"] if p.grad is not None and (p.dim() > 1) == matrices]
                if not ws:
                    continue
                gs = [p.grad for p in ws]
                if matrices:
                    r = trust_ratios(ws, gs, group["weight_decay"], group["coefficient"])
                    gs = torch._foreach_mul(torch._foreach_add(gs, ws, alpha=group["weight_decay"]), r.unbind())
                for p in ws:
                    if "b" not in self.state[p]:
                        self.state[p]["b"] = torch.zeros_like(p)
                bs = [self.state[p]["b"] for p in ws]
                torch._foreach_mul_(bs, group["momentum"])
                torch._foreach_add_(bs, gs)
                torch._foreach_add_(ws, bs, alpha=-group["lr"])

class LAMB(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            ws, gs, ts, ms, vs = ready(self, group, "m", "v")
            if not ws:
                continue
            b1, b2 = group["betas"]
            torch._foreach_mul_(ms, b1)
            torch._foreach_add_(ms, gs, alpha=1 - b1)
            torch._foreach_mul_(vs, b2)
            torch._foreach_add_(vs, torch._foreach_mul(gs, gs), alpha=1 - b2)
            us = torch._foreach_div(ms, [1 - b1**t for t in ts])
            below = torch._foreach_div(vs, [1 - b2**t for t in ts])
            torch._foreach_sqrt_(below)
            torch._foreach_add_(below, group["eps"])
            torch._foreach_div_(us, below)
            pairs = [(u, w) for u, w in zip(us, ws) if w.dim() > 1]
            if pairs:
                them = [u for u, _ in pairs]
                torch._foreach_add_(them, [w for _, w in pairs], alpha=group["weight_decay"])
                rs = trust_ratios([w for _, w in pairs], them)
                torch._foreach_mul_(them, list(rs))
            torch._foreach_add_(ws, us, alpha=-group["lr"])
"""
bank.text(None, APART)
bank.text(None, APART.replace("plain = (w == 0) | (u == 0)", "plain = ~((w > 0) & (u > 0))").replace(
    "return (coefficient * w / below).masked_fill(plain, 1)", "return torch.where(plain, 1.0, coefficient * w / below)"))  # fmt: skip
bank.slip(None, (
    "    ratios = coefficient * of_weights / (of_updates + decay * of_weights)\n    return torch.where((of_weights > 0) & (of_updates > 0), ratios, 1.0)",
    "    ratios = coefficient / (of_updates / of_weights + decay)\n    return torch.where(of_weights * of_updates > 0, ratios, torch.ones_like(ratios))"))  # fmt: skip

bank.hint(
    "ratios-form",
    "Return one ratio for each pair, in a tensor (n,) of the norms' dtype: torch.stack makes one from a list.",
)
bank.slip("ratios-form", ("return torch.where((of_weights > 0) & (of_updates > 0), ratios, 1.0)", "return torch.where((of_weights > 0) & (of_updates > 0), ratios, 1.0).tolist()"))  # fmt: skip
bank.variant("ratios-form", APART, ("masked_fill(plain, 1)", "masked_fill(plain, 1)[:, None]"))

bank.hint(
    "wrong-ratios",
    "The ratio is the norm of the weights over that of the update. A norm is the root of the sum of all squares of "
    "the tensor.",
)
bank.slip("wrong-ratios", ("torch._foreach_norm(weights)", "torch._foreach_norm(weights, 1)"))
bank.variant("wrong-ratios", APART, ("w, u = (torch.stack(torch._foreach_norm(one)) for", "w, u = (torch.stack([t.abs().max() for t in one]) for"))  # fmt: skip

bank.hint("upside-down", "The ratio is upside down: large weights can take long steps.")
bank.slip(
    "upside-down",
    ("* of_weights / (of_updates + decay * of_weights)", "* of_updates / (of_weights + decay * of_updates)"),
)
bank.variant("upside-down", APART, ("u + decay * w)", "w + decay * u)"), ("coefficient * w", "coefficient * u"))

bank.hint(
    "one-ratio-for-all",
    "All layers have the same ratio. Each must have its own, from the norms of its own tensors: that is the point.",
)
bank.slip("one-ratio-for-all", ("    ratios = coefficient", "    of_weights = of_weights.norm().expand(len(weights))\n    of_updates = of_updates.norm().expand(len(weights))\n    ratios = coefficient"))  # fmt: skip
bank.variant("one-ratio-for-all", APART, ("    plain =", "    w, u = (torch.linalg.vector_norm(one) * torch.ones(len(one)) for one in (w, u))\n    plain ="))  # fmt: skip

bank.hint(
    "wrong-options",
    "Without decay and coefficient the ratios are right. Add λ‖w‖ to the norm of the update; c multiplies the "
    "whole ratio.",
)
bank.slip("wrong-options", ("coefficient * of_weights", "of_weights"))
bank.slip("wrong-options", ("(of_updates + decay * of_weights)", "of_updates"))
bank.variant("wrong-options", APART, ("u + decay * w)", "u + decay)"))

bank.hint("norm-of-the-sum", "Your denominator is the norm of u + λw. In LARS the two norms are added: ‖u‖ + λ‖w‖.")
bank.slip("norm-of-the-sum", ("torch._foreach_norm(updates)", "torch._foreach_norm(torch._foreach_add(updates, weights, alpha=decay))"), ("(of_updates + decay * of_weights)", "of_updates"))  # fmt: skip
bank.variant("norm-of-the-sum", APART, ("    plain =", "    u = torch.stack(torch._foreach_norm(torch._foreach_add(updates, weights, alpha=decay)))\n    plain ="), ("u + decay * w)", "u)"))  # fmt: skip

bank.hint(
    "wrong-zero-ratios",
    "Where the weights or the update are zero, the ratio is 1, without the coefficient. Both belong in the condition.",
)
bank.slip("wrong-zero-ratios", ("(of_weights > 0) & (of_updates > 0)", "of_updates > 0"))
bank.slip("wrong-zero-ratios", ("ratios, 1.0)", "ratios, coefficient)"))
bank.slip(
    "wrong-zero-ratios", ("return torch.where((of_weights > 0) & (of_updates > 0), ratios, 1.0)", "return ratios")
)
bank.slip("wrong-zero-ratios", ("(of_updates + decay * of_weights)", "(of_updates + decay * of_weights + 1e-9)"), ("torch.where((of_weights > 0) & (of_updates > 0), ratios, 1.0)", "ratios"))  # fmt: skip
bank.variant("wrong-zero-ratios", APART, ("(w == 0) | (u == 0)", "u == 0"))
bank.variant("wrong-zero-ratios", APART, ("(w == 0) | (u == 0)", "(w == 0) & (u == 0)"))

bank.hint("wrong-lars-plain", "A layer of LARS without decay is wrong. It should be b ← μ b + r g, w ← w - α b.")
bank.slip("wrong-lars-plain", ('torch._foreach_mul_(buffers, group["momentum"])\n            torch._foreach_add_(buffers, updates)', 'torch._foreach_lerp_(buffers, updates, 1 - group["momentum"])'))  # fmt: skip

bank.variant("wrong-lars-plain", APART, ("torch._foreach_add_(bs, gs)", 'torch._foreach_add_(bs, gs, alpha=1 - group["momentum"])'))  # fmt: skip

bank.hint("ratio-outside-the-momentum", "Your ratio multiplies the momentum. It must multiply this step's "
                                           "gradient, before that is added to the momentum.")  # fmt: skip
bank.slip("ratio-outside-the-momentum", ("                torch._foreach_mul_([updates[k] for k in layers], list(ratios))\n", ""), (
    "            torch._foreach_add_(buffers, updates)\n            torch._foreach_add_(weights, buffers,",
    "            torch._foreach_add_(buffers, updates)\n            updates = torch._foreach_mul(buffers, 1.0)\n            if layers:\n                torch._foreach_mul_([updates[k] for k in layers], list(ratios))\n            torch._foreach_add_(weights, updates,"))  # fmt: skip
bank.variant("ratio-outside-the-momentum", APART, ("torch._foreach_mul(torch._foreach_add(gs, ws, alpha=group[\"weight_decay\"]), r.unbind())", 'torch._foreach_add(gs, ws, alpha=group["weight_decay"])'), (
    "torch._foreach_add_(ws, bs, alpha=-group[\"lr\"])", 'torch._foreach_add_(ws, torch._foreach_mul(bs, r.unbind()) if matrices else bs, alpha=-group["lr"])'))  # fmt: skip

bank.hint("kernels-exempt", "Convolution kernels are layers too: two dimensions or more, not exactly two.")
bank.slip("kernels-exempt", ("weight.ndim > 1", "weight.ndim == 2"))
bank.variant("kernels-exempt", APART, ("(p.dim() > 1)", "(p.dim() == 2)"))

bank.hint("no-coefficient", "Your LARS ignores its coefficient. It belongs in the ratio.")
bank.slip("no-coefficient", ('*pairs, decay, group["coefficient"]', "*pairs, decay"))
bank.variant("no-coefficient", APART, (', group["weight_decay"], group["coefficient"])', ', group["weight_decay"])'))

bank.hint("no-ratio-in-lars", "The layers of LARS make plain steps, without their ratios. (_foreach_mul returns "
                                 "new tensors, _foreach_mul_ works in place; a decay of 0 does not exempt a layer.)")  # fmt: skip
bank.slip("no-ratio-in-lars", ("torch._foreach_mul_([updates", "torch._foreach_mul([updates"))
bank.variant("no-ratio-in-lars", APART, ("torch._foreach_mul(torch._foreach_add(gs, ws, alpha=group[\"weight_decay\"]), r.unbind())", 'torch._foreach_add(gs, ws, alpha=group["weight_decay"])'))  # fmt: skip

bank.hint("wrong-lars-decay", "Without decay LARS is right. With it, add λw to the gradient; r multiplies both, "
                                 "and r has λ in its denominator.")  # fmt: skip
bank.slip("wrong-lars-decay", ('*pairs, decay, group["coefficient"]', '*pairs, 0.0, group["coefficient"]'))
bank.slip("wrong-lars-decay", ("[decay * (weight.ndim > 1) for weight in weights]", "[0.0] * len(weights)"))
bank.variant("wrong-lars-decay", APART, ('trust_ratios(ws, gs, group["weight_decay"],', "trust_ratios(ws, gs, 0.0,"))

bank.hint(
    "ratio-of-the-sum",
    "You take the ratio of g + λw and add λ‖w‖ once more. Pass the gradients themselves to trust_ratios.",
)
bank.slip("ratio-of-the-sum", ("[gradients[k] for k in layers]", "[updates[k] for k in layers]"))
bank.variant("ratio-of-the-sum", APART, ("r = trust_ratios(ws, gs,", 'r = trust_ratios(ws, torch._foreach_add(gs, ws, alpha=group["weight_decay"]),'))  # fmt: skip

bank.hint("decay-outside-the-ratio", "You decouple the decay from the ratio. Here λw is added before r multiplies.")
bank.slip("decay-outside-the-ratio", ("            torch._foreach_add_(updates, gradients)\n", "            updates = torch._foreach_mul(gradients, 1.0)\n"), (
    '            torch._foreach_mul_(buffers, group["momentum"])\n', '            torch._foreach_add_(updates, torch._foreach_mul(weights, [decay * (weight.ndim > 1) for weight in weights]))\n            torch._foreach_mul_(buffers, group["momentum"])\n'))  # fmt: skip
bank.variant("decay-outside-the-ratio", APART, ('torch._foreach_mul(torch._foreach_add(gs, ws, alpha=group["weight_decay"]), r.unbind())', 'torch._foreach_add(torch._foreach_mul(gs, r.unbind()), ws, alpha=group["weight_decay"])'))  # fmt: skip

bank.hint(
    "wrong-lars-vectors",
    "LARS treats vectors or scalars wrongly. They have no decay and no ratio, and the same momentum as all others.",
)
bank.slip("wrong-lars-vectors", ("            torch._foreach_add_(weights, buffers,", "            torch._foreach_zero_([buffers[k] for k in range(len(weights)) if k not in layers] or buffers[:0] or [torch.zeros(1)])\n            torch._foreach_add_(weights, buffers,"))  # fmt: skip
bank.variant("wrong-lars-vectors", APART, ("for matrices in (True, False):", "for matrices in (True,):"))

bank.hint(
    "vectors-adapted",
    "You give vectors and scalars a ratio. Only parameters with two dimensions or more are adapted.",
)
bank.slip("vectors-adapted", ("layers = group[\"weight_decay\"], [k for k, weight in enumerate(weights) if weight.ndim > 1]", "layers = group[\"weight_decay\"], list(range(len(weights)))"))  # fmt: skip
bank.slip("vectors-adapted", ("            layers = [k for k, weight in enumerate(weights) if weight.ndim > 1]\n", "            layers = list(range(len(weights)))\n"))  # fmt: skip
bank.slip("vectors-adapted", ("weight.ndim > 1", "weight.ndim > 0"))
bank.slip("vectors-adapted", ("            layers = [k for k, weight in enumerate(weights) if weight.ndim > 1]\n", "            layers = list(range(len(weights)))\n"), (
    '[group["weight_decay"] * (weight.ndim > 1) for weight in weights]', 'group["weight_decay"]'))  # fmt: skip
bank.variant("vectors-adapted", APART, ("if w.dim() > 1]", "]"))

bank.hint("vectors-decay", "Vectors or scalars decay. Biases and gains of norms must be exempt.")
bank.slip("vectors-decay", ("[decay * (weight.ndim > 1) for weight in weights]", "decay"))
bank.slip(
    "vectors-decay", ('[group["weight_decay"] * (weight.ndim > 1) for weight in weights]', 'group["weight_decay"]')
)
bank.variant("vectors-decay", APART, ("                gs = [p.grad for p in ws]\n", "                gs = [p.grad for p in ws]\n                if not matrices:\n                    gs = torch._foreach_add(gs, ws, alpha=group[\"weight_decay\"])\n"))  # fmt: skip

bank.hint("wrong-lars-zeros", "With weights or a gradient of zero, LARS is wrong: r is 1 there.")
bank.slip("wrong-lars-zeros", ("list(ratios))\n            torch._foreach_mul_(buffers", "list(torch.where(ratios == 1, 0 * ratios, ratios)))\n            torch._foreach_mul_(buffers"))  # fmt: skip
bank.variant("wrong-lars-zeros", APART, ("r.unbind())", "[one * (one != 1) for one in r])"))

bank.hint("wrong-lars-groups", "With one group LARS was right, with several it is not. Each group has its own "
                                  "options, rates change, and a parameter may have no gradient.")  # fmt: skip
bank.slip(
    "wrong-lars-groups",
    ('*pairs, decay, group["coefficient"]', '*pairs, decay, self.param_groups[0]["coefficient"]'),
)
bank.variant("wrong-lars-groups", APART, ('bs, group["momentum"]', 'bs, self.param_groups[0]["momentum"]'))

bank.hint("rate-in-the-momentum", "You put the rate inside the momentum: when the rate changes, the old one "
                                     "keeps working. Multiply the momentum by it outside.")  # fmt: skip
bank.slip("rate-in-the-momentum", ("torch._foreach_add_(buffers, updates)", 'torch._foreach_add_(buffers, updates, alpha=group["lr"])'), ('torch._foreach_add_(weights, buffers, alpha=-group["lr"])', "torch._foreach_sub_(weights, buffers)"))  # fmt: skip
bank.variant("rate-in-the-momentum", APART, ("torch._foreach_add_(bs, gs)", 'torch._foreach_sub_(bs, gs, alpha=group["lr"])'), ('torch._foreach_add_(ws, bs, alpha=-group["lr"])', "torch._foreach_add_(ws, bs)"))  # fmt: skip

bank.hint(
    "wrong-lamb-plain",
    "A layer of LAMB without decay is wrong: take AdamW's update, times ‖w‖ over the update's own norm.",
)
bank.slip("wrong-lamb-plain", ("torch._foreach_add_(weights, updates, alpha", "torch._foreach_add_(updates, means)\n            torch._foreach_add_(weights, updates, alpha"))  # fmt: skip
bank.slip(
    "wrong-lars-plain",
    (
        "torch._foreach_mul_([updates[k] for k in layers], list(ratios))",
        "torch._foreach_mul_([updates[k] for k in layers], ratios[0])",
    ),
)
bank.slip(
    "wrong-lamb-plain",
    (
        "trust_ratios([weights[k] for k in layers], adapted)",
        "trust_ratios([weights[k] for k in layers], adapted, 0.0, 0.001)",
    ),
)
bank.variant("wrong-lamb-plain", APART, ("torch._foreach_sqrt_(below)\n", "torch._foreach_mul_(below, below)\n"))

bank.hint("not-corrected", "In LAMB you don't correct the averages by 1 - βᵗ. The norm cancels a common factor "
                              "of m, but not that of v next to ε, nor does it for decay or for vectors.")  # fmt: skip
bank.slip("not-corrected", ("[math.sqrt(1 - beta2**step) for step in steps]", "[1.0] * len(steps)"), ("root / (1 - beta1**step)", "root"))  # fmt: skip
bank.slip("not-corrected", ("root / (1 - beta1**step)", "root"))
bank.slip("not-corrected", ("[math.sqrt(1 - beta2**step) for step in steps]", "[1.0] * len(steps)"))
bank.variant("not-corrected", APART, ("[1 - b1**t for t in ts]", "1.0"), ("[1 - b2**t for t in ts]", "1.0"))

bank.hint("no-ratio-in-lamb", "The layers of LAMB make AdamW's steps, without their ratios. (_foreach_mul returns new tensors, _foreach_mul_ works in place.)")  # fmt: skip
bank.slip("no-ratio-in-lamb", ("torch._foreach_mul_(adapted, list", "torch._foreach_mul(adapted, list"))
bank.variant("no-ratio-in-lamb", APART, ("                torch._foreach_mul_(them, list(rs))\n", ""))

bank.hint("ratio-of-the-gradient", "LAMB's ratio uses its own update, not the gradient.")
bank.slip("ratio-of-the-gradient", ("trust_ratios([weights[k] for k in layers], adapted)", "trust_ratios([weights[k] for k in layers], [gradients[k] for k in layers])"))  # fmt: skip
bank.variant("ratio-of-the-gradient", APART, ("rs = trust_ratios([w for _, w in pairs], them)", "rs = trust_ratios([w for _, w in pairs], [w.grad for _, w in pairs])"))  # fmt: skip

bank.hint(
    "wrong-lamb-decay",
    "Without decay LAMB is right. With it, λw is part of the update u, and of the norm in its ratio.",
)
bank.slip("wrong-lamb-decay", ('[group["weight_decay"] * (weight.ndim > 1) for weight in weights]', "0.0"))
bank.variant(
    "wrong-lamb-decay",
    APART,
    ('torch._foreach_add_(them, [w for _, w in pairs], alpha=group["weight_decay"])', "pass"),
)

bank.hint(
    "lamb-decay-twice", "LAMB's update already contains the decay. Pass none to trust_ratios, or λ‖w‖ counts twice."
)
bank.slip("lamb-decay-twice", ("for k in layers], adapted)", 'for k in layers], adapted, group["weight_decay"])'))
bank.variant(
    "lamb-decay-twice",
    APART,
    ("for _, w in pairs], them)", 'for _, w in pairs], them, decay=group["weight_decay"])'),
)

bank.hint(
    "ratio-before-the-decay", "You take LAMB's ratio before λw is added to the update. The norm of the sum counts."
)
bank.slip(
    "ratio-before-the-decay",
    ("adapted)))\n", "torch._foreach_sub(adapted, [weights[k] for k in layers], alpha=group['weight_decay']))))\n"),
)
bank.variant("ratio-before-the-decay", APART, ("                torch._foreach_add_(them, [w for _, w in pairs], alpha=group[\"weight_decay\"])\n                rs = trust_ratios([w for _, w in pairs], them)\n", '                rs = trust_ratios([w for _, w in pairs], them)\n                torch._foreach_add_(them, [w for _, w in pairs], alpha=group["weight_decay"])\n'))  # fmt: skip

bank.hint("lamb-decay-decoupled", "You apply LAMB's decay to the weights outside the update, as in AdamW. Here "
                                     "λw is part of the update, and r multiplies it.")  # fmt: skip
bank.slip("lamb-decay-decoupled", ('[group["weight_decay"] * (weight.ndim > 1) for weight in weights]', "0.0"), (
    "            torch._foreach_add_(weights, updates, alpha", '            torch._foreach_mul_([weights[k] for k in layers], 1 - group["lr"] * group["weight_decay"])\n            torch._foreach_add_(weights, updates, alpha'))  # fmt: skip
bank.variant("lamb-decay-decoupled", APART, ('torch._foreach_add_(them, [w for _, w in pairs], alpha=group["weight_decay"])', "pass"), (
    "                torch._foreach_mul_(them, list(rs))\n", '                torch._foreach_mul_(them, list(rs))\n                torch._foreach_add_(them, [w for _, w in pairs], alpha=group["weight_decay"])\n'))  # fmt: skip

bank.hint(
    "wrong-lamb-vectors",
    "LAMB treats vectors or scalars wrongly. They have no decay and no ratio, only AdamW's step.",
)
bank.slip("wrong-lamb-vectors", ('torch._foreach_add_(weights, updates, alpha=-group["lr"])', 'torch._foreach_add_([weights[k] for k in layers] or weights[:1], [updates[k] for k in layers] or updates[:1], alpha=-group["lr"])'))  # fmt: skip
bank.variant("wrong-lamb-vectors", APART, ('torch._foreach_add_(ws, us, alpha=-group["lr"])', 'torch._foreach_add_(ws, [u * (u.dim() > 1) for u in us], alpha=-group["lr"])'))  # fmt: skip

bank.hint("wrong-lamb-zeros", "With weights or updates of zero, LAMB is wrong: r is 1 there.")
bank.slip("wrong-lamb-zeros", ("list(trust_ratios([weights[k] for k in layers], adapted))", "[one * (one != 1) for one in trust_ratios([weights[k] for k in layers], adapted)]"))  # fmt: skip
bank.variant("wrong-lamb-zeros", APART, ("list(rs)", "[one * (one != 1) for one in rs]"))

bank.hint("wrong-lamb-groups", "With one group LAMB was right, with several it is not. Each group has its own "
                                  "options, rates change, and a parameter may have no gradient.")  # fmt: skip
bank.slip("wrong-lamb-groups", ('[group["eps"] * root', '[self.param_groups[0]["eps"] * root'))
bank.variant("wrong-lamb-groups", APART, ('below, group["eps"]', 'below, self.param_groups[0]["eps"]'))

bank.hint("one-count", "All parameters share one step count. A parameter that had no gradient for some steps "
                          "has taken fewer: correct its averages by its own count.")  # fmt: skip
bank.slip("one-count", ("            roots = [", '            group["t"] = group.get("t", 0) + 1\n            steps = [group["t"]] * len(weights)\n            roots = ['))  # fmt: skip
bank.slip("one-count", ("            roots = [", "            steps = steps[:1] * len(weights)\n            roots = ["))
bank.variant("one-count", APART, ("            us = torch", "            self.t = getattr(self, 't', 0) + (group is self.param_groups[0])\n            ts = [self.t] * len(ws)\n            us = torch"))  # fmt: skip

bank.slip("not-resumed", ('            torch._foreach_mul_(buffers, group["momentum"])\n', '            self.kept = getattr(self, "kept", {})\n            buffers = [self.kept.setdefault(id(w), torch.zeros_like(w)) for w in weights]\n            torch._foreach_mul_(buffers, group["momentum"])\n'))  # fmt: skip
bank.slip("gradients-changed", ("updates = torch._foreach_mul(weights, [decay * (weight.ndim > 1) for weight in weights])\n            torch._foreach_add_(updates, gradients)", "updates = gradients\n            torch._foreach_add_(updates, torch._foreach_mul(weights, [decay * (weight.ndim > 1) for weight in weights]))"), (
    "pairs = [weights[k] for k in layers], [gradients[k] for k in layers]", "pairs = [weights[k] for k in layers], torch._foreach_sub([gradients[k] for k in layers], [weights[k] for k in layers], alpha=decay)"))  # fmt: skip
bank.slip(
    "an-operator-each",
    ("torch.stack(torch._foreach_norm(weights))", "torch.stack([weight.norm() for weight in weights])"),
)
bank.slip("hidden-sync", ("    ratios = coefficient", "    if not bool((of_weights > 0).all()):\n        return torch.tensor([coefficient * w / (u + decay * w) if w * u > 0 else 1.0 for w, u in zip(of_weights, of_updates)])\n    ratios = coefficient"))  # fmt: skip

bank.hint("eps-inside", "In LAMB, you add ε under the root. As in AdamW, add it to the root.")
bank.slip("eps-inside", ("            below = torch._foreach_sqrt(squares)\n", "            below = torch._foreach_mul(squares, 1.0)\n"), ('[group["eps"] * root for root in roots])', '[group["eps"] * root**2 for root in roots])\n            torch._foreach_sqrt_(below)'))  # fmt: skip
bank.variant("eps-inside", APART, ('            torch._foreach_sqrt_(below)\n            torch._foreach_add_(below, group["eps"])\n', '            torch._foreach_add_(below, group["eps"])\n            torch._foreach_sqrt_(below)\n'))  # fmt: skip

bank.hint("ratio-capped", "You cap the ratio at a bound, such as 1 or 10. Here it has none: a layer with large "
                             "weights and a small update makes a long step.")  # fmt: skip
for most in ("1.0", "10.0"):
    bank.slip("ratio-capped", ("ratios, 1.0)", f"ratios, 1.0).clamp(max={most})"))
bank.slip("ratio-capped", ("list(ratios))", "list(ratios.clamp(max=1.0)))"))
bank.variant("ratio-capped", APART, ("(coefficient * w / below)", "(coefficient * w / below).clamp(max=1)"))
bank.variant("ratio-capped", APART, ("r.unbind())", "[one.clamp(max=1) for one in r])"))
bank.slip("ratio-capped", ("list(trust_ratios([weights[k] for k in layers], adapted))", "list(trust_ratios([weights[k] for k in layers], adapted).clamp(max=1))"))  # fmt: skip
bank.variant("ratio-capped", APART, ("list(rs)", "list(rs.clamp(max=1.0))"))

bank.hint("rate-twice", "The rate multiplies LAMB's step twice: with the ratio, and once more in the given last line.")
bank.slip("rate-twice", ("list(trust_ratios([weights[k] for k in layers], adapted))", "list(group['lr'] * trust_ratios([weights[k] for k in layers], adapted))"))  # fmt: skip
bank.variant("rate-twice", APART, ("list(rs)", "list(rs * group['lr'])"))

bank.slip("ratio-capped", ("list(trust_ratios([weights[k] for k in layers], adapted))", "list(trust_ratios([weights[k] for k in layers], adapted).clamp(max=10))"))  # fmt: skip
bank.variant("ratio-capped", APART, ("list(rs)", "list(rs.clamp(0.01, 10.0))"))

bank.hint("norm-capped", "You cap a norm of the weights at 10. The ratio uses the norm as it is.")
bank.slip("norm-capped", ("coefficient * of_weights /", "coefficient * of_weights.clamp(max=10) /"))
bank.variant("norm-capped", APART, ("(coefficient * w /", "(coefficient * w.clamp(max=10.0) /"))

bank.hint("other-places", "Your ratios multiply the first updates of the list, not those at the positions in `layers`.")
bank.slip(
    "other-places",
    ("_foreach_mul_([updates[k] for k in layers], list", "_foreach_mul_(updates[: len(layers)], list"),
)
bank.slip("other-places", ("_foreach_mul_(adapted, list", "_foreach_mul_(updates[: len(layers)], list"))
bank.variant("other-places", APART, ("_foreach_mul_(them, list(rs))", "_foreach_mul_(us[: len(rs)], list(rs))"))

bank.slip("one-ratio-for-all", (
    "list(trust_ratios([weights[k] for k in layers], adapted))", "trust_ratios([weights[k] for k in layers], adapted).mean()"))  # fmt: skip
bank.slip("one-ratio-for-all", ("ratios = trust_ratios(*pairs, decay, group[\"coefficient\"])",
          "ratios = trust_ratios(*pairs, decay, group[\"coefficient\"]).mean().expand(len(layers))"))  # fmt: skip
bank.variant("one-ratio-for-all", APART, ("list(rs)", "list(rs.mean() + 0 * rs)"))
bank.slip(
    "wrong-lars-plain",
    ('trust_ratios(*pairs, decay, group["coefficient"])', 'trust_ratios(*pairs, group["coefficient"], decay)'),
)
bank.slip(
    "wrong-lamb-plain",
    ("trust_ratios([weights[k] for k in layers], adapted)", "trust_ratios(adapted, [weights[k] for k in layers])"),
)
