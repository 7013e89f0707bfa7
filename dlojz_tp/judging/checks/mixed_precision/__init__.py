"""Checks of 02_mixed_precision: the two steps, what half precision loses, the scaler, the masters, the bytes."""
