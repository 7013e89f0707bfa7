"""Answers to 09_ddp, one file for each group of balises."""

from tests.answers.ddp_files import bank as files
from tests.answers.ddp_layers import bank as layers
from tests.answers.ddp_start import bank

bank.answers += [*layers.answers, *files.answers]
