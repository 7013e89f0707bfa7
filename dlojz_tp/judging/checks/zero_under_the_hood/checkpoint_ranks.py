"""What the ranks do in the check of balise 10: save under watch, load again, load what a crash would leave."""

import contextlib
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.borrowed import Borrowed, refusing, replaced
from dlojz_tp.judging.probes.crash_images import LATEST, Images, content
from dlojz_tp.judging.probes.files import Opened, unsafe_loads
from dlojz_tp.judging.probes.memory import Memory
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.works.balise import BaliseNotDone

LENGTHS = {"0.master": 3001, "0.exp_avg": 3001, "1.master": 2, "1.exp_avg": 1024, "half": 4001}
OLD, NEW = 9, 10  # by name, the folder of step 10 comes before that of step 9
HEAD = 2500  # bytes of a file that are not values


@contextlib.contextmanager
def own_files():
    """Inside, what torch.distributed.checkpoint reads and writes files with raises Borrowed."""
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    with refusing(*((one, "__init__", "checkpoint") for one in (FileSystemReader, FileSystemWriter))):
        yield


def state(step: int, attempt: int = 0) -> dict[str, torch.Tensor]:
    """The whole tensors of a step, without padding; no value is zero. attempt: each has other values."""
    generator = torch.Generator().manual_seed(step + 100 * attempt)
    found = {name: torch.rand(n, generator=generator) + step for name, n in LENGTHS.items()}
    return found | {"half": found["half"].bfloat16()}


def parts_of(step: int, rank: int, size: int, attempt: int = 0) -> dict[str, torch.Tensor]:
    """A rank's shards: views of the padded whole and of what lies behind it, as an optimizer's may be."""
    found = {}
    for name, whole in state(step, attempt).items():
        each = -(-len(whole) // size)
        behind = whole.new_zeros(each * size - len(whole) + 2 * len(whole))
        found[name] = torch.cat([whole, behind])[rank * each : (rank + 1) * each]
    return found


def bytes_of_rank(size: int) -> int:
    """Bytes of a rank's shards."""
    return sum(value.nbytes for value in parts_of(NEW, 0, size).values())


@own_files()
def save(save_shards, load_shards, place):
    """On 4 ranks: save an old step, then a new one while images are taken; load it."""
    rank, size, folder = dist.get_rank(), dist.get_world_size(), place / "run"
    with Traffic() as traffic:
        save_shards(folder, OLD, parts_of(OLD, rank, size), dict(LENGTHS))
    dist.barrier()
    if not folder.is_dir():
        raise Wrong("nothing-written", where=f"rank {rank} of {size}")
    old = content(folder)
    dist.barrier()
    with Images(folder, place / "images", late=rank == 1) as images:
        save_shards(folder, NEW, parts_of(NEW, rank, size), dict(LENGTHS))
    images.returned()
    dist.barrier()
    if rank == 0:
        shutil.copytree(folder, place / "scribbled", symlinks=True)
    with Opened(folder) as opened, _mapped_too(opened), unsafe_loads() as unsafe, Memory() as memory:
        loaded = _try(load_shards, folder)
    return {
        "written": (sum(len(data) for _, data in old), len(old)), "files of old": old, "sent": traffic.volume(),
        "loaded": loaded, "files": _files_of_ranks(opened), "unsafe": bool(unsafe),
        "peak": memory.peak, "mapped": _mapped(load_shards, place / "scribbled"),
    }  # fmt: skip


def _mapped_too(opened):
    """Inside, what torch.load opens is noted, mapped files too."""
    load = torch.load

    def loading(f, *args, **kwargs):
        if not hasattr(f, "read"):
            opened.note(f)  # a file that is mapped is opened in C++
        return load(f, *args, **kwargs)

    return replaced(torch, "load", loading)


def _files_of_ranks(opened) -> int:
    """How many files of a rank were opened; a larger one is shared by several ranks."""
    most = bytes_of_rank(4) + HEAD
    small = [size for path in set(opened.reads) if Path(path).exists() and (size := Path(path).stat().st_size) <= most]
    return len(small) if sum(small) > 2.4 * most else 1


def _mapped(load_shards, folder) -> str:
    """The name of a loaded shard that changes when the files do; none of them should."""
    dist.barrier()
    loaded = _try(load_shards, folder)
    shards = loaded[1] if isinstance(loaded, tuple) and isinstance(loaded[1], dict) else {}
    before = {name: t[:1].clone() for name, t in shards.items() if isinstance(t, torch.Tensor) and t.dim() == 1}
    dist.barrier()
    if dist.get_rank() == 0:
        for path in filter(Path.is_file, folder.rglob("*")):
            with path.open("r+b") as file:  # of the same size, as it may be mapped
                file.write(b"\xa5" * path.stat().st_size)
    dist.barrier()
    return next(
        (name for name, t in before.items() if t.view(torch.uint8).ne(shards[name][:1].view(torch.uint8)).any()), ""
    )


@own_files()
def load_again(save_shards, load_shards, place, paths):
    """On 3 ranks and on one: load. On 2 and 4: save where an older attempt on 4 ranks has left files; on 2: load all
    images, too."""
    size = dist.get_world_size()
    found = {"loaded": _try(load_shards, place / "run")}
    if size == 2:
        found["images"] = [_try(load_shards, path) for path in paths]
    if size in (2, 4):
        return found | _save_again(save_shards, load_shards, place, dist.get_rank(), size)
    (place / "empty").mkdir(exist_ok=True)
    return found | {"none": [_try(load_shards, place / "empty"), _try(load_shards, place / "none")]}


class _Killed(TorchDispatchMode):
    """Inside, the first collective ends the job."""

    class Now(BaseException):
        """Nobody catches it by mistake."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            raise _Killed.Now
        return func(*args, **(kwargs or {}))


def _save_again(save_shards, load_shards, place, rank, size):
    """What loads after two more saves of the same step: the first over the files of an attempt on 4 ranks that was cut
    short; the second, of a step that is complete, is cut short itself, at its first collective."""
    folder = place / f"leftover {size}"
    if rank == 0:
        shutil.copytree(late(place / "images"), folder, symlinks=True)
    dist.barrier()
    try:
        save_shards(folder, NEW, parts_of(NEW, rank, size, 1), dict(LENGTHS))
    except (OSError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise Wrong("leftover-refused", size=size, error=text, where=f"rank {rank} of {size}") from error
    dist.barrier()
    found, killed = {"leftover": _try(load_shards, folder)}, False
    dist.barrier()
    try:
        with _Killed():
            save_shards(folder, NEW, parts_of(NEW, rank, size, 2), dict(LENGTHS))
    except (_Killed.Now, OSError, ValueError):  # or it does not save what is there
        killed = True
    dist.barrier()
    return found | {"over": _try(load_shards, folder) if killed else None}


def _try(load_shards, folder):
    """What came, or {"error": what was raised}."""
    try:
        return load_shards(folder)
    except (BaliseNotDone, Borrowed):
        raise
    except Exception as error:
        return {"error": f"it raised {type(error).__name__}: {error}".split("\n")[0][:200]}


def late(folder: Path) -> Path:
    """The image of the moment when all ranks but one had written; the folder itself where it is missing."""
    return next((image for image in sorted(folder.iterdir()) if image.name.endswith(LATEST)), folder.parent / "run")
