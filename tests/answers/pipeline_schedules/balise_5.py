"""Balise 5: the search."""

from dlojz_tp import planner
from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules", 5)

COMPARE = "if fits and (best is None or job.batch / found.seconds > best[2]):"
FITS = "fits = all(sum(states[r :: job.n_ranks]) + peak <= job.memory for r, peak in enumerate(found.peak_bytes))"
COUNTS = "for m in (m for m in range(1, job.batch + 1) if job.batch % m == 0):"

bank.hint("not-three", "Return (name, n_micro_batches, samples_per_second), or None if nothing fits.")
bank.slip("not-three", ("    return best\n", "    return best and best[:2]\n"), variant=True)

bank.hint("unknown-schedule", "None of the given schedules is called {name!r}.")
bank.slip("unknown-schedule", ("best = name, m,", 'best = name.upper() + "!", m,'), variant=True)

bank.hint(
    "size-not-number",
    "{m} is the size of a micro-batch, in samples. Return the number of micro-batches: {number}.",
)
bank.slip("size-not-number", ("best = name, m,", "best = name, b,"), variant=True)
bank.slip(None, ("<= job.memory", "< job.memory"))

bank.hint(
    "invented",
    "Nothing fits, but you returned {name} with {m} micro-batches. The fullest rank would need {need:.3g} bytes of "
    "{memory:.3g}.",
)
bank.slip("invented", ("<= job.memory", "<= job.memory * 1.05"))

bank.hint(
    "impossible-number",
    "{name} cannot cut {batch} samples into {m} equal micro-batches, or cannot schedule that many.",
)
bank.slip("impossible-number", ("best = name, m,", "best = name, b * 2 + 1,"), variant=True)
bank.slip(
    "invented",
    ("    best = None\n", "    best, fallback = None, ('1F1B', job.batch, 1.0)\n"),
    ("    return best\n", "    return best or fallback\n"),
)
bank.slip("invented", ("sum(states[r :: job.n_ranks]) + peak", "states[r] + peak"), variant=True)

bank.hint("gave-up", "You found nothing, but {name} with {m} micro-batches fits.")
bank.slip("gave-up", ("    return best\n", "    return None\n"))
bank.slip("gave-up", (FITS, "fits = sum(job.state_bytes) + max(found.peak_bytes) <= job.memory"))

bank.hint(
    "states-forgotten",
    "{name} with {m} micro-batches does not fit. The activations alone would, but weights, gradients and optimizer "
    "states need memory too.",
)
bank.slip("states-forgotten", (FITS, "fits = max(found.peak_bytes) <= job.memory"), variant=True)

bank.hint(
    "one-rank-looked-at",
    "{name} with {m} micro-batches fits only on some ranks: rank {rank} needs {need:.3g} bytes of {memory:.3g}. Each "
    "rank has the states of its own stages, and the peak of their activations, of b samples each.",
)
bank.slip("one-rank-looked-at", (FITS, "fits = sum(states[:: job.n_ranks]) + found.peak_bytes[0] <= job.memory"))
bank.slip("one-rank-looked-at", (FITS, "fits = (sum(states) + sum(found.peak_bytes)) / job.n_ranks <= job.memory"))

bank.hint(
    "does-not-fit",
    "{name} with {m} micro-batches does not fit: rank {rank} needs {need:.3g} bytes of {memory:.3g}.",
)
bank.slip("does-not-fit", (FITS, "fits = sum(states[:: job.n_ranks]) <= job.memory"), variant=True)

bank.hint(
    "most-micro-batches",
    "More micro-batches are not always better: each action costs its overhead. {name} with {m} micro-batches gives "
    "more samples a second here, and it fits.",
)
bank.slip("most-micro-batches", (COMPARE, "if fits and (best is None or (m, job.batch / found.seconds) > best[1:]):"))

bank.hint(
    "other-times",
    "{name} with {m} micro-batches gives {right:.4g} samples a second. You returned {speed:.4g}, which is what it "
    "would give {machine}: the choice was made between wrong times.",
)
bank.slip("other-times", ("job.overhead + ", "0 * job.overhead + "))
bank.slip("other-times", ("seconds + job.split", "seconds"))

bank.hint(
    "schedules-not-compared",
    "You returned {chosen}, but {name} is faster here. Do you compare all schedules, with the costs of the text?",
)
bank.slip(
    "schedules-not-compared",
    (COMPARE, "if fits and (best is None or (name == best[0] and job.batch / found.seconds > best[2])):"),
)

bank.hint(
    "faster-one-missed",
    "{name} with {m} micro-batches is faster and also fits. Do you try every divisor of the batch, and is each "
    "rank's memory the sum of its states and its own peak?",
)
bank.slip("faster-one-missed", (COUNTS, "for m in (m for m in (2, 5) if job.batch % m == 0):"))
bank.slip("most-micro-batches", ("best = name, m, job.batch / found.seconds", "best = name, m, m / found.seconds"),
          ("job.batch / found.seconds > best[2]", "m / found.seconds > best[2]"),
          (COMPARE.replace("job.batch /", "m /"), "if fits and (best is None or m / found.seconds > best[2]):"), variant=True)  # fmt: skip

bank.hint(
    "wrong-throughput",
    "The choice is right, but the throughput is wrong: it is {batch} samples in {seconds:.4g} s. If you divide just "
    "that, look at the costs.",
)
bank.slip(
    "wrong-throughput",
    ("job.batch / found.seconds\n", "1 / found.seconds\n"),
    ("job.batch / found.seconds > best[2]", "1 / found.seconds > best[2]"),
)

bank.hint(
    "seconds-returned",
    "That is the time of a step, or of a sample. Return samples a second: {batch} in {seconds:.4g} s.",
)
bank.slip("seconds-returned", ("best = name, m, job.batch / found.seconds", "best = name, m, found.seconds"))
bank.slip("seconds-returned", ("    return best\n", "    return best and (*best[:2], 1 / best[2])\n"), variant=True)
bank.slip("wrong-throughput", ("job.overhead + 2 * b * t", "2 * (job.overhead + b * t)"))
bank.slip("schedules-not-compared", ("job.overhead + 2 * b * t", "job.overhead + job.split + 2 * b * t"))

bank.hint("job-changed", "You changed the job or the dictionary of schedules.")
bank.slip("job-changed", ("    best = None\n", "    best = None\n    job.forward.reverse()\n"))
bank.slip(
    "job-changed",
    ("    best = None\n", "    best = None\n    schedules = schedules if schedules.pop('GPipe', 0) else schedules\n"),
    variant=True,
)
bank.slip("other-times", ("link=job.link, ", ""), variant=True)
bank.slip("wrong-throughput", ("seconds + job.split", "seconds + job.split / 2"), variant=True)
bank.slip("gave-up", ("sum(states[r :: job.n_ranks])", "sum(states[r * chunks : (r + 1) * chunks])"), variant=True)
bank.slip("one-rank-looked-at", ("[b * size for size in activations]", "[b * activations[0]] * n_stages"), variant=True)
bank.slip("faster-one-missed", ("if job.batch % m == 0", "if job.batch % m == 0 and m >= job.n_ranks"), variant=True)
bank.slip("raised", ("            except ValueError:\n", "            except KeyError:\n"))


@bank.wrong("schedules-not-compared", variant=True)
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


@bank.right()
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


@bank.right()
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
