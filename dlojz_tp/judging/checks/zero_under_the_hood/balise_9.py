"""Balise 9: the bytes that a rank sends in a step, counted while the step runs."""

import numbers

import torch

from dlojz_tp.judging.checking.looks import Look, Value, judged, one_of
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import on_ranks
from dlojz_tp.judging.probes.known_traffic import SENT, bytes_sent, steps

GROUPS = list(SENT)[:5], list(SENT)[5:9], list(SENT)[9:]
PLACES = [(size, rank) for size in (2, 3, 4, 1) for rank in range(size)]


def _count(sent_bytes):
    """{step: (what the answer returns, how often it ran the step)} on a rank."""
    found = {}
    for name, step in steps().items():
        calls = []

        def counted(step=step, calls=calls):
            calls.append(1)
            return step()

        value = sent_bytes(counted)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, numbers.Real):  # NumPy's and fractions, too
            value = float(value)
        found[name] = value, len(calls)
    return found


def observe(sent_bytes):
    """What came and how often the step ran, everywhere; for each group of steps, bytes (places, steps)."""
    worlds = on_ranks(_count, sent_bytes)
    ranks = [worlds[size][rank] for size, rank in PLACES]
    values = [value for found in ranks for value, _ in found.values()]
    kinds = [None if value is None else type(value).__name__ for value in values]
    yield {"calls": [calls for found in ranks for _, calls in found.values()], "kinds": kinds}
    for group in GROUPS:
        yield {group[0]: torch.tensor([[found[name][0] for name in group] for found in ranks], dtype=torch.float64)}


def _look(claim, group, hint):
    due = torch.tensor([[bytes_sent(name, size) for name in group] for size, _ in PLACES], dtype=torch.float64)
    allowed = torch.tensor([16 if name == "a barrier" else 0.5 for name in group])  # some count the number in a barrier

    def wrong(seen):
        return (seen - due).abs() > 1e-6 * due + allowed

    def fields(seen, _):
        place, step = wrong(seen).nonzero()[0].tolist()
        size, rank = PLACES[place]
        return {"where": f"{group[step]}, rank {rank} of {size}", "size": size,
                "expected": f"{due[place, step]:g} bytes", "got": f"{seen[place, step]:g} bytes"}  # fmt: skip

    return Value(claim, group[0], due, hint, holds=lambda seen, _: not wrong(seen).any(), fields=fields)


def _missed(seen, due):
    """Whether nothing was counted where something was sent."""
    return "backward-missed" if ((seen == 0) & (due > 0)).any() else "wrong-volume"


def _run_otherwise(seen, _):
    return "step-run-again" if min(seen) else "step-not-run"


def _no_number(seen, _):
    return "nothing-returned" if None in seen else "not-a-number"


def _first_kind(seen, due):
    return {"got": next((kind for kind in seen if kind not in due), ""), "expected": "a number"}


LOOKS = [
    Look("single collectives, in float32 and bfloat16 (1, 2, 3 and 4 ranks)", "calls", [1] * len(PLACES) * len(SENT),
         _run_otherwise, fields=lambda seen, _: {"got": max(seen), "expected": 1}),
    Look("", "kinds", ("int", "float"), _no_number, holds=one_of, fields=_first_kind),
    _look("", GROUPS[0], "wrong-volume"),
    _look("a message to the next rank, an asynchronous collective, nothing at all", GROUPS[1], "wrong-volume"),
    _look("collectives that start in backward: hooks, and DistributedDataParallel", GROUPS[2], _missed),
]  # fmt: skip


def balise_9(sent_bytes):
    yield from judged(LOOKS, observe, sent_bytes)
