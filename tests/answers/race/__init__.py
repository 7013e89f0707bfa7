"""Answers to 25_race, one file a balise."""
