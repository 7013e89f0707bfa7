"""Answers to 19_hybrid_parallelism, one file a balise."""
