"""Answers to balise 3 of 24_triton_kernels: layer norm over long rows."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 3)

# sums around the row's first element; gradients as partial sums of groups of rows, and a second launch that adds them
BY_SHIFTS = """
@triton.jit
def norm(x, weight, bias, out, means, rstds, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n, BLOCK):
        inside = start + at < n
        values = tl.load(x + row * n + start + at, mask=inside, other=0.0)
        if start == 0:
            first += tl.sum(values, 0) / tl.minimum(n, BLOCK)
        values = tl.where(inside, values - first, 0.0)
        sums += values
        squares += values * values
    shift = tl.sum(sums, 0) / n
    variance = tl.sum(squares, 0) / n - shift * shift
    mean = tl.max(first, 0) + shift
    rstd = tl.rsqrt(variance + eps)
    for start in tl.range(0, n, BLOCK):
        inside = start + at < n
        values = tl.load(x + row * n + start + at, mask=inside)
        gain, plus = tl.load(weight + start + at, mask=inside), tl.load(bias + start + at, mask=inside)
        tl.store(out + row * n + start + at, (values - mean) * rstd * gain + plus, mask=inside)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)


@triton.jit
def part(grad, x, mean, rstd, parts, rows, n, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    place = row[:, None] * n + column[None, :]
    given = tl.load(grad + place, mask=inside, other=0.0)
    values = tl.load(x + place, mask=inside, other=0.0)
    centre = tl.load(mean + row, mask=row < rows, other=0.0)
    width = tl.load(rstd + row, mask=row < rows, other=0.0)
    normal = (values - centre[:, None]) * width[:, None]
    out = parts + tl.program_id(0) * 2 * n + column
    tl.store(out, tl.sum(given * normal, 0), mask=column < n)
    tl.store(out + n, tl.sum(given, 0), mask=column < n)


@triton.jit
def add(parts, weight_grad, bias_grad, count, n, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.zeros((BLOCK,), tl.float32)
    two = tl.zeros((BLOCK,), tl.float32)
    for k in range(count):
        one += tl.load(parts + 2 * k * n + column, mask=column < n, other=0.0)
        two += tl.load(parts + (2 * k + 1) * n + column, mask=column < n, other=0.0)
    tl.store(weight_grad + column, one, mask=column < n)
    tl.store(bias_grad + column, two, mask=column < n)


def layer_norm(x, weight, bias, eps=1e-5, block=1024):
    rows, n = x.shape
    out, means, rstds = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    norm[(rows,)](x, weight, bias, out, means, rstds, n, eps, block)
    return out, means, rstds


def layer_norm_grads(grad, x, mean, rstd):
    rows, n = x.shape
    count, columns = triton.cdiv(rows, 4), triton.cdiv(n, 128)
    parts, weight_grad, bias_grad = torch.empty(count, 2, n), torch.empty(n), torch.empty(n)
    part[count, columns](grad, x, mean, rstd, parts, rows, n, 4, 128)
    add[columns,](parts, weight_grad, bias_grad, count, n, 128)
    return weight_grad, bias_grad
"""
bank.text(None, BY_SHIFTS)
bank.slip(None, ("eps=1e-5, block=1024):", "eps=1e-5, block=1024):\n    block = min(block, 32)"), ("1 / tl.sqrt(", "tl.rsqrt("))  # fmt: skip

MEAN = "        mean += delta * count / (start + count)\n"
SQUARES = "tl.sum(away * away, 0) + delta * delta * start * count / (start + count)"
CHAN = """        delta = tl.sum(values, 0) / count - mean
        away = tl.where(mask, values - mean - delta, 0.0)
        mean += delta * count / (start + count)
        squares += tl.sum(away * away, 0) + delta * delta * start * count / (start + count)
"""
bank.hint("wrong-mean", "These aren't the means of the rows. The last block may be shorter: a block's mean weighs as "
                           "much as it has elements.")  # fmt: skip
bank.slip("wrong-mean", ("mean += delta * count / (start + count)", "mean += delta / 2"))
bank.slip("wrong-mean", ("tl.sum(values, 0) / count - mean", "tl.sum(values, 0) / BLOCK - mean"))
bank.slip("wrong-mean", ("mean += delta * count / (start + count)", "mean += tl.sum(values, 0)"))
bank.variant("wrong-mean", BY_SHIFTS, ("mean = tl.max(first, 0) + shift", "mean = tl.max(first, 0)"))

bank.hint("wrong-rstd", "These aren't 1 / sqrt(variance + eps). The variance is the mean squared distance from the "
                           "mean of the whole row.")  # fmt: skip
bank.slip("wrong-rstd", (SQUARES, "tl.sum(away * away, 0)"))
bank.slip("wrong-rstd", ("1 / tl.sqrt(squares / n + eps)", "1 / (tl.sqrt(squares / n) + eps)"))
bank.slip("wrong-rstd", ("squares / n + eps", "squares / (n - 1) + eps"))
bank.variant("wrong-rstd", BY_SHIFTS, ("tl.rsqrt(variance + eps)", "tl.rsqrt(variance + eps * eps)"))

bank.hint("masked-lanes-count", "Lanes past the end of the row take part in the squares: they were loaded as 0, so "
                                   "their distance from the mean isn't 0. Set it to 0 with `tl.where`.", edge=True)  # fmt: skip
bank.slip("masked-lanes-count", ("tl.where(mask, values - mean - delta, 0.0)", "values - mean - delta"))
bank.variant("masked-lanes-count", BY_SHIFTS, ("values = tl.where(inside, values - first, 0.0)\n        sums += values\n", "values = values - first\n        sums += tl.where(inside, values, 0.0)\n"))  # fmt: skip

bank.hint("wrong-norm", "Means and rstd are right, the rows aren't: (x - mean) * rstd * weight + bias.")
bank.slip("wrong-norm", ("values * tl.load(weight + column, mask=mask) + tl.load(bias + column, mask=mask)", "values * tl.load(weight + column, mask=mask)"))  # fmt: skip
bank.variant("wrong-norm", BY_SHIFTS, ("(values - mean) * rstd * gain + plus", "((values - mean) * rstd + plus) * gain"))  # fmt: skip

bank.hint("third-pass", "x is read {n} times. Collect the mean and the squares in the same pass.", edge=True)
TWO_PASSES = """        mean += tl.sum(values, 0) / n
    for start in range(0, n, BLOCK):
        mask = start + lane < n
        values = tl.load(x + row * n + start + lane, mask=mask, other=0.0)
        away = tl.where(mask, values - mean, 0.0)
        squares += tl.sum(away * away, 0)
"""
bank.slip("third-pass", (CHAN, TWO_PASSES))
bank.variant("third-pass", BY_SHIFTS, ("    shift = tl.sum", "    for start in tl.range(0, n, BLOCK):\n        sums += 0 * tl.load(x + row * n + start + at, mask=start + at < n, other=0.0)\n    shift = tl.sum"))  # fmt: skip

bank.hint("row-at-once", "A program holds {n} elements of a row at once, and block is {block}. Walk through the row.")
bank.slip("row-at-once", ("eps=1e-5, block=1024):", "eps=1e-5, block=1024):\n    block = triton.next_power_of_2(x.shape[1])"))  # fmt: skip
bank.variant("row-at-once", BY_SHIFTS, ("n, eps, block)", "n, eps, 512)"))

bank.hint("cancels", "Rows around 3000 lose their variance: the difference of two large numbers has few digits left. "
                        "Sum squared distances from a mean, not squares.", edge=True)  # fmt: skip
bank.slip("cancels", (CHAN, "        mean += tl.sum(values, 0) / n\n        squares += tl.sum(values * values, 0)\n"), ("squares / n + eps", "squares / n - mean * mean + eps"))  # fmt: skip
bank.variant("cancels", BY_SHIFTS, ("first += tl.sum(values, 0) / tl.minimum(n, BLOCK)", "first += 0.0"))

bank.hint("sums-in-any-order", "Atomics add in any order, and each order rounds differently: two runs differ. Let one "
                                  "program own a column, or write partial sums.", edge=True)  # fmt: skip
ROW_EACH = [("for row in range(rows):", "row = tl.program_id(1)\n    if True:"), ("[triton.cdiv(n, 64),]", "[triton.cdiv(n, 64), rows]"), ("x.new_empty(n), x.new_empty(n)", "x.new_zeros(n), x.new_zeros(n)")]  # fmt: skip
OF_WEIGHT, OF_BIAS = "tl.store(weight_grad + column, of_weight", "tl.store(bias_grad + column, of_bias"
bank.slip("sums-in-any-order", *ROW_EACH, (OF_WEIGHT, OF_WEIGHT.replace("store", "atomic_add")), (OF_BIAS, OF_BIAS.replace("store", "atomic_add")))  # fmt: skip
bank.variant("sums-in-any-order", BY_SHIFTS, ("add[columns,](parts, weight_grad, bias_grad, count, n, 128)", "weight_grad.zero_()\n    bias_grad.zero_()\n    for k in range(count):\n        add[columns,](parts[k], weight_grad, bias_grad, 1, n, 128)"), ("tl.store(weight_grad + column", "tl.atomic_add(weight_grad + column"), ("tl.store(bias_grad + column", "tl.atomic_add(bias_grad + column"))  # fmt: skip

bank.edge("order-relied")
bank.slip("order-relied", *ROW_EACH, (OF_WEIGHT, OF_WEIGHT + " + tl.load(weight_grad + column, mask=mask)"), (OF_BIAS, OF_BIAS + " + tl.load(bias_grad + column, mask=mask)"))  # fmt: skip
bank.slip("programs-race", *ROW_EACH, ("x.new_zeros(n), x.new_zeros(n)", "x.new_empty(n), x.new_empty(n)"))
bank.variant("programs-race", BY_SHIFTS, ("parts + tl.program_id(0) * 2 * n + column", "parts + column"))

bank.hint("wrong-gradients", "The gradient of weight sums grad * (x - mean) * rstd over the rows, that of bias sums "
                                "grad.")  # fmt: skip
bank.slip("wrong-gradients", (" * tl.load(rstd + row)", ""))
bank.slip("wrong-gradients", ("given * (values - tl.load(mean + row))", "given * values"))
bank.slip("wrong-gradients", ("of_bias += given", "of_bias += given / rows"))
bank.variant("wrong-gradients", BY_SHIFTS, ("tl.sum(given * normal, 0)", "tl.sum(given * values, 0)"))

bank.hint("rows-read-again", "An element of x or of the gradient is read more than once. Take both sums from one load.",
          edge=True)  # fmt: skip
bank.slip("rows-read-again", ("of_bias += given", "of_bias += tl.load(grad + row * n + column, mask=mask)"))
bank.variant("rows-read-again", BY_SHIFTS, ("tl.store(out + n, tl.sum(given, 0)", "tl.store(out + n, tl.sum(tl.load(grad + place, mask=inside, other=0.0), 0)"))  # fmt: skip

bank.slip("pytorch-computes", ("    rows, n = x.shape\n    weight_grad, bias_grad", "    rows, n = x.shape\n    x = x - mean[:, None]\n    weight_grad, bias_grad"), ("(values - tl.load(mean + row))", "values"))  # fmt: skip

bank.slip(
    "written-twice", ("of_bias += given", "of_bias += given\n        tl.store(bias_grad + column, of_bias, mask=mask)")
)
