"""Balise 5: the fastest schedule that fits, against an exhaustive search."""

import contextlib
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from dlojz_tp import planner
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged
from dlojz_tp.judging.probes.shared_looks import mistake_look


@dataclass(frozen=True)
class Job:
    """As in the practical work."""

    n_ranks: int
    batch: int
    forward: list
    overhead: float
    split: float
    activation_bytes: list
    state_bytes: list
    message_bytes: float
    link: planner.Link
    memory: float


def _three_chunks(ranks, micro_batches):
    return planner.interleaved_1f1b(ranks, micro_batches, 3)


def _two_chunks(ranks, micro_batches):
    return planner.interleaved_1f1b(ranks, micro_batches, 2)


USUAL = {
    "GPipe": (planner.gpipe, 1),
    "1F1B": (planner.one_f_one_b, 1),
    "interleaved": (_two_chunks, 2),
    "zero-bubble": (planner.zero_bubble_h1, 1),
}
OTHER = {"three chunks": (_three_chunks, 3), "all forwards": (planner.gpipe, 1)}

LINK = planner.Link(latency=1e-5, bandwidth=20e9)
BASE = Job(4, 24, [0.002] * 8, 0.001, 0.0, [10.0] * 8, [100.0] * 8, 4e6, LINK, 1e9)
UNEVEN = [0.001, 0.003, 0.002, 0.002, 0.001, 0.002, 0.004, 0.002]
CASES = {
    "plenty of memory": (BASE, USUAL),
    "an overhead of 20 ms": (replace(BASE, overhead=0.02), USUAL),
    "a dear split": (replace(BASE, overhead=0.0002, split=0.004), USUAL),
    "slow links": (replace(BASE, split=0.003, link=planner.Link(1e-4, 5e8)), USUAL),
    "large activations": (replace(BASE, memory=1500.0, activation_bytes=[100.0] * 8, state_bytes=[10.0] * 8), USUAL),
    "little memory": (replace(BASE, memory=330.0), USUAL),
    "nearly enough memory": (replace(BASE, memory=275.0), USUAL),
    "a large last piece": (replace(BASE, memory=300.0, state_bytes=[100.0] * 7 + [178.0]), USUAL),
    "a large first piece": (replace(BASE, memory=330.0, state_bytes=[150.0] + [100.0] * 7, split=0.01), USUAL),
    "uneven pieces": (replace(BASE, forward=UNEVEN, activation_bytes=[40.0] + [10.0] * 7, memory=700.0), USUAL),
    "a split that just pays": (replace(BASE, overhead=0.002, split=0.0003), USUAL),
    "dear actions": (replace(BASE, overhead=0.2), USUAL),
    "large pieces at both ends": (replace(BASE, memory=320.0, state_bytes=[150.0] * 2 + [50.0] * 4 + [150.0] * 2), USUAL),
    "activations at the end": (replace(BASE, activation_bytes=[10.0] * 7 + [300.0], memory=900.0), USUAL),
    "two ranks, other schedules": (replace(BASE, n_ranks=2, batch=10, forward=[0.002] * 12, activation_bytes=[9.0] * 12,
                                           state_bytes=[50.0] * 12), OTHER),
    "one rank": (replace(BASE, n_ranks=1, batch=6), USUAL),
    "too little memory": (replace(BASE, memory=215.0), USUAL),
    "not even the states": (replace(BASE, memory=150.0), USUAL),
}  # fmt: skip
# half a byte more than the round number: whether what is exactly full fits is nobody's question
CASES = {name: (replace(job, memory=job.memory + 0.5), schedules) for name, (job, schedules) in CASES.items()}


def _pieces(job, chunks):
    """The slice of the job's lists that belongs to each stage."""
    stages = job.n_ranks * chunks
    length = len(job.forward) // stages
    return [slice(s * length, (s + 1) * length) for s in range(stages)]


def _simulated(job, orders, chunks, m):
    """A step of the job with m micro-batches."""
    b, pieces = job.batch / m, _pieces(job, chunks)
    work = [b * sum(job.forward[piece]) for piece in pieces]
    costs = {
        "F": [job.overhead + t for t in work], "B": [job.overhead + 2 * t for t in work],
        "I": [job.overhead + job.split + t for t in work], "W": [job.overhead + job.split + t for t in work],
    }  # fmt: skip
    return planner.simulate(
        orders, costs, link=job.link, message_bytes=b * job.message_bytes,
        activation_bytes=[b * sum(job.activation_bytes[piece]) for piece in pieces],
    )  # fmt: skip


class Truth(NamedTuple):
    """All that can be tried for a job, by (name, m): seconds, bytes of a rank's activations, of all on each rank."""

    job: Job
    schedules: dict
    seconds: dict
    peaks: dict
    needs: dict
    fitting: list
    best: tuple | None

    def is_speed(self, speed, key):
        """Whether this is the number of samples a second."""
        batch = self.job.batch
        return isinstance(speed, int | float) and abs(speed * self.seconds[key] - batch) <= 1e-6 * batch


@cache
def _truth(case):
    job, schedules = CASES[case]
    seconds, peaks, needs = {}, {}, {}
    for name, (make, chunks) in schedules.items():
        pieces = _pieces(job, chunks)
        states = [sum(sum(job.state_bytes[piece]) for piece in pieces[r :: job.n_ranks]) for r in range(job.n_ranks)]
        for m in (m for m in range(1, job.batch + 1) if job.batch % m == 0):
            with contextlib.suppress(ValueError):
                step = _simulated(job, make(job.n_ranks, m), chunks, m)
                seconds[name, m], peaks[name, m] = step.seconds, max(step.peak_bytes)
                needs[name, m] = [state + peak for state, peak in zip(states, step.peak_bytes)]
    fitting = [key for key in needs if max(needs[key]) <= job.memory + 1e-6]
    return Truth(job, schedules, seconds, peaks, needs, fitting, min(fitting, key=seconds.get, default=None))


def observe(choose, case):
    """What is chosen, and whether the job or the schedules are others now."""
    job, schedules = CASES[case]
    given = Job(**{name: list(v) if isinstance(v, list) else v for name, v in vars(job).items()})
    handed = dict(schedules)
    got = choose(given, handed)
    return {"choice": (got,), "changed": vars(given) != vars(job) or handed != schedules}


def _mistake(choice, truth):
    """Of what was returned, in a tuple: the hint and its fields; None where it is right."""
    (got,), best, expected = choice, truth.best, "None"
    if best:
        expected = f"{best[0]}, {best[1]} micro-batches, {truth.job.batch / truth.seconds[best]:.4g} samples/s"
    if got is None:
        return best and ("gave-up", {"name": best[0], "m": best[1], "expected": expected, "got": "None"})
    if not isinstance(got, tuple | list) or len(got) != 3:
        return "not-three", {"expected": "", "got": got}
    found = _impossible(truth, *got) or _too_large(truth, *got) or _slower(truth, *got)
    return found and (found[0], {"expected": expected, "got": f"{got[0]}, {got[1]} micro-batches"} | found[1])


def _mistaken(job, schedules, name, m, speed):
    """Words for the machine on which this would be the speed."""
    make, chunks = schedules[name]
    machines = {
        "if actions had no overhead": replace(job, overhead=0.0),
        "if a backward in two halves cost nothing more": replace(job, split=0.0),
        "if messages took no time": replace(job, link=None),
        "if each message held the whole batch": replace(job, message_bytes=m * job.message_bytes),
        "if each message held one sample": replace(job, message_bytes=m * job.message_bytes / job.batch),
    }
    speeds = {
        words: job.batch / _simulated(other, make(job.n_ranks, m), chunks, m).seconds
        for words, other in machines.items()
    }
    return next((words for words, found in speeds.items() if abs(found - speed) <= 1e-6 * found), "with other times")


def _impossible(truth, name, m, speed):
    best, batch = truth.best, truth.job.batch
    if name not in truth.schedules:
        return "unknown-schedule", {"name": name}
    if (
        best
        and truth.is_speed(speed, best)
        and isinstance(m, int | float)
        and m != best[1]
        and (name, m * best[1]) == (best[0], batch)
    ):
        return "size-not-number", {"m": m, "number": best[1]}
    return None if (name, m) in truth.needs else ("impossible-number", {"name": name, "batch": batch, "m": m})


def _too_large(truth, name, m, _):
    memory, needs = truth.job.memory, truth.needs[name, m]
    if (name, m) in truth.fitting:
        return None
    without_states = [key for key, peak in truth.peaks.items() if peak <= memory]
    slug = "one-rank-looked-at" if min(needs) <= memory else "does-not-fit"
    if (name, m) == min(without_states, key=truth.seconds.get, default=None):
        slug = "states-forgotten"
    elif truth.best is None:
        slug = "invented"
    return slug, {"name": name, "m": m, "rank": needs.index(max(needs)), "need": max(needs), "memory": memory}


def _slower(truth, name, m, speed):
    batch, seconds, best = truth.job.batch, truth.seconds[name, m], truth.best
    number, own = isinstance(speed, int | float), truth.is_speed(speed, (name, m))
    if number and any(close(speed, one) for one in (seconds, seconds / batch)):
        return "seconds-returned", {"batch": batch, "seconds": seconds}
    if seconds <= truth.seconds[best] * (1 + 1e-9):
        shown = {"expected": f"{batch / seconds:.6g}", "got": f"{speed:.6g}" if number else str(speed)}
        return None if own else ("wrong-throughput", {"batch": batch, "seconds": seconds} | shown)
    if number and not own:
        machine = _mistaken(truth.job, truth.schedules, name, m, speed)
        return "other-times", {"name": name, "m": m, "right": batch / seconds, "speed": speed, "machine": machine}
    same = [key for key in truth.fitting if key[0] == name]
    slug = "most-micro-batches" if m == max(n for _, n in same) else "faster-one-missed"
    if (name, m) == min(same, key=truth.seconds.get):
        slug = "schedules-not-compared"
    return slug, {"chosen": name, "name": best[0], "m": best[1]}


def _looks(claim):
    return [Look(claim, "changed", False, "job-changed"), mistake_look("", "choice", _truth, _mistake)]


LOOKS = {  # whether something fits: first where it does
    True: _looks("for many jobs, the fastest schedule and number of micro-batches that fit on every rank"),
    False: _looks("None if nothing fits"),
}


def balise_5(choose):
    """Jobs of many kinds; the truth tries everything."""
    for fits, looks in LOOKS.items():
        for case in (case for case in CASES if bool(_truth(case).best) == fits):
            yield from judged(looks, observe, choose, case, at=case, where=case)
