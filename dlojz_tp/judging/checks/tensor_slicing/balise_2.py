"""Balise 2: see `linear.py`."""

from functools import partial

from dlojz_tp.judging.checks.tensor_slicing.layouts import in_groups_too, on_groups
from dlojz_tp.judging.checks.tensor_slicing.linear import LINEAR, case_of, linears
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each


def balise_2(column_part, ColumnLinear):  # noqa: N803
    """The part by itself; the layer with and without bias, in odd shapes, and sizes that do not divide."""
    yield LINEAR[0].claim
    yield from in_groups_too(partial(at_each, LINEAR), on_groups(linears, column_part, ColumnLinear, case_of("linear")))
