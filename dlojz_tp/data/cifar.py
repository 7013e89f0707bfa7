"""CIFAR-10 as a centre keeps it: the standard cifar-10-batches-py pickles, read without running what they hold."""

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from .places import DataDamaged, DataMissing, TensorSet, centre_folder

if TYPE_CHECKING:
    import numpy as np

BATCHES = tuple(f"data_batch_{index}" for index in range(1, 6))
FILES = (*BATCHES, "test_batch", "batches.meta")


def cifar10_folder() -> Path | None:
    """Folder of the pickles: `DLOJZ_CIFAR10`, `$DSDIR/CIFAR_10` or the like, or cifar-10-batches-py inside; or None."""
    folder = centre_folder("DLOJZ_CIFAR10", "CIFAR_10", "CIFAR10", "CIFAR-10", "cifar10", "cifar-10")
    inner = folder / "cifar-10-batches-py" if folder else None
    return inner if inner is not None and inner.is_dir() else folder


def cifar10() -> TensorSet:
    """Load CIFAR-10: images (N, 3, 32, 32) uint8, labels (N,) int64.

    Raises DataMissing where there is none, DataDamaged where a file is missing, cut short, or not plain data.
    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """
    import numpy as np
    import torch

    folder = cifar10_folder()
    if folder is None or not folder.is_dir():
        where = f"there is no folder {folder}" if folder else "no computing centre's folder is known"
        raise DataMissing(f"CIFAR-10: {where}. Set DLOJZ_CIFAR10 to the folder that holds cifar-10-batches-py")
    classes = tuple(_text(name) for name in _entry(folder / "batches.meta", "label_names", list))

    def load(names):
        images, labels = zip(*(_batch(folder / name, len(classes)) for name in names), strict=True)
        return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels))

    return TensorSet(*load(BATCHES), *load(["test_batch"]), classes)


class _ArraysOnly(pickle.Unpickler):
    """Reads plain values and numpy arrays. Any other name in the file is refused before anything is called."""

    def find_class(self, module, name):
        import numpy as np

        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("numpy", "ndarray"):
            return _Array
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")


class _Array:
    """Stands for the name numpy.ndarray, so that a file cannot call numpy's constructor with arguments of its own."""


def _empty_array(subtype, shape, dtype) -> "np.ndarray":
    """Stand for numpy's `_reconstruct`: an empty array, which the pickle then fills."""
    import numpy as np

    if subtype is not _Array:
        raise pickle.UnpicklingError("it builds something else than an array")
    return np.empty(0, dtype=np.uint8)


def _entry(path: Path, key: str, kind: type):
    """Read one entry of a pickled dict; Python 2 wrote its keys as bytes."""
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        value = content[key.encode()] if key.encode() in content else content[key]
    except OSError as error:
        raise DataDamaged(f"CIFAR-10: cannot read {path} ({error.strerror}). Copy it again") from error
    except Exception as error:  # a damaged pickle may raise anything
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataDamaged(f"CIFAR-10: {path} is not a CIFAR-10 file: {why}. Copy it again") from error
    if not isinstance(value, kind):
        raise DataDamaged(f"CIFAR-10: {path} is not a CIFAR-10 file: {key} is no {kind.__name__}. Copy it again")
    return value


def _batch(path: Path, classes: int) -> tuple["np.ndarray", "np.ndarray"]:
    """Read one batch: images (N, 3, 32, 32) uint8 and labels (N,) int64."""
    import numpy as np

    pixels, labels = _entry(path, "data", np.ndarray), _entry(path, "labels", list)
    fits = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * 32 * 32)
    if not fits or not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise DataDamaged(f"CIFAR-10: {path} does not hold rows of 3072 bytes with a label each. Copy it again")
    return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.int64)


def _text(name) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
