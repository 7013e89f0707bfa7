"""Enter the pretended machine, and leave it as if it had never been."""

import contextlib
import gc
import os
import sys
import threading
from types import FunctionType

import torch
from torch import serialization

from dlojz_tp.judging.pretend_gpu import amp, compiling, cuda, fakes, profiles, random_numbers, tensor_methods
from dlojz_tp.judging.pretend_gpu.copies import Mover
from dlojz_tp.judging.pretend_gpu.functions import Functions
from dlojz_tp.judging.pretend_gpu.groups import Groups
from dlojz_tp.judging.pretend_gpu.machine import Machine, size
from dlojz_tp.judging.pretend_gpu.memory import HOMES, META, Block
from dlojz_tp.judging.pretend_gpu.operators import Operators
from dlojz_tp.judging.pretend_gpu.streams import Streams, _running
from dlojz_tp.launch import place

_HERE = __name__.rpartition(".")[0]
# Libraries that have none of torch's functions by name. To look through them costs more than all else here: a process
# that was forked copies each page that it reads an object on.
_WITHOUT = {
    *sys.stdlib_module_names,
    "cuda",
    "mpmath",
    "networkx",
    "numpy",
    "PIL",
    "psutil",
    "sympy",
    "torchvision",
    "triton",
}


@contextlib.contextmanager
def pretend_gpu(count: int = 1, capacity="80 GiB", nccl: bool = True, clock=None):
    """Inside, on a rank of a launch: a machine with `count` GPUs of `capacity` bytes each. See the package.

    nccl: process groups behave as NCCL's; else as gloo's, which takes tensors of the CPU. With a GPU for each rank,
    launch.device() and launch.lane() then give what they give on such a machine: all ranks enter together.
    clock: what gives operations a time, of modelled_gpu; then tensors have shapes and no values.
    Gives the Machine, where what happened is noted. RuntimeError outside a rank, unless a rehearsal changes its whole
    process: too much is changed in this process.
    """
    if os.environ.get(place.INSIDE) != "rank" and not place.pretended():
        raise RuntimeError("pretend_gpu() is for code that runs on ranks: call it inside a function given to launch")
    machine = Machine(count, size(capacity), nccl)
    if clock is not None:
        machine.clock, machine.home = clock, META
    streams = Streams(machine)
    mover = Mover(machine)
    groups = Groups(machine, streams)
    modes = Operators(machine, streams, groups), Functions(machine, mover, streams)
    for mode in modes:
        mode.of_kernel = os.environ.get(place.INSIDE) != "rank"  # a check leaves it on
    of_cuda = cuda.replaced(machine, streams)
    changes = [
        *of_cuda, *tensor_methods.replaced(machine, streams, mover), *amp.replaced(machine),
        *random_numbers.replaced(machine),
        *groups.replaced(), *profiles.replaced(), *fakes.replaced(), *_of_threads(modes),
        (torch.autograd, "_engine_run_backward", modes[1].run_backward(torch.autograd._engine_run_backward)),
        *(clock.replaced(machine) if clock is not None else compiling.replaced(of_cuda)),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        if clock is not None:
            HOMES.add("meta")
            stack.callback(HOMES.remove, "meta")
        _running.append(streams)
        stack.callback(_running.pop)
        stack.enter_context(_in_place(changes))
        stack.enter_context(_lifted_on_cpu())
        stack.enter_context(_serialization(machine, streams))
        stack.enter_context(groups.launched())
        for mode in modes:
            stack.enter_context(mode)
        yield machine


def _of_threads(modes) -> list[tuple]:
    """Modes are a thread's own: threads that start inside enter them too."""
    run = threading.Thread.run

    def run_inside(thread):
        with modes[0], modes[1]:
            run(thread)

    return [(threading.Thread, "run", run_inside)]


@contextlib.contextmanager
def _in_place(changes):
    """Inside, each (module or class, name, stand-in) holds, also under the names that others imported it by."""
    with contextlib.ExitStack() as stack:
        instead = {}
        for target, name, new in changes:
            had, old = name in vars(target), getattr(target, name, None)
            if isinstance(target, type) and had:
                old = vars(target)[name]
            if callable(old) and not isinstance(target, type):
                instead[id(old)] = old, new
            setattr(target, name, new)
            stack.callback(*((setattr, target, name, old) if had else (delattr, target, name)))
        functions = _functions()
        for table, name, new in _imported(instead, functions):
            stack.callback(table.__setitem__, name, table[name])
            table[name] = new
        for cell, new in _kept(instead, functions):
            stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = new
        yield


def _imported(instead, functions):
    """(globals, name, stand-in) where `from torch.cuda import …` has left one of these functions."""
    modules = [sys.modules[name] for name in list(sys.modules) if _changed(name)]
    tables = {id(vars(m)): vars(m) for m in modules if m is not None}
    tables |= {id(each.__globals__): each.__globals__ for each in functions}
    for table in tables.values():
        for name, value in list(table.items()):
            if id(value) in instead:
                yield table, name, instead[id(value)][1]


def _kept(instead, functions):
    """(cell, stand-in) of what a function keeps from around it."""
    for cell in {id(cell): cell for each in functions for cell in each.__closure__ or ()}.values():
        with contextlib.suppress(ValueError):  # not filled yet
            if id(cell.cell_contents) in instead:
                yield cell, instead[id(cell.cell_contents)][1]


def _functions():
    """The functions of this rank alone: those that the launch's server had before it forked are not listed."""
    return [each for each in gc.get_objects() if type(each) is FunctionType and _changed(each.__module__ or "")]


def _changed(module: str) -> bool:
    """Whether names in this module are changed: not in ours, nor in most of torch's, which knows what it imports."""
    library = module.partition(".")[0]
    if library == "torch":
        return module.startswith(("torch.cuda", "torch.accelerator", "torch.utils"))
    return library not in _WITHOUT and not module.startswith(_HERE + ".")


@contextlib.contextmanager
def _lifted_on_cpu():
    """torch.tensor inside of torch's own functions makes its values on the CPU first."""
    before = torch._C._only_lift_cpu_tensors() if hasattr(torch._C, "_only_lift_cpu_tensors") else False
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextlib.contextmanager
def _serialization(machine, streams):
    """torch.save writes where a tensor was; torch.load puts it back there, if there is such a GPU."""

    def where(storage):
        memory = getattr(storage, "_gpu_tag", None)
        return f"cuda:{memory.index}" if type(memory) is Block else None

    def restore(storage, location):
        if not location.startswith("cuda"):
            return None
        index = int(location[5:] or machine.current)
        if index >= machine.count:
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is "
                f"{machine.count}. Please use torch.load with map_location to map your storages to an existing device."
            )
        if getattr(storage, "_gpu_tag", None) is None:
            storage._gpu_tag = Block(machine, index, storage.nbytes(), streams.current(index))
        return storage

    entry = (1, where, restore)
    serialization._package_registry.insert(0, entry)
    try:
        yield
    finally:
        serialization._package_registry.remove(entry)
