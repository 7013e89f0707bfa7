"""Balise 2: bytes moved, against sums written down by hand for each chain."""

import contextlib
import copy
import functools
from dataclasses import dataclass, field

import torch
from torch import ones

from dlojz_tp.judging.checking.looks import Look, at_most, judged


@dataclass(frozen=True)
class Case:
    """A chain with its bytes, counted by hand. mistakes: the bytes, one operation at a time, that known ones give."""

    name: str
    function: object
    inputs: tuple
    unfused: int
    fused: int
    mistakes: dict[int, str] = field(default_factory=dict)

    @functools.cached_property
    def result(self):
        return self.function(*self.inputs)


HALF, DOUBLE, LARGE = torch.bfloat16, torch.float64, torch.empty(3, 2**30, device="meta", dtype=torch.bfloat16)
CASES = {
    "a chain of three operations on 1,000 float32 numbers": [
        Case("sin(x y + 1)", lambda x, y: (x * y + 1).sin(), (torch.linspace(0, 1, 1000), ones(1000)), 28000, 12000,
             {16000: "reads-only", 12000: "writes-only", 7000: "elements-not-bytes", 8000: "last-only"}),
    ],
    "bytes, not elements: bfloat16, float64, comparisons": [
        Case("bfloat16", lambda x: x.relu().neg(), (ones(300, dtype=HALF),), 2400, 1200, {4800: "four-bytes"}),
        Case("float64", lambda x: x.relu().neg(), (ones(50, 4, dtype=DOUBLE),), 6400, 3200, {3200: "four-bytes"}),
        Case("x > 0, float32", lambda x: x > 0, (ones(100),), 500, 500, {800: "four-bytes"}),
        Case("a + b", lambda a, b: a + b, (ones(100), ones(100)), 1200, 1200, {800: "reads-only", 400: "writes-only"}),
    ],
    "views move nothing; a tensor used twice is read once": [
        # y[3:] is read with its storage, or from its first number to its last
        Case("relu, four views, neg", lambda x: x.relu().view(20, 30).t()[3:].unsqueeze(0).neg(), (ones(600),),
             4800 + 4320, 2400 + 2160,
             dict.fromkeys((4800 + 4560, 4800 + 4 * (26 + 19 * 30 + 1 + 540)), "storage-counted")),
        # less usual views: a list of names has gaps, the operator's own word has none; neg reads and writes ten numbers
        Case("relu, views of many kinds, neg",
             lambda x: x.relu().view(20, 30).unfold(1, 5, 5).diagonal(0, 1, 2).split(10)[1].unbind(1)[2].neg(),
             (ones(600),),
             4800 + 80, 2400 + 40),
        Case("x * x + x", lambda x: x * x + x, (ones(100),), 800 + 1200, 800, {2400: "read-twice"}),
    ],
    "operands that are broadcast or expanded": [
        Case("(50, 8) + (8,)", lambda x, b: x + b, (ones(50, 8), ones(8)), 3232, 3232, {4800: "broadcast-counted"}),
        Case("(50, 8) * (8,).expand(50, 8)", lambda x, b: x * b.expand(50, 8), (ones(50, 8), ones(8)), 3232, 3232,
             {4800: "expanded-counted"}),
        Case("(50, 8) * an input that was expanded from (1, 8)", lambda x, b: x * b,
             (ones(50, 8), ones(2, 8)[:1].expand(50, 8)), 3232, 3232, dict.fromkeys((4800, 3264), "expanded-counted")),
        # along the last dimension, in the function; and a tensor without dimensions, which holds one number
        Case("(50, 8) + (50, 1).expand(50, 8), times a tensor ()", lambda x, b, scale: (x + b.expand(50, 8)) * scale,
             (ones(50, 8), ones(50, 1), torch.tensor(2.0)), 3400 + 3204, 3404, {4800 + 3204: "expanded-counted"}),
    ],
    "operands in lists and by name, several results, in-place operations": [
        Case("torch.cat([a, b])", lambda a, b: torch.cat([a, b]), (ones(30, 4), ones(10, 4)), 1280, 1280,
             {640: "lists-missed"}),
        # an operator's tensors arrive by name only where its signature says so; clamp's bounds come either way
        Case("clamp(a, max=b), xlogy", lambda a, b, c: torch.special.xlogy(torch.clamp(a, max=b), other=c),
             (ones(30), ones(30), ones(30, dtype=DOUBLE)), 360 + 120 + 240 + 240, 720, {840: "lists-missed"}),
        # sorter is an argument that even the operator's own signature takes by name only
        Case("searchsorted(…, sorter=…)", lambda row, values, order: torch.searchsorted(row, values, sorter=order),
             (torch.linspace(0, 1, 10), torch.linspace(0, 1, 30), torch.arange(10)), 480, 480, {400: "lists-missed"}),
        Case("a sort's values", lambda x: x.sort(dim=0).values.neg(), (ones(40, 5),), 800 + 800 + 1600 + 1600, 1600,
             dict.fromkeys((3200, 2400), "results-missed")),
        Case("x + 1, mul_, relu_", lambda x: (x + 1).mul_(2).relu_(), (ones(25),), 600, 200,
             dict.fromkeys((200, 400), "in-place-free")),
        # the dtype is a keyword
        Case("x to float64, neg", lambda x: x.to(DOUBLE).neg(), (ones(100),), 1200 + 1600, 1200),
    ],
    "no numbers are needed: shapes on the meta device": [
        Case("meta", lambda x, y: x * y + 1, (LARGE, torch.empty_like(LARGE)), 15 * 2**31, 9 * 2**31,
             {12 * 2**31: "addresses"}),
    ],
}  # fmt: skip


def observe(memory_traffic):
    """Of each case: what came back, the runs of its function, what it returned; why the answer failed, if it did."""
    for case in (case for cases in CASES.values() for case in cases):
        given, runs, got, lost = copy.deepcopy(case.inputs), [], None, ""

        def function(*inputs, case=case, runs=runs):
            runs.append(None)
            runs[-1] = case.function(*inputs)
            return runs[-1]

        try:
            got = memory_traffic(function, *given)
        except (TypeError, AttributeError) as error:
            if not runs or "NoneType" not in str(error) or "mapping" in str(error):
                raise
            lost = str(error)
        made = runs[0] if runs else None
        real = type(made) is torch.Tensor and not made.is_meta  # what traces may run it on shapes alone
        pairs = [pair for pair in zip(given, case.inputs) if not pair[0].is_meta]
        numbers = two_numbers(got)
        found = {
            "lost": lost, "form": None if got is None else "(unfused, fused)" if numbers else str(got),
            "runs": len(runs), "inputs": all(torch.equal(*pair) for pair in pairs),
            "result": made if real else case.result, "moved": numbers,
        }  # fmt: skip
        yield {f"{case.name}: {key}": value for key, value in found.items()}


def two_numbers(got):
    """As floats; None for anything else."""
    if isinstance(got, tuple | list) and len(got) == 2:
        with contextlib.suppress(TypeError, ValueError):
            return tuple(float(value) for value in got)
    return None


def why(case, seen, due):
    """Which mistake gives these two numbers."""
    (unfused, fused), out = seen, case.result.numel() * case.result.itemsize
    if (fused, unfused) == due:
        return "swapped"
    if unfused == case.unfused:  # of two that give one number, the last here is told
        known = {case.unfused: "fused-same", (len(case.inputs) + 1) * out: "fused-as-result"}
        return (known | {out: "fused-result-only", case.fused - out: "fused-inputs-only"}).get(fused, "wrong-fused")
    if not unfused:
        return "nothing-seen"
    if any(abs(unfused * unit / case.unfused - 1) < 1e-3 for unit in (1e3, 1e6, 1e9, 2**10, 2**20, 2**30)):
        return "not-bytes"
    views = "views" in case.name and unfused > case.unfused
    return case.mistakes.get(unfused, "views-counted" if views else "wrong-unfused")


def looks(claim, case):
    where = {"where": case.name}

    def bytes_of(seen, due):
        return where | {"expected": f"{due[0]:,} and {due[1]:,} bytes", "got": f"{seen[0]:,.0f} and {seen[1]:,.0f}"}

    return [
        Look(claim, f"{case.name}: lost", "", "result-lost"),
        Look(claim, f"{case.name}: form", "(unfused, fused)", "not-two-numbers"),
        Look(claim, f"{case.name}: runs", 1, "ran-again", holds=at_most, fields="n"),
        Look(claim, f"{case.name}: inputs", True, "inputs-spoilt", fields=where),
        Look(claim, f"{case.name}: result", case.result, "result-spoilt", fields=where,
             holds=lambda seen, due: seen is due or torch.equal(seen, due)),
        Look(claim, f"{case.name}: moved", (case.unfused, case.fused), functools.partial(why, case), fields=bytes_of),
    ]  # fmt: skip


LOOKS = [look for claim, cases in CASES.items() for case in cases for look in looks(claim, case)]


def balise_2(memory_traffic):
    yield from judged(LOOKS, observe, memory_traffic)
