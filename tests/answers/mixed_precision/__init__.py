"""Answers to 02_mixed_precision, one file a balise."""
