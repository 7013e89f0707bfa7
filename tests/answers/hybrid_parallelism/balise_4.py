"""Answers to balise 4."""

from tests.answers.bank import Bank

bank = Bank("19_hybrid_parallelism", whole=True)
