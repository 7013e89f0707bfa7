"""Answers to balise 2 of 04_profiler: the most expensive operators."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", whole=True)

ROWS = "rows = [r for r in averages if not r.is_user_annotation and r.device_type == torch.autograd.DeviceType.CPU]"

# ---------------------------------------------------------------- right

bank.text(
    2,
    None,
    """
def top_operators(averages, k, device="cpu"):
    import heapq
    from torch.autograd import DeviceType

    def own(row):
        return row.self_device_time_total if device == "cuda" else row.self_cpu_time_total

    operators = list(filter(lambda r: r.device_type == DeviceType.CPU and not r.is_user_annotation, averages))
    everything = sum(map(own, operators))
    return [(r.key, r.count, own(r) / everything) for r in heapq.nlargest(k, operators, key=own)]
""",
)
bank.text(
    2,
    None,
    """
def top_operators(averages, k, device="cpu"):
    rows = []
    for row in averages:
        if row.is_user_annotation or row.device_type != torch.autograd.DeviceType.CPU:
            continue
        time = row.self_cpu_time_total if device == "cpu" else row.self_device_time_total
        rows.append((time, row.key, row.count))
    rows.sort(reverse=True)
    total = sum(time for time, _, _ in rows)
    return [[name, calls, time / total] for time, name, calls in rows][:k]
""",
)
bank.text(
    2,
    None,
    """
def top_operators(averages, k, device="cpu"):
    rows = [r for r in averages if not r.is_user_annotation and r.device_type == torch.autograd.DeviceType.CPU]
    times = torch.tensor([r.self_cpu_time_total if device == "cpu" else r.self_device_time_total for r in rows], dtype=torch.float64)
    top = times.topk(min(k, len(rows)))
    shares = top.values / times.sum()
    return [(rows[i].key, rows[i].count, share) for i, share in zip(top.indices.tolist(), shares.tolist())]
""",
)

bank.text(  # the shares as tensors
    2,
    None,
    """
def top_operators(averages, k, device="cpu"):
    rows = [r for r in averages if not r.is_user_annotation and r.device_type.name == "CPU"]
    times = torch.tensor([r.self_cpu_time_total if device == "cpu" else r.self_device_time_total for r in rows])
    share = times / times.sum()
    order = share.argsort(descending=True)[:k].tolist()
    return [(rows[i].key, rows[i].count, share[i]) for i in order]
""",
)

# ---------------------------------------------------------------- wrong

bank.slip(2, "operator-left-out", ("not r.is_user_annotation and ", 'r.key.startswith("aten::") and '))
bank.slip(
    2,
    "labels-counted",
    (
        "not r.is_user_annotation and ",
        'r.key not in ("loading", "forward", "backward", "optimizer") and "ProfilerStep" not in r.key and ',
    ),
)
bank.slip(
    2,
    "share-of-everything",
    ("sum(getattr(row, attribute) for row in rows) or 1.0", "getattr(averages.total_average(), attribute)"),
)

bank.slip(2, "total-time", ("self_cpu_time_total", "cpu_time_total"))
bank.slip(
    2,
    "total-time",
    ("    attribute =", "    self_ = 0\n    attribute ="),
    ("key=lambda row: getattr(row, attribute)", "key=lambda row: getattr(row, attribute.removeprefix('self_'))"),
)
bank.slip(
    2, "mean-time", ("key=lambda row: getattr(row, attribute)", "key=lambda row: getattr(row, attribute) / row.count")
)
bank.slip(2, "mean-time", ("key=lambda row: getattr(row, attribute)", "key=lambda row: row.cpu_time"))
bank.slip(2, "most-calls", ("key=lambda row: getattr(row, attribute)", "key=lambda row: row.count"))
bank.slip(2, "cheapest-first", (", reverse=True", ""))
bank.slip(2, "cheapest-first", ("rows[:k]]", "rows[:k]][::-1]"))
bank.slip(2, "labels-counted", ("not r.is_user_annotation and ", ""))
bank.slip(2, "labels-counted", (ROWS, "rows = averages"))
bank.slip(2, "kernels-counted", (" and r.device_type == torch.autograd.DeviceType.CPU", ""))
bank.slip(2, "other-device", ('if device == "cpu" else "self_device_time_total"', 'if True else ""'))
bank.slip(2, "other-device", ('if device == "cpu" else', 'if device != "cpu" else'))
bank.slip(2, "wrong-number", ("rows[:k]]", "rows]"))
bank.slip(2, "wrong-number", ("rows[:k]]", "rows[:10]]"))
bank.slip(2, "operator-left-out", (ROWS, ROWS.replace("not r.is", 'r.key.startswith("aten::op") and not r.is')))
bank.slip(2, "wrong-operators", ("reverse=True)", "reverse=True)[1:]"))
bank.slip(2, "wrong-operators", ("key=lambda row: getattr(row, attribute)", "key=lambda row: row.key"))
bank.slip(2, "wrong-calls", ("row.count, getattr", "1, getattr"))
bank.slip(2, "share-of-top", ("for row in rows) or 1.0", "for row in rows[:k]) or 1.0"))
bank.slip(2, "share-of-everything", ("for row in rows) or 1.0", "for row in averages) or 1.0"))
bank.slip(
    2,
    "share-of-total",
    ("sum(getattr(row, attribute)", "sum(getattr(row, attribute.removeprefix('self_'))"),
)
bank.slip(2, "share-percent", ("getattr(row, attribute) / total)", "100 * getattr(row, attribute) / total)"))
bank.slip(2, "share-is-time", ("getattr(row, attribute) / total)", "getattr(row, attribute))"))
bank.slip(2, "wrong-share", ("getattr(row, attribute) / total)", "getattr(row, attribute) / total / row.count)"))
bank.slip(
    2,
    "averages-changed",
    ("    rows = sorted(rows, ", "    averages.sort(key=lambda row: -row.count)\n    rows = sorted(rows, "),
)
bank.slip(
    2,
    "averages-changed",
    ("    rows = [r", "    averages[:] = [r for r in averages if not r.is_user_annotation]\n    rows = [r"),
)
bank.slip(2, "not-triples", ("(row.key, row.count, getattr(row, attribute) / total)", "row.key"))
bank.slip(2, "not-triples", ("return [(row.key", "return {row.key: (row.key"), ("rows[:k]]", "rows[:k]}"))
bank.slip(2, "nothing-returned", ("    return [", "    print(k)\n    ["))
bank.slip(2, "rows-as-they-came", ("    rows = sorted(rows, key", "    sorted(rows, key"))
