# %% [markdown] tags=["slide"]
# # Triton kernels: count every byte · about 125 min, core 50
#
# A GPU *kernel* is a small program that runs thousands of times at once. You write such kernels in **Triton**: a masked
# vector kernel, a fused softmax, a tiled matrix product, and then layer norm, CutMix and FlashAttention. A verdict sees
# each element that they read and write. It needs no GPU.
#
# **What you will gain.** Fewer *bytes moved*, counted exactly: your softmax moves a quarter of what the same softmax
# moves as a chain of PyTorch's operations.

# %% tags=["setup"] jupyter={"source_hidden": true}
import math
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlojz_tp import course, measure, planner, recorded, report, scale, todo
from dlojz_tp.measure import compiled_kernels, kernels

tp = course.open("24_triton_kernels")
WORK = "24_triton_kernels"
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tp

# %% [markdown] tags=["slide"]
# ## The idea
#
# You write one **program**, and launch a **grid** of them. Each program computes one **block** of the result, and knows
# which by `tl.program_id(0)`. Its values are in the **registers** of one of the card's units. A **warp** is 32 threads
# that load at once. Nothing says which program runs first.
#
# Most operations of a network compute little for each byte. So a kernel takes as long as its bytes need, or as its
# operations need if that is longer (the roofline of work 03):
#
# $$t \;\ge\; \max\left(\frac{\text{bytes read + written}}{\text{bandwidth}},\ \frac{\text{operations}}{\text{peak}}\right)$$


# %% tags=["slide"] jupyter={"source_hidden": true}
def draw_idea(n=11, block=4):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3), layout="constrained", width_ratios=(3, 2))
    colours = ["#0072B2", "#009E73", "#D55E00"]
    for lane in range(3 * block):
        colour = colours[lane // block] if lane < n else "white"
        left.add_patch(plt.Rectangle((lane + 0.05, 0), 0.9, 0.9, fc=colour, ec="#777777", ls="-" if lane < n else ":"))
        left.text(lane + 0.5, 0.45, lane if lane < n else "masked", ha="center", va="center", fontsize=8 if lane < n else 5.5,
                  color="white" if lane < n else "#333333")  # fmt: skip
    for program, colour in enumerate(colours):
        left.add_patch(plt.Rectangle((program * block + 0.5, 2), block - 1, 0.9, fc="white", ec=colour, lw=2))
        left.text((program + 0.5) * block, 2.45, f"program {program}", ha="center", va="center", fontsize=9)
        left.annotate(
            "",
            ((program + 0.5) * block, 0.95),
            ((program + 0.5) * block, 2),
            arrowprops={"arrowstyle": "<->", "color": colour},
        )
    left.set(xlim=(0, 3 * block), ylim=(-0.3, 3.2), xticks=[], yticks=[])
    left.set_title(f"{n} elements in memory, blocks of {block}: 3 programs", loc="left", fontsize=10)
    passes = [("amax", 1, 0), ("subtract", 1, 1), ("exp", 1, 1), ("sum", 1, 0), ("divide", 1, 1)]
    place = 0
    for name, read, written in passes:
        right.barh(1, read, left=place, color="#0072B2", ec="white")
        right.barh(1, written, left=place + read, color="#D55E00", ec="white")
        right.text(place + (read + written) / 2, 1.5, name, ha="center", fontsize=8)
        place += read + written
    right.barh(0, 1, color="#0072B2", ec="white", label="reads the matrix")
    right.barh(0, 1, left=1, color="#D55E00", ec="white", label="writes it")
    right.set(
        yticks=(1, 0), yticklabels=("five operations", "one kernel"), xlabel="passes through memory", ylim=(-0.6, 1.9)
    )
    right.legend(fontsize=8, loc="lower right")
    right.set_title("A softmax", loc="left", fontsize=10)
    for ax in (left, right):
        ax.grid(False)
        ax.spines[:].set_visible(False)
    plt.show()


draw_idea()


# %% tags=["setup"] jupyter={"source_hidden": true}
class EagerBytes(TorchDispatchMode):
    """Inside, `steps` are (operation of PyTorch, bytes that it reads and writes); views move none."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            moved = sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
            self.steps.append((str(operation.overloadpacket).removeprefix("aten."), moved))
        return result

    @property
    def moved(self):
        return sum(moved for _, moved in self.steps)


def bytes_moved(run, *given):
    """Bytes that the kernels of run(*given) read and write, in the interpreter on a CPU."""
    with kernels.Watched() as seen:
        run(*given)
    return seen.read_bytes() + seen.written_bytes()


# %% [markdown]
# ## Baseline
#
# A softmax as five operations. Each reads its tensors from memory and writes its result there.


# %%
def chain(x):
    """The softmax of each row of x, (rows, n), by PyTorch's operations."""
    powers = (x - x.amax(1, keepdim=True)).exp()
    return powers / powers.sum(1, keepdim=True)


X = torch.randn(16, 1000)
with EagerBytes() as eager_softmax:
    chain(X)

# %% tags=["slide"] jupyter={"source_hidden": true}
report.table({"operation": "{}", "bytes": "{:,}", "passes": "{:.2f}"},
             [(name, n, n / X.nbytes) for name, n in [*eager_softmax.steps, ("together", eager_softmax.moved)]])  # fmt: skip

# %% [markdown]
# ## One program for each block
#
# ### Balise 1 · A masked vector kernel · about 12 min
#
# `alpha * x + y` in one kernel. Each *program* computes one block of `BLOCK` elements, one element a *lane*. The last block is
# rarely full, so its lanes past `n` must be *masked*: nothing may be read or written there. Vectors may be views. So the next
# element of `x` is `x_stride` further in memory.
#
# - **`scale_add_kernel`**: load, compute and store this program's block. 5 lines.
# - **`scale_add`**: launch enough programs to cover `n` elements. 1 line.
#
# <details><summary>Hint</summary>
#
# `tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)` are the numbers of the elements. A pointer plus such numbers is a block of pointers:
# `tl.load(pointers, mask=...)`, `tl.store(pointers, values, mask=...)`. Launch: `kernel[(programs,)](arguments)`.
# </details>


# %% tags=["balise-1"]
@triton.jit
def scale_add_kernel(x, y, out, alpha, n, x_stride, y_stride, BLOCK: tl.constexpr):
    # BEGIN SOLUTION
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < n
    x_block = tl.load(x + lane * x_stride, mask=mask)
    y_block = tl.load(y + lane * y_stride, mask=mask)
    tl.store(out + lane, alpha * x_block + y_block, mask=mask)
    # END SOLUTION


def scale_add(x, y, alpha):
    """alpha * x + y, computed by one launch of a kernel. x, y: float32, shape (n,), any strides; alpha: a number.

    Returns a new tensor, float32, shape (n,). Each element of x and y is read once, each result written once.
    """
    n, block = len(x), 128
    out = torch.empty(n, device=x.device)
    # BEGIN SOLUTION
    scale_add_kernel[triton.cdiv(n, block),](x, y, out, alpha, n, x.stride(0), y.stride(0), BLOCK=block)
    # END SOLUTION
    return out


# %%
tp.check(1, scale_add)

# %% [markdown]
# ### What a stride costs
#
# A card doesn't move single numbers: it moves *sectors* of 32 bytes, eight float32. If the 32 lanes of a warp read
# neighbours, they need 4 sectors. This is called a *coalesced* load. Now your kernel gets views whose elements are
# further apart.

# %%
strided = tp.predict(
    "x[::16] has n elements. How many times the sectors of n neighbours does your kernel load for it?", ...
)


# %% jupyter={"source_hidden": true}
def loads(stride, n=1024):
    """(bytes used, sectors moved) of x[::stride] by the kernel."""
    x = torch.randn(n * stride)[::stride]
    with kernels.Watched() as seen:
        scale_add(x, torch.randn(n), 2.0)
    return seen.read_bytes(x), seen.sectors(x)


loaded = {stride: loads(stride) for stride in (1, 2, 4, 8, 16)}
rows = [(stride, used, 32 * sectors, sectors / loaded[1][1]) for stride, (used, sectors) in loaded.items()]
report.table({"stride of x": "{}", "bytes used": "{:,}", "bytes moved": "{:,}", "times as many": "{:.1f}"}, rows)

# %%
strided.shows(loaded[16][1] / loaded[1][1], "× {:.1f}", "From a stride of 8 on, each float32 has a sector of its own.")

# %% [markdown]
# ## A row in registers
#
# ### Balise 2 · Fused softmax · about 14 min
#
# Written as a chain of operations, a softmax reads and writes the matrix again for each of them. A kernel keeps a row in registers: each
# element is read once and written once.
#
# - **`softmax_kernel`**: one program computes one row. Subtract the maximum first, so that no exponential overflows. Compute in float32.
#   About 6 lines.
# - **`softmax`**: one program a row. The block is the next power of two, because Triton has no others. 2 lines.
#
# <details><summary>Hint</summary>
#
# Masked lanes take part in `tl.max(row, 0)` and `tl.sum(row, 0)`. Which `other=` in `tl.load` changes neither the maximum nor
# the sum of exponentials? `triton.next_power_of_2(n)`, `row.to(tl.float32)`.
# </details>


# %% tags=["balise-2", "slide-mistake=masked-lanes-count"]
@triton.jit
def softmax_kernel(x, out, n, x_stride, out_stride, BLOCK: tl.constexpr):
    # BEGIN SOLUTION
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    mask = lane < n
    values = tl.load(x + row * x_stride + lane, mask=mask, other=-float("inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * out_stride + lane, values / tl.sum(values, 0), mask=mask)
    # END SOLUTION


def softmax(x):
    """torch.softmax(x, 1), computed by one launch of a kernel. x: (rows, n), float32 or float16.

    x may have any stride between rows; the elements of a row are neighbours. n: up to some thousands, as one block. Returns
    a new tensor, shape and dtype of x, computed in float32. Each element is read once, each result written once.
    """
    rows, n = x.shape
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    # BEGIN SOLUTION
    block = triton.next_power_of_2(n)
    softmax_kernel[rows,](x, out, n, x.stride(0), out.stride(0), BLOCK=block)
    # END SOLUTION
    return out


# %%
tp.check(2, softmax)

# %% [markdown]
# Measured again: the same numbers, by your kernel.

# %% tags=["slide"] jupyter={"source_hidden": true}
fused = bytes_moved(softmax, X)
away = (softmax(X) - chain(X)).abs().max().item()
report.table({"softmax": "{}", "bytes": "{:,}", "passes": "{:.2f}"},
             [("five operations", eager_softmax.moved, eager_softmax.moved / X.nbytes),
              ("your kernel", fused, fused / X.nbytes)])  # fmt: skip
print(f"{eager_softmax.moved / fused:.2f} times fewer bytes; largest difference {away:.0e}")

# %% [markdown]
# Would `torch.compile` have fused the chain? It needs no card to write the kernel, so here is what it writes.

# %% jupyter={"source_hidden": true}
print("""\
# by Inductor of torch 2.14, for an A100 and a matrix of 4096 × 1000; names are changed, casts and broadcasts left out
@triton.jit
def triton_per_fused_0(in_ptr0, out_ptr2, xnumel, r0_numel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r0_index = tl.arange(0, 1024)[None, :]
    r0_mask = r0_index < 1000
    x = tl.load(in_ptr0 + (r0_index + 1000*xindex), r0_mask, eviction_policy='evict_first', other=0.0)
    largest = triton_helpers.max2(tl.where(r0_mask, x, float("-inf")), 1)[:, None]
    powers = libdevice.exp(x - largest)
    total = tl.sum(tl.where(r0_mask, powers, 0), 1)[:, None]
    tl.store(out_ptr2 + (r0_index + 1000*xindex), powers / total, r0_mask)""")

# %% [markdown]
# It's your kernel, with `XBLOCK` rows a program. A compiler fuses chains like this well. It doesn't invent another
# algorithm, such as FlashAttention.
#
# On a GPU, fewer bytes should mean fewer seconds. The next cell races your kernel against PyTorch's own softmax, the
# chain, and the compiled chain. The interpreter says nothing about time, so without a GPU nothing is raced.

# %% jupyter={"source_hidden": true}
if DEVICE.type == "cuda":
    x = torch.randn(4096 if FULL else 16, 4000, device=DEVICE)
    compiled = torch.compile(chain)
    race = measure.race({"your kernel": lambda: softmax(x), "torch.softmax": lambda: torch.softmax(x, 1),
                         "the chain": lambda: chain(x), "compiled chain": lambda: compiled(x)}, device=DEVICE)  # fmt: skip
    recorded.note(WORK, "softmax", race.medians)
    print(race)
elif (found := recorded.load(WORK, "softmax")) is not None:
    print(f"recorded on {recorded.where(WORK)}:")
    report.table({"softmax": "{}", "time": measure.human_seconds}, [*found.items()])
else:
    print("no GPU here, and no race is recorded yet")

# %% [markdown]
# ## Rows longer than a block
#
# ### Balise 3 · Layer norm · further · about 16 min
#
# A long row doesn't fit in registers. The kernel walks through it block by block: once for the mean and variance, once to normalise.
# Squares of large numbers lose the small differences between them. So keep a `mean` and the `squares` of the distances from it, and merge each block in:
#
# $$\delta = \bar{x}_\text{block} - \bar{x},\quad \bar{x} \leftarrow \bar{x} + \delta \tfrac{m}{s + m},\quad
# S \leftarrow S + S_\text{block} + \delta^2 \tfrac{s\,m}{s + m}$$
#
# where $s$ elements came before and the block has $m$.
#
# - **`layer_norm_kernel`**: the merge. 4 lines.
# - **`layer_norm_grads_kernel`**: sums over all rows. Each program owns a block of columns, so nothing has to be added
#   across programs. 5 lines.
#
# <details><summary>Hint</summary>
#
# Lanes past the end of the row were loaded as 0, so their distance from the mean isn't 0. Set it to 0 with `tl.where`.
# </details>


# %% tags=["balise-3"]
@triton.jit
def layer_norm_kernel(x, weight, bias, out, mean_out, rstd_out, n, eps, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    mean, squares = 0.0, 0.0
    for start in range(0, n, BLOCK):
        mask, count = start + lane < n, tl.minimum(n - start, BLOCK)
        values = tl.load(x + row * n + start + lane, mask=mask, other=0.0)
        # BEGIN SOLUTION
        delta = tl.sum(values, 0) / count - mean
        away = tl.where(mask, values - mean - delta, 0.0)
        mean += delta * count / (start + count)
        squares += tl.sum(away * away, 0) + delta * delta * start * count / (start + count)
        # END SOLUTION
    rstd = 1 / tl.sqrt(squares / n + eps)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)
    for start in range(0, n, BLOCK):
        column, mask = start + lane, start + lane < n
        values = (tl.load(x + row * n + column, mask=mask) - mean) * rstd
        values = values * tl.load(weight + column, mask=mask) + tl.load(bias + column, mask=mask)
        tl.store(out + row * n + column, values, mask=mask)


@triton.jit
def layer_norm_grads_kernel(grad, x, mean, rstd, weight_grad, bias_grad, rows, n, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    of_weight, of_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    # BEGIN SOLUTION
    for row in range(rows):
        given = tl.load(grad + row * n + column, mask=mask)
        values = tl.load(x + row * n + column, mask=mask)
        of_weight += given * (values - tl.load(mean + row)) * tl.load(rstd + row)
        of_bias += given
    # END SOLUTION
    tl.store(weight_grad + column, of_weight, mask=mask)
    tl.store(bias_grad + column, of_bias, mask=mask)


def layer_norm(x, weight, bias, eps=1e-5, block=1024):
    """Layer norm of each row of x, computed by kernels. x: (rows, n), contiguous float32; weight, bias: (n,).

    block: the most elements that a program loads at once, a power of two; n may be larger or smaller. x is read twice at
    most, each result written once. Rows may be far from 0. Returns (result like x, mean, rstd); the mean of each row and
    rstd = 1 / sqrt(variance + eps), both (rows,).
    """
    rows, n = x.shape
    out, mean, rstd = torch.empty_like(x), x.new_empty(rows), x.new_empty(rows)
    layer_norm_kernel[rows,](x, weight, bias, out, mean, rstd, n, eps, BLOCK=block)
    return out, mean, rstd


def layer_norm_grads(grad, x, mean, rstd):
    """(gradient of weight, gradient of bias), both (n,), computed by kernels without atomics.

    grad: of the result of layer_norm, (rows, n), contiguous, as x; mean, rstd: (rows,), from layer_norm. Each element of
    grad and x is read once.
    """
    rows, n = x.shape
    weight_grad, bias_grad = x.new_empty(n), x.new_empty(n)
    layer_norm_grads_kernel[triton.cdiv(n, 64),](grad, x, mean, rstd, weight_grad, bias_grad, rows, n, BLOCK=64)
    return weight_grad, bias_grad


# %%
tp.check(3, layer_norm, layer_norm_grads)

# %% [markdown]
# ## Tiles
#
# ### Balise 4 · A tiled matrix product · about 18 min
#
# A program computes one tile of `a @ b`, BM × BN elements. It walks along `k` in steps of BK: it loads a tile of `a` and
# one of `b`, and adds their product.
#
# - **`matmul_bytes`**: `a` is read once for each column of tiles, `b` once for each row of tiles. 2 lines.
# - **`tile_of`**: the program's tile. Programs usually start in the order of their numbers, and those that run at once
#   share the L2 cache. So bands of `GROUP` rows of tiles are numbered one after the other, each column by column. 3
#   lines.
# - **`matmul_kernel`**: one step of the sum for rows `i` and columns `j`. 5 lines.
#
# <details><summary>Hint</summary>
#
# A band has `GROUP * columns` tiles; the last band may have only `rows - first` rows.
# `tl.dot(a_tile, b_tile, sums)` adds to `sums`. `x[:, None]` and `y[None, :]` make a tile of offsets or of masks.
# </details>


# %% tags=["balise-4"]
def matmul_bytes(m, n, k, tile, itemsize=4):
    """Bytes that all programs of `matmul` read and write. tile: (BM, BN, BK), which need not divide m, n and k.

    a: (m, k) and b: (k, n) have itemsize bytes an element, the result has 4. What is masked moves no byte.
    """
    # BEGIN SOLUTION
    rows, columns = triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1])
    return itemsize * (m * k * columns + k * n * rows) + 4 * m * n
    # END SOLUTION


@triton.jit
def tile_of(program, rows, columns, GROUP: tl.constexpr):
    """(row, column) of the tile of this program, among rows × columns tiles."""
    first = program // (GROUP * columns) * GROUP  # the band's first row of tiles
    # BEGIN SOLUTION
    high = tl.minimum(rows - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % high, inside // high
    # END SOLUTION


@triton.jit
def matmul_kernel(a, b, out, m, n, k, a_row, a_column, b_row, b_column,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """a_row, a_column, b_row, b_column: strides. out is contiguous."""
    row, column = tile_of(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    i, j = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        inner = start + tl.arange(0, BK)
        # BEGIN SOLUTION
        a_mask = (i < m)[:, None] & (inner < k)[None, :]
        b_mask = (inner < k)[:, None] & (j < n)[None, :]
        a_tile = tl.load(a + i[:, None] * a_row + inner[None, :] * a_column, mask=a_mask, other=0.0)
        b_tile = tl.load(b + inner[:, None] * b_row + j[None, :] * b_column, mask=b_mask, other=0.0)
        sums = tl.dot(a_tile, b_tile, sums)
        # END SOLUTION
    tl.store(out + i[:, None] * n + j[None, :], sums, mask=(i < m)[:, None] & (j < n)[None, :])


def matmul(a, b, tile=(32, 32, 32), group=1):
    """a @ b by one kernel, summed in float32. a: (m, k), b: (k, n), both float32 or both float16, with any strides.

    tile: (BM, BN, BK), powers of two from 16. A program computes BM × BN elements, BK steps of k at once; all of them
    move `matmul_bytes`. group: rows of tiles in a band. Programs are numbered band by band, in a band column by column:
    [[0, 2, 4, 6], [1, 3, 5, 7], [8, 9, 10, 11]] for 3 × 4 tiles in bands of two.
    Returns a new contiguous tensor, (m, n), float32.
    """
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty((m, n), device=a.device)
    grid = (triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]),)
    matmul_kernel[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), *tile, GROUP=group)
    return out


# %%
tp.check(4, matmul_bytes, matmul)

# %% [markdown]
# Two questions for your kernel: are its bytes those of your formula? And what do 16 programs that run at once need,
# with 4 × 16 tiles?

# %%
shared = tp.predict("How many times fewer bytes do 16 programs at once need in bands of 4 rows than row by row?", ...)

# %% jupyter={"source_hidden": true}
rows = []
for tile in ((16, 16, 16), (16, 64, 16), (64, 64, 64)):
    with kernels.Watched() as seen:
        matmul(torch.randn(100, 60), torch.randn(60, 90), tile)
    moved = seen.read_bytes() + seen.written_bytes()
    rows.append((str(tile), matmul_bytes(100, 90, 60, tile), moved, 2 * 100 * 90 * 60 / moved))
report.table(
    {"tile": "{}", "your formula, bytes": "{:,}", "counted, bytes": "{:,}", "operations per byte": "{:.1f}"}, rows
)

needed = {}
for group in (1, 4):
    with kernels.Watched() as seen:
        matmul(torch.randn(64, 16), torch.randn(16, 256), (16, 16, 16), group)
    needed[group] = seen.at_once(16)[0]

# %%
shared.shows(
    needed[1] / needed[4], "× {:.2f}", "16 tiles in a row need 1 + 16 strips of `a` and `b`, 4 × 4 tiles 4 + 4."
)

# %% [markdown]
# <details><summary>On a GPU, are the sums really in float32?</summary>
#
# The sums are. But `tl.dot` rounds float32 *factors* to TF32, ten bits, unless you ask for `input_precision="ieee"`.
# The interpreter doesn't round. With float16 factors there is no difference: their products fit in float32.
# </details>

# %% [markdown]
# ## Whole batches
#
# ### Balise 5 · CutMix and MixUp in one kernel · further · about 12 min
#
# In work 07, masks and mixed batches go through memory. A kernel needs neither: each image has a partner, a box and a
# weight. Inside the box a pixel is the partner's; outside, it is `weight * own + (1 - weight) * partner's`. Without
# a box, that is MixUp; with weight 1, CutMix.
#
# - **`mix_kernel`**: a program has a block of the `size` = c·h·w numbers of one image. Find each number's factor, and load
#   a pixel only where its factor isn't zero. 7 lines.
#
# <details><summary>Hint</summary>
#
# A number's row and column: `lane // width % height` and `lane % width`. Masked pixels need `other=0.0`, because zero times
# an undefined value may be NaN.
# </details>


# %% tags=["balise-5"]
@triton.jit
def mix_kernel(images, partner, boxes, weights, out, size, height, width, BLOCK: tl.constexpr):
    image, lane = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    other, weight = tl.load(partner + image), tl.load(weights + image)
    top, left = tl.load(boxes + 4 * image), tl.load(boxes + 4 * image + 1)
    bottom, right = tl.load(boxes + 4 * image + 2), tl.load(boxes + 4 * image + 3)
    # BEGIN SOLUTION
    row, column = lane // width % height, lane % width
    inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    factor = tl.where(inside, 0.0, weight)
    own = tl.load(images + image * size + lane, mask=(lane < size) & (factor != 0), other=0.0)
    theirs = tl.load(images + other * size + lane, mask=(lane < size) & (factor != 1), other=0.0)
    tl.store(out + image * size + lane, factor * own + (1 - factor) * theirs, mask=lane < size)
    # END SOLUTION


def mix(images, partner, boxes, weights):
    """Mix each image with a partner, by one kernel. images: (b, c, h, w), contiguous float32; partner: (b,), int64.

    boxes: (b, 4), int64: top, left, bottom, right. Inside (bottom and right excluded) a pixel is the partner's; outside
    it is weight * own + (1 - weight) * partner's. weights: (b,), float32. Returns a new tensor like images. A pixel is
    read only where its factor isn't zero.
    """
    b, c, h, w = images.shape
    out = torch.empty_like(images)
    grid = (b, triton.cdiv(c * h * w, 1024))
    mix_kernel[grid](images, partner, boxes, weights, out, c * h * w, h, w, BLOCK=1024)
    return out


# %%
tp.check(5, mix)

# %%
mixing = tp.predict("CutMix by torch.where moves how many times the bytes of your kernel?", ...)

# %% jupyter={"source_hidden": true}
images, partner = torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 0])
boxes = torch.tensor([[4, 4, 20, 20], [0, 0, 16, 16], [10, 0, 32, 12], [8, 8, 24, 24]])
with EagerBytes() as eager:
    y, x = torch.arange(32)[:, None], torch.arange(32)
    top, left, bottom, right = (side[:, None, None, None] for side in boxes.unbind(1))
    mask = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    mixed = torch.where(mask, images[partner], images)
with kernels.Watched() as seen:
    same = torch.equal(mix(images, partner, boxes, torch.ones(4)), mixed)
moved = seen.read_bytes() + seen.written_bytes()
print(f"{eager.moved:,} bytes by torch.where, {moved:,} by the kernel; the same images: {same}")

# %%
mixing.shows(
    eager.moved / moved, "× {:.2f}", "`images[partner]` is a copy of the batch, and the mask takes several operations."
)

# %% [markdown]
# ## Attention
#
# ### Balise 6 · FlashAttention's forward · further · about 18 min
#
# As PyTorch operations, attention writes all scores to memory, s × s numbers a head, and reads them again. One kernel keeps
# them in registers: a program has a block of queries and walks through the keys. For each query it holds the largest
# score so far, `most`, and, relative to it, the sum `total` of exponentials and `sums`, the values weighted by them. A
# larger maximum scales both by $e^{\text{old} - \text{new}}$ (the online softmax of work 18).
#
# - **`attention_kernel`**: the loop over blocks of keys, as far as the program's queries may look. 11 lines.
#
# <details><summary>Hint</summary>
#
# `tl.dot(own, tl.trans(keys))` are scores. A score is `-float("inf")` where the key comes after the query.
# `tl.dot(shares, values, sums * old[:, None])`.
# </details>


# %% tags=["balise-6"]
@triton.jit
def attention_kernel(q, k, v, out, s, factor, D: tl.constexpr, BLOCK: tl.constexpr):
    head, query, width = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    place = head * s * D + query[:, None] * D + width[None, :]
    own = tl.load(q + place, mask=(query < s)[:, None], other=0.0)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, D), tl.float32)
    # BEGIN SOLUTION
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = head * s * D + key[:, None] * D + width[None, :]
        keys = tl.load(k + there, mask=(key < s)[:, None], other=0.0)
        values = tl.load(v + there, mask=(key < s)[:, None], other=0.0)
        scores = tl.dot(own, tl.trans(keys)) * factor
        scores = tl.where(key[None, :] <= query[:, None], scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        shares, old = tl.exp(scores - new[:, None]), tl.exp(most - new)
        total = total * old + tl.sum(shares, 1)
        sums = tl.dot(shares, values, sums * old[:, None])
        most = new
    # END SOLUTION
    tl.store(out + place, sums / total[:, None], mask=(query < s)[:, None])


def attention(q, k, v, block=32):
    """Causal attention, softmax(q kᵀ / √d) v, by one kernel. q, k, v: (heads, s, d), contiguous float32, d = 16, 32, ...

    block: queries of a program, and keys that it loads at once, a power of two from 16. Each query is read once; blocks
    of keys that come after all queries of a program are not read; scores are not written. Returns (heads, s, d).
    """
    heads, s, d = q.shape
    out = torch.empty_like(q)
    attention_kernel[triton.cdiv(s, block), heads](q, k, v, out, s, 1 / math.sqrt(d), D=d, BLOCK=block)
    return out


# %%
tp.check(6, attention)

# %%
flash = tp.predict(
    "At s = 128 and d = 16, PyTorch's operations move how many times the bytes of a kernel with blocks of 32?", ...
)

# %% jupyter={"source_hidden": true}
S, D = 128, 16
q, k, v = torch.randn(3, 1, S, D)
with EagerBytes() as eager:
    scores = (q @ k.transpose(1, 2) / math.sqrt(D)).masked_fill(torch.ones(S, S).tril() == 0, -torch.inf)
    due = scores.softmax(2) @ v
rows, fused = [], {}
for block in (16, 32, 64):
    with kernels.Watched() as seen:
        away = (attention(q, k, v, block) - due).abs().max().item()
    fused[block] = seen.read_bytes() + seen.written_bytes()
    rows.append((block, 4 * S * D * (3 + S // block), fused[block], eager.moved / fused[block], away))
table = {
    "block": "{}",
    "4 s d (3 + s / block)": "{:,}",
    "bytes, counted": "{:,}",
    "times fewer": "{:.1f}",
    "error": "{:.0e}",
}
report.table(table, rows)

# %%
flash.shows(
    eager.moved / fused[32],
    "× {:.1f}",
    "It grows with s: the scores are s × s, and the kernel's keys are s × s / block.",
)

# %% [markdown]
# ## Inside PyTorch · further
#
# ### Balise 7 · A kernel as an operator · further · about 13 min
#
# Autograd and `torch.compile` know PyTorch's operators and nothing of your kernel. So make it an operator. It needs two more functions. A *fake*
# implementation says what comes out, without computing: the compiler plans with it. A *backward* says how the gradient flows. For a softmax
# $y$ and a gradient $g$ of each row,
#
# $$\frac{\partial L}{\partial x} = y \odot \Bigl(g - \sum_j g_j\, y_j\Bigr)$$
#
# - **`softmax_operator`**: register both. The operator itself and `keep`, which saves its output, are given. 6 lines.
#
# <details><summary>Hint</summary>
#
# `@operator.register_fake` decorates a function of `x` that returns `torch.empty(...)`. `operator.register_autograd(backward,
# setup_context=keep)`; `backward(ctx, grad)` finds the output in `ctx.saved_tensors`.
# </details>


# %% tags=["balise-7"]
def softmax_operator(name):
    """Register `softmax` as an operator of PyTorch called `name`, such as "mine::softmax"; returns the operator.

    It takes x as `softmax` does: (rows, n), float32 or float16. It has a fake implementation, which returns an empty contiguous
    tensor with the shape, dtype and device of x, and a gradient. torch.library.opcheck finds nothing wrong with it.
    """

    @torch.library.custom_op(name, mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return softmax(x)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(output)

    # BEGIN SOLUTION
    @operator.register_fake
    def fake(x):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(1, keepdim=True))

    operator.register_autograd(backward, setup_context=keep)
    # END SOLUTION
    return operator


# %%
tp.check(7, softmax_operator)

# %% [markdown]
# What does `torch.compile` see? A backend gets its graph.


# %% jupyter={"source_hidden": true}
def show(graph, inputs):
    report.table({"node of the graph": "{}", "target": "{}"}, [(n.name, str(n.target)) for n in graph.graph.nodes])
    return graph.forward


operator = softmax_operator("course::softmax")
compiled = torch.compile(lambda x: 2 * operator(x + 1), backend=show, fullgraph=True)
x = torch.randn(4, 30, requires_grad=True)
compiled(x).square().sum().backward()
chained = torch.autograd.grad((2 * chain(x + 1)).square().sum(), x)[0]
print(f"largest difference to the chain's gradient: {(x.grad - chained).abs().max():.0e}")

# %% [markdown]
# <details><summary>Can the compiler look into a kernel?</summary>
#
# Yes, on a GPU. With `torch.library.triton_op`, and `torch.library.wrap_triton(kernel)[grid](...)` for the launch,
# Inductor sees the kernel and compiles it with the rest. With `custom_op` it's a closed box.
# </details>
#
# ## A choice of tiles · further
#
# ### Balise 8 · The best tile for a card · further · about 13 min
#
# Large tiles read less. But they take more shared memory, and there are fewer of them: with fewer tiles than units, some units
# stay idle. A simple model says which tile is best:
#
# $$t = \max\Bigl(\frac{\text{bytes}}{\text{bandwidth}},\; \Bigl\lceil \frac{\text{tiles}}{\text{units}} \Bigr\rceil
# \cdot \frac{2 \cdot BM \cdot BN \cdot k}{\text{operations} / \text{units}}\Bigr)$$
#
# Tiles run in *waves* of one tile a unit, and a tile at the edge takes as long as a full one. Each unit has its share of the card's operations a second.
#
# - **`seconds`**: this formula, with `matmul_bytes`. 4 lines.
# - **`best_tile`**: the fastest tile that fits in shared memory. 4 lines.
#
# <details><summary>Hint</summary>
#
# While a tile of each factor is multiplied, others are on their way: shared memory holds `stages` tiles of `a`, (BM, BK), and as many of
# `b`, (BK, BN). `min(tiles, key=...)` returns the first of equals.
# </details>


# %% tags=["balise-8"]
class Card(NamedTuple):
    """A GPU: byte/s of its memory, FLOP/s of its tensor cores, its units, bytes of shared memory that a program may take."""

    bandwidth: float
    operations: float
    units: int
    shared: int


def seconds(m, n, k, tile, card, itemsize=2):
    """Modelled seconds of `matmul` with this tile, (BM, BN, BK), on a card: of its bytes or of its waves, the longer.

    A wave computes one tile, (BM, BN) with 2 * BM * BN * k operations, on each unit, which has its share of the card's
    operations per second; a wave that isn't full takes as long as a full one. The bytes are those of matmul_bytes.
    """
    # BEGIN SOLUTION
    waves = triton.cdiv(triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]), card.units)
    computing = waves * 2 * tile[0] * tile[1] * k * card.units / card.operations
    return max(matmul_bytes(m, n, k, tile, itemsize) / card.bandwidth, computing)
    # END SOLUTION


def best_tile(m, n, k, tiles, card, stages=3, itemsize=2):
    """The fastest of these tiles, by `seconds`, that fits: the first of equally fast ones.

    tiles: a list of (BM, BN, BK). One fits if `stages` tiles of both factors, (BM, BK) and (BK, BN), of itemsize bytes an
    element, take at most card.shared bytes. Raises ValueError if none fits.
    """
    # BEGIN SOLUTION
    fit = [(bm, bn, bk) for bm, bn, bk in tiles if stages * itemsize * bk * (bm + bn) <= card.shared]
    if not fit:
        raise ValueError(f"none of {len(tiles)} tiles fits in {card.shared} bytes")
    return min(fit, key=lambda tile: seconds(m, n, k, tile, card, itemsize))
    # END SOLUTION


# %%
tp.check(8, seconds, best_tile)

# %% [markdown]
# ## Past this machine
#
# Three cards by their data sheets. A unit is a streaming multiprocessor. A tile's sums may take half a unit's 65,536
# registers.

# %%
choice = tp.predict(
    "Products of 4096 × 4096 × 4096 and of 512 × 512 × 4096 in float16 on an A100: the same tile?",
    ...,
    choices=["yes", "no"],
)

# %% jupyter={"source_hidden": true}
LENGTHS = (32, 64, 128, 256)
TILES = [(bm, bn, bk) for bm in LENGTHS for bn in LENGTHS for bk in (32, 64) if bm * bn <= 65_536 // 2]
UNITS = {"V100": (80, 96), "A100": (108, 163), "H100": (132, 227)}  # and KiB of shared memory of a program
CARDS = {name: Card(planner.CARDS[name].bandwidth, planner.CARDS[name].float16, units, kib * 1024)
         for name, (units, kib) in UNITS.items()}  # fmt: skip
SIZES = [(4096, 4096, 4096), (512, 512, 4096), (64, 8192, 8192)]
rows = []
for size in SIZES:
    for name, card in CARDS.items():
        tile = best_tile(*size, TILES, card)
        took, moving = seconds(*size, tile, card), matmul_bytes(*size, tile, 2) / card.bandwidth
        rows.append((str(size), name, str(tile), took * 1e6, "memory" if moving >= took else "units"))
report.table({"m, n, k": "{}", "card": "{}", "tile": "{}", "modelled, µs": "{:,.1f}", "waits for": "{}"}, rows)

# %%
choice.shows(
    "no" if len({best_tile(*size, TILES, CARDS["A100"]) for size in SIZES[:2]}) > 1 else "yes",
    why="Of 512 × 512 the largest tile makes only 8 programs, for 108 units.",
)

# %% [markdown]
# The model has no cache: each byte that a program reads comes from memory. That's the worst case. Your kernels on the
# roofline of an A100, by their counted bytes:

# %% tags=["slide"] jupyter={"source_hidden": true}
card = planner.A100
vector = torch.randn(4096)
POINTS = {
    "scale and add": 2 * 4096 / bytes_moved(scale_add, vector, vector, 2.0),
    "softmax, chain": 5 * X.numel() / eager_softmax.moved,
    "softmax, your kernel": 5 * X.numel() / bytes_moved(softmax, X),
} | {
    f"product, tile {tile[:2]}": 2 * 4096**3 / matmul_bytes(4096, 4096, 4096, tile, 2)
    for tile in ((16, 16, 16), (128, 128, 64), (128, 256, 64))
}  # fmt: skip
report.roofline({name: (intensity, None) for name, intensity in POINTS.items()},
                {"A100, float32": (card.float32, card.bandwidth), "A100, float16": (card.float16, card.bandwidth)},
                title="What could each reach at best? Modelled, from counted bytes")  # fmt: skip

# %% [markdown]
# Triton's compiler needs no card to say what a kernel takes. With Triton 3.8, shared memory is as modelled on an H100.
# On an A100 it's one stage less, because the tiles in use are in registers.

# %% jupyter={"source_hidden": true}
rows = []
for tile in ((64, 64, 32), (64, 128, 32)):
    with kernels.Watched() as seen:
        matmul(torch.randn(64, 64).half(), torch.randn(64, 64).half(), tile)
    a100, h100 = (compiled_kernels.taken(seen.launches[0], version, num_stages=3) for version in (80, 90))
    held, sums = 3 * 2 * tile[2] * (tile[0] + tile[1]), tile[0] * tile[1] // 128
    rows.append((str(tile), held, a100.shared, h100.shared, sums, a100.registers, h100.registers))
report.table({"tile": "{}", "shared bytes, modelled": "{:,}", "A100": "{:,}", "H100": "{:,}",
              "sums of a thread": "{}", "its registers, A100": "{}", "H100 ": "{}"}, rows)  # fmt: skip

# %% [markdown]
# On a GPU, the next cell runs the kernel with each tile and compares the fastest with the model's choice. This is what
# `triton.autotune` does.

# %% jupyter={"source_hidden": true}
if DEVICE.type == "cuda":
    size = 2048 if FULL else 128
    a, b = torch.randn(2, size, size, device=DEVICE).half()
    tiles = {str(tile): tile for tile in ((64, 64, 32), (64, 128, 32), (128, 128, 32), (128, 128, 64))}
    race = measure.race({"torch.matmul": lambda: a @ b}
                        | {name: lambda tile=tile: matmul(a, b, tile, 8) for name, tile in tiles.items()}, device=DEVICE)  # fmt: skip
    recorded.note(WORK, "tiles", race.medians)
    print(f"{size} × {size} × {size} in float16:")
found = race.medians if DEVICE.type == "cuda" else recorded.load(WORK, "tiles")
if found is None:
    print("no GPU here, and nothing is recorded yet: the figures above are modelled")
else:
    report.table({"product by": "{}", "time": measure.human_seconds}, [*found.items()])

# %% [markdown]
# ## Three questions
#
# <details><summary>Your kernel is right in the interpreter for every size. What can still go wrong on a GPU?</summary>
#
# What the interpreter doesn't model: it runs one program after the other, so its numbers never show a race
# (the verdict looks for races). It doesn't round the factors of `tl.dot` to TF32, takes Python that the compiler
# refuses, and has any amount of registers and shared memory.
# </details>
#
# <details><summary>A softmax over rows of 100,000 numbers doesn't fit in a block. How few passes are enough?</summary>
#
# Two reads and one write. The first read keeps a running maximum and a sum that is rescaled when the maximum
# changes (the online softmax). The second one computes the results.
# </details>
#
# <details><summary>When isn't it worth writing a kernel?</summary>
#
# When a library has it (a matrix product), when <code>torch.compile</code> fuses the chain by itself, or when the
# operations that it saves take a small part of a step. Look at a profile first. It pays where the <i>algorithm</i>
# changes: attention without its scores, a mask that is never stored.
# </details>
#
# ## To remember
#
# A kernel is a program for one block, and a grid of them. It's worth its lines if it moves fewer bytes: load once,
# compute in registers, store once, with neighbours in neighbouring lanes. Masks are part of each load and store, and
# no program may rely on another. Bytes can be counted and predicted without a card, so you know what to expect before
# you measure. In work 22, the same count says what numbers of 8 and 4 bits are worth.
