# %% [markdown]
# # Compilation: from a C file to torch.compile · about 85 min, core 40
#
# Python decides *what* is computed, one operation after the other. Each operation reads its numbers from memory, does
# little with them, and writes them back. A compiler that sees several operations at once can **fuse** them: numbers are
# read once, and stay in registers in between. In this practical work you fuse by hand, in C; then count the bytes that a
# fusion saves; then make a model that `torch.compile` can take whole, keep it from compiling again and again, and
# compute **when compiling has paid for itself**. Sometimes the answer is *never*, and you will know it by arithmetic.
#
# **What you will gain.** An estimate first. A bias, a GELU, a dropout mask and a residual, one after the other, are eight
# operations, here on a tensor of 8 × 2048 × 16384 numbers in bfloat16.

# %% tags=["setup"]
import ctypes
import math
import os
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages; read when torch is imported

import matplotlib.pyplot as plt
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

from dlojz_tp import (
    course, data, gains, measure, planner, precision, recorded, report, scale, todo, training_run, worth,
)  # fmt: skip
from dlojz_tp.measure import compiling

NAME = "06_compile"
tp = course.open(NAME)
tp

# %% [markdown]
# All sizes are here. What `torch.compile` makes is kept in a private folder of the course, so that a second run of this
# notebook finds it again.

# %% tags=["setup"]
FULL = scale() == "full"
DEVICE = training_run.device()
ELEMENTS = 2**28 if FULL else 2**22  # numbers in the tensors of the pointwise chain
WIDTH, ROWS, BLOCKS = (4096, 16384, 4) if FULL else (128, 512, 1)  # of the small network that is compiled whole
CACHE = compiling.settle_compiler()
MISSING = compiling.compile_missing(DEVICE)
BACKEND = "aot_eager" if MISSING else "inductor"  # the first traces as the second does, but makes no code
print(MISSING + ": nothing is fused in this run" if MISSING else f"torch.compile makes its code with {BACKEND}")

# %%
n_bytes, bandwidth = 2 * 8 * 2048 * 16384, planner.A100.bandwidth  # bfloat16; byte/s, from the data sheet
print(f"the tensor holds {n_bytes / 1e9:.2f} GB")
for name, passes in {"eight operations": 19, "one fused kernel": 4}.items():
    print(f"estimate: {name:<17} read or write {passes:2} such tensors: {1000 * passes * n_bytes / bandwidth:5.2f} ms")
print(gains.expected(NAME))

# %% [markdown]
# Nothing was computed faster: *not moving* bytes is the gain. The lines are arithmetic, from a data sheet; which passes
# are counted is balise 2. Large matrix products and most convolutions gain little: they do many operations for
# each byte already, in libraries tuned for years.
#
# ## The idea
#
# A chain of $k$ operations on tensors of $Q$ bytes moves each intermediate result twice: out, and in again. With a
# memory of bandwidth $B$, and $t_0$ seconds to start a kernel:
#
# $$t_\text{eager} \approx k\,t_0 + \frac{2\,k\,Q}{B}
# \qquad\qquad
# t_\text{fused} \approx t_0 + \frac{2\,Q}{B}$$
#
# The picture is drawn from the formula, not measured.

# %% jupyter={"source_hidden": true}
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"


def draw_passes(ax, operations, title):
    """Each operation as a box on the chip, with what it reads from and writes to memory as arrows."""
    ax.axhspan(0, 0.8, color="#eeeeee")
    ax.text(-0.75, 0.4, "memory", va="center", color=GREY)
    for i, name in enumerate(operations):
        for shift, word, colour in ((-0.2, "read", BLUE), (0.2, "write", RED)):
            ends = [(i + shift, 0.45), (i + shift, 2.3)]
            tip, tail = ends[::-1] if word == "read" else ends
            ax.annotate("", tip, tail, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2})
            if len(operations) == 1:
                ax.text(i + 1.2 * shift, 1.5, word, color=colour, ha="right" if shift < 0 else "left")
        ax.text(i, 2.6, name, ha="center", va="center", bbox={"boxstyle": "round,pad=0.5", "fc": "white", "ec": GREY})
    ax.set(xlim=(-0.8, len(operations) - 0.4), ylim=(0, 3.1), xticks=[], yticks=[], title=title)
    ax.spines[:].set_visible(False)


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.4), width_ratios=(2, 1), layout="constrained")
draw_passes(left, ["divide", "erf", "+ 1", "× x", "÷ 2"], "Five operations: each waits for the memory twice")
draw_passes(right, ["divide, erf, + 1, × x, ÷ 2"], "One kernel: the rest stays in registers")
plt.show()

# %% [markdown]
# ## The baseline, measured first
#
# The training run of this series with channels last, and bfloat16 where the device computes faster in it (03, 02),
# uncompiled. Its loader is the usual one: the one chosen in 05 would change the shares of loading and step, so that
# gain is not carried on here.


# %% tags=["setup"]
def fresh_model():
    """The network of the training run, always with the same weights, in channels last."""
    return training_run.fast_model(len(data.image_set().classes))


# %%
whole = tp.predict("How many times faster does this training run become, compiled, on this machine?", ...)

# %%
before = training_run.run("eager", training_run.fast_step, model=fresh_model())
print(f"eager, on {DEVICE}: {before.images_per_second:,.0f} images/s")

# %% [markdown]
# ## Old school: a C file
#
# The exact GELU of a number is
#
# $$\text{gelu}(x) = \frac{x}{2}\left(1 + \operatorname{erf}\!\left(\frac{x}{\sqrt 2}\right)\right)$$
#
# Before there were compilers for tensors, one wrote a loop in C for such a thing, made a shared library of it, and
# called it from Python with `ctypes`, on the memory of the tensor.

# %% [markdown]
# ### Balise 1 · A fused GELU in C · further · about 15 min
#
# One loop reads each number once and writes it once. C knows no tensors: it gets two addresses and a count, and takes what
# lies there for `n` float32 numbers in a row.
#
# - `compile_command(source, library)`: the words of the command that makes the shared library `library` of the C file
#   `source`. Write the `options`: its optimisations, and what makes a shared library;
# - `c_source()`: the C file as text. It defines `void gelu(const float *x, float *y, int64_t n)`, which writes the exact
#   GELU of `n` numbers at `x` to `y`;
# - `fused_gelu(x, library)`: the GELU of a CPU tensor `x` of any shape, strides and dtype, as a **new** tensor of the same
#   shape and dtype. `library.gelu` does all the computing; what `ctypes` must know of it is given. Make numbers of `x` that
#   C can read, and room for the result, call it, and go back to the dtype of `x`.
#
# About 1 line of options, 6 of C, 4 of Python.
#
# <details><summary>Hint</summary>
#
# `-O3`; a shared library wants `-shared -fPIC`, and `libm`, the mathematical functions, is linked already (`-lm`). In C,
# `erff` is the `float` version of `erf`, from `math.h`; `int64_t` comes from `stdint.h`. An address is `x.data_ptr()`. The
# memory of a transposed tensor is in another order than its elements (`contiguous`); and a tensor that nobody holds by a
# name is freed, perhaps before C reads it.
# </details>


# %% tags=["balise-1"]
def compile_command(source, library):
    """The words of the command that makes the shared library at path `library` of the C file at path `source`."""
    # BEGIN SOLUTION
    options = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    # END SOLUTION
    return ["cc", *options, str(source), "-o", str(library), "-lm"]


def c_source():
    """C text that defines void gelu(const float *x, float *y, int64_t n)."""
    # BEGIN SOLUTION
    return """
    #include <math.h>
    #include <stdint.h>

    void gelu(const float *x, float *y, int64_t n) {
        for (int64_t i = 0; i < n; i++)
            y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    }
    """
    # END SOLUTION


def fused_gelu(x, library):
    """GELU of the CPU tensor x by `gelu` of the ctypes library: a new tensor, same shape and dtype."""
    library.gelu.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.gelu.restype = None  # without these, ctypes cuts addresses to 32 bits
    # BEGIN SOLUTION
    numbers = x.detach().to(torch.float32).contiguous()  # held by a name until the call is over
    result = torch.empty_like(numbers)
    library.gelu(numbers.data_ptr(), result.data_ptr(), numbers.numel())
    return result.to(x.dtype)
    # END SOLUTION


# %%
tp.check(1, compile_command, c_source, fused_gelu)

# %% [markdown]
# What do the compiler's options do? `-march=native` allows it all instructions of this processor, `-ffast-math` another order of
# operations. Add both to your `options` if they are not there, and check once more. Then the same C text races with your
# command and with `-O3` alone, against a Python loop and against PyTorch; on one core each. Guess first:

# %%
CANDIDATES = "your C, your command", "your C, -O3 alone", "torch, five operations", "torch, its own gelu"
fastest = tp.predict("Which computes a GELU of a million numbers fastest, on one core?", ..., choices=CANDIDATES)


# %%
def built(command):
    """Compile your C text with `command(source, library)` in a private folder; the loaded library."""
    folder = compiling.private_folder()
    (folder / "gelu.c").write_text(c_source())
    compiling.run_compiler(command(folder / "gelu.c", folder / "gelu.so"), folder / "gelu.so")
    return ctypes.CDLL(str(folder / "gelu.so"))


def with_options(*options):
    return built(lambda source, library: ["cc", *options, "-shared", "-fPIC", source, "-o", library, "-lm"])


def python_gelu(numbers):
    return [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in numbers]


def pieces_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


# %%
threads = torch.get_num_threads()
if compiling.c_compiler():
    x = torch.randn(1_000_000)
    few = x[:5000].tolist()
    plain, yours = with_options("-O3"), built(compile_command)
    torch.set_num_threads(1)
    race = measure.race(
        {
            "your C, your command": lambda: fused_gelu(x, yours),
            "your C, -O3 alone": lambda: fused_gelu(x, plain),
            "torch, five operations": lambda: pieces_gelu(x),
            "torch, its own gelu": lambda: F.gelu(x),
            "Python loop, 5,000 numbers": lambda: python_gelu(few),
        },
        repeats=7, warmup=1, device="cpu", calls=2,
    )  # fmt: skip
    torch.set_num_threads(threads)
    why = "A vector instruction computes several erf at once, which -O3 alone does not; five operations go to memory five times."
    fastest.shows(min(CANDIDATES, key=race.medians.get), why=why)
else:
    print("there is no C compiler here: the race of the C library is left out")

# %% jupyter={"source_hidden": true}
if compiling.c_compiler():
    nanoseconds = {name: 1e9 * t / (len(few) if "Python" in name else len(x)) for name, t in race.medians.items()}
    figure, axes = plt.subplots(figsize=(8.5, 2.9), layout="constrained")
    order = sorted(nanoseconds, key=nanoseconds.get)
    bars = axes.barh(order, [nanoseconds[name] for name in order], color=[BLUE if "C" in n else GREY for n in order])
    axes.bar_label(bars, [f" {nanoseconds[name]:,.3g}" for name in order])
    axes.set(xscale="log", xlabel="time of one number (ns, log scale), one core", title="Who computes a GELU fastest?")
    axes.margins(x=0.25)
    plt.show()

# %% [markdown]
# Two things are at work. The five operations of torch are fast loops, but write every number out and read it in again five
# times (these 4 MB into a cache, larger tensors into memory). The C loop moves each number once; with `-O3` alone it computes one `erf` after the other, while `-march=native
# -ffast-math` allow this processor's vector instructions and another order of operations: 8 or 16 numbers at once. The
# price is in the names: such a library runs on this type of processor only, and may treat infinities and NaN
# carelessly. (With gcc before 13, loading it even makes the whole process round the tiniest numbers, subnormals, to
# zero.) And a C loop knows nothing of gradients, of GPUs, of bfloat16, or of the next operation. That is why compilers
# for tensors were made.
#
# **A page of history.** From 2018, *TorchScript* was PyTorch's answer: `torch.jit.script` read the *source* of a
# function, in a subset of Python, and `torch.jit.trace` recorded one run of it, blind to every branch not taken. Real
# models needed rewriting before they went through, and it is deprecated today. `torch.compile`, of 2023, works the
# other way round: **Dynamo** reads a function's *bytecode* just before it runs, takes out the graphs that it
# understands, leaves the rest to Python, and guards each graph with the conditions under which it holds;
# **AOTAutograd** adds the backward graph; **Inductor** fuses both, and writes Triton kernels for GPUs and C++ for
# processors. For programs without Python, `torch.export` took TorchScript's place.

# %% [markdown]
# ## What does fusing save?

# %% [markdown]
# ### Balise 2 · Memory traffic, unfused and fused · further · about 11 min
#
# If memory is the limit, the gain of fusing is a ratio of bytes: those that a chain of operations moves, by those that one
# kernel would have to. Count them on a real run. Return `(unfused, fused)` for `function(*inputs)`, which gives one tensor:
#
# - `unfused`: for every operation, the tensors that it reads and those that it gives back. Views move nothing;
# - `fused`: each of `inputs` in once, and the result out once.
#
# A `TorchDispatchMode` sees every operation of its block: it runs it, and hands on what comes out. `tensors`, which finds all
# tensors in what it is given, each once, is given. Write `held`, the bytes of the numbers that a tensor really holds: one
# that was *expanded* holds no more than before; then what happens to each operation (count in `self.moved`), and the two numbers. About 6 lines.
#
# <details><summary>Hint</summary>
#
# Along an expanded dimension the stride is 0: its size does not count. `operation(*args, **(kwargs or {}))` runs it;
# `operation.is_view` tells a view. Operands can stand in `kwargs`, too, and there may be several results: `tensors` takes
# any tuple.
# </details>


# %% tags=["balise-2"]
def memory_traffic(function, *inputs):
    """Bytes that function(*inputs) moves, operation by operation, and as one fused kernel: (unfused, fused)."""
    from torch.utils._pytree import tree_leaves

    def held(tensor):
        # BEGIN SOLUTION
        return tensor.itemsize * math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
        # END SOLUTION

    def tensors(tree):  # in lists, tuples and dictionaries; one that stands there twice is read once
        return {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values()

    class Counting(TorchDispatchMode):
        moved = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            # BEGIN SOLUTION
            result = operation(*args, **(kwargs or {}))
            if not operation.is_view:
                self.moved += sum(map(held, tensors((args, kwargs)))) + sum(map(held, tensors(result)))
            return result
            # END SOLUTION

    with Counting() as counting:
        result = function(*inputs)
    # BEGIN SOLUTION
    return counting.moved, sum(map(held, tensors(inputs))) + held(result)
    # END SOLUTION


# %%
tp.check(2, memory_traffic)

# %% [markdown]
# A bias, a GELU written out, a dropout mask, a residual. How many bytes, and how many operations for each byte? (In a
# transformer's feed-forward part these stand in two places: bias and GELU between its two products, on the wide tensor;
# a second bias, mask and residual after them, on the narrow one. One chain is easier to follow.)


# %% tags=["setup"]
def tail(x, bias, mask, residual):
    """x, mask and residual (rows, width), bias (width,). Eight pointwise operations."""
    x = x + bias
    x = 0.5 * x * (1 + torch.erf(x * 0.70710678))
    return x * mask + residual


# %%
width = 1024
shape = (ELEMENTS // width, width)
inputs = [torch.randn(n, device=DEVICE) for n in (shape, (width,), shape, shape)]
unfused, fused = memory_traffic(tail, *inputs)
for name, moved in {"operation by operation": unfused, "as one kernel": fused}.items():
    passes, intensity = moved / (4 * ELEMENTS), 8 * ELEMENTS / moved
    print(f"{name:<23} {moved / 1e6:7.1f} MB, {passes:4.1f} passes over the tensor, {intensity:.2f} operations a byte")
print(f"if memory alone decides, fusing gains a factor of {unfused / fused:.2f}")

# %% [markdown]
# An A100 wants 10 operations a byte in float32 before its arithmetic, and not its memory, is the limit (03, balise 2).
# Both rows are far below: the factor of bytes is a prediction of time. Is it right? Inductor says how many kernels it
# made; the clock says the rest.

# %%
import torch._inductor.metrics  # noqa: E402

torch._dynamo.reset()
torch._inductor.metrics.reset()
torch._dynamo.utils.counters.clear()
compiled_tail = torch.compile(tail, backend=BACKEND)
start = time.perf_counter()
compiled_tail(*inputs)
measure.synchronize(DEVICE)
tail_start = time.perf_counter() - start
found = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
where = "found in the cache of an earlier run" if found else "nothing was in the cache"
print(
    f"first call {tail_start:.1f} s ({where}), {torch._inductor.metrics.generated_kernel_count} kernel for 8 operations"
)
print("largest difference to eager:", f"{(compiled_tail(*inputs) - tail(*inputs)).abs().max().item():.1e}")

# %%
tail_race = measure.race(
    {"compiled": lambda: compiled_tail(*inputs), "eager": lambda: tail(*inputs)},
    repeats=20 if FULL else 7, device=DEVICE,
)  # fmt: skip
recorded.note(NAME, "tail", tail_race.medians | {"predicted": unfused / fused})
tail_race

# %%
seconds = {"measured": 1 / tail_race.ratio, "predicted from the bytes": unfused / fused}
print("eager / compiled:  " + "   ".join(f"{name} {ratio:.2f}" for name, ratio in seconds.items()))

# %% [markdown]
# The prediction knows memory only. The measured gain is larger where eight results of eager have to be *allocated* too
# (fresh memory costs a processor dearly), where a fused kernel also uses vector instructions better, or where the
# processor's cache keeps a part of them; it is smaller where the arithmetic of `erf` is no longer small against the
# bytes that are left.
#
# ## One graph

# %% [markdown]
# Dynamo takes out a graph as long as it understands what Python does *without knowing the numbers in the tensors*.
# Where it does not, the graph **breaks**: the part before is run, Python goes on, and the part after becomes another
# graph. The result stays right. But nothing is fused over a break, and where Python reads a number, it waits for the
# device. Here is a network with all the usual reasons in it.


# %% tags=["setup"]
class Chatty(nn.Module):
    """x (b, 16) -> logits (b, 4). Keeps the peak of its activations, one number a call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.peaks = []

    def forward(self, x):
        h = self.first(x)
        print(f"mean {h.mean():.3f}")
        size = h.norm()
        if size > 0:
            h = h / size
        h = F.gelu(h)
        self.peaks.append(h.max().item())
        strong = h[h > h.mean()]
        return self.second(h) * (1 + len(strong) / h.numel())


# %%
compiling.capture(Chatty(), torch.randn(8, 16))

# %% [markdown]
# ### Balise 3 · One graph, no break · about 11 min
#
# Write `Mended`, a network with the layers of `Chatty` (`first` and `second`, the same sizes), that gives the same logits
# and the same gradients for every input, and that Dynamo captures in **one** graph:
#
# - nothing is printed;
# - in place of the list `peaks`, it has a buffer `peak` of shape `()`: the largest activation (of `h`, as it goes into
#   `second`) of its last call, without a graph behind it;
# - `size` may be zero. Then, too, logits and gradients are those of `Chatty`, and not NaN.
#
# About 12 lines.
#
# <details><summary>Hint</summary>
#
# Both sides of a branch can be computed, and `torch.where` chooses. Gradients go through **both** sides, though: where
# the side not chosen divides by zero, its gradient is 0 × ∞ = NaN. So make the divisor harmless *before* dividing; the
# root of a sum of squares has an infinite slope at zero, too. How many elements are larger is the sum, or the mean, of a
# comparison: no need to take them out. Buffers are registered in `__init__` with `register_buffer`.
# </details>


# %% tags=["balise-3"]
class Mended(nn.Module):
    """x (b, 16) -> logits (b, 4), as Chatty, in one graph. Buffer `peak` (): largest activation of the last call."""

    def __init__(self):
        super().__init__()
        # BEGIN SOLUTION
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("peak", torch.zeros(()))
        # END SOLUTION

    def forward(self, x):
        # BEGIN SOLUTION
        h = self.first(x)
        square = h.square().sum()
        some = square > 0
        h = F.gelu(torch.where(some, h / torch.where(some, square, 1.0).sqrt(), h))
        self.peak.copy_(h.detach().max())
        return self.second(h) * (1 + (h > h.mean()).to(h.dtype).mean())
        # END SOLUTION


# %%
tp.check(3, Mended)

# %%
Mended()(torch.randn(8, 16))
compiling.capture(Mended(), torch.randn(8, 16))

# %% [markdown]
# In your own code, `TORCH_LOGS=graph_breaks python train.py` lists the breaks, and `torch.compile(model,
# fullgraph=True)` turns them into errors that name the line. (With `fullgraph=True`, newer versions carry an `.item()`
# through the graph as an unknown number. The device waits for it all the same, so the check above does not accept it.)
#
# ## Compiled again, and again

# %% [markdown]
# A graph comes with **guards**: the shapes, dtypes and Python values that it was made for. A call that fails them all
# is compiled again. When one function has been compiled 8 times (`torch._dynamo.config.recompile_limit`), Dynamo
# compiles nothing more for it. A call that fits one of the eight graphs still runs it; every other one runs uncompiled:
# a warning in the log, and a slow job (with `fullgraph=True`, an error).

# %% [markdown]
# ### Balise 4 · Recompilations, counted and stopped · further · about 13 min
#
# Batches of sentences have another length each time. Two ways out: let Dynamo make the length *dynamic*, or pad to a few
# lengths, the *buckets*, and mask what was added. First see how often it compiles at all.
#
# - `count_graphs(function, calls, dynamic=None)`: how many graphs `torch.compile` makes of `function`, called once with each
#   tuple of arguments in `calls`. A *backend* is given each new graph and returns what runs it. Write one that counts in
#   `graphs` and runs the graph as it is;
# - `pad_to_bucket(x, multiple)`: `x` of shape `(b, t, d)` gets zeros behind, along `t`, up to the next multiple of
#   `multiple`. Return `(padded, mask)`, the boolean `mask` of shape `(b, padded t)` being `True` where a position is real;
# - `masked_pool(x, query, mask)`: the `attention_pool` below, over the real positions only: `(b, d)`. At least one is
#   real in each row. Take no elements out: one graph serves each padded length. What stands in the padding must not
#   matter, be it NaN: neither for the result nor for its gradients.
#
# About 3, 2 and 3 lines.
#
# <details><summary>Hint</summary>
#
# `graph.forward` runs the graph as it is; `nonlocal graphs` lets the inner function count. `F.pad` counts dimensions from
# the last, two numbers for each, and pads booleans with `False`. A softmax gives weight 0 where the score is minus infinity:
# set it *before* the softmax. A weight of 0 times NaN is NaN, also in the backward pass: fill `x` before anything else.
# </details>


# %% tags=["setup"]
def attention_pool(x, query):
    """Mean over t of x (b, t, d), weighted by the softmax over t of x · query, query (d,): (b, d)."""
    weights = (x @ query).softmax(dim=1)
    return (weights.unsqueeze(-1) * x).sum(dim=1)


# %% tags=["balise-4"]
def count_graphs(function, calls, dynamic=None):
    """How many graphs torch.compile makes of `function` over `calls`, a list of tuples of arguments."""
    graphs = 0

    def backend(graph, example_inputs):
        # BEGIN SOLUTION
        nonlocal graphs
        graphs += 1
        return graph.forward
        # END SOLUTION

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    for arguments in calls:
        compiled(*arguments)
    return graphs


def pad_to_bucket(x, multiple):
    """x (b, t, d) with zeros behind, t up to a multiple of `multiple`, and the mask of real positions: both where x is."""
    # BEGIN SOLUTION
    missing = -x.shape[1] % multiple
    # END SOLUTION
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    # BEGIN SOLUTION
    return F.pad(x, (0, 0, 0, missing)), F.pad(mask, (0, missing))
    # END SOLUTION


def masked_pool(x, query, mask):
    """attention_pool of x (b, t, d) with query (d,) over the positions where mask (b, t) is True: (b, d)."""
    # BEGIN SOLUTION
    x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # a weight of 0 is not enough: 0 × NaN is NaN
    scores = (x @ query).masked_fill(~mask, -math.inf)
    return (scores.softmax(dim=1).unsqueeze(-1) * x).sum(dim=1)
    # END SOLUTION


# %%
tp.check(4, count_graphs, pad_to_bucket, masked_pool)

# %% [markdown]
# Twenty batches of sentences, each of another length: how many graphs? And a counter of steps, kept as a Python number of
# the module, against one kept in a tensor?

# %%
graphs_made = tp.predict("Twenty lengths, all left to torch.compile's own choice: how many graphs does it make?", ...)


# %%
class Counter(nn.Module):
    """Divides by the number of its calls. It counts from `start`: a Python number, or a tensor ()."""

    def __init__(self, start):
        super().__init__()
        self.calls = start

    def forward(self, x):
        self.calls = self.calls + 1
        return x / self.calls


def marked(x):
    torch._dynamo.mark_dynamic(x, 1)  # this dimension will change: do not guard its size
    return x


# %%
query, lengths = torch.randn(8), list(range(5, 65, 3))
sentences = [torch.randn(4, t, 8) for t in lengths]
calls = [(x, query) for x in sentences]
bucketed = [(padded, query, mask) for padded, mask in (pad_to_bucket(x, 16) for x in sentences)]
found = {
    "20 lengths, every shape fixed (dynamic=False)": count_graphs(attention_pool, calls, dynamic=False),
    "20 lengths, torch's own choice": count_graphs(attention_pool, calls),
    "20 lengths, dynamic=True": count_graphs(attention_pool, calls, dynamic=True),
    "20 lengths, mark_dynamic": count_graphs(attention_pool, [(marked(x), query) for x, query in calls]),
    "padded to multiples of 16, every shape fixed": count_graphs(masked_pool, bucketed, dynamic=False),
    "20 steps counted in a Python number": count_graphs(Counter(0), [(torch.ones(3),)] * 20),
    "20 steps counted in a tensor": count_graphs(Counter(torch.zeros(())), [(torch.ones(3),)] * 20),
}
for name, graphs in found.items():
    print(
        f"{name:<46} {graphs} graph{'s' * (graphs > 1)}"
        + ("  <- the limit: what is new runs uncompiled" if graphs == 8 else "")
    )
why = "One for the first length; at the second, Dynamo makes the length a variable of the graph."
graphs_made.shows(found["20 lengths, torch's own choice"], "{:.0f} graphs", why)

# %% [markdown]
# Fixed sizes give the fastest code, so a few buckets can beat a dynamic graph; CUDA graphs, below, need fixed sizes in any
# case. What does padding cost? Computed, not measured:

# %%
share = 1 - sum(lengths) / sum(padded.shape[1] for padded, _, _ in bucketed)
print(f"{share:.0%} of the padded positions are padding; the largest difference in the result is",
      f"{max((masked_pool(*b) - attention_pool(*c)).abs().max().item() for b, c in zip(bucketed, calls)):.0e}")  # fmt: skip

# %% [markdown]
# ## Has it paid for itself?

# %% [markdown]
# ### Balise 5 · The step at which compilation has paid · about 7 min
#
# Compiling is bought with slow steps at the beginning and pays in each step after. `eager` and `compiled` are the seconds of
# one step, `slow_steps` a list of the seconds of those steps that had to compile; each of them also did the work of a step.
#
# Return the smallest number of steps `n` after which the compiled job, its slow steps included, has taken no longer than the
# eager one: an `int`, at least 1, and at least as many as `slow_steps`. Return `None` where a compiled step is not faster.
# About 4 lines.
#
# <details><summary>Hint</summary>
#
# Write down both totals after `n` steps. What does each step gain, and what did each slow step cost *more* than a
# compiled one? `math.ceil` rounds up.
# </details>


# %% tags=["balise-5"]
def break_even(eager, compiled, slow_steps):
    """Steps after which compiling has paid for itself: int, or None for never. All times in seconds."""
    # BEGIN SOLUTION
    if compiled >= eager:
        return None
    extra = sum(seconds - compiled for seconds in slow_steps)
    return max(1, len(slow_steps), math.ceil(extra / (eager - compiled)))
    # END SOLUTION


# %%
tp.check(5, break_even)


# %% [markdown]
# Your own measurement, of the fused chain: where the lines cross, compiling has paid.


# %% jupyter={"source_hidden": true}
def draw_break_even(ax, title, eager, starts):
    """Total time against steps: eager, and for each start {name: (compiled, slow_steps)}."""
    crossings = {name: break_even(eager, *times) for name, times in starts.items()}
    last = max([2.2 * n for n in crossings.values() if n] or [20])
    if not any(crossings.values()):
        last = 3 * max(sum(slow) for _, slow in starts.values()) / eager
    ax.plot([0, last], [0, last * eager], color=GREY, label="eager")
    for (name, (compiled, slow)), colour in zip(starts.items(), (RED, BLUE)):
        ax.plot([1, last], [sum(slow), sum(slow) + (last - len(slow)) * compiled], color=colour, label=name)
        if crossings[name]:
            ax.plot(crossings[name], crossings[name] * eager, "o", color=colour)
        paid = (
            f"    paid after {crossings[name]:,} step{'s' * (crossings[name] > 1)}" if crossings[name] else "    never"
        )
        ax.plot([], [], " ", label=paid)
    ax.set(xlabel="steps", ylabel="total time (s)", title=title, xlim=(0, last), ylim=(0, None))
    ax.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


# %%
torch._dynamo.reset()  # as a new job would: nothing is compiled in this process, but the cache is there
start = time.perf_counter()
compiled_tail(*inputs)
measure.synchronize(DEVICE)
tail_again = time.perf_counter() - start
medians = tail_race.medians
starts = {
    f"compiled, first start ({tail_start:.1f} s)": (medians["compiled"], [tail_start]),
    f"compiled, from the cache ({tail_again:.2f} s)": (medians["compiled"], [tail_again]),
}
figure, axes = plt.subplots(figsize=(8.5, 3), layout="constrained")
draw_break_even(axes, "When has compiling the chain paid?", medians["eager"], starts)
plt.show()

# %% [markdown]
# A first start with an empty cache also tries out which vector instructions this processor has, once for all. A start from the cache still
# traces, and a new job loads the compiler's own libraries besides, some seconds that are not in the figure. A chain that
# gains a few milliseconds a step needs hundreds or thousands of steps, or a cache that an earlier job has filled. That is
# the whole art of the decision: hours of training on fixed shapes pay, a quick try with twenty batches does not.
#
# ## The whole step

# %% [markdown]
# ### Balise 6 · A compiled training step · about 9 min
#
# Forward and backward become one graph each, the update another. But a scheduler changes the learning rate: a new
# Python number, and so one more compilation of the whole update, were it not for your two first lines.
#
# `loss_of(*batch)` gives the loss `()` of a batch; `optimizer` holds the model's parameters. Make `forward`, the compiled
# `loss_of`, and `update`, the compiled `optimizer.step`, with `torch.compile` and the given `backend`:
#
# - the loss is **one** graph; let a break be an error. The backward graph is made together with it, so `loss.backward()`
#   itself is not compiled;
# - the optimizer may break the graph, as PyTorch's do. `optimizer.step` stays the method that it is: schedulers wrap it;
# - a new learning rate compiles nothing again.
#
# The step that uses both is given. About 4 lines.
#
# <details><summary>Hint</summary>
#
# A guard looks at Python numbers, not into tensors: make one of each group's `"lr"` in `optimizer.param_groups`
# (`torch.as_tensor`), and schedulers will write into it. `fullgraph=True` makes a break an error. `torch.compile` takes
# functions, so also a bound method.
# </details>


# %% tags=["balise-6"]
def make_compiled_step(loss_of, optimizer, backend="inductor"):
    """Return step(*batch) -> loss (), detached: a compiled training step of what loss_of and optimizer hold."""
    # BEGIN SOLUTION
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])
    forward = torch.compile(loss_of, backend=backend, fullgraph=True)
    update = torch.compile(optimizer.step, backend=backend)
    # END SOLUTION

    def step(*batch):
        optimizer.zero_grad(set_to_none=True)
        loss = forward(*batch)
        loss.backward()
        update()
        return loss.detach()

    return step


# %%
tp.check(6, make_compiled_step)

# %% [markdown]
# A trap when you save: `torch.compile(model)` returns a wrapper, and the names in its `state_dict` begin with `_orig_mod.`. An
# uncompiled model can't load them. Save the state of the model that you compiled, or compile in place with
# `model.compile()`.
#
# A small network with much that can be fused: residual blocks with layer norm, GELU and dropout, then batch norm. It
# trains twice from the same weights with AdamW and a schedule: eager, and compiled by your function. Dropout draws the same
# numbers in both, because the compiler is told to leave drawing to PyTorch.


# %% tags=["setup"]
class Residual(nn.Module):
    """x (rows, width) -> x + dropout(gelu(norm(x) W)) V."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


def small_network():
    torch.manual_seed(0)
    blocks = [Residual(WIDTH) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 10)).to(DEVICE)


# %%
torch._inductor.config.fallback_random = True  # for the comparison; drawing inside the fused kernels is faster
generator = torch.Generator().manual_seed(1)
x = torch.randn(ROWS, WIDTH, generator=generator).to(DEVICE)
y = (x[:, :10].argmax(1) + (torch.rand(ROWS, generator=generator) < 0.1).long().to(DEVICE)) % 10


def trainer(compiled, steps=12):
    """A step of the small network, eager or compiled, and a schedule for its learning rate."""
    model = small_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, cycle_momentum=False)

    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    def eager_step(x, y):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return (make_compiled_step(loss_of, optimizer, BACKEND) if compiled else eager_step), schedule


def trained(step, schedule, steps=12):
    """Losses of some steps, (steps,), and the seconds of each."""
    torch.manual_seed(2)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step(x, y))
        measure.synchronize(DEVICE)
        seconds.append(time.perf_counter() - start)
        schedule.step()
    return torch.stack(losses).cpu(), seconds


# %%
torch._dynamo.reset()
eager_step, schedule = trainer(compiled=False)
eager_losses, _ = trained(eager_step, schedule)
compiled_step, schedule = trainer(compiled=True)
compiled_losses, seconds = trained(compiled_step, schedule)
print("eager    ", *(f"{loss:.4f}" for loss in eager_losses[::3]))
print("compiled ", *(f"{loss:.4f}" for loss in compiled_losses[::3]))
print(f"largest difference {(eager_losses - compiled_losses).abs().max():.1e}; seconds of the compiled steps:",
      *(f"{s:.3g}" for s in seconds[:4]), "…")  # fmt: skip

# %% [markdown]
# Only the first step is slow. With `cycle_momentum=True`, its default, this scheduler would also change AdamW's betas in
# every step: Python numbers again, and one more recompilation. Now in turn:

# %%
step_race = measure.race(
    {"compiled step": lambda: compiled_step(x, y), "eager step": lambda: eager_step(x, y)},
    repeats=30 if FULL else 9, device=DEVICE,
)  # fmt: skip
recorded.note(NAME, "small network", step_race.medians)
step_race


# %%
def verdict(race, slow_steps):
    """When compiling has paid, in words; nothing is claimed where the race is level."""
    compiled, eager = race.medians.values()
    if abs(eager - compiled) <= max(race.spreads.values()) / 2:
        return "the steps differ by less than their spread: nobody can tell"
    paid = break_even(eager, compiled, slow_steps)
    return f"paid after {paid:,} steps" if paid else "never: the compiled step is not faster"


slow = [s for s in seconds if s > 20 * step_race.medians["compiled step"]]
print(f"compiling took {sum(slow):.1f} s:", verdict(step_race, slow))

# %% [markdown]
# ## CUDA graphs: all launches recorded once
#
# Fusing leaves fewer kernels, but Python still launches them one by one. With small batches a GPU is done before the next
# launch comes. `torch.compile(model, mode="reduce-overhead")` records the launches of a call once, as a **CUDA graph**, and
# replays them as one. A record is rigid:
#
# | it needs | because | so |
# |---|---|---|
# | static shapes | each launch has its sizes in it | pad to buckets, drop the last small batch |
# | static addresses | each launch has its pointers in it: inputs are copied to where the first ones lay, results lie where the last ones did | `clone()` what you keep: the next call overwrites it |
# | no synchronisation | nothing can come back to the CPU in the middle | no `.item()`, no print |
# | no control flow on the CPU | no Python runs in a replay: a branch stays as it was recorded | `torch.where`, as in balise 3 |
#
# Each new shape is recorded anew. What cannot be recorded is cut out and runs without, or the graph runs without a record. Sixteen rows,
# forward only:

# %%
if not MISSING:
    few, network = x[:16].clone(), small_network().eval().requires_grad_(False)
    modes = {mode: torch.compile(network, mode=mode) for mode in ("reduce-overhead", "default")}
    calls_by_mode = {mode: lambda run=run: run(few) for mode, run in modes.items()}
    mode_race = measure.race(calls_by_mode | {"eager": lambda: network(few)}, repeats=20, warmup=3, device=DEVICE)
    recorded.note(NAME, "reduce-overhead", mode_race.medians)
    print(mode_race)

# %% [markdown]
# On a CPU nothing is launched, so nothing is recorded: `reduce-overhead` gains nothing, and what compiling gains here is Python's
# own time between operations. On a GPU the first line is the gain of the record.
#
# ## Measured again: the training run
#
# What can compilation gain on a convolutional network? First the arithmetic: where does a step of the training run spend
# its time? Convolutions go to the same library, compiled or not. Only the rest can be fused.

# %%
torch._inductor.config.fallback_random = False
KINDS = {"convolution": "convolution", "batch norm": "batch_norm", "optimizer": "ptimizer"}
model = fresh_model()
optimizer = training_run.make_optimizer(model.parameters())
images, labels = (batch.to(DEVICE) for batch in next(iter(training_run.make_loader(num_workers=0))))
for _ in range(2):
    training_run.fast_step(model, images, labels, optimizer, DEVICE)
activity = torch.profiler.ProfilerActivity
with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if FULL else [])]) as profile:
    training_run.fast_step(model, images, labels, optimizer, DEVICE)
    measure.synchronize(DEVICE)
spent = {}
for event in profile.key_averages():
    if event.is_user_annotation or event.device_type != torch.autograd.DeviceType.CPU:
        continue  # labels, and kernels: their time is in the rows of the operators already
    taken = event.self_device_time_total if DEVICE.type == "cuda" else event.self_cpu_time_total
    kind = next((kind for kind, part in KINDS.items() if part in event.key), "everything else")
    spent[kind] = spent.get(kind, 0) + taken
shares = {kind: taken / sum(spent.values()) for kind, taken in spent.items()}
for kind, share in sorted(shares.items(), key=lambda item: -item[1]):
    print(f"{kind:<16} {share:4.0%} of a step")
limit = 1 / shares["convolution"]
print(f"\nof the operators' time, if all but the convolutions took none: {limit:.2f} times as fast, and no more")

# %% [markdown]
# Of the operators' time, that limit (Amdahl's law) is never reached: batch norm still has to read its input twice, for the statistics and for the
# result, and the backward pass again.
#
# On a GPU, the whole network and its optimizer are compiled now, by your function. Without one, compiling a whole ResNet
# takes a processor about a minute, so here only a **region** is compiled, the first stage, with the largest images. That is a
# technique of its own: a network of equal blocks compiles faster block by block.


# %%
def prepared():
    """The network, its optimizer and a step of the training run, compiled: the whole with a GPU, else one stage."""
    model = fresh_model()
    optimizer = training_run.make_optimizer(model.parameters())
    if not FULL:
        model.layer1.compile(backend=BACKEND)
        return model, optimizer, training_run.fast_step

    half = precision.fast_dtype(DEVICE) == torch.bfloat16  # float16 would want loss scaling, which the step has not

    def loss_of(images, labels):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
            return F.cross_entropy(model(images), labels)

    inner = make_compiled_step(loss_of, optimizer, BACKEND)

    def step(model, images, labels, optimizer, device):
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        return inner(images, labels.to(device, non_blocking=True)), None

    return model, optimizer, step


# %%
def start_again():
    """Seconds of the first two steps of a new job; the second may compile once more (the momentum is new)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, optimizer, step = prepared()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        step(model, images, labels, optimizer, DEVICE)
        measure.synchronize(DEVICE)
        seconds.append(time.perf_counter() - start)
    return (model, optimizer, step), seconds, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


_, first_start, hits = start_again()
made, second_start, _ = start_again()
print(f"first start:  {sum(first_start):5.1f} s for two steps, {hits or 'no'} graphs found in the cache")
print(f"second start: {sum(second_start):5.1f} s, from the cache")

# %% [markdown]
# First the step alone, on a batch that lies ready, in turn. Then the whole training run, with its loading: three pairs,
# each eager and compiled one after the other, and the pair with the middle gain is kept. A gain above the limit is Python's own
# time between operators, or another program that has disturbed a run.

# %%
model, optimizer, step = made
other = fresh_model()
other_optimizer = training_run.make_optimizer(other.parameters())
region_race = measure.race(
    {
        "compiled": lambda: step(model, images, labels, optimizer, DEVICE),
        "eager": lambda: training_run.fast_step(other, images, labels, other_optimizer, DEVICE),
    },
    repeats=30 if FULL else 9, warmup=2, device=DEVICE, calls=1,
)  # fmt: skip
region_race

# %%
pairs = []
for _ in measure.rounds(3):
    eager_run = training_run.run("eager", training_run.fast_step, model=fresh_model())
    name = "compiled" if FULL else "first stage compiled"
    pairs.append((eager_run, training_run.run(name, step, model=model, optimizer=optimizer)))
before, after = sorted(pairs, key=lambda pair: pair[1].images_per_second / pair[0].images_per_second)[len(pairs) // 2]
gains.keep(NAME, "torch.compile" if FULL else "torch.compile, first stage only", before=before, after=after)
why = (
    "Convolutions go to the same library, compiled or not; on a CPU they are most of a step, on a GPU much less of it."
)
whole.shows(after.images_per_second / before.images_per_second, "× {:.2f}", why)
report.compare([before, after])

# %%
for name, slow in {"first start": first_start, "from the cache": second_start}.items():
    print(f"{name:<15}", verdict(region_race, slow))

# %% [markdown]
# Read the figure with the limit above in mind. On a processor the library of convolutions takes most of a step, and what
# is left gains little; the difference between two such runs can be larger than the gain. Then the honest answer is: **on
# this machine do not compile this network**. On a GPU with Tensor Cores convolutions take less of the step, and batch norm,
# activations and additions more: there the same arithmetic gives another answer.

# %%
found = recorded.load(NAME, gains.KEY)
if found:
    slower, faster = found["images_per_second"]
    print(f"recorded on {recorded.where(NAME)}: {slower:,.0f} -> {faster:,.0f} images/s")
else:
    print("No training run of a GPU is recorded yet.")

# %% [markdown]
# ## Race
#
# Your C library stood against PyTorch's own kernel above. Here all ways to a GELU meet once more, at the size of the chain:
# PyTorch's own, five operations, and the five operations compiled. (Without a GPU, your library runs too, on one core.)

# %%
x = torch.randn(ELEMENTS // 4, device=DEVICE)
compiled_pieces = torch.compile(pieces_gelu, backend=BACKEND)
candidates = {
    "five operations, compiled": lambda: compiled_pieces(x),
    "torch's own gelu": lambda: F.gelu(x),
    "five operations": lambda: pieces_gelu(x),
}
if DEVICE.type == "cpu" and compiling.c_compiler():
    candidates["your C library, one core"] = lambda: fused_gelu(x, yours)
gelu_race = measure.race(candidates, repeats=20 if FULL else 7, device=DEVICE)
recorded.note(NAME, "gelu", gelu_race.medians)
gelu_race

# %% [markdown]
# ## Past this machine · further
#
# **Bytes.** Your `memory_traffic` needs shapes and no numbers: tensors on the device `meta` take no memory. The two chains of
# a transformer's feed-forward part in bfloat16, where they really stand, on cards that are not here. *Estimates* from data
# sheets, memory alone.


# %%
def after_first(x, bias):
    """Between the two products, on the wide tensor."""
    x = x + bias
    return 0.5 * x * (1 + torch.erf(x * 0.70710678))


def after_second(x, bias, mask, residual):
    """After the second product, on the narrow tensor."""
    return (x + bias) * mask + residual


def on_meta(*shapes):
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


rows, narrow, wide = 8 * 2048, 4096, 16384
chains = [memory_traffic(after_first, *on_meta((rows, wide), (wide,))),
          memory_traffic(after_second, *on_meta((rows, narrow), (narrow,), (rows, narrow), (rows, narrow)))]  # fmt: skip
unfused, fused = (sum(moved) for moved in zip(*chains))
for card in (planner.V100, planner.A100, planner.H100):
    both = f"{1000 * unfused / card.bandwidth:6.2f} ms unfused, {1000 * fused / card.bandwidth:5.2f} ms fused"
    saved = 48 * 1000 * (unfused - fused) / card.bandwidth
    print(f"estimate: {card.name:<5} {both}; 48 layers: {saved:5.0f} ms less a forward pass")

# %% [markdown]
# **Launches.** Before a kernel runs, Python goes through a module, autocast casts its weights, and the kernel is handed over.
# With small batches the GPU is done sooner, and waits. NVIDIA has published how long the forward pass of a ResNet-50 takes
# on a V100 in mixed precision, uncompiled (DeepLearningExamples, ResNet50 v1.5 for PyTorch, "Inference performance
# results"):

# %%
published = planner.RESNET50_FORWARD_SECONDS
an_image = published[256] / 256  # where the GPU has enough to do
for batch, seconds in published.items():
    print(f"batch {batch:4}: {1000 * seconds:5.1f} ms; the GPU alone would take about {1000 * batch * an_image:5.1f} ms "
          "(estimate from the last row)")  # fmt: skip

# %% [markdown]
# From 1 to 16 images hardly anything changes: with one image the GPU waits for Python nearly all the time, with 16
# still more than half of it. `torch.compile` has modes for this. What they gain depends on network and card, so the
# table has no figures:
#
# | `mode=` | what it does besides fusing | what it costs |
# |---|---|---|
# | `"default"` | nothing | – |
# | `"reduce-overhead"` | CUDA graphs, as above | static shapes and addresses; memory of its own |
# | `"max-autotune"` | times several Triton and library kernels for each matrix product and convolution; CUDA graphs as well | minutes of compiling |
# | `"max-autotune-no-cudagraphs"` | the same without CUDA graphs | minutes of compiling |
#
# Your `make_compiled_step` on a **modelled** card, as it is and with CUDA graphs; nothing is compiled: what stands between two
# convolutions counts as one kernel. Compiled transformers are the only compiled runs that the model was held against.

# %%
steps = {
    "eager": training_run.fast_step,
    "your step, CUDA graphs": worth.compiled(make_compiled_step, mode="reduce-overhead"),
    "your step": worth.compiled(make_compiled_step),
}
worth.table(steps, makes=worth.Mixed, batches=(2, 128), keep=NAME)

# %%
tp.progress()

# %%
gains.table()

# %% [markdown]
# ## Three questions
#
# <details><summary>A colleague compiles a model and sees no gain on an A100. The profile shows 40 small kernels between "Torch-Compiled Region" marks. What do you look for?</summary>
#
# Graph breaks: the model was cut into many regions. <code>fullgraph=True</code> or <code>TORCH_LOGS=graph_breaks</code> names the
# lines: a print, an <code>.item()</code>, a branch on a tensor.
# </details>
#
# <details><summary>Training on sentences is fast for a minute, then as slow as without compilation, and the log speaks of a recompile limit. Why?</summary>
#
# Something changes in each call that a guard looks at: lengths, where <code>dynamic=False</code> was given, or a Python counter
# in the module. After 8 graphs Dynamo compiles no more, and whatever fits none of them runs uncompiled. Pad to buckets, mark the dimension as dynamic, keep the number in a tensor.
# </details>
#
# <details><summary>A GELU fused into the matrix product before it would move even fewer bytes. Why did your count stop at one kernel for the chain?</summary>
#
# The count of <code>memory_traffic</code> treats the chain alone. The product writes its result once, and the chain reads it: one
# write and one read more could go. Inductor does that with its own matrix products (<code>max-autotune</code>), libraries do it with
# an <em>epilogue</em>.
# </details>
#
# ## To remember
#
# Fusing saves bytes, not operations: count the bytes, and you know the gain before you compile. A compiler needs one graph
# without breaks, and guards that hold: shapes in buckets, numbers in tensors. Compiling is bought with time, and pays after
# $n$ steps or never; a cache makes the second job cheap. Next: **data augmentation on the GPU**, another chain of small
# operations on large tensors.
