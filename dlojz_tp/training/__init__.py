"""The red thread of 01 to 06: one training run, its precision, and what each work has gained."""
