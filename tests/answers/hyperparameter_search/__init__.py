"""Answers to 11_hyperparameter_search, one file a balise."""
