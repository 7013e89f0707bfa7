"""Balise 5: gradients accumulated over micro-batches with one exchange, and the learning rate of a larger batch."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, judged, silent, within
from dlojz_tp.judging.probes.shared_looks import each_rank, judged_on_ranks
from dlojz_tp.judging.probes.traffic import Traffic

CASES = {"even": (3, 3, 3), "one": (4,), "uneven": (4, 4, 1)}  # samples of each micro-batch


def _model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _micro_batches(rank, case, call=0):
    generator = torch.Generator().manual_seed(50 * call + rank)
    sizes = CASES[case]
    x = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes)))


def observe(accumulate):
    """On a rank: for each case the weights after two calls, the exchanges of the first, the optimizer's steps."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for case, samples in CASES.items():
        model = DistributedDataParallel(_model(), bucket_cap_mb=10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps, forwards, syncing, weights, first = [], [], [], [], {}
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        model.register_forward_pre_hook(lambda m, _, f=forwards: f.append(m.require_backward_grad_sync))
        next(model.module.parameters()).register_hook(
            lambda *_, s=syncing, m=model: s.append(m.require_backward_grad_sync)
        )
        for call in range(2):
            with Traffic() as traffic:
                accumulate(model, _micro_batches(rank, case, call), optimizer)
            first = first or {
                "exchanges": traffic.names().count("all_reduce"), "steps": len(steps),
                "forwards": list(forwards), "backwards": list(syncing),
            }  # fmt: skip
            weights.append([p.detach().clone() for p in model.parameters()])
        where = f"rank {rank} of {size}, micro-batches of {', '.join(map(str, samples))} samples"
        about = {"case": case, "size": size, "n": len(samples), "samples": sum(samples), "where": where}
        found[case] = {"weights": weights[0], "later": weights[1]} | first | about
    return found


@functools.cache
def _truth(size, case, calls, weighted=True, scale=1.0, last=False):
    """The weights of one process; last: of the last micro-batch alone."""
    model, n = _model(), len(CASES[case])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in range(calls):
        optimizer.zero_grad()
        for rank in range(size):
            for x, y in _micro_batches(rank, case, call)[-last:]:
                share = len(y) / sum(CASES[case]) if weighted else 1 / n
                (F.cross_entropy(model(x), y) * share * scale / size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _compared(case):
    """What each rank has of a case, and whether others have other weights."""
    return lambda ranks: [
        rank[case] | {"apart": not all(close(rank[case]["weights"], one[case]["weights"], 1e-9) for one in ranks)}
        for rank in ranks
    ]


def _mistake(got, _):
    """The hint for weights that are wrong after the first call."""
    n, case, forwards, backwards = (got[key] for key in ("n", "case", "forwards", "backwards"))
    if close(got["weights"], [p.detach() for p in _model().parameters()], 1e-12):
        return "no-optimizer-step"
    if got["apart"]:
        early = True in backwards and not backwards[-1]
        return "bypassed" if len(forwards) != n else "exchanged-too-early" if early else "never-exchanged"
    known = [
        ("sum-of-losses", {"scale": n}),
        ("sum-of-losses", {"scale": n, "weighted": False}),
        ("sum-not-divided", {"scale": got["samples"]}),
    ]
    if len(forwards) == n:
        known += [
            ("cleared-each-time", {"last": True, "weighted": w, "scale": k}) for w in (True, False) for k in (1, n)
        ]
    known += [("micro-means", {"weighted": False}), ("averaged-twice", {"scale": 1 / got["size"]}),
              ("summed-over-ranks", {"scale": got["size"]})]  # fmt: skip
    known = (slug for slug, how in known if close(got["weights"], _truth(got["size"], case, 1, **how), 1e-9))
    return next(known, "wrong-accumulation")


def _found(got, due):
    early = 1 + got["backwards"].index(True) if True in got["backwards"] else 0
    return got | {"found": early, "expected": due[0], "got": got["weights"][0]}


def _exchange(got, _=None):
    """The hint for how a step was computed and what was exchanged; "" where that is right."""
    n, forwards, backwards = got["n"], got["forwards"], got["backwards"]
    if got["exchanges"] > 1:
        outside = n > 1 and not all(backwards) and all(forwards)
        return "forward-outside" if outside else "exchange-each-time"
    if forwards and len(forwards) < n or 0 < len(backwards) < n:
        return "not-accumulated"
    return "" if forwards else "bypassed"


def _steps(got, _):
    return {"found": got["steps"], "got": got["steps"], "where": got["where"]}


def _second_call(got, due):
    return {"where": f"{got['where']}, second call"} | silent(got, due)


def _exchanges(got, due):
    return got | {"found": got["exchanges"]} | silent(got, due)


def _weights(claim, case):
    return [
        each_rank(claim, case, 1, "several-updates", holds=lambda got, due: got["steps"] <= due, fields=_steps),
        each_rank("", _compared(case), functools.partial(_truth, case=case, calls=1), _mistake, fields=_found,
                  holds=lambda got, due: close(got["weights"], due, 1e-9)),
        each_rank("", case, functools.partial(_truth, case=case, calls=2), "old-gradients", fields=_second_call,
                  holds=lambda got, due: close(got["later"], due, 1e-9)),
    ]  # fmt: skip


LOOKS = [
    *_weights("one step equals a step on the whole batch of all ranks", "even"),
    *_weights("", "one"),
    *_weights("the same where the last micro-batch is smaller", "uneven"),
    *(each_rank(claim, case, "", _exchange, holds=lambda got, due: _exchange(got) == due, fields=_exchanges)
      for claim, case in zip(("gradients are exchanged once a step, with the last micro-batch", "", ""), CASES)),
]  # fmt: skip

BASE, BASE_BATCH, BATCH, WARMUP = GIVEN = 0.1, 256, 1024, 5
TARGET = BASE * BATCH / BASE_BATCH
RATES = [BASE + (TARGET - BASE) * min(1, step / WARMUP) for step in range(9)]


def observe_rates(learning_rate):
    yield {"rates": [learning_rate(step, *GIVEN) for step in range(9)]}
    yield {"between": learning_rate(9, BASE, BASE_BATCH, 384, WARMUP)}
    yield {"smaller": [learning_rate(step, 0.5, 100, 50, 10) for step in (0, 5, 20)]}
    try:
        yield {"at once": learning_rate(0, 0.5, 100, 50, 0)}
    except ZeroDivisionError as error:
        yield {"at once": str(error)}


def _wrong_rates(got, _):
    """The hint for rates of which one is wrong."""
    rise = TARGET - BASE
    mistakes = {
        "rate-square-root": close(got[-1], BASE * (BATCH / BASE_BATCH) ** 0.5, 1e-6),
        "rate-inverted": close(got[-1], BASE * BASE_BATCH / BATCH, 1e-6),
        "rate-geometric": close(got, [BASE * (TARGET / BASE) ** min(1, s / WARMUP) for s in range(9)], 1e-6),
        "rate-not-scaled": close(got[-1], BASE, 1e-6),
        "rate-no-warm-up": close(got, [TARGET] * 9, 1e-6),
        "rate-from-zero": close(got[0], 0.0, 1e-12),
        "rate-off-by-one": any(
            close(got[:4], [BASE + rise * (s + 1) / n for s in range(4)], 1e-6) for n in (WARMUP, WARMUP + 1)),
        "rate-goes-on": got[-1] > max(TARGET, got[WARMUP]),
    }  # fmt: skip
    return next((slug for slug, is_it in mistakes.items() if is_it), "rate-wrong")


def _first_wrong(got, due):
    step = next(step for step, (one, right) in enumerate(zip(got, due)) if not close(one, right, 1e-6))
    where = f"step {step} of a warm-up of {WARMUP}, batch {BATCH} for {BASE_BATCH}"
    return {"expected": due[step], "got": got[step], "where": where}


def _numbers(got, _):
    return all(isinstance(one, int | float) for one in got)


OF_RATES = [
    Look("the learning rate is linear in the batch, after a warm-up", "rates", RATES, holds=_numbers,
         hint=lambda got, _: "nothing-returned" if None in got else "rate-not-number"),
    Look("", "rates", RATES, _wrong_rates, holds=within(1e-6), fields=_first_wrong),
    Look("", "between", 0.15, holds=within(1e-6),
         hint=lambda got, _: "rate-whole-numbers" if any(close(got, k * BASE, 1e-6) for k in (1, 2)) else "rate-wrong",
         fields={"where": f"step 9 of a warm-up of {WARMUP}, batch 384 for {BASE_BATCH}"}),
    Look("", "smaller", [0.5, 0.375, 0.25], holds=within(1e-6),
         hint=lambda got, _: "rate-whole-numbers" if close(got, [0.5, 0.25, 0.0], 1e-6) else "rate-smaller-batch",
         fields={"where": "steps 0, 5 and 20 of a warm-up of 10, batch 50 for 100"}),
    Look("", "at once", 0.25, "rate-no-warm-up-asked", holds=within(1e-6),
         fields=lambda got, _: {"error": got if isinstance(got, str) else "another rate came"}),
]  # fmt: skip


def balise_5(accumulate, learning_rate):
    """Even and uneven micro-batches in worlds of 1 to 4; then the learning rate, step by step."""
    yield from judged_on_ranks(LOOKS, observe, accumulate, timeout=15)
    yield from judged(OF_RATES, observe_rates, learning_rate)
