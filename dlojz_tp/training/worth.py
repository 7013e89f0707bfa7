"""What a training step would be worth on a card that is not there: modelled, and always shown with that word."""

import functools
import html
from collections.abc import Callable, Mapping
from unittest import mock

import torch
import torch.nn.functional as F
from torchvision.models import resnet50

from dlojz_tp import modelled_gpu
from dlojz_tp.cards.render import Card
from dlojz_tp.measure import human_bytes, human_seconds
from dlojz_tp.modelled_gpu import Loading
from dlojz_tp.modelled_gpu.runs import NO_MODEL, NOTHING, tried
from dlojz_tp.planner import CARDS
from dlojz_tp.scale import brief
from dlojz_tp.training import gains, training_run

HEAD = ("step", "images", "a step", "images/s", "against the first", "memory")


def here() -> str:
    """The name of this machine's card, if it can be modelled; else the H100."""
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return max((name for name in CARDS if name in found), key=len, default="H100")


class Mixed(torch.nn.Module):
    """ResNet-50 in channels last, its forward pass in bfloat16: images -> float32 logits."""

    def __init__(self):
        super().__init__()
        self.network = resnet50().to(memory_format=torch.channels_last)

    def forward(self, images):
        with torch.autocast("cuda", torch.bfloat16):
            return self.network(images.contiguous(memory_format=torch.channels_last)).float()


def compiled(make_step: Callable, **options) -> Callable:
    """A step of the training run in channels last, of the step(*batch) that make_step(loss_of, optimizer) gives.

    options: of torch.compile, for all that make_step compiles and says nothing else of.
    """
    made = []

    def step(model, images, labels, optimizer, device):
        if not made:
            with mock.patch.object(torch, "compile", functools.partial(torch.compile, **options)):
                made.append(make_step(lambda x, y: F.cross_entropy(model(x), y), optimizer))
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        return made[0](images, labels.to(device, non_blocking=True)), None

    return step


def table(
    steps: Mapping[str, Callable],
    *,
    card: str | None = None,
    batches: tuple[int, ...] = (128,),
    makes: Mapping[str, Callable] | Callable = resnet50,
    loading: Loading | Mapping = Loading(),  # noqa: B008
    keep: str | None = None,
    pair: tuple[str, str] | None = None,
) -> Card:
    """Steps of the training run at full size: ResNet-50, 224 pixels, 1,000 classes.

    Args:
        steps: name to step(model, images, labels, optimizer, device), as `training_run.run` takes it.
        card: a name of planner.CARDS; default `here()`.
        batches: images in a batch; each has lines of its own. Under tests the last one alone.
        makes: make_model(), for all steps or by name; a step without one gets a plain ResNet-50.
        loading: how batches come, for all steps or by name.
        keep: the practical work whose modelled gain this is, of the last batch size, kept for the table of gains.
        pair: names of the steps without and with the technique; default the first and the last.
    """
    card, rows, runs = card or here(), [], {}
    for batch in batches[-1:] if brief() else batches:
        first, runs = None, {}
        for name, step in steps.items():
            make = makes.get(name, resnet50) if isinstance(makes, Mapping) else makes
            come = loading.get(name, Loading()) if isinstance(loading, Mapping) else loading
            run, why = tried(
                modelled_gpu.train, name, step, make, training_run.make_optimizer, (batch, 3, 224, 224),
                card=card, loading=come, steps=1,
            )  # fmt: skip
            if why or not run.seconds:
                rows.append((name, f"{batch:,}", why or NOTHING, "", "", ""))
                continue
            first, runs[name] = first or run, run
            factor = "" if run is first else f"× {run.images_per_second / first.images_per_second:.2f}"
            speeds = human_seconds(run.seconds), f"{run.images_per_second:,.0f}", factor
            rows.append((name, f"{batch:,}", *speeds, human_bytes(run.peak_memory)))
    names = pair or (next(iter(steps)), list(steps)[-1])
    if keep and all(name in runs for name in names):
        loads = isinstance(loading, Mapping) or loading.seconds > 0
        gains.keep_modelled(keep, card, *(runs[name].record for name in names), loads=loads)
    return _table(card, "ResNet-50, 224 pixels", HEAD, rows)


def calls(makes: Mapping[str, Callable], *, card: str | None = None) -> Card:
    """Functions alone, called one after the other; make(device) prepares one, and returns what is called."""
    card, rows, first = card or here(), [], None
    for name, make in makes.items():
        run, why = tried(modelled_gpu.on_card, _a_call, make, card=card, name=name)
        seconds = run.result if run else 0
        if not seconds:
            rows.append((name, why or NOTHING, ""))
            continue
        rows.append((name, human_seconds(seconds), f"× {first / seconds:.2f}" if first else ""))
        first = first or seconds
    return _table(card, "each alone", ("", "a call", "against the first"), rows)


def _a_call(clock, make, repeats=4):
    call = make(torch.device("cuda"))
    for _ in range(2):  # the first fills the queue
        torch.cuda.synchronize()
        begin = clock.host
        for _ in range(repeats):
            call()
    torch.cuda.synchronize()
    return (clock.host - begin) / repeats


def _table(card, what, head, rows) -> Card:
    title = f"modelled, {card}: {what}. Nothing in this table was measured."
    lines = [(f"modelled, {card}", *head[1:]), *rows]
    whole = [line for line in lines if not any(cell.startswith(NO_MODEL) for cell in line)]
    widths = [max(len(line[i]) for line in (whole if i else lines)) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]

    def row(cells, tag):
        return (
            "<tr>" + "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
        )

    body = row(lines[0], "th") + "".join(row(cells, "td") for cells in rows)
    note = modelled_gpu.MISSED
    return Card("\n".join([title, *text, note]), f"<p>{title}</p><table>{body}</table><p>{note}</p>")
