"""torch.profiler with a GPU's activity: what the CPU did there, told once more as the GPU's."""

import functools
import itertools
import json
import os
from pathlib import Path

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from dlojz_tp.launch import place

MEMORY, OPERATOR, MODE, KERNEL, STREAM = "[memory]", "cpu_op", "PythonDispatchMode", "kernel", 7


def replaced() -> list[tuple]:
    """(class, name, stand-in) of each."""
    start, export = profile.__init__, profile.export_chrome_trace

    @functools.wraps(start)
    def __init__(self, *, activities=None, **options):  # noqa: N807
        self.on_gpu = activities is None or ProfilerActivity.CUDA in activities
        if os.environ.get(place.CARD):  # at full size the frames of the model itself fill the memory
            options["with_stack"] = False
        start(self, activities=[ProfilerActivity.CPU], **options)

    @functools.wraps(export)
    def export_chrome_trace(self, path):
        done = export(self, path)
        if self.on_gpu and not str(path).endswith(".gz"):
            trace = json.loads(Path(path).read_text())
            trace["traceEvents"] += _of_gpu(trace["traceEvents"])
            Path(path).write_text(json.dumps(trace))
        return done

    return [
        (profile, "__init__", __init__),
        (profile, "export_chrome_trace", export_chrome_trace),
        (FunctionEvent, "self_device_time_total", property(lambda event: event.self_cpu_time_total)),
        (FunctionEvent, "device_time_total", property(lambda event: event.cpu_time_total)),
    ]


def _of_gpu(events: list[dict]) -> list[dict]:
    """The memory's events, and the operators that our mode calls, as a GPU's."""
    found = [e | {"args": e["args"] | {"Device Type": 1, "Device Id": 0}} for e in events if e["name"] == MEMORY]
    operators = sorted((e for e in events if e.get("cat") == OPERATOR), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    for outer, event in itertools.pairwise(operators):
        if outer["name"] == MODE != event["name"]:
            found.append(event | {"cat": KERNEL, "pid": 0, "tid": STREAM, "args": {"device": 0, "stream": STREAM}})
    return found
