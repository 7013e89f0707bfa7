# %% [markdown]
# # Tensor slicing, under the hood · about 100 min, core 40
#
# Data parallelism needs the whole model on every rank. When one *layer* with its gradients and optimizer states is too much,
# the layer itself has to be cut. In this practical work you cut a small transformer language model over the ranks, as
# Megatron-LM does: linear layers, embedding, attention, feed-forward. You count what travels, cut it
# by more than half, and combine it with data parallelism.
#
# **What you will gain.** A model of 13 billion parameters trains with 16 bytes for each: float16 weights and gradients, a
# float32 copy of the weights and Adam's two moments. On how many GPUs does it fit, and what does it cost to send activations?
# The next cell *estimates* it from published sizes and data sheets; nothing is measured.

# %% tags=["setup"]
import contextlib
import copy
import os
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dlojz_tp import course, data, launch, measure, modelled_gpu, recorded, report, scale, todo
from dlojz_tp.models import Attention, Block, FeedForward, Transformer, TransformerConfig, language_loss

tp = course.open("17_tensor_slicing")
tp

# %% jupyter={"source_hidden": true}
WIDTH_13B, LAYERS_13B, TOKENS = 5120, 40, 2048  # published sizes of a model of 13 billion parameters; one sequence
STATES = 12 * WIDTH_13B**2 * LAYERS_13B * 16  # bytes; a layer has 12 d² weights: 4 d² in attention, 8 d² behind it
MESSAGE = TOKENS * WIDTH_13B * 2  # bytes of one activation (sequence, width) in half precision
INSIDE, BETWEEN = 450e9, 50e9  # bytes a second: NVLink of an H100 (data sheet, one direction); 400 Gb/s for each GPU
print(f"estimate: {STATES / 1e9:.0f} GB of weights, gradients and optimizer states\n")
print("ranks   GB on each   fits 80 GB   sent in a step: NVLink, 450 GB/s   network, 50 GB/s")
for n in (1, 2, 4, 8):
    bytes_sent = 4 * LAYERS_13B * 2 * (n - 1) / n * MESSAGE
    times = [f"{1e3 * bytes_sent / bandwidth:.0f} ms" for bandwidth in (INSIDE, BETWEEN)]
    fits = "yes" if STATES / n < 80e9 else "no"
    print(f"{n:>5} {STATES / n / 1e9:>12.0f}   {fits:>10} {times[0]:>32} {times[1]:>18}")

# %% [markdown]
# Four all-reduces a layer, and the next product waits for each. You will see why four, and why tensor slicing stays inside a node.
#
# With two GPUs or more, the ranks talk through NCCL; else they are processes on the CPU, talk through gloo, and share the cores.

# %% tags=["setup"]
GPUS = torch.cuda.device_count()
if GPUS == 1:
    os.environ["DLOJZ_LAUNCH_ON_CPU"] = "1"  # for all launches of this notebook
FULL = scale() == "full" and GPUS >= 2  # one GPU cannot carry two ranks
TEXT = data.code_text()  # the source of Python's standard library, as tokens
CONFIG = TransformerConfig(
    vocab_size=TEXT.vocab_size,
    width=1024 if FULL else 128,
    heads=16 if FULL else 8,
    layers=8 if FULL else 2,
    max_length=512 if FULL else 64,
)
LENGTH = CONFIG.max_length  # tokens of a sequence
BATCH = 16 if FULL else 8  # sequences of a step
STEPS = 100 if FULL else 40
LEARNING_RATE = 3e-4 if FULL else 1e-3
RANKS = (1, 2) if GPUS in (2, 3) else (1, 2, 4)

# %% [markdown]
# ## The idea
#
# A linear layer is a product $Y = XW$. There are two ways to cut $W$ over $N$ ranks, by **columns** and by **rows**:
#
# $$X\,(W_1\;\;W_2) = (XW_1\;\;XW_2) \qquad\qquad
# (X_1\;\;X_2)\begin{pmatrix}W_1\\W_2\end{pmatrix} = X_1W_1 + X_2W_2$$
#
# By columns, every rank needs the whole $X$ and gets a part of $Y$. By rows, every rank needs a part of $X$ and gets a
# whole matrix that is a part of the *sum*. Put the second behind the first, and nothing has to travel between them.


# %% jupyter={"source_hidden": true}
def grid(axes, x, y, width, height, colours, text, by="columns"):
    """A matrix cut into len(colours) parts, its name below."""
    n = len(colours)
    for k, colour in enumerate(colours):
        if by == "columns":
            place = (x + k * width / n, y), width / n, height
        else:
            place = (x, y + height - (k + 1) * height / n), width, height / n
        axes.add_patch(plt.Rectangle(*place, facecolor=colour, edgecolor="white", linewidth=2))
    axes.text(x + width / 2, y - 0.28, text, ha="center", va="center", fontsize=10)


ZERO, ONE, WHOLE, SUM = "#0072B2", "#E69F00", "#999999", "#009E73"
figure, axes = plt.subplots(figsize=(8.5, 2.5), layout="constrained")
grid(axes, 0, 0.6, 0.8, 1.2, [WHOLE], "$X$, on both")
grid(axes, 1.5, 0.8, 2.0, 0.8, [ZERO, ONE], "$A$, by columns")
grid(axes, 4.2, 0.6, 2.0, 1.2, [ZERO, ONE], "$H=\\phi(XA)$")
grid(axes, 6.9, 0.2, 0.8, 2.0, [ZERO, ONE], "$B$, by rows", by="rows")
grid(axes, 8.4, 0.6, 0.8, 1.2, [ZERO], "rank 0")
grid(axes, 9.8, 0.6, 0.8, 1.2, [ONE], "rank 1")
grid(axes, 11.3, 0.6, 0.8, 1.2, [SUM], "$Y$, on both")
for x, sign in ((1.15, "·"), (3.85, "→"), (6.55, "·"), (8.05, "="), (9.5, "+"), (10.95, "=")):
    axes.text(x, 1.2, sign, ha="center", va="center", fontsize=16)
axes.text(10.95, 2.05, "one all-reduce", ha="center", va="center", fontsize=9, color="#555555")
axes.set(xlim=(-0.3, 12.4), ylim=(-0.35, 2.4), xticks=[], yticks=[])
axes.set_title(
    "Columns, then rows: two products, one communication (blue: rank 0, orange: rank 1)", loc="left", fontsize=11
)
axes.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# ## The baseline, measured first
#
# The model is plain PyTorch. All ranks draw the same weights and see the same batches, of Python's own source code.


# %% tags=["setup"]
TOKENS_USED = TEXT.train if FULL else TEXT.train[300_000:400_000].clone()  # all that travels to the ranks


def make_model():
    """The plain transformer on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    return Transformer(CONFIG).to(launch.device())


def token_batch(step):
    """Tokens of a step, (BATCH, LENGTH + 1), on this rank's device, the same on all ranks."""
    return data.batch_of_text(TOKENS_USED, BATCH, LENGTH + 1, seed=step).to(launch.device())


# %% [markdown]
# On every rank: some steps of training with their losses and times, then one more, in which the bytes of all living tensors are counted.


# %% tags=["setup"]
def train_step(model, optimizer, tokens):
    """One step; `language_loss` is the mean cross-entropy of each next token."""
    optimizer.zero_grad()
    loss = language_loss(model, tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(make):
    """On a rank: train `make(plain model)`. Returns losses, seconds of each step, {part: bytes} at the peak."""
    torch.manual_seed(1)
    torch.set_num_threads(1)  # on a CPU, each rank is one core's worth
    model, device, losses, times = make(make_model()), launch.device(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        tokens = token_batch(step)
        measure.synchronize(device)
        begin = time.perf_counter()
        losses.append(train_step(model, optimizer, tokens))
        measure.synchronize(device)
        times.append(time.perf_counter() - begin)
    optimizer.zero_grad()
    with measure.LiveBytes().track(model, optimizer) as live:
        train_step(model, optimizer, tokens)
        for p in model.parameters():
            live.track_gradient(p)
        live.reset_peak()
        language_loss(model, tokens).backward()
    return [loss.item() for loss in losses], times, dict(live.parts_at_peak)


# %%
def plain(model):
    return model


def summary(name, result):
    losses, times, parts = result
    step = sorted(times[3:])[len(times[3:]) // 2]
    held = ", ".join(f"{part} {measure.human_bytes(parts.get(part, 0))}" for part in PARTS)
    print(f"{name}: loss {losses[0]:.3f} → {losses[-1]:.3f}, {measure.human_seconds(step)} a step; at the peak {held}")


PARTS = ("parameters", "gradients", "optimizer states", "activations")
found = {"one process": launch.ranks(train, plain, n=1, timeout=120)[0]}
summary("one process", found["one process"])

# %% [markdown]
# ### Balise 1 · Two functions that are each other's mirror · about 9 min
#
# Every rank holds the same $x$ and does its own part of the work with it. At the end, what the ranks found is added up:
#
# ```
#            ┌─ rank 0: its part ─┐
#  x ── copy ┤                    ├ sum ── y        forward →   ← backward
#            └─ rank 1: its part ─┘
# ```
#
# Autograd knows nothing of other ranks, so the two ends need a backward of their own. At *copy*, a rank finds the gradient of its own
# part only, but $x$ had an effect through all parts: its gradient is their **sum over the ranks**. At *sum*, $y$ is a sum of
# terms, and the gradient of each term is that of $y$, which every rank holds already. Megatron-LM calls the two $f$ and $g$.
#
# Write forward and backward of `CopyToRanks` and `SumOverRanks`, 1 line each. `total(x)` is given: the sum of `x` over the ranks, as
# a new tensor.
#
# <details><summary>Hint</summary>
#
# Two of the four call `total`. A forward that does nothing returns `x.view_as(x)`: the same memory, another place in the graph.
# </details>


# %% tags=["balise-1"]
def total(x):
    """A new tensor: the sum of `x` over the ranks."""
    # given: an all-reduce works in place and sends memory as it lies, so it gets a copy without gaps
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result)
    return result


class CopyToRanks(torch.autograd.Function):
    """Where every rank begins its part of the work with x."""

    @staticmethod
    def forward(ctx, x):
        # BEGIN SOLUTION
        return x.view_as(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        # BEGIN SOLUTION
        return total(gradient)
        # END SOLUTION


class SumOverRanks(torch.autograd.Function):
    """Where the ranks' parts of the work end: each brings a term x of the sum."""

    @staticmethod
    def forward(ctx, x):
        # BEGIN SOLUTION
        return total(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        # BEGIN SOLUTION
        return gradient
        # END SOLUTION


# %%
tp.check(1, CopyToRanks, SumOverRanks)

# %% [markdown]
# The third is given, the all-gather. Forward, the parts of all ranks side by side; backward, each rank keeps the gradient of its own
# part. Nothing travels then: what is behind it is computed alike on all ranks.


# %% tags=["setup"]
class GatherFromRanks(torch.autograd.Function):
    """Forward: the parts of all ranks, side by side along `dim`. Backward: this rank's part of the gradient."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].contiguous(), None


# %% [markdown]
# From here on, all that knows of ranks is one small object, `ranks`, handed to each layer. Ask it, never `dist`: from balise 9 on it
# will be *some* of the ranks. All layers are built **from the plain layer**, the same on all ranks, and keep their part alone.


# %% tags=["setup"]
class Ranks:
    """The ranks that hold one model together."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        gpu = launch.device().type == "cuda"
        self.generator = torch.cuda.default_generators[torch.cuda.current_device()] if gpu else torch.default_generator
        self.stream = torch.Generator(launch.device()).manual_seed(1000 + dist.get_rank()).get_state()

    def copy(self, x):
        return CopyToRanks.apply(x)

    def sum(self, x):
        return SumOverRanks.apply(x)

    def gather(self, x, dim=-1):
        return GatherFromRanks.apply(x, dim)

    def part(self, tensor, dim):
        """This rank's part of `tensor` along `dim`, a view. ValueError where the size does not divide."""
        if tensor.shape[dim] % self.size:
            raise ValueError(f"{self.size} ranks do not divide a size of {tensor.shape[dim]}")
        return tensor.chunk(self.size, dim)[self.rank]

    @contextlib.contextmanager
    def own_random(self):
        """Inside, random numbers of this rank's own stream; outside, all ranks draw alike."""
        common = self.generator.get_state()
        self.generator.set_state(self.stream)
        try:
            yield
        finally:
            self.stream = self.generator.get_state()
            self.generator.set_state(common)


# %% [markdown]
# ### Balise 2 · A linear layer cut by columns · about 6 min
#
# Each rank computes some of the **output** features: the whole $x$ comes in, this rank's columns of $Y$ come out, and a
# gather makes $Y$ whole.
#
# - `column_part(linear, ranks)` returns an `nn.Linear` that holds this rank's share, a block of neighbours, rank 0's first. Putting it together is given. You cut the
#   weight and the bias: tensors of their own, for a view keeps the whole matrix in memory, and nothing is saved.
# - `ColumnLinear.forward(x)`: the whole `x`, `(…, in)`, to the whole result, `(…, out)`, on every rank. The gradient of `x` has to be that
#   of the uncut layer.
#
# `ranks.part(tensor, dim)` is this rank's part of a tensor, a view; it refuses a size that does not divide, as any way of yours has to.
# If you need sizes of `x`, take them from what `ranks.copy` gives: ranks of a later balise make the sequence longer there. 1 line in
# each of the three places.
#
# <details><summary>Hint</summary>
#
# PyTorch computes $XW^\top$ with a weight of shape `(out, in)`: what the formula calls columns lies along dimension 0.
# `.detach().clone()` makes a tensor of its own, `nn.Parameter` a parameter. In `forward`: what do all ranks share at the entrance, and
# so which function of balise 1 stands there, as `ranks.copy` or `ranks.sum`? At the exit, `ranks.gather`.
# </details>


# %% tags=["balise-2"]
def column_part(linear, ranks):
    """An nn.Linear with this rank's output features of `linear`: weight (out / N, in), bias (out / N) or None."""
    # weight: this rank's share, a tensor of its own
    # BEGIN SOLUTION
    weight = ranks.part(linear.weight, 0).detach().clone()
    # END SOLUTION
    # given: on "meta" it takes no memory, and copy_ into it does nothing; part.bias, if there is one, is assigned by you
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=linear.bias is not None, device="meta")
    part.weight = nn.Parameter(weight)
    if linear.bias is not None:
        # BEGIN SOLUTION
        part.bias = nn.Parameter(ranks.part(linear.bias, 0).detach().clone())
        # END SOLUTION
    return part


class ColumnLinear(nn.Module):
    """A linear layer cut by columns over the ranks, its outputs gathered. x (…, in) -> (…, out)."""

    def __init__(self, linear, ranks):
        super().__init__()
        self.ranks = ranks
        self.part = column_part(linear, ranks)

    def forward(self, x):
        # BEGIN SOLUTION
        return self.ranks.gather(self.part(self.ranks.copy(x)))
        # END SOLUTION


# %%
tp.check(2, column_part, ColumnLinear)

# %% [markdown]
# ### Balise 3 · An embedding cut along its dimension · further · about 7 min
#
# An embedding is a table of shape `(vocabulary, d)`. `SlicedEmbedding` holds `d / N` neighbouring **columns** of it, all words, and
# `forward(tokens)` returns the whole vectors, `(…, d)`, on every rank. The table stays where it is: only the tokens' vectors travel. 1 line to
# hold the part, 1 to look up.
#
# **Bonus.** `VocabularyEmbedding` holds `vocabulary / N` **rows**, whole vectors of this rank's words. A word of another rank's
# counts as zero here, so that the sum over the ranks is the vector. Given: `mine`, each token's row in this rank's part, and `others`,
# where that is out of range. 2 lines (left undone, the balise passes without them).
#
# <details><summary>Hint</summary>
#
# `F.embedding(tokens, weight)` looks up rows; a row out of range is an error. Tokens have no gradient: does anything stand
# at the entrance? Bonus: `masked_fill` the rows of other words with 0, look up, `masked_fill` their vectors with 0, and only then sum.
# </details>


# %% tags=["balise-3"]
class SlicedEmbedding(nn.Module):
    """An embedding of which each rank holds d / N columns. tokens (…) -> (…, d)."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks = ranks
        # self.weight: this rank's columns, all words
        # BEGIN SOLUTION
        self.weight = nn.Parameter(ranks.part(embedding.weight, 1).detach().clone())
        # END SOLUTION

    def forward(self, tokens):
        # BEGIN SOLUTION
        return self.ranks.gather(F.embedding(tokens, self.weight))
        # END SOLUTION


class VocabularyEmbedding(nn.Module):
    """Bonus: an embedding of which each rank holds vocabulary / N rows. tokens (…) -> (…, d)."""

    def __init__(self, embedding, ranks):
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(ranks.part(embedding.weight, 0).detach().clone())

    def forward(self, tokens):
        mine = tokens - self.ranks.rank * len(self.weight)
        others = (mine < 0) | (mine >= len(self.weight))  # which of the tokens are another rank's words
        # BEGIN SOLUTION
        vectors = F.embedding(mine.masked_fill(others, 0), self.weight)
        return self.ranks.sum(vectors.masked_fill(others.unsqueeze(-1), 0))
        # END SOLUTION


# %%
tp.check(3, SlicedEmbedding, VocabularyEmbedding)

# %% [markdown]
# ### Balise 4 · Attention cut by heads · about 8 min
#
# The heads of an attention do not know of each other until the output projection. So heads are columns that were cut already:
# each rank computes `heads / N` of them, from its columns of `query`, `key` and `value` (given). The projection $W$ behind
# them takes this rank's heads as its input, so it is cut by **rows**, and what it gives is a *term*:
#
# $$Y = \textstyle\sum_r \mathrm{heads}_r(X)\,W_r + b$$
#
# - `row_part(linear, ranks)` has this rank's share of the **input** features, and no bias. 1 line to cut the weight.
# - `SlicedAttention.forward(x)`: `x`, `(b, s, d)`, is whole on every rank, and so is the result. Write what stands at the entrance (1 line),
#   the causal attention of this rank's heads (2), and the exit (1). Take sizes from what `ranks.copy` gives: in balise 12 it
#   makes the sequence longer.
#
# In training, attention drops weights at random, different ones in each head. Elsewhere all ranks draw the same random
# numbers; so draw inside `with self.ranks.own_random():`, or each rank's heads drop the same as its neighbour's.
#
# <details><summary>Hint</summary>
#
# `F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)` gives `(b, heads / N, s, k)`; `.transpose(1, 2).flatten(2)`
# joins the heads to `(b, s, d / N)`. `self.bias` is $b$: how often does it count if it is added before the sum?
# </details>


# %% tags=["balise-4"]
def row_part(linear, ranks):
    """An nn.Linear without bias with this rank's input features of `linear`: weight (out, in / N)."""
    # weight: this rank's share, a tensor of its own
    # BEGIN SOLUTION
    weight = ranks.part(linear.weight, 1).detach().clone()
    # END SOLUTION
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    part.weight = nn.Parameter(weight)
    return part


class SlicedAttention(nn.Module):
    """Causal self-attention, its heads cut over the ranks. x (b, s, d) -> (b, s, d)."""

    def __init__(self, attention, ranks):
        super().__init__()
        if attention.heads % ranks.size:
            raise ValueError(f"{ranks.size} ranks do not divide {attention.heads} heads")
        self.ranks, self.heads, self.dropout = ranks, attention.heads // ranks.size, attention.dropout
        self.query = column_part(attention.query, ranks)
        self.key = column_part(attention.key, ranks)
        self.value = column_part(attention.value, ranks)
        self.output = row_part(attention.output, ranks)
        self.bias = nn.Parameter(attention.output.bias.detach().clone())

    def forward(self, x_bsd):
        # x_bsd: what stands at the entrance
        # BEGIN SOLUTION
        x_bsd = self.ranks.copy(x_bsd)
        # END SOLUTION
        # given: this rank's heads, each (b, heads / N, s, k)
        layers = self.query, self.key, self.value
        q, k, v = (layer(x_bsd).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        rate = self.dropout if self.training else 0.0
        # the attention of these heads, and the exit
        # BEGIN SOLUTION
        with self.ranks.own_random():
            y_bhsk = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.ranks.sum(self.output(y_bhsk.transpose(1, 2).flatten(2))) + self.bias
        # END SOLUTION


# %%
tp.check(4, row_part, SlicedAttention)

# %% [markdown]
# See it: all scores are alike and all values 1, so a head gives the share of tokens that it kept.


# %% jupyter={"source_hidden": true}
def kept(heads=4, length=48):
    """On a rank: (heads, length), what each head gives."""
    plain = Attention(heads, heads, dropout=0.5).to(launch.device())
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
        plain.value.bias.fill_(1)
        plain.output.weight.copy_(torch.eye(heads))
        torch.manual_seed(3)  # the same on all ranks
        return SlicedAttention(plain, Ranks())(torch.zeros(1, length, heads, device=launch.device()))[0].T.cpu()


figure, axes = plt.subplots(figsize=(8.5, 2.2), layout="constrained")
image = axes.imshow(launch.ranks(kept, n=2)[0], cmap="Blues", vmin=0, vmax=2, aspect="auto")
axes.set(yticks=range(4), yticklabels=[f"head {h}, rank {h // 2}" for h in range(4)], xlabel="token")
axes.set_title("How many of the earlier tokens does each head keep? No two rows are alike", loc="left", fontsize=11)
figure.colorbar(image, ax=axes, label="share kept ÷ 0.5")
plt.show()

# %% [markdown]
# ### Balise 5 · A feed-forward from column-cut layers · further · about 4 min
#
# The plain `FeedForward` has two linear layers, `up` (d → f) and `down` (f → d), with a GELU between them. What one would do
# first: cut both by columns. Write the forward, 1 line. It is right; what does it cost?
#
# <details><summary>Hint</summary>
#
# `F.gelu` works on each element: between two gathered layers it looks like that of the plain layer.
# </details>


# %% tags=["balise-5"]
class GatheredFeedForward(nn.Module):
    """Two column-cut linear layers with a GELU between them. x (b, s, d) -> (b, s, d)."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.up = ColumnLinear(feed_forward.up, ranks)
        self.down = ColumnLinear(feed_forward.down, ranks)

    def forward(self, x_bsd):
        # BEGIN SOLUTION
        return self.down(F.gelu(self.up(x_bsd)))
        # END SOLUTION


# %%
tp.check(5, GatheredFeedForward)

# %% [markdown]
# What does it send? A **ring** moves an all-gather of $n$ bytes with $\frac{N-1}{N}n$ bytes sent by each rank, and an all-reduce with
# twice as much. The unit of the table is one activation, (b, s, d).
#
# In balise 6 nothing will be gathered between the two layers. Guess before you run the next cells.


# %% tags=["setup"]
def traffic(make):
    """On a rank: [(way, name, bytes handed in)] of one forward and one backward through the layer `make(ranks)`."""
    layer, found = make(Ranks()).to(launch.device()), []
    x = torch.randn(BATCH, LENGTH, CONFIG.width, device=launch.device(), requires_grad=True)
    with measure.Communications() as log:
        y = layer(x)
        forward = len(log.entries())
        y.sum().backward()
    for k, entry in enumerate(log.entries()):
        found.append(("forward" if k < forward else "backward", entry["name"], entry["bytes"]))
    return found


def units(name, size, n):
    """Activations (b, s, d) that a rank sends in a ring of n, for a collective to which it hands in `size` bytes."""
    sent = (n - 1) * size if name == "all_gather" else 2 * (n - 1) / n * size
    return sent / (BATCH * LENGTH * CONFIG.width * 4)


def sent_by(calls, n):
    return sum(units(name, size, n) for _, name, size in calls)


def table(title, calls, n):
    print(title)
    for way, name, size in calls:
        print(f"   {way:<9} {name:<11} {units(name, size, n):5.2f}")
    print(f"   {len(calls)} communications, {sent_by(calls, n):.2f} activations sent\n")


# %%
fewer = tp.predict("How many times as much as a pair do two gathered layers send (f = 4 d, 2 ranks)?", ...)


# %%
def gathered_feed_forward(ranks):
    return GatheredFeedForward(FeedForward(CONFIG.width, 4 * CONFIG.width), ranks)


gathered = launch.ranks(traffic, gathered_feed_forward, n=2)[0]
table("two column-cut layers, 2 ranks", gathered, 2)

# %% [markdown]
# ### Balise 6 · The pair: columns, then rows · about 6 min
#
# Gathered, the middle travels whole, and it is four times as wide as the ends. But nobody needs it in one place: the GELU works on each
# element, and `down` cut by **rows** takes just this rank's part. So cut `up` by columns, `down` by rows, and nothing travels in the
# middle: one all-reduce forward, one backward, both of size (b, s, d).
#
# Write the two parts (2 lines) and the forward (2 lines). The bias of `down` is given, whole on every rank. As in attention,
# take sizes from what `ranks.copy` gives.
#
# <details><summary>Hint</summary>
#
# `column_part` and `row_part` are all you need of slicing. `self.ranks.copy` and `self.ranks.sum` stand at the two ends. The bias
# counts once, as in attention.
# </details>


# %% tags=["balise-6"]
class ColumnRow(nn.Module):
    """A feed-forward whose first layer is cut by columns, the second by rows. x (b, s, d) -> (b, s, d)."""

    def __init__(self, feed_forward, ranks):
        super().__init__()
        self.ranks = ranks
        # self.up and self.down: this rank's parts
        # BEGIN SOLUTION
        self.up = column_part(feed_forward.up, ranks)
        self.down = row_part(feed_forward.down, ranks)
        # END SOLUTION
        self.bias = nn.Parameter(feed_forward.down.bias.detach().clone())

    def forward(self, x_bsd):
        # BEGIN SOLUTION
        hidden = F.gelu(self.up(self.ranks.copy(x_bsd)))
        return self.ranks.sum(self.down(hidden)) + self.bias
        # END SOLUTION


# %%
tp.check(6, ColumnRow)


# %%
def pair(ranks):
    return ColumnRow(FeedForward(CONFIG.width, 4 * CONFIG.width), ranks)


paired = launch.ranks(traffic, pair, n=2)[0]
table("columns, then rows, 2 ranks", paired, 2)
fewer.shows(
    sent_by(gathered, 2) / sent_by(paired, 2),
    "× {:.2f}",
    "Most of it was the middle, four times as wide as the ends: gathered forward, its gradient summed backward.",
)

# %% [markdown]
# ### Balise 7 · The whole model · further · about 9 min
#
# A block is its plain one with two halves cut; norms and dropout stay whole: every rank computes the same, on the same numbers.
# Write the two halves in `SlicedBlock`, the feed-forward as the pair of balise 6 (2 lines).
#
# `SlicedTransformer` is given, but for one thing. A *tied* head has no weight of its own: it is the token embedding, used a second
# time, to give each word a score. Each rank holds `d / N` columns of that table, `(v, d / N)`. Seen as a linear layer, with a weight `(out, in)`,
# that is a cut by rows: it takes this rank's part of `x` and gives a term of the scores `(b, s, v)`. Write it, 2 lines.
#
# <details><summary>Hint</summary>
#
# `self.ranks.part(…, -1)` is this rank's part of `x`. Each rank uses another part of it, and the gradient of `x` needs all of them: which
# function stands before the cut? Then `F.linear(mine, self.token_embedding.weight)`.
# </details>


# %% tags=["balise-7"]
class SlicedBlock(nn.Module):
    """A block whose attention and feed-forward are cut over the ranks. x (b, s, d) -> (b, s, d)."""

    def __init__(self, block, ranks):
        super().__init__()
        self.norm_attention, self.norm_feed_forward = block.norm_attention, block.norm_feed_forward
        # self.attention and self.feed_forward: the halves of `block`, cut
        # BEGIN SOLUTION
        self.attention = SlicedAttention(block.attention, ranks)
        self.feed_forward = ColumnRow(block.feed_forward, ranks)
        # END SOLUTION
        self.drop = block.drop

    def forward(self, x_bsd):
        x_bsd = x_bsd + self.drop(self.attention(self.norm_attention(x_bsd)))
        return x_bsd + self.drop(self.feed_forward(self.norm_feed_forward(x_bsd)))


class SlicedTransformer(nn.Module):
    """A transformer cut inside its layers over the ranks. tokens (b, s) -> scores (b, s, v), on every rank."""

    def __init__(self, model, ranks):
        super().__init__()
        self.ranks = ranks
        self.token_embedding = SlicedEmbedding(model.token_embedding, ranks)
        self.position_embedding, self.drop, self.norm = model.position_embedding, model.drop, model.norm
        self.blocks = nn.ModuleList(SlicedBlock(block, ranks) for block in model.blocks)
        self.head = None if model.config.tied_head else ColumnLinear(model.head, ranks)

    def forward(self, tokens_bs):
        places_s = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)
        x_bsd = self.drop(self.token_embedding(tokens_bs) + self.position_embedding(places_s))
        for block in self.blocks:
            x_bsd = block(x_bsd)
        x_bsd = self.norm(x_bsd)
        if self.head is not None:
            return self.head(x_bsd)
        # a tied head: the scores from this rank's columns of the token embedding
        # BEGIN SOLUTION
        mine = self.ranks.part(self.ranks.copy(x_bsd), -1)
        return self.ranks.sum(F.linear(mine, self.token_embedding.weight))
        # END SOLUTION


# %%
tp.check(7, SlicedBlock, SlicedTransformer)

# %% [markdown]
# A whole layer, with either feed-forward. However many ranks, with the pair it is never more than four all-reduces, 8 activations.


# %%
def with_gathering(ranks):
    block = SlicedBlock(Block(CONFIG), ranks)
    block.feed_forward = gathered_feed_forward(ranks)
    return block


def with_pairs(ranks):
    return SlicedBlock(Block(CONFIG), ranks)


volumes = {}
for name, make in (("feed-forward gathered", with_gathering), ("feed-forward as a pair", with_pairs)):
    calls = launch.ranks(traffic, make, n=2)[0]
    table(f"a block, {name}, 2 ranks", calls, 2)
    volumes[name] = sent_by(calls, 2)
print("ratio of the volumes:", round(volumes["feed-forward as a pair"] / volumes["feed-forward gathered"], 2))

# %% [markdown]
# Less than half of the volume. Can these all-reduces hide behind computing, as those of data parallelism do? Four of your blocks, 4,096
# wide, forward and backward on two **modelled** H100: linked by NVLink, then by a network of 100 Gb/s. Tensors have sizes and no values,
# operations and messages take the time of their arithmetic and their bytes.


# %%
class Unrandom(Ranks):
    """Ranks that draw nothing: a modelled card has no numbers."""

    own_random = contextlib.nullcontext

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()


def modelled_blocks(clock):
    """On a modelled rank: forward and backward of 8 sequences of 1,024 tokens, in bfloat16."""
    config, ranks = replace(CONFIG, width=4096, heads=32, max_length=1024), Unrandom()
    blocks = nn.Sequential(*(SlicedBlock(Block(config), ranks).to(launch.device()) for _ in range(4)))
    x = torch.empty(8, 1024, 4096, device=launch.device(), requires_grad=True)
    clock.restart()  # what was before is not shown
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = blocks(x).sum()
    loss.backward()


runs = []
for name, network in (("your blocks, NVLink", None), ("your blocks, 100 Gb/s", 12.5e9)):
    modelled = modelled_gpu.each_on_ranks({name: (modelled_blocks,)}, n=2, network=network)
    runs += [ranks[0] for ranks in modelled.values()]
print(*runs, sep="\n")
report.streams(runs) if runs else None

# %% [markdown]
# They cannot: the two lower rows never work at the same time. With NVLink the forward's gaps are too short to be drawn;
# over the network the card waits for most of the step. Backward's messages take twice as long: the gradient of `x` is
# float32, as `x` is.
#
# ## Measured again
#
# The same training, cut over the ranks. It has to be *the same*: the same numbers up to rounding. First a guess.


# %%
kept_share = tp.predict("At the peak, which share of one process's activations does each of 2 ranks hold?", ...)


# %%
def sliced(model):
    return SlicedTransformer(model, Ranks())


for n in RANKS[1:]:
    found[f"{n} ranks"] = launch.ranks(train, sliced, n=n, timeout=120)[0]
for name, result in found.items():
    summary(name, result)
kept_share.shows(
    found["2 ranks"][2]["activations"] / found["one process"][2]["activations"],
    "{:.2f}",
    "Only what lies inside attention and feed-forward is cut: norms, residuals and the scores of all words are whole.",
)

# %% jupyter={"source_hidden": true}
figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 2.7), layout="constrained")
for k, (name, (losses, _, _)) in enumerate(found.items()):
    left.plot(losses, color=("#9ECAE1", "#D55E00", "black")[k], linewidth=(7, 3.5, 1)[k], label=name, aa=False)
left.set(xlabel="step", ylabel="loss", title="Do they learn the same?")
left.legend(frameon=False, fontsize=9)
for k, (name, (losses, _, _)) in enumerate(found.items()):
    gap = [abs(a - b) for a, b in zip(losses, found["one process"][0])]
    if k:
        right.plot([max(g, 1e-8) for g in gap], "s", color=("#D55E00", "black")[k - 1], label=name, ms=3, aa=False)
right.set(xlabel="step", ylabel="distance of the losses", title="How far apart? (1e-8: not at all)", yscale="log")
right.set(xlim=left.get_xlim(), ylim=(5e-9, 1e-2))
if len(found) > 1:
    right.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# The same sums in another order: the last bits differ, and that grows slowly.

# %% jupyter={"source_hidden": true}
figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 2.7), layout="constrained", width_ratios=(3, 2))
colours = dict(zip(PARTS, ("#0072B2", "#D55E00", "#CC79A7", "#009E73")))
for k, (_, _, parts) in enumerate(found.values()):
    bottom = 0
    for part in PARTS:
        left.bar(
            k, parts.get(part, 0) / 2**20, bottom=bottom, color=colours[part], label=part if k == 0 else None, width=0.6
        )
        bottom += parts.get(part, 0) / 2**20
left.set(xticks=range(len(found)), xticklabels=found, ylabel="MiB on rank 0", title="What does a rank hold?")
left.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
steps = [1e3 * sorted(times[3:])[len(times[3:]) // 2] for _, times, _ in found.values()]
right.bar(range(len(found)), steps, color="#999999", width=0.6)
right.bar_label(right.containers[0], fmt="%.0f", fontsize=9)
right.margins(y=0.1)
right.set(xticks=range(len(found)), xticklabels=found, ylabel="ms", title="How long is a step?")
plt.show()

# %% [markdown]
# Weights, gradients and optimizer states are almost divided by the number of ranks, activations are not (balise 12 cuts more of them).
# Each rank computes with one thread, and ranks on a CPU share its cores.

# %%
print("milliseconds of a step:", recorded.line("17_tensor_slicing", "steps"))
if launch.backend(RANKS[-1]) == "nccl":
    recorded.note("17_tensor_slicing", "steps", dict(zip(found, steps)))

# %% [markdown]
# ## Two dimensions
#
# Eight GPUs share a node, a training has hundreds of nodes, and four all-reduces a layer want the fastest links. So
# the world is cut in two directions, as a **grid**. A row is a *tensor group*: neighbours, who hold one copy of the
# model together and see the same data. A column is a *data group*: ranks that hold **the same slice** in different copies, see
# different data, and average their gradients once a step. With 8 ranks and tensor groups of 4:

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8.5, 2.7), layout="constrained")
for rank in range(8):
    row, column = divmod(rank, 4)
    axes.add_patch(plt.Rectangle((column - 0.4, -row - 0.3), 0.8, 0.6, facecolor=f"C{column}", alpha=0.3))
    axes.text(column, -row, f"rank {rank}\nslice {column}\ndata {row}", ha="center", va="center", fontsize=9)
for row in range(2):
    axes.add_patch(plt.Rectangle((-0.55, -row - 0.4), 4.1, 0.8, fill=False, edgecolor="#0072B2", linewidth=2))
beside = "tensor group: a copy of the model,\n4 all-reduces in each layer"
across = "data group: the same slice,\n1 all-reduce in a step"
axes.text(3.65, 0, beside, va="center", fontsize=9, color="#0072B2")
axes.add_patch(plt.Rectangle((-0.47, -1.5), 0.94, 2, fill=False, edgecolor="#D55E00", linewidth=2, linestyle="--"))
axes.text(-0.65, -0.5, across, ha="right", va="center", fontsize=9, color="#D55E00")
axes.set(xlim=(-2.5, 6.1), ylim=(-1.65, 0.65), xticks=[], yticks=[])
axes.spines[:].set_visible(False)
plt.show()

# %% tags=["setup"]
import warnings
from dataclasses import dataclass

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DistributedSampler

from dlojz_tp import planner

ROUNDS = 20 if FULL else 8  # of the race

# %% [markdown]
# ### Balise 8 · A group of neighbours · further · about 7 min
#
# `tensor_group(tensor_size)` returns this rank's row of the grid. With 4 ranks and `tensor_size=2`, ranks 0 and 1 get
# one group, ranks 2 and 3 another. The trap: `dist.new_group(ranks)` is a call of the **whole world**. Every rank makes
# every group, its own or not, in the same order; who makes only its own leaves the others waiting. In a call, make each
# group once: two `new_group` with the same ranks make two groups, and all of its ranks must keep the same one.
#
# Write the loop that makes all groups and keeps this rank's as `mine`. About 5 lines.
#
# <details><summary>Hint</summary>
#
# Loop over the first ranks of all groups: `range(0, world_size, tensor_size)`. Make the group of a list of ranks in every turn, and keep it only
# if `dist.get_rank()` is in that list.
# </details>


# %% tags=["balise-8"]
def tensor_group(tensor_size):
    """The process group of `tensor_size` neighbours that this rank belongs to."""
    world_size, mine = dist.get_world_size(), None
    if world_size % tensor_size:
        raise ValueError(f"tensor groups of {tensor_size} ranks do not divide a world of {world_size}")
    # make all groups; mine: the one that this rank is in
    # BEGIN SOLUTION
    for first in range(0, world_size, tensor_size):
        members = list(range(first, first + tensor_size))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    # END SOLUTION
    return mine


# %%
tp.check(8, tensor_group)

# %% [markdown]
# ### Balise 9 · Inside the group · further · about 8 min
#
# `GroupRanks(group)` is what `Ranks` is, for the ranks of `group` alone: hand it to a layer, and the layer is cut over the group. All
# that changes is *who* communicates, forward **and** backward: backward runs later and is called by autograd, so the group has to be
# remembered in `ctx`.
#
# The sum and the gathering are given, and the three methods. Write `CopyToGroup` (2 lines, then 2), and keep `group`, this rank's
# number *in the group* as `rank`, and the group's `size` (1 line): all layers ask for these.
#
# <details><summary>Hint</summary>
#
# `ctx.group = group` keeps it. Backward returns a value for each argument of forward: `None` for the group. Collectives take
# `group=`; `dist.get_rank(group)` and `dist.get_world_size(group)` are those in the group.
# </details>


# %% tags=["balise-9"]
class CopyToGroup(torch.autograd.Function):
    """CopyToRanks within a group."""

    @staticmethod
    def forward(ctx, x, group):
        # BEGIN SOLUTION
        ctx.group = group
        return x.view_as(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        result = gradient.clone(memory_format=torch.contiguous_format)  # a copy to reduce, as in balise 1
        # BEGIN SOLUTION
        dist.all_reduce(result, group=ctx.group)
        return result, None
        # END SOLUTION


class SumOverGroup(torch.autograd.Function):
    """SumOverRanks within a group."""

    @staticmethod
    def forward(ctx, x, group):
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class GatherFromGroup(torch.autograd.Function):
    """GatherFromRanks within a group."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        part = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
        return part.contiguous(), None, None


class GroupRanks(Ranks):
    """The ranks of `group`, which hold one model together."""

    def __init__(self, group):
        super().__init__()
        # self.group, and this rank's number and the number of ranks in it
        # BEGIN SOLUTION
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        # END SOLUTION

    def copy(self, x):
        return CopyToGroup.apply(x, self.group)

    def sum(self, x):
        return SumOverGroup.apply(x, self.group)

    def gather(self, x, dim=-1):
        return GatherFromGroup.apply(x, dim, self.group)


# %%
tp.check(9, GroupRanks)

# %% [markdown]
# ### Balise 10 · A group across · further · about 3 min
#
# `data_group(tensor_size)` returns this rank's *column*: the ranks that hold the same slice, one from each tensor group. With 4 ranks and
# `tensor_size=2`, ranks 0 and 2 get one group, ranks 1 and 3 another. Making the groups is given. Write `columns`, a list of lists of
# ranks, here `[[0, 2], [1, 3]]`: 1 line.
#
# <details><summary>Hint</summary>
#
# How many columns has the picture, and by how much do the ranks in one differ? `range(first, world_size, step)`.
# </details>


# %% tags=["balise-10"]
def data_group(tensor_size):
    """The process group of the ranks that hold this rank's slice."""
    world_size, mine = dist.get_world_size(), None
    if world_size % tensor_size:
        raise ValueError(f"tensor groups of {tensor_size} ranks do not divide a world of {world_size}")
    # columns: the members of every data group
    # BEGIN SOLUTION
    columns = [list(range(first, world_size, tensor_size)) for first in range(tensor_size)]
    # END SOLUTION
    for members in columns:
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    return mine


# %%
tp.check(10, data_group)

# %% [markdown]
# Both together are a rank's place in the grid.


# %% tags=["setup"]
@dataclass
class Grid:
    """A rank's place: the ranks that hold its copy of the model with it, and those that hold the same slice."""

    tensor: "GroupRanks"
    data: "GroupRanks"


def make_grid(tensor_size):
    return Grid(GroupRanks(tensor_group(tensor_size)), GroupRanks(data_group(tensor_size)))


# %% [markdown]
# ### Balise 11 · Data parallelism over the groups · further · about 6 min
#
# Both kinds of group in one step. `grid.tensor` and `grid.data` have `rank`, `size` and `group`.
#
# - `make_sampler(dataset, grid)` gives the indices of the samples that this rank sees: the ranks of a tensor group **the same**, the data ranks share them
#   out, as many to each, whatever random state a rank has. `DistributedSampler(dataset, num_replicas=…, rank=…)`, 1 line.
# - `step_2d`: after `loss.backward()` each rank has the gradient of its slice for its own share of the batch. The weights must become those of
#   one process with the whole batch. Given is `means`, the loss and all gradients, and what unpacks them. Write `message`, all of them
#   flat in one tensor, as the **mean** over the right ranks: 2 lines; one all-reduce is enough.
#
# <details><summary>Hint</summary>
#
# `torch.cat([tensor.flatten() for tensor in means])`. Which ranks saw other samples for the same slice? The tensor ranks have talked
# in `loss.backward()` already.
# </details>


# %% tags=["balise-11"]
def make_sampler(dataset, grid):
    """Indices of this rank's samples: an iterable."""
    # BEGIN SOLUTION
    return DistributedSampler(dataset, num_replicas=grid.data.size, rank=grid.data.rank)
    # END SOLUTION


def step_2d(model, batch, loss_of, optimizer, grid):
    """One training step of 2D parallelism; returns the loss of the global batch."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    # given: frozen or unused parameters have no gradient, and keep none
    means = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    # BEGIN SOLUTION
    message = torch.cat([tensor.flatten() for tensor in means]) / grid.data.size
    dist.all_reduce(message, group=grid.data.group)
    # END SOLUTION
    for tensor, mean in zip(means, message.split([tensor.numel() for tensor in means])):
        tensor.copy_(mean.view_as(tensor))
    optimizer.step()
    return means[0]


# %%
tp.check(11, make_sampler, step_2d)


# %% [markdown]
# See it: 4 ranks as a grid of 2 × 2 against one process. No rank holds the whole model, none sees the whole batch.


# %%
def losses_in_grid(tensor_size, steps):
    grid = make_grid(tensor_size)
    model = SlicedTransformer(make_model(), grid.tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows, found = list(make_sampler(range(BATCH), grid)), []
    for step in range(steps):
        found.append(float(step_2d(model, token_batch(step)[rows], language_loss, optimizer, grid)))
    return found, sum(p.numel() for p in model.parameters()), len(rows)


# %%
print("ranks  tensor  parameters  sequences  loss of each step")
for n, tensor_size in ((1, 1), (RANKS[-1], RANKS[-1] // 2)):
    losses, held, share = launch.ranks(losses_in_grid, tensor_size, 5, n=n)[0]
    print(f"{n:5}  {tensor_size:6}  {held:10,}  {share:9}  {' '.join(f'{loss:.5f}' for loss in losses)}")

# %% [markdown]
# ### Balise 12 · Sequence parallelism · further · about 9 min
#
# Norms, dropouts and residuals are still done in full on every rank, and kept for backward N times. But they treat each **token** by
# itself: between the sliced layers, let each rank hold `s / N` tokens (Korthikanti and others, 2022). An all-reduce is a reduce-scatter,
# which leaves each rank a part of the sum, then an all-gather. So no more bytes travel:
#
# | | forward | backward |
# |---|---|---|
# | `copy`, (b, s/N, d) → (b, s, d) | all-gather | its mirror |
# | `sum`, (b, s, d) → (b, s/N, d) | reduce-scatter | its mirror |
#
# Write the two functions with the collectives given below, 1 line in each of four places, along dimension 1.
#
# What all ranks hold whole (norms, biases added after a sum) now sees other tokens on each rank. Make its gradients right in
# `sum_common_gradients`: 1 line between packing and unpacking.
#
# <details><summary>Hint</summary>
#
# Each of the two functions is the other's backward; backward returns `None` for the group too. For the gradients: is each rank's a term of
# one sum, or an estimate of the same thing? `dist.all_reduce` adds up in place.
# </details>


# %% tags=["setup"]
def gather_parts(x, dim, group):
    """All-gather: the parts of all ranks, side by side along `dim`."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def sum_to_parts(x, dim, group):
    """Reduce-scatter: this rank's part along `dim` of the sum over the ranks."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim)]
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts, group=group)
    return result


# %% tags=["balise-12"]
class GatherSequence(torch.autograd.Function):
    """What `copy` does: this rank's tokens (b, s / N, d) -> all tokens (b, s, d)."""

    @staticmethod
    def forward(ctx, x_bsd, group):
        ctx.group = group
        # BEGIN SOLUTION
        return gather_parts(x_bsd, 1, group)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient_bsd):
        # BEGIN SOLUTION
        return sum_to_parts(gradient_bsd, 1, ctx.group), None
        # END SOLUTION


class ScatterSequence(torch.autograd.Function):
    """What `sum` does: a term of all tokens (b, s, d) -> the sum at this rank's (b, s / N, d)."""

    @staticmethod
    def forward(ctx, x_bsd, group):
        ctx.group = group
        # BEGIN SOLUTION
        return sum_to_parts(x_bsd, 1, group)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient_bsd):
        # BEGIN SOLUTION
        return gather_parts(gradient_bsd, 1, ctx.group), None
        # END SOLUTION


class SequenceRanks(GroupRanks):
    """The ranks of a group that hold s / N tokens each between the sliced layers."""

    def copy(self, x):
        return GatherSequence.apply(x, self.group)

    def sum(self, x):
        self.part(x, 1)  # refuses a sequence that does not divide
        return ScatterSequence.apply(x, self.group)


def sum_common_gradients(parameters, ranks):
    """Make the gradients of parameters that all ranks of the group hold those of all tokens, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    message = torch.cat([gradient.flatten() for gradient in gradients])
    # BEGIN SOLUTION
    dist.all_reduce(message, group=ranks.group)
    # END SOLUTION
    for gradient, part in zip(gradients, message.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


# %%
tp.check(12, SequenceRanks, sum_common_gradients)

# %% [markdown]
# See it: what one block keeps for backward, counted by autograd's own hooks on rank 0, without its weights.


# %%
def kept_bytes(run, model):
    """Bytes that autograd keeps for backward while `run()` computes; the model's parameters not counted."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    return sum(size for _, size in kept.values()) if output is not None else 0


def block_memory():
    """[bytes kept by a block on this rank: sliced; sliced, with sequence parallelism]"""
    group, found = tensor_group(dist.get_world_size()), []
    x_bsd = torch.randn(BATCH, LENGTH, CONFIG.width, device=launch.device())
    for ranks in (GroupRanks(group), SequenceRanks(group)):
        block = SlicedBlock(make_model().blocks[0], ranks)
        x = (ranks.part(x_bsd, 1) if isinstance(ranks, SequenceRanks) else x_bsd).clone().requires_grad_()
        found.append(kept_bytes(lambda block=block, x=x: block(x), block))
    return found


# %%
memory = {n: launch.ranks(block_memory, n=n)[0] for n in RANKS}

# %% jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
for k, name in enumerate(("sliced", "sliced, with sequence parallelism")):
    places = [i + 0.4 * (k - 0.5) for i in range(len(RANKS))]
    bars = axes.bar(places, [memory[n][k] / 2**20 for n in RANKS], 0.38, label=name, color=("#0072B2", "#E69F00")[k])
    axes.bar_label(bars, fmt="%.1f", fontsize=9)
axes.set(xticks=range(len(RANKS)), xticklabels=[f"{n} rank{'s' * (n > 1)}" for n in RANKS], ylabel="MiB on each rank")
axes.set_title("What does a block keep for backward? (measured)", loc="left", fontsize=11)
axes.legend(fontsize=9, frameon=False)
axes.spines[["top", "right"]].set_visible(False)
axes.margins(y=0.15)
plt.show()

# %% [markdown]
# ## The whole model with sequence parallelism
#
# Your layers need no change, only other `ranks`. Each rank looks up its own tokens, and the head makes the sequence whole. (Nothing is
# dropped here. A block's `drop` would have to draw inside `own_random`: it now sees other tokens on each rank.)


# %%
class SequenceTransformer(nn.Module):
    """A transformer cut over the ranks, s / N tokens on each between its layers. tokens (b, s) -> scores (b, s, v)."""

    def __init__(self, model, ranks):
        super().__init__()
        self.ranks = ranks
        self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        self.blocks = nn.ModuleList(SlicedBlock(block, ranks) for block in model.blocks)
        self.norm, self.head = model.norm, ColumnLinear(model.head, ranks)

    def forward(self, tokens_bs):
        places_s = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)
        mine_bs, places_s = self.ranks.part(tokens_bs, 1), self.ranks.part(places_s, 0)
        x_bsd = self.token_embedding(mine_bs) + self.position_embedding(places_s)
        for block in self.blocks:
            x_bsd = block(x_bsd)
        return self.head(self.norm(x_bsd))

    def common_parameters(self):
        """Those outside of the sliced linear layers: all ranks hold them whole."""
        inside = {p for layer in self.modules() if isinstance(layer, nn.Linear) for p in layer.parameters()}
        return [p for p in self.parameters() if p not in inside]


# %% [markdown]
# ## PyTorch's own
#
# `parallelize_module` takes the **plain** model and a plan: which layer is cut by columns, which by rows. The weights become `DTensor`s,
# tensors that know how they are cut, and the communications follow from that. One thing has to be told to our model: how many heads a rank has.


# %%
def plan(outside):
    """For one block; `outside`: how activations lie between the sliced layers."""
    entrance = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    found = {"attention": entrance, "feed_forward": entrance, "feed_forward.up": ColwiseParallel()}
    found |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    found |= {name: RowwiseParallel(output_layouts=outside) for name in ("attention.output", "feed_forward.down")}
    if outside.is_shard():
        found |= {"norm_attention": SequenceParallel(), "norm_feed_forward": SequenceParallel()}
    return found


def parallelized(model, mesh, sequence=False):
    """The plain model, cut in place over `mesh` by PyTorch."""
    outside = Shard(1) if sequence else Replicate()
    for block in model.blocks:
        block.attention.heads //= mesh.size()
        parallelize_module(block, mesh, plan(outside))
    whole = {"head": ColwiseParallel(input_layouts=outside, output_layouts=Replicate())}
    if sequence:
        whole["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        whole["position_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        whole["norm"] = SequenceParallel()
    else:
        whole["token_embedding"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, whole)


# %% [markdown]
# A `DeviceMesh` is what your `Grid` is; `fully_shard` over its data dimension does the averaging (practical work **14_fsdp**).


# %%
def optimizer_of(model):
    """AdamW; DTensors and plain tensors in groups of their own, which its fused loops want."""
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=LEARNING_RATE)


def stepper(model, finish=lambda: None):
    """A function that trains `model` one step on given tokens and returns the loss."""
    optimizer = optimizer_of(model)

    def step(tokens):
        optimizer.zero_grad()
        loss = language_loss(model, tokens)
        loss.backward()
        finish()
        optimizer.step()
        return loss.detach()

    return step


# %%
def sliced():
    """name -> function of a batch that trains one step; all ranks are one tensor group."""
    mine = SlicedTransformer(make_model(), GroupRanks(tensor_group(dist.get_world_size())))
    mesh = init_device_mesh(launch.device().type, (dist.get_world_size(),))
    return {"yours": stepper(mine), "parallelize_module": stepper(parallelized(make_model(), mesh))}


def with_sequence():
    """The same with sequence parallelism."""
    ranks = SequenceRanks(tensor_group(dist.get_world_size()))
    mesh = init_device_mesh(launch.device().type, (dist.get_world_size(),))
    mine, theirs = SequenceTransformer(make_model(), ranks), parallelized(make_model(), mesh, sequence=True)
    return {
        "yours, sequence": stepper(mine, lambda: sum_common_gradients(mine.common_parameters(), ranks)),
        "parallelize_module, sequence": stepper(theirs),
    }


def in_2d():
    """A grid: half of the ranks in each tensor group, each group on its share of the batch."""
    size = dist.get_world_size() // 2
    grid = make_grid(size)
    mine = SlicedTransformer(make_model(), grid.tensor)
    optimizer, rows = optimizer_of(mine), list(make_sampler(range(BATCH), grid))
    mesh = init_device_mesh(launch.device().type, (2, size), mesh_dim_names=("data", "tensor"))
    theirs = parallelized(make_model(), mesh["tensor"])
    for module in (*theirs.blocks, theirs):
        fully_shard(module, mesh=mesh["data"])
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the scores are a view; nobody changes them
    their_step = stepper(theirs)
    return {
        "yours, 2D": lambda tokens: step_2d(mine, tokens[rows], language_loss, optimizer, grid),
        "DeviceMesh, 2D": lambda tokens: grid.data.sum(their_step(tokens[rows])) / grid.data.size,
    }


# %% [markdown]
# ## Race
#
# Do they train the same model? Then whole steps, in turn, in the same processes.


# %%
def race_on_ranks(make, rounds):
    """({name: losses of three steps}, race) of what `make()` gives."""
    plain, steps, tokens = stepper(make_model()), make(), token_batch(0)
    losses = {"one process": [plain(token_batch(k)).item() for k in range(3)]}
    losses |= {name: [step(token_batch(k)).item() for k in range(3)] for name, step in steps.items()}
    candidates = {name: lambda step=step: step(tokens) for name, step in steps.items()}
    return losses, measure.race(candidates, repeats=rounds, warmup=2, calls=1, device=launch.device())


# %%
races = [launch.ranks(race_on_ranks, make, ROUNDS, n=2, timeout=120)[0] for make in (sliced, with_sequence)]
if 4 in RANKS:
    races.append(launch.ranks(race_on_ranks, in_2d, ROUNDS, n=4, timeout=120)[0])
print("loss of steps 0, 1, 2")
for name, values in {name: values for losses, _ in races for name, values in losses.items()}.items():
    print(f"{name:<30}", *(f"{value:.5f}" for value in values))
for _, race in races:
    print(f"\n{race}")
print("\n" + recorded.line("17_tensor_slicing", "races"))
if FULL:
    recorded.note("17_tensor_slicing", "races", [race.medians for _, race in races])

# %% [markdown]
# The same losses. Where does the rest of PyTorch's time go? Take an addition of 8 numbers, for which nothing is sent.


# %%
dearer = tp.predict("An addition of 8 numbers: how many times as long does it take with DTensors?", ...)


# %%
def race_additions():
    """Plain tensors against DTensors, cut alike."""
    torch.set_num_threads(1)
    mesh = init_device_mesh(launch.device().type, (dist.get_world_size(),))
    plain = torch.ones(8, device=launch.device())
    cut = DTensor.from_local(plain, mesh, [Shard(0)])
    return measure.race({"plain tensor": lambda: plain + plain, "DTensor": lambda: cut + cut}, repeats=20)


additions = launch.ranks(race_additions, n=2)[0]
print(additions)
dearer.shows(
    additions.medians["DTensor"] / additions.medians["plain tensor"],
    "× {:.1f}",
    "For each operation, DTensor looks up how its operands are cut and what must be sent, and wraps the result, even where nothing is.",
)

# %% [markdown]
# A large operation feels that price less. What it buys: any model, any mesh, saved and loaded in any other cut.
#
# ## What can be hidden · further
#
# Backward, the gradient of `x` has to be summed before the layer below can go on; that of the *weight* needs nobody. So Megatron-LM
# starts the all-reduce, computes the weight's gradient beside it, and waits then, all in one function.


# %%
class OverlappedColumn(torch.autograd.Function):
    """x (…, in) times a column-cut weight (out / N, in), the copy at the entrance included."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight
        running = dist.all_reduce(of_x, async_op=True)  # starts, and returns at once
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        running.wait()
        return of_x, of_weight


def compare():
    """The largest distance of the gradients from those of your function and a product."""
    torch.manual_seed(0)
    x, whole = torch.randn(4, 8, 32, device=launch.device()), nn.Linear(32, 64, bias=False, device=launch.device())
    ways, found = (OverlappedColumn.apply, lambda x, w: F.linear(CopyToRanks.apply(x), w)), []
    for way in ways:
        leaves = x.clone().requires_grad_(), column_part(whole, Ranks()).weight
        way(*leaves).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    return [f"{(a - b).abs().max().item():.1e}" for a, b in zip(*found)]


print("distance of the gradients of x and of the weight:", *launch.ranks(compare, n=2)[0])

# %% [markdown]
# Forward, a sum is needed at once. With sequence parallelism it can be cut into pieces, of which one travels while the product works on
# another ("async tensor parallelism" in PyTorch, `tp_comm_overlap` in Megatron). The planner knows both.
#
# ## Past this machine · further
#
# Why does tensor slicing stay inside a node? The planner puts a layer's computing beside its four all-reduces: each rank computes
# 1 / t of the layer at a constant speed, each message has a latency and a bandwidth, what overlaps does so perfectly.

# %%
NVLINK = planner.Link(latency=2e-6, bandwidth=INSIDE)  # the links of the first table; latencies are assumed
NETWORK = planner.Link(latency=10e-6, bandwidth=BETWEEN)
SPEED = 0.45 * 989e12  # operations a second: 45 % of the data sheet's dense bfloat16
DEGREES = [2**k for k in range(7)]


def layer_at(degree, ranks_per_node, overlap="none"):
    """A layer as wide as in models of 70 billion parameters; forward and backward, one sequence of 4,096 tokens."""
    return planner.tensor_parallel_layer(
        4096, 1, 8192, 64, tensor_parallel=degree, ranks_per_node=ranks_per_node,
        inside=NVLINK, between=NETWORK, flops_per_second=SPEED, overlap=overlap,
    )  # fmt: skip


# %% jupyter={"source_hidden": true}
figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
inside = [layer_at(degree, 8) for degree in DEGREES]
left.bar(range(7), [1e3 * layer.compute for layer in inside], color="#009E73", label="computing")
left.bar(range(7), [1e3 * layer.communication for layer in inside], bottom=[1e3 * layer.compute for layer in inside],
         color="#CC79A7", label="all-reduces, none hidden")  # fmt: skip
left.set(ylabel="ms for one layer", title="neighbours, 8 GPUs in a node")
left.legend(fontsize=9, frameon=False)
for name, per_node, place, colour in (
    ("neighbours,\n8 in a node", 8, (2.0, 24), "#0072B2"),
    ("spread, one\nin each node", 1, (0.6, 58), "#D55E00"),
):
    shares = [100 * layer_at(degree, per_node).communication_share for degree in DEGREES]
    right.plot(range(7), shares, marker="o", markersize=4, color=colour)
    right.text(*place, name, fontsize=9, color=colour)
hidden = [100 * layer_at(degree, 8, "products").communication_share for degree in DEGREES]
right.plot(range(7), hidden, marker="o", markersize=4, color="#0072B2", linestyle="--")
right.text(6.2, 3, "the same,\nbeside products", fontsize=9, color="#0072B2", ha="right")
right.axvline(3.5, color="#999999", linestyle=":")
right.text(3.45, 96, "one node ", ha="right", va="top", fontsize=9, color="#555555")
right.set(ylabel="time waiting for others (%)", title="what does not compute", ylim=(0, 100))
for axes in (left, right):
    axes.set(xticks=range(7), xticklabels=DEGREES, xlabel="tensor ranks t")
    axes.spines[["top", "right"]].set_visible(False)
figure.suptitle("A layer of width 8,192 (model, not measured)", fontsize=11)
plt.show()

# %% jupyter={"source_hidden": true}
OVERLAPS = ("none", "weight gradients", "products")
print("estimate: efficiency, by what the communication runs beside")
print("t   in a node", *(f"{overlap:>17}" for overlap in OVERLAPS))
for degree, per_node in ((8, 8), (16, 8), (64, 8), (8, 1)):
    gains = [layer_at(1, 8).total / layer_at(degree, per_node, overlap).total / degree for overlap in OVERLAPS]
    print(f"{degree:<3} {per_node:>9}", *(f"{gain:>17.0%}" for gain in gains))

# %% [markdown]
# Computing shrinks with t, the message does not. So: tensor slicing as far as a node reaches, and no farther than it must; across
# the nodes data parallelism, whose one message a step can hide behind backward. And the groups must *be* neighbours: the same 8 ranks,
# spread over 8 nodes, are not even half as fast. Over two nodes, products still hide most of the message; over eight, they are too short. Inside
# a node the model hides all, and what was measured is less: the authors of PyTorch's version report steps about 8 % faster with Llama 3 models
# (discuss.pytorch.org, topic 209487).

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>Every rank keeps the whole of each norm and of each bias behind a sum, and updates it by itself. Why do these
# copies not drift apart?</summary>
#
# What flows between the sliced regions is equal on all ranks: the sum gives them the same value, the copy the same gradient. Equal
# inputs and gradients make equal updates, if the all-reduce gives the same <i>bits</i> everywhere.
# </details>
#
# <details><summary>Which norm of the gradients does a rank have to clip by?</summary>
#
# That of the whole model: add up the squares of the <i>sliced</i> gradients over the ranks, and count the whole ones once. A rank
# that clipped by its own slices would scale them differently from its neighbour.
# </details>
#
# <details><summary>A model has 64 heads for the queries, but only 8 for keys and values. How many ranks can share its attention?</summary>
#
# Up to 8 in the same way: each has one key-value head and the 8 query heads that use it. With 16, two ranks hold the same key-value
# head, and its gradients have to be added up over the two.
# </details>
#
# ## To remember
#
# Cut the first matrix by columns and the second by rows: every rank computes its part from end to end, one all-reduce
# stands at the exit, another, backward, at the entrance. Heads are columns that were cut already. What is whole is computed alike on
# all ranks; what is sliced draws its own random numbers. A layer costs four all-reduces of its activations,
# hard to hide: that is why tensor slicing stays where the links are fast, and data parallelism goes between. Cutting *between*
# layers, in a pipeline, sends far less; **19_hybrid_parallelism** combines the three and searches for the best compromise.
