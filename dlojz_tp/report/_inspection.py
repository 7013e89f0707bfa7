"""One run at a glance."""

from textwrap import shorten

from matplotlib.axes import Axes

from dlojz_tp.measure import MemoryEstimate, Record, human_bytes, human_seconds

from ._style import (
    BLUE,
    COLOURS,
    GREY,
    RED,
    Chart,
    as_records,
    mean_split,
    memory_unit,
    short_number,
    style,
    waterfall,
    where_and_when,
)


def inspection(record: Record, reference: Record | None = None, memory: MemoryEstimate | None = None) -> Chart:
    """Show one run: throughput, where the time of a step goes, where the memory goes, loss or step times, power.

    A panel without data is left out.

    Args:
        record: the run.
        reference: another run, whose throughput is marked.
        memory: an estimate of the memory, if the record holds none.

    Returns:
        A figure.

    Raises:
        TypeError: if these are no records.
        ValueError: if the record holds nothing to show.
    """
    (record,) = as_records(record)
    if reference is not None:
        as_records(reference)
    parts, kind = (memory.parts(), memory.kind) if memory else (record.memory_parts, record.memory_kind)
    peaks = [memory.peak] if memory else record.peak_memory_bytes
    rows = []
    if record.images_per_second or mean_split(record):
        rows.append(["throughput"] * bool(record.images_per_second) + ["split"] * bool(mean_split(record)))
    curve = "curve" if len(record.losses) > 1 or len(record.steps) > 1 else ""
    rows.append(["memory"] * bool(peaks) + [curve] * bool(curve))
    rows.append(["power"] * bool(record.power and record.power.get("watts")))
    rows = [row for row in rows if row]
    if not rows:
        why = "it ran out of memory" if record.out_of_memory else "no step counts after the warm-up"
        raise ValueError(f"the record {record.name!r} holds nothing to show: {why}")
    with style():
        figure = Chart(height=0.7 + 2.6 * len(rows))
        figure.suptitle(f"{record.name}  ({where_and_when(record)})")
        axes = figure.subplot_mosaic([_wide(row) for row in rows])
        if "throughput" in axes:
            _throughput(axes["throughput"], record, reference)
        if "split" in axes:
            _split(axes["split"], record)
        if "memory" in axes:
            _memory(axes["memory"], parts, peaks, kind, record.hardware)
        if "curve" in axes:
            (_losses if len(record.losses) > 1 else _step_times)(axes["curve"], record)
        if "power" in axes:
            _power(axes["power"], record)
    return figure


def _wide(row: list[str]) -> list[str]:
    """Spread one or two panels over a grid of five columns."""
    return row * 5 if len(row) == 1 else [row[0]] * 2 + [row[1]] * 3


def _throughput(ax: Axes, record: Record, reference: Record | None) -> None:
    value = record.images_per_second
    ax.set_title("How fast?")
    rows = [("this run", value, BLUE)]
    if reference is not None and reference.images_per_second:
        rows.append((shorten(reference.name, 20, placeholder=" …"), reference.images_per_second, GREY))
    largest = max(row[1] for row in rows)
    for place, (_, speed, colour) in enumerate(rows):
        ax.barh(place, largest, color="#EEEEEE", height=0.5)
        ax.barh(place, speed, color=colour, height=0.5)
    ax.set_yticks([])
    for place, (name, speed, colour) in enumerate(rows):
        text = f"{name}: {short_number(speed)} images/s"
        if place == 0 and len(rows) == 2:
            text += f"  (× {value / rows[1][1]:.2f})"
        ax.text(0, place - 0.33, text, ha="left", va="bottom", color=colour, fontweight="bold")
    ax.set_ylim(len(rows) - 0.4, -0.8)
    ax.set_xlim(0, largest)
    ax.set_xlabel("throughput (images/s)")
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def _split(ax: Axes, record: Record) -> None:
    split = mean_split(record)
    ax.set_title(f"Where does a step of {human_seconds(sum(split.values()))} go?")
    waterfall(ax, {name: 1000 * seconds for name, seconds in split.items()}, lambda ms: human_seconds(ms / 1000))
    ax.set_xlabel(f"time in a step (ms), mean of {len(record.steps) - record.warmup} steps")


def _memory(ax: Axes, parts: dict[str, int], peaks: list[int], kind: str | None, hardware: dict) -> None:
    unit, name = memory_unit(max(peaks))
    label = kind or "of unknown origin"
    if parts:
        ax.set_title(f"Where do {human_bytes(max(peaks))} go? ({label})")
        waterfall(ax, {part: size / unit for part, size in parts.items() if size}, lambda x: human_bytes(x * unit))
        ax.set_xlabel(f"memory at the peak ({name})")
        return
    ax.set_title(f"How much memory? ({label})")
    ranks = range(len(peaks))
    ax.barh(ranks, [peak / unit for peak in peaks], color=COLOURS["activations"], height=0.6)
    capacity = hardware.get("device_memory_bytes", 0) if hardware.get("device_type") == "cuda" else 0
    ax.set_xlim(0, 1.05 * max(capacity, *peaks, 1) / unit)
    if capacity:
        ax.axvline(capacity / unit, color=RED, linestyle="--")
        ax.text(capacity / unit, -0.45, f"{human_bytes(capacity)} on the card ", ha="right", va="bottom", color=RED)
    names = [f"rank {rank}" for rank in ranks] if len(peaks) > 1 else [human_bytes(peaks[0])]
    ax.set_yticks(ranks, names)
    ax.set_ylim(len(peaks) - 0.4, -0.9)
    ax.set_xlabel(f"peak memory ({name})")
    ax.grid(visible=False, axis="y")


def _losses(ax: Axes, record: Record) -> None:
    ax.set_title("Does it learn?")
    ax.plot(range(1, len(record.losses) + 1), record.losses, color=BLUE)
    ax.set_xlabel("step")
    ax.set_ylabel("training loss")


def _step_times(ax: Axes, record: Record) -> None:
    ax.set_title("Are the steps alike?")
    milliseconds = [1000 * step["total"] for step in record.steps]
    numbers = range(1, len(milliseconds) + 1)
    ax.plot(numbers, milliseconds, color=BLUE, marker="o", markersize=4, linewidth=1)
    if record.warmup:
        ax.axvspan(0.5, record.warmup + 0.5, color="#EEEEEE")
    ax.set_xlim(0.5, len(milliseconds) + 0.5)
    ax.set_ylim(0, 1.1 * max(milliseconds))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("step (grey: warm-up, not counted)" if record.warmup else "step")
    ax.set_ylabel("time (ms)")


def _power(ax: Axes, record: Record) -> None:
    watts = record.power["watts"]
    ax.set_title(f"How much power? Mean {sum(watts) / len(watts):.0f} W")
    seconds = record.power.get("seconds") or range(len(watts))
    ax.plot(seconds, watts, color=RED)
    ax.set_ylim(0, 1.1 * max(watts))
    ax.set_xlabel("time (s)" if record.power.get("seconds") else "sample")
    ax.set_ylabel("power (W)")
