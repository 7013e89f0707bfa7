"""Answers to balise 2."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", whole=True)
