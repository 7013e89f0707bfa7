"""Balise 7: attention with a rank's heads alone, prompt and tokens, against the whole layer on one process."""

import copy
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent, tried
from dlojz_tp.judging.probes.ranks import world_after_world
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.models import LlamaAttention, LlamaConfig
from dlojz_tp.parallel import Axis

SIZE, BATCH, PROMPT, LENGTH = 4, 2, 5, 8  # a head's numbers; sequences; tokens of the prompt, and with those behind it
#        heads, key heads: those that go are first, on 4 ranks and on 3
HEADS = {4: [(8, 4), (8, 2), (4, 4), (4, 1), (6, 6), (12, 6), (12, 3)], 3: [(6, 3), (12, 6), (3, 1), (6, 2), (4, 4)]}


def goes(size, heads, groups):
    """Whether so many ranks can share these heads: the ranks divide the key heads, or the key heads the ranks."""
    return heads % size == 0 and (groups % size == 0 or size % groups == 0)


@cache
def whole(heads, groups):
    """The layer on one process, float64. The check's own: give answers a copy."""
    config = LlamaConfig(2, width=heads * SIZE, heads=heads, kv_heads=groups, max_length=LENGTH)
    with seeded(heads + groups):
        return LlamaAttention(config).double().requires_grad_(False)


def words(heads):
    """What comes in, (b, s, d)."""
    drawn = torch.Generator().manual_seed(7)
    return torch.randn(BATCH, LENGTH, heads * SIZE, generator=drawn, dtype=torch.float64)


@cache
def truth(heads, groups):
    """The whole layer over the whole sequence at once: (b, s, d)."""
    return whole(heads, groups)(words(heads))


class Kept:
    """Keys and values of one rank, of any number of heads; what was handed over is noted."""

    def __init__(self):
        self.parts, self.seen, self.asked = [], [], []

    def attend(self, q, k, v):
        self.seen.append([q.shape[1], k.shape[1]])
        self.asked.append(q.sum((0, 2, 3)).sort().values)
        self.parts.append((k.clone(), v.clone()))
        keys, values = (torch.cat(some, 2) for some in zip(*self.parts))
        hidden = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - q.shape[2])
        if not keys.shape[1] or q.shape[1] % keys.shape[1]:
            return torch.zeros_like(q)  # the look at the heads says so
        many = q.shape[1] // keys.shape[1]
        return F.scaled_dot_product_attention(
            q, *(t.repeat_interleave(many, 1) for t in (keys, values)), attn_mask=hidden
        )


def bytes_of(module):
    """Bytes of memory that its parameters keep alive."""
    parts = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    return sum(parts.values()) // 8


def made(cut_attention, attention, ranks):
    """What comes back, or a ValueError in words."""
    try:
        return cut_attention(attention, ranks)
    except ValueError as error:
        return f"ValueError: {error}"


def observe(cut_attention):
    """On a rank, of each pair of heads: the prompt, then token after token."""
    size = dist.get_world_size()
    ranks = Axis(dist.group.WORLD)
    for heads, groups in HEADS[size]:
        if not goes(size, heads, groups):
            got = tried(cut_attention, copy.deepcopy(whole(heads, groups)), ranks)
            yield {"refused": got.split(":")[0] if isinstance(got, str) else "taken"}
            continue
        got = made(cut_attention, copy.deepcopy(whole(heads, groups)), ranks)
        if not isinstance(got, torch.nn.Module):
            yield {"made": got if got is None or isinstance(got, str) else type(got).__name__}
            continue
        x, kept, outs = words(heads), Kept(), []
        with Traffic() as traffic, torch.no_grad():
            for first, part in ((0, x[:, :PROMPT]), *((k, x[:, k : k + 1]) for k in range(PROMPT, LENGTH))):
                outs.append(got(part, first, kept.attend))
        sent = traffic.take()
        yield {"made": "a layer", "form": form(outs), "heads": kept.seen, "numbers": sum(p.numel() for p in got.parameters()),
               "memory": bytes_of(got), "names": [call.name for call in sent], "bytes": [call.bytes for call in sent],
               "prompt": outs[0], "tokens": torch.cat(outs[1:], 1) if len(outs) > 1 else None, "own": kept.asked[0]}  # fmt: skip


def pair(at):
    """(ranks, heads, key heads) of what `at` names."""
    size, heads, groups = (int(word) for word in at.split() if word.isdigit())
    return size, heads, groups


def of_rank(at):
    """How many heads and key heads a rank has."""
    size, heads, groups = pair(at)
    return heads // size, max(groups // size, 1)


def calls(at):
    return [[of_rank(at)[0], of_rank(at)[1]]] * (1 + LENGTH - PROMPT)


def numbers(at):
    """Of a rank: how many weights."""
    _, heads, _ = pair(at)
    return 2 * sum(of_rank(at)) * SIZE * heads * SIZE


def each(value):
    """The same on all ranks."""
    return lambda at: [value(at)] * pair(at)[0]


def forms(at):
    d = pair(at)[1] * SIZE
    return [f"float64 ({BATCH}, {n}, {d})" for n in (PROMPT, *[1] * (LENGTH - PROMPT))]


def sent(at):
    d = pair(at)[1] * SIZE
    return [8 * BATCH * n * d for n in (PROMPT, *[1] * (LENGTH - PROMPT))]


def of_heads(seen, due):
    """The hint for other heads than due."""
    (q, k), (own, held) = next(one for one in seen if one != due[0])[0], due[0][0]
    if q != own:
        return "other-heads"
    return "whole-cache" if k > held else "few-keys"


def told(seen, due):
    """Fields: the first rank with other heads."""
    rank = next(k for k, one in enumerate(seen) if one != due[k])
    (q, k), (own, held) = seen[rank][0], due[rank][0]
    return {"got": f"rank {rank}: {q} heads, {k} key heads", "expected": f"{own} heads, {held} key heads", "rank": rank,
            "n": k, "held": held}  # fmt: skip


def own(at):
    """Of each rank: what its heads ask, a sum for each head, in order of size."""
    size, heads, groups = pair(at)
    layer = whole(heads, groups)
    asked = layer.query(words(heads)[:, :PROMPT]).unflatten(-1, (heads, SIZE)).transpose(1, 2)
    return [part.sort().values for part in layer.rotary(asked, 0).sum((0, 2, 3)).chunk(size)]


def first(seen, due):
    """Fields: of the first rank that is not as it should be."""
    got = next(one for one, other in zip(seen, due) if one != other)
    return {"got": got, "expected": due[0]}


def no_more(seen, due):
    return max(seen) <= due[0]


def of_names(seen, due):
    if not any(seen):
        return "not-summed"
    return "too-often" if len(seen[0]) > len(due[0]) else "other-collective"


LOOKS = [
    Look("a layer for each rank, where the number of ranks divides that of the key heads, or the reverse", "made", each(lambda at: "a layer"),
         lambda seen, due: "refuses-shared" if "Error" in str(seen[0]) else "not-a-layer", fields=first),
    Look("it passes the rank's own heads to `attend`: these are the keys and values that a rank keeps", "heads", each(calls), of_heads,
         holds=lambda seen, due: seen == due, fields=told),
    Look("each rank returns (b, s, d)", "form", each(forms), "heads-form", fields=first),
    Look("its part of the weights", "numbers", each(numbers), "whole-weights", holds=no_more, fields=first),
    Look("and no other memory", "memory", each(numbers), "view-kept", holds=no_more, fields=first),
    Look("one all-reduce for each call", "names", each(lambda at: ["all_reduce"] * (1 + LENGTH - PROMPT)), of_names, fields=first),
    Look("of (b, s, d)", "bytes", each(sent), "too-much-sent", fields=first),
    Value("the prompt: the same as on one process", "prompt", each(lambda at: truth(*pair(at)[1:])[:, :PROMPT]), "wrong-attention", fields=silent),
    Value("then a token at a time", "tokens", each(lambda at: truth(*pair(at)[1:])[:, PROMPT:]), "wrong-attention", fields=silent),
    Look("the first rank has the first heads", "own", own, "other-order", fields=silent),
]  # fmt: skip
REFUSED = [Look("heads that cannot be split evenly are refused", "refused", each(lambda at: "ValueError"),
                lambda seen, due: "not-refused" if "taken" in seen else "other-error", fields=first)]  # fmt: skip
KNOWN = (
    ("Provided sizes", "heads-not-numbers"), ("don't multiply up to the size", "heads-not-numbers"),
    ("mat1 and mat2 shapes", "other-side"), ("Expected size for first two dimensions of batch2", "other-side"),
)  # fmt: skip


def balise_7(cut_attention):
    yield LOOKS[0].claim
    at = {size: list(cases) for size, cases in HEADS.items()}
    for size, ranks in world_after_world(observe, cut_attention, known=KNOWN, sizes=tuple(HEADS)):
        heads, groups = at[size].pop(0)
        where = f"{size} ranks, {heads} heads, {groups} key heads"
        looks = LOOKS if goes(size, heads, groups) else REFUSED
        yield from judged(looks, lambda seen=ranks: seen, at=where, where=where)
