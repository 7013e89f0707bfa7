"""Answers to balise 6 of 22_compression: two of four, and an order of channels that saves more."""

from tests.answers.bank import Bank

bank = Bank("22_compression", 6, whole=True)

# ranks in a group; a gather; the best exchange of all in each round
BEST = """
def two_of_four(weight):
    rows, columns = weight.shape
    if columns % 4 != 0:
        raise ValueError("groups of four")
    groups = weight.detach().abs().unflatten(1, (columns // 4, 4))
    return (groups.argsort(-1, descending=True).argsort(-1) < 2).flatten(1)


def reorder(first, bias, second, order):
    return first.index_select(0, order), bias.index_select(0, order), second.index_select(1, order)


def order_columns(weight):
    n = weight.size(1)
    order = list(range(n))
    while True:
        best, now = None, saved(weight[:, order])
        most = now * (1 + 1e-6)
        for i in range(n):
            for j in range(i + 1, n):
                other = order[:]
                other[i], other[j] = other[j], other[i]
                value = saved(weight[:, other])
                if value > most:
                    best, most = other, value
        if best is None:
            return torch.tensor(order)
        order = best
"""
bank.text(None, BEST)

# loops over rows and groups; a stack of places that is emptied
LOOPS = """
def two_of_four(weight):
    if weight.shape[1] % 4:
        raise ValueError(weight.shape)
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    for k in range(0, weight.shape[1], 4):
        group = weight[:, k : k + 4].abs()
        order = group.argsort(dim=1)[:, 2:]
        mask[:, k : k + 4].scatter_(1, order, True)
    return mask


def reorder(first, bias, second, order):
    n = len(bias)
    P = torch.zeros(n, n, dtype=first.dtype)
    P[torch.arange(n), order] = 1
    return P @ first, P @ bias, second @ P.T


def order_columns(weight):
    w, order = weight.clone(), torch.arange(weight.shape[1])
    total = saved(w)
    again = True
    while again:
        again = False
        for i in range(len(order)):
            for j in range(4 * (i // 4 + 1), len(order)):
                w[:, [i, j]] = w[:, [j, i]]
                order[[i, j]] = order[[j, i]]
                now = saved(w)
                if now > total * 1.000001:
                    total, again = now, True
                else:
                    w[:, [i, j]] = w[:, [j, i]]
                    order[[i, j]] = order[[j, i]]
    return order
"""
bank.text(None, LOOPS)
bank.slip(None, ("reshape(weight.shape)", "view(weight.shape)"), ("second[:, order]", "second.T[order].T"))
bank.slip("nothing-returned", ("    return mask.scatter", "    mask.scatter"))

MASK = "mask.scatter(2, groups.topk(2).indices, True).reshape(weight.shape)"

bank.hint("mask-form", "Return a boolean mask with the weight's shape.")
bank.slip("mask-form", (MASK, MASK + " * weight"))
bank.slip("mask-form", (".reshape(weight.shape)", ""))
bank.variant("mask-form", BEST, (".flatten(1)\n\n", "\n\n"))

bank.hint("weight-written", "You changed an input. Work on a copy, or only on the order.")
bank.slip("weight-written", ("    return mask", "    weight *= mask.scatter(2, groups.topk(2).indices, True).reshape(weight.shape)\n    return mask"))  # fmt: skip
bank.slip("weight-written", ("groups = weight.abs()", "groups = weight.abs_()"))
bank.slip("weight-written", ("return first[order], bias[order], second[:, order]", "return first.copy_(first[order]), bias.copy_(bias[order]), second.copy_(second[:, order])"))  # fmt: skip
bank.variant("weight-written", BEST, ("return first.index_select(0, order),", "first[:] = first.index_select(0, order)\n    return first,"))  # fmt: skip
bank.variant("weight-written", LOOPS, ("w, order = weight.clone()", "w, order = weight"))

bank.hint(
    "wrong-pattern", "In every four consecutive inputs of a row, keep the two of largest magnitude. You keep others."
)
bank.slip("wrong-pattern", ("topk(2)", "topk(1)"))
bank.variant("wrong-pattern", BEST, ("argsort(-1) < 2", "argsort(-1) < 3"))

bank.hint(
    "signed", "You compare the weights with their sign, so a large negative weight is removed. Compare magnitudes."
)
bank.slip("signed", ("weight.abs().reshape", "weight.reshape"))
bank.variant("signed", LOOPS, ("weight[:, k : k + 4].abs()", "weight[:, k : k + 4]"))

bank.hint("smallest-stay", "You keep the two smallest and remove the two largest. It is the other way round.")
bank.slip("smallest-stay", ("topk(2)", "topk(2, largest=False)"))
bank.variant("smallest-stay", LOOPS, ("[:, 2:]", "[:, :2]"))

bank.hint(
    "along-outputs",
    "Your groups run along the outputs: four rows of a column. The four weights that share an instruction are "
    "consecutive inputs in one row.",
)
bank.slip("along-outputs", ("groups = weight.abs().reshape(len(weight), -1, 4)", "groups = weight.abs().T.reshape(len(weight), -1, 4)"), (MASK, "mask.scatter(2, groups.topk(2).indices, True).reshape(weight.T.shape).T.contiguous()"))  # fmt: skip
bank.variant("along-outputs", BEST, ("groups = weight.detach().abs().unflatten", "groups = weight.detach().abs().T.reshape(rows, columns).unflatten"), ("< 2).flatten(1)", "< 2).flatten(1).reshape(columns, rows).T.contiguous()"))  # fmt: skip

bank.hint("not-neighbours", "The four of a group are not consecutive inputs: one is taken from each quarter of "
                               "the row. Reshape to (…, groups, 4), with the four last.")  # fmt: skip
bank.slip("not-neighbours", ("reshape(len(weight), -1, 4)", "reshape(len(weight), 4, -1)"), ("mask.scatter(2, groups.topk(2).", "mask.scatter(1, groups.topk(2, 1)."))  # fmt: skip
bank.variant("not-neighbours", BEST, ("unflatten(1, (columns // 4, 4))", "unflatten(1, (4, columns // 4))"), ("argsort(-1, descending=True).argsort(-1)", "argsort(1, descending=True).argsort(1)"))  # fmt: skip

bank.hint(
    "no-groups",
    "You keep half of each row, anywhere in it. It has to be two in *every* four: the hardware looks no further.",
)
bank.slip("no-groups", ("reshape(len(weight), -1, 4)", "reshape(len(weight), 1, -1)"), ("topk(2)", "topk(weight.shape[1] // 2)"))  # fmt: skip
bank.variant("no-groups", BEST, ("unflatten(1, (columns // 4, 4))", "unflatten(1, (1, columns))"), ("< 2)", "< columns // 2)"))  # fmt: skip

bank.hint("ties", "Where magnitudes are equal, the number kept is not always two: {got} in the groups, in "
                     "order. Select indices (topk, argsort) instead of comparing with a threshold.")  # fmt: skip
bank.slip("ties", (MASK, "(groups >= groups.topk(2).values[..., 1:]).reshape(weight.shape)"))
bank.slip("ties", (MASK, "(groups > groups.sort(-1).values[..., 1:2]).reshape(weight.shape)"))
bank.variant("ties", LOOPS, ("        mask[:, k : k + 4].scatter_(1, order, True)\n", "        mask[:, k : k + 4] = group >= group.median(1, keepdim=True).values + 1e-9\n"))  # fmt: skip

bank.hint("remainder", "You accept {where}, though its columns can't be split into groups of four. The hardware "
                          "would refuse it: raise a ValueError.")  # fmt: skip
bank.slip("remainder", ("    if weight.shape[1] % 4:\n        raise ValueError(f\"{weight.shape[1]} inputs do not divide into groups of four\")\n",
                           "    if weight.shape[1] % 4:\n        return torch.ones_like(weight, dtype=torch.bool)\n"))  # fmt: skip
bank.slip("remainder", ("    if weight.shape[1] % 4:", "    if weight.numel() % 4:"), (MASK, "mask.scatter(2, groups.topk(2).indices, True).reshape(weight.shape)"), ("reshape(len(weight), -1, 4)", "reshape(1, -1, 4)"))  # fmt: skip
bank.variant("remainder", LOOPS, ("weight.shape[1] % 4:", "False:"), ("order = group.argsort(dim=1)[:, 2:]", "order = group.argsort(dim=1)[:, group.shape[1] // 2 :]"))  # fmt: skip

bank.hint(
    "other-error",
    "If the number of columns is not a multiple of four, your code fails with {got}, somewhere inside. A "
    "ValueError tells the caller what is wrong.",
)
bank.slip("other-error", ("    if weight.shape[1] % 4:", "    if False:"))
bank.slip("other-error", ("    if weight.shape[1] % 4:\n        raise ValueError(f\"{weight.shape[1]} inputs do not divide into groups of four\")\n", "    assert weight.shape[1] % 4 == 0\n"))  # fmt: skip
bank.variant("other-error", BEST, ("columns % 4 != 0", "columns < 4"))

bank.hint("parts-form", "reorder returns three tensors, first, bias and second, in their original shapes.")
bank.slip("parts-form", ("return first[order], bias[order], second[:, order]", "return first[order], second[:, order]"))
bank.variant(
    "parts-form", LOOPS, ("return P @ first, P @ bias, second @ P.T", "return P @ first, P @ bias, P @ second.T")
)

bank.hint("other-function", "The network computes something else. The rows of first, the entries of bias and "
                               "the columns of second belong together: put all three in the same order.")  # fmt: skip
bank.slip("other-function", ("first[order], bias[order], second[:, order]", "first, bias, second[:, order]"))
bank.slip("other-function", ("first[order], bias[order], second[:, order]", "first[order], bias[order], second"))
bank.slip("other-function", ("first[order], bias[order], second[:, order]", "first[order], bias, second[:, order]"))
bank.variant("other-function", BEST, ("bias.index_select(0, order)", "bias"))
bank.variant("inverse-order", LOOPS, ("second @ P.T", "second @ P"))

bank.hint("inverse-order", "The columns of second are in the inverse order, and the network computes something "
                              "else. All three take the same order.")  # fmt: skip
bank.slip("inverse-order", ("second[:, order]", "second[:, order.argsort()]"))
bank.variant("inverse-order", BEST, ("second.index_select(1, order)", "second.index_select(1, order.sort().indices)"))

bank.hint("other-order", "The network computes the same, but its channels are not in the requested order: the "
                            "new channel k is the old order[k].")  # fmt: skip
bank.slip("other-order", ("return first[order]", "order = order.argsort()\n    return first[order]"))
bank.slip("other-order", ("first[order], bias[order], second[:, order]", "first, bias, second"))
bank.variant("other-order", LOOPS, ("P[torch.arange(n), order] = 1", "P[order, torch.arange(n)] = 1"))

bank.hint(
    "not-an-order",
    "This is not an order of the columns. An order holds each number from 0 to inputs - 1 once, as integers of "
    "shape (inputs,). Yours is {got}.",
)
bank.slip("not-an-order", ("    return order\n", "    return weight[:, order]\n"))
bank.slip("not-an-order", ("other[i], other[j] = order[j], order[i]", "other[i] = order[j]"))
bank.variant("not-an-order", BEST, ("return torch.tensor(order)", "return order"))

bank.hint(
    "saves-less",
    "With your order, 2:4 keeps {got} of what it kept in the first order, which is less. Compare before you exchange.",
)
bank.slip("saves-less", (") > (1 + 1e-6) * saved", ") < (1 - 1e-6) * saved"))
bank.variant("saves-less", LOOPS, ("now > total * 1.000001", "now < total * 0.999999"))

bank.hint("more-to-save", "If the columns at {i} and {j} of your order were exchanged, 2:4 would keep {gain} % "
                             "more. Go through all pairs of columns in different groups, and repeat until a whole "
                             "round exchanges nothing. An exchange counts if it gains more than a millionth of "
                             "what is kept now: use no larger threshold, and no fixed number.")  # fmt: skip
bank.slip("more-to-save", ("    order, exchanged = torch.arange(weight.shape[1]), True\n", "    return torch.arange(weight.shape[1])\n    order, exchanged = torch.arange(weight.shape[1]), True\n"))  # fmt: skip
bank.slip("more-to-save", ("order, exchanged = other, True", "order = other"))
bank.slip("more-to-save", ("(1 + 1e-6)", "(1 + 1e-3)"))
bank.slip("more-to-save", ("i // 4 != j // 4 and", "i // 4 + 1 == j // 4 and"))
bank.slip("more-to-save", ("i // 4 != j // 4 and", "i // 3 != j // 3 and"))
bank.slip("more-to-save", ("            if i // 4 != j // 4", "            if i // 4 == j // 4"))
bank.slip("more-to-save", ("(1 + 1e-6)", "(1 + 1e-4)"))
bank.slip("saves-less", ("    order, exchanged = torch.arange(weight.shape[1]), True\n", "    return weight.abs().sum(0).argsort()\n    order, exchanged = torch.arange(weight.shape[1]), True\n"))  # fmt: skip
bank.variant("more-to-save", BEST, ("        order = best\n", "        return torch.tensor(best)\n"))
bank.variant("more-to-save", LOOPS, ("total, again = now, True", "total = now"))

bank.hint("exchanges-for-ever", "The search did not end within {seconds} s. If an exchange gains nothing, or if "
                                   "you compare it with an order other than the present one, it is made again and "
                                   "again.")  # fmt: skip
bank.slip("exchanges-for-ever", ("> (1 + 1e-6) * saved", ">= saved"))
bank.variant("exchanges-for-ever", BEST, ("if value > most:", "if value >= now:"))

bank.hint("rounding-exchanged", "You exchanged columns for a gain of a hundred-millionth. Rounding alone can "
                                   "look like that, and the search may go round in circles: require more than a "
                                   "millionth.")  # fmt: skip
bank.slip("rounding-exchanged", ("> (1 + 1e-6) * saved", "> saved"))
bank.variant("rounding-exchanged", BEST, ("most = now * (1 + 1e-6)", "most = now"))
