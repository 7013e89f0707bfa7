"""Answers to balise 4."""

from tests.answers.bank import Bank

bank = Bank("22_compression", whole=True)
