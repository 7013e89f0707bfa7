"""An all-reduce in two halves."""


def halves(calls) -> bool:
    """Whether these are the two halves of an all-reduce."""
    return [call[0] for call in calls] == ["reduce_scatter", "all_gather"]
