"""A race: a trainee's answer, the course's and PyTorch's own do the same work, in turn.

What is raced of a work is in `checks/WORK/races.py`: RACES = {balise: Contest(...)}. The best ratio of each
balise is kept beside the verdicts, in one small file for each work.
"""

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlojz_tp import launch, measure, progress
from dlojz_tp.cards import render
from dlojz_tp.classroom import races
from dlojz_tp.frameworks import NotInstalled
from dlojz_tp.judging.checking.usual_state import usual_state
from dlojz_tp.judging.checking.verdicts import deadline_of
from dlojz_tp.launch.alarm import Overdue
from dlojz_tp.works import source, state, whole_file
from dlojz_tp.works.locking import locked

YOURS, COURSES = "yours", "the course's"
BUDGET_S = 3.0  # of all rounds together
LEAST, MOST = 9, 40  # rounds
DEADLINE_S = 30.0  # of a race: an answer that has passed may still hang in its work
NOISY = 0.1  # more than this says nothing of an answer
FOLDER = "races"
_here: dict[str, dict[int, "Result"]] = {}  # what this process knows, should the folder not be writable


class Contest(NamedTuple):
    """What is raced of a balise.

    rival: the name of PyTorch's own. answer: given the balise's answers, returns a function without arguments that
    does the work once. theirs: returns one that does it with PyTorch's own. ranks: how many run it together; 0 is this
    process. device: where the work is done; None is the GPU if there is one.
    """

    rival: str
    answer: Callable[..., Callable[[], object]]
    theirs: Callable[[], Callable[[], object]]
    ranks: int = 0
    device: str | None = None


class Result(NamedTuple):
    """ratio: median time over the rival's; below 1 is faster. noise: half the spread of the times, over the median."""

    ratio: float
    noise: float


class Failed(Exception):  # noqa: N818  (it reads "raise Failed(...)")
    """A race has not come to its end. The message, one line, says why."""


def device() -> torch.device:
    """Where the work of a race is done, in this process or on a rank."""
    if dist.is_initialized():
        return launch.device()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def contests(module: str) -> dict[int, Contest]:
    """The races of a work: {balise: Contest}. module: of the work, such as "dataloader"."""
    name = f"dlojz_tp.judging.checks.{module}.races"
    return importlib.import_module(name).RACES if importlib.util.find_spec(name) else {}


def refused(work: source.Work, number: int) -> str:
    """Why a balise has no race, in a line; empty where it has one."""
    there = contests(work.module)
    if number in there:
        return ""
    listed = ", ".join(map(str, there))
    return f"balise {number} has no race" + (f"; in this work there is one for: {listed}" if there else "")


def run(work: source.Work, number: int, answers: tuple, solution: tuple | None) -> Result | None:
    """Race answers that have passed, show the times, and keep the best ratio; None where nothing is kept.

    solution: the course's answers, or None where this copy of the course has none. Never raises for an answer.
    """
    from dlojz_tp import report  # late: a rank needs no figures

    rival = contests(work.module)[number].rival
    try:
        found = timed(work.module, number, {YOURS: answers} | ({COURSES: solution} if solution else {}))
    except Failed as error:
        render.show(render.line(f"balise {number}, no race: {error}", "fail"))
        return None
    medians, against = found.medians, rival if rival in found.medians else COURSES
    rows = [(name, median, found.spreads[name] / 2, median / medians[against]) for name, median in medians.items()]
    how = measure.human_seconds
    report.table({"candidate": "{}", "median": how, "±": how, f"time / {against}": "{:.2f}"}, rows)
    result, kept = result_of(found, against), None
    said = (
        f"balise {number}: your answer is {' and '.join(compared(found, name) for name in medians if name != YOURS)}."
    )
    if result.noise > NOISY:
        said = f"balise {number}: the times vary by ± {100 * result.noise:.0f} %, so nothing is kept. Race again later."
    elif against != rival:
        said += f" Nothing is kept, because {rival} is not installed here."
    else:
        kept = keep(work.name, number, result)
        said += f" Best ratio so far: {kept.ratio:.2f}."
    said += " This copy of the course has no answer of its own to race." * (not solution)
    render.show(render.line(said, "pass" if kept else "not done"))
    return kept


def result_of(race: measure.Race, against: str) -> Result:
    """The ratio of the first candidate to `against`, and the noise of the noisiest candidate."""
    medians = race.medians
    noise = max(race.spreads[name] / 2 / medians[name] for name in medians)
    return Result(medians[YOURS] / medians[against], noise)


def compared(race: measure.Race, name: str) -> str:
    """The first candidate beside another, in a few words."""
    ratio, noise = result_of(race, name)
    if races.level((ratio, noise), (1.0, noise)):
        return f"level with {name}"
    return f"{1 / ratio:.2f} times faster than {name}" if ratio < 1 else f"{ratio:.2f} times slower than {name}"


def timed(module: str, number: int, answers: dict[str, tuple]) -> measure.Race:
    """Race answers, {name: answers}, and the rival, in turn: on ranks inside one launch, so that all see one machine.

    Over ranks, a round's time is that of the slowest rank. Raises Failed.
    """
    ranks = contests(module)[number].ranks
    try:
        if ranks:
            found = launch.ranks(raced, module, number, answers, n=ranks, timeout=DEADLINE_S)
            slowest = {
                name: [max(times) for times in zip(*(one.seconds[name] for one in found))] for name in found[0].seconds
            }
            return replace(found[0], seconds=slowest)
        with usual_state(), deadline_of(DEADLINE_S):
            return raced(module, number, answers)
    except Overdue:
        raise Failed(f"it did not end within {DEADLINE_S:.0f} s") from None
    except launch.RankError as error:
        raise (error.cause if isinstance(error.cause, Failed) else Failed(error.summary)) from None
    except launch.LaunchError as error:  # the machine is too busy, say
        raise Failed(str(error)) from None
    except Failed:
        raise
    except (Exception, SystemExit) as error:
        raise Failed(f"it raised {_named(error)}") from None


def raced(module: str, number: int, answers: dict[str, tuple]) -> measure.Race:
    """One side of `timed`: in this process or on a rank, with one core: threads that wait for each other are noise."""
    torch.set_num_threads(1)
    contest, runs, together = contests(module)[number], {}, 0.0
    makes = {name: (contest.answer, given) for name, given in answers.items()} | {contest.rival: (contest.theirs, ())}
    where = contest.device or device()
    for name, (make, given) in makes.items():
        try:
            runs[name] = make(*given)
            runs[name]()  # the first call prepares
            measure.synchronize(where)
            start = time.perf_counter()
            runs[name]()
            measure.synchronize(where)
            together += time.perf_counter() - start
        except NotInstalled:
            continue
        except Overdue:
            raise Failed(f"{name} did not end within {DEADLINE_S:.0f} s") from None
        except (Exception, SystemExit) as error:
            raise Failed(f"{name} raised {_named(error)}") from None
    if len(runs) < 2:
        raise Failed(
            f"{contest.rival} is not installed here, and this copy of the course has no answer to race against"
        )
    if contest.ranks:
        slowest = torch.tensor(together, device=where)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # all ranks run as many rounds
        together = slowest.item()
    rounds = max(LEAST, min(MOST, math.floor(BUDGET_S / together)))
    on_ranks = {"calls": 1, "before": dist.barrier} if contest.ranks else {}
    return measure.race(runs, rounds, warmup=0, device=where, **on_ranks)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def best(work: str) -> dict[int, Result]:
    """{balise: best result kept} of a work; what is damaged counts as not there."""
    stored = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
        for number, (ratio, noise) in json.loads(whole_file.read(_path(work))).items():
            if 0 < float(ratio) < math.inf and 0 <= float(noise) <= NOISY:
                stored[int(number)] = Result(float(ratio), float(noise))
    return stored | _here.get(work, {})


def keep(work: str, number: int, result: Result) -> Result:
    """Keep a result if it is the best of its balise; returns the best."""
    path = _path(work)
    with contextlib.suppress(OSError):  # then it lasts until this kernel ends
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(path.parent / f".{work}.lock", progress.LOCK_S) if path.parent.is_dir() else contextlib.nullcontext():
        found = best(work)
        found[number] = min(found.get(number, result), result)
        _here[work] = found
        with contextlib.suppress(OSError):
            whole_file.replace(path, f".{work}-", json.dumps(found).encode())
            del _here[work]
    return found[number]


def _path(work: str) -> Path:
    return state.folder() / FOLDER / f"{work}.json"
