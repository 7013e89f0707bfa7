"""Answers to balise 5 of 04_profiler: the busy part of a device."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 5, whole=True)

# ---------------------------------------------------------------- right

bank.text(
    None,
    """
def device_busy(trace):
    steps, work = [], []
    for e in trace["traceEvents"]:
        if e.get("ph") != "X":
            continue
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#"):
            steps.append(e)
        if e.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}:
            work.append((e["ts"], e["ts"] + e["dur"]))
    begin = min(s["ts"] for s in steps)
    end = max(s["ts"] + s["dur"] for s in steps)
    merged = []
    for b, e in sorted(work):
        b, e = max(b, begin), min(e, end)
        if e <= b:
            continue
        if merged and b <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], e)
        else:
            merged.append([b, e])
    edges = [begin] + [x for span in merged for x in span] + [end]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2) if edges[i + 1] > edges[i]]
    gaps.sort(key=lambda g: g[1] - g[0], reverse=True)
    return sum(e - b for b, e in merged) / (end - begin), gaps
""",
)
bank.text(  # a sweep over begins and ends with a counter
    None,
    """
def device_busy(trace):
    complete = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "cat" in e]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in complete if e["cat"] == "user_annotation" and "ProfilerStep" in e["name"]]
    start, stop = min(s[0] for s in steps), max(s[1] for s in steps)
    marks = [(start, 0), (stop, 0)]
    for e in complete:
        if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            b, f = max(e["ts"], start), min(e["ts"] + e["dur"], stop)
            if b < f:
                marks += [(b, 1), (f, -1)]
    marks.sort()
    running, since, busy, gaps = 0, start, 0.0, []
    for when, change in marks:
        if when > since:
            if running:
                busy += when - since
            elif gaps and gaps[-1][1] == since:
                gaps[-1][1] = when
            else:
                gaps.append([since, when])
        running, since = running + change, when
    return busy / (stop - start), sorted(gaps, key=lambda g: g[0] - g[1])
""",
)
bank.text(  # with numpy
    None,
    """
def device_busy(trace):
    import numpy as np
    kind = {"kernel", "gpu_memcpy", "gpu_memset"}
    x = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    s = np.array([(e["ts"], e["ts"] + e["dur"]) for e in x if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")])
    lo, hi = s[:, 0].min(), s[:, 1].max()
    w = np.array([(e["ts"], e["ts"] + e["dur"]) for e in x if e.get("cat") in kind], dtype=float).reshape(-1, 2)
    w = np.clip(w, lo, hi)
    w = w[np.argsort(w[:, 0])]
    begins = np.append(w[:, 0], hi)
    ends = np.maximum.accumulate(np.insert(w[:, 1], 0, lo))
    open_ = begins > ends
    gaps = [(float(b), float(e)) for b, e in zip(ends[open_], begins[open_])]
    return 1 - sum(e - b for b, e in gaps) / float(hi - lo), sorted(gaps, key=lambda g: g[0] - g[1])
""",
)
bank.slip(None, ('name"].startswith("ProfilerStep")', 'name"].startswith("ProfilerStep#")'))

# ---------------------------------------------------------------- wrong

RETURN = "return 1 - idle / (last - first), sorted(gaps, key=lambda gap: gap[0] - gap[1])"
SORTED = "sorted(gaps, key=lambda gap: gap[0] - gap[1])"
bank.hint("overlap-twice", "You count work on two streams at the same time twice. The device is either busy or not.")
bank.slip(
    "overlap-twice", (RETURN, f"return sum(e - b for b, e in spans if e > b) / (last - first), {SORTED}"), variant=True
)
bank.hint("labels-as-work", "You count the labels on the device's rows (gpu_user_annotation) as work. They also "
          "cover the gaps.")  # fmt: skip
bank.slip("labels-as-work", ('"gpu_memset")', '"gpu_memset", "gpu_user_annotation")'))
bank.slip(
    "labels-as-work",
    ('if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")', 'if e["pid"] == 0'),
    ('event.get("ph") == "X"', 'event.get("ph") == "X" and "cat" in event'),
    variant=True,
)
bank.hint("processor-as-work", "You count what the processor does (cpu_op, cuda_runtime) as work of the device.")
bank.slip("processor-as-work", ('"gpu_memset")', '"gpu_memset", "cuda_runtime")'))
bank.slip(
    "processor-as-work",
    (
        'if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")',
        'if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")',
    ),
    variant=True,
)
bank.hint("kernels-only", "Copies and memory fills are work of the device, too: gpu_memcpy, gpu_memset.")
bank.slip("kernels-only", ('("kernel", "gpu_memcpy", "gpu_memset")', '("kernel",)'))
bank.hint("one-stream", "You count only one stream. Copies and other kernels run on other streams.")
bank.slip("one-stream", ('"gpu_memset")]', '"gpu_memset") and e["tid"] == 7]'))
bank.slip(
    "one-stream",
    ('"gpu_memset")]\n', '"gpu_memset")]\n    work = [e for e in work if e["tid"] == work[0]["tid"]]\n'),
    variant=True,
)
bank.hint("window-of-kernels", "Your window goes from the first to the last kernel. It should be the window of the "
          "steps: idle time before the first kernel and after the last one counts.")  # fmt: skip
bank.slip(
    "window-of-kernels",
    (
        "    spans = sorted(",
        '    first, last = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)\n    spans = sorted(',
    ),
    variant=True,
)
bank.hint("window-of-all", "Your window goes from the first to the last event. It should be the window of the steps.")
bank.slip("window-of-all", (' and e["name"].startswith("ProfilerStep")', ""))
bank.slip(
    "window-of-all",
    ('if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")', 'if "cat" in e'),
    variant=True,
)
bank.hint("window-on-device", "Your window is that of the steps on the device's rows. The steps have cat "
          "user_annotation.")  # fmt: skip
bank.slip("window-on-device", ('== "user_annotation"', '== "gpu_user_annotation"'))
bank.slip("window-on-device", ('e.get("cat") == "user_annotation" and ', ""), variant=True)
bank.hint("not-cut", "You count work that extends beyond the window in full. Only the part inside counts.")
bank.slip(
    "not-cut",
    (
        "    idle = ",
        '    whole = sorted((e["ts"], e["ts"] + e["dur"]) for e in work)\n    busy, until = 0, 0\n    for b, e in whole:\n'
        "        busy += max(0, e - max(b, until))\n        until = max(until, e)\n    idle = ",
    ),
    ("return 1 - idle / (last - first)", "return busy / (last - first)"),
    variant=True,
)
bank.hint("inner-end", "After a long interval, a short one inside it moves the end back. Keep the larger of the two "
          "ends.")  # fmt: skip
bank.slip("inner-end", ("end = max(end, until)", "end = until"), variant=True)
bank.hint("busy-is-time", "This is a time. Divide it by the length of the window.")
bank.slip("busy-is-time", ("1 - idle / (last - first)", "last - first - idle"))
bank.slip("busy-is-time", ("1 - idle / (last - first)", "(last - first - idle) / 1000"), variant=True)
bank.hint("busy-is-idle", "This is the idle part. The busy part is 1 minus it.")
bank.slip("busy-is-idle", ("1 - idle / (last - first)", "idle / (last - first)"), variant=True)
bank.hint("busy-percent", "Return the busy part as a number between 0 and 1, not as a percentage.")
bank.slip("busy-percent", ("1 - idle / (last - first)", "100 * (1 - idle / (last - first))"), variant=True)
bank.hint("gaps-per-stream", "These are the gaps of each stream. The device is idle only when none of its streams "
          "works.")  # fmt: skip
bank.slip("gaps-per-stream",
    ("    for begin, until in [span for span in spans if span[0] < span[1]] + [(last, last)]:", """\
    end = last
    streams = {}
    for e in work:
        streams.setdefault(e["tid"], []).append((max(first, e["ts"]), min(last, e["ts"] + e["dur"])))
    for own in streams.values():
        at = first
        for begin, until in [*sorted(own), (last, last)]:
            if begin > at:
                gaps.append((at, begin))
            at = max(at, until)
    for begin, until in []:"""),
    variant=True)  # fmt: skip
bank.hint("all-or-nothing", "The device works for a part of the window, more than 0 and less than 1. Do you use the "
          "right events? Does the window end after its start, and do you cut work off at both? (The steps are in no "
          "particular order, either.)")  # fmt: skip
bank.slip("all-or-nothing", ("1 - idle / (last - first)", "1 - len(gaps) / (len(spans) or 1)"))
bank.hint("not-sorted", "The events are in no particular order. Sort them by their start time before you go through "
          "them.")  # fmt: skip
bank.slip("not-sorted", ("sorted((max", "list((max"), variant=True)
bank.hint("gaps-order", "The gaps are right, but their order is not: the longest comes first.")
bank.slip("gaps-order", (SORTED, "gaps"))
bank.slip("gaps-order", (SORTED, f"{SORTED}[::-1]"), variant=True)
bank.hint("gap-at-edge", "The gap at the {edge} of the window is missing.")
bank.slip("gap-at-edge", ("    end, gaps = first, []\n", "    end, gaps = min(b for b, e in spans if b < e) if spans else first, []\n"),
          ("    idle = sum(end - begin for begin, end in gaps)\n", "    idle = sum(end - begin for begin, end in gaps) + (min(b for b, e in spans if b < e) if spans else first) - first\n"))  # fmt: skip
bank.slip(
    "gap-at-edge",
    (SORTED, "sorted((gap for gap in gaps if gap[1] != last), key=lambda gap: gap[0] - gap[1])"),
)
bank.hint("gaps-unit", "The start and end of a gap are microseconds on the trace's own clock, not counted from the "
          "window's start.")  # fmt: skip
bank.slip("gaps-unit", (SORTED, "sorted(((b - first, e - first) for b, e in gaps), key=lambda gap: gap[0] - gap[1])"))
bank.slip(
    "gaps-unit",
    (SORTED, "sorted(((b / 1000, e / 1000) for b, e in gaps), key=lambda gap: gap[0] - gap[1])"),
    variant=True,
)
bank.hint("gaps-as-length", "A gap is a pair (begin, end), not (begin, length).")
bank.slip("gaps-as-length", (SORTED, "sorted(((b, e - b) for b, e in gaps), key=lambda gap: -gap[1])"), variant=True)
bank.hint("empty-gaps", "Some gaps have no length, or end before they begin.")
bank.slip(
    "empty-gaps",
    (
        "        if begin > end:\n            gaps.append((end, begin))\n",
        "        gaps.append((end, max(end, begin)))\n",
    ),
)
bank.slip(
    "empty-gaps",
    ("gaps.append((end, begin))", "gaps.append((begin, end))"),
    ("end - begin for begin, end in gaps", "begin - end for begin, end in gaps"),
    variant=True,
)
bank.hint("gaps-missing", "You return only {n} of {m} gaps. Return all of them.")
bank.slip("gaps-missing", (SORTED, f"{SORTED}[:1]"))
bank.hint("busy-wrong", "The busy part is wrong.")
bank.slip("busy-wrong", ("1 - idle / (last - first)", "round(1 - idle / (last - first), 2)"))
bank.slip("gaps-missing", (SORTED, f"{SORTED}[:4]"))
bank.slip(
    "gaps-missing", (SORTED, SORTED.replace("(gaps,", "([gap for gap in gaps if gap[1] - gap[0] > 5],")), variant=True
)
bank.slip("kernels-only", ('"gpu_memcpy", "gpu_memset")', '"gpu_memcpy")'), variant=True)
bank.slip("gap-at-edge", (" + [(last, last)]", ""), variant=True)
bank.hint("edge-left-out", "You leave out work that is partly outside the window. The part inside counts.")
bank.slip(
    "edge-left-out",
    ('"gpu_memset")]', '"gpu_memset") and first <= e["ts"] and e["ts"] + e["dur"] <= last]'),
    variant=True,
)
bank.hint("mean-of-streams", "This is the mean over the streams. The device is busy when any of them works.")
bank.slip(
    "mean-of-streams",
    (
        "return 1 - idle / (last - first)",
        'return sum(e["dur"] for e in work) / (len({e["tid"] for e in work}) or 1) / (last - first)',
    ),
    variant=True,
)
bank.hint("window-of-some-steps", "Your window covers only some of the steps. It should go from the start of the "
          "first to the end of the last.")  # fmt: skip
bank.slip("window-of-some-steps", ('max(e["ts"] + e["dur"] for e in steps)', 'min(e["ts"] + e["dur"] for e in steps)'))
bank.slip(
    "window-of-some-steps", ('max(e["ts"] + e["dur"] for e in steps)', 'max(e["ts"] for e in steps)'), variant=True
)
bank.slip(
    "all-or-nothing",
    (
        'min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)',
        'steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]',
    ),
    variant=True,
)
bank.hint("gaps-wrong", "The gaps are not the times in which the device does nothing.")
bank.slip("gaps-wrong", (SORTED, "[(b, e) for b, e in spans if e > b]"), variant=True)
bank.hint("nothing-recorded", "Without a single kernel, the device is idle: return 0, and one gap as long as the "
          "window. {error}")  # fmt: skip
bank.slip(
    "nothing-recorded",
    ("    end, gaps = first, []\n", "    end, gaps = first, []\n    if not work:\n        return 1.0, []\n"),
)
bank.slip(
    "nothing-recorded",
    ("    end, gaps = first, []\n", "    end, gaps = first, []\n    min(work, key=len)\n"),
    variant=True,
)
bank.hint("incomplete-event", "Events without {error} are not work: only events with ph equal to X have a start and "
          "a length.")  # fmt: skip
bank.slip(
    "incomplete-event",
    ('[event for event in trace["traceEvents"] if event.get("ph") == "X"]', 'trace["traceEvents"]'),
)
bank.slip("incomplete-event", ('e.get("cat")', 'e["cat"]'), variant=True)
bank.hint("trace-changed", "You changed the trace that you were given.")
bank.slip("trace-changed", ("    idle = ", '    trace["traceEvents"].sort(key=str)\n    idle = '))
bank.slip(
    "trace-changed",
    ("    idle = ", '    for e in work:\n        e["end"] = e["ts"] + e["dur"]\n    idle = '),
    variant=True,
)
bank.hint("not-a-pair", "Return (busy, gaps): a number and a list of pairs (begin, end).")
bank.slip("not-a-pair", (RETURN, "return 1 - idle / (last - first)"))
bank.slip("not-a-pair", (SORTED, "sorted(end - begin for begin, end in gaps)"), variant=True)
bank.slip("busy-wrong", ("        if begin > end:", "        if begin > end + 1:"), variant=True)
