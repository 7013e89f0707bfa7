"""Checks of 03_tensor_cores_channels_last: intensity and roofline, tiles and padding, memory formats."""
