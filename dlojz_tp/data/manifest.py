"""The manifest of a made image set: what the set must hold, and whether it does. Standard library only."""

import hashlib
import json
import os
import re
from pathlib import Path

FORMAT = 1
MADE_BY = "make_photo_patches"
NAME = "manifest.json"
SPLITS = ("train", "val")
DEFAULTS = {"count": 64, "size": [500, 375], "seed": 0}  # of the command's options
MOST = 9999  # train files a class
_CLASS = re.compile(r"[A-Za-z0-9_]+")


def read(folder: Path) -> dict:
    """Read the manifest of the set in `folder`.

    Returns the manifest as a dict. Its keys: format, made_by, classes (list of str), count ({"train": N, "val": N},
    files a class), size ([width, height] in pixels), seed, quality, grain, split_at, versions, bytes (of all files),
    sha256.
    Raises FileNotFoundError where there is none, ValueError where it is not a whole manifest of this format.
    """
    text = (folder / NAME).read_bytes()
    try:
        manifest = json.loads(text)
        ours = manifest["made_by"] == MADE_BY and manifest["format"] == FORMAT
        classes, count = manifest["classes"], manifest["count"]
        whole = (
            all(isinstance(name, str) and _CLASS.fullmatch(name) for name in classes)
            and all(isinstance(count[split], int) and 0 < count[split] <= MOST for split in SPLITS)
            and isinstance(manifest["sha256"], str)
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{NAME} cannot be read ({type(error).__name__})") from error
    if not ours:
        raise ValueError(f"{NAME} is not one of {MADE_BY}, format {FORMAT}")
    if not whole or not classes:
        raise ValueError(f"{NAME} is not complete")
    return manifest


def file_names(manifest: dict, split: str) -> list[tuple[str, int]]:
    """List the files of one split, in the set's order, as (path relative to the set, class index)."""
    return [
        (f"{split}/{name}/{index:04d}.jpg", label)
        for label, name in enumerate(manifest["classes"])
        for index in range(manifest["count"][split])
    ]


def missing_file(folder: Path, manifest: dict) -> str | None:
    """Name the first file that the manifest promises and that is not there; None if all are. Lists folders only."""
    for split in SPLITS:
        present = {}
        for name in manifest["classes"]:
            try:
                present[name] = {entry.name for entry in (folder / split / name).iterdir()}
            except OSError:
                present[name] = set()
        for path, label in file_names(manifest, split):
            if path.rsplit("/", 1)[1] not in present[manifest["classes"][label]]:
                return path
    return None


def empty_file(folder: Path, manifest: dict) -> str | None:
    """Name the first file of the set that holds nothing, as a full disk leaves it; None if all do. Opens no file."""
    for split in SPLITS:
        for path, _ in file_names(manifest, split):
            try:
                if not os.stat(folder / path).st_size:  # noqa: PTH116  (a thousand files: the quick one)
                    return path
            except OSError:
                return path
    return None


def options(manifest: dict) -> list[str]:
    """The options of the command that make this set again; those with their default value are left out."""
    words = []
    for name, default in DEFAULTS.items():
        value = manifest["count"]["train"] if name == "count" else manifest.get(name)
        numbers = value if isinstance(value, list) else [value]
        if value != default and all(type(number) is int and number >= 0 for number in numbers):
            words += [f"--{name}", "x".join(map(str, numbers))]
    return words


def checksum(folder: Path, manifest: dict) -> tuple[str, int]:
    """Compute the SHA-256 over names, lengths and bytes of all files in order, and their total length in bytes.

    Raises OSError where a file cannot be read.
    """
    digest, total = hashlib.sha256(), 0
    for split in SPLITS:
        for path, _ in file_names(manifest, split):
            content = (folder / path).read_bytes()
            # The length keeps two neighbouring files apart: bytes moved from one to the next change the sum.
            digest.update(f"{path}\0{len(content)}\0".encode())
            digest.update(content)
            total += len(content)
    return digest.hexdigest(), total


def foreign_file(folder: Path, manifest: dict) -> str | None:
    """Name the first file or folder that is no part of the set; None if there is none."""
    files = {path for split in SPLITS for path, _ in file_names(manifest, split)} | {NAME}
    folders = {str(parent) for path in files for parent in Path(path).parents}
    for here, subfolders, names in os.walk(folder):
        relative = Path(here).relative_to(folder)
        for name in sorted(subfolders):
            # A link to a folder is never ours, whatever its name.
            if str(relative / name) not in folders or (Path(here) / name).is_symlink():
                return str(relative / name)
        for name in sorted(names):
            if str(relative / name) not in files:
                return str(relative / name)
    return None
