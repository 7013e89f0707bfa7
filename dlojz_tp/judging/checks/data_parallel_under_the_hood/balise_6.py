"""Balise 6: accumulation that sends nothing before the last micro-batch."""

from functools import cache, partial

import torch

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checks.data_parallel_under_the_hood.bucket_errors import KNOWN
from dlojz_tp.judging.checks.data_parallel_under_the_hood.chain_gradients import CAPACITY, HELD, local, plain
from dlojz_tp.judging.checks.data_parallel_under_the_hood.common import (
    PLACED_TWICE,
    by_world,
    not_mean,
    on_each,
    own_work,
    reduced,
    share,
)
from dlojz_tp.judging.probes.memory import KeptForBackward
from dlojz_tp.judging.probes.networks import TOLERANCE, Chain, gradients, rows
from dlojz_tp.judging.probes.traffic import Traffic, sent, until
from dlojz_tp.judging.probes.withheld import Withheld


def halves(n):
    return [-(-n // 2), n // 2]


SIZES = {
    "equal": lambda n: [n // 2] * 2 if n % 2 == 0 else [n // 3] * 3,
    "one": lambda n: [n],
    "uneven": lambda n: [n - 3, 2, 1] if n > 3 else [1, 1, 1],
}


def observe(Accumulating, backward_in_parts):  # noqa: N803
    model, found, x = Chain().to(launch.device()), {}, share(0)
    parameters, finished = list(model.parameters()), []
    retained = []  # how many of the tensors kept for backward were there when the next forward began

    def run(name, work):
        model.zero_grad()
        log = Traffic()
        model.tell = log.mark
        finished.clear()
        retained.clear()
        with Withheld() as running, log:
            work(log)
            now = gradients(parameters)
        running.left()
        found[name] = {
            "now": now, "later": gradients(parameters), "events": log.events, "finished": len(finished),
            "retained": max(retained, default=0),
        }  # fmt: skip

    def by_hand(log):
        first, second = x.split(halves(len(x)))
        with reducer.no_sync():
            (model(first) * len(first) / len(x)).backward()
        found["own"] = gradients(parameters)
        log.mark("last micro-batch")
        (model(second) * len(second) / len(x)).backward()
        log.mark("backward ended")
        reducer.finish()

    def after_error(_log):
        try:
            with reducer.no_sync():
                raise KeyError("a damaged image")
        except KeyError:
            pass
        model(x).backward()
        reducer.finish()

    def in_parts(log, sizes):
        kept = KeptForBackward()

        def loss_of(part):
            retained.append(kept.alive)
            log.mark(f"forward of {len(part)}")
            with kept:
                return model(part)

        backward_in_parts(loss_of, list(x.split(sizes)), reducer)

    with own_work():
        reducer = Accumulating(list(parameters), CAPACITY)
        run("by hand", by_hand)
        run("after error", after_error)
        finish = reducer.finish
        reducer.finish = lambda *args, **kwargs: (finished.append(1), finish(*args, **kwargs))[1]
        for name, sizes in SIZES.items():
            run(name, lambda log, sizes=sizes: in_parts(log, sizes(len(x))))
    return found


@cache
def weighted(size, sizes_of, weights):
    """Gradients where part k of each rank's rows has weights[k]; None: its part of the rank's rows."""
    model = Chain()
    for rank in range(size):
        x = rows(0)[rank::size]
        for part, weight in zip(x.split(sizes_of(len(x))), weights, strict=True):
            (model(part) * (len(part) / len(x) if weight is None else weight) / size).backward()
    return gradients(model.parameters())


def no_sync(ranks, rank):
    """Inside no_sync() nothing is sent, and the rank's own gradients are collected."""
    early = sent(until(ranks[rank]["by hand"]["events"], "last micro-batch"))
    if early:
        return "every-micro-batch", {"n": len(early)}
    model, x = Chain(), rows(0)[rank :: len(ranks)]
    first = x[: halves(len(x))[0]]
    (model(first) * len(first) / len(x)).backward()
    for k, (mine, wanted) in enumerate(zip(ranks[rank]["own"], gradients(model.parameters()), strict=True)):
        if mine is None or not close(mine, wanted):
            return "lost-local", {"expected": wanted, "got": mine,
                                  "where": f"rank {rank} of {len(ranks)}, parameter {k}"}  # fmt: skip
    return None


def after_it(ranks, rank):
    """The backward after no_sync() sends the sum of both."""
    case, size = ranks[rank]["by hand"], len(ranks)
    if size > 1 and not sent(case["events"]):
        return "never-sent", {}
    only_last = weighted(size, halves, (0, None))
    late = size > 1 and not sent(until(case["events"], "backward ended"))
    return mean(case, rank, size, only_last) or (("no-overlap-left", {}) if late else None)


def after_error(ranks, rank):
    case, size = ranks[rank]["after error"], len(ranks)
    if size > 1 and not sent(case["events"]):
        return "switch-stays", {"where": f"rank {rank} of {size}, after an exception inside no_sync()"}
    return mean(case, rank, size)


def mean(case, rank, size, only_last=None):
    """As `not_mean`. only_last: the gradients if those before the last micro-batch are lost."""
    if only_last and all(g is not None and close(g, v) for g, v in zip(case["now"], only_last, strict=True)):
        return "only-the-last", {"expected": plain(1)[0][0], "got": case["now"][0],
                                 "where": f"rank {rank} of {size}, parameter 0"}  # fmt: skip
    return not_mean(case, plain(1)[0], local(rank, size), rank, size)


def large(events):
    """What may carry gradients: a number of rows that the ranks tell each other has a few bytes."""
    return [event for event in sent(events) if event[1] >= 64]


def in_parts(name, ranks, rank):
    """Forward and backward of one micro-batch after the other, sent with the last one."""
    case, size, sizes = ranks[rank][name], len(ranks), SIZES[name](12 // len(ranks))
    events, texts = case["events"], [event[0] for event in case["events"]]
    forwards, backwards = [k for k, text in enumerate(texts) if text.startswith("forward")], texts.count("layer 0")
    rows_at_once = max((int(texts[k].split()[-1]) for k in forwards), default=0)
    if rows_at_once > max(sizes):
        return "not-in-parts", {"rows": rows_at_once, "most": max(sizes)}
    first_backward = next((k for k, text in enumerate(texts) if text.startswith("layer")), len(texts))
    if len(sizes) > 1 and backwards == len(forwards) and sum(k < first_backward for k in forwards) > 1:
        return "graphs-kept", {}
    if case["retained"] and backwards == len(forwards):
        return "retained", {"n": case["retained"]}
    if forwards and (early := large(events[: forwards[-1]])):
        return "every-micro-batch", {"n": len(early)}
    if case["finished"] != 1:
        return "finish-every-time" if case["finished"] else "finish-forgotten", {"n": case["finished"]}
    if size > 1 and not large(events):
        return "never-sent", {}
    if reduced(events, size) > 1.05 * HELD + 64:
        return "sent-again", {"sent": reduced(events, size), "held": HELD}
    last = max((k for k, text in enumerate(texts) if text == "layer 0"), default=0)
    if size > 1 and not large(events[:last]):
        return "no-overlap-left", {}
    only_last = weighted(size, SIZES[name], (0,) * (len(sizes) - 1) + (None,)) if len(sizes) > 1 else None
    wrong = mean(case, rank, size, only_last)
    weights = weights_of(case["now"], size, name) if wrong and wrong[0] in ("wrong-gradient", "not-divided") else None
    if weights:
        due = [rows / sum(sizes) for rows in sizes]
        told = {"rows": ", ".join(map(str, sizes)), "weights": listed(weights), "due": listed(due)}
        return "part-weights", wrong[1] | told
    return wrong


def weights_of(got, size, name):
    """The weights with which the mean gradients of the parts were added up; None where `got` is no such sum."""
    if any(one is None or not one.isfinite().all() for one in got):
        return None
    n = len(SIZES[name](12 // size))
    parts = [weighted(size, SIZES[name], tuple(float(j == k) for j in range(n))) for k in range(n)]
    columns, flat = (
        torch.stack([torch.cat([one.flatten() for one in each]) for each in some], 1) for some in (parts, [got])
    )
    found = torch.linalg.lstsq(columns, flat).solution
    return found[:, 0].tolist() if close(columns @ found, flat, TOLERANCE) else None


def listed(weights):
    return ", ".join(f"{round(one, 4) + 0.0:g}" for one in weights)


LOOKS = [
    on_each("inside no_sync() nothing is sent, and p.grad collects this rank's own gradients", no_sync),
    on_each("the backward after it sends the sum of both, bucket by bucket", after_it),
    on_each("an exception inside no_sync() leaves no trace", after_error),
    *(on_each(f"{words}: the gradient of the whole batch, and only the last one sends", partial(in_parts, name))
      for name, words in (("equal", "equal micro-batches"), ("one", "a single one"), ("uneven", "uneven ones"))),
]  # fmt: skip


def balise_6(Accumulating, backward_in_parts):  # noqa: N803
    """no_sync() by itself and after an exception; then micro-batches of equal and of different sizes."""
    yield LOOKS[0].claim
    yield from by_world(LOOKS, observe, Accumulating, backward_in_parts, known=(PLACED_TWICE, *KNOWN))
