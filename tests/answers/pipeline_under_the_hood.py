"""Answers to 15_pipeline_under_the_hood, one file for each of its parts."""

from tests.answers.pipeline_under_the_hood_borrowed import bank as borrowed
from tests.answers.pipeline_under_the_hood_bubble import bank as bubble
from tests.answers.pipeline_under_the_hood_cut import bank as cut
from tests.answers.pipeline_under_the_hood_hybrid import bank as hybrid
from tests.answers.pipeline_under_the_hood_memory import bank as memory
from tests.answers.pipeline_under_the_hood_schedules import bank as schedules
from tests.answers.pipeline_under_the_hood_stashing import bank as stashing
from tests.answers.pipeline_under_the_hood_steps import bank as steps

bank = cut
parts = (cut, steps, schedules, memory, bubble, stashing, hybrid, borrowed)
bank.answers = [answer for part in parts for answer in part.answers]
