"""Checks of 23_inference: a cache of keys and values, its blocks, a scheduler, speculation, several cards."""
