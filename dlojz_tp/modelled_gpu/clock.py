"""The time of a modelled card: when the CPU starts an operation, when a stream runs it, who waits for whom.

The order is pretend_gpu's: each stream knows what its next operation comes after. Here each operation has an end, and
the next one begins when all that it comes after has ended and the CPU has started it.
"""

import bisect
import contextlib
import functools
import math
import weakref
from typing import NamedTuple

import torch

from dlojz_tp.judging.pretend_gpu.memory import META, block, in_kernel, real_device, tensors
from dlojz_tp.modelled_gpu import rates as rated
from dlojz_tp.modelled_gpu import shapes, stand_ins
from dlojz_tp.modelled_gpu.messages import Messages
from dlojz_tp.modelled_gpu.work import COPIED_FIRST, NO_KERNEL, ONLY_WRITTEN, last, nbytes, work
from dlojz_tp.planner.cluster import Cluster

SMALL = 1024  # numbers: smaller tensors of the CPU keep their values


class Span(NamedTuple):
    """row: "CPU" (starts operations, or waits), "compute", "copy", "NCCL" (messages) or "stream"; times in seconds."""

    row: str
    name: str
    begin: float
    end: float


class Compiled(NamedTuple):
    """How a function was compiled: graph: replayed as a CUDA graph. pads: products of odd sizes are padded."""

    graph: bool
    pads: bool = True


class Clock:
    """host: the CPU's time (seconds). spans: all that was done. cluster: where the ranks are, if there are several."""

    def __init__(self, rates: rated.Rates, cluster: Cluster | None = None):
        self.rates, self.host, self.spans = rates, 0.0, []
        self.zero = 0.0  # see restart
        self.label = f"modelled, {rates.card.name}"
        self.ends: dict = {}  # stream: when its operations up to each number are done
        self.buses: dict = {}  # way of a copy: when its engine is free
        self.regions: list[tuple] = []  # of autograd's nodes made in compiled functions: (first, after the last, which)
        self.inside: list[Compiled] = []  # compiled functions that run now
        self.group = None  # operations that wait to be fused
        self.messages = Messages(cluster, self._message_done) if cluster is not None else None
        self.groups: dict = {}  # stream of a group: its name
        self.unwritten = weakref.WeakKeyDictionary()  # memory that a fused kernel may never write: see Group

    # ---- time
    def end(self, stream, number: int) -> float:
        if stream in self.groups:
            return self.messages.end(self.groups[stream], number)
        ends = self.ends.setdefault(stream, [0.0])
        ends.extend([ends[-1]] * (number + 1 - len(ends)))
        return ends[number]

    def reached(self, knows: dict) -> float:
        """When all of this is done, and the CPU has asked for it."""
        self.flush()
        return max(self.host, self.done(knows))

    def done(self, knows: dict) -> float:
        return max((self.end(stream, number) for stream, number in knows.items()), default=0.0)

    def waits_for(self, knows: dict) -> None:
        """The CPU waits."""
        until = self.reached(knows)
        if until > self.host:
            self.spans.append(Span("CPU", "waiting", self.host, until))
        self.host = until + rated.LATENCY

    def works(self, name: str, seconds: float) -> None:
        """The CPU does something else, such as loading."""
        self.spans.append(Span("CPU", name, self.host, self.host + seconds))
        self.host += seconds

    def run(self, mark, name: str, seconds: float, launch: float, row=None, engine=None) -> None:
        """One operation with this mark, (stream, number): the CPU starts it, the stream runs it in its turn."""
        stream, number = mark
        if launch:
            self.spans.append(Span("CPU", name, self.host, self.host + launch))
        self.host += launch
        begin = max(self.host, self.done(stream.after), self.buses.get(engine, 0.0))
        self.end(stream, number)
        self.ends[stream][number:] = [begin + seconds] * (len(self.ends[stream]) - number)
        if engine:
            self.buses[engine] = begin + seconds
        row = row or ("compute" if stream is stream.streams.default[stream.device.index] else "stream")
        self.spans.append(Span(row, name, begin, begin + seconds))

    # ---- what pretend_gpu tells
    def ran(self, mark, func, args, kwargs, out) -> None:
        """An operation on a card's tensors was called, and gave `out`."""
        name = func._schema.name.partition("::")[2]
        if name in NO_KERNEL or func.namespace == "profiler":
            return
        found, compiled = work(func, name, args, kwargs, out), self._compiled()
        extern = found.flops > 0
        if compiled and not extern:
            if self.group is None or self.group.mark[0] is not mark[0]:
                self.flush()
                self.group = Group(compiled.graph)
            self.group.add(self, mark, name, found)
            return
        self.flush()
        if compiled:
            launch = 0.0 if compiled.graph else rated.COMPILED_LAUNCH
        else:
            more = max((len(a) for a in args if isinstance(a, list | tuple)), default=0)
            inner = name == "_to_copy" or torch._C._current_autograd_node() is not None
            launch = self.rates.launch * (rated.INNER if inner else 1)
            launch += rated.ONE_OF_LIST * more if name.startswith("_foreach") else 0
        moved = sum(self.read(x, size, None) for x, size in found.reads) + sum(nbytes(x) for x in found.writes)
        moved += moved * (name in COPIED_FIRST and not compiled)
        share = rated.STRIDED if found.strided else rated.DEPTHWISE if found.depthwise else rated.TRAFFIC
        seconds = self.rates.traffic(moved + found.again, share)
        if extern:
            tensor_cores = self._tensor_cores(found)
            padded = found.fits < 1 and tensor_cores and compiled and compiled.pads
            small = self.rates.small if found.smallest and tensor_cores else 0
            share = found.smallest / (found.smallest + small) if small else 1.0
            share *= found.fits if tensor_cores and not padded else 1.0
            if found.attention:
                share = self.rates.attention / self.rates.products
            seconds = max(seconds, self.rates.product(found.flops, found.dtype, found.conv) / share)
            seconds += self.rates.traffic(2 * moved) if padded else 0.0
            if found.conv and found.last != tensor_cores:
                half = found.dtype.itemsize < 4
                seconds += self.rates.traffic(found.reordered, self.rates.reordered if half else rated.TRAFFIC)
        self.run(mark, name, max(seconds, rated.KERNEL), launch)

    def copied(self, mark, way: str, size: int, pinned: bool) -> None:
        """A copy between devices was called."""
        self.flush()
        self.run(mark, way, self.rates.copy(way, size, pinned), self.rates.launch, "copy", way)

    def sent(self, mark, message, size: int) -> None:
        """A collective or a message was called: it waits for all that its stream waits for, in its group's queue."""
        self.flush()
        self.spans.append(Span("CPU", message.kind, self.host, self.host + self.rates.launch))
        self.host += self.rates.launch
        self.groups[mark[0]] = message.group
        ready = self.done({stream: number for stream, number in mark[0].after.items() if stream is not mark[0]})
        self.messages.add(message, size, max(self.host, ready))

    def _message_done(self, said, begin: float, start: float, end: float) -> None:
        if start > begin:
            self.spans.append(Span("NCCL", "waiting for another rank", begin, start))
        self.spans.append(Span("NCCL", said.name, start, end))

    def finish(self) -> list[Span]:
        """Run what is left. Returns all spans, in order of time."""
        self.flush()
        self.done({stream: stream.after[stream] for stream in self.groups})
        moved = [span._replace(begin=span.begin - self.zero, end=span.end - self.zero) for span in self.spans]
        return sorted(moved, key=lambda span: span.begin)

    def restart(self) -> None:
        """Until now is preparation: all of it is done, spans begin here, at 0. All ranks come here together."""
        self.flush()
        ends = [self.end(stream, stream.after[stream]) for stream in (*self.groups, *self.ends)]
        self.host = max([self.host, *ends])
        if self.messages is not None:
            self.host = self.messages.latest(self.host)
        self.zero = self.host
        self.spans.clear()

    def _tensor_cores(self, found) -> bool:
        return found.dtype in (torch.float16, torch.bfloat16) or self.rates.tf32(found.conv)

    # ---- compiled functions
    @contextlib.contextmanager
    def compiled(self, how: tuple[bool, bool]):
        """Inside, operations are fused, and so are those of the backward pass of what is made inside; see Compiled."""
        how = Compiled(*how)
        first, self.host = (
            torch.autograd._get_sequence_nr(),
            self.host + rated.CALL + (rated.REPLAY if how.graph else 0),
        )
        self.inside.append(how)
        try:
            yield
        finally:
            self.inside.pop()
            self.regions.append((first, torch.autograd._get_sequence_nr(), how))

    def _compiled(self) -> Compiled | None:
        """How what runs now is compiled; None where it is not."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.inside[-1] if self.inside else None
        number = node._sequence_nr()
        at = bisect.bisect_right(self.regions, (number, math.inf)) - 1
        return self.regions[at][2] if at >= 0 and number < self.regions[at][1] else None

    def flush(self) -> None:
        """Run the kernel that was being fused."""
        group, self.group = self.group, None
        if group is not None:
            seconds = max(self.rates.traffic(group.moved), rated.KERNEL)
            launch = 0.0 if group.graph else rated.COMPILED_LAUNCH
            self.run(group.mark, "fused " + ", ".join(group.names), seconds, launch)

    def read(self, x, size: int, group) -> float:
        """Bytes that it costs to read x."""
        memory = block(x)
        late = None if memory is None else self.unwritten.get(memory)
        if late is None:
            if group is None or memory is None:
                return size
            seen, group.seen[memory] = group.seen.get(memory, 0), size
            return max(0, size - seen)
        if late.group is group:
            return 0
        if group is not None and late.again is not None:
            return late.again
        del self.unwritten[memory]
        return late.bytes + size

    # ---- tensors without values
    instead = staticmethod(stand_ins.instead)

    def replaced(self, machine) -> list[tuple]:
        """(module or class, name, stand-in) of each, after pretend_gpu's own."""
        return stand_ins.replaced(self, machine)

    def shapes_only(self, func, args, kwargs):
        """The arguments of an operation, with real tensors beside those that have no values made like them."""
        found = list(tensors((*args, *kwargs.values())))
        if not any(real_device(x) == META for x in found) or all(real_device(x) == META for x in found):
            return args, kwargs
        return tuple(map(_without_values, args)), {key: _without_values(x) for key, x in kwargs.items()}

    def result(self, func, args, kwargs):
        """Call the operation: meta kernels know nothing of cuDNN's memory formats."""
        with in_kernel():
            return shapes.result(func, args, kwargs, lambda: self._result(func, args, kwargs))

    def _result(self, func, args, kwargs):
        name = func._schema.name
        out = stand_ins.NO_META.get(name, func)(*args, **kwargs)
        if name == "aten::convolution" and any(last(x) for x in args[:2]):
            return out.contiguous(memory_format=torch.channels_last)
        if name == "aten::convolution_backward" and any(last(x) for x in args[:3]):
            like = torch.channels_last
            return tuple(x.contiguous(memory_format=like) if x is not None and x.dim() == 4 else x for x in out)
        return out

    def on_cpu(self, func, args, kwargs, found):
        """What the CPU makes: large tensors of numbers have no values, and nothing need be written into them."""
        if found and real_device(found[0]) == META:
            written = func._schema.name.partition("::")[2] in ONLY_WRITTEN
            return found[0] if written else self.result(func, args, kwargs)
        if not found and _makes(func) and (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point:
            out = func(*args, **kwargs | {"device": META})
            if out.numel() >= SMALL:
                return out
        return func(*args, **kwargs)


class Late(NamedTuple):
    """What a fused kernel made: its bytes are written when another kernel reads it. again: bytes to read where it is
    made again instead, as the compiler does with casts and the like; None where it is not."""

    group: object
    bytes: int
    again: float | None


MADE_AGAIN = {"_to_copy", "_log_softmax", "native_dropout", "bernoulli"}


class Group:
    """Operations that become one kernel: it reads each memory once, and writes what others read."""

    def __init__(self, graph: bool):
        self.graph, self.moved, self.names, self.mark = graph, 0.0, [], (None, 0)
        self.seen, self.written = weakref.WeakKeyDictionary(), weakref.WeakSet()

    def add(self, clock: Clock, mark, name: str, found) -> None:
        self.mark = mark
        self.names.append(name)
        cost = sum(clock.read(x, size, self) for x, size in found.reads) + found.again
        self.moved += cost
        for x in found.writes:
            memory = block(x)
            if memory in clock.unwritten or memory in self.written:
                continue
            if found.fresh:
                clock.unwritten[memory] = Late(self, nbytes(x), cost if name in MADE_AGAIN else None)
            else:  # it was there before
                self.moved += nbytes(x)
                self.written.add(memory)


@functools.cache
def _makes(func) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _without_values(x):
    if isinstance(x, list | tuple):
        return type(x)(map(_without_values, x))
    if not isinstance(x, torch.Tensor) or real_device(x) == META:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
