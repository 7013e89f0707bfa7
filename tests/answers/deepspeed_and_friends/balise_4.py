"""Answers to balise 4 of 20_deepspeed_and_friends: AdamW on lists of tensors."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", 4, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

HEAD = """
def fused_adamw(weights, gradients, means, squares, step, lr, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1):
"""

# as the formula is written, each correction on its own
WRITTEN = (
    HEAD
    + """
    with torch.no_grad():
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        below = torch._foreach_div(squares, 1 - beta2**step)
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, epsilon)
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_addcdiv_(weights, means, below, value=-lr / (1 - beta1**step))
"""
)
bank.text(None, WRITTEN)

# the update is made in the list of roots
ASIDE = (
    HEAD
    + """
    torch._foreach_mul_(squares, beta2 / (1 - beta2))
    torch._foreach_addcmul_(squares, gradients, gradients)
    torch._foreach_mul_(squares, 1 - beta2)
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    update = torch._foreach_sqrt(squares)
    torch._foreach_mul_(update, (1 - beta2**step) ** -0.5)
    torch._foreach_add_(update, epsilon)
    torch._foreach_reciprocal_(update)
    torch._foreach_mul_(update, means)
    torch._foreach_mul_(update, lr / (1 - beta1**step))
    torch._foreach_mul_(weights, 1 - weight_decay * lr)
    torch._foreach_sub_(weights, update)
"""
)
bank.text(None, ASIDE)

hint("wrong-step", "The step is not that of AdamW. Compare each call with the formula: decay, mean, squares, "
                      "then the update with both corrections.")  # fmt: skip
slip("wrong-step", ("-lr * correction", "lr * correction"))
variant("wrong-step", WRITTEN, ("value=-lr /", "value=lr /"))

slip("wrong-step", ("torch._foreach_addcdiv_(weights", "torch._foreach_addcmul_(weights"))
slip("wrong-step", ("weights, means, roots", "weights, gradients, roots"))
slip("wrong-step", ("/ (1 - beta1**step)", "/ 1 - beta1**step"))

hint("old-mean", "The weights move along the mean of the previous step, so in the first step they do not move "
                    "at all. First add the gradient to the averages, then update.")  # fmt: skip
MEAN = "    torch._foreach_lerp_(means, gradients, 1 - beta1)\n"
slip("old-mean", (MEAN, ""), ("(1 - beta1**step))\n", "(1 - beta1**step))\n" + MEAN))
variant(
    "old-mean",
    ASIDE,
    (MEAN, ""),
    ("    torch._foreach_sub_(weights, update)\n", "    torch._foreach_sub_(weights, update)\n" + MEAN),
)

hint(
    "squares-for-means",
    "The weights move along the squares of the gradients. The mean belongs in the "
    "numerator, the root of the squares in the denominator.",
)
slip("squares-for-means", ("weights, means, roots", "weights, squares, roots"))
variant("squares-for-means", WRITTEN, ("weights, means, below", "weights, squares, below"))

hint("wrong-mean", "After a step, `means` do not hold β₁m + (1 − β₁)g. lerp_(x, y, t) computes (1 − t)x + ty.")
slip("wrong-mean", ("gradients, 1 - beta1)", "gradients, beta1)"))
slip(
    "wrong-mean",
    (
        "    torch._foreach_lerp_(means, gradients, 1 - beta1)\n",
        "    torch._foreach_add_(means, gradients, alpha=1 - beta1)\n",
    ),
)
variant("wrong-mean", WRITTEN, ("alpha=1 - beta1", "alpha=1"))
variant("wrong-mean", ASIDE, ("gradients, 1 - beta1)", "gradients, beta1)"))

hint("wrong-squares", "After a step, `squares` do not hold β₂v + (1 − β₂)g². This takes two calls: multiply the "
                         "old squares by β₂, then add the squares of the gradients times 1 − β₂.")  # fmt: skip
slip("wrong-squares", ("gradients, gradients, 1 - beta2)", "gradients, gradients, beta2)"))
slip("wrong-squares", ("gradients, gradients, 1 - beta2)", "gradients, gradients)"))
slip("wrong-squares", ("gradients, gradients, 1 - beta2)", "gradients, gradients, 1 - beta1)"))
variant("wrong-squares", WRITTEN, ("torch._foreach_mul_(squares, beta2)", "torch._foreach_mul_(squares, beta1)"))
variant("wrong-squares", ASIDE, ("    torch._foreach_mul_(squares, 1 - beta2)\n", ""))

hint("not-in-place", "After the call, the {what} are unchanged. Operators that end in _ change the list that "
                        "they are given. The others return a new list, and binding a name to it changes nothing "
                        "for the caller.")  # fmt: skip
slip("not-in-place", ("torch._foreach_mul_(weights,", "weights = torch._foreach_mul(weights,"))
slip("not-in-place", ("torch._foreach_mul_(squares,", "squares = torch._foreach_mul(squares,"))

variant("not-in-place", WRITTEN, ("torch._foreach_mul_(means, beta1)", "means = torch._foreach_mul(means, beta1)"))

hint("gradients-changed", "The gradients have other values after the call, but they belong to the caller. Write "
                             "decay, squares and averages elsewhere.")  # fmt: skip
slip(
    "gradients-changed",
    ("gradients, gradients, 1 - beta2)", "torch._foreach_mul_(gradients, gradients) or gradients, [torch.ones_like(g) for g in gradients], 1 - beta2)"),
)  # fmt: skip
variant(
    "gradients-changed", WRITTEN,
    ("        torch._foreach_mul_(weights, 1 - lr * weight_decay)\n", ""),
    ("        torch._foreach_mul_(means, beta1)\n", "        torch._foreach_add_(gradients, weights, alpha=weight_decay)\n        torch._foreach_mul_(means, beta1)\n"),
)  # fmt: skip

hint("decay-in-gradient", "You add the decay to the gradient, so it goes into both averages: that is Adam with "
                             "L2. In AdamW, the weights shrink by the factor 1 − ηλ, whatever the gradient is.")  # fmt: skip
DECAY = "    torch._foreach_mul_(weights, 1 - lr * weight_decay)\n"
slip("decay-in-gradient", (DECAY, "    gradients = torch._foreach_add(gradients, weights, alpha=weight_decay)\n"))
variant(
    "decay-in-gradient", WRITTEN,
    ("        torch._foreach_mul_(weights, 1 - lr * weight_decay)\n", ""),
    ("        torch._foreach_mul_(means, beta1)\n", "        gradients = torch._foreach_add(gradients, torch._foreach_mul(weights, weight_decay))\n        torch._foreach_mul_(means, beta1)\n"),
)  # fmt: skip

hint(
    "decay-without-rate",
    "The weights shrink by the factor 1 − λ in each step. The decay is scaled by the rate: 1 − ηλ.",
)
slip("decay-without-rate", ("1 - lr * weight_decay", "1 - weight_decay"))
variant("decay-without-rate", WRITTEN, ("1 - lr * weight_decay", "1 - weight_decay"))

hint("no-decay", "The weights do not decay: multiply them by 1 − ηλ.")
slip("no-decay", (DECAY, ""))
variant("no-decay", WRITTEN, ("        torch._foreach_mul_(weights, 1 - lr * weight_decay)\n", ""))

hint("mean-not-corrected", "The mean starts at zero and is too small in the first steps. Divide it by 1 − β₁ᵗ.")
slip("mean-not-corrected", (" / (1 - beta1**step)", ""))
variant("mean-not-corrected", WRITTEN, (" / (1 - beta1**step)", ""))

hint("squares-not-corrected", "The squares start at zero and are too small in the first steps. Divide v by 1 − "
                                 "β₂ᵗ, or its root by the root of 1 − β₂ᵗ.")  # fmt: skip
slip("squares-not-corrected", ("correction = (1 - beta2**step) ** 0.5", "correction = 1"))
variant("squares-not-corrected", WRITTEN, ("(squares, 1 - beta2**step)", "(squares, 1.0)"))

hint(
    "root-forgotten",
    "You divide √v by 1 − β₂ᵗ. That correction belongs to v, under the root: divide √v by the root of 1 − β₂ᵗ.",
)
slip("root-forgotten", ("(1 - beta2**step) ** 0.5", "1 - beta2**step"))
slip(
    "root-forgotten",
    ("    torch._foreach_add_(roots, epsilon * correction)\n", "    torch._foreach_div_(roots, 1 - beta2**step)\n    torch._foreach_add_(roots, epsilon)\n"),
    ("-lr * correction /", "-lr /"),
)  # fmt: skip
variant(
    "root-forgotten", WRITTEN,
    ("below = torch._foreach_div(squares, 1 - beta2**step)\n        torch._foreach_sqrt_(below)",
     "below = torch._foreach_sqrt(squares)\n        torch._foreach_div_(below, 1 - beta2**step)"),
)  # fmt: skip

hint("decay-late", "You shrink the weights after the update, so the update shrinks with them. Multiply by 1 − "
                      "ηλ first: the decay applies to the old weights.")  # fmt: skip
slip("decay-late", (DECAY, ""), ("(1 - beta1**step))\n", "(1 - beta1**step))\n" + DECAY))
variant("decay-late", ASIDE, ("    torch._foreach_mul_(weights, 1 - weight_decay * lr)\n    torch._foreach_sub_(weights, update)\n",
        "    torch._foreach_sub_(weights, update)\n    torch._foreach_mul_(weights, 1 - weight_decay * lr)\n"))  # fmt: skip

hint("step-from-zero", "The corrections are those of another step. `step` counts from 1: use it unchanged.")
slip("step-from-zero", ("beta2**step", "beta2 ** (step + 1)"), ("beta1**step", "beta1 ** (step + 1)"))
slip("step-from-zero", ("beta2**step", "beta2 ** (step - 1)"), ("beta1**step", "beta1 ** (step - 1)"))
variant("step-from-zero", WRITTEN, ("beta1**step", "beta1 ** (step - 1)"))
variant("step-from-zero", WRITTEN, ("beta2**step", "beta2 ** (1 + step)"), ("beta1**step", "beta1 ** (1 + step)"))

hint("epsilon-moved", "ε is in the wrong place. Add it to √(v / (1 − β₂ᵗ)): outside the root, and after the "
                         "correction. If you correct later, you must correct ε too.")  # fmt: skip
slip("epsilon-moved", ("epsilon * correction", "epsilon"))
slip(
    "epsilon-moved",
    (
        "    roots = torch._foreach_sqrt(squares)\n",
        "    roots = torch._foreach_add(squares, epsilon * correction**2)\n",
    ),
    ("    torch._foreach_add_(roots, epsilon * correction)\n", "    torch._foreach_sqrt_(roots)\n"),
)
variant(
    "epsilon-moved", WRITTEN,
    ("        torch._foreach_sqrt_(below)\n        torch._foreach_add_(below, epsilon)\n",
     "        torch._foreach_add_(below, epsilon)\n        torch._foreach_sqrt_(below)\n"),
)  # fmt: skip

hint(
    "betas-exchanged",
    "β₁ and β₂ are swapped: β₁ belongs to the mean of the gradients, β₂ to that of their squares.",
)
slip("betas-exchanged", ("    correction", "    beta1, beta2 = beta2, beta1\n    correction"))
variant("betas-exchanged", WRITTEN, ("    with torch", "    beta1, beta2 = beta2, beta1\n    with torch"))

hint("operators-grow", "{few} operators ran for 3 tensors, {many} for 30: your code goes through the tensors "
                          "one by one somewhere. Replace each such loop or comprehension with an operator that "
                          "takes the list.")  # fmt: skip
LOOP = (
    HEAD
    + """
    for w, g, m, v in zip(weights, gradients, means, squares):
        w.mul_(1 - lr * weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        w.addcdiv_(m / (1 - beta1**step), (v / (1 - beta2**step)).sqrt() + epsilon, value=-lr)
"""
)
bank.text("operators-grow", LOOP)
slip("operators-grow", ("torch._foreach_sqrt(squares)", "[v.sqrt() for v in squares]"))
variant(
    "operators-grow",
    WRITTEN,
    ("torch._foreach_mul_(weights, 1 - lr * weight_decay)", "[w.mul_(1 - lr * weight_decay) for w in weights]"),
)

hint("copies", "At its peak, the step holds {copies} additional copies of the size of the weights. One is "
                  "enough, for the roots: everything else can be done in place.")  # fmt: skip
slip(
    "copies",
    ("    torch._foreach_addcdiv_(weights, means, roots,", "    updates = torch._foreach_div(means, roots)\n    torch._foreach_add_(weights, updates, alpha="),
)  # fmt: skip
CAT = (
    HEAD
    + """
    sizes = [w.numel() for w in weights]
    w, g, m, v = (torch.cat([t.reshape(-1) for t in tensors]) for tensors in (weights, gradients, means, squares))
    w.mul_(1 - lr * weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    w.addcdiv_(m, (v / (1 - beta2**step)).sqrt_().add_(epsilon), value=-lr / (1 - beta1**step))
    for tensors, whole in ((weights, w), (means, m), (squares, v)):
        torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(whole.split(sizes), tensors)])
"""
)
bank.text("copies", CAT)
variant(
    "copies", WRITTEN,
    ("        torch._foreach_sqrt_(below)\n", "        below = torch._foreach_sqrt(below)\n"),
)  # fmt: skip

hint(
    "borrowed",
    "{what} does the work here. Your code is compared with it and raced against it: write the calls on lists yourself.",
)
FUNCTION = (
    HEAD
    + """
    from torch.optim.adamw import adamw

    steps = [torch.tensor(float(step - 1)) for _ in weights]
    adamw(weights, gradients, means, squares, [], steps, foreach=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr,
          weight_decay=weight_decay, eps=epsilon, maximize=False)
"""
)
bank.text("borrowed", FUNCTION)
KERNEL = (
    HEAD
    + """
    steps = [torch.tensor(float(step)) for _ in weights]
    torch._fused_adamw_(weights, gradients, means, squares, [], steps, lr=lr, beta1=beta1, beta2=beta2,
                        weight_decay=weight_decay, eps=epsilon, amsgrad=False, maximize=False)
"""
)
bank.text("borrowed", KERNEL)
variant("borrowed", KERNEL, ("torch._fused_adamw_(", "torch.ops.aten._fused_adamw_("))
variant("borrowed", FUNCTION, ("foreach=True", "foreach=False"))
slip("not-in-place", ("torch._foreach_addcdiv_(weights,", "torch._foreach_addcdiv(weights,"))
