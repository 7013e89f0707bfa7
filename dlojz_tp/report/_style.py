"""The look that all figures share."""

import io
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib import rc_params_from_file, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.style import context
from PIL import Image

from dlojz_tp.measure import PHASES, Record, counted_steps

COLOURS = {
    "loading": "#E69F00",
    "copy": "#56B4E9",
    "forward": "#0072B2",
    "step": "#0072B2",
    "backward": "#009E73",
    "communication": "#CC79A7",
    "optimizer": "#D55E00",
    "other": "#999999",
    "parameters": "#0072B2",
    "buffers": "#999999",
    "gradients": "#D55E00",
    "optimizer states": "#CC79A7",
    "inputs": "#56B4E9",
    "activations": "#009E73",
}
STYLE = Path(__file__).with_name("course.mplstyle")
BLUE, RED, GREY = "#0072B2", "#D55E00", "#666666"


class Chart(Figure):
    """A figure that keeps the course's style whenever it is drawn, and that a notebook shows once.

    A figure made with pyplot would be shown twice: as the value of the cell, and as an open figure at its end.
    """

    def __init__(self, width: float = 10.5, height: float = 4.0):
        """Make an empty figure; width and height in inches, at 100 dots an inch."""
        with style():
            super().__init__(figsize=(width, height), dpi=100, layout="constrained")
            self.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.04, hspace=0.04)
        if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
            # pyplot tells notebooks to show a Figure as a PNG four times as large: say so for this class.
            shell.display_formatter.formatters["image/png"].for_type(Chart, Chart.png)

    def draw(self, renderer: Any) -> None:
        with style():
            super().draw(renderer)

    def png(self) -> bytes:
        """Give the figure as a PNG file of few bytes: flat colours need no more than a palette of 128."""
        full, small = io.BytesIO(), io.BytesIO()
        self.savefig(full, format="png", dpi=self.dpi)
        Image.open(full).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "png", optimize=True)
        return small.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def style():
    """Give the context in which the course's figures are drawn."""
    return context(STYLE)


def ground():
    """Give the figures that a notebook draws with pyplot the resolution and the ground of the course's own."""
    chosen = rc_params_from_file(STYLE, use_default_template=False)
    rcParams.update({name: chosen[name] for name in ("figure.dpi", "figure.facecolor", "axes.facecolor")})


def as_records(records: Any) -> list[Record]:
    """Check that there is at least one record, and that all are records.

    Args:
        records: a record or a sequence of records.

    Returns:
        A list of records.

    Raises:
        ValueError: if it is empty.
        TypeError: if it holds anything else.
    """
    records = [records] if isinstance(records, Record) else list(records)
    if not records:
        raise ValueError("no record to show: run something first")
    for record in records:
        if not isinstance(record, Record):
            raise TypeError(f"expected a run record, got {type(record).__name__}: see measure.load")
    return records


def mean_split(record: Record) -> dict[str, float]:
    """Give the mean seconds of each phase of the counted steps, what no phase covers as "other".

    Args:
        record: a run record.

    Returns:
        Phase to seconds, in the order of a step; empty if no step counts.
    """
    steps = counted_steps(record)
    if not steps:
        return {}
    found = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in PHASES}
    found = {name: seconds for name, seconds in found.items() if any(name in step for step in steps)}
    total = sum(step["total"] for step in steps) / len(steps)
    rest = total - sum(found.values())
    # Less than 1 % outside the phases is the loop itself, and would only add a row.
    return found | ({"other": rest} if rest > 0.01 * total else {})


def waterfall(ax: Axes, sizes: dict[str, float], write: Any) -> None:
    """Draw parts of a whole, one a row, each beginning where the one before ends.

    Args:
        ax: where to draw.
        sizes: name to size.
        write: turns a size into text.
    """
    total = sum(sizes.values()) or 1.0
    begin = 0.0
    for row, (name, size) in enumerate(sizes.items()):
        ax.barh(row, size, left=begin, color=COLOURS.get(name, GREY), height=0.72)
        text = f"{write(size)} · {100 * size / total:.0f} %"
        # Text goes where there is more room: right of the bar, or left of it.
        if begin + size < 0.6 * total:
            ax.text(begin + size + 0.015 * total, row, text, va="center", ha="left")
        elif begin > 0.4 * total:
            ax.text(begin - 0.015 * total, row, text, va="center", ha="right")
        else:
            ax.text(begin + size / 2, row, text, va="center", ha="center", color="white", fontweight="bold")
        begin += size
    ax.set_yticks(range(len(sizes)), list(sizes))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(sizes) - 0.4, -0.6)
    ax.set_xlim(0, total)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def memory_unit(largest: float) -> tuple[float, str]:
    """Choose a unit for a memory axis.

    Args:
        largest: bytes.

    Returns:
        Bytes in the unit, and its name.
    """
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def where_and_when(record: Record) -> str:
    """Give the device and the day of a record, for example ``"NVIDIA H200, 2026-11-21"``."""
    try:
        day = datetime.fromisoformat(record.date).date().isoformat()
    except ValueError:
        day = record.date
    return ", ".join(part for part in (record.hardware.get("device_name", ""), day) if part)


THREE_DIGITS = 100


def short_number(value: float) -> str:
    """Write a rate in three digits or all before the point, for example ``"1,234"`` or ``"8.2"``."""
    return f"{value:,.0f}" if value >= THREE_DIGITS else f"{value:.3g}"
