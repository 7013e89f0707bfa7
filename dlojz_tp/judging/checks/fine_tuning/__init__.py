"""Checks of 21_fine_tuning: a frozen body, cached features, rates by layer, thawing, LoRA, adapters, NF4, QLoRA."""
