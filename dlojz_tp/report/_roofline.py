"""The roofline: what a machine can reach, against the operations done for each byte moved."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from ._style import GREY, Chart, short_number, style

LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
MARKERS = "osD^vPX*"


def roofline(
    points: Mapping[str, tuple[float, float | None]],
    machines: Mapping[str, tuple[float, float]],
    title: str = "What limits each layer: computing or memory?",
) -> Chart:
    """Show the roofs of machines, and layers under them.

    Args:
        points: name of a layer to ``(intensity in FLOP per byte, measured FLOP/s)``; ``None`` for a rate that was not
            measured draws an open mark on each machine's roof: what the layer could reach at best.
        machines: name to ``(peak in FLOP/s, memory bandwidth in byte/s)``; at least one.
        title: of the figure.

    Returns:
        A figure; both axes logarithmic.

    Raises:
        ValueError: without a machine, or for a number that is not positive.

    Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", Communications of the ACM 52(4), 2009.
    """
    if not machines:
        raise ValueError("a roofline needs a machine: give {name: (peak FLOP/s, bandwidth byte/s)}")
    numbers = [*(x for pair in machines.values() for x in pair), *(x for pair in points.values() for x in pair)]
    if not all(math.isfinite(x) and x > 0 for x in numbers if x is not None):
        raise ValueError("peaks, bandwidths, intensities and rates are finite numbers above 0")
    ridges = [peak / bandwidth for peak, bandwidth in machines.values()]
    intensities = [intensity for intensity, _ in points.values()]
    low, high = min([*ridges, *intensities]) / 5, max([*ridges, *intensities]) * 5
    with style():
        figure = Chart(height=4.4)
        ax = figure.subplots()
        ax.set_title(title)
        for colour, (name, machine) in zip(_repeat(LINES), machines.items()):
            _roof(ax, name, *machine, low, high, colour)
        for marker, (name, (intensity, rate)) in zip(_repeat(MARKERS), points.items()):
            _point(ax, name, intensity, rate, machines, marker)
        ax.set(xscale="log", yscale="log", xlim=(low, high))
        bottom, top = ax.get_ylim()
        ax.set_ylim(10 ** math.floor(math.log10(bottom)), 10 ** math.ceil(math.log10(top)))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("arithmetic intensity (FLOP per byte)")
        ax.set_ylabel("rate (FLOP/s)")
        ax.yaxis.set_major_formatter(lambda y, _: _rate(y))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        figure.legend(*ax.get_legend_handles_labels(), loc="outside right center")
    return figure


def _roof(ax: Axes, name: str, peak: float, bandwidth: float, low: float, high: float, colour: str) -> None:
    ridge = peak / bandwidth
    ax.plot(
        [low, ridge, high], [low * bandwidth, peak, peak], color=colour, label=f"{name}: ridge at {short_number(ridge)}"
    )
    ax.axvline(ridge, color=colour, linewidth=1, linestyle=":")


def _point(ax: Axes, name: str, intensity: float, rate: float | None, machines: Mapping, marker: str) -> None:
    label = f"{name}  ({short_number(intensity)} FLOP/byte)"
    if rate is None:
        roofs = [min(peak, bandwidth * intensity) for peak, bandwidth in machines.values()]
        ax.plot([intensity] * len(roofs), roofs, marker, color=GREY, markerfacecolor="white", label=label, zorder=3)
    else:
        ax.plot([intensity], [rate], marker, color="black", label=f"{label}: {_rate(rate)}", zorder=3)


def _repeat(values):
    while True:
        yield from values


def _rate(value: float) -> str:
    """Write FLOP/s, for example "312 T"."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"
