"""Answers to 06_compile, one file a balise."""
