"""Balise 4: the zig-zag order, against the attention of the whole text and the places of its tokens."""

import functools

import torch

from dlojz_tp.judging.checking.looks import Look, at_most, form, judged, silent, tried
from dlojz_tp.judging.checks.long_sequences_and_experts.sequences import begun, ended, texts, truth
from dlojz_tp.judging.probes.gpus import on_gpu
from dlojz_tp.measure.operations import Products

RANKS, LENGTH, BATCH = (1, 2, 3, 4), 24, 2
HEADS, GROUPS, SIZE = 4, 2, 4
TOKENS = torch.randperm(1000, generator=torch.Generator().manual_seed(4))[: BATCH * (LENGTH + 1)].view(BATCH, -1)
TEXT = texts(HEADS, GROUPS, LENGTH, SIZE)


def places(rank, ranks):
    """(s / N,) of a rank's tokens in the text."""
    pieces = torch.arange(LENGTH).view(2 * ranks, -1)
    return pieces[[rank, -1 - rank]].flatten()


WORLDS = [(rank, ranks) for ranks in RANKS for rank in range(ranks)]
PLACES = [places(*at) for at in WORLDS]
BATCHES = {"inputs": [TOKENS[:, at] for at in PLACES], "labels": [TOKENS[:, at + 1] for at in PLACES], "positions": PLACES}  # fmt: skip


def observe(zigzag_batch, add_zigzag):
    """Batches of 1 to 4 ranks; their queries after the keys of themselves and earlier ranks, then of later ones."""
    given = TOKENS.clone()
    batches = [zigzag_batch(given, *at) for at in WORLDS]
    yield {"forms": [form(batch) for batch in batches]}
    yield {name: [batch[k] for batch in batches] for k, name in enumerate(BATCHES)}
    yield {"refused": str(tried(zigzag_batch, given[:, :-2], 0, 4)).split(":")[0] if len(batches) else ""}
    found, products, kept = {"earlier": [], "all": []}, [], True
    for rank, ranks in WORLDS:
        q, state = TEXT[0][:, :, places(rank, ranks)], begun(TEXT[0][:, :, places(rank, ranks)])
        for source in ((rank - step) % ranks for step in range(ranks)):
            before = [x.clone() for x in state]
            k, v = (x[:, :, places(source, ranks)] for x in TEXT[1:])
            with Products() as counted:
                after = add_zigzag(state, q, k, v, rank, source)
            kept &= all(map(torch.equal, before, state))
            state = after
            if source != rank:
                products.append(counted.multiplications * ranks**2)
            if source == 0:
                found["earlier"].append(ended(state))
        found["all"].append(ended(state))
    yield found | {"products": max(products), "kept": kept}
    yield {"device": on_gpu(functools.partial(both, zigzag_batch, add_zigzag), TOKENS, *TEXT)}


def both(zigzag_batch, add_zigzag, tokens, q, k, v):
    """What they return on the device of their tensors."""
    states = [list(add_zigzag(begun(q), q, k, v, 1, source)) for source in (0, 1, 2)]
    return [list(zigzag_batch(tokens, 1, 2)), states]


def due(rank, ranks, sources):
    """The attention over the keys of these ranks."""
    at, of = places(rank, ranks), torch.cat([places(source, ranks) for source in sources])
    q, k, v = TEXT
    return truth(q[:, :, at], k[:, :, of], v[:, :, of], at=at, of=of)


def first(seen, due):
    """Fields: the first rank that is otherwise."""
    k = next((k for k, (a, b) in enumerate(zip(seen, due)) if str(a) != str(b)), 0)
    rank, ranks = WORLDS[k]
    values = {"expected": str(due[k]).replace("\n", ""), "got": str(seen[k]).replace("\n", "")} if seen else {}
    return {"where": f"rank {rank} of {ranks}"} | values


def of_pieces(name):
    """Fields: the first rank whose tokens are others."""

    def fields(seen, due):
        k = next(k for k, (a, b) in enumerate(zip(seen, due)) if a.shape != b.shape or not torch.equal(a, b))
        row = (lambda x: x[0].tolist()) if name != "positions" else (lambda x: x.tolist())
        rank, ranks = WORLDS[k]
        return {"rank": rank, "n": ranks, "expected": row(due[k]), "got": row(seen[k]), "where": f"rank {rank} of {ranks}"}  # fmt: skip

    return fields


def on_device(seen, due):
    return "hidden-sync" if seen[0] == "waits" else "wrong-device"


HALF = HEADS * LENGTH**2 * SIZE  # products with half of the keys, and of half of the weights with values, times N²
LOOKS = [
    Look("a batch for each of 1 to 4 ranks", "forms", [[f"int64 {shape}" for shape in ((BATCH, len(at)), (BATCH, len(at)), (len(at),))] for at in PLACES],
         "zigzag-form", fields=first),
    Look("pieces r and 2N − 1 − r", "inputs", BATCHES["inputs"], "other-pieces", fields=of_pieces("inputs")),
    Look("labels: the next token of the text", "labels", BATCHES["labels"], "labels-of-rank", fields=of_pieces("labels")),
    Look("positions: the place in the text", "positions", PLACES, "positions-of-rank", fields=of_pieces("positions")),
    Look("a length that 2N does not divide", "refused", "ValueError", "not-refused", fields=silent),
    Look("each rank's queries over its own keys, and those of earlier ranks", "earlier", [due(r, n, range(r + 1)) for r, n in WORLDS], "earlier-wrong", fields=silent),
    Look("then over those of later ranks", "all", [due(r, n, range(n)) for r, n in WORLDS], "later-wrong", fields=silent),
    Look("half of the scores for each other rank", "products", HALF, "hidden-computed", holds=at_most, fields=lambda seen, due: {"n": f"{seen / due:.1f}"} | silent(seen, due)),
    Look("the State given stays as it is", "kept", True, "state-changed"),
    Look("on a GPU", "device", ["", ""], on_device, fields=lambda seen, due: {"error": seen[1]} | silent(seen, due)),
]  # fmt: skip


def balise_4(zigzag_batch, add_zigzag):
    yield from judged(LOOKS, observe, zigzag_batch, add_zigzag)
