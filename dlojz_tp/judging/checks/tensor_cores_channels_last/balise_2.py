"""Balise 2: the roofline, against the time that computing and moving take."""

from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.checks.tensor_cores_channels_last.numbers import first, is_number, number, of_each, read, same

A100, CPU, _ = MACHINES = (312e12, 2039e9), (120e9, 20e9), (67e12, 3350e9)  # the third is an H100 in float32
FORM = '(FLOP/s, "compute" or "memory", FLOP per byte)'
OTHERS = (3e6, 7e5), (5e9, 3e8), (8e12, 1.3e9), (1e7, 9e8), (2e9, 1e7)
RATES = {  # cases are (FLOP, bytes, peak, bandwidth)
    "under the slanted roof: 4 FLOP per byte on an A100": [(4e9, 1e9, *A100)],
    "under the flat roof: 700 FLOP per byte": [(2.1e12, 3e9, *A100)],
    "other machines, other layers": [(*layer, *machine) for layer in OTHERS for machine in MACHINES],
}
RIDGES = {"the ridge point belongs to the machine": [(5e9, 3e8, *machine) for machine in MACHINES]}
LAYERS = [(2e8, 1e8), (4e9, 1e9), (3e9, 1e8), (2.6e10, 2e8), (1.5e11, 1e9), (1.6e11, 1e9), (9e11, 1e9), (1e6, 3e6)]
BOUNDS = [
    (*layer, *machine)
    for machine in MACHINES  # the last two layers are just left and just right of the ridge
    for layer in [*LAYERS, (0.99 * machine[0], machine[1]), (1.01 * machine[0], machine[1])]
]
BOUNDED = ["compute" if flop / peak > moved / bandwidth else "memory" for flop, moved, peak, bandwidth in BOUNDS]
COPY = (0, 4e9, *CPU)


def observe(roofline):
    """What each case gives, and works far to the right and far to the left of its machine's ridge."""
    for case in [*sum(RATES.values(), []), COPY]:
        if case == COPY:
            yield {"bounds": [read(roofline(*one)) for one in BOUNDS]}
        yield {case: [read(roofline(*work, *case[2:])) for work in (case[:2], (1e15, 1e12), (1e9, 1e9))]}


def _numbers(one):
    return isinstance(one, tuple) and len(one) == 3 and is_number(one[0]) and is_number(one[2])


def _right_form(one):
    return _numbers(one) and isinstance(one[1], str) and one[1] in ("compute", "memory")


def _form_hint(seen, _):
    one = next(one for one in seen if not _right_form(one))
    return "nothing-returned" if one is None else "other-words" if _numbers(one) else "not-three-values"


def _form(claim, see):
    """A look at the form of all that was returned."""
    return Look(claim, see, [FORM], _form_hint, holds=lambda seen, _: all(map(_right_form, seen)))


def _where(flop, moved, peak, bandwidth):
    return f"{flop:.3g} FLOP, {moved:.3g} bytes; peak {peak:.4g} FLOP/s, {bandwidth:.4g} byte/s"


def _rate(claim, case):
    """A look at the form, and one at the rate."""
    flop, moved, peak, bandwidth = case
    computing, moving = flop / peak, moved / bandwidth
    truth, slope = flop / max(computing, moving), flop / moving
    mistakes = [
        ("upper-roof", max(peak, slope)), ("times-added", flop / (computing + moving)),
        ("seconds-not-rate", max(computing, moving)), ("fraction-not-rate", truth / peak),
        *(("scaled-rate", truth / 10**power) for power in (3, 6, 9, 12)),
        *([("intensity-inverted", min(peak, bandwidth * moved / flop))] if flop else []),
    ]  # fmt: skip

    def hint(seen, _):
        got, right, left = (one[0] if _numbers(one) else float("nan") for one in seen)
        # one roof for all, even where the other is far lower
        if same(got, peak) and same(right, peak) and slope < peak:
            return "peak-only"
        if same(got, slope) and same(left, bandwidth) and slope > peak:
            return "slope-only"
        return first(got, mistakes, "wrong-rate")

    def fields(seen, _):
        return {"expected": f"{truth:.4g} FLOP/s", "got": f"{seen[0][0]:.4g}", "where": _where(*case)}

    yield _form(claim, lambda o: o[case][:1])
    yield Look("", case, truth, hint, holds=lambda seen, _: same(seen[0][0], truth), fields=fields)


def _ridge(claim, case):
    flop, moved, peak, bandwidth = case
    mistakes = [("ridge-inverted", bandwidth / peak), ("ridge-of-the-layer", flop / moved)]
    see, shown = lambda o: o[case][0][2], "{:.4g} FLOP/byte"
    yield number(claim, see, peak / bandwidth, mistakes, "wrong-ridge", _where(*case), shown)


def _bound_hint(seen, due):
    if all((word == "compute") == (flop > moved) for word, (flop, moved, *_) in zip(seen, BOUNDS)):
        return "bound-by-counts"
    wrong = [case for word, truth, case in zip(seen, due, BOUNDS) if word != truth]
    if len(wrong) == len(seen):
        return "bound-reversed"
    beside = all(abs(flop / peak * bandwidth / moved - 1) < 0.1 for flop, moved, peak, bandwidth in wrong)
    return "bound-beside-ridge" if beside else "bound-of-one-machine"


def _first_bound(seen, due):
    k = next(k for k, (word, truth) in enumerate(zip(seen, due)) if word != truth)
    return {"expected": due[k], "got": seen[k], "where": _where(*BOUNDS[k])}


LOOKS = [
    *of_each(RATES, _rate),
    *of_each(RIDGES, _ridge),
    _form("what bounds the layer", "bounds"),
    Look("", lambda o: [word for _, word, _ in o["bounds"]], BOUNDED, _bound_hint, fields=_first_bound),
    *_rate("a copy: nothing to compute", COPY),
    Look("", lambda o: o[COPY][0][1], "memory", "bound-reversed"),
]


def balise_2(roofline):
    yield from judged(LOOKS, observe, roofline)
