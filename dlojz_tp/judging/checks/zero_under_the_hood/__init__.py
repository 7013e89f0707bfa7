"""Checks of 13_zero_under_the_hood: the memory formula, shards, stages 1, 2 and 3, and what stands on them."""
