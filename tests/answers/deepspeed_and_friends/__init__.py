"""Answers to 20_deepspeed_and_friends, one file a balise."""

from tests.answers.bank import Bank
from tests.answers.deepspeed_and_friends.balise_1 import bank as balise_1
from tests.answers.deepspeed_and_friends.balise_2 import bank as balise_2
from tests.answers.deepspeed_and_friends.balise_3 import bank as balise_3
from tests.answers.deepspeed_and_friends.balise_4 import bank as balise_4
from tests.answers.deepspeed_and_friends.balise_5 import bank as balise_5
from tests.answers.deepspeed_and_friends.balise_6 import bank as balise_6
from tests.answers.deepspeed_and_friends.balise_7 import bank as balise_7

bank = Bank("20_deepspeed_and_friends")
bank.add(balise_1, balise_2, balise_3, balise_4, balise_5, balise_6, balise_7)
