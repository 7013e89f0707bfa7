"""Answers to balise 4."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", whole=True)
