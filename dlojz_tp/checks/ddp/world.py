"""Balise 1, first part: a process group and a device, wherever ranks are started."""

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, pretended

HINTS = {
    "group-started-twice": "There was a process group already, but join_world started another. Check "
                           "dist.is_initialized().",
    "group-not-started": "After join_world there is no process group: {started}.",
    "meets-elsewhere": "Your ranks would meet at {found}, but the environment says {wanted}. MASTER_ADDR and "
                       "MASTER_PORT are given: leave them unchanged. Another address works on one machine only, "
                       "and with a fixed port two jobs collide.",
    "train-does-not-join": "Started by torchrun, train finds no process group: call join_world() first in train.",
    "slurm-before-torchrun": "torchrun may run inside a Slurm job. SLURM_PROCID is then the number of torchrun "
                             "itself, and RANK the number of the rank. Take RANK, WORLD_SIZE and LOCAL_RANK where "
                             "they are set.",
    "slurm-unknown": "srun sets SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID, not RANK, WORLD_SIZE and LOCAL_RANK. "
                     "Use the former where the latter are missing.",
    "no-device": "Return the device of this rank as a torch.device.",
    "gpu-of-another-rank": "Choose the GPU by the rank on its node (LOCAL_RANK), not by the rank in the world: a "
                           "node has no GPU number {rank}.",
    "one-gpu-for-all": "All ranks got the same GPU. Each must take the GPU with the number of its local rank.",
    "gpu-not-used": "There is a GPU for each rank, but the device is {device}.",
    "gpu-invented": "There is no GPU here, but the device is {device}.",
    "wrong-backend": "NCCL communicates between GPUs, gloo between CPUs. Here the backend was {backend}.",
}


ELASTIC = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # torchrun sets them, too
ADDRESS = "127.0.0.2"  # this machine, but not what one writes for it
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
RANKS = (  # rank, rank on its node, GPUs of the node, who started it
    (0, 0, 4, "torchrun"), (3, 3, 4, "torchrun"), (6, 2, 4, "torchrun"), (5, 1, 0, "torchrun"),
    (0, 0, 4, "srun"), (6, 2, 4, "srun"), (5, 1, 0, "srun"),
)  # fmt: skip


def join(join_world, train):
    """The claims on `join_world`, and that `train` calls it."""
    yield "a process group, started by launch, torchrun or srun"
    with tempfile.TemporaryDirectory(prefix="dlojz-store-") as folder:
        port = _free_port()
        for rank, seen in enumerate(launch.ranks(_joined, join_world, train, port, folder, n=2, timeout=15)):
            _right_groups(rank, seen, f"{ADDRESS}:{port}")
    yield "the device of each rank, on a node with 4 GPUs and on one without"
    try:
        seen = launch.ranks(_on_gpus, join_world, n=1, timeout=10)[0]
    except launch.RankError as error:
        if isinstance(error.cause, Wrong):
            raise error.cause from error
        raise
    _right_devices(seen)


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def store_in(folder, answer):
    """Ranks meet in a file, not at a port that listens: else the group starts as the environment says. Gives the places asked for."""
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


def _joined(join_world, train, port, folder):
    """On a rank: join three worlds; for each (how, what went wrong, (rank, world size, sum over ranks), device, places)."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    address = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port)}
    # torchrun inside a Slurm job: the variables of both are there, and torchrun's count
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    torchrun = {**alone, **ELASTIC, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **address}
    slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_LOCALID": str(rank), **address}
    for how, environment in (("launch", None), ("torchrun", torchrun), ("srun", slurm)):
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
            return [*found, (how, error or "nothing was raised", None, device, [])]
        total = torch.ones(())
        dist.all_reduce(total)
        found.append((how, None, (dist.get_rank(), dist.get_world_size(), int(total)), device, places))
    dist.destroy_process_group()
    os.environ.update(torchrun)
    try:
        with store_in(Path(folder) / "train", train):
            train(lambda: torch.nn.Linear(5, 3), _NoData(), 1, 2, 0.1)
    except Exception as raised:  # it has come to the data, or to an error that comes again where train is judged
        if "process group has not been initialized" in str(raised):
            found.append(("train", str(raised), None, None, []))
    return found


def _right_groups(rank, seen, wanted):
    for how, error, group, device, places in seen:
        where = f"rank {rank} of 2, started by {how}"
        if how == "train":
            raise Wrong("train-does-not-join", got=error, where=f"rank {rank} of 2, started by torchrun")
        if error is not None:
            twice = how == "launch" and "twice" in error
            unknown = how == "srun"
            slug = "group-started-twice" if twice else "slurm-unknown" if unknown else "group-not-started"
            raise Wrong(slug, got=error, where=where, started=f"it was started by {how}")
        if group != (rank, 2, 2):
            got = f"rank {group[0]} of {group[1]}"
            if how == "torchrun" and group[:2] == (0, 1):
                raise Wrong("slurm-before-torchrun", expected=f"rank {rank} of 2", got=got, where=where)
            raise Wrong("group-not-started", expected=f"rank {rank} of 2", got=got, where=where, started=got)
        if elsewhere := [place for place in places if place != wanted]:
            raise Wrong("meets-elsewhere", where=where, found=elsewhere[0], wanted=wanted)
        if not isinstance(device, torch.device | str):
            raise Wrong("no-device", got=device, where=where)
        if torch.device(device).type != "cpu" and not torch.cuda.is_available():
            raise Wrong("gpu-invented", expected="cpu", got=str(device), where=where, device=device)


def _on_gpus(join_world):
    """On a rank: pretend to be several ranks of two nodes; for each (rank, local rank, gpus, starter, device, backend)."""
    dist.destroy_process_group()
    seen = []
    for rank, local, gpus, starter in RANKS:
        started, current = [], []
        for name in (*TORCHRUN, *SLURM, *ELASTIC, "DLOJZ_LAUNCH_DEVICE"):
            os.environ.pop(name, None)
        os.environ.update(zip(TORCHRUN if starter == "torchrun" else SLURM, (str(rank), "8", str(local))))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        if starter == "torchrun":
            os.environ.update(ELASTIC, LOCAL_WORLD_SIZE="4")

        def index(current=current):
            return torch.device("cuda", current[-1]).index if current else 0

        changes = [
            (torch.cuda, "is_available", lambda gpus=gpus: gpus > 0),
            (torch.cuda, "device_count", lambda gpus=gpus: gpus),
            (torch.cuda, "set_device", current.append),
            (torch.cuda, "current_device", index),
            (torch.accelerator, "is_available", lambda gpus=gpus: gpus > 0),
            (torch.accelerator, "current_accelerator", lambda *_, g=gpus, **__: torch.device("cuda") if g else None),
            (torch.accelerator, "device_count", lambda gpus=gpus: gpus),
            (torch.accelerator, "set_device_index", current.append),
            (dist, "init_process_group", lambda *a, started=started, **k: started.append(_backend(*a, **k))),
        ]
        try:
            with pretended(changes, join_world):
                device = join_world()
        except (KeyError, TypeError, ValueError) as error:
            if starter == "torchrun":
                raise
            message = f"{type(error).__name__}: {error}".split("\n")[0]
            raise Wrong("slurm-unknown", got=message, where=f"rank {rank}, started by srun") from error
        device = None if device is None else torch.device(device)
        if device is not None and device.type == "cuda" and device.index is None and current:
            device = torch.device(
                "cuda", torch.device(current[-1]).index if not isinstance(current[-1], int) else current[-1]
            )
        seen.append((rank, local, gpus, starter, device, started[0] if started else None))
    return seen


def _backend(backend=None, *_, **__):
    return backend


def _right_devices(seen):
    indices = {device.index for _, _, gpus, _, device, _ in seen if device is not None and gpus}
    for rank, local, gpus, starter, device, backend in seen:
        where = f"rank {rank}, local rank {local}, {gpus} GPUs on the node, started by {starter}"
        if device is None:
            raise Wrong("no-device", where=where)
        if not gpus:
            if device.type != "cpu":
                raise Wrong("gpu-invented", expected="cpu", got=str(device), where=where, device=device)
        elif device.type != "cuda":
            raise Wrong("gpu-not-used", expected=f"cuda:{local}", got=str(device), where=where, device=device)
        elif device.index != local:
            slug = "one-gpu-for-all" if len(indices) == 1 else "gpu-of-another-rank"
            raise Wrong(slug, expected=f"cuda:{local}", got=str(device), where=where, rank=rank)
        both = {"cpu:gloo", "cuda:nccl"}
        if backend not in (None, "nccl" if gpus else "gloo") and set(str(backend).lower().split(",")) != both:
            raise Wrong("wrong-backend", expected="nccl" if gpus else "gloo", got=backend, where=where, backend=backend)
