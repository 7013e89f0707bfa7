"""Balise 2: bf16 in compute and on the way out, float32 where sums are made and weights are kept."""

import torch

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.fsdp import common, watched

HINTS = {
    "shards-in-half": "The shards are {got}. An update of a thousandth of a weight is lost in bf16: what the "
    "optimizer sees must stay in float32, and the policy makes the bf16 copies.",
    "computes-in-full": "All matrix products run in float32. The policy must reach the groups through `mp_policy`, "
    "and its param_dtype is the dtype in which they compute.",
    "blocks-in-full": "Products inside the blocks run in {got}. A policy applies only to the groups of its own "
    "call: give it to every block too.",
    "root-in-full": "The head's product runs in {got}. A policy applies only to the groups of its own call: give "
    "one to the root too.",
    "another-half": "Products run in {got}. In float16, gradients below 6e-8 vanish, and there is no loss scaling here.",
    "gathers-in-full": "Products run in bf16, but parameters travel as {got}: twice the bytes, and each rank casts "
    "them itself. That is what autocast does; the policy casts the shards before they travel.",
    "reduces-in-half": "Gradients are summed over the ranks in {got}, but float32 is expected: set it in the "
    "policy as the dtype of the reduction. (In bfloat16, each sum is rounded to 8 bits.)",
    "logits-in-half": "The logits come out as {got}. The loss takes exponentials and a sum over the vocabulary, so "
    "let the root's policy give its output in float32.",
    "policy-missing": "A product has a bf16 input and float32 weights ({error}). The weights belong to a group "
    "without the policy, to one whose policy has no param_dtype, or to no group. The blocks and "
    "the root each need the policy.",
    "output-too-early": "A product has a float32 input and bf16 weights ({error}): a block gives its output in "
    "float32, and nothing casts it on its way to the root's norm and head. Only the root's "
    "policy has to name an output dtype; param_dtype is bfloat16 in all of them.",
}
KNOWN = (
    ("c10::BFloat16 != float", "policy-missing"),
    ("BFloat16 and Float", "policy-missing"),
    ("float != c10::BFloat16", "output-too-early"),
    ("Float and BFloat16", "output-too-early"),
)
HALF, FULL = torch.bfloat16, torch.float32


def balise_2(shard_mixed):
    """Dtypes of shards, of what travels, of products, of gradients and logits, on 1 to 4 ranks."""
    cases = [
        common.decoder("a decoder", dtype=FULL, layers=2, frozen=("norm.weight",), std=0.1),
        common.decoder("a decoder with a tied head", dtype=FULL, tied_head=True, kv_heads=1, std=0.1),
    ]
    yield "shards in float32; bf16 in products and in messages; float32 sums, gradients and logits"
    for size, ranks in common.on_ranks(_one, shard_mixed, cases, known=KNOWN):
        case = cases[size % 2]
        for rank, report in enumerate(ranks):
            where = f"{case.name}, rank {rank} of {size}"
            common.well_formed(report, where)
            _right_dtypes(report, where)
            common.grouped_by_block(report, case, where)
        common.trained(ranks, common.truth(case, size), f"{case.name}, {size} ranks", tol=3e-2)


def _one(shard_mixed, cases):
    return watched.train(shard_mixed, cases[torch.distributed.get_world_size() % 2])


def _right_dtypes(report, where):
    if report["dtypes"] != {FULL}:
        raise Wrong("shards-in-half", got=_words(report["dtypes"] - {FULL}), where=where)
    products = report["forward"]["products"]
    if not products or set(products) == {FULL}:
        raise Wrong("computes-in-full", expected="bfloat16", got="float32", where=where)
    others = set(products) - {HALF, FULL}
    if others:
        raise Wrong("another-half", got=_words(others), where=where)
    if products[-1] != HALF:
        raise Wrong("root-in-full", expected="bfloat16", got=_words([products[-1]]), where=where)
    if set(products) != {HALF}:
        raise Wrong("blocks-in-full", expected="bfloat16", got=_words(set(products) - {HALF}), where=where)
    # bytes without a dtype are bf16 shards packed for one message
    wide = {call.dtype for call in _calls(report) if call.name == "all_gather" and call.dtype == FULL}
    if wide:
        raise Wrong("gathers-in-full", expected="bfloat16", got="float32", where=where)
    sums = {call.dtype for call in _calls(report) if call.name in ("reduce_scatter", "all_reduce")}
    if sums - {FULL}:
        raise Wrong("reduces-in-half", expected="float32", got=_words(sums - {FULL}), where=where)
    if report["logits"] != FULL:
        raise Wrong("logits-in-half", expected="float32", got=_words([report["logits"]]), where=where)


def _calls(report):
    return report["forward"]["calls"] + report["backward"]["calls"]


def _words(dtypes) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
