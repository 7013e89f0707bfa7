"""Answers to 15_pipeline_under_the_hood, one file a balise."""
