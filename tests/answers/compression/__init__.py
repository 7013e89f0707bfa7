"""Answers to 22_compression, one file a balise."""
