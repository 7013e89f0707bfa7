"""Checks of 04_profiler: the profile and what is read from it, waits, slow loops, items of the checklist."""
