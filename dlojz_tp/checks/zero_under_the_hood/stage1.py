"""Balise 3: optimizer states for one shard on each rank, parameters gathered after the step."""

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.zero_under_the_hood.common import (
    NAMES,
    differing,
    gradient_shards,
    left_behind,
    own_work,
    share_backward,
    world,
)
from dlojz_tp.checks.zero_under_the_hood.stage1_held import held, measured, sending
from dlojz_tp.checks.zero_under_the_hood.stage1_truth import (
    CASES,
    DEFAULTS,
    SGD,
    STEPS,
    WORDS,
    local,
    moved_up,
    one_process,
    only_shards,
    reduced_instead,
    run,
    second_step,
    trained,
)
from dlojz_tp.checks.zero_under_the_hood.worlds import by_worlds
from dlojz_tp.probes.networks import Odd, same, state
from dlojz_tp.probes.ranks import each_rank
from dlojz_tp.probes.traffic import Traffic, counted_waits, sent
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "nothing-travels": "Rank {rank} sent nothing: each rank trains for itself. reduce() needs a reduce-scatter of the "
    "gradients, update() an all-gather of the parameters.",
    "not-gathered": "After step(), rank {rank} has updated its own shard, and the other shards are still the old ones. The "
    "shards of all ranks must be gathered into the flat tensor that the parameters are views of.",
    "views-lost": "The shards were updated, but the parameters of the model ({name}) do not follow: they are no "
    "views of what was gathered. Keep p.data a view of the flat tensor, and gather into that one.",
    "wrong-shard": "The gathered parameters are not those of the ranks in their order: is the shard of every rank its own "
    "one, shard(flat, rank, world_size)?",
    "sum-not-mean": "own.grad holds the sum over the ranks. The loss is a mean over the whole batch: divide by world_size.",
    "mean-divided-twice": "own.grad is the mean, divided by world_size once more.",
    "local-gradient": "own.grad on rank {rank} is a shard of its own gradient: the other ranks' rows do not count.",
    "no-shard-gradient": "After reduce(), own.grad of shard {k} is {found}. It must be the shard of the mean gradient, "
    "(n / world_size,), as the optimizer reads it there.",
    "wrong-shard-gradient": "After reduce(), the shards' gradients side by side are not the mean gradient.",
    "none-gradient": "A parameter that was not used has p.grad None: {error} It counts as zero.",
    "gradient-left-out": "A collective refused the sizes: {error}. The flat gradient must be as long as the flat parameters: "
    "what has no gradient counts as zero, at its place.",
    "gradients-pile-up": "The first step is right, the second is not: the gradient of the first is still in it. zero_grad() "
    "must free p.grad and own.grad.",
    "own-grad-left": "After zero_grad(), shard {k} still has its gradient. zero_grad() frees all gradients, those of the shards "
    "too: the next stage adds to what is there.",
    "grad-left": "After zero_grad(), {name} still has a gradient, if only of zeros. Set it to None: that gives its memory back, and "
    "the next stage takes a gradient that is there for a complete one.",
    "gradients-moved-up": "What has no gradient was skipped, and all gradients behind it moved up: they belong to other parameters now. "
    "It counts as zero, at its place.",
    "gather-not-awaited": "reduce() or update() returned on rank {rank} while a collective was still on its way. What was started with "
    "async_op=True must be waited for before its result is used.",
    "reduced-not-gathered": "After step() the parameters are {word} of those of all ranks. Each rank has updated another shard: gather "
    "the shards side by side, with an all-gather.",
    "optimizer-on-parameters": "self.optimizer was given parameters of the model. It must know each part's own and nothing else: is it "
    "\"params\" of every group that says so?",
    "fixed-world": "Right for 2 ranks, wrong for {size}: ask for the number of ranks.",
    "states-forgotten": "The second step is what an optimizer does in its first one. Make it once, in __init__, so that its "
    "states last.",
    "options-lost": "The options were not used: the weights are those of {word}. Hand **options on to optimizer_class.",
    "class-ignored": "optimizer_class was SGD, and the weights are AdamW's.",
    "group-options": "The second group has a learning rate and a weight decay of its own, and was trained with those of the "
    "first. A group is a dictionary: keep what it holds beside \"params\".",
    "first-group-only": "The parameters of the second group did not change. Every group needs its part.",
    "frozen-trained": "A frozen parameter changed. Leave out what has requires_grad False: weight decay would shrink it.",
    "weights-differ": "After {steps} steps the weights are not those of {word} in one process: {names}.",
    "states-whole": "This rank holds {found} elements of optimizer states, as many as one process would. It should update "
    "its shard only: {due} elements. Give the optimizer part.own, not the parameters.",
    "states-unequal": "This rank holds {found} elements of optimizer states; ⌈n / world_size⌉ for each group make {due}. "
    "Cut the flat tensor, not the list of parameters: then all shards are equally long.",
    "first-group-shared": "This rank holds {found} elements of optimizer states; ⌈n / world_size⌉ for each group make {due}. The "
    "first group is shared out, the second one is whole on every rank: each group needs its parts.",
    "hidden-copy": "After a step and zero_grad(), {found} bytes are alive; parameters and the states of one shard make "
    "{due}. A full copy is kept: of the parameters, the gradients, or the states.",
    "all-reduce-first": "A rank sent {found:.0f} bytes for {held} bytes of parameters: an all-reduce gives every rank the "
    "whole sum, of which it needs one shard. A reduce-scatter sends half of that.",
    "gathered-in-reduce": "After reduce(), own.grad is a whole gradient of {found} elements, not a shard of {due}.",
}  # fmt: skip
_SIZES = ("outputShape", "invalid tensor size", "must be equal to world_size")
KNOWN = (("NoneType", "none-gradient"), *((words, "gradient-left-out") for words in _SIZES))


def balise_3(ShardedOptimizer):  # noqa: N803
    """Three steps with AdamW, with groups, with SGD, on 1 to 4 ranks; then what is held, and what is sent."""
    looks = {
        "the gradients of an odd model: a shard of the mean on each rank": _each(_gradients),
        "the weights of AdamW in one process, after three steps: tied, frozen, unused parameters": _each(
            _weights, "adamw"
        ),
        "two groups with options of their own": _each(_weights, "groups"),
        "SGD in the place of AdamW": _each(_weights, "sgd"),
        "states for one shard only, and no full copy of anything besides the parameters": _each(held),
        "gradients are reduced to their shards, parameters gathered: 2Ψ, no more": each_rank(sending),
    }
    yield from by_worlds(looks, _on_rank, ShardedOptimizer, known=KNOWN)


def _each(look, *more):
    """A look at all worlds from a look at one."""
    return lambda worlds: [look(ranks, size, *more) for size, ranks in worlds.items()]


def _on_rank(ShardedOptimizer):  # noqa: N803
    (rank, size), found = world(), {}
    torch.set_num_threads(1)
    with own_work():
        for case, (arguments, options, _) in CASES.items():
            model = Odd(by_rank=case == "adamw")
            found[case] = _train(model, ShardedOptimizer(*arguments(model), **options), rank, size)
        found |= measured(ShardedOptimizer, rank, size)
    return found


def _train(model, optimizer, rank, size):
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        if step:
            found["left"] = [own.grad is not None for own in optimizer.shards]
            found["left whole"] = [name for name, p in model.named_parameters() if p.grad is not None]
        share_backward(model, step, rank, size)
        if step == 0:
            with Withheld() as withheld, Traffic() as log, counted_waits() as waits:
                optimizer.reduce()
                found["gradients"] = gradient_shards(optimizer)
                optimizer.update()
            found["waited"] = len(waits) >= len(sent(log.events))
            found["events"], found["first"] = log.events, state(model)
            withheld.left()
        else:
            optimizer.step()
        if step == 1:
            found["second"] = state(model)
    return found | {"last": state(model), "on own": only_shards(optimizer)}


def _gradients(ranks, size):
    """own.grad after the first reduce(), side by side, against the mean gradient in the order of the list."""
    truth = one_process("adamw", size)[0][0]
    order = list(dict.fromkeys(NAMES[k] for k in (0, 1, 3, 4, 5, 6, 7)))
    whole = torch.cat([truth[name].reshape(-1) for name in order])
    if size > 1:
        for rank, got in enumerate(ranks):
            if not sent(got["adamw"]["events"]):
                raise Wrong("nothing-travels", rank=rank, where=f"rank {rank} of {size}")
    for rank, got in enumerate(ranks):
        for k, gradient in enumerate(got["adamw"]["gradients"]):
            if gradient is None:
                raise Wrong("no-shard-gradient", k=k, found="None", where=f"rank {rank} of {size}")
    shards = [torch.cat([g.reshape(-1) for g in got["adamw"]["gradients"]]) for got in ranks]
    due = -(-len(whole) // size)
    if size > 1 and all(len(s) >= len(whole) for s in shards):
        raise Wrong("gathered-in-reduce", found=len(shards[0]), due=due, where=f"rank 0 of {size}")
    got = torch.cat(shards)[: len(whole)]
    if close(got, whole, 1e-6):
        return
    where = f"{size} ranks"
    if len(got) == len(whole):
        ordered = torch.sort(torch.cat(shards)[torch.cat(shards) != 0])[0]
        if close(ordered, torch.sort(whole[whole != 0])[0], 1e-9):
            return  # another order of the parameters is right, too
        if close(ordered, torch.sort(whole[whole != 0] * size)[0], 1e-9):
            raise Wrong("sum-not-mean", expected=whole, got=got, where=where)
        if close(ordered, torch.sort(whole[whole != 0] / size)[0], 1e-9):
            raise Wrong("mean-divided-twice", expected=whole, got=got, where=where)
        if close(ordered, torch.sort(whole[whole != 0] * (size / 2))[0], 1e-9):
            raise Wrong("fixed-world", size=size, expected=whole, got=got, where=where)
    _awaited(ranks, size, "adamw")
    for rank, mine in enumerate(shards):
        own = local(rank, size)
        values = torch.cat([own[name].reshape(-1) for name in order])
        place = values[rank * due : (rank + 1) * due]
        if any(close(mine[: len(place)], place / k, 1e-9) for k in (1, size)):
            raise Wrong("local-gradient", rank=rank, expected=whole, got=got, where=f"rank {rank} of {size}")
    raise Wrong("wrong-shard-gradient", expected=whole, got=got, where=where)


def _awaited(ranks, size, case):
    for rank, got in enumerate(ranks):
        if not got[case]["waited"]:
            raise Wrong("gather-not-awaited", rank=rank, where=f"rank {rank} of {size}")


def _weights(ranks, size, case):
    truth = one_process(case, size)[1]
    for rank, got in enumerate(ranks):
        steps = next((n for n, name in ((STEPS, "last"), (1, "first")) if not same(got[case][name], truth[n])), 0)
        if steps:
            _awaited(ranks, size, case)
            slug, fields = _mistake(ranks, size, case, rank)
            found = got[case]["last" if steps == STEPS else "first"]
            names = differing(found, truth[steps])
            fields = {"rank": rank, "names": ", ".join(names[:4]), "name": names[0], "steps": steps} | fields
            fields.setdefault("word", "SGD" if case == "sgd" else "AdamW")
            fields |= {"expected": truth[steps][names[0]], "got": found.get(names[0])}
            raise Wrong(slug, where=f"rank {rank} of {size}, {names[0]}, {WORDS[case]}", **fields)


def _mistake(ranks, size, case, rank):
    truth, got = one_process(case, size)[1], ranks[rank][case]
    start, first = truth[0], got["first"]
    if not same(first["frozen"], start["frozen"]):
        return "frozen-trained", {}
    if not got["on own"]:
        return "optimizer-on-parameters", {}
    if same(got["last"], start):
        return "views-lost", {}
    if case == "groups":
        rest = ("first.bias", "scale", "extra")
        if all(same(got["last"][name], start[name]) for name in rest):
            return "first-group-only", {}
        if all(same(first[n], truth[1][n]) for n in ("first.weight", "tied", "turned")):
            return "group-options", {}
    if case == "sgd" and same(got["last"], run(case, lambda m: torch.optim.AdamW(trained(m), lr=SGD["lr"]), size)):
        return "class-ignored", {}
    for word, optimizer_of in DEFAULTS[case].items():
        if optimizer_of and same(got["last"], run(case, optimizer_of, size)):
            return "options-lost", {"word": word}
    if same(first, truth[1]):
        return second_step(got, size, case), {}
    if case == "adamw" and moved_up(ranks, size):
        return "gradients-moved-up", {}
    if size > 1:
        if word := reduced_instead([r[case]["first"] for r in ranks], start, truth[1], size):
            return "reduced-not-gathered", {"word": word}
        if left_behind(first, start, truth[1]):
            return "not-gathered", {}
        right = sum(int(torch.isclose(first[n], truth[1][n], atol=1e-9).sum()) for n in NAMES if n != "unused")
        moved = sum(int((truth[1][n] != start[n]).sum()) for n in NAMES)
        if moved / (2 * size) < right < moved:
            return "wrong-shard", {}
    return "weights-differ", {}
