"""Answers to 03_tensor_cores_channels_last, one file for each of its parts."""

from tests.answers.tensor_cores_channels_last_arithmetic import bank as arithmetic
from tests.answers.tensor_cores_channels_last_formats import bank as formats
from tests.answers.tensor_cores_channels_last_padding import bank as padding
from tests.answers.tensor_cores_channels_last_step import bank as step
from tests.answers.tensor_cores_channels_last_tiles import bank as tiles

bank = arithmetic
bank.answers = [*arithmetic.answers, *tiles.answers, *padding.answers, *formats.answers, *step.answers]
