"""Answers to balise 4 of 24_triton_kernels: a tiled matrix product."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 4)

# pointers that move on, a grid of two dimensions made one, bands counted by hand
BY_POINTERS = """
def matmul_bytes(m, n, k, tile, itemsize=4):
    total = m * n * 4
    for size, step, other in ((m, tile[0], n), (n, tile[1], m)):
        total += -(-size // step) * k * other * itemsize
    return total


@triton.jit
def product_kernel(a, b, out, m, n, k, sa, ta, sb, tb, rows, columns, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, GROUP: tl.constexpr):
    number = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    band = number // (GROUP * columns)
    size = min(GROUP, rows - band * GROUP)
    number -= band * GROUP * columns
    row, column = band * GROUP + number % size, number // size
    i = (row * BM + tl.arange(0, BM))[:, None]
    j = (column * BN + tl.arange(0, BN))[None, :]
    p = tl.arange(0, BK)
    a += i * sa + p[None, :] * ta
    b += p[:, None] * sb + j * tb
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for step in range(tl.cdiv(k, BK)):
        left = k - step * BK
        x = tl.load(a, mask=(i < m) & (p < left)[None, :], other=0)
        y = tl.load(b, mask=(j < n) & (p < left)[:, None], other=0)
        total += tl.dot(x, y)
        a += BK * ta
        b += BK * sb
    tl.store(out + i * n + j, total, mask=(i < m) & (j < n))


def matmul(a, b, tile=(32, 32, 32), group=1):
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    out = a.new_empty((m, n), dtype=torch.float32)
    rows, columns = -(-m // tile[0]), -(-n // tile[1])
    product_kernel[rows, columns](
        a, b, out, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1), rows, columns, *tile, group)
    return out
"""
bank.text(None, BY_POINTERS)
bank.slip(None, ("tl.dot(a_tile, b_tile, sums)", "sums + tl.sum(a_tile[:, :, None].to(tl.float32) * b_tile[None].to(tl.float32), 1)"))  # fmt: skip
bank.slip(None, ("first + inside % high, inside // high", "first + inside - inside // high * high, inside // high"), ("mask=b_mask, other=0.0", "mask=b_mask, other=0"), ("range(0, k, BK)", "tl.range(0, tl.cdiv(k, BK) * BK, BK)"))  # fmt: skip

FORMULA = "itemsize * (m * k * columns + k * n * rows) + 4 * m * n"
bank.hint("wrong-bytes", "`matmul_bytes` is wrong where tiles divide the matrices. A program reads BM rows of `a` and BN "
                            "columns of `b`, all k of both, and writes its tile once. Sum over all programs.")  # fmt: skip
bank.slip("wrong-bytes", (FORMULA, "itemsize * (m * k + k * n) + 4 * m * n"))
bank.slip("wrong-bytes", (FORMULA, "itemsize * (m * k * columns + k * n * rows)"))
bank.slip("wrong-bytes", (FORMULA, "(m * k * columns + k * n * rows) + m * n"))
bank.slip("wrong-bytes", (FORMULA, FORMULA + " * triton.cdiv(k, tile[2])"))
bank.variant("wrong-bytes", BY_POINTERS, ("m * n * 4", "0"))

bank.hint("factors-swapped", "You count `a` once for each row of tiles, and `b` once for each column. A row of tiles needs the "
                                "same rows of `a`, but each of its programs reads them anew.")  # fmt: skip
bank.slip("factors-swapped", ("m * k * columns + k * n * rows", "m * k * rows + k * n * columns"))
bank.slip("factors-swapped", ("cdiv(m, tile[0]), triton.cdiv(n, tile[1])", "cdiv(n, tile[1]), triton.cdiv(m, tile[0])"))  # fmt: skip
bank.variant("factors-swapped", BY_POINTERS, ("(m, tile[0], n), (n, tile[1], m)", "(m, tile[0], m), (n, tile[1], n)"))  # fmt: skip

bank.hint("result-size", "With float16 factors `matmul_bytes` is wrong. The result is float32, and `itemsize` is that of "
                            "the factors.", edge=True)  # fmt: skip
bank.slip("result-size", ("+ 4 * m * n", "+ itemsize * m * n"))
bank.slip("result-size", ("itemsize * (m * k", "4 * (m * k"))
bank.variant("result-size", BY_POINTERS, ("m * n * 4", "m * n * itemsize"))

bank.hint("ragged-bytes", "`matmul_bytes` is wrong where tiles reach past the edges. `triton.cdiv(m, BM)` rows of tiles cover "
                             "m rows, and what is masked moves no byte.", edge=True)  # fmt: skip
bank.slip("ragged-bytes", ("triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1])", "m // tile[0], n // tile[1]"))
bank.slip("ragged-bytes", (FORMULA, "itemsize * (m * k * n / tile[1] + k * n * m / tile[0]) + 4 * m * n"))
bank.slip("ragged-bytes", (FORMULA, "rows * columns * (itemsize * k * (tile[0] + tile[1]) + 4 * tile[0] * tile[1])"))
bank.variant("ragged-bytes", BY_POINTERS, ("-(-size // step)", "max(1, size // step)"))

A_MASK, B_MASK = "(i < m)[:, None] & (inner < k)[None, :]", "(inner < k)[:, None] & (j < n)[None, :]"
bank.slip("reads-outside", (", mask=a_mask, other=0.0", ""), (", mask=b_mask, other=0.0", ""))
bank.slip("reads-outside", (A_MASK, "(i < m)[:, None]"))
bank.slip("reads-outside", (A_MASK, "(inner < k)[None, :]"), (B_MASK, "(inner < k)[:, None]"))
bank.variant("reads-outside", BY_POINTERS, ("(p < left)", "(p < k)"))
bank.edge("writes-outside")
bank.slip("writes-outside", (", mask=(i < m)[:, None] & (j < n)[None, :])", ")"))
bank.slip("never-written", ("    grid = (triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]),)", "    grid = (m // tile[0] * triton.cdiv(n, tile[1]),)"))  # fmt: skip
bank.slip("never-written", ("triton.cdiv(n, tile[1]),)", "triton.cdiv(n, tile[1]) - 1,)"))
bank.text("no-kernel", "def matmul_bytes(m, n, k, tile, itemsize=4):\n    return " + FORMULA.replace("columns", "-(-n // tile[1])").replace("rows", "-(-m // tile[0])") + "\n\n\ndef matmul(a, b, tile=(32, 32, 32), group=1):\n    return a.float() @ b.float()\n")  # fmt: skip

bank.hint("no-other", "The product has infinities or NaN. Without `other`, masked elements may hold anything on a GPU (here "
                         "infinity). Past the end of k they enter the sums: `other=0.0`, for both tiles.", edge=True)  # fmt: skip
bank.slip("no-other", ("mask=a_mask, other=0.0", "mask=a_mask"), ("mask=b_mask, other=0.0", "mask=b_mask"))
bank.slip("no-other", ("mask=b_mask, other=0.0", "mask=b_mask"))
bank.variant("no-other", BY_POINTERS, ("(p < left)[None, :], other=0", "(p < left)[None, :]"))

bank.hint("wrong-product", "It isn't `a @ b`. A tile is the sum of `tl.dot(tile of a, tile of b)` over all steps of k, the "
                              "last one as well, where fewer than BK are left.")  # fmt: skip
bank.slip("wrong-product", ("range(0, k, BK)", "range(0, k // BK * BK, BK)"))
bank.slip("wrong-product", ("        sums = tl.dot(a_tile, b_tile, sums)", "        sums = tl.dot(a_tile, b_tile)"))
bank.slip("wrong-product", ("inner = start + tl.arange(0, BK)", "inner = tl.arange(0, BK)"))
bank.variant("wrong-product", BY_POINTERS, ("range(tl.cdiv(k, BK))", "range(k // BK)"))

bank.hint("tile-ignored", "There is not one program for each tile. Take the sizes of the tiles from `tile`.", edge=True)  # fmt: skip
bank.slip("tile-ignored", ("    (m, k), n = a.shape", "    tile = (32, 32, 32)\n    (m, k), n = a.shape"))
bank.slip("tile-ignored", ("    (m, k), n = a.shape", "    tile = tile[1], tile[0], tile[2]\n    (m, k), n = a.shape"))
bank.variant("tile-ignored", BY_POINTERS, ("    m, n, k = a.shape[0]", "    tile = 16, 16, 32\n    m, n, k = a.shape[0]"))  # fmt: skip

bank.hint("more-bytes", "The numbers are right, but the programs move more than tiles of this size need. Load each tile "
                           "once in a step.")  # fmt: skip
LOAD_B = "tl.load(b + inner[:, None] * b_row + j[None, :] * b_column, mask=b_mask, other=0.0)"
bank.slip("more-bytes", (f"        b_tile = {LOAD_B}\n", f"        b_tile = {LOAD_B}\n        b_tile = {LOAD_B}\n"))
bank.slip("more-bytes", ("tl.store(out + i[:, None] * n + j[None, :], sums,", "sums += 0 * tl.load(a)\n    tl.store(out + i[:, None] * n + j[None, :], sums,"))  # fmt: skip
bank.variant("more-bytes", BY_POINTERS, ("total += tl.dot(x, y)", "total += tl.dot(tl.load(a, mask=(i < m) & (p < left)[None, :], other=0), y) + 0 * tl.sum(x)"))  # fmt: skip

bank.hint("half-sums", "With float16 factors the sums are rounded to float16 on the way: it has three digits, and 300 "
                          "products are off by one or more. Sum in float32: `tl.zeros(..., tl.float32)`.")  # fmt: skip
bank.slip("half-sums", ("tl.zeros((BM, BN), tl.float32)", "tl.zeros((BM, BN), a.dtype.element_ty)"), ("tl.dot(a_tile, b_tile, sums)", "(sums + tl.dot(a_tile, b_tile)).to(a.dtype.element_ty)"))  # fmt: skip
bank.slip("half-sums", ("tl.dot(a_tile, b_tile, sums)", "sums + tl.dot(a_tile, b_tile, out_dtype=a.dtype.element_ty)"))  # fmt: skip
bank.slip("half-sums", ("j[None, :], sums, mask", "j[None, :], sums.to(a.dtype.element_ty), mask"))
bank.variant("half-sums", BY_POINTERS, ("        a += BK * ta", "        total = total.to(x.dtype).to(tl.float32)\n        a += BK * ta"))  # fmt: skip
bank.edge("another-form")
bank.slip("another-form", ("torch.empty((m, n), device=a.device)", "torch.empty((m, n), dtype=a.dtype, device=a.device)"))  # fmt: skip
bank.variant("another-form", BY_POINTERS, ("dtype=torch.float32", "dtype=b.dtype"))

bank.hint("other-order", "The tiles of 5 × 3, in bands of three rows, are computed by programs in another order. In a band "
                            "the row of the tile changes first.")  # fmt: skip
bank.slip("other-order", ("return first + inside % high, inside // high", "return program // columns, program % columns"))  # fmt: skip
bank.slip("other-order", ("return first + inside % high, inside // high", "return first + inside // columns, inside % columns"))  # fmt: skip
bank.slip("other-order", ("return first + inside % high, inside // high", "return program % rows, program // rows"))
bank.variant("other-order", BY_POINTERS, ("tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)", "tl.program_id(1) + tl.program_id(0) * tl.num_programs(1)"))  # fmt: skip

bank.hint("last-band", "The last band has fewer rows than `group`: {got}. Count its rows, `min(rows - first, GROUP)`, or "
                          "programs compute tiles that don't exist (-1: never computed).", edge=True)  # fmt: skip
bank.slip("last-band", ("tl.minimum(rows - first, GROUP)", "GROUP"))
bank.slip("last-band", ("tl.minimum(rows - first, GROUP)", "tl.minimum(rows, GROUP)"))
bank.variant("last-band", BY_POINTERS, ("min(GROUP, rows - band * GROUP)", "GROUP"))

bank.edge("stride-ignored", "pytorch-copies")
bank.slip("stride-ignored", ("i[:, None] * a_row + inner[None, :] * a_column", "i[:, None] * k + inner[None, :]"))
bank.slip("stride-ignored", ("*b.stride(), *tile", "n, 1, *tile"))
bank.variant("stride-ignored", BY_POINTERS, ("a.stride(0), a.stride(1)", "k, 1"))
bank.slip("pytorch-copies", ("    (m, k), n = a.shape", "    a, b = a.contiguous(), b.contiguous()\n    (m, k), n = a.shape"))  # fmt: skip
bank.variant("pytorch-copies", BY_POINTERS, ("    m, n, k = a.shape[0]", "    b = b.contiguous()\n    m, n, k = a.shape[0]"))  # fmt: skip
