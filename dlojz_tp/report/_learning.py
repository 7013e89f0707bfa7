"""Does a network learn?"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dlojz_tp.measure import Record

from ._style import GREY, Chart, as_records, style


def learning(runs: Record | Sequence[Record] | Mapping[str, Sequence[float]], classes: int | None = None) -> Chart:
    """Show loss and accuracy as they develop, with the accuracy of guessing.

    Args:
        runs: a record, several records, or curves by name; a curve whose name holds "loss" is a loss, one
            a step, any other is an accuracy from 0 to 1, one an epoch.
        classes: number of classes, for the line of chance; ``None`` takes ``num_classes`` from the settings.

    Returns:
        A figure.

    Raises:
        ValueError: if there is no curve, or an accuracy is not between 0 and 1.
    """
    losses, accuracies, found = _curves(runs)
    classes = classes or found
    if not losses and not accuracies:
        raise ValueError("no curve to show: give losses or accuracy")
    for name, curve in accuracies.items():
        if any(value < 0 or value > 1 for value in curve):
            raise ValueError(f"the accuracy {name!r} goes from 0 to 1; divide a percentage by 100")
    panels = [panel for panel in (losses, accuracies) if panel]
    with style():
        figure = Chart(width=10.5 if len(panels) == 2 else 7, height=3.8)
        axes = iter(figure.subplots(1, len(panels), squeeze=False)[0])
        if losses:
            ax = next(axes)
            ax.set_title("Does the loss fall?")
            _draw(ax, losses, "step", "loss")
        if accuracies:
            ax = next(axes)
            ax.set_title("Is it better than guessing?")
            _draw(ax, {name: [100 * value for value in curve] for name, curve in accuracies.items()}, "epoch",
                  "accuracy (%)")  # fmt: skip
            ax.set_ylim(0, 100)
            if classes:
                ax.axhline(100 / classes, color=GREY, linestyle="--", label=f"chance: {100 / classes:.1f} %")
            ax.legend(loc="best")
    return figure


def _curves(runs: Any) -> tuple[dict, dict, int | None]:
    """Sort what is given into losses and accuracies, and find the number of classes."""
    if isinstance(runs, Mapping):
        curves = {name: [float(value) for value in curve] for name, curve in runs.items() if len(curve)}
        losses = {name: curve for name, curve in curves.items() if "loss" in name.lower()}
        return losses, {name: curve for name, curve in curves.items() if name not in losses}, None
    records = as_records(runs)
    # Two runs of the same name are two runs.
    names = [record.name for record in records]
    names = [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]
    losses = {name: record.losses for name, record in zip(names, records, strict=True) if record.losses}
    accuracies = {name: record.accuracy for name, record in zip(names, records, strict=True) if record.accuracy}
    return losses, accuracies, next((r.settings["num_classes"] for r in records if "num_classes" in r.settings), None)


def _draw(ax: Axes, curves: dict[str, list[float]], x: str, y: str) -> None:
    for name, curve in curves.items():
        # Points on a short curve: a single value would be no line at all.
        marker = "o" if len(curve) <= 30 else None
        ax.plot(range(1, len(curve) + 1), curve, marker=marker, label=name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if max(map(len, curves.values())) == 1:
        ax.set_xticks([1])
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.legend(loc="best")
