"""Process groups as NCCL has them, carried by gloo: tensors of GPUs, no tags, in order, and no wait unasked.

A collective runs on a stream of its group, after all that its caller's stream holds. Its result is in the tensors only
once its Work was waited for, and a stream that reads them before makes a race. The reducer of DDP, and all that waits
in C++, is taken to wait at once. Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp;
https://docs.pytorch.org/docs/stable/distributed.html ("tag is not supported with the NCCL backend").
"""

import contextlib
import itertools
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import _disable_current_modes

from dlojz_tp.judging.pretend_gpu import integers
from dlojz_tp.judging.pretend_gpu.memory import (
    CPU,
    block,
    device_of,
    in_kernel,
    is_wild,
    real_device,
    real_storage,
    tag,
    tensors,
)
from dlojz_tp.judging.pretend_gpu.streams import Stream, merge
from dlojz_tp.judging.pretend_gpu.stuck import Message
from dlojz_tp.launch import lanes, place

_RANDOM = "torch.distributed.tensor._random", "torch.distributed.tensor._dispatch"
_WRITE_NOTHING = "send", "barrier"
_c10d = dist.distributed_c10d
_numbers = itertools.count()  # of pretended machines in this process: the same on all ranks


class Groups:
    """The groups of one pretended machine. running: what was started and not waited for, by id of its Work."""

    def __init__(self, machine, streams):
        self.machine, self.streams = machine, streams
        self.number = next(_numbers)
        self.of: dict[str, Stream] = {}
        self.names: dict[Stream, str] = {}
        self.running: dict[int, tuple] = {}
        self.batch, self.batches = None, itertools.count()
        self.integers = Counter()  # short lists of them that travelled, by group and ends
        self.real = {name: getattr(dist.Work, name) for name in ("wait", "is_completed", "get_future")}

    # ---- one collective or message
    def call(self, mode, func, name, args, kwargs, found):
        """What `c10d::…` and `_c10d_functional::…` do, called with the tensors `found`."""
        for x in found if self.machine.nccl else ():  # gloo's are the CPU's
            if tag(x) is None and is_wild(x):
                mode.put(x, self.machine.current)
        # what an object is sent as has its values, where others have none
        as_objects = self.machine.clock is not None and name != "barrier" and {real_device(x) for x in found} == {CPU}
        if self.machine.nccl and not as_objects and name not in ("barrier", "wait_tensor"):
            strange = next((x for x in found if block(x) is None), None)
            if strange is not None:
                raise RuntimeError(f"No backend type associated with device type {real_device(strange).type}")
        if len(places := {device_of(x) for x in found if not is_wild(x)}) > 1 and name != "barrier":
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} (in collective)")
        if func.namespace != "c10d" or not self.machine.nccl or as_objects:
            # without values, Python makes what a functional collective returns, and asks where its input is
            with in_kernel() if self.machine.clock else contextlib.nullcontext():
                out = func(*args, **kwargs)
            on = next((block(x).index for x in found if block(x) is not None), None)
            for x in tensors([out]) if on is not None else ():
                mode.put(x, on)
            return out
        group = next(
            (dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)), None
        )
        if group is None or _is_fake(group):
            return func(*args, **kwargs)
        return self._queued(func, name, list(args), kwargs, found, group)

    def _queued(self, func, name, args, kwargs, found, group):
        index = next((block(x).index for x in found if block(x) is not None), None)
        if index is None:  # a barrier: on the GPU that the group has used, else NCCL guesses
            used = self.of.get(group.group_name)
            index = dist.get_rank() % self.machine.count if used is None else used.device.index
        if name == "recv_any_source_":
            raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")
        if name not in ("send", "recv_"):
            self._one_rank_a_gpu(group, index)
        elif len(args) > 3:
            args[-1] = 0  # the tag
        stream, current = self._stream(group, index), self.streams.current(index)
        stream.wait_stream(current)
        mark = self.streams.mark(stream)
        message = self._message(name, args, found, group, mark, current)
        self.machine.messages.append(message)
        self.machine.queued += 1
        outputs = [] if name in _WRITE_NOTHING else list(tensors([args[0]]))
        for x in found:
            memory = block(x)
            if memory is not None:
                self.streams.used(memory, mark, any(x is y for y in outputs), f"c10d::{name}", x)
        by_python, clock = _from_python(), self.machine.clock
        if clock is not None:  # no values: nothing travels but short lists of integers
            if message.peer is not None and integers.is_short(found[0]):
                (integers.sent if name == "send" else integers.received)(found[0], self._key(message, name))
            whole = sum(x.nbytes for x in tensors([args[0]]))
            clock.sent(mark, message, max(whole, message.bytes - whole) if found else 0)
            work = _create_work_from_future(_done([] if by_python else map(_anywhere, tensors([args[0]]))))
            self.running[id(work)] = work, [(x, x) for x in outputs], dict(stream.after), index, name
            if not by_python:
                merge(current.after, stream.after)
            return (args[0], work.boxed()) if len(func._schema.returns) == 2 else work.boxed()
        if not by_python:
            out = func(*args, **kwargs)
            merge(current.after, stream.after)
            return out
        copies: list[tuple] = []
        if outputs:
            args[0] = _copied(args[0], copies)
        out = func(*args, **kwargs)
        work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        self.running[id(work)] = work, copies, dict(stream.after), index, name
        return (args[0], *out[1:]) if isinstance(out, tuple) else out

    def _key(self, message, name) -> str:
        """What both ends call this message: the n-th from one rank to another."""
        ends = (dist.get_rank(), message.peer) if name == "send" else (message.peer, dist.get_rank())
        return self._next(message.group, ends)

    def _next(self, group: str, ends) -> str:
        self.integers[group, ends] += 1
        return f"integers/{self.number}/{group}/{ends}/{self.integers[group, ends]}"

    def _stream(self, group, index) -> Stream:
        if group.group_name not in self.of:
            stream = self.of[group.group_name] = Stream(index, streams=self.streams)
            stream.of_group = True
            self.names[stream] = group.group_name
        return self.of[group.group_name]

    def _message(self, name, args, found, group, mark, current) -> Message:
        ranks = tuple(dist.get_process_group_ranks(group))
        peer = ranks[next(a for a in args if type(a) is int)] if name in ("send", "recv_") else None
        after = {self.names[s]: n for s, n in current.after.items() if s in self.names}
        nbytes = sum(x.nbytes for x in found)
        return Message(name.rstrip("_"), group.group_name, ranks, peer, nbytes, self.batch, mark[1], after)

    def _one_rank_a_gpu(self, group, index) -> None:
        """At a group's first collective, NCCL compares the GPUs of all its ranks."""
        if group.group_name in self.of:
            return
        ranks, me, store = dist.get_process_group_ranks(group), dist.get_rank(), _c10d._get_default_store()
        key = f"pretended GPU/{self.number}/{group.group_name}/"
        store.set(f"{key}{me}", str(index))
        others = {rank: int(store.get(f"{key}{rank}")) for rank in ranks}
        twin = next((rank for rank in ranks if rank != me and others[rank] == index), None)
        if twin is not None:
            raise dist.DistBackendError(
                "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\nLast error:\n"
                f"Duplicate GPU detected : rank {me} and rank {twin} both on CUDA device {index}"
            )

    # ---- waiting
    def wait(self, work, *args, **kwargs):
        """The current stream waits, and not the CPU, but for a barrier."""
        done = self.real["wait"](work, *args, **kwargs)
        self._bring(work)
        return done

    def is_completed(self, work):
        done = self.real["is_completed"](work)
        if done:
            self._bring(work)
        return done

    def get_future(self, work):
        copies = self.running[id(work)][1] if id(work) in self.running else []
        self._bring(work, self.real["wait"])
        if self.machine.clock is not None:
            return _done(_anywhere(x) for x, _ in copies)
        return self.real["get_future"](work)

    def _bring(self, work, wait=None):
        if id(work) not in self.running:
            return
        if wait is not None:
            wait(work)
        _, copies, knows, index, name = self.running.pop(id(work))
        merge(self.streams.current(index).after, knows)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for x, values in copies:
                x.detach().copy_(values)
        if name == "barrier":
            self.streams.wait("barrier", knows)

    # ---- what the program asks for
    def replaced(self) -> list[tuple]:
        """(module or class, name, stand-in) of each."""
        if not self.machine.nccl:
            return []
        backend, batched, start, new = dist.get_backend, dist.batch_isend_irecv, dist.init_process_group, dist.new_group
        reduce = dist.all_reduce

        def get_backend(group=None):
            ours = sys._getframe(1).f_globals.get("__name__", "").split(".")[0] == "torch"
            return backend(group) if ours else "nccl"

        def batch_isend_irecv(ops):
            self.batch = next(self.batches)
            try:
                return batched(ops)
            finally:
                self.batch = None
                if self.machine.clock is not None:
                    self.machine.clock.messages.close()

        def init_process_group(backend=None, *args, **kwargs):
            kwargs.pop("device_id", None)
            return start(backend if backend == "fake" else "gloo", *args, **kwargs)

        def new_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
            kwargs.pop("device_id", None)
            return new(ranks, timeout, None, *args, **kwargs)

        def all_reduce(x, op=dist.ReduceOp.SUM, group=None, async_op=False):
            """Without values: C++ hides the operation, so short lists of integers are reduced here."""
            if not (block(x) and integers.is_short(x)) or dist.get_rank(group) < 0:
                return reduce(x, op, group, async_op)
            numbers, key = integers.known(x), self._next((group or dist.group.WORLD).group_name, "all")
            work = reduce(x, op, group, async_op)
            ranks, name = dist.get_process_group_ranks(group), getattr(op, "op", op).name
            integers.reduced(x, numbers, key, dist.get_rank(), ranks, name)
            return work

        def without_device(function):
            """Objects are sent from the CPU, which has their values."""
            return lambda *args, device=None, **kwargs: function(*args, **kwargs)

        objects = "send_object_list", "recv_object_list", "broadcast_object_list"
        by_shape = [*((name, without_device(getattr(dist, name))) for name in objects), ("all_reduce", all_reduce)]
        functions = [
            *(by_shape if self.machine.clock else ()),
            ("get_backend", get_backend), ("batch_isend_irecv", batch_isend_irecv), ("new_group", new_group),
            ("init_process_group", init_process_group), ("is_nccl_available", lambda: True),
        ]  # fmt: skip
        return [
            *((module, name, new) for module in (dist, _c10d) for name, new in functions),
            (_c10d, "_get_object_coll_device", lambda group=None: "cuda" if self.machine.clock is None else "cpu"),
            # DTensor counts in the state of a GPU's generator, which this is not: it leaves its numbers to it
            *(
                (module, "is_rng_supported_mesh", lambda mesh: False)
                for module in map(sys.modules.get, _RANDOM)
                if module
            ),
            *((dist.Work, name, _as_method(getattr(self, name))) for name in self.real),
        ]

    @contextlib.contextmanager
    def launched(self):
        """Inside, this rank is as `launch` starts it where each rank has a GPU: all ranks come here together."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if not self.machine.nccl or world > self.machine.count or place.INSIDE not in os.environ:
            yield
            return
        before, rank = os.environ.get(place.DEVICE), dist.get_rank() if dist.is_initialized() else 0
        os.environ[place.DEVICE], self.machine.current = f"cuda:{rank}", rank
        opened = dict(lanes._lanes)
        if world > 1:
            lanes.open_lanes()
        try:
            yield
        finally:
            os.environ[place.DEVICE] = before or str(CPU)
            lanes._lanes.clear()
            lanes._lanes.update(opened)


def _done(results) -> torch.futures.Future:
    future = torch.futures.Future()
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        future.set_result(list(results))
    return future


def _anywhere(x):
    """For futures (of DDP's reducer and hooks), which take no tensor without values: one like it, of any device."""
    like = torch.empty(x.shape, dtype=x.dtype)
    real_storage(like)._gpu_wild = True
    return like


def _is_group(argument) -> bool:
    return "ProcessGroup" in str(argument._type())


def _is_fake(group) -> bool:
    """Whether its messages go nowhere: torch.testing's group, for one process that stands for many."""
    return _c10d._world.pg_map.get(group, ("",))[0] == "fake"


def _from_python() -> bool:
    """Whether torch.distributed's Python called, which waits in Python too; else C++ did."""
    frame = sys._getframe(1)
    while frame is not None and "pretend_gpu" in frame.f_code.co_filename or _inner(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith("distributed_c10d.py")


def _inner(frame) -> bool:
    """Frames between an operation's caller and its mode."""
    return frame is not None and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py", "_ops.py"))


def _copied(value, copies):
    """Copies of all tensors in it, noted beside their originals."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            copies.append((value, value.detach().clone()))
        return copies[-1][1]
    return [_copied(each, copies) for each in value]


def _as_method(method):
    return lambda work, *args, **kwargs: method(work, *args, **kwargs)
