"""Balise 1, first part: a process group and a device, wherever ranks are started."""

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking import pretended
from dlojz_tp.judging.checking.looks import judged
from dlojz_tp.judging.probes.shared_looks import each_rank, first_found, recognised

ELASTIC = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # torchrun sets them, too
ADDRESS = "127.0.0.2"  # this machine, but not what one writes for it
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
RANKS = (  # rank, rank on its node, GPUs of the node, who started it
    (0, 0, 4, "torchrun"), (3, 3, 4, "torchrun"), (6, 2, 4, "torchrun"), (5, 1, 0, "torchrun"),
    (0, 0, 4, "srun"), (6, 2, 4, "srun"), (5, 1, 0, "srun"),
)  # fmt: skip


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def store_in(folder, answer):
    """Ranks meet in a file, not at a port that listens; else as the environment says. Gives the places."""
    begin, places = dist.init_process_group, []

    def started(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, **options):
        if init_method in (None, "env://") and "store" not in options:
            places.append(":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")))
        elif str(init_method).startswith("tcp://"):
            places.append(init_method.removeprefix("tcp://"))
        for number, name in ((rank, "RANK"), (world_size, "WORLD_SIZE")):
            if number < 0 and name not in os.environ:
                raise ValueError(f"environment variable {name} expected, but not set")
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        if dist.is_initialized():
            raise ValueError("trying to initialize the default process group twice!")
        begin("gloo", store=dist.FileStore(str(folder), world_size), world_size=world_size, rank=rank)

    with pretended([(dist, "init_process_group", started)], answer):
        yield places


class _Asked(Exception):
    """The data set was asked for something."""


class _NoData:
    def _asked(self, *_):
        raise _Asked

    __len__ = __getitem__ = _asked


def _joined(join_world, train, place, folder):
    """On a rank: join three worlds, and call train in the last: what went wrong in each, group, device, places."""
    rank, size = dist.get_rank(), dist.get_world_size()
    address = dict(zip(("MASTER_ADDR", "MASTER_PORT"), place.split(":")))
    # torchrun inside a Slurm job: the variables of both are there, and torchrun's count
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    torchrun = {**alone, **ELASTIC, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **address}
    slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_LOCALID": str(rank), **address}
    ways = {"launch": None, "torchrun": torchrun, "srun": slurm}
    usual = {"rank": rank, "error": "", "group": (rank, size, size), "device": "cpu", "elsewhere": []}
    found = {how: {"how": how, "where": f"rank {rank} of 2, started by {how}"} | usual for how in ways}
    found["train"] = found["torchrun"].copy()
    for how, environment in ways.items():
        error = device = None
        if environment:
            dist.destroy_process_group()
            for name in (*TORCHRUN, *ELASTIC):
                os.environ.pop(name, None)
            os.environ.update(environment)
        try:
            with store_in(Path(folder) / how, join_world) as places:
                device = join_world()
        except (ValueError, KeyError, RuntimeError, TypeError) as raised:
            error = f"{type(raised).__name__}: {raised}".split("\n")[0]
        if error or not dist.is_initialized():
            found[how]["error"] = error or "nothing was raised"
            if how == "srun" or _twice(found[how]):
                continue
            return found
        total = torch.ones(())
        dist.all_reduce(total)
        group = dist.get_rank(), dist.get_world_size(), int(total)
        found[how] |= {"group": group, "device": device, "elsewhere": [(one, place) for one in places if one != place]}
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(torchrun)
    try:
        with store_in(Path(folder) / "train", train):
            train(lambda: torch.nn.Linear(5, 3), _NoData(), 1, 2, 0.1)
    except Exception as raised:  # it has come to the data, or to an error that comes again where train is judged
        if "process group has not been initialized" in str(raised):
            found["train"]["error"] = str(raised)
    return found


def _on_gpus(join_world):
    """On a rank: pretend to be several ranks of two nodes; of each, its device or the error, and the backend."""
    dist.destroy_process_group()
    seen = []
    for rank, local, gpus, starter in RANKS:
        where = f"rank {rank}, local rank {local}, {gpus} GPUs on the node, started by {starter}"
        seen.append({"rank": rank, "local": local, "gpus": gpus, "where": where, "error": ""})
        started, current = [], []
        for name in (*TORCHRUN, *SLURM, *ELASTIC, "DLOJZ_LAUNCH_DEVICE"):
            os.environ.pop(name, None)
        os.environ.update(zip(TORCHRUN if starter == "torchrun" else SLURM, (str(rank), "8", str(local))))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        if starter == "torchrun":
            os.environ.update(ELASTIC, LOCAL_WORLD_SIZE="4")
        begun = lambda backend=None, *_, started=started, **__: started.append(backend)  # noqa: E731
        changes = [
            (torch.cuda, "is_available", lambda gpus=gpus: gpus > 0),
            (torch.cuda, "device_count", lambda gpus=gpus: gpus),
            (torch.cuda, "set_device", current.append),
            (torch.cuda, "current_device", lambda at=current: torch.device("cuda", at[-1]).index if at else 0),
            (torch.accelerator, "is_available", lambda gpus=gpus: gpus > 0),
            (torch.accelerator, "current_accelerator", lambda *_, g=gpus, **__: torch.device("cuda") if g else None),
            (torch.accelerator, "device_count", lambda gpus=gpus: gpus),
            (torch.accelerator, "set_device_index", current.append),
            (dist, "init_process_group", begun),
        ]
        try:
            with pretended(changes, join_world):
                device = join_world()
        except (KeyError, TypeError, ValueError) as error:
            if starter == "torchrun":
                raise
            seen[-1]["error"] = f"{type(error).__name__}: {error}".split("\n")[0]
            continue
        device = None if device is None else torch.device(device)
        if device is not None and device.type == "cuda" and device.index is None and current:
            device = torch.device("cuda", current[-1]) if isinstance(current[-1], int) else torch.device(current[-1])
        seen[-1] |= {"device": device, "backend": started[0] if started else None}
    return seen


def _each(claim, find):
    """A look at each entry of a list: what find(entry) finds; see `recognised`."""

    return recognised(claim, lambda seen: first_found((find(got), {"where": got["where"]}) for got in seen))


def _twice(got):
    return got["how"] == "launch" and "twice" in got["error"]


def _alone(got):
    """Whether a rank that torchrun started counts as Slurm does."""
    return got["how"] == "torchrun" and got["group"][:2] == (0, 1)


def _group(got):
    found = "rank {} of {}".format(*got["group"])
    return {"expected": f"rank {got['rank']} of 2", "got": found, "started": found}


def _not_started(got):
    if _twice(got) or not got["error"]:
        return None
    slug = "slurm-unknown" if got["how"] == "srun" else "group-not-started"
    return slug, {"got": got["error"], "started": f"it was started by {got['how']}"}


def _device(got):
    due = f"cuda:{got['local']}" if got["gpus"] else "cpu"
    return {"device": got["device"], "got": str(got["device"]), "expected": due, "rank": got["rank"]}


def _other_backend(got):
    due, both = "nccl" if got["gpus"] else "gloo", {"cpu:gloo", "cuda:nccl"}
    fits = got["backend"] in (None, due) or set(str(got["backend"]).lower().split(",")) == both
    return None if fits else ("wrong-backend", {"backend": got["backend"], "got": got["backend"]})


START = "a process group, started by launch, torchrun or srun"
DEVICE = "the device of each rank, on a node with 4 GPUs and on one without"
JOINED = [
    _each(START, lambda got: _twice(got) and ("group-started-twice", {"got": got["error"]})),
    _each("", _not_started),
    _each("", lambda got: _alone(got) and ("slurm-before-torchrun", _group(got))),
    _each("", lambda got: not _alone(got) and got["group"] != (got["rank"], 2, 2) and (
        "group-not-started", _group(got))),
    each_rank("", "elsewhere", [], "meets-elsewhere",
              fields=lambda got, _: {"found": got[0][0], "got": got[0][0], "wanted": got[0][1], "expected": got[0][1]}),
    _each("", lambda got: not isinstance(got["device"], torch.device | str) and ("no-device", {"got": got["device"]})),
    _each("", lambda got: torch.device(got["device"]).type != "cpu" and not torch.cuda.is_available() and (
        "gpu-invented", {"device": got["device"], "expected": "cpu", "got": str(got["device"])})),
]  # fmt: skip
CALLED = [_each(START, lambda got: got["error"] and ("train-does-not-join", {"got": got["error"]}))]
KNOWN = [_each(DEVICE, lambda got: got["error"] and ("slurm-unknown", {"got": got["error"]}))]
DEVICES = [
    _each(DEVICE, lambda got: got["device"] is None and ("no-device", {})),
    _each("", lambda got: not got["gpus"] and got["device"].type != "cpu" and ("gpu-invented", _device(got))),
    _each("", lambda got: got["gpus"] and got["device"].type != "cuda" and ("gpu-not-used", _device(got))),
    _each("", lambda got: got["gpus"] and got["device"].index != got["local"] and (
        "gpu-of-another-rank" if got["several"] else "one-gpu-for-all", _device(got))),
    _each("", _other_backend),
]  # fmt: skip


def join(join_world, train):
    """The claims on `join_world`, and that `train` calls it. Returns whether a group is started where there is one."""
    yield START
    place = f"{ADDRESS}:{_free_port()}"
    with tempfile.TemporaryDirectory(prefix="dlojz-store-") as folder:
        joined = launch.ranks(_joined, join_world, train, place, folder, n=2, timeout=15)
    for how, looks in (*dict.fromkeys(("launch", "torchrun", "srun"), JOINED).items(), ("train", CALLED)):
        yield from judged(looks, lambda how=how: [found[how] for found in joined])
    yield DEVICE
    seen = launch.ranks(_on_gpus, join_world, n=1, timeout=10)[0]
    yield from judged(KNOWN, lambda: seen)
    there = [got for got in seen if not got["error"]]
    several = len({got["device"].index for got in there if got["gpus"] and got["device"] is not None}) > 1
    yield from judged(DEVICES, lambda: [got | {"several": several} for got in there])
    return any(_twice(found["launch"]) for found in joined)
