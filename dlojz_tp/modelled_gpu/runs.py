"""Programs that run on a modelled card, and what they give: always with the word "modelled" and the card's name."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental import _config as shapes

from dlojz_tp import launch, measure
from dlojz_tp.judging.pretend_gpu import pretend_gpu
from dlojz_tp.launch import place
from dlojz_tp.modelled_gpu.clock import Clock, Span
from dlojz_tp.modelled_gpu.rates import rates
from dlojz_tp.planner.cards import Card
from dlojz_tp.planner.cluster import Cluster
from dlojz_tp.scale import brief

NO_MODEL = "no model of it: "
NOTHING = NO_MODEL + "it does nothing on the card"


@dataclass(frozen=True)
class Modelled:
    """What a program was worth on a modelled card.

    label: "modelled, H100". result: what the program returned. spans: what the CPU, the streams and the bus did, with
    times in seconds. peak_memory: bytes of tensors on the card.
    """

    label: str
    name: str
    result: Any
    spans: list[Span]
    peak_memory: int

    @property
    def record(self) -> measure.Record:
        """The run record, where the program returned one: `train` does."""
        return self.result

    @property
    def seconds(self) -> float:
        """Median of the steps that count, where the program returned a run record; else all that is in `spans`."""
        if isinstance(self.result, measure.Record):
            return statistics.median(step["total"] for step in measure.counted_steps(self.record))
        return max(span.end for span in self.spans)

    @property
    def images_per_second(self) -> float:
        return self.record.images_per_second

    def __str__(self):
        if not isinstance(self.result, measure.Record):
            return f"{self.label}: {self.name}, {measure.human_seconds(self.seconds)}"
        return (f"{self.label}: {self.name}, {measure.human_seconds(self.seconds)} a step, "
                f"{self.images_per_second:,.0f} images/s, {self.peak_memory / 2**30:.1f} GiB")  # fmt: skip


@dataclass(frozen=True)
class Loading:
    """How batches come: seconds that one process takes for one, processes (0: the program's own), pinned memory,
    batches that each process makes ahead; prefetched: copied to the card one ahead, in a separate stream."""

    seconds: float = 0.0
    workers: int = 0
    pinned: bool = True
    ahead: int = 2
    prefetched: bool = False


def on_card(program: Callable, *args, card: str | Card = "H100", name: str = "", timeout: float = 120) -> Modelled:
    """Call program(clock, *args) on a process that has this card, where tensors have shapes and no values.

    The whole of a step's code may be in it: `torch.device("cuda")`, streams, events, autocast, torch.compile. What
    reads a value gets 0. Seconds are the modelled card's and its CPU's, for all that asks `clock`, events, Chronometer.
    """
    with place.on_cpu():  # the machine's own GPUs have no part in it
        return launch.ranks(_in_rank, program, args, card, name, n=1, timeout=timeout)[0]


def on_ranks(
    program: Callable, *args, n: int = 2, card: str | Card = "H100", network: float | None = None, name: str = "",
    timeout: float = 30,
) -> list[Modelled]:  # fmt: skip
    """Call program(clock, *args) on `n` ranks with such a card each: as `on_card`, with process groups like NCCL's.

    network: bytes a second that each rank sends to others, one way, where each is in a separate node; None: all are
    in nodes of 8, with the card's own links inside and its maker's network between.
    Returns what each rank gave. Messages take the time of the planner's formulas, and carry no values.
    """
    card = rates(card).card
    cluster = Cluster(card) if network is None else Cluster(replace(card, network=network), node=1)
    with place.on_cpu():  # the machine's own GPUs have no part in it
        return launch.ranks(_in_rank, program, args, card, name, cluster, n=n, timeout=timeout)


def each_on_ranks(programs: Mapping[str, tuple], **where) -> dict[str, list[Modelled]]:
    """`on_ranks` for each (program, *args), by name; of one that fails there, as a trainee's may, a line tells why.

    where: n, card and network, for all. Under tests the last program alone.
    """
    found = {}
    for name, (program, *args) in list(programs.items())[-1 if brief() else 0 :]:
        ranks, why = tried(on_ranks, program, *args, name=name, **where)
        if ranks and all(run.spans for run in ranks):
            found[name] = ranks
        else:
            print(f"{name}: {why or NOTHING}")
    return found


def tried(model: Callable, *args, **kwargs) -> tuple:
    """(what the model gives, ""), or (None, why there is none): programs are trainees' own, right or wrong.

    TypeError: a program refers to what cannot be sent to a rank.
    """
    try:
        return model(*args, **kwargs), ""
    except (launch.RankError, launch.LaunchError, TypeError) as error:
        return None, f"{NO_MODEL}{str(error).splitlines()[0]}"


def clock_of(card: str) -> Clock:
    """The clock of this process in a rehearsal at full size."""
    shapes.meta_nonzero_assume_all_nonzero = True  # a mask keeps all: what it is has no values
    return Clock(rates(card), Cluster(rates(card).card) if dist.is_initialized() else None)


def _in_rank(program, args, card, name, cluster=None):
    clock, n = Clock(rates(card), cluster), dist.get_world_size()
    shapes.meta_nonzero_assume_all_nonzero = True  # a mask keeps all: what it is has no values
    with pretend_gpu(n, int(clock.rates.card.memory), nccl=cluster is not None, clock=clock) as gpu:
        result = program(clock, *args)
        spans = clock.finish()
        if isinstance(result, measure.Record) and result.peak_memory_bytes:
            result.memory_kind = "estimated"
        return Modelled(clock.label, name, result, spans, gpu.peak[dist.get_rank()])


def train(
    name: str,
    step: Callable,
    make_model: Callable,
    make_optimizer: Callable,
    images: tuple,
    classes: int = 1000,
    *,
    card: str = "H100",
    loading: Loading = Loading(),  # noqa: B008
    steps: int = 2,
) -> Modelled:
    """A few steps of a training loop at full size, with loading: what would they be worth on a card?

    Args:
        name: what runs, as figures show it.
        step: called as step(model, images, labels, optimizer, device), as in training_run.
        make_model: make_model(), on the CPU or on the GPU. make_optimizer: make_optimizer(parameters).
        images: shape of a batch, (b, 3, h, w).
        loading: how batches come.

    Returns:
        The model of it, with a run record whose phases are "loading" and "step".
    """
    args = name, step, make_model, make_optimizer, images, classes, loading, steps
    return on_card(_train, *args, card=card, name=name)


def _train(clock, name, step, make_model, make_optimizer, images, classes, loading, steps):
    device = torch.device("cuda")
    model = make_model().to(device)
    optimizer = make_optimizer(model.parameters())
    model.train()
    chrono = measure.Chronometer(device, warmup=1)
    come = batches(clock, images, classes, loading)
    for batch in chrono.steps(prefetched(come, device) if loading.prefetched else come, n=1 + steps):
        with chrono.step():
            step(model, *batch, optimizer, device)
    return chrono.record(name, batch_size=images[0], image_size=images[-1], card=clock.label)


def batches(clock: Clock, images: tuple, classes: int, loading: Loading) -> Iterator[tuple]:
    """Batches (images, labels) without end, each when its process has made it: for what a step's loop goes through."""
    ready, taken = [], []
    while True:
        if not loading.workers:
            clock.works("loading", loading.seconds)
        else:
            i, w = len(ready), loading.workers
            room = taken[i - w * loading.ahead] if i >= w * loading.ahead else 0.0
            ready.append(max(ready[i - w] if i >= w else 0.0, room) + loading.seconds)
            if ready[i] > clock.host:
                clock.spans.append(Span("CPU", "waiting for a batch", clock.host, ready[i]))
                clock.host = ready[i]
            taken.append(clock.host)
        batch = torch.empty(images), torch.zeros(images[0], dtype=torch.int64)
        yield tuple(x.pin_memory() for x in batch) if loading.pinned else batch


def prefetched(come: Iterator[tuple], device: torch.device) -> Iterator[tuple]:
    """Each batch on the device, whose copy was started before the one in front of it was handed over."""
    side, waiting = torch.cuda.Stream(device), []
    for batch in come:
        with torch.cuda.stream(side):
            waiting.append((tuple(x.to(device, non_blocking=True) for x in batch), side.record_event()))
        if len(waiting) > 1:
            moved, copied = waiting.pop(0)
            torch.cuda.current_stream(device).wait_event(copied)
            yield moved
