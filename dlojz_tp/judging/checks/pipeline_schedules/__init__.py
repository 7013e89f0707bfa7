"""Checks of 16_pipeline_schedules: PyTorch's schedules, two written as data, the split backward, the search."""
