"""Checks of 10_learning_rate_and_large_batch: schedules, optimizers, and what a large batch changes."""

from dlojz_tp.checks.learning_rate_and_large_batch.accumulation import balise_4
from dlojz_tp.checks.learning_rate_and_large_batch.adamw import balise_3
from dlojz_tp.checks.learning_rate_and_large_batch.finder import balise_2
from dlojz_tp.checks.learning_rate_and_large_batch.muon import balise_6
from dlojz_tp.checks.learning_rate_and_large_batch.noise import balise_7
from dlojz_tp.checks.learning_rate_and_large_batch.resuming import balise_8
from dlojz_tp.checks.learning_rate_and_large_batch.schedules import balise_1
from dlojz_tp.checks.learning_rate_and_large_batch.stepping import HINTS
from dlojz_tp.checks.learning_rate_and_large_batch.trust import balise_5

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7", "balise_8"]
