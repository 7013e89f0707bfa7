"""Balise 6: two of every four weights, and an order of channels that saves more of them; groups sorted in Python."""

import itertools

import torch

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, Value, form, judged, same, tried
from dlojz_tp.launch.alarm import Overdue, deadline

SECONDS = 4  # of processor time, for what takes half a second
DRAWN = torch.Generator().manual_seed(24)


def drawn(*shape):
    return torch.randn(shape, generator=DRAWN, dtype=torch.float64)


WEIGHT = drawn(5, 12)
OTHERS = {
    "one group": drawn(1, 4),
    "a transposed matrix": drawn(8, 3).T,
    "negative weights": -drawn(2, 8).abs().repeat(2, 1),
}
TIES = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0], [-2, 2, 2, -2, 1, 1, 0, 1]])
UNEVEN = (3, 6), (4, 10), (4, 2)
FIRST, BIAS, SECOND = drawn(6, 4), drawn(6), drawn(3, 6)
ORDER = torch.tensor([2, 0, 5, 1, 3, 4])  # not its own inverse
X = drawn(7, 4)
UNLIKE = torch.tensor([[9.0, 8, 7, 6, 1, 0.5, 0.2, 0.1]]).double() * (
    1 + 0.1 * drawn(3, 8)
)  # the large ones in one group
SEARCHED = {"large columns side by side": UNLIKE, "8 columns": drawn(6, 8), "20 columns": drawn(3, 20),
            "equal weights": torch.ones(2, 8, dtype=torch.float64), "one group": drawn(3, 4),
            "a small gain": torch.tensor([[10.0, 9, 1, 0, 10, 0.99, 0, 0]]).double(),
            "a smaller gain": torch.tensor([[10.0, 9, 1, 0, 10, 0.9985, 0, 0]]).double(),
            "small weights": 1e-9 * UNLIKE}  # fmt: skip
PAIR = torch.tensor(
    [[3.0, 5, 5, 2, 2, 2, 1, 4], [4, 5, 0, 0, 2, 1, 0, 3], [5, 2, 0, 2, 0, 4, 4, 1]]
).double()  # 1 and 4 alone
for i, j in itertools.product(range(4), range(4, 8)):
    places = list(range(8))
    places[1], places[i], places[4], places[j] = i, 1, j, 4
    SEARCHED[f"only columns {i} and {j} gain"] = PAIR[:, places]
ROUNDED = torch.tensor([[10.0, 9, 1, 0, 10, 1 - 3e-7, 0, 0]]).double()  # an exchange saves a hundred-millionth more


def true_mask(weight):
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    for row, values in enumerate(weight.tolist()):
        for start in range(0, len(values), 4):
            for place in sorted(range(start, start + 4), key=lambda k: -abs(values[k]))[:2]:
                mask[row, place] = True
    return mask


def true_saved(weight):
    """The sum of the magnitudes that 2:4 keeps."""
    sizes = weight.abs().reshape(len(weight), -1, 4).sort(-1).values
    return sizes[..., 2:].sum().item()


def output(first, bias, second):
    return torch.relu(X @ first.T + bias) @ second.T


def in_words(order, columns):
    """ "an order", or what is wrong with it."""
    if not isinstance(order, torch.Tensor) or order.dtype != torch.int64 or order.shape != (columns,):
        return f"{form(order)}"
    return "an order" if order.sort().values.tolist() == list(range(columns)) else f"{order.tolist()}"


def best_exchange(weight, order):
    """(what an exchange of two columns would still save, in per cent; which): the largest."""
    now, gains = true_saved(weight[:, order]), [(0.0, (0, 0))]
    for i, j in itertools.combinations(range(len(order)), 2):
        other = order.clone()
        other[i], other[j] = order[j], order[i]
        gains.append((100 * (true_saved(weight[:, other]) / now - 1), (i, j)))
    return max(gains)


def observe(two_of_four, reorder, order_columns):
    given = WEIGHT.clone()
    got = two_of_four(given)
    yield {"form": form(got), "kept": same(given, WEIGHT), "mask": got}
    yield {"others": [two_of_four(one.clone() if one.is_contiguous() else one.T.clone().T) for one in OTHERS.values()]}
    yield {"ties": two_of_four(TIES.clone()).view(-1, 4).sum(1).tolist()}
    kinds = [tried(two_of_four, torch.ones(shape)) for shape in UNEVEN]
    yield {"uneven": [kind.split(":")[0] if isinstance(kind, str) else "taken" for kind in kinds]}
    given = FIRST.clone(), BIAS.clone(), SECOND.clone(), ORDER.clone()
    parts = reorder(*given)
    yield {"parts form": form(parts), "function": tried(output, *parts), "parts": list(parts)}
    yield {"parts kept": same(given, (FIRST, BIAS, SECOND, ORDER))}
    given = UNLIKE.clone()
    try:
        with deadline(SECONDS, of_processor=True):
            found = {name: order_columns(weight.clone()) for name, weight in SEARCHED.items()}
            order_columns(given)
    except Overdue:
        raise Wrong("exchanges-for-ever", seconds=SECONDS) from None
    yield {"searched": same(given, UNLIKE)}
    yield {"orders": [in_words(order, SEARCHED[name].shape[1]) for name, order in found.items()]}
    yield {"rounded": tried(lambda: order_columns(ROUNDED.clone()).tolist())}
    yield {"saved": [100 * true_saved(w[:, found[name]]) / true_saved(w) for name, w in SEARCHED.items()]}
    yield {"more": [best_exchange(w, found[name]) for name, w in SEARCHED.items()]}


def numbers(key):
    return lambda seen: [mask.double() for mask in seen[key]] if isinstance(seen[key], list) else seen[key].double()


def first_other(seen, due):
    return next(k for k, one in enumerate(seen) if one != due[k])


def where(names):
    def fields(seen, due):
        k = first_other(seen, due)
        return {"expected": due[k], "got": seen[k], "where": list(names)[k]}

    return fields


def most_left(seen, due):
    """Fields: the exchange that would save most."""
    gain, (i, j) = max(seen)
    name = list(SEARCHED)[seen.index((gain, (i, j)))]
    return {"expected": "no exchange gains more", "got": f"{gain:.2f} % more", "where": name, "i": i, "j": j, "gain": f"{gain:.2f}"}  # fmt: skip


def least(seen, due):
    worst = min(seen)
    return {"expected": "100 % or more", "got": f"{worst:.1f} %", "where": list(SEARCHED)[seen.index(worst)]}


PARTS = [FIRST[ORDER], BIAS[ORDER], SECOND[:, ORDER]]
LOOKS = [
    Look("a mask of the weight's shape", "form", form(true_mask(WEIGHT)), "mask-form"),
    Look("the weight is unchanged", "kept", True, "weight-written"),
    Value("two of every four inputs", numbers("mask"), true_mask(WEIGHT).double(), "wrong-pattern"),
    Value("other shapes, negative weights", numbers("others"), [true_mask(one).double() for one in OTHERS.values()], "wrong-pattern"),
    Look("equal magnitudes: exactly two", "ties", [2, 2, 2, 2], "ties"),
    Look("columns that can't be split into groups of four", "uneven", ["ValueError"] * 3,
         lambda seen, due: "remainder" if "taken" in seen else "other-error", fields=where([f"{shape}" for shape in UNEVEN])),
    Look("channels in another order: three tensors", "parts form", form(PARTS), "parts-form"),
    Value("the network computes the same", "function", output(FIRST, BIAS, SECOND), "other-function"),
    Value("the channels are in that order", "parts", PARTS, "other-order"),
    Look("the inputs are unchanged", "parts kept", True, "weight-written"),
    Look("the search doesn't change the weight", "searched", True, "weight-written"),
    Look("it returns an order", "orders", ["an order"] * len(SEARCHED), "not-an-order", fields=where(SEARCHED)),
    Look("which keeps no less than the first order", "saved", None, "saves-less",
         holds=lambda seen, due: min(seen) >= 100 - 1e-3, fields=least),
    Look("and no exchange of two columns keeps more", "more", None, "more-to-save",
         holds=lambda seen, due: max(seen)[0] <= 1e-3, fields=most_left),
    Look("the first order, where others gain only by rounding", "rounded", list(range(8)), "rounding-exchanged"),
]  # fmt: skip


def balise_6(two_of_four, reorder, order_columns):
    yield from judged(LOOKS, observe, two_of_four, reorder, order_columns)
