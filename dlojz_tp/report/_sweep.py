"""Memory and throughput against the batch size."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from dlojz_tp.measure import Record, human_bytes

from ._style import BLUE, GREY, RED, Chart, as_records, memory_unit, style, where_and_when


def sweep(
    records: Sequence[Record], capacity_bytes: float | None = None, fit: tuple[float, float] | None = None
) -> Chart:
    """Show memory and throughput against batch size, with the sizes that ran out of memory marked.

    Args:
        records: one run a batch size, with ``batch_size`` in the settings; a size that failed has ``out_of_memory``.
        capacity_bytes: memory of the card, drawn as a line.
        fit: ``(fixed_bytes, bytes_per_image)`` of a straight line through the memory of the sizes that fit.

    Returns:
        A figure.

    Raises:
        ValueError: without records, without a batch size, or if no size fitted.
    """
    records = as_records(records)
    sizes = [record.settings.get("batch_size") for record in records]
    if not all(isinstance(size, int | float) and size > 0 for size in sizes):
        raise ValueError("every record of a sweep needs 'batch_size' in its settings")
    records = sorted(records, key=lambda record: record.settings["batch_size"])
    fitted = [record for record in records if not record.out_of_memory]
    if not fitted:
        raise ValueError(f"every size ran out of memory, the smallest of {min(sizes)} too: begin with a smaller one")
    with style():
        figure = Chart(height=4.7)
        left, right = figure.subplots(1, 2)
        span = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{sizes[0]}"
        figure.suptitle(f"batches of {span} images  ({where_and_when(fitted[-1])})")
        _memory(left, records, capacity_bytes, fit)
        _throughput(right, records)
    return figure


def _memory(ax: Axes, records: list[Record], capacity_bytes: float | None, fit: tuple[float, float] | None) -> None:
    points = [(_size(r), max(r.peak_memory_bytes)) for r in records if r.peak_memory_bytes and not r.out_of_memory]
    kinds = sorted({r.memory_kind for r in records if r.memory_kind and not r.out_of_memory})
    failed = [_size(r) for r in records if r.out_of_memory]
    largest = max([capacity_bytes or 0, *(memory for _, memory in points), 1])
    unit, name = memory_unit(largest)
    ax.set_title("What fits?")
    if points:
        label = " and ".join(kinds) or "memory"
        ax.plot([x for x, _ in points], [y / unit for _, y in points], "o", color=BLUE, label=label)
    if fit is not None:
        high = 1.1 * _size(records[-1])
        label = f"{human_bytes(fit[0])} + {human_bytes(fit[1])} × images"
        line = [fit[0] / unit, (fit[0] + fit[1] * high) / unit]
        ax.plot([0, high], line, color=GREY, linewidth=1.5, zorder=1, label=label)
    if capacity_bytes:
        ax.axhline(capacity_bytes / unit, color=RED, linestyle="--", linewidth=1.5)
        ax.text(
            0.01, capacity_bytes / unit, f"the card: {human_bytes(capacity_bytes)}",
            transform=ax.get_yaxis_transform(), color=RED, va="bottom",
        )  # fmt: skip
    if failed:
        ax.plot(failed, [largest / unit] * len(failed), "X", color=RED, markersize=11, label="out of memory")
    # The line of a fit may shoot up beyond the card: the points are what matters.
    ax.set_ylim(0, 1.25 * largest / unit)
    ax.set_ylabel(f"peak memory ({name})")
    # Below the panel, where it can hide no point.
    handles, labels = ax.get_legend_handles_labels()
    ax.figure.legend(handles, labels, loc="outside lower left", ncols=len(labels))
    # Linear, or the straight line of a fit would be bent.
    ax.set_xlim(0, 1.1 * _size(records[-1]))
    ax.set_xlabel("batch size (images)")


def _throughput(ax: Axes, records: list[Record]) -> None:
    points = [(_size(r), r.images_per_second) for r in records if r.images_per_second and not r.out_of_memory]
    failed = [_size(r) for r in records if r.out_of_memory]
    ax.set_title("What does a larger batch bring?")
    ax.plot([x for x, _ in points], [y for _, y in points], "o-", color=BLUE)
    if failed:
        ax.axvline(failed[0], color=RED, linestyle="--", linewidth=1.5)
        ax.text(
            failed[0], 0.03, "out of memory ", transform=ax.get_xaxis_transform(),
            color=RED, rotation=90, ha="right", va="bottom",
        )  # fmt: skip
    ax.set_ylim(0, 1.15 * max([y for _, y in points], default=1))
    ax.set_ylabel("throughput (images/s)")
    _batch_axis(ax, records)


def _batch_axis(ax: Axes, records: list[Record]) -> None:
    """Give the batch sizes an axis in powers of two, with the sizes that were run as its marks."""
    sizes = sorted({_size(record) for record in records})
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    # More than nine numbers would touch: then every second or third is written, counted from the largest.
    shown = sizes[::-1][:: math.ceil(len(sizes) / 9)]
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel("batch size (images)")


def _size(record: Record) -> float:
    return record.settings["batch_size"]
