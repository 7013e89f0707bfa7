"""Several worlds of ranks in one launch: the ranks leave one process group and meet in the next.

A process costs more than a process group. So a check that looks at worlds of 4, 3, 2 and 1 ranks starts four
processes, not ten; those that a round leaves over are a second world, or have nothing to do.

What an answer keeps at the top of its notebook is new in each world: the function and its arguments are unpacked anew.
"""

import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.checking.judging import Wrong
from dlojz_tp.launch.run import packed


def in_worlds(fn: Callable, *args, sizes=(4, 3, 1, 2), timeout: float = 20) -> dict[int, list]:
    """Call `fn(*args)` on all ranks of worlds of these sizes, one after the other; small ones side by side.

    Arguments: fn, with an importable name or sent by value; sizes, each once; timeout, seconds for all together.
    Returns {world size: results in rank order}. Errors: RankError, which names the rank and the size of its own
    world; Wrong, where a rank raised it.
    """
    rounds = _rounds(sizes)
    torch.set_num_threads(1)  # what is compared here is tiny, and ranks need the cores; judge() restores the number
    task = bytes(packed(fn, args, {}))
    with tempfile.TemporaryDirectory(prefix="dlojz-worlds-") as folder:
        try:
            ranks = launch.ranks(_through, folder, rounds, task, n=max(sizes), timeout=timeout)
        except launch.RankError as error:
            if isinstance(error.cause, Wrong):
                raise error.cause from error
            raise _named(error, Path(folder)) from error.cause
    found = {}
    for turn, worlds in enumerate(rounds):
        first = 0
        for size in worlds:
            found[size] = [ranks[rank][turn] for rank in range(first, first + size)]
            first += size
    return {size: found[size] for size in sizes}


def _rounds(sizes) -> list[list[int]]:
    """Sizes that go side by side, in the order given, never more ranks than the largest world has."""
    rounds: list[list[int]] = []
    for size in sizes:
        if rounds and sum(rounds[-1]) + size <= max(sizes):
            rounds[-1].append(size)
        else:
            rounds.append([size])
    return rounds


def _through(folder, rounds, task) -> list:
    me, n, found = dist.get_rank(), dist.get_world_size(), []
    torch.set_num_threads(1)
    for turn, worlds in enumerate(rounds):
        first = 0
        for size in worlds:
            if me < first + size:
                break
            first += size
        else:  # nothing to do in this round
            _say_done()
            found.append(None)
            continue
        if turn or size < n:
            _leave()
            _join(Path(folder) / f"{turn}-{first}", me - first, size)
        (Path(folder) / f"rank-{me}").write_text(f"rank {me - first} of {size}")
        fn, args, _ = pickle.loads(task)
        found.append(fn(*args))
    return found


def _say_done():
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done {dist.get_rank()}", "yes")
    return store


def _leave() -> None:
    """Leave the process group when all ranks are done with it: else a neighbour's last collective could break."""
    _say_done().wait([f"done {other}" for other in range(dist.get_world_size())])
    dist.destroy_process_group()


def _join(file: Path, rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo", store=dist.FileStore(str(file), size), rank=rank, world_size=size)


_IDLE = r" ranks? [\d, ]+ waits? in init_process_group \(line 1 of <module>\)"  # they stand before the next world


def _named(error: launch.RankError, folder: Path) -> launch.RankError:
    """The error with the number that the rank had in the world in which it failed."""
    noted, was = folder / f"rank-{error.rank}", f"rank {error.rank} of {error.world_size}"
    if not noted.exists():
        return error
    now = noted.read_text()
    rank, size = (int(word) for word in now.split()[1::2])
    if error.kind == "hung" and rank == error.rank:  # all ranks of this world keep their numbers
        summary = error.summary.replace(f" of {error.world_size} hung", f" of {size} hung", 1)
        for idle, instead in ((f", while{_IDLE},", ", while"), (f", while{_IDLE}", ""), (f",{_IDLE}", "")):
            summary = re.sub(idle, instead, summary)
        return launch.RankError(rank, size, error.kind, summary, error.traceback, error.stacks, error.cause)
    if error.kind == "hung" or not error.summary.startswith(was):
        return error
    summary = now + error.summary.removeprefix(was).split(" (and so did")[0]
    return launch.RankError(rank, size, error.kind, summary, error.traceback, error.stacks, error.cause)
