"""A loss and an accuracy as an answer returns them: a pair of Python's numbers."""


def pair(got):
    """A result, a list as a tuple."""
    return tuple(got) if isinstance(got, list) else got


def two_floats(got, _):
    """A look's `holds`: a loss and an accuracy, Python's numbers."""
    return isinstance(got, tuple) and len(got) == 2 and all(isinstance(value, float | int) for value in got)
