"""Balise 5: Ulysses: heads instead of tokens, against the attention of the whole text."""

import torch
import torch.distributed as dist

from dlojz_tp import launch
from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent, tried
from dlojz_tp.judging.checking.wrong import Wrong, fails
from dlojz_tp.judging.checks.long_sequences_and_experts.sequences import piece, texts, truth
from dlojz_tp.judging.probes.gpus import left_on_cpu, on_gpus
from dlojz_tp.judging.probes.shared_looks import each_rank, judged_on_ranks
from dlojz_tp.judging.probes.traffic import Traffic

HEADS, TOKENS, SIZE, BATCH = 12, 3, 2, 2  # of queries; tokens of a piece; numbers of a head
FEW = {1: 1, 2: 1, 3: 1, 4: 2}  # ranks: heads of keys that are fewer
MANY = {1: 2, 2: 4, 3: 6, 4: 4}  # and as many or more


def given(groups, ranks, dtype=torch.float64):
    """[q, k, v] of the whole text."""
    return texts(HEADS, groups, TOKENS * ranks, SIZE, BATCH, dtype)


def share(x, rank, ranks):
    """The heads of a rank; of fewer heads than ranks, the one that its queries share."""
    heads = x.shape[1]
    return x[:, rank * heads // ranks : max((rank + 1) * heads // ranks, rank * heads // ranks + 1)]


def observe(to_heads, to_sequence, ulysses_attention, _):
    """On a rank: there and back, of many heads and of few; what is sent; attention."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = {n: [piece(x, rank, ranks).contiguous() for x in given(n, ranks)] for n in (FEW[ranks], MANY[ranks])}
    few, many = own.values()
    back = share(given(MANY[ranks], ranks)[0], rank, ranks).contiguous()
    with Traffic() as log:
        got = [to_heads(many[0].clone()), to_heads(few[1].clone()), to_sequence(back.clone())]
    found = {"forms": form(got), "sent": [[call.name for call in log.calls], [call.bytes for call in log.calls]]}
    if found["forms"] != forms(ranks)[rank]:
        return found  # what follows could not run
    found |= dict(zip(("heads", "few", "back"), got))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in many]
    half = [x.bfloat16() for x in many]
    return found | {"many": ulysses_attention(*many), "of few": ulysses_attention(*few), "half": form(ulysses_attention(*half)),
                    "turned": tried(ulysses_attention, *turned)}  # fmt: skip


def forms(ranks):
    """Of to_heads, many and few, and of to_sequence."""
    whole = TOKENS * ranks
    sizes = (HEADS // ranks, whole), (1, whole), (HEADS, TOKENS)
    return [[f"float64 ({BATCH}, {heads}, {tokens}, {SIZE})" for heads, tokens in sizes]] * ranks


def calls(ranks):
    """Three all-to-alls, and the bytes that a rank hands in."""
    numbers = [BATCH * heads * TOKENS * SIZE for heads in (HEADS, ranks, HEADS)]
    return [["all_to_all"] * 3, [8 * n for n in numbers]]


def shares(groups, k):
    return lambda ranks: [share(given(groups[ranks], ranks)[k], rank, ranks) for rank in range(ranks)]


def pieces(groups):
    return lambda ranks: list(truth(*given(groups[ranks], ranks)).chunk(ranks, 2))


def own_queries(ranks):
    return list(given(MANY[ranks], ranks)[0].chunk(ranks, 2))


def no_more(got, due):
    return got[0] == due[0] and all(one <= most for one, most in zip(got[1], due[1]))


def of_sent(got, due):
    names, sizes = got
    return {"name": next((n for n in names if n != "all_to_all"), "all_to_all"), "expected": sum(due[1]), "got": sum(sizes), "calls": len(names)}  # fmt: skip


def first(seen, due):
    """Fields: the first form that is otherwise."""
    rank, k = next((rank, k) for rank, one in enumerate(seen) for k in range(3) if one[k] != due[rank][k])
    return {"name": ("to_heads", "to_heads, of fewer heads than ranks,", "to_sequence")[k], "expected": due[rank][k], "got": seen[rank][k],
            "where": f"rank {rank} of {len(seen)}"}  # fmt: skip


def form_hint(seen, due):
    if any(one is None for rank in seen for one in rank):
        return "nothing-returned"
    return "few-heads" if first(seen, due)["name"].endswith(",") else "heads-form"


def turned_hint(seen, due):
    return "not-contiguous" if isinstance(seen[0], str) else "wrong-ulysses"


LOOKS = [
    Look("all heads of a piece to some heads of the text, and back: shapes", "forms", forms, form_hint, fields=first),
    Value("the r-th share of the heads, all tokens in order", "heads", shares(MANY, 0), "wrong-share", fields=silent),
    Value("and back", "back", own_queries, "wrong-way-back", fields=silent),
    Look("fewer heads than ranks", "few", shares(FEW, 1), "few-heads", fields=silent),
    each_rank("an all-to-all of each tensor", "sent", calls, "other-traffic", holds=no_more, fields=of_sent),
    Look("the attention of the whole text, a piece on each rank", "many", pieces(MANY), "wrong-ulysses", fields=silent),
    Look("keys with fewer heads than ranks", "of few", pieces(FEW), "wrong-ulysses", fields=silent),
    each_rank("bfloat16", "half", f"bfloat16 ({BATCH}, {HEADS}, {TOKENS}, {SIZE})", "wrong-ulysses"),
    Look("transposed views", "turned", pieces(MANY), turned_hint,
         fields=lambda seen, due: {"error": seen[0]} | silent(seen, due)),
]  # fmt: skip
LLAMA = [(64, 8, 4096, 128, 8), (32, 8, 1000, 64, 2), (12, 12, 7, 16, 4), (8, 4, 5, 2, 1)]
SHARED = [(64, 8, 4096, 128, 16), (12, 1, 10, 8, 4), (8, 2, 3, 4, 8)]


def counted(_, __, ___, sent_numbers):
    """Numbers sent, in parts of those of one piece's queries."""
    for name, cases in (("enough", LLAMA), ("shared", SHARED)):
        got = [sent_numbers(*case) for case in cases]
        unit = [heads * tokens * size for heads, _, tokens, size, _ in cases]
        yield {f"{name}: {way}": [float(one[k]) / n for one, n in zip(got, unit)] for k, way in enumerate(("ring", "ulysses"))}  # fmt: skip


def ring_due(cases):
    return [2 * groups * (ranks - 1) / heads for heads, groups, _, _, ranks in cases]


def ulysses_due(cases):
    travelling = [
        (2 * heads + 2 * (groups if groups > ranks else ranks), ranks, heads) for heads, groups, _, _, ranks in cases
    ]
    return [numbers * (ranks - 1) / ranks / heads for numbers, ranks, heads in travelling]


def told(cases):
    """Fields: the first case that is wrong, in numbers."""

    def fields(seen, due):
        k = next(k for k, (a, b) in enumerate(zip(seen, due)) if abs(a - b) > 1e-6 * max(abs(b), 1))
        heads, groups, tokens, size, ranks = cases[k]
        unit = heads * tokens * size
        return {"expected": "", "got": f"{seen[k] * unit:.10g}",
                "where": f"{heads} heads, {groups} of keys, {tokens} tokens, size {size}, {ranks} ranks"}  # fmt: skip

    return fields


NUMBERS = [
    Value("numbers that the ring sends", "enough: ring", ring_due(LLAMA), "ring-numbers", fields=told(LLAMA)),
    Value("and Ulysses", "enough: ulysses", ulysses_due(LLAMA), "ulysses-numbers", fields=told(LLAMA)),
    Value("where heads of keys are fewer than ranks", "shared: ring", ring_due(SHARED), "ring-numbers", fields=told(SHARED)),
    Look("", "shared: ulysses", ulysses_due(SHARED), "repeated-numbers", fields=told(SHARED)),
]  # fmt: skip


def on_gpu(gpu, to_heads, to_sequence, ulysses_attention, _):
    q, k, v = (torch.ones(1, heads, 3, SIZE, device=launch.device()) for heads in (4, 1, 1))
    ulysses_attention(q, k, v)
    to_sequence(to_heads(q))
    return [wait.why for wait in gpu.waits]


def balise_5(to_heads, to_sequence, ulysses_attention, sent_numbers):
    answers = to_heads, to_sequence, ulysses_attention, sent_numbers
    yield from judged_on_ranks(LOOKS, observe, *answers)
    yield from judged(NUMBERS, counted, *answers)
    yield "two ranks with a GPU each"
    waits = on_gpus(on_gpu, *answers, known=left_on_cpu("wrong-device"))
    if waits and any(waits):
        fails(Wrong("hidden-sync", error=next(filter(None, waits))[0]))
