"""Balise 8: gradients accumulated over micro-batches with one exchange a step."""

import functools
import math
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close
from dlojz_tp.models import Llama, LlamaConfig, language_loss
from dlojz_tp.probes.gpus import MIXED, on_gpus
from dlojz_tp.probes.ranks import by_worlds
from dlojz_tp.probes.traffic import Traffic

HINTS = {
    "no-sync-is-ddp": "no_sync() belongs to DDP. A sharded module has set_requires_gradient_sync(True or False) instead.",
    "reduced-each-time": "{found} reduce-scatters for {n} micro-batches and {groups} groups. Exchange gradients "
    "only with the last micro-batch: {groups}.",
    "root-told-alone": "{found} reduce-scatters: you turned the exchange off for the root only, so the blocks "
    "exchanged each time. Leave recurse as it is.",
    "never-reduced": "No gradient was exchanged. For the last micro-batch, turn the exchange on again before its "
    "backward.",
    "sync-left-off": "After accumulate, a plain backward no longer exchanges anything: the switch was left off.",
    "never-last": "The last backward ran with set_is_last_backward(False): nothing waits for its exchange, so on a "
    "GPU the optimizer may read gradients that aren't there yet.",
    "one-large-batch": "The micro-batches went through the model together, or were kept for a single backward: all "
    "their activations are in memory at once, which accumulation is meant to avoid.",
    "around-the-shards": "The forward of the sharded model was called {found} times for {n} micro-batches.",
    "losses-added": "The gradients are {n} times too large: they add up over the micro-batches. Weight each loss "
    "by its share.",
    "mean-of-means": "This is right for equal micro-batches and wrong when one is smaller: weight each loss by its "
    "number of sequences.",
    "averaged-twice": "The gradients are too small by a factor of the number of ranks: fully_shard already "
    "averages over the ranks.",
    "updates-between": "The optimizer made {found} steps. Make one, after the last micro-batch.",
    "no-update": "The weights didn't change. Do you call optimizer.step()?",
    "old-gradients-kept": "The first call is right, the second isn't: gradients of the previous call were still there.",
    "accumulated-wrongly": "The weights differ from those of one step on the whole batch of all ranks.",
    "loss-not-a-number": "Return this rank's loss, the mean over all its micro-batches: a tensor of one number, or a float.",
    "loss-with-graph": "The returned loss is still attached to its graph, which keeps the activations: detach it.",
    "loss-of-last": "That is the loss of the last micro-batch, not the mean over all of them.",
    "total-not-on-gpu": "On GPUs, a sum is in the CPU's memory: {error}. total += loss writes into total, where "
    "total is: create it on the loss's device, or start with a plain 0.0.",
    "wrong-mean-loss": "That isn't the mean loss over all micro-batches of this rank.",
}

CONFIG = LlamaConfig(vocab_size=23, width=12, heads=2, kv_heads=1, layers=2, max_length=8, ffn_width=20)
CASES = {"even": (2, 2, 2), "uneven": (3, 1), "one": (3,)}  # sequences of each micro-batch
SEEN = {4: ("uneven",), 3: ("even",), 2: ("even", "uneven"), 1: ("uneven", "one")}  # in which world
TWICE = "uneven"  # this one is called twice, then followed by a plain backward
GROUPS = CONFIG.layers + 1
RATE = 0.5
CLOSE = 1e-6  # a share such as 1/3 may have been a float32 on its way


def balise_8(accumulate):
    """Even and uneven micro-batches in worlds of 1 to 4, two calls each, then a plain backward."""
    looks = {
        "one step equals a step of one process on the whole batch": partial(_weights, ("even",)),
        "the same where the last micro-batch is smaller": partial(_weights, ("uneven", "one")),
        "one micro-batch after another, gradients exchanged once per step, with the last one": partial(
            _each, _right_traffic
        ),
        "the loss of this rank comes back": partial(_each, _right_loss),
    }
    yield from by_worlds(looks, _accumulated, accumulate, timeout=30)
    yield "and where each of two ranks has a GPU"
    on_gpus(_on_gpu, accumulate, known=((MIXED, "total-not-on-gpu"),))


def _weights(cases, worlds):
    for case in cases:
        for size, ranks in worlds.items():
            if case in SEEN[size]:
                _right_weights(size, [found[case] for found in ranks], case)


def _each(look, worlds):
    for size, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            for case in SEEN[size]:
                look(size, rank, found[case], case)


def _model():
    torch.manual_seed(3)
    return Llama(CONFIG).double()


def _micro_batches(rank, case, call=0):
    tokens = torch.randint(23, (sum(CASES[case]), 6), generator=torch.Generator().manual_seed(50 * call + rank))
    return list(tokens.split(CASES[case]))


def _on_gpu(_, accumulate):
    model = _model().to(launch.device())
    for block in model.blocks:
        fully_shard(block)
    optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=RATE)
    accumulate(model, [tokens.to(launch.device()) for tokens in _micro_batches(dist.get_rank(), "uneven")], optimizer)


def _accumulated(accumulate):
    """On a rank: for each case weights, loss and traffic of two calls, and the traffic of a plain backward after them."""
    rank, found = dist.get_rank(), {}
    for case in SEEN[dist.get_world_size()]:
        model = _model()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        steps, batches, graphs, told = [], [], [], [True]
        model.set_is_last_backward = partial(_told, told, model.set_is_last_backward)
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        model.register_forward_pre_hook(lambda _, args, seen=batches: seen.append(len(args[0])))
        model.head.register_forward_hook(lambda _, __, out, g=graphs, t=told: g.append(_Alive(out, t)))
        seen = found[case] = {"weights": []}
        for call in range(1 + (case == TWICE)):
            with Traffic() as traffic:
                try:
                    loss = accumulate(model, _micro_batches(rank, case, call), optimizer)
                except AttributeError as error:
                    if "no_sync" in str(error):
                        raise Wrong("no-sync-is-ddp", got=str(error)) from error
                    raise
            if call == 0:
                seen["reduced"], seen["steps"], seen["batches"] = _reduced(traffic), len(steps), list(batches)
                seen["open"] = max((alive.before for alive in graphs), default=0)
                seen["graph"] = isinstance(loss, torch.Tensor) and loss.requires_grad
                seen["loss"] = loss.detach() if isinstance(loss, torch.Tensor) else loss
            seen["last"] = all(alive.last for alive in graphs[-1:])
            seen["weights"].append([p.to_local().detach().clone() for p in model.parameters()])
        if case != TWICE:
            continue
        with Traffic() as traffic:
            language_loss(model, _micro_batches(rank, "one")[0]).backward()
        seen["after"] = _reduced(traffic)
    return found


def _told(told, tell, is_last_backward):
    told.append(is_last_backward)
    tell(is_last_backward)


class _Alive:
    """Knows how many logits of earlier micro-batches still waited for their backward when these were made."""

    waiting = 0

    def __init__(self, logits, told):
        self.told, self.last = told, True
        self.before = _Alive.waiting
        _Alive.waiting += logits.requires_grad
        if logits.requires_grad:
            logits.register_hook(self._done)

    def _done(self, _gradient):
        _Alive.waiting -= 1
        self.last = self.told[-1]


def _reduced(traffic):
    """Bytes handed in by each reduce-scatter."""
    return [call.bytes for call in traffic.calls if call.name == "reduce_scatter"]


@functools.cache
def _truth(size, case, calls, how="right"):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    n, total = len(CASES[case]), sum(CASES[case])
    for call in range(calls):
        optimizer.zero_grad()
        for rank in range(size):
            for tokens in _micro_batches(rank, case, call):
                share = {
                    "right": len(tokens) / total,
                    "mean of means": 1 / n,
                    "sum": 1.0,
                    "twice": len(tokens) / total / size,
                }
                (language_loss(model, tokens) * share[how] / size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _right_weights(size, ranks, case):
    n = len(CASES[case])
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}, micro-batches of {', '.join(map(str, CASES[case]))} sequences"
        if found["steps"] > 1:
            raise Wrong("updates-between", expected=1, got=found["steps"], where=where, found=found["steps"])
        first, *second = (
            [torch.cat(parts) for parts in zip(*shards)] for shards in zip(*(r["weights"] for r in ranks))
        )
        wanted = _truth(size, case, 1)
        if close(first, wanted, CLOSE):
            if not second or close(second[0], _truth(size, case, 2), CLOSE):
                return
            slug = "old-gradients-kept" if found["after"] or size == 1 else "sync-left-off"
            raise Wrong(slug, where=f"{where}, second call")
        if close(first, _truth(size, case, 0), 1e-12):
            slug = "never-reduced" if found["steps"] and (size == 1 or not found["reduced"]) else "no-update"
        elif n > 1 and not found["reduced"] and size > 1:
            slug = "never-reduced"
        elif n > 1 and close(first, _truth(size, case, 1, "sum"), CLOSE):
            slug = "losses-added"
        elif n > 1 and close(first, _truth(size, case, 1, "mean of means"), CLOSE):
            slug = "mean-of-means"
        elif size > 1 and close(first, _truth(size, case, 1, "twice"), CLOSE):
            slug = "averaged-twice"
        else:
            slug = "accumulated-wrongly"
        raise Wrong(slug, expected=wanted[0], got=first[0], where=where, n=n)


def _right_traffic(size, rank, found, case):
    n, sizes = len(CASES[case]), list(CASES[case])
    where = f"rank {rank} of {size}, {n} micro-batches"
    if found["batches"] and len(found["batches"]) < n or found["open"]:
        raise Wrong(
            "one-large-batch", expected=f"{sizes} sequences, one after another", got=found["batches"], where=where
        )
    if sorted(found["batches"]) != sorted(sizes):
        raise Wrong("around-the-shards", where=where, found=len(found["batches"]), n=n)
    if size == 1:
        return  # nobody to exchange with
    count = len(found["reduced"])
    if count > GROUPS:
        root = found["reduced"].count(min(found["reduced"]))  # its group is the smallest
        slug = "root-told-alone" if root == 1 and count == n * CONFIG.layers + 1 else "reduced-each-time"
        raise Wrong(slug, expected=GROUPS, got=count, where=where, found=count, n=n, groups=GROUPS)
    if not found["last"]:
        raise Wrong("never-last", where=where)
    if "after" in found and len(found["after"]) < GROUPS:
        raise Wrong("sync-left-off", expected=GROUPS, got=len(found["after"]), where=where)


def _right_loss(size, rank, found, case):
    where = f"rank {rank} of {size}, micro-batches of {', '.join(map(str, CASES[case]))} sequences"
    loss = found["loss"]
    if loss is None:
        raise Wrong("nothing-returned", where=where)
    if found["graph"]:
        raise Wrong("loss-with-graph", where=where)
    try:
        loss = float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Wrong("loss-not-a-number", got=loss, where=where) from error
    model, batches = _model(), _micro_batches(rank, case)
    losses = [language_loss(model, tokens).item() for tokens in batches]
    wanted = sum(one * len(tokens) for one, tokens in zip(losses, batches)) / sum(CASES[case])
    if not math.isclose(loss, wanted, rel_tol=1e-5):
        share = len(batches[-1]) / sum(CASES[case])
        last = any(math.isclose(loss, losses[-1] * factor, rel_tol=1e-5) for factor in (1, share))
        slug = "loss-of-last" if last else "wrong-mean-loss"
        raise Wrong(slug, expected=wanted, got=loss, where=where)
