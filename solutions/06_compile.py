# %% [markdown] tags=["slide"]
# # Compilation: from a C file to torch.compile · about 90 min, core 55
#
# PyTorch runs one operation after another. Each one reads its operands from memory, does little with them, and writes
# its result back. A compiler that sees several operations at once can **fuse** them: each number is read once and then
# stays in registers. You count the bytes that fusion saves, write a model that `torch.compile` captures as a whole, and
# compute **after how many steps compiling has paid for itself**.
#
# **What you will gain.** A chain of eight pointwise operations makes 19 passes over a tensor. One fused kernel makes 4.

# %% tags=["setup"] jupyter={"source_hidden": true}
import ctypes
import math
import os
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler; must be set before torch is imported

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

# %% tags=["setup"] jupyter={"source_hidden": true}
FULL = scale() == "full"
DEVICE = training_run.device()
ELEMENTS = 2**28 if FULL else 2**22  # numbers in the tensors of the pointwise chain
WIDTH, ROWS, BLOCKS = (4096, 16384, 4) if FULL else (128, 512, 1)  # of the small network that is compiled whole
CACHE = compiling.settle_compiler()
MISSING = compiling.compile_missing(DEVICE)
BACKEND = "aot_eager" if MISSING else "inductor"  # aot_eager traces like inductor, but generates no code
print(MISSING + ": nothing is fused in this run" if MISSING else f"torch.compile generates code with {BACKEND}")

# %% [markdown] tags=["slide"]
# ## The idea
#
# A chain of $k$ operations on tensors of $Q$ bytes writes each intermediate result to memory and reads it back. With a
# bandwidth $B$, and $t_0$ seconds to start a kernel:
#
# $$t_\text{eager} \approx k\,t_0 + \frac{2\,k\,Q}{B}
# \qquad\qquad
# t_\text{fused} \approx t_0 + \frac{2\,Q}{B}$$

# %% tags=["slide"] jupyter={"source_hidden": true}
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
draw_passes(
    left, ["divide", "erf", "+ 1", "× x", "÷ 2"], "Five operations: each reads from memory and writes to it (a sketch)"
)
draw_passes(right, ["divide, erf, + 1, × x, ÷ 2"], "One kernel: intermediate results stay in registers")
plt.show()

# %% [markdown]
# ## The baseline
#
# The chain adds a bias, applies a GELU and a dropout mask, and adds a residual, as in a transformer's feed-forward
# part. How long do its eight operations take, and how long does one of them take?


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
rounds = 20 if FULL else 7
measure.race(
    {"x * mask alone": lambda: inputs[0] * inputs[2], "the chain": lambda: tail(*inputs)}, rounds, device=DEVICE
)

# %% [markdown]
# ### Balise 1 · A fused GELU in C · further · about 17 min
#
# $$\text{gelu}(x) = \frac{x}{2}\left(1 + \operatorname{erf}\!\left(\frac{x}{\sqrt 2}\right)\right)$$
#
# A loop in C reads each number once and writes each result once. C knows nothing about tensors: it gets two addresses
# and a count.
#
# - `compile_command(source, library)`: the command that builds the library. Write its `options`: optimise, and build a
#   shared library.
# - `c_source()`: the C file as text. It defines `void gelu(const float *x, float *y, int64_t n)`, which writes the
#   exact GELU of the `n` numbers at `x` to `y`.
# - `fused_gelu(x, library)`: the GELU of a CPU tensor of any shape, strides and dtype, as a **new** tensor of the same
#   shape and dtype. Prepare float32 numbers that C can read, and memory for the result. Call `library.gelu`, then
#   convert the result to the dtype of `x`.
#
# **Write all of it:** `tp.open_task(1)` gives you only names and docstrings. Write the kernel, build it, and call it
# from Python.
#
# <details><summary>Hint</summary>
#
# `-O3` optimises, and a shared library needs `-shared -fPIC`. In C, `erff` is the `float` version of `erf`, from
# `math.h`. `int64_t` comes from `stdint.h`. An address is `x.data_ptr()`. A transposed tensor's elements are in a
# different order in memory (`contiguous`), and a tensor without a name may be freed before C reads it.
# </details>


# %% tags=["balise-1"]
def compile_command(source, library):
    """The command that builds the shared library `library` from the C file `source` (two paths): a list of words.

    It calls cc, optimises (-O2 or -O3), makes code that can be loaded at any address, and links libm after the source.
    """
    # BEGIN SOLUTION
    options = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    # END SOLUTION
    return ["cc", *options, str(source), "-o", str(library), "-lm"]


def c_source():
    """The text of a C file that defines void gelu(const float *x, float *y, int64_t n).

    It writes the exact GELU, x/2 · (1 + erf(x/√2)), of the n numbers at x to y, and changes nothing else. n may be 0, or
    above 2³¹.
    """
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
    """GELU of the CPU tensor x, computed by `library.gelu` (ctypes): a new, contiguous tensor, same shape and dtype.

    x has any shape, strides and floating-point dtype, and isn't changed. C reads and writes float32 numbers, one after
    the other. Declare `argtypes` of library.gelu: addresses are c_void_p, n is c_int64.
    """
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
# You can add two more options: `-march=native` allows all instructions of this processor, and `-ffast-math` lets the
# compiler reorder operations. Such a library runs on this type of processor only, and may mishandle infinities and NaN.

# %%
CANDIDATES = "your C, your command", "your C, -O3 alone", "torch, five operations", "torch, built-in gelu"
fastest = tp.predict("Which computes a GELU of a million numbers fastest, on one core?", ..., choices=CANDIDATES)


# %% jupyter={"source_hidden": true}
def built(command):
    """Compile your C text with `command(source, library)` in a private folder. Returns the loaded library."""
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


# %% jupyter={"source_hidden": true}
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
            "torch, built-in gelu": lambda: F.gelu(x),
            "Python loop, 5,000 numbers": lambda: python_gelu(few),
        },
        repeats=7, warmup=1, device="cpu", calls=2,
    )  # fmt: skip
    torch.set_num_threads(threads)
    why = "Vector instructions compute several numbers at once, and five separate operations pass over the numbers five times."
    fastest.shows(min(CANDIDATES, key=race.medians.get), why=why)
else:
    print("there is no C compiler here, so this race is left out")

# %% jupyter={"source_hidden": true}
if compiling.c_compiler():
    nanoseconds = {name: 1e9 * t / (len(few) if "Python" in name else len(x)) for name, t in race.medians.items()}
    figure, axes = plt.subplots(figsize=(8.5, 2.9), layout="constrained")
    order = sorted(nanoseconds, key=nanoseconds.get)
    bars = axes.barh(order, [nanoseconds[name] for name in order], color=[BLUE if "C" in n else GREY for n in order])
    axes.bar_label(bars, [f" {nanoseconds[name]:,.3g}" for name in order])
    axes.set(xscale="log", xlabel="time per number (ns, log scale), one core", title="A GELU, computed in five ways")
    axes.margins(x=0.25)
    plt.show()

# %% [markdown]
# A C loop knows nothing about gradients, GPUs, bfloat16 or the next operation. `torch.compile` handles all of these:
# **Dynamo** captures graphs from a function's bytecode, **AOTAutograd** adds the backward graph, and **Inductor** fuses
# both into Triton or C++ code.
#
# ## Bytes, then seconds
#
# ### Balise 2 · Memory traffic, unfused and fused · about 13 min
#
# If memory is the limit, the gain of fusion is the ratio of bytes moved. Return the bytes that `function(*inputs)`,
# which returns one tensor, moves without and with fusion: `(unfused, fused)`.
#
# - `unfused`: for every operation, the tensors that it reads and those that it returns. Views move nothing.
# - `fused`: each of `inputs` once, and the result once.
#
# A `TorchDispatchMode` sees every operation in its block: it runs the operation and passes on the result. `tensors`
# finds all tensors in its argument, each once. Write
#
# - `held`, the bytes that a tensor's numbers take in memory. *Expanding* a tensor adds none;
# - what to do with each operation (add to `self.moved`);
# - the two numbers to return.
#
# <details><summary>Hint</summary>
#
# An expanded dimension has stride 0: leave its size out. `operation(*args, **(kwargs or {}))` runs the operation, and
# `operation.is_view` is true for views. Operands can be in `kwargs` too, and there may be several results: `tensors`
# takes any tuple.
# </details>


# %% tags=["balise-2"]
def memory_traffic(function, *inputs):
    """Bytes that function(*inputs) moves, operation by operation, and as one fused kernel: (unfused, fused)."""
    from torch.utils._pytree import tree_leaves

    def held(tensor):
        # BEGIN SOLUTION
        return tensor.itemsize * math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
        # END SOLUTION

    def tensors(tree):  # also inside lists, tuples and dictionaries; a repeated tensor counts once
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
# Now count the chain's bytes, compile it, and race it. Does the ratio of bytes predict the ratio of seconds?

# %%
unfused, fused = memory_traffic(tail, *inputs)

# %%
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
compiled_tail = torch.compile(tail, backend=BACKEND)
start = time.perf_counter()
compiled_tail(*inputs)
measure.synchronize(DEVICE)
tail_start = time.perf_counter() - start
found = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
chain = {"compiled": lambda: compiled_tail(*inputs), "eager": lambda: tail(*inputs)}
tail_race = measure.race(chain, rounds, device=DEVICE)

# %% tags=["slide"] jupyter={"source_hidden": true}
recorded.note(NAME, "tail", tail_race.medians | {"predicted": unfused / fused})
print(f"the first call took {tail_start:.1f} s: {'from the cache' if found else 'nothing was in the cache'}")
medians, passes = tail_race.medians, 4 * ELEMENTS
rows = [["eager", unfused / 1e6, unfused / passes, 8 * ELEMENTS / unfused, medians["eager"]],
        ["one kernel", fused / 1e6, fused / passes, 8 * ELEMENTS / fused, medians["compiled"]]]  # fmt: skip
columns = {
    "the chain": "{}",
    "MB": "{:.1f}",
    "passes": "{:.1f}",
    "operations per byte": "{:.2f}",
    "time": measure.human_seconds,
}
report.table(columns, rows)
print(f"eager / compiled: bytes {unfused / fused:.2f}, measured {1 / tail_race.ratio:.2f}")
if MISSING:
    print(f"{MISSING}: the compiled chain was not fused, so ignore its time")

# %% [markdown]
# The bytes tell us only about memory. Eager also has to *allocate* eight results, which increases the gain. The
# processor's cache and the arithmetic of `erf` reduce it. Matrix products do many operations for each byte, so fusion
# gains little there.
#
# ## One graph
#
# Dynamo captures a graph as long as it can follow Python *without knowing the numbers in the tensors*. Where it can't,
# the graph **breaks**: Python takes over, and the rest becomes another graph. The result stays correct, but nothing is
# fused across a break. `Chatty` has all the usual causes of breaks:


# %% tags=["setup"]
class Chatty(nn.Module):
    """x (b, 16) -> logits (b, 4). Keeps the peak of its activations, one number per call."""

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
# ### Balise 3 · One graph, no break · about 14 min
#
# Write `Mended`. It has the layers of `Chatty` (`first` and `second`, the same sizes), gives the same logits and
# gradients for every input, and is captured in **one** graph.
#
# - It prints nothing.
# - Instead of the list `peaks`, it has a buffer `peak` of shape `()`: the largest number that went into `second` in the
#   last call, detached from the graph.
# - If `size` is zero, logits and gradients are still those of `Chatty`, not NaN.
#
# <details><summary>Hint</summary>
#
# Compute both sides of a branch, and let `torch.where` choose. Gradients go through **both** sides, though: if the side
# that isn't chosen divides by zero, its gradient is 0 × ∞ = NaN. Make the divisor harmless *before* you divide. A
# square root has an infinite slope at zero, too. To count the elements above the mean, sum a comparison.
# Register buffers in `__init__` with `register_buffer`.
# </details>


# %% tags=["balise-3"]
class Mended(nn.Module):
    """x (b, 16) -> logits (b, 4), like Chatty, in one graph. Buffer `peak` (): largest activation of the last call."""

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
compiling.capture(Mended(), torch.randn(8, 16))

# %% [markdown]
# In your own code, `TORCH_LOGS=graph_breaks python train.py` lists the breaks, and
# `torch.compile(model, fullgraph=True)` makes them errors.
#
# ### Balise 4 · Recompilations, counted and stopped · further · about 15 min
#
# Each graph has **guards**: the shapes, dtypes and Python values that it was made for. If a call fits no graph's
# guards, Dynamo compiles another graph. After 8 graphs it stops, and such a call runs uncompiled. Batches of sentences
# vary in length, so pad them to a few lengths, the *buckets*.
#
# - `count_graphs`: a *backend* receives each new graph and returns what runs it. Write one that counts in `graphs` and
#   runs the graph unchanged.
# - `pad_to_bucket(x, multiple)`: append zeros to `x`, `(b, t, d)`, until `multiple` divides `t`. Return
#   `(padded, mask)`. The boolean `mask`, `(b, padded t)`, is `True` where a position is real.
# - `masked_pool(x, query, mask)`: `attention_pool` over the real positions only, without changing the shape of `x`.
#   Each row has at least one real position. NaN in the padding must affect neither the result nor the gradients.
#
# <details><summary>Hint</summary>
#
# `graph.forward` runs the graph unchanged, and `nonlocal graphs` lets the inner function count. `F.pad` counts
# dimensions from the last, two numbers for each, and pads booleans with `False`. A softmax gives weight 0 where the
# score is minus infinity: mask the scores *before* the softmax. A weight of 0 times NaN is NaN, in the backward
# pass too, so fill `x` first.
# </details>


# %% tags=["setup"]
def attention_pool(x, query):
    """Mean over t of x (b, t, d), weighted by the softmax over t of x · query, query (d,): (b, d)."""
    weights = (x @ query).softmax(dim=1)
    return (weights.unsqueeze(-1) * x).sum(dim=1)


# %% tags=["balise-4"]
def count_graphs(function, calls, dynamic=None):
    """How many graphs torch.compile makes for `function` in `calls`, a list of tuples of arguments."""
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
    """x (b, t, d), t padded with zeros to a multiple of `multiple`, and the mask of real positions; both on x's device."""
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

# %%
graphs_made = tp.predict("How many graphs does torch.compile, with its defaults, make for twenty lengths?", ...)


# %% jupyter={"source_hidden": true}
class Counter(nn.Module):
    """Divides by the number of its calls. It counts from `start`: a Python number, or a tensor ()."""

    def __init__(self, start):
        super().__init__()
        self.calls = start

    def forward(self, x):
        self.calls = self.calls + 1
        return x / self.calls


def marked(x):
    torch._dynamo.mark_dynamic(x, 1)  # this dimension will vary: do not guard its size
    return x


# %% jupyter={"source_hidden": true}
query, lengths = torch.randn(8), list(range(5, 65, 3))
sentences = [torch.randn(4, t, 8) for t in lengths]
calls = [(x, query) for x in sentences]
bucketed = [(padded, query, mask) for padded, mask in (pad_to_bucket(x, 16) for x in sentences)]
found = {
    "20 lengths, every shape fixed (dynamic=False)": count_graphs(attention_pool, calls, dynamic=False),
    "20 lengths, defaults": count_graphs(attention_pool, calls),
    "20 lengths, dynamic=True": count_graphs(attention_pool, calls, dynamic=True),
    "20 lengths, mark_dynamic": count_graphs(attention_pool, [(marked(x), query) for x, query in calls]),
    "padded to multiples of 16, every shape fixed": count_graphs(masked_pool, bucketed, dynamic=False),
    "20 steps counted in a Python number": count_graphs(Counter(0), [(torch.ones(3),)] * 20),
    "20 steps counted in a tensor": count_graphs(Counter(torch.zeros(())), [(torch.ones(3),)] * 20),
}
report.table({"": "{}", "graphs": "{}"}, list(found.items()))
share = 1 - sum(lengths) / sum(padded.shape[1] for padded, _, _ in bucketed)
print(f"8 graphs are the limit; {share:.0%} of the padded positions are padding")
why = "One for the first length. At the second, Dynamo makes the length a variable of the graph."
graphs_made.shows(found["20 lengths, defaults"], "{:.0f} graphs", why)

# %% [markdown]
# ## When does compiling pay off?
#
# ### Balise 5 · The step from which compiling pays off · about 10 min
#
# Compiling makes the first steps slow and each later step faster. `eager` and `compiled` are the seconds of one step.
# `slow_steps` lists the seconds of the steps that had to compile. Each of these did the work of a step as well.
#
# Return the smallest number of steps `n` after which the compiled job, its slow steps included, has taken no longer
# than the eager one: an `int`, at least 1, and at least `len(slow_steps)`. Return `None` if a compiled step is not
# faster.
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
# The figure uses your times for the chain: compiling has paid for itself where the lines cross. A new job that finds
# its graphs in the cache starts faster.


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
        steps = crossings[name]
        paid = f"    pays off after {steps:,} step{'s' * (steps > 1)}" if steps else "    never"
        ax.plot([], [], " ", label=paid)
    ax.set(xlabel="steps", ylabel="total time (s)", title=title, xlim=(0, last), ylim=(0, None))
    ax.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


# %% jupyter={"source_hidden": true}
torch._dynamo.reset()  # as in a new job: nothing is compiled yet, but the cache is there
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
draw_break_even(axes, "When does compiling the chain pay off?", medians["eager"], starts)
plt.show()

# %% [markdown]
# ## The whole step
#
# ### Balise 6 · A compiled training step · about 10 min
#
# `loss_of(*batch)` returns the loss `()` of a batch, and `optimizer` has the model's parameters. With `torch.compile`
# and the given `backend`, make `forward`, the compiled `loss_of`, and `update`, the compiled `optimizer.step`.
#
# - The loss must be **one** graph: a break is an error. The backward graph comes with it.
# - The optimizer may break the graph, as PyTorch's optimizers do. Don't replace `optimizer.step`, because schedulers
#   wrap it.
# - A scheduler's new learning rate must not trigger a recompilation.
#
# <details><summary>Hint</summary>
#
# A guard looks at Python numbers, not into tensors. Make each group's `"lr"` in `optimizer.param_groups` a tensor
# (`torch.as_tensor`), and schedulers will write into it. `fullgraph=True` makes a break an error. `torch.compile` takes
# functions and bound methods.
# </details>


# %% tags=["balise-6", "slide-mistake=lr-recompiles"]
def make_compiled_step(loss_of, optimizer, backend="inductor"):
    """Return step(*batch) -> loss (), detached: a compiled training step with loss_of and optimizer."""
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
# A small network of residual blocks trains twice from the same weights, with AdamW and a schedule: once eager, and once
# compiled by your function.


# %% tags=["setup"] jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
torch._inductor.config.fallback_random = True  # the random numbers of eager mode, to compare; fused kernels draw faster
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
both = {"compiled step": lambda: compiled_step(x, y), "eager step": lambda: eager_step(x, y)}
step_race = measure.race(both, 30 if FULL else 9, device=DEVICE)

# %% jupyter={"source_hidden": true}
recorded.note(NAME, "small network", step_race.medians)
print("eager    ", *(f"{loss:.4f}" for loss in eager_losses[::3]))
print("compiled ", *(f"{loss:.4f}" for loss in compiled_losses[::3]))
print(f"largest difference of the losses {(eager_losses - compiled_losses).abs().max():.1e}")


def verdict(race, slow_steps):
    """Say when compiling pays off; claim nothing if the two are equally fast."""
    compiled, eager = race.medians.values()
    if abs(eager - compiled) <= max(race.spreads.values()) / 2:
        return "no difference: the steps differ by less than their spread"
    paid = break_even(eager, compiled, slow_steps)
    return f"after {paid:,} steps" if paid else "never: the compiled step is not faster"


# %% [markdown]
# ## Measure again
#
# Has compiling paid for itself, in the chain and in the training step?

# %% tags=["slide"]
slow = [s for s in seconds if s > 20 * step_race.medians["compiled step"]]
rows = [
    [name, *reversed(race.medians.values()), sum(starts), verdict(race, starts)]
    for name, race, starts in (("the chain", tail_race, [tail_start]), ("training step", step_race, slow))
]
times = dict.fromkeys(("eager", "compiled", "compiling"), measure.human_seconds)
report.table({"": "{}", **times, "pays off": "{}"}, rows)

# %% [markdown]
# Where a compiled step is faster, hours of training on fixed shapes pay for compiling. A quick try with twenty batches
# doesn't.
#
# `torch.compile(model)` returns a wrapper whose `state_dict` has names that begin with `_orig_mod.`. Save the state of
# the inner model, or compile in place with `model.compile()`.
#
# ## CUDA graphs · further
#
# Fusing leaves fewer kernels, but Python still launches each of them. With small batches, the GPU waits for the next
# launch. `torch.compile(model, mode="reduce-overhead")` records the launches of a call as a **CUDA graph** and replays
# them together. This needs
#
# - static shapes, since each recorded launch contains its sizes: pad to buckets, and drop the last, smaller batch;
# - static addresses, since each recorded launch contains its pointers: `clone()` any result that you keep;
# - no synchronisation (`.item()`, print) and no branch in Python, since no Python runs in a replay: use `torch.where`,
#   as in balise 3.
#
# On a CPU there are no launches to record, and `reduce-overhead` gains nothing.

# %% jupyter={"source_hidden": true}
if not MISSING:
    few, network = x[:16].clone(), small_network().eval().requires_grad_(False)
    modes = {mode: torch.compile(network, mode=mode) for mode in ("reduce-overhead", "default")}
    calls_by_mode = {mode: lambda run=run: run(few) for mode, run in modes.items()}
    mode_race = measure.race(calls_by_mode | {"eager": lambda: network(few)}, repeats=20, warmup=3, device=DEVICE)
    recorded.note(NAME, "reduce-overhead", mode_race.medians)
    print(mode_race)

# %% [markdown]
# ## The training run · further
#
# The training run of this series uses channels last (practical work 03), and bfloat16 if the device is faster with it
# (02). Its convolutions run in the same library, compiled or not. Only the rest of a step can be fused, which
# limits the gain (Amdahl's law):


# %% tags=["setup"] jupyter={"source_hidden": true}
def fresh_model():
    """The network of the training run, always with the same weights, in channels last."""
    return training_run.fast_model(len(data.image_set().classes))


# %% jupyter={"source_hidden": true}
torch._inductor.config.fallback_random = False
KINDS = {"convolution": "convolution", "batch norm": "batch_norm", "optimizer": "ptimizer"}
model = fresh_model()
optimizer = training_run.make_optimizer(model.parameters())
images, labels = (batch.to(DEVICE) for batch in next(iter(training_run.make_loader(num_workers=0))))
for _ in range(2):
    training_run.fast_step(model, images, labels, optimizer, DEVICE)
activity = torch.profiler.ProfilerActivity
activities = [activity.CPU, *([activity.CUDA] if DEVICE.type == "cuda" else [])]
with torch.profiler.profile(activities=activities) as profile:
    training_run.fast_step(model, images, labels, optimizer, DEVICE)
    measure.synchronize(DEVICE)
spent = {}
for event in profile.key_averages():
    if event.is_user_annotation or event.device_type != torch.autograd.DeviceType.CPU:
        continue  # labels and kernels: the rows of the operators contain their time already
    taken = event.self_device_time_total if DEVICE.type == "cuda" else event.self_cpu_time_total
    kind = next((kind for kind, part in KINDS.items() if part in event.key), "everything else")
    spent[kind] = spent.get(kind, 0) + taken
shares = {kind: taken / sum(spent.values()) for kind, taken in spent.items()}
for kind, share in sorted(shares.items(), key=lambda item: -item[1]):
    print(f"{kind:<16} {share:4.0%} of a step")
limit = 1 / shares["convolution"]
print(f"\nat most {limit:.2f} times as fast, even if everything except the convolutions took no time")


# %% jupyter={"source_hidden": true}
def prepared():
    """The training run's (network, optimizer, step), compiled: the whole step with a GPU, otherwise one stage."""
    model = fresh_model()
    optimizer = training_run.make_optimizer(model.parameters())
    if not FULL:
        model.layer1.compile(backend=BACKEND)
        return model, optimizer, training_run.fast_step

    half = precision.fast_dtype(DEVICE) == torch.bfloat16  # float16 would need loss scaling, which this step lacks

    def loss_of(images, labels):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
            return F.cross_entropy(model(images), labels)

    inner = make_compiled_step(loss_of, optimizer, BACKEND)

    def step(model, images, labels, optimizer, device):
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        return inner(images, labels.to(device, non_blocking=True)), None

    return model, optimizer, step


# %% [markdown]
# Without a GPU, compiling a whole ResNet takes about a minute, so only a **region**, its first stage, is compiled. Of
# three pairs of runs, we keep the one with the median gain.

# %%
whole = tp.predict("How many times as fast is this training run when it is compiled, on this machine?", ...)


# %% jupyter={"source_hidden": true}
def start_again():
    """Time the first two steps of a new job, in seconds. The second may compile again: the momentum is new."""
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

# %% jupyter={"source_hidden": true}
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

# %% jupyter={"source_hidden": true}
pairs = []
for _ in measure.rounds(3):
    eager_run = training_run.run("eager", training_run.fast_step, model=fresh_model())
    name = "compiled" if FULL else "first stage compiled"
    pairs.append((eager_run, training_run.run(name, step, model=model, optimizer=optimizer)))
before, after = sorted(pairs, key=lambda pair: pair[1].images_per_second / pair[0].images_per_second)[len(pairs) // 2]
gains.keep(NAME, "torch.compile" if FULL else "torch.compile, first stage only", before=before, after=after)
why = "Convolutions run in the same library, compiled or not, so only the rest of a step can gain."
whole.shows(after.images_per_second / before.images_per_second, "× {:.2f}", why)
report.compare([before, after])

# %% jupyter={"source_hidden": true}
for name, slow in {"first start": first_start, "from the cache": second_start}.items():
    print(f"compiling pays off, {name}:", verdict(region_race, slow))
print(gains.expected(NAME))

# %% [markdown]
# A gain above the limit means that something else disturbed a run. A gain can also be smaller than the difference
# between two identical runs. Then the honest answer is: **don't compile this network on this machine**.
#
# ## Beyond this machine · further
#
# `memory_traffic` needs only shapes, no numbers, so it also works on the `meta` device. These are *estimates* for the
# two pointwise chains of a large transformer layer in bfloat16, if only memory limits them:


# %% jupyter={"source_hidden": true}
def after_first(x, bias):
    """Between the two matrix products, on the wide tensor."""
    x = x + bias
    return 0.5 * x * (1 + torch.erf(x * 0.70710678))


def after_second(x, bias, mask, residual):
    """After the second matrix product, on the narrow tensor."""
    return (x + bias) * mask + residual


def on_meta(*shapes):
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


rows, narrow, wide = 8 * 2048, 4096, 16384
chains = [memory_traffic(after_first, *on_meta((rows, wide), (wide,))),
          memory_traffic(after_second, *on_meta((rows, narrow), (narrow,), (rows, narrow), (rows, narrow)))]  # fmt: skip
unfused, fused = (sum(moved) for moved in zip(*chains))
rows = [[c.name, unfused / c.bandwidth, fused / c.bandwidth] for c in (planner.V100, planner.A100, planner.H100)]
report.table({"estimate": "{}", "unfused": measure.human_seconds, "fused": measure.human_seconds}, rows)

# %% [markdown]
# Launches take time, too. NVIDIA's uncompiled ResNet-50 takes 12.8 ms for one image and 14.0 ms for 16 on a V100
# (DeepLearningExamples): with one image, the GPU waits for Python nearly all the time. The next table shows your
# `make_compiled_step` on a **modelled** card, alone and with CUDA graphs. Nothing is compiled: the operations between
# two convolutions count as one kernel.

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

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>A compiled model gains nothing on an A100. The profile shows 40 small kernels between "Torch-Compiled Region" marks. What do you look for?</summary>
#
# Graph breaks: the model was cut into many regions. <code>fullgraph=True</code> or <code>TORCH_LOGS=graph_breaks</code>
# names the lines: a print, an <code>.item()</code>, a branch on a tensor.
# </details>
#
# <details><summary>Training on sentences is fast for a minute, then as slow as without compilation, and the log mentions a recompile limit. Why?</summary>
#
# Something that a guard looks at changes in each call: the length, with <code>dynamic=False</code>, or a Python counter
# in the module. After 8 graphs, calls that fit none run uncompiled. Pad to buckets, mark the dimension as dynamic, or
# keep the number in a tensor.
# </details>
#
# <details><summary>Fusing the GELU into the preceding matrix product would save even more bytes. Why did your count stop at one kernel for the chain?</summary>
#
# <code>memory_traffic</code> counts the chain alone. The product writes its result and the chain reads it: fusing the
# two would save that write and that read. Inductor does so in its own matrix products (<code>max-autotune</code>), and
# libraries do it with an <em>epilogue</em>.
# </details>
#
# ## To remember
#
# Fusion saves bytes, not operations. Count the bytes, and you can predict the gain before you compile. A compiler needs
# one graph without breaks, and guards that don't change: shapes in buckets, numbers in tensors. Compiling costs time,
# and pays for itself after $n$ steps or never. Next: **data augmentation**.
