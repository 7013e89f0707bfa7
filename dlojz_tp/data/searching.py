"""The search table: networks trained with every configuration of a grid, so that a search takes a moment."""

import bisect
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from . import made
from .places import DataDamaged, data_root

if TYPE_CHECKING:
    import numpy as np

WHAT = "the search table"
FORMAT = 1
MADE_BY = "make_search_table"
FILES = ["right.npy"]
DEFAULTS = {"epochs": 27, "rates": 13, "seed": 0}  # of the command's options
SEEDS = 3
LOG = ("learning_rate", "batch_size", "width", "weight_decay")


def axes(rates: int) -> dict[str, tuple]:
    """Values of each hyperparameter; `rates` learning rates, equally far apart on the log axis."""
    return {
        "optimizer": ("sgd", "adamw"),
        "learning_rate": tuple(10 ** (4 * index / (rates - 1) - 4) for index in range(rates)),
        "momentum": (0.0, 0.9, 0.99),  # of sgd alone
        "batch_size": (16, 64, 256),
        "width": (8, 24, 72),
        "weight_decay": (1e-5, 1e-2),
    }


def configurations(axes: dict[str, tuple]) -> list[dict]:
    """Every configuration of the table, in its order; only one of sgd has a momentum."""
    every = [dict(zip(axes, values)) for values in product(*axes.values())]
    for config in every:
        if config["optimizer"] != "sgd" and config["momentum"] != axes["momentum"][0]:
            config.clear()
        elif config["optimizer"] != "sgd":
            del config["momentum"]
    return [config for config in every if config]


@dataclass(frozen=True, eq=False)
class SearchTable:
    """Accuracy of small networks on the digits: every configuration, some seeds, after each epoch.

    axes: {name: values}; right (configurations, seeds, epochs, 2) validation and test images that were told right,
    -1 once diverged; images, how many there are of each; seconds_an_epoch[optimizer][batch size][width], in the order
    of the axes, measured.
    """

    axes: dict[str, tuple]
    right: "np.ndarray"
    images: tuple[int, int]
    seconds_an_epoch: list

    def __repr__(self) -> str:
        return f"SearchTable({len(self.configurations)} configurations, {self.seeds} seeds, {self.epochs} epochs)"

    @property
    def epochs(self) -> int:
        """How long each was trained."""
        return self.right.shape[2]

    @property
    def seeds(self) -> int:
        """How often each was trained: with seeds 0, 1, ..."""
        return self.right.shape[1]

    @cached_property
    def configurations(self) -> list[dict]:
        """All configurations of the table: dicts without the values that are not active."""
        return configurations(self.axes)

    def nearest(self, config: dict) -> dict:
        """The configuration of the table that is nearest to any other, axis by axis (by ratio where it is a log axis).

        Raises ValueError where a value is missing, is no number, or has a name that the table does not know.
        """
        return dict(self.configurations[self._place(config)])

    def curve(self, config: dict, seed: int = 0) -> "np.ndarray":
        """Validation accuracy (epochs,) after each epoch, of the nearest configuration; NaN once it has diverged."""
        return self._curves[self._place(config), seed, :, 0].copy()

    def test(self, config: dict, seed: int = 0) -> "np.ndarray":
        """Test accuracy (epochs,), in the same way."""
        return self._curves[self._place(config), seed, :, 1].copy()

    def seconds(self, config: dict) -> float:
        """Seconds an epoch took, alone on one core of the machine that made the table."""
        near = self.nearest(config)
        first, second, third = (self.axes[name].index(near[name]) for name in ("optimizer", "batch_size", "width"))
        return self.seconds_an_epoch[first][second][third]

    @cached_property
    def _curves(self) -> "np.ndarray":
        import numpy as np

        return np.where(self.right < 0, np.nan, self.right / np.array(self.images))

    @cached_property
    def _borders(self) -> dict[str, list[float]]:
        """Where one value of an axis ends and the next one begins."""
        middle = {name: lambda a, b: math.sqrt(a * b) for name in LOG}
        middle |= {"momentum": lambda a, b: (a + b) / 2}
        return {name: [middle[name](*pair) for pair in zip(self.axes[name], self.axes[name][1:])] for name in middle}

    @cached_property
    def _places(self) -> dict[tuple, int]:
        """Row of the table by the places of a configuration's values on the axes."""
        found = {}
        for index, config in enumerate(self.configurations):
            found[tuple(self.axes[name].index(config[name]) for name in self.axes if name in config)] = index
        return found

    def _place(self, config: dict) -> int:
        names = [name for name in self.axes if name != "momentum" or config.get("optimizer") == "sgd"]
        try:
            if config.keys() - self.axes.keys():
                raise ValueError(f"the table has no {min(config.keys() - self.axes.keys())}: {', '.join(self.axes)}")
            if config["optimizer"] not in self.axes["optimizer"]:
                raise ValueError(f"the table has no optimizer {config['optimizer']!r}")
            places = [self.axes["optimizer"].index(config["optimizer"])]
            for name in names[1:]:
                if math.isnan(config[name]):
                    raise ValueError(f"{name} is NaN")
                places.append(bisect.bisect(self._borders[name], config[name]))
        except KeyError as error:
            raise ValueError(f"the configuration has no {error}: {config}") from None
        except TypeError:
            raise ValueError(f"a value of the configuration is no number: {config}") from None
        return self._places[tuple(places)]


def search_table() -> SearchTable:
    """Load the search table: 936 configurations, 3 seeds, 27 epochs.

    Every byte is checked against the manifest.
    Raises DataMissing where the table is not made, DataDamaged where it is not whole.
    Source: made by data_scripts/make_search_table.py.
    """
    import numpy as np

    root, manifest = search_table_manifest()
    grid = axes(manifest["rates"])
    try:
        right = np.load(root / FILES[0], allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _damaged(root, str(error), manifest) from error
    if right.shape != (len(configurations(grid)), SEEDS, manifest["epochs"], 2):
        raise _damaged(root, f"{FILES[0]} has the shape {right.shape}", manifest)
    return SearchTable(grid, right, tuple(manifest["images"][1:]), manifest["seconds"])


def search_table_manifest() -> tuple[Path, dict]:
    """Folder and manifest of the table, every byte checked: some milliseconds. Raises as `search_table` does."""
    root = data_root() / "search_table"
    return root, made.checked(WHAT, root, MADE_BY, read, FILES, _options)


def read(folder: Path) -> dict:
    """Read the manifest of the table in `folder`. Raises FileNotFoundError or ValueError, as `made.read` does.

    Its keys: format, made_by, epochs, rates, seed (as asked); images (train, validation, test); seconds an epoch
    (nested: optimizer, batch size, width); versions; bytes (of all files), sizes and crc32 (of each), sha256,
    manifest_sha256.
    """
    return made.read(folder, MADE_BY, FORMAT, _whole)


def _whole(manifest: dict) -> bool:
    numbers = [manifest["epochs"], manifest["rates"] - 1, *manifest["images"]]
    grid = axes(2)
    seconds = [time for by_batch in manifest["seconds"] for by_width in by_batch for time in by_width]
    return (
        all(type(number) is int and number > 0 for number in numbers)
        and len(manifest["images"]) == 3
        and len(seconds) == len(grid["optimizer"]) * len(grid["batch_size"]) * len(grid["width"])
        and all(type(time) is float and time > 0 for time in seconds)
    )


def _damaged(root: Path, why: str, manifest: dict) -> DataDamaged:
    return made.damaged(WHAT, root, why, MADE_BY, _options(manifest))


def _options(manifest: dict) -> list[str]:
    return made.options(manifest, DEFAULTS)


def command_of(manifest: dict) -> str:
    """The command that makes a set with this manifest."""
    return made.command_line(MADE_BY, _options(manifest))
