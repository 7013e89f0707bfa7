"""Balise 4: the last blocks stay whole between forward and backward, and are not gathered again."""

import torch.distributed as dist

from dlojz_tp.judging.checking.looks import at_most, nothing
from dlojz_tp.judging.checks.fsdp import common, watched
from dlojz_tp.judging.checks.fsdp.common import of_each
from dlojz_tp.judging.probes.shared_looks import each_rank

KNOWN = (("reshard_after_forward as an int", "smaller-world"),)


def _looks(blocks, kept, kept_of):
    """kept_of: (blocks, asked, found whole) of all models that a rank of this world has trained."""

    def see(report):
        """The blocks that are whole after forward; None where no block has a group: a later look names that."""
        return (
            [index for index, whole in enumerate(report["after forward"]) if whole] if any(report["grouped"]) else None
        )

    def gathers(report):
        return common.count(report["backward"], "all_gather") if see(report) is not None else 0

    def mistake(found, _):
        if len(kept_of) > 1 and len({number for _, _, number in kept_of}) == 1:
            return "kept-ignored"
        if kept == 0 and len(found) == blocks and any(asked == number for _, asked, number in kept_of):
            return "none-means-all"
        if len(found) in (0, blocks) and all(number in (0, of) for of, _, number in kept_of):
            return "all-or-none"
        if kept and found == list(range(kept)):
            return "first-kept"
        return "the-others-kept" if found == list(range(blocks - kept)) else "other-blocks-kept"

    def fields(found, due):
        number = mistake(found, due) in ("kept-ignored", "all-or-none")
        return {"kept": kept, "blocks": blocks, "expected": str(due), "got": len(found) if number else str(found)}

    return [
        each_rank("", of_each(lambda report: report["after backward"] if any(report["grouped"]) else []), False,
                  "never-freed", holds=nothing, fields=common.first_index),
        each_rank("", of_each(see), list(range(blocks - kept, blocks)), mistake,
                  holds=lambda got, due: got in (None, due), fields=fields),
        each_rank("", of_each(gathers), blocks - kept + 2, "gathered-again", holds=at_most),
    ]  # fmt: skip


def balise_4(shard_kept):
    """Which blocks are whole after forward, how often backward gathers, weights as in one process, 1 to 4 ranks."""
    plain = common.decoder("a decoder of 5 blocks", layers=5, kv_heads=1)
    tied = common.decoder("a decoder of 3 blocks with a tied head", tied_head=True)
    plans = {2: [(plain, 2), (plain, 1), (plain, 0)], 1: [(tied, 1)], 3: [(tied, 3)], 4: [(tied, 2)]}
    claim = "the last blocks, as many as asked for, stay whole until backward and aren't gathered again"
    for size, ranks in common.on_ranks(_each, shard_kept, plans, known=KNOWN):
        pairs = [(plan, report) for plan, report in zip(plans[size], ranks[0]) if not report["slug"]]
        kept_of = [(case.blocks, asked, sum(report["after forward"])) for (case, asked), report in pairs]
        for (case, kept), *reports in zip(plans[size], *ranks):
            looks = _looks(case.blocks, kept, kept_of) if size > 1 else []
            yield from common.judged_training(claim, reports, case, *looks, what=f", kept={kept}", kept=case.blocks)


def _each(shard_kept, plans):
    return [watched.train(shard_kept, case, kept) for case, kept in plans[dist.get_world_size()]]
