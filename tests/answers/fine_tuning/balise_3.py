"""Answers to balise 3 of 21_fine_tuning: rates by layer."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning")

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
bank.text(3, None, BY_PARAMETER)
bank.text(3, None, SHRINKING)
bank.slip(3, None, ("reversed(list(layers))", "list(layers)[::-1]"), ("return groups", "return groups[::-1]"))
bank.slip(3, None, ('"params": chosen,', '"params": tuple(chosen), "name": str(depth),'))

bank.hint(3, "groups-form", "Return a list of dictionaries that an optimizer takes, each with `params`, `lr` and "
                            "`weight_decay`.")  # fmt: skip
bank.slip(3, "groups-form", (', "weight_decay": decay * matrices', ""))
bank.slip(3, "groups-form", ('groups.append({"params": chosen,', 'groups.extend({"params": chosen,'))
bank.variant(3, "groups-form", BY_PARAMETER, ('"weight_decay"', '"decay"'))

bank.hint(3, "frozen-in", "A group contains parameters that don't learn: {what}. Leave out those without "
                          "`requires_grad`.")  # fmt: skip
bank.slip(3, "frozen-in", ("p.requires_grad and ", ""))
bank.variant(3, "frozen-in", BY_PARAMETER, ("if p.requires_grad:", "if True:"))

bank.hint(3, "twice", "A parameter is in the groups more than once: {what}. Layers may share one. Remember the "
                      "`id` of each one that you have seen.")  # fmt: skip
bank.slip(3, "twice", (" and id(p) not in seen", ""))
bank.variant(3, "twice", SHRINKING, (" and p not in seen", ""))

bank.hint(3, "left-out", "Parameters that learn are in no group: {what}. All those of every layer count, the "
                         "head's and those of nested modules too.")  # fmt: skip
bank.slip(3, "left-out", ("reversed(list(layers))", "reversed(list(layers)[:-1])"))
bank.slip(3, "left-out", ("layer.parameters()", "layer.parameters(recurse=False)"))
bank.slip(3, "left-out", ("for matrices in (True, False)", "for matrices in (True,)"))
bank.variant(3, "left-out", SHRINKING, ("range(len(layers) - 1,", "range(len(layers) - 2,"))

bank.hint(3, "empty-groups", "Some groups have no parameters. A layer may have no matrices, or nothing that "
                             "learns. Append a group only if it has some.")  # fmt: skip
bank.slip(3, "empty-groups", ("if chosen:", "if True:"))
bank.variant(3, "empty-groups", SHRINKING, ("if heavy:", "if True:"))

bank.hint(3, "upside-down", "The rates are upside down: the first layer has the largest. The head has `rate`, and "
                            "the layers before it have less and less.")  # fmt: skip
bank.slip(3, "upside-down", ("factor**depth", "factor ** (len(layers) - 1 - depth)"))
bank.variant(3, "upside-down", BY_PARAMETER, ("(len(layers) - 1 - depth)", "depth"))

bank.hint(3, "not-compounded", "All layers before the head have the same rate. Each should have `factor` times the "
                               "rate of the *next* layer: the powers of `factor`.")  # fmt: skip
bank.slip(3, "not-compounded", ("factor**depth", "(factor if depth else 1)"))
bank.variant(3, "not-compounded", BY_PARAMETER, ("factor ** (len(layers) - 1 - depth)", "(1 if depth == len(layers) - 1 else factor)"))  # fmt: skip

bank.hint(3, "wrong-rates", "The head has `rate`, and each layer before it has `factor` times the rate of the next "
                            "one. A layer without parameters counts as a layer, too.")  # fmt: skip
bank.slip(3, "wrong-rates", ("factor**depth", "factor ** (depth + 1)"))
bank.variant(3, "wrong-rates", BY_PARAMETER, ("(len(layers) - 1 - depth)", "(len(layers) - depth)"))
bank.slip(3, "wrong-rates", ("factor**depth", "(1 - factor * depth)"))
bank.slip(3, "wrong-rates", ("reversed(list(layers))", "l for l in reversed(list(layers)) if list(l.parameters())"))  # fmt: skip
bank.variant(3, "wrong-rates", SHRINKING, ("        rate *= factor", "        rate *= factor if heavy else 1"))  # fmt: skip

bank.hint(3, "shared-earlier", "A parameter that two layers share doesn't have the rate of the later one. Go from "
                               "the head to the first layer, and keep the first that you meet.")  # fmt: skip
bank.slip(3, "shared-earlier", ("enumerate(reversed(list(layers)))", "zip(range(len(layers) - 1, -1, -1), layers)"))  # fmt: skip
bank.variant(3, "shared-earlier", BY_PARAMETER, ("if p.requires_grad:", "if p.requires_grad and p not in place:"))  # fmt: skip

bank.hint(3, "decay-everywhere", "Biases and the parameters of norms have the decay, too. It pulls them towards 0, "
                                 "where they don't belong: parameters with fewer than two dimensions have a decay "
                                 "of 0.")  # fmt: skip
bank.slip(3, "decay-everywhere", ("decay * matrices", "decay"))
bank.variant(3, "decay-everywhere", BY_PARAMETER, ("p.ndim >= 2", "p.ndim >= 0"))

bank.hint(3, "wrong-decay", "`decay` is for parameters with two or more dimensions, and 0 for all others. Look at "
                            "`p.ndim`, not at names.")  # fmt: skip
bank.slip(3, "wrong-decay", ("(p.ndim > 1) == matrices", "(p.ndim == 2) == matrices"))
bank.slip(3, "wrong-decay", ("decay * matrices", "decay * (not matrices)"))
bank.slip(3, "wrong-decay", ("decay * matrices", "0"))
bank.variant(3, "wrong-decay", SHRINKING, ("len(p.shape) > 1", "len(p.shape) != 1"))

bank.hint(3, "other-layers", "Some models get wrong groups: with layers in a tuple, an nn.Sequential or an "
                             "nn.ModuleList, with a head alone, or with nothing that learns.")  # fmt: skip
bank.slip(3, "other-layers", ("groups, seen = [], set()", "groups, seen = [], set()\n    if len(layers) < 2:\n        return []"))  # fmt: skip
bank.slip(3, "other-layers", ("reversed(list(layers))", "reversed(list(layers.children()) if isinstance(layers, nn.Sequential) and len(layers) > 9 else list(layers) if isinstance(layers, list) else [])"))  # fmt: skip
bank.variant(3, "other-layers", BY_PARAMETER, ("list(layers), {}", "list(layers) if isinstance(layers, list) else [*layers][1:], {}"))  # fmt: skip
