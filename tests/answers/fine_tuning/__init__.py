"""Answers to 21_fine_tuning, one file a balise."""

from tests.answers.bank import Bank
from tests.answers.fine_tuning.balise_1 import bank as balise_1
from tests.answers.fine_tuning.balise_2 import bank as balise_2
from tests.answers.fine_tuning.balise_3 import bank as balise_3
from tests.answers.fine_tuning.balise_4 import bank as balise_4
from tests.answers.fine_tuning.balise_5 import bank as balise_5
from tests.answers.fine_tuning.balise_6 import bank as balise_6
from tests.answers.fine_tuning.balise_7 import bank as balise_7
from tests.answers.fine_tuning.balise_8 import bank as balise_8

bank = Bank("21_fine_tuning")
bank.add(balise_1, balise_2, balise_3, balise_4, balise_5, balise_6, balise_7, balise_8)
