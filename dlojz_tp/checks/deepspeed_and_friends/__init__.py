"""Checks of 20_deepspeed_and_friends: batch sizes, DeepSpeed's engine, a fused and a 1-bit optimizer, Accelerate and Fabric."""

from dlojz_tp.checks.deepspeed_and_friends.batches import balise_1
from dlojz_tp.checks.deepspeed_and_friends.configuration import balise_2
from dlojz_tp.checks.deepspeed_and_friends.engine import balise_3
from dlojz_tp.checks.deepspeed_and_friends.fused import balise_4
from dlojz_tp.checks.deepspeed_and_friends.one_bit import balise_5
from dlojz_tp.checks.deepspeed_and_friends.with_accelerate import balise_6
from dlojz_tp.checks.deepspeed_and_friends.with_fabric import balise_7

HINTS = {}

__all__ = ["HINTS", "balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6", "balise_7"]
