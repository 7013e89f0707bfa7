"""Small images for races: squares of 32 pixels cut from cells of the course's photographs, and some of any shape."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import made
from .places import DataDamaged, data_root

if TYPE_CHECKING:
    from torch import Tensor

WHAT = "the set of photo cells"
FORMAT = 1
MADE_BY = "make_photo_cells"
SPLITS = ("train", "val")
COUNTED = (*SPLITS, "varied")
FILES = ["train.npy", "val.npy", "varied_shapes.npy", "varied.npy"]
DEFAULTS = {"train": 100, "val": 100, "varied": 40, "seed": 0}  # of the command's options


@dataclass(frozen=True, eq=False)
class PhotoCells:
    """Small photographs of 15 classes. Training and validation come from different places of each photograph.

    train_x (N, 3, 32, 32) uint8, train_y (N,) int64; val_x, val_y in the same way; varied, a list of validation
    images (3, h, w) uint8 whose short side is 32 pixels and whose long side is 32, 40, 48, 56 or 64, varied_y (n,)
    int64; classes, the names; version, the start of the checksum of all files: the same for the same bytes.
    """

    train_x: "Tensor"
    train_y: "Tensor"
    val_x: "Tensor"
    val_y: "Tensor"
    varied: list["Tensor"]
    varied_y: "Tensor"
    classes: tuple[str, ...]
    version: str

    def __repr__(self) -> str:
        counts = f"{len(self.train_x)} train, {len(self.val_x)} val, {len(self.varied)} varied"
        return f"PhotoCells({len(self.classes)} classes, {counts}, version {self.version})"


def photo_cells() -> PhotoCells:
    """Load the photo cells: 1,500 training and 1,500 validation squares, 600 validation images of many shapes.

    Every byte is checked against the manifest.
    Raises DataMissing where the set is not made, DataDamaged where it is not whole.
    Source: made by data_scripts/make_photo_cells.py.
    """
    import numpy as np
    import torch

    root, manifest = photo_cells_manifest()
    try:
        train, val, shapes, flat = (torch.from_numpy(np.load(root / name, allow_pickle=False)) for name in FILES)
        sizes = [(3, *size) for size in shapes.tolist()]
        varied = [part.view(size) for part, size in zip(flat.split([3 * h * w for _, h, w in sizes]), sizes)]
    except (OSError, ValueError, RuntimeError) as error:
        raise _damaged(root, str(error), manifest) from error
    classes, count = tuple(manifest["classes"]), manifest["count"]
    labels = [torch.arange(len(classes)).repeat_interleave(count[name]) for name in COUNTED]
    if [len(images) for images in (train, val, varied)] != [len(each) for each in labels]:
        raise _damaged(root, "it holds another number of images than its manifest says", manifest)
    return PhotoCells(train, labels[0], val, labels[1], varied, labels[2], classes, manifest["sha256"][:12])


def photo_cells_manifest() -> tuple[Path, dict]:
    """Folder and manifest of the set; checks every byte, in some 20 ms. Raises as `photo_cells` does."""
    root = data_root() / "photo_cells"
    return root, made.checked(WHAT, root, MADE_BY, read, FILES, _options)


def read(folder: Path) -> dict:
    """Read the manifest of the set in `folder`. Raises FileNotFoundError or ValueError, as `made.read` does.

    Its keys: format, made_by, classes; count ({"train", "val", "varied"}: images a class) and seed, as asked; versions;
    bytes (of all files), sizes and crc32 (of each), sha256, manifest_sha256.
    """
    return made.read(folder, MADE_BY, FORMAT, _whole)


def _whole(manifest: dict) -> bool:
    counts, classes = [manifest["count"][name] for name in COUNTED], manifest["classes"]
    named = isinstance(classes, list) and bool(classes) and all(isinstance(name, str) for name in classes)
    return named and all(type(count) is int and count > 0 for count in counts)


def _damaged(root: Path, why: str, manifest: dict) -> DataDamaged:
    return made.damaged(WHAT, root, why, MADE_BY, _options(manifest))


def _options(manifest: dict) -> list[str]:
    return made.options({**manifest, **manifest["count"]}, DEFAULTS)


def command_of(manifest: dict) -> str:
    """The command that makes a set with this manifest."""
    return made.command_line(MADE_BY, _options(manifest))
