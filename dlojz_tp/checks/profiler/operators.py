"""Balise 2: the most expensive operators, from averages that are made up, and from a real profile."""

import random
from numbers import Real

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from dlojz_tp.checking import Wrong, close

HINTS = {
    "not-triples": "Return a list of (name, calls, share): a string and two numbers each.",
    "wrong-number": "You returned {n} operators instead of {wanted}.",
    "total-time": "This is the order of the total times, which count the operators that an operator calls once "
                  "more. Use the self times.",
    "mean-time": "This is the order of the means per call. An operator that is called a thousand times counts a "
                 "thousand times.",
    "most-calls": "This is the order of the number of calls, not of the time.",
    "cheapest-first": "The cheapest operators come first. Sort the other way round.",
    "labels-counted": "{name!r} is a label, not an operator. Leave out the rows with is_user_annotation.",
    "kernels-counted": "{name!r} is a kernel. Its time is counted twice: there and in the operator that launched "
                       "it. Leave out the rows whose device_type is not the CPU's.",
    "operator-left-out": "{name!r} is an operator, too, whatever its name. Leave out only labels and kernels.",
    "rows-as-they-came": "These are the first rows of the list in its given order. Sort by the time, the largest "
                         "first. sorted() returns a new list.",
    "other-device": "These are the times of the other device. `device` says whose time counts.",
    "wrong-operators": "These are not the operators with the largest self times.",
    "wrong-calls": "The number of calls of {name!r} is wrong. It is row.count.",
    "share-of-top": "The shares are fractions of the time of these k operators. They should be fractions of the "
                    "time of all operators.",
    "share-of-everything": "Your sum includes labels or kernels. A share is a fraction of the time of all operators.",
    "share-of-total": "The shares are fractions of the sum of the total times, in which the time of an inner "
                      "operator counts more than once.",
    "share-percent": "The shares are numbers between 0 and 1, not percentages.",
    "share-is-time": "The third entry is a time. Divide it by the time of all operators.",
    "wrong-share": "The share of {name!r} is wrong.",
    "averages-changed": "You changed the list that you were given. Sort into a new one.",
}


def balise_2(top_operators):
    """Averages that are made up, for a processor and for a GPU; few rows; a real profile."""
    yield "the order of the self times on the processor"
    rows = _made(seed=1)
    _right(top_operators, rows, 4, "cpu")
    yield "labels and kernels are left out; the device's times where they are asked for"
    _right(top_operators, _made(seed=2, gpu=True), 6, "cuda")
    _right(top_operators, _made(seed=3, gpu=True), 5, "cpu")
    yield "more operators asked for than there are; only one asked for"
    _right(top_operators, _made(seed=4), 500, "cpu")
    _right(top_operators, _made(seed=5), 1, "cpu")
    yield "a real profile"
    _right(top_operators, _real(), 5, "cpu")


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


def _right(top_operators, rows, k, device):
    before = list(rows)
    got = top_operators(rows, k, device)
    if got is None:
        raise Wrong("nothing-returned")
    if len(rows) != len(before) or any(a is not b for a, b in zip(rows, before, strict=True)):
        raise Wrong("averages-changed")
    operators = [row for row in rows if not row.is_user_annotation and row.device_type == DeviceType.CPU]
    best = sorted(operators, key=lambda row: -_time(row, device))
    wanted = [(row.key, row.count, _time(row, device)) for row in best[:k]]
    if not isinstance(got, list | tuple) or not all(_triple(entry) for entry in got):
        raise Wrong("not-triples", expected="[(name, calls, share), …]", got=got)
    names = [name for name, *_ in got]
    where = f"device={device!r}, k={k}"
    due = [name for name, *_ in wanted]
    # without a time on the other device, its order is this one, too: then the shares are 0
    if names == [row.key for row in operators[:k]] != due and any(float(share) for *_, share in got):
        raise Wrong("rows-as-they-came", expected=due, got=names, where=where)
    _right_names(names, rows, operators, best, k, device, where)
    for (name, calls, _), (_, count, _) in zip(got, wanted, strict=True):
        if calls != count:
            raise Wrong("wrong-calls", expected=count, got=calls, where=where, name=name)
    everything = sum(_time(row, device) for row in operators)
    for (name, _, share), (*_, time) in zip(got, wanted, strict=True):
        if not close(float(share), time / everything, 1e-4):
            slug = _share_slug(float(share), time, everything, wanted, rows, operators, device)
            raise Wrong(slug, expected=time / everything, got=float(share), where=where, name=name)


def _triple(entry):
    return (
        isinstance(entry, tuple | list) and len(entry) == 3 and isinstance(entry[0], str)
        and all(isinstance(v, Real) or isinstance(v, torch.Tensor) and v.dim() == 0 for v in entry[1:])
    )  # fmt: skip


def _right_names(names, rows, operators, best, k, device, where):
    wanted = [row.key for row in best[:k]]
    if names == wanted:
        return
    labels = {row.key for row in rows if row.is_user_annotation}
    kernels = {row.key for row in rows if row.device_type != DeviceType.CPU} - labels
    for slug, others in (("labels-counted", labels), ("kernels-counted", kernels)):
        counted = [name for name in names if name in others]
        if counted:
            raise Wrong(slug, expected=wanted, got=names, where=where, name=counted[0])
    if len(names) != len(wanted):
        raise Wrong("wrong-number", expected=wanted, got=names, where=where, n=len(names), wanted=len(wanted))
    total = (lambda r: r.cpu_time_total) if device == "cpu" else (lambda r: r.device_time_total)
    orders = {
        "cheapest-first": lambda r: -_time(r, device),
        "total-time": total,
        "mean-time": lambda r: _time(r, device) / max(r.count, 1),
        "most-calls": lambda r: r.count,
        "other-device": lambda r: _time(r, "cuda" if device == "cpu" else "cpu"),
    }
    slug = "wrong-operators"
    for name, key in orders.items():
        if names == [row.key for row in sorted(operators, key=key, reverse=True)[:k]]:
            slug = name
            break
    else:
        mean = [row.key for row in sorted(operators, key=lambda r: total(r) / max(r.count, 1), reverse=True)[:k]]
        slug = "mean-time" if names == mean else "cheapest-first" if names == wanted[::-1] else slug
    left_out = next((name for name in wanted if not name.startswith("aten::")), "")
    if left_out and names == [row.key for row in best if row.key.startswith("aten::")][:k]:
        raise Wrong("operator-left-out", expected=wanted, got=names, where=where, name=left_out)
    raise Wrong(slug, expected=wanted, got=names, where=where)


def _share_slug(share, time, everything, wanted, rows, operators, device):
    def part(sum_of):
        return sum_of and close(share, time / sum_of, 1e-4)

    if close(share, 100 * time / everything, 1e-4):
        return "share-percent"
    if close(share, time, 1e-4) or close(share, time / 1000, 1e-4):
        return "share-is-time"
    if part(sum(entry[2] for entry in wanted)):
        return "share-of-top"
    cpu = [row for row in rows if row.device_type == DeviceType.CPU]
    plain = [row for row in rows if not row.is_user_annotation]
    if any(part(sum(_time(row, device) for row in some)) for some in (rows, cpu, plain)):
        return "share-of-everything"
    if part(sum(row.cpu_time_total if device == "cpu" else row.device_time_total for row in operators)):
        return "share-of-total"
    return "wrong-share"
