"""The checks of the practical works, one module each, named like the work without its number.

HINTS: {slug: text of the hint}. balise_N(answers): a generator that yields what it is about to look at and raises
`checking.Wrong(slug)`. See CONTRIBUTING.md.
"""
