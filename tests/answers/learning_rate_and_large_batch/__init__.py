"""Answers to 10_learning_rate_and_large_batch, one file a balise."""
