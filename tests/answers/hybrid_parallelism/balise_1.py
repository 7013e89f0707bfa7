"""Answers to balise 1."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", whole=True)
