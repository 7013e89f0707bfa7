# %% [markdown] tags=["slide"]
# # Long sequences and experts · about 115 min, core 55
#
# Today's largest models add two cuts. **Context parallelism** cuts a long sequence over ranks: you write attention by
# blocks, then **ring attention**. **Expert parallelism** cuts a mixture of experts, in which each token uses a few of
# many feed-forward networks: you write the **router** and the **all-to-all**.
#
# **What you will gain.** Attention over 2,048 tokens that holds a twentieth of the **bytes**. Four ranks that each hold
# a quarter of the sequence. And a layer with four times the **weights** at the same **FLOPs** a token.

# %% tags=["setup"] jupyter={"source_hidden": true}
import functools
import logging
import math
import os
import time
import warnings
from dataclasses import replace
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo
from dlojz_tp.models import Llama, LlamaConfig, language_loss

tp = course.open("18_long_sequences_and_experts")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
WORK = "18_long_sequences_and_experts"
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # one core's worth, as on a rank
if torch.cuda.device_count() == 1:
    os.environ["DLOJZ_LAUNCH_ON_CPU"] = "1"  # one GPU cannot carry two ranks
LENGTH = 8_192 if FULL else 2_048  # tokens of a sequence
HEADS, SIZE = (16, 128) if FULL else (4, 128)  # heads, and numbers of a head
BLOCK = 1024 if FULL else 256  # tokens of a block

# %% [markdown] tags=["slide"]
# ## The idea
#
# Attention is a quotient of two sums over the keys $j$ that a query sees, with scores $x_j = q \cdot k_j / \sqrt d$:
#
# $$\text{attention} = \frac{\sum_j e^{x_j}\, v_j}{\sum_j e^{x_j}}$$
#
# A sum can be computed piece by piece, in any order. So nobody needs all scores at once, and the pieces may come from
# other ranks. A mixture of experts is a sum too, with few terms that aren't zero.


# %% tags=["slide-more"] jupyter={"source_hidden": true}
def draw_idea(ranks=4):
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), layout="constrained")
    for row in range(ranks):
        for column in range(ranks):
            colour = colours[row] if column <= row else "#EEEEEE"
            left.add_patch(plt.Rectangle((column, -row), 0.94, 0.94, fc=colour, alpha=1 if column == row else 0.55))
            if column <= row:
                left.text(column + 0.47, 0.47 - row, f"step {row - column}", ha="center", va="center", fontsize=9)
        left.text(-0.15, 0.47 - row, f"queries of rank {row}", ha="right", va="center", fontsize=9)
        left.text(row + 0.47, 1.1, f"keys of {row}", ha="center", fontsize=9)
    left.set(xlim=(-1.8, ranks), ylim=(1 - ranks, 1.35), title="Ring attention: keys travel, queries stay")
    for token, pair in enumerate([(0, 2), (2, 3), (0, 1), (2, 0), (1, 3)]):
        right.add_patch(plt.Rectangle((0, -token), 0.9, 0.7, fc="#DDE3EA"))
        right.text(0.45, 0.35 - token, f"token {token}", ha="center", va="center", fontsize=9)
        for expert in pair:
            right.plot([0.95, 2.75], [0.35 - token, 0.1 - 1.2 * expert], color=colours[expert], lw=1.5)
    for expert, colour in enumerate(colours):
        right.add_patch(plt.Rectangle((2.8, -0.25 - 1.2 * expert), 1.3, 0.7, fc=colour, alpha=0.55))
        right.text(3.45, 0.1 - 1.2 * expert, f"expert {expert}", ha="center", va="center", fontsize=9)
    right.set(xlim=(-0.1, 4.2), ylim=(-4.3, 1), title="A mixture: two of four experts for each token")
    for ax in (left, right):
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.grid(False)
    plt.show()


draw_idea()

# %% [markdown]
# ## Attention without the square
#
# The baseline computes all scores of a head at once, $s \times s$ numbers for $s$ tokens.


# %% jupyter={"source_hidden": true}
def plain_attention(q, k, v):
    """Causal attention with all scores at once; q, k, v (b, h, s, d)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


# %% tags=["setup"] jupyter={"source_hidden": true}
def peak_bytes(run):
    """The most bytes of tensors alive at once that `run()` makes; scratch memory inside a kernel isn't seen."""
    with measure.LiveBytes() as live:
        run()
    return live.peak


def milliseconds(run, rounds=5):
    """The fastest of some calls; on a CPU, processor time of this thread."""
    clock, found = time.perf_counter if DEVICE.type == "cuda" else time.thread_time, []
    for _ in measure.rounds(rounds):
        measure.synchronize(DEVICE)
        begin = clock()
        run()
        measure.synchronize(DEVICE)
        found.append(1e3 * (clock() - begin))
    return min(found)


def qkv(length, heads=HEADS):
    """Queries, keys and values (1, heads, length, SIZE)."""
    torch.manual_seed(0)
    return torch.randn(3, 1, heads, length, SIZE, device=DEVICE).unbind()


# %%
rows = []
for length in (LENGTH // 8, LENGTH // 4, LENGTH // 2, LENGTH):
    run = functools.partial(plain_attention, *qkv(length))
    rows.append((length, peak_bytes(run), milliseconds(run)))
report.table({"tokens": "{:,}", "bytes at the peak": measure.human_bytes, "ms": "{:.1f}"}, rows)

# %% [markdown]
# Twice the tokens, four times the bytes.
#
# ### Balise 1 · Online softmax · about 12 min
#
# FlashAttention takes a block of keys at a time. For each query, `State` holds the largest score so far and both sums,
# *relative to it*: $e^{x}$ alone would overflow. If a block brings a larger score, the earlier sums have to be
# rescaled.
#
# - **`add_block`**: the State after one more block. 3 lines.
# - **`finish`**: the attention, and the **log-sum-exp** of all scores, which backward needs. 1 line.
# - **`blockwise_attention`**: take in each block of keys that a block of queries sees. 1 line.
#
# <details><summary>Hint</summary>
#
# $e^{x - m'} = e^{x - m} \cdot e^{m - m'}$, so multiply both sums by `exp(old - new)`. `torch.maximum` compares two
# tensors; `scores.amax(-1)` is over the block's keys.
# </details>


# %% tags=["setup"]
class State(NamedTuple):
    """What each query (b, h, s) has seen so far. maximum: its largest score.

    total (b, h, s): the sum of exp(score - maximum). weighted (b, h, s, d): the sum of exp(score - maximum) * value.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor


def start(q):
    """The State of queries q (b, h, s, d) before the first block, in float32 or wider; its maximum is finite."""
    zeros = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return State(torch.full_like(zeros[..., 0], torch.finfo(zeros.dtype).min), zeros[..., 0], zeros)


def scores_of(q, k, visible=None):
    """Scores q·k / √d (b, h, s, n) of q (b, h, s, d) and k (b, h, n, d), in float32 or wider.

    visible: booleans (s, n), True where a query may look; elsewhere the score is -inf. None: everywhere.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) / math.sqrt(q.shape[-1])) @ k.to(wide).transpose(-1, -2)
    return scores if visible is None else scores.masked_fill(~visible, -math.inf)


# %% tags=["setup"] jupyter={"source_hidden": true}
def causal_blocks(length, block, device=None):
    """Yields (rows, [(columns, visible), ...]): a slice of queries, and the slices of keys that they see.

    Blocks in the future are left out. visible: booleans for the block on the diagonal; None where all is visible.
    """
    for first in range(0, length, block):
        rows = slice(first, min(first + block, length))
        triangle = torch.ones(rows.stop - first, rows.stop - first, dtype=torch.bool, device=device).tril()
        yield rows, [(slice(c, c + block), None) for c in range(0, first, block)] + [(rows, triangle)]


# %% tags=["balise-1", "slide-mistake=not-rescaled"]
def add_block(state, q, k, v, visible=None):
    """The State, in the same dtypes, after one more block of keys k and values v (b, g, n, d), for queries q (b, h, s, d).

    q, k and v may be in bfloat16. Groups of h / g neighbouring query heads share a head of k and v. visible: as in
    scores_of; a query may see nothing of a block. The State given stays as it is.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores, v = scores_of(q, k, visible), v.to(state.weighted.dtype)
    # BEGIN SOLUTION
    maximum = torch.maximum(state.maximum, scores.amax(-1))
    weights, fade = torch.exp(scores - maximum[..., None]), torch.exp(state.maximum - maximum)
    return State(maximum, fade * state.total + weights.sum(-1), fade[..., None] * state.weighted + weights @ v)
    # END SOLUTION


def finish(state):
    """(attention (b, h, s, d), log of the sum of exp(score) over all keys (b, h, s)), both in the State's dtype."""
    # BEGIN SOLUTION
    return state.weighted / state.total[..., None], state.maximum + state.total.log()
    # END SOLUTION


def blockwise_attention(q, k, v, blocks):
    """(attention (b, h, s, d) in the dtype of q, log-sum-exp (b, h, s) in float32 or wider) of q, k, v (b, h, s, d).

    blocks: what causal_blocks yields. No more than one block of scores exists at any moment.
    """
    outs, sums = [], []
    for rows, seen in blocks:
        state = start(q[:, :, rows])
        for columns, visible in seen:
            # BEGIN SOLUTION
            state = add_block(state, q[:, :, rows], k[:, :, columns], v[:, :, columns], visible)
            # END SOLUTION
        out, lse = finish(state)
        outs.append(out.to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


# %%
tp.check(1, add_block, finish, blockwise_attention)

# %%
fewer = tp.predict("How many times as many bytes does plain_attention need as blockwise_attention?", ...)

# %% tags=["slide"] jupyter={"source_hidden": true}
WAYS = {
    "all scores at once": plain_attention,
    "yours, by blocks": lambda q, k, v: blockwise_attention(q, k, v, causal_blocks(q.shape[2], BLOCK, q.device))[0],
    "PyTorch's own": functools.partial(F.scaled_dot_product_attention, is_causal=True),
}
given = qkv(LENGTH)
found = {
    name: (peak_bytes(lambda way=way: way(*given)), milliseconds(lambda way=way: way(*given)))
    for name, way in WAYS.items()
}
plain, blocks, _ = found.values()
fewer.shows(plain[0] / blocks[0], "× {:.0f}", "The scores of a block, instead of those of all pairs.")
heads = {f"{LENGTH:,} tokens, {HEADS} heads": "{}", "bytes at the peak": measure.human_bytes, "ms": "{:.1f}"}
report.table(heads, [(name, *one) for name, one in found.items()])

# %%
tp.race(1)

# %% [markdown]
# PyTorch's `scaled_dot_product_attention` does the same in one kernel, with a block of scores in the fastest memory.
#
# ### Balise 2 · Backward by blocks · further · about 11 min
#
# Autograd would save the weights of every block: the square again. So backward recomputes them from tensors that grow
# only with $s$. Let $P = e^{x - \text{lse}}$ be the weights, $dO$ the gradient of the output $O$ (`up`):
#
# $$dV = P^\top dO \qquad dX = P \circ (dO\, V^\top - \text{inner}) \qquad \text{inner} = \textstyle\sum_d dO \circ O$$
#
# Then $dQ = dX K / \sqrt d$ and $dK = dX^\top Q / \sqrt d$. In **`BlockwiseAttention`**, save what backward needs. For
# each block, compute `weights` and `of_scores`, which is $dX / \sqrt d$, and add to the gradients of keys and values. 5
# lines.
#
# <details><summary>Hint</summary>
#
# `torch.exp(scores_of(q_rows, k_columns, visible) - lse[:, :, rows, None])`. A key is in several blocks: `+=`.
# </details>


# %% tags=["balise-2"]
class BlockwiseAttention(torch.autograd.Function):
    """Causal attention by blocks: BlockwiseAttention.apply(q, k, v, block), (b, h, s, d) each, gives (b, h, s, d).

    What is saved for backward, and what backward holds at any moment, grows with s and not with its square; a result that
    is dropped leaves nothing behind. Computed in the dtype of the log-sum-exp; gradients have the dtype of their inputs.
    """

    @staticmethod
    def forward(ctx, q, k, v, block):
        out, lse = blockwise_attention(q, k, v, causal_blocks(q.shape[2], block, q.device))
        # BEGIN SOLUTION
        ctx.save_for_backward(q, k, v, out, lse)
        # END SOLUTION
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        dtypes, root = [one.dtype for one in (q, k, v)], math.sqrt(q.shape[-1])
        q, k, v, gradient = (one.to(lse.dtype) for one in (q, k, v, gradient))
        dq, dk, dv = (torch.zeros_like(one) for one in (q, k, v))
        inner = (gradient * out).sum(-1, keepdim=True)
        for rows, seen in causal_blocks(q.shape[2], ctx.block, q.device):
            q_rows, up = q[:, :, rows], gradient[:, :, rows]
            for columns, visible in seen:
                k_columns, v_columns = k[:, :, columns], v[:, :, columns]
                # BEGIN SOLUTION
                weights = torch.exp(scores_of(q_rows, k_columns, visible) - lse[:, :, rows, None])
                of_scores = weights * (up @ v_columns.mT - inner[:, :, rows]) / root
                dk[:, :, columns] += of_scores.mT @ q_rows
                dv[:, :, columns] += weights.mT @ up
                # END SOLUTION
                dq[:, :, rows] += of_scores @ k_columns
        return *(one.to(dtype) for one, dtype in zip((dq, dk, dv), dtypes)), None


# %%
tp.check(2, BlockwiseAttention)

# %% [markdown]
# ## A sequence on several ranks
#
# A sequence of a million tokens doesn't fit on one GPU, even without the square. **Context parallelism** gives each of
# N ranks a piece. A query still needs the keys of all ranks, but one piece at a time is enough: that is `add_block`.
#
# ### Balise 3 · Ring attention · about 13 min
#
# Queries stay; keys and values travel around the ring. In each of N steps, a rank adds the piece that it holds. In
# all but the last, it sends this piece to the next rank and receives the previous one's. The pieces are in the order of
# the ranks. So a piece from an earlier rank is visible as a whole, a rank's own is causal (`triangle(q)`), and a later
# one is the future: compute nothing.
#
# Start the messages, compute while they travel, then wait. On GPUs, NCCL carries a rank's messages in order. If
# all ranks send first, nobody receives: post both in one batch.
#
# <details><summary>Hint</summary>
#
# `dist.batch_isend_irecv([dist.P2POp(dist.isend, held, to), …])` returns handles to wait for. After `step` steps, a
# rank holds what rank `(rank - step) % ranks` had.
# </details>


# %% tags=["setup"]
def triangle(q):
    """Booleans (s, s) for queries q (b, h, s, d): True where a query may look: at keys up to its own place."""
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()


# %% tags=["balise-3"]
def add_piece(state, q, k, v, rank, source):
    """The State of this rank's queries after keys and values of rank `source`. Rank r has the r-th piece of the text.

    q (b, h, s / N, d); k, v (b, g, s / N, d). Of a piece in the future, nothing is computed.
    """
    # BEGIN SOLUTION
    visible = triangle(q) if source == rank else None
    return state if source > rank else add_block(state, q, k, v, visible)
    # END SOLUTION


def ring_attention(q, k, v, add=add_piece):
    """Causal attention (b, h, s / N, d), in the dtype of q, of this rank's queries over the keys of all N ranks.

    q (b, h, s / N, d), k and v (b, g, s / N, d): this rank's piece; groups of h / g query heads share a key head.
    add(state, q, k, v, rank, source), like add_piece, is called once for each piece of keys, this rank's own first,
    future ones too. Keys and values go to the next rank N - 1 times, as they are, while add runs. A rank holds no more
    than three pieces of them, and leaves q, k and v as they are. Forward only.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    to, by = (rank + 1) % ranks, (rank - 1) % ranks
    state, held = start(q), torch.stack([k, v])
    for step in range(ranks):
        coming, messages = torch.empty_like(held), []
        if step + 1 < ranks:
            # BEGIN SOLUTION
            messages = dist.batch_isend_irecv([dist.P2POp(dist.isend, held, to), dist.P2POp(dist.irecv, coming, by)])
            # END SOLUTION
        # BEGIN SOLUTION
        state = add(state, q, *held, rank, (rank - step) % ranks)
        for message in messages:
            message.wait()
        # END SOLUTION
        held = coming
    return finish(state)[0].to(q.dtype)


# %%
tp.check(3, add_piece, ring_attention)


# %% jupyter={"source_hidden": true}
def held_and_sent(tokens):
    """On a rank: bytes at the peak of ring attention over `tokens` tokens; bytes it sends, by the formula."""
    q, k, v = torch.ones(3, 1, HEADS, tokens // dist.get_world_size(), SIZE, device=launch.device())
    with measure.LiveBytes().track(q, k, v) as live:
        ring_attention(q, k, v)
    return live.peak, (dist.get_world_size() - 1) * 2 * k.nbytes


def show_ring(tokens=LENGTH // 2):
    rows = []
    for n in (1, 2, 4):
        held, sent = map(max, zip(*launch.ranks(held_and_sent, tokens, n=n)))
        rows.append((n, tokens // n, held, sent))
    size = measure.human_bytes
    report.table({"ranks": "{}", "tokens of each": "{:,}", "held at the peak": size, "sends, by formula": size}, rows)


show_ring()

# %% [markdown]
# ### Balise 4 · Balance: the zig-zag · further · about 12 min
#
# Rank 0 sees one piece, the last rank sees N, and all others wait for it. Cut the text into 2N pieces, and give rank r
# two: r and 2N − 1 − r. The earlier the one, the later the other.
#
# Then a rank computes half of the scores between its queries and any other rank's keys. Which half? Draw the four pairs
# of pieces for an earlier rank, and for a later one. `add_late` is for keys that only the second half of the queries
# sees. A rank's tokens aren't contiguous, so cut labels and positions alike.
#
# <details><summary>Hint</summary>
#
# Of an earlier rank's pieces, all queries see the first and none the second. Of a later rank's, the second half of the
# queries sees both, and the first half neither.
# </details>


# %% tags=["setup"]
def add_late(state, q, k, v):
    """The State after keys k and values v that the second half of the queries sees, and the first half doesn't."""
    half = q.shape[2] // 2
    late = add_block(State(*(one[:, :, half:] for one in state)), q[:, :, half:], k, v)
    return State(*(torch.cat([old[:, :, :half], new], 2) for old, new in zip(state, late)))


# %% tags=["balise-4"]
def zigzag_batch(tokens, rank, ranks):
    """(inputs, labels, positions) of this rank, each (b, s / N) but positions (s / N,); tokens (b, s + 1).

    Of 2N equal pieces of the first s tokens, rank r has piece r and then 2N - 1 - r. The label of a token is the next
    one in the text, its position its place in the text. Raises ValueError if 2N doesn't divide s.
    """
    length = tokens.shape[1] - 1
    if length % (2 * ranks):
        raise ValueError(f"{2 * ranks} pieces do not divide {length} tokens")
    pieces = torch.arange(length, device=tokens.device).chunk(2 * ranks)
    # BEGIN SOLUTION
    positions = torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
    return tokens[:, positions], tokens[:, positions + 1], positions
    # END SOLUTION


def add_zigzag(state, q, k, v, rank, source):
    """As add_piece, with pieces r and 2N - 1 - r on rank r: of another rank's keys, half of the scores are computed.

    q (b, h, s / N, d); k, v (b, g, s / N, d). The State given stays as it is.
    """
    half = q.shape[2] // 2
    if source == rank:
        return add_block(state, q, k, v, triangle(q))
    # BEGIN SOLUTION
    if source < rank:
        return add_block(state, q, k[:, :, :half], v[:, :, :half])
    return add_late(state, q, k, v)
    # END SOLUTION


# %%
tp.check(4, zigzag_batch, add_zigzag)

# %%
less = tp.predict(
    "How many times as many products does the busiest of 4 ranks compute with neighbours as with the zig-zag?", ...
)


# %% jupyter={"source_hidden": true}
def products(add, tokens=512):
    """Multiplications of this rank in a ring over `tokens` tokens: half of what FlopCounterMode counts."""
    q, k, v = torch.ones(3, 1, HEADS, tokens // dist.get_world_size(), SIZE, device=launch.device())
    with FlopCounterMode(display=False) as counter:
        ring_attention(q, k, v, add)
    return counter.get_total_flops() / 2


ORDERS = {"neighbours": add_piece, "zig-zag": add_zigzag}
shares = {name: launch.ranks(products, add, n=4) for name, add in ORDERS.items()}
figure, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
for k, (name, counts) in enumerate(shares.items()):
    ax.bar([rank + 0.4 * k for rank in range(4)], [n / 1e9 for n in counts], 0.36, label=name)
ax.set(xlabel="rank", ylabel="billions of products", xticks=[r + 0.2 for r in range(4)], xticklabels=range(4))
ax.legend()
plt.show()
less.shows(
    max(shares["neighbours"]) / max(shares["zig-zag"]),
    "× {:.1f}",
    "The last rank computed 4 pieces; now each computes 1 + 3 · ½, its own with the hidden half.",
)

# %% [markdown]
# ### Balise 5 · Ulysses: heads instead of tokens · further · about 13 min
#
# Heads are independent. An **all-to-all** turns "all heads of a piece" into "some heads of the whole text"; then any
# attention kernel will do. A second all-to-all reverses this. Rank r gets the r-th share of the heads. N divides the
# number of heads; keys with fewer heads than ranks are repeated before they travel.
#
# How much does each way send? The ring sends keys and values N − 1 times. Ulysses sends queries, keys, values and the
# result once; only the rank's own share stays.
#
# <details><summary>Hint</summary>
#
# `x.chunk(ranks, 1)` are the shares of the heads, one for each rank. `exchange` returns pieces of the text, in order.
# Of each tensor, a rank sends (N − 1) / N.
# </details>


# %% tags=["setup"]
def exchange(parts):
    """parts: N tensors of one shape, the r-th for rank r. Returns N tensors, the r-th from rank r: an all-to-all."""
    sent = torch.stack(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.unbind()


# %% tags=["balise-5"]
def to_heads(x):
    """From all heads of a piece of the text to the r-th share of the heads of all of it, on rank r of N.

    (b, h, s / N, d) to (b, h / N, s, d), in order, in one all-to-all of x. If h < N, each head is repeated N / h times,
    side by side, so that each rank gets the one that its queries share. N divides h, or h divides N.
    """
    ranks = dist.get_world_size()
    # BEGIN SOLUTION
    if x.shape[1] < ranks:
        x = x.repeat_interleave(ranks // x.shape[1], 1)
    return torch.cat(exchange(x.chunk(ranks, 1)), 2)
    # END SOLUTION


def to_sequence(x):
    """The way back, in one all-to-all of x: (b, h / N, s, d) to (b, h, s / N, d)."""
    # BEGIN SOLUTION
    return torch.cat(exchange(x.chunk(dist.get_world_size(), 2)), 1)
    # END SOLUTION


def ulysses_attention(q, k, v):
    """Causal attention (b, h, s / N, d) of this rank's queries; k, v (b, g, s / N, d): groups of h / g share a head."""
    q, k, v = to_heads(q), to_heads(k), to_heads(v)
    return to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def sent_numbers(heads, groups, tokens, size, ranks):
    """(ring, Ulysses): how many numbers a rank sends to others for one causal attention, all messages together.

    heads of queries; groups: heads of keys; tokens of a rank's piece; size of a head; batch 1.
    """
    # BEGIN SOLUTION
    ring = 2 * groups * tokens * size * (ranks - 1)
    return ring, (2 * heads + 2 * max(groups, ranks)) * tokens * size * (ranks - 1) / ranks
    # END SOLUTION


# %%
tp.check(5, to_heads, to_sequence, ulysses_attention, sent_numbers)

# %% [markdown]
# Now race them. The zig-zag moves work between ranks and removes none, so it gains only where each rank has its own
# core. Ulysses runs PyTorch's fused kernel.


# %% jupyter={"source_hidden": true}
def race_attention(tokens, rounds):
    """On a rank: seconds of causal attention over `tokens` tokens, round after round."""
    torch.set_num_threads(1)
    q, k, v = torch.ones(3, 1, HEADS, tokens // dist.get_world_size(), SIZE, device=launch.device())
    ways = {"ring": add_piece, "ring, zig-zag": add_zigzag}
    runs = {name: functools.partial(ring_attention, q, k, v, add) for name, add in ways.items()}
    runs["Ulysses"] = functools.partial(ulysses_attention, q, k, v)
    return measure.race(runs, rounds, warmup=1, device=launch.device(), calls=1, before=dist.barrier).seconds


def show_race(tokens, rounds=8):
    rows = []
    for n in (2, 4):
        ranks = launch.ranks(race_attention, tokens, rounds, n=n, timeout=120)
        slowest = {name: [max(times) for times in zip(*(one[name] for one in ranks))] for name in ranks[0]}
        medians = measure.Race(slowest).medians
        rows += [(n, name, median, median / medians["Ulysses"]) for name, median in medians.items()]
    heads = {"ranks": "{}", "attention": "{}", "median": measure.human_seconds, "time / Ulysses": "{:.2f}"}
    print(f"{tokens:,} tokens, {HEADS} heads, {launch.backend(4)}")
    report.table(heads, rows)


show_race(16_384 if torch.cuda.device_count() >= 4 else 1_024)

# %% [markdown]
# On real links, the bytes count. Which sends less? By your two formulas, the ring, as long as $N < h / g + 1$.
# So grouped heads favour the ring. The table *models* one layer, forward, on H100s in bfloat16. The ring's messages
# travel while scores are computed. An all-to-all can't: attention needs its result. And Ulysses has no work for more
# ranks than heads.


# %% jupyter={"source_hidden": true}
def show_volumes(tokens=131_072, heads=64, size=128):
    cluster, rows = planner.Cluster(planner.H100), []
    model = replace(planner.MODELS["llama3-70b"], sequence=tokens)
    for groups in (64, 8):
        for n in (2, 4, 8, 16):
            ring, ulysses = (2 * numbers for numbers in sent_numbers(heads, groups, tokens // n, size, n))
            ring_s = cluster.collective("all_gather", ring * n / (n - 1), n)
            ulysses_s = cluster.collective("all_to_all", ulysses * n / (n - 1), n)
            scores_s = tokens / n * model.scores(causal=True) / cluster.scores()
            rows.append((groups, n, ring / 1e6, ulysses / 1e6, 1e3 * ring_s, 1e3 * ulysses_s, 1e3 * scores_s))
    mb, ms = "{:,.0f}", "{:.1f}"
    columns = {"heads of keys": "{}", "ranks": "{}", "MB, ring": mb, "MB, Ulysses": mb}
    print(f"modelled: {tokens:,} tokens, {heads} heads of {size}, nodes of 8 H100s")
    report.table(columns | {"ms, ring": ms, "ms, Ulysses": ms, "ms, scores": ms}, rows)


show_volumes()

# %% [markdown]
# ## A mixture of experts
#
# ### Balise 6 · A router · about 13 min
#
# A *router* is one small matrix: it gives each token a logit for each expert. With $p$ the softmax of the logits, a
# token takes the $k$ experts with the largest $p + \text{bias}$. Their *gates* are their $p$, divided by the sum of the
# $k$.
#
# A router left alone prefers a few experts: those learn more, and are chosen more often. Three remedies:
#
# - `balance_loss`, Switch's: smallest, 1, when all experts have equal shares;
# - `next_bias`, DeepSeek-V3's: no loss; the bias of an expert rises while its load is below the mean;
# - `within`: an expert takes at most `capacity` choices; later ones are *dropped*.
#
# `z_loss`, which keeps logits small, is given. About 6 lines.
#
# <details><summary>Hint</summary>
#
# `torch.topk` may order equal scores in any way; `torch.sort(..., stable=True)` keeps their order. In `within`, a running
# sum down the columns of `chosen` counts the choices of each expert.
# </details>


# %% tags=["setup"]
def z_loss(logits):
    """The mean square of the log-sum-exp of a token's logits, in float32: keeps logits small (ST-MoE)."""
    return logits.float().logsumexp(-1).square().mean()


# %% tags=["balise-6"]
def route(logits, k, bias=0.0):
    """(gates (t, k) float32, experts (t, k) int64) of t tokens: the k best experts of each, the best first.

    logits (t, e), also bfloat16; probabilities are their softmax, computed in float32. bias (e,), float32: added to
    the probabilities for the choice, and for nothing else. Of equal scores, the expert with the lower number is first.
    Gates: the probabilities of the chosen experts divided by their sum; gradients reach the logits through them. Like
    the functions below, it reads no value back from a GPU.
    """
    # BEGIN SOLUTION
    probabilities = logits.softmax(-1, dtype=torch.float32)
    experts = (probabilities + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    gates = probabilities.gather(1, experts)
    # END SOLUTION
    return gates / gates.sum(-1, keepdim=True), experts


def balance_loss(logits, experts):
    """e · Σ over experts of (its share of the choices) · (its mean probability over tokens): a float32 scalar.

    logits (t, e), also bfloat16; experts (t, k): the choices. Shares sum to 1. Gradients pass through the probabilities.
    """
    share = F.one_hot(experts, logits.shape[-1]).float().mean((0, 1))
    # BEGIN SOLUTION
    return logits.shape[-1] * (share * logits.softmax(-1, dtype=torch.float32).mean(0)).sum()
    # END SOLUTION


def within(experts, count, capacity):
    """Booleans (t, k): True for the choices that are kept. Each of `count` experts keeps its first `capacity` choices.

    experts (t, k). The first choices of all tokens, in order, come before all second choices, and so on.
    """
    chosen = F.one_hot(experts.T.flatten(), count)  # (k · t, count): first choices of all tokens, then second ones
    # BEGIN SOLUTION
    return ((chosen.cumsum(0) * chosen).sum(-1) <= capacity).view(experts.T.shape).T
    # END SOLUTION


def next_bias(bias, load, rate):
    """A new bias (e,): `rate` higher for experts below the mean load, `rate` lower above it, equal at the mean.

    bias (e,) float32; load (e,) int64: choices of each expert in the last step.
    """
    # BEGIN SOLUTION
    return bias + rate * (load.float().mean() - load).sign()
    # END SOLUTION


# %%
tp.check(6, route, balance_loss, within, next_bias)

# %% [markdown]
# ### A small mixture, trained
#
# Two small Llamas read Python's library, byte by byte, with the same FLOPs a token. The *dense* one has feed-forward
# blocks of width 2f, the *mixture* 8 experts of width f in their place, two for each token. An even share is 12.5 % of
# the choices.

# %%
busiest = tp.predict(
    "Without balancing, what share (%) of the choices does the busiest expert get in the last layer?", ...
)


# %% tags=["setup"] jupyter={"source_hidden": true}
def looped_product(x, weights, counts):
    """Rows x (n, d), sorted by expert, times their expert's matrix of weights (e, d, f): (n, f). counts (e,): rows of each."""
    return torch.cat([rows @ weight for rows, weight in zip(x.split(counts.tolist()), weights)])


class Experts(nn.Module):
    """Feed-forward networks (SwiGLU) side by side. Rows (n, d), sorted by expert, to (n, d); counts (e,): rows of each."""

    def __init__(self, experts, width, hidden, product=looped_product):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * hidden) * width**-0.5)  # gate and up, side by side
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.product = product

    def forward(self, x, counts):
        gate, up = self.product(x, self.up, counts).chunk(2, -1)
        return self.product(F.silu(gate) * up, self.down, counts)


class Mixture(nn.Module):
    """A feed-forward block of `experts`, `k` for each token: x (b, s, d) to (b, s, d). `logits`, `chosen`: of the last call."""

    def __init__(self, width, hidden, experts=8, k=2):
        super().__init__()
        self.k, self.router = k, nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.register_buffer("bias", torch.zeros(experts))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        self.logits = self.router(tokens)
        gates, self.chosen = route(self.logits, self.k, self.bias)
        order = self.chosen.flatten().argsort(stable=True)
        found = self.experts(tokens[order // self.k], self.load)[order.argsort()].unflatten(0, (-1, self.k))
        return (gates[..., None] * found).sum(1).view_as(x)

    @property
    def load(self):
        """Choices of each expert, in the last call."""
        return torch.bincount(self.chosen.flatten(), minlength=len(self.bias))


# %% tags=["setup"] jupyter={"source_hidden": true}
WIDTH, HIDDEN, STEPS = 64, 64, (400 if FULL else 100) if len(measure.rounds(2)) > 1 else 4
TEXT = data.code_text()
BYTES, UNSEEN = (torch.tensor(list(TEXT.decode(some[:300_000].tolist()).encode())) for some in (TEXT.train, TEXT.val))


def batch(text, count, seed):
    return data.batch_of_text(text, count, 65, seed=seed).to(DEVICE)


def trained(balancing=None, dense=False):
    """(loss on unseen text, parameters, shares of the last layer's experts (steps, 8)) of a Llama or of a mixture."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(256, width=WIDTH, heads=4, layers=2, max_length=64, ffn_width=2 * HIDDEN)).to(DEVICE)
    mixtures = [] if dense else [Mixture(WIDTH, HIDDEN).to(DEVICE) for _ in model.blocks]
    for block, mixture in zip(model.blocks, mixtures):
        block.feed_forward = mixture
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    rates, shares = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS, pct_start=0.1), []
    for step in range(STEPS):
        loss = language_loss(model, batch(BYTES, 16, step))
        if balancing == "loss":
            loss = loss + 0.05 * sum(balance_loss(one.logits, one.chosen) for one in mixtures)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        if balancing == "bias":
            for one in mixtures:
                one.bias.copy_(next_bias(one.bias, one.load, 0.002))
        shares += [one.load / one.load.sum() for one in mixtures[-1:]]
    with torch.no_grad():
        found = sum(language_loss(model, batch(UNSEEN, 32, 1000 + k)).item() for k in range(4)) / 4
    return found, sum(p.numel() for p in model.parameters()), torch.stack(shares).cpu() if shares else None


# %% tags=["slide"] jupyter={"source_hidden": true}
KINDS = {
    "dense": {"dense": True},
    "mixture": {},
    "with a loss": {"balancing": "loss"},
    "with a bias": {"balancing": "bias"},
}
runs = {name: trained(**kind) for name, kind in KINDS.items()}
last = {name: shares[-10:].mean(0).max().item() for name, (_, _, shares) in runs.items() if shares is not None}
busiest.shows(
    100 * last["mixture"],
    "{:.0f} %",
    "An expert that is chosen more often learns more, and is chosen more often still.",
)
heads = {f"after {STEPS} steps": "{}", "parameters": "{:,}", "loss, unseen text": "{:.3f}", "busiest expert": "{:.0%}"}
report.table(heads, [(name, size, loss, last.get(name)) for name, (loss, size, _) in runs.items()])
figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.6), sharey=True, layout="constrained")
for ax, (name, (_, _, shares)) in zip(axes, list(runs.items())[1:]):
    ax.stackplot(range(STEPS), 100 * shares.T.numpy(), colors=plt.get_cmap("tab10").colors[:8])
    ax.set(title=name, xlabel="step", xlim=(0, max(1, STEPS - 1)), ylim=(0, 100))
axes[0].set_ylabel("% of the choices")
figure.suptitle("Which expert of the last layer gets how much?", fontsize=11)
plt.show()

# %% [markdown]
# Left alone, one expert is soon among the two of nearly every token, and others starve. The losses of such short runs
# hardly tell a mixture from a dense model: each expert has seen a quarter of the few tokens. In long runs, Switch
# Transformer reached the loss of a dense model of equal FLOPs up to seven times sooner (published).
#
# ### Balise 7 · Expert parallelism · about 13 min
#
# Each rank owns e / N experts. A token's row travels to the rank of its expert, through the expert, and back:
#
# 1. sort the choices by expert: rows for the same rank become neighbours;
# 2. exchange how many rows go where (given), then the rows: an all-to-all with uneven parts;
# 3. sort the rows that arrive by expert, and run this rank's experts;
# 4. send the results back the same way, undo the sorting, and sum them, weighted by gates.
#
# The gradients travel too: the backward of an all-to-all is another one. About 6 lines.
#
# <details><summary>Hint</summary>
#
# Choice i of the flattened `chosen` belongs to token i // k. `order.argsort()` undoes `order`.
# </details>


# %% tags=["balise-7"]
class Exchange(torch.autograd.Function):
    """Rows to and from all ranks: Exchange.apply(x, send, receive).

    x (sum of send, d): its first send[0] rows go to rank 0, and so on. send, receive: lists of N ints. Returns
    (sum of receive, d): receive[0] rows of rank 0, and so on. Backward sends the gradients back to where the rows came from.
    """

    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.send, ctx.receive = send, receive
        rows = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), receive, send)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        # BEGIN SOLUTION
        return Exchange.apply(gradient, ctx.receive, ctx.send), None, None
        # END SOLUTION


def expert_parallel(x, gates, chosen, experts, run):
    """(t, d) in the dtype of x: for each token of this rank, the sum of gate · expert(token) over its k chosen experts.

    x (t, d), gates (t, k) float32, chosen (t, k) int64; t differs between ranks and may be 0. Rank r of N owns experts
    r·e / N to (r + 1)·e / N - 1 of e = `experts`. run(rows (n, d), counts (e / N,)) gives this rank's own experts' results
    (n, d) for rows sorted by expert, counts of each; call it once on every rank, even without rows. Each choice's row
    travels once to its expert and once back. Gradients reach x, gates, and the experts of all ranks. Only the sizes of
    the exchanges are read back from a GPU.
    """
    ranks, own = dist.get_world_size(), experts // dist.get_world_size()
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    coming = torch.empty_like(counts)  # (N · own,): from each rank, for each own expert
    dist.all_to_all_single(coming, counts)
    send, receive = (some.view(ranks, own).sum(1).tolist() for some in (counts, coming))
    # BEGIN SOLUTION
    order = chosen.flatten().argsort(stable=True)
    rows = Exchange.apply(x[order // chosen.shape[1]], send, receive)
    # END SOLUTION
    expert = torch.arange(own, device=x.device).repeat(ranks).repeat_interleave(coming, output_size=sum(receive))
    by_expert = expert.argsort(stable=True)
    # BEGIN SOLUTION
    results = run(rows[by_expert], coming.view(ranks, own).sum(0))[by_expert.argsort()]
    back = Exchange.apply(results, receive, send)[order.argsort()].view(*chosen.shape, x.shape[1])
    return (gates[..., None] * back).sum(1).to(x.dtype)
    # END SOLUTION


# %%
tp.check(7, Exchange, expert_parallel)

# %% [markdown]
# ### Balise 8 · Experts without a loop · further · about 8 min
#
# `looped_product` starts one product for each expert. A GPU finishes 256 small products sooner than Python can start
# them. Start one instead: put the rows of each expert into a table of its own, padded with zeros to the longest, and
# multiply all tables at once. About 3 lines.
#
# <details><summary>Hint</summary>
#
# A row's place in its table is its number minus the number of rows of all earlier experts. `torch.bmm` multiplies
# (e, n, d) and (e, d, f).
# </details>


# %% tags=["balise-8"]
def grouped_product(x, weights, counts):
    """Rows x (n, d), sorted by expert, times their expert's matrix of weights (e, d, f): (n, f), in the dtype of x.

    counts (e,) int64: rows of each expert; any may be 0, and n too. The number of operations doesn't grow with e. No more
    multiplications, and no more memory, than tables padded to the largest count need. Gradients reach x and weights.
    """
    expert = torch.arange(len(weights), device=x.device).repeat_interleave(counts, output_size=len(x))  # of each row
    # BEGIN SOLUTION
    place = torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[expert]
    tables = x.new_zeros(len(weights), int(counts.max()), x.shape[1]).index_put((expert, place), x)
    return torch.bmm(tables, weights)[expert, place]
    # END SOLUTION


# %%
tp.check(8, grouped_product)

# %% [markdown]
# ### Race: a mixture of transformers · further
#
# A layer of 64 small experts, four for each token, on one rank: `route`, `expert_parallel` and `Experts`, against the
# block of Mixtral in transformers with the same weights. `eager` is its loop over experts, `grouped_mm` PyTorch's own
# grouped product.


# %% jupyter={"source_hidden": true}
def race_mixtures(tokens=512, width=128, hidden=64, count=64, k=4):
    """On a rank: [(name, seconds of a forward and a backward pass, largest difference from the first's result)]."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # imports of transformers warn of future changes
    from dlojz_tp.models.hugging_face import mixture_in_transformers

    torch.manual_seed(0)
    device = launch.device()
    x, router = (torch.randn(n, width, device=device) for n in (tokens, count))
    router, experts = (router * width**-0.5).requires_grad_(), Experts(count, width, hidden).to(device)

    def yours(product):
        experts.product = product
        gates, chosen = route(x @ router.T, k)
        return expert_parallel(x, gates, chosen, count, experts)

    weights = router.detach(), experts.up.detach(), experts.down.detach(), k
    blocks = {how: mixture_in_transformers(*weights, how) for how in ("eager", "grouped_mm")}
    forwards = {
        "yours, a loop of products": lambda: yours(looped_product),
        "yours, one product": lambda: yours(grouped_product),
    }
    forwards |= {f"transformers, {how}": lambda block=block: block(x[None])[0] for how, block in blocks.items()}

    def both(forward):
        out = forward()
        out.backward(torch.ones_like(out))

    first, *others = (forward().detach() for forward in forwards.values())
    errors = [0.0, *((other - first).abs().max().item() for other in others)]
    candidates = {name: lambda forward=forward: both(forward) for name, forward in forwards.items()}
    race = measure.race(candidates, repeats=len(measure.rounds(5)), warmup=1, device=device, calls=1)
    return [(name, min(times), error) for (name, times), error in zip(race.seconds.items(), errors)]


def show_mixtures():
    if frameworks.here("transformers"):
        rows = launch.ranks(race_mixtures, n=1, timeout=120)[0]
        recorded.note(WORK, "mixtures", rows, on_cpu=True)
    else:
        rows = recorded.instead("transformers", WORK, "mixtures")
    if rows:
        heads = {"forward and backward": "{}", "ms": "{:.1f}", "× eager": "{:.2f}", "largest difference": "{:.0e}"}
        eager = rows[2][1]
        report.table(heads, [(name, 1e3 * s, s / eager, error) for name, s, error in rows])


show_mixtures()

# %% [markdown]
# ## A window · further
#
# Even by blocks, the work grows with the square of $s$. In a **sliding window** a token sees only the last few
# tokens, and layers pass on what is farther away: after L layers, information has crossed L windows. The first tokens
# stay visible to all: softmax puts much weight on these **sinks**, and without them the quality drops.
#
# ### Balise 9 · A window of attention · further · about 11 min
#
# **`window_blocks`** lists the blocks that `blockwise_attention` computes. Loops and `queries` are given.
#
# - Skip a block of keys if no query sees any of it. Compare its ends; no mask is made.
# - `visible`, booleans: query and key are less than `window` apart, or the key is a sink; never a later key.
# - `whole`: do all queries of the block see all its keys?
#
# 5 lines.
#
# <details><summary>Hint</summary>
#
# Two blocks are as far apart as their nearest tokens, `first` and `last`. Whether all is seen depends on the farthest:
# the last query, and the first key that isn't a sink, `max(c, sinks)`.
# </details>


# %% tags=["balise-9"]
def window_blocks(length, block, window, sinks=0, device=None):
    """As causal_blocks: a query sees the last `window` tokens, itself included, and the first `sinks` of those before it.

    Blocks of which no query sees anything are left out, and no mask is made for them, so that the cost grows with
    `length` and not with its square. visible (rows, columns), booleans on `device`; None if all of the block is seen.
    """
    for first in range(0, length, block):
        rows, seen = slice(first, min(first + block, length)), []
        queries = torch.arange(first, rows.stop, device=device)[:, None]
        for c in range(0, rows.stop, block):
            last = min(c + block, length) - 1  # the last key of this block; c is the first
            # BEGIN SOLUTION
            if first - last >= window and c >= sinks:
                continue
            # END SOLUTION
            keys = torch.arange(c, last + 1, device=device)
            # BEGIN SOLUTION
            visible = (queries >= keys) & ((queries - keys < window) | (keys < sinks))
            oldest = max(c, sinks)  # of the keys that only the window shows
            whole = last <= first and (oldest > last or rows.stop - 1 - oldest < window)
            # END SOLUTION
            seen.append((slice(c, last + 1), None if whole else visible))
        yield rows, seen


# %%
tp.check(9, window_blocks)


# %% jupyter={"source_hidden": true}
def show_window(block=BLOCK // 2, window=BLOCK // 2, sinks=4):
    """Time and blocks of causal attention and of a window, and flex_attention's own count of the same blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = []
    for length in (LENGTH // 2, LENGTH, 2 * LENGTH):
        given, plans = qkv(length), {"causal": causal_blocks(length, block, DEVICE)}
        plans["window"] = window_blocks(length, block, window, sinks, DEVICE)
        for name, plan in plans.items():
            blocks = list(plan)
            run = functools.partial(blockwise_attention, *given, blocks)
            rows.append((length, name, sum(len(seen) for _, seen in blocks), milliseconds(run, 3)))
    report.table({"tokens": "{:,}", "attention": "{}", "blocks": "{}", "ms": "{:.1f}"}, rows)

    def visible(b, h, query, key):
        return (query >= key) & ((query - key < window) | (key < sinks))

    length = LENGTH // 4
    mask = create_block_mask(visible, None, None, length, length, device=DEVICE, BLOCK_SIZE=block)
    count = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    print(f"\nflex_attention's mask lists {count} blocks of {length:,} tokens")
    if DEVICE.type == "cpu":  # elsewhere it has to be compiled first
        yours, _ = blockwise_attention(*qkv(length), window_blocks(length, block, window, sinks))
        with warnings.catch_warnings(action="ignore"):  # of its slowness: here only its numbers count
            theirs = flex_attention(*qkv(length), block_mask=mask)
        print(f"largest difference from flex_attention: {(yours - theirs).abs().max():.0e}")


show_window()

# %% [markdown]
# ## Five axes · further
#
# | axis | what is cut | what a rank sends in a layer | where |
# |---|---|---|---|
# | data | the batch | gradients, once a step | anywhere |
# | tensor | weights and heads | activations, four times | inside a node |
# | pipeline | the stack of layers | activations at the cut | between nodes |
# | context | the sequence | keys and values | where pieces are long |
# | expert | the experts | each token k times, there and back | fast links |

# %% [markdown]
# ## 16,384 GPUs · further
#
# Llama 3 405B trained with sequences of 131,072 tokens on 16,384 H100s, with 8 tensor, 16 pipeline and 16 *context*
# ranks. DeepSeek-V3 trained on 2,048 H800s with 16 pipeline and 64 *expert* ranks. Why 16 context and 64 expert ranks?
# The planner *models* both; nothing here is measured.


# %% tags=["slide"] jupyter={"source_hidden": true}
def show_large():
    llama, cluster = replace(planner.MODELS["llama3-405b"], sequence=131_072), planner.Cluster(planner.H100)
    rows = []
    for context in (1, 2, 4, 8, 16):
        shape = {"schedule": "interleaved", "chunks": 4, "zero": 1, "sequence_parallel": True}
        layout = planner.Layout(8, 16, 128 // context, context=context, micro_batches=16, **shape)
        held, step = planner.rank_memory(llama, layout).total, planner.step_time(llama, layout, cluster)
        rows.append((context, layout.batch, held / 1e9, "yes" if held < planner.H100.memory else "no", step.total))
    heads = {
        "context ranks": "{}",
        "sequences a step": "{:,}",
        "GB a GPU": "{:.0f}",
        "fits 80 GB": "{}",
        "s a step": "{:.0f}",
    }
    print("modelled: Llama 3 405B, 131,072 tokens, 16,384 H100s")
    report.table(heads, rows)
    deepseek, cluster, rows = planner.MODELS["deepseek-v3"], planner.Cluster(planner.CARDS["H800"]), []
    shape = {"schedule": "zero-bubble", "zero": 1, "recomputation": "norm+latent+activation", "precision": "float8"}
    for expert in (1, 8, 16, 32, 64):
        layout = planner.Layout(1, 16, 128, expert=expert, micro_batches=120, experts_overlap=True, **shape)
        alone = replace(layout, experts_overlap=False)
        steps = [planner.step_time(deepseek, one, cluster).total for one in (layout, alone)]
        rows.append((expert, deepseek.experts // expert, planner.rank_memory(deepseek, layout).total / 1e9, *steps))
    heads = {
        "expert ranks": "{}",
        "experts on each": "{}",
        "GB a GPU": "{:.0f}",
        "s a step": "{:.0f}",
        "without overlap": "{:.0f}",
    }
    print("\nmodelled: DeepSeek-V3, 4,096 tokens, 2,048 H800s")
    report.table(heads, rows)


show_large()

# %% [markdown]
# Activations decide the first table: a rank keeps those of its own piece, and only with 16 do they fit. Experts decide
# the second. Beyond 16 ranks, steps get slower unless the all-to-alls overlap with computing.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Llama 3 used context parallelism for sequences of 131,072 tokens, but not for 8,192. Why not always?</summary>
#
# A rank computes (s / N)² scores while s / N keys travel. With short pieces, the message takes longer than the
# computation that should hide it.
# </details>
#
# <details><summary>An expert gets no token in a step. May its rank skip the all-to-all? Do its weights
# change?</summary>
#
# It must join: the others wait for it. The gradient is zero, but AdamW still changes the weights, by momentum and
# decay.
# </details>
#
# <details><summary>DeepSeek-V3 has 671 billion parameters, and a token uses 37 billion. Which number decides the memory?</summary>
#
# The first: any token may choose any expert. The second decides the arithmetic.
# </details>
#
# ## To remember
#
# **A softmax is two sums, and sums can be computed in pieces.** By blocks, attention needs no square. In a ring, each
# rank has a piece of the sequence, and computes while keys travel. A router sends a token to a few experts: many
# weights, few FLOPs, two all-to-alls a layer, and a load to balance. Now there are five axes. Which grid of them is
# best? **19_hybrid_parallelism** searches for it.
