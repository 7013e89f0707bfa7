"""Balise 5: gradients accumulated over micro-batches with one exchange, and the learning rate of a larger batch."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.ranks import by_world
from dlojz_tp.probes.traffic import Traffic

HINTS = {
    "exchange-each-time": "{found} all-reduces for {n} micro-batches, but only the last micro-batch should "
                          "exchange. Run the others inside no_sync().",
    "forward-outside": "You use no_sync(), but only around backward. DDP decides in the forward pass, so this must "
                       "be inside too.",
    "never-exchanged": "The gradients were never exchanged: run the last micro-batch outside no_sync().",
    "exchanged-too-early": "The gradients were exchanged with micro-batch {found} of {n}, so those of the later "
                           "ones were not. Run the last micro-batch outside no_sync(): its exchange includes the "
                           "gradients accumulated before it.",
    "not-accumulated": "The micro-batches went through the network together, or were kept for one backward pass. "
                       "All their activations are then in memory at once, which accumulation is meant to avoid.",
    "bypassed": "The micro-batches bypassed DDP (through .module). Call the wrapped model.",
    "sum-of-losses": "The gradients are {n} times too large, because they add up over micro-batches. Scale each loss.",
    "sum-not-divided": "The gradients are those of a sum over the samples. Divide by all {samples} samples of the "
                       "micro-batches.",
    "cleared-each-time": "These are the gradients of the last micro-batch alone. A zero_grad() in each micro-batch "
                         "throws away the earlier gradients: clear once, before the first.",
    "averaged-twice": "The gradients are world_size times too small. DDP already averages over the ranks: a rank's "
                      "loss is the mean over its own samples.",
    "summed-over-ranks": "The gradients are world_size times too large. DDP averages them over the ranks, and all "
                         "ranks have equally many samples: divide by the samples of this rank, and don't multiply.",
    "micro-means": "The result is right for equal micro-batches, but wrong where one is smaller. Weight each loss "
                   "by its number of samples.",
    "several-updates": "The optimizer made {found} steps. It should make one, after the last micro-batch.",
    "no-optimizer-step": "The weights did not change. Do you call optimizer.step()?",
    "old-gradients": "The first call is right, but the second is not: the gradients of the call before were still "
                     "there.",
    "wrong-accumulation": "The weights are not those of one step on the whole batch of all ranks.",
    "rate-not-number": "Return the learning rate of this step as one number.",
    "rate-not-scaled": "After the warm-up the learning rate is base · batch / base_batch.",
    "rate-square-root": "This is the square-root rule. Use the linear rule.",
    "rate-inverted": "The target is base · batch / base_batch. You swapped the two batch sizes.",
    "rate-geometric": "Your warm-up multiplies by the same factor in each step. It should add the same amount.",
    "rate-smaller-batch": "With a batch smaller than base_batch, the target is below base, and the warm-up goes "
                          "down to it.",
    "rate-whole-numbers": "batch / base_batch is not a whole number here, but you use one: // and int() cut off "
                          "the decimals, round() rounds. Divide with /.",
    "rate-no-warm-up": "In the first steps the learning rate rises from base to the target, by the same amount in "
                       "each step.",
    "rate-from-zero": "The warm-up starts at base (step 0), not at 0.",
    "rate-off-by-one": "The target is reached at step = warmup_steps, and step 0 has the base rate.",
    "rate-goes-on": "After the warm-up the learning rate no longer changes.",
    "rate-no-warm-up-asked": "With warmup_steps = 0, the rate is the target from step 0 on: {error}",
    "rate-wrong": "The learning rate of this step is wrong.",
}


def balise_5(accumulate, learning_rate):
    """Even and uneven micro-batches in worlds of 1 to 4; then the learning rate, step by step."""
    torch.set_num_threads(1)  # small truths: threads would only wait for each other; judge() puts the number back
    yield "one step equals a step on the whole batch of all ranks"
    yield from by_world(_judge, _accumulated, accumulate, timeout=15)
    yield "the learning rate is linear in the batch, after a warm-up"
    _right_rates(learning_rate)


def _judge(size, ranks):
    for case in ("even", "one", "uneven"):
        if case == "uneven":
            yield "the same where the last micro-batch is smaller"
        _right_weights(size, [found[case] for found in ranks], case)
    yield "gradients are exchanged once a step, with the last micro-batch"
    for rank, found in enumerate(ranks):
        _right_traffic(size, rank, found)


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


def _accumulated(accumulate):
    """On a rank: for each case the weights after two calls, the exchanges of the first, the optimizer's steps."""
    rank, found = dist.get_rank(), {}
    for case in CASES:
        model = DistributedDataParallel(_model(), bucket_cap_mb=10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        forwards = []
        model.register_forward_pre_hook(lambda m, _, f=forwards: f.append(m.require_backward_grad_sync))
        syncing = []
        next(model.module.parameters()).register_hook(
            lambda *_, s=syncing, m=model: s.append(m.require_backward_grad_sync)
        )
        weights = []
        for call in range(2):
            with Traffic() as traffic:
                accumulate(model, _micro_batches(rank, case, call), optimizer)
            calls = [name for name in traffic.names() if name == "all_reduce"]
            if call == 0:
                first = {
                    "exchanges": len(calls),
                    "steps": len(steps),
                    "forwards": list(forwards),
                    "backwards": list(syncing),
                }
            weights.append([p.detach().clone() for p in model.parameters()])
        found[case] = {"weights": weights, **first}
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


def _right_weights(size, ranks, case):
    n, samples = len(CASES[case]), sum(CASES[case])
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}, micro-batches of {', '.join(map(str, CASES[case]))} samples"
        if found["steps"] > 1:
            raise Wrong("several-updates", expected=1, got=found["steps"], where=where, found=found["steps"])
        first, second = found["weights"]
        wanted = _truth(size, case, 1)
        if close(first, wanted, 1e-9):
            if close(second, _truth(size, case, 2), 1e-9):
                continue
            raise Wrong("old-gradients", where=f"{where}, second call")
        if close(first, [p.detach() for p in _model().parameters()], 1e-12):
            slug = "no-optimizer-step"
        elif not all(close(first, other["weights"][0], 1e-9) for other in ranks):
            slug = "never-exchanged" if len(found["forwards"]) == n else "bypassed"
            if True in found["backwards"] and slug == "never-exchanged" and not found["backwards"][-1]:
                slug = "exchanged-too-early"
        elif n > 1 and any(close(first, _truth(size, case, 1, w, n), 1e-9) for w in (True, False)):
            slug = "sum-of-losses"
        elif close(first, _truth(size, case, 1, scale=samples), 1e-9):
            slug = "sum-not-divided"
        elif len(found["forwards"]) == n > 1 and any(
            close(first, _truth(size, case, 1, w, k, last=True), 1e-9) for w in (True, False) for k in (1, n)
        ):
            slug = "cleared-each-time"
        elif case == "uneven" and close(first, _truth(size, case, 1, weighted=False), 1e-9):
            slug = "micro-means"
        elif size > 1 and close(first, _truth(size, case, 1, scale=1 / size), 1e-9):
            slug = "averaged-twice"
        elif size > 1 and close(first, _truth(size, case, 1, scale=size), 1e-9):
            slug = "summed-over-ranks"
        else:
            slug = "wrong-accumulation"
        early = 1 + found["backwards"].index(True) if True in found["backwards"] else 0
        raise Wrong(slug, expected=wanted[0], got=first[0], where=where, n=n, samples=samples, found=early)


def _right_traffic(size, rank, found):
    for case, seen in found.items():
        n, where = len(CASES[case]), f"rank {rank} of {size}, {len(CASES[case])} micro-batches"
        if seen["exchanges"] > 1:
            outside = n > 1 and not all(seen["backwards"]) and all(seen["forwards"])
            slug, found = "forward-outside" if outside else "exchange-each-time", seen["exchanges"]
            raise Wrong(slug, expected=1, got=found, where=where, found=found, n=n)
        if seen["forwards"] and len(seen["forwards"]) < n or 0 < len(seen["backwards"]) < n:
            raise Wrong("not-accumulated", where=where)
        if not seen["forwards"]:
            raise Wrong("bypassed", where=where)


def _right_rates(learning_rate):
    base, base_batch, batch, warmup = 0.1, 256, 1024, 5
    target = base * batch / base_batch
    wanted = [base + (target - base) * min(1, step / warmup) for step in range(9)]
    got = [learning_rate(step, base, base_batch, batch, warmup) for step in range(9)]
    for step, value in enumerate(got):
        if value is None:
            raise Wrong("nothing-returned")
        if not isinstance(value, int | float):
            raise Wrong("rate-not-number", got=value, where=f"step {step}")
    for step, (value, right) in enumerate(zip(got, wanted)):
        if close(value, right, 1e-6):
            continue
        slug = "rate-wrong"
        if close(got[-1], base * (batch / base_batch) ** 0.5, 1e-6):
            slug = "rate-square-root"
        elif close(got[-1], base * base_batch / batch, 1e-6):
            slug = "rate-inverted"
        elif close(got, [base * (target / base) ** min(1, s / warmup) for s in range(9)], 1e-6):
            slug = "rate-geometric"
        elif close(got[-1], base, 1e-6):
            slug = "rate-not-scaled"
        elif close(got, [target] * 9, 1e-6):
            slug = "rate-no-warm-up"
        elif close(got[0], 0.0, 1e-12):
            slug = "rate-from-zero"
        elif any(
            close(got[:4], [base + (target - base) * (s + 1) / w for s in range(4)], 1e-6) for w in (warmup, warmup + 1)
        ):
            slug = "rate-off-by-one"
        elif got[-1] > max(target, got[warmup]):
            slug = "rate-goes-on"
        raise Wrong(
            slug,
            expected=right,
            got=value,
            where=f"step {step} of a warm-up of {warmup}, batch {batch} for {base_batch}",
        )
    between = learning_rate(9, base, base_batch, 384, warmup)
    if not close(between, 0.15, 1e-6):
        slug = "rate-whole-numbers" if any(close(between, whole * base, 1e-6) for whole in (1, 2)) else "rate-wrong"
        raise Wrong(
            slug, expected=0.15, got=between, where=f"step 9 of a warm-up of {warmup}, batch 384 for {base_batch}"
        )
    smaller = [learning_rate(step, 0.5, 100, 50, 10) for step in (0, 5, 20)]
    wanted = [0.5, 0.375, 0.25]
    if not close(smaller, wanted, 1e-6):
        slug = "rate-whole-numbers" if close(smaller, [0.5, 0.25, 0.0], 1e-6) else "rate-smaller-batch"
        raise Wrong(slug, expected=wanted, got=smaller, where="steps 0, 5 and 20 of a warm-up of 10, batch 50 for 100")
    try:
        got = learning_rate(0, 0.5, 100, 50, 0)
    except ZeroDivisionError as error:
        raise Wrong("rate-no-warm-up-asked", error=str(error)) from error
    if not close(got, 0.25, 1e-6):
        raise Wrong("rate-no-warm-up-asked", expected=0.25, got=got, error="another rate came")
