"""Balise 7: floating-point formats of few bits, against PyTorch's own types and written-out numbers; scales as powers of two."""

import math

import torch

from dlojz_tp.judging.checking.looks import Look, Value, form, judged, silent, tried
from dlojz_tp.measure.operations import Operations

#       bits of mantissa, exponent of the least normal number, largest number; PyTorch's type
E4M3, E5M2, E2M1, HALF = (3, -6, 448.0), (2, -14, 57344.0), (1, 0, 6.0), (10, -14, 65504.0)
TYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, HALF: torch.float16}
FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # E2M1, as the table of the MX specification has them
INF, NAN = math.inf, math.nan
DRAWN = torch.Generator().manual_seed(7)
BOTH = E4M3, E5M2


def codes(kind):
    """The finite numbers of an eight-bit type in order: all 256 codes but infinities and NaN."""
    found = torch.arange(256, dtype=torch.uint8).view(TYPES[kind]).float()
    return found[found.isfinite()].sort().values


def truth(x, kind):
    """By PyTorch's type; what that does beyond the largest number is another thing from version to version."""
    if kind == E2M1:  # the nearest; of two, the one whose mantissa is even, as every other is
        apart = (x.abs().unsqueeze(-1) - FOUR_BITS).abs()
        apart[..., 1::2] += 1e-6  # decides between two equal ones alone: all x are multiples of a sixteenth
        return torch.copysign(FOUR_BITS[apart.argmin(-1)], x)
    return x.clamp(-kind[2], kind[2]).to(TYPES[kind]).float()


def middles(kind):
    """Halfway between two neighbours, which float32 holds exactly."""
    found = codes(kind)
    return (found[1:] + found[:-1]) / 2


def spread(kind, least, most):
    """Numbers of both signs with all exponents from least to most - 1."""
    exponents = torch.arange(least, most).repeat_interleave(8)
    sizes = torch.ldexp(1 + torch.rand(len(exponents), generator=DRAWN), exponents)
    return sizes * (1 - 2 * torch.randint(2, sizes.shape, generator=DRAWN))


NORMAL = [spread(kind, kind[1], int(math.log2(kind[2]))) for kind in BOTH]
TIES = [middles(kind)[middles(kind).abs() > 2.0 ** kind[1]] for kind in BOTH]
SMALL = [torch.cat([spread(kind, kind[1] - kind[0] - 3, kind[1]), middles(kind)[middles(kind).abs() < 2.0 ** kind[1]],
                    torch.tensor([0.0, -0.0, 1e-30, -1e-42])]) for kind in BOTH]  # fmt: skip
LARGE = [torch.tensor([1.01, -1.03, 1.06, 1.3, -2.0, 1e4, -1e30]) * kind[2] for kind in BOTH]
ENDLESS = torch.tensor([INF, -INF, 1.0, NAN])
OTHER = [torch.arange(-112, 113) / 16, torch.cat([spread(HALF, -26, 15), torch.tensor([0.0])])]
MOVED = [(kind[0], kind[1] - 4, kind[2] / 16) for kind in BOTH]  # all numbers a sixteenth as large
MOVED_X = [torch.cat([x, y, z]) / 16 for x, y, z in zip(NORMAL, SMALL, LARGE)]
SHAPES = [torch.tensor(0.3), torch.randn(4, 3, 2, generator=DRAWN).transpose(0, 2)]


def row(*parts):
    """Blocks of different sizes in one row: (largest magnitude, length); its place and its sign change."""
    found = []
    for k, (size, length) in enumerate(parts):
        one = (torch.rand(length, generator=DRAWN) - 0.5) * size
        one[k % length] = (-1) ** k * size
        found.append(one)
    return torch.cat(found)


#         x, largest number, length of a block
ROWS = [
    (row((1.0, 32), (300.0, 32), (0.002, 32)), 448.0, 32), (row((447.0, 32), (449.0, 32), (500.0, 32), (900.0, 32)), 448.0, 32),
    (row((5e4, 32), (1e9, 32), (-7.0, 8)), 57344.0, 32), (row((5.0, 4), (7.0, 4), (20.0, 4), (0.3, 4), (100.0, 2)), 6.0, 4),
    (torch.stack([row((a, 16), (b, 16), (c, 5)) for a, b, c in ((1, 1e3, 3e-4), (9e5, 2, 70))]), 448.0, 16),
    (torch.randn(3, 2, 12, generator=DRAWN).transpose(0, 1) * torch.tensor([1.0, 40, 1e-3]).view(1, 3, 1), 6.0, 4),
]  # fmt: skip
ABOVE = torch.tensor(448.0).nextafter(torch.tensor(INF)).item() * 2**20  # the next number of float32
EXACT = [(row((448.0, 32), (448.0 * 2**20, 32), (448.0 / 2**30, 32), (57344.0, 32), (ABOVE, 32)), 448.0, 32)]
TINY = torch.full((2, 32), 1e-38)
WHOLE = [(torch.tensor([0.5, -3.0, 2.0]), 448.0), (torch.tensor([[7e5, 1.0], [-2.0, 9e5]]), 57344.0),
         (torch.tensor(-1e-7), 6.0), (torch.full((2, 3), -12.0), 6.0)]  # fmt: skip
POSITIVE = [bool(x.max() == x.abs().max()) for x, _ in WHOLE]


def exponents(x, most, size):
    """Block by block, number by number: how often 1 is doubled or halved until nothing is too large."""
    found = torch.zeros(x.shape)
    for one, out in zip(x.reshape(-1, x.shape[-1]).double(), found.view(-1, x.shape[-1])):
        for start in range(0, len(one), size):
            largest, power = one[start : start + size].abs().max().item(), 0
            while largest > most * 2.0**power:
                power += 1
            while largest <= most * 2.0 ** (power - 1):
                power -= 1
            out[start : start + size] = power
    return found


def observe(round_float, tensor_scale, block_scales):
    yield {"form": form([round_float(x.clone(), *E4M3) for x in SHAPES])}
    given = [x.clone() for x in NORMAL]
    yield {"normal": [round_float(x, *kind) for x, kind in zip(given, BOTH)]}
    yield {"changed": not all(map(torch.equal, given, NORMAL))}
    for name, cases in (("ties", TIES), ("small", SMALL), ("large", LARGE), ("codes", map(codes, BOTH))):
        yield {name: [round_float(x.clone(), *kind) for x, kind in zip(cases, BOTH)]}
    got = round_float(ENDLESS.clone(), *E4M3), round_float(ENDLESS.clone(), *E5M2)
    yield {"endless": [one[:3] for one in got], "nan": [bool(one[3].isnan()) for one in got]}
    yield {"other": [round_float(x.clone(), *kind) for x, kind in zip([*OTHER, *MOVED_X], (E2M1, HALF, *MOVED))]}
    got = [tensor_scale(x.clone(), most) for x, most in WHOLE]
    yield {"scale form": form(got)}
    shares = [one / (x.abs().max() / most) for one, (x, most) in zip(got, WHOLE)]
    yield {"one side": [abs(one - 1) < 1e-5 for one in shares] == POSITIVE, "scale": shares}
    got = [block_scales(x.clone(), *way) for x, *way in ROWS]
    yield {"blocks form": form(got)}
    yield {
        "powers": all(bool((one[one > 0].frexp().mantissa == 0.5).all()) for one in got),
        "blocks": [one.log2() for one in got],
    }
    yield {"exact": [block_scales(x.clone(), *way).log2() for x, *way in EXACT]}
    yield {"tiny": block_scales(TINY.clone(), 448.0).log2()}
    nothing = torch.zeros(2, 64)
    got = tensor_scale(nothing.clone(), 448.0), block_scales(nothing.clone(), 448.0), block_scales(nothing.clone(), 6.0)
    yield {"nothing": [bool(((one > 0) & (one < INF)).all()) for one in got]}
    yield {"empty": tried(lambda: form(round_float(torch.zeros(0), *E4M3)))}
    totals = []
    for size in (8, 64):
        with Operations() as operations:
            round_float(torch.ones(size, 2 * size), *E4M3), block_scales(torch.ones(size, 2 * size), 448.0)
        totals.append(operations.total)
    yield {"loops": totals[1] > totals[0] + 40}  # of 56 rows more, each of 4 blocks


def exact(seen, due):
    """The same numbers; 0 and -0 are one number."""
    return all(torch.equal(a, b) for a, b in zip(seen, due, strict=True))


def each(cases):
    return [truth(x, kind) for x, kind in zip(cases, BOTH)]


DUE = [exponents(*case) for case in ROWS]
LOOKS = [
    Look("float32, with the shape of x", "form", form(SHAPES), "form"),
    Value("normal numbers as in float8_e4m3fn and float8_e5m2", "normal", each(NORMAL), "wrong-rounding", holds=exact, fields=silent),
    Look("the inputs are unchanged", "changed", False, "input-changed"),
    Value("halves", "ties", each(TIES), "wrong-rounding", holds=exact, fields=silent),
    Value("subnormal numbers", "small", each(SMALL), "wrong-small", holds=exact, fields=silent),
    Value("numbers that are too large", "large", each(LARGE), "wrong-large", holds=exact, fields=silent),
    Value("all finite codes are unchanged", "codes", [codes(kind) for kind in BOTH], "wrong-rounding", holds=exact, fields=silent),
    Value("infinities", "endless", [truth(ENDLESS[:3], kind) for kind in BOTH], "wrong-large", holds=exact, fields=silent),
    Look("NaN", "nan", [True, True], "nan-lost", fields=silent),
    Value("other formats", "other", [truth(OTHER[0], E2M1), truth(OTHER[1], HALF), *[truth(16 * x, kind) / 16 for x, kind in zip(MOVED_X, BOTH)]], "hard-coded", holds=exact, fields=silent),
    Look("one scale", "scale form", ["float32 ()"] * len(WHOLE), "scale-form"),
    Look("of magnitudes", "one side", False, "one-sided"),
    Value("relative to the true one", "scale", [torch.ones(())] * len(WHOLE), "wrong-scale"),
    Look("each number gets the scale of its block", "blocks form", [f"float32 {tuple(x.shape)}" for x, *_ in ROWS], "blocks-form"),
    Look("a power of two", "powers", True, "no-power"),
    Value("its exponent", "blocks", DUE, "wrong-exponent", fields=silent),
    Value("where the largest is a power of two times `most`", "exact", [exponents(*case) for case in EXACT], "wrong-exponent", fields=silent),
    Look("tiny numbers", "tiny", torch.full((2, 32), -127.0), "below-e8m0", fields=silent),
    Look("nothing but zeros", "nothing", [True] * 3, "no-range", fields=silent),
    Look("an empty tensor", "empty", "float32 (0,)", "form"),
    Look("no loops", "loops", False, "loops"),
]  # fmt: skip


def balise_7(round_float, tensor_scale, block_scales):
    yield from judged(LOOKS, observe, round_float, tensor_scale, block_scales)
