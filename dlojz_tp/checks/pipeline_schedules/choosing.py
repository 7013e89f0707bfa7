"""Balise 5: the fastest schedule that fits, against an exhaustive search."""

from dataclasses import dataclass, replace

from dlojz_tp import planner
from dlojz_tp.checking import Wrong, close

HINTS = {
    "not-three": "Return (name, n_micro_batches, samples_per_second), or None if nothing fits.",
    "unknown-schedule": "None of the given schedules is called {name!r}.",
    "size-not-number": "{m} is the size of a micro-batch, in samples. Return the number of micro-batches: {number}.",
    "impossible-number": "{name} cannot cut {batch} samples into {m} equal micro-batches, or cannot schedule that many.",
    "invented": "Nothing fits, but you returned {name} with {m} micro-batches. The fullest rank would need "
                "{need:.3g} bytes of {memory:.3g}.",
    "gave-up": "You found nothing, but {name} with {m} micro-batches fits.",
    "states-forgotten": "{name} with {m} micro-batches does not fit. The activations alone would, but weights, "
                        "gradients and optimizer states need memory too.",
    "one-rank-looked-at": "{name} with {m} micro-batches fits only on some ranks: rank {rank} needs {need:.3g} "
                          "bytes of {memory:.3g}. Each rank has the states of its own stages, and the peak of "
                          "their activations, of b samples each.",
    "does-not-fit": "{name} with {m} micro-batches does not fit: rank {rank} needs {need:.3g} bytes of {memory:.3g}.",
    "other-times": "{name} with {m} micro-batches gives {right:.4g} samples a second. You returned {speed:.4g}, "
                   "which is what it would give {machine}: the choice was made between wrong times.",
    "most-micro-batches": "More micro-batches are not always better: each action costs its overhead. {name} with "
                          "{m} micro-batches gives more samples a second here, and it fits.",
    "schedules-not-compared": "You returned {chosen}, but {name} is faster here. Do you compare all schedules, "
                              "with the costs of the text?",
    "faster-one-missed": "{name} with {m} micro-batches is faster and also fits. Do you try every divisor of the "
                         "batch, and is each rank's memory the sum of its states and its own peak?",
    "wrong-throughput": "The choice is right, but the throughput is wrong: it is {batch} samples in {seconds:.4g} "
                        "s. If you divide just that, look at the costs.",
    "seconds-returned": "That is the time of a step, or of a sample. Return samples a second: {batch} in "
                        "{seconds:.4g} s.",
    "job-changed": "You changed the job or the dictionary of schedules.",
}  # fmt: skip


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


def balise_5(choose):
    """Jobs of many kinds; the truth tries everything."""
    yield "for many jobs, the fastest schedule and number of micro-batches that fit on every rank"
    for name, (job, schedules) in CASES.items():
        tried = _all(job, schedules)
        if not any(fits for _, fits, *_ in tried.values()):
            continue
        _right(choose, name, job, schedules, tried)
    yield "None if nothing fits"
    for name, (job, schedules) in CASES.items():
        tried = _all(job, schedules)
        if not any(fits for _, fits, *_ in tried.values()):
            _right(choose, name, job, schedules, tried)


def _simulated(job, orders, chunks, m):
    """A step of the job with m micro-batches."""
    stages, b = job.n_ranks * chunks, job.batch / m
    length = len(job.forward) // stages
    pieces = [slice(s * length, (s + 1) * length) for s in range(stages)]
    work = [b * sum(job.forward[piece]) for piece in pieces]
    costs = {
        "F": [job.overhead + t for t in work], "B": [job.overhead + 2 * t for t in work],
        "I": [job.overhead + job.split + t for t in work], "W": [job.overhead + job.split + t for t in work],
    }  # fmt: skip
    return planner.simulate(
        orders, costs, link=job.link, message_bytes=b * job.message_bytes,
        activation_bytes=[b * sum(job.activation_bytes[piece]) for piece in pieces],
    )  # fmt: skip


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


_FOUND: dict[int, dict] = {}


def _all(job, schedules):
    """{(name, m): (seconds, fits, peaks of activations, needs)}, of every possibility; kept: the jobs are constants."""
    if id(job) in _FOUND:
        return _FOUND[id(job)]
    found = {}
    for name, (make, chunks) in schedules.items():
        stages = job.n_ranks * chunks
        length = len(job.forward) // stages
        pieces = [slice(s * length, (s + 1) * length) for s in range(stages)]
        for m in range(1, job.batch + 1):
            if job.batch % m:
                continue
            try:
                orders = make(job.n_ranks, m)
            except ValueError:
                continue
            simulation = _simulated(job, orders, chunks, m)
            states = [
                sum(sum(job.state_bytes[pieces[s]]) for s in range(r, stages, job.n_ranks)) for r in range(job.n_ranks)
            ]
            needs = [state + peak for state, peak in zip(states, simulation.peak_bytes)]
            found[name, m] = simulation.seconds, max(needs) <= job.memory + 1e-6, simulation.peak_bytes, needs
    _FOUND[id(job)] = found
    return found


def _right(choose, case, job, schedules, tried):
    given = Job(**{name: list(v) if isinstance(v, list) else v for name, v in vars(job).items()})
    handed = dict(schedules)
    got = choose(given, handed)
    if vars(given) != vars(job) or handed != schedules:
        raise Wrong("job-changed", where=case)
    fitting = {key: found for key, found in tried.items() if found[1]}
    best = min(fitting, key=lambda key: fitting[key][0], default=None)
    if got is None:
        if best:
            raise Wrong("gave-up", expected=_words(best, job, tried), got="None", where=case, name=best[0], m=best[1])
        return
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong("not-three", got=got, where=case)
    name, m, speed = got
    more = {
        "got": f"{name}, {m} micro-batches",
        "where": case,
        "expected": _words(best, job, tried) if best else "None",
    }
    if name not in schedules:
        raise Wrong("unknown-schedule", name=name, **more)
    right_speed = (
        best and isinstance(speed, int | float) and abs(speed * fitting[best][0] - job.batch) <= 1e-6 * job.batch
    )
    if right_speed and isinstance(m, int | float) and m != best[1] and (name, m * best[1]) == (best[0], job.batch):
        raise Wrong("size-not-number", m=m, number=best[1], **more)
    if (name, m) not in tried:
        raise Wrong("impossible-number", name=name, batch=job.batch, m=m, **more)
    seconds, fits, peaks, needs = tried[name, m]
    if not fits:
        worst = max(range(len(needs)), key=needs.__getitem__)
        fields = {"name": name, "m": m, "need": needs[worst], "memory": job.memory}
        if max(peaks) <= job.memory and _best_of(tried, lambda peaks, _: max(peaks) <= job.memory) == (name, m):
            raise Wrong("states-forgotten", **fields, **more)
        if best is None:
            raise Wrong("invented", **fields, **more)
        some = min(needs) <= job.memory
        raise Wrong("one-rank-looked-at" if some else "does-not-fit", rank=worst, **fields, **more)
    own = isinstance(speed, int | float) and abs(speed * seconds - job.batch) <= 1e-6 * job.batch
    if isinstance(speed, int | float) and any(close(speed, one) for one in (seconds, seconds / job.batch)):
        raise Wrong("seconds-returned", batch=job.batch, seconds=seconds, **more)
    if seconds > fitting[best][0] * (1 + 1e-9):
        if not own and isinstance(speed, int | float):
            machine = _mistaken(job, schedules, name, m, speed)
            raise Wrong("other-times", name=name, m=m, right=job.batch / seconds, speed=speed, machine=machine, **more)
        same = [key for key in fitting if key[0] == name]
        fields = {"name": best[0], "m": best[1]}
        if (name, m) == min(same, key=lambda key: fitting[key][0]):
            raise Wrong("schedules-not-compared", chosen=name, **fields, **more)
        if m == max(n for _, n in same):
            raise Wrong("most-micro-batches", **fields, **more)
        raise Wrong("faster-one-missed", **fields, **more)
    if not own:
        shown = f"{speed:.6g}" if isinstance(speed, int | float) else str(speed)
        more |= {"expected": f"{job.batch / seconds:.6g}", "got": shown}
        raise Wrong("wrong-throughput", batch=job.batch, seconds=seconds, **more)


def _best_of(tried, fits):
    left = {key: found[0] for key, found in tried.items() if fits(found[2], found[3])}
    return min(left, key=left.get, default=None)


def _words(key, job, tried):
    return f"{key[0]}, {key[1]} micro-batches, {job.batch / tried[key][0]:.4g} samples/s"
