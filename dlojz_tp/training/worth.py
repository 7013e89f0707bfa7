"""What a training step would be worth on a card that is not there: modelled, and always shown with that word."""

import html
from collections.abc import Callable, Mapping

from torchvision.models import resnet50

from dlojz_tp import modelled_gpu
from dlojz_tp.cards.render import Card
from dlojz_tp.launch import LaunchError, RankError
from dlojz_tp.measure import human_bytes, human_seconds
from dlojz_tp.training import training_run

HEAD = ("step", "images", "a step", "images/s", "against the first", "memory")


def table(
    steps: Mapping[str, Callable],
    *,
    card: str = "H100",
    batches: tuple[int, ...] = (128,),
    makes: Mapping[str, Callable] | None = None,
    loading: modelled_gpu.Loading | Mapping = modelled_gpu.Loading(),  # noqa: B008
) -> Card:
    """Steps of the training run at full size: ResNet-50, 224 pixels, 1,000 classes.

    Args:
        steps: name to step(model, images, labels, optimizer, device), as `training_run.run` takes it.
        card: a name of planner.CARDS.
        batches: images in a batch; each has lines of its own.
        makes: name of a step to its make_model(), where that is not a plain ResNet-50.
        loading: how batches come, for all steps or by name.
    """
    rows = []
    for batch in batches:
        first = None
        for name, step in steps.items():
            come = loading.get(name, modelled_gpu.Loading()) if isinstance(loading, Mapping) else loading
            make = (makes or {}).get(name, _model)
            try:
                run = modelled_gpu.train(
                    name,
                    step,
                    make,
                    training_run.make_optimizer,
                    (batch, 3, 224, 224),
                    card=card,
                    loading=come,
                    steps=1,
                )
            except (RankError, LaunchError) as error:
                rows.append((name, f"{batch:,}", f"no model of it: {str(error).splitlines()[0]}", "", "", ""))
                continue
            first = first or run
            factor = "" if run is first else f"× {run.images_per_second / first.images_per_second:.2f}"
            speeds = human_seconds(run.seconds), f"{run.images_per_second:,.0f}", factor
            rows.append((name, f"{batch:,}", *speeds, human_bytes(run.peak_memory)))
    return _table(f"modelled, {card}", rows)


def _model():
    return resnet50(num_classes=1000)


def _table(label, rows) -> Card:
    title = f"{label}: ResNet-50, 224 pixels. Nothing in this table was measured."
    note = (
        f"The model missed published throughputs by {100 * modelled_gpu.MEAN_MISS:.0f} % on average and by "
        f"{100 * modelled_gpu.LARGEST_MISS:.0f} % at most (benchmarks/modelled_gpu.py)."
    )
    lines = [(label, *HEAD[1:]), *rows]
    widths = [max(len(line[i]) for line in lines if i < 2 or not line[2].startswith("no model")) for i in range(6)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]

    def row(cells, tag):
        return (
            "<tr>" + "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
        )

    body = row(lines[0], "th") + "".join(row(cells, "td") for cells in rows)
    return Card("\n".join([title, *text, note]), f"<p>{title}</p><table>{body}</table><p>{note}</p>")
