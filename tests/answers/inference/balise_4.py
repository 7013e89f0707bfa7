"""Answers to balise 4."""

from tests.answers.bank import Bank

bank = Bank("23_inference", whole=True)
