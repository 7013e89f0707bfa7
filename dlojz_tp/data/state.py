"""Which data sets this machine has. Quick: no images are read, nothing is loaded."""

import importlib.util

from .cells import COUNTED, photo_cells_manifest
from .cifar import FILES, cifar10_folder
from .imagenet import class_folders, imagenet_folder
from .photos import photo_patches
from .places import DataDamaged, DataMissing
from .pretraining import pretrained_manifest
from .searching import SEEDS, axes, configurations, search_table_manifest
from .text import code_text_manifest


def status() -> list[tuple[str, str, str]]:
    """List the data sets as (name, "ready" | "missing" | "damaged", one line of detail)."""
    looks = {
        "photo_patches": _photos,
        "code_text": _text,
        "search_table": _table,
        "photo_cells": _cells,
        "pretrained": _pretrained,
        "digits": _digits,
        "imagenet": _imagenet,
        "cifar10": _cifar10,
    }
    return [(name, *_state(look)) for name, look in looks.items()]


def _state(look) -> tuple[str, str]:
    try:
        return "ready", look()
    except DataDamaged as error:
        return "damaged", str(error)
    except DataMissing as error:
        return "missing", str(error)
    except OSError as error:
        return "damaged", f"cannot be read: {error}"


def _photos() -> str:
    found = photo_patches()
    return f"{len(found.classes)} classes, {len(found.train)} train and {len(found.val)} val images in {found.root}"


def _text() -> str:
    root, manifest = code_text_manifest()
    train, val = (manifest["tokens"][split] for split in ("train", "val"))
    return f"{train:,} train and {val:,} val tokens, vocabulary of {manifest['vocab_size']} in {root}"


def _table() -> str:
    root, manifest = search_table_manifest()
    number = len(configurations(axes(manifest["rates"])))
    return f"{number} configurations, {SEEDS} seeds, {manifest['epochs']} epochs in {root}"


def _cells() -> str:
    root, manifest = photo_cells_manifest()
    train, val, varied = (len(manifest["classes"]) * manifest["count"][name] for name in COUNTED)
    return f"{train:,} train and {val:,} val squares, {varied:,} val images of many shapes in {root}"


def _pretrained() -> str:
    root, manifest = pretrained_manifest()
    number, epochs = len(manifest["classes"]), manifest["epochs"]
    return f"a network for {number} classes, {epochs} epochs, accuracy {manifest['accuracy']:.3f} in {root}"


def _digits() -> str:
    if importlib.util.find_spec("sklearn") is None:
        raise DataMissing("the digits come with scikit-learn: pip install scikit-learn")
    return "1,797 images of 8 x 8, shipped with scikit-learn"


def _imagenet() -> str:
    root = imagenet_folder()
    if root is None or not root.is_dir():
        absent = f"; no folder {root}" if root else ""
        raise DataMissing(f"optional: set DLOJZ_IMAGENET to a folder with train/ and val/{absent}")
    train, val = class_folders(root, "train"), class_folders(root, "val")
    if train != val:
        raise DataDamaged(f"train/ has {len(train)} class folders, val/ {len(val)}, not the same ones, in {root}")
    return f"{len(train)} classes in {root}"


def _cifar10() -> str:
    root = cifar10_folder()
    if root is None or not root.is_dir():
        absent = f"; no folder {root}" if root else ""
        raise DataMissing(f"optional: set DLOJZ_CIFAR10 to a folder with cifar-10-batches-py{absent}")
    absent = [name for name in FILES if not (root / name).is_file()]
    if absent:
        raise DataDamaged(f"{absent[0]} is missing in {root}: copy it again")
    return f"standard pickles in {root}"
