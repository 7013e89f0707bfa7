"""Balise 5: the busy part of a device, on traces whose truth is counted microsecond by microsecond."""

import copy
import random
from numbers import Real

from dlojz_tp.checking import Wrong, close
from dlojz_tp.measure.trace import generated

HINTS = {
    "not-a-pair": "Return (busy, gaps): a number and a list of pairs (begin, end).",
    "gaps-per-stream": "These are the gaps of each stream. The device is idle only when none of its streams works.",
    "overlap-twice": "You count work on two streams at the same time twice. The device is either busy or not.",
    "labels-as-work": "You count the labels on the device's rows (gpu_user_annotation) as work. They also cover "
                      "the gaps.",
    "processor-as-work": "You count what the processor does (cpu_op, cuda_runtime) as work of the device.",
    "kernels-only": "Copies and memory fills are work of the device, too: gpu_memcpy, gpu_memset.",
    "one-stream": "You count only one stream. Copies and other kernels run on other streams.",
    "mean-of-streams": "This is the mean over the streams. The device is busy when any of them works.",
    "not-sorted": "The events are in no particular order. Sort them by their start time before you go through them.",
    "all-or-nothing": "The device works for a part of the window, more than 0 and less than 1. Do you use the "
                      "right events? Does the window end after its start, and do you cut work off at both? (The "
                      "steps are in no particular order, either.)",
    "window-of-kernels": "Your window goes from the first to the last kernel. It should be the window of the "
                         "steps: idle time before the first kernel and after the last one counts.",
    "window-of-all": "Your window goes from the first to the last event. It should be the window of the steps.",
    "window-on-device": "Your window is that of the steps on the device's rows. The steps have cat user_annotation.",
    "window-of-some-steps": "Your window covers only some of the steps. It should go from the start of the first "
                            "to the end of the last.",
    "edge-left-out": "You leave out work that is partly outside the window. The part inside counts.",
    "not-cut": "You count work that extends beyond the window in full. Only the part inside counts.",
    "inner-end": "After a long interval, a short one inside it moves the end back. Keep the larger of the two ends.",
    "busy-is-time": "This is a time. Divide it by the length of the window.",
    "busy-is-idle": "This is the idle part. The busy part is 1 minus it.",
    "busy-percent": "Return the busy part as a number between 0 and 1, not as a percentage.",
    "busy-wrong": "The busy part is wrong.",
    "gaps-order": "The gaps are right, but their order is not: the longest comes first.",
    "gaps-missing": "You return only {n} of {m} gaps. Return all of them.",
    "gap-at-edge": "The gap at the {edge} of the window is missing.",
    "gaps-unit": "The start and end of a gap are microseconds on the trace's own clock, not counted from the "
                 "window's start.",
    "gaps-as-length": "A gap is a pair (begin, end), not (begin, length).",
    "empty-gaps": "Some gaps have no length, or end before they begin.",
    "gaps-wrong": "The gaps are not the times in which the device does nothing.",
    "nothing-recorded": "Without a single kernel, the device is idle: return 0, and one gap as long as the window. "
                        "{error}",
    "incomplete-event": "Events without {error} are not work: only events with ph equal to X have a start and a "
                        "length.",
    "trace-changed": "You changed the trace that you were given.",
}


def balise_5(device_busy):
    """Traces of a few events, each for one mistake; then made-up ones; then none at all."""
    yield "one stream: how much of the window of the steps the device is busy"
    _right(device_busy, _trace([(20, 50), (70, 90)], edges=(0, 60, 110, 160), around=(-20, 180), shown=True))
    _right(device_busy, _trace([(1000, 1300), (1400, 1800)], edges=(1000, 1500, 2000)))
    _right(device_busy, _trace([(0, 10), (10.4, 60)], edges=(0, 100)))
    yield "overlapping streams, and an interval inside another one"
    _right(device_busy, _trace([(10, 60)], [(40, 80), (85, 90)], edges=(0, 100)))
    _right(device_busy, _trace([(10, 90), (20, 30), (40, 45)], [(120, 130)], edges=(0, 150)))
    yield "copies and memory fills count; labels and the processor's work don't"
    _right(device_busy, _trace([(10, 20)], copies=[(30, 50)], fills=[(60, 65)], labels=[(0, 100)], edges=(0, 100)))
    _right(device_busy, _trace([(10, 20)], processor=[(15, 70)], edges=(0, 100)))
    yield "only the window counts, including gaps at its start and its end"
    _right(device_busy, _trace([(0, 120), (150, 160), (280, 340)], edges=(100, 200, 300), around=(0, 400), shown=True))
    _right(device_busy, _trace([(0, 20), (130, 150), (320, 340)], edges=(100, 200, 300), around=(0, 400), shown=True))
    yield "events in any order, even if some lack a time"
    for seed in range(4):
        _right(device_busy, _random(seed))
    yield "a trace of a loop"
    for kind, seed in (("hesitant", 5), ("flowing", 6)):
        _right(device_busy, generated(kind, steps=3, seed=seed))
    yield "a device that does nothing"
    _right(device_busy, _trace([], edges=(50, 90)), nothing=True)


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


def _right(device_busy, trace, nothing=False):
    given = copy.deepcopy(trace)
    try:
        got = device_busy(given)
    except (KeyError, ValueError, ZeroDivisionError, IndexError, TypeError) as error:
        if nothing:
            raise Wrong("nothing-recorded", error=f"Your code raised {type(error).__name__}: {error}.") from error
        if isinstance(error, KeyError) and error.args and error.args[0] in ("ts", "dur", "cat", "args"):
            raise Wrong("incomplete-event", error=error.args[0]) from error
        raise
    if got is None:
        raise Wrong("nothing-returned")
    if given != trace:
        raise Wrong("trace-changed")
    form = isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[0], Real)
    if not form or not isinstance(got[1], list | tuple) or not all(_pair(gap) for gap in got[1]):
        raise Wrong("not-a-pair", expected="(busy, [(begin, end), …])", got=got)
    first, last = _window(trace)
    busy, gaps = _covered(_spans(trace, WORK), first, last)
    truth = busy / (last - first)
    if not close(float(got[0]), truth, 1e-6):
        slug, edge = "nothing-recorded" if nothing else _busy_slug(float(got[0]), trace, first, last, busy), ""
        if slug == "busy-wrong":
            slug, edge = _missing_edge(float(got[0]), gaps, first, last)
        raise Wrong(slug, expected=truth, got=float(got[0]), edge=edge, error=f"Yours gave {got[0]}.")
    device = _covered(_spans(trace, WORK), *_window(trace, ("gpu_user_annotation",)))[1]
    _right_gaps(got[1], [gap for gap in gaps if gap[1] - gap[0] > 1e-3], first, last, device)


def _pair(gap):
    return isinstance(gap, tuple | list) and len(gap) == 2 and all(isinstance(value, Real) for value in gap)


def _busy_slug(got, trace, first, last, busy):
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
    return "busy-wrong" if 0 < got < 1 else "all-or-nothing"


def _missing_edge(got, gaps, first, last):
    """("gap-at-edge", which) if the busy part is that of a walk which forgets the gap at an edge."""
    for edge, mark in (("start", 0), ("end", 1)):
        rest = [gap for gap in gaps if gap[mark] != (first, last)[mark]]
        if len(rest) < len(gaps) and rest and close(got, 1 - sum(e - b for b, e in rest) / (last - first), 1e-6):
            return "gap-at-edge", edge
    return "busy-wrong", ""


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


def _right_gaps(got, gaps, first, last, on_device):
    got = [(float(b), float(e)) for b, e in got]
    if any(e <= b for b, e in got):
        slug = "empty-gaps"
        if sorted(round(e, 3) for _, e in got) == sorted(round(e - b, 3) for b, e in gaps):
            slug = "gaps-as-length"
        raise Wrong(slug, expected=str(gaps[:4]), got=str(got[:4]))
    got = [gap for gap in got if gap[1] - gap[0] > 1e-3]  # times of a file are rounded

    def same(some, others):
        flat = [[value for gap in part for value in gap] for part in (some, others)]
        return len(flat[0]) == len(flat[1]) and all(abs(a - b) < 2e-3 for a, b in zip(*flat, strict=True))

    if not same(sorted(got), sorted(gaps)):
        slug, edge = "gaps-wrong", ""
        if same(sorted(got), sorted(gap for gap in gaps if gap[1] != last)):
            slug, edge = "gap-at-edge", "end"
        elif same(sorted(got), sorted(gap for gap in gaps if gap[0] != first)):
            slug, edge = "gap-at-edge", "start"
        elif same(sorted(got), sorted(gap for gap in gaps if first not in gap and last not in gap)):
            slug, edge = "gap-at-edge", "start and at the end"
        elif same(sorted(got), sorted(on_device)):
            slug = "window-on-device"
        elif same(sorted((b + first, e + first) for b, e in got), sorted(gaps)) or same(
            sorted((1000 * b, 1000 * e) for b, e in got), sorted(gaps)
        ):
            slug = "gaps-unit"
        elif same(sorted((b, b + length) for b, length in got), sorted(gaps)):
            slug = "gaps-as-length"
        elif len(got) < len(gaps) and all(any(same([gap], [one]) for one in gaps) for gap in got):
            slug = "gaps-missing"
        fields = {"edge": edge, "n": len(got), "m": len(gaps)}
        raise Wrong(slug, expected=str(sorted(gaps)[:4]), got=str(sorted(got)[:4]), **fields)
    lengths = [e - b for b, e in got]
    if any(b - a > 2e-3 for a, b in zip(lengths, lengths[1:], strict=False)):
        raise Wrong("gaps-order", expected="the longest first", got=str([round(v, 1) for v in lengths[:6]]))
