"""Balise 4: counting graphs, padding to buckets, a result that padding does not change."""

import math

import torch
from torch._dynamo.utils import counters

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.compile.fresh import Graphs, fresh, no_inductor
from dlojz_tp.checks.compile.pooling import pools, row_by_row, scene
from dlojz_tp.probes.gpus import on_gpu

HINTS = {
    "count-not-whole": "The number of graphs is an int.",
    "count-of-calls": "This is the number of calls. Most of them find a graph that is already compiled.",
    "count-of-runs": "This is the number of times that a graph *runs*. The backend is called once for each graph "
                     "that is compiled; what it returns is called for each run. Also, nothing must be forgotten "
                     "between the calls.",
    "one-too-few": "One graph is missing. The first compilation counts, and so does each part of a broken graph.",
    "remembered": "The count depends on what was compiled before: a second count of the same calls gives {again}, "
                  "not {first}. torch._dynamo.reset() makes Dynamo forget.",
    "not-compiled-by": "Nothing was compiled for this count: pass a backend to torch.compile, and call what "
                       "torch.compile returns.",
    "inductor-used": "The functions went to Inductor, which takes seconds for each graph. To count graphs, use a "
                     "backend that only returns the graph.",
    "dynamic-ignored": "The argument `dynamic` has no effect: pass it on to torch.compile.",
    "dynamic-replaced": "dynamic=None leaves the choice to torch, but here you made it: pass the argument on "
                        "unchanged.",
    "function-returned": "What the backend returns cannot run the graph: it is called with the graph's inputs, "
                         "which are not the arguments of `function`. Return something that runs the graph.",
    "calls-left-out": "The function ran {n} times for {calls} calls, or it was given copies of its arguments.",
    "limit-changed": "torch._dynamo.config.recompile_limit was {limit}, and you changed it. It applies to the "
                     "whole program, and to the next measurement.",
    "arguments-packed": "Each entry of `calls` is a tuple of arguments: compiled(*arguments).",
    "wrong-count-of-graphs": "The number of graphs is wrong.",
    "not-padded-and-mask": "Return two tensors: the padded one and its mask.",
    "always-more": "A length that is already a multiple needs no padding: {t} became {padded} for multiples of "
                   "{multiple}.",
    "cut-off": "You cut off real positions: {t} became {padded}. Round up.",
    "wrong-length": "{t} positions must become {right}, the next multiple of {multiple}; they became {padded}.",
    "wrong-dimension": "The padding went to another dimension: F.pad counts from the last one. It belongs after "
                       "the positions, in dimension 1.",
    "padded-in-front": "The padding is at the front. It belongs at the end.",
    "not-zeros": "The padding is not zero, or the real positions are changed.",
    "dtype-changed": "The padded tensor has a different dtype or device from x.",
    "made-on-cpu": "When x is on a GPU, a tensor is on the CPU: {error}. Every tensor that you create, even a "
                   "piece of a mask, needs device=x.device.",
    "mask-inverted": "The mask is True for the padding. It must be True for the real positions.",
    "mask-not-bool": "The mask must be a boolean tensor of shape (b, padded t).",
    "mask-wrong": "The mask does not separate the real positions from the padding.",
    "mask-by-zeros": "A real position whose numbers are all 0 counts as padding. Derive the mask from the length, "
                     "not from the numbers.",
    "input-written": "The {what} was changed.",
    "pool-recompiles": "The padded lengths are {right}, but masked_pool still gave {found} graphs: the graph "
                       "breaks where you take elements out, or read the numbers of the mask. Compute on all "
                       "positions.",
}


def balise_4(count_graphs, pad_to_bucket, masked_pool):
    """Counts against a backend of our own; padding; pooling; then all three together."""
    yield "graphs of a function whose shapes change"
    with fresh(), no_inductor() as inductor:
        limit = torch._dynamo.config.recompile_limit
        _counts(count_graphs, inductor)
        if torch._dynamo.config.recompile_limit != limit:
            raise Wrong("limit-changed", limit=limit)
    yield "padding to the next multiple, and the mask"
    for t in (1, 7, 8, 9, 16, 17, 30):
        _pads(pad_to_bucket, t, 8)
    _pads(pad_to_bucket, 10, 5)
    _pads(pad_to_bucket, 11, 16)
    _pads(pad_to_bucket, 11, 16, torch.bfloat16)
    yield "pooling over the real positions only"
    pools(masked_pool)
    yield "twelve lengths, three shapes, three graphs"
    _together(pad_to_bucket, masked_pool)
    yield "all of it on the device of x"
    _on_gpu(pad_to_bucket, masked_pool)


def _wave(x):
    return x.softmax(dim=0) * 2


def _broken(x, k):
    y = x.sin()
    torch._dynamo.graph_break()
    return y * k


def _counts(count_graphs, inductor):
    lengths = [(torch.ones(n),) for n in (3, 4, 5, 5, 3)]
    same = [(torch.ones(4), 2.0)] * 5
    scenes = [
        ("five calls, a graph break", _broken, same, {}),
        ("three lengths in five calls, dynamic=False", _wave, lengths, {"dynamic": False}),
        ("three lengths in five calls", _wave, lengths, {}),
        ("three lengths in five calls, dynamic=True", _wave, lengths, {"dynamic": True}),
    ]
    found = []
    for name, function, calls, options in scenes:
        truth, runs = _truths(name, function, calls, options)
        counters.clear()
        try:
            got = count_graphs(function, list(calls), **options)
        except TypeError as error:
            if "positional argument" in str(error) or "must be Tensor" in str(error) or "tuple" in str(error):
                slug = "function-returned" if counters["stats"]["unique_graphs"] else "arguments-packed"
                raise Wrong(slug, got=str(error).splitlines()[0], where=name) from error
            raise
        found.append(got)
        if type(got) is int and got != truth and len(found) > 1:
            torch._dynamo.reset()  # is it only what was compiled before?
            if count_graphs(function, list(calls), **options) == truth:
                raise Wrong("remembered", expected=truth, got=got, where=name, again=got, first=truth)
        if type(got) is int and got != truth and not counters["frames"]:
            raise Wrong("not-compiled-by", expected=truth, got=got, where=name)
        if type(got) is int and got != truth and function is _wave and (slug := _dynamic_slug(count_graphs, calls)):
            raise Wrong(slug, expected=truth, got=got, where=name)
        _judge_count(name, got, truth, runs, calls, found, inductor)
    _again(count_graphs, lengths)
    _calls_all(count_graphs)


_known: dict[str, tuple[int, int]] = {}  # the truths of this process: each compiles as often as the answer does


def _truths(name, *scene):
    if name not in _known:
        _known[name] = _truth(*scene)
    return _known[name]


def _truth(function, calls, options):
    """(graphs, runs of graphs) by a backend of our own."""
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(function, backend=graphs, **options)
    for arguments in calls:
        compiled(*arguments)
    torch._dynamo.reset()
    return len(graphs.captured), graphs.runs


def _dynamic_slug(count_graphs, calls):
    """What an answer makes of its argument `dynamic`, by its counts for all three values; "" where they tell nothing."""
    _calls_all(count_graphs)
    settings = {"False": {"dynamic": False}, "None": {}, "True": {"dynamic": True}}
    truth = {name: _truths(f"lengths, dynamic={name}", _wave, calls, options)[0] for name, options in settings.items()}
    got = {name: count_graphs(_wave, list(calls), **options) for name, options in settings.items()}
    if len(set(got.values())) == 1 and got["None"] in truth.values():
        return "dynamic-ignored"
    right = got["False"] == truth["False"] and got["True"] == truth["True"]
    return "dynamic-replaced" if right and got["None"] in (truth["False"], truth["True"]) else ""


def _judge_count(name, got, truth, runs, calls, found, inductor):
    if got is None:
        raise Wrong("nothing-returned")
    if inductor:
        raise Wrong("inductor-used", where=name)
    if isinstance(got, bool) or not isinstance(got, int):
        raise Wrong("count-not-whole", expected=truth, got=got, where=name)
    if got == truth:
        return
    if got == 0:
        slug = "not-compiled-by"
    elif got == truth - 1:
        slug = "one-too-few"
    elif len(found) > 1 and got in (truth + sum(found[:-1]), truth + found[0]):
        slug = "remembered"
    elif got == runs:
        slug = "count-of-runs"
    elif got == len(calls):
        slug = "count-of-calls"
    else:
        slug = "wrong-count-of-graphs"
    raise Wrong(slug, expected=truth, got=got, where=name, again=got, first=truth)


def _again(count_graphs, lengths):
    first = count_graphs(_wave, list(lengths))
    again = count_graphs(_wave, list(lengths))
    if first != again:
        raise Wrong("remembered", expected=first, got=again, first=first, again=again)


def _calls_all(count_graphs):
    """Each call is really made: the function writes to a tensor that it is given."""
    seen = torch.zeros(())

    def adds(seen, x):
        return seen.add_(1) + x

    count_graphs(adds, [(seen, torch.ones(2))] * 4)
    if seen.item() != 4:
        raise Wrong("calls-left-out", n=int(seen.item()), calls=4)


def _pads(pad_to_bucket, t, multiple, dtype=torch.float64):
    x = torch.linspace(1, 2, 3 * t * 2).to(dtype).view(2, 3, t).transpose(0, 1).transpose(1, 2)  # (3, t, 2)
    x = x.clone()
    x[0, -1] = 0.0  # a real position may be all zeros
    given = x.clone()
    got = pad_to_bucket(given, multiple)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 2 or not all(isinstance(part, torch.Tensor) for part in got):
        raise Wrong("not-padded-and-mask", expected="(padded, mask)", got=got)
    padded, mask = got
    right = math.ceil(t / multiple) * multiple
    where = f"x of shape {tuple(x.shape)}, multiples of {multiple}"
    if not torch.equal(given, x):
        raise Wrong("input-written", what="input x", where=where)
    if padded.dim() != 3 or padded.shape[0] != 3 or padded.shape[2] != 2:
        raise Wrong("wrong-dimension", expected=f"(3, {right}, 2)", got=str(tuple(padded.shape)), where=where)
    if (length := padded.shape[1]) != right:
        slug = (
            "cut-off"
            if length < t
            else "always-more"
            if t % multiple == 0 and length == t + multiple
            else "wrong-length"
        )
        raise Wrong(slug, expected=right, got=length, where=where, t=t, right=right, padded=length, multiple=multiple)
    if padded.dtype != x.dtype or padded.device != x.device:
        raise Wrong("dtype-changed", expected=x, got=padded, where=where)
    if not torch.equal(padded[:, :t], x) or padded[:, t:].any():
        in_front = torch.equal(padded[:, right - t :], x) and not padded[:, : right - t].any()
        slug = "padded-in-front" if in_front else "not-zeros"
        raise Wrong(slug, where=where)
    real = (torch.arange(right) < t).expand(3, right)
    if mask.dtype != torch.bool or mask.shape != real.shape:
        raise Wrong(
            "mask-not-bool", expected=f"bool, (3, {right})", got=f"{mask.dtype}, {tuple(mask.shape)}", where=where
        )
    if not torch.equal(mask, real):
        if torch.equal(mask, ~real):
            raise Wrong("mask-inverted", where=where)
        by_zeros = torch.equal(mask, (padded != 0).any(-1)) or torch.equal(mask, (padded != 0).all(-1))
        raise Wrong("mask-by-zeros" if by_zeros else "mask-wrong", expected=str(real[0].tolist()),
                    got=str(mask[0].tolist()), where=where)  # fmt: skip


def _together(pad_to_bucket, masked_pool):
    lengths = range(1, 25, 2)
    x, query, _ = scene(t=24)
    with fresh():
        graphs = Graphs()
        compiled = torch.compile(masked_pool, backend=graphs, dynamic=False)
        for t in lengths:
            part = x[:, :t]
            padded, mask = pad_to_bucket(part, 8)
            got = compiled(padded, query, mask)
            if not close(got, row_by_row(part, query, torch.ones(3, t, dtype=torch.bool)), 1e-4):
                raise Wrong("wrong-pool", where=f"length {t}, compiled")
    if len(graphs.captured) != 3:
        raise Wrong("pool-recompiles", found=len(graphs.captured), right=3)


def _on_gpu(pad_to_bucket, masked_pool):
    def both(x, query):
        padded, mask = pad_to_bucket(x, 8)
        return padded, mask, masked_pool(padded, query, mask)

    fault, error = on_gpu(both, *scene()[:2])
    if fault == "elsewhere":
        raise Wrong("made-on-cpu", error=error)
