"""Balise 2: the most expensive operators, from averages that are made up, and from a real profile."""

import functools
import random
from numbers import Real

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from dlojz_tp.judging.checking.looks import Look, Value, judged, same, within


def _row(key, count, own, total, device_own=0.0, device_total=0.0, label=False, kind=DeviceType.CPU):
    row = FunctionEventAvg()
    row.key, row.count, row.device_type, row.is_user_annotation = key, count, kind, label
    row.self_cpu_time_total, row.cpu_time_total = own, total
    row.self_device_time_total, row.device_time_total = device_own, device_total
    return row


def _made(seed, gpu=False):
    """Rows in which each of the usual mistakes gives another order."""
    drawn = random.Random(seed)
    rows = [
        _row(f"aten::op{seed}{i}", drawn.choice([1, 3, 24, 700]) + i, own := drawn.uniform(50, 4000), own)
        for i in range(12)
    ]
    rows.append(_row("aten::outer", 4, 60.0 + seed, 30_000.0))  # calls others, does little itself
    rows.append(_row("aten::rare", 1, 1500.0 + seed, 1500.0))
    rows.append(_row("aten::often", 9000, 2500.0 + seed, 2500.0))
    rows.append(_row("autograd::engine::evaluate_function: MmBackward0", 8, 3600.0 + seed, 3900.0))
    rows.append(_row("forward", 3, 5200.0, 41_000.0, label=True))
    rows.append(_row("augment the images", 3, 4700.0, 9_000.0, label=True))
    rows.append(_row("ProfilerStep*", 3, 900.0, 60_000.0, label=True))
    if gpu:
        for i, row in enumerate(list(rows)):
            row.self_device_time_total = 0.0 if row.is_user_annotation else drawn.uniform(10, 9000)
            row.device_time_total = row.self_device_time_total * (3 if i % 3 else 1)
            if not row.is_user_annotation and i % 2:
                time = row.self_device_time_total * 1.01
                rows.append(_row(f"kernel_{i}", row.count, 0.0, 0.0, time, time, kind=DeviceType.CUDA))
        rows.append(_row("forward", 3, 0.0, 0.0, 30_000.0, 30_000.0, label=True, kind=DeviceType.CUDA))
    drawn.shuffle(rows)
    return EventList(rows, use_device="cuda" if gpu else None)


def _real():
    """The averages of a real profile with nested operators and labels."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function("forward"):
                x = torch.ones(48, 48, requires_grad=True)
                y = torch.nn.functional.linear(x, x).softmax(1)
            with record_function("backward"):
                y.sum().backward()
    return profiler.key_averages()


def _time(row, device):
    return row.self_cpu_time_total if device == "cpu" else row.self_device_time_total


def observe(top_operators, rows, k, device):
    before = list(rows)
    got = top_operators(rows, k, device)
    untouched = len(rows) == len(before) and all(a is b for a, b in zip(rows, before, strict=True))
    right = isinstance(got, list | tuple) and all(map(_triple, got))
    yield {"returned": got is not None, "untouched": untouched, "form": FORM if right else got}
    names, calls, shares = zip(*got) if got else ((), (), ())
    yield {"top": {"names": list(names), "idle": not any(map(float, shares))}}
    yield {"calls": list(calls), "shares": list(map(float, shares))}


FORM = "[(name, calls, share), …]"


def _triple(entry):
    return (
        isinstance(entry, tuple | list) and len(entry) == 3 and isinstance(entry[0], str)
        and all(isinstance(v, Real) or isinstance(v, torch.Tensor) and v.dim() == 0 for v in entry[1:])
    )  # fmt: skip


def _looks(claim, rows, k, device):
    operators = [row for row in rows if not row.is_user_annotation and row.device_type == DeviceType.CPU]
    best = sorted(operators, key=lambda row: -_time(row, device))[:k]
    names, everything = [row.key for row in best], sum(_time(row, device) for row in operators)
    return [
        Look(claim, "returned", True, "nothing-returned"), Look("", "untouched", True, "averages-changed"),
        Look("", "form", FORM, "not-triples"),
        Look("", "top", names, functools.partial(_names_slug, rows, operators, k, device),
             holds=lambda seen, due: seen["names"] == due, fields=functools.partial(_names_fields, rows)),
        Look("", "calls", [row.count for row in best], "wrong-calls", fields=_first(names, same)),
        Value("", "shares", [_time(row, device) / everything for row in best], "wrong-share", holds=within(1e-4),
              fields=_first(names, within(1e-4))),
    ]  # fmt: skip


def _first(names, right):
    """Fields of the first operator whose number is wrong."""

    def fields(seen, due):
        k = next(k for k, pair in enumerate(zip(seen, due)) if not right(*pair))
        return {"name": names[k], "expected": due[k], "got": seen[k]}

    return fields


def _no_operators(rows):
    """Names of labels, then those of kernels."""
    labels = {row.key for row in rows if row.is_user_annotation}
    return labels, {row.key for row in rows if row.device_type != DeviceType.CPU} - labels


def _names_fields(rows, seen, due):
    counted = [name for others in _no_operators(rows) for name in seen["names"] if name in others]
    left_out = [name for name in due if not name.startswith("aten::")]
    return {"n": len(seen["names"]), "wanted": len(due), "name": (counted + left_out + [""])[0], "got": seen["names"]}


def _names_slug(rows, operators, k, device, seen, due):
    names = seen["names"]
    # without a time on the other device, its order is this one, too: then the shares are 0
    if names == [row.key for row in operators[:k]] and not seen["idle"]:
        return "rows-as-they-came"
    for slug, others in zip(("labels-counted", "kernels-counted"), _no_operators(rows)):
        if others.intersection(names):
            return slug
    if len(names) != len(due):
        return "wrong-number"

    def by(key, some=operators):
        return [row.key for row in sorted(some, key=key, reverse=True)[:k]]

    own = functools.partial(_time, device=device)
    named = [row for row in operators if row.key.startswith("aten::")]
    total = (lambda row: row.cpu_time_total) if device == "cpu" else (lambda row: row.device_time_total)
    orders = [
        ("operator-left-out", by(own, named) if len(named) < len(operators) else []),
        ("cheapest-first", by(lambda row: -own(row))), ("total-time", by(total)),
        ("mean-time", by(lambda row: own(row) / max(row.count, 1))), ("most-calls", by(lambda row: row.count)),
        ("other-device", by(lambda row: _time(row, "cuda" if device == "cpu" else "cpu"))),
        ("mean-time", by(lambda row: total(row) / max(row.count, 1))), ("cheapest-first", due[::-1]),
    ]  # fmt: skip
    return next((slug for slug, order in orders if names == order), "wrong-operators")


CASES = {  # (averages, k, device)
    "the order of the self times on the processor": lambda: [(_made(seed=1), 4, "cpu")],
    "labels and kernels are left out; the device's times where they are asked for": lambda: [
        (_made(seed=2, gpu=True), 6, "cuda"), (_made(seed=3, gpu=True), 5, "cpu"),
    ],
    "more operators asked for than there are; only one asked for": lambda: [
        (_made(seed=4), 500, "cpu"), (_made(seed=5), 1, "cpu"),
    ],
    "a real profile": lambda: [(_real(), 5, "cpu")],
}  # fmt: skip


def balise_2(top_operators):
    """Averages that are made up, for a processor and for a GPU; few rows; a real profile."""
    for claim, cases in CASES.items():
        for rows, k, device in cases():
            where = f"device={device!r}, k={k}"
            yield from judged(
                _looks(claim, rows, k, device), observe, top_operators, rows, k, device, at=where, where=where
            )
