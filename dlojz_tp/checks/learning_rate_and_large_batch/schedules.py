"""Balise 1."""


def balise_1(*answers):
    raise NotImplementedError
