"""Answers to 13_zero_under_the_hood, one file for each of its parts."""

from tests.answers.zero_under_the_hood_checkpoint import bank as checkpoint
from tests.answers.zero_under_the_hood_clipping import bank as clipping
from tests.answers.zero_under_the_hood_formula import bank as formula
from tests.answers.zero_under_the_hood_half import bank as half
from tests.answers.zero_under_the_hood_stage1 import bank as stage1
from tests.answers.zero_under_the_hood_stage2 import bank as stage2
from tests.answers.zero_under_the_hood_stage3 import bank as stage3
from tests.answers.zero_under_the_hood_volume import bank as volume

PARTS = (
    formula,
    stage1,
    stage2,
    stage3,
    half,
    clipping,
    volume,
    checkpoint,
)  # a part more: its import above, its name here
bank = formula
bank.answers = [answer for part in PARTS for answer in part.answers]
