"""Checks of 10_learning_rate_and_large_batch: schedules, optimizers, and what a large batch changes."""
