"""Balise 4: gradients that leave bucket by bucket while backward goes on, and are freed at once."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.zero_under_the_hood.common import (
    ADAMW,
    apart,
    differing,
    gradient_shards,
    in_two,
    left_behind,
    optimizers,
    own_work,
    share_backward,
    sharing,
    states_held,
    world,
)
from dlojz_tp.checks.zero_under_the_hood.outside import no_copy
from dlojz_tp.checks.zero_under_the_hood.stage2_truth import CASES, SMALL, STEPS, Idle, one_process
from dlojz_tp.checks.zero_under_the_hood.worlds import by_worlds
from dlojz_tp.probes.memory import Memory, held_bytes
from dlojz_tp.probes.networks import Chain, same, state
from dlojz_tp.probes.outside import Outside
from dlojz_tp.probes.ranks import each_rank
from dlojz_tp.probes.traffic import Traffic, counted_waits, on_the_wire, sent, until
from dlojz_tp.probes.withheld import Withheld

DEPTH, WIDTH = 26, 16
CAPACITY = 4500  # bytes: two of the chain's layers
FIRST = 0.4  # of the parameters are in the first group, whose gradients come last
SLACK = 4000  # bytes: activations of a few rows, single numbers
BYTES = DEPTH * (WIDTH * WIDTH + WIDTH) * 8

HINTS = {
    "hook-before-grad": "The hook got something else than a parameter whose gradient is there: {error} A hook of register_hook is "
    "handed the gradient, before it is in p.grad; register_post_accumulate_grad_hook calls f(p) after.",
    "added-twice": "What arrived on rank {rank} was added to own.grad more than once. wait() must let go of what it has waited for.",
    "shards-not-waited": "When reduce() returned on rank {rank}, a reduce-scatter was still on its way: own.grad changed "
    "afterwards. Wait for each before its result is used.",
    "bucket-left": "A bucket with a parameter that was not used ({names}) is never complete, and came out wrong: reduce() has to send "
    "what backward left, zeros for what is missing.",
    "second-backward": "With one backward a step all is right, with two it is not: the second must add to what the first left "
    "in own.grad.",
    "after-backward": "Nothing was sent before backward had ended. A bucket leaves in a hook, as soon as its last gradient "
    "is there: only so can it be freed early.",
    "not-asynchronous": "Each reduce-scatter was waited for where it was started: backward stood still while it travelled. Start it "
    "with async_op=True, and wait when the next bucket is ready.",
    "not-again": "In the first step buckets left during backward, in the second none did. What tells that a bucket is complete must "
    "begin anew when the bucket has left.",
    "late-buckets": "When backward reached the first layer, {early} of {n} buckets were on their way: a bucket waits "
    "although it is complete.",
    "one-each-parameter": "{n} reduce-scatters for {held} bytes in buckets of {capacity} bytes: one for each bucket, not one "
    "for each parameter.",
    "capacity-ignored": "{n} reduce-scatters in one step, for {held} bytes in buckets of {capacity} bytes: make_parts() must "
    "make a Part for each bucket.",
    "gradients-kept": "After reduce(), parameters still hold whole gradients: {found} bytes more than before backward, {due} are "
    "due. Set "
    "p.grad to None when the bucket has left.",
    "freed-late": "During backward, {found} bytes of gradients were alive at once, nearly all of {held}. What has left must be "
    "freed then, not at the end: p.grad = None in the hook.",
    "flats-kept": "p.grad is freed, and still {found} bytes were alive at the peak, nearly all of the {held} bytes of "
    "gradients: the flat tensors live on. Let go of each when its reduce-scatter is done: wait for the one before.",
    "buckets-kept": "After reduce(), {found} bytes more are alive than before backward; the gradients of one shard make {due}. "
    "The flat tensors of the buckets are still held somewhere: empty the list of what runs.",
    "grad-all-reduced": "A rank sent {found:.0f} bytes for {held} bytes of gradients: that is more than a reduce-scatter and an "
    "all-gather need.",
}  # fmt: skip
KNOWN = (
    (("NoneType", "in reduce"), "none-gradient"),
    ("NoneType", "hook-before-grad"),
    (("KeyError: ", " of shape ("), "hook-before-grad"),
)


def balise_4(ShardedGradients):  # noqa: N803
    """Two steps of the odd model, also with two backwards each; then what is sent when, and what is alive."""
    looks = {
        "the weights of AdamW in one process": lambda worlds: [_numbers(worlds[size], size, "one") for size in worlds],
        "each bucket leaves while backward goes on": each_rank(_early),
        "what is not owned is freed at once: at the peak, after reduce(), after the step": each_rank(_held),
        "groups with options of their own, and two backward passes before a step": lambda worlds: [
            _numbers(worlds[size], size, "two") for size in worlds
        ],
    }
    yield from by_worlds(looks, _on_rank, ShardedGradients, known=KNOWN)


def _on_rank(ShardedGradients):  # noqa: N803
    (rank, size), found = world(), {}
    torch.set_num_threads(1)
    with own_work():
        for case, (arguments, _, micro) in CASES.items():
            model = Idle()
            optimizer = ShardedGradients(arguments(model), capacity=SMALL, **ADAMW)
            got = found[case] = {}
            for step in range(STEPS):
                optimizer.zero_grad()
                with nullcontext() if step else Withheld() as withheld, Traffic() as log, counted_waits() as waits:
                    for part in range(micro):
                        share_backward(model, step * micro + part, rank, size)
                    optimizer.reduce()
                    if step == 0:
                        got["gradients"], got["events"] = gradient_shards(optimizer), list(log.events)
                        got["waits"] = len(waits) - len(sent(log.events))
                        withheld.left()
                        dist.barrier()
                        got["later"] = gradient_shards(optimizer)
                    optimizer.update()
                got[step + 1] = state(model)
        found |= _measured(ShardedGradients, rank, size)
    return found


def _measured(ShardedGradients, rank, size):  # noqa: N803
    before, model = optimizers(), Chain(DEPTH, WIDTH)
    parameters, x = list(model.parameters()), torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None]
    reduced, most, flying, early = 0, _most(size), [], []
    with Outside(BYTES, on=size == 2) as outside, Memory(*parameters) as memory:
        optimizer = ShardedGradients(in_two(parameters, FIRST), capacity=CAPACITY, **ADAMW)
        for _ in range(2):
            optimizer.zero_grad()
            memory.reset()
            before_it = memory.now()
            with Traffic() as log, counted_waits() as waits:

                def tell(text, log=log, waits=waits):
                    log.mark(text)
                    flying.append(len(sent(log.events)) - len(waits))

                model.tell = tell
                model(x + rank).backward()
                early.append(len(sent(log.events)))
                log.mark("backward ended")
                peak, kept = memory.peak - before_it, sum(p.grad is not None for p in parameters)
                optimizer.reduce()
                reduced, left = (
                    max(reduced, memory.settled(before_it + most["reduced"]) - before_it),
                    sum(p.grad is not None for p in parameters),
                )
                optimizer.update()
        optimizer.zero_grad()
        model.zero_grad()
        alive = memory.settled(most["alive"] + apart(optimizer))
        alive = max(alive, held_bytes(optimizer)) - apart(optimizer)  # a NumPy array is no tensor
    found = {"events": log.events, "peak": peak, "kept": kept, "left": left, "reduced": reduced, "alive": alive}
    found |= {"flying": max(flying), "early": early}
    return found | {"outside": outside.kept, "states": states_held(before, 2 * -(-BYTES // 8 // size) + 160)}


def _values(gradients):
    """All numbers but zeros, sorted: shards may hold the parameters in any order."""
    whole = torch.cat([g.reshape(-1).cpu() for g in gradients])
    return whole[whole != 0].sort()[0]


def _numbers(ranks, size, case):
    gradients, weights = one_process(case, size)
    truth = _values(gradients[0].values())
    for rank, got in enumerate(ranks):
        where = f"rank {rank} of {size}"
        if size > 1 and not sent(got[case]["events"]):
            raise Wrong("nothing-travels", rank=rank, where=where)
        now, later = got[case]["gradients"], got[case]["later"]
        for k, (a, b) in enumerate(zip(now, later, strict=True)):
            if a is None and got[case]["waits"] < 0 and any(g is not None for g in now):
                raise Wrong("shards-not-waited", rank=rank, where=where)
            if a is None:
                lost = all(g is None for g in now)
                slug = "no-shard-gradient" if lost else "bucket-left"
                raise Wrong(slug, k=k, found="None", where=where, names="unused")
            if not torch.equal(a, b):
                raise Wrong("shards-not-waited", rank=rank, where=where)
    got = _values([g for rank in ranks for g in rank[case]["gradients"]])
    right = close(got, truth, 1e-9)
    if not right:
        for factor, slug in ((size, "sum-not-mean"), (1 / size, "mean-divided-twice")):
            if close(got, truth * factor, 1e-9):
                raise Wrong(slug, expected=truth, got=got, where=f"{size} ranks, all shards, sorted")
    for rank, each in enumerate(ranks):
        if not right and (off := each[case]["waits"]):
            slug = "shards-not-waited" if off < 0 else "added-twice"
            raise Wrong(slug, rank=rank, where=f"rank {rank} of {size}")
    if not right and case == "two":
        raise Wrong("second-backward", expected=truth, got=got, where=f"{size} ranks, all shards, sorted")
    for rank, got in enumerate(ranks):
        first, last = got[case][1], got[case][STEPS]
        if right and same(last, weights[-1]):
            continue
        where = f"rank {rank} of {size}, " + ("AdamW" if case == "one" else "two groups")
        names = differing(first, weights[1]) or differing(last, weights[-1])
        fields = {"names": ", ".join(names[:4]), "name": names[0] if names else "", "steps": STEPS, "word": "AdamW"}
        if not same(first["frozen"], weights[0]["frozen"]):
            raise Wrong("frozen-trained", where=where)
        if names:
            fields |= {"expected": weights[-1][names[0]], "got": last[names[0]]}
        slug = "bucket-left" if not right else "weights-differ"
        if right and same(first, weights[1]):
            slug = "gradients-pile-up"
        elif left_behind(first, weights[0], weights[1]):
            slug = "not-gathered"
        raise Wrong(slug, rank=rank, where=where, **fields)


def _early(got, size, where):
    events = got["events"]
    if size == 1 and not sent(events):
        return  # one rank alone may send nothing
    gathers = [e for e in sent(events) if e[0] in ("all_gather", "broadcast")]
    calls = [e for e in sent(events) if e not in gathers]
    buckets = BYTES // CAPACITY + 1
    fields = {"n": len(calls), "held": BYTES, "capacity": CAPACITY, "where": where}
    early = len(sent(until(events, "backward ended")))
    if not early:
        raise Wrong("not-again" if got["early"][0] else "after-backward", **fields)
    if size > 1 and (cost := on_the_wire(events)) > 2.4 * BYTES * (size - 1) / size + SLACK:
        raise Wrong("grad-all-reduced", found=cost, **fields)
    by_messages = any(e[0] in ("reduce", "send", "recv", "all_to_all") for e in calls)
    if len(calls) > 2 * buckets + 2 and not by_messages:
        raise Wrong("one-each-parameter", **fields)
    if len(calls) <= buckets // 3:
        raise Wrong("capacity-ignored", **fields)
    early = len(sent(until(events, "layer 1")))
    if early < 0.7 * len(calls):
        raise Wrong("late-buckets", early=early, **fields)
    if size > 1 and got["flying"] <= 0:
        raise Wrong("not-asynchronous", **fields)


def _groups() -> list[int]:
    """Elements of the two groups."""
    elements = BYTES // 8
    return [round(elements * FIRST), elements - round(elements * FIRST)]


def _most(size) -> dict[str, float]:
    """Bytes that may be alive: after reduce(), besides what was there before backward; and after the step."""
    if size == 1:
        return dict.fromkeys(("reduced", "alive"), math.inf)  # one rank alone holds all
    due = 2 * sum(-(-n // size) for n in _groups())
    reduced = 8 * due // 2 + 2 * CAPACITY + SLACK  # a shard of the gradients, and a bucket or two
    return {
        "reduced": reduced,
        "alive": BYTES + 8 * due + 8 * due // 2 + CAPACITY + SLACK,
    }  # own.grad may stay, as zeros


def _held(got, size, where):
    """Compare bytes alive with what parameters, states and gradients of one shard make, and a few buckets."""
    if size == 1:
        return
    groups, most = _groups(), _most(size)
    due = 2 * sum(-(-n // size) for n in groups)
    if (slug := sharing(got["states"], groups, size)) != "shared":
        raise Wrong(slug, found=got["states"], due=due, where=where)
    shard = 8 * due // 2
    fields = {"held": BYTES, "where": where}
    much = got["reduced"] > most["reduced"]
    if much and got["left"]:
        raise Wrong("gradients-kept", found=got["reduced"], due=shard, **fields)
    if got["peak"] > shard + 8 * CAPACITY + SLACK:
        raise Wrong("freed-late" if got["kept"] else "flats-kept", found=got["peak"], **fields)
    if much:
        raise Wrong("buckets-kept", found=got["reduced"], due=shard, **fields)
    if got["alive"] > most["alive"]:
        raise Wrong("hidden-copy", found=got["alive"], due=BYTES + 8 * due, where=where)
    no_copy(got["outside"], BYTES, where)
