"""Balise 5: the search."""

from dlojz_tp import planner
from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules")

COMPARE = "if fits and (best is None or job.batch / found.seconds > best[2]):"
FITS = "fits = all(sum(states[r :: job.n_ranks]) + peak <= job.memory for r, peak in enumerate(found.peak_bytes))"
COUNTS = "for m in (m for m in range(1, job.batch + 1) if job.batch % m == 0):"

bank.slip(5, "not-three", ("    return best\n", "    return best and best[:2]\n"))
bank.slip(5, "unknown-schedule", ("best = name, m,", 'best = name.upper() + "!", m,'))
bank.slip(5, "size-not-number", ("best = name, m,", "best = name, b,"))
bank.slip(5, None, ("<= job.memory", "< job.memory"))
bank.slip(5, "invented", ("<= job.memory", "<= job.memory * 1.05"))
bank.slip(5, "impossible-number", ("best = name, m,", "best = name, b * 2 + 1,"))
bank.slip(
    5,
    "invented",
    ("    best = None\n", "    best, fallback = None, ('1F1B', job.batch, 1.0)\n"),
    ("    return best\n", "    return best or fallback\n"),
)
bank.slip(5, "invented", ("sum(states[r :: job.n_ranks]) + peak", "states[r] + peak"))
bank.slip(5, "gave-up", ("    return best\n", "    return None\n"))
bank.slip(5, "gave-up", (FITS, "fits = sum(job.state_bytes) + max(found.peak_bytes) <= job.memory"))
bank.slip(5, "states-forgotten", (FITS, "fits = max(found.peak_bytes) <= job.memory"))
bank.slip(5, "one-rank-looked-at", (FITS, "fits = sum(states[:: job.n_ranks]) + found.peak_bytes[0] <= job.memory"))
bank.slip(5, "one-rank-looked-at", (FITS, "fits = (sum(states) + sum(found.peak_bytes)) / job.n_ranks <= job.memory"))
bank.slip(5, "does-not-fit", (FITS, "fits = sum(states[:: job.n_ranks]) <= job.memory"))
bank.slip(
    5, "most-micro-batches", (COMPARE, "if fits and (best is None or (m, job.batch / found.seconds) > best[1:]):")
)
bank.slip(5, "other-times", ("job.overhead + ", "0 * job.overhead + "))
bank.slip(5, "other-times", ("seconds + job.split", "seconds"))
bank.slip(
    5,
    "schedules-not-compared",
    (COMPARE, "if fits and (best is None or (name == best[0] and job.batch / found.seconds > best[2])):"),
)
bank.slip(5, "faster-one-missed", (COUNTS, "for m in (m for m in (2, 5) if job.batch % m == 0):"))
bank.slip(5, "most-micro-batches", ("best = name, m, job.batch / found.seconds", "best = name, m, m / found.seconds"),
          ("job.batch / found.seconds > best[2]", "m / found.seconds > best[2]"),
          (COMPARE.replace("job.batch /", "m /"), "if fits and (best is None or m / found.seconds > best[2]):"))  # fmt: skip
bank.slip(
    5,
    "wrong-throughput",
    ("job.batch / found.seconds\n", "1 / found.seconds\n"),
    ("job.batch / found.seconds > best[2]", "1 / found.seconds > best[2]"),
)
bank.slip(5, "seconds-returned", ("best = name, m, job.batch / found.seconds", "best = name, m, found.seconds"))
bank.slip(5, "seconds-returned", ("    return best\n", "    return best and (*best[:2], 1 / best[2])\n"))
bank.slip(5, "wrong-throughput", ("job.overhead + 2 * b * t", "2 * (job.overhead + b * t)"))
bank.slip(5, "schedules-not-compared", ("job.overhead + 2 * b * t", "job.overhead + job.split + 2 * b * t"))
bank.slip(5, "job-changed", ("    best = None\n", "    best = None\n    job.forward.reverse()\n"))
bank.slip(
    5,
    "job-changed",
    ("    best = None\n", "    best = None\n    schedules = schedules if schedules.pop('GPipe', 0) else schedules\n"),
)
bank.slip(5, "other-times", ("link=job.link, ", ""))
bank.slip(5, "wrong-throughput", ("seconds + job.split", "seconds + job.split / 2"))
bank.slip(5, "gave-up", ("sum(states[r :: job.n_ranks])", "sum(states[r * chunks : (r + 1) * chunks])"))
bank.slip(5, "one-rank-looked-at", ("[b * size for size in activations]", "[b * activations[0]] * n_stages"))
bank.slip(5, "faster-one-missed", ("if job.batch % m == 0", "if job.batch % m == 0 and m >= job.n_ranks"))
bank.slip(5, "raised", ("            except ValueError:\n", "            except KeyError:\n"))


@bank.wrong(5, "schedules-not-compared")
def choose(job, schedules):
    """The example of the text by heart, else 1F1B."""
    m = job.batch
    make, _ = schedules.get("1F1B", next(iter(schedules.values())))
    name = "1F1B" if "1F1B" in schedules else next(iter(schedules))
    costs = {"F": [job.overhead + t + u for t, u in zip(job.forward[::2], job.forward[1::2])]}
    costs["B"] = [2 * t - job.overhead for t in costs["F"]]
    found = planner.simulate(make(job.n_ranks, m), costs, link=job.link, message_bytes=job.message_bytes)
    return name, m, job.batch / found.seconds


def _measured(job, make, chunks, m):
    """(seconds, fits) of one possibility, or None."""
    try:
        orders = make(job.n_ranks, m)
    except ValueError:
        return None
    b, n_stages = job.batch // m, chunks * job.n_ranks
    size = len(job.forward) // n_stages
    costs, activations, states = {"F": [], "B": [], "I": [], "W": []}, [], [0.0] * job.n_ranks
    for stage in range(n_stages):
        pieces = range(stage * size, (stage + 1) * size)
        work = sum(job.forward[i] for i in pieces) * b
        costs["F"].append(job.overhead + work)
        costs["B"].append(job.overhead + 2 * work)
        costs["I"].append(job.overhead + job.split + work)
        costs["W"].append(job.overhead + job.split + work)
        activations.append(b * sum(job.activation_bytes[i] for i in pieces))
        states[stage % job.n_ranks] += sum(job.state_bytes[i] for i in pieces)
    found = planner.simulate(
        orders, costs, link=job.link, message_bytes=b * job.message_bytes, activation_bytes=activations
    )
    return found.seconds, all(s + a <= job.memory for s, a in zip(states, found.peak_bytes))


@bank.right(5)
def choose(job, schedules):
    tried = []
    for name, (make, chunks) in schedules.items():
        for m in range(1, job.batch + 1):
            if job.batch % m:
                continue
            found = _measured(job, make, chunks, m)
            if found and found[1]:
                tried.append((found[0], name, m))
    if not tried:
        return None
    seconds, name, m = min(tried)
    return [name, m, job.batch / seconds]


@bank.right(5)
def choose(job, schedules):
    divisors = {d for k in range(1, int(job.batch**0.5) + 1) if job.batch % k == 0 for d in (k, job.batch // k)}
    keys = [(name, m) for m in sorted(divisors, reverse=True) for name in reversed(list(schedules))]
    best, fastest = None, 0.0
    for name, m in keys:
        found = _measured(job, *schedules[name], m)
        if found is None or not found[1]:
            continue
        if job.batch / found[0] >= fastest:
            fastest = job.batch / found[0]
            best = (name, m, fastest)
    return best
