"""Balise 7."""


def balise_7(*answers):
    raise NotImplementedError
