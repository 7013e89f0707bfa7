"""Answers to 16_pipeline_schedules, a file for each of its parts."""

from tests.answers.pipeline_schedules_choice import bank as choice
from tests.answers.pipeline_schedules_deepspeed import bank as deepspeed
from tests.answers.pipeline_schedules_order import bank as order
from tests.answers.pipeline_schedules_split import bank as split
from tests.answers.pipeline_schedules_step import bank as step

bank = step
bank.answers = [*step.answers, *order.answers, *split.answers, *choice.answers, *deepspeed.answers]
