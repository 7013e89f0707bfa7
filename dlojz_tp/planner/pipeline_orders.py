"""Orders of a pipeline as data: read, checked, with words for what is wrong."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight backward"}


class ScheduleError(ValueError):
    """An order that cannot be a training step."""


class Deadlock(ScheduleError):
    """Orders in which ranks wait for each other without end."""


class OrdersDiffer(ScheduleError):
    """Orders in which two neighbours do not agree which message comes next."""


class Action(NamedTuple):
    """kind: "F", "B", "I" or "W"; number of the micro-batch; number of the stage, along the model."""

    kind: str
    micro_batch: int
    stage: int


def name_of(action: Action) -> str:
    """Words for an action: "forward 3"."""
    return f"{KINDS[action.kind]} {action.micro_batch}"


def read_orders(orders: Sequence[Sequence[tuple]]) -> tuple[list[list[Action]], list[int]]:
    """Check the orders of all ranks, whatever their timing.

    Returns the orders as `Action`s, and for each stage the rank that holds it. Raises `ScheduleError`.
    """
    read = [[_action(action, rank) for action in order] for rank, order in enumerate(orders)]
    if not any(read):
        raise ScheduleError("no rank has anything to do")
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(read):
        for action in order:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(f"stage {action.stage} is on rank {rank_of[action.stage]} and on rank {rank}")
    n_stages, n_micro_batches = max(rank_of) + 1, 1 + max(a.micro_batch for order in read for a in order)
    for stage in range(n_stages):
        if stage not in rank_of:
            raise ScheduleError(f"stage {stage} is on no rank: it does nothing")
        _complete([a for a in read[rank_of[stage]] if a.stage == stage], stage, n_micro_batches)
    return read, [rank_of[stage] for stage in range(n_stages)]


def _action(given: tuple, rank: int) -> Action:
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        kind, *numbers = given
        if isinstance(kind, str) and kind in KINDS and all(type(n) is int and n >= 0 for n in numbers):
            return Action(kind, *numbers) if len(numbers) == 2 else Action(kind, *numbers, rank)
    raise ScheduleError(
        f'an action is ("F", micro_batch), ("B", micro_batch), or with a stage as third; rank {rank} has {given!r}'
    )


def _complete(actions: list[Action], stage: int, n_micro_batches: int) -> None:
    """Each micro-batch once forward, then once backward, whole or in its two halves."""
    done = set()
    for action in actions:
        what = f"stage {stage} does {name_of(action)}"
        if action in done:
            raise ScheduleError(f"{what} twice")
        before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
        if before and action._replace(kind=before) not in done:
            raise ScheduleError(f"{what} before its {KINDS[before]} {action.micro_batch}")
        other = {"B": "I", "I": "B"}.get(action.kind)  # a whole backward, or its first half: not both
        if other and action._replace(kind=other) in done:
            raise ScheduleError(f"{what} after it was done whole or in part: the gradient would count twice")
        done.add(action)
    for k in range(n_micro_batches):
        kinds = {action.kind for action in done if action.micro_batch == k}
        if kinds not in ({"F", "B"}, {"F", "I", "W"}):
            lacks = "F" if "F" not in kinds else "W" if "I" in kinds else "B"
            raise ScheduleError(f"stage {stage} never does {KINDS[lacks]} {k}")


def same_order_on_both_sides(orders: list[list[Action]], rank_of: list[int]) -> None:
    """Raise `OrdersDiffer` where a rank takes activations, or gradients, in another order than they are sent to it.

    Source: `torch.distributed.batch_isend_irecv` (messages between two ranks match by their order); NCCL has no tags.
    """
    sent, taken = defaultdict(list), defaultdict(list)  # (is it an activation, from, to) -> (micro-batch, its sender)
    for order in orders:
        for action in order:
            forward = action.kind == "F"
            ahead, back = (1, -1) if forward else (-1, 1)
            for table, stage, step in ((sent, action.stage, ahead), (taken, action.stage + back, ahead)):
                if action.kind == "W" or not (0 <= stage < len(rank_of) and 0 <= stage + step < len(rank_of)):
                    continue
                ends = rank_of[stage], rank_of[stage + step]
                if ends[0] != ends[1]:
                    table[forward, *ends].append((action.micro_batch, stage))
    for (forward, source, target), messages in sent.items():
        others = taken[forward, source, target]
        if messages != others:
            k = next(k for k, pair in enumerate(zip(messages, others, strict=True)) if pair[0] != pair[1])
            what = "activation" if forward else "gradient"
            raise OrdersDiffer(
                f"rank {source} sends the {what} of micro-batch {messages[k][0]} where rank {target} takes that of "
                f"{others[k][0]}: both sides of a cut have one order, for messages come as they were sent"
            )
