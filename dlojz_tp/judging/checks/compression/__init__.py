"""Checks of 22_compression: distillation, quantization, pruning, formats below 16 bits."""
