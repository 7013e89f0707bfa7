"""Answers to 22_compression, one file a balise."""

from tests.answers.bank import Bank
from tests.answers.compression.balise_1 import bank as balise_1
from tests.answers.compression.balise_2 import bank as balise_2
from tests.answers.compression.balise_3 import bank as balise_3
from tests.answers.compression.balise_4 import bank as balise_4
from tests.answers.compression.balise_5 import bank as balise_5
from tests.answers.compression.balise_6 import bank as balise_6
from tests.answers.compression.balise_7 import bank as balise_7

bank = Bank("22_compression")
bank.add(balise_1, balise_2, balise_3, balise_4, balise_5, balise_6, balise_7)
