"""Answers to 05_dataloader, one file a balise."""
