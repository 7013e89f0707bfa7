"""Streams and events: what has no order between two streams is a race.

Every stream counts its operations and knows, of each other stream, up to which operation its own come after (a vector
clock). Waiting for an event or a stream takes over what that one knows; what the CPU has waited for comes before all
that it starts then. Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

import contextlib
import time
import weakref

import torch

from dlojz_tp.judging.pretend_gpu.machine import Race, line
from dlojz_tp.judging.pretend_gpu.memory import Block, tag, written

BUSY_WAIT = 100  # questions in a row: nobody does that beside other work


class Streams:
    """The order of all that runs on the pretended machine.

    arriving: copies to the CPU that nobody has waited for: (target, its values, the copy's mark).
    """

    def __init__(self, machine):
        self.machine = machine
        self.host: dict = {}  # what the CPU has waited for
        self.all = weakref.WeakSet()
        self.arriving: list[tuple] = []
        self.in_vain = 0  # questions in a row whether something has run, answered with no
        self.default = [Stream(index, streams=self) for index in range(machine.count)]

    def current(self, device=None):
        index = self.machine.index(device)
        return getattr(self.machine.here, "streams", {}).get(index, self.default[index])

    @contextlib.contextmanager
    def use(self, stream):
        """Inside, `stream` is the current one of this thread, its device current. None changes nothing."""
        if stream is None:
            yield
            return
        here, device = self.machine.here, self.machine.current
        before = getattr(here, "streams", {})
        here.streams = before | {stream.device.index: stream}
        self.machine.current = stream.device.index
        try:
            yield stream
        finally:
            here.streams, self.machine.current = before, device

    def set(self, stream) -> None:
        self.machine.here.streams = getattr(self.machine.here, "streams", {}) | {stream.device.index: stream}

    # ---- order
    def after(self, stream, mark) -> bool:
        """Whether what `stream` starts now comes after the operation with this mark, (its stream, its number)."""
        other, number = mark
        return other is stream or max(stream.after.get(other, 0), self.host.get(other, 0)) >= number

    def started(self, stream, func, found, args, kwargs) -> tuple:
        """Note one operation on a stream that uses the tensors `found`, and the races it makes. Returns its mark."""
        outputs = {id(x) for x in written(func, args, kwargs)}
        mark = self.mark(stream)
        for x in found:
            memory = tag(x)
            if memory is not None and type(memory) is Block:
                self.used(memory, mark, id(x) in outputs, func._schema.name, x)
        return mark

    def mark(self, stream) -> tuple:
        stream.after[stream] += 1
        return stream, stream.after[stream]

    def used(self, memory, mark, writes: bool, what: str, x) -> None:
        """This memory is read, or written, by the operation with this mark: note a race."""
        stream = mark[0]
        before = [memory.written] if memory.written is not None else []
        if writes:
            before += memory.read.items()
        if any(not self.after(stream, other) for other in before):
            self.machine.races.append(Race(what, tuple(x.shape), *line()))
        if writes:
            memory.written, memory.read, memory.integers = mark, {}, None
        else:
            memory.read[stream] = mark[1]

    # ---- what the CPU waits for
    def wait(self, why: str, knows: dict) -> None:
        """The CPU waits for what a stream or an event knows."""
        self.machine.waited(why)
        self.learn(knows)

    def wait_for_stream(self, why: str, stream) -> None:
        self.wait(why, stream.after)

    def wait_for_all(self, why: str, device=None) -> None:
        """torch.cuda.synchronize: all streams of one device."""
        index = self.machine.index(device)
        self.machine.waited(why)
        knows: dict = {}
        for stream in list(self.all):
            if stream.device.index == index:
                merge(knows, stream.after)
        self.learn(knows)

    def learn(self, knows: dict) -> None:
        if self.machine.clock is not None:
            self.machine.clock.waits_for(knows)
        merge(self.host, knows)
        arrived = [each for each in self.arriving if self.host.get(each[2][0], 0) >= each[2][1]]
        self.arriving = [each for each in self.arriving if not any(each is other for other in arrived)]
        for target, values, _ in arrived:
            torch._C.TensorBase.copy_(target, values)

    def done(self, knows: dict) -> bool:
        """Whether the CPU may know that all of this has run: only once it has waited for it."""
        return all(self.host.get(stream, 0) >= number for stream, number in knows.items())

    def asked(self, why: str, knows: dict) -> bool:
        """Whether all of this has run, when a program asks. A loop that does nothing but ask is a wait, and ends."""
        if not self.done(knows):
            self.in_vain += 1
            if self.in_vain < BUSY_WAIT:
                return False
            self.wait(f"{why} in a loop", knows)
        self.in_vain = 0
        return True


def merge(mine: dict, other: dict) -> None:
    for stream, number in other.items():
        mine[stream] = max(mine.get(stream, 0), number)


class Stream:
    """torch.cuda.Stream. after: {stream: number}, what all that it starts from now on comes after."""

    device_type, of_group = 1, False

    def __init__(self, device=None, priority=0, streams=None, **_):
        self.streams = streams or running()
        index = device if streams is not None else self.streams.machine.index(device)
        self.device, self.priority, self.after = torch.device("cuda", index), priority, {}
        self.after[self] = 0
        self.returned: list[tuple] = []  # (bytes, marks) of memory that other streams may still use
        self.device_index, self.cuda_stream, self.stream_id = index, id(self), id(self)
        self.streams.all.add(self)

    def freed(self, memory):
        """Memory goes back to the stream it was allocated for, which may give it out again at once."""
        used = [*memory.read.items(), *([memory.written] if memory.written else [])]
        # torch.distributed keeps what its messages use
        used = [mark for mark in used if not (mark[0] in memory.kept or mark[0].of_group)]
        used = [mark for mark in used if not self.streams.after(self, mark)]
        if used:
            self.returned.append((memory.bytes, used))

    def allocated(self, nbytes):
        """New memory may be what was freed: a race, if another stream still uses that."""
        unsafe = [(size, used) for size, used in self.returned if not all(self.streams.after(self, m) for m in used)]
        taken = next((each for each in unsafe if each[0] >= nbytes), None)
        self.returned = [each for each in unsafe if each is not taken]
        if taken is not None:
            self.streams.machine.races.append(Race("freed and used again, without record_stream", (), *line()))

    def wait_stream(self, stream):
        merge(self.after, stream.after)
        merge(self.after, self.streams.host)

    def wait_event(self, event):
        merge(self.after, event.knows)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        self.streams.wait("torch.cuda.Stream.synchronize", self.after)

    def query(self):
        return self.streams.asked("torch.cuda.Stream.query", self.after)

    def is_capturing(self):
        return False

    def __enter__(self):
        self._inside = self.streams.use(self)
        self._inside.__enter__()
        return self

    def __exit__(self, *error):
        return self._inside.__exit__(*error)


class Event:
    """torch.cuda.Event. knows: what the stream that recorded it knew then."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, **_):
        self.timing, self.at, self.knows, self.streams = enable_timing, None, {}, running()

    def record(self, stream=None):
        stream = stream or self.streams.current()
        stream.after[stream] += 1  # the event itself: nobody knows of it without waiting
        self.knows, clock = dict(stream.after), self.streams.machine.clock
        self.at = time.perf_counter() if clock is None else clock.reached(self.knows)
        merge(self.knows, self.streams.host)

    def wait(self, stream=None):
        (stream or self.streams.current()).wait_event(self)

    def query(self):
        return self.streams.asked("torch.cuda.Event.query", self.knows)

    def synchronize(self):
        self.streams.wait("torch.cuda.Event.synchronize", self.knows)

    def elapsed_time(self, other):
        """Milliseconds of the CPU between the two records: a number, and no measure of anything."""
        if not (self.timing and other.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at is None or other.at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.streams.done(self.knows) and self.streams.done(other.knows)):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (other.at - self.at)


_running: list[Streams] = []  # of the machine that is pretended now


def running() -> Streams:
    return _running[-1]
