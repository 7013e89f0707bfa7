"""Balise 8: see `groups.py`."""

from dlojz_tp.judging.checks.tensor_slicing.groups import groups_of, neighbours_of, strided


def balise_8(tensor_group):
    """Groups of neighbours in worlds of 1 to 12 ranks: the calls recorded, then real groups on 3 and 4 ranks."""
    yield from groups_of(tensor_group, neighbours_of, strided, "across-nodes")
