"""Several runs side by side."""

from collections.abc import Sequence
from textwrap import wrap

from matplotlib.axes import Axes

from dlojz_tp.measure import Record, hardware, human_seconds

from ._style import BLUE, COLOURS, GREY, Chart, as_records, mean_split, short_number, style, where_and_when


def compare(records: Sequence[Record], device_name: str | None = None) -> Chart:
    """Show throughput and step split of several runs, with the speed-up against the first.

    A run from another device carries the name of its device and its date, and is hatched.

    Args:
        records: the runs, in the order to show.
        device_name: the device that counts as "here"; ``None`` is that of this machine.

    Returns:
        A figure.

    Raises:
        ValueError: without records, or if none has a throughput.
    """
    records = as_records(records)
    if not any(record.images_per_second for record in records):
        raise ValueError("no record has a throughput: none has a step that counts after the warm-up")
    here = device_name or hardware()["device_name"]
    foreign = [record.hardware.get("device_name", here) != here for record in records]
    names = [
        "\n".join([*wrap(record.name, 30), *([where_and_when(record)] if other else [])])
        for record, other in zip(records, foreign, strict=True)
    ]
    with style():
        figure = Chart(height=1.7 + 0.62 * len(records))
        left, right = figure.subplots(1, 2, sharey=True)
        figure.suptitle("Which run is the fastest, and why?")
        _speeds(left, records, foreign)
        _splits(right, records)
        left.set_yticks(range(len(records)), names)
        left.set_ylim(len(records) - 0.5, -0.5)
        for ax in (left, right):
            ax.tick_params(axis="y", length=0)
            ax.grid(visible=False, axis="y")
    return figure


def _speeds(ax: Axes, records: list[Record], foreign: list[bool]) -> None:
    speeds = [record.images_per_second or 0.0 for record in records]
    first = speeds[0]
    ax.set_title("Throughput")
    for row, (record, speed, other) in enumerate(zip(records, speeds, foreign, strict=True)):
        look = {"color": GREY, "hatch": "//"} if other else {"color": BLUE}
        ax.barh(row, speed, height=0.62, edgecolor="white", **look)
        if speed:
            text = f" {short_number(speed)}" + (f"  (× {speed / first:.3g})" if row and first else "")
        else:
            text = " out of memory" if record.out_of_memory else " not measured"
        ax.text(speed, row, text, va="center", ha="left")
    # Room on the right for the number of the longest bar.
    ax.set_xlim(0, 1.45 * max(speeds))
    ax.set_xlabel("throughput (images/s)")


def _splits(ax: Axes, records: list[Record]) -> None:
    splits = [mean_split(record) for record in records]
    totals = [sum(split.values()) for split in splits]
    measured = [total for total in totals if total]
    # Steps of very different lengths cannot share an axis: then the shares are shown.
    shares = bool(measured) and max(measured) > 20 * min(measured)
    ax.set_title("Time of a step")
    drawn: set[str] = set()
    longest = 0.0
    for row, (split, total) in enumerate(zip(splits, totals, strict=True)):
        begin = 0.0
        for phase, seconds in split.items():
            width = 100 * seconds / total if shares else 1000 * seconds
            label = None if phase in drawn else phase
            ax.barh(row, width, left=begin, height=0.62, color=COLOURS.get(phase, GREY), label=label)
            drawn.add(phase)
            begin += width
        longest = max(longest, begin)
        ax.text(begin, row, f" {human_seconds(total)}" if split else " no step counted", va="center", ha="left")
    ax.set_xlim(0, 1.25 * (longest or 1.0))
    ax.set_xlabel("share of the step (%)" if shares else "time (ms)")
    if drawn:
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower right", ncols=len(drawn))
