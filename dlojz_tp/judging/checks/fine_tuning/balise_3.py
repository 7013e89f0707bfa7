"""Balise 3: the rate and the decay of each parameter, written down by hand."""

import torch
from torch import nn

from dlojz_tp.judging.checking.compare import mistake_of
from dlojz_tp.judging.checking.looks import Look, judged, silent, tried

RATE, FACTOR, DECAY = 0.8, 0.25, 0.03
KEYS = {"params", "lr", "weight_decay"}
#  name: (layers before the end, dimensions); five layers, of which the fourth has no parameters
DUE = {
    "0.0.weight": (4, 4), "0.1.weight": (4, 1), "0.1.bias": (4, 1), "0.scale": (4, 0),
    "1.0.0.weight": (3, 2), "1.0.1.weight": (3, 1), "1.0.1.bias": (3, 1),
    "2.weight": (2, 2), "4.1.weight": (0, 2), "4.1.bias": (0, 1),
}  # fmt: skip
SHARED = {"2.weight": 3, "4.1.weight": 4}  # stands in an earlier layer too, so many before the end
FROZEN = ["1.0.0.bias", "2.bias", "4.0.weight", "4.0.bias"]


def layers():
    """Five layers with frozen parameters, and two parameters that an earlier layer has as well; and their names."""
    first = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    first.register_parameter("scale", nn.Parameter(torch.ones(())))
    second = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Embedding(4, 4))
    third, head = nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6))
    first.embedding = nn.Embedding(6, 4)
    first.embedding.weight = head[1].weight
    second[1].weight = third.weight
    model = nn.Sequential(first, second, third, nn.ReLU(), head)
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    for p in model.parameters():
        p.requires_grad_(names[id(p)] not in FROZEN)
    return model, names


def told(by_layer, given, names):
    """[(name, rate, decay)] of all parameters in the groups, what is odd in the groups, the number that are empty."""
    groups = by_layer(given, RATE, FACTOR, DECAY)
    if groups is None:
        return None
    found, odd, empty, kept = [], [], 0, []
    for group in groups if hasattr(groups, "__iter__") and not isinstance(groups, dict) else [groups]:
        if not isinstance(group, dict) or not group.keys() >= KEYS:
            odd.append(sorted(map(str, group)) if isinstance(group, dict) else type(group).__name__)
            continue
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        kept.append(group | {"params": params})
        empty += not params
        found += [
            (names.get(id(p), type(p).__name__), float(group["lr"]), float(group["weight_decay"])) for p in params
        ]
    return found, odd, empty, kept


def counts(found):
    names = [name for name, *_ in found]
    return {name: names.count(name) for name in sorted(names)}


def observe(by_layer):
    model, names = layers()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    seen = told(by_layer, list(model), names)
    if seen is None:
        yield {"odd": None}
    found, odd, empty, kept = seen
    yield {"odd": odd, "counts": counts(found), "empty": empty}
    rates, decays = {name: rate for name, rate, _ in found}, {name: decay for name, _, decay in found}
    yield {"rates": [rates[name] for name in DUE if name not in SHARED], "shared": [rates[name] for name in SHARED]}
    yield {"decays": [decays[name] for name in DUE]}
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        yield {kind.__name__: tried(lambda kind=kind: kind(kept, 1e-3).step())}
    others = [told(by_layer, some, names) for some in (tuple(model), model, nn.ModuleList(model))]
    yield {"kinds": [None if one is None else sorted(one[0]) == sorted(found) for one in others]}
    head, still = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    own = {id(head.weight): "weight", id(head.bias): "bias"}
    small = [told(by_layer, some, own) for some in ([head], [still, head], [still])]
    yield {"small": [None if one is None else [*sorted(one[0]), one[2]] for one in small]}


def who_hint(seen, due):
    """The hint: which parameters stand in the groups too often, or not at all."""
    if set(seen) & set(FROZEN):
        return "frozen-in"
    if any(count > 1 for count in seen.values()):
        return "twice"
    return "left-out" if set(due) - set(seen) else "groups-form"


def who_fields(seen, due):
    wrong = [name for name in {**seen, **due} if seen.get(name) != due.get(name)]
    return {"what": ", ".join(wrong[:3]), "got": "", "expected": ""}


def truth(names, power):
    return [RATE * FACTOR ** power(DUE[name][0]) for name in names]


PLAIN = [name for name in DUE if name not in SHARED]
RATES = truth(PLAIN, lambda k: k)


def rate_hint(seen, due):
    known = {"upside-down": truth(PLAIN, lambda k: 4 - k), "not-compounded": truth(PLAIN, lambda k: min(k, 1))}
    return mistake_of(seen, known, "wrong-rates")


def decay_hint(seen, due):
    return mistake_of(seen, {"decay-everywhere": [DECAY] * len(DUE)}, "wrong-decay")


def per_parameter(seen, due):
    k = next(k for k, (a, b) in enumerate(zip(seen, due)) if abs(a - b) > 1e-9)
    names = {len(DUE): list(DUE), len(PLAIN): PLAIN, len(SHARED): list(SHARED)}[len(due)]
    return {"where": f"parameter {names[k]}", "got": f"{seen[k]:g}", "expected": f"{due[k]:g}"}


PAIR = [("bias", RATE, 0.0), ("weight", RATE, DECAY)]
LOOKS = [
    Look("groups with params, lr and weight_decay", "odd", [], "groups-form", fields=silent),
    Look("each parameter that learns appears once", "counts", dict.fromkeys(sorted(DUE), 1), who_hint, fields=who_fields),
    Look("no empty group", "empty", 0, "empty-groups"),
    Look("the rate of each layer", "rates", RATES, rate_hint, fields=per_parameter),
    Look("a parameter that two layers share has the later layer's rate", "shared", truth(SHARED, lambda k: k), "shared-earlier", fields=per_parameter),
    Look("decay for parameters with two or more dimensions", "decays", [DECAY * (n > 1) for _, n in DUE.values()], decay_hint, fields=per_parameter),
    Look("AdamW takes them", "AdamW", None, "groups-form"),
    Look("SGD takes them", "SGD", None, "groups-form"),
    Look("layers in a tuple, in an nn.Sequential, in an nn.ModuleList", "kinds", [True] * 3, "other-layers", fields=silent),
    Look("a head alone, a head with a frozen layer, nothing that learns", "small", [[*PAIR, 0], [*PAIR, 0], [0]], "other-layers", fields=silent),
]  # fmt: skip


def balise_3(by_layer):
    yield from judged(LOOKS, observe, by_layer)
