"""Text from an answer or from the name of a file, for a terminal: it may not move the cursor or hide other lines."""

import re

# control characters, and those that turn the direction of writing; a surrogate is a byte that is no UTF-8
ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: object) -> str:
    """The text with odd characters as Python and JSON write them; its tabs and ends of lines stay."""
    return ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def one_line(text: object) -> str:
    """As `plain`, for the name of a file, which may have an end of line in it."""
    return plain(text).replace("\n", "\\u000a").replace("\t", "\\u0009")
