"""Answers to 17_tensor_slicing, one file for each of its parts."""

from tests.answers.tensor_slicing_functions import bank as functions
from tests.answers.tensor_slicing_group_functions import bank as group_functions
from tests.answers.tensor_slicing_groups import bank as groups
from tests.answers.tensor_slicing_layers import bank as layers
from tests.answers.tensor_slicing_sequence import bank as sequence
from tests.answers.tensor_slicing_two_dimensions import bank as two_dimensions

bank = functions
bank.answers = [*functions.answers, *layers.answers]
bank.answers += [answer for part in (groups, group_functions, two_dimensions, sequence) for answer in part.answers]
