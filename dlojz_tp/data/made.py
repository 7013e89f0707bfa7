"""A set that a command of the course made: its manifest, its files, and what to say where it is not whole.

Standard library only.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from .places import DataDamaged, DataMissing, make_command

NAME = "manifest.json"


def read(folder: Path, made_by: str, version: int, whole: Callable[[dict], bool]) -> dict:
    """Read the manifest of the set in `folder`.

    Args: made_by, the command that writes such sets; version, the format's; whole, says whether the entries make sense.
    Raises FileNotFoundError where there is none, ValueError where it is not a whole manifest of this format.
    """
    text = (folder / NAME).read_bytes()
    try:
        manifest = json.loads(text)
        ours = manifest["made_by"] == made_by and manifest["format"] == version
        complete = ours and whole(manifest) and isinstance(manifest["sha256"], str)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{NAME} cannot be read ({type(error).__name__})") from error
    if not ours:
        raise ValueError(f"{NAME} is not one of {made_by}, format {version}")
    if not complete:
        raise ValueError(f"{NAME} is not complete")
    return manifest


def opened(what: str, root: Path, command: str, read_it: Callable[[Path], dict]) -> dict:
    """The manifest of the set that should be in `root`.

    Args: what, as in "the image set"; command, that makes it; read_it, as `read` does.
    Raises DataMissing where there is no set, DataDamaged where its manifest is not whole.
    """
    try:
        return read_it(root)
    except FileNotFoundError as error:
        if root.is_dir() and any(root.iterdir()):
            raise damaged(what, root, f"it has no {NAME}", command) from error
        raise DataMissing(f"{what} is not in {root}. Make it: {make_command(command)}") from error
    except (OSError, ValueError) as error:
        raise damaged(what, root, str(error), command) from error


def checksum(folder: Path, paths: list[str]) -> tuple[str, int]:
    """Compute the SHA-256 over names, lengths and bytes of all files in order, and their total length in bytes.

    Args: paths, relative to the folder. Raises OSError where a file cannot be read.
    """
    digest, total = hashlib.sha256(), 0
    for path in paths:
        content = (folder / path).read_bytes()
        # The length keeps two neighbouring files apart: bytes moved from one to the next change the sum.
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
        total += len(content)
    return digest.hexdigest(), total


def foreign_file(folder: Path, paths: list[str]) -> str | None:
    """Name the first file or folder that is neither one of `paths` nor the manifest; None if there is none."""
    files = {*paths, NAME}
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


def options(values: dict, defaults: dict) -> list[str]:
    """The options of the command that make a set of these values; those with their default value are left out."""
    words = []
    for name, default in defaults.items():
        value = values.get(name)
        numbers = value if isinstance(value, list) else [value]
        if value != default and all(type(number) in (int, float) and number >= 0 for number in numbers):
            words += [f"--{name}", "x".join(map(str, numbers))]
    return words


def damaged(what: str, root: Path, why: str, command: str, words: list[str] | None = None) -> DataDamaged:
    """The error for a set that is not whole, with the line that makes it again.

    Args: what, as in "the image set"; words, its options, or None where the manifest is what is damaged.
    """
    if words is None:  # the command replaces no folder without a manifest: only a person may remove it
        line = f"rm -r {shlex.quote(str(root))} && {make_command(command)}"
    else:
        line = " ".join([make_command(command), *words, "--force"])
    return DataDamaged(f"{what} in {root} is damaged: {why}. Make it again: {line}")
