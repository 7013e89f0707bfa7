"""Answers to 01_gpu_acceleration, one file for each of its three parts."""

from tests.answers.gpu_acceleration_memory import bank as memory
from tests.answers.gpu_acceleration_metrics import bank as metrics
from tests.answers.gpu_acceleration_pipeline import bank as pipeline
from tests.answers.gpu_acceleration_step import bank as step

bank = step
bank.answers = [*pipeline.answers, *step.answers, *metrics.answers, *memory.answers]
