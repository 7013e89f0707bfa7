"""Answers to 09_ddp, one file a balise."""
