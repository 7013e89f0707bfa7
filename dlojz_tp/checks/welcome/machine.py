"""Balise 1: what a process may use, asked on pretended machines."""

import functools
import os
from numbers import Integral
from types import SimpleNamespace
from unittest import mock

import torch

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, pretended

HINTS = {
    "not-a-dict": "Return a dictionary with the keys device, gpus, cores and torch.",
    "keys-missing": "The dictionary has no {missing}. Check how you spelled the keys.",
    "device-hard-coded": "The device doesn't depend on the machine. Ask torch.cuda.is_available() each time: the "
                         "same notebook runs with and without a GPU.",
    "device-wrong": 'The device must be a string: "cuda" where a GPU can be used, and "cpu" elsewhere.',
    "gpus-not-counted": "You return whether there is a GPU, not how many there are. torch.cuda.device_count() "
                        "counts them.",
    "gpus-wrong": "The number of GPUs is wrong. torch.cuda.device_count() is the number of GPUs that this process "
                  "may use: 0 on a laptop.",
    "cores-of-the-node": "You count the cores of the whole node. A batch system gives your process only some of "
                         "them; os.sched_getaffinity(0) is the set you may use. Starting one thread for each core "
                         "of the node slows everybody down.",
    "cores-not-counted": "You return the set of cores. Return its length.",
    "threads-not-cores": "You return the number of threads that torch was told to use. Ask the system how many "
                         "cores you may use.",
    "cores-wrong": "Count the cores that this process may use: the length of os.sched_getaffinity(0).",
    "not-an-integer": "You return the number of {what} as {kind}. A count is a whole number, an int.",
    "wrong-version": "The version of torch itself is torch.__version__.",
}


def balise_1(describe_machine):
    """Run the answer on pretended machines: the cores really restricted, the GPUs invented."""
    yield "a dictionary with device, gpus, cores and torch is returned"
    _right_keys(describe_machine(), "this machine")
    wanted = [(1, 0), (2, 4), (1, 1)]
    seen = launch.ranks(_on_pretended_machines, describe_machine, wanted, n=1)[0]
    for cores, gpus, got in seen:
        _right_keys(got, _words(cores, gpus))
    yield "the device depends on the machine"
    for cores, gpus, got in seen:
        expected = "cuda" if gpus else "cpu"
        if not isinstance(got["device"], str) or got["device"].split(":")[0] != expected:
            known = all(str(other["device"]) == str(got["device"]) for _, _, other in seen)
            slug = "device-hard-coded" if known and str(got["device"]) in ("cuda", "cpu") else "device-wrong"
            raise Wrong(slug, expected=expected, got=got["device"], where=_words(cores, gpus))
    yield "the GPUs are counted: 0, 1 and 4"
    for cores, gpus, got in seen:
        _whole(got["gpus"], "GPUs", _words(cores, gpus))
        if got["gpus"] != gpus or isinstance(got["gpus"], bool):
            slug = "gpus-not-counted" if got["gpus"] == (gpus > 0) else "gpus-wrong"
            raise Wrong(slug, expected=gpus, got=got["gpus"], where=_words(cores, gpus))
    yield "the cores that this process may use are counted"
    for cores, gpus, got in seen:
        found = got["cores"]
        if isinstance(found, set | frozenset | list | tuple):
            raise Wrong("cores-not-counted", expected=cores, got=found, where=_words(cores, gpus))
        _whole(found, "cores", _words(cores, gpus))
        if found != cores or isinstance(found, bool):
            slug = {_NODE_CORES: "cores-of-the-node", _THREADS: "threads-not-cores"}.get(found, "cores-wrong")
            raise Wrong(slug, expected=cores, got=found, where=_words(cores, gpus))


_NODE_CORES, _THREADS = 96, 7  # numbers that no real answer gives by accident


def _words(cores, gpus):
    return f"a process with {cores} of the node's {_NODE_CORES} cores and {gpus} GPUs"


def _right_keys(machine, where):
    if machine is None:
        raise Wrong("nothing-returned", where=where)
    if not isinstance(machine, dict):
        raise Wrong("not-a-dict", got=machine, where=where)
    missing = [key for key in ("device", "gpus", "cores", "torch") if key not in machine]
    if missing:
        words = " and no ".join(missing)
        raise Wrong("keys-missing", expected="device, gpus, cores, torch", got=machine, where=where, missing=words)
    if str(machine["torch"]) not in (str(torch.__version__), torch.__version__.split("+")[0]):
        raise Wrong("wrong-version", expected=str(torch.__version__), got=machine["torch"], where=where)


def _whole(count, what, where):
    if not isinstance(count, Integral):
        raise Wrong("not-an-integer", got=count, where=where, what=what, kind=type(count).__name__)


def _answer(value, *_, **__):
    """What a pretended function says, or raises."""
    if isinstance(value, Exception):
        raise value
    return value


def _on_pretended_machines(describe_machine, wanted):
    import psutil

    mine = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(_THREADS)
    total = 80 * 2**30
    properties = SimpleNamespace(
        name="pretended GPU", total_memory=total, major=9, minor=0, multi_processor_count=132, warp_size=32
    )
    of_a_gpu = {
        "current_device": 0,
        "get_device_name": "pretended GPU",
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "mem_get_info": (total, total),
    }
    none = RuntimeError("No CUDA GPUs are available")
    seen = []
    for cores, gpus in wanted:
        os.sched_setaffinity(0, mine[-cores:])
        answers = (
            (torch.cuda, "is_available", gpus > 0),
            (torch.cuda, "device_count", gpus),
            *((torch.cuda, name, value if gpus else none) for name, value in of_a_gpu.items()),
            (torch.accelerator, "is_available", gpus > 0),
            (torch.accelerator, "device_count", gpus),
            (torch.accelerator, "current_accelerator", torch.device("cuda") if gpus else None),
            (torch, "get_num_interop_threads", _THREADS),
            (os, "cpu_count", _NODE_CORES),
            (psutil, "cpu_count", _NODE_CORES),
        )
        changes = [(place, name, functools.partial(_answer, value)) for place, name, value in answers]
        with mock.patch.dict(os.environ), pretended(changes, describe_machine):
            for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"):  # `nproc` believes them; the launcher had set one
                os.environ.pop(name, None)
            seen.append((len(mine[-cores:]), gpus, describe_machine()))
    return seen
