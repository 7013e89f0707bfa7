"""Balise 1: a frozen body: its modes, statistics and gradients over training steps, and what an optimizer gets."""

import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking.looks import Look, judged, silent

CALLS = "train()", "eval()", "train() again", "train(False)", "train(True)"


def parts():
    """A body with batch norm and dropout, awake as it is made, and a head with both."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    body = nn.Sequential(stem, nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    return body, nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def awake(module, name):
    """The names of a module and all below it that are in training mode."""
    return [f"{name}.{below}".rstrip(".") for below, one in module.named_modules() if one.training]


def kind(value):
    return "None" if value is None else f"another {type(value).__name__}"


def named(module, given):
    """What `learning` gave, as sorted names of the module; a word for anything that is no parameter of it."""
    if given is None:
        return None
    names = {id(p): name for name, p in module.named_parameters()}
    return sorted(names.get(id(one), type(one).__name__) for one in given)


def steps(model, held):
    """Train for three steps; False where the output has no graph."""
    optimizer = torch.optim.SGD(held, 0.1, weight_decay=0.1)
    images = 3 + torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model.train()
        loss = F.cross_entropy(model(images), torch.tensor([0, 1, 2, 0, 1, 2]))
        if not loss.requires_grad:
            return False
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return True


def observe(transfer, learning):
    body, head = parts()
    model = transfer(body, head)
    yield {"learns": [name for name, p in body.named_parameters() if p.requires_grad]}
    yield {"head stays": [name for name, p in head.named_parameters() if not p.requires_grad]}
    yield {"at first": awake(body, "body")}
    modes, heads, returned = [], [], []
    for call, mode in zip(CALLS, (True, False, True, False, True)):
        if "()" in call:
            returned.append(model.train() if mode else model.eval())
        else:
            returned.append(model.train(mode))
        modes.append(awake(body, "body"))
        heads.append(all(one.training == mode for one in head.modules()))
    yield {"modes": modes, "heads": heads, "returned": [kind(one) for one in returned if one is not model]}

    yield {"learning": named(model, listed(learning, model))}
    thawed = transfer(*parts())
    thawed.body[-1].requires_grad_(True)
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    still = nn.Linear(2, 2).requires_grad_(False)
    yield {"thawed": named(thawed, listed(learning, thawed))}
    yield {"others": [named(one, listed(learning, one)) for one in (tied, still)]}

    kept = {name: value.clone() for name, value in body.state_dict().items()}
    before = [p.detach().clone() for p in head.parameters()]
    yield {"graph": steps(model, listed(learning, model))}
    yield {"gradients": [name for name, p in body.named_parameters() if p.grad is not None]}
    yield {"moved": [name for name, value in body.state_dict().items() if not torch.equal(value, kept[name])]}
    yield {"head": [torch.equal(p, old) for p, old in zip(head.parameters(), before)].count(True)}


def listed(learning, model):
    given = learning(model)
    return given if given is None else list(given)


def names_in(seen, due):
    return {"what": ", ".join(seen[:3])}


def mode_hint(seen, due):
    return "body-awake" if any("body" in one for one in seen) else "parts-awake"


def learning_hint(seen, due):
    """The hint: of one model's list of names, or of the first that is wrong of several."""
    if isinstance(due[0] if due else "", list):
        seen, due = next((a, b) for a, b in zip(seen, due) if a != b)
    if set(seen) - set(due):
        return "others-in-list"
    return "listed-twice" if len(seen) > len(set(seen)) else "missing-in-list"


HEAD = sorted(f"head.{name}" for name, _ in parts()[1].named_parameters())
THAWED = sorted([*HEAD, "body.4.weight", "body.4.bias"])
LOOKS = [
    Look("no parameter of the body learns", "learns", [], "body-learns", fields=names_in),
    Look("the head's parameters do", "head stays", [], "head-frozen", fields=names_in),
    Look("a body that arrives in training mode is put in evaluation mode", "at first", [], "awake-at-first", fields=silent),
    Look(f"it stays in evaluation mode, with everything below it, after {', '.join(CALLS)}", "modes", [[]] * 5, mode_hint,
         fields=lambda seen, due: {"where": CALLS[next(k for k, one in enumerate(seen) if one)]}),
    Look("the head follows", "heads", [True] * 5, "head-stuck",
         fields=lambda seen, due: {"where": CALLS[seen.index(False)], "got": "", "expected": ""}),
    Look("`train` returns the model, and so does `eval`", "returned", [], "train-returns",
         fields=lambda seen, due: {"what": seen[0], "got": "", "expected": ""}),
    Look("`learning` lists what learns: the head's parameters", "learning", HEAD, learning_hint),
    Look("also with a part of the body thawed", "thawed", THAWED, learning_hint),
    Look("in other models: tied weights once, and nothing of a frozen model", "others",
         [["0.bias", "0.weight", "2.bias"], []], learning_hint),
    Look("three training steps: the loss has a graph", "graph", True, "no-graph"),
    Look("the body has no gradients", "gradients", [], "body-learns", fields=names_in),
    Look("its weights and running statistics have not changed", "moved", [], "body-moved", fields=names_in),
    Look("all of the head has changed", "head", 0, "head-frozen", fields=lambda seen, due: {"what": f"{seen} of them"}),
]  # fmt: skip


def balise_1(transfer, learning):
    yield from judged(LOOKS, observe, transfer, learning)
