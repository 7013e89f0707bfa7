"""Answers to 09_ddp, one file for each group of balises."""

from tests.answers.ddp.balise_9 import bank as everything
from tests.answers.ddp_files import bank as files
from tests.answers.ddp_layers import bank as layers
from tests.answers.ddp_start import bank

bank.answers += [*layers.answers, *files.answers]
bank.add(everything)
