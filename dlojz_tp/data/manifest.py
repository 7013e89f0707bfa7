"""The manifest of a made image set: what the set must hold, and whether it does. Standard library only."""

import re
from pathlib import Path

from . import made

FORMAT = 1
MADE_BY = "make_photo_patches"
SPLITS = ("train", "val")
DEFAULTS = {"count": 64, "size": [500, 375], "seed": 0}  # of the command's options
MOST = 9999  # train files a class
_CLASS = re.compile(r"[A-Za-z0-9_]+")


def read(folder: Path) -> dict:
    """Read the manifest of the set in `folder`.

    Returns the manifest as a dict. Its keys: format, made_by, classes (list of str), count ({"train": N, "val": N},
    files a class), size ([width, height] in pixels), seed, quality, grain, split_at, versions, bytes (of all files),
    sizes and crc32 (of each), sha256, manifest_sha256.
    Raises FileNotFoundError where there is none, ValueError where it is not a whole manifest of this format.
    """
    return made.read(folder, MADE_BY, FORMAT, _whole)


def _whole(manifest: dict) -> bool:
    classes, count = manifest["classes"], manifest["count"]
    named = bool(classes) and all(isinstance(name, str) and _CLASS.fullmatch(name) for name in classes)
    return named and all(isinstance(count[split], int) and 0 < count[split] <= MOST for split in SPLITS)


def paths(manifest: dict) -> list[str]:
    """List all files of the set, relative to its folder, in the order of the checksum."""
    return [path for split in SPLITS for path, _ in file_names(manifest, split)]


def file_names(manifest: dict, split: str) -> list[tuple[str, int]]:
    """List the files of one split, in the set's order, as (path relative to the set, class index)."""
    return [
        (f"{split}/{name}/{index:04d}.jpg", label)
        for label, name in enumerate(manifest["classes"])
        for index in range(manifest["count"][split])
    ]


def options(manifest: dict) -> list[str]:
    """The options of the command that make this set again; those with their default value are left out."""
    return made.options({**manifest, "count": manifest["count"]["train"]}, DEFAULTS)
