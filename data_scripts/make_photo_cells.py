"""Make the small images of the race: squares and rectangles cut from cells of the course's photographs.

    python data_scripts/make_photo_cells.py [--out DIR] [--train 100] [--val 100] [--varied 40] [--seed 0] [--force]

A class is a photograph. Each photograph is divided into 4 x 3 cells, and every third cell is for validation: the two
parts share no pixel, and both come from all over the photograph. The same arguments give the same bytes on the same
library versions. About a second; nothing is downloaded.
Exit status: 0 done or already there, 1 could not be made, 2 wrong arguments.
"""

import argparse
import io
import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "data_scripts")]

from make_photo_patches import PHOTOS, library_versions, load_photo  # noqa: E402

from dlojz_tp.data import cells, making  # noqa: E402

COLUMNS, ROWS = 4, 3
SIDE = 32  # pixels of a square, and of a rectangle's short side
STRIDE = 8  # a rectangle's long side is a multiple of it
SMALLEST = 32  # pixels of the photograph: no shorter side is cut, unless the whole cell is smaller
GRAIN = 8.0  # standard deviation in grey levels: no two cuts of one place are the same


def cell(photo_size, split: str, rng) -> tuple[int, int, int, int]:
    """Draw a cell of the split: (left, top, width, height) in pixels of the photograph.

    Cells end between pixels: a pixel that two cells shared could be seen in training and in validation.
    """
    places = [(i, j) for i in range(COLUMNS) for j in range(ROWS) if ((i + j) % 3 == 0) == (split == "val")]
    i, j = places[int(rng.integers(len(places)))]
    (left, right), (top, bottom) = (
        (side * k // parts, side * (k + 1) // parts) for side, k, parts in zip(photo_size, (i, j), (COLUMNS, ROWS))
    )
    return left, top, right - left, bottom - top


def cut(photo: Image.Image, split: str, rng, ratio: float = 1.0) -> np.ndarray:
    """Cut a box of width / height = ratio from a cell, and scale it: (3, h, w) uint8.

    The short side becomes SIDE, the long side the nearest multiple of STRIDE: what was cut is stretched by an eighth
    at most.
    """
    left, top, width, height = cell(photo.size, split, rng)
    largest = min(height, width / ratio)  # of the box's height
    smallest = min(largest, max(SMALLEST, SMALLEST / ratio))
    h = min(largest, math.exp(rng.uniform(math.log(smallest), math.log(largest))))  # exp(log(x)) may exceed x
    w = min(width, h * ratio)
    x, y = left + rng.uniform(0, width - w), top + rng.uniform(0, height - h)
    scale = SIDE / min(w, h)
    size = tuple(max(SIDE, round(side * scale / STRIDE) * STRIDE) for side in (w, h))
    pixels = np.asarray(photo.resize(size, Image.Resampling.BOX, box=(x, y, x + w, y + h)), dtype=np.float32)
    grain = GRAIN * rng.standard_normal((*pixels.shape[:2], 1), dtype=np.float32)  # one draw for the three colours
    return np.clip(pixels + grain + 0.5, 0, 255).astype(np.uint8).transpose(2, 0, 1)


def squares(photos, split: str, count: int, seed: int) -> np.ndarray:
    """`count` squares of each photograph, (N, 3, SIDE, SIDE): the draw depends on (seed, split, class, index) alone."""
    draws = [
        cut(photo, split, np.random.default_rng([seed, cells.SPLITS.index(split), label, index]))
        for label, photo in enumerate(photos)
        for index in range(count)
    ]
    return np.stack(draws)


def rectangles(photos, count: int, seed: int) -> list[np.ndarray]:
    """`count` validation images of each photograph, (3, h, w) each. The log of w / h is uniform from 1:2 to 2:1."""
    found = []
    for label, photo in enumerate(photos):
        for index in range(count):
            rng = np.random.default_rng([seed, len(cells.SPLITS), label, index])
            found.append(cut(photo, "val", rng, math.exp(rng.uniform(-math.log(2), math.log(2)))))
    return found


def build(folder: Path, manifest: dict) -> None:
    """Write the files into the empty `folder`."""
    photos, count, seed = [load_photo(name) for name in PHOTOS], manifest["count"], manifest["seed"]
    varied = rectangles(photos, count["varied"], seed)
    arrays = {
        "train.npy": squares(photos, "train", count["train"], seed),
        "val.npy": squares(photos, "val", count["val"], seed),
        "varied_shapes.npy": np.array([image.shape[1:] for image in varied], dtype=np.int64),
        "varied.npy": np.concatenate([image.ravel() for image in varied]),
    }
    for name in cells.FILES:
        buffer = io.BytesIO()  # np.save into a file hides why it could not write
        np.save(buffer, arrays[name])
        (folder / name).write_bytes(buffer.getvalue())


def summary(manifest: dict) -> str:
    """What was made, in words."""
    count = ", ".join(f"{number} {name}" for name, number in manifest["count"].items())
    return f"{len(manifest['classes'])} classes, {count} images each"


RECIPE = making.Recipe(cells.MADE_BY, cells.read, lambda manifest: cells.FILES, build, summary)


def wanted_manifest(train: int, val: int, varied: int, seed: int) -> dict:
    """Write down what the set shall be; checksum and length come when it is made."""
    return {
        "format": cells.FORMAT,
        "made_by": cells.MADE_BY,
        "classes": list(PHOTOS),
        "count": {"train": train, "val": val, "varied": varied},
        "seed": seed,
        "versions": library_versions(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = making.parser(cells.MADE_BY, __doc__.splitlines()[0], "photo_cells")
    parser.add_argument("--train", type=making.number(1, 5000), help="training squares a class [100]")
    parser.add_argument("--val", type=making.number(1, 5000), help="validation squares a class [100]")
    parser.add_argument("--varied", type=making.number(1, 5000), help="validation images of any shape a class [40]")
    parser.set_defaults(**cells.DEFAULTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse(argv)
    return making.run(RECIPE, args, lambda: wanted_manifest(args.train, args.val, args.varied, args.seed))


if __name__ == "__main__":
    making.stop_cleanly()
    sys.exit(main())
