"""Answers to balise 5 of 04_profiler: the busy part of a device."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", whole=True)

# ---------------------------------------------------------------- right

bank.text(
    5,
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
    5,
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
    5,
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
bank.slip(5, None, ('name"].startswith("ProfilerStep")', 'name"].startswith("ProfilerStep#")'))

# ---------------------------------------------------------------- wrong

RETURN = "return 1 - idle / (last - first), sorted(gaps, key=lambda gap: gap[0] - gap[1])"
SORTED = "sorted(gaps, key=lambda gap: gap[0] - gap[1])"
bank.slip(5, "overlap-twice", (RETURN, f"return sum(e - b for b, e in spans if e > b) / (last - first), {SORTED}"))
bank.slip(5, "labels-as-work", ('"gpu_memset")', '"gpu_memset", "gpu_user_annotation")'))
bank.slip(
    5,
    "labels-as-work",
    ('if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")', 'if e["pid"] == 0'),
    ('event.get("ph") == "X"', 'event.get("ph") == "X" and "cat" in event'),
)
bank.slip(5, "processor-as-work", ('"gpu_memset")', '"gpu_memset", "cuda_runtime")'))
bank.slip(
    5,
    "processor-as-work",
    (
        'if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")',
        'if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")',
    ),
)
bank.slip(5, "kernels-only", ('("kernel", "gpu_memcpy", "gpu_memset")', '("kernel",)'))
bank.slip(5, "one-stream", ('"gpu_memset")]', '"gpu_memset") and e["tid"] == 7]'))
bank.slip(5, "one-stream", ('"gpu_memset")]\n', '"gpu_memset")]\n    work = [e for e in work if e["tid"] == work[0]["tid"]]\n'))
bank.slip(
    5,
    "window-of-kernels",
    (
        "    spans = sorted(",
        '    first, last = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)\n    spans = sorted(',
    ),
)
bank.slip(5, "window-of-all", (' and e["name"].startswith("ProfilerStep")', ""))
bank.slip(
    5,
    "window-of-all",
    ('if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")', 'if "cat" in e'),
)
bank.slip(5, "window-on-device", ('== "user_annotation"', '== "gpu_user_annotation"'))
bank.slip(5, "window-on-device", ('e.get("cat") == "user_annotation" and ', ""))
bank.slip(
    5,
    "not-cut",
    (
        "    idle = ",
        '    whole = sorted((e["ts"], e["ts"] + e["dur"]) for e in work)\n    busy, until = 0, 0\n    for b, e in whole:\n'
        "        busy += max(0, e - max(b, until))\n        until = max(until, e)\n    idle = ",
    ),
    ("return 1 - idle / (last - first)", "return busy / (last - first)"),
)
bank.slip(5, "inner-end", ("end = max(end, until)", "end = until"))
bank.slip(5, "busy-is-time", ("1 - idle / (last - first)", "last - first - idle"))
bank.slip(5, "busy-is-time", ("1 - idle / (last - first)", "(last - first - idle) / 1000"))
bank.slip(5, "busy-is-idle", ("1 - idle / (last - first)", "idle / (last - first)"))
bank.slip(5, "busy-percent", ("1 - idle / (last - first)", "100 * (1 - idle / (last - first))"))
bank.slip(
    5,
    "gaps-per-stream",
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
)  # fmt: skip
bank.slip(5, "all-or-nothing", ("1 - idle / (last - first)", "1 - len(gaps) / (len(spans) or 1)"))
bank.slip(5, "not-sorted", ("sorted((max", "list((max"))
bank.slip(5, "gaps-order", (SORTED, "gaps"))
bank.slip(5, "gaps-order", (SORTED, f"{SORTED}[::-1]"))
bank.slip(5, "gap-at-edge", ("    end, gaps = first, []\n", "    end, gaps = min(b for b, e in spans if b < e) if spans else first, []\n"),
          ("    idle = sum(end - begin for begin, end in gaps)\n", "    idle = sum(end - begin for begin, end in gaps) + (min(b for b, e in spans if b < e) if spans else first) - first\n"))  # fmt: skip
bank.slip(
    5,
    "gap-at-edge",
    (SORTED, "sorted((gap for gap in gaps if gap[1] != last), key=lambda gap: gap[0] - gap[1])"),
)
bank.slip(
    5, "gaps-unit", (SORTED, "sorted(((b - first, e - first) for b, e in gaps), key=lambda gap: gap[0] - gap[1])")
)
bank.slip(5, "gaps-unit", (SORTED, "sorted(((b / 1000, e / 1000) for b, e in gaps), key=lambda gap: gap[0] - gap[1])"))
bank.slip(5, "gaps-as-length", (SORTED, "sorted(((b, e - b) for b, e in gaps), key=lambda gap: -gap[1])"))
bank.slip(
    5,
    "empty-gaps",
    (
        "        if begin > end:\n            gaps.append((end, begin))\n",
        "        gaps.append((end, max(end, begin)))\n",
    ),
)
bank.slip(
    5,
    "empty-gaps",
    ("gaps.append((end, begin))", "gaps.append((begin, end))"),
    ("end - begin for begin, end in gaps", "begin - end for begin, end in gaps"),
)
bank.slip(5, "gaps-missing", (SORTED, f"{SORTED}[:1]"))
bank.slip(5, "busy-wrong", ("1 - idle / (last - first)", "round(1 - idle / (last - first), 2)"))
bank.slip(5, "gaps-missing", (SORTED, f"{SORTED}[:4]"))
bank.slip(5, "gaps-missing", (SORTED, SORTED.replace("(gaps,", "([gap for gap in gaps if gap[1] - gap[0] > 5],")))
bank.slip(5, "kernels-only", ('"gpu_memcpy", "gpu_memset")', '"gpu_memcpy")'))
bank.slip(5, "gap-at-edge", (" + [(last, last)]", ""))
bank.slip(
    5,
    "edge-left-out",
    ('"gpu_memset")]', '"gpu_memset") and first <= e["ts"] and e["ts"] + e["dur"] <= last]'),
)
bank.slip(
    5,
    "mean-of-streams",
    (
        "return 1 - idle / (last - first)",
        'return sum(e["dur"] for e in work) / (len({e["tid"] for e in work}) or 1) / (last - first)',
    ),
)
bank.slip(
    5, "window-of-some-steps", ('max(e["ts"] + e["dur"] for e in steps)', 'min(e["ts"] + e["dur"] for e in steps)')
)
bank.slip(5, "window-of-some-steps", ('max(e["ts"] + e["dur"] for e in steps)', 'max(e["ts"] for e in steps)'))
bank.slip(
    5,
    "all-or-nothing",
    (
        'min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)',
        'steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]',
    ),
)
bank.slip(5, "gaps-wrong", (SORTED, "[(b, e) for b, e in spans if e > b]"))
bank.slip(
    5,
    "nothing-recorded",
    ("    end, gaps = first, []\n", "    end, gaps = first, []\n    if not work:\n        return 1.0, []\n"),
)
bank.slip(5, "nothing-recorded", ("    end, gaps = first, []\n", "    end, gaps = first, []\n    min(work, key=len)\n"))
bank.slip(
    5,
    "incomplete-event",
    ('[event for event in trace["traceEvents"] if event.get("ph") == "X"]', 'trace["traceEvents"]'),
)
bank.slip(5, "incomplete-event", ('e.get("cat")', 'e["cat"]'))
bank.slip(5, "trace-changed", ("    idle = ", '    trace["traceEvents"].sort(key=str)\n    idle = '))
bank.slip(5, "trace-changed", ("    idle = ", '    for e in work:\n        e["end"] = e["ts"] + e["dur"]\n    idle = '))
bank.slip(5, "not-a-pair", (RETURN, "return 1 - idle / (last - first)"))
bank.slip(5, "not-a-pair", (SORTED, "sorted(end - begin for begin, end in gaps)"))
bank.slip(5, "busy-wrong", ("        if begin > end:", "        if begin > end + 1:"))
