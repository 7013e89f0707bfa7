"""Answers to 21_fine_tuning, one file a balise."""
