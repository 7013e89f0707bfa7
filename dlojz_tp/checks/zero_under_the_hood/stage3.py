"""Balise 5: parameters that a rank holds only while their layer computes."""

import math
from functools import cache

import torch

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.zero_under_the_hood.common import ADAMW, differing, optimizers, own_work, rows, states_held, world
from dlojz_tp.checks.zero_under_the_hood.layers import BYTES, DEPTH, LAYER, TRAINED, WIDTH, Deep, Layers
from dlojz_tp.checks.zero_under_the_hood.outside import no_copy
from dlojz_tp.checks.zero_under_the_hood.unit import small, sound
from dlojz_tp.checks.zero_under_the_hood.worlds import by_worlds
from dlojz_tp.probes.memory import Memory, held_bytes
from dlojz_tp.probes.networks import same
from dlojz_tp.probes.outside import Outside
from dlojz_tp.probes.ranks import each_rank
from dlojz_tp.probes.traffic import Traffic, on_the_wire, sent

STEPS = 3
SLACK = 6000  # bytes: activations of one row, single numbers

HINTS = {
    "empty-in-forward": "In forward, a layer met parameters that are not there ({error}). gather() must run before the layer "
    "computes, and leave p.data the views of the filled flat tensor.",
    "empty-in-backward": "Forward works; in backward, parameters were not there ({error}). The layer needs them again: "
    "gather in a hook of register_full_backward_pre_hook.",
    "freed-memory-read": "A rank crashed reading memory that was freed ({error}). A layer computed while its unit was not "
    "gathered: before forward, or again before backward?",
    "tied-missing": "The layer whose weight is tied to another layer's met an empty parameter ({error}). It has no unit of its "
    "own, but it must gather the one that holds the weight.",
    "stale-parameters": "After the first step, forward still sees the old parameters ({names}): gather() must fetch the shards "
    "again after each update.",
    "frozen-decayed": "The frozen parameter changed. It belongs into a unit of its own, unknown to the optimizer: weight decay "
    "would shrink it.",
    "frozen-known": "The optimizer was given the shard of a frozen layer. It has nothing to do there: keep such a unit in self.frozen, "
    "and give the optimizer the shards of self.parts.",
    "unused-moved": "A parameter that was not used came out wrong, or those of its layer did ({names}). Its layer's gradients "
    "are never complete: reduce() sends what backward left, zeros for the missing ones.",
    "stage3-local": "Nothing was reduced: each rank updates its shards with its own gradient.",
    "never-freed": "Between two steps this rank holds {found} bytes: its shards with their states make {due}, the whole model "
    "{whole}. The parameters were never freed: free() in a forward hook, and when the gradients have left.",
    "some-never-freed": "Between two steps {layers} of {of} layers are still gathered on this rank. Each layer is freed when it is "
    "done, the first and the last ones too.",
    "frozen-whole": "The frozen layer is held whole. It is memory like any other: a unit that is gathered and freed, without "
    "a place in the optimizer.",
    "memory-not-returned": "p.data was emptied, and {found} bytes are alive all the same: the flat tensor, or the graph, still "
    "holds the memory. untyped_storage().resize_(0) gives it back, whoever else looks at it.",
    "all-at-once": "In forward, {found} bytes of parameters were there at once: {layers} layers of {of}. Gather a "
    "layer just before it computes, free it just after.",
    "kept-after-forward": "After forward, {layers} of {of} layers are still gathered. Free each in a forward hook; backward "
    "gathers it again.",
    "kept-in-backward": "In backward, {found} bytes more than the shards were alive at the peak, of {whole} for the whole model: "
    "a layer must be freed as soon as its gradients have left.",
    "frozen-kept": "In backward, frozen layers stay gathered. They get no gradient, so send() never frees them: free them when the "
    "backward of another layer begins, and the last ones in reduce().",
    "kept-after-backward": "After reduce(), {layers} of {of} layers are still gathered. send() is where a layer's gradients are "
    "complete: its parameters are not needed any more.",
    "gathered-after-update": "After update(), the whole model is there again. In stage 3 nothing is gathered before a "
    "layer is used.",
    "gathered-often": "A rank sent {found:.0f} bytes for {held} bytes of parameters. Each layer is gathered once for forward and "
    "once for backward, and its gradients are reduce-scattered once.",
    "states-not-shared": "This rank holds {found} elements of optimizer states, {due} are due: give the optimizer the units' "
    "own shards.",
}  # fmt: skip
_EMPTY = ("not allocated", "setStorage", "size mismatch", "shape", "must match", "invalid for input", "out of bounds",
          "must be a matrix", "2-D", "dimension", "size of tensor")  # fmt: skip


KNOWN = (
    ("SIGSEGV", "freed-memory-read"),
    ("tied weight", "tied-missing"),
    (("setStorage", "in update"), "gathered-after-update"),
    ("_Failed: forward", "empty-in-forward"),
    ("_Failed: backward", "empty-in-backward"),
)


class _Failed(Exception):  # noqa: N818
    """Forward or backward failed for want of parameters."""


def balise_5(Unit, ShardedParameters):  # noqa: N803
    """Three steps of five odd layers; then what is alive between steps, in forward and in backward."""
    looks = {
        "what forward sees, after three steps: the weights of AdamW in one process": each_rank(_numbers),
        "between steps: this rank's shards and their states, nothing else": each_rank(_between),
        "in forward and in backward: one layer at a time": each_rank(_inside),
        "two all-gathers and one reduce-scatter of everything: 3Ψ, no more": each_rank(_sent),
    }
    yield from by_worlds(looks, _on_rank, Unit, ShardedParameters, known=KNOWN)


def _sent(got, size, where):
    if (cost := on_the_wire(got["events"])) > 1.15 * (2 * BYTES + TRAINED) * (size - 1) / size + 500:
        raise Wrong("gathered-often", found=cost, held=BYTES, where=where)


def _on_rank(Unit, ShardedParameters):  # noqa: N803
    rank, size = world()
    torch.set_num_threads(1)
    with own_work():
        model, found = Layers(), {"small": _tried("forward", lambda: small(Unit, ShardedParameters))}
        before = _bytes_of(model.fixed)
        optimizer = ShardedParameters(model.layers(), **ADAMW)
        found["fixed"] = before, _bytes_of(model.fixed)
        fixed = {id(unit.own) for unit in [*optimizer.parts, *optimizer.frozen] if not unit.parameters[0].requires_grad}
        found["knows"] = any(id(p) in fixed for group in optimizer.optimizer.param_groups for p in group["params"])
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2 if step == 1 else 1):  # the second step has two backward passes
                x = rows(10 * step + part)[rank::size]
                _backward(_forward(model, x))
            if step == 2:
                optimizer.reduce()
                optimizer.update()
            else:
                optimizer.step()
            found[step + 1] = _tried("forward", lambda: model.look(rows(0)))
        optimizer.zero_grad()
        return found | _measured(ShardedParameters, rank, size)


def _bytes_of(module):
    return {p.untyped_storage().nbytes() for p in module.parameters()}


def _forward(model, x):
    return _tried("forward", lambda: model(x))


def _backward(loss):
    _tried("backward", loss.backward)


def _tried(what, work):
    try:
        return work()
    except RuntimeError as error:
        text = str(error).split("\n")[0][:120]
        if any(word in str(error) for word in _EMPTY):
            raise _Failed(f"{what}: {text}") from error
        raise


def _measured(ShardedParameters, rank, size):  # noqa: N803
    before, model, most = optimizers(), Deep(), _most(size)
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None] + rank
    with Outside(BYTES, on=size == 2) as outside, Memory(*model.parameters()) as memory:
        optimizer = ShardedParameters(list(model.layers), **ADAMW)
        made = memory.now()
        for step in range(2):
            optimizer.zero_grad()
            between, full_between = max(memory.settled(most["between"]), held_bytes(optimizer)), model.full()
            memory.reset()
            with Traffic() as log:
                loss = _forward(model, x)
                in_forward, full = memory.peak, model.full()
                after_forward = memory.settled(between + most["after forward"])
                memory.reset()
                _backward(loss)
                in_backward, full_backward = memory.peak, model.full()
                del loss
                optimizer.reduce()
                reduced, full_reduced = memory.settled(between + most["reduced"]), model.full()
                optimizer.update()
                updated = memory.settled(between + most["reduced"]) if step else 0  # the first one makes the states
        optimizer.zero_grad()
        found = {
            "made": made, "between": between, "in forward": in_forward, "after forward": after_forward,
            "in backward": in_backward, "reduced": reduced, "updated": updated,
        }  # fmt: skip
    found |= {
        "full": sum(full),
        "full reduced": sum(full_reduced),
        "full between": full_between,
        "full after backward": full_backward,
    }
    return found | {"outside": outside.kept, "events": log.events, "states": states_held(before, TRAINED // 8)}


@cache
def _truth(size):
    """Parameters as forward sees them after each step, one process."""
    model, found = Layers(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    found.append(model.look(rows(0)))
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2 if step == 1 else 1):
            for rank in range(size):
                (model(rows(10 * step + part)[rank::size]) / size).backward()
        model.partly.unused.grad = torch.zeros_like(model.partly.unused)
        optimizer.step()
        found.append(model.look(rows(0)))
    return found


def _numbers(got, size, where):
    truth = _truth(size)
    for step in range(1, STEPS + 1):
        names = differing(got[step], truth[step])
        if not names:
            continue
        fields = {"names": ", ".join(names[:4]), "expected": truth[step][names[0]], "got": got[step].get(names[0])}
        frozen = ("mixed.weight", "fixed.weight", "fixed.bias")
        slug = "weights-differ"
        if any(name in frozen for name in names) and any(not same(got[1][n], truth[0][n]) for n in frozen):
            slug = "frozen-decayed"
        elif all(same(got[step][name], truth[0][name]) for name in names):
            if not all(same(got[step][name], truth[0][name]) for name in truth[0]):
                _inside(got, size, where)  # some are old: they were not freed
            slug = "stale-parameters"
        elif all(name.startswith("partly") for name in names):
            slug = "unused-moved"
        elif size > 1 and not [e for e in sent(got["events"]) if "all_gather" not in e[0] and e[0] != "broadcast"]:
            slug = "stage3-local"
        elif step == 2:
            slug = "second-backward"
        if size > 1 and slug in ("weights-differ", "frozen-decayed") and not got["small"]["calls"][0]:
            slug, fields["rank"] = "gathers-nothing", int(where.split()[1])
        raise Wrong(slug, where=f"{where}, {names[0]} after step {step}", steps=step, word="AdamW", **fields)


def _most(size) -> dict[str, float]:
    """Bytes that may be alive: between two steps; after forward and after reduce(), besides those."""
    if size == 1:
        return dict.fromkeys(("between", "after forward", "reduced"), math.inf)  # one rank alone holds all
    shard, gradients = -(-BYTES // size) + 8 * DEPTH, -(-TRAINED // size) + 8 * DEPTH
    return {
        "between": 2 * shard + 2 * LAYER + SLACK / 2,  # the parameters, and two moments of those that are trained
        "after forward": 2.5 * LAYER + SLACK,
        "reduced": gradients + 1.5 * LAYER + SLACK / 2,
    }


def _between(got, size, where):
    if size == 1:
        return
    shard = -(-BYTES // size) + 8 * DEPTH
    due = 2 * shard
    fields = {"found": got["between"], "due": due, "whole": BYTES, "where": where}
    before, after = got["fixed"]
    if after == before and not got["full between"][0]:
        raise Wrong("frozen-whole", **fields)
    if got["knows"]:
        raise Wrong("frozen-known", where=where)
    if got["states"] >= 2 * TRAINED // 8:
        raise Wrong("states-not-shared", **(fields | {"found": got["states"], "due": shard // 8}))
    trained, frozen = got["full between"]
    if got["made"] > shard + 2 * LAYER + SLACK or got["between"] > _most(size)["between"]:
        slug = "never-freed" if trained > 3 else "frozen-kept" if frozen > 3 else "memory-not-returned"
        if got["updated"] > got["reduced"] + TRAINED / 2:
            slug = "gathered-after-update"
        raise Wrong(slug, **fields)
    if trained or frozen:
        raise Wrong("some-never-freed", layers=trained + frozen, of=DEPTH, where=where)
    no_copy(got["outside"], BYTES, where)


def _inside(got, size, where):
    if size == 1:
        return
    shard = -(-TRAINED // size) + 8 * DEPTH  # of the gradients
    base, allowed = got["between"], _most(size)

    def check(slug, alive, most, layers_off=0):
        if alive - base > most:
            found = alive - base
            layers = min(DEPTH, round((found - layers_off) / LAYER))
            raise Wrong(slug, found=found, whole=BYTES, due=4 * shard, layers=layers, of=DEPTH, where=where)

    if not got["full"]:
        check("memory-not-returned", got["after forward"], allowed["after forward"])
    check("kept-after-forward", got["after forward"], allowed["after forward"])
    if got["full"] > 1:  # the last one may stay: backward begins with it
        raise Wrong("kept-after-forward", layers=got["full"], of=DEPTH, where=where)
    check("all-at-once", got["in forward"], 3.5 * LAYER + SLACK)
    trained, frozen = got["full after backward"]
    slug = "frozen-kept" if frozen > 2 >= trained else "kept-in-backward"
    check(slug, got["in backward"], shard + 6 * LAYER + SLACK / 2, shard)
    slug = "frozen-kept" if frozen > 2 >= trained else "kept-after-backward"
    check(slug, got["reduced"], allowed["reduced"], shard)
    if got["full reduced"]:
        raise Wrong("kept-after-backward", layers=got["full reduced"], of=DEPTH, where=where)
    check("gathered-after-update", got["updated"], allowed["reduced"], shard)
    sound(got["small"], where)
