"""Balise 8."""


def balise_8(*answers):
    raise NotImplementedError
