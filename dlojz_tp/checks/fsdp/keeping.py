"""Balise 4: the last blocks stay whole between forward and backward, and are not gathered again."""

import torch.distributed as dist

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.fsdp import common, watched

HINTS = {
    "kept-ignored": "Asked to keep {kept} blocks, you keep {got} of {blocks}, as with every other number.",
    "all-or-none": "Asked to keep {kept} of {blocks} blocks, you keep {got}: one truth value for all of them. Each "
    "block has its own call, and so its own answer.",
    "first-kept": "You keep the first {kept} blocks whole. Backward begins with the last blocks: keep those, "
    "because they are needed at once and freed first.",
    "the-others-kept": "Asked to keep {kept} of {blocks} blocks, you keep the others. `reshard_after_forward` says "
    "what is *freed*.",
    "none-means-all": "Asked to keep no block, you keep all {blocks}. A slice that begins at -0 begins at 0.",
    "other-blocks-kept": "Asked to keep {kept} blocks, you should keep blocks {expected} whole after forward, but "
    "you keep {got}.",
    "smaller-world": "`reshard_after_forward` got a number ({error}). A number means the size of a smaller group "
    "of ranks to shard over, not a number of blocks.",
    "never-freed": "Block {index} is still whole after backward: between steps, a rank should hold only its shards.",
    "gathered-again": "Backward gathers {got} times, but at most {expected} are needed: blocks that were kept are "
    "gathered again.",
}
KNOWN = (("reshard_after_forward as an int", "smaller-world"),)


def balise_4(shard_kept):
    """Which blocks are whole after forward, how often backward gathers, weights as in one process, 1 to 4 ranks."""
    plain = common.decoder("a decoder of 5 blocks", layers=5, kv_heads=1)
    tied = common.decoder("a decoder of 3 blocks with a tied head", tied_head=True)
    plans = {2: [(plain, 2), (plain, 1), (plain, 0)], 1: [(tied, 1)], 3: [(tied, 3)], 4: [(tied, 2)]}
    yield "the last blocks, as many as asked for, stay whole until backward and aren't gathered again"
    for size, ranks in common.on_ranks(_each, shard_kept, plans, known=KNOWN):
        kept_of = [(case.blocks, asked, sum(r["after forward"])) for (case, asked), r in _pairs(plans[size], ranks)]
        for (case, kept), reports in zip(plans[size], zip(*ranks)):
            for rank, report in enumerate(reports):
                where = f"{case.name}, kept={kept}, rank {rank} of {size}"
                common.well_formed(report, where)
                if size > 1:
                    _right_blocks(report, case.blocks, kept, kept_of, where)
                common.grouped_by_block(report, case, where, kept=kept)
            common.trained(reports, common.truth(case, size), f"{case.name}, kept={kept}, {size} ranks")


def _pairs(plans, ranks):
    return [(plan, report) for plan, report in zip(plans, ranks[0]) if not report["slug"]]


def _each(shard_kept, plans):
    return [watched.train(shard_kept, case, kept) for case, kept in plans[dist.get_world_size()]]


def _right_blocks(report, blocks, kept, kept_of, where):
    if not any(report["grouped"]):
        return  # the next look names it
    if any(report["after backward"]):
        raise Wrong("never-freed", index=report["after backward"].index(True), where=where)
    found = [index for index, whole in enumerate(report["after forward"]) if whole]
    wanted = list(range(blocks - kept, blocks))
    fields = {"kept": kept, "blocks": blocks, "expected": str(wanted), "got": str(found), "where": where}
    if found == wanted:
        gathers, most = common.count(report["backward"], "all_gather"), blocks - kept + 2
        if gathers > most:
            raise Wrong("gathered-again", expected=most, got=gathers, where=where)
        return
    if len(kept_of) > 1 and len({number for _, _, number in kept_of}) == 1:
        raise Wrong("kept-ignored", **fields | {"got": len(found)})
    if kept == 0 and len(found) == blocks and any(asked == number for _, asked, number in kept_of):
        raise Wrong("none-means-all", **fields)
    if len(found) in (0, blocks) and all(number in (0, of) for of, _, number in kept_of):
        raise Wrong("all-or-none", **fields | {"got": len(found)})
    if kept and found == list(range(kept)):
        raise Wrong("first-kept", **fields)
    if found == list(range(blocks - kept)):
        raise Wrong("the-others-kept", **fields)
    raise Wrong("other-blocks-kept", **fields)
