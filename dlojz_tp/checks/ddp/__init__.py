"""Checks of 09_ddp: training, metrics and batch norm over ranks, uneven work, checkpoints, a batch script, resuming."""

from dlojz_tp.checking import merged
from dlojz_tp.checks.ddp import (
    accumulation,
    balance,
    batch_norm,
    checkpoint,
    evaluation,
    heads,
    script,
    script_run,
    training,
    world,
)
from dlojz_tp.checks.ddp.accumulation import balise_5
from dlojz_tp.checks.ddp.balance import balise_6
from dlojz_tp.checks.ddp.batch_norm import balise_3
from dlojz_tp.checks.ddp.checkpoint import balise_7
from dlojz_tp.checks.ddp.evaluation import balise_2
from dlojz_tp.checks.ddp.everything import balise_9
from dlojz_tp.checks.ddp.heads import balise_4
from dlojz_tp.checks.ddp.script import balise_8
from dlojz_tp.checks.ddp.training import balise_1

__all__ = ["balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7", "balise_8", "balise_9"]

HINTS = merged(world, training, evaluation, batch_norm, heads, accumulation, balance, checkpoint, script, script_run)
