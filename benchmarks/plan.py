"""Hold the planner's predictions against published runs, and time its search.

    python benchmarks/plan.py [words of a kind]

Of a kind that has all the words, every row is shown. Rows on which a constant was chosen are marked *fitted* and
count in no mean.
"""

import sys
import time
from dataclasses import replace
from itertools import groupby

from dlojz_tp import planner
from dlojz_tp.planner import published


def line(name: str, errors: list[float]) -> str:
    """A row of the summary."""
    if not errors:
        return f"{name:62} fitted"
    got = published.missed(errors)
    return f"{name:62} {got.rows:4} {100 * got.mean:+8.1f} {100 * got.size:7.1f} {100 * got.within:9.0f}"


def groups(words: list[str]) -> None:
    """Errors by kind of run."""
    print(f"{'tokens a second, predicted / published - 1 (%)':62} rows     mean    size within 15")
    held_out, kind = [], lambda row: row.kind
    for name, rows in groupby(sorted(published.read_rows(), key=kind), kind):
        rows = [(row, row.predicted() / row.tokens - 1) for row in rows]
        errors = [error for row, error in rows if not row.fitted]
        held_out += errors
        print(line(name, errors))
        if words and all(word.lower() in name.lower() for word in words):
            for row, error in rows:
                mark = "fitted" if row.fitted else ""
                print(f"  {row.name:76} {row.tokens:9.1f} {row.predicted():9.1f} {100 * error:+7.1f} {mark}")
    print(line("all that are held out", held_out))


def narayanan(title: str, runs: list, cluster: planner.Cluster) -> None:
    """Errors of runs whose micro-batches and chunks are unknown: the quickest layout that agrees with the rest."""
    errors = [planner.predicted_tflops(run, cluster) / run.tflops - 1 for run in runs]
    print(line(title, errors))
    print("   " + " ".join(f"{100 * error:+.0f}" for error in errors))


def searches() -> None:
    """How long a search takes."""
    a100, h100, h800 = (planner.Cluster(planner.CARDS[name]) for name in ("A100", "H100", "H800"))
    models = planner.MODELS
    for name, cluster, gpus, batch, only in (
        ("llama3-405b", h100, 16384, 2048, {}),
        ("bloom-176b", a100, 384, 2048, {}),
        ("deepseek-v3", h800, 2048, 15360, {"precision": "float8", "experts_overlap": True}),
    ):
        begin = time.perf_counter()
        found = planner.search(models[name], cluster, gpus, batch, only=only)
        seconds, best = time.perf_counter() - begin, found[0]
        print(f"{name} on {gpus} {cluster.card.name}: {len(found)} fit, {seconds:.1f} s; MFU {100 * best.mfu:.0f} %")
        print(f"   {best.layout}")


if __name__ == "__main__":
    groups(sys.argv[1:])
    a100 = planner.Cluster(planner.A100)
    print("\nNarayanan et al. 2021, micro-batches and chunks not told: TFLOP/s, predicted / published - 1 (%)")
    narayanan("table 1", planner.MEGATRON, a100)
    narayanan("table 2, tensor and pipeline ranks", planner.MEGATRON_OR_ZERO[:6], a100)
    zero = planner.MEGATRON_OR_ZERO[6:]
    narayanan("table 2, ZeRO 3 as libraries do it today", zero, a100)
    then = [replace(run, only=run.only | published.ZERO_THEN) for run in zero]
    narayanan("table 2, ZeRO 3 with the switches that come nearest", then, a100)
    print()
    searches()
