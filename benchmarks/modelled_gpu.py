"""Hold the modelled cards against published speeds: steps, and gains, which are ratios of two speeds of one source.

    python benchmarks/modelled_gpu.py [--check] [words of card, source, row or family]

Where a row is marked, a constant was fitted on it; all other rows are held out. Without words, --check exits with 1 if
these don't give the figures of the sentence under modelled tables, modelled_gpu.MISSED.
"""

import sys
import time

from dlojz_tp.modelled_gpu.published import gains, held_out, misses, rows
from dlojz_tp.modelled_gpu.rates import (
    CARD_MISSES,
    LARGEST_GAIN_MISS,
    LARGEST_MISS,
    MEAN_GAIN_MISS,
    MEAN_MISS,
    ROWS_HELD_OUT,
)


def main(words: list[str]) -> int:
    check, begin, seconds = "--check" in words, time.perf_counter(), {}
    for row in rows([word for word in words if word != "--check"]):
        run = row.modelled()
        seconds[row] = run.result
        print(f"{str(row):62} published {1e3 * row.seconds:7.1f} ms  modelled {1e3 * run.result:7.1f} ms  "
              f"speed {100 * (row.seconds / run.result - 1):+4.0f} %  {run.peak_memory / 2**30:3.0f} GiB"
              f"{'  fitted' if row.fitted else ''}", flush=True)  # fmt: skip
    for row, published, modelled in gains(seconds):
        print(f"{str(row):62} over {row.over:24} published × {published:.2f}  modelled × {modelled:.2f}  "
              f"{100 * (modelled / published - 1):+4.0f} %")  # fmt: skip
    parts = {}
    for kind in ("family", "card"):
        for value in sorted({getattr(row, kind) for row in seconds}):
            parts[value] = say(value, {row: s for row, s in seconds.items() if getattr(row, kind) == value})
    found = *say("all held out", seconds), {card: parts[card][1] for card in CARD_MISSES if card in parts}
    print(f"{time.perf_counter() - begin:.0f} s")
    said = ROWS_HELD_OUT, MEAN_MISS, LARGEST_MISS, MEAN_GAIN_MISS, LARGEST_GAIN_MISS, CARD_MISSES
    if check and found != said:
        print(f"MISSED says {said}, the rows give {found}: put these figures into modelled_gpu/rates.py")
        return 1
    return 0


def say(what: str, seconds: dict) -> tuple:
    """Print, and return as MISSED has them: how many rows; mean and largest error of speeds, then of gains."""
    speeds, ratios = held_out(seconds)
    errors = [error for pairs in (speeds, ratios) for error in misses(pairs)]
    bias = sum(b / a - 1 for a, b in speeds) / max(1, len(speeds))
    mean, most, gain_mean, gain_most = (100 * error for error in errors)
    print(f"{what:12} {len(speeds):3} speeds: off by {mean:4.1f} % on average, {most:2.0f} % at most, mean "
          f"{100 * bias:+5.1f} %; {len(ratios):2} gains: {gain_mean:4.1f} %, {gain_most:2.0f} % at most")  # fmt: skip
    return len(speeds), *(round(error, 2) for error in errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
