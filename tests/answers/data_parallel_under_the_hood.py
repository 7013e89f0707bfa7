"""Answers to 08_data_parallel_under_the_hood, one file for each of its parts."""

from tests.answers.data_parallel_under_the_hood_buckets import bank as buckets
from tests.answers.data_parallel_under_the_hood_overlap import bank as overlap
from tests.answers.data_parallel_under_the_hood_ring import bank as ring
from tests.answers.data_parallel_under_the_hood_start import bank as start
from tests.answers.data_parallel_under_the_hood_unused import bank as unused

bank = start
bank.answers = [*start.answers, *buckets.answers, *overlap.answers, *unused.answers, *ring.answers]
