"""ImageNet as a centre keeps it: train/CLASS/*.JPEG and val/CLASS/*.JPEG."""

import os
from pathlib import Path

from .places import DataDamaged, DataMissing, ImageSet, centre_folder

SUFFIXES = (".jpeg", ".jpg", ".png")


def imagenet_folder() -> Path | None:
    """Folder of ImageNet: `DLOJZ_IMAGENET`, else `$DSDIR/imagenet` if it exists, else None."""
    return centre_folder("DLOJZ_IMAGENET", "imagenet")


def imagenet() -> ImageSet:
    """List ImageNet (ILSVRC 2012); the class index comes from the sorted folder names.

    Takes a few seconds for its 1.28 million files: folders are listed, no file is opened.
    Raises DataMissing where there is none, DataDamaged where the folders are not laid out as needed.
    Source: https://www.image-net.org
    """
    root = imagenet_folder()
    if root is None or not root.is_dir():
        where = f"there is no folder {root}" if root else "no computing centre's folder is known"
        raise DataMissing(f"ImageNet: {where}. Set DLOJZ_IMAGENET to the folder that holds train/ and val/")
    classes = class_folders(root, "train")
    _same_classes(root, classes, class_folders(root, "val"))
    train, val = (_list(root / split, classes) for split in ("train", "val"))
    return ImageSet("imagenet", root, tuple(classes), train, val)


def class_folders(root: Path, split: str) -> list[str]:
    """Sorted names of the class folders of one split. Raises DataDamaged where there are none."""
    images, names = 0, []
    try:
        with os.scandir(root / split) as entries:
            for entry in entries:
                if entry.name.lower().endswith(SUFFIXES):
                    images += 1
                elif not entry.name.startswith(".") and entry.is_dir():
                    names.append(entry.name)
    except OSError as error:
        raise DataDamaged(f"ImageNet: cannot list {root / split} ({error.strerror}). Check DLOJZ_IMAGENET") from error
    if images and not names:
        raise DataDamaged(
            f"ImageNet: {root / split} holds {images} images but no class folders. Sort them into {split}/CLASS/ "
            "(one folder a class, named as in train/) and set DLOJZ_IMAGENET to that copy"
        )
    if not names:
        raise DataDamaged(f"ImageNet: {root / split} holds no class folders. Check DLOJZ_IMAGENET")
    return sorted(names)


def _same_classes(root: Path, train: list[str], val: list[str]) -> None:
    other = sorted(set(train) ^ set(val))
    if other:
        raise DataDamaged(
            f"ImageNet: train/ and val/ of {root} differ in {len(other)} class folders, first {other[0]}. "
            "Give both the same class folders"
        )


def _list(folder: Path, classes: list[str]) -> tuple[tuple[Path, int], ...]:
    files = []
    for label, name in enumerate(classes):
        try:
            with os.scandir(folder / name) as entries:  # never asks for a file's size or date: 1.28 million questions
                found = sorted(entry.path for entry in entries if entry.name.lower().endswith(SUFFIXES))
        except OSError as error:
            raise DataDamaged(f"ImageNet: cannot list {folder / name} ({error.strerror}). Check its rights") from error
        if not found:
            raise DataDamaged(f"ImageNet: {folder / name} holds no images. Remove that class or fill it")
        files += [(Path(path), label) for path in found]
    return tuple(files)
