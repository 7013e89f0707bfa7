"""Answers to 23_inference, one file a balise."""
