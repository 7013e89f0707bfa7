"""Simulate a pipeline: which action runs when, who waits, how much memory is kept."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .collectives import Link
from .pipeline_orders import Action, Deadlock, name_of, read_orders, same_order_on_both_sides


class PipelineEvent(NamedTuple):
    """One action on the clock: seconds from the start."""

    rank: int
    kind: str
    micro_batch: int
    stage: int
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found. Lists have one entry a rank.

    events: all actions, by begin. seconds: of the whole step. busy: seconds that a rank computes. bubble: share of all
    ranks' time that is idle, 0 to 1. in_flight: peak number of forwards (micro-batch × stage) whose activations are
    kept. peak_bytes: peak bytes of these activations.
    """

    events: list[PipelineEvent]
    seconds: float
    busy: list[float]
    bubble: float
    in_flight: list[int]
    peak_bytes: list[float]


def simulate(
    orders: Sequence[Sequence[tuple]],
    costs: Mapping[str, float | Sequence[float]],
    *,
    link: Link | None = None,
    message_bytes: float | Sequence[float] = 0.0,
    activation_bytes: float | Sequence[float] = 1.0,
    weight_bytes: float | Sequence[float] | None = None,
    blocking_sends: bool = False,
) -> Simulation:
    """Run one training step of a pipeline on paper.

    A rank does its actions in order. It begins an action when the one before is through and what it needs has come: a
    forward needs the activation of the stage before, a backward the gradient of the next stage, also its own
    forward. Sends run beside computing; a link carries one message at a time in each direction.

    Args:
        orders: for each rank, its actions `(kind, micro_batch)` or `(kind, micro_batch, stage)`; without a stage, the
            stage is the rank. kind: "F" forward, "B" whole backward, or its two halves: "I" gradient of the input,
            "W" gradients of the weights.
        costs: kind -> seconds; a number, or one a stage.
        link: between any two ranks; ``None``: messages take no time.
        message_bytes: bytes of the activation that a stage sends on, and of its gradient; a number, or one a stage.
        activation_bytes: kept for a micro-batch from its forward until its backward (with "I" and "W": until "W").
        weight_bytes: what of them is still kept between "I" and "W"; ``None``: all.
        blocking_sends: a send ends only when the peer receives, as with `dist.send` and large messages.

    Returns:
        `Simulation`.

    Raises:
        ScheduleError: for actions that are missing, doubled, unknown, or before what they need on their own rank.
        OrdersDiffer: where a rank takes messages in another order than its neighbour sends them.
        Deadlock: when the ranks wait for each other; the text says who waits for what.
        ValueError: for costs that are missing or negative.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    §2.2 (dependencies and bubble); Qi et al. 2023, "Zero bubble pipeline parallelism", §2 (I and W).
    """
    orders, rank_of = read_orders(orders)
    kinds = sorted({action.kind for order in orders for action in order})
    if missing := [kind for kind in kinds if kind not in costs]:
        raise ValueError(f"no cost for {', '.join(missing)}: give seconds for each of {', '.join(kinds)}")
    n_stages = len(rank_of)
    seconds = {kind: _per_stage(f"the cost of {kind}", costs[kind], n_stages) for kind in kinds}
    clock = _Clock(orders, rank_of, seconds, link, _per_stage("message_bytes", message_bytes, n_stages), blocking_sends)
    events = sorted(clock.run(), key=lambda event: (event.begin, event.rank, event.end))
    same_order_on_both_sides(orders, rank_of)
    total = max(event.end for event in events)
    busy = [sum(event.end - event.begin for event in events if event.rank == rank) for rank in range(len(orders))]
    kept = _per_stage("activation_bytes", activation_bytes, n_stages)
    left = kept if weight_bytes is None else _per_stage("weight_bytes", weight_bytes, n_stages)
    peaks = [_memory(order, kept, left) for order in orders]
    idle = 1 - sum(busy) / (total * len(orders)) if total else 0.0
    return Simulation(events, total, busy, idle, [number for number, _ in peaks], [size for _, size in peaks])


def _per_stage(what: str, given: float | Sequence[float], n_stages: int) -> list[float]:
    """One number a stage."""
    values = list(given) if isinstance(given, Sequence) else [given] * n_stages
    if len(values) != n_stages or not all(value >= 0 for value in values):
        raise ValueError(f"{what} is a number of 0 or more, or one for each of the {n_stages} stages, not {given}")
    return [float(value) for value in values]


def _memory(order: list[Action], kept: list[float], left: list[float]) -> tuple[int, float]:
    """Peak number of kept forwards, and of their bytes, of one rank."""
    number = size = most = largest = 0
    for kind, _, stage in order:
        if kind == "F":
            number, size = number + 1, size + kept[stage]
        elif kind == "I":
            size -= kept[stage] - left[stage]
        else:
            number, size = number - 1, size - (kept if kind == "B" else left)[stage]
        most, largest = max(most, number), max(largest, size)
    return most, float(largest)


class _Clock:
    """The ranks' programs, each a list of ("receive" | "compute" | "send", action), and how far each has come."""

    def __init__(self, orders, rank_of, seconds, link, message_bytes, blocking):
        self.rank_of, self.seconds, self.link, self.message_bytes = rank_of, seconds, link, message_bytes
        self.blocking = blocking
        self.programs = [[op for action in order for op in self._operations(action)] for order in orders]
        self.at = [0] * len(orders)  # next operation of each rank
        self.now = [0.0] * len(orders)
        self.ready: dict[tuple, float] = {}  # (is it a forward, micro-batch, stage) of the producer -> when it is here
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.events: list[PipelineEvent] = []

    def _operations(self, action: Action) -> list[tuple[str, Action]]:
        before = [("receive", action)] if self._needs(action) else []
        after = [("send", action)] if self._sends_to(action) is not None else []
        return [*before, ("compute", action), *after]

    def _needs(self, action: Action) -> tuple | None:
        """What must have come from the neighbour: (forward?, micro-batch, stage of the producer)."""
        forward = action.kind == "F"
        stage = action.stage - 1 if forward else action.stage + 1
        return (forward, action.micro_batch, stage) if action.kind != "W" and 0 <= stage < len(self.rank_of) else None

    def _sends_to(self, action: Action) -> int | None:
        """The rank that needs what this action makes."""
        stage = action.stage + 1 if action.kind == "F" else action.stage - 1
        return self.rank_of[stage] if action.kind != "W" and 0 <= stage < len(self.rank_of) else None

    def run(self) -> list[PipelineEvent]:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.programs)):
                while self.at[rank] < len(self.programs[rank]) and self._advance(rank):
                    moved = True
        if any(at < len(program) for at, program in zip(self.at, self.programs, strict=True)):
            raise Deadlock(self._who_waits())
        return self.events

    def _advance(self, rank: int) -> bool:
        """Do the next operation of a rank, if it can go on."""
        what, action = self.programs[rank][self.at[rank]]
        if what == "receive":
            need = self._needs(action)
            if need not in self.ready:
                return False
            self.now[rank] = max(self.now[rank], self.ready[need])
        elif what == "compute":
            begin = self.now[rank]
            self.now[rank] = begin + self.seconds[action.kind][action.stage]
            self.events.append(PipelineEvent(rank, *action, begin, self.now[rank]))
        elif not self._send(rank, action):
            return False
        self.at[rank] += 1
        return True

    def _send(self, rank: int, action: Action) -> bool:
        peer = self._sends_to(action)
        made = (action.kind == "F", action.micro_batch, action.stage)
        begin = self.now[rank]
        if peer == rank:  # the next stage is on the same rank: nothing travels
            self.ready[made] = begin
            return True
        if self.blocking:
            if not self._receives(peer, made):
                return False
            begin = max(begin, self.now[peer])
        # a gradient is as large as the activation that came the other way
        size = self.message_bytes[action.stage if action.kind == "F" else action.stage - 1]
        begin = max(begin, self.link_free[rank, peer])
        end = begin + (self.link.latency + size / self.link.bandwidth if self.link else 0.0)
        self.link_free[rank, peer] = self.ready[made] = end
        if self.blocking:
            self.now[rank] = end
        return True

    def _receives(self, rank: int, made: tuple) -> bool:
        """Whether this rank is at the receive of just this message."""
        if self.at[rank] == len(self.programs[rank]):
            return False
        what, action = self.programs[rank][self.at[rank]]
        return what == "receive" and self._needs(action) == made

    def _who_waits(self) -> str:
        lines = []
        for rank, program in enumerate(self.programs):
            if self.at[rank] == len(program):
                continue
            what, action = program[self.at[rank]]
            if what == "send":
                peer = self._sends_to(action)
                lines.append(f"rank {rank} sends its {name_of(action)} to rank {peer}, which is not receiving it")
            else:
                forward, micro_batch, stage = self._needs(action)
                need = f"{'forward' if forward else 'backward'} {micro_batch}"
                lines.append(f"rank {rank} waits before its {name_of(action)} for {need} of rank {self.rank_of[stage]}")
        return "deadlock: " + "; ".join(lines)
