"""Hold the modelled cards against published throughputs.

    python benchmarks/modelled_gpu.py [words of the name]

Where a row is marked, a constant of its card was calibrated on it; all other rows are predicted.
"""

import sys
import time

from dlojz_tp.modelled_gpu.published import PUBLISHED


def main(words: list[str]) -> None:
    errors, begin = [], time.perf_counter()
    for run in PUBLISHED:
        if not all(word.lower() in f"{run.name} {run.card.name}".lower() for word in words):
            continue
        value, found = run.predicted()
        error = value / run.value - 1
        errors += [] if run.calibrates else [abs(error)]
        print(f"{run.card.name:5} {run.name:48} published {run.value:10,.4g} modelled {value:10,.4g} {run.unit:12}"
              f"{100 * error:+6.1f} % {'calibrated' if run.calibrates else ''}  {found.peak_memory / 2**30:.0f} GiB",
              flush=True)  # fmt: skip
    print(f"predicted: mean of the errors' sizes {100 * sum(errors) / max(1, len(errors)):.0f} %, largest "
          f"{100 * max(errors, default=0):.0f} %; {time.perf_counter() - begin:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
