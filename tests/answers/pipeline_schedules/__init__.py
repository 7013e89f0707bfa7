"""Answers to 16_pipeline_schedules, one file a balise."""
