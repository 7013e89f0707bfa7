"""Answers to 17_tensor_slicing, one file a balise."""
