"""Balise 7: a sliced block, and the whole sliced transformer with its head."""

import copy
from functools import cache, partial

import torch

from dlojz_tp import launch
from dlojz_tp.checking import Wrong
from dlojz_tp.checks.tensor_slicing.attention import attention_forms
from dlojz_tp.checks.tensor_slicing.block_dropout import RATE as PLACE_RATE
from dlojz_tp.checks.tensor_slicing.block_dropout import dropped, judge_agreement, judge_places, places
from dlojz_tp.checks.tensor_slicing.common import Form, exercise, noise, randomise, truth
from dlojz_tp.checks.tensor_slicing.layers import judge_layer
from dlojz_tp.checks.tensor_slicing.layouts import WORLD, in_groups_too, on_groups
from dlojz_tp.checks.tensor_slicing.linear import pair_forms
from dlojz_tp.checks.tensor_slicing.parts import (
    LONGER_AT,
    judge_longer,
    judge_odd,
    judge_shorter,
    longer,
    run,
    shorter,
)
from dlojz_tp.checks.tensor_slicing.right_ranks import CheckRanks
from dlojz_tp.models import Block, Transformer, TransformerConfig
from dlojz_tp.probes.gpus import MIXED, on_gpus
from dlojz_tp.probes.traffic import Call, Traffic, on_the_wire

HINTS = {
    "residual-lost": "You return only what attention and feed-forward add. Add each to its input.",
    "norm-behind": "The norms come after attention and feed-forward. In the plain block they come before them.",
    "norms-lost": "The norms are missing: one comes before the attention, one before the feed-forward.",
    "norms-mixed": "The two norms are swapped: norm_attention comes before the attention, norm_feed_forward before "
                   "the feed-forward.",
    "halves-side-by-side": "Attention and feed-forward get the same input. The feed-forward works on the sum of "
                           "the input and the attention's result.",
    "tied-entrance": "The gradients of {name} differ between the ranks: each rank knows only its own part. Before "
                     "the tied head, copy x to the ranks, and only then cut.",
    "tie-broken": "The head and the token embedding hold two parameters, each with a separate gradient. Tied, they "
                  "are one parameter.",
    "last-norm-lost": "The last norm is missing: it comes before the head.",
    "positions-lost": "The position embedding is missing.",
    "positions-shifted": "Your positions begin with 1, but the first token has position 0.",
    "blocks-lost": "You use only the first block.",
    "positions-not-on-gpu": "On GPUs, a tensor is in the CPU's memory: {error}. Create the layer's own tensors "
                            "(positions, a mask, zeros) on the device of its input: torch.arange(…, "
                            "device=tokens_bs.device).",
    "tables-travel": "For a single token, a rank sends {found} bytes forward, but {wanted} are enough. Do not send "
                     "a table of weights. First look up or multiply with this rank's part, then send the result.",
}  # fmt: skip

CONFIG = TransformerConfig(vocab_size=60, width=16, heads=4, layers=2, max_length=6, ffn_width=24)
STEPS = 2
NORMS = ("norm_attention", "norm_feed_forward")


def _block_forms(prefix=""):
    norms = [Form((f"{prefix}{norm}.{part}",), None) for norm in NORMS for part in ("weight", "bias")]
    # a feed-forward of two column-cut layers is known too: it sends too much, which is said then
    gathered = [Form((f"{prefix}feed_forward.down.{part}",), 0) for part in ("weight", "bias")]
    return norms + attention_forms(f"{prefix}attention.") + pair_forms(f"{prefix}feed_forward.") + gathered


def _model_forms():
    tables = [Form(("token_embedding.weight",), 1)]
    tables += [Form(("token_embedding.weight",), 0, pad=pad) for pad in ((0, 0), (0, 1), (1, 0))]
    places = [Form(("position_embedding.weight",), None), Form(("position_embedding.weight",), 1)]
    head = [Form(("head.weight",), 0), Form(("head.weight",), 1)]
    blocks = [form for k in range(CONFIG.layers) for form in _block_forms(f"blocks.{k}.")]
    return tables + places + blocks + [Form(("norm.weight",), None), Form(("norm.bias",), None)] + head


def _config(**changes):
    return TransformerConfig(**{**CONFIG.__dict__, **changes})


MODELS_AT = {4: ("own",), 2: ("tied",), 1: ("own", "tied")}  # size of the group -> models: a verdict must not take long
_MODELS = {"own": CONFIG, "tied": _config(tied_head=True, layers=1)}
_LARGE = _config(width=192, ffn_width=768)  # for `aside`
_LARGE_MODEL = _config(width=128, vocab_size=1024, layers=1)


@cache
def _case(kind: str) -> dict:
    b, s, d, v = 2, 5, CONFIG.width, CONFIG.vocab_size
    if kind == "block":
        plain, other = (randomise(Block(CONFIG), seed) for seed in (1, 2))
        forms, out = _block_forms(), d
        batches = [noise(b, s, d, seed=20 + k) for k in range(STEPS)]
    else:
        plain, other = (randomise(Transformer(_MODELS[kind]), seed) for seed in (3, 4))
        known = dict(plain.named_parameters())
        forms, out = [form for form in _model_forms() if all(name in known for name in form.covers)], v
        generator = torch.Generator().manual_seed(5)
        b = 3  # sequences: a message for each of them shows
        batches = [torch.randint(v, (b, s), generator=generator) for _ in range(STEPS)]
    upstream = [noise(b, s, out, seed=30 + k) for k in range(STEPS)]
    large = partial(Block, _LARGE) if kind == "block" else partial(Transformer, _LARGE_MODEL)
    return {
        "plain": plain, "other": other, "forms": forms, "batches": batches, "upstream": upstream, "large": large,
    }  # fmt: skip


@cache
def _truth(kind: str) -> dict:
    return truth(_case(kind))


def balise_7(SlicedBlock, SlicedTransformer):  # noqa: N803
    """A block; the model with a head of its own, and with a tied one; dropout outside the sliced regions."""
    every = on_groups(_models, SlicedBlock, SlicedTransformer)
    yield from in_groups_too(_judge, every)
    yield "the model where each of two ranks has a GPU"
    on_gpus(_on_gpu, SlicedTransformer, known=((MIXED, "positions-not-on-gpu"),))


def _on_gpu(_, SlicedTransformer):  # noqa: N803
    model = copy.deepcopy(_case("tied")["plain"]).to(launch.device())
    SlicedTransformer(model, CheckRanks()).to(launch.device())(_case("tied")["batches"][0].to(launch.device()))


def _judge(every):
    sent = 2 * 2 * 5 * CONFIG.width * 8
    block = [(size, rank, got["block"]) for size, rank, got in every]
    for claim in judge_layer(block, _truth("block"), _case("block"), calls=(2, 2), sizes_of=lambda size: (sent, sent),
                             known=_BLOCK):  # fmt: skip
        yield f"block: {claim}"
    for claim in judge_longer(every):
        yield f"block: {claim}"
    yield "block: the same dropout on all ranks, none in evaluation"
    for size in {size: None for size, _, _ in every}:
        judge_agreement([got["block dropout"] for n, _, got in every if n == size], size)
    for kind, title in (("own", "a head of its own"), ("tied", "a tied head")):
        yield from _model(every, kind, title)
    yield "dropout on what is added and on the embeddings, at the rate of the plain model"
    for size, rank, got in every:
        judge_places(got["places"], f"rank {rank} of {size}")
    yield "model: evaluation, and training with the same dropout on all ranks"
    for size in {size: None for size, _, _ in every}:
        judge_agreement([got["dropout"] for n, _, got in every if n == size and "dropout" in got], size)


def _model(every, kind, title):
    reports = [(size, rank, got[kind]) for size, rank, got in every if kind in got]
    layers = _MODELS[kind].layers
    # the embeddings, the blocks and the head forward; the blocks and the head backward
    claims = judge_layer(
        reports, _truth(kind), _case(kind), calls=(2 * layers + 3, 2 * layers + 2), known=_mistakes(kind)
    )
    try:
        for claim in claims:
            yield f"{title}: {claim}"
    except Wrong as wrong:
        if kind == "tied" and wrong.slug == "slice-doubled":
            wrong.slug = "tie-broken"
        if kind == "tied" and wrong.slug == "weight-partial":
            wrong.slug = "tied-entrance"
        raise
    yield f"{title}: for a single token little travels, no table of weights"
    for size, rank, got in reports:
        judge_odd({"a single token": got["single"]}, f"rank {rank} of {size}")
        judge_shorter(got["shorter"], f"rank {rank} of {size}")
    for size, rank, got in reports:
        found, wanted = on_the_wire(got["sent"]), _enough(_MODELS[kind], size)
        if found > wanted:
            raise Wrong(
                "tables-travel", found=int(found), wanted=int(wanted), where=f"rank {rank} of {size}, one token"
            )


def _enough(config, size):
    """Bytes that a rank sends for one token, rather more than less: its vector, twice in each block, its scores, and
    all vectors of positions, where each of these is a sum over the ranks."""
    numbers = (1 + 2 * config.layers + config.max_length) * config.width + config.vocab_size
    return on_the_wire([Call("all_reduce", 8 * numbers, size)])


def _models(SlicedBlock, SlicedTransformer, ranks):  # noqa: N803
    report = {"block": exercise(SlicedBlock, _case("block"), ranks)}
    report["stopped"] = report["block"]["stopped"]
    if report["stopped"]:
        return report
    if ranks.size == LONGER_AT:
        report["longer"] = longer(SlicedBlock, _case("block")["other"], CONFIG.width, ranks)
    block = randomise(Block(_config(dropout=0.5)), 6)
    block.attention.dropout = 0.0  # what is left is the block's own
    report["block dropout"] = dropped(SlicedBlock, block, noise(2, 5, CONFIG.width, seed=7), _block_forms(), ranks)
    report["places"] = {}
    if ranks.size == WORLD:
        report["places"] = places(SlicedBlock, SlicedTransformer, _config(dropout=PLACE_RATE), ranks)
    for kind in MODELS_AT[ranks.size]:
        report[kind] = exercise(SlicedTransformer, _case(kind), ranks)
        report["stopped"] = report[kind]["stopped"]
        if report["stopped"]:
            return report
        report[kind]["shorter"] = shorter(SlicedTransformer, _case(kind)["plain"], _case(kind)["batches"][0], ranks)
        with Traffic() as sent:
            token = _case(kind)["batches"][0][:1, :1]
            report[kind]["single"] = run(SlicedTransformer, _case(kind)["plain"], token, ranks)
        report[kind]["sent"] = sent.calls
    if ranks.size == WORLD:
        dropping = randomise(Transformer(_config(dropout=0.3)), 8)
        report["dropout"] = dropped(
            SlicedTransformer, dropping, _case("own")["batches"][0], _case("own")["forms"], ranks
        )
    return report


def _of_block(work):
    def output(_rank, _size):
        with torch.no_grad():
            return work(_case("block")["plain"], _case("block")["batches"][0])

    return output


def _put_together(
    first="norm_attention", second="norm_feed_forward", residuals=(1, 1), behind=False, side_by_side=False
):
    """An output of the plain block's parts put together in another way; a norm's name may be None."""

    def work(block, x):
        def half(name, layer, x, residual):
            norm = getattr(block, name) if name else torch.nn.Identity()
            return residual * x + (norm(layer(x)) if behind else layer(norm(x)))

        y = half(first, block.attention, x, residuals[0])
        if side_by_side:
            return y + half(second, block.feed_forward, x, 0)
        return half(second, block.feed_forward, y, residuals[1])

    return _of_block(work)


def _post_norm(block, x):
    x = block.norm_attention(x + block.attention(x))
    return block.norm_feed_forward(x + block.feed_forward(x))


_BLOCK = (
    ("norm-behind", _put_together(behind=True)),
    ("norm-behind", _of_block(_post_norm)),
    ("residual-lost", _put_together(residuals=(0, 0))),
    ("residual-lost", _put_together(residuals=(1, 0))),
    ("residual-lost", _put_together(residuals=(0, 1))),
    ("norms-lost", _put_together(None, None)),
    ("norms-lost", _put_together(None)),
    ("norms-lost", _put_together(second=None)),
    ("norms-mixed", _put_together(second="norm_attention")),
    ("norms-mixed", _put_together("norm_feed_forward")),
    ("norms-mixed", _put_together("norm_feed_forward", "norm_attention")),
    ("halves-side-by-side", _put_together(side_by_side=True)),
)


def _mistakes(kind):
    def without(position=True, norm=True, first=0, blocks=None):
        def output(_rank, _size):
            model, tokens = _case(kind)["plain"], _case(kind)["batches"][0]
            with torch.no_grad():
                x = model.token_embedding(tokens)
                places = torch.arange(tokens.shape[1]) + first
                x = x + model.position_embedding(places) if position else x
                for block in model.blocks[:blocks]:
                    x = block(x)
                return model.head(model.norm(x) if norm else x)

        return output

    return (
        ("last-norm-lost", without(norm=False)),
        ("positions-lost", without(position=False)),
        ("positions-shifted", without(first=1)),
        ("blocks-lost", without(blocks=1)),
    )
