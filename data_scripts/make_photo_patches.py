"""Make the course's default image set: JPEG patches cut from photographs shipped with scikit-image and scikit-learn.

    python data_scripts/make_photo_patches.py [--out DIR] [--size 500x375] [--count 64] [--seed 0] [--force]

A class is a photograph. Training patches come from its left 70 %, validation patches from the rest: the two never share
a pixel. The same arguments give the same bytes on the same library versions. Nothing is downloaded.
Exit status: 0 done or already there, 1 could not be made, 2 wrong arguments.
"""

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, features

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from dlojz_tp import folders  # noqa: E402
from dlojz_tp.data import manifest as mf  # noqa: E402
from dlojz_tp.data.places import data_root  # noqa: E402

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


class CannotMake(Exception):
    """The set cannot be made; the message says why and what to do."""


def photo_path(name: str) -> Path:
    """Find the file of a photograph inside its installed package, without importing the package."""
    package, inside = PHOTOS[name]
    spec = importlib.util.find_spec(package)
    path = Path(next(iter(spec.submodule_search_locations))) / inside if spec else None
    if path is None or not path.is_file():
        # A smaller class list would make results differ between machines: refuse instead.
        raise CannotMake(f"photograph {inside} is not in {package}: pip install --force-reinstall {WHEELS[package]}")
    return path


def load_photo(name: str) -> Image.Image:
    """Read a photograph as RGB."""
    path = photo_path(name)
    try:
        return Image.open(path).convert("RGB")
    except OSError as error:
        wheel = WHEELS[PHOTOS[name][0]]
        raise CannotMake(f"{path} cannot be read ({error}): pip install --force-reinstall {wheel}") from error


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
    """Write all patches and then the manifest into the empty `folder`, with `jobs` threads."""
    photos = [load_photo(name) for name in PHOTOS]

    def write(task):
        path, label, split, index = task
        (folder / path).write_bytes(patch_bytes(photos[label], split, label, index, manifest["size"], manifest["seed"]))

    for split in mf.SPLITS:
        for name in manifest["classes"]:
            (folder / split / name).mkdir(parents=True)
    files = [(split, path, label) for split in mf.SPLITS for path, label in mf.file_names(manifest, split)]
    tasks = [(path, label, split, int(Path(path).stem)) for split, path, label in files]
    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(write, tasks))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # no thread may write into a folder being removed
    manifest["sha256"], manifest["bytes"] = mf.checksum(folder, manifest)
    (folder / mf.NAME).write_text(json.dumps(manifest, indent=1) + "\n")


def wanted_manifest(size, count: int, seed: int) -> dict:
    """Write down what the set shall be; checksum and length come when it is made."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "pillow", *WHEELS.values())}
    jpeg = next((features.version(name) for name in ("libjpeg_turbo", "jpg") if features.version(name)), "unknown")
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
        "versions": {**versions, "libjpeg": jpeg},
    }


def state_of(out: Path, wanted: dict, force: bool) -> str:
    """Say what lies at `out`: "nothing", "ready" or "replace". Raises CannotMake for what must not be touched."""
    if not os.path.lexists(out):
        return "nothing"
    if not out.is_dir():
        raise CannotMake(f"{out} is not a folder: give another --out")
    if not any(out.iterdir()):
        return "nothing"
    try:
        found = mf.read(out)
    except (OSError, ValueError) as error:
        why = f"no {mf.NAME}" if isinstance(error, FileNotFoundError) else str(error)
        raise CannotMake(f"{out} is no set made by this command ({why}): move or remove it, or give --out") from error
    differ = [key for key, value in wanted.items() if key != "versions" and found.get(key) != value]
    if differ and not force:
        raise CannotMake(f"{out} holds a set with another {', '.join(differ)}: give --force to replace it, or --out")
    if not differ and not force and mf.missing_file(out, found) is None:
        with contextlib.suppress(OSError):  # a file that cannot be read counts as damaged
            if mf.checksum(out, found)[0] == found["sha256"]:
                return "ready"
    foreign = mf.foreign_file(out, found)
    if foreign:
        raise CannotMake(f"{out} must be replaced but holds {foreign}, not made by this command: move it away first")
    return "replace"


@contextlib.contextmanager
def locked(out: Path):
    """Let one run at a time make the set; yields False where the file system has no locks."""
    with (out.parent / f".{out.name}.lock").open("w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another run is making {out}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held


def remove_leftovers(out: Path) -> None:
    """Remove what interrupted runs left beside `out`; called with the lock held."""
    for old in out.parent.glob(f".{out.name}.making-*"):
        # Some cluster file systems lock within one machine only: leave another machine's young folder alone.
        ours = old.name.startswith(f".{out.name}.making-{socket.gethostname()}-")
        with contextlib.suppress(OSError):
            if ours or time.time() - old.stat().st_mtime > 86400:
                shutil.rmtree(old, ignore_errors=True)


def make(out: Path, wanted: dict, force: bool, jobs: int) -> str:
    """Make the set at `out` unless it is there; returns the line to print."""
    if state_of(out, wanted, force) == "ready":
        return f"{out} is already there with these parameters: nothing to do"
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out) as held:
        if held:
            remove_leftovers(out)
        state = state_of(out, wanted, force)
        if state == "ready":
            return f"{out} is already there with these parameters: nothing to do"
        start = time.perf_counter()
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.making-{socket.gethostname()}-", dir=out.parent))
        try:
            build(work / "new", wanted, jobs)
            if state == "replace":
                out.rename(work / "old")
            (work / "new").rename(out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    files = len(wanted["classes"]) * sum(wanted["count"].values())
    return (
        f"made {out}: {len(wanted['classes'])} classes, {wanted['count']['train']} train and {wanted['count']['val']} "
        f"val files each, {wanted['bytes'] / 1e6:.0f} MB, {wanted['bytes'] / files / 1e3:.0f} KB a file, "
        f"{time.perf_counter() - start:.1f} s"
    )


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if not found or not all(16 <= int(side) <= 2000 for side in found.groups()):
        raise argparse.ArgumentTypeError(f"must be WIDTHxHEIGHT, each 16 to 2000 pixels, such as 500x375; got {text!r}")
    return int(found[1]), int(found[2])


def _number(low: int, high: int):
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return parse


def _default() -> Path:
    with contextlib.suppress(RuntimeError):
        return data_root() / "photo_patches"
    return Path(os.environ["DLOJZ_DATA"]) / "photo_patches"  # of nobody: refused as --out is


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong argument is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=_default(), help="folder [%(default)s]")
    parser.add_argument("--size", type=_size, metavar="WxH", help="pixels of a patch [500x375]")
    parser.add_argument("--count", type=_number(1, mf.MOST), help="train files a class; val 3/8 of it [64]")
    parser.add_argument("--seed", type=_number(0, 10**18 - 1), help="other seed, other patches [0]")
    parser.add_argument("--jobs", type=_number(1, 64), default=2, help="threads; does not change the bytes [2]")
    parser.add_argument("--force", action="store_true", help="replace a set made by this command")
    parser.set_defaults(**mf.DEFAULTS)
    parser.error = lambda message: parser.exit(2, f"make_photo_patches: {message} (--help shows all)\n")
    return parser.parse_args(argv)


def _terminate(signum, frame):
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse(argv)
    try:
        args.out = folders.resolve(args.out, "--out")
        say(make(args.out, wanted_manifest(args.size, args.count, args.seed), args.force, args.jobs))
        return 0
    except (CannotMake, folders.NoFolder) as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted: nothing was made; run the command again"
    except OSError as error:
        problem = folders.explain(error, args.out, "--out")
    print(f"make_photo_patches: {problem}", file=sys.stderr)
    return 1


def say(line: str) -> None:
    """Print a line; where nobody can read it, the set is made all the same."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)  # cleans up as after Ctrl-C
    sys.exit(main())
