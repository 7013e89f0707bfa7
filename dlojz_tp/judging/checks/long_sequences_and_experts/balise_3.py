"""Balise 3: ring attention, against the attention of the whole text."""

from functools import cache

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking.looks import Look, Value, at_most, form, judged, silent, tried
from dlojz_tp.judging.checking.wrong import Wrong, fails
from dlojz_tp.judging.checks.long_sequences_and_experts.sequences import begun, ended, piece, texts, truth
from dlojz_tp.judging.pretend_gpu import stuck
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.memory import Memory, held_bytes
from dlojz_tp.judging.probes.ranks import hung
from dlojz_tp.judging.probes.shared_looks import each_rank, judged_on_ranks
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.judging.probes.withheld import Kept
from dlojz_tp.measure.operations import Products

SIZE, HELD, PIECES = 4, 64, 3.2  # numbers of a head; tokens of a piece whose memory is counted; how many may be held
CASES = {  # heads, groups, tokens of a piece, dtype
    "double": (4, 2, 5, torch.float64),
    "groups": (6, 2, 3, torch.float32),
    "one token": (2, 1, 1, torch.float64),
    "bfloat16": (2, 2, 4, torch.bfloat16),
}
KNOWN = ((hung, "ring-waits"),)


@cache
def given(case, ranks):
    """The text, and the attention over it."""
    heads, groups, tokens, dtype = CASES[case]
    whole = texts(heads, groups, tokens * ranks, SIZE, 2, dtype)
    return whole, truth(*whole, dtype)


def seen_pieces(add_piece):
    """One process: three ranks' queries after all pieces; products of a piece from the past, and of a future one."""
    (q, k, v), outs, counts = given("double", 3)[0], [], []
    for rank in range(3):
        state = begun(piece(q, rank, 3))
        for source in ((rank - step) % 3 for step in range(3)):
            with Products() as products:
                state = add_piece(state, *(piece(x, r, 3) for x, r in ((q, rank), (k, source), (v, source))), rank, source)  # fmt: skip
            counts += [products.multiplications] * (source > rank)
        outs.append(ended(state))
    return {"future": max(counts), "pieces": torch.cat(outs, 2)}


def observe(add_piece, ring_attention):
    """On a rank: attention of four texts; what was called, sent and waited for in the first, what is held."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = {case: [piece(x, rank, ranks).contiguous() for x in given(case, ranks)[0]] for case in CASES}
    kept, calls, reused = [x.clone() for x in own["double"]], [], []
    with Kept() as running, Traffic() as log:

        def add(state, q, k, v, rank, source):
            calls.append((source, running.forgotten(), sum("recv" in call.name for call in log.events)))
            reused.extend(
                max(span(x)[0], span(y)[0]) <= min(span(x)[-1], span(y)[-1]) for x in (k, v) for y in running.to_come()
            )
            return add_piece(state, q, k, v, rank, source)

        out = ring_attention(*own["double"], add)
        forgotten, sends = running.forgotten(), running.unsent() + running.dropped
        running.left()
        dist.barrier()  # a rank that leaves takes along what it was sending
    sent = [call for call in log.calls if "recv" not in call.name]
    found = {"form": form(out), "other": [c.name for c in sent if c.name != "send" or c.peer != (rank + 1) % ranks],
             "reused": any(reused), "sources": [source for source, *_ in calls], "forgotten": forgotten, "unsent": sends, "double": out,
             "bytes": sum(call.bytes for call in sent), "same": all(map(torch.equal, kept, own["double"]))}  # fmt: skip
    hidden = [n > 0 for _, n, _ in calls[:-1]]
    found["hidden"] = (
        "" if all(hidden) else "before" if calls[hidden.index(False)][2] > hidden.index(False) else "after"
    )
    if forgotten or sends or any(reused) or found["other"] or not isinstance(out, torch.Tensor):
        return found  # what follows could wait without end
    found |= {"held": held(ring_attention), "turned": tried(turned, ring_attention, rank, ranks)}
    with Traffic() as log:
        others = {case: ring_attention(*own[case]) for case in list(CASES)[1:]}
    more = sum(call.bytes for call in log.calls if "recv" not in call.name)
    return found | others | {"forms": form(list(others.values())), "more bytes": more}


def span(x):
    """The bytes of memory from a tensor's first element to its last: a range."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return range(x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size())


def held(ring_attention):
    """The most pieces of keys and values that are held when `add` is called, beside its State."""
    q, k, v = torch.ones(3, 1, 2, HELD, SIZE)
    size, most = held_bytes([k.clone(), v.clone()]), []
    with Memory() as memory:

        def add(state, q, k, v, rank, source):
            beside = held_bytes(list(state))
            most.append((memory.settled(beside + PIECES * size) - beside) / size)
            return state

        ring_attention(q, k, v, add)
    return max(most, default=0.0)


def turned(ring_attention, rank, ranks):
    """As "double", of queries, keys and values that are views of (b, s, h, d), as a linear layer gives them."""
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given("double", ranks)[0]]
    return ring_attention(*(piece(x, rank, ranks) for x in views))


def due(case):
    """What each rank returns of it."""
    return lambda ranks: list(given(case, ranks)[1].chunk(ranks, 2))


def bytes_due(*cases):
    """What a rank sends in them."""
    once = sum(2 * 2 * groups * tokens * SIZE * dtype.itemsize for _, groups, tokens, dtype in map(CASES.get, cases))
    return lambda ranks: (ranks - 1) * once


def sources(ranks):
    return [[(rank - step) % ranks for step in range(ranks)] for rank in range(ranks)]


def whose(seen, due):
    """Fields: the first rank that called `add` for others."""
    rank = next(rank for rank, (one, other) in enumerate(zip(seen, due)) if one != other)
    return {"rank": rank, "expected": due[rank], "got": seen[rank], "where": f"rank {rank} of {len(due)}"}


WHEN = {"before": "you wait for the message before `add` begins", "after": "you start the message after `add`", "": ""}
PIECE_LOOKS = [
    Look("a piece in the future: nothing is computed", "future", 0, "future-computed", fields="n"),
    Value("queries of 3 ranks after the pieces of all 3", "pieces", given("double", 3)[1], "wrong-piece"),
]  # fmt: skip


def turned_hint(seen, due):
    return "not-contiguous" if isinstance(seen[0], str) else "wrong-ring"


LOOKS = [
    each_rank("messages to the next rank, and no others", "other", [], "gathered", fields=lambda got, due: {"name": got[0]} | silent(got, due)),
    Look("`add` for each piece, this rank's own first", "sources", sources, "wrong-source", fields=whose),
    each_rank("every message is waited for", "forgotten", 0, "not-waited", fields=silent),
    each_rank("", "unsent", 0, "send-dropped", fields=silent),
    each_rank("what travels has memory of its own", "reused", False, "received-into-sent"),
    each_rank("the attention of the whole text", "form", lambda ranks: f"float64 (2, 4, 5, {SIZE})", "wrong-ring"),
    Value("", "double", due("double"), "wrong-ring"),
    each_rank("messages travel while `add` runs", "hidden", "", "not-hidden", fields=lambda got, due: {"when": WHEN[got]} | silent(got, due)),
    each_rank("keys and values travel N − 1 times", "bytes", bytes_due("double"), "too-much-sent", holds=at_most),
    each_rank("", "more bytes", bytes_due(*list(CASES)[1:]), "too-much-sent", holds=at_most),
    each_rank("q, k and v are unchanged", "same", True, "overwritten"),
    each_rank("at most three pieces are held", "held", PIECES, "holds-all", holds=at_most, fields=lambda got, due: {"n": round(got), "expected": "", "got": ""}),
    each_rank("the shape and dtype of the queries", "forms", [f"{str(dtype)[6:]} (2, {h}, {n}, {SIZE})" for h, _, n, dtype in [*CASES.values()][1:]], "wrong-ring"),
    *(Look(text, case, due(case), "wrong-ring") for case, text in
      {"groups": "6 heads share 2 of keys, float32", "one token": "pieces of one token", "bfloat16": "bfloat16"}.items()),
    Look("transposed views", "turned", due("double"), turned_hint,
         fields=lambda seen, due: {"error": seen[0]} | silent(seen, due)),
]  # fmt: skip


def on_gpu(gpu, ring_attention):
    q, k, v = torch.ones(3, 1, 2, 4, SIZE, device=launch.device())
    ring_attention(q, k, v)
    return gpu.messages, [wait.why for wait in gpu.waits]


def balise_3(add_piece, ring_attention):
    yield from judged(PIECE_LOOKS, seen_pieces, add_piece)
    yield from judged_on_ranks(LOOKS, observe, add_piece, ring_attention, known=KNOWN, timeout=4)
    yield "three ranks with a GPU each: devices, the order of messages on NCCL"
    seen = on_gpus(on_gpu, ring_attention, known=left_on_cpu("wrong-device"), n=3)
    if seen and stuck([messages for messages, _ in seen]):
        fails(Wrong("stuck-on-nccl"))
    if seen and any(waits for _, waits in seen):
        fails(Wrong("hidden-sync", error=seen[0][1][0]))
