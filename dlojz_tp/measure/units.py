"""Write bytes and seconds as people read them."""

import math


def human_bytes(count: float) -> str:
    """Write a number of bytes with the unit that suits it.

    Units are binary, as in PyTorch's own messages: 1 MiB = 1,048,576 bytes.

    Args:
        count: bytes, may be negative.

    Returns:
        A short text, for example ``"176.9 MiB"``.
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def human_seconds(seconds: float) -> str:
    """Write a duration with the unit that suits it, on three digits.

    Args:
        seconds: a duration in seconds.

    Returns:
        A short text, for example ``"12.3 ms"``.
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            value = seconds / size
            # Three digits mean something in a timing; more would be noise.
            decimals = max(0, 2 - math.floor(math.log10(abs(value))))
            return f"{value:.{decimals}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
