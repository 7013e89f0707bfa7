"""Balise 10: see `groups.py`."""

from dlojz_tp.judging.checks.tensor_slicing.groups import groups_of, neighbours_of, strided


def balise_10(data_group):
    """Groups across the tensor groups, in the same worlds."""
    yield from groups_of(data_group, strided, neighbours_of, "neighbours-again")
