"""Answers to balise 1 of 24_triton_kernels: a masked vector kernel."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 1)

# as many programs as a card has units, each walks on by all of them
BY_STRIDES = """
@triton.jit
def add_kernel(x, y, out, alpha, n, x_step, y_step, BLOCK: tl.constexpr):
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, n, step):
        at = start + tl.arange(0, BLOCK)
        own = tl.load(x + at * x_step, mask=at < n, other=0)
        added = tl.load(y + at * y_step, mask=at < n, other=0)
        tl.store(out + at, own * alpha + added, mask=at < n)


def scale_add(x, y, alpha):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = -(-len(x) // 64)
    add_kernel[lambda meta: (min(8, blocks),)](x, y, out, alpha, len(x), *x.stride(), *y.stride(), BLOCK=64)
    return out
"""
bank.text(None, BY_STRIDES)
bank.slip(None, ("n, block = len(x), 128", "n, block = len(x), 1024"))
bank.slip(None, ("n, block = len(x), 128", "n, block = len(x), 32"), ("[triton.cdiv(n, block),]", "[(n // block + 1,)]"))  # fmt: skip
bank.slip(None, ("    lane = tl", "    x = x + tl.program_id(0) * BLOCK * x_stride\n    lane = tl"), ("x + lane * x_stride", "x + tl.arange(0, BLOCK) * x_stride"))  # fmt: skip

X_LOAD, Y_LOAD = "tl.load(x + lane * x_stride, mask=mask)", "tl.load(y + lane * y_stride, mask=mask)"
STORE = "alpha * x_block + y_block, mask=mask)"
bank.slip("reads-outside", (X_LOAD, X_LOAD.replace(", mask=mask", "")), (Y_LOAD, Y_LOAD.replace(", mask=mask", "")), (STORE, "alpha * x_block + y_block)"))  # fmt: skip
bank.slip("reads-outside", (Y_LOAD, Y_LOAD.replace(", mask=mask", "")))
bank.slip("reads-outside", ("lane < n", "lane <= n"))
bank.variant("reads-outside", BY_STRIDES, ("x + at * x_step, mask=at < n, other=0", "x + at * x_step"))

bank.edge("writes-outside")
bank.slip("writes-outside", (STORE, "alpha * x_block + y_block)"))
bank.variant("writes-outside", BY_STRIDES, ("own * alpha + added, mask=at < n)", "own * alpha + added)"))

bank.slip("never-written", ("triton.cdiv(n, block)", "n // block"))
bank.slip("never-written", ("triton.cdiv(n, block),", "4,"))
bank.variant("never-written", BY_STRIDES, ("        tl.store(out + at,", "    tl.store(out + at,"))

bank.edge("stride-ignored")
bank.slip("stride-ignored", ("x + lane * x_stride", "x + lane"))
bank.slip("stride-ignored", ("x.stride(0), y.stride(0)", "1, 1"))
bank.slip("stride-ignored", ("y.stride(0)", "1"))
bank.variant("stride-ignored", BY_STRIDES, ("*x.stride(), *y.stride()", "1, 1"))

bank.edge("pytorch-copies")
bank.slip("pytorch-copies", ("    scale_add_kernel[", "    x = x.contiguous()\n    scale_add_kernel["))
bank.slip("pytorch-copies", ("out = torch.empty(n, device=x.device)", "out = torch.zeros(n, device=x.device)"))
bank.slip("pytorch-computes", ("    scale_add_kernel[", "    x, alpha = alpha * x, 1.0\n    scale_add_kernel["))
bank.variant("pytorch-copies", BY_STRIDES, ("out = torch.empty(x.shape, dtype=x.dtype, device=x.device)", "out = x.clone()"))  # fmt: skip

bank.text("no-kernel", "def scale_add(x, y, alpha):\n    return alpha * x + y\n")

bank.slip("given-changed", ("out = torch.empty(n, device=x.device)", "out = y"))
bank.slip("another-form", ("    return out", "    return out.double()"))

bank.edge("read-again")
bank.slip("read-again", (STORE, f"alpha * x_block + {Y_LOAD}, mask=mask)"))
bank.variant("read-again", BY_STRIDES, ("own * alpha + added", "tl.load(x + at * x_step, mask=at < n, other=0) * alpha + added + 0 * own"))  # fmt: skip

bank.slip("idle-programs", ("triton.cdiv(n, block),", "n,"))
bank.variant("idle-programs", BY_STRIDES, ("(min(8, blocks),)", "(128,)"))

bank.edge("compiler-refuses")
bank.slip("compiler-refuses", ("@triton.jit", "BLOCK_SIZE = 128\n\n\n@triton.jit"), (" * BLOCK +", " * BLOCK_SIZE +"))  # fmt: skip
bank.variant("compiler-refuses", BY_STRIDES, ("        own = tl", "        if start + BLOCK >= n + 10 * BLOCK:\n            break\n        own = tl"))  # fmt: skip

bank.hint("wrong-values", "The values are not alpha * x + y, although each is written once.")
bank.slip("wrong-values", ("alpha * x_block + y_block", "x_block + alpha * y_block"))
bank.slip("wrong-values", ("alpha * x_block + y_block", "alpha * (x_block + y_block)"))
bank.slip("wrong-values", ("alpha * x_block + y_block", "x_block + y_block"))
bank.variant("wrong-values", BY_STRIDES, ("own * alpha + added", "own + added * alpha"))

bank.edge("wrong-there")
bank.slip("wrong-there", ("triton.cdiv(n, block),", "8,"))
bank.variant("wrong-there", BY_STRIDES, ("*x.stride(), *y.stride()", "3, 1"))

bank.slip("programs-race", ("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)"))
bank.slip("programs-race", ("tl.program_id(0) * BLOCK", "tl.program_id(0)"))
bank.variant("programs-race", BY_STRIDES, ("tl.num_programs(0) * BLOCK", "BLOCK"))

bank.slip("one-program", ("    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n", "    for start in range(0, n, BLOCK):\n     lane = start + tl.arange(0, BLOCK)\n"), ("    mask =", "     mask ="), ("    x_block =", "     x_block ="), ("    y_block =", "     y_block ="), ("    tl.store", "     tl.store"), ("triton.cdiv(n, block),", "1,"))  # fmt: skip
bank.variant("one-program", BY_STRIDES, ("(min(8, blocks),)", "(1,)"))
