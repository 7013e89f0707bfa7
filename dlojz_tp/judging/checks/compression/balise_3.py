"""Balise 3: batch norm folded, ranges with the least error, a layer in integers: against real integers."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent

DRAWN = torch.Generator().manual_seed(3)


def drawn(*shape):
    return torch.randn(shape, generator=DRAWN)


def pair(layer, norm):
    """Layer and batch norm, float64, with numbers that nothing forgives: small variances, large means."""
    for p in [*layer.parameters(), norm.weight, norm.bias, norm.running_mean]:
        p.data = drawn(*p.shape).double()
    norm.running_var = torch.rand(norm.num_features, generator=DRAWN).double() / 100
    return layer.eval(), norm.double().eval()


#       layer and norm, what goes in
PAIRS = [
    (*pair(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)), drawn(3, 5).double()),
    (*pair(nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0.01)), drawn(3, 4).double()),
    (*pair(nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6)), drawn(2, 4, 4, 3).double()),
    (*pair(nn.Conv2d(1, 3, (2, 1)), nn.BatchNorm2d(3)), drawn(1, 1, 3, 2).double()),
]
SHARES = [round(0.02 * k, 2) for k in range(5, 51)]
FAR = torch.cat([drawn(600), torch.tensor([15.0, -9.0])])  # two numbers far from all others
#         x, bits, symmetric
SPREAD = [(FAR, 4, False), (FAR, 3, True), (FAR.abs(), 5, False), (torch.linspace(-1, 3, 99), 6, False),
          (torch.cat([torch.full((40, 25), 0.5), torch.full((1, 25), -6.0)]), 8, True)]  # fmt: skip


def whole(low, high, *shape, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=DRAWN).to(dtype)


def layer_of(n, inputs, outputs, zero, zero_out, bits=8, spread=0.8):
    """Integers of a layer whose sums fill the range of what comes out, and saturate now and then."""
    q, weight = whole(0, 256, n, inputs, dtype=torch.uint8), whole(-127, 128, outputs, inputs, dtype=torch.int8)
    usual = 127 * 73 * inputs**0.5
    factor = whole(2**30, 2**31, outputs, dtype=torch.int64)
    real = spread * 2 ** (bits - 1) / usual
    shift = (31 - torch.tensor(real).log2().floor().long()).expand(outputs) + torch.arange(outputs) % 2
    bias = whole(int(-usual), int(usual), outputs)
    zeros = [torch.tensor(one, dtype=torch.int32) for one in (zero, zero_out)]
    return q, zeros[0], weight, bias, factor, shift, zeros[1], bits


USUAL = layer_of(4, 30, 6, 93, 70)
OTHERS = [
    layer_of(2, 7, 3, 0, 128),
    layer_of(3, 50, 4, 255, 0),
    layer_of(2, 1, 1, 117, 100, 8, 0.3),
    layer_of(5, 9, 2, 100, 7, 4, 3.0),
]
LONG = layer_of(2, 5000, 3, 2, 10)
LONG = (LONG[0] // 2 + 128, LONG[1], LONG[2].abs(), *LONG[3:4], LONG[4], LONG[5] + 7, *LONG[6:])  # all of one sign
#        each sum comes out as a half
HALVES = (torch.arange(0, 12, dtype=torch.uint8)[:, None], torch.tensor(5, dtype=torch.int32),
          torch.tensor([[1], [-3]], dtype=torch.int8), torch.tensor([0, 2], dtype=torch.int32),
          torch.tensor([2**30, 2**30]), torch.tensor([31, 32]), torch.tensor(60, dtype=torch.int32), 8)  # fmt: skip
#        a sum so little below a half that no float tells: the product with the factor has more than 53 bits
ALMOST = (torch.full((1, 1), 5, dtype=torch.uint8), torch.tensor(5, dtype=torch.int32), torch.tensor([[1]], dtype=torch.int8),
          torch.tensor([1519841907], dtype=torch.int32), torch.tensor([1558644615]), torch.tensor([54]),
          torch.tensor(20, dtype=torch.int32), 8)  # fmt: skip


def integers_of(q, zero, weight, bias, factor, shift, zero_out, bits):
    """With Python's integers, which have as many bits as they need."""
    q, weight = (one.numpy().astype(object) for one in (q, weight))
    total = (q - int(zero)) @ weight.T + np.array(bias.tolist(), dtype=object)
    rows = [[(t * f + 2 ** (s - 1)) // 2**s + int(zero_out) for t, f, s in zip(row, factor.tolist(), shift.tolist())]
            for row in total]  # fmt: skip
    return torch.tensor(rows).clamp(0, 2**bits - 1).to(torch.uint8)


def squared_errors(x, bits, symmetric):
    """Of each share, in float64."""
    least, most = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    x, found = x.double(), []
    for share in SHARES:
        low, high = share * x.min().clamp(max=0), share * x.max().clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = (high - low) / (most - least)
        zero = torch.round(least - low / scale)
        found.append((((torch.round(x / scale) + zero).clamp(least, most) - zero) * scale - x).square().sum())
    return torch.stack(found)


BEST = [SHARES[int(squared_errors(*case).argmin())] for case in SPREAD]


class Floats(TorchDispatchMode):
    """Notes the operators that give floating-point numbers."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(
            isinstance(one, torch.Tensor) and one.is_floating_point()
            for one in (out if isinstance(out, tuple | list) else [out])
        ):
            self.names.add(func.overloadpacket._qualified_op_name.replace("aten::", ""))
        return out


def together(layer, x, weight, bias):
    """What one layer gives."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    return nn.functional.conv2d(x, weight, bias, groups=layer.groups)


def copied(case):
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in case]


def observe(fold, least_error, integer_linear):
    given = [copy.deepcopy(one[:2]) for one in PAIRS]
    with torch.no_grad():
        got = [fold(*one) for one in given]
    yield {"fold form": [list(map(tuple, (w.shape, b.shape))) if w is not None else None for w, b in got]}
    yield {"folded": [together(layer, x, *one).detach() for (layer, _, x), one in zip(PAIRS, got)]}
    after = [[*layer.state_dict().values(), *norm.state_dict().values()] for layer, norm in given]
    before = [[*layer.state_dict().values(), *norm.state_dict().values()] for layer, norm, _ in PAIRS]
    same = all(torch.equal(a, b) for one, other in zip(before, after) for a, b in zip(one, other))
    yield {"modules changed": not same}
    got = [least_error(x.clone(), list(SHARES), *way) for x, *way in SPREAD]
    yield {"range form": [form(list(one)) if isinstance(one, tuple | list) else form(one) for one in got]}
    yield {"shares": torch.tensor([float(high / x.max().double()) for (x, *_), (_, high) in zip(SPREAD, got)]),
           "lows": torch.tensor([float(low) for low, _ in got])}  # fmt: skip
    with Floats() as floats:
        got = integer_linear(*copied(USUAL))
    yield {"form": form(got), "usual": got, "floats": sorted(floats.names)}
    yield {"others": [integer_linear(*copied(case)) for case in OTHERS], "long": integer_linear(*copied(LONG))}
    yield {"halves": integer_linear(*copied(HALVES))}
    yield {"almost": integer_linear(*copied(ALMOST)).tolist()}


TRUE = [norm(layer(x)).detach() for layer, norm, x in PAIRS]
RANGES = [[share * x.min(), share * x.max()] for (x, *_), share in zip(SPREAD, BEST)]


def rounded(seen, due):
    """The hint where nearly a half is wrong: rounded up, it was a float."""
    return "floats" if seen[0][0] == due[0][0] + 1 else "wrong-layer"


LOOKS = [
    Look("one weight and one bias for layer and batch norm", "fold form",
         [[tuple(layer.weight.shape), (layer.weight.shape[0],)] for layer, *_ in PAIRS], "fold-form"),
    Value("the same result as both together", "folded", TRUE, "wrong-fold"),
    Look("the modules stay", "modules changed", False, "modules-changed"),
    Look("a range", "range form", form(RANGES), "range-form"),
    Value("the range with the least error", "shares", torch.tensor(BEST), "wrong-range"),
    Value("", "lows", torch.stack([low for low, _ in RANGES]), "wrong-range"),
    Look("integers of a layer", "form", form(integers_of(*USUAL)), "layer-form"),
    Value("equal to Python's integers", "usual", integers_of(*USUAL), "wrong-layer"),
    Look("nowhere a float", "floats", [], "floats", fields=lambda seen, due: silent(seen, due) | {"names": ", ".join(seen[:4])}),
    Value("other sizes, zero points and bits", "others", [integers_of(*case) for case in OTHERS], "wrong-layer"),
    Value("halves", "halves", integers_of(*HALVES), "wrong-layer"),
    Value("sums of 5000 products", "long", integers_of(*LONG), "wrong-layer"),
    Look("nearly a half", "almost", integers_of(*ALMOST).tolist(),
         rounded, fields=lambda seen, due: silent(seen, due) | {"names": "Python's or NumPy's, a sum was rounded to 53 bits"}),
]  # fmt: skip


def balise_3(fold, least_error, integer_linear):
    yield from judged(LOOKS, observe, fold, least_error, integer_linear)
