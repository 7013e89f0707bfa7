"""Balise 4: what each layer keeps for backward, and the four parts of a vision transformer's memory as formulas."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking.looks import Look, Value, judged, within
from dlojz_tp.judging.checking.verdicts import Wrong
from dlojz_tp.models.vit import ViT, ViTConfig

BATCH = 50
PARTS = ("parameters", "gradients", "optimizer states", "activations")


class Sums(nn.Module):
    """Three layers that read the same input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


class Part(nn.Module):
    """Reads two of eight numbers: a view, behind which the whole storage lives."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 8)

    def forward(self, x):
        return self.linear((x + 1)[:, :2])


class Halves(nn.Module):
    """Keeps two views of one storage."""

    def forward(self, x):
        left, right = x.chunk(2, -1)
        return left * right


class Front(nn.Module):
    """Keeps a view of its input, which the layer before keeps whole."""

    def forward(self, x):
        return x[:, :2].square()


class Scaled(nn.Module):
    """Times a buffer, which is there anyway."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((BATCH, 8), 2.0))

    def forward(self, x):
        return x * self.scale


class Masked(nn.Module):
    """Keeps a mask, one byte a number."""

    def forward(self, x):
        return torch.where(x > 0, x, 0.1)


def tied():
    """Two layers of one weight."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return [first, second]


N = 4 * BATCH * 8  # bytes of a batch of eight numbers
# the layers, and the bytes that each of them keeps, counted by hand
STACKS = {
    "linear and ReLU": (lambda: [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()], [N, N, 0, N]),
    "one input, three layers": (lambda: [Sums(), Sums()], [N, N]),
    "norm, GELU, softmax": (lambda: [nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1)], [N + 8 * BATCH, N, N]),
    "views": (lambda: [nn.Linear(8, 8), Part(), nn.Flatten(), nn.Linear(8, 8)], [N, N, 0, N]),
    "two views of one": (lambda: [nn.Linear(8, 8), Halves()], [N, N]),
    "a view of what is kept": (lambda: [nn.Linear(8, 8), nn.Tanh(), Front()], [N, N, 0]),
    "masks": (lambda: [nn.Linear(8, 8), Masked(), nn.Linear(8, 8)], [N, N // 4, N]),
    "float64": (lambda: [nn.Linear(8, 8).double(), nn.Tanh()], [2 * N, 2 * N]),
    "tied weights": (tied, [N, N]),
    "frozen layers": (lambda: [nn.Linear(8, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 8)], [0, 0, N]),
    "buffers": (lambda: [nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)], [N, 0, N]),
}
DUE = [bytes_ for _, each in STACKS.values() for bytes_ in each]

CONFIGS = [  # with a batch size: many tokens, few, mostly head, mostly image
    (ViTConfig(32, 2, 4, 128, patch=4, image=(64, 32), classes=10), 2),
    (ViTConfig(8, 6, 4, 8, patch=4, image=(8, 8), classes=10, channels=1), 3),  # narrow: the small terms count
    (ViTConfig(48, 1, 3, 192, patch=4, image=(8, 12), classes=1000, channels=1), 5),
    (ViTConfig(16, 2, 2, 64, patch=16, image=(32, 48), classes=3), 1),
]
LARGE = ViTConfig(768, 6, 12, 3072), 8


@functools.cache
def kept_by_vit(config, batch):
    """Bytes kept for backward, measured: of storages, without those of the parameters."""
    model, found = ViT(config), {}
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(torch.zeros(batch, config.channels, *config.image))
        loss = F.cross_entropy(logits, torch.zeros(batch, dtype=torch.long))
    del loss
    return sum(found.values())


@functools.cache
def count(config):
    """Parameters of a vision transformer."""
    with torch.device("meta"):
        return sum(p.numel() for p in ViT(config).parameters())


class ByFormula(TorchDispatchMode):
    """Refuses to run a model, on whatever device, and to make large tensors that are real."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("addmm", "mm", "native_layer_norm", "convolution"):
            raise Wrong("model-run")
        out = func(*args, **(kwargs or {}))
        real = isinstance(out, torch.Tensor) and out.device.type != "meta" and not isinstance(out, FakeTensor)
        if real and out.numel() > 100_000:
            raise Wrong("weights-allocated")
        return out


def observe(kept_bytes, predict_memory):
    got = []
    for name, (make, _) in STACKS.items():
        dtype = torch.float64 if name == "float64" else torch.float32
        got.append(kept_bytes(make(), torch.randn(BATCH, 8, dtype=dtype)))
    yield {"lengths": None if got[0] is None else [len(each) if isinstance(each, list | tuple) else 0 for each in got]}
    yield {"kept": [float(one) for each in got for one in each]}
    with ByFormula():
        large = predict_memory(*LARGE)
    yield {"names": sorted(large) if isinstance(large, dict) else type(large).__name__ if large is not None else None}
    found = {one: predict_memory(*one) for one in CONFIGS}
    for part, each in zip(PARTS, (4, 4, 8)):
        yield {part: [float(got[part]) / (each * count(config)) for (config, _), got in found.items()]}
    yield {"activations": [float(got["activations"]) / kept_by_vit(*one) for one, got in found.items()]}


LOOKS = [
    Look("one number for each layer", "lengths", [len(each) for _, each in STACKS.values()], "kept-form"),
    Value("the bytes that each layer keeps", "kept", [float(one) for one in DUE], "wrong-kept",
          fields=lambda seen, due: _first(seen)),
    Look("four parts", "names", sorted(PARTS), "parts-form"),
    *(Value(f"{part} of four transformers, against the measured bytes", part, [1.0] * len(CONFIGS), "wrong-" + part.split()[-1],
            holds=within(1e-6 if part != "activations" else 0.005), fields=lambda seen, due: _ratios(seen))
      for part in PARTS),
]  # fmt: skip


def _ratios(seen):
    text = ", ".join(f"{ratio:.2f}" for ratio in seen)
    return {"ratios": text, "expected": "each 1.00 times the true bytes", "got": text}


def _first(seen):
    """The first layer that is wrong, for a hint."""
    names = [(name, i) for name, (_, each) in STACKS.items() for i in range(len(each))]
    at = next(i for i, (one, due) in enumerate(zip(seen, DUE)) if one != due)
    shown = {
        "expected": f"{DUE[at]:,} bytes",
        "got": f"{seen[at]:,.0f} bytes",
        "where": "{}, layers[{}]".format(*names[at]),
    }
    return shown | {"stack": names[at][0], "layer": names[at][1], "bytes": int(seen[at]), "true": DUE[at]}


def balise_4(kept_bytes, predict_memory):
    yield from judged(LOOKS, observe, kept_bytes, predict_memory)
