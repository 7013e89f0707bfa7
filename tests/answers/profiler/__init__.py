"""Answers to 04_profiler, one file a balise."""
