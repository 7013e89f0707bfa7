"""Answers to 03_tensor_cores_channels_last, one file a balise."""
