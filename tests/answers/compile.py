"""Answers to 06_compile, one file for each group of balises."""

from tests.answers.compile_breaks import bank as breaks
from tests.answers.compile_bytes import bank as traffic
from tests.answers.compile_c import bank
from tests.answers.compile_paying import bank as paying
from tests.answers.compile_recompiles import bank as recompiles
from tests.answers.compile_training import bank as training

bank.answers += [
    *traffic.answers, *breaks.answers, *recompiles.answers, *paying.answers, *training.answers
]  # fmt: skip
