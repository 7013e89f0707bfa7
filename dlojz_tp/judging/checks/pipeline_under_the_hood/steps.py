"""Balises 3, 4 and 6: what the checks of a step share."""

import contextlib

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import within
from dlojz_tp.judging.checking.wrong import fails
from dlojz_tp.judging.checks.pipeline_under_the_hood import common
from dlojz_tp.judging.checks.pipeline_under_the_hood.common import looked, right_step, stage_look, stage_mistake, stages

HINTS = {
    "other-cut": "The stage ran on micro-batches of {got} rows. tensor_split cuts {rows} rows into {expected}: "
    "other functions, such as chunk and split, cut differently, sometimes into fewer or more parts, "
    "and slices of len // n rows leave the last rows out.",
    "uneven-fails": "This is right when the batch divides evenly, but it fails when it doesn't: {error}. "
    "tensor_split cuts {rows} rows into {cut}.",
    "step-not-on-gpu": "On GPUs, something is in the CPU's memory: {error}. Start a sum on the loss's device, and "
    "receive on launch.device().",
    "too-many-bytes": "Rank {rank} sent {got} bytes, but activations, gradients and their headers take at most "
    "{allowed}.",
}
ACTIVATION = 8 * 8  # bytes of the widest row


def in_any_order(*given, **more):
    """on_ranks(…); for an answer that computes its neighbours, on two stages and one: there it finds the right ones."""
    try:
        return common.on_ranks(*given, **more)
    except Wrong as wrong:
        if wrong.slug != "not-a-neighbour":
            raise
        fails(wrong)
        return common.on_ranks(*given, **more | {"sizes": (2, 1)})


@contextlib.contextmanager
def last_look():
    """Inside, whatever is looked at only at an input or a device of its own: a mistake at the edge ends it."""
    try:
        yield
    except Wrong as wrong:
        fails(wrong)


def case(found, number: int) -> dict[int, list]:
    """{size: what the steps of one case gave, in the order of the stages}"""
    return {
        size: sorted((rank[number] for rank in ranks), key=lambda got: got["stage"]) for size, ranks in found.items()
    }


def forwards(got) -> list[int]:
    """The rows of each forward."""
    return [rows for kind, rows, _ in got["seen"] if kind == "F"]


def right_cut(claim, worlds, rows, pieces):
    """Judge whether each step ran on micro-batches of as many rows as tensor_split makes; if so, the step itself."""
    pairs = stages(worlds, rows, pieces)
    yield from looked(claim, [ROWS], pairs)
    if not any(_other_cut(got, at) for got, at in pairs):
        yield from right_step(claim, worlds, rows, pieces)


def _inputs(got):
    """Of each of two steps, the first numbers of what the stage ran on, sorted: micro-batches go in any order."""
    numbers = [first for kind, _, first in got["seen"] if kind == "F"]
    half = len(numbers) // 2
    return [sorted(numbers[:half]), sorted(numbers[half:])]


def _other_cut(got, at):
    counts, due = forwards(got), common.row_counts(at.rows, at.pieces)
    if sorted(counts) == sorted(got["calls"] * due):
        return None
    shown, cut = (", ".join(map(str, some)) for some in (counts[: len(counts) // got["calls"]], due))
    return "other-cut", {"got": shown, "expected": cut, "rows": at.rows}


def _too_many_bytes(sent, at):
    """Each row crosses a cut twice, forward on one side and back on the other; a header may take 256 bytes."""
    allowed = 2 * (2 * at.rows * ACTIVATION) + 2 * at.pieces * 2 * 256
    return ("too-many-bytes", {"rank": at.stage, "got": sent, "allowed": allowed}) if sent > allowed else None


ROWS = stage_mistake(common.itself, _other_cut)
CROSSING = [
    stage_mistake("bytes", _too_many_bytes),
    stage_look(_inputs, lambda seen, at: within(1e-6)(seen, [sorted(common.firsts(at))] * 2), "not-its-input",
               common.beside(common.firsts)),
]  # fmt: skip
