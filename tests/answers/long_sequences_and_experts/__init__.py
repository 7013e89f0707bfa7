"""Answers to 18_long_sequences_and_experts, one file a balise."""
