"""Make the course's table for hyperparameter search: small networks trained with every configuration of a grid.

    python data_scripts/make_search_table.py [--out DIR] [--epochs 27] [--rates 13] [--seed 0] [--force]

One hidden layer on the 1,797 digits, 60 % of each class for training, 20 % for validation, 20 % for the test: 936
configurations (13 learning rates), each with 3 seeds, after each of 27 epochs. All networks of one width, batch size,
optimizer and seed train together, as one. The same arguments give the same bytes on the same machine and versions; the
seconds an epoch takes are measured and stand outside of the checksum. About a minute on two cores. Nothing is
downloaded. Exit status: 0 done or already there, 1 could not be made, 2 wrong arguments.
"""

import argparse
import importlib.metadata
import importlib.util
import io
import os
import platform
import sys
import threading
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from dlojz_tp.data import making, searching  # noqa: E402

HALF_MAX = 65504.0  # a network whose outputs pass what float16 holds has diverged: no loss is finite in half precision


def split_digits(seed: int) -> list:
    """Digits as [(images (N, 65), labels (N,))] for train, validation and test.

    The pixels are standardised with the train part's mean and deviation; the last column is 1, for the bias.
    """
    import numpy as np
    import torch
    from sklearn.datasets import load_digits

    bunch, rng = load_digits(), np.random.default_rng(seed)
    parts = [[], [], []]
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(bunch.target == digit))
        cuts = round(0.6 * len(members)), round(0.8 * len(members))
        for part, chosen in zip(parts, np.split(members, cuts)):
            part.append(chosen)
    rows = [np.concatenate(part) for part in parts]
    pixels = torch.from_numpy(bunch.data).float()
    train = pixels[rows[0]]
    pixels = torch.cat([(pixels - train.mean()) / train.std(), torch.ones(len(pixels), 1)], dim=1)
    return [(pixels[row], torch.from_numpy(bunch.target[row]).long()) for row in rows]


def train_together(parts, configs: list[dict], seed: int, epochs: int, stop: threading.Event):
    """Train one network for each configuration, all of one optimizer, batch size and width, from the same seed.

    Returns (configurations, epochs, 2) int16: validation and test images told right after each epoch, -1 once diverged.
    """
    import torch

    torch.set_num_threads(1)  # of this thread: many small products gain nothing from more
    torch.set_flush_denormal(True)
    (x, y), *held_out = parts
    n, inputs = len(configs), x.shape[1]
    optimizer, size, width = (configs[0][name] for name in ("optimizer", "batch_size", "width"))
    generator = torch.Generator().manual_seed(seed)

    def uniform(fan_in, *shape):  # as nn.Linear draws
        return (torch.rand(*shape, generator=generator) * 2 - 1) / fan_in**0.5

    first = uniform(inputs - 1, inputs, 1, width).repeat(1, n, 1)  # its last row is the bias
    second = uniform(width, 1, width, 10).repeat(n, 1, 1)
    bias = uniform(width, 1, 1, 10).repeat(n, 1, 1)
    parameters = [first, second, bias]
    shapes = [(1, n, 1), (n, 1, 1), (n, 1, 1)]
    rates, decays, momenta = (
        [torch.tensor([config.get(name, 0.0) for config in configs]).view(shape) for shape in shapes]
        for name in ("learning_rate", "weight_decay", "momentum")
    )
    means, squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))

    def forward(images):
        hidden = (images @ first.flatten(1)).view(len(images), n, width).relu_().transpose(0, 1)
        outputs = torch.baddbmm(bias, hidden, second)
        diverged.logical_or_(~(outputs.abs().amax((1, 2)) <= HALF_MAX))
        return hidden, outputs

    right = torch.empty(n, epochs, len(held_out), dtype=torch.int16)
    diverged, one_hot, steps = torch.zeros(n, dtype=torch.bool), torch.eye(10)[y], 0
    for epoch in range(epochs):
        if stop.is_set():
            break
        for rows in torch.randperm(len(x), generator=generator).split(size):
            hidden, outputs = forward(x[rows])
            # gradients of the mean cross-entropy, by hand: half the time of autograd's
            d_outputs = (outputs.softmax(-1) - one_hot[rows]) / len(rows)
            d_hidden = (d_outputs @ second.transpose(1, 2)) * (hidden > 0)
            d_first = (x[rows].T @ d_hidden.transpose(0, 1).reshape(len(rows), -1)).view_as(first)
            gradients = d_first, hidden.transpose(1, 2) @ d_outputs, d_outputs.sum(1, keepdim=True)
            steps += 1
            for p, g, m, v, rate, decay, momentum in zip(parameters, gradients, means, squares, rates, decays, momenta):
                if optimizer == "sgd":  # torch.optim.SGD
                    m.mul_(momentum).add_(g).addcmul_(decay, p)
                    p.addcmul_(rate, m, value=-1)
                else:  # torch.optim.AdamW with its own betas and eps
                    m.lerp_(g, 0.1)
                    v.mul_(0.999).addcmul_(g, g, value=0.001)
                    p.mul_(1 - rate * decay)
                    root = (v / (1 - 0.999**steps)).sqrt_().add_(1e-8)
                    p.addcmul_(rate / (1 - 0.9**steps), m / root, value=-1)
        for part, (images, labels) in enumerate(held_out):
            right[:, epoch, part] = (forward(images)[1].argmax(-1) == labels).sum(-1)
        right[diverged, epoch] = -1
    return right


def seconds_an_epoch(parts, optimizer: str, size: int, width: int) -> float:
    """Time one epoch of one network, trained alone as torch.optim and nn do it; the best of three."""
    import torch
    from torch import nn

    x, y = parts[0][0][:, :-1], parts[0][1]
    model = nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, 10))
    chosen = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](model.parameters(), lr=1e-3)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(size):
            chosen.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            chosen.step()
        times.append(time.perf_counter() - start)
    return min(times)


def build(folder: Path, manifest: dict) -> None:
    """Write the files into the empty `folder`, and counts and seconds into the manifest."""
    import numpy as np
    import torch

    parts, grid, seed = split_digits(manifest["seed"]), searching.axes(manifest["rates"]), manifest["seed"]
    configs = searching.configurations(grid)
    groups = {}
    for index, config in enumerate(configs):
        groups.setdefault((config["batch_size"], -config["width"], config["optimizer"]), []).append(index)
    tasks = [(groups[key], run) for key in sorted(groups) for run in range(searching.SEEDS)]  # the longest first
    right = np.empty((len(configs), searching.SEEDS, manifest["epochs"], 2), dtype=np.int16)
    threads, stop = torch.get_num_threads(), threading.Event()

    def work(task):
        rows, run = task
        chosen = [configs[row] for row in rows]
        right[rows, run] = train_together(parts, chosen, 1000 * seed + run, manifest["epochs"], stop).numpy()

    try:
        torch.set_num_threads(1)
        manifest["images"] = [len(labels) for _, labels in parts]
        manifest["seconds"] = [
            [[seconds_an_epoch(parts, name, size, width) for width in grid["width"]] for size in grid["batch_size"]]
            for name in grid["optimizer"]
        ]
        making.in_threads(work, tasks, len(os.sched_getaffinity(0)), stop)
    finally:
        torch.set_num_threads(threads)
    buffer = io.BytesIO()  # np.save into a file hides why it could not write
    np.save(buffer, right)
    (folder / searching.FILES[0]).write_bytes(buffer.getvalue())


def summary(manifest: dict) -> str:
    """What was made, in words."""
    number = len(searching.configurations(searching.axes(manifest["rates"])))
    return f"{number} configurations, {searching.SEEDS} seeds, {manifest['epochs']} epochs"


RECIPE = making.Recipe(searching.MADE_BY, searching.read, lambda manifest: searching.FILES, build, summary)


def wanted_manifest(epochs: int, rates: int, seed: int) -> dict:
    """Write down what the table shall be; the rest comes when it is made."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("numpy", "torch", "scikit-learn")}
    except importlib.metadata.PackageNotFoundError as error:
        raise making.CannotMake(f"the library {error.name} is not installed: pip install {error.name}") from error
    return {
        "format": searching.FORMAT,
        "made_by": searching.MADE_BY,
        "epochs": epochs,
        "rates": rates,
        "seed": seed,
        "versions": {"python": platform.python_version(), **versions},
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = making.parser(searching.MADE_BY, __doc__.splitlines()[0], "search_table")
    parser.add_argument("--epochs", type=making.number(1, 1000), help="epochs of training [27]")
    parser.add_argument("--rates", type=making.number(2, 100), help="learning rates from 1e-4 to 1 [13]")
    parser.set_defaults(**searching.DEFAULTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parse(argv)
    return making.run(RECIPE, args, lambda: wanted_manifest(args.epochs, args.rates, args.seed))


if __name__ == "__main__":
    making.stop_cleanly()
    sys.exit(main())
