"""Tables of predicted numbers, a row a case, compared with the truth in parts of something."""

from numbers import Real

import numpy as np
import torch

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.borrowed import out_of_reach
from dlojz_tp.judging.checking.looks import Value, within
from dlojz_tp.planner import Layout


def out_of_planner(*functions):
    """Inside, these functions of the planner raise Wrong: an answer is to write them."""
    return out_of_reach(lambda name: Wrong("planner-called", name=name), *functions)


def form(got, word, right):
    """`word` where `right` holds for all that came, else the first for which it does not, in words."""
    wrong = next((one for one in got if not right(one)), word)
    if isinstance(wrong, np.ndarray | torch.Tensor):
        wrong = wrong.tolist()
    return ", ".join(map(str, wrong)) if isinstance(wrong, dict | list | tuple) else wrong


def number(one):
    """For `form`: whether something is one number, of Python, NumPy or a tensor."""
    return isinstance(one, Real) or (isinstance(one, torch.Tensor | np.ndarray) and one.shape in ((), (1,)))


def numbers(count):
    """For `form`: whether something is `count` numbers."""
    return lambda one: isinstance(one, list | tuple | np.ndarray | torch.Tensor) and np.shape(one)[:1] == (count,)


def table(rows):
    """(rows, columns) float64."""
    return torch.tensor([[float(number) for number in row] for row in rows], dtype=torch.float64)


def said(layout):
    """What of a layout is not as usual, in words."""
    plain = vars(Layout())
    return ", ".join(f"{name} {value}" for name, value in vars(layout).items() if value != plain[name]) or "one rank"


def alone(columns, rules, other):
    """A hint: that of the columns with mistakes ({"their names": slug}), where nothing else is wrong; else `other`."""

    def hint(seen, due):
        if not seen.isfinite().all():
            return other
        off = ((seen - due).abs() > 1e-6).any(0).tolist()
        wrong = {name for name, one in zip(columns, off) if one}
        return next((slug for names, slug in rules.items() if wrong and wrong <= set(names.split())), other)

    return hint


def table_value(key, due, whole, hint, rows, columns, words="{:,.1f}"):
    """A Value of a table: each number counts in parts of `whole`; the largest difference is shown.

    rows, columns: words for each, for the verdict.
    """

    def fields(seen, right):
        k, j = divmod(int((seen - right).abs().nan_to_num(1e9).argmax()), len(columns))
        got = seen[k, j] * whole.expand_as(due)[k, j]
        return {"where": f"{columns[j]}: {rows[k]}", "expected": words.format(due[k, j].item()),
                "got": words.format(got.item())}  # fmt: skip

    return Value("", lambda observed: observed[key] / whole, due / whole, hint, holds=within(1e-6), fields=fields)
