"""Handwritten digits, for convergence in seconds."""

from .places import DataMissing, TensorSet


def digits(seed: int = 0, val_share: float = 0.2) -> TensorSet:
    """Load the 1,797 digits: images (N, 1, 8, 8) float32 in [0, 1], labels (N,) int64.

    Args: seed of the split; val_share, the share of each class that goes to validation, between 0 and 1.
    The split is stratified and depends on nothing but the arguments.
    Raises DataMissing where scikit-learn is not installed, ValueError for a share that leaves a split empty.
    Source: scikit-learn, `load_digits` (UCI, Optical Recognition of Handwritten Digits, test part).
    """
    import numpy as np
    import torch

    if not 0.01 <= val_share <= 0.99:
        raise ValueError(f"val_share must be between 0.01 and 0.99, got {val_share}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataMissing("the digits come with scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    x_nchw = (bunch.images[:, None] / 16).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    rng = np.random.default_rng(seed)
    train, val = [], []
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        cut = round(len(members) * val_share)
        val.append(members[:cut])
        train.append(members[cut:])
    # Mixed once, so that a loop without shuffling does not see one digit after the other.
    train, val = (rng.permutation(np.concatenate(part)) for part in (train, val))
    tensors = (torch.from_numpy(part) for part in (x_nchw[train], labels[train], x_nchw[val], labels[val]))
    return TensorSet(*tensors, tuple(str(digit) for digit in range(10)))
