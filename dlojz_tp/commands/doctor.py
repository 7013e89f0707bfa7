"""`python -m dlojz_tp doctor`: what this machine offers the course, and what to do about each gap."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import sysconfig
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from dlojz_tp.commands.limits import cpu_limit, memory_limits

WIDTH = 100
GB = 1e9
WHOLE_WORDS = {"break_long_words": True, "break_on_hyphens": False}


class Row(NamedTuple):
    """One line of the table: mark is "ok", "note" (worth knowing) or "gap" (missing; `todo` says what to do)."""

    name: str
    mark: str
    value: str
    todo: str = ""
    essential: bool = False


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 if nothing essential (Python, torch, the default data set) is missing, else 1."""
    parser = argparse.ArgumentParser(prog="dlojz_tp doctor", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON list")
    parser.error = lambda message: parser.exit(2, f"dlojz_tp doctor: {message} (--help shows all)\n")
    args = parser.parse_args(argv)
    rows = examine()
    print(json.dumps([row._asdict() for row in rows], indent=1) if args.json else table(rows))
    return 1 if any(row.essential and row.mark == "gap" for row in rows) else 0


def examine() -> list[Row]:
    """Look at this machine; a probe that fails gives a row that says so, never an exception."""
    rows = []
    for name, (probe, essential) in PROBES.items():
        try:
            rows += probe()
        except Exception as error:  # an odd machine must not hide the other rows
            what = f"could not tell ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
            rows.append(Row(name, "gap", what, "the course may still work; report this line", essential))
    return rows


def table(rows: list[Row]) -> str:
    """Lay the rows out in plain text, at most 100 columns wide, and end with one line of summary."""
    indent = max(len(row.name) for row in rows) + 8
    lines = []
    for row in rows:
        head = f"{row.mark:<6}{row.name:<{indent - 6}}"
        lines += textwrap.wrap(row.value, WIDTH, initial_indent=head, subsequent_indent=" " * indent, **WHOLE_WORDS)
        if row.todo:
            # Far to the left, so that a command stays on one line and can be copied.
            lines += textwrap.wrap(row.todo, WIDTH, initial_indent="   -> ", subsequent_indent=" " * 6, **WHOLE_WORDS)
    missing = [row.name for row in rows if row.essential and row.mark == "gap"]
    gaps = sum(row.mark == "gap" for row in rows)
    minor = f" Gaps that only some notebooks feel: {gaps}." if gaps else ""
    not_ready = f"Not ready: {', '.join(missing)}. Do what the arrows say, then run this again."
    return "\n".join([*lines, "", not_ready if missing else f"Ready for the course.{minor}"])


def to_install(package: str) -> str:
    """What to do about a missing package: in somebody else's installation, only ask."""
    command = f"pip install '{package}'"
    return command if os.access(sys.prefix, os.W_OK) else f"ask whoever installed the course to run: {command}"


def _python() -> list[Row]:
    # An older Python does not get here: the package does not import on it.
    return [Row("Python", "ok", f"{platform.python_version()}, {sys.executable}", essential=True)]


def _torch() -> list[Row]:
    try:
        import torch
    except Exception as error:  # a broken library raises OSError, a mismatch RuntimeError
        why = "not installed" if isinstance(error, ModuleNotFoundError) else f"does not import: {error}"
        return [Row("torch", "gap", why[:200], to_install("torch>=2.11,<2.15"), True)]
    old = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11)
    todo = to_install("torch>=2.11,<2.15") if old else ""
    return [Row("torch", "gap" if old else "ok", torch.__version__, todo, True)]


def _torchvision() -> list[Row]:
    try:
        import torchvision
    except Exception as error:  # with another torch: "operator torchvision::nms does not exist"
        why = "not installed" if isinstance(error, ModuleNotFoundError) else f"does not import: {error}"
        return [Row("torchvision", "gap", why[:200], "install the torchvision that belongs to this torch")]
    return [Row("torchvision", "ok", torchvision.__version__)]


def _gpus() -> list[Row]:
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not found:
        return [Row("GPU", "note", "none: the course runs on the CPU with small sizes")]
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / GB:.0f} GB" for gpu in found)
    return [Row("GPU", "ok", "; ".join(f"{number} x {kind}" for kind, number in kinds.items()))]


def _backend() -> list[Row]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [Row("backend for ranks", "gap", "this torch has no distributed", "install another build of torch")]
    gpus = torch.cuda.device_count()
    if gpus > 1 and dist.is_nccl_available():
        return [Row("backend for ranks", "ok", f"nccl up to {gpus} ranks, gloo on the CPU beyond")]
    why = {0: "no GPUs", 1: "one GPU cannot carry two ranks"}.get(gpus, "torch has no nccl")
    return [Row("backend for ranks", "ok", f"gloo on the CPU ({why})")]


def _cores() -> list[Row]:
    mine, limit = len(os.sched_getaffinity(0)), cpu_limit()
    usable = min(mine, limit) if limit else mine
    value = f"{usable:g} usable of {os.cpu_count()}" + (f" (limited to {limit:g} by the cgroup)" if limit else "")
    todo = "ask for 2 cores or more: loader workers and ranks share this one" if usable < 2 else ""
    return [Row("cores", "note" if usable < 2 else "ok", value, todo)]


def _memory() -> list[Row]:
    import psutil

    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in memory_limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    short = free < 3 * GB
    todo = "close other programs, or ask for more: ranks and loaders need about 3 GB" if short else ""
    return [Row("memory", "note" if short else "ok", f"{free / GB:.1f} GB free of {total / GB:.1f} GB", todo)]


def _shared_memory() -> list[Row]:
    if not Path("/dev/shm").is_dir():
        return [Row("shared memory", "note", "no /dev/shm: loader workers may fail", "use num_workers=0")]
    free = shutil.disk_usage("/dev/shm").free
    if free < 0.5 * GB:
        todo = "in a container: start it with --shm-size=2g; else use num_workers=0"
        return [Row("shared memory", "gap", f"{free / 1e6:.0f} MB free: loader workers may be killed", todo)]
    return [Row("shared memory", "ok", f"{free / GB:.1f} GB free for loader workers")]


def _disk() -> list[Row]:
    from dlojz_tp.data import data_root

    root = data_root()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    todo = "free some space, or set DLOJZ_DATA to a folder on another disk" if free < GB else ""
    return [Row("disk for data", "gap" if free < GB else "ok", f"{free / GB:.1f} GB free for {root}", todo)]


def _temporary() -> list[Row]:
    folder = tempfile.gettempdir()
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        todo = "set TMPDIR to another folder of yours before you start JupyterLab: 06 loads what it compiles"
        return [Row("temporary folder", "gap", f"no program may run from {folder} (mounted noexec)", todo)]
    return [Row("temporary folder", "ok", f"{folder}, programs may run from it")]


def _compiler() -> list[Row]:
    from dlojz_tp.measure.compiling import cpp_compiler

    found = shutil.which(cpp_compiler())
    if found is None:
        install = "Debian: apt install g++; on a cluster: module load gcc"
        other = "export CXX=clang++" if shutil.which("clang++") else install
        return [Row("C++ compiler", "gap", f"no {cpp_compiler()} found", f"only torch.compile needs it. {other}")]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        todo = "only torch.compile needs it. Debian: apt install python3-dev; or use a conda environment"
        return [Row("C++ compiler", "gap", f"{found}, but Python.h is missing", todo)]
    return [Row("C++ compiler", "ok", f"{found}, for torch.compile")]


def _slurm() -> list[Row]:
    from dlojz_tp.launch.jobs import options, slurm

    job, sbatch = os.environ.get("SLURM_JOB_ID"), slurm.available(options.load())
    if job:
        inside = f"inside job {job} on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
        return [Row("Slurm", "ok", inside + ("" if sbatch else "; sbatch not found: jobs run on this machine"))]
    if sbatch:
        return [Row("Slurm", "ok", f"{sbatch}; not inside a job: this may be a login node, keep runs short")]
    return [Row("Slurm", "note", "none: jobs run on this machine")]


def _data_sets() -> list[Row]:
    from dlojz_tp import data

    rows, root = [], data.data_root()
    writable = os.access(next(folder for folder in (root, *root.parents) if folder.exists()), os.W_OK)
    for name, state, detail in data.status():
        default = name == "photo_patches"
        made = name in ("photo_patches", "code_text", "search_table", "photo_cells", "pretrained")
        remark = ""
        if made and state == "ready":
            try:
                remark = data.verify(name)  # reads every file, 0.3 s: a listing shows no changed byte
            except data.DataDamaged as error:
                state, detail = "damaged", str(error)
        mark = "gap" if state != "ready" and (made or state == "damaged") else "ok" if state == "ready" else "note"
        # A made set's message ends with the command that makes it: that part is what to do.
        value, _, command = detail.partition(". Make it") if mark == "gap" else (detail, "", "")
        todo = command.split(": ", 1)[-1] if command else ("see the message" if mark == "gap" else remark)
        if command and not writable and not command.startswith(" there"):
            todo = f"ask whoever installed the course to run, or set DLOJZ_DATA to a folder of yours and run: {todo}"
        rows.append(Row(f"data: {name}", mark, value if state == "ready" else f"{state}: {value}", todo, default))
    return rows


def _jupyter() -> list[Row]:
    lab, board = _version("jupyterlab"), _version("tensorboard")
    todo = "" if lab else to_install("jupyterlab>=4.4")
    absent = f"not installed (optional): {to_install('tensorboard')}"
    return [
        Row("JupyterLab", "ok" if lab else "gap", lab or "not installed", todo),
        Row("TensorBoard", "ok" if board else "note", board or absent),
    ]


def _kernels() -> list[Row]:
    from dlojz_tp.commands import sockets

    if (folder := sockets.folder()) is None:
        todo = "free some space in /tmp, or remove what another user has put there under that name"
        return [Row("kernels", "gap", f"no private folder /tmp/dlojz-lab-{os.getuid()} for their sockets", todo)]
    value = f"those of `lab` listen in {folder}, where no other user can read along"
    return [Row("kernels", "ok", value)]


def _loopback() -> list[Row]:
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(1)
            client.connect(server.getsockname())
        except OSError as error:
            todo = "ranks talk over 127.0.0.1: allow it in the firewall or the container"
            return [Row("loopback", "gap", f"127.0.0.1 does not connect ({error})", todo)]
        return [Row("loopback", "ok", f"127.0.0.1 connects (port {server.getsockname()[1]} was free)")]


def _scale() -> list[Row]:
    from dlojz_tp.scale import scale

    try:
        return [Row("course scale", "ok", scale())]
    except ValueError as error:
        return [Row("course scale", "gap", "not known", str(error))]


# name of the row when the probe itself fails: (probe, whether the course cannot start without it)
PROBES = {
    "Python": (_python, True),
    "torch": (_torch, True),
    "torchvision": (_torchvision, False),
    "GPU": (_gpus, False),
    "backend for ranks": (_backend, False),
    "cores": (_cores, False),
    "memory": (_memory, False),
    "shared memory": (_shared_memory, False),
    "disk for data": (_disk, False),
    "temporary folder": (_temporary, False),
    "C++ compiler": (_compiler, False),
    "Slurm": (_slurm, False),
    "data sets": (_data_sets, True),
    "JupyterLab": (_jupyter, False),
    "kernels": (_kernels, False),
    "loopback": (_loopback, False),
    "course scale": (_scale, False),
}


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    return None
