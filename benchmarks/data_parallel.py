"""Race a data parallelism written by hand against torch's DistributedDataParallel, in the same processes.

The hand-written one is the solution of practical work 08: its cells are read from its source. Each line trains the same
network on the same batches, in turn; the figures are medians over the rounds, on rank 0.

    python benchmarks/data_parallel.py [--rounds 40] [--ranks 2 4] [--out FILE]

Writes benchmarks/results/data_parallel.json.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp import launch, measure
from dlojz_tp.works import source

WORK = "08_data_parallel_under_the_hood"
CASES = {  # width, layers, rows a rank: large gradients, small ones, many tiny ones
    "8 layers of 512": (512, 8, 48),
    "16 layers of 256": (256, 16, 64),
    "60 layers of 32": (32, 60, 64),
}


def solution() -> dict:
    """The names that the solution of the practical work defines."""
    names: dict = {"__name__": "__main__"}
    for cell in source.find(WORK).cells:
        if cell.balise is not None or "setup" in cell.options or "class DataParallel" in cell.text:
            text = cell.text.partition("\n\nrecord_yours")[0]  # the class, not the run that follows it
            exec(compile(text, WORK, "exec"), names)
    return names


def make_model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    chain = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*chain).to(launch.device())


def race(wrap, case: str, rounds: int) -> measure.Race:
    """On a rank: whole steps of each candidate, in turn. wrap: the hand-written DataParallel."""
    width, layers, rows = CASES[case]
    capacity = 2 * (width * width + width) * 4  # two layers
    torch.manual_seed(1000 + dist.get_rank())
    x = torch.randn(rows, width).to(launch.device())
    ddp = {"bucket_cap_mb": capacity / 2**20}
    models = {
        "by hand": wrap(make_model(width, layers), capacity),
        "DDP": DistributedDataParallel(make_model(width, layers), **ddp),
        "DDP, bucket views": DistributedDataParallel(make_model(width, layers), gradient_as_bucket_view=True, **ddp),
    }
    steps = {}
    for name, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        finish = getattr(model, "finish", lambda: None)

        def step(model=model, optimizer=optimizer, finish=finish):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            finish()
            optimizer.step()

        steps[name] = step
    return measure.race(steps, repeats=rounds, warmup=5, calls=1, device=launch.device())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="steps of each candidate")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "data_parallel.json")
    options = parser.parse_args()
    wrap = solution()["DataParallel"]

    print(f"{'work':<18} {'ranks':>5}  {'by hand':>9}  {'DDP':>9}  {'DDP, views':>10}  {'/ DDP':>6}  {'/ views':>7}")
    results = []
    for case in CASES:
        for n in options.ranks:
            found = launch.ranks(race, wrap, case, options.rounds, n=n, timeout=600)[0]
            times = [measure.human_seconds(seconds) for seconds in found.medians.values()]
            ratios = list(found.ratios.values())
            shown = f"{times[0]:>9}  {times[1]:>9}  {times[2]:>10}  {ratios[0]:>6.2f}  {ratios[1]:>7.2f}"
            print(f"{case:<18} {n:>5}  {shown}", flush=True)
            results.append({"case": case, "ranks": n, "backend": launch.backend(n), **json.loads(found.to_json())})
    record = {
        "work": "a training step: zero_grad, forward, backward with averaged gradients, SGD",
        "races": results,
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "load_1_min": os.getloadavg()[0]},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
