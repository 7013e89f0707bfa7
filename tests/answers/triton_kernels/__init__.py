"""Answers to 24_triton_kernels, one file a balise."""
