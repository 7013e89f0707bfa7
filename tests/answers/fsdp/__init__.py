"""Answers to 14_fsdp, one file a balise."""
