"""Answers to balise 5 of 11_hyperparameter_search: exploit, explore, evolve."""

from tests.answers.bank import Bank

bank = Bank("11_hyperparameter_search", 5)

DEEP = '''
def exploit(member, better):
    """Network and optimizer copied in one: the copy of the optimizer then trains the copy of the network."""
    member.network, member.optimizer = copy.deepcopy((better.network, better.optimizer))
    member.hyperparameters = better.hyperparameters.copy()


def explore(member, rng):
    factors = np.where(rng.random(len(member.hyperparameters)) < 0.5, 0.8, 1.25)
    member.hyperparameters = {k: v * f for (k, v), f in zip(member.hyperparameters.items(), factors)}
    for group in member.optimizer.param_groups:
        for name, value in member.hyperparameters.items():
            group[name] = value


def evolve(members, rng):
    order = np.argsort(np.nan_to_num([m.value for m in members], nan=-1.0), kind="stable")
    n = max(len(members) // 4, 1)
    poor, good = order[:n], rng.choice(order[len(order) - n:], n)
    for k, best in zip(poor, good):
        exploit(members[k], members[best])
    for k in poor:
        explore(members[k], rng)
    return list(zip(poor.tolist(), good.tolist()))
'''
bank.text(None, DEEP)

HAND = '''
def exploit(member, better):
    """Tensor by tensor, in place."""
    with torch.no_grad():
        for mine, theirs in zip(member.network.parameters(), better.network.parameters()):
            mine.copy_(theirs)
            state = better.optimizer.state[theirs]
            member.optimizer.state[mine] = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
        for mine, theirs in zip(member.network.buffers(), better.network.buffers()):
            mine.copy_(theirs)
    member.hyperparameters.update(better.hyperparameters)
    for mine, theirs in zip(member.optimizer.param_groups, better.optimizer.param_groups):
        mine.update({k: v for k, v in theirs.items() if k != "params"})


def explore(member, rng):
    notes = member.hyperparameters
    for name, up in zip(notes, rng.integers(0, 2, len(notes))):
        notes[name] = notes[name] * 1.25 if up else notes[name] / 1.25
        for group in member.optimizer.param_groups:
            group[name] = notes[name]


def evolve(members, rng):
    n = max(1, len(members) // 4)
    ranked = sorted(range(len(members)), key=lambda k: (not math.isnan(members[k].value), members[k].value))
    top, found = ranked[::-1][:n], []
    for poor in ranked[:n]:
        good = top[rng.integers(n)]
        exploit(members[poor], members[good])
        explore(members[poor], rng)
        found.append((poor, good))
    return found
'''
bank.text(None, HAND)

NETWORK = "    member.network.load_state_dict(better.network.state_dict())\n"
OPTIMIZER = "    member.optimizer.load_state_dict(copy.deepcopy(better.optimizer.state_dict()))\n"
NOTED = "    member.hyperparameters = dict(better.hyperparameters)\n"
TIMES = (
    "    for name in member.hyperparameters:\n        member.hyperparameters[name] *= float(rng.choice((0.8, 1.25)))\n"
)
GROUPS = "    for group in member.optimizer.param_groups:\n        group.update(member.hyperparameters)\n"
DEEPLY = "    member.network, member.optimizer = copy.deepcopy((better.network, better.optimizer))\n"

bank.hint(
    "better-changed",
    "exploit changed the better member ({what}). `member` copies `better`, not the other way round.",
)
bank.slip("better-changed", (NETWORK, "    better.network.load_state_dict(member.network.state_dict())\n"))
bank.slip("better-changed", (NETWORK, "    member, better = better, member\n" + NETWORK))
bank.variant("better-changed", HAND, ("mine.copy_(theirs)", "theirs.copy_(mine)"))

bank.hint(
    "optimizer-elsewhere",
    "member.optimizer no longer trains the parameters of member.network, so a step won't reach the network. An "
    "optimizer keeps the parameters that it was created with. Copy the values into them, or deep-copy network and "
    "optimizer in one call.",
)
bank.slip("optimizer-elsewhere", (NETWORK, "    member.network = copy.deepcopy(better.network)\n"))
bank.slip("optimizer-elsewhere", (NETWORK, "    member.network = better.network\n"))
bank.slip(
    "optimizer-elsewhere",
    (NETWORK, "    member.network.load_state_dict(better.network.state_dict(), assign=True)\n"),
)
bank.slip("optimizer-elsewhere", (OPTIMIZER, "    member.optimizer = copy.deepcopy(better.optimizer)\n"))
bank.variant(
    "optimizer-elsewhere",
    DEEP,
    (
        DEEPLY,
        "    member.network = copy.deepcopy(better.network)\n    member.optimizer = copy.deepcopy(better.optimizer)\n",
    ),
)

bank.hint("weights-not-copied", "After exploit, the weights of member.network are not those of better.network.")
bank.slip("weights-not-copied", (NETWORK, ""))
bank.slip("weights-not-copied", (NETWORK, "    member = copy.deepcopy(better)\n"), (OPTIMIZER, ""), (NOTED, ""))
bank.slip("weights-not-copied", (NETWORK, NETWORK + "    with torch.no_grad():\n        for p in member.network.parameters():\n            p.mul_(0.8)\n"))  # fmt: skip
bank.variant("weights-not-copied", HAND, ("            mine.copy_(theirs)\n            state", "            state"))

bank.hint(
    "buffers-not-copied",
    "You copy the parameters but not the buffers. Batch norm's running statistics then belong to the old weights. "
    "`state_dict()` has both.",
)
BY_PARAMETERS = """    with torch.no_grad():
        for mine, theirs in zip(member.network.parameters(), better.network.parameters()):
            mine.copy_(theirs)
"""
bank.slip("buffers-not-copied", (NETWORK, BY_PARAMETERS))
bank.slip("buffers-not-copied", (NETWORK, "    member.network.load_state_dict(dict(better.network.named_parameters()), strict=False)\n"))  # fmt: skip
bank.variant("buffers-not-copied", HAND, (".buffers(), better.network.buffers()):\n            mine.copy_(theirs)", ".buffers(), better.network.buffers()):\n            pass"))  # fmt: skip

bank.hint(
    "state-not-copied",
    "{where}: what the optimizer has accumulated (momentum, second moments, number of steps) is not that of "
    "better. With another network's gradients in its momentum, the member wouldn't go on as better would.",
)
bank.slip("state-not-copied", (OPTIMIZER, ""))
bank.slip("state-not-copied", (OPTIMIZER, "    for group in member.optimizer.param_groups:\n        group.update(better.hyperparameters)\n"))  # fmt: skip
bank.slip("state-not-copied", (OPTIMIZER, "    member.optimizer = type(better.optimizer)(member.network.parameters(), **better.hyperparameters)\n"))  # fmt: skip
bank.variant("state-not-copied", HAND, ("            member.optimizer.state[mine] = {", "            _ = {"))
bank.variant("state-not-copied", HAND, ("for k, v in state.items()}", 'for k, v in state.items() if k != "step"}'))

bank.hint(
    "noted-not-copied", "member.hyperparameters are not those of better, so explore would start from the old ones."
)
bank.slip("noted-not-copied", (NOTED, ""))
bank.variant("noted-not-copied", DEEP, ("    member.hyperparameters = better.hyperparameters.copy()\n", ""))
bank.variant("noted-not-copied", HAND, ("    member.hyperparameters.update(better.hyperparameters)\n", ""))

bank.hint(
    "rates-not-copied",
    "You copy member.hyperparameters, but the optimizer still trains with the old values: they are in its "
    "param_groups.",
)
BY_STATE = """    for mine, theirs in zip(member.network.parameters(), better.network.parameters()):
        member.optimizer.state[mine] = copy.deepcopy(better.optimizer.state[theirs])
"""
bank.slip("rates-not-copied", (OPTIMIZER, BY_STATE))
bank.slip("rates-not-copied", (OPTIMIZER, "    before = [dict(g) for g in member.optimizer.param_groups]\n" + OPTIMIZER + "    for group, old in zip(member.optimizer.param_groups, before):\n        group.update(old)\n"))  # fmt: skip
bank.variant("rates-not-copied", HAND, ('if k != "params"}', 'if k not in ("params", "lr")}'))

bank.hint(
    "network-shared",
    "Both networks now share tensors ({where}): training one changes the other.",
)
bank.slip("network-shared", (NETWORK, "    member.network = better.network\n"), (OPTIMIZER, "    member.optimizer = better.optimizer\n"))  # fmt: skip
bank.slip("network-shared", (NETWORK, "    for mine, theirs in zip(member.network.parameters(), better.network.parameters()):\n        mine.data = theirs.data\n    for mine, theirs in zip(member.network.buffers(), better.network.buffers()):\n        mine.copy_(theirs)\n"))  # fmt: skip
bank.variant("network-shared", DEEP, ("copy.deepcopy((better.network, better.optimizer))", "better.network, better.optimizer"))  # fmt: skip
bank.variant("network-shared", HAND, ("            mine.copy_(theirs)\n            state", "            mine.set_(theirs.data)\n            state"))  # fmt: skip

bank.hint(
    "state-shared",
    "{where}: both optimizers share their tensors of momentum and moments, and both write to them. "
    "optimizer.load_state_dict keeps the tensors that you give it. Give it a deep copy.",
)
bank.slip("state-shared", ("copy.deepcopy(better.optimizer.state_dict())", "better.optimizer.state_dict()"))
bank.slip("state-shared", ("copy.deepcopy(better.optimizer.state_dict())", "dict(better.optimizer.state_dict())"))
bank.slip("state-shared", ("copy.deepcopy(better.optimizer.state_dict())", "copy.copy(better.optimizer.state_dict())"))
bank.variant("state-shared", HAND, ("v.clone() if torch.is_tensor(v) else v", "v"))
bank.variant("state-shared", HAND, ("if torch.is_tensor(v) else v", 'if k != "step" else v'))

bank.hint("noted-shared", "Both members share one dictionary of hyperparameters, so exploring would change "
                             "both. Copy it.")  # fmt: skip
bank.slip("noted-shared", (NOTED, "    member.hyperparameters = better.hyperparameters\n"))
bank.variant("noted-shared", DEEP, ("better.hyperparameters.copy()", "better.hyperparameters"))
bank.variant("noted-shared", HAND, ("member.hyperparameters.update(better.hyperparameters)", "member.hyperparameters = better.hyperparameters"))  # fmt: skip

bank.hint(
    "trains-otherwise",
    "Weights, buffers and state are those of better, yet after four more steps on the same batches the two differ "
    "({what}). Did you leave the network in eval mode, or without gradients?",
)
bank.slip("trains-otherwise", (NOTED, NOTED + "    member.network.eval()\n"))
bank.slip("trains-otherwise", (NOTED, NOTED + "    for p in member.network[:1].parameters():\n        p.requires_grad_(False)\n        p.grad = None\n"))  # fmt: skip
bank.variant("trains-otherwise", DEEP, ("((better.network, ", "((better.network.eval(), "), ("    member.hyper", "    better.network.train()\n    member.hyper"))  # fmt: skip

bank.hint(
    "explore-resets",
    "explore changed more than the hyperparameters: {what}. A new optimizer loses what the old one has "
    "accumulated. Write the new values into the param_groups of the existing one.",
)
bank.slip("explore-resets", (GROUPS, "    member.optimizer = type(member.optimizer)(member.network.parameters(), **member.hyperparameters)\n"))  # fmt: skip
bank.slip("explore-resets", (GROUPS, GROUPS + "    member.optimizer.state.clear()\n"))
bank.slip("explore-resets", (GROUPS, GROUPS + "    for p in member.network.parameters():\n        p.data *= 1.25\n"))
bank.variant("explore-resets", DEEP, ("    for group in", "    member.optimizer = torch.optim.AdamW(member.network.parameters())\n    for group in"))  # fmt: skip

bank.hint("not-noted", "After explore, member.hyperparameters still has the old values.")
bank.slip("not-noted", (TIMES, "    new = {k: v * float(rng.choice((0.8, 1.25))) for k, v in member.hyperparameters.items()}\n"), ("group.update(member.hyperparameters)", "group.update(new)"))  # fmt: skip
bank.slip("not-noted", (TIMES, "    for value in member.hyperparameters.values():\n        value *= rng.choice((0.8, 1.25))\n"))  # fmt: skip
bank.variant("not-noted", HAND, ("notes = member.hyperparameters\n", "notes = dict(member.hyperparameters)\n"))

bank.hint(
    "wrong-factor",
    "A hyperparameter was multiplied by {got}, not by 0.8 or 1.25. (1 means that it did not change; 1.562 or 0.64 "
    "that it changed twice, as in a loop over param_groups.)",
)
bank.slip("wrong-factor", ("rng.choice((0.8, 1.25))", "rng.uniform(0.8, 1.25)"))
bank.slip("wrong-factor", ("rng.choice((0.8, 1.25))", "rng.choice((0.8, 1.2))"))
bank.slip("wrong-factor", (TIMES, TIMES.replace("    for name in member.hyperparameters:", '    for name in ("lr",):')))
bank.slip("wrong-factor", ("    for group in member.optimizer.param_groups:\n        group.update", "    for group in member.optimizer.param_groups:\n        for name in group.keys() & member.hyperparameters.keys():\n            member.hyperparameters[name] *= float(rng.choice((0.8, 1.25)))\n        group.update"))  # fmt: skip
bank.variant("wrong-factor", DEEP, ("0.8, 1.25)", "0.8, 1.0)"))
bank.variant("wrong-factor", HAND, ("notes[name] / 1.25", "notes[name] / 1.5"))

bank.hint(
    "not-in-optimizer",
    "The dictionary has new values, but the optimizer still uses some or all of the old ones. Write all of the new "
    "ones into its param_groups.",
)
bank.slip("not-in-optimizer", (GROUPS, ""))
bank.slip("not-in-optimizer", ("group.update(member.hyperparameters)", 'group["lr"] = member.hyperparameters["lr"]'))
bank.slip("not-in-optimizer", (GROUPS, "    member.optimizer.defaults.update(member.hyperparameters)\n"))
bank.variant("not-in-optimizer", HAND, ("            group[name] = notes[name]", "            setattr(group, name, notes[name]) if 0 else None"))  # fmt: skip

bank.hint("one-group", "Only one of the optimizer's param_groups has the new values. There may be several.")
bank.slip("one-group", (GROUPS, "    member.optimizer.param_groups[0].update(member.hyperparameters)\n"))
bank.variant("one-group", HAND, ("in member.optimizer.param_groups:\n            group[name] =", "in member.optimizer.param_groups[-1:]:\n            group[name] ="))  # fmt: skip
bank.variant("one-group", DEEP, ("in member.optimizer.param_groups:\n        for", "in member.optimizer.param_groups[:1]:\n        for"))  # fmt: skip

bank.hint("one-factor", "All hyperparameters get the same factor each time. Draw one for each.")
bank.slip("one-factor", (TIMES, "    factor = float(rng.choice((0.8, 1.25)))\n    for name in member.hyperparameters:\n        member.hyperparameters[name] *= factor\n"))  # fmt: skip
bank.variant("one-factor", DEEP, ("rng.random(len(member.hyperparameters))", "np.full(len(member.hyperparameters), rng.random())"))  # fmt: skip

bank.hint("factor-not-drawn", "Two hyperparameters can go up or down in four ways. In {n} explorations, only {got} of "
                           "them came up."
)  # fmt: skip
bank.slip("factor-not-drawn", ("    for name in member", "    rng = np.random.default_rng(3)\n    for name in member"))
bank.slip("factor-not-drawn", (TIMES, "    for name, factor in zip(member.hyperparameters, rng.permutation((0.8, 1.25))):\n        member.hyperparameters[name] *= float(factor)\n"))  # fmt: skip
bank.variant("factor-not-drawn", DEEP, ("rng.random(len(member.hyperparameters)) < 0.5", "np.array([True, False])"))

bank.hint("rng-ignored", "{name}, called again with a generator of the same seed, draws something else. Draw from `rng` alone.")  # fmt: skip
bank.slip("rng-ignored", ("float(rng.choice((0.8, 1.25)))", "float(np.random.choice((0.8, 1.25)))"))
bank.slip("rng-ignored", ("int(rng.choice(order[-quarter:]))", "order[-1 - int(torch.randint(quarter, ()))]"))
bank.variant("rng-ignored", HAND, ("rng.integers(0, 2, len(notes))", "torch.randint(2, (len(notes),))"))
bank.variant("rng-ignored", DEEP, ("rng.choice(order[", "np.random.choice(order["))

bank.hint("places-changed", "The members are no longer in the same order in the list. Sort indices, not the "
                               "list that you were given.")  # fmt: skip
BY_LIST = '''
def evolve(members, rng):
    """Sorts the members themselves."""
    ranked = sorted(members, key=lambda m: -1 if math.isnan(m.value) else m.value)
    quarter, found = max(1, len(members) // 4), []
    for poor in ranked[:quarter]:
        good = ranked[-1 - int(rng.integers(quarter))]
        exploit(poor, good)
        explore(poor, rng)
        found.append((next(k for k, m in enumerate(members) if m is poor), next(k for k, m in enumerate(members) if m is good)))
    return found
'''
BY_LIST = DEEP[: DEEP.index("def evolve")] + BY_LIST.lstrip()
bank.text(None, BY_LIST)
bank.slip("places-changed", ("    order = sorted(", "    members.sort(key=lambda m: -1 if math.isnan(m.value) else m.value)\n    values.sort()\n    order = sorted("))  # fmt: skip
bank.hint("member-replaced", "You replaced an object in the list by another. Change the member in place, as "
                                "exploit does: other code may hold a reference to it.")  # fmt: skip
bank.variant("member-replaced", BY_LIST, ("        exploit(poor, good)\n        explore(poor, rng)\n        found.append((next(k for k, m in enumerate(members) if m is poor), next(k for k, m in enumerate(members) if m is good)))\n", "        a, b = members.index(poor), members.index(good)\n        members[a] = copy.deepcopy(good)\n        explore(members[a], rng)\n        found.append((a, b))\n"))  # fmt: skip
bank.slip("member-replaced", ("    for poor, good in pairs:\n", "    for poor, good in pairs:\n        members[poor] = copy.deepcopy(members[poor])\n"))  # fmt: skip
bank.variant("places-changed", BY_LIST, ("ranked = sorted(members, key=lambda m: -1 if math.isnan(m.value) else m.value)", "members.sort(key=lambda m: -1 if math.isnan(m.value) else m.value)\n    ranked = members"))  # fmt: skip

bank.hint("nothing-evolved", "No member has changed. Do you call exploit on the members themselves, and for a "
                                "quarter of nine?")  # fmt: skip
bank.slip("nothing-evolved", ("        exploit(members[poor], members[good])\n        explore(members[poor], rng)\n", "        pass\n"))  # fmt: skip
bank.slip("nothing-evolved", ("    for poor, good in pairs:\n", "    members = copy.deepcopy(members)\n    for poor, good in pairs:\n"))  # fmt: skip
bank.variant("nothing-evolved", BY_LIST, ("sorted(members,", "sorted(copy.deepcopy(members),"), ("enumerate(members) if m is", "enumerate(members) if m.hyperparameters is not"))  # fmt: skip

bank.hint(
    "best-changed",
    "These members changed: {got}. Some of them belong to the highest quarter. Those are copied, and go on "
    "unchanged. Only the lowest quarter, {expected}, changes.",
)
bank.slip("best-changed", ("        explore(members[poor], rng)\n", "    for member in members:\n        explore(member, rng)\n"))  # fmt: skip
bank.slip("best-changed", ("explore(members[poor], rng)", "explore(members[good], rng)"))
bank.slip("best-changed", ("exploit(members[poor], members[good])", "exploit(members[good], members[poor])"))
bank.slip("best-changed", ("key=values.__getitem__)", "key=values.__getitem__, reverse=True)"))
bank.variant("best-changed", DEEP, ("    for k in poor:", "    for k in range(len(members)):"))
bank.variant("best-changed", BY_LIST, ("exploit(poor, good)", "exploit(good, poor)"))

bank.hint(
    "nan-not-worst",
    "These members changed: {got}. The lowest quarter is {expected}. A member with the value NaN (diverged) is the "
    "worst of all. Every comparison with NaN is false, so sorting puts it, and others, anywhere.",
)
bank.slip("nan-not-worst", ("-math.inf if math.isnan(member.value) else member.value", "member.value"))
bank.slip("nan-not-worst", ("-math.inf if", "math.inf if"))
bank.variant(
    "nan-not-worst", DEEP, ("np.nan_to_num([m.value for m in members], nan=-1.0)", "[m.value for m in members]")
)
bank.variant("nan-not-worst", HAND, ("(not math.isnan(members[k].value), members[k].value)", "members[k].value"))

bank.hint(
    "quarter-wrong",
    "These members changed: {got}. The lowest quarter of nine, rounded down, is two members: {expected}.",
)
bank.slip("quarter-wrong", ("len(members) // 4", "round(len(members) / 4 + 0.5)"))
bank.slip("quarter-wrong", ("len(members) // 4", "len(members) // 5"))
bank.variant("quarter-wrong", HAND, ("n = max(1, len(members) // 4)", "n = 3"))
bank.variant("quarter-wrong", DEEP, ("n = max(len(members) // 4, 1)", "n = 1"))

bank.hint("pairs-form", "evolve returns a list of pairs of indices, [(the copier, the copied), …], two ints each.")
bank.slip("pairs-form", ("    return pairs", "    return [(members[poor], members[good]) for poor, good in pairs]"))
bank.slip("pairs-form", ("    return pairs", "    return [poor for poor, _ in pairs]"))
bank.variant("pairs-form", DEEP, ("return list(zip(poor.tolist(), good.tolist()))", "return poor, good, order"))
bank.slip("nothing-returned", ("    return pairs", "    pairs"))

bank.hint("pairs-wrong", "The first of each pair is the index of the member that copied. The members that "
                            "changed are {expected}; your pairs say {got}.")  # fmt: skip
bank.slip("pairs-wrong", ("    return pairs", "    return [(good, poor) for poor, good in pairs]"))
bank.slip("pairs-wrong", ("    return pairs", "    return pairs[:1]"))
bank.variant("pairs-wrong", DEEP, ("zip(poor.tolist(), good.tolist())", "zip(good.tolist(), poor.tolist())"))

bank.hint("not-from-best", "You copied {got}. The highest quarter is {expected}.")
bank.slip("not-from-best", ("rng.choice(order[-quarter:])", "rng.choice(order[quarter:])"))
bank.slip("not-from-best", ("rng.choice(order[-quarter:])", "rng.choice(order[-quarter - 1:])"))
bank.slip("not-from-best", ("rng.choice(order[-quarter:])", "rng.choice(order[-math.ceil(len(order) / 4):])"))
bank.slip("not-from-best", ("rng.choice(order[-quarter:])", "rng.choice(order[-2 * quarter:])"))
bank.slip("not-from-best", ("rng.choice(order[-quarter:])", "rng.choice(order[quarter : 2 * quarter])"))
bank.variant("not-from-best", HAND, ("top, found = ranked[::-1][:n]", "top, found = ranked[n:][:n]"))
bank.variant("not-from-best", BY_LIST, ("ranked[-1 - int(rng.integers(quarter))]", "ranked[-3]"))

bank.hint("evolve-not-copied", "The member that copied doesn't match the one that it copied ({what}): your "
                                  "pairs say one thing, the networks another.")  # fmt: skip
bank.slip("evolve-not-copied", ("        exploit(members[poor], members[good])\n", ""))
bank.slip("evolve-not-copied", ("exploit(members[poor], members[good])", "exploit(members[poor], members[0])"))
bank.variant("evolve-not-copied", HAND, ("        exploit(members[poor], members[good])\n", ""))

bank.hint(
    "evolve-not-explored",
    "In evolve, the rates of a member that copied are not those of the copied one times 0.8 or 1.25. Each explores "
    "once, after it has copied: the copy overwrites anything drawn before.",
)
bank.slip("evolve-not-explored", ("        explore(members[poor], rng)\n", ""))
bank.slip("evolve-not-explored", ("        exploit(members[poor], members[good])\n        explore(members[poor], rng)\n", "        explore(members[poor], rng)\n        exploit(members[poor], members[good])\n"))  # fmt: skip
bank.variant("evolve-not-explored", DEEP, ("        explore(members[k], rng)\n", "        pass\n"))
bank.variant("evolve-not-explored", BY_LIST, ("        explore(poor, rng)\n", "        explore(poor, rng)\n        explore(poor, rng)\n"))  # fmt: skip

bank.hint("not-drawn", "In all of eight runs, the same members copied the same ones. Draw whom to copy from the "
                          "highest quarter.")  # fmt: skip
bank.slip("not-drawn", ("int(rng.choice(order[-quarter:]))", "order[-1]"))
bank.slip("not-drawn", ("[(poor, int(rng.choice(order[-quarter:]))) for poor in order[:quarter]]", "list(zip(order[:quarter], order[-quarter:]))"))  # fmt: skip
bank.variant("not-drawn", HAND, ("top[rng.integers(n)]", "top[0]"))

bank.hint("at-least-one", "Of three members with the values 0.9, 0.3, 0.8, one copies another: [(1, 0)]. A "
                             "quarter is at least one member.")  # fmt: skip
bank.slip("at-least-one", ("max(1, len(members) // 4)", "len(members) // 4"))
bank.variant("at-least-one", BY_LIST, ("max(1, len(members) // 4)", "len(members) // 4"))

bank.hint("other-name", "With a third hyperparameter, eps, explore multiplied eps by {got}, not by 0.8 or 1.25, "
                           "in the dictionary or in the optimizer. Take the names from member.hyperparameters.")  # fmt: skip
bank.slip("other-name", ("    for name in member.hyperparameters:", '    for name in ("lr", "weight_decay"):'))
bank.slip("other-name", ("group.update(member.hyperparameters)", 'group["lr"], group["weight_decay"] = member.hyperparameters["lr"], member.hyperparameters["weight_decay"]'))  # fmt: skip
bank.variant("other-name", HAND, ("            group[name] = notes[name]", '            group[name] = group[name] if name == "eps" else notes[name]'))  # fmt: skip

bank.hint("quarter-rounded", "Of fifteen members, three copy: {expected}. 15 // 4 is 3. Your pairs say {got}.")
bank.slip("quarter-rounded", ("len(members) // 4", "round(len(members) / 4)"))
bank.slip("quarter-rounded", ("max(1, len(members) // 4)", "max(1, min(2, len(members) // 4))"))
bank.variant("quarter-rounded", DEEP, ("max(len(members) // 4, 1)", "max(int(len(members) / 4 + 0.5), 1)"))

bank.hint(
    "one-for-all", "In each of eight runs with fifteen members, all three copied the same one. Draw again for each."
)
bank.slip("one-for-all", ("    pairs = [(poor, int(rng.choice(order[-quarter:]))) for", "    one = int(rng.choice(order[-quarter:]))\n    pairs = [(poor, one) for"))  # fmt: skip
bank.variant("one-for-all", HAND, ("    for poor in ranked[:n]:\n        good = top[rng.integers(n)]\n", "    good = top[rng.integers(n)]\n    for poor in ranked[:n]:\n"))  # fmt: skip

bank.hint(
    "drawn-for-optimizer",
    "The optimizer's new values differ from the dictionary's: you drew another factor for it. Write the "
    "dictionary's values into its param_groups.",
)
bank.slip(
    "drawn-for-optimizer",
    (
        "group.update(member.hyperparameters)",
        "group.update({k: group[k] * float(rng.choice((0.8, 1.25))) for k in member.hyperparameters})",
    ),
)
bank.variant("drawn-for-optimizer", HAND, ("group[name] = notes[name]", "group[name] *= rng.choice((0.8, 1.25))"))
