"""Hold the planner's predictions against published runs, and time its search.

    python benchmarks/plan.py

The two constants of `planner.Cluster` were chosen from the first and the last row of the first table; no others were.
"""

import time

from dlojz_tp import planner


def show(title: str, runs: list, cluster: planner.Cluster) -> None:
    """A row a run, and how far off they are."""
    print(f"\n{title}\n  billions  counted   GPUs  ZeRO  TFLOP/s  predicted   error")
    errors = []
    for run in runs:
        got = planner.predicted_tflops(run, cluster)
        errors.append(got / run.tflops - 1)
        counted, zero = run.model.n_parameters / 1e9, run.only["zero"]
        row = f"{run.billions:10.1f} {counted:8.2f} {run.gpus:6} {zero:5} {run.tflops:8} {got:10.1f}"
        print(f"{row} {100 * errors[-1]:+6.1f}%")
    sizes = [abs(error) for error in errors]
    print(f"  mean of the errors' sizes {100 * sum(sizes) / len(sizes):.1f} %, largest {100 * max(sizes):.1f} %")


if __name__ == "__main__":
    a100 = planner.Cluster(planner.A100)
    show("Megatron-LM, table 1", planner.MEGATRON, a100)
    ends = (planner.MEGATRON[0].tflops + planner.MEGATRON[-1].tflops) / 2
    worst = max(abs(ends / run.tflops - 1) for run in planner.MEGATRON)
    print(f"  for comparison: {ends:.0f} for all rows, the mean of the same two, is {100 * worst:.1f} % off at most")
    show("Megatron-LM, table 2", planner.MEGATRON_OR_ZERO, a100)
    begin = time.perf_counter()
    found = planner.search(planner.GPT(25600, 128, 160), a100, 3072, 3072)
    print(f"\nsearch over 3,072 GPUs and 128 layers: {len(found)} that fit, {time.perf_counter() - begin:.2f} s")
