"""Answers to 07_data_augmentation, one file for each balise or group of balises."""

from tests.answers.bank import Bank
from tests.answers.data_augmentation.balise_1 import bank as balise_1
from tests.answers.data_augmentation.balise_3 import bank as balise_3
from tests.answers.data_augmentation.balise_4 import bank as balise_4
from tests.answers.data_augmentation.balise_6 import bank as balise_6
from tests.answers.data_augmentation.balise_7 import bank as balise_7
from tests.answers.data_augmentation_mixing import bank as mixing

bank = Bank("07_data_augmentation")
bank.add(balise_1, mixing, balise_3, balise_4, balise_6, balise_7)
