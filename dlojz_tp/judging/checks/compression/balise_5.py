"""Balise 5: masks by magnitude, and zeros that stay; the truth is a network that has only the weights that stayed."""

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, same, tried

DRAWN = torch.Generator().manual_seed(5)


def drawn(*shape, scale=1.0):
    return scale * torch.randn(shape, generator=DRAWN, dtype=torch.float64)


WEIGHTS = [drawn(6, 5, scale=0.3), drawn(4, 6), drawn(3, 2, 2, 2, scale=3.0)]  # layers of different sizes
SHARES = 0.25, 0.6, 0.85
TIES = [torch.tensor([[0.5, -0.5, 0.5, 0.5], [-0.5, 0.5, 0.5, 0.5]]), torch.full((3,), -0.5)]
ODD = {
    "nothing": ([WEIGHTS[0]], 0.0), "everything": (WEIGHTS[:2], 1.0), "round(0.29 · 100) of 100": ([drawn(10, 10)], 0.29),
    "a layer without weights": ([torch.zeros(0, 3), drawn(3, 3)], 0.5), "a transposed layer": ([drawn(7, 3).T], 0.4),
    "4 of 10 are zeros": ([torch.tensor([[0.0, 3, 0, -6, 1], [4, 0, -2, 5, 0]])], 0.5),
}  # fmt: skip


def true_masks(weights, sparsity, by_layer):
    """By sorting (magnitude, layer, place) in Python."""
    masks = [torch.ones(w.shape, dtype=torch.bool) for w in weights]
    every = [(abs(x), k, i) for k, w in enumerate(weights) for i, x in enumerate(w.flatten().tolist())]
    for group in [[one for one in every if one[1] == k] for k in range(len(weights))] if by_layer else [every]:
        for _, k, i in sorted(group)[: round(sparsity * len(group))]:
            masks[k].view(-1)[i] = False
    return masks


def counted(masks):
    return [int((~mask).sum()) for mask in masks]


# a network of two layers of one shape, and a batch of its own for each step
FIRST, BIAS, SECOND = drawn(6, 6), drawn(6), drawn(6, 6)
BATCHES = [(drawn(5, 6), drawn(5, 6)) for _ in range(7)]
MASKS = true_masks([FIRST, SECOND], 0.7, False)
OPTIMIZERS = {
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.003, momentum=0.5, centered=True),
    "plain SGD": lambda ps: torch.optim.SGD(ps, lr=0.01),
}
DENSE = 3  # steps before it is pruned


def error(first, bias, second, batch):
    x, y = batch
    return (torch.relu(x @ first.T + bias) @ second.T - y).square().mean()


def trained(make, hold, dense=DENSE):
    """Steps with all weights, then with zeros that hold(weights, masks, optimizer) keeps: (parameters, optimizer)."""
    ps = [nn.Parameter(one.clone()) for one in (FIRST, BIAS, SECOND)]
    optimizer = make(ps)
    for k, batch in enumerate(BATCHES):
        if k == dense:
            hold([ps[0], ps[2]], [mask.clone() for mask in MASKS], optimizer)
        optimizer.zero_grad()
        error(*ps, batch).backward()
        optimizer.step()
        if k >= dense:
            hold([ps[0], ps[2]], [mask.clone() for mask in MASKS], optimizer)
    return ps, optimizer


def smaller(make, dense=DENSE):
    """The parameters that are due: after the dense steps, only weights that stayed exist, each a vector of its own."""
    whole = [nn.Parameter(one.clone()) for one in (FIRST, BIAS, SECOND)]
    optimizer, masks = make(whole), [MASKS[0], torch.ones_like(BIAS, dtype=torch.bool), MASKS[1]]
    for batch in BATCHES[:dense]:
        optimizer.zero_grad()
        error(*whole, batch).backward()
        optimizer.step()
    kept = [nn.Parameter(one.detach()[mask]) for one, mask in zip(whole, masks)]
    other = make(kept)
    for one, old, mask in zip(kept, whole, masks):
        for name, value in optimizer.state[old].items():
            other.state[one][name] = value[mask] if value is not None and value.shape == mask.shape else value
    for batch in BATCHES[dense:]:
        other.zero_grad()
        full = [torch.zeros_like(mask, dtype=torch.float64).masked_scatter(mask, one) for one, mask in zip(kept, masks)]
        error(*full, batch).backward()
        other.step()
    return torch.cat([one.detach() for one in kept])


def observe(magnitude_masks, hold_zeros):
    given = [w.clone() for w in WEIGHTS]
    got = magnitude_masks(given, 0.5, False)
    yield {"form": form(got), "kept": same(given, WEIGHTS)}
    for by_layer in (False, True):
        every = [magnitude_masks([w.clone() for w in WEIGHTS], share, by_layer) for share in SHARES]
        yield {by_layer: every}
    ties = [magnitude_masks([w.clone() for w in TIES], 0.5, by_layer) for by_layer in (False, True)]
    yield {"ties": [sum(counted(ties[0])), *counted(ties[1])]}
    learnt = [nn.Parameter(w.clone()) for w in WEIGHTS]
    yield {"odd": [counted(magnitude_masks([w.clone() for w in ws], share, True)) for ws, share in ODD.values()],
           "learnt": magnitude_masks(learnt, 0.6, False)}  # fmt: skip
    for name, make in OPTIMIZERS.items():
        ps, optimizer = trained(make, hold_zeros)
        pairs = [(ps[0], MASKS[0]), (ps[2], MASKS[1])]
        yield {f"{name} zeros": sum(int((p[~mask] != 0).sum()) for p, mask in pairs)}
        kept = [p.detach()[mask] for p, mask in (pairs[0], (ps[1], slice(None)), pairs[1])]
        yield {f"{name} left": remembered(pairs, optimizer), name: torch.cat(kept)}
    yield of_no_name(hold_zeros)
    yield {"others": of_other_shapes(hold_zeros)}
    yield {"fresh": torch.cat([p.detach().flatten() for p in trained(OPTIMIZERS["AdamW"], hold_zeros, dense=0)[0]])}


def of_no_name(hold_zeros):
    """Of something that no optimizer here remembers: what stays where the weight is zero, and what is a new tensor."""
    weight = nn.Parameter(FIRST.clone())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {
        "mine": torch.ones_like(weight),
        "rounded": torch.ones_like(weight, dtype=torch.bfloat16),
    }
    before = {"the weight": weight.data, **optimizer.state[weight]}
    hold_zeros([weight], [MASKS[0].clone()], optimizer)
    after = {"the weight": weight.data, **optimizer.state[weight]}
    moved = [name for name, one in before.items() if name not in after or after[name].data_ptr() != one.data_ptr()]
    return {"unknown": remembered([(weight, MASKS[0])], optimizer), "moved": moved}


def of_other_shapes(hold_zeros):
    """Which states that have not the weight's shape change; in words, if the answer stumbles over them."""
    weight, shapes = nn.Parameter(FIRST.clone()), {"rows": (6, 1), "columns": (6,), "flat": (36,)}
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {name: torch.ones(shape) for name, shape in shapes.items()}
    said = tried(hold_zeros, [weight], [MASKS[0].clone()], optimizer)
    changed = [name for name, shape in shapes.items() if not same(optimizer.state[weight].get(name), torch.ones(shape))]
    return said if isinstance(said, str) else ", ".join(changed)


def remembered(pairs, optimizer):
    """Which of an optimizer's states are not zero where the weight is."""
    found = {name for p, mask in pairs for name, value in optimizer.state[p].items()
             if isinstance(value, torch.Tensor) and value.shape == p.shape and (value[~mask] != 0).any()}  # fmt: skip
    return sorted(found)


def first_wrong(seen, due):
    return next(k for k, (one, other) in enumerate(zip(seen, due)) if one != other)


def of_case(seen, due):
    """The hint of the first odd case that is wrong."""
    return {2: "cut-decimals", 5: "zeros-not-counted"}.get(first_wrong(seen, due), "count")


def in_case(seen, due):
    k = first_wrong(seen, due)
    return {"expected": f"{due[k]} zeros", "got": f"{seen[k]} zeros", "where": list(ODD)[k]}


def fresh():
    """`smaller` from the first step on, as one vector with its zeros."""
    masks = [MASKS[0], torch.ones_like(BIAS, dtype=torch.bool), MASKS[1]]
    parts = smaller(OPTIMIZERS["AdamW"], dense=0).split([int(mask.sum()) for mask in masks])
    return torch.cat([torch.zeros_like(mask, dtype=torch.float64).masked_scatter(mask, one).flatten() for one, mask in zip(parts, masks)])  # fmt: skip


def masks_due(by_layer):
    return [[mask.double() for mask in true_masks(WEIGHTS, share, by_layer)] for share in SHARES]


def numbers(key):
    return lambda seen: [[mask.double() for mask in masks] for masks in seen[key]]


LOOKS = [
    Look("a mask for each weight", "form", form(true_masks(WEIGHTS, 0.5, False)), "mask-form"),
    Look("the weights are unchanged", "kept", True, "weights-written"),
    Value("all layers together: which weights stay", numbers(False), masks_due(False), "wrong-mask"),
    Value("each layer alone", numbers(True), masks_due(True), "wrong-mask"),
    Look("equal magnitudes", "ties", [round(5.5), 4, round(1.5)], "ties"),
    Look("how many, in odd cases", "odd", [counted(true_masks(ws, share, True)) for ws, share in ODD.values()], of_case,
         fields=in_case),
    Look("parameters that learn", "learnt", true_masks(WEIGHTS, 0.6, False), "wrong-mask"),
]  # fmt: skip
for name, make in OPTIMIZERS.items():
    LOOKS += [
        Look(f"{name}: zeros stay", f"{name} zeros", 0, "zeros-come-back", fields="n"),
        Look("in the optimizer's states too", f"{name} left", [], "states-stay", fields=lambda seen, due: {"names": ", ".join(seen)}),
        Value("the remaining weights learn as if the rest did not exist", name, smaller(make), "survivors"),
    ]  # fmt: skip
LOOKS += [
    Look("whatever its name is", "unknown", [], "states-stay", fields=lambda seen, due: {"names": ", ".join(seen)}),
    Look("written in place", "moved", [], "not-in-place", fields=lambda seen, due: {"names": ", ".join(seen)}),
    Look("states of another shape are unchanged", "others", "", "other-shapes"),
    Value("pruned before the first step", "fresh", fresh(), "survivors"),
]


def balise_5(magnitude_masks, hold_zeros):
    yield from judged(LOOKS, observe, magnitude_masks, hold_zeros)
