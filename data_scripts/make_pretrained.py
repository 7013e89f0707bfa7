"""Pretrain the small network that the practical work on fine-tuning starts from.

    python data_scripts/make_pretrained.py [--out DIR] [--epochs 24] [--seed 0] [--force]

A small ResNet learns to tell ten of the course's photographs apart from squares of 32 pixels, each shown under another
light each time. The five other photographs (dlojz_tp.data.pretraining.NEW) it never sees. Training and validation
squares share no pixel, as in make_photo_cells.py, but are cut here: no other set has to be there. One thread: the same
arguments give the same bytes on the same kind of machine and versions. Some 40 seconds; nothing is downloaded.
Exit status: 0 done or already there, 1 could not be made, 2 wrong arguments.
"""

import argparse
import math
import platform
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "data_scripts")]

from make_photo_cells import PHOTOS, library_versions, load_photo, squares  # noqa: E402

from dlojz_tp.data import making, pretraining  # noqa: E402

TRAIN, VAL = 400, 100  # squares of each photograph
BATCH, RATE, MOMENTUM, DECAY = 64, 0.2, 0.9, 5e-4
WARM_UP = 0.2  # of all steps


def train(model, images, labels, epochs: int, generator) -> None:
    """Train with SGD, one warm-up and a cosine; every image under a new light each time, half of them mirrored."""
    import torch
    from torch import nn

    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, weight_decay=DECAY, nesterov=True)
    total, step = epochs * (len(images) // BATCH), 0
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(BATCH)[: total // epochs]:
            done = step / total
            share = done / WARM_UP if done < WARM_UP else (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2
            optimizer.param_groups[0]["lr"] = RATE * max(0.02, share)
            x = pretraining.under_lights(images[rows], generator)
            x = torch.where(torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5, x.flip(-1), x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels[rows]).backward()
            optimizer.step()
            step += 1


def build(folder: Path, manifest: dict) -> None:
    """Write the weights into the empty `folder`, and the accuracy into the manifest."""
    import torch
    from safetensors.torch import save

    from dlojz_tp.models import small_resnet

    photos, seed = [load_photo(name) for name in manifest["classes"]], manifest["seed"]
    x, val_x = (torch.from_numpy(squares(photos, *part, seed)) for part in (("train", TRAIN), ("val", VAL)))
    y, val_y = (torch.arange(len(photos)).repeat_interleave(count) for count in (TRAIN, VAL))
    generator, threads = torch.Generator().manual_seed(seed), torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # sums in another order would give other bytes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = small_resnet(pretraining.WIDTH, len(photos))
        train(model, x, y, manifest["epochs"], generator)
        model.eval()
        with torch.no_grad():
            right = model(pretraining.under_lights(val_x, generator)).argmax(1) == val_y
    finally:
        torch.set_num_threads(threads)
    manifest["accuracy"] = round(right.double().mean().item(), 6)
    (folder / pretraining.FILES[0]).write_bytes(save(model.state_dict()))


def summary(manifest: dict) -> str:
    """What was made, in words."""
    return f"{len(manifest['classes'])} classes, {manifest['epochs']} epochs, accuracy {manifest['accuracy']:.3f}"


RECIPE = making.Recipe(pretraining.MADE_BY, pretraining.read, lambda manifest: pretraining.FILES, build, summary)


def wanted_manifest(epochs: int, seed: int) -> dict:
    """Write down what the set shall be; accuracy, checksum and length come when it is made."""
    return {
        "format": pretraining.FORMAT,
        "made_by": pretraining.MADE_BY,
        "classes": [name for name in PHOTOS if name not in pretraining.NEW],
        "epochs": epochs,
        "seed": seed,
        "versions": {"python": platform.python_version(), **library_versions("torch", "safetensors")},
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = making.parser(pretraining.MADE_BY, __doc__.splitlines()[0], "pretrained")
    parser.add_argument("--epochs", type=making.number(1, 1000), help="epochs of training [24]")
    parser.set_defaults(**pretraining.DEFAULTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse(argv)
    return making.run(RECIPE, args, lambda: wanted_manifest(args.epochs, args.seed))


if __name__ == "__main__":
    making.stop_cleanly()
    sys.exit(main())
