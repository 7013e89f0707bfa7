"""Balise 7: the loop with Lightning Fabric, on two ranks."""

from dlojz_tp.judging.checks.deepspeed_and_friends.ported import as_one_process

KNOWN = [("does not match the world size", "alone", {"n": 1}), ("you must call `.launch()`", "not-launched")]


def balise_7(train_with_fabric):
    yield from as_one_process(train_with_fabric, "lightning_fabric", "Fabric", "world_size", KNOWN)
