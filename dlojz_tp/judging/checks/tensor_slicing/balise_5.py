"""Balise 5: see `linear.py`."""

from dlojz_tp.judging.checks.tensor_slicing.linear import feed_forward


def balise_5(GatheredFeedForward):  # noqa: N803
    """Two column-cut layers: right, with two communications each way."""
    yield from feed_forward("gathered", GatheredFeedForward)
