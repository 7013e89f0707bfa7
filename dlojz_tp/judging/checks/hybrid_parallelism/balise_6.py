"""Balise 6: all layouts that divide and fit, the quickest first, against a search that tries everything."""

from dlojz_tp import planner
from dlojz_tp.judging.checking.looks import Look, judged, silent, tried
from dlojz_tp.judging.checks.hybrid_parallelism.tables import form, numbers, out_of_planner, said
from dlojz_tp.planner import GPT, Layout

#       model, gpus, batch, node
PROBES = {
    "a node of 8, batch 24": (GPT(48, 12, 8), 8, 24, 8),
    "one GPU": (GPT(48, 4, 8), 1, 6, 8),
    "nodes of 4, 24 GPUs": (GPT(48, 6, 12), 24, 16, 4),
    "6 GPUs in a node of 8": (GPT(48, 6, 6), 6, 18, 8),
    "12 GPUs in nodes of 8": (GPT(48, 6, 8), 12, 24, 8),
    "8 GPUs and 6 heads": (GPT(48, 12, 6), 8, 8, 8),
    "a batch that few data ranks divide": (GPT(48, 10, 4), 16, 10, 8),
}
TIED = GPT(48, 4, 4), 4, 8, 8


def every(model, gpus, batch, node):
    """All layouts that divide: every number is tried."""
    found = set()
    for t in range(1, gpus + 1):
        torn = t > node or (gpus > node and node % t)
        for p in range(1, gpus + 1):
            if torn or gpus % (t * p) or model.heads % t or model.layers % p:
                continue
            d = gpus // (t * p)
            for b in range(1, batch + 1):
                if batch % (d * b) == 0:
                    kinds = [
                        {"zero": min(1, d - 1), "recomputation": kind, "sequence_parallel": t > 1}
                        for kind in ("none", "full")
                    ]
                    found |= {Layout(t, p, d, b, batch // (d * b), **kind) for kind in kinds}
    return found


def _memory(layout):
    return 1e9 * (
        43 / layout.tensor / layout.pipeline + layout.micro_batch * (1 if layout.recomputation == "full" else 2.5)
    )


def _seconds(layout):
    spread = layout.tensor * 0.37 + layout.pipeline * 0.83 + layout.micro_batches * 0.11 + layout.micro_batch * 0.05
    return spread + (layout.recomputation == "full") * 0.31


def _usable(probe):
    if probe[2] % 4:  # few layouts divide: let all of them fit
        return 1e12
    sizes = sorted(map(_memory, every(*probe)))
    return sizes[len(sizes) * 2 // 3]


def observe(search):
    for name, probe in PROBES.items():
        asked = []

        def seconds(layout, asked=asked):
            asked.append(layout)
            return _seconds(layout)

        with _own_work():
            got = search(*probe, _memory, seconds, _usable(probe))
        yield {f"{name}: form": form([got], "a list", lambda one: isinstance(one, list))}
        yield {f"{name}: entries": form(got, "entries", lambda one: numbers(3)(one) and isinstance(one[2], Layout))}
        yield {f"{name}: layouts": [one[2] for one in got]}
        yield {f"{name}: values": [(one[0], one[1]) == (_seconds(one[2]), _memory(one[2])) for one in got]}
        yield {f"{name}: order": [one[0] for one in got]}
    with _own_work():
        some, all_ = (tried(search, *TIED, memory, lambda layout: layout.pipeline, 1e12)
                      for memory in (_memory, lambda layout: 5e9))  # fmt: skip
    yield {"some": some if isinstance(some, str) else [(one[0], one[1]) for one in some],
           "all": all_ if isinstance(all_, str) else len(all_)}  # fmt: skip
    with _own_work():
        none = _told(search, GPT(48, 3, 3), 8, 9, 8, _memory, _seconds, 1e12)
        small = _told(search, *PROBES["a node of 8, batch 24"], _memory, _seconds, 5e9)
    yield {"divides": none[0], "fits": small[0], "leanest": small[1], "other words": none[1] != small[1]}


def _told(search, *arguments):
    """("NoLayout", its text); other words where something else happened."""
    try:
        got = search(*arguments)
    except planner.NoLayout as error:
        return "NoLayout" if str(error).strip() else "NoLayout without a sentence", str(error)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}", ""
    return None if got is None else "returned an empty list" if not got else "returned layouts", ""


def _own_work():
    return out_of_planner(planner.search, planner.layout_search._candidates, planner.layout_search._grids)


def _fitting(probe):
    return {layout for layout in every(*probe) if _memory(layout) <= _usable(probe)}


def _layouts(name):
    """A Look at which layouts came: its hint is what is wrong with the first that should not have."""
    (model, gpus, batch, node), fitting = PROBES[name], _fitting(PROBES[name])

    def shown(seen):
        strange = [layout for layout in seen if layout not in fitting]
        left = sorted(fitting.difference(seen), key=str) or sorted(seen, key=seen.count)[-1:]
        return (strange or left)[0], bool(strange)

    def hint(seen, _):
        layout, strange = shown(seen)
        if not strange:
            left = fitting.difference(seen)
            just = left and all(_memory(layout) == _usable(PROBES[name]) for layout in left)
            return "twice" if not left else "just-fits" if just else "missing"
        t, p = layout.tensor, layout.pipeline
        tests = {
            "not-all-gpus": layout.ranks != gpus, "other-batch": layout.batch != batch, "heads-divided": model.heads % t,
            "layers-divided": model.layers % p, "torn": t > node or (gpus > node and node % t),
            "too-large": _memory(layout) > _usable(PROBES[name]),
        }  # fmt: skip
        return next((slug for slug, wrong in tests.items() if wrong), "other-options")

    def fields(seen, _):
        return {"layout": said(shown(seen)[0]), "n": len(set(seen)), "of": len(fitting), "where": name} | silent(
            seen, _
        )

    return Look(
        "",
        f"{name}: layouts",
        fitting,
        hint,
        holds=lambda seen, due: len(seen) == len(due) and set(seen) == due,
        fields=fields,
    )


def _looks():
    for name in PROBES:
        yield Look(name, f"{name}: form", "a list", "search-form")
        yield Look("", f"{name}: entries", "entries", "search-form")
        yield _layouts(name)
        yield Look("", f"{name}: values", [True] * len(_fitting(PROBES[name])), "values-changed", fields=silent)
        due = sorted(map(_seconds, _fitting(PROBES[name])))
        yield Look("the quickest first", f"{name}: order", due,
                   lambda seen, due: "slowest-first" if seen == due[::-1] else "unordered", fields=silent)  # fmt: skip
    some = sorted((layout.pipeline, _memory(layout)) for layout in every(*TIED))
    by_hand = lambda seen, _: "layouts-compared" if isinstance(seen, str) else "ties"  # noqa: E731
    yield Look("of equally quick layouts, the smaller one comes first", "all", len(some), by_hand, fields=silent)
    yield Look("", "some", some, by_hand, fields=silent)
    shown = lambda seen, due: {"expected": due, "got": seen}  # noqa: E731
    yield Look(
        "where nothing divides or nothing fits, the error says so", "divides", "NoLayout", "silent-none", fields=shown
    )
    yield Look("", "fits", "NoLayout", "silent-none", fields=shown)
    yield Look("", "leanest", f"{min(map(_memory, every(*PROBES['a node of 8, batch 24']))) / 1e9:.1f}",
               "leanest-unsaid", holds=lambda seen, due: due in seen, fields=shown)  # fmt: skip
    yield Look("", "other words", True, "one-sentence", fields=silent)


LOOKS = list(_looks())


def balise_6(search):
    yield from judged(LOOKS, observe, search)
