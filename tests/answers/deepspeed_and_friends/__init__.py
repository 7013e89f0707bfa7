"""Answers to 20_deepspeed_and_friends, one file a balise."""
