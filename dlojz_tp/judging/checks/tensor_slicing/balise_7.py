"""Balise 7: a sliced block, and the whole sliced transformer with its head."""

import copy
from functools import cache, partial

import torch

from dlojz_tp import launch
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.checks.tensor_slicing import parts
from dlojz_tp.judging.checks.tensor_slicing.attention_forms import attention_forms
from dlojz_tp.judging.checks.tensor_slicing.block_dropout import PLACE_LOOKS, agreement, dropped, places
from dlojz_tp.judging.checks.tensor_slicing.block_dropout import RATE as PLACE_RATE
from dlojz_tp.judging.checks.tensor_slicing.common import Form, exercise, noise, randomise, truth
from dlojz_tp.judging.checks.tensor_slicing.layers import layer_looks
from dlojz_tp.judging.checks.tensor_slicing.layouts import WORLD, in_groups_too, on_groups
from dlojz_tp.judging.checks.tensor_slicing.linear import pair_forms
from dlojz_tp.judging.checks.tensor_slicing.right_ranks import CheckRanks
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each
from dlojz_tp.judging.probes.gpus import MIXED, on_gpus
from dlojz_tp.judging.probes.traffic import Call, Traffic, on_the_wire
from dlojz_tp.models import Block, Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab_size=60, width=16, heads=4, layers=2, max_length=6, ffn_width=24)
STEPS = 2
NORMS = ("norm_attention", "norm_feed_forward")


def _block_forms(prefix=""):
    norms = [Form((f"{prefix}{norm}.{part}",), None) for norm in NORMS for part in ("weight", "bias")]
    # a feed-forward of two column-cut layers is known too: it sends too much, which is said then
    gathered = [Form((f"{prefix}feed_forward.down.{part}",), 0) for part in ("weight", "bias")]
    attention = attention_forms(CONFIG.width // CONFIG.heads, f"{prefix}attention.")
    return norms + attention + pair_forms(f"{prefix}feed_forward.") + gathered


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


def _on_gpu(_, SlicedTransformer):  # noqa: N803
    model = copy.deepcopy(_case("tied")["plain"]).to(launch.device())
    SlicedTransformer(model, CheckRanks()).to(launch.device())(_case("tied")["batches"][0].to(launch.device()))


def _enough(kind, at):
    """Bytes that a rank sends for one token, rather more than less: its vector, twice in each block, its scores, and
    all vectors of positions, where each of these is a sum over the ranks."""
    config = _MODELS[kind]
    numbers = (1 + 2 * config.layers + config.max_length) * config.width + config.vocab_size
    return on_the_wire([Call("all_reduce", 8 * numbers, at[1])])


def _bytes(calls, enough):
    about = {"found": int(on_the_wire(calls)), "wanted": int(enough), "where": "one token"}
    return silent(calls, enough) | about


def _models(SlicedBlock, SlicedTransformer, ranks):  # noqa: N803
    """On a rank: reports of the block, of the models, of the dropout beside the slices."""
    block = exercise(SlicedBlock, _case("block"), ranks)
    report = {"block": block, "stopped": block["stopped"]}
    if report["stopped"]:
        yield report
        return
    if ranks.size == parts.LONGER_AT:
        block["longer"] = parts.longer(SlicedBlock, _case("block")["other"], CONFIG.width, ranks)
    plain = randomise(Block(_config(dropout=0.5)), 6)
    plain.attention.dropout = 0.0  # what is left is the block's own
    block["dropout"] = dropped(SlicedBlock, plain, noise(2, 5, CONFIG.width, seed=7), _block_forms(), ranks)
    yield report
    report = {}
    for kind in MODELS_AT[ranks.size]:
        report[kind] = exercise(SlicedTransformer, _case(kind), ranks)
        report["stopped"] = report[kind]["stopped"]
        if report["stopped"]:
            yield report
            return
        plain, tokens = _case(kind)["plain"], _case(kind)["batches"][0]
        report[kind]["shorter"] = parts.shorter(SlicedTransformer, plain, tokens, ranks)
        with Traffic() as sent:
            report[kind]["odd"] = {"a single token": parts.run(SlicedTransformer, plain, tokens[:1, :1], ranks)}
        report[kind]["sent"] = sent.calls
    yield report
    if ranks.size == WORLD:
        model = {"places": places(SlicedBlock, SlicedTransformer, _config(dropout=PLACE_RATE), ranks)}
        plain = randomise(Transformer(_config(dropout=0.3)), 8)
        model["dropout"] = dropped(SlicedTransformer, plain, _case("own")["batches"][0], _case("own")["forms"], ranks)
        yield {"model": model}


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


def _model_looks(kind, named):
    layers = _MODELS[kind].layers  # the embeddings, the blocks and the head forward; the blocks and the head backward
    return [
        *layer_looks(partial(_case, kind), partial(_truth, kind), (2 * layers + 3, 2 * layers + 2),
                     known=_mistakes(kind), named=lambda slug, got: named.get(slug, slug)),
        parts.odd("for a single token little travels, no table of weights"),
        parts.SHORTER,
        Look("", "sent", partial(_enough, kind), "tables-travel",
             holds=lambda calls, enough: on_the_wire(calls) <= enough, fields=_bytes),
    ]  # fmt: skip


_SENT = 2 * 2 * 5 * CONFIG.width * 8
LOOKS = {  # key of a report: (what is said before its claims, its looks)
    "block": ("block: ", [
        *layer_looks(partial(_case, "block"), partial(_truth, "block"), (2, 2), sent=(_SENT, _SENT), known=_BLOCK),
        parts.LONGER,
        *agreement("the same dropout on all ranks, none in evaluation"),
    ]),
    "own": ("a head of its own: ", _model_looks("own", {})),
    "tied": ("a tied head: ", _model_looks("tied", {"slice-doubled": "tie-broken", "weight-partial": "tied-entrance"})),
    "model": ("", [*PLACE_LOOKS, *agreement("model: evaluation, and training with the same dropout on all ranks")]),
}  # fmt: skip


def _judge(every):
    for key, (title, looks) in LOOKS.items():
        for claim in at_each(looks, [(size, rank, got[key]) for size, rank, got in every if key in got]):
            yield f"{title}{claim}"


def balise_7(SlicedBlock, SlicedTransformer):  # noqa: N803
    """A block; the model with a head of its own, and with a tied one; dropout outside the sliced regions."""
    yield from in_groups_too(_judge, on_groups(_models, SlicedBlock, SlicedTransformer))
    yield "the model where each of two ranks has a GPU"
    on_gpus(_on_gpu, SlicedTransformer, known=((MIXED, "positions-not-on-gpu"),))
