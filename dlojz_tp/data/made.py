"""A set that a command of the course made: its manifest, its files, and what to say where it is not whole.

Standard library only.
"""

import hashlib
import json
import os
import shlex
import zlib
from collections.abc import Callable
from pathlib import Path

from .places import DataDamaged, DataMissing, make_command

NAME = "manifest.json"
SEAL = "manifest_sha256"  # of the rest of the manifest; sets made by older versions have none


class Newer(ValueError):
    """The set was made by a newer version of the course."""


def read(folder: Path, made_by: str, version: int, whole: Callable[[dict], bool]) -> dict:
    """Read the manifest of the set in `folder`.

    Args: made_by, the command that writes such sets; version, the format's; whole, says whether the entries make sense.
    Raises FileNotFoundError where there is none, ValueError where it is not a whole manifest of this format.
    """
    text = (folder / NAME).read_bytes()
    try:
        manifest = json.loads(text)
        if manifest["made_by"] == made_by and type(manifest["format"]) is int and manifest["format"] > version:
            raise Newer(f"{NAME} is of format {manifest['format']}, and this version of the course reads {version}")
        ours = manifest["made_by"] == made_by and manifest["format"] == version
        complete = ours and whole(manifest) and isinstance(manifest["sha256"], str) and type(manifest["bytes"]) is int
    except Newer:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{NAME} cannot be read ({type(error).__name__})") from error
    if not ours:
        raise ValueError(f"{NAME} is not one of {made_by}, format {version}")
    if not complete:
        raise ValueError(f"{NAME} is not complete")
    if manifest.get(SEAL, seal(manifest)) != seal(manifest):
        raise ValueError(f"{NAME} was changed: its own checksum differs")
    return manifest


def seal(manifest: dict) -> str:
    """The SHA-256 of a manifest without the entry that holds it."""
    rest = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def opened(what: str, root: Path, command: str, read_it: Callable[[Path], dict]) -> dict:
    """The manifest of the set that should be in `root`.

    Args: what, as in "the image set"; command, that makes it; read_it, as `read` does.
    Raises DataMissing where there is no set, DataDamaged where its manifest is not whole.
    """
    try:
        return read_it(root)
    except FileNotFoundError as error:
        if root.is_dir() and any(root.iterdir()):
            there = min(path.name for path in root.iterdir())
            raise damaged(what, root, f"it holds {there} and no {NAME}", command) from error
        raise DataMissing(f"{what} is not in {root}. Make it: {make_command(command)}") from error
    except Newer as error:
        todo = f"Update the course, or set DLOJZ_DATA to another folder. Make it there: {make_command(command)}"
        raise DataDamaged(f"{what} in {root} cannot be read: {error}. {todo}") from error
    except (OSError, ValueError) as error:
        raise damaged(what, root, str(error), command) from error


def checked(what: str, root: Path, command: str, read_it: Callable, paths: list[str], words: Callable) -> dict:
    """The manifest of the set in `root`, of which every byte is checked: for a set of a few files.

    Args: what, command and read_it, as `opened` takes them; paths, relative to root; words(manifest), the command's
    options. Raises DataMissing where there is no set, DataDamaged where it is not whole.
    """
    manifest = opened(what, root, command, read_it)
    if wrong := wrong_bytes(root, paths, manifest):
        raise damaged(what, root, wrong, command, words(manifest))
    return manifest


def sums(folder: Path, paths: list[str]) -> dict:
    """What a manifest says of its files, read from them.

    Args: paths, relative to the folder. Raises OSError where a file cannot be read.
    Returns {"sha256": over names, lengths and bytes of all files in order, "bytes": of all, "sizes" and "crc32": of
    each, in one line}.
    """
    digest, sizes, crcs = hashlib.sha256(), [], []
    for path in paths:
        content = (folder / path).read_bytes()
        # The length keeps two neighbouring files apart: bytes moved from one to the next change the sum.
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
        sizes.append(len(content))
        crcs.append(zlib.crc32(content))
    each = {"sizes": " ".join(map(str, sizes)), "crc32": " ".join(map(str, crcs))}
    return {"sha256": digest.hexdigest(), "bytes": sum(sizes)} | each


def wrong_size(folder: Path, paths: list[str], manifest: dict) -> str | None:
    """Say which file is not there or not as long as the manifest says; None if all are. Opens no file."""
    sizes = []
    for path in paths:
        try:
            sizes.append(os.stat(folder / path).st_size)  # noqa: PTH116  (a thousand files: the quick one)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if not sizes[-1]:  # as a full disk leaves it
            return f"{path} is empty"
    for path, found, due in zip(paths, sizes, manifest.get("sizes", "").split()):
        if str(found) != due:
            return f"{path} has {found:,} bytes and not {int(due):,}"
    if sum(sizes) != manifest["bytes"]:  # all that an older manifest can tell
        return f"its files have {sum(sizes):,} bytes together and not {manifest['bytes']:,}"
    return None


def wrong_bytes(folder: Path, paths: list[str], manifest: dict) -> str | None:
    """Say which file differs from what the manifest says; None if none does. Reads every file."""
    if wrong := wrong_size(folder, paths, manifest):
        return wrong
    try:
        found = sums(folder, paths)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    if found["sha256"] == manifest["sha256"]:
        return None
    pairs = zip(paths, found["crc32"].split(), manifest.get("crc32", "").split())
    return next(
        (f"{path} was changed: its checksum differs" for path, crc, due in pairs if crc != due),
        "the checksum differs from the manifest's",
    )


def remark(folder: Path, paths: list[str], manifest: dict, line: str) -> str:
    """What is worth knowing of a set that is whole; empty where there is nothing. `line`: the command that makes it."""
    if foreign := foreign_file(folder, paths):
        return f"it also holds {foreign}, which the course did not make and leaves alone"
    if SEAL not in manifest:
        return f"an older version made it: run this once, and {NAME} gets its own checksum: {line}"
    return ""


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


def command_line(command: str, words: list[str]) -> str:
    """The line that makes a set. Args: words, its options."""
    return " ".join([make_command(command), *words])


def damaged(what: str, root: Path, why: str, command: str, words: list[str] | None = None) -> DataDamaged:
    """The error for a set that is not whole, with the line that makes it again.

    Args: what, as in "the image set"; words, its options, or None where the manifest is what is damaged.
    """
    line = command_line(command, words or [])
    if not _own(root):
        todo = f"Ask whoever made it, or set DLOJZ_DATA to a folder of yours. Make it there: {line}"
    elif words is None:  # the command replaces no folder without a manifest: a person may want what is there
        todo = f"Make it again: mv {shlex.quote(str(root))} {shlex.quote(f'{root}.old')} && {line}"
    else:
        todo = f"Make it again: {line} --force"
    return DataDamaged(f"{what} in {root} is damaged: {why}. {todo}")


def _own(root: Path) -> bool:
    """Whether a set is the user's own, to be replaced; a shared one is not."""
    return os.getuid() in (0, root.stat().st_uid) and os.access(root.parent, os.W_OK)
