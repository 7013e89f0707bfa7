"""Checks of 18_long_sequences_and_experts: attention by blocks, over ranks, in windows; mixtures of experts."""
