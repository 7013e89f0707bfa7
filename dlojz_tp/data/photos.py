"""The photo patches, the default image set, and the choice between them and ImageNet."""

import os
from pathlib import Path

from . import made
from . import manifest as mf
from .imagenet import imagenet, imagenet_folder
from .places import DataDamaged, ImageSet, data_root
from .searching import search_table_manifest
from .text import code_text_manifest

WHAT = "the image set"


def photo_patches() -> ImageSet:
    """List the photo patches: JPEG files of about 500 x 375 pixels, one class a photograph.

    Checks the manifest against a listing of the folders; `verify("photo_patches")` reads every file.
    Raises DataMissing where the set is not made, DataDamaged where it is not whole.
    Source: made by data_scripts/make_photo_patches.py.
    """
    root, manifest = _checked()
    train, val = (tuple((root / path, label) for path, label in mf.file_names(manifest, split)) for split in mf.SPLITS)
    return ImageSet("photo_patches", root, tuple(manifest["classes"]), train, val)


def verify(name: str = "photo_patches") -> None:
    """Read every file of a made set and compare the checksum with the manifest's.

    Args: name, "photo_patches", "code_text" or "search_table": the sets with a manifest.
    Raises DataMissing, DataDamaged, or ValueError for another name.
    """
    if name in ("code_text", "search_table"):
        {"code_text": code_text_manifest, "search_table": search_table_manifest}[name]()  # reads every byte each time
        return
    if name != "photo_patches":
        raise ValueError(f"no checksum is kept for {name!r}; only 'photo_patches', 'code_text' and 'search_table' can")
    root, manifest = _checked()
    try:
        found, _ = made.checksum(root, mf.paths(manifest))
    except OSError as error:
        raise _damaged(root, f"{error.filename} cannot be read ({error.strerror})", manifest) from error
    if found != manifest["sha256"]:
        raise _damaged(root, _cut_short(root, manifest) or "the checksum differs from the manifest's", manifest)


def image_set() -> ImageSet:
    """Choose the image set: ImageNet at scale "full" where the centre has it, else the photo patches.

    Raises DataMissing or DataDamaged as they do. A folder named by `DLOJZ_IMAGENET` is never passed over in silence.
    """
    from dlojz_tp.scale import scale

    folder = imagenet_folder()
    return imagenet() if scale() == "full" and folder is not None else photo_patches()


def _checked() -> tuple[Path, dict]:
    root = data_root() / "photo_patches"
    manifest = made.opened(WHAT, root, mf.MADE_BY, mf.read)
    missing = mf.missing_file(root, manifest)
    if missing:
        raise _damaged(root, f"{missing} is missing", manifest)
    empty = mf.empty_file(root, manifest)
    if empty:
        raise _damaged(root, f"{empty} is empty", manifest)
    return root, manifest


def _damaged(root: Path, why: str, manifest: dict) -> DataDamaged:
    return made.damaged(WHAT, root, why, mf.MADE_BY, mf.options(manifest))


def _cut_short(root: Path, manifest: dict) -> str | None:
    """Name the first file that does not end as a JPEG file ends: the usual damage."""
    for path in mf.paths(manifest):
        with (root / path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2))
            if file.read() != b"\xff\xd9":
                return f"{path} is cut short"
    return None
