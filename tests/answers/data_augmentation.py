"""Answers to 07_data_augmentation, one file for each group of balises."""

from tests.answers.data_augmentation_boxes import bank as boxes
from tests.answers.data_augmentation_loss import bank as loss
from tests.answers.data_augmentation_mixing import bank

bank.answers += [*boxes.answers, *loss.answers]
