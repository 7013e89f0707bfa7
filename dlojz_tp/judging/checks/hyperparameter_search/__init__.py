"""Checks of 11_hyperparameter_search: from a grid to a study over many processes."""
