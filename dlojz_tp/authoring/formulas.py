"""Formulas as MathML, for pages that run no script."""

from latex2mathml import converter


def mathml(tex: str, display: str = "inline") -> str:
    """A formula in LaTeX as MathML; display: "inline" or "block"."""
    made = converter.convert(tex, display=display)
    return made.replace("<mo>&#x02016;", '<mo stretchy="false">&#x02016;')  # of a norm: else one of two is higher
