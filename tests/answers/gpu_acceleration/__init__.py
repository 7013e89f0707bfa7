"""Answers to 01_gpu_acceleration, one file a balise."""
