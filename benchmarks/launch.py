"""Race launch.ranks against torchrun: the time to start ranks, all-reduce once, and have the result.

    python benchmarks/launch.py [--rounds 5] [--out benchmarks/results/launch.json]

Both do the same work (an all-reduce of one million float32 on the CPU with gloo) in turn, A B A B. The time runs from
the call to the result in hand. "cold" is the first launch of a session: it starts the server that imports torch.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.launch import client

SIZE = 1_000_000  # elements
TORCHRUN_LIMIT_S = 120
SCRIPT = f"""
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full(({SIZE},), dist.get_rank() + 1.0)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print(x[0].item())
dist.destroy_process_group()
"""


def all_reduce() -> float:
    x = torch.full((SIZE,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x[0].item()


def with_launch(n: int) -> float:
    return launch.ranks(all_reduce, n=n, timeout=60)[0]


def with_torchrun(n: int, script: Path) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=TORCHRUN_LIMIT_S)
    return float(done.stdout.split()[-1])


def timed(job, *args) -> tuple[float, float]:
    """Run a job; returns (seconds, its result)."""
    begin = time.perf_counter()
    result = job(*args)
    return time.perf_counter() - begin, result


def race(n: int, rounds: int, script: Path) -> dict:
    """Time both launchers in turn on `n` ranks, `rounds` times each."""
    times: dict[str, list[float]] = {"launch": [], "torchrun": []}
    for _ in range(rounds):
        for name, job in (("launch", (with_launch, n)), ("torchrun", (with_torchrun, n, script))):
            seconds, result = timed(*job)
            assert result == n * (n + 1) / 2, f"{name} returned {result} for {n} ranks"
            times[name].append(seconds)
    medians = {f"{name}_median_s": statistics.median(values) for name, values in times.items()}
    ratio = medians["torchrun_median_s"] / medians["launch_median_s"]
    return {"ranks": n, **medians, "ratio": ratio, **{f"{name}_s": values for name, values in times.items()}}


def worlds_time(rounds: int) -> float:
    return statistics.median(timed(launch.worlds, dist.get_world_size)[0] for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each launcher for each number of ranks")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "launch.json")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo on both sides

    cold = []
    for _ in range(3):
        client.close()
        cold.append(timed(with_launch, 2)[0])
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "all_reduce.py"
        script.write_text(SCRIPT)
        races = [race(n, options.rounds, script) for n in (2, 4)]
    worlds = worlds_time(options.rounds)

    print(f"{'ranks':>5}  {'launch.ranks':>12}  {'torchrun':>9}  {'torchrun / launch':>17}")
    for r in races:
        print(
            f"{r['ranks']:>5}  {r['launch_median_s']:>10.3f} s  {r['torchrun_median_s']:>7.2f} s  {r['ratio']:>17.0f}"
        )
    print(f"2 ranks, cold: {statistics.median(cold):.2f} s.  Worlds of 1, 2, 3 and 4, warm: {worlds:.2f} s.")
    record = {
        "work": f"all_reduce of {SIZE} float32, gloo on the CPU",
        "races": races,
        "cold_2_ranks_s": cold,
        "worlds_1_2_3_4_median_s": worlds,
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "load_1_min": os.getloadavg()[0]},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
