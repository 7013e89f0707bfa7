"""Balise 1: what a process may use, asked on pretended machines: the cores really restricted, the GPUs invented."""

import functools
import os
from numbers import Integral
from types import SimpleNamespace
from unittest import mock

import torch

from dlojz_tp import launch
from dlojz_tp.judging.checking import pretended
from dlojz_tp.judging.checking.looks import Look, judged, one_of

KEYS = ("device", "gpus", "cores", "torch")
CORES, GPUS = [1, 2, 1], [0, 4, 1]  # of the pretended machines
NODE_CORES, THREADS = 96, 7  # numbers that no real answer gives by accident
KNOWN = {NODE_CORES: "cores-of-the-node", THREADS: "threads-not-cores"}
WHERE = f"machines of {NODE_CORES} cores: 1 core may be used, and no GPU; 2 cores and 4 GPUs; 1 core and 1 GPU"


def observe(describe_machine):
    """What is returned on this machine, and on each pretended one."""
    yield {"here": [describe_machine()]}
    yield {"there": launch.ranks(_on_pretended_machines, describe_machine, n=1)[0]}


def _kind(value):
    """The name of its type; "int" for any whole number."""
    return "int" if isinstance(value, Integral) else "dict" if isinstance(value, dict) else type(value).__name__


def _there(key, of):
    """What `see` is for an entry on the pretended machines."""
    return lambda o: [of(got[key]) for got in o["there"]]


def _no_dict(seen, _):
    return "nothing-returned" if "NoneType" in seen else "not-a-dict"


def _form(claim, key):
    """Looks at what was returned: a dictionary with the keys, whatever else is in it."""
    versions = [str(torch.__version__), torch.__version__.split("+")[0]]
    where = {"where": WHERE if key == "there" else ""}

    def missing(o):
        return [" and no ".join(one for one in KEYS if one not in got) for got in o[key]]

    return [
        Look(claim, lambda o: list(map(_kind, o[key])), ["dict"], _no_dict, holds=one_of, fields=where),
        Look("", missing, [""], "keys-missing", holds=one_of,
             fields=lambda seen, _: where | {"missing": next(filter(None, seen))}),
        Look("", lambda o: [str(got["torch"]) for got in o[key]], versions, "wrong-version", holds=one_of,
             fields=where),
    ]  # fmt: skip


def _counts(claim, key, what):
    """A look at counts as they are, and what sees them as numbers; a bool, which counts nothing, as a word."""
    fields = lambda seen, _: {"what": what, "kind": next(kind for kind in seen if kind != "int")}  # noqa: E731
    counted = _there(key, lambda one: str(one) if isinstance(one, bool) else int(one))
    return Look(claim, _there(key, _kind), ["int"], "not-an-integer", holds=one_of, fields=fields), counted


def _device(seen, _):
    return "device-hard-coded" if set(map(str, seen)) in ({"cpu"}, {"cuda"}) else "device-wrong"


def _first(seen, due):
    """The first that is wrong; None if there is none."""
    return next((found for found, right in zip(seen, due) if found != right), None)


def _gpus(seen, due):
    yes_or_no = seen[0] == "False" or _first(seen[1:], due[1:]) in (1, "True")
    return "gpus-not-counted" if yes_or_no else "gpus-miscounted"


def _cores(seen, due):
    return KNOWN.get(_first(seen, due), "cores-wrong")


whole_gpus, gpus = _counts("the GPUs are counted: 0, 1 and 4", "gpus", "GPUs")
whole_cores, cores = _counts("", "cores", "cores")
LOOKS = [
    *_form("a dictionary with device, gpus, cores and torch is returned", "here"), *_form("", "there"),
    Look("the device depends on the machine", _there("device", lambda one: one), ["cpu", "cuda", "cuda"], _device,
         holds=lambda seen, due: [isinstance(one, str) and one.split(":")[0] for one in seen] == due),
    whole_gpus,
    Look("", gpus, GPUS, _gpus, holds=lambda seen, due: seen[1:] == due[1:] and seen[0] != "False"),
    Look("", gpus, GPUS, "gpus-wrong"),  # only without a GPU
    Look("the cores that this process may use are counted", _there("cores", _kind), "a number", "cores-not-counted",
         holds=lambda seen, _: not {"set", "frozenset", "list", "tuple"} & set(seen)),
    whole_cores,
    # at most as many as there really are
    Look("", cores, lambda _: [min(n, len(os.sched_getaffinity(0))) for n in CORES], _cores),
]  # fmt: skip


def balise_1(describe_machine):
    yield from judged(LOOKS, observe, describe_machine, where=WHERE)


def _answer(value, *_, **__):
    """What a pretended function says, or raises."""
    if isinstance(value, Exception):
        raise value
    return value


def _on_pretended_machines(describe_machine):
    import psutil

    mine = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(THREADS)
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
    for cores, gpus in zip(CORES, GPUS):
        os.sched_setaffinity(0, mine[-cores:])
        answers = (
            (torch.cuda, "is_available", gpus > 0),
            (torch.cuda, "device_count", gpus),
            *((torch.cuda, name, value if gpus else none) for name, value in of_a_gpu.items()),
            (torch.accelerator, "is_available", gpus > 0),
            (torch.accelerator, "device_count", gpus),
            (torch.accelerator, "current_accelerator", torch.device("cuda") if gpus else None),
            (torch, "get_num_interop_threads", THREADS),
            (os, "cpu_count", NODE_CORES),
            (psutil, "cpu_count", NODE_CORES),
        )
        changes = [(place, name, functools.partial(_answer, value)) for place, name, value in answers]
        with mock.patch.dict(os.environ), pretended(changes, describe_machine):
            for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"):  # `nproc` believes them; the launcher had set one
                os.environ.pop(name, None)
            seen.append(describe_machine())
    return seen
