"""Answers to balise 9 of 13_zero_under_the_hood: bytes that a rank sends in a step."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp import measure
from tests.answers.bank import Bank

bank = Bank("13_zero_under_the_hood", 9, whole=True)


@bank.right()
def sent_bytes(step):
    n, total = dist.get_world_size(), 0.0
    with measure.Communications() as log:
        step()
    for entry in log.entries():
        match entry["name"]:
            case "all_reduce":
                total += 2 * (n - 1) * entry["bytes"] / n
            case "reduce_scatter":
                total += (n - 1) * entry["bytes"] / n
            case "all_gather":
                total += (n - 1) * entry["bytes"]
            case "send":
                total += entry["bytes"]
    return round(total)


@bank.right()
def sent_bytes(step):
    """A dispatch mode of its own, whole tensors first, a tensor as the result."""
    n = dist.get_world_size()
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func)
            if name.startswith("c10d."):
                first = args[0][0] if isinstance(args[0], list) else args[0]
                while isinstance(first, list):
                    first = first[0]
                if "reduce_scatter" in name:
                    whole = args[1][0] if isinstance(args[1], list) else args[1]
                    found.append(((n - 1) / n, whole.nbytes))
                elif "allreduce" in name:
                    found.append((2 * (n - 1) / n, sum(t.nbytes for t in args[0])))
                elif "allgather" in name:
                    own = args[1][0] if isinstance(args[1], list) else args[1]
                    found.append((n - 1, own.nbytes))
                elif "send" in name:
                    found.append((1, first.nbytes))
            return func(*args, **(kwargs or {}))

    with Watch():
        step()
    return torch.tensor(sum(factor * size for factor, size in found), dtype=torch.float64)


RING = '''
def sent_bytes(step):
    """Steps round the ring."""
    n = dist.get_world_size()
    log = measure.Communications()
    with log:
        step()
    rounds = {"all_reduce": (2, n), "reduce_scatter": (1, n), "all_gather": (1, 1)}
    total = 0
    for entry in log.entries():
        if entry["kind"] == "message":
            total += entry["bytes"] * (entry["name"] == "send")
        elif entry["name"] in rounds:
            times, parts = rounds[entry["name"]]
            total += times * (n - 1) * (entry["bytes"] / parts)
    return total
'''
bank.text(None, RING)

bank.slip("nothing-returned", ("    return sum(", "    sum("))

bank.hint("step-not-run", "step() was not called. Count the volume while it runs.")
bank.slip("step-not-run", ("        step()\n", "        pass\n"))
bank.variant("step-not-run", RING, ("        step()\n", "        pass\n"))

bank.hint(
    "step-run-again", "step() was called {got} times: in a training run that would be as many steps. Call it once."
)
bank.slip("step-run-again", ("    with measure", "    step()  # warm up\n    with measure"))
bank.variant("step-run-again", RING, ("        step()\n", "        step()\n        step()\n"))

bank.hint("not-a-number", "Return one number, the bytes. You returned {got}.")
bank.slip("not-a-number", ("return sum(sent", "return log.entries() and str(sent and 1) or str(sent"), (
    '.get(entry["name"], 0) * entry["bytes"] for entry in log.entries() if entry["kind"] != "phase")', ")",
))  # fmt: skip
bank.slip("not-a-number", ("    return sum(", "    return [sent, sum("), ('!= "phase")', '!= "phase")]'))
bank.variant("not-a-number", RING, ("return total", "return str(total)"))

bank.hint(
    "handed-in",
    "These are the bytes that the rank passes to the collectives. What it sends depends on the collective: see the "
    "table.",
)
bank.slip("handed-in", ('sent.get(entry["name"], 0) * entry["bytes"]', 'entry["bytes"] * (n > 1)'))
bank.variant(
    "handed-in", RING, ('total += times * (n - 1) * (entry["bytes"] / parts)', 'total += entry["bytes"] * (n > 1)')
)

bank.hint("alone-sends", "A single rank sends nothing.")
bank.slip("alone-sends", ("2 * (n - 1) / n,", "2 * (n - 1) / n + (n == 1),"))
bank.variant(
    "alone-sends",
    RING,
    (
        "    return total",
        '    return total if n > 1 else total + 2 * len([e for e in log.entries() if e["name"] == "all_reduce"]) * 480',
    ),
)

bank.hint(
    "all-reduce-once",
    "An all-reduce is a reduce-scatter and an all-gather: it sends twice as much as either of them.",
)
bank.slip("all-reduce-once", ('"all_reduce": 2 * (n - 1) / n', '"all_reduce": (n - 1) / n'))
bank.variant("all-reduce-once", RING, ('"all_reduce": (2, n)', '"all_reduce": (1, n)'))

bank.hint(
    "all-reduce-whole",
    "An all-reduce sends 2 (N - 1) / N of the tensor: a little less than twice the tensor, however many ranks "
    "there are.",
)
bank.slip("all-reduce-whole", ('"all_reduce": 2 * (n - 1) / n', '"all_reduce": 2 * (n > 1)'))
bank.slip("all-reduce-whole", ('"all_reduce": 2 * (n - 1) / n', '"all_reduce": n - 1 if n > 2 else 2 * (n - 1)'))
bank.variant(
    "all-reduce-whole",
    RING,
    (
        'total += times * (n - 1) * (entry["bytes"] / parts)',
        'total += 2 * entry["bytes"] * (n > 1) if times == 2 else times * (n - 1) * (entry["bytes"] / parts)',
    ),
)

bank.hint(
    "gather-as-scatter",
    "You counted an all-gather like a reduce-scatter. In a reduce-scatter a rank passes the whole tensor; in an "
    "all-gather it passes only its own part, which goes to all other ranks: N - 1 times.",
)
bank.slip("gather-as-scatter", ('"all_gather": n - 1', '"all_gather": (n - 1) / n'))
bank.variant("gather-as-scatter", RING, ('"all_gather": (1, 1)', '"all_gather": (1, n)'))

bank.hint(
    "scatter-as-gather",
    "You counted a reduce-scatter like an all-gather. In a reduce-scatter a rank passes the whole tensor; every "
    "part except its own leaves the rank, once each.",
)
bank.slip("scatter-as-gather", ('"reduce_scatter": (n - 1) / n', '"reduce_scatter": n - 1'))
bank.variant("scatter-as-gather", RING, ('"reduce_scatter": (1, n)', '"reduce_scatter": (1, 1)'))

bank.hint(
    "elements-not-bytes", "These are elements. A float32 takes 4 bytes, a bfloat16 takes 2; the log counts bytes."
)
bank.slip("elements-not-bytes", ('* entry["bytes"]', '* entry["bytes"] / 4'))
bank.variant("elements-not-bytes", RING, ("return total", "return total // 4"))

bank.hint("two-ranks-only", "The volume is right for 2 ranks, but wrong for {size}. Ask for the number of ranks.")
bank.slip("two-ranks-only", ("n = dist.get_world_size()", "n = min(2, dist.get_world_size())"))
bank.variant(
    "two-ranks-only", RING, ("    n = dist.get_world_size()\n", "    n = 2 if dist.get_world_size() > 1 else 1\n")
)

bank.hint("of-all-ranks", "This is what all ranks send together. The question is about one rank.")
bank.slip("of-all-ranks", ('* entry["bytes"]', '* entry["bytes"] * n'))
bank.variant("of-all-ranks", RING, ("return total", "return n * total"))

bank.hint("receive-counted", "You also counted a message that is received. Count only what leaves the rank.")
bank.slip("receive-counted", ('"send": 1', '"send": 1, "recv": 1'))
bank.variant("receive-counted", RING, (' * (entry["name"] == "send")', ""))

bank.hint("message-forgotten", "You did not count a message to one rank: see the last row of the table.")
bank.slip("message-forgotten", ('"send": 1', '"send": 0'))
bank.variant("message-forgotten", RING, ('total += entry["bytes"] * (entry["name"] == "send")', "continue"))

bank.hint("wrong-volume", "This is not what the rank sends in these collectives.")
bank.slip("wrong-volume", ('if entry["kind"] != "phase"', 'if entry["kind"] == "message"'))
bank.variant("wrong-volume", RING, ('total += times * (n - 1) * (entry["bytes"] / parts)', "total += 0"))

bank.hint(
    "backward-missed",
    "You did not count the collectives that start in backward, from hooks or in DistributedDataParallel. Record "
    "them all: measure.Communications sees every one.",
)


@bank.wrong("backward-missed")
def sent_bytes(step):
    """Replaces the functions of torch.distributed: what C++ starts, in DistributedDataParallel, goes by."""
    n, found = dist.get_world_size(), []
    before = {}

    def counted(name, factor, which):
        call = getattr(dist, name)
        before[name] = call

        def replacement(*args, **kwargs):
            found.append(factor * args[which].nbytes)
            return call(*args, **kwargs)

        setattr(dist, name, replacement)

    counted("all_reduce", 2 * (n - 1) / n, 0)
    counted("all_gather", n - 1, 1)
    for name in ("all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            counted(name, n - 1, 1)
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            counted(name, (n - 1) / n, 1)
    scatter = measure.Communications()
    try:
        with scatter:
            step()
    finally:
        for name, call in before.items():
            setattr(dist, name, call)
    log = {"_log": scatter.entries()}["_log"]
    if any(e["name"] in ("all_gather", "reduce_scatter", "send") for e in log):
        factors = {"reduce_scatter": (n - 1) / n, "all_gather": n - 1, "send": 1}
        return sum(factors.get(e["name"], 0) * e["bytes"] for e in log)
    return sum(found)


MISSED = """
def sent_bytes(step):
    \"\"\"A mode of Python sees what Python starts.\"\"\"
    n, total = dist.get_world_size(), []
    before = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        total.append(2 * (n - 1) * tensor.nbytes / n)
        return before(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        with measure.Communications() as log:
            step()
    finally:
        dist.all_reduce = before
    rest = {"reduce_scatter": (n - 1) / n, "all_gather": n - 1, "send": 1}
    return sum(total) + sum(rest.get(entry["name"], 0) * entry["bytes"] for entry in log.entries())
"""
bank.text("backward-missed", MISSED, variant=True)

bank.slip(None, ("    with measure", "    from fractions import Fraction\n\n    with measure"),
          ('sent.get(entry["name"], 0) * entry', 'Fraction(sent.get(entry["name"], 0)) * entry'))  # fmt: skip
