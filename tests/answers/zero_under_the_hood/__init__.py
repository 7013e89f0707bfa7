"""Answers to 13_zero_under_the_hood: one file a balise where its check is a table of looks, else one for each part."""

from tests.answers.bank import Bank
from tests.answers.zero_under_the_hood.balise_1 import bank as balise_1
from tests.answers.zero_under_the_hood.balise_2 import bank as balise_2
from tests.answers.zero_under_the_hood.balise_3 import bank as balise_3
from tests.answers.zero_under_the_hood.balise_4 import bank as balise_4
from tests.answers.zero_under_the_hood.balise_5 import bank as balise_5
from tests.answers.zero_under_the_hood.balise_6 import bank as balise_6
from tests.answers.zero_under_the_hood.balise_7 import bank as balise_7
from tests.answers.zero_under_the_hood.balise_8 import bank as balise_8
from tests.answers.zero_under_the_hood.balise_9 import bank as balise_9
from tests.answers.zero_under_the_hood_checkpoint import bank as checkpoint

bank = Bank("13_zero_under_the_hood")
bank.add(balise_1, balise_2, balise_3, balise_4, balise_5, balise_6, balise_7, balise_8, checkpoint, balise_9)
