"""Balise 4: counting graphs, padding to buckets, a result that padding does not change."""

import functools

import torch
from torch._dynamo.utils import counters

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, form, judged, within
from dlojz_tp.judging.checks.compile import pooling
from dlojz_tp.judging.checks.compile.fresh import Graphs, fresh, no_inductor
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.judging.probes.shared_looks import recognised, said


def wave(x):
    return x.softmax(dim=0) * 2


def broken(x, k):
    y = x.sin()
    torch._dynamo.graph_break()
    return y * k


LENGTHS = [(torch.ones(n),) for n in (3, 4, 5, 5, 3)]
COUNTED = {
    "five calls, a graph break": (broken, [(torch.ones(4), 2.0)] * 5, {}),
    "three lengths in five calls, dynamic=False": (wave, LENGTHS, {"dynamic": False}),
    "three lengths in five calls": (wave, LENGTHS, {}),
    "three lengths in five calls, dynamic=True": (wave, LENGTHS, {"dynamic": True}),
}
DYNAMIC = dict(zip((False, None, True), list(COUNTED)[1:]))


@functools.cache
def truth(scene):
    """(graphs, runs of graphs) by a backend of our own: compiled once in a process."""
    function, calls, options = COUNTED[scene]
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(function, backend=graphs, **options)
    for arguments in calls:
        compiled(*arguments)
    torch._dynamo.reset()
    return len(graphs.captured), graphs.runs


def count(count_graphs, scene):
    function, calls, options = COUNTED[scene]
    return count_graphs(function, list(calls), **options)


def calls_made(count_graphs):
    """Of four: the function writes to a tensor that it is given."""
    seen = torch.zeros(())

    def adds(seen, x):
        return seen.add_(1) + x

    count_graphs(adds, [(seen, torch.ones(2))] * 4)
    return int(seen.item())


def counted(count_graphs, scene, earlier):
    """The count of a scene; of a wrong one also what tells why. earlier: those of the scenes before."""
    function, dynamic = COUNTED[scene][0], {}
    with fresh(), no_inductor() as inductor:
        limit, (due, runs) = torch._dynamo.config.recompile_limit, truth(scene)
        counters.clear()
        try:
            got = count(count_graphs, scene)
        except TypeError as error:
            if any(words in str(error) for words in ("positional argument", "must be Tensor", "tuple")):
                slug = "function-returned" if counters["stats"]["unique_graphs"] else "arguments-packed"
                raise Wrong(slug, got=str(error).splitlines()[0], where=scene) from error
            raise
        seen = {"got": got, "compiled": bool(counters["frames"]), "inductor": bool(inductor), "runs": runs}
        if type(got) is int and got != due and function is wave:
            seen["calls"] = calls_made(count_graphs)
            dynamic = {word: (count(count_graphs, other), truth(other)[0]) for word, other in DYNAMIC.items()}
        limits = [limit] * (torch._dynamo.config.recompile_limit != limit)
        return seen | {"dynamic": dynamic, "earlier": earlier, "limits": limits}


def padding(t, multiple, dtype=torch.float64):
    x = torch.linspace(1, 2, 3 * t * 2).to(dtype).view(2, 3, t).transpose(0, 1).transpose(1, 2).clone()  # (3, t, 2)
    x[0, -1] = 0.0  # a real position may be all zeros
    return x, multiple


PADDED = [padding(t, 8) for t in (1, 7, 8, 9, 16, 17, 30)]
PADDED += [padding(10, 5), padding(11, 16), padding(11, 16, torch.bfloat16)]
X, QUERY, _ = pooling.scene(t=24)
PARTS = [X[:, :t] for t in range(1, 25, 2)]
POOLED = [pooling.row_by_row(part, QUERY, torch.ones(part.shape[:2], dtype=torch.bool)) for part in PARTS]


def observe(count_graphs, pad_to_bucket, masked_pool):
    earlier, limits = [], []
    for scene in COUNTED:
        yield {scene: (seen := counted(count_graphs, scene, list(earlier)))}
        earlier.append(seen["got"])
        limits += seen["limits"]
    with fresh(), no_inductor():
        twice = [count(count_graphs, "three lengths in five calls") for _ in range(2)]
        calls = calls_made(count_graphs)
    yield {"twice": twice, "calls": calls, "limits": limits}
    for k, (x, multiple) in enumerate(PADDED):
        given = x.clone()
        got = pad_to_bucket(given, multiple)
        pair = isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(part, torch.Tensor) for part in got)
        yield {f"{k}: pair": "(padded, mask)" if pair else got, f"{k}: input": torch.equal(given, x)}
        yield {f"{k}: padded": got[0], f"{k}: mask": got[1]}
    yield from pooling.observe(masked_pool)
    with fresh():
        graphs = Graphs()
        compiled, found = torch.compile(masked_pool, backend=graphs, dynamic=False), []
        for part in PARTS:
            padded, mask = pad_to_bucket(part.clone(), 8)
            found.append(compiled(padded, QUERY.clone(), mask))
    yield {"compiled": found, "graphs": len(graphs.captured)}
    yield {"device": on_gpu(lambda x, query: on_device(pad_to_bucket, masked_pool, x, query), *pooling.scene()[:2])}


def on_device(pad_to_bucket, masked_pool, x, query):
    padded, mask = pad_to_bucket(x, 8)
    return padded, mask, masked_pool(padded, query, mask)


def count_hint(seen, due):
    """Why a count is wrong."""
    got, earlier = seen["got"], seen["earlier"]
    if type(got) is int and got != due:
        if not seen["compiled"]:
            return "not-compiled-by"
        if seen.get("calls", 4) != 4:
            return "calls-left-out"
        if seen["dynamic"] and (slug := dynamic_hint(*zip(*seen["dynamic"].values()))):
            return slug
    if got is None or seen["inductor"]:
        return "nothing-returned" if got is None else "inductor-used"
    if type(got) is not int:
        return "count-not-whole"
    known = {
        "not-compiled-by": [0],
        "one-too-few": [due - 1],
        "remembered": [due + sum(earlier), due + earlier[0]] if earlier else [],
        "count-of-runs": [seen["runs"]],
        "count-of-calls": [5],
    }
    return next((slug for slug, counts in known.items() if got in counts), "wrong-count-of-graphs")


def dynamic_hint(got, due):
    """What an answer makes of `dynamic`, by its counts for False, None, True; "" where they tell nothing."""
    if len(set(got)) == 1 and got[1] in due:
        return "dynamic-ignored"
    return "dynamic-replaced" if got[::2] == due[::2] and got[1] in due[::2] else ""


def look_at_count(scene):
    def right(seen, due):
        return type(seen["got"]) is int and seen["got"] == due and not seen["inductor"]

    def fields(seen, due):
        got = seen["got"]
        return {"got": got, "where": scene, "again": got, "first": due, "n": seen.get("calls"), "calls": 4}

    return Look("graphs of a function whose shapes change", scene, lambda _: truth(scene)[0], count_hint, holds=right,
                fields=fields)  # fmt: skip


def remembered(seen):
    first, again = seen["twice"]
    told = {"first": first, "again": again, "expected": first, "got": again}
    return None if first == again else ("remembered", told)


def pad_looks(k, x, multiple):
    t, right = x.shape[1], -(-x.shape[1] // multiple) * multiple
    due, real = torch.nn.functional.pad(x, (0, 0, 0, right - t)), (torch.arange(right) < t).expand(3, right)
    where = {"where": f"x of shape {tuple(x.shape)}, multiples of {multiple}"}

    def of_shape(seen, _):
        if len(seen) != 3 or seen[::2] != (3, 2):
            return "wrong-dimension"
        more = t % multiple == 0 and seen[1] == t + multiple
        return "cut-off" if seen[1] < t else "always-more" if more else "wrong-length"

    def lengths(seen, _):
        return where | {"t": t, "right": right, "padded": seen[1] if len(seen) > 1 else "", "multiple": multiple}

    def of_values(seen, _):
        front = torch.equal(seen[:, right - t :], x) and not seen[:, : right - t].any()
        return "padded-in-front" if front else "not-zeros"

    def of_mask(seen, _):
        by_zeros = torch.equal(seen, (due != 0).any(-1)) or torch.equal(seen, (due != 0).all(-1))
        return "mask-inverted" if torch.equal(seen, ~real) else "mask-by-zeros" if by_zeros else "mask-wrong"

    def look(see, due, hint, fields=lambda seen, due: where, **more):
        return Look("padding to the next multiple, and the mask", see, due, hint, fields=fields, **more)

    return [
        look(f"{k}: pair", "(padded, mask)", "not-padded-and-mask"),
        look(f"{k}: input", True, "input-written", lambda *_: where | {"what": "input x"}),
        look(lambda seen: tuple(seen[f"{k}: padded"].shape), (3, right, 2), of_shape, lengths),
        look(lambda seen: (seen[f"{k}: padded"].dtype, seen[f"{k}: padded"].device), (x.dtype, x.device),
             "dtype-changed"),
        look(f"{k}: padded", due, of_values, holds=torch.equal),
        look(lambda seen: form(seen[f"{k}: mask"]), form(real), "mask-not-bool"),
        look(f"{k}: mask", real, of_mask,
             lambda seen, _: where | {"expected": str(real[0].tolist()), "got": str(seen[0].tolist())},
             holds=torch.equal),
    ]  # fmt: skip


LOOKS = [
    *map(look_at_count, COUNTED),
    recognised("", remembered),
    Look("", "calls", 4, "calls-left-out", fields=lambda seen, due: {"n": seen, "calls": due}),
    Look("", "limits", [], "limit-changed", fields=lambda seen, _: {"limit": seen[0], "got": ""}),
    *(look for k, given in enumerate(PADDED) for look in pad_looks(k, *given)),
    *pooling.looks("pooling over the real positions only"),
    Look("twelve lengths, three shapes, three graphs", "compiled", POOLED, "wrong-pool", holds=within(1e-4)),
    Look("", "graphs", 3, "pool-recompiles", fields=lambda seen, due: {"found": seen, "right": due}),
    Look("all of it on the device of x", "device", "", "made-on-cpu", holds=lambda seen, _: seen[0] != "elsewhere",
         fields=said),
]  # fmt: skip


def balise_4(count_graphs, pad_to_bucket, masked_pool):
    """Counts against a backend of our own; padding; pooling; then all three together."""
    yield from judged(LOOKS, observe, count_graphs, pad_to_bucket, masked_pool)
