# %% [markdown] tags=["slide"]
# # Tensor slicing, under the hood · about 130 min, core 50
#
# When a single layer no longer fits on a rank, the layer itself has to be cut. You cut a small transformer, as
# Megatron-LM does.
#
# **What you will gain.** Each rank holds fewer **bytes** of weights, gradients and optimizer states, at the price of
# **messages** in each layer. You measure both. The next cell *estimates* them for 13 billion parameters, from data
# sheets.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib
import copy
import os
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dlojz_tp import course, data, launch, measure, modelled_gpu, planner, recorded, report, scale, todo
from dlojz_tp.models import Attention, Block, FeedForward, Transformer, TransformerConfig, language_loss

tp = course.open("17_tensor_slicing")
tp

# %% jupyter={"source_hidden": true}
WIDTH_13B, LAYERS_13B, TOKENS = 5120, 40, 2048  # published sizes of a model of 13 billion parameters; one sequence
STATES = (
    12 * WIDTH_13B**2 * LAYERS_13B * 16
)  # a layer has 12 d² weights; 16 bytes each: half precision, and Adam in float32
MESSAGE = TOKENS * WIDTH_13B * 2  # bytes of one activation (sequence, width) in half precision
H100S = planner.Cluster(planner.H100)  # NVLink inside a node; a network card of 400 Gb/s for each GPU
columns = {"ranks": "{}", "GB on each": "{:.0f}", "fits 80 GB": "{}", "messages a layer": "{}"}
columns |= {"sent in a step: NVLink": "{:.0f} ms", "network, 400 Gb/s": "{:.0f} ms"}
rows = []
for n in (1, 2, 4, 8):
    fits = "yes" if STATES / n < planner.H100.memory else "no"
    sent = [4e3 * LAYERS_13B * H100S.collective("all_reduce", MESSAGE, n, in_a_node) for in_a_node in (n, 1)]
    rows.append((n, STATES / n / 1e9, fits, 4 * (n > 1), *sent))
print("estimate, 13 billion parameters")
report.table(columns, rows)

# %% tags=["setup"] jupyter={"source_hidden": true}
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

# %% [markdown] tags=["slide"]
# ## The idea
#
# A linear layer is a product $Y = XW$. You can cut $W$ over $N$ ranks by **columns** or by **rows**:
#
# $$X\,(W_1\;\;W_2) = (XW_1\;\;XW_2) \qquad\qquad
# (X_1\;\;X_2)\begin{pmatrix}W_1\\W_2\end{pmatrix} = X_1W_1 + X_2W_2$$
#
# By columns, a rank needs the whole $X$ and gets a part of $Y$. By rows, it needs a part of $X$ and gets a term of the
# *sum*. With columns first and rows next, you need no message in between.


# %% tags=["slide"] jupyter={"source_hidden": true}
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
# On each rank: a column of $Y$, then its term of the sum, then the sum after the all-reduce.

# %%
# %%ranks 2
mine, device = dist.get_rank(), launch.device()
x, w = torch.tensor([[1.0, 2.0]], device=device), torch.tensor([[1.0, 10.0], [100.0, 1000.0]], device=device)
column, term = x @ w.chunk(2, 1)[mine], x.chunk(2, 1)[mine] @ w.chunk(2, 0)[mine]
before = term.tolist()
dist.all_reduce(term)
column.tolist(), before, term.tolist()

# %% [markdown]
# ## The baseline, measured first
#
# One process trains the plain model: it sends nothing and holds everything.

# %% tags=["setup"] jupyter={"source_hidden": true}
TOKENS_USED = TEXT.train if FULL else TEXT.train[300_000:400_000].clone()  # all that travels to the ranks


def make_model():
    """The plain transformer on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    return Transformer(CONFIG).to(launch.device())


def token_batch(step):
    """Tokens of a step, (BATCH, LENGTH + 1), on this rank's device, the same on all ranks."""
    return data.batch_of_text(TOKENS_USED, BATCH, LENGTH + 1, seed=step).to(launch.device())


# %% tags=["setup"] jupyter={"source_hidden": true}
def train_step(model, optimizer, tokens):
    """One step; `language_loss` is the mean cross-entropy of each next token."""
    optimizer.zero_grad()
    loss = language_loss(model, tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(make):
    """On a rank: train `make(plain model)`. Returns losses, {part: bytes} at the peak of one more step, its messages."""
    torch.manual_seed(1)
    torch.set_num_threads(1)  # on a CPU, each rank is one core's worth
    model = make(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = [train_step(model, optimizer, token_batch(step)) for step in range(STEPS)]
    tokens = token_batch(STEPS)
    optimizer.zero_grad()
    with measure.LiveBytes().track(model, optimizer) as live:
        train_step(model, optimizer, tokens)
        for p in model.parameters():
            live.track_gradient(p)
        live.reset_peak()
        language_loss(model, tokens).backward()
    with measure.Communications() as log:
        language_loss(model, tokens).backward()
    return [loss.item() for loss in losses], dict(live.parts_at_peak), len(log.entries())


def held(parts):
    """Bytes of weights, gradients and optimizer states."""
    return sum(parts.get(part, 0) for part in PARTS[:3])


def summary(found):
    """A line for each run: what is learned, held and sent."""
    heads = {"": "{}", "loss, first": "{:.4f}", "last": "{:.4f}", "activations": measure.human_bytes}
    heads |= {"weights, gradients, states": measure.human_bytes, "messages a step": "{}"}
    report.table(heads, [
        (name, losses[0], losses[-1], parts["activations"], held(parts), sent)
        for name, (losses, parts, sent) in found.items()
    ])  # fmt: skip


PARTS = ("parameters", "gradients", "optimizer states", "activations")


# %%
def plain(model):
    return model


found = {"one process": launch.ranks(train, plain, n=1, timeout=120)[0]}
summary(found)

# %% [markdown]
# ### Balise 1 · Two conjugate functions · about 11 min
#
# Every rank holds the same $x$ and computes its own part from it. The sum of the parts is $y$. Autograd sees only one
# rank, so you write both ends:
#
# - **Copy**, where the parts begin. A rank's backward finds only the gradient through its own part. But $x$ feeds all
#   parts, so its gradient is the **sum over the ranks**.
# - **Sum**, where the parts end. The gradient of each term is that of $y$, and every rank has it already.
#
# Write forward and backward, one line each.
#
# <details><summary>Hint</summary>
#
# Two of the four call `total`. A forward that changes nothing returns `x.view_as(x)`: the same memory, but a new node
# of the graph.
# </details>


# %% tags=["balise-1"]
def total(x):
    """A new tensor: the sum of `x` over the ranks."""
    # given: an all-reduce works in place and needs contiguous memory, so it gets a contiguous copy
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
    """Where the ranks' parts of the work end: each gives a term x of the sum."""

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
# Every layer below gets an object `ranks` with your two functions and an all-gather. Use it, never `dist`: from balise
# 9 on, it covers *some* ranks only. Each layer is built **from the plain layer**, the same on all ranks, and keeps only
# this rank's part.


# %% tags=["setup"] jupyter={"source_hidden": true}
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


class OwnRandom:
    """A rank's number, the number of ranks, and a stream of random numbers for each rank."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        gpu = launch.device().type == "cuda"
        self.generator = torch.cuda.default_generators[torch.cuda.current_device()] if gpu else torch.default_generator
        self.stream = torch.Generator(launch.device()).manual_seed(1000 + dist.get_rank()).get_state()

    @contextlib.contextmanager
    def own_random(self):
        """Inside, this rank draws from its own stream; outside, all ranks draw the same numbers."""
        common = self.generator.get_state()
        self.generator.set_state(self.stream)
        try:
            yield
        finally:
            self.stream = self.generator.get_state()
            self.generator.set_state(common)


# %% tags=["setup"]
class Ranks(OwnRandom):
    """The ranks that hold one model together; `rank` is this rank's number, `size` how many there are."""

    def copy(self, x):
        """The entrance of a layer. Take sizes of x from the result: in balise 12 it has a longer sequence."""
        return CopyToRanks.apply(x)

    def sum(self, x):
        return SumOverRanks.apply(x)

    def gather(self, x, dim=-1):
        return GatherFromRanks.apply(x, dim)

    def part(self, tensor, dim):
        """This rank's part of `tensor` along `dim`, a view. ValueError if `size` doesn't divide its length."""
        if tensor.shape[dim] % self.size:
            raise ValueError(f"{self.size} ranks do not divide a size of {tensor.shape[dim]}")
        return tensor.chunk(self.size, dim)[self.rank]


# %% [markdown]
# ### Balise 2 · A linear layer cut by columns · about 9 min
#
# Each rank computes some of the **output** features from the whole $x$, and a gather makes $Y$ whole.
#
# - `column_part(linear, ranks)` returns an `nn.Linear` with this rank's share of the features. Cut weight and bias (1
#   line each), and copy the parts: a view keeps the whole matrix in memory.
# - `ColumnLinear.forward(x)`: `x` and the result are whole on every rank, and the gradient of `x` is that of the uncut
#   layer (1 line).
#
# `ranks.part` refuses sizes that `N` doesn't divide. Any other cut must refuse them too.
#
# <details><summary>Hint</summary>
#
# PyTorch computes $XW^\top$ with a weight of shape `(out, in)`, so the columns of the formula are rows of `weight`:
# dimension 0. `nn.Parameter(tensor.detach().clone())` has memory of its own. In `forward`, all ranks share `x` at the
# entrance: which function of balise 1 belongs there? The exit is `ranks.gather`.
# </details>


# %% tags=["balise-2"]
def column_part(linear, ranks):
    """An nn.Linear with this rank's output features of `linear`: weight (out / N, in), bias (out / N) or None."""
    # weight: this rank's share, a tensor of its own
    # BEGIN SOLUTION
    weight = ranks.part(linear.weight, 0).detach().clone()
    # END SOLUTION
    # given: on "meta" it takes no memory, and copy_ into it does nothing; you assign part.bias, if there is one
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
# ### Balise 3 · A sliced embedding · further · about 10 min
#
# An embedding is a table `(vocabulary, d)`. `SlicedEmbedding` holds `d / N` neighbouring **columns**, for all words,
# and returns whole vectors on every rank. Only the vectors of the tokens travel. Write one line to hold the part and
# one to look up.
#
# **Bonus** (you pass without it). `VocabularyEmbedding` holds `vocabulary / N` **rows**, the whole vectors of this
# rank's words. Words marked in `others` give zeros here, so the sum over the ranks is the vector. `mine` is each
# token's row in this rank's part. Two lines.
#
# <details><summary>Hint</summary>
#
# `F.embedding(tokens, weight)` looks up rows; a row out of range is an error. Tokens have no gradient, so the entrance
# needs no function. Bonus: `masked_fill` the rows of other words with 0, look up, `masked_fill` their vectors with 0,
# then sum.
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
# ### Balise 4 · Attention cut by heads · about 12 min
#
# Up to the output projection, heads are independent: each has its own columns. Each rank computes `heads / N` of them,
# from its columns of `query`, `key` and `value` (given). The output projection $W$ takes these heads as its input. So
# $W$ is cut by **rows**, and each rank gets a *term*:
#
# $$Y = \textstyle\sum_r \mathrm{heads}_r(X)\,W_r + b$$
#
# - `row_part`: cut the weight to this rank's **input** features (1 line).
# - `SlicedAttention.forward`: `x` and the result are whole on every rank. Write the entrance (1 line), the causal
#   attention of this rank's heads (2) and the exit (1).
#
# Each head must drop different weights, but all ranks draw the same numbers. Compute the attention inside `with
# self.ranks.own_random():`, where each rank draws its own.
#
# <details><summary>Hint</summary>
#
# `F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)` gives `(b, heads / N, s, k)`; `.transpose(1,
# 2).flatten(2)` joins the heads to `(b, s, d / N)`. `self.bias` is $b$: how often would it count if you added it before
# the sum?
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
        # x_bsd: the entrance
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
# ### Balise 5 · A feed-forward from column-cut layers · further · about 7 min
#
# The plain `FeedForward` is `up` (d → f), a GELU, and `down` (f → d). The obvious cut is by columns, twice. Write the
# forward in one line. It's right, but how much does it send?
#
# <details><summary>Hint</summary>
#
# `F.gelu` works on each element, so the forward looks like that of the plain layer.
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
# On a **ring**, each rank sends $\frac{N-1}{N}n$ bytes for an all-gather of $n$ bytes, and twice as many for an
# all-reduce. The next table's unit is one activation (b, s, d). The pair of balise 6 gathers nothing in between.


# %% tags=["setup"] jupyter={"source_hidden": true}
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


def messages(calls, n=2):
    """Print the messages of `traffic`, and return the activations that they send."""
    rows = [(way, name, units(name, size, n)) for way, name, size in calls]
    report.table({"way": "{}", "message": "{}", "activations": "{:.2f}"}, rows)
    sent = sum(row[-1] for row in rows)
    print(f"{len(rows)} messages, {sent:.2f} activations sent")
    return sent


# %%
fewer = tp.predict("Two gathered layers send more than the pair of balise 6. By what factor (f = 4 d, 2 ranks)?", ...)


# %%
def gathered_feed_forward(ranks):
    return GatheredFeedForward(FeedForward(CONFIG.width, 4 * CONFIG.width), ranks)


gathered = messages(launch.ranks(traffic, gathered_feed_forward, n=2)[0])

# %% [markdown]
# ### Balise 6 · The pair: columns, then rows · about 10 min
#
# No rank needs the whole hidden layer. The GELU works on each element, and a `down` that is cut by **rows** takes
# exactly this rank's part. Two messages are left, one forward and one backward.
#
# Write the two parts and the forward, 2 lines each.
#
# **Write all of it:** `tp.open_task(6)` gives you only names and docstrings. Cut a feed-forward so that one all-reduce
# each way is enough.
#
# <details><summary>Hint</summary>
#
# `self.ranks.copy` and `self.ranks.sum` belong at the two ends. As in attention, the bias counts once.
# </details>


# %% tags=["balise-6", "slide-mistake=bias-every-rank"]
class ColumnRow(nn.Module):
    """A feed-forward whose first layer is cut by columns, the second by rows. x (b, s, d) -> (b, s, d).

    feed_forward: the plain layer, alike on all ranks: nn.Linear `up` (d -> f), an exact GELU, nn.Linear `down` (f -> d).
    ranks: N ranks. ranks.copy(x) returns x, and adds up its gradient over the ranks. ranks.sum(x) adds up x over the
    ranks, and passes its gradient on. Call each once, with (b, s, d), and nothing of `dist`.
    `column_part(linear, ranks)` is an nn.Linear with this rank's output features, `row_part(linear, ranks)` one with
    its input features and no bias. Both copy, and raise ValueError if N doesn't divide.

    Each rank holds its share of the parameters, `down`'s bias whole, and nothing else of the plain layer. x and the
    result are whole on every rank. The result and all gradients are those of the plain layer, at any batch and dtype.
    """

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


paired = messages(launch.ranks(traffic, pair, n=2)[0])
why = "Most of it is the wide hidden layer (4 d): forward gathers it, and backward sums its gradient over the ranks."
fewer.shows(gathered / paired, "× {:.2f}", why)

# %% [markdown]
# ### Balise 7 · The whole model · further · about 11 min
#
# Norms and dropout stay whole: every rank repeats the same computation. In `SlicedBlock`, write the two halves
# that are cut (2 lines), with the pair of balise 6 as feed-forward.
#
# In `SlicedTransformer`, write the scores of a *tied* head (2 lines). This head reuses the token embedding, and each
# rank holds `(v, d / N)` of it. Used as the weight `(out, in)` of a linear layer, it is cut by rows: it takes this
# rank's part of `x` and gives a term of the scores.
#
# <details><summary>Hint</summary>
#
# `self.ranks.part(…, -1)` is this rank's part of `x`. The gradient of `x` needs all parts: which function comes before
# the cut? Then `F.linear(mine, self.token_embedding.weight)`.
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
# Can the all-reduces overlap with computing? Four of your blocks run on two **modelled** H100s, linked first by NVLink,
# then at 100 Gb/s:


# %% jupyter={"source_hidden": true}
class Unrandom(Ranks):
    """Ranks without random numbers: a modelled card has none."""

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
# Not in forward: the next product needs the sum. Over the slow network, the modelled card mostly waits.
#
# ## Measured again
#
# The same model, cut over the ranks, must reach the same losses up to rounding.

# %%
kept_share = tp.predict("At the peak, what fraction of the activations of one process does each of 2 ranks hold?", ...)


# %% tags=["slide"]
def sliced(model):
    return SlicedTransformer(model, Ranks())


for n in RANKS[1:]:
    found[f"{n} ranks"] = launch.ranks(train, sliced, n=n, timeout=120)[0]
summary(found)
kept_share.shows(
    found["2 ranks"][1]["activations"] / found["one process"][1]["activations"],
    "{:.2f}",
    "Only what is inside attention and feed-forward is cut: norms, residuals and the scores of all words are whole.",
)

# %% tags=["slide"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8.5, 2.7), layout="constrained")
colours = dict(zip(PARTS, ("#0072B2", "#D55E00", "#CC79A7", "#009E73")))
bottom = [0] * len(found)
for part in PARTS:
    sizes = [parts.get(part, 0) / 2**20 for _, parts, _ in found.values()]
    axes.bar(range(len(found)), sizes, bottom=bottom, color=colours[part], label=part, width=0.6)
    bottom = [low + size for low, size in zip(bottom, sizes)]
axes.set(
    xticks=range(len(found)), xticklabels=found, ylabel="MiB on rank 0", title="What does a rank hold at the peak?"
)
axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# You pay four messages a layer, and three for embedding and head.
#
# ## Two dimensions
#
# Four all-reduces a layer need the fast links inside a node. Over many nodes, the world becomes a **grid**. A row is a
# *tensor group*: neighbours that hold one copy of the model and see the same data. A column is a *data group*: its
# ranks hold **the same slice** of different copies, see different data, and average their gradients once a step.

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

# %% tags=["setup"] jupyter={"source_hidden": true}
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

ROUNDS = 20 if FULL else 8  # of the race

# %% [markdown]
# ### Balise 8 · Tensor groups · further · about 11 min
#
# `tensor_group(tensor_size)` returns this rank's row of the grid. With 4 ranks and `tensor_size=2`, ranks 0 and 1 get
# one group, ranks 2 and 3 another. `dist.new_group(ranks)` is a collective of the **whole world**: every rank must make
# every group, in the same order, or the others wait. Make each group once.
#
# Write the loop that makes all groups and keeps this rank's as `mine`, about 5 lines.
#
# <details><summary>Hint</summary>
#
# Loop over the first rank of each group, `range(0, world_size, tensor_size)`. Make every group, but keep it only if
# `dist.get_rank()` is one of its ranks.
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
# ### Balise 9 · Layers over a group · further · about 12 min
#
# `GroupRanks(group)` is `Ranks` for only the ranks of `group`. Autograd calls backward later, so `ctx` has to remember
# the group.
#
# Write `CopyToGroup` (2 lines forward, 2 backward). Then keep `group`, this rank's number *in the group* as `rank`, and
# the group's `size` (1 line).
#
# <details><summary>Hint</summary>
#
# `ctx.group = group` keeps it. Backward returns a value for each argument of forward: `None` for the group. Collectives
# take `group=`; `dist.get_rank(group)` and `dist.get_world_size(group)` count in the group.
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
# ### Balise 10 · Data groups · further · about 7 min
#
# `data_group(tensor_size)` returns this rank's *column*: the ranks that hold the same slice. The groups are made for
# you. Write `columns`, a list of lists of ranks (1 line). With 4 ranks and `tensor_size=2` it is `[[0, 2], [1, 3]]`.
#
# <details><summary>Hint</summary>
#
# How many columns does the picture have, and by how much do neighbours in one column differ? `range(first, world_size,
# step)`.
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


# %% tags=["setup"] jupyter={"source_hidden": true}
@dataclass
class Grid:
    """A rank's place: the ranks that hold its copy of the model with it, and those that hold the same slice."""

    tensor: "GroupRanks"
    data: "GroupRanks"


def make_grid(tensor_size):
    return Grid(GroupRanks(tensor_group(tensor_size)), GroupRanks(data_group(tensor_size)))


# %% [markdown]
# ### Balise 11 · Data parallelism across groups · further · about 9 min
#
# `grid.tensor` and `grid.data` have `rank`, `size` and `group`.
#
# - `make_sampler`: all ranks of a tensor group get **the same** samples, and the data ranks get equal shares. Return
#   `DistributedSampler(dataset, num_replicas=…, rank=…)` (1 line).
# - `step_2d`: after `loss.backward()` each rank has the gradient of its slice for its own samples. The weights must
#   become those of one process with the whole batch. Write `message`: all of `means`, flattened into one tensor and
#   **averaged** over the right ranks (2 lines, one all-reduce).
#
# <details><summary>Hint</summary>
#
# `torch.cat([tensor.flatten() for tensor in means])`. Which ranks saw different samples for the same slice? The tensor
# ranks have already communicated in `loss.backward()`.
# </details>


# %% tags=["balise-11"]
def make_sampler(dataset, grid):
    """Indices of this rank's samples, an iterable. They don't depend on the rank's random state."""
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
# One process against your grid:


# %% jupyter={"source_hidden": true}
def losses_in_grid(tensor_size, steps):
    grid = make_grid(tensor_size)
    model = SlicedTransformer(make_model(), grid.tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows, found = list(make_sampler(range(BATCH), grid)), []
    for step in range(steps):
        found.append(float(step_2d(model, token_batch(step)[rows], language_loss, optimizer, grid)))
    return sum(p.numel() for p in model.parameters()), len(rows), *found


sizes = ((1, 1), (RANKS[-1], RANKS[-1] // 2))
rows = [(n, size, *launch.ranks(losses_in_grid, size, 3, n=n)[0]) for n, size in sizes]
heads = {"ranks": "{}", "in a tensor group": "{}", "parameters": "{:,}", "sequences": "{}"}
report.table(heads | {f"loss {k}": "{:.5f}" for k in range(3)}, rows)

# %% [markdown]
# ### Balise 12 · Sequence parallelism · further · about 12 min
#
# Every rank still keeps the activations of norms, dropouts and residuals whole. But these treat each **token** by
# itself, so between the sliced layers a rank can hold `s / N` tokens (Korthikanti et al., 2022). The same bytes
# travel, because an all-reduce is a reduce-scatter and an all-gather. Now `copy` is an all-gather, from (b, s/N, d) to
# (b, s, d), and `sum` a reduce-scatter back. Each backward is the mirror of its forward.
#
# Write both along dimension 1, with `gather_parts(x, dim, group)` and `sum_to_parts(x, dim, group)`: one line in each
# of four places.
#
# Norms, and biases added after a sum, now see different tokens on each rank. Correct their gradients in
# `sum_common_gradients` (1 line).
#
# <details><summary>Hint</summary>
#
# Each of the two functions is the other's backward; backward returns `None` for the group. For the gradients: is each
# rank's gradient a term of one sum, or an estimate of the same mean? `dist.all_reduce` sums in place.
# </details>


# %% tags=["setup"] jupyter={"source_hidden": true}
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
    """What `sum` does: a term for all tokens (b, s, d) -> the sum for this rank's (b, s / N, d)."""

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
    """Turn this rank's gradients of common parameters into those of all tokens, in place."""
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
# What does one block keep for backward on rank 0, besides its weights?


# %% jupyter={"source_hidden": true}
def kept_bytes(run, model):
    """Bytes that autograd keeps for backward while `run()` computes; the model's parameters don't count."""
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


memory = {n: launch.ranks(block_memory, n=n)[0] for n in RANKS}
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
# ## Race with PyTorch's own · further
#
# `parallelize_module` takes the **plain** model and a plan of its cuts. Weights become `DTensor`s, which know how they
# are cut. A `DeviceMesh` is your `Grid`, and `fully_shard` (**14_fsdp**) averages the gradients.


# %%
def plan(outside):
    """The plan for one block; `outside`: how activations are cut between the sliced layers."""
    entrance = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    found = {"attention": entrance, "feed_forward": entrance, "feed_forward.up": ColwiseParallel()}
    found |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    found |= {name: RowwiseParallel(output_layouts=outside) for name in ("attention.output", "feed_forward.down")}
    if outside.is_shard():
        found |= {"norm_attention": SequenceParallel(), "norm_feed_forward": SequenceParallel()}
    return found


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
def optimizer_of(model):
    """AdamW, with DTensors and plain tensors in separate groups: `foreach` can't mix them."""
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


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
def race_on_ranks(make, rounds):
    """({name: losses of three steps}, race) of what `make()` gives."""
    plain, steps, tokens = stepper(make_model()), make(), token_batch(0)
    losses = {"one process": [plain(token_batch(k)).item() for k in range(3)]}
    losses |= {name: [step(token_batch(k)).item() for k in range(3)] for name, step in steps.items()}
    candidates = {name: lambda step=step: step(tokens) for name, step in steps.items()}
    return losses, measure.race(candidates, repeats=rounds, warmup=2, calls=1, device=launch.device())


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
# At each operation `DTensor` looks up how its operands are cut, which costs time with small tensors.
#
# ## Beyond this machine · further
#
# The planner *models* one layer on t tensor ranks. Each computes 1 / t of it, and pays for four all-reduces.

# %% jupyter={"source_hidden": true}
DEGREES = [2**k for k in range(7)]


def layer_at(degree, ranks_per_node, overlap="none"):
    """A layer as wide as in models of 70 billion parameters; forward and backward, one sequence of 4,096 tokens."""
    layout = planner.Layout(degree, sequence_parallel=True, tensor_overlap=overlap)
    return planner.layer_time(planner.GPT(8192, 1, 64, 4096), layout, planner.Cluster(planner.H100, ranks_per_node))


# %% jupyter={"source_hidden": true}
figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
inside = [layer_at(degree, 8) for degree in DEGREES]
left.bar(range(7), [1e3 * (layer.total - layer.tensor) for layer in inside], color="#009E73", label="computing")
left.bar(range(7), [1e3 * layer.tensor for layer in inside], color="#CC79A7", label="all-reduces, none hidden",
         bottom=[1e3 * (layer.total - layer.tensor) for layer in inside])  # fmt: skip
left.set(ylabel="ms for one layer", title="neighbours, 8 GPUs in a node")
left.legend(fontsize=9, frameon=False)
for name, per_node, place, colour in (
    ("neighbours,\n8 in a node", 8, (1.8, 27), "#0072B2"),
    ("spread, one\nin each node", 1, (0.6, 58), "#D55E00"),
):
    shares = [100 * layer_at(degree, per_node).waiting for degree in DEGREES]
    right.plot(range(7), shares, marker="o", markersize=4, color=colour)
    right.text(*place, name, fontsize=9, color=colour)
hidden = [100 * layer_at(degree, 8, "products").waiting for degree in DEGREES]
right.plot(range(7), hidden, marker="o", markersize=4, color="#0072B2", linestyle="--")
right.text(6.2, 3, "overlapped\nwith products", fontsize=9, color="#0072B2", ha="right")
right.axvline(3.5, color="#999999", linestyle=":")
right.text(3.45, 96, "one node ", ha="right", va="top", fontsize=9, color="#555555")
right.set(ylabel="time waiting for others (%)", title="time not spent computing", ylim=(0, 100))
for axes in (left, right):
    axes.set(xticks=range(7), xticklabels=DEGREES, xlabel="tensor ranks t")
    axes.spines[["top", "right"]].set_visible(False)
figure.suptitle("A layer of width 8,192 (model, not measured)", fontsize=11)
plt.show()

# %% [markdown]
# Computation shrinks with t, but the messages don't. So slice inside a node, and use data parallelism between nodes:
# its one message can overlap with backward.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Every rank keeps all norms, and all biases added after a sum, and updates them itself. Why don't
# these copies drift apart?</summary>
#
# Outside the sliced regions everything is equal on all ranks: the sum gives the same value, the copy the same gradient.
# Equal gradients make equal updates, if the all-reduce gives the same <i>bits</i> on every rank.
# </details>
#
# <details><summary>By which norm of the gradients does a rank have to clip?</summary>
#
# By that of the whole model: sum the squares of the <i>sliced</i> gradients over the ranks, and count the whole ones
# once. A rank that clipped by its own slices would scale them differently from its neighbour.
# </details>
#
# <details><summary>A model has 64 heads for the queries, but only 8 for keys and values. How many ranks can share its attention?</summary>
#
# Cut this way, up to 8: each has one key-value head and the 8 query heads that use it. With 16, two ranks hold
# the same key-value head, and its gradients have to be summed over the two.
# </details>
#
# ## To remember
#
# Cut the first matrix by columns and the second by rows: one all-reduce at the exit, and one in backward at the
# entrance. Attention is cut by heads, which are groups of columns. A rank holds 1 / N of the sliced weights, gradients
# and states, and a layer costs four all-reduces. They are hard to hide, so tensor slicing stays where the links are
# fast. A pipeline cuts *between* layers and sends far less. **19_hybrid_parallelism** combines both with data
# parallelism.
