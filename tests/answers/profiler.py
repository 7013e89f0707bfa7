"""Answers to 04_profiler, one file for each of its parts."""

from tests.answers.profiler_busy import bank as busy
from tests.answers.profiler_checklist import bank as checklist
from tests.answers.profiler_loop import bank as loop
from tests.answers.profiler_loops import bank as loops
from tests.answers.profiler_operators import bank as operators
from tests.answers.profiler_waits import bank as waits

bank = loop
bank.answers = [
    *loop.answers, *operators.answers, *waits.answers, *busy.answers, *loops.answers, *checklist.answers,
]  # fmt: skip
