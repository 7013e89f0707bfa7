"""Answers to balise 6 of 12_large_models: the optimizer's step inside backward."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", 6, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# one optimizer of all parameters: those without a gradient are left alone
ONE = """
def step_in_backward(model, make, max_norm=None, micro_batches=1, scaler=None):
    if not (max_norm is None and micro_batches == 1 and scaler is None):
        raise ValueError("needs all gradients at once")
    optimizer = make(list(model.parameters()))

    def update(p):
        optimizer.step()
        optimizer.zero_grad()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(update)
    return [optimizer]
"""
bank.text(None, ONE)
# a weight comes after its bias, and one step is made for both
bank.text(None, ONE.replace("p.requires_grad:", "p.requires_grad and p.dim() == 2:"))

# a closure for each; layer by layer, so that a tied weight is met twice
CLOSURES = """
import functools


def step_in_backward(model, make, max_norm=None, micro_batches=1, scaler=None):
    for name, asked in {"clipping": max_norm, "accumulation": micro_batches != 1, "a scaler": scaler}.items():
        if asked is not None and asked is not False:
            raise ValueError(f"{name} needs all gradients at once")
    made = []

    def update(p, optimizer):
        if p.grad is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for layer in model.modules():
        for p in layer.parameters(recurse=False):
            if p.requires_grad:
                made.append(make([p]))
                p.register_post_accumulate_grad_hook(functools.partial(update, optimizer=made[-1]))
    return made
"""
bank.text(None, CLOSURES)

STEP = "        optimizers[p].step()\n        p.grad = None\n"
REGISTER = "        p.register_post_accumulate_grad_hook(update)\n"
TAKEN = "    optimizers = {p: make([p]) for p in model.parameters() if p.requires_grad}\n"
LIST = "    return list(optimizers.values())"

slip("nothing-returned", (LIST, "    return None"))
hint("optimizers-form", "Return the list of optimizers; you returned {what}.")
slip("optimizers-form", (LIST, "    return optimizers"))
slip("optimizers-form", (LIST, "    return list(optimizers)"))
slip("optimizers-form", ("in model.parameters()", "in model.parameters(recurse=False)"))
variant("optimizers-form", ONE, ("return [optimizer]", "return optimizer"))

hint("nothing-moves", "After loss.backward(), no weight has moved. Is a step made during backward, once the "
                         "gradient is there? A register_hook hook runs before p.grad is set, a "
                         "register_post_accumulate_grad_hook one after it.")  # fmt: skip
slip("nothing-moves", (REGISTER, "        pass\n"))
slip("nothing-moves", (REGISTER, "        p.register_hook(lambda g, p=p: update(p))\n"))
variant(
    "nothing-moves",
    ONE,
    (
        "        optimizer.step()\n        optimizer.zero_grad()",
        "        optimizer.zero_grad()\n        optimizer.step()",
    ),
)

hint("few-move", "After loss.backward(), only {moved} of {all} parameters have moved. A function made in a loop "
                    "sees the loop variable's last value when it is called. Use the parameter that the hook "
                    "receives.")  # fmt: skip
slip("few-move", (REGISTER, "        p.register_post_accumulate_grad_hook(lambda _: update(p))\n"))
variant("few-move", CLOSURES, ("functools.partial(update, optimizer=made[-1])", "lambda p: update(p, made[-1])"))

hint("some-left-out", "After loss.backward(), only {moved} of {all} parameters have moved. Each parameter that "
                         "needs a gradient needs a hook, and an optimizer that makes its step: weights and biases, "
                         "from the first layer to the last.")  # fmt: skip
slip("some-left-out", ("if p.requires_grad}", "if p.requires_grad and p.dim() > 1}"))
slip("some-left-out", ("{p: make([p])", "{p.shape: make([p])"), ("optimizers[p]", "optimizers[p.shape]"), (
    "for p in optimizers:", "for p in [p for p in model.parameters() if p.requires_grad]:"))  # fmt: skip
variant(
    "some-left-out",
    CLOSURES,
    ("            if p.requires_grad:", "            if p.requires_grad and p.dim() == 2:"),
)

hint("hook-returns", "A hook returned something, but it may return only None: end it without a return. A lambda "
                        "returns its value, and one with several calls returns a tuple.")  # fmt: skip
slip("hook-returns", (REGISTER, "        p.register_post_accumulate_grad_hook(lambda q: (update(q), q.grad))\n"))
variant(
    "hook-returns",
    ONE,
    (
        "        optimizer.step()\n        optimizer.zero_grad()\n",
        "        return optimizer.step(), optimizer.zero_grad()\n",
    ),
)

hint("wrong-weights", "After four steps, the weights have moved {times} times as far as in the usual loop "
                         "(wrong: {names}). Use each gradient once, unchanged, for one step of an optimizer that "
                         "`make` returned.")  # fmt: skip
slip(
    "wrong-weights",
    ("        optimizers[p].step()\n", "        optimizers[p].step()\n        optimizers[p].step()\n"),
)
slip("wrong-weights", ("        optimizers[p].step()\n", "        p.data -= 0.01 * p.grad\n"))
slip(
    "wrong-weights",
    (TAKEN, TAKEN.replace("model.parameters()", "(p for child in model.children() for p in child.parameters())")),
)
variant(
    "wrong-weights",
    ONE,
    ("        optimizer.step()\n", "        p.grad /= p.grad.norm()\n        optimizer.step()\n"),
)

hint(
    "unfrozen",
    "A frozen weight has moved. Leave requires_grad as it is, and register no hook on a parameter that needs no "
    "gradient.",
)
slip("unfrozen", (TAKEN, "    model.requires_grad_()\n" + TAKEN))
variant(
    "unfrozen",
    ONE,
    ("    optimizer = make", "    for p in model.parameters():\n        p.requires_grad = True\n    optimizer = make"),
)

hint("gradients-add-up", "The gradient of one step was still there in the next, and the two were added up. Set "
                            "p.grad to None once it is used.")  # fmt: skip
slip("gradients-add-up", ("        p.grad = None\n", ""))
variant("gradients-add-up", CLOSURES, ("            optimizer.zero_grad(set_to_none=True)\n", ""))

hint("used-again", "Each hook makes the step of all parameters, and the parameters whose gradient came earlier "
                      "still have it, so they are moved several times. Make one step per gradient, and drop the "
                      "gradient at once.")  # fmt: skip
variant("used-again", ONE, ("        optimizer.zero_grad()", "        optimizer.zero_grad() if p is first else None"), (
    "    def update(p)", "    first = next(model.parameters())\n\n    def update(p)"))  # fmt: skip
slip(
    "used-again",
    (
        STEP,
        "        for optimizer in optimizers.values():\n            optimizer.step()\n        if p is next(iter(optimizers)):\n            model.zero_grad()\n",
    ),
)

hint(
    "zero-skipped",
    "You skip a parameter whose gradient is 0. In the usual loop it still changes: momentum "
    "moves it, and weight decay shrinks it.",
)
slip("zero-skipped", ("        optimizers[p].step()", "        if p.grad.any():\n            optimizers[p].step()"))
variant("zero-skipped", CLOSURES, ("if p.grad is not None:", "if p.grad is not None and p.grad.abs().max() > 0:"))

hint("state-lost", "With plain SGD the weights are right, but with an optimizer that has a state they are not. "
                      "Make the optimizers once, before the first step, and use them for every step: they hold "
                      "momentum and variance.")  # fmt: skip
slip("state-lost", ("optimizers[p].step()", "make([p]).step()"))
variant("state-lost", ONE, ("        optimizer.step()", "        make([p]).step()"))

hint(
    "rate-ignored",
    "The learning rates that a loop sets in the returned optimizers have no effect. Return the optimizers that "
    "make the steps.",
)
slip("rate-ignored", (LIST, "    return [make([p]) for p in optimizers]"))
variant("rate-ignored", ONE, ("return [optimizer]", "return [make([p]) for p in model.parameters()]"))

hint("gradients-left", "After backward, {left} of {all} gradients are still there. p.grad must be None: a "
                          "gradient of zeros takes as much memory as any other.")  # fmt: skip
slip("gradients-left", ("p.grad = None", "p.grad.zero_()"))
slip("gradients-left", ("p.grad = None", "optimizers[p].zero_grad(set_to_none=False)"))
slip("gradients-left", ("p.grad = None", "p.grad *= 0"), variant=True)

hint("moved-too-early", "A hook changed a weight that backward still needed. It may make only the step of its "
                           "own parameter: an optimizer moves every parameter that has a gradient, even one of "
                           "zeros.")  # fmt: skip
slip(
    "moved-too-early",
    (
        STEP,
        "        for optimizer in optimizers.values():\n            optimizer.step()\n            optimizer.zero_grad(set_to_none=False)\n",
    ),
)
variant("moved-too-early", ONE, ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"))

hint("gradients-together", "At some moment, the gradients of {layers} layers out of {all} are in memory beside "
                              "weights and states. Nothing may hold a gradient once its step is made: keep no "
                              "list, and do not wait for the last gradient.")  # fmt: skip
TOGETHER = (
    STEP,
    "        ready.append(p)\n        if len(ready) == len(optimizers) or p is first:\n            for q in ready:\n                optimizers[q].step()\n                q.grad = None\n            ready.clear()\n",
)
slip(
    "gradients-together",
    TOGETHER,
    ("    def update(p)", "    ready, first = [], next(iter(optimizers))\n\n    def update(p)"),
    ("    optimizers = {p", "    optimizers = {p"),
)
slip("gradients-together", ("        p.grad = None\n", "        seen.append(p.grad)\n        p.grad = None\n        if p is next(iter(optimizers)):\n            seen.clear()\n"), (
    "    def update(p)", "    seen = []\n\n    def update(p)"))  # fmt: skip
variant("gradients-together", CLOSURES, ("            optimizer.zero_grad(set_to_none=True)\n", "            held[id(p)] = p.grad\n            optimizer.zero_grad(set_to_none=True)\n"), (
    "    made = []", "    made, held = [], {}"))  # fmt: skip

hint(
    "not-refused",
    "With {name}, nothing was refused. It needs all gradients before the first step: raise a ValueError.",
)
slip("not-refused", ("if max_norm is not None:", "if max_norm is not None and max_norm > 1:"))
slip("not-refused", ("if micro_batches > 1:", "if micro_batches < 1:"))
slip("not-refused", ("if scaler is not None:", "if scaler is True:"))
variant("not-refused", ONE, (" and scaler is None", ""))
variant("not-refused", CLOSURES, ("micro_batches != 1", "False"))

hint("refused-otherwise", "With {name}, you raised {error}. A ValueError that says why is expected.")
slip(
    "refused-otherwise",
    (
        "    if micro_batches > 1:\n        raise ValueError(",
        "    if micro_batches > 1:\n        raise NotImplementedError(",
    ),
)
slip(
    "refused-otherwise",
    ('ValueError("the norm of all gradients is known only after the first ones are gone")', "ValueError"),
)
variant(
    "refused-otherwise",
    ONE,
    ("    if not (", "    assert ("),
    ('is None):\n        raise ValueError("needs all gradients at once")', "is None)"),
)

hint(
    "refused-late",
    "With {name}, you raise a ValueError, but the model is already changed: its hooks make steps. Refuse first.",
)
slip("refused-late", ("    if scaler is not None:\n        raise ValueError(\"whether to skip a step is known only after its first updates are done\")\n", ""), (
    LIST, "    if scaler is not None:\n        raise ValueError('skip')\n" + LIST))  # fmt: skip
variant("refused-late", ONE, ("    if not (max_norm is None and micro_batches == 1 and scaler is None):\n        raise ValueError(\"needs all gradients at once\")\n", ""), (
    "    return [optimizer]", "    if max_norm or micro_batches > 1 or scaler:\n        raise ValueError('no')\n    return [optimizer]"))  # fmt: skip
