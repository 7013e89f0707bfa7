"""Answers to 00_welcome, one file a balise."""
