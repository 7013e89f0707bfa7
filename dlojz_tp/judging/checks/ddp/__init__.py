"""Checks of 09_ddp: training, metrics and batch norm over ranks, uneven work, checkpoints, a batch script, resuming."""
