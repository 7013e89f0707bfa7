"""Balise 5."""


def balise_5(*answers):
    raise NotImplementedError
