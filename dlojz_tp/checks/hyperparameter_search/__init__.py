"""Checks of 11_hyperparameter_search: from a grid to a study over many processes."""

from dlojz_tp.checks.hyperparameter_search.asynchronous import balise_3
from dlojz_tp.checks.hyperparameter_search.bayesian import balise_4
from dlojz_tp.checks.hyperparameter_search.halving import balise_2
from dlojz_tp.checks.hyperparameter_search.population import balise_5
from dlojz_tp.checks.hyperparameter_search.space import balise_1
from dlojz_tp.checks.hyperparameter_search.study import balise_6

__all__ = ["balise_1", "balise_2", "balise_3", "balise_4", "balise_5", "balise_6"]

HINTS = {}
