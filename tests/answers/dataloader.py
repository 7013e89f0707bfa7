"""Answers to 05_dataloader, one file for each group of balises."""

from tests.answers.dataloader_files import bank as files
from tests.answers.dataloader_prefetch import bank as prefetch
from tests.answers.dataloader_seeds import bank as seeds
from tests.answers.dataloader_shards import bank as shards
from tests.answers.dataloader_stream import bank as stream
from tests.answers.dataloader_timeline import bank as timeline

bank = files
bank.answers = [
    *files.answers, *timeline.answers, *seeds.answers, *stream.answers, *prefetch.answers, *shards.answers
]  # fmt: skip
