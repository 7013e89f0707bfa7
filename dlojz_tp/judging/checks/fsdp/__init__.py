"""Checks of 14_fsdp: what `fully_shard` is told, by what each rank holds, sends and computes."""
