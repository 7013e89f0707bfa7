"""The generated trace has the form of a recorded one, and says that it is none."""

import json

import pytest

from dlojz_tp.judging.checks.profiler.balise_5 import WORK, _covered, _spans, _window
from dlojz_tp.measure.trace import generated


def busy(trace):
    first, last = _window(trace)
    return _covered(_spans(trace, WORK), first, last)[0] / (last - first)


def test_it_says_what_it_is_and_is_the_same_each_time():
    trace = generated("hesitant", steps=3, seed=5)
    assert trace["generated"].startswith("not recorded")
    assert "generated" in trace["traceEvents"][0]["args"]["name"]
    assert trace == generated("hesitant", steps=3, seed=5) != generated("hesitant", steps=3, seed=6)
    assert json.loads(json.dumps(trace)) == trace


@pytest.mark.parametrize("kind", ["hesitant", "flowing"])
def test_the_form_of_the_profiler(kind):
    trace = generated(kind, steps=4)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "cat", "ts", "dur", "pid", "tid"} <= set(event) and event["dur"] >= 0 for event in spans)
    steps = [e["name"] for e in spans if e["cat"] == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    assert sorted(steps) == [f"ProfilerStep#{n}" for n in (2, 3, 4, 5)]
    for stream in {e["tid"] for e in spans if e["cat"] in WORK}:  # a stream does one thing after the other
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["cat"] in WORK and e["tid"] == stream)
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in zip(lane, lane[1:], strict=False))


def test_a_hesitant_device_waits_and_a_flowing_one_does_not():
    assert 0.6 < busy(generated("hesitant")) < 0.9 < 0.999 < busy(generated("flowing"))


def test_other_kinds_are_refused():
    with pytest.raises(ValueError, match="hesitant"):
        generated("fast")
