"""The photo patches, the default image set, and the choice between them and ImageNet."""

from pathlib import Path

from . import cells, made, pretraining, searching, text
from . import manifest as mf
from .imagenet import imagenet, imagenet_folder
from .places import DataDamaged, ImageSet, data_root

WHAT = "the image set"
SMALLER = {  # the other sets with a manifest: small enough for every byte to be read each time
    "code_text": (text, text.code_text_manifest),
    "search_table": (searching, searching.search_table_manifest),
    "photo_cells": (cells, cells.photo_cells_manifest),
    "pretrained": (pretraining, pretraining.pretrained_manifest),
}


def photo_patches() -> ImageSet:
    """List the photo patches: JPEG files of about 500 x 375 pixels, one class a photograph.

    Checks that every file is there and as long as it was made; `verify("photo_patches")` reads them all.
    Raises DataMissing where the set is not made, DataDamaged where it is not whole.
    Source: made by data_scripts/make_photo_patches.py.
    """
    root, manifest = _checked()
    train, val = (tuple((root / path, label) for path, label in mf.file_names(manifest, split)) for split in mf.SPLITS)
    return ImageSet("photo_patches", root, tuple(manifest["classes"]), train, val)


def verify(name: str = "photo_patches") -> str:
    """Read every file of a made set and compare the checksums with the manifest's.

    Args: name, "photo_patches", "code_text", "search_table", "photo_cells" or "pretrained": the sets with a manifest.
    Returns what is worth knowing of a set that is whole: a file that the course did not make; empty where nothing is.
    Raises DataMissing, DataDamaged, or ValueError for another name.
    """
    if name in SMALLER:
        module, manifest_of = SMALLER[name]
        root, manifest = manifest_of()
        return made.remark(root, module.FILES, manifest, module.command_of(manifest))
    if name != "photo_patches":
        raise ValueError(f"no checksum is kept for {name!r}, only for photo_patches, {', '.join(SMALLER)}")
    root, manifest = _checked()
    if wrong := made.wrong_bytes(root, mf.paths(manifest), manifest):
        raise _damaged(root, wrong, manifest)
    return made.remark(root, mf.paths(manifest), manifest, made.command_line(mf.MADE_BY, mf.options(manifest)))


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
    if wrong := made.wrong_size(root, mf.paths(manifest), manifest):
        raise _damaged(root, wrong, manifest)
    return root, manifest


def _damaged(root: Path, why: str, manifest: dict) -> DataDamaged:
    return made.damaged(WHAT, root, why, mf.MADE_BY, mf.options(manifest))
