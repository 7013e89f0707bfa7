"""Answers to balise 2 of 04_profiler: the most expensive operators."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 2, whole=True)

ROWS = "rows = [r for r in averages if not r.is_user_annotation and r.device_type == torch.autograd.DeviceType.CPU]"

# ---------------------------------------------------------------- right

HEAP = """
def top_operators(averages, k, device="cpu"):
    import heapq
    from torch.autograd import DeviceType

    def own(row):
        return row.self_device_time_total if device == "cuda" else row.self_cpu_time_total

    operators = list(filter(lambda r: r.device_type == DeviceType.CPU and not r.is_user_annotation, averages))
    everything = sum(map(own, operators))
    return [(r.key, r.count, own(r) / everything) for r in heapq.nlargest(k, operators, key=own)]
"""
bank.text(None, HEAP)
bank.text(
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

bank.hint("operator-left-out", "{name!r} is an operator, too, whatever its name. Leave out only labels and kernels.")
bank.slip("operator-left-out", ("not r.is_user_annotation and ", 'r.key.startswith("aten::") and '))
bank.hint("labels-counted", "{name!r} is a label, not an operator. Leave out the rows with is_user_annotation.")
bank.slip(
    "labels-counted",
    (
        "not r.is_user_annotation and ",
        'r.key not in ("loading", "forward", "backward", "optimizer") and "ProfilerStep" not in r.key and ',
    ),
)
bank.hint("share-of-everything", "Your sum includes labels or kernels. A share is a fraction of the time of all "
          "operators.")  # fmt: skip
bank.slip(
    "share-of-everything",
    ("sum(getattr(row, attribute) for row in rows) or 1.0", "getattr(averages.total_average(), attribute)"),
)

bank.hint("total-time", "This is the order of the total times, which count the operators that an operator calls once "
          "more. Use the self times.")  # fmt: skip
bank.slip("total-time", ("self_cpu_time_total", "cpu_time_total"))
bank.slip(
    "total-time",
    ("    attribute =", "    self_ = 0\n    attribute ="),
    ("key=lambda row: getattr(row, attribute)", "key=lambda row: getattr(row, attribute.removeprefix('self_'))"),
    variant=True,
)
bank.hint("mean-time", "This is the order of the means per call. An operator that is called a thousand times counts "
          "a thousand times.")  # fmt: skip
bank.slip(
    "mean-time", ("key=lambda row: getattr(row, attribute)", "key=lambda row: getattr(row, attribute) / row.count")
)
bank.slip("mean-time", ("key=lambda row: getattr(row, attribute)", "key=lambda row: row.cpu_time"), variant=True)
bank.hint("most-calls", "This is the order of the number of calls, not of the time.")
bank.slip("most-calls", ("key=lambda row: getattr(row, attribute)", "key=lambda row: row.count"), variant=True)
bank.hint("cheapest-first", "The cheapest operators come first. Sort the other way round.")
bank.slip("cheapest-first", (", reverse=True", ""))
bank.slip("cheapest-first", ("rows[:k]]", "rows[:k]][::-1]"), variant=True)
bank.slip("labels-counted", ("not r.is_user_annotation and ", ""))
bank.slip("labels-counted", (ROWS, "rows = averages"), variant=True)
bank.hint("kernels-counted", "{name!r} is a kernel. Its time is counted twice: there and in the operator that "
          "launched it. Leave out the rows whose device_type is not the CPU's.")  # fmt: skip
bank.slip("kernels-counted", (" and r.device_type == torch.autograd.DeviceType.CPU", ""), variant=True)
bank.hint("other-device", "These are the times of the other device. `device` says whose time counts.")
bank.slip("other-device", ('if device == "cpu" else "self_device_time_total"', 'if True else ""'))
bank.slip("other-device", ('if device == "cpu" else', 'if device != "cpu" else'), variant=True)
bank.hint("wrong-number", "You returned {n} operators instead of {wanted}.")
bank.slip("wrong-number", ("rows[:k]]", "rows]"))
bank.slip("wrong-number", ("rows[:k]]", "rows[:10]]"), variant=True)
bank.slip(
    "operator-left-out", (ROWS, ROWS.replace("not r.is", 'r.key.startswith("aten::op") and not r.is')), variant=True
)
bank.hint("wrong-operators", "These are not the operators with the largest self times.")
bank.slip("wrong-operators", ("reverse=True)", "reverse=True)[1:]"))
bank.slip("wrong-operators", ("key=lambda row: getattr(row, attribute)", "key=lambda row: row.key"), variant=True)
bank.hint("wrong-calls", "The number of calls of {name!r} is wrong. It is row.count.")
bank.slip("wrong-calls", ("row.count, getattr", "1, getattr"), variant=True)
bank.hint("share-of-top", "The shares are fractions of the time of these k operators. They should be fractions of "
          "the time of all operators.")  # fmt: skip
bank.slip("share-of-top", ("for row in rows) or 1.0", "for row in rows[:k]) or 1.0"))
bank.variant("share-of-top", HEAP, ("map(own, operators)", "map(own, heapq.nlargest(k, operators, key=own))"))
bank.slip("share-of-everything", ("for row in rows) or 1.0", "for row in averages) or 1.0"), variant=True)
bank.hint("share-of-total", "The shares are fractions of the sum of the total times, in which the time of an inner "
          "operator counts more than once.")  # fmt: skip
bank.slip(
    "share-of-total",
    ("sum(getattr(row, attribute)", "sum(getattr(row, attribute.removeprefix('self_'))"),
)
bank.variant("share-of-total", HEAP, ("sum(map(own, operators))", "sum(row.cpu_time_total for row in operators)"))
bank.hint("share-percent", "The shares are numbers between 0 and 1, not percentages.")
bank.slip("share-percent", ("getattr(row, attribute) / total)", "100 * getattr(row, attribute) / total)"))
bank.variant("share-percent", HEAP, ("own(r) / everything", "own(r) / everything * 100"))
bank.hint("share-is-time", "The third entry is a time. Divide it by the time of all operators.")
bank.slip("share-is-time", ("getattr(row, attribute) / total)", "getattr(row, attribute))"))
bank.variant("share-is-time", HEAP, ("own(r) / everything", "own(r)"))
bank.slip("share-is-time", ("getattr(row, attribute) / total)", "getattr(row, attribute) / 1000)"))
bank.hint("wrong-share", "The share of {name!r} is wrong.")
bank.slip("wrong-share", ("getattr(row, attribute) / total)", "getattr(row, attribute) / total / row.count)"))
bank.variant("wrong-share", HEAP, ("own(r) / everything", "own(r) / everything / r.count"))
bank.hint("averages-changed", "You changed the list that you were given. Sort into a new one.")
bank.slip(
    "averages-changed",
    ("    rows = sorted(rows, ", "    averages.sort(key=lambda row: -row.count)\n    rows = sorted(rows, "),
)
bank.slip(
    "averages-changed",
    ("    rows = [r", "    averages[:] = [r for r in averages if not r.is_user_annotation]\n    rows = [r"),
    variant=True,
)
bank.hint("not-triples", "Return a list of (name, calls, share): a string and two numbers each.")
bank.slip("not-triples", ("(row.key, row.count, getattr(row, attribute) / total)", "row.key"))
bank.slip("not-triples", ("return [(row.key", "return {row.key: (row.key"), ("rows[:k]]", "rows[:k]}"), variant=True)
bank.slip("nothing-returned", ("    return [", "    print(k)\n    ["))
bank.hint("rows-as-they-came", "These are the first rows of the list in its given order. Sort by the time, the "
          "largest first. sorted() returns a new list.")  # fmt: skip
bank.slip("rows-as-they-came", ("    rows = sorted(rows, key", "    sorted(rows, key"), variant=True)
