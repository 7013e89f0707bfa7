"""The dropout of balise 7, outside of the sliced regions: where it is, how much, and alike on all ranks."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import build, match, noise, randomise
from dlojz_tp.models import Block, Transformer
from dlojz_tp.probes.networks import state

HINTS = {
    "residual-dropout-lost": "In training, nothing is dropped from {what}. The plain version does it there, with "
                             "its `drop`.",
    "residual-dropout-rate": "The dropout of {what} is {rate} in the plain version, but yours is {found:.3g}. Use "
                             "its `drop`.",
    "residual-dropout-elsewhere": "In training, you drop more than {what}, or something else: the input, or the "
                                  "sum with it.",
    "inner-dropout-lost": "In training, the attention inside your block has no dropout, but the plain block's has. "
                          "Its rate is block.attention.dropout.",
    "residual-dropout-differs": "In training with dropout, {what} differs between the ranks. Outside the sliced "
                                "regions, all ranks must drop out the same numbers: use no ranks.own_random() "
                                "there, and no seed that differs between ranks.",
    "model-dropout-in-eval": "In evaluation the model's result is not the plain model's, because something is "
                             "dropped out.",
}  # fmt: skip

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


def judge_places(found, where):
    """Raise Wrong where one of the factors of `places` is neither 0 nor 1 / (1 - RATE), or too many are 0."""
    if found.pop("attention", False):
        raise Wrong("inner-dropout-lost", where=where)
    for what, factors in found.items():
        kept = factors[factors.abs() > 1e-9]
        if kept.numel() == 0 or not close(kept, kept.median().expand_as(kept), 1e-6):
            raise Wrong("residual-dropout-elsewhere", what=what, where=where)
        scale, share = kept.median().item(), 1 - kept.numel() / factors.numel()
        if abs(scale - 1) < 1e-6 and not share:
            raise Wrong("residual-dropout-lost", what=what, where=where)
        used = share if abs(scale * (1 - RATE) - 1) < 1e-6 else 1 - 1 / scale if scale > 1 else share
        if abs(scale * (1 - RATE) - 1) > 1e-6 or abs(share - RATE) > MARGIN:
            raise Wrong("residual-dropout-rate", what=what, rate=RATE, found=used, where=where)


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
        return found | {"eval": layer(x).clone(), "plain": copy.deepcopy(plain).eval()(x)}


def judge_agreement(reports, size):
    """Raise Wrong where the ranks of one group dropped out differently, or in evaluation."""
    for rank, got in enumerate(reports):
        where = f"rank {rank} of {size}"
        if not close(got["eval"], got["plain"]):
            raise Wrong("model-dropout-in-eval", expected=got["plain"], got=got["eval"], where=where)
        pairs = [("the result", got["training"], reports[0]["training"])]
        pairs += [
            (f"the gradient of {held}", g, reports[0]["shared"].get(held, g)) for held, g in got["shared"].items()
        ]
        for what, value, wanted in pairs:
            if not close(value, wanted):
                raise Wrong("residual-dropout-differs", what=what, expected=wanted, got=value, where=where)
