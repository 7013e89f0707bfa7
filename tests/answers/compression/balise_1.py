"""Answers to balise 1."""

from tests.answers.bank import Bank

bank = Bank("22_compression", whole=True)
