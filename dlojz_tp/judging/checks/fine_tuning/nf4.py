"""NF4 in float64: the published table, and the scales of a weight's blocks, their mean and their steps."""

import torch

TABLE = torch.tensor([  # as printed in the paper (QLoRA, appendix E)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], dtype=torch.float64)  # fmt: skip
BLOCK, GROUP = 64, 256


def largest(weights):
    """The largest magnitude of each block, the mean of them, the step of each group: all in float64."""
    flat = weights.double().flatten()
    scales = torch.stack([flat[k : k + BLOCK].abs().max() for k in range(0, len(flat), BLOCK)] or [flat.sum()])[
        : len(flat)
    ]
    mean = scales.sum() / max(1, len(scales))
    far = (scales - mean).abs()
    steps = [far[k : k + GROUP].max() / 127 for k in range(0, len(scales), GROUP)]
    steps = torch.stack(steps) if steps else far
    return scales, mean, steps.where(steps > 1e-6 * mean, 0.0)  # of equal scales: rounding errors
