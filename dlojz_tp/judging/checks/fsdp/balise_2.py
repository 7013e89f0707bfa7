"""Balise 2: bf16 in compute and on the way out, float32 where sums are made and weights are kept."""

import torch

from dlojz_tp.judging.checking.looks import one_of
from dlojz_tp.judging.checks.fsdp import common, watched
from dlojz_tp.judging.checks.fsdp.common import of_each
from dlojz_tp.judging.probes.shared_looks import each_rank

KNOWN = (
    ("c10::BFloat16 != float", "policy-missing"),
    ("BFloat16 and Float", "policy-missing"),
    ("float != c10::BFloat16", "output-too-early"),
    ("Float and BFloat16", "output-too-early"),
)
HALF, FULL = torch.bfloat16, torch.float32


def _dtypes(*names):
    """A look's key: of each rank, the dtypes of these collectives; none is that of bf16 shards packed together."""
    return of_each(lambda report: {
        call.dtype for part in ("forward", "backward") for call in report[part]["calls"] if call.name in names
    })  # fmt: skip


def _look(see, due, hint, holds=lambda got, due: set(got) <= {due}):
    """At dtypes; the hint has those that are not the one due."""
    return each_rank(
        "",
        see,
        due,
        hint,
        holds=holds,
        fields=lambda got, _: {"expected": _words([due]), "got": _words({*got} - {due})},
    )


def _words(dtypes) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


PRODUCTS = of_each(lambda report: report["forward"]["products"])
LOOKS = [
    _look("dtypes", FULL, "shards-in-half"),
    _look(PRODUCTS, HALF, "computes-in-full", lambda got, _: bool(set(got) - {FULL})),
    each_rank("", PRODUCTS, {HALF, FULL}, "another-half", holds=one_of,
              fields=lambda got, due: {"expected": "bfloat16", "got": _words({*got} - due)}),
    _look(PRODUCTS, HALF, "root-in-full", lambda got, _: got[-1] != FULL),
    _look(PRODUCTS, HALF, "blocks-in-full", lambda got, _: FULL not in got),
    each_rank("", _dtypes("all_gather"), HALF, "gathers-in-full", holds=lambda got, _: FULL not in got,
              fields={"expected": "bfloat16", "got": "float32"}),
    _look(_dtypes("reduce_scatter", "all_reduce"), FULL, "reduces-in-half"),
    _look(of_each(lambda report: [report["logits"]]), FULL, "logits-in-half"),
]  # fmt: skip


def balise_2(shard_mixed):
    """Dtypes of shards, of what travels, of products, of gradients and logits, on 1 to 4 ranks."""
    cases = [
        common.decoder("a decoder", dtype=FULL, layers=2, frozen=("norm.weight",), std=0.1),
        common.decoder("a decoder with a tied head", dtype=FULL, tied_head=True, kv_heads=1, std=0.1),
    ]
    claim = "shards in float32; bf16 in products and in messages; float32 sums, gradients and logits"
    for size, ranks in common.on_ranks(_one, shard_mixed, cases, known=KNOWN):
        yield from common.judged_training(claim, ranks, cases[size % 2], *LOOKS, tol=3e-2)


def _one(shard_mixed, cases):
    return watched.train(shard_mixed, cases[torch.distributed.get_world_size() % 2])
