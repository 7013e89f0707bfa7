"""Balises 3 and 4: the naive step, and the step in micro-batches."""

import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.pipeline_under_the_hood.common import (
    Place,
    batch,
    firsts,
    loss_function,
    my_stage,
    on_ranks,
    right_step,
    run_step,
)
from dlojz_tp.probes.gpus import left_on_cpu, on_gpus

HINTS = {
    "not-in-one-piece": "A stage ran {n} times for one batch. The naive step is one forward and one backward.",
    "not-cut": "A stage saw {got} rows at once, but micro-batches have at most {most}. Cut the batch with "
    "tensor_split and run the stage once for each part.",
    "run-too-often": "The stage ran forward {got} times for {m} micro-batches.",
    "other-cut": "The stage ran on micro-batches of {got} rows. tensor_split cuts {rows} rows into {expected}: "
    "other functions, such as chunk and split, cut differently, sometimes into fewer or more parts, "
    "and slices of len // n rows leave the last rows out.",
    "uneven-fails": "This is right when the batch divides evenly, but it fails when it doesn't: {error}. "
    "tensor_split cuts {rows} rows into {cut}.",
    "one-at-a-time": "The first stage waits for the gradient of a micro-batch before it sends the next one "
    "forward, so no two stages ever work at the same time. Run all forwards first, then all "
    "backwards.",
    "first-one-back": "Stage {stage} begins its backwards with the first micro-batch. Here the last one comes "
    "first: the last stage has just computed it.",
    "step-not-on-gpu": "On GPUs, something is in the CPU's memory: {error}. Start a sum on the loss's device, and "
    "receive on launch.device().",
    "too-many-bytes": "Rank {rank} sent {got} bytes, but activations, gradients and their headers take at most "
    "{allowed}.",
}
ACTIVATION = 8 * 8  # bytes of the widest row


def balise_3(naive_step):
    """Gradients, loss and messages of one batch on 1 to 4 stages; then once more."""
    yield "a batch of 12 through 1, 2, 3 and 4 stages: loss and every gradient"
    found = on_ranks(_naive, naive_step, (12, 1))
    worlds = case(found, 0)
    right_step(worlds, 12)
    yield "a second step adds its gradients; one forward per step, only what crosses a cut is sent"
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            forwards = sum(kind == "F" for kind, _, _ in got["seen"])
            if forwards != 2:
                raise Wrong("not-in-one-piece", n=forwards / 2, where=f"stage {rank} of {size}")
            _bytes(got, 12, 2, rank, size)
            own_inputs(got["seen"], rank, size, 12, 1)
    yield "a batch of one row"
    right_step(case(found, 1), 1)


def balise_4(gpipe_step):
    """Gradients and losses with even and uneven micro-batches; how the batch was cut, and in which order."""
    yield "12 rows in 4 micro-batches, on 1, 2, 3 and 4 stages: loss and every gradient"
    cases = ((12, 4), (9, 4), (5, 5), (7, 1))  # 9 rows in 4: chunk makes 3 of them, split 5
    try:
        found = on_ranks(_gpipe, gpipe_step, cases)
    except (launch.RankError, Wrong) as error:  # was it the first case? Its values may say more
        right_step(case(on_ranks(_gpipe, gpipe_step, cases[:1], sizes=(2, 3)), 0), 12, 4)
        if isinstance(error, launch.RankError):
            error, words = error.summary, ", ".join(map(str, row_counts(*cases[1])))
            raise Wrong(
                "uneven-fails", error=error, got=error, rows=9, cut=words, where="9 rows in 4 micro-batches"
            ) from None
        raise
    right_step(case(found, 0), 12, 4)
    yield "each micro-batch runs alone, all go forward before a gradient comes back, the last one goes back first"
    for size, ranks in case(found, 0).items():
        for rank, got in enumerate(ranks):
            _cut(got, 12, 4, rank, size)
    yield "9 rows in 4 micro-batches, 5 rows in 5, 7 rows in 1"
    for number, (rows, pieces) in enumerate(cases):
        right_rows(case(found, number), rows, pieces)
        right_step(case(found, number), rows, pieces, even=rows % pieces == 0)
    yield "and on two stages, each with a GPU"
    on_gpus(_on_gpu, gpipe_step, known=left_on_cpu("step-not-on-gpu"))


def case(found, number: int) -> dict[int, list]:
    """{size: what the steps of one case gave, in the order of the stages}"""
    return {
        size: sorted((rank[number] for rank in ranks), key=lambda got: got["stage"]) for size, ranks in found.items()
    }


def _naive(naive_step, cases):
    return [run_step(naive_step, lambda *given: naive_step(*given, loss_function), rows, calls=2) for rows in cases]


def _on_gpu(_, gpipe_step):
    place = Place(dist.get_rank(), dist.get_world_size())
    x, targets = (tensor.to(launch.device()) for tensor in batch(4))
    gpipe_step(my_stage(place.stage, place.n_stages), place, x, targets, loss_function, 2)


def _gpipe(gpipe_step, cases):
    return [
        run_step(gpipe_step, lambda *given, m=m: gpipe_step(*given, loss_function, m), rows, calls=2)
        for rows, m in cases
    ]


def row_counts(rows, pieces):
    """Rows of the micro-batches."""
    return [rows // pieces + (k < rows % pieces) for k in range(pieces)]


def right_rows(worlds, rows, pieces):
    """Raise Wrong unless the stages ran, in each of their steps, on micro-batches of as many rows as tensor_split makes."""
    wanted = row_counts(rows, pieces)
    for size, ranks in worlds.items():
        for rank, got in enumerate(ranks):
            counts, steps = [n for kind, n, _ in got["seen"] if kind == "F"], len(got["gradients"])
            if sorted(counts) != sorted(steps * wanted):
                shown, cut = (", ".join(map(str, numbers)) for numbers in (counts[: len(counts) // steps], wanted))
                where = f"stage {rank} of {size}, {rows} rows in {pieces}"
                raise Wrong("other-cut", got=shown, expected=cut, rows=rows, where=where)


def _cut(got, rows, pieces, rank, size):
    where = f"stage {rank} of {size}"
    forwards = [seen for _, seen, _ in got["seen"] if seen is not None]
    most = -(-rows // pieces)
    if max(forwards) > most:
        raise Wrong("not-cut", got=max(forwards), most=most, where=where)
    if len(forwards) != 2 * pieces:
        raise Wrong("run-too-often", got=len(forwards) / 2, m=pieces, where=where)
    kinds = "".join(kind for kind, _, _ in got["seen"])
    if rank == 0 and size > 1 and not kinds.startswith("F" * pieces):
        raise Wrong("one-at-a-time", got=" ".join(kinds[: 2 * pieces]), where=where)
    went, back = ([first for kind, _, first in got["seen"] if kind == what][:pieces] for what in "FB")
    if kinds.startswith("F" * pieces) and back != went[::-1]:
        raise Wrong("first-one-back", stage=rank, where=where)
    _bytes(got, rows, 2 * pieces, rank, size)
    own_inputs(got["seen"], rank, size, rows, pieces)


def own_inputs(seen, rank, size, rows, pieces):
    """Two steps: each time, the stage ran on what the stage before gave for these micro-batches, in any order."""
    truth = sorted(firsts(rank, size, rows, pieces))
    numbers = [first for kind, _, first in seen if kind == "F"]
    for got in (sorted(numbers[:pieces]), sorted(numbers[pieces:])):
        if not close(got, truth, 1e-6):
            raise Wrong("not-its-input", stage=rank, expected=truth, got=got, where=f"stage {rank} of {size}")


def _bytes(got, rows, passes, rank, size):
    """Each row crosses a cut twice, forward on one side and back on the other; headers may take 256 bytes each."""
    allowed = 2 * (2 * rows * ACTIVATION) + passes * 2 * 256
    found = sum(call.bytes for call in got["sent"] if call.name == "send")
    if found > allowed:
        raise Wrong("too-many-bytes", rank=rank, got=found, allowed=allowed, where=f"stage {rank} of {size}")
