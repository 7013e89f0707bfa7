"""Answers to balise 5 of 22_compression: masks by magnitude, and zeros that stay."""

from tests.answers.bank import Bank

bank = Bank("22_compression", 5, whole=True)

# topk of what stays, and each tensor written over
TOPK = """
def magnitude_masks(weights, sparsity, by_layer=False):
    if by_layer:
        return [magnitude_masks([one], sparsity)[0] for one in weights]
    sizes = torch.cat([one.detach().reshape(-1).abs() for one in weights])
    stay = len(sizes) - round(len(sizes) * sparsity)
    flat = torch.zeros(len(sizes), dtype=torch.bool)
    flat[sizes.topk(stay).indices] = True
    masks, first = [], 0
    for one in weights:
        masks.append(flat[first : first + one.numel()].reshape(one.shape))
        first += one.numel()
    return masks


def hold_zeros(weights, masks, optimizer):
    for weight, mask in zip(weights, masks):
        weight.data.copy_(weight.data * mask)
        state = optimizer.state.get(weight, {})
        for name, value in state.items():
            if torch.is_tensor(value) and value.size() == weight.size():
                value.copy_(torch.where(mask, value, torch.zeros_like(value)))
"""
bank.text(None, TOPK)

# ranks instead of an order
RANKS = """
def magnitude_masks(weights, sparsity, by_layer=False):
    def stays(sizes):
        return sizes.argsort().argsort() >= round(sparsity * sizes.numel())

    with torch.no_grad():
        flat = [one.abs().flatten() for one in weights]
        found = [stays(one) for one in flat] if by_layer else stays(torch.cat(flat)).split([len(one) for one in flat])
        return [mask.reshape(one.shape) for mask, one in zip(found, weights)]


def hold_zeros(weights, masks, optimizer):
    with torch.no_grad():
        for weight, mask in zip(weights, masks):
            weight *= mask
            for value in optimizer.state[weight].values():
                if hasattr(value, "shape") and value.shape == mask.shape:
                    value[~mask] = 0
"""
bank.text(None, RANKS)
SHAPE = "isinstance(one, torch.Tensor) and one.shape == weight.shape"
bank.slip(
    None, (SHAPE, "getattr(one, 'shape', None) == weight.shape"), ("one.masked_fill_(~mask, 0)", "one.mul_(mask)")
)
bank.slip("nothing-returned", ("    return masks", "    masks"))

LOOP = "for one in (weight, *optimizer.state[weight].values()):"

bank.hint("mask-form", "Return a list of boolean masks, one for each weight and of its shape. You returned {got}.")
bank.slip("mask-form", ("dtype=torch.bool", "dtype=torch.float64"))
bank.slip("mask-form", ("part.view_as(one)", "part"))
bank.variant("mask-form", RANKS, ("mask.reshape(one.shape)", "one * mask.reshape(one.shape)"))

bank.hint(
    "weights-written",
    "You changed the weights. A mask only says which of them would stay: hold_zeros does the writing.",
)
bank.slip("weights-written", ("one.detach().abs()", "one.data.abs_()"))
bank.slip("weights-written", ("    return masks", "    for one, mask in zip(weights, masks):\n        one.data.mul_(mask)\n    return masks"))  # fmt: skip
bank.variant("weights-written", TOPK, ("reshape(-1).abs()", "reshape(-1).abs_()"))

bank.hint(
    "wrong-mask",
    "These are not the weights that stay. Remove round(sparsity · n) of them, those with the smallest |w|.",
)
bank.slip("wrong-mask", ("sizes.argsort()", "torch.randperm(len(sizes))"))
bank.variant("wrong-mask", RANKS, ("sizes.argsort().argsort()", "torch.arange(sizes.numel())"))

bank.hint("signed", "You remove the most negative weights first, although they are large. Compare magnitudes: use abs.")
bank.slip("signed", (".abs()", ""))
bank.variant("signed", TOPK, (".abs()", ""))

bank.hint("largest-go", "You remove the largest weights and keep the smallest. It is the other way round.")
bank.slip("largest-go", ("sizes.argsort()", "sizes.argsort(descending=True)"))
bank.variant("largest-go", TOPK, ("sizes.topk(stay)", "sizes.topk(stay, largest=False)"))

bank.hint("mask-inverted", "The masks are inverted: True means that the weight stays.")
bank.slip("mask-inverted", ("torch.ones_like(sizes", "torch.zeros_like(sizes"), ("] = False", "] = True"))
bank.variant("mask-inverted", RANKS, (">= round", "< round"))

bank.hint("share-that-stays", "You take `sparsity` as the share of weights that stay. It is the share of zeros.")
bank.slip("share-that-stays", ("round(sparsity * len(sizes))", "round((1 - sparsity) * len(sizes))"))
bank.variant("share-that-stays", TOPK, ("len(sizes) - round(len(sizes) * sparsity)", "round(len(sizes) * sparsity)"))

bank.hint("layers-alone", "Each layer loses the same share. Without by_layer, all weights are compared with "
                             "each other, and the layers lose different shares.")  # fmt: skip
bank.slip("layers-alone", ("if by_layer else [weights]", "if True else [weights]"))
bank.variant("layers-alone", RANKS, ("if by_layer else", "if True else"))

bank.hint(
    "layers-together",
    "With by_layer, each tensor is pruned separately to the same share. Here the weights are "
    "still compared across tensors.",
)
bank.slip("layers-together", ("[[one] for one in weights] if by_layer else [weights]", "[weights]"))
bank.variant("layers-together", RANKS, ("if by_layer else", "if False else"))

bank.hint("ties", "Weights of equal magnitude are all removed, or none of them. The shares are then wrong, and "
                     "a layer may lose all its weights. Go by the order (argsort, topk), not by a threshold.")  # fmt: skip
THRESHOLD = ("        mask = torch.ones_like(sizes, dtype=torch.bool)\n        mask[sizes.argsort()[: round(sparsity * len(sizes))]] = False\n",
             "        go = round(sparsity * len(sizes))\n        mask = sizes > (sizes.sort().values[go - 1] if go else -1)\n")  # fmt: skip
bank.slip("ties", THRESHOLD)
bank.slip("ties", THRESHOLD, ("sizes > (sizes.sort().values[go - 1] if go else -1)", "sizes >= (sizes.sort().values[go] if go < len(sizes) else torch.inf)"))  # fmt: skip
bank.variant("ties", TOPK, ("    flat = torch.zeros(len(sizes), dtype=torch.bool)\n    flat[sizes.topk(stay).indices] = True\n",
             "    flat = sizes >= (sizes.topk(stay).values.min() if stay else torch.inf)\n"))  # fmt: skip

bank.hint(
    "count",
    "The number of weights removed is not round(sparsity · n). At a sparsity of 0 it is none, at 1 all; beware of "
    "order[-0:], which is the whole list.",
)
bank.slip("count", ("round(sparsity * len(sizes))", "max(1, round(sparsity * len(sizes)))"))
bank.slip("count", ("sizes.argsort()[: round(sparsity * len(sizes))]", "sizes.argsort(descending=True)[-round(sparsity * len(sizes)) :]"))  # fmt: skip
bank.variant("count", TOPK, ("sizes.topk(stay).indices", "sizes.argsort()[-stay:]"))

bank.hint("cut-decimals", "The number of weights removed is not round(sparsity · n). Cutting off the decimals "
                             "loses one where sparsity · n comes out slightly too small.")  # fmt: skip
bank.slip("cut-decimals", ("round(sparsity", "int(sparsity"))
bank.variant("cut-decimals", TOPK, ("round(len(sizes) * sparsity)", "int(len(sizes) * sparsity)"))

bank.hint("zeros-not-counted", "Remove round(sparsity · n) of the n weights in total. Weights that are already "
                                  "zero count among them: they are the smallest.")  # fmt: skip
bank.slip("zeros-not-counted", ("mask = torch.ones_like(sizes, dtype=torch.bool)", "mask = sizes > 0"),
          ("sizes.argsort()[: round(", "sizes.where(mask, torch.inf).argsort()[: round("))  # fmt: skip
bank.variant("zeros-not-counted", TOPK, ("round(len(sizes) * sparsity)", "round(len(sizes) * sparsity) - int((sizes == 0).sum())"))  # fmt: skip

bank.hint("zeros-come-back", "{n} pruned weights are not zero after the last step. hold_zeros comes after each "
                                "step and writes zeros into the weights, in place: zeroing a copy, or only the "
                                "gradient, doesn't last.")  # fmt: skip
bank.slip("zeros-come-back", ("one.masked_fill_(~mask, 0)", "one = one.masked_fill(~mask, 0)"))
bank.slip("zeros-come-back", (LOOP, "for one in (weight.grad, *optimizer.state[weight].values()):"))
bank.slip("zeros-come-back", ("(~mask, 0)", "(mask, 0)"))
bank.variant("zeros-come-back", RANKS, ("weight *= mask", "weight = weight * mask"), ("optimizer.state[weight]", "optimizer.state.get(weight, {})"))  # fmt: skip

bank.hint("states-stay", "The weights are zero, but the optimizer still keeps states for them, under {names}. "
                            "They take memory, and would move the weights as soon as these are no longer held at "
                            "zero.")  # fmt: skip
bank.slip("states-stay", (LOOP, "for one in (weight,):"))
bank.slip("states-stay", (LOOP, 'for one in (weight, optimizer.state[weight].get("momentum_buffer")):'))
bank.slip("states-stay", (LOOP, 'for one in (weight, optimizer.state[weight].get("momentum_buffer"), optimizer.state[weight].get("exp_avg")):'))  # fmt: skip
bank.slip("states-stay", (LOOP, 'for one in (weight, *(optimizer.state[weight].get(name) for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"))):'))  # fmt: skip
bank.variant("states-stay", RANKS, ("for value in optimizer.state[weight].values():", "for name, value in optimizer.state[weight].items():"),
             ("if hasattr(value,", "if name[:3] in ('mom', 'exp') and hasattr(value,"))  # fmt: skip
bank.slip("states-stay", (LOOP, 'for one in (weight, *(value for name, value in optimizer.state[weight].items() if name in ("momentum_buffer", "exp_avg", "exp_avg_sq", "square_avg", "grad_avg", "max_exp_avg_sq", "sum"))):'))  # fmt: skip
bank.slip(
    "states-stay", ("and one.shape == weight.shape", "and one.shape == weight.shape and one.dtype == weight.dtype")
)
bank.variant("states-stay", TOPK, ("value.size() == weight.size()", "name == 'momentum_buffer'"))

bank.hint("survivors", "The zeros are right, but the remaining weights don't move as they should: their "
                          "optimizer state, or that of other parameters, was lost or changed.")  # fmt: skip
bank.slip("survivors", (LOOP, "for one in (weight, *(value for state in optimizer.state.values() for value in state.values())):"))  # fmt: skip
bank.slip("survivors", ("    for weight, mask", "    optimizer.state.clear()\n    for weight, mask"))
bank.slip(
    "survivors",
    (LOOP, LOOP + "\n            if isinstance(one, torch.Tensor) and one.ndim == 0:\n                one.zero_()"),
)
bank.slip("survivors", ("                one.masked_fill_(~mask, 0)\n", "                one.masked_fill_(~mask, 0)\n                if one is not weight:\n                    one.zero_()\n"))  # fmt: skip
bank.variant("survivors", TOPK, ("torch.where(mask, value, torch.zeros_like(value))", "torch.zeros_like(value)"))
bank.hint("not-in-place", "You replaced these by new tensors: {names}. Anything else that holds the old tensor, "
                             "such as a flat buffer, doesn't see the zeros. Write in place: masked_fill_, mul_, "
                             "copy_.")  # fmt: skip
bank.slip("not-in-place", ("one.masked_fill_(~mask, 0)", "one.data = one.masked_fill(~mask, 0)"))
bank.slip("not-in-place", ("                one.masked_fill_(~mask, 0)\n", "                one.masked_fill_(~mask, 0)\n        weight.data = weight.clone()\n"))  # fmt: skip
bank.variant(
    "not-in-place",
    TOPK,
    ("value.copy_(torch.where(mask, value, torch.zeros_like(value)))", "state[name] = value * mask"),
)
bank.variant("not-in-place", TOPK, ("weight.data.copy_(weight.data * mask)", "weight.data = weight.data * mask"))

bank.hint("other-shapes", "Some optimizers keep states whose shape differs from the weight's, such as averages "
                             "of rows. They have no entry for each weight: compare the shapes, and leave such "
                             "states alone. Here: {got}.")  # fmt: skip
bank.slip("other-shapes", (SHAPE, "isinstance(one, torch.Tensor) and one.dim() > 0"))
bank.slip("other-shapes", (SHAPE, "isinstance(one, torch.Tensor) and one.numel() == weight.numel()"),
          ("one.masked_fill_(", "one.view_as(weight).masked_fill_("))  # fmt: skip
bank.slip(
    "other-shapes",
    (SHAPE, "getattr(one, 'ndim', 0) == weight.ndim"),
    ("one.masked_fill_(~mask, 0)", "one.mul_(mask)"),
)
bank.variant(
    "other-shapes",
    RANKS,
    ('hasattr(value, "shape") and value.shape == mask.shape', 'hasattr(value, "shape") and value.dim()'),
)
