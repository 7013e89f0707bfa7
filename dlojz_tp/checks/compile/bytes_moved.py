"""Balise 2: bytes moved, against sums written down by hand for each chain."""

from dataclasses import dataclass

import torch

from dlojz_tp.checking import Wrong

HINTS = {
    "not-two-numbers": "Return two numbers of bytes: (unfused, fused).",
    "ran-again": "You ran the function {n} times. Run it once: it may change its inputs.",
    "swapped": "The two numbers are swapped: first operation by operation, then as one kernel.",
    "elements-not-bytes": "These are numbers of elements. Each element has `tensor.itemsize` bytes.",
    "four-bytes": "Not every number has 4 bytes: bfloat16 has 2, float64 has 8, the result of a comparison has 1.",
    "not-bytes": "Return bytes, not thousands or millions of them.",
    "nothing-seen": "No operation was counted. Does the function run inside a `with` block of your mode, and do you count "
                    "the operations that are *not* views?",
    "result-lost": "An operation inside your mode returned None: __torch_dispatch__ must return the operation's "
                   "result.",
    "reads-only": "You count only what is read. Each operation also writes its result.",
    "writes-only": "You count only what is written. Each operation reads its operands first.",
    "views-counted": "A view moves nothing: it is another description of the same memory.",
    "read-twice": "A tensor that appears twice among the operands was counted twice.",
    "broadcast-counted": "You counted a broadcast operand at the size of the result. It holds fewer numbers, and "
                         "only those are read.",
    "expanded-counted": "You counted an expanded tensor at its full shape. Along an expanded dimension the stride "
                        "is 0: the same number is read again and again, but is stored only once.",
    "storage-counted": "You counted a part of a tensor with the memory around it. Only its own numbers are read: "
                       "its shape and strides tell which.",
    "lists-missed": "You missed operands that are in a list or passed by name: torch.cat([a, b]), torch.add(a, "
                    "other=b).",
    "results-missed": "An operation that returns several tensors writes them all.",
    "in-place-free": "You counted an in-place operation as free, or only as a read. It reads its tensor and writes "
                     "it back.",
    "last-only": "You count only the last operation: add up over all of them.",
    "wrong-unfused": "The bytes for one operation at a time are wrong.",
    "fused-inputs-only": "The fused kernel also has to write its result.",
    "fused-result-only": "The fused kernel also has to read its inputs.",
    "fused-as-result": "You let the fused kernel read each input at the size of the result. Count an input by the "
                       "numbers that it holds.",
    "addresses": "On the meta device all tensors have the address 0, and elsewhere memory is reused: an address "
                 "does not identify a tensor. The object does: use id().",
    "fused-same": "You counted the fused kernel like the chain. Its intermediate results stay in registers and "
                  "move nothing.",
    "wrong-fused": "A fused kernel reads each input once and writes the result once.",
    "result-spoilt": "Inside your mode the function gives different numbers from those without it: run each "
                     "operation once, with its arguments unchanged.",
    "inputs-spoilt": "The inputs were changed, although the function does not change them.",
}


@dataclass(frozen=True)
class _Case:
    """A chain with its bytes, counted by hand; what known mistakes would give for (unfused, fused)."""

    name: str
    function: object
    inputs: tuple
    unfused: int
    fused: int
    mistakes: dict


def balise_2(memory_traffic):
    """Chains of growing difficulty."""
    yield "a chain of three operations on 1,000 float32 numbers"
    _judge(memory_traffic, _chain())
    yield "bytes, not elements: bfloat16, float64, comparisons"
    for case in _dtypes():
        _judge(memory_traffic, case)
    yield "views move nothing; a tensor used twice is read once"
    for case in (_views(), _other_views(), _square()):
        _judge(memory_traffic, case)
    yield "operands that are broadcast or expanded"
    for case in (_broadcast(), _expanded(), _expanded_input(), _expanded_last()):
        _judge(memory_traffic, case)
    yield "operands in lists and by name, several results, in-place operations"
    for case in (_lists(), _by_name(), _by_name_only(), _several(), _in_place(), _widened()):
        _judge(memory_traffic, case)
    yield "no numbers are needed: shapes on the meta device"
    x = torch.empty(3, 2**30, device="meta", dtype=torch.bfloat16)
    size = 3 * 2**31
    inputs = x, torch.empty_like(x)
    _judge(memory_traffic, _Case("meta", lambda x, y: x * y + 1, inputs, 5 * size, 3 * size, {"addresses": 4 * size}))


def _chain():
    def chain(x, y):
        return (x * y + 1).sin()

    n = 4000
    mistakes = {"reads-only": 4 * n, "writes-only": 3 * n, "elements-not-bytes": 7000, "last-only": 2 * n}
    return _Case("sin(x y + 1)", chain, (torch.linspace(0, 1, 1000), torch.ones(1000)), 7 * n, 3 * n, mistakes)


def _dtypes():
    half, double = torch.ones(300, dtype=torch.bfloat16), torch.ones(50, 4, dtype=torch.float64)
    yield _Case("bfloat16", lambda x: torch.relu(x).neg(), (half,), 2400, 1200, {"four-bytes": 4800})
    yield _Case("float64", lambda x: torch.relu(x).neg(), (double,), 6400, 3200, {"four-bytes": 3200})
    yield _Case("x > 0, float32", lambda x: x > 0, (torch.ones(100),), 500, 500, {"four-bytes": 800})
    yield _Case("a + b", lambda a, b: a + b, (torch.ones(100), torch.ones(100)), 1200, 1200,
                {"reads-only": 800, "writes-only": 400})  # fmt: skip


def _views():
    def chain(x):
        y = torch.relu(x).view(20, 30).t()
        return y[3:].unsqueeze(0).neg()

    first, second = 4 * 2 * 600, 4 * 2 * 27 * 20
    around = 4 * (600 + 540)  # y[3:] with its storage
    between = 4 * (26 + 19 * 30 + 1 + 540)  # from its first number to its last
    views = {"storage-counted": (first + around, first + between), "views-counted": (first + second + 1, None)}
    return _Case("relu, four views, neg", chain, (torch.ones(600),), first + second, 2400 + second // 2, views)


def _other_views():
    """Less usual ones: a list of names has gaps, the operator's own word has none."""

    def chain(x):
        windows = torch.relu(x).view(20, 30).unfold(1, 5, 5)  # (20, 6, 5)
        return windows.diagonal(0, 1, 2).split(10)[1].unbind(1)[2].neg()

    moved = 2 * 2400 + 2 * 4 * 10  # neg reads and writes ten numbers
    views = {"views-counted": (None,)}
    return _Case("relu, views of many kinds, neg", chain, (torch.ones(600),), moved, 2400 + 40, views)


def _square():
    x = torch.ones(100)
    return _Case("x * x + x", lambda x: x * x + x, (x,), 800 + 1200, 800, {"read-twice": 2400})


def _broadcast():
    x, b = torch.ones(50, 8), torch.ones(8)
    mistakes = {"broadcast-counted": 3 * 1600}
    return _Case("(50, 8) + (8,)", lambda x, b: x + b, (x, b), 3232, 3232, mistakes)


def _expanded():
    def chain(x, b):
        return x * b.expand(50, 8)

    x, b = torch.ones(50, 8), torch.ones(8)
    return _Case("(50, 8) * (8,).expand(50, 8)", chain, (x, b), 3232, 3232, {"expanded-counted": 4800})


def _expanded_input():
    x, b = torch.ones(50, 8), torch.ones(2, 8)[:1].expand(50, 8)
    mistakes = {"expanded-counted": (4800, 3264)}
    return _Case("(50, 8) * an input that was expanded from (1, 8)", lambda x, b: x * b, (x, b), 3232, 3232, mistakes)


def _expanded_last():
    """Along the last dimension, in the function; and a tensor without dimensions, which holds one number."""

    def chain(x, b, scale):
        return (x + b.expand(50, 8)) * scale

    x, b, scale = torch.ones(50, 8), torch.ones(50, 1), torch.tensor(2.0)
    mistakes = {"expanded-counted": 3 * 1600 + 3204}
    return _Case(
        "(50, 8) + (50, 1).expand(50, 8), times a tensor ()", chain, (x, b, scale), 3400 + 3204, 3404, mistakes
    )


def _lists():
    a, b = torch.ones(30, 4), torch.ones(10, 4)
    mistakes = {"lists-missed": 640}
    return _Case("torch.cat([a, b])", lambda a, b: torch.cat([a, b]), (a, b), 1280, 1280, mistakes)


def _by_name():
    a, b = torch.ones(30), torch.ones(30)
    c = torch.ones(30, dtype=torch.float64)

    def chain(a, b, c):
        return torch.special.xlogy(torch.clamp(a, max=b), other=c)

    # an operator's tensors arrive by name only where its signature says so; clamp's bounds come either way
    return _Case("clamp(a, max=b), xlogy", chain, (a, b, c), 3 * 120 + 120 + 240 + 240, 720, {"lists-missed": 840})


def _by_name_only():
    """sorter is an argument that even the operator's own signature takes by name only."""
    row, values, order = torch.linspace(0, 1, 10), torch.linspace(0, 1, 30), torch.arange(10)

    def chain(row, values, order):
        return torch.searchsorted(row, values, sorter=order)

    return _Case("searchsorted(…, sorter=…)", chain, (row, values, order), 480, 480, {"lists-missed": 400})


def _several():
    x = torch.ones(40, 5)
    return _Case("a sort's values", lambda x: x.sort(dim=0).values.neg(), (x,), 800 + 800 + 1600 + 1600, 1600,
                 {"results-missed": (3200, 2400)})  # fmt: skip


def _widened():
    """The dtype is a keyword."""
    return _Case("x to float64, neg", lambda x: x.to(torch.float64).neg(), (torch.ones(100),), 1200 + 1600, 1200, {})


def _in_place():
    def chain(x):
        y = x + 1
        y.mul_(2)
        return y.relu_()

    x = torch.ones(25)
    mistakes = {"in-place-free": (200, 400)}
    return _Case("x + 1, mul_, relu_", chain, (x,), 600, 200, mistakes)


def _judge(memory_traffic, case):
    runs = []

    def function(*inputs):
        runs.append(None)
        runs[-1] = case.function(*inputs)
        return runs[-1]

    before = [tensor.clone() for tensor in case.inputs]
    try:
        got = memory_traffic(function, *case.inputs)
    except (TypeError, AttributeError) as error:
        if runs and "NoneType" in str(error) and "mapping" not in str(error):
            raise Wrong("result-lost", got=str(error)) from error
        raise
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong("not-two-numbers", expected="(unfused, fused)", got=got)
    try:
        unfused, fused = (float(value) for value in got)
    except (TypeError, ValueError):
        raise Wrong("not-two-numbers", expected="(unfused, fused)", got=str(got)) from None
    if len(runs) > 1:
        raise Wrong("ran-again", n=len(runs))
    if any(a.device.type != "meta" and not torch.equal(a, b) for a, b in zip(before, case.inputs, strict=True)):
        raise Wrong("inputs-spoilt", where=case.name)
    made = runs[0] if runs else None
    real = type(made) is torch.Tensor and made.device.type != "meta"  # what traces may run it on shapes alone
    if real and not torch.equal(made, truth := case.function(*before)):
        raise Wrong("result-spoilt", expected=truth, got=made, where=case.name)
    right = (case.unfused, case.fused)
    if (unfused, fused) == right:
        return
    where = {
        "expected": f"{right[0]:,} and {right[1]:,} bytes",
        "got": f"{unfused:,.0f} and {fused:,.0f}",
        "where": case.name,
    }
    if (fused, unfused) == right:
        raise Wrong("swapped", **where)
    if unfused != case.unfused:
        raise Wrong(_why_unfused(case, unfused), **where)
    raise Wrong(_why_fused(case, fused), **where)


def _why_unfused(case, unfused):
    if not unfused:
        return "nothing-seen"
    if any(abs(unfused * unit / case.unfused - 1) < 1e-3 for unit in (1e3, 1e6, 1e9, 2**10, 2**20, 2**30)):
        return "not-bytes"
    for slug, values in case.mistakes.items():
        values = values if isinstance(values, tuple) else (values,)
        if unfused in values or (None in values and slug == "views-counted" and unfused > case.unfused):
            return slug
    return "wrong-unfused"


def _why_fused(case, fused):
    result = case.function(*case.inputs)
    out = result.numel() * result.itemsize
    inputs = case.fused - out
    known = {
        "fused-inputs-only": inputs,
        "fused-result-only": out,
        "fused-as-result": (len(case.inputs) + 1) * out,
        "fused-same": case.unfused,
    }
    return next((slug for slug, value in known.items() if fused == value != case.fused), "wrong-fused")
