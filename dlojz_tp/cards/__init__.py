"""Verdicts and calm lines, as a notebook or a terminal shows them."""
