"""Balise 6: the loop with Accelerate, on two ranks."""

from dlojz_tp.judging.checks.deepspeed_and_friends.ported import as_one_process


def balise_6(train_with_accelerate):
    yield from as_one_process(train_with_accelerate, "accelerate", "Accelerator", "num_processes")
