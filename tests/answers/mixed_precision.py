"""Answers to 02_mixed_precision, one file for each part."""

from tests.answers.mixed_precision_bf16 import bank as bf16
from tests.answers.mixed_precision_fp16 import bank as fp16
from tests.answers.mixed_precision_masters import bank as masters
from tests.answers.mixed_precision_memory import bank as memory
from tests.answers.mixed_precision_scaler import bank as scaler
from tests.answers.mixed_precision_underflow import bank as underflow

bank = fp16
bank.answers = [
    *fp16.answers, *bf16.answers, *underflow.answers, *scaler.answers, *masters.answers, *memory.answers,
]  # fmt: skip
