"""Checks of 15_pipeline_under_the_hood: cuts, messages, steps, schedules and their execution, memory, asynchrony."""
