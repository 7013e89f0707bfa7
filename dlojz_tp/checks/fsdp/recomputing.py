"""Balise 3: blocks that keep only their input and run again in backward, sharded."""

import copy

import torch.distributed as dist

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.fsdp import common, watched

HINTS = {
    "nothing-again": "No block runs again in backward: all activations were kept, on the GPU or elsewhere. "
    "`checkpoint_wrapper` makes a new module, which counts only once it is in the model. With "
    "every=1, each block is one of these modules.",
    "whole-model-again": "The whole model runs again in backward, including the head: it is one segment, whose "
    "activations all exist at once. Checkpoint the blocks.",
    "part-again": "Only a part of block {index} runs again ({got}). Only its input should be kept.",
    "twice-again": "Block {index} runs {got} times in backward. Once is enough: did you wrap it twice?",
    "every-ignored": "With every={every}, all blocks run again. The argument says how many blocks apart the "
    "checkpointed ones are.",
    "other-blocks": "With every={every}, blocks {expected} should run again in backward, but {got} do.",
    "more-kept": "Blocks run again in backward, but forward keeps more than their inputs: {got}, where {expected} "
    "would do.",
    "reentrant": "Block {index} got no gradient, because its input needs none (the embedding isn't trained): the "
    "reentrant form of checkpoint looks only at its inputs. Use `use_reentrant=False`.",
}


def balise_3(shard_recomputed):
    """What runs again in backward, for several `every`; gathers, weights as in one process, on 1 to 4 ranks."""
    frozen = ("token_embedding.weight",)
    plans = [
        (common.decoder("a decoder", layers=3), {}),
        (common.decoder("a decoder whose embedding is frozen", frozen=frozen, layers=4), {"every": 3}),
        (common.decoder("a decoder with a tied head", tied_head=True, kv_heads=1), {"every": 2}),
    ]
    alone = {}
    yield "only the blocks asked for run again in backward, once; trained as in one process"
    for size, ranks in common.on_ranks(_each, shard_recomputed, plans):
        alone = alone or {case.name: _alone(case) for case, _ in plans}
        for (case, options), reports in zip(_of_size(plans, size), zip(*ranks)):
            words = "" if not options else f", every={options['every']}"
            for rank, report in enumerate(reports):
                where = f"{case.name}{words}, rank {rank} of {size}"
                common.well_formed(report, where)
                _right_blocks(report, case.blocks, options.get("every", 1), where)
                _right_memory(report, alone[case.name], case.blocks, options.get("every", 1), where)
                common.grouped_by_block(report, case, where)
            common.trained(reports, common.truth(case, size), f"{case.name}{words}, {size} ranks")


def _of_size(plans, size):
    return {2: plans[:2], 1: plans[:1], 3: plans[1:2], 4: plans[2:]}[size]


def _each(shard_recomputed, plans):
    def with_options(model, mesh, options):
        return shard_recomputed(model, mesh, **options)

    return [watched.train(with_options, case, options) for case, options in _of_size(plans, dist.get_world_size())]


def _right_blocks(report, blocks, every, where):
    again = report["again"]
    if again.get("head"):
        raise Wrong("whole-model-again", where=where)
    if not again:
        raise Wrong("nothing-again", where=where)
    runs = [(again.get(f"attention {index}", 0), again.get(f"feed-forward {index}", 0)) for index in range(blocks)]
    for index, (attention, feed_forward) in enumerate(runs):
        if attention != feed_forward:
            part = "the attention" if attention else "the feed-forward"
            raise Wrong("part-again", index=index, got=part, where=where)
        if attention > 1:
            raise Wrong("twice-again", index=index, got=attention, where=where)
    found, wanted = [i for i in range(blocks) if runs[i][0]], list(range(0, blocks, every))
    first = next((name for name in report["no gradient"] if name.startswith("blocks.0.")), "")
    if first:
        raise Wrong("reentrant", index=0, got=first, where=where)
    if found == list(range(blocks)) != wanted:
        raise Wrong("every-ignored", every=every, where=where)
    if found != wanted:
        raise Wrong("other-blocks", every=every, expected=str(wanted), got=str(found), where=where)


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


def _right_memory(report, alone, blocks, every, where):
    """Fewer bytes saved in forward, more products in backward than in the plain model, in proportion."""
    kept, forward, backward = alone
    again = len(range(0, blocks, every))
    most = kept * (1 - 0.7 * again / blocks)  # inputs of blocks, and what is outside of them
    if report["saved"] > most:
        raise Wrong("more-kept", expected=f"at most {most:.0f} bytes", got=f"{report['saved']} bytes", where=where)
    # recomputation may leave out the last product of a block, which nothing needs
    fewest = backward + again * ((forward - 1) / blocks - 1)
    products = len(report["backward"]["products"])
    if products < fewest:
        words = f"{fewest:.0f} products in backward", f"{products}: results were kept"
        raise Wrong("more-kept", expected=words[0], got=words[1], where=where)
