"""Random numbers that are always the same, on the CPU alone."""

import contextlib

import torch


@contextlib.contextmanager
def seeded(seed: int):
    """Inside, the CPU's random numbers begin with this seed; then the caller's own go on.

    torch.manual_seed would seed GPUs too, and note for each kind of them where it was called from: 3 ms on a new rank.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
