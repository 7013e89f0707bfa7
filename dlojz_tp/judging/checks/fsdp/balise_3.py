"""Balise 3: blocks that keep only their input and run again in backward, sharded."""

import copy

import torch.distributed as dist

from dlojz_tp.judging.checking.looks import silent
from dlojz_tp.judging.checks.fsdp import common, watched
from dlojz_tp.judging.checks.fsdp.common import of_each
from dlojz_tp.judging.probes.shared_looks import each_rank


def _runs(report):
    """Of each block, how often its attention and its feed-forward run again."""
    again, blocks = report["again"], range(len(report["grouped"]))
    return [(again.get(f"attention {index}", 0), again.get(f"feed-forward {index}", 0)) for index in blocks]


def _cut_off(report):
    """The first block's parameter without a gradient, if any."""
    return next((name for name in report["no gradient"] if name.startswith("blocks.0.")), "")


def _part(runs, _):
    index, run = next((index, run) for index, run in enumerate(runs) if run[0] != run[1])
    return {"index": index, "expected": "", "got": "the attention" if run[0] else "the feed-forward"}


def _twice(runs, _):
    index, run = next((index, run) for index, run in enumerate(runs) if run[0] > 1)
    return {"index": index, "expected": "", "got": run[0]}


def _bytes(got, _):
    return {"expected": f"at most {got[1]:.0f} bytes", "got": f"{got[0]} bytes"}


def _results(got, _):
    return {"expected": f"{got[1]:.0f} products in backward", "got": f"{got[0]}: results were kept"}


def _found(report):
    """The blocks that run again; None where the first one is cut off."""
    return None if _cut_off(report) else [index for index, run in enumerate(_runs(report)) if run[0]]


def _looks(case, every, alone, at_edge):
    """alone: what `_alone` returns; at_edge: where a block is cut off, other cases show the rest."""
    blocks, all_blocks = case.blocks, list(range(case.blocks))
    kept, forward, backward = alone
    runs = of_each(_runs)

    def again(report):
        return sum(attention for attention, _ in _runs(report))

    def saved(report):
        """Bytes that forward has saved, and may save: inputs of blocks, and what is outside of them."""
        return (0, 0) if passed(report) else (report["saved"], kept * (1 - 0.7 * again(report) / blocks))

    def products(report):
        """In backward, and the fewest: recomputation may leave out the last one of a block, which nothing needs."""
        fewest = backward + again(report) * ((forward - 1) / blocks - 1)
        return (0, 0) if passed(report) else (len(report["backward"]["products"]), fewest)

    def mistake(got, _):
        return "every-ignored" if got == all_blocks else "other-blocks"

    def passed(report):
        return at_edge and _cut_off(report)

    return [
        each_rank("", "again", False, "whole-model-again", holds=lambda got, _: not got.get("head"), fields=silent),
        each_rank("", "again", True, "nothing-again", holds=lambda got, _: bool(got), fields=silent),
        each_rank("", runs, True, "part-again", holds=lambda got, _: all(a == b for a, b in got), fields=_part),
        each_rank("", runs, True, "twice-again", holds=lambda got, _: all(a < 2 for a, _ in got), fields=_twice),
        each_rank("", of_each(_cut_off), "", "reentrant", fields={"index": 0}),
        each_rank("", of_each(_found), all_blocks[::every], mistake, holds=lambda got, due: got in (None, due),
                  fields={"every": every}),
        each_rank("", of_each(saved), True, "more-kept", holds=lambda got, _: got[0] <= got[1], fields=_bytes),
        each_rank("", of_each(products), True, "more-kept", holds=lambda got, _: got[0] >= got[1], fields=_results),
    ]  # fmt: skip


def _alone(case) -> tuple[int, int, int]:
    """The plain model: bytes saved in forward, products in forward, products in backward."""
    model, watch, saved = copy.deepcopy(case.model), watched.Watch(), watched.Saved()
    tokens = case.tokens[0, 0]
    with watch:
        with saved:
            logits = model(tokens[:, :-1])
        forward, kept = len(watch.take()["products"]), saved.take(model)
        watched.loss_of(logits, tokens).backward()
    return kept, forward, len(watch.take()["products"])


def balise_3(shard_recomputed):
    """What runs again in backward, for several `every`; gathers, weights as in one process, on 1 to 4 ranks."""
    plans = [
        (common.decoder("a decoder", layers=3), {}),
        (
            common.decoder("a decoder whose embedding is frozen", frozen=("token_embedding.weight",), layers=4),
            {"every": 3},
        ),
        (common.decoder("a decoder with a tied head", tied_head=True, kv_heads=1), {"every": 2}),
    ]
    parts = {2: plans[:2], 1: plans[:1], 3: plans[1:2], 4: plans[2:]}
    alone = {}
    claim = "only the blocks asked for run again in backward, once; trained as in one process"
    for size, ranks in common.on_ranks(_each, shard_recomputed, parts):
        alone = alone or {case.name: _alone(case) for case, _ in plans}
        for (case, options), *reports in zip(parts[size], *ranks):
            at_edge = case is plans[1][0]  # the embedding is frozen
            looks = _looks(case, options.get("every", 1), alone[case.name], at_edge)
            what = "".join(f", {name}={value}" for name, value in options.items())
            trains = not (at_edge and any(not one["slug"] and _cut_off(one) for one in reports))
            yield from common.judged_training(claim, reports, case, *looks, what=what, trains=trains)


def _each(shard_recomputed, parts):
    def with_options(model, mesh, options):
        return shard_recomputed(model, mesh, **options)

    return [watched.train(with_options, case, options) for case, options in parts[dist.get_world_size()]]
