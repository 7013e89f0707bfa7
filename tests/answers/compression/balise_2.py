"""Answers to balise 2."""

from tests.answers.bank import Bank

bank = Bank("22_compression", whole=True)
