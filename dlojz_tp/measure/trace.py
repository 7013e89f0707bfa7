"""A Chrome trace of a GPU made by arithmetic, for machines without a GPU: generated, not recorded, and it says so.

It has the form that `torch.profiler` gives a trace on a GPU: the processor's labels, operators and CUDA calls, and the
device's kernels and copies on several streams. Times are microseconds. Form: PyTorch, kineto, output_json.cpp.
"""

import random

PROCESSOR, DEVICE = 4242, 0  # pid of the two groups of lanes
COMPUTE, COPIES, EXTRA = 7, 20, 24  # streams
LAUNCH = 7.0  # microseconds of the processor for each kernel: a common order of size
SIZES = {"forward": 22, "backward": 44, "optimizer": 5}  # kernels of a phase
NAMES = {
    "forward": ["conv_fprop", "batch_norm_forward", "relu"],
    "backward": ["conv_dgrad", "conv_wgrad", "batch_norm_backward"],
    "optimizer": ["foreach_sgd"],
}


def generated(kind: str, steps: int = 4, seed: int = 0) -> dict:
    """A trace of a training loop on a pretended GPU; the same arguments give the same trace.

    Args:
        kind: "hesitant" loads its batch in turn, copies it on the stream of the kernels, and reads a value in each
            step; "flowing" does none of this, and the processor runs ahead of the device.
        steps: recorded steps.
        seed: of the random durations.

    Returns:
        A dictionary as `json.load` gives it for a trace of the profiler; its key "generated" says what it is.

    Raises:
        ValueError: for another kind.
    """
    if kind not in ("hesitant", "flowing"):
        raise ValueError(f"a generated trace is 'hesitant' or 'flowing', not {kind!r}")
    loop = _Loop(random.Random(f"{kind} {seed}"), hesitant=kind == "hesitant")
    for number in range(2, 2 + steps):
        loop.step(number)
    names = [(PROCESSOR, "processor (generated)"), (DEVICE, "GPU 0 (generated)")]
    lanes = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for pid, name in names]
    loop.events.sort(key=lambda event: (event["name"], event["ts"]))  # a trace is in no order of time
    return {
        "schemaVersion": 1,
        "generated": f"not recorded: dlojz_tp.measure.trace.generated({kind!r}, steps={steps}, seed={seed})",
        "displayTimeUnit": "ms",
        "traceEvents": [*lanes, *loop.events],
    }


class _Loop:
    """The processor's clock, the time at which each stream is free, and the events so far."""

    def __init__(self, drawn: random.Random, hesitant: bool):
        self.drawn, self.hesitant, self.events = drawn, hesitant, []
        self.now = 5_000_000.0  # a trace does not begin at 0
        # a loop that runs ahead has left the device work from before the window
        self.free = {COMPUTE: self.now - 300 + (0 if hesitant else 2600), COPIES: self.now, EXTRA: self.now}
        self._kernels(COMPUTE, self.now - 400, self.free[COMPUTE], "backward")

    def step(self, number: int) -> None:
        begin = self.now
        self._label("loading", self._load)
        for phase in SIZES:
            first = max(self.now, self.free[COMPUTE])
            self._label(phase, lambda phase=phase: self._launch(phase))
            self._add("gpu_user_annotation", phase, DEVICE, COMPUTE, first, self.free[COMPUTE])
        self._add("user_annotation", f"ProfilerStep#{number}", PROCESSOR, 1, begin, self.now)
        self._add("gpu_user_annotation", f"ProfilerStep#{number}", DEVICE, COMPUTE, begin, self.free[COMPUTE])

    def _load(self) -> None:
        if self.hesitant:
            self.now += self.drawn.uniform(1300, 1700)
            self._device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", COMPUTE, 380)
            self._wait("cudaMemcpyAsync")
        else:
            self.now += self.drawn.uniform(30, 60)
            # a prefetcher's copy, for the step after: beside the kernels
            self._device("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", COPIES, 380)

    def _launch(self, phase: str) -> None:
        for i in range(SIZES[phase]):
            begin = self.now
            self.now += self.drawn.uniform(0.7, 1.3) * LAUNCH
            self._add("cuda_runtime", "cudaLaunchKernel", PROCESSOR, 1, begin, self.now)
            if phase == "backward" and i % 11 == 10:  # gradients are gathered beside the kernels
                self._device("kernel", "gather_gradients", EXTRA, self.drawn.uniform(90, 160))
            if phase == "backward" and i == 0:
                self._device("gpu_memset", "Memset (Device)", COMPUTE, 3)
            name = NAMES[phase][i % len(NAMES[phase])]
            self._device("kernel", name, COMPUTE, self.drawn.uniform(15, 75) * (2 if "conv" in name else 0.7))
        if phase == "optimizer" and self.hesitant:  # loss.item(), then a line is printed
            self._wait("cudaStreamSynchronize")
            self.now += self.drawn.uniform(150, 250)
        if phase == "optimizer" and not self.hesitant:  # the queue is full: the processor cannot run ahead for ever
            begin, self.now = self.now, max(self.now, self.free[COMPUTE] - 2600)
            self._add("cuda_runtime", "cudaLaunchKernel", PROCESSOR, 1, begin, self.now)

    def _device(self, cat: str, name: str, stream: int, duration: float) -> None:
        begin = max(self.now + 4, self.free[stream])
        self.free[stream] = begin + duration
        self._add(cat, name, DEVICE, stream, begin, begin + duration)

    def _kernels(self, stream: int, begin: float, end: float, phase: str) -> None:
        """Fill a stretch of a stream with kernels."""
        while begin < end:
            last = min(end, begin + self.drawn.uniform(60, 150))
            self._add("kernel", self.drawn.choice(NAMES[phase]), DEVICE, stream, begin, last)
            begin = last

    def _wait(self, name: str) -> None:
        begin, self.now = self.now, max(self.now, self.free[COMPUTE]) + 5
        self._add("cuda_runtime", name, PROCESSOR, 1, begin, self.now)

    def _label(self, name: str, run) -> None:
        begin = self.now
        run()
        self._add("user_annotation", name, PROCESSOR, 1, begin, self.now)

    def _add(self, cat: str, name: str, pid: int, tid: int, begin: float, end: float) -> None:
        begin, end = round(begin, 3), round(end, 3)
        found = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": round(end - begin, 3)}
        if pid == DEVICE:
            found["args"] = {"device": 0, "stream": tid}
        self.events.append(found)
