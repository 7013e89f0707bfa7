"""Balise 5: the busy part of a device, on traces whose truth is counted microsecond by microsecond."""

import copy
import functools
import random
from numbers import Real

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, within
from dlojz_tp.measure.trace import generated


def _event(cat, begin, end, name="work", stream=7, pid=0):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": stream, "ts": begin, "dur": end - begin,
            "args": {"stream": stream}}  # fmt: skip


def _trace(first, second=(), copies=(), fills=(), labels=(), processor=(), edges=(0, 100), around=(), shown=False):
    """A trace of intervals in microseconds; edges: those of the steps; shown: the steps also on the device's rows."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "GPU 0"}}]
    events += [_event("kernel", *span) for span in first] + [_event("kernel", *span, stream=20) for span in second]
    events += [_event("gpu_memcpy", *span, "Memcpy HtoD", 21) for span in copies]
    events += [_event("gpu_memset", *span, "Memset", 7) for span in fills]
    events += [_event("gpu_user_annotation", *span, "forward") for span in labels]
    for span in processor:
        events += [
            _event("cpu_op", *span, "aten::add", 1, 99),
            _event("cuda_runtime", *span, "cudaLaunchKernel", 1, 99),
        ]
    for number, (begin, end) in enumerate(zip(edges, edges[1:], strict=False), 2):
        events.append(_event("user_annotation", begin, end, f"ProfilerStep#{number}", 1, 99))
        if shown:
            late = 15 if number % 2 else 5
            events.append(_event("gpu_user_annotation", begin + late, end + late, f"ProfilerStep#{number}"))
        events.append(_event("user_annotation", begin, end, "forward", 1, 99))
    if around:
        events.append(_event("user_annotation", *around, "the whole run", 1, 99))
    return {"schemaVersion": 1, "traceEvents": events[::-1]}


def _random(seed):
    """Many intervals on three streams, some outside the window, and events that are incomplete."""
    drawn = random.Random(seed)
    spans = [[(b := drawn.randrange(900, 2200), b + drawn.randrange(1, 60)) for _ in range(14)] for _ in range(3)]
    trace = _trace(*spans, edges=(1000, 1300, 1700, 2000), labels=[(1000, 2000)], processor=[(1000, 1900)], shown=True)
    more = [
        {"ph": "i", "name": "Iteration Start", "ts": 1500.0, "pid": 0},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "ts": 1200.0, "pid": 0, "id": 1},
        {"ph": "M", "name": "thread_name", "cat": "kernel", "pid": 0},
        {"ph": "X", "name": "without a category", "ts": 1000, "dur": 1000, "pid": 3},
    ]
    trace["traceEvents"] += more
    drawn.shuffle(trace["traceEvents"])
    return trace


WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def _spans(trace, cats, name=""):
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in cats and name in e["name"]]
    return [(e["ts"], e["ts"] + e["dur"]) for e in events]


def _covered(spans, first, last):
    """(covered length, gaps) inside the window, from the elementary intervals between all ends."""
    inside = [(max(first, b), min(last, e)) for b, e in spans if b < last and e > first]
    marks = sorted({first, last, *(mark for span in inside for mark in span)})
    gaps = []
    for begin, end in zip(marks, marks[1:], strict=False):
        if not any(b <= begin and end <= e for b, e in inside):
            joined = gaps and gaps[-1][1] == begin
            gaps[-1:] = [(gaps[-1][0], end)] if joined else [*gaps[-1:], (begin, end)]
    return last - first - sum(e - b for b, e in gaps), gaps


def _window(trace, cats=("user_annotation",), name="ProfilerStep"):
    spans = _spans(trace, cats, name)
    return (min(b for b, _ in spans), max(e for _, e in spans)) if spans else (0, 0)


FORM = "(busy, [(begin, end), …])"


def observe(device_busy, trace, nothing):
    given = copy.deepcopy(trace)
    try:
        got = device_busy(given)
    except (KeyError, ValueError, ZeroDivisionError, IndexError, TypeError) as error:
        missing = isinstance(error, KeyError) and error.args and error.args[0] in ("ts", "dur", "cat", "args")
        if not (nothing or missing):
            raise
        yield {"error": f"Your code raised {type(error).__name__}: {error}." if nothing else error.args[0]}
        return
    yield {"error": "", "returned": got is not None, "changed": given != trace}
    right = isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[0], Real)
    right = right and isinstance(got[1], list | tuple) and all(map(_pair, got[1]))
    yield {"form": FORM if right else got}
    yield {"busy": float(got[0]), "gaps": [(float(b), float(e)) for b, e in got[1]]}


def _pair(gap):
    return isinstance(gap, tuple | list) and len(gap) == 2 and all(isinstance(value, Real) for value in gap)


def _busy_slug(trace, nothing, got, _):
    if nothing:
        return "nothing-recorded"
    first, last = _window(trace)
    busy, gaps = _covered(_spans(trace, WORK), first, last)
    length = last - first
    spans = _spans(trace, WORK)
    cut = [(max(first, b), min(last, e)) for b, e in spans if b < last and e > first]
    work = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in WORK]
    alone = [
        _covered([(e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == one], first, last)[0] / length
        for one in {e["tid"] for e in work}
    ]
    device = _window(trace, WORK, "")
    whole = _window(trace, (*WORK, "user_annotation", "gpu_user_annotation", "cpu_op", "cuda_runtime"), "")
    on_device = _window(trace, ("gpu_user_annotation",))
    both = _window(trace, ("gpu_user_annotation", "user_annotation"))
    steps = sorted(_spans(trace, ("user_annotation",), "ProfilerStep"))
    windows = [*steps, *[(first, b) for b, _ in steps[1:]], *[(first, e) for _, e in steps[:-1]]]
    inside = _covered([(b, e) for b, e in spans if b >= first and e <= last], first, last)[0]
    known = {
        "kernels-only": tuple(
            _covered(_spans(trace, some), first, last)[0] / length for some in (WORK[:1], WORK[:2], WORK[::2])
        ),
        "edge-left-out": (inside / length,),
        "not-sorted": _unsorted(cut, first, last),
        "mean-of-streams": (sum(e - b for b, e in cut) / length / len(alone or [1]), sum(alone) / len(alone or [1])),
        "gaps-per-stream": (1 - sum(1 - one for one in alone),),
        "busy-is-time": (busy, busy / 1000, busy / 1e6),
        "busy-is-idle": (1 - busy / length, (length - busy)),
        "busy-percent": (100 * busy / length,),
        "overlap-twice": (sum(e - b for b, e in cut) / length,),
        "not-cut": (_covered(spans, *device)[0] / length, sum(e - b for b, e in spans) / length),
        "labels-as-work": (_covered(_spans(trace, (*WORK, "gpu_user_annotation")), first, last)[0] / length,),
        "processor-as-work": (
            _covered(_spans(trace, (*WORK, "cpu_op", "cuda_runtime")), first, last)[0] / length,
            _covered(_spans(trace, (*WORK, "cuda_runtime")), first, last)[0] / length,
            _covered(_spans(trace, (*WORK, "cpu_op")), first, last)[0] / length,
        ),
        "inner-end": (_set_back(cut, length),),
        "window-of-kernels": _ratio(spans, device),
        "window-on-device": _ratio(spans, on_device) + _ratio(spans, both),
        "window-of-all": _ratio(spans, whole),
        "one-stream": tuple(alone),
        "window-of-some-steps": tuple(part for w in windows for part in _ratio(spans, w) if 0 < part < 1),
    }
    for slug, values in known.items():
        if any(close(got, value, 1e-6) for value in values):
            return slug
    if not 0 < got < 1:
        return "all-or-nothing"
    return "gap-at-edge" if _missing_edge(got, gaps, first, last) else "busy-wrong"


def _missing_edge(got, gaps, first, last):
    """Which, if the busy part is that of a walk which forgets the gap at an edge; else ""."""
    for edge, mark in (("start", 0), ("end", 1)):
        rest = [gap for gap in gaps if gap[mark] != (first, last)[mark]]
        if len(rest) < len(gaps) and rest and close(got, 1 - sum(e - b for b, e in rest) / (last - first), 1e-6):
            return edge
    return ""


def _unsorted(cut, first, last):
    """Busy part if one walks through the intervals in the order of the trace."""
    idle, end = 0, first
    for b, e in [*cut, (last, last)]:
        idle += max(0, b - end)
        end = max(end, e)
    return (1 - idle / (last - first),)


def _ratio(spans, window):
    if window[1] <= window[0]:
        return ()
    return (_covered(spans, *window)[0] / (window[1] - window[0]),)


def _set_back(cut, length):
    """Busy part if the end so far is always that of the last interval."""
    idle, end = 0, None
    for b, e in sorted(cut):
        idle += max(0, b - end) if end is not None else 0
        end = e
    covered = max((e for _, e in cut), default=0) - min((b for b, _ in cut), default=0)
    return (covered - idle) / length


def _alike(some, others):
    """Whether these are the same gaps, in any order; times of a file are rounded."""
    some, others = ([value for gap in sorted(part) for value in gap] for part in (some, others))
    return len(some) == len(others) and all(abs(a - b) < 2e-3 for a, b in zip(some, others))


def _no_end(seen, due):
    as_lengths = sorted(round(e, 3) for _, e in seen) == sorted(round(e - b, 3) for b, e in due)
    return "gaps-as-length" if as_lengths else "empty-gaps"


def _gap_mistake(trace, got, gaps):
    """(slug, which edge) of gaps that are not those due."""
    first, last = _window(trace)
    on_device = _covered(_spans(trace, WORK), *_window(trace, ("gpu_user_annotation",)))[1]
    known = [
        ("gap-at-edge", "end", got, [gap for gap in gaps if gap[1] != last]),
        ("gap-at-edge", "start", got, [gap for gap in gaps if gap[0] != first]),
        ("gap-at-edge", "start and at the end", got, [gap for gap in gaps if first not in gap and last not in gap]),
        ("window-on-device", "", got, on_device),
        ("gaps-unit", "", [(b + first, e + first) for b, e in got], gaps),
        ("gaps-unit", "", [(1000 * b, 1000 * e) for b, e in got], gaps),
        ("gaps-as-length", "", [(b, b + length) for b, length in got], gaps),
    ]
    for slug, edge, some, others in known:
        if _alike(some, others):
            return slug, edge
    some_of_them = len(got) < len(gaps) and all(any(_alike([gap], [one]) for one in gaps) for gap in got)
    return "gaps-missing" if some_of_them else "gaps-wrong", ""


def _longest_first(lengths, _):
    """A look's `holds`; times of a file are rounded."""
    return all(b - a <= 2e-3 for a, b in zip(lengths, lengths[1:]))


def _looks(claim, trace, nothing):
    first, last = _window(trace)
    busy, gaps = _covered(_spans(trace, WORK), first, last)
    gaps = [gap for gap in gaps if gap[1] - gap[0] > 1e-3]
    real = lambda o: [gap for gap in o["gaps"] if gap[1] - gap[0] > 1e-3]  # noqa: E731
    mistake = functools.partial(_gap_mistake, trace)

    def gap_fields(seen, due):
        return {"edge": mistake(seen, due)[1], "n": len(seen), "m": len(due)}

    return [
        Look(claim, "error", "", "nothing-recorded" if nothing else "incomplete-event", fields="error"),
        Look("", "returned", True, "nothing-returned"), Look("", "changed", False, "trace-changed"),
        Look("", "form", FORM, "not-a-pair"),
        Look("", "busy", busy / (last - first), functools.partial(_busy_slug, trace, nothing), holds=within(1e-6),
             fields=lambda seen, _: {"edge": _missing_edge(seen, gaps, first, last), "error": f"Yours gave {seen}."}),
        Look("", "gaps", gaps, _no_end, holds=lambda seen, _: all(b < e for b, e in seen)),
        Look("", real, gaps, lambda *both: mistake(*both)[0], holds=_alike, fields=gap_fields),
        Look("", lambda o: [e - b for b, e in real(o)], "the longest first", "gaps-order", holds=_longest_first),
    ]  # fmt: skip


CLAIMS = {  # traces of a few events, each for one mistake; then made-up ones; then none at all
    "one stream: how much of the window of the steps the device is busy": [
        _trace([(20, 50), (70, 90)], edges=(0, 60, 110, 160), around=(-20, 180), shown=True),
        _trace([(1000, 1300), (1400, 1800)], edges=(1000, 1500, 2000)),
        _trace([(0, 10), (10.4, 60)], edges=(0, 100)),
    ],
    "overlapping streams, and an interval inside another one": [
        _trace([(10, 60)], [(40, 80), (85, 90)], edges=(0, 100)),
        _trace([(10, 90), (20, 30), (40, 45)], [(120, 130)], edges=(0, 150)),
    ],
    "copies and memory fills count; labels and the processor's work don't": [
        _trace([(10, 20)], copies=[(30, 50)], fills=[(60, 65)], labels=[(0, 100)], edges=(0, 100)),
        _trace([(10, 20)], processor=[(15, 70)], edges=(0, 100)),
    ],
    "only the window counts, including gaps at its start and its end": [
        _trace([(0, 120), (150, 160), (280, 340)], edges=(100, 200, 300), around=(0, 400), shown=True),
        _trace([(0, 20), (130, 150), (320, 340)], edges=(100, 200, 300), around=(0, 400), shown=True),
    ],
    "events in any order, even if some lack a time": list(map(_random, range(4))),
    "a trace of a loop": [generated(kind, steps=3, seed=seed) for kind, seed in (("hesitant", 5), ("flowing", 6))],
    "a device that does nothing": [_trace([], edges=(50, 90))],
}


def balise_5(device_busy):
    for claim, traces in CLAIMS.items():
        nothing = claim == "a device that does nothing"
        for trace in traces:
            yield from judged(_looks(claim, trace, nothing), observe, device_busy, trace, nothing)
