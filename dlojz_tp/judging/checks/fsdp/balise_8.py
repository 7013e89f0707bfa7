"""Balise 8: gradients accumulated over micro-batches with one exchange a step."""

import functools
import math
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from dlojz_tp import launch
from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most, silent
from dlojz_tp.judging.checks.fsdp.common import claimed, judged_by_worlds, of_each, on_each
from dlojz_tp.judging.probes import ranks
from dlojz_tp.judging.probes.gpus import MIXED, on_gpus
from dlojz_tp.judging.probes.shared_looks import each_rank
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.models import Llama, LlamaConfig, language_loss

CONFIG = LlamaConfig(vocab_size=23, width=12, heads=2, kv_heads=1, layers=2, max_length=8, ffn_width=20)
CASES = {"even": (2, 2, 2), "uneven": (3, 1), "one": (3,)}  # sequences of each micro-batch
SEEN = {4: ("uneven",), 3: ("even",), 2: ("even", "uneven"), 1: ("uneven", "one")}  # in which world
TWICE = "uneven"  # this one is called twice, then followed by a plain backward
GROUPS = CONFIG.layers + 1
RATE = 0.5
CLOSE = 1e-6  # a share such as 1/3 may have been a float32 on its way


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
    """On a rank: of each case weights, loss and traffic of two calls, and the traffic of a plain backward after."""
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
                loss = accumulate(model, _micro_batches(rank, case, call), optimizer)
            if call == 0:
                seen["reduced"], seen["steps"], seen["batches"] = _reduced(traffic), len(steps), list(batches)
                seen["open"] = max((alive.before for alive in graphs), default=0)
                seen["graph"] = isinstance(loss, torch.Tensor) and loss.requires_grad
                seen["loss"] = loss if loss is None else _number(loss)
            seen["last"] = all(alive.last for alive in graphs[-1:])
            seen["weights"].append([p.to_local().detach().clone() for p in model.parameters()])
        if case != TWICE:
            continue
        with Traffic() as traffic:
            language_loss(model, _micro_batches(rank, "one")[0]).backward()
        seen["after"] = _reduced(traffic)
    return found


def _number(loss):
    """A float, or what it is in the place of a number."""
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        return loss.detach() if isinstance(loss, torch.Tensor) else loss


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


def _of(case, key):
    return of_each(lambda found: found[case][key])


def _weights_looks(size, case):
    """At the weights of all ranks after one call, and where there is one, after a second."""
    n = len(CASES[case])

    def see(ranks):
        calls = zip(*(found[case]["weights"] for found in ranks))
        return ranks[0][case], [[torch.cat(parts) for parts in zip(*shards)] for shards in calls]

    def is_truth(weights, calls=1, how="right", tol=CLOSE):
        return close(weights, _truth(size, case, calls, how), tol)

    def mistake(seen, _):
        found, (first, *_) = seen
        if is_truth(first, 0, tol=1e-12):
            return "never-reduced" if found["steps"] and (size == 1 or not found["reduced"]) else "no-update"
        if n > 1 and not found["reduced"] and size > 1:
            return "never-reduced"
        known = {"losses-added": "sum", "mean-of-means": "mean of means"} if n > 1 else {}
        known |= {"averaged-twice": "twice"} if size > 1 else {}
        return next((slug for slug, how in known.items() if is_truth(first, how=how)), "accumulated-wrongly")

    def again(seen, _):
        return "old-gradients-kept" if seen[0]["after"] or size == 1 else "sync-left-off"

    def fields(seen, _):
        return {"n": n, "expected": _truth(size, case, 1)[0], "got": seen[1][0][0], "where": _where(size, case)}

    return [
        Look("", lambda ranks: ranks[0][case]["steps"], 1, "updates-between", holds=at_most,
             fields="found"),
        Look("", see, 1, mistake, holds=lambda seen, _: is_truth(seen[1][0]), fields=fields),
        Look("", see, 2, again, holds=lambda seen, _: len(seen[1]) == 1 or is_truth(seen[1][1], 2), fields=silent),
    ]  # fmt: skip


def _where(size, case):
    return f"{size} ranks, micro-batches of {', '.join(map(str, CASES[case]))} sequences"


def _traffic_looks(size, case):
    n = len(CASES[case])

    def together(found):
        batches, due = found[case]["batches"], f"{list(CASES[case])} sequences, one after another"
        wrong = 0 < len(batches) < n or found[case]["open"]
        return wrong and ("one-large-batch", {"expected": due, "got": batches})

    def around(found):
        batches, due = found[case]["batches"], sorted(CASES[case])
        told = {"expected": due, "got": batches, "found": len(batches), "n": n}
        return sorted(batches) != due and ("around-the-shards", told)

    def often(found):
        reduced, batches = found[case]["reduced"], found[case]["batches"]
        if len(reduced) <= GROUPS:
            return None
        root = reduced.count(min(reduced))  # its group is the smallest
        alone = root == 1 and len(reduced) == len(batches) * CONFIG.layers + 1
        told = {"expected": GROUPS, "found": len(reduced), "n": n, "groups": GROUPS}
        return "root-told-alone" if alone else "reduced-each-time", told

    looks = [on_each("", together), on_each("", around)]
    if size == 1:  # nobody to exchange with
        return looks
    return [
        *looks,
        on_each("", often),
        each_rank("", _of(case, "last"), True, "never-last", fields=silent),
        each_rank("", of_each(lambda found: len(found[case].get("after", range(GROUPS)))), GROUPS, "sync-left-off",
                  holds=lambda got, least: got >= least),
    ]  # fmt: skip


def _losses(rank, case):
    """[(loss of a micro-batch, its share)]"""
    model, total = _model(), sum(CASES[case])
    return [(language_loss(model, tokens).item(), len(tokens) / total) for tokens in _micro_batches(rank, case)]


def _loss_looks(size, case):
    def due(size):
        return [sum(loss * share for loss, share in _losses(rank, case)) for rank in range(size)]

    def first(seen, due):
        pairs = enumerate(zip(seen, due))
        return next(((k, *pair) for k, pair in pairs if not math.isclose(*pair, rel_tol=1e-5)), None)

    def mistake(seen, due):
        rank, got, _ = first(seen, due)
        loss, share = _losses(rank, case)[-1]
        last = any(math.isclose(got, one, rel_tol=1e-5) for one in (loss, loss * share))
        return "loss-of-last" if last else "wrong-mean-loss"

    def fields(seen, due):
        rank, got, wanted = first(seen, due)
        return {"expected": wanted, "got": got, "where": f"rank {rank} of {_where(size, case)}"}

    return [
        each_rank("", _of(case, "loss"), True, "nothing-returned", holds=lambda got, _: got is not None, fields=silent),
        each_rank("", _of(case, "graph"), False, "loss-with-graph", fields=silent),
        each_rank("", _of(case, "loss"), 0.0, "loss-not-a-number", holds=lambda got, _: isinstance(got, float),
                  fields={"expected": ""}),
        Look("", _of(case, "loss"), due, mistake, holds=lambda *both: first(*both) is None, fields=fields),
    ]  # fmt: skip


def _looks(size):
    cases = SEEN[size]
    unequal = [look for case in cases if case != "even" for look in _weights_looks(size, case)]
    return [
        *claimed("one step equals a step of one process on the whole batch",
                 _weights_looks(size, "even") if "even" in cases else []),
        *claimed("the same where the last micro-batch is smaller", unequal),
        *claimed("one micro-batch after another, gradients exchanged once per step, with the last one",
                 [look for case in cases for look in _traffic_looks(size, case)]),
        *claimed("the loss of this rank comes back", [look for case in cases for look in _loss_looks(size, case)]),
    ]  # fmt: skip


def balise_8(accumulate):
    """Even and uneven micro-batches in worlds of 1 to 4, two calls each, then a plain backward."""
    known = (("has no attribute 'no_sync'", "no-sync-is-ddp"),)
    yield from judged_by_worlds(_looks, _accumulated, accumulate, sizes=ranks.SIZES, known=known)
    yield "and where each of two ranks has a GPU"
    on_gpus(_on_gpu, accumulate, known=((MIXED, "total-not-on-gpu"),))
