"""Answers to 11_hyperparameter_search, one file a balise."""

from tests.answers.bank import Bank
from tests.answers.hyperparameter_search.balise_1 import bank as balise_1
from tests.answers.hyperparameter_search.balise_2 import bank as balise_2
from tests.answers.hyperparameter_search.balise_3 import bank as balise_3
from tests.answers.hyperparameter_search.balise_4 import bank as balise_4
from tests.answers.hyperparameter_search.balise_5 import bank as balise_5
from tests.answers.hyperparameter_search.balise_6 import bank as balise_6

bank = Bank("11_hyperparameter_search")
bank.add(balise_1, balise_2, balise_3, balise_4, balise_5, balise_6)
