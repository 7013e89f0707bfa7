"""Balise 6: adapters merged, unmerged, saved and loaded: weights and outputs by dense products, files read by safetensors.

The models are of the notebook's LoRALinear. Where that is not right, they are of one of our own.
"""

import contextlib
import copy
import inspect
import tempfile
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, at_most, judged, silent
from dlojz_tp.measure.operations import Operations
from dlojz_tp.works.balise import BaliseNotDone

LAYERS = {"block.query": (2, 4), "block.inner.value": (1, 1), "out": (3, 1.5)}  # rank, alpha
DTYPES = torch.float32, torch.float64
CHANGES = {"head.bias": 1e-3, "average": 1, "out.linear.weight": 1e-4}  # another base: this last number is larger


class LoRA(nn.Module):
    """linear(x) + scale * B A x; linear(x) alone where `merged` is True."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.A = nn.Parameter(linear.weight.new_zeros(rank, linear.in_features))
        self.B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))

    def forward(self, x):
        y = self.linear(x)
        return y if getattr(self, "merged", False) else y + self.scale * x @ self.A.T @ self.B.T


def filled(layer, seed):
    """The layer, with A and B drawn."""
    draws = torch.Generator().manual_seed(seed)
    for p in (layer.A, layer.B):
        p.data.copy_(torch.randn(p.shape, generator=draws, dtype=torch.float64))
    return layer


def is_right(kind):
    """Whether a LoRALinear computes what balise 5 asks for."""
    try:
        layer = filled(kind(nn.Linear(5, 3).double(), 2, 6), 0)
        x = torch.linspace(-1, 2, 10).double().view(2, 5)
        due = x @ (layer.linear.weight + 3 * layer.B @ layer.A).T + layer.linear.bias
        learns = [name for name, p in layer.named_parameters() if p.requires_grad]
        return layer.scale == 3 and sorted(learns) == ["A", "B"] and torch.allclose(layer(x), due)
    except Exception:  # whatever it is, it is another balise's answer
        return False


def globals_of(answer):
    return getattr(inspect.unwrap(answer), "__globals__", {})


@contextlib.contextmanager
def kind_for(answers):
    """The LoRALinear of the answers' notebook, or one of our own, which then has that name there."""
    names = [globals_of(answer) for answer in answers]
    kind = names[0].get("LoRALinear")
    if is_right(kind):
        yield kind
        return
    with contextlib.ExitStack() as stack:
        for its in names:
            stack.enter_context(mock.patch.dict(its, LoRALinear=LoRA))
        yield LoRA


def plain(dtype):
    """A network of linear layers, at any depth, with and without a bias, and a buffer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        inner = nn.Sequential(OrderedDict(value=nn.Linear(5, 3, bias=False), tanh=nn.Tanh()))
        block = nn.Sequential(OrderedDict(query=nn.Linear(4, 5), tanh=nn.Tanh(), inner=inner))
        net = nn.Sequential(OrderedDict(block=block, out=nn.Linear(3, 4), head=nn.Linear(4, 2)))
    net.register_buffer("average", torch.ones(5))
    return net.to(dtype).eval().requires_grad_(False)


def model_of(kind, dtype=torch.float32, seed=1):
    net = plain(dtype)
    for k, (name, how) in enumerate(LAYERS.items()):
        owner, _, own = name.rpartition(".")
        setattr(net.get_submodule(owner), own, filled(kind(net.get_submodule(name), *how), 10 * seed + k))
    return net


def dense(net):
    """A network without adapters, in float64, that computes what `net` is to compute; none of net is merged."""
    net64 = plain(torch.float64)
    for name, (rank, alpha) in LAYERS.items():
        layer, mine = net.get_submodule(name), net64.get_submodule(name)
        mine.weight.data += alpha / rank * layer.B.detach().double() @ layer.A.detach().double()
    return net64


def dense_weights(net):
    return [dense(net).get_submodule(name).weight.detach() for name in LAYERS]


def weights(net):
    return [net.get_submodule(name).linear.weight.detach().clone() for name in LAYERS]


def is_merged(net, name):
    return bool(getattr(net.get_submodule(name.removesuffix(".A").removesuffix(".B")), "merged", False))


def marks(net):
    return [is_merged(net, name) for name in LAYERS]


def products(net):
    """How many matrix products a pass has."""
    with Operations() as operations:
        out(net)
    return sum(operations.calls[f"aten.{name}"] for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"))


def held(net):
    """What stays whatever the values are: names; A and B themselves; what learns, which merged adapters may or may not."""
    own = [
        (name, id(p), p.requires_grad or is_merged(net, name))
        for name, p in net.named_parameters()
        if name.endswith((".A", ".B"))
    ]
    base = [(name, p.requires_grad, p.is_leaf) for name, p in net.named_parameters() if not name.endswith((".A", ".B"))]
    return [*net.state_dict()], own, base


def trained(net):
    """A and B are others."""
    for name in LAYERS:
        filled(net.get_submodule(name), 77)


def each(change, nets):
    for net in nets:
        change(net)


def out(net):
    with torch.no_grad():
        return net(torch.linspace(-1, 1, 24).sin().view(6, 4).to(net.head.weight.dtype))


def observe_merge(kind, merge, unmerge):
    nets = [model_of(kind, dtype) for dtype in DTYPES]
    before = [held(net) for net in nets]
    each(unmerge, nets)
    yield {"not merged": [weights(net) for net in nets]}
    each(merge, nets)
    yield {"weights": [weights(net) for net in nets], "marks": [marks(net) for net in nets]}
    yield {"products": [products(net) for net in nets], "outputs": [out(net) for net in nets]}
    yield {"held": [held(net) for net in nets] == before}
    twin, changed = copy.deepcopy(nets[1]), copy.deepcopy(nets[1])
    changed.out.linear.weight.data.zero_()
    each(merge, nets)
    part = model_of(kind, torch.float64)
    merge(part.block)
    merge(part)
    yield {"twice": [weights(net) for net in [*nets, part]]}
    unmerge(twin)
    yield {"twin": [out(nets[1]), out(twin), out(changed)]}
    each(unmerge, nets)
    yield {"back": [weights(net) for net in nets], "back marks": [marks(net) for net in nets], "back held": [held(net) for net in nets] == before}  # fmt: skip
    each(unmerge, nets)
    unmerge(part.block.inner)
    unmerge(part)
    yield {"back twice": [weights(net) for net in [*nets, part]]}
    each(trained, nets)
    yield {"trained": [out(net) for net in nets]}
    each(merge, nets)
    yield {"again": [weights(net) for net in nets]}


def observe_files(kind, names, save, load, folder):
    for label, dtype, path in (
        ("a text as path", DTYPES[0], f"{folder}/one"),
        ("a Path", DTYPES[1], Path(folder) / "two.safetensors"),
    ):
        net = model_of(kind, dtype)
        if dtype == torch.float64:  # a view, not contiguous
            layer = net.block.query
            layer.A = nn.Parameter(layer.A.detach().T.contiguous().T)
        due = {f"{name}.{part}": getattr(net.get_submodule(name), part) for name in LAYERS for part in "AB"}
        save(net, path)
        with safe_open(path, "pt") as file:
            kept = file.metadata() or {}
        found, base = load_file(path), names.get("fingerprint", lambda net: "")(net)
        yield {f"{label}: names": sorted(found), f"{label}: base": kept.get("base") == base}
        yield {f"{label}: values": all(found[key].dtype == dtype and torch.equal(found[key], due[key]) for key in due)}
        fresh = model_of(kind, dtype, seed=2)
        before = held(fresh)
        load(fresh, path)
        yield {
            f"{label}: outputs": out(fresh),
            f"{label}: held": held(fresh) == before,
            f"{label}: loaded base": weights(fresh),
        }
    yield {"others": [others(kind, load, path, *one) for one in CHANGES.items()]}


def others(kind, load, path, name, change):
    """What a load into a base with another number does, in words."""
    net = model_of(kind, torch.float64, seed=3)
    net.state_dict()[name].view(-1)[-1] += change
    before = {key: value.clone() for key, value in net.state_dict().items()}
    try:
        load(net, path)
        found = "no ValueError"
    except BaliseNotDone:
        raise
    except Exception as error:
        found = "a ValueError" if isinstance(error, ValueError) else f"a {type(error).__name__}"
    now = net.state_dict()
    same = now.keys() == before.keys() and all(torch.equal(now[key], before[key]) for key in before)
    return found if same else f"{found}, and the model has changed"


MODELS = [model_of(LoRA, dtype) for dtype in DTYPES]
BEFORE = [weights(net) for net in MODELS]
MERGED, OUTPUTS = [dense_weights(net) for net in MODELS], [out(dense(net)) for net in MODELS]
CHANGED = dense(MODELS[1])
CHANGED.out.weight.data.zero_()
each(trained, MODELS)
AGAIN, TRAINED = [dense_weights(net) for net in MODELS], [out(dense(net)) for net in MODELS]
ALL, NONE = [[True] * len(LAYERS)] * 2, [[False] * len(LAYERS)] * 2


def other(seen, due):
    """A look's fields: what the first wrong load did."""
    return {"what": next(one for one in seen if one != "a ValueError")} | silent(seen, due)


LOOKS = [
    Look("unmerge leaves layers that are not merged alone", "not merged", BEFORE, "wrong-unmerge", fields=silent),
    Value("merged: W + scale B A", "weights", MERGED, "wrong-weight", fields=silent),
    Look("the mark `merged` is set in each layer", "marks", ALL, "no-mark", fields=silent),
    Look("a merged layer computes linear(x) alone", "products", len(LAYERS) + 1, "not-linear-alone", holds=at_most, fields=silent),
    Value("outputs as before", "outputs", OUTPUTS, "not-linear-alone", fields=silent),
    Look("the parameters and their names are unchanged", "held", True, "other-parameters"),
    Value("merged twice, and a part merged before the whole", "twice", [*MERGED, MERGED[1]], "merged-twice", fields=silent),
    Value("unmerged: W again", "back", BEFORE, "wrong-unmerge", fields=silent),
    Look("no mark", "back marks", NONE, "no-mark", fields=silent),
    Look("the parameters and their names are unchanged", "back held", True, "other-parameters"),
    Value("unmerged twice", "back twice", [*BEFORE, BEFORE[1]], "wrong-unmerge", fields=silent),
    Value("after that, the adapter learns again", "trained", TRAINED, "wrong-unmerge", fields=silent),
    Value("and is merged again", "again", AGAIN, "wrong-weight", fields=silent),
    Value("copies of a merged model that are unmerged or changed, and the original", "twin", [OUTPUTS[1], OUTPUTS[1], out(CHANGED)], "shared-copy", fields=silent),
]  # fmt: skip
NAMES = sorted(f"{name}.{part}" for name in LAYERS for part in "AB")
for label, k in (("a text as path", 0), ("a Path", 1)):
    LOOKS += [
        Look(f"{label}: A and B of each layer, under their names", f"{label}: names", NAMES, "wrong-names"),
        Look("the base's fingerprint", f"{label}: base", True, "no-base"),
        Look("their values", f"{label}: values", True, "wrong-values"),
        Value("after loading, a model gives the outputs of the saved one", f"{label}: outputs", OUTPUTS[k], "wrong-values", fields=silent),
        Look("its parameters are the same objects", f"{label}: held", True, "other-parameters"),
        Value("its base stays", f"{label}: loaded base", BEFORE[k], "wrong-values", fields=silent),
    ]  # fmt: skip
LOOKS.append(Look("another base", "others", ["a ValueError"] * len(CHANGES), "other-base", fields=other))


def balise_6(merge, unmerge, save_adapter, load_adapter):
    answers = merge, unmerge, save_adapter, load_adapter
    names = globals_of(save_adapter)
    with kind_for(answers) as kind, tempfile.TemporaryDirectory() as folder:

        def observe(*_):
            yield from observe_merge(kind, merge, unmerge)
            yield from observe_files(kind, names, save_adapter, load_adapter, folder)

        yield from judged(LOOKS, observe, *answers)
