"""Answers to 13_zero_under_the_hood, one file a balise."""
