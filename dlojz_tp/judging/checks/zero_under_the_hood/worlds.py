"""What is said of ranks that fail, in all checks of this work."""

import functools

from dlojz_tp.judging.checking.borrowed import Borrowed
from dlojz_tp.judging.probes import ranks, shared_looks

IN_GRAPH = "being modified inplace", "leaf Variable", "Only Tensors created explicitly"
USUAL = (
    (Borrowed, "zero-borrowed"), *((words, "in-graph") for words in IN_GRAPH), (ranks.hung, "ranks-waiting"),
    *((f"has no attribute '{name}'", "parts-missing", {"name": name}) for name in ("parts", "optimizer", "frozen")),
)  # fmt: skip
on_ranks = functools.partial(ranks.on_ranks, usual=USUAL, timeout=15)  # seconds: a deadlock must come back quickly
judged_on_ranks = functools.partial(shared_looks.judged_on_ranks, usual=USUAL, timeout=15)
