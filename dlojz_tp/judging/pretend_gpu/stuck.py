"""Where messages would wait for each other without end on NCCL: each rank has one queue for each group, in order."""

from typing import NamedTuple


class Message(NamedTuple):
    """A collective, or a message to or from a peer, as a rank has started it.

    kind: "send", "recv" or a collective's name. ranks: of its group; peer: a global rank, None for a collective.
    batch: of one batch_isend_irecv, started together. number: in its rank's and group's queue. after: {group: number},
    what this rank's stream has waited for before, so that this one waits too.
    """

    kind: str
    group: str
    ranks: tuple
    peer: int | None
    bytes: int
    batch: int | None
    number: int
    after: dict


def stuck(schedules: list[list[Message]]) -> dict[int, list[Message]] | None:
    """Where NCCL would hang: the heads of the queues of each rank that cannot go on; None if all go through.

    schedules: `gpu.messages` of each rank. gloo, which carries the messages here, has no such queue, and hides it.
    """
    queues: dict[tuple[int, str], list[list[Message]]] = {}
    for rank, messages in enumerate(schedules):
        for message in messages:
            steps = queues.setdefault((rank, message.group), [])
            if message.batch is not None and steps and steps[-1][0].batch == message.batch:
                steps[-1].append(message)
            else:
                steps.append([message])
    while _one_goes(queues):
        pass
    left: dict[int, list[Message]] = {}
    for (rank, _), steps in queues.items():
        if steps:
            left.setdefault(rank, []).extend(steps[0])
    return left or None


def _one_goes(queues) -> bool:
    for (rank, group), steps in queues.items():
        for message in list(steps[0]) if steps else ():
            met = _met(queues, rank, group, message)
            if met:
                for other, its in met:
                    head = queues[other, group][0]
                    head.remove(its)
                    if not head:
                        queues[other, group].pop(0)
                return True
    return False


def _met(queues, rank, group, message):
    """The heads that pass with this one, [(rank, message)]; None if somebody is not there."""
    found = []
    for other in message.ranks if message.peer is None else (rank, message.peer):
        head = (queues.get((other, group)) or [[]])[0]
        its = next((m for m in head if m is message or other != rank and _fits(m, message, rank)), None)
        if its is None or not _free(queues, other, its):
            return None
        found.append((other, its))
    return found


def _fits(its, message, rank) -> bool:
    if message.peer is None:
        return its.peer is None and its.kind == message.kind
    return its.peer == rank and {its.kind, message.kind} == {"send", "recv"}


def _free(queues, rank, message) -> bool:
    """Whether all that its stream waits for has passed."""
    for group, number in message.after.items():
        steps = queues.get((rank, group))
        if group != message.group and steps and any(m.number <= number for m in steps[0]):
            return False
    return True
