"""Checks of 01_gpu_acceleration: the input pipeline, the step and its metrics, the memory."""
