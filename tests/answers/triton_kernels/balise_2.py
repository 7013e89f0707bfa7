"""Answers to balise 2 of 24_triton_kernels: a fused softmax."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 2)

# several rows a program, as a tile
BY_TILES = """
@triton.jit
def tile_softmax(x, out, rows, n, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    tile = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=-float("inf"))
    tile = tile.to(tl.float32)
    most = tl.max(tile, 1)
    shares = tl.where(inside, tl.exp(tile - most[:, None]), 0.0)
    total = tl.sum(shares, 1)
    tl.store(out + row[:, None] * n + column[None, :], shares / total[:, None], mask=inside)


def softmax(x):
    rows, n = x.shape
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    tile_softmax[triton.cdiv(rows, 4),](x, out, rows, n, x.stride(0), 4, triton.next_power_of_2(n))
    return out
"""
bank.text(None, BY_TILES)
bank.slip(None, ("values - tl.max(values, 0)", "values - tl.max(tl.where(mask, values, -float('inf')), 0)"), ('other=-float("inf")', 'other=0.0'), ("values = tl.exp(values - tl.max(", "values = tl.exp(tl.where(mask, values, -float('inf')) - tl.max("))  # fmt: skip
bank.slip(None, ('other=-float("inf")', "other=-1e30"))
bank.slip(None, ("values / tl.sum(values, 0)", "values * (1 / tl.sum(values, 0))"), ("rows,](", "rows, 1, 1]("))

LOAD = 'tl.load(x + row * x_stride + lane, mask=mask, other=-float("inf")).to(tl.float32)'
bank.hint("masked-lanes-count", "Masked lanes take part in the maximum or the sum. Load them with "
                                   "`other=-float(\"inf\")`: that changes no maximum, and its exponential is 0.")  # fmt: skip
bank.slip("masked-lanes-count", ('other=-float("inf")', "other=0.0"))
bank.slip("masked-lanes-count", (', other=-float("inf")', ""))
bank.slip("masked-lanes-count", ('other=-float("inf")', "other=-100.0"))
bank.slip("masked-lanes-count", ('other=-float("inf")', "other=-65504.0"))
bank.variant("masked-lanes-count", BY_TILES, ('other=-float("inf")', "other=0"), ("tl.where(inside, tl.exp(tile - most[:, None]), 0.0)", "tl.exp(tile - most[:, None])"))  # fmt: skip

bank.hint("overflows", "`exp` of a large number is infinite. Subtract the maximum of the row first: the result stays "
                          "the same.")  # fmt: skip
bank.slip("overflows", ("tl.exp(values - tl.max(values, 0))", "tl.exp(values)"))
bank.slip("overflows", ("tl.exp(values - tl.max(values, 0))", "tl.exp(values - tl.min(tl.where(mask, values, float('inf')), 0))"))  # fmt: skip
bank.variant("overflows", BY_TILES, ("tl.exp(tile - most[:, None])", "tl.exp(tile)"))

bank.hint("wrong-softmax", "These aren't the softmax of each row: exponentials of the row's elements, divided by "
                              "their sum.")  # fmt: skip
bank.slip("wrong-softmax", ("values / tl.sum(values, 0)", "values"))
bank.slip("wrong-softmax", ("values / tl.sum(values, 0)", "tl.log(values / tl.sum(values, 0))"))
bank.variant("wrong-softmax", BY_TILES, ("shares / total[:, None]", "shares / tl.sum(total, 0)"))

bank.hint("half-inside", "The values are rounded to float16 more than once. Compute and sum in float32, and round "
                            "when you store.", edge=True)  # fmt: skip
bank.slip("half-inside", ("tl.exp(values - tl.max(values, 0))", "tl.exp(values - tl.max(values, 0)).to(out.dtype.element_ty)"))  # fmt: skip
bank.slip("half-inside", ("    tl.store", "    values = values.to(x.dtype.element_ty)\n    tl.store"))
bank.variant("half-inside", BY_TILES, ("most = tl.max(tile, 1)", "most = tl.max(tile, 1)\n    tile = (tile - most[:, None]).to(x.dtype.element_ty).to(tl.float32)\n    most = tl.max(tile, 1)"))  # fmt: skip

# Triton takes the maximum of float16 in float32, and so is the difference
bank.slip(None, (".to(tl.float32)", ""))
# a block is a power of two
bank.slip("raised", ("triton.next_power_of_2(n)", "n"))

bank.edge("read-again")
bank.slip("read-again", ("tl.store(out", f"values = tl.exp({LOAD} - tl.max({LOAD}, 0))\n    tl.store(out"))
BY_A_CHAIN = """
@triton.jit
def highest(x, out, n, stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * stride + lane, mask=lane < n, other=-float("inf")).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.max(row, 0))


@triton.jit
def exponentials(x, most, out, n, stride, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * stride + lane, mask=lane < n, other=-float("inf")).to(tl.float32)
    tl.store(out + tl.program_id(0) * n + lane, tl.exp(row - tl.load(most + tl.program_id(0))), mask=lane < n)


@triton.jit
def divide(shares, out, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    row = tl.load(shares + tl.program_id(0) * n + lane, mask=lane < n, other=0)
    tl.store(out + tl.program_id(0) * n + lane, row / tl.sum(row, 0), mask=lane < n)


def softmax(x):
    (rows, n), block = x.shape, triton.next_power_of_2(x.shape[1])
    most, shares = torch.empty(rows), torch.empty(rows, n)
    out = torch.empty((rows, n), dtype=x.dtype)
    highest[rows,](x, most, n, x.stride(0), block)
    exponentials[rows,](x, most, shares, n, x.stride(0), block)
    divide[rows,](shares, out, n, block)
    return out
"""
bank.text("read-again", BY_A_CHAIN, variant=True)

bank.edge("several-launches")
BY_ROWS = """
@triton.jit
def one_row(x, out, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    row = tl.load(x + lane, mask=lane < n, other=-float("inf")).to(tl.float32)
    row = tl.exp(row - tl.max(row, 0))
    tl.store(out + lane, row / tl.sum(row, 0), mask=lane < n)


def softmax(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    for own, result in zip(x, out):
        one_row[1,](own, result, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return out
"""
bank.text("several-launches", BY_ROWS)

bank.edge("stride-ignored")
bank.slip("stride-ignored", ("row * x_stride", "row * n"))
bank.variant("stride-ignored", BY_TILES, ("row[:, None] * stride", "row[:, None] * n"))

bank.slip("writes-outside", ("row * out_stride", "row * x_stride"))
bank.slip("writes-outside", ("values / tl.sum(values, 0), mask=mask)", "values / tl.sum(values, 0))"))
bank.variant("writes-outside", BY_TILES, ("total[:, None], mask=inside)", "total[:, None])"))

bank.slip("reads-outside", ("softmax_kernel[rows,]", "softmax_kernel[n,]"))
bank.variant("reads-outside", BY_TILES, ("(row < rows)[:, None] & ", ""))

bank.slip("never-written", ("softmax_kernel[rows,]", "softmax_kernel[rows - 1,]"))
bank.variant("never-written", BY_TILES, ("triton.cdiv(rows, 4)", "rows // 4"))

bank.edge("pytorch-copies")
bank.slip("pytorch-computes", ("    softmax_kernel[", "    x = x.float()\n    x = x - x.amax(1, keepdim=True)\n    softmax_kernel["))  # fmt: skip
bank.variant("pytorch-copies", BY_TILES, ("rows, n = x.shape\n", "x = x.contiguous()\n    rows, n = x.shape\n"))

bank.edge("wrong-there")
bank.slip("wrong-there", ("block = triton.next_power_of_2(n)", "block = 1024"))
bank.variant("wrong-there", BY_TILES, ("triton.cdiv(rows, 4)", "2"))
bank.text("no-kernel", "def softmax(x):\n    return x.softmax(1)\n")

bank.variant("one-program", BY_TILES, ("    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n", "    row = tl.arange(0, ROWS)\n"), ("tile_softmax[triton.cdiv(rows, 4),](x, out, rows, n, x.stride(0), 4,", "tile_softmax[1,](x, out, rows, n, x.stride(0), triton.next_power_of_2(rows),"))  # fmt: skip
