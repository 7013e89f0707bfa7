"""Answers to balise 6."""

from tests.answers.bank import Bank

bank = Bank("23_inference", whole=True)
