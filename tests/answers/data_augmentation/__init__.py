"""Answers to 07_data_augmentation, one file a balise."""
