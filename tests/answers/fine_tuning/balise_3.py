"""Answers to balise 3 of 21_fine_tuning: rates by layer."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 3)

# each parameter in a dictionary, overwritten by later layers; a group for each
BY_PARAMETER = """
def by_layer(layers, rate, factor, decay):
    layers, place = list(layers), {}
    for depth, layer in enumerate(layers):
        for p in layer.parameters():
            if p.requires_grad:
                place[p] = rate * factor ** (len(layers) - 1 - depth)
    return [{"params": [p], "lr": lr, "weight_decay": decay if p.ndim >= 2 else 0.0} for p, lr in place.items()]
"""
# from the head down, a rate that shrinks
SHRINKING = """
def by_layer(layers, rate, factor, decay):
    groups, seen = [], set()
    for k in range(len(layers) - 1, -1, -1):
        heavy, light = [], []
        for p in layers[k].parameters():
            if p.requires_grad and p not in seen:
                seen.add(p)
                (heavy if len(p.shape) > 1 else light).append(p)
        if heavy:
            groups.append(dict(params=heavy, lr=rate, weight_decay=decay))
        if light:
            groups.append(dict(params=iter(light), lr=rate, weight_decay=0))
        rate *= factor
    return tuple(groups)
"""
bank.text(None, BY_PARAMETER)
bank.text(None, SHRINKING)
bank.slip(None, ("reversed(list(layers))", "list(layers)[::-1]"), ("return groups", "return groups[::-1]"))
bank.slip(None, ('"params": chosen,', '"params": tuple(chosen), "name": str(depth),'))

bank.hint("groups-form", "Return a list of dictionaries that an optimizer takes, each with `params`, `lr` and "
                            "`weight_decay`.")  # fmt: skip
bank.slip("groups-form", (', "weight_decay": decay * matrices', ""))
bank.slip("groups-form", ('groups.append({"params": chosen,', 'groups.extend({"params": chosen,'))
bank.variant("groups-form", BY_PARAMETER, ('"weight_decay"', '"decay"'))

bank.hint("frozen-in", "A group contains parameters that don't learn: {what}. Leave out those without "
                          "`requires_grad`.", edge=True)  # fmt: skip
bank.slip("frozen-in", ("p.requires_grad and ", ""))
bank.variant("frozen-in", BY_PARAMETER, ("if p.requires_grad:", "if True:"))

bank.hint("twice", "A parameter is in the groups more than once: {what}. Layers may share one. Remember the "
                      "`id` of each one that you have seen.", edge=True)  # fmt: skip
bank.slip("twice", (" and id(p) not in seen", ""))
bank.variant("twice", SHRINKING, (" and p not in seen", ""))

bank.hint("left-out", "Parameters that learn are in no group: {what}. All those of every layer count, the "
                         "head's and those of nested modules too.")  # fmt: skip
bank.slip("left-out", ("reversed(list(layers))", "reversed(list(layers)[:-1])"))
bank.slip("left-out", ("layer.parameters()", "layer.parameters(recurse=False)"))
bank.slip("left-out", ("for matrices in (True, False)", "for matrices in (True,)"))
bank.variant("left-out", SHRINKING, ("range(len(layers) - 1,", "range(len(layers) - 2,"))

bank.hint("empty-groups", "Some groups have no parameters. A layer may have no matrices, or nothing that "
                             "learns. Append a group only if it has some.", edge=True)  # fmt: skip
bank.slip("empty-groups", ("if chosen:", "if True:"))
bank.variant("empty-groups", SHRINKING, ("if heavy:", "if True:"))

bank.hint("upside-down", "The rates are upside down: the first layer has the largest. The head has `rate`, and "
                            "the layers before it have less and less.")  # fmt: skip
bank.slip("upside-down", ("factor**depth", "factor ** (len(layers) - 1 - depth)"))
bank.variant("upside-down", BY_PARAMETER, ("(len(layers) - 1 - depth)", "depth"))

bank.hint("not-compounded", "All layers before the head have the same rate. Each should have `factor` times the "
                               "rate of the *next* layer: the powers of `factor`.")  # fmt: skip
bank.slip("not-compounded", ("factor**depth", "(factor if depth else 1)"))
bank.variant("not-compounded", BY_PARAMETER, ("factor ** (len(layers) - 1 - depth)", "(1 if depth == len(layers) - 1 else factor)"))  # fmt: skip

bank.hint("wrong-rates", "The head has `rate`, and each layer before it has `factor` times the rate of the next "
                            "one. A layer without parameters counts as a layer, too.")  # fmt: skip
bank.slip("wrong-rates", ("factor**depth", "factor ** (depth + 1)"))
bank.variant("wrong-rates", BY_PARAMETER, ("(len(layers) - 1 - depth)", "(len(layers) - depth)"))
bank.slip("wrong-rates", ("factor**depth", "(1 - factor * depth)"))
bank.slip("wrong-rates", ("reversed(list(layers))", "l for l in reversed(list(layers)) if list(l.parameters())"))  # fmt: skip
bank.variant("wrong-rates", SHRINKING, ("        rate *= factor", "        rate *= factor if heavy else 1"))  # fmt: skip

bank.hint("shared-earlier", "A parameter that two layers share doesn't have the rate of the later one. Go from "
                               "the head to the first layer, and keep the first that you meet.", edge=True)  # fmt: skip
bank.slip("shared-earlier", ("enumerate(reversed(list(layers)))", "zip(range(len(layers) - 1, -1, -1), layers)"))  # fmt: skip
bank.variant("shared-earlier", BY_PARAMETER, ("if p.requires_grad:", "if p.requires_grad and p not in place:"))  # fmt: skip

bank.hint("decay-everywhere", "Biases and the parameters of norms have the decay, too. It pulls them towards 0, "
                                 "where they don't belong: parameters with fewer than two dimensions have a decay "
                                 "of 0.", edge=True)  # fmt: skip
bank.slip("decay-everywhere", ("decay * matrices", "decay"))
bank.variant("decay-everywhere", BY_PARAMETER, ("p.ndim >= 2", "p.ndim >= 0"))

bank.hint("wrong-decay", "`decay` is for parameters with two or more dimensions, and 0 for all others. Look at "
                            "`p.ndim`, not at names.", edge=True)  # fmt: skip
bank.slip("wrong-decay", ("(p.ndim > 1) == matrices", "(p.ndim == 2) == matrices"))
bank.slip("wrong-decay", ("decay * matrices", "decay * (not matrices)"))
bank.slip("wrong-decay", ("decay * matrices", "0"))
bank.variant("wrong-decay", SHRINKING, ("len(p.shape) > 1", "len(p.shape) != 1"))

bank.hint("other-layers", "Some models get wrong groups: with layers in a tuple, an nn.Sequential or an "
                             "nn.ModuleList, with a head alone, or with nothing that learns.", edge=True)  # fmt: skip
bank.slip("other-layers", ("groups, seen = [], set()", "groups, seen = [], set()\n    if len(layers) < 2:\n        return []"))  # fmt: skip
bank.slip("other-layers", ("reversed(list(layers))", "reversed(list(layers.children()) if isinstance(layers, nn.Sequential) and len(layers) > 9 else list(layers) if isinstance(layers, list) else [])"))  # fmt: skip
bank.variant("other-layers", BY_PARAMETER, ("list(layers), {}", "list(layers) if isinstance(layers, list) else [*layers][1:], {}"))  # fmt: skip
