"""Checks of 24_triton_kernels: vectors, softmax, layer norm, tiles, mixed images, attention, operators, choices."""
