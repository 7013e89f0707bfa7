"""Checks of 12_large_models: patches, attention, memory, recomputation, the largest model of a card."""
