"""Answers to balise 1."""

from tests.answers.bank import Bank

bank = Bank("10_learning_rate_and_large_batch", whole=True)
