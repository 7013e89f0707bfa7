"""Balise 4: a tiled matrix product: its formula, its edges, its bytes, its sums and the order of its tiles."""

import math

import torch

from dlojz_tp.judging.checking.looks import Look, Value, close, form, judged, silent
from dlojz_tp.judging.checks.triton_kernels.watching import KERNEL_LOOKS, kernel_parts, watched

WHOLE = [(64, 96, 32, (16, 32, 16), 4), (256, 128, 512, (32, 128, 64), 4)]  # m, n, k, tile, bytes an element
HALF = [(256, 128, 64, (32, 64, 32), 2), (4096, 4096, 4096, (128, 256, 64), 2)]
RAGGED = [(50, 70, 40, (16, 32, 16), 4), (70, 50, 1, (32, 16, 64), 2), (1, 1, 1, (16, 16, 16), 4)]

DRAWS = torch.Generator().manual_seed(0)
A, B = torch.randn(50, 40, generator=DRAWS), torch.randn(40, 70, generator=DRAWS)
TILE = 16, 32, 32
HALVES = [(0.5 + torch.rand(shape, generator=DRAWS)).half() for shape in ((16, 300), (300, 16))]
VIEWS = torch.randn(24, 20, generator=DRAWS).T, torch.randn(24, 36, generator=DRAWS)[:, ::2]
BANDS = torch.randn(80, 16, generator=DRAWS), torch.randn(16, 48, generator=DRAWS)  # 5 × 3 tiles in bands of three
IN_BANDS = [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9, 11, 13], [10, 12, 14]]


def product(a, b):
    return (a.double() @ b.double()).float()


def moved(m, n, k, tile, itemsize):
    """What the programs read and write, program by program."""
    reads = 0
    for top in range(0, m, tile[0]):
        for left in range(0, n, tile[1]):
            reads += k * (min(tile[0], m - top) + min(tile[1], n - left))
    return itemsize * reads + 4 * m * n


def shares(matmul_bytes, cases):
    """What the formula says, as parts of the truth."""
    return [float(matmul_bytes(*case)) / moved(*case) for case in cases]


def numbers(seen, out, tile):
    """Of each tile, the number of the program that writes it; -1 if none does. Rows of tiles."""
    found = [[-1] * math.ceil(out.shape[1] / tile[1]) for _ in range(math.ceil(out.shape[0] / tile[0]))]
    for one in seen.log:
        if one.kind == "write" and one.memory.storage.data_ptr() == out.untyped_storage().data_ptr():
            for row, column in {divmod(int(e), out.shape[1]) for e in one.elements[:1]}:
                found[row // tile[0]][column // tile[1]] = one.program
    return found


def observe(matmul_bytes, matmul):
    yield {"whole": shares(matmul_bytes, WHOLE)}
    yield {"half bytes": shares(matmul_bytes, HALF)}
    yield {"ragged bytes": shares(matmul_bytes, RAGGED)}

    result, seen, _ = yield from kernel_parts(matmul, A, B, tile=TILE)
    yield {"finite": bool(result.isfinite().all()), "product": result}
    programs, total = len({one.program for one in seen.log}), seen.read_bytes() + seen.written_bytes()
    yield {"tiles": (programs, total)}

    result, seen, _ = watched(matmul, *BANDS, tile=(16, 16, 16), group=3)
    yield {"numbers": numbers(seen, result, (16, 16)), "in bands": result}
    result, seen, _ = watched(matmul, *HALVES, tile=(16, 16, 64))
    yield {"form of halves": form(result), "halves": result}
    result, seen, ran = watched(matmul, *VIEWS)
    yield {"copies": ran, "views": (result, list(map(str, seen.outside)))}


def in_words(programs, total):
    return f"{programs} programs that move {total:,} bytes"


def order(seen, due):
    return "last-band" if seen[:3] == due[:3] else "other-order"


def holds_for_views(seen, due):
    return close(seen[0], due) and not seen[1]


def more_hint(seen, due):
    return "tile-ignored" if seen[0] != due[0] else "more-bytes"


def as_formula(seen, due):
    return seen[0] == due[0] and seen[1] <= due[1]


LOOKS = [
    Value("matmul_bytes: tiles that divide the matrices", "whole", [1.0, 1.0], "wrong-bytes", fields=silent),
    Look("float16: the result has four bytes all the same", "half bytes", [1.0, 1.0], "result-size", fields=silent),
    Look("tiles at the edges", "ragged bytes", [1.0, 1.0, 1.0], "ragged-bytes", fields=silent),
    Look("matmul: a float32 matrix", "form", "float32 (50, 70)", "another-form"),
    *KERNEL_LOOKS,
    Look("masked elements count as zero", "finite", True, "no-other"),
    Value("the product, although 32 doesn't divide k", "product", product(A, B), "wrong-product"),
    Look("one program for each tile, and the bytes of the formula", "tiles", (12, moved(50, 70, 40, TILE, 4)),
         more_hint, holds=as_formula,
         fields=lambda seen, due: {"got": in_words(*seen), "expected": in_words(*due)}),
    Look("tiles in bands of three rows", "numbers", IN_BANDS, order),
    Look("", "in bands", product(*BANDS), "other-order"),
    Look("float16 factors: a float32 matrix", "form of halves", "float32 (16, 16)", "another-form"),
    Look("summed in float32", "halves", product(*HALVES), "half-sums"),
    Look("a transposed `a`, every second column of a matrix as `b`: no copies", "copies", [], "pytorch-copies",
         fields=lambda seen, due: {"what": seen[0], "expected": "", "got": ""}),
    Look("the product", "views", product(*VIEWS), "stride-ignored", holds=holds_for_views,
         fields=lambda seen, due: {"what": (seen[1] or ["The product of two views is wrong"])[0], "got": "", "expected": ""}),
]  # fmt: skip


def balise_4(matmul_bytes, matmul):
    yield from judged(LOOKS, observe, matmul_bytes, matmul)
