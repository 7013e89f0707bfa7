"""Answers to 12_large_models, one file a balise."""
