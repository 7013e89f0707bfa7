"""Balise 2: the roofline, against the time that computing and moving take."""

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.tensor_cores_channels_last.numbers import first, number, same

HINTS = {
    "not-three-values": "Return three values: attainable FLOP/s, \"compute\" or \"memory\", and the ridge point.",
    "times-added": "You let computing and moving data follow each other. On a roofline they overlap, and the "
                   "slower one decides.",
    "upper-roof": "This is the higher of the two roofs. A kernel can reach only the lower one.",
    "peak-only": "This is the peak, whatever the intensity. Under the slanted roof the memory is slower: use "
                 "bandwidth × intensity.",
    "slope-only": "This is bandwidth × intensity, even where that is more than the peak.",
    "intensity-inverted": "Your intensity is upside down: it is FLOP per byte, not bytes per FLOP.",
    "seconds-not-rate": "This is the time in seconds. Divide the work by it to get the attainable FLOP/s.",
    "fraction-not-rate": "This is a fraction of the peak. The task asks for FLOP/s.",
    "scaled-rate": "The number is right except for a power of ten: FLOP/s go in, FLOP/s come out.",
    "wrong-rate": "The attainable rate is wrong. It is the lower of the peak and bandwidth × intensity.",
    "ridge-inverted": "Your ridge point is upside down: it is an intensity, in FLOP per byte.",
    "ridge-of-the-layer": "This is the layer's intensity. The ridge point belongs to the machine: it is where the "
                          "two roofs meet.",
    "wrong-ridge": "The ridge point is wrong. It is the intensity at which bandwidth × intensity reaches the peak.",
    "other-words": 'The bound must be one of two words, "compute" or "memory".',
    "bound-reversed": "You have swapped the two words: to the left of the ridge point, memory is the limit.",
    "bound-by-counts": "Having more operations than bytes does not make a layer compute-bound: machines do many "
                       "operations in the time that one byte takes. Compare the intensity with the ridge point.",
    "bound-beside-ridge": "Close to the ridge point your word is wrong. Compare the two intensities exactly, "
                          "without rounding and without a margin.",
    "bound-of-one-machine": "Your word is right for one machine and wrong for another. Decide with the peak and "
                            "the bandwidth.",
}  # fmt: skip
A100, CPU, H100_FP32 = (312e12, 2039e9), (120e9, 20e9), (67e12, 3350e9)
FORM = '(FLOP/s, "compute" or "memory", FLOP per byte)'


def balise_2(roofline):
    """Both sides of the ridge, on three machines; work without operations."""
    yield "under the slanted roof: 4 FLOP per byte on an A100"
    _rate(roofline, 4e9, 1e9, *A100)
    yield "under the flat roof: 700 FLOP per byte"
    _rate(roofline, 2.1e12, 3e9, *A100)
    yield "other machines, other layers"
    for flop, moved in ((3e6, 7e5), (5e9, 3e8), (8e12, 1.3e9), (1e7, 9e8), (2e9, 1e7)):
        for machine in (A100, CPU, H100_FP32):
            _rate(roofline, flop, moved, *machine)
    yield "the ridge point belongs to the machine"
    for machine in (A100, CPU, H100_FP32):
        _ridge(roofline, 5e9, 3e8, *machine)
    yield "what bounds the layer"
    _bounds(roofline)
    yield "a copy: nothing to compute"
    _rate(roofline, 0, 4e9, *CPU)
    if _call(roofline, 0, 4e9, *CPU)[1] != "memory":
        raise Wrong("bound-reversed", expected="memory", got="compute", where="0 operations")


def _call(roofline, *work):
    got = roofline(*work)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("not-three-values", expected=FORM, got=got)
    rate, bound, ridge = got
    rate, ridge = number(rate, "not-three-values", FORM), number(ridge, "not-three-values", FORM)
    if not isinstance(bound, str) or bound not in ("compute", "memory"):
        raise Wrong("other-words", expected='"compute" or "memory"', got=bound)
    return rate, bound, ridge


def _where(flop, moved, peak, bandwidth):
    return f"{flop:.3g} FLOP, {moved:.3g} bytes; peak {peak:.4g} FLOP/s, {bandwidth:.4g} byte/s"


def _rate(roofline, flop, moved, peak, bandwidth):
    computing, moving = flop / peak, moved / bandwidth
    truth = flop / max(computing, moving)
    got = _call(roofline, flop, moved, peak, bandwidth)[0]
    if same(got, truth):
        return
    slope = flop / moving
    mistakes = [
        ("upper-roof", max(peak, slope)),
        ("times-added", flop / (computing + moving)),
        ("seconds-not-rate", max(computing, moving)),
        ("fraction-not-rate", truth / peak),
        *(("scaled-rate", truth / 10**power) for power in (3, 6, 9, 12)),
    ]
    if flop:
        mistakes += [("intensity-inverted", min(peak, bandwidth * moved / flop))]
    # the roof that is not the lowest here: said at once when only it is given elsewhere too
    if same(got, max(peak, slope)):
        other = (1e15, 1e12) if slope < peak else (1e9, 1e9)  # another work, on the other side of the ridge
        again = _call(roofline, *other, peak, bandwidth)[0]
        if same(again, peak) and slope < peak:
            mistakes.insert(0, ("peak-only", got))
        elif same(again, bandwidth * other[0] / other[1]) and slope > peak:
            mistakes.insert(0, ("slope-only", got))
    raise Wrong(first(got, mistakes, "wrong-rate"), expected=f"{truth:.4g} FLOP/s", got=f"{got:.4g}",
                where=_where(flop, moved, peak, bandwidth))  # fmt: skip


def _ridge(roofline, flop, moved, peak, bandwidth):
    got = _call(roofline, flop, moved, peak, bandwidth)[2]
    if not same(got, peak / bandwidth):
        mistakes = [("ridge-inverted", bandwidth / peak), ("ridge-of-the-layer", flop / moved)]
        raise Wrong(first(got, mistakes, "wrong-ridge"), expected=f"{peak / bandwidth:.4g} FLOP/byte", got=f"{got:.4g}",
                    where=_where(flop, moved, peak, bandwidth))  # fmt: skip


def _bounds(roofline):
    works = [(2e8, 1e8), (4e9, 1e9), (3e9, 1e8), (2.6e10, 2e8), (1.5e11, 1e9), (1.6e11, 1e9), (9e11, 1e9), (1e6, 3e6)]
    found = []
    for machine in (A100, CPU, H100_FP32):
        beside = [(factor * machine[0], machine[1]) for factor in (0.99, 1.01)]  # just left and just right of the ridge
        for work in [*works, *beside]:
            truth = "compute" if work[0] / machine[0] > work[1] / machine[1] else "memory"
            found.append((_call(roofline, *work, *machine)[1], truth, work, machine))
    wrong = [entry for entry in found if entry[0] != entry[1]]
    if not wrong:
        return
    got, truth, work, machine = wrong[0]
    slug = "bound-of-one-machine"
    if all((word == "compute") == (w[0] > w[1]) for word, _, w, _ in found):
        slug = "bound-by-counts"
    elif len(wrong) == len(found):
        slug = "bound-reversed"
    elif all(abs(w[0] / m[0] * m[1] / w[1] - 1) < 0.1 for _, _, w, m in wrong):
        slug = "bound-beside-ridge"
    raise Wrong(slug, expected=truth, got=got, where=_where(*work, *machine))
