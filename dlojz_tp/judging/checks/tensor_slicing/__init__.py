"""Checks of 17_tensor_slicing: two conjugate functions, sliced layers, a sliced transformer, groups, 2D parallelism."""
