"""Balise 6."""


def balise_6(*answers):
    raise NotImplementedError
