"""The dropout of balise 7, outside of the sliced regions: where it is, how much, and alike on all ranks."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.checks.tensor_slicing.common import build, match, noise, randomise
from dlojz_tp.judging.probes.networks import state, twin
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.models import Block, Transformer

RATE, SHAPE = 0.3, (16, 5)  # sequences, tokens
MARGIN = 0.08  # more than six times the spread of a share of 1,280 draws
PLACES = (
    ("attention", "feed_forward.down"),
    ("feed-forward", "attention.output"),
)  # a place, and what is silenced then


class _Norms(TorchDispatchMode):
    """inputs: what layer norms were given."""

    def __init__(self):
        super().__init__()
        self.inputs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket._qualified_op_name == "aten::native_layer_norm":
            self.inputs.append(args[0].clone())
        return func(*args, **(kwargs or {}))


def places(SlicedBlock, SlicedTransformer, config, ranks) -> dict:  # noqa: N803
    """On a rank: {what: factors}, each place by itself: what training gives over what evaluation gives. `config` drops RATE."""
    found = {}
    for place, other in PLACES:
        plain = randomise(Block(config), 6)
        plain.attention.dropout = 0.0
        _silence(plain, other)
        layer, x = _built(SlicedBlock, plain, ranks), noise(*SHAPE, config.width, seed=7)
        with torch.no_grad():
            found[f"what the {place} adds"] = (layer(x) - x) / (layer.eval()(x) - x)
    plain = randomise(Block(config), 6)
    plain.drop.p = 0.0
    layer = _built(SlicedBlock, plain, ranks)
    with torch.no_grad():
        found["attention"] = close(layer(x), layer.eval()(x))
    plain = randomise(Transformer(config), 8)
    for block in plain.blocks:
        block.drop.p = block.attention.dropout = 0.0
        _silence(block, "attention.output", "feed_forward.down")
    tokens = torch.randint(config.vocab_size, SHAPE, generator=torch.Generator().manual_seed(9))
    layer = _built(SlicedTransformer, plain, ranks)
    with torch.no_grad(), _Norms() as norms:
        trained = layer(tokens)
    with torch.no_grad():
        whole = plain.token_embedding(tokens) + plain.position_embedding(torch.arange(SHAPE[1]))
        changed = not close(trained, layer.eval()(tokens))
    first = next((given for given in norms.inputs if given.numel() == whole.numel()), None)
    if first is None:  # norms of its own: only whether there is any dropout can be told
        first = whole * (torch.rand(whole.shape) > RATE) / (1 - RATE) if changed else whole
    found["the sum of the two embeddings"] = first.reshape(whole.shape) / whole
    return found


def _silence(module, *names):
    with torch.no_grad():
        for name in names:
            for p in module.get_submodule(name).parameters():
                p.zero_()


def _built(Layer, plain, ranks):  # noqa: N803
    layer, error = build(Layer, plain, ranks)
    if error is not None:
        raise error
    return layer


def _misplaced(got):
    """The first of the factors of `places` that are neither 0 nor 1 / (1 - RATE), or of which too many are 0."""
    for what, factors in got["places"].items():
        if what == "attention":
            continue
        kept, about = factors[factors.abs() > 1e-9], {"what": what, "rate": RATE}
        if kept.numel() == 0 or not close(kept, kept.median().expand_as(kept), 1e-6):
            return "residual-dropout-elsewhere", about
        scale, share = kept.median().item(), 1 - kept.numel() / factors.numel()
        if abs(scale - 1) < 1e-6 and not share:
            return "residual-dropout-lost", about
        scaled = abs(scale * (1 - RATE) - 1) <= 1e-6
        if not scaled or abs(share - RATE) > MARGIN:
            return "residual-dropout-rate", about | {"found": share if scaled or scale <= 1 else 1 - 1 / scale}
    return None


PLACE_LOOKS = [
    Look("dropout on what is added and on the embeddings, at the rate of the plain model", "places", None,
         "inner-dropout-lost", holds=lambda found, _: not found["attention"], fields=silent),
    recognised("", _misplaced),
]  # fmt: skip


def dropped(Layer, plain, x, forms, ranks):  # noqa: N803
    """On a rank: a step in training with dropout, its gradients of what all ranks hold whole, and evaluation."""
    layer = _built(Layer, plain, ranks)
    matched = match(state(layer), forms, state(plain), ranks.rank, ranks.size)
    torch.manual_seed(13)
    y = layer(x)
    y.backward(noise(*y.shape, seed=14))
    # what every rank holds whole tells whether the ranks agree, even where a gathered result hides it
    shared = {form.covers[0]: name for name, (form, _) in matched.items() if form.dim is None and not form.optional}
    gradients = {n: p.grad for n, p in layer.named_parameters()}
    found = {"training": y.detach(), "shared": {held: gradients[name] for held, name in shared.items()}}
    layer.eval()
    with torch.no_grad():
        return found | {"eval": layer(x).clone(), "plain": twin(plain).eval()(x)}


def agreement(claim):
    """Looks at what `dropped` found on the ranks of a group: which rank drops out otherwise than rank 0, or in evaluation?"""
    return [
        Look(claim, "dropout", None, "model-dropout-in-eval", holds=lambda got, _: close(got["eval"], got["plain"]),
             fields=_evaluated),
        recognised("", _disagreement),
    ]  # fmt: skip


def _evaluated(got, _):
    return {"expected": got["plain"], "got": got["eval"]}


def _disagreement(got):
    mine, first = got["dropout"], got["all"][0]["dropout"]
    pairs = {"the result": (mine["training"], first["training"])}
    pairs |= {f"the gradient of {held}": (g, first["shared"].get(held, g)) for held, g in mine["shared"].items()}
    what = next((what for what, both in pairs.items() if not close(*both)), None)
    return what and ("residual-dropout-differs", {"what": what, "got": pairs[what][0], "expected": pairs[what][1]})
