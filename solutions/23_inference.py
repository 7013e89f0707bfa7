# %% [markdown] tags=["slide"]
# # Inference: one token at a time · about 110 min, core 55
#
# A language model writes one token after another, and each needs a pass through the whole model. You write the parts
# that make this cheap, for a small Llama: the **KV cache**, **paged attention**, **continuous batching**, and then
# **speculative decoding**, **beam search** and decoding on several ranks. Servers like vLLM are built from these parts.
#
# **What you will gain.** To write 256 tokens after a prompt of 16, the baseline sends 36,736 tokens through the model.
# With your cache it's 271. You count them, and measure the time per token.

# %% tags=["setup"] jupyter={"source_hidden": true}
import copy
import dataclasses
import functools
import itertools
import logging
import os
import statistics
import time
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo
from dlojz_tp.models import Llama, LlamaConfig, language_loss
from dlojz_tp.parallel import Axis

tp = course.open("23_inference")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
WORK = "23_inference"
FULL = scale() == "full"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # a token is little work: a second thread waits more than it works
TEXT = data.code_text()  # the source of Python's standard library, as tokens
PAGE = TEXT.train[300_000:302_000].to(DEVICE)  # 2,000 tokens, a few pages of one file
SMALL = LlamaConfig(TEXT.vocab_size, width=128, heads=8, kv_heads=2, layers=4, max_length=512)
CONFIG = LlamaConfig(TEXT.vocab_size, width=1024, heads=16, kv_heads=4, layers=12, max_length=2048) if FULL else SMALL

# %% [markdown] tags=["slide"]
# ## The idea
#
# To write $n$ tokens after a prompt of $s$, a model without a cache reads the whole text again for each token. With a
# cache it reads every token once:
#
# $$\sum_{i=0}^{n-1} (s + i) \;=\; n s + \frac{n (n-1)}{2} \qquad\longrightarrow\qquad s + n - 1$$
#
# The first pass, over the prompt, is called **prefill**. Each pass after it, for one token, is **decoding**.


# %% tags=["slide"] jupyter={"source_hidden": true}
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
        word = "with a cache" if memory else "without a cache"
        ax.set_title(f"{word}: {tokens} tokens go through the model", loc="left", fontsize=10)
        ax.set(xlim=(0, prompt + count), ylim=(-count, 0), xlabel="position in the text", xticks=[], yticks=[])
        ax.grid(False)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("pass of the model →", rotation=90)
    words = {"read": "goes through the model", "kept": "keys and values from the cache", "written": "is written"}
    boxes = [plt.Rectangle((0, 0), 1, 1, fc=colour, ec="#777777") for colour in colours.values()]
    figure.legend(boxes, words.values(), fontsize=9, ncols=3, loc="outside lower center")
    plt.show()


draw_idea()
# %% [markdown]
# ## Baseline
#
# The Llama trains for a few seconds on a few pages of Python's library, and learns parts of them by heart. Then it
# writes without a cache.


# %% tags=["setup"] jupyter={"source_hidden": true}
def trained(config, steps=100, rate=1e-3 if FULL else 6e-3):
    """A Llama that has read PAGE several times and knows parts of it by heart; in evaluation mode."""
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
    """prompt (b, s) and `count` more tokens, each the most likely: (b, s + count). Rereads all tokens for each."""
    for _ in range(count):
        logits = model(prompt)  # (b, s, v)
        prompt = torch.cat([prompt, logits[:, -1:].argmax(-1)], 1)
    return prompt


# %% tags=["setup"] jupyter={"source_hidden": true}
def best_seconds(run, *given, rounds=3):
    """Seconds of the fastest of `rounds` calls; on a CPU, processor time of this thread, which does all the work."""
    clock, seconds = time.perf_counter if DEVICE.type == "cuda" else time.thread_time, []
    for _ in range(rounds):
        start = clock()
        run(*given)
        measure.synchronize(DEVICE)
        seconds.append(clock() - start)
    return min(seconds)


def tokens_read(run, *given):
    """Tokens that go through MODEL in one call."""
    count = []
    hook = MODEL.register_forward_pre_hook(lambda _, given: count.append(given[0].numel()))
    run(*given)
    hook.remove()
    return sum(count)


def rows_of(write_text):
    """[(tokens written, tokens through the model, seconds a token)] of `write_text(n)`, for growing n."""
    return [(n, tokens_read(write_text, n), best_seconds(write_text, n, rounds=1 + (n < 100)) / n) for n in LENGTHS]


LENGTHS = (32, 64, 128, 256)
HEADS = {"tokens written": "{}", "through the model": "{:,}", "a token takes": measure.human_seconds}

# %%
MODEL = trained(CONFIG)
PROMPT = PAGE[500:516][None]
written = write_without_cache(MODEL, PROMPT, 48)[0].tolist()
print(TEXT.decode(written[:16]) + " ▶ " + TEXT.decode(written[16:]) + "\n")
plain = rows_of(lambda n: write_without_cache(MODEL, PROMPT, n))
report.table(HEADS, plain)

# %% [markdown]
# ## A KV cache
#
# In a decoder, a token attends only to earlier tokens and itself. So the keys and values of a token never change once
# it has been read. If you keep them, only the new token has to go through the model.
#
# `model(tokens, first, attend)` reads `tokens`, `(b, s)`. `first` is the position of the first of them in the text. The
# model returns logits `(b, s, v)` for these tokens. In each layer, it calls `attend(layer, q, k, v)` instead of its own
# attention.
#
# ### Balise 1 · A cache of keys and values · about 14 min
#
# **`Cache().attend(layer, q, k, v)`** gets `s` new tokens of one layer: `q`, `(b, h, s, size)`, has h heads; `k` and
# `v`, `(b, g, s, size)`, have g heads, perhaps fewer (`enable_gqa` shares them). Append `k` and `v` to what the cache
# has for this layer, and keep the result. Then write `visible`, booleans `(new, all)`: each new token sees all earlier
# ones and itself. A call may bring a whole prompt, one token, or several tokens after others.
#
# **`write(model, prompt, count, attend)`** returns `prompt`, `(b, s)`, and `count` more tokens. `attend` has a cache,
# so each token goes through the model once: the prompt in one call, then each new token in its own. Write the call of
# the model, and the next `first`.
#
# 4 and 2 lines.
#
# <details><summary>Hint</summary>
#
# `torch.cat([old, new], dim=2)`. Earlier tokens are a full block of columns to the left of the triangle:
# `torch.ones(new, all, dtype=torch.bool, device=q.device).tril(all - new)`. `is_causal=True` would align the triangle
# with the upper left corner, which is right only for the first call.
# </details>


# %% tags=["balise-1", "slide-mistake=first-key-only"]
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
    """prompt (b, s) and `count` more tokens, each the most likely: (b, s + count). Each token is read once."""
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
# Write 256 tokens after the prompt of 16 again. Now 136 times fewer tokens go through the model. Guess the speedup.

# %%
faster = tp.predict("How many times as fast are 256 tokens written with the cache?", ...)


# %%
cached = rows_of(lambda n: write(MODEL, PROMPT, n, Cache().attend))
ratios = [before[2] / after[2] for before, after in zip(plain, cached)]
report.table(HEADS | {"times as fast": "{:.1f}"}, [(*row, ratio) for row, ratio in zip(cached, ratios)])
faster.shows(ratios[-1], "× {:.1f}", "A pass over 200 tokens does not take 200 times as long as a pass over one.")
same = (write_without_cache(MODEL, PROMPT, 256) == write(MODEL, PROMPT, 256, Cache().attend)).sum().item()
print(f"{same} of {PROMPT.shape[1] + 256} tokens are the same as without the cache")

# %% [markdown]
# <details><summary>Why is it less than 136 times as fast?</summary>
#
# Every pass reads the same weights from memory and makes the same PyTorch calls, and a processor computes many tokens
# at once far more efficiently than one. Balise 2 does the arithmetic.
#
# The two ways add numbers in different orders. Where two tokens are almost equally likely, the texts may differ.
# </details>

# %% [markdown]
# ## Where the time goes · further
#
# With a cache, a token needs little arithmetic, but all weights, keys and values have to come from memory. A pass takes
# as long as the slower of the two, the roofline of work 03:
#
# $$\text{seconds} \approx \max\left( \frac{\text{FLOP}}{\text{peak}},\ \frac{\text{bytes}}{\text{bandwidth}} \right)$$
#
# ### Balise 2 · What a token costs · further · about 13 min
#
# **`pass_cost(config, batch, seen, new, size)`** returns `(FLOP, bytes)` of one pass over `batch` rows. Each row has
# `seen` tokens in its cache and brings `new` ones. You are given `weights`, the number of weights in all
# matrices, the width `d`, and `shared`, how many numbers a token's keys have in one layer. Its values have as many.
#
# - 2 FLOP for each new token and weight.
# - Attention, in each layer: $4 d$ FLOP for each *pair* of a new token and a token that it sees, itself included.
#   Masked pairs don't count.
# - Bytes, `size` per number: each weight once, and keys and values of all tokens, old and new, in each layer and row.
#
# **`tokens_a_second(config, batch, seen, size, peak, bandwidth)`**: new tokens per second for all rows together, by the
# roofline. A pass gives each row one.
#
# 3 and 2 lines.
#
# <details><summary>Hint</summary>
#
# The new tokens of a row see `seen + 1`, `seen + 2`, …, `seen + new` tokens: together `new * seen + new * (new + 1) //
# 2` pairs. The weights are read once for the batch, keys and values for each row.
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
    """New tokens a second of all rows, one per row and pass; peak in FLOP a second, bandwidth in bytes a second."""
    # BEGIN SOLUTION
    flop, moved = pass_cost(config, batch, seen, 1, size)
    return batch / max(flop / peak, moved / bandwidth)
    # END SOLUTION


# %%
tp.check(2, pass_cost, tokens_a_second)
# %% [markdown]
# Compare the roofline with a wide Llama of two layers, with 128 tokens in each row's cache. Peak and bandwidth of this
# machine are measured. 64 rows need 64 times the arithmetic of one. Guess the time.

# %%
together = tp.predict("How many times as long as a pass with one row does a pass with 64 rows take?", ...)

# %% jupyter={"source_hidden": true}
WIDE = LlamaConfig(
    TEXT.vocab_size,
    width=4096 if FULL else 512,
    heads=32 if FULL else 8,
    kv_heads=8 if FULL else 2,
    layers=2,
    max_length=256,
)
SEEN = 128


@torch.inference_mode()
def seconds_of_a_pass(config, batch):
    """Decoding: seconds of one pass with a new token in each row, after SEEN others."""
    model, cache = Llama(config).to(DEVICE).eval(), Cache()
    tokens = PAGE[: SEEN + 1].repeat(batch, 1)
    model(tokens[:, :-1], 0, cache.attend)
    # each round adds a token to the cache, which is little next to SEEN
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
peak, bandwidth = of_this_machine()
print(f"peak {peak / 1e9:.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.0f} GB/s\n")
speeds = []
for batch in (1, 4, 16, 64):
    flop, moved = pass_cost(WIDE, batch, SEEN, 1, 4)
    bound = "arithmetic" if flop / peak > moved / bandwidth else "memory"
    roof = tokens_a_second(WIDE, batch, SEEN, 4, peak, bandwidth)
    speeds.append((batch, flop / moved, bound, roof, batch / seconds_of_a_pass(WIDE, batch)))
report.table({"rows": "{}", "FLOP a byte": "{:.2f}", "bound by": "{}", "tokens/s by the roofline": "{:,.0f}",
              "measured": "{:,.0f}"}, speeds)  # fmt: skip
together.shows(64 * speeds[0][-1] / speeds[-1][-1], "× {:.1f}", "The weights are read once, for all rows.")

# %% [markdown]
# The roofline leaves out PyTorch's calls and the copies in `torch.cat`. It explains the trend: rows share the
# weights, until arithmetic takes longer than reading them.
#
# The next cell makes an *estimate* for Llama 2 7B in 16 bits on an H100, with 1,024 tokens in each row's cache. The
# largest batch just fits in memory.


# %% jupyter={"source_hidden": true}
def estimate(card=planner.H100, seen=1024):
    rows = []
    for groups in (32, 8):
        seven = LlamaConfig(32_000, width=4096, heads=32, kv_heads=groups, layers=32, max_length=2048, ffn_width=11_008)
        row = pass_cost(seven, 2, seen, 1, 2)[1] - pass_cost(seven, 1, seen, 1, 2)[1]  # bytes of a row's cache
        fit = int((card.memory - 2 * seven.n_parameters) / row)
        flop, moved = pass_cost(seven, 1, 0, seen, 2)
        speed = seen / max(flop / card.bfloat16, moved / card.bandwidth)
        rows.append((groups, "prefill", 1, speed, flop / moved))
        for batch in (1, 16, fit):
            flop, moved = pass_cost(seven, batch, seen, 1, 2)
            speed = tokens_a_second(seven, batch, seen, 2, card.bfloat16, card.bandwidth)
            rows.append((groups, "decoding", batch, speed, flop / moved))
    report.table({"key heads": "{}", f"estimate, {card.name}": "{}", "rows": "{}", "tokens/s": "{:,.0f}",
                  "FLOP a byte": "{:,.1f}"}, rows)  # fmt: skip
    print(f"\nThe card needs {card.bfloat16 / card.bandwidth:.0f} FLOP a byte to be busy computing.")


estimate()

# %% [markdown]
# For other models and cards: `python -m dlojz_tp plan --model llama3-70b --gpus 4 --serve`.
#
# ## Memory in blocks
#
# A server that reserves memory for the longest possible answer wastes most of it. **Paged attention** (Kwon and others,
# 2023) cuts memory into **blocks** of a few tokens, as an operating system does. A sequence takes one block at a time,
# and its **table** lists them. The token at place `p` is in block `table[p // size]`, at `p % size`.
#
# Sequences with the same beginning share its blocks. Before a sequence writes into a shared block, it takes a copy:
# **copy on write**.
#
# ### Balise 3 · Paged attention · about 17 min
#
# `free` lists the blocks that no table holds, and `holders` counts the tables of each block. A table never has spare
# blocks.
#
# - **`extend(table, length, n)`** makes room for `n` tokens after `length` others. `shared`: is the last block in
#   another table too, *and* about to be written into? `missing`: how many more blocks does the table need? If `shared`,
#   put a copy in its place, in all layers.
# - **`fork(table)`** counts the new holders, and takes no block.
# - **`paged_attention(q, keys, values, tables, lengths)`**: `q`, `(b, heads, d)`, has one query per sequence. Row i of
#   `tables` has the blocks of sequence i, padded with zeros. `k` and `v`, `(b, groups, places, d)`, are already
#   gathered. Write `seen`, `(b, places)`: places beyond a sequence's length don't count. Then `y`, `(b, heads, 1, d)`.
#   No loop.
#
# 5, 2 and 2 lines.
#
# <details><summary>Hint</summary>
#
# The last block is written into if `length` is not a multiple of `size` and `n` is not 0. `-(-a // b)` rounds up.
# `table.pop()` gives up the old block, which then has one holder fewer; `new = taken[0]` takes its place.
# `scaled_dot_product_attention` takes a mask of booleans, `True` where a query may look, with axes for heads and
# queries, and `enable_gqa=True`.
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
        """Room for n tokens after `length`, in blocks of this table alone. MemoryError, and no change, if there is none."""
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
    """Attention of one query per sequence, (b, heads, d), over keys and values in blocks. All on q's device."""
    k, v = (each.index_select(0, tables.flatten()) for each in (keys, values))  # (b · most, size, groups, d)
    k, v = (each.reshape(len(q), -1, *each.shape[2:]).transpose(1, 2) for each in (k, v))  # (b, groups, places, d)
    # BEGIN SOLUTION
    seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    y = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    # END SOLUTION
    return y[:, :, 0]


# %%
tp.check(3, Pool, paged_attention)


# %% jupyter={"source_hidden": true}
@torch.no_grad()
def step_in_blocks(model, pool, tables, lengths, tokens):
    """Logits (b, vocabulary) of the next token of each sequence, whose keys and values go to the pool."""
    rows = nn.utils.rnn.pad_sequence([torch.tensor(table) for table in tables], batch_first=True).to(DEVICE)
    at = torch.tensor(lengths, device=DEVICE)
    where = rows.gather(1, at[:, None] // pool.size)[:, 0], at % pool.size

    def attend(layer, q, k, v):
        pool.keys[layer][where], pool.values[layer][where] = k[:, :, 0], v[:, :, 0]
        return paged_attention(q[:, :, 0], pool.keys[layer], pool.values[layer], rows, at + 1)[:, :, None]

    return model(tokens[:, None], first=at, attend=attend)[:, 0]


@torch.no_grad()
def read_prompt(pool, prompt):
    """(the table, the logits of what follows) of a prompt (s,), whose keys and values go to the pool."""
    table = []
    pool.extend(table, 0, len(prompt))

    def attend(layer, q, k, v):
        pool.write(layer, table, 0, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return table, MODEL(prompt[None], attend=attend)[0, -1]


def write_in_blocks(pool, prompt, count):
    """The prompt and `count` more tokens, with keys and values in blocks."""
    table, logits = read_prompt(pool, prompt)
    text = [*prompt.tolist(), int(logits.argmax())]
    while len(text) < len(prompt) + count:
        pool.extend(table, len(text) - 1, 1)
        logits = step_in_blocks(MODEL, pool, [table], [len(text) - 1], torch.tensor(text[-1:], device=DEVICE))
        text.append(int(logits.argmax()))
    return text


def under_way(n=64, longest=512):
    """Lengths of n sequences, each somewhere between its first token and its last."""
    drawn = torch.Generator().manual_seed(0)
    last = (100 * torch.randn(n, generator=drawn).exp()).clamp(16, longest)
    return (last * torch.rand(n, generator=drawn)).long().add(1).tolist()


def held(lengths, size):
    """Tokens for which a pool has reserved room once it holds these sequences."""
    pool, count = Pool(2 * sum(lengths) // size + len(lengths), size), 0
    for length in lengths:
        table = []
        pool.extend(table, 0, length)
        count += len(table) * size
    return count


# %% [markdown]
# Does the model write the same text from blocks? And how much of the reserved memory holds tokens, with 64 unfinished
# sequences of up to 512 tokens?

# %% tags=["slide"]
pool = Pool(64, 16, CONFIG.layers, CONFIG.groups, CONFIG.head_size, DEVICE)
text, due = write_in_blocks(pool, PROMPT[0], 48), write(MODEL, PROMPT, 48, Cache().attend)[0].tolist()
print(f"{sum(a == b for a, b in zip(text, due))} of {len(due)} tokens are the same as with the cache\n")
lengths = under_way()
rooms = {"the longest": 512 * len(lengths)} | {f"blocks of {size}": held(lengths, size) for size in (64, 16, 4)}
shares = {name: sum(lengths) / room for name, room in rooms.items()}
report.table({"reserved": "{}", "room for tokens": "{:,}", "holds tokens": "{:.0%}", "times the sequences": "{:.1f}"},
             [(name, room, shares[name], rooms["the longest"] / room) for name, room in rooms.items()])  # fmt: skip

# %% [markdown]
# ## Continuous batching
#
# A decoding step reads all weights, for one sequence or for sixty. In a **static batch** all begin together, and
# finished ones wait for the longest. **Continuous batching** (Yu and others, 2022) decides before *each step* which
# requests take part.
#
# Since no memory is reserved, it can run out. Then a request is **preempted**: it gives up its blocks, keeps its
# tokens, and computes its keys and values again later.
#
# ### Balise 4 · Continuous batching · about 15 min
#
# A step gives every running request one more token.
#
# - **`schedule(waiting, running, blocks, size, most)`** returns both lists for the next step. First come, first
#   served: no request overtakes an earlier one, even if the earlier one is too large to fit.
# - **`serve(requests, plan, seconds)`** simulates a clock. Advance it by the time of a step; `before` has the requests
#   of the previous one. Then remove finished requests from `running`.
#
# 4 and 2 lines.
#
# **Write all of it:** `tp.open_task(4)` gives you only names and docstrings. Decide who runs in each step, and serve
# requests as they arrive.
#
# <details><summary>Hint</summary>
#
# The running requests are always the beginning of the queue: go along it as long as there is room, then stop. A
# preempted request is not in `before`.
# </details>


# %% tags=["setup"]
@dataclasses.dataclass(eq=False)
class Request:
    """A user's request."""

    number: int
    arrival: float  # seconds
    prompt: int  # tokens
    output: int  # tokens that it will generate
    done: int = 0  # tokens generated so far


# %% tags=["balise-4"]
def schedule(waiting, running, blocks, size, most):
    """(the waiting requests, the running ones) of the next step: two lists. It changes no request.

    running + waiting is the queue of `Request`s, in order of arrival, and both lists that come back keep this order.
    blocks: how many there are, each for `size` tokens. A running request needs blocks for the prompt + done tokens that
    it has before the step. most: requests that may run together. As many run as fit, from the front of the queue; all
    others wait, even if a later one would fit. If memory runs out, the last of the running requests go back to waiting.
    ValueError if a request alone needs more than all blocks.
    """
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
    """{number: [times of its tokens]}; counts up `done` of each request.

    requests: a list of `Request`s, in any order. plan(waiting, running) returns both lists of the next step, as
    `schedule` does. seconds(tokens): the time of a step that computes `tokens` tokens for all its requests together.
    The clock starts at 0. If no request is waiting or running, it jumps to the next arrival, unless that is past. Then
    those that have arrived by now join waiting, in order of arrival, and the next step is planned. A request that took
    part in the previous step computes 1 token; one that joins, or comes back, computes prompt + done. Each gets its new
    token at the end of the step, on the clock. One that has `output` tokens then leaves.
    """
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
# A simulation: 300 requests arrive at random, 40 a second, a few of them long. A step takes 10 ms for the weights and
# 0.05 ms a token, and there are 600 blocks of 16 tokens. The baseline uses static batches, and reserves room for the
# longest answer.

# %%
more = tp.predict("By what factor does your server beat static batches in tokens per second?", ...)


# %% jupyter={"source_hidden": true}
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
    """Each request reserves room for the longest answer; without `joining`, none joins before the batch has ended."""
    room = min(MOST, BLOCKS * SIZE // LONGEST) - len(running)
    if running and not joining:
        room = 0
    return waiting[room:], running + waiting[:room]


def served(plan, rate=40):
    """(tokens a second, requests in a step, median seconds to the first token, between two: median, 99 %; preemptions)."""
    requests, sent_back, together = arrivals(rate), [], []

    def watched(waiting, running):
        after = plan(waiting, running)
        sent_back.extend(one for one in running if one not in after[1])
        together.append(len(after[1]))
        return after

    times = serve(requests, watched, lambda tokens: 0.010 + 0.00005 * tokens)
    first = statistics.median(times[one.number][0] - one.arrival for one in requests)
    speed = sum(map(len, times.values())) / max(max(each) for each in times.values())
    gaps = sorted(after - before for each in times.values() for before, after in itertools.pairwise(each))
    between = gaps[len(gaps) // 2], gaps[99 * len(gaps) // 100]
    return speed, statistics.fmean(together), first, *between, len(sent_back)


# %%
servers = {
    "static batches": functools.partial(reserved, joining=False),
    "joining, the longest reserved": functools.partial(reserved, joining=True),
    "joining, in blocks": lambda waiting, running: schedule([*waiting], [*running], BLOCKS, SIZE, MOST),
}
found = {name: served(plan) for name, plan in servers.items()}
report.table({"simulated": "{}", "tokens/s": "{:,.0f}", "requests in a step": "{:.1f}", "first token after": "{:.2f} s",
              "between tokens": measure.human_seconds, "the slowest 1 %": measure.human_seconds,
              "preempted": "{}"}, [(name, *row) for name, row in found.items()])  # fmt: skip
times_more = found["joining, in blocks"][0] / found["static batches"][0]
more.shows(times_more, "× {:.1f}", "No request waits for the longest, and no reserved memory stays empty.")

# %% [markdown]
# The price: when a prompt joins, all others wait for its prefill.
#
# <details><summary>What do servers do about that?</summary>
#
# They cut a long prompt into chunks, one in each step. Or they are *disaggregated* (DistServe, arXiv 2401.09670): some
# GPUs prefill, others decode, and keys and values travel between them. A prompt then delays nobody's next token, and each
# side has its own batch size and number of GPUs.
# </details>

# %% [markdown]
# ## What you gained
#
# Compare the baseline with your code.

# %% tags=["slide"]
n, read_before, before = plain[-1]
_, read, after = rows_of(lambda n: write(MODEL, PROMPT, n, Cache().attend))[-1]
static, *_, mine = (row[0] for row in found.values())
report.table({"": "{}", "before": "{}", "yours": "{}", "times": "{:.1f}"}, [
    (f"tokens through the model, {n} written", f"{read_before:,}", f"{read:,}", read_before / read),
    ("a token takes", measure.human_seconds(before), measure.human_seconds(after), before / after),
    ("memory that holds tokens", f"{shares['the longest']:.0%}", f"{shares['blocks of 16']:.0%}",
     shares["blocks of 16"] / shares["the longest"]),
    ("tokens a second of a server, simulated", f"{static:,.0f}", f"{mine:,.0f}", mine / static),
])  # fmt: skip

# %% [markdown]
# ## Speculative decoding · further
#
# A small, fast model, the **draft**, guesses the next $k$ tokens. The large one, the **target**, reads them in *one*
# pass and gives its distribution at each place (Leviathan and others, 2023).
#
# A token $x$ drawn from the draft's $q$ should be distributed like the target's $p$. Keep it with probability
# $\min(1, p(x) / q(x))$. A token is then drawn and kept with probability $\min(p, q)$. $\max(0,\ p(x) - q(x))$ is
# missing, so after a rejection draw the next token from that, divided by its sum. Overall, tokens have **exactly** the
# distribution $p$, however bad the draft is.


# %% jupyter={"source_hidden": true}
def draw_acceptance():
    p, q = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05]), torch.tensor([0.15, 0.45, 0.10, 0.05, 0.25])
    low, x = torch.minimum(p, q), range(5)
    _, axes = plt.subplots(1, 3, figsize=(10.5, 2.9), layout="constrained", sharey=True)
    axes[0].bar(x, low, color="C0", label="kept: min(p, q)")
    axes[0].bar(x, q - low, bottom=low, color="C1", label="rejected")
    axes[1].bar(x, p - low, color="C2", label="missing: max(0, p - q)")
    axes[2].bar(x, low, color="C0", label="kept")
    axes[2].bar(x, p - low, bottom=low, color="C2", label="drawn after a rejection")
    for ax, title in zip(axes, ("What the draft says, q", "What is missing", "Together: the target's p")):
        ax.set(title=title, xticks=x, xticklabels="abcde", xlabel="token")
        ax.legend(fontsize=8)
    axes[0].set_ylabel("probability")
    plt.show()


draw_acceptance()
# %% [markdown]
# Each guess builds on the guesses before it, so once one is rejected, the rest are useless. If all $k$ are kept, the
# same pass yields one more token.
#
# ### Balise 5 · Speculative decoding · further · about 12 min
#
# **`verify(target, draft, drafted, uniforms)`** gets the `drafted` tokens, `(k,)`. `target`, `(k + 1, v)`, has the
# target's probabilities at the $k$ places and after the last; `draft`, `(k, v)`, has the draft's. `uniforms`, `(k,)`,
# are random numbers in $[0, 1)$. Token $i$ may stay if $u_i < p_i(x_i) / q_i(x_i)$.
#
# Return `(kept, after)`: the number of tokens before the first rejection, and the distribution `(v,)` of the next
# token. After a rejection it is $\max(0, p - q)$ at the rejected place, divided by its sum. Without one, it is the
# target's last row, which is given.
#
# 4 lines.
#
# <details><summary>Hint</summary>
#
# `target[places, drafted]` takes one probability from each row. With 1 for "may stay" and 0 otherwise, `cumprod` is 1
# before the first rejection and 0 from there on. Its sum is `kept`.
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
# The draft here is a table: how often each token follows another in these pages. If each guess stays with probability
# $\alpha$, the mean of $\sum_x \min(p(x), q(x))$, a pass of the target gives $1 + \alpha + \dots + \alpha^k$ tokens.


# %% jupyter={"source_hidden": true}
def followers(tokens, v):
    """Probabilities (v, v) of the next token for each token, from counts; tokens that never came count a little."""
    table = torch.full((v, v), 1e-3)
    table.index_put_((tokens[:-1], tokens[1:]), torch.ones(len(tokens) - 1, device=tokens.device), accumulate=True)
    return table / table.sum(1, keepdim=True)


def probabilities(logits, temperature):
    """The distribution to draw from, (…, v): at temperature 0 only the most likely token."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(-1)


FOLLOWERS = followers(PAGE.cpu(), CONFIG.vocab_size)


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
        """Logits (s, v) of tokens whose first position is `first`."""
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


# %% jupyter={"source_hidden": true}
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


# %%
PAGE_PROMPT = PAGE[100:140]
gains = speculation(PAGE_PROMPT)
report.table({"drafted, k": "{}", "α": "{:.2f}", "tokens a pass": "{:.2f}", "by the formula": "{:.2f}",
              "a token takes": measure.human_seconds, "times as fast": "{:.2f}"},
             [(k, alpha or None, tokens, due, seconds, gains[0][2] / seconds)
              for k, (tokens, due, seconds, alpha) in gains.items()])  # fmt: skip
greedy = [speculate(MODEL, PAGE_PROMPT, 100, k, temperature=0)[0] for k in (0, 4)]
print(f"\nAt temperature 0 the text is that of plain decoding: {greedy[0] == greedy[1]}.")

# %% [markdown]
# You gain less in time than in tokens: a pass over $k + 1$ tokens is as cheap as a pass over one only where the machine
# waits for memory.
#
# <details><summary>Which drafts do servers use?</summary>
#
# **EAGLE** (arXiv 2401.15077) adds one layer. It continues the target's own last hidden states, which is easier than
# continuing tokens, and the target's head turns the result into tokens. With **multi-token prediction** (MTP), an extra
# module learns in training to predict the token after next, too. DeepSeek-V3 can use this module as a draft: 85 to 90 %
# of its tokens are kept, for 1.8 times as many tokens a second (arXiv 2412.19437).
# </details>

# %% [markdown]
# ## Beam search on shared blocks · further
#
# In **beam search**, continuations (*beams*) compete. In each step, every possible next token of every beam gets a
# score, and the `width` best survive. A beam may have several children, which share its past, or none. Without shared
# blocks, a step would copy whole caches.
#
# ### Balise 6 · Beam search on blocks · further · about 12 min
#
# **`beam_search(pool, table, length, logits, width, count, step)`** continues a prompt by `count` tokens. The blocks of
# `table` hold the prompt's `length` tokens, and `logits` `(vocabulary,)` are the model's after it. The score of a
# continuation is the sum of the log probabilities of its tokens.
#
# `following`, `(width, vocabulary)`, are the log probabilities of each beam's next token. Write the rest of a step:
# choose the `width` best of all these continuations, say which beam each continues (`parents`, `(width,)`) and
# with which token (`tokens`, `(width,)`), and give each child a table. Release the old tables.
#
# 5 lines.
#
# <details><summary>Hint</summary>
#
# `(scores[:, None] + following).flatten().topk(width)` finds the best of all. Divide an index by the vocabulary's size:
# the quotient is the beam, the remainder the token. First `pool.fork(tables[parent])` for each survivor, and only then
# `pool.release` for all old tables: a parent may be the only holder of its blocks.
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
# How many blocks do eight beams hold, with a prompt of 200 tokens, 64 more for each, and blocks of 16?


# %% jupyter={"source_hidden": true}
class Copying(Pool):
    """A pool that shares nothing: a fork copies all blocks."""

    def fork(self, table):
        other = []
        self.extend(other, 0, len(table) * self.size)
        self.keys[:, other], self.values[:, other] = self.keys[:, table], self.values[:, table]
        return other


def beams(kind, prompt, width=8, count=64, size=16):
    """(the tokens, blocks held in the last step) of beam search in a pool of this kind."""
    pool, held_blocks = kind(400, size, CONFIG.layers, CONFIG.groups, CONFIG.head_size, DEVICE), []

    def step(tables, lengths, tokens):
        held_blocks.append(400 - len(pool.free))
        return step_in_blocks(MODEL, pool, tables, lengths, tokens)

    table, logits = read_prompt(pool, prompt)
    texts, _ = beam_search(pool, table, len(prompt), logits, width, count, step)
    return texts, held_blocks[-1]


# %%
(texts, shared), (same, alone) = beams(Pool, PAGE[1000:1200]), beams(Copying, PAGE[1000:1200])
report.table({"eight beams": "{}", "blocks at the end": "{}", "share": "{:.0%}"},
             [("nothing shared", alone, 1), ("shared blocks", shared, shared / alone)])  # fmt: skip
print(f"\nthe same tokens: {torch.equal(texts, same)}")

# %% [markdown]
# ## A model on several GPUs · further
#
# A model that doesn't fit on one GPU is cut as in work 17: each GPU reads its part of the weights. Attention is cut by
# heads. The projections of queries, keys and values are cut by *columns*, the output projection by *rows*, and its
# results are summed. The cache needs no messages: each rank keeps the keys and values of its heads.


# %% tags=["setup"] jupyter={"source_hidden": true}
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
# With grouped heads, one thing changes. If 8 query heads share 2 key heads, queries 0 to 3 read the first and 4 to
# 7 the second. On four ranks, ranks 0 and 1 both keep the first key head, 2 and 3 the second.
#
# ### Balise 7 · Heads on several ranks · further · about 13 min
#
# **`cut_attention(attention, ranks)`** gets this rank's copy of a `LlamaAttention` and returns it with only this rank's
# heads, in order of rank. `ranks` has `rank` and `size`. The heads follow one another, `attention.head_size` numbers
# each. Write `mine`, the slice of numbers of this rank's heads, and `held`, that of the key heads they read: the rank's
# share, or a head several ranks keep. Then write `attention.output`: a `Summed` of the `linear_part` by rows.
#
# About 5 lines.
#
# <details><summary>Hint</summary>
#
# With $h$ heads and $g$ key heads on $N$ ranks, rank $r$ has the $h / N$ heads from $r\,h / N$ on. The first of its key
# heads is number `r * g // N`, and it has `max(g // N, 1)`. Multiply by the head size to get numbers. A linear layer's
# weight is `(out, in)`: to cut by rows, choose `inputs` in `linear_part(linear, outputs, inputs)`; the given
# lines after yours show a call. `Summed(part, ranks)` adds up the results.
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
# The trained Llama, cut on each rank, writes with your `write` and your `Cache`. Neither knows about ranks.

# %% tags=["setup"] jupyter={"source_hidden": true}
GPUS = torch.cuda.device_count()
if GPUS == 1:
    os.environ["DLOJZ_LAUNCH_ON_CPU"] = "1"  # one GPU cannot carry two ranks
RANKS = (1, 2) if GPUS in (2, 3) else (1, 2, 4)


# %% jupyter={"source_hidden": true}
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


# %%
prompt, count, rows = PAGE[None, 100:140], 24, []
due = write(MODEL, prompt, count, Cache().attend).cpu()
for n in RANKS:
    results = launch.ranks(write_on_rank, copy.deepcopy(MODEL).cpu(), prompt.cpu(), count, n=n, timeout=120)
    same = min((text == due)[0, -count:].sum().item() for text, *_ in results)
    _, weights, cache, sent = results[0]
    rows.append((n, f"{same} of {count}", weights, cache, len(sent) / count, sent[-1] if sent else 0))
report.table({"ranks": "{}", "same tokens": "{}", "weights a rank": measure.human_bytes,
              "cache a rank": measure.human_bytes, "all-reduces a token": "{:.0f}",
              "bytes of each": "{}"}, rows)  # fmt: skip

# %% [markdown]
# With two key heads, four ranks each keep half of the cache: it can't be divided further. There are two all-reduces a
# layer, so small that only their latency matters. An *estimate* for 70 billion parameters in bfloat16 (80 layers, 8 key
# heads) on H100s, with 10 µs assumed for an all-reduce:


# %% jupyter={"source_hidden": true}
def show_cards(parameters=70e9, layers=80, per_message=10e-6):
    told, rows = 2 * layers * per_message, []
    for n in (2, 4, 8, 16):
        read = 2 * parameters / n / planner.H100.bandwidth
        rows.append((n, 1000 * read, 1000 * told, 1 / (read + told), max(8 // n, 1) / 8))
    report.table({"estimate, cards": "{}", "ms to read weights": "{:.1f}", "ms for messages": "{:.1f}",
                  "tokens/s at most": "{:.0f}", "cache on each": "{:.1%}"}, rows)  # fmt: skip


show_cards()

# %% [markdown]
# With each doubling, reading takes half as long, but the messages take as long as before. So servers split a model
# within one node, and run several copies.

# %% [markdown]
# ## Race: `generate` of transformers · further
#
# `generate` gets the weights of your Llama, and must write the same tokens. Without the library you see the recorded
# result.


# %% jupyter={"source_hidden": true}
def race_generate(count):
    """([(name, tokens/s)] of `write` and generate, tokens that are the same, `count`), each the best of five."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # its imports warn of future changes
    warnings.filterwarnings("ignore", message="IProgress not found")  # and ask for progress bars
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
# For each token, `generate` also builds general masks and positions, and applies stopping rules and logits
# processors.

# %% [markdown]
# ## In vLLM · further
#
# | here | in vLLM ([docs.vllm.ai](https://docs.vllm.ai), November 2026) |
# |---|---|
# | the pool | `gpu_memory_utilization` of the card, minus weights and activations |
# | paged attention | kernels that read through the table, with no gather first |
# | shared blocks | found by a *hash* of their tokens (`enable_prefix_caching`) |
# | the schedule | `max_num_seqs`, `max_num_batched_tokens`; long prompts in chunks |
# | the draft | `speculative_config`: a small model, extra heads, or n-grams of the prompt |
# | heads on ranks | `tensor_parallel_size`, within a node |
#
# If a server is too slow, ask: are passes bound by memory (then use larger batches), do requests wait for blocks (fewer
# bytes a token, more cards), or does the prompt cost most (prefix caching)?

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>A card has twice the FLOP/s and the same bandwidth. What changes for one user?</summary>
#
# Decoding one row is bound by bandwidth, so the answer comes no faster. Prefill is bound by arithmetic, so the first
# token after a long prompt comes up to twice as fast.
# </details>
#
# <details><summary>With <code>is_causal=True</code>, tests on whole prompts pass. Which small test fails?</summary>
#
# Two calls: a prompt, then one token, compared with the whole text in one call. With one query,
# <code>is_causal=True</code> shows it only the first key.
# </details>
#
# <details><summary>How much do 8-bit weights (work 22) gain for one user, and for 200?</summary>
#
# One user: up to four times as fast as float32, twice as fast as 16 bits, because reading weights takes most of the
# time. With 200, much less: keys, values and arithmetic count there, and 8-bit weights help with none of them.
# </details>
#
# ## To remember
#
# If you keep keys and values, each token is read once. A pass is then bound by memory: it reads all weights for one
# token per row. Rows share the weights, so throughput depends on how many rows fit. Keep their cache in blocks, and
# decide before every step which requests take part. None of this changes what the model writes. Prove that first, then
# measure.

# %%
tp.progress()
