"""Worlds of several sizes in one launch, and what went wrong on their ranks.

A process costs more than a process group. So a check that looks at worlds of 4, 3, 2 and 1 ranks starts four
processes, not ten: the ranks leave one process group and meet in the next. Those that a round leaves over are a second
world, or have nothing to do.

What an answer keeps at the top of its notebook is new in each world: the function and its arguments are unpacked anew.
"""

import os
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from inspect import isgenerator
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking.verdicts import Wrong
from dlojz_tp.launch.joining import join_group
from dlojz_tp.launch.rank import send_part, waits_for_others
from dlojz_tp.launch.run import in_parts, packed

SIZES = (2, 3, 1, 4)  # three rounds: 3 and 1 go side by side, after two ranks, which show nearly every mistake
TIMEOUT = 6  # seconds for a launch, which takes half a one: a deadlock must come back quickly
THROUGH = " through"  # what a rank notes behind its place when it is through with a world


def on_ranks(fn: Callable, *args, **more) -> dict[int, list]:
    """Call `fn(*args)` on all ranks of worlds of several sizes: {world size: results in rank order}, smallest first.

    more: as for `world_after_world`.
    """
    return dict(sorted(world_after_world(fn, *args, **more, alone=False)))


def world_after_world(
    fn: Callable, *args, known=(), usual=(), data=None, sizes=SIZES, timeout=TIMEOUT, alone=True
) -> Iterator[tuple[int, list]]:
    """Yield (world size, results in rank order) each as soon as it is there; who stops ends the ranks.

    So a check that judges world after world costs a wrong answer no more than its mistake takes. Where fn is a
    generator, each of its values is yielded once all ranks of the world have it.
    known, usual: (sign, slug) of failures that have their own hint, those of a balise and those of its work; a
    third entry has further fields of the hint, beside {error} (one line) and {what} (the exception's own text). A sign
    is words of an exception, several that occur in it together, the class of an exception, or a function below.
    data: if given, classes of the arguments that are no answers; every other one must be callable.
    alone: a smaller world that comes first has a separate launch: most mistakes end there, and others start no rank.
    Errors: Wrong; RankError for a failure without a sign.
    """
    for answer in args if data else ():
        if not callable(answer) and not isinstance(answer, data):
            raise Wrong("not-callable", error=type(answer).__name__)
    try:
        yield from _as_they_come(fn, *args, sizes=sizes, timeout=timeout, alone=alone)
    except launch.RankError as error:
        for sign, slug, *more in (*known, *usual):
            if _shows(sign, error):
                fields = {"error": error.summary, "what": str(error.cause)}
                raise Wrong(slug, got=error.summary, **fields | dict(*more)) from error
        raise


def by_worlds(looks: dict[str, Callable], fn: Callable, *args, sizes=SIZES, **more) -> Iterator[str]:
    """The claims of a check that ends at the first world with a mistake: all looks at one, then at the next.

    looks: {claim: look}; look(worlds) is given {world size: results of fn in rank order} and raises Wrong.
    sizes, more: as for `world_after_world`.
    """
    first, *others = sizes
    *most, last = map(str, sorted(others))
    yield next(iter(looks))
    for size, ranks in world_after_world(fn, *args, sizes=sizes, **more):
        if size == others[0]:
            yield f"all of it again on {', '.join(most)} and {last} ranks"
        for number, (claim, look) in enumerate(looks.items()):
            if number and size == first:
                yield claim
            look({size: ranks})


def by_world(judge: Callable, fn: Callable, *args, **more) -> Iterator[str]:
    """The claims of judge(size, results of fn in rank order), each once; it ends at the first world with a mistake."""
    said = {}
    for size, ranks in world_after_world(fn, *args, **more):
        yield from (said.setdefault(claim, claim) for claim in judge(size, ranks) if claim not in said)


def each_rank(look):
    """A look(worlds) that calls look(result, world size, where) for every rank."""

    def all_of_them(worlds):
        for size, ranks in worlds.items():
            for rank, got in enumerate(ranks):
                look(got, size, f"rank {rank} of {size}")

    return all_of_them


def _shows(sign, error: launch.RankError) -> bool:
    """Whether a failure has this sign."""
    if isinstance(sign, type):
        return isinstance(error.cause, sign)
    if callable(sign):
        return sign(error)
    text = error.what + (error.traceback if error.kind == "raised" else "")
    return all(words in text for words in ((sign,) if isinstance(sign, str) else sign))


def hung(error: launch.RankError) -> bool:
    """A sign: ranks that still ran at the deadline."""
    return error.kind == "hung"


def died(error: launch.RankError) -> bool:
    """A sign: a rank crashed, or was ended by a signal that a rank's own function has sent."""
    return error.kind == "died"


def some_returned(error: launch.RankError) -> bool:
    """A sign: ranks wait for others that were through already."""
    return error.kind == "hung" and bool(error.returned)


def waits_in(call: str) -> Callable:
    """A sign: the rank to look at first waits in this function of torch."""
    return lambda error: error.waits.get(error.rank) == call


def killed_by(signal: str) -> Callable:
    """A sign: as `died`, by this signal, SIGABRT for example."""
    return lambda error: error.signal == signal


def _as_they_come(fn: Callable, *args, sizes, timeout, alone) -> Iterator[tuple[int, list]]:
    """Yields each world in the order of `sizes` once all its ranks are through; small ones run side by side.

    Errors: RankError, which names the rank and the size of its own world; Wrong, where a rank raised it.
    """
    rounds = _rounds(sizes)
    torch.set_num_threads(1)  # what is compared here is tiny, and ranks need the cores; judge() restores the number
    task = bytes(packed(fn, args, {}))
    for some in (rounds[:1], rounds[1:]) if alone and sum(rounds[0]) < max(sizes) else (rounds,):
        yield from _launched(some, task, timeout)


def _launched(rounds, task, timeout) -> Iterator[tuple[int, list]]:
    left = [size for worlds in rounds for size in worlds]
    found = {size: [deque() for _ in range(size)] for size in left}
    with tempfile.TemporaryDirectory(prefix="dlojz-worlds-") as folder:
        try:
            for _, (size, rank, *value) in in_parts(
                _through, folder, rounds, task, n=max(map(sum, rounds)), timeout=timeout
            ):
                found[size][rank].append(value)
                while left and all(found[left[0]]):
                    values = [waiting.popleft() for waiting in found[left[0]]]
                    if all(values):
                        yield left[0], [value for (value,) in values]
                    else:  # a rank is through
                        left.pop(0)
        except launch.RankError as error:
            if isinstance(error.cause, Wrong):
                raise error.cause from error
            raise _in_its_world(error, Path(folder)) from error.cause


def _rounds(sizes) -> list[list[int]]:
    """Sizes that go side by side, in the order given, never more ranks than the largest world has."""
    rounds: list[list[int]] = []
    for size in sizes:
        if rounds and sum(rounds[-1]) + size <= max(sizes):
            rounds[-1].append(size)
        else:
            rounds.append([size])
    return rounds


def _through(folder, rounds, task) -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    for turn, worlds in enumerate(rounds):
        first = 0
        for size in worlds:
            if me < first + size:
                break
            first += size
        else:  # nothing to do in this round
            _say_done()
            continue
        if turn or size < n:
            with waits_for_others():
                _leave()
                _join(Path(folder) / f"{turn}-{first}", me - first, size)
        place = Path(folder) / f"rank-{me}"
        place.write_text(f"{first} {size}")
        fn, args, _ = pickle.loads(task)
        value = fn(*args)
        for one in value if isgenerator(value) else [value]:
            send_part((size, me - first, one))
        send_part((size, me - first))
        place.write_text(f"{first} {size}{THROUGH}")


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
    join_group("gloo", store=dist.FileStore(str(file), size), rank=rank, world_size=size)


def _in_its_world(error: launch.RankError, folder: Path) -> launch.RankError:
    """The error with the numbers that the ranks have in the world in which it came."""
    places = {int(file.name.removeprefix("rank-")): file.read_text() for file in folder.glob("rank-*")}
    rank = error.rank
    if error.kind == "hung":  # those that are through with their world stand before the next one
        at_work = [rank for rank in error.stands if rank in places and not places[rank].endswith(THROUGH)]
        rank = rank if rank in at_work else next(iter(at_work), None)
    if rank not in places:
        return error
    world = places[rank].removesuffix(THROUGH)
    first, size = map(int, world.split())
    members = list(range(first, first + size))
    return error.in_part(members, [rank for rank in members if places.get(rank) == world + THROUGH])
