"""Balise 3: the jobs that ASHA hands out to workers of unequal speed, one after the other."""

import functools
import heapq
import math
import random
from numbers import Integral

import torch

from dlojz_tp.judging.checking.looks import Look, Value, judged, silent

# first, last, eta, maximize, seconds an epoch of each worker, jobs
RUNS = [
    (1, 27, 3, True, (1.0,), 60),
    (1, 9, 3, True, (1.0, 1.31, 3.7), 70),
    (2, 40, 2, False, (1.0, 1.13, 1.7, 9.3, 0.37), 90),
    (1, 243, 3, True, (1.0,), 368),  # int(math.log(243, 3)) is 4; 364 jobs until a trial has 243 epochs
    (1, 9, 3, True, (1.0,), 13),  # five of six diverge; later it matters which of them goes on
]
MOST, FEW_LEFT = 90, 4


def _value(run, number, epochs):
    """No two are equal; some trials lead and fall behind; some diverge."""
    if epochs == 243 or _diverges(run, number):
        return math.nan
    rng = random.Random(f"{run} {number}")
    level, gain = rng.random(), rng.random()
    return level + 0.2 * gain * math.log(epochs)


def _diverges(run, number):
    return number % 6 > 0 if run == FEW_LEFT else number % (5 if RUNS[run][2] == 2 else 3) == 1


def _replay(run, scheduler):
    """Workers take jobs from the scheduler; returns what it handed out, [(number, epochs)], and what was no job."""
    *_, speeds, n = RUNS[run]
    jobs, trained, free = [], {}, [(0.0, worker, None) for worker in range(len(speeds))]
    chance = random.Random(run)
    while len(jobs) < n:
        # sometimes several report before one of them asks: only then can two rungs promote
        ready = [heapq.heappop(free) for _ in range(chance.randint(1, len(speeds)))]
        for _, _, finished in ready:
            if finished:
                scheduler.report(*finished)
        for _, worker, _ in ready:
            job = scheduler.job()
            pair = isinstance(job, tuple | list) and len(job) == 2 and all(isinstance(one, Integral) for one in job)
            if not pair:
                return jobs, "none" if job is None else "no pair"
            number, epochs = map(int, job)
            jobs.append((number, epochs))
            more = max(epochs - trained.get(number, 0), 0.01)  # a job that has been done already takes a moment
            trained[number] = max(epochs, trained.get(number, 0))
            end = ready[-1][0] + speeds[worker] * more
            heapq.heappush(free, (end, worker, (number, epochs, _value(run, number, epochs))))
    return jobs[:n], ""


class _Truth:
    """Says from all reports and jobs so far what comes next; keeps no rungs."""

    def __init__(self, first, last, eta, maximize=True):
        self.first, self.last, self.eta, self.sign = first, last, eta, 1 if maximize else -1
        self.reports, self.jobs, self.why = [], [], []  # why: in words, of each job

    def report(self, *one):
        self.reports.append(one)

    def job(self):
        levels = [self.first * self.eta**k for k in range(20) if self.first * self.eta**k <= self.last]
        told = []
        for epochs in levels[-2::-1]:
            there = {
                number: -math.inf if math.isnan(v) else self.sign * v for number, e, v in self.reports if e == epochs
            }
            best = sorted(there, key=there.get, reverse=True)[: len(there) // self.eta]
            gone = [number for number in best if (number, epochs * self.eta) in self.jobs]
            if there:
                n = len(there)
                told.append(
                    f"Rung at {epochs} epochs: {n} reported, {n} // {self.eta} = {len(best)} go on, {len(gone)} of these "
                    "already promoted."
                )
            for number in best:
                if number not in gone:
                    self.why.append(" ".join(told))
                    self.jobs.append((number, epochs * self.eta))
                    return self.jobs[-1]
        self.why.append(" ".join([*told, "So a new trial starts."]))
        self.jobs.append((1 + max((number for number, _ in self.jobs), default=-1), self.first))
        return self.jobs[-1]


def _fill(run, jobs):
    """(jobs, 2). Which of several diverged trials goes on is free: all have the number -2 there."""
    most = max(MOST, RUNS[run][-1])
    jobs = [(-2 if epochs > RUNS[run][0] and _diverges(run, number) else number, epochs) for number, epochs in jobs]
    return torch.tensor((jobs + [(-1, -1)] * most)[:most], dtype=torch.float32)


def _made(cls, run):
    first, last, eta, maximize = RUNS[run][:4]
    return cls(first, last, eta) if maximize else cls(first, last, eta, maximize=False)


@functools.cache
def _due(run):
    """The jobs, and why each is due."""
    truth = _made(_Truth, run)
    return _fill(run, _replay(run, truth)[0]), truth.why


def _job(number, epochs):
    return f"{'a diverged trial' if number == -2 else f'trial {number:g}'} for {epochs:g} epochs in all"


def observe(asha):
    for run in range(len(RUNS)):
        jobs, fault = _replay(run, _made(asha, run))
        yield {("fault", run): fault, ("jobs", run): _fill(run, jobs)}


def _fault(seen, _):
    return "waits" if seen == "none" else "job-form"


def _looks(run, claim):
    first, last, eta, maximize, speeds, _ = RUNS[run]
    where = f"first={first}, last={last}, eta={eta}, maximize={maximize}, {len(speeds)} workers"

    def fields(seen, due):
        place = int((seen != due).any(1).nonzero()[0])
        got, expected = (_job(*one[place].tolist()) for one in (seen, due))
        return {"why": _due(run)[1][place], "where": f"job {place + 1}; {where}", "got": got, "expected": expected}

    def jobs_due(_):
        return _due(run)[0]

    def place_alone(seen, due):
        return silent(seen, due) | {"where": where}

    yield Look(claim, ("fault", run), "", _fault, fields=place_alone)
    yield Value(
        "",
        ("jobs", run),
        jobs_due,
        "wrong-job",
        holds=lambda seen, due: torch.equal(seen, due),
        fields=fields,
    )


LOOKS = [
    *_looks(0, "one worker: promote, or start a new trial"),
    *_looks(1, "three workers of unequal speed: none waits, and no trial is promoted twice"),
    *_looks(2, "a loss, five workers, a rung that is not the last"),
    *_looks(3, "six rungs"),
    *_looks(FEW_LEFT, "when most trials diverge, some of them still go on"),
]


def balise_3(asha):
    yield from judged(LOOKS, observe, asha)
