"""Balise 4: who runs in the next step, by trying every beginning of the queue, and a service by one table of states."""

import dis
import itertools
import random
from dataclasses import dataclass

from dlojz_tp.judging.checking import Wrong
from dlojz_tp.judging.checking.looks import Look, Value, judged, tried

ENDLESS = 10_000  # steps: no service here needs a tenth of it
WAITS, RUNS, NOWHERE, TWICE = 0.0, 1.0, -1.0, 2.0


@dataclass(eq=False)
class Request:
    """As in the notebook."""

    number: int
    arrival: float
    prompt: int
    output: int
    done: int = 0


def state(needs, running, blocks, most, size=4, arrivals=None):
    """(waiting, running, blocks, size, most) for requests that need these tokens, of which the first `running` took part."""
    queue = []
    for k, tokens in enumerate(needs):
        done = min(tokens - 1, 1 + 3 * (k % 3)) if k < running or k % 4 == 3 else 0
        arrival = arrivals[k] if arrivals else 0.5 * k
        queue.append(
            Request(100 - 7 * k, arrival, tokens - done, done + 50, done)
        )  # numbers say nothing about the order
    return queue[running:], queue[:running], blocks, size, most


def drawn_states(n=40):
    chance, states = random.Random(8), []
    while len(states) < n:
        needs = [chance.choice([1, 3, 4, 5, 8, 9, 13, 16, 21]) for _ in range(chance.randint(1, 8))]
        blocks, most = chance.randint(6, 14), chance.randint(1, 6)
        there = longest([-(-(one - 1) // 4) for one in needs], blocks, most)
        arrivals = sorted(chance.randint(0, 3) / 2 for _ in needs)  # many at the same time
        states.append(
            state(needs, chance.choice([there, there, chance.randint(0, there)]), blocks, most, arrivals=arrivals)
        )
    return states


def longest(needed, blocks, most):
    return max(k for k in range(min(most, len(needed)) + 1) if sum(needed[:k]) <= blocks)


# called one after the other
STATES = {
    "waiting requests are let in while there is room": [
        state([5, 8, 9, 4], 0, 5, 9),
        state([5, 8, 9, 4], 0, 8, 9),
        state([1, 4, 16], 0, 6, 9),
        state([17, 3], 0, 5, 9),
        state([6, 7, 5, 9], 2, 9, 9, size=8),
        state([2, 3, 4], 0, 9, 9, size=1),
    ],
    "a request that was sent back needs blocks for all its tokens": [state([9, 10, 11, 13, 4], 2, 10, 9), state([4, 4, 4, 16, 4], 1, 6, 9)],
    "a limit of requests": [state([1] * 9, 0, 20, 4), state([1] * 5, 3, 20, 3), state([3] * 4, 1, 20, 3)],
    "nobody overtakes": [state([5, 20, 4, 4], 1, 6, 9), state([20, 4, 4], 1, 6, 9), state([9, 9, 9, 1], 2, 7, 9)],
    "memory runs out": [
        state([9, 9, 9], 3, 8, 9),
        state([9, 5, 4, 4], 4, 6, 9),
        state([17, 17, 17], 3, 9, 9),
        state([13, 4, 8, 4, 4], 4, 6, 9),
        state([24, 4, 4, 4], 3, 6, 9),
    ],
    "memory runs out while others wait": [state([9, 9, 9, 1, 2], 3, 8, 9), state([16, 13, 1, 1], 2, 6, 9), state([4, 5, 4, 8, 1], 3, 3, 9)],
    "nobody there": [state([], 0, 5, 3)],
    "40 states drawn at random": drawn_states(),
}  # fmt: skip
LARGE = [state([21], 0, 5, 3), state([21, 1, 1], 1, 5, 3)]


def asked(schedule, of):
    """What became of each request; what is wrong with the lists, in a word; whether a request was written to."""
    waiting, running, *sizes = of
    queue = running + waiting
    before = [vars(one).copy() for one in queue]
    try:
        got = schedule(list(waiting), list(running), *sizes)
    except ValueError as error:
        if not by_hand(error):
            raise
        return {"kind": f"ValueError: {error}", "to": [], "order": "", "kept": True}
    if not isinstance(got, tuple | list) or len(got) != 2 or not all(isinstance(each, list) for each in got):
        return {"kind": None if got is None else "other", "to": [], "order": "", "kept": True}
    at = {id(one): k for k, one in enumerate(queue)}
    places = [[at.get(id(one), -1) for one in each] for each in got]
    to = []
    for k in range(len(queue)):
        times = [each.count(k) for each in places]
        to.append(NOWHERE if sum(times) == 0 else TWICE if sum(times) > 1 else RUNS if times[1] else WAITS)
    order = ["waiting", "running"]
    wrong = [name for name, each in zip(order, places) if each != sorted(each)]
    kept = [vars(one).copy() for one in queue] == before
    for one, old in zip(queue, before):  # the next answer gets it as it was
        vars(one).update(old)
    return {"kind": "two lists", "to": to, "order": " and ".join(wrong), "kept": kept}


def by_hand(error):
    """Whether a `raise` raised it, and not a call of something else."""
    at = error.__traceback__
    while at.tb_next:
        at = at.tb_next
    return at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def due_of(of):
    waiting, running, blocks, size, most = of
    queue = running + waiting
    k = longest([-(-(one.prompt + one.done) // size) for one in queue], blocks, most)
    return [RUNS] * k + [WAITS] * (len(queue) - k)


def requests_of(*rows):
    return lambda: [Request(*row) for row in rows]


def drawn_requests():
    chance, now, rows = random.Random(3), 0.0, []
    for number in range(25):
        now += chance.choice([0.125, 0.125, 0.25, 1, 6])  # never two at once: either may be the first
        rows.append(Request(number, now, chance.randint(1, 12), chance.randint(1, 9)))
    chance.shuffle(rows)
    return rows


# requests, blocks, most; a step takes half a second and a sixty-fourth a token
SERVICES = {
    "one request": (requests_of((7, 0.0, 10, 3)), 9, 4),
    "one that comes late": (requests_of((7, 2.5, 10, 2), (3, 9.0, 4, 1)), 9, 4),
    "two, one after the other": (requests_of((1, 0.0, 8, 5), (2, 0.75, 8, 5)), 9, 1),
    "two that share steps": (requests_of((1, 0.0, 8, 5), (2, 0.625, 16, 2), (3, 0.625, 4, 4)), 20, 4),
    "one that is sent back": (requests_of((1, 0.0, 7, 4), (2, 0.0, 7, 4), (3, 0.0, 4, 1)), 4, 4),
    "in any order": (requests_of((1, 4.0, 8, 2), (2, 0.0, 8, 2), (3, 1.0, 8, 3)), 9, 4),
    "25 drawn at random": (drawn_requests, 8, 4),
}


def planned(blocks, most, size=4):
    steps = itertools.count()

    def plan(waiting, running):
        if next(steps) > ENDLESS:
            raise Wrong("never-leaves")
        to = due_of((waiting, running, blocks, size, most))
        queue, k = running + waiting, int(sum(to))
        return queue[k:], queue[:k]

    return plan


def seconds(tokens):
    return 0.5 + tokens / 64


def true_times(requests, plan):
    """A table: who has arrived and has not ended; nothing moves between lists."""
    rows = sorted(requests, key=lambda one: one.arrival)
    now, last, times = 0.0, [], {one.number: [] for one in rows}
    while any(one.done < one.output for one in rows):
        left = [one for one in rows if one.done < one.output]
        if left[0].arrival > now:
            now = left[0].arrival
        here = [one for one in left if one.arrival <= now]
        ran = [one for one in here if one.number in last]
        _, runs = plan([one for one in here if one.number not in last], ran)
        now += seconds(sum(1 if one.number in last else one.prompt + one.done for one in runs))
        last = [one.number for one in runs]
        for one in runs:
            one.done += 1
            times[one.number].append(now)
    return times


def flat(times):
    return [float(one) for number in sorted(times) for one in times[number]]


def observe(schedule, serve):
    for name, states in STATES.items():
        found = [asked(schedule, one) for one in states]
        kinds = [one["kind"] for one in found]
        yield {
            f"{name} kind": None if None in kinds else sorted(set(kinds)),
            f"{name} to": [one["to"] for one in found],
        }
        yield {f"{name} order": [one["order"] for one in found], f"{name} kept": all(one["kept"] for one in found)}
    got = [tried(schedule, list(waiting), list(running), *sizes) for waiting, running, *sizes in LARGE]
    yield {"large": [one.split(":")[0] if isinstance(one, str) else "taken" for one in got]}
    for name, (make, blocks, most) in SERVICES.items():
        requests = make()
        times = serve(requests, planned(blocks, most), seconds)
        good = isinstance(times, dict) and all(isinstance(each, list) for each in times.values())
        yield {f"{name} form": None if times is None else "a list for each number" if good else "other"}
        yield {f"{name} tokens": {number: len(each) for number, each in sorted(times.items())}}
        yield {f"{name} times": flat(times), f"{name} done": all(one.done == one.output for one in requests)}


def shown(name):
    """Fields: the first state in which somebody is not where it is due."""

    def fields(seen, due):
        at = next(k for k, (one, other) in enumerate(zip(seen, due)) if one != other)
        waiting, running, blocks, size, most = STATES[name][at]
        words = {WAITS: "waits", RUNS: "runs", NOWHERE: "is lost", TWICE: "is there twice"}
        tokens = [[one.prompt + one.done for one in each] for each in (running, waiting)]
        where = f"running {tokens[0]}, waiting {tokens[1]} tokens; {blocks} blocks of {size}, most {most}"
        return {
            "where": where,
            "expected": ", ".join(map(words.get, due[at])),
            "got": ", ".join(map(words.get, seen[at])),
        }

    return fields


def of_token(name):
    """Fields: the first token whose time is another."""
    make, blocks, most = SERVICES[name]

    def fields(seen, due):
        names = [f"token {k + 1} of request {number}" for number, each in sorted(true_times(make(), planned(blocks, most)).items())
                 for k in range(len(each))]  # fmt: skip
        at = next(k for k, (one, other) in enumerate(zip(seen, due)) if abs(one - other) > 1e-9)
        return {"where": f"{name}, {names[at]}", "expected": f"{due[at]:g} s", "got": f"{seen[at]:g} s"}

    return fields


def lists(seen, due):
    """The hint where lists are not of the right length, or hold somebody twice."""
    every = [one for each in seen for one in each]
    return "lost" if NOWHERE in every else "twice" if TWICE in every else "wrong-turn"


def none(seen, due):
    return {"expected": "", "got": ""}


LOOKS = []
for name, states in STATES.items():
    LOOKS += [
        Look(name, f"{name} kind", ["two lists"], lambda seen, due: "fits" if "ValueError" in str(seen) else "lists-form"),
        Value("", f"{name} to", [due_of(one) for one in states], lists, fields=shown(name)),
        Look("in order of arrival", f"{name} order", [""] * len(states), "order",
             fields=lambda seen, due: none(seen, due) | {"which": next(filter(None, seen))}),
        Look("the requests are not changed", f"{name} kept", True, "written"),
    ]  # fmt: skip
LOOKS.append(Look("one that never fits", "large", ["ValueError"] * 2,
                  lambda seen, due: "never-fits" if "taken" in seen else "other-error"))  # fmt: skip
for name, (make, blocks, most) in SERVICES.items():
    due = true_times(make(), planned(blocks, most))
    LOOKS += [
        Look(f"served: {name}", f"{name} form", "a list for each number", "times-form"),
        Look("the number of tokens that was asked for", f"{name} tokens", {k: len(each) for k, each in sorted(due.items())}, "tokens",
             holds=lambda seen, due: seen == due),
        Value("their times", f"{name} times", flat(due), "wrong-times", fields=of_token(name)),
        Look("done is counted", f"{name} done", True, "not-counted"),
    ]  # fmt: skip


def balise_4(schedule, serve):
    yield from judged(LOOKS, observe, schedule, serve)
