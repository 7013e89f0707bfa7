"""What a race to a target needs: numbered images that log each reading, and a log in MLPerf's format."""

import json
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dlojz_tp.data import cifar
from dlojz_tp.data.cells import PhotoCells

# A run's log shows which of these it broke
RULES = ("validation images", "test images", "sparse evaluation", "warm start", "clock", "seed")
MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)  # of ImageNet's three colours, in grey levels
AT_ONCE = 250  # images in a batch of an evaluation


class Log:
    """The events of one run, in the format of MLPerf's logs.

    events: dictionaries with "namespace", "time_ms", "event_type", "key", "value" and "metadata", in order of time.
    time_ms counts from wherever the clock starts; only differences say something.
    str() of a log is its text, a line of JSON for each event. What JSON has no form for, such as infinity, is a word.
    Args: clock, gives seconds.
    Source: mlcommons/logging, `mlperf_logging.mllog`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.events, self._clock = [], clock

    def __call__(self, key: str, value: object = None, **metadata: object) -> None:
        """Note an event now: its key, its value, and whatever else is worth noting of it.

        A key that ends with _start or _stop is one end of an interval.
        """
        kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rsplit("_", 1)[-1], "POINT_IN_TIME")
        event = {"namespace": "", "time_ms": 1000 * self._clock(), "event_type": kind, "key": key}
        self.events.append(event | {"value": value, "metadata": metadata})

    def __str__(self) -> str:
        return "\n".join(f":::MLLOG {json.dumps(_plain(event), default=str, allow_nan=False)}" for event in self.events)


def _plain(value: object) -> object:
    """The value with words in place of infinity and NaN, which json.dumps writes but no other reader takes."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


class Photos:
    """Numbered images of a race: first those to train on, then those to validate with. Each reading is logged.

    train, validation: ranges of numbers; classes: how many there are; log: the `Log` of the current run, replaced by a
    new one before each run.
    """

    def __init__(self, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], device="cpu"):
        """train, validation: images (n, 3, h, w) uint8 and labels (n,) int64. device: where all of them are kept."""
        self._images = torch.cat([train[0], validation[0]]).to(device)
        self._labels = torch.cat([train[1], validation[1]]).to(device)
        self._mean, self._std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
        self.train = range(len(train[0]))
        self.validation = range(len(train[0]), len(self._images))
        self.classes = int(self._labels.max()) + 1
        self.log = Log()

    def __repr__(self) -> str:
        return f"Photos({len(self.train)} to train on, {len(self.validation)} to validate with, {self.classes} classes)"

    @classmethod
    def of(cls, cells: PhotoCells, device="cpu") -> "Photos":
        """The squares of the photo cells."""
        return cls((cells.train_x, cells.train_y), (cells.val_x, cells.val_y), device)

    @classmethod
    def cifar10(cls, device="cpu") -> "Photos | None":
        """CIFAR-10, its test batch to validate with; None where no folder for it is named or found.

        Raises DataMissing or DataDamaged where the folder is not there or not whole.
        """
        if cifar.cifar10_folder() is None:
            return None
        images = cifar.cifar10()
        return cls((images.train_x, images.train_y), (images.val_x, images.val_y), device)

    def normalised(self, images: Tensor) -> Tensor:
        """Images (..., 3, h, w) uint8 as float32 with a mean near 0 and a deviation near 1, on the device."""
        return (images.to(self._mean.device).float() - self._mean) / self._std

    def read(self, numbers: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Images (b, 3, h, w) float32 and labels (b,) int64 to train on; logged as "train_read".

        numbers (b,): of images, those of `validation` too, for the log will tell.
        Raises IndexError for anything else: what is logged is what was read.
        """
        numbers = torch.as_tensor(numbers)
        whole = numbers.ndim == 1 and not (numbers.is_floating_point() or numbers.dtype == torch.bool)
        listed = numbers.tolist()
        if not whole or not all(0 <= number < len(self._images) for number in listed):
            raise IndexError(f"images are numbered from 0 to {len(self._images) - 1}, as whole numbers: a list of some")
        self.log("train_read", listed)
        return self._batch(numbers.long())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Accuracy over all validation images, 0 to 1; logged as "eval_read" and "eval_accuracy".

        The model, on the same device as the images, is called in the mode that it has.
        """
        numbers = torch.tensor(self.validation)
        self.log("eval_read", numbers.tolist())
        right = 0
        for some in numbers.split(AT_ONCE):
            x, y = self._batch(some)
            right += (model(x).argmax(1) == y).sum()
        accuracy = float(right.double() / len(numbers))
        self.log("eval_accuracy", accuracy)
        return accuracy

    def _batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        numbers = numbers.to(self._labels.device)
        return self.normalised(self._images[numbers]), self._labels[numbers]
