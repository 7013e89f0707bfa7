"""Answers to balise 4 of 21_fine_tuning: a frozen module learns, in an optimizer that goes on."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 4, whole=True)

# names and sets, one parameter after the other
BY_SETS = """
def thaw(optimizer, module, rate, factor):
    old = set()
    for group in optimizer.param_groups:
        group.update(lr=group["lr"] * factor)
        old.update(group["params"])
    fresh = []
    for p in module.parameters():
        p.requires_grad = True
        if p not in old:
            fresh.append(p)
    if len(fresh) > 0:
        optimizer.add_param_group(dict(params=fresh, lr=rate))
"""
bank.text(None, BY_SETS)

# a group that is made by hand, of the optimizer's defaults
BY_HAND = """
def thaw(optimizer, module, rate, factor):
    old = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    rates = [group["lr"] * factor for group in optimizer.param_groups]
    fresh = {}
    for layer in module.modules():
        for p in layer.parameters(recurse=False):
            p.requires_grad_()
            if all(p is not other for other in old):
                fresh[id(p)] = p
    if fresh:
        optimizer.param_groups.append(optimizer.defaults | {"params": list(fresh.values()), "lr": rate})
        rates.append(rate)
    for group, its in zip(optimizer.param_groups, rates):
        group["lr"] = its
"""
bank.text(None, BY_HAND)
bank.slip(None, ("def thaw(optimizer", "@torch.no_grad()\ndef thaw(optimizer"))

bank.hint("wrong-old-rates", "The rates that the optimizer had are not multiplied by `factor`. Change "
                                'group["lr"], in place, in each group that existed before the call.')  # fmt: skip
bank.slip("wrong-old-rates", ('    for group in optimizer.param_groups:\n        group["lr"] *= factor\n', ""))
bank.slip("wrong-old-rates", ('group["lr"] *= factor', 'group["lr"] = rate * factor'))
bank.slip("wrong-old-rates", ('    for group in optimizer.param_groups:\n        group["lr"] *= factor\n', '    optimizer.param_groups[0]["lr"] *= factor\n'))  # fmt: skip
bank.variant("wrong-old-rates", BY_SETS, ('group["lr"] * factor', 'group["lr"] / factor'))
bank.variant("wrong-old-rates", BY_HAND, ('group["lr"] * factor for', 'group["lr"] for'))

FACTOR_LATER = ('    for group in optimizer.param_groups:\n        group["lr"] *= factor\n', "")
ADDED = 'optimizer.add_param_group({"params": new, "lr": rate})\n'
bank.hint("wrong-new-rate", "The new group does not have the rate `rate`. `factor` is for the groups that were there before.")  # fmt: skip
bank.slip("wrong-new-rate", FACTOR_LATER, (ADDED, ADDED + '    for group in optimizer.param_groups:\n        group["lr"] *= factor\n'))  # fmt: skip
bank.slip("wrong-new-rate", (', "lr": rate', ""))
bank.slip("wrong-new-rate", ('"lr": rate', '"lr": optimizer.param_groups[-1]["lr"]'))
bank.variant("wrong-new-rate", BY_HAND, ("rates.append(rate)", "rates.append(rate * factor)"))
bank.variant("wrong-new-rate", BY_SETS, ("lr=rate)", "lr=rate / factor)"))

bank.hint("new-group", "The parameters of `module` that the optimizer doesn't have yet belong in one new group: "
                          "{what}. A new optimizer created inside the function is not visible outside.")  # fmt: skip
bank.slip("new-group", (ADDED, 'optimizer.param_groups[-1]["params"] += new\n'))
bank.slip("new-group", (ADDED, 'optimizer = type(optimizer)([*optimizer.param_groups, {"params": new, "lr": rate}])\n'))
bank.slip("new-group", (ADDED, 'for p in new:\n            optimizer.add_param_group({"params": [p], "lr": rate})\n'))
bank.slip("new-group", ("if id(p) not in held", "if id(p) not in held and p.ndim > 1"))
bank.variant("new-group", BY_SETS, ("optimizer.add_param_group(dict(params=fresh, lr=rate))", "pass"))
bank.variant("new-group", BY_HAND, ("layer.parameters(recurse=False)", "layer._parameters.values() if isinstance(layer, nn.Linear) else ()"), ("p.requires_grad_()", "module.requires_grad_()"))  # fmt: skip

bank.hint("empty-group", "There is a group without parameters. Add a group only if the module has new parameters.")
bank.slip("empty-group", ("    if new:\n", "    if True:\n"))
bank.variant("empty-group", BY_HAND, ("if fresh:", "if fresh is not None:"))

bank.hint("still-frozen", "A parameter of `module` still has requires_grad False: it gets no gradient, and the "
                             "optimizer skips it. Set requires_grad for all of them.")  # fmt: skip
bank.slip("still-frozen", ("    module.requires_grad_(True)\n", ""))
bank.slip("still-frozen", ("module.requires_grad_(True)", "module.requires_grad = True"))
bank.variant("still-frozen", BY_HAND, ("            p.requires_grad_()\n", ""))

bank.hint("others-learn", "Parameters outside `module` now learn, too. Set requires_grad only for the "
                             "parameters of `module`.")  # fmt: skip
HELD = '        group["lr"] *= factor\n'
OTHERS = "for p in (q for g in optimizer.param_groups for q in g['params']):\n"
bank.slip("others-learn", (HELD, HELD + "        for p in group['params']:\n            p.requires_grad_(True)\n"))
bank.variant(
    "others-learn", BY_SETS, ("    fresh = []\n", f"    fresh = []\n    {OTHERS}        p.requires_grad = True\n")
)

bank.hint("woken", "The mode of a layer has changed. requires_grad is enough for a module to learn; train() "
                      "wakes its batch norms, and their running averages move. Leave the mode as it is.")  # fmt: skip
bank.slip("woken", ("module.requires_grad_(True)", "module.train().requires_grad_(True)"))
bank.variant("woken", BY_SETS, ("    fresh = []\n", "    fresh = []\n    module.eval()\n"))

bank.hint("added-again", "You add a parameter that is already in the optimizer, and PyTorch refuses. Leave out "
                            "parameters that are in one of optimizer.param_groups.")  # fmt: skip
bank.slip("added-again", (" if id(p) not in held", ""))
bank.slip(
    "added-again",
    ("for group in optimizer.param_groups for p in", "for group in optimizer.param_groups[:1] for p in"),
)
bank.slip("added-again", ("if id(p) not in held", "if p.requires_grad"))
bank.variant("added-again", BY_SETS, ("if p not in old", "if True"))

bank.hint("repeated", "A parameter is in a group twice: two layers share it, or it was already in the "
                         "optimizer. module.parameters() of the whole module yields each once.")  # fmt: skip
bank.slip("repeated", ("for p in module.parameters() if", "for layer in module.modules() for p in layer.parameters(recurse=False) if"))  # fmt: skip
bank.variant("repeated", BY_HAND, ("list(fresh.values())", "list(fresh.values()) + list(fresh.values())[:1]"))

bank.hint("options", "The options of a group are wrong. The new group has the optimizer's defaults, all but the "
                        "rate, and the old groups keep theirs. add_param_group fills in what you leave out.")  # fmt: skip
bank.slip("options", (ADDED, 'optimizer.add_param_group({**optimizer.param_groups[0], "params": new, "lr": rate})\n'))
bank.slip("options", ('"lr": rate', '"lr": rate, "weight_decay": 0.0'))
bank.variant("options", BY_HAND, ("optimizer.defaults |", "optimizer.param_groups[-1] |"))
bank.variant("options", BY_SETS, ('lr"] * factor', 'lr"] * factor, weight_decay=0.0'))

bank.hint("state-lost", "The optimizer's state (momentum, averages of the gradients) has changed. The head's "
                           "momentum is worth keeping: leave optimizer.state alone.")  # fmt: skip
bank.slip(
    "state-lost", (ADDED, 'optimizer.add_param_group({"params": new, "lr": rate})\n    optimizer.state.clear()\n')
)
bank.slip("state-lost", (ADDED, 'optimizer.__init__([*optimizer.param_groups, {"params": new, "lr": rate}], **{k: v for k, v in optimizer.defaults.items() if k in ("lr", "momentum", "betas", "weight_decay", "nesterov")})\n'))  # fmt: skip
bank.variant("state-lost", BY_SETS, ("old = set()", "old = set()\n    optimizer.state = type(optimizer.state)(dict)"))

bank.hint(
    "values-changed",
    "The values of parameters have changed. Thawing changes no values; only the optimizer's steps do.",
)
bank.slip("values-changed", ("module.requires_grad_(True)", "module.requires_grad_(True)\n    module.apply(lambda m: m.reset_parameters() if hasattr(m, 'reset_parameters') else None)"))  # fmt: skip
bank.variant(
    "values-changed", BY_SETS, ("p.requires_grad = True", "p.requires_grad = True\n        nn.init.zeros_(p.data)")
)
