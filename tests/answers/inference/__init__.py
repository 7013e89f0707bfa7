"""Answers to 23_inference, one file a balise."""

from tests.answers.bank import Bank
from tests.answers.inference.balise_1 import bank as balise_1
from tests.answers.inference.balise_2 import bank as balise_2
from tests.answers.inference.balise_3 import bank as balise_3
from tests.answers.inference.balise_4 import bank as balise_4
from tests.answers.inference.balise_5 import bank as balise_5
from tests.answers.inference.balise_6 import bank as balise_6
from tests.answers.inference.balise_7 import bank as balise_7

bank = Bank("23_inference")
bank.add(balise_1, balise_2, balise_3, balise_4, balise_5, balise_6, balise_7)
