"""The time of a data-parallel step: buckets of gradients are all-reduced while backward goes on."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: total; computing (forward, backward, update); all-reduces; what of these is not hidden."""

    total: float
    compute: float
    communication: float
    exposed: float


def data_parallel_step(
    forward: float,
    backward: float,
    gradient_bytes: float,
    all_reduce: Callable[[float], float],
    *,
    update: float = 0.0,
    bucket_bytes: float = 25 * 2**20,
    overlap: bool = True,
) -> StepTimes:
    """Predict a step whose gradients are all-reduced bucket by bucket.

    Gradients come out evenly over the backward pass. A bucket's all-reduce starts when it is full and the bucket before
    it is through; the update waits for the last. Without overlap, all start at the end of backward.

    Args:
        forward, backward, update: seconds of computing of one rank.
        gradient_bytes: bytes of all gradients of one rank.
        all_reduce: bytes -> seconds of one all-reduce; 0 for one rank.
        bucket_bytes: capacity of a bucket; DDP's default is 25 MiB.
        overlap: whether all-reduces run beside backward.

    Returns:
        `StepTimes`.

    Raises:
        ValueError: for a capacity that is not positive, or negative times.

    Source: Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training", §3.2.
    """
    if bucket_bytes <= 0 or min(forward, backward, update, gradient_bytes) < 0:
        raise ValueError("times and bytes are 0 or more, a bucket's capacity is above 0")
    buckets = math.ceil(gradient_bytes / bucket_bytes)
    communication, free = 0.0, 0.0
    for k in range(buckets):
        full = min((k + 1) * bucket_bytes, gradient_bytes)
        ready = forward + backward * (full / gradient_bytes if overlap else 1.0)
        seconds = all_reduce(full - k * bucket_bytes)
        free = max(free, ready) + seconds
        communication += seconds
    compute = forward + backward + update
    total = max(forward + backward, free) + update
    return StepTimes(total, compute, communication, total - compute)


def scaling_efficiency(step: StepTimes) -> float:
    """Throughput of a rank in the world over that of a rank alone, from 0 to 1 (each rank's batch kept)."""
    return step.compute / step.total
