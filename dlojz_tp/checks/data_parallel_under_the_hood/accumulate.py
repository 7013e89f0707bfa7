"""Balise 6: accumulation that sends nothing before the last micro-batch."""

from functools import cache

import torch

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.data_parallel_under_the_hood.common import (
    PLACED_TWICE,
    by_world,
    compare,
    own_work,
    reduced,
    share,
)
from dlojz_tp.checks.data_parallel_under_the_hood.overlap import CAPACITY, HELD, KNOWN, local, plain
from dlojz_tp.probes.memory import KeptForBackward
from dlojz_tp.probes.networks import TOLERANCE, Chain, gradients, rows
from dlojz_tp.probes.traffic import Traffic, sent, until
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "every-micro-batch": "{n} collectives were started before the last micro-batch. Inside no_sync() the hooks "
                         "must send nothing.",
    "never-sent": "No gradient was sent, not even in the last micro-batch. The last micro-batch must run outside "
                  "no_sync(): check the order of the with blocks, that the switch is set back, and that the "
                  "backward reaches the parameters and their hooks.",
    "switch-stays": "After an exception inside no_sync(), nothing is sent any more. Reset the switch in a finally "
                    "block.",
    "lost-local": "Inside no_sync(), p.grad must collect the sum of this rank's own gradients, unsent and undivided.",
    "only-the-last": "Only the gradient of the last micro-batch came out: the gradients collected before it are lost.",
    "part-weights": "The gradients of micro-batches of {rows} rows were added up with the weights {weights}; "
                    "expected are {due}. Each one is the gradient of a mean: weight it by its rows divided by all "
                    "rows of the rank. The reducer divides by the number of ranks.",
    "graphs-kept": "All forward passes ran before the first backward. All their activations are in memory at once, "
                   "which accumulation is meant to avoid: run forward and backward of one micro-batch, then the "
                   "next.",
    "retained": "After backward, {n} tensors that a micro-batch had saved for it were still in memory: "
                "retain_graph keeps them, so the activations of all micro-batches are in memory at once.",
    "not-in-parts": "You call loss_of with {rows} rows at once; a micro-batch has at most {most}. Micro-batches "
                    "exist to save memory: call loss_of for each part separately.",
    "finish-forgotten": "finish() was not called after the last backward.",
    "finish-every-time": "finish() was called {n} times. Call it once, after the last micro-batch.",
    "no-overlap-left": "In the last micro-batch, no all-reduce was started before backward had ended. In that "
                       "micro-batch the hooks must work as usual.",
}  # fmt: skip


def balise_6(Accumulating, backward_in_parts):  # noqa: N803
    """no_sync() by itself and after an exception; then micro-batches of equal and of different sizes."""
    yield "inside no_sync() nothing is sent, and p.grad collects this rank's own gradients"
    yield from by_world(_judge, _accumulate, Accumulating, backward_in_parts, known=(PLACED_TWICE, *KNOWN))


def _judge(size, ranks):
    for rank, got in enumerate(ranks):
        _no_sync(got, rank, size)
    yield "the backward after it sends the sum of both, bucket by bucket"
    truth = plain(1)[0]
    for rank, got in enumerate(ranks):
        case = got["by hand"]
        if size > 1 and not sent(case["events"]):
            raise Wrong("never-sent", where=f"rank {rank} of {size}")
        _mean(case, truth, rank, size, {"only-the-last": _weighted(size, _HALVES, (0, None))})
        if size > 1 and not sent(until(case["events"], "backward ended")):
            raise Wrong("no-overlap-left", where=f"rank {rank} of {size}")
    yield "an exception inside no_sync() leaves no trace"
    for rank, got in enumerate(ranks):
        if size > 1 and not sent(got["after error"]["events"]):
            raise Wrong("switch-stays", where=f"rank {rank} of {size}, after an exception inside no_sync()")
        _mean(got["after error"], truth, rank, size, {})
    for case, words in (("equal", "equal micro-batches"), ("one", "a single one"), ("uneven", "uneven ones")):
        yield f"{words}: the gradient of the whole batch, and only the last one sends"
        for rank, got in enumerate(ranks):
            _parts(got[case], truth, case, rank, size)


def _HALVES(n):  # noqa: N802
    return [-(-n // 2), n // 2]


_SIZES = {
    "equal": lambda n: [n // 2] * 2 if n % 2 == 0 else [n // 3] * 3,
    "one": lambda n: [n],
    "uneven": lambda n: [n - 3, 2, 1] if n > 3 else [1, 1, 1],
}


def _accumulate(Accumulating, backward_in_parts):  # noqa: N803
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
        first, second = x.split(_HALVES(len(x)))
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
        for name, sizes in _SIZES.items():
            run(name, lambda log, sizes=sizes: in_parts(log, sizes(len(x))))
    return found


@cache
def _weighted(size, sizes_of, weights):
    """Gradients where part k of each rank's rows has weights[k]; None: its part of the rank's rows."""
    model = Chain()
    for rank in range(size):
        x = rows(0)[rank::size]
        for part, weight in zip(x.split(sizes_of(len(x))), weights, strict=True):
            (model(part) * (len(part) / len(x) if weight is None else weight) / size).backward()
    return gradients(model.parameters())


def _no_sync(got, rank, size):
    where = f"rank {rank} of {size}"
    early = sent(until(got["by hand"]["events"], "last micro-batch"))
    if early:
        raise Wrong("every-micro-batch", n=len(early), where=where)
    model, x = Chain(), rows(0)[rank::size]
    first = x[: _HALVES(len(x))[0]]
    (model(first) * len(first) / len(x)).backward()
    for k, (mine, wanted) in enumerate(zip(got["own"], gradients(model.parameters()), strict=True)):
        if mine is None or not close(mine, wanted):
            raise Wrong("lost-local", expected=wanted, got=mine, where=f"{where}, parameter {k}")


def _mean(case, truth, rank, size, known):
    for slug, values in known.items():
        if all(g is not None and close(g, v) for g, v in zip(case["now"], values, strict=True)):
            raise Wrong(slug, expected=truth[0], got=case["now"][0], where=f"rank {rank} of {size}, parameter 0")
    compare(
        case["now"], truth, local(rank, size), rank=rank, size=size, calls=sent(case["events"]), later=case["later"]
    )


def _large(events):
    """What may carry gradients: a number of rows that the ranks tell each other has a few bytes."""
    return [event for event in sent(events) if event[1] >= 64]


def _parts(case, truth, name, rank, size):
    where, events = f"rank {rank} of {size}, {name} micro-batches", case["events"]
    texts = [event[0] for event in events]
    forwards = [k for k, text in enumerate(texts) if text.startswith("forward")]
    backwards = texts.count("layer 0")
    sizes = _SIZES[name](12 // size)
    n = len(sizes)
    rows_at_once = max((int(texts[k].split()[-1]) for k in forwards), default=0)
    if rows_at_once > max(sizes):
        raise Wrong("not-in-parts", rows=rows_at_once, most=max(sizes), where=where)
    first_backward = next((k for k, text in enumerate(texts) if text.startswith("layer")), len(texts))
    if n > 1 and backwards == len(forwards) and sum(k < first_backward for k in forwards) > 1:
        raise Wrong("graphs-kept", where=where)
    if case["retained"] and backwards == len(forwards):
        raise Wrong("retained", n=case["retained"], where=where)
    if forwards and (early := _large(events[: forwards[-1]])):
        raise Wrong("every-micro-batch", n=len(early), where=where)
    if case["finished"] != 1:
        slug = "finish-every-time" if case["finished"] else "finish-forgotten"
        raise Wrong(slug, n=case["finished"], where=where)
    if size > 1 and not _large(events):
        raise Wrong("never-sent", where=where)
    if reduced(events, size) > 1.05 * HELD + 64:
        raise Wrong("sent-again", sent=reduced(events, size), held=HELD, where=where)
    last = max((k for k, text in enumerate(texts) if text == "layer 0"), default=0)
    if size > 1 and not _large(events[:last]):
        raise Wrong("no-overlap-left", where=where)
    known = {"only-the-last": _weighted(size, _SIZES[name], (0,) * (n - 1) + (None,))} if n > 1 else {}
    try:
        _mean(case, truth, rank, size, known)
    except Wrong as wrong:
        weights = _weights(case["now"], size, name) if wrong.slug in ("wrong-gradient", "not-divided") else None
        if weights:
            due = [rows / sum(sizes) for rows in sizes]
            wrong.slug = "part-weights"
            wrong.fields |= {"rows": ", ".join(map(str, sizes)), "weights": _listed(weights), "due": _listed(due)}
        raise


def _weights(got, size, name):
    """The weights with which the mean gradients of the parts were added up; None where `got` is no such sum."""
    if any(one is None or not one.isfinite().all() for one in got):
        return None
    n = len(_SIZES[name](12 // size))
    parts = [_weighted(size, _SIZES[name], tuple(float(j == k) for j in range(n))) for k in range(n)]
    columns, flat = (
        torch.stack([torch.cat([one.flatten() for one in each]) for each in some], 1) for some in (parts, [got])
    )
    found = torch.linalg.lstsq(columns, flat).solution
    return found[:, 0].tolist() if close(columns @ found, flat, TOLERANCE) else None


def _listed(weights):
    return ", ".join(f"{round(one, 4) + 0.0:g}" for one in weights)
