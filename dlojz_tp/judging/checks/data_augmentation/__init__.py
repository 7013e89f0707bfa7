"""Checks of 07_data_augmentation: RandAugment's place, MixUp and CutMix for whole batches, the loss, the step."""
