"""The best layouts of a large model: where each one's time and memory go."""

from collections.abc import Sequence
from dataclasses import asdict

from dlojz_tp.planner import Plan

from ._style import COLOURS, GREY, Chart, style

TIMES = {
    "compute": "#0072B2", "elementwise": "#56B4E9", "tensor": "#CC79A7", "pipeline": "#882255", "bubble": "#DDDDDD",
    "data": "#009E73", "update": "#D55E00", "context": "#E69F00", "expert": "#F0E442", "jitter": "#999999",
}  # fmt: skip
BYTES = {"optimizer": COLOURS["optimizer states"], "gathered": GREY} | {
    name: COLOURS[name] for name in ("parameters", "gradients", "activations")
}


def plans(found: Sequence[Plan], memory: float | None = None, title: str = "Which layout trains fastest?") -> Chart:
    """Show layouts, one a row: seconds of a step in parts, bytes of the fullest rank in parts.

    Args:
        found: as `planner.search` gives them; at least one.
        memory: bytes of a card, drawn as a line; ``None`` for none.
        title: of the figure.

    Returns:
        A figure.

    Raises:
        ValueError: without a layout.
    """
    if not found:
        raise ValueError("no layout to show: give what planner.search found")
    with style():
        figure = Chart(height=2 + 0.34 * len(found))
        left, right = figure.subplots(1, 2, sharey=True)
        figure.suptitle(title)
        _bars(left, [asdict(plan.time) for plan in found], TIMES, 1, "seconds of a step (predicted)")
        _bars(right, [asdict(plan.memory) for plan in found], BYTES, 1e9, "GB of the fullest GPU (predicted)")
        if memory:
            right.axvline(memory / 1e9, color=GREY, linestyle="--")
        layouts = [plan.layout for plan in found]
        names = [f"{x.tensor} x {x.pipeline} x {x.data}, ZeRO {x.zero}" for x in layouts]
        left.set_yticks(range(len(found)), names)
        left.set_ylabel("tensor x pipeline x data")
        left.invert_yaxis()
    return figure


def _bars(ax, rows, colours, unit, label):
    """One stacked bar a row."""
    begins = [0.0] * len(rows)
    for part, colour in colours.items():
        sizes = [row[part] / unit for row in rows]
        if sum(sizes) > 0:
            ax.barh(range(len(rows)), sizes, left=begins, color=colour, label=part, height=0.7)
        begins = [begin + size for begin, size in zip(begins, sizes)]
    ax.set_xlabel(label)
    ax.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8, handlelength=1, columnspacing=1
    )
