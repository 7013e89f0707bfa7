"""Balise 4: thaw, in optimizers that have made steps: rates, groups, state, modes, before and after."""

import copy

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, judged, same, silent

RATE, FACTOR = 0.002, 0.1


class Net(nn.Module):
    """A body of four layers, two of which share a weight, two norms, and two heads."""

    def __init__(self):
        super().__init__()
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        self.body = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), first, second, nn.Sequential(nn.LayerNorm(4), nn.Identity())
        )
        self.head, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        y = self.body(x)
        return self.head(y) + self.other(y)


def sgd(groups):
    return torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def adamw(groups):
    return torch.optim.AdamW(groups, 0.01, betas=(0.8, 0.95), weight_decay=0.03)


def weights_and_biases(net):
    return [
        {"params": [net.head.weight], "lr": 0.2, "weight_decay": 0.5},
        {"params": [net.head.bias], "weight_decay": 0.0},
    ]


def head_and_last(net):
    return [{"params": [*net.head.parameters()], "lr": 0.03, "weight_decay": 0.0}, {"params": [*net.body[4].parameters(), net.body[3].bias]}]  # fmt: skip


# (optimizer, its groups at first, what is thawed, one after the other)
CASES = {
    "SGD, a head in two groups": (sgd, weights_and_biases, [lambda net: net.body]),
    "AdamW, from the last layers to the first": (
        adamw,
        weights_and_biases,
        [lambda net: net.body[2:], lambda net: net.body],
    ),
    "AdamW, a part of the module is already in it": (adamw, head_and_last, [lambda net: net.body]),
    "SGD, twice in a row": (sgd, weights_and_biases, [lambda net: net.body, lambda net: net.body]),
    "SGD, all of the module is already in it": (sgd, head_and_last, [lambda net: net.body[4]]),
    "SGD, a module without parameters": (sgd, head_and_last, [lambda net: net.body[4][1]]),
}


def made(kind, groups):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        net = Net().requires_grad_(False)
    optimizer = kind(groups(net))
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.requires_grad_(True)
    for _ in range(3):
        step(net, optimizer)
    for p in (net.head.bias, net.body[3].bias):  # in the optimizer or not, frozen since
        p.requires_grad_(False)
    net.eval()
    net.body[4][1].train()  # a part is awake
    return net, optimizer


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.linspace(-1, 1, 15).view(5, 3)).pow(2).sum().backward()
    optimizer.step()


def seen_in(net, optimizer):
    """What the optimizer and the network are, by the names of parameters."""
    names = {id(p): name for name, p in net.named_parameters()}
    groups = [[names.get(id(p), "another") for p in group["params"]] for group in optimizer.param_groups]
    options = [
        {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")} for group in optimizer.param_groups
    ]
    return {
        "groups": groups,
        "rates": {name: float(group["lr"]) for group, its in zip(optimizer.param_groups, groups) for name in its},
        "options": {name: some for some, its in zip(options, groups) for name in its},
        "state": {names.get(id(p)): copy.deepcopy(some) for p, some in optimizer.state.items()},
        "learns": {name for name, p in net.named_parameters() if p.requires_grad},
        "modes": [module.training for module in net.modules()],
        "values": {name: p.detach().clone() for name, p in net.named_parameters()},
    }


def thawed(thaw, kind, groups, modules):
    """After each call: what was before, what is now, names of new parameters and of all of the module, and more."""
    net, optimizer = made(kind, groups)
    for k, choose in enumerate(modules):
        if k:
            step(net.eval(), optimizer)
        module = choose(net)
        mine = [name for name, p in net.named_parameters() if any(p is one for one in module.parameters())]
        net.zero_grad()
        before = seen_in(net, optimizer)
        again = False
        try:
            thaw(optimizer, module, RATE, FACTOR)
        except ValueError as error:
            if "more than one parameter group" not in str(error):
                raise
            again = True
        after = seen_in(net, optimizer)
        new = [name for name in mine if name not in before["rates"]]
        moved = None
        if k == len(modules) - 1 and not again:
            step(net, optimizer)
            moved = [name for name in mine if torch.equal(dict(net.named_parameters())[name], before["values"][name])]
        yield before, after, new, mine, again, moved, optimizer.defaults


def group_words(before, after, new):
    """What is wrong with the group of the new parameters; "" where nothing is."""
    held = [name for its in after["groups"] for name in its]
    if missing := [name for name in new if name not in held]:
        return f"{len(missing)} of {len(new)} new parameters are in none"
    if len(after["groups"]) < len(before["groups"]):
        return "some of the optimizer's groups are gone"
    if new and any(set(its) & set(new) and set(its) - set(new) for its in after["groups"]):
        return "new parameters share a group with others"
    count = len([its for its in after["groups"] if set(its) & set(new)])
    return f"{count} groups hold the new parameters" if count > 1 else ""


def rates(some, old):
    """Of all parameters, after each call: those rates as a part of what they were, or as a part of RATE; 1 for the others."""
    found = [a["rates"].get(one, 0.0) / b["rates"].get(one, RATE) if (one in b["rates"]) == old and one in {*b["rates"], *new} else 1.0
             for b, a, new in some for one in b["values"]]  # fmt: skip
    return torch.tensor(found, dtype=torch.float64)


def due_rates(name, old):
    """As `rates` of a right answer: all new parameters are in the optimizer after each call."""
    kind, groups, modules = CASES[name]
    net, optimizer = made(kind, groups)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = []
    for choose in modules:
        found += [FACTOR if old and id(p) in held else 1.0 for p in net.parameters()]
        held |= {id(p) for p in choose(net).parameters()}
    return torch.tensor(found, dtype=torch.float64)


def observe(thaw):
    for name, case in CASES.items():
        found = list(thawed(thaw, *case))
        yield {f"{name}: again": any(again for *_, again, _, _ in found)}
        some = [(b, a, new) for b, a, new, *_ in found]
        lists = [its for _, a, _ in some for its in a["groups"]]
        yield {f"{name}: frozen": any(set(mine) - a["learns"] for _, a, _, mine, *_ in found),
               f"{name}: others": [sorted(a["learns"] - b["learns"] - set(mine)) for b, a, _, mine, *_ in found],
               f"{name}: modes": all(b["modes"] == a["modes"] for b, a, *_ in found),
               f"{name}: group": next(filter(None, (group_words(*one) for one in some)), ""),
               f"{name}: empty": any(not its for its in lists),
               f"{name}: repeated": any(len(its) != len(set(its)) for its in lists)}  # fmt: skip
        yield {f"{name}: old rates": rates(some, old=True), f"{name}: new rates": rates(some, old=False)}
        yield {f"{name}: options": all(all(a["options"][one].get(key, value) == value for key, value in defaults.items() if key != "lr")
                                       for _, a, new, *_, defaults in found for one in new),
               f"{name}: old options": all(a["options"][one] == b["options"][one] for b, a, _ in some for one in b["options"]),
               f"{name}: state": all(same(a["state"].get(one), b["state"][one]) for b, a, _ in some for one in b["state"]),
               f"{name}: values": all(same(a["values"], b["values"]) for b, a, _ in some),
               f"{name}: still": found[-1][5] or []}  # fmt: skip


LOOKS = []
for name, (_, _, modules) in CASES.items():
    LOOKS += [
        Look(name, f"{name}: again", False, "added-again"),
        Look("the module learns", f"{name}: frozen", False, "still-frozen"),
        Look("", f"{name}: others", [[]] * len(modules), "others-learn", fields=silent),
        Look("its mode stays", f"{name}: modes", True, "woken"),
        Look("its new parameters are in one new group", f"{name}: group", "", "new-group", fields=lambda seen, due: {"what": seen, "got": "", "expected": ""}),
        Look("", f"{name}: empty", False, "empty-group"),
        Look("each once", f"{name}: repeated", False, "repeated"),
        Value("the old rates are multiplied by `factor`", f"{name}: old rates",
              due_rates(name, True), "wrong-old-rates", fields=silent),
        Value("the new group has its own rate", f"{name}: new rates",
              due_rates(name, False), "wrong-new-rate", fields=silent),
        Look("it has the optimizer's defaults", f"{name}: options", True, "options"),
        Look("", f"{name}: old options", True, "options"),
        Look("the optimizer's state is kept", f"{name}: state", True, "state-lost"),
        Look("", f"{name}: values", True, "values-changed"),
        Look("a step changes the module", f"{name}: still", [], "new-group", fields={"what": "a "
                                                                                                             "step "
                                                                                                             "does "
                                                                                                             "not "
                                                                                                             "change "
                                                                                                             "them"}),
    ]  # fmt: skip


def balise_4(thaw):
    yield from judged(LOOKS, observe, thaw)
