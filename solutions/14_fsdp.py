# %% [markdown]
# # Fully sharded data parallelism with PyTorch · about 85 min, core 35
#
# `fully_shard` is PyTorch's ZeRO stage 3: each rank keeps a part of every parameter, of its gradient and of the optimizer's
# states, and gathers a layer only while it computes with it. The call is one line. The rest is what you tell it: which
# modules form a group, in which dtypes they compute and travel, what is kept and what is fetched again, where the parts
# live. Each goes wrong silently, because the losses stay right. So you will look at **what each rank holds, and what it
# sends**.
#
# **What you will gain.** What does one rank hold of Llama 7B in float32 with AdamW? An *estimate*: arithmetic from
# published sizes, without activations. (All measured figures below are those of the machine that ran the notebook.)

# %% tags=["setup"]
import contextlib
import functools
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel as DDP

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, scale, todo
from dlojz_tp.models import Llama, LlamaConfig, language_loss

tp = course.open("14_fsdp")
tp

# %%
LLAMA_7B = LlamaConfig(32_000, width=4096, heads=32, layers=32, max_length=2048, ffn_width=11_008)  # published sizes
WHOLE_GROUPS = 4 * (LLAMA_7B.n_parameters - 30 * LLAMA_7B.block_parameters)  # bytes: two blocks and the rest, gathered
print(f"estimate: {LLAMA_7B.n_parameters / 1e9:.2f} billion parameters of 16 bytes (weight, gradient, two moments)\n")
print("ranks   every rank holds all   shards   shards and what is gathered")
for ranks in (1, 8, 64, 512):
    plain, parts = (planner.state_bytes(LLAMA_7B.n_parameters, ranks, stage, mixed_precision=False) for stage in (0, 3))
    gathered = WHOLE_GROUPS if ranks > 1 else 0
    peak = (parts.total + gathered) / 1e9
    print(f"{ranks:>5} {plain.total / 1e9:>19.0f} GB {parts.total / 1e9:>5.1f} GB {peak:>26.1f} GB")

# %% [markdown]
# A GPU of 80 GB cannot even begin with the whole. With 8 of them it fits, and what is gathered for a moment soon is more than
# what is kept. That part depends on you.
#
# Each GPU is a rank, and the ranks talk through NCCL. Without GPUs, and in cells that need more ranks than there are,
# the ranks are processes on the CPU, talk through gloo, and share the cores.

# %% tags=["setup"]
GPUS = torch.cuda.device_count()
FULL = scale() == "full" and GPUS >= 1
RANKS = min(4, GPUS) if FULL else 2
TEXT = data.code_text()  # the source of Python's standard library, as tokens
SMALL = LlamaConfig(TEXT.vocab_size, width=128, heads=8, kv_heads=2, layers=4, max_length=64)
CONFIG = LlamaConfig(TEXT.vocab_size, width=2048, heads=16, kv_heads=8, layers=16, max_length=1024) if FULL else SMALL
LENGTH = CONFIG.max_length  # tokens of a sequence
BATCH = 4 if FULL else 2  # sequences of a step on each rank
STEPS = 20 if FULL else 4
LEARNING_RATE = 3e-4 if FULL else 1e-3
TOKENS = TEXT.train[300_000:400_000].clone()  # all that travels to the ranks
MB = 1e6

# %% [markdown]
# ## The idea
#
# With $\Psi$ parameters on $N$ ranks, in float32 with AdamW, a rank holds $16\,\Psi/N$ bytes for ever. A group that computes
# is whole for a moment: the root's (embedding, last norm, head) from forward into backward, a block's only while it runs,
# and the next one may be on its way already. With the activations $A$:
#
# $$M \;=\; \frac{16\,\Psi}{N} \;+\; 4\,(\psi_\text{root} + 2\,\psi_\text{block}) \;+\; A$$
#
# In backward, the whole gradient of a group is there as well, for a moment. A group is the unit of everything: one
# all-gather makes it whole, one reduce-scatter spreads its gradients.

# %% jupyter={"source_hidden": true}
SHARDS, GATHERED, GRADIENTS, STATES, OTHERS = "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#009E73"
figure, axes = plt.subplots(figsize=(8.5, 2.9), layout="constrained")
axes.bar(0, 1.2, 17, align="edge", color=SHARDS, edgecolor="white")
axes.text(8.5, 0.6, "this rank's shards: weights, gradients, optimizer states", ha="center", va="center", color="white")
axes.bar(0, 0.9, 13.6, 1.2, align="edge", color=GATHERED, edgecolor="white")
axes.text(0.15, 1.65, "root", va="center", fontsize=9)
for k, number in enumerate([1, 2, 3, 4, 4, 3, 2, 1]):
    x = 1.4 + 1.5 * k + (0.2 if k > 3 else 0)
    axes.bar(x, 1.0, 1.3, 2.1, align="edge", color=GATHERED, edgecolor="white")
    axes.text(x + 0.65, 2.6, f"block {number}", ha="center", va="center", fontsize=8)
    axes.annotate("", (x, 3.15), (x, 3.75), arrowprops={"arrowstyle": "->", "color": "#555555"})
    if k > 3:
        axes.annotate("", (x + 1.25, 3.75), (x + 1.25, 3.15), arrowprops={"arrowstyle": "->", "color": GRADIENTS})
axes.text(1.4, 3.95, "all-gather ↓", fontsize=9, color="#555555")
axes.text(13.6, 3.95, "↑ reduce-scatter", fontsize=9, color=GRADIENTS, ha="right")
for x, text in ((4.3, "forward"), (10.5, "backward"), (15.3, "optimizer")):
    axes.text(x, -0.35, text, ha="center", va="center")
axes.axvline(7.4, color="#555555", linestyle=":")
axes.axvline(13.75, color="#555555", linestyle=":")
axes.set(xlim=(-0.1, 17.1), ylim=(-0.7, 4.5), xticks=[], yticks=[], ylabel="bytes")
axes.set_title("One step of one rank: a block is whole only while it computes", loc="left", fontsize=11)
axes.spines[["top", "right", "bottom"]].set_visible(False)
plt.show()

# %% [markdown]
# ## The baseline, measured first
#
# A small decoder of the Llama kind, in plain PyTorch: it knows nothing of ranks. All ranks draw the same weights and see
# other batches. `language_loss(model, tokens)` is the mean cross-entropy of each next token.


# %% tags=["setup"]
def make_mesh():
    """All ranks in one line: a DeviceMesh of one dimension."""
    return init_device_mesh(launch.device().type, (dist.get_world_size(),))


def make_model(config=CONFIG):
    """The plain decoder on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    return Llama(config).to(launch.device())


def rank_batch(step, length=LENGTH):
    """Tokens of a step, (BATCH, length + 1), on this rank's device, others on each rank."""
    return data.batch_of_text(TOKENS, BATCH, length + 1, 1000 * step + dist.get_rank()).to(launch.device())


# %% tags=["setup"]
def train_step(model, optimizer, tokens):
    """One step. Returns the loss of this rank's batch, detached."""
    optimizer.zero_grad()
    loss = language_loss(model, tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


# %% [markdown]
# `profiled` runs on every rank. `make(mesh)` gives a model and its optimizer. A few steps run under the counters, of which the
# last counts: the bytes of all living tensors after each operation, by what they are (what a group gathers for a moment is
# "gathered"), and every collective. Then come the steps whose losses are kept. The bytes that a rank sends are those of
# ring algorithms.


# %% tags=["setup"]
PARTS = ("parameters", "optimizer states", "gradients", "gathered", "activations")


def ring_bytes(entry, n):
    """Bytes that each of n ranks sends for one collective, with a ring. entry: of measure.Communications."""
    factor = {"all_gather": n - 1, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}
    return factor.get(entry["name"], 0) * entry["bytes"]


def watched_step(model, optimizer, steps):
    """So many steps, the last counts. Returns ({part: bytes} at the peak, those after each operation, collectives)."""
    live = measure.ShardBytes(record=True)
    for step in range(steps):
        log = measure.Communications()
        with live.track(model, optimizer), log:
            live.reset_peak()
            live.history.clear()
            optimizer.zero_grad()
            language_loss(model, rank_batch(step)).backward()
            live.track(model)  # from here on gradients count as such
            optimizer.step()
    entries = [entry for entry in log.entries() if entry["kind"] == "collective"]
    return {part: live.parts_at_peak[part] for part in PARTS}, list(live.history), entries


# %% tags=["setup"]
def profiled(make):
    """On a rank: train what `make(mesh)` gives. Losses, bytes by part, collectives: a dictionary."""
    torch.set_num_threads(1)  # on a CPU, each rank is one core's worth
    model, optimizer = make(make_mesh())
    watched = 3 if isinstance(model, DDP) else 2  # DDP arranges its buckets anew in the second
    peak, history, entries = watched_step(model, optimizer, watched)
    losses = [train_step(model, optimizer, rank_batch(step)) for step in range(watched, STEPS)]
    losses, n = torch.stack(losses).double(), dist.get_world_size()
    dist.all_reduce(losses)
    return {
        "losses": (losses / n).tolist(),
        "peak": peak,
        "history": history if dist.get_rank() == 0 else [],
        "gathers": sum(entry["name"] == "all_gather" for entry in entries),
        "sent": sum(ring_bytes(entry, n) for entry in entries),
    }


# %% tags=["setup"]
def profile_all(makers):
    """On a rank: {name: profile} of each `make` in turn."""
    return {name: profiled(make) for name, make in makers.items()}


def run(*known, **makers):
    """Profile each on RANKS ranks and keep rank 0's figures in `found`; print them below those of `known` names."""
    found.update(launch.ranks(profile_all, makers, n=RANKS, timeout=300)[0])
    print("MB at the peak    weights  optimizer  gradients  gathered  activations    all", end=" | ")
    print("MB sent  gathers   loss")
    for name in [name for name in (*known, *makers) if name in found]:
        row, peak = found[name], found[name]["peak"]
        columns = zip(PARTS, (7, 9, 9, 8, 11))
        print(f"{name:<16}", *(f"{peak[part] / MB:>{width + 1}.1f}" for part, width in columns), end=" ")
        print(f"{sum(peak.values()) / MB:>6.1f} | {row['sent'] / MB:>7.1f} {row['gathers']:>8}", end=" ")
        print(f"{row['losses'][-1]:>7.3f}")


def replicated(mesh):
    """Plain data parallelism: everything on every rank."""
    model = DDP(make_model(), gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)


found = {}

# %%
MILLION = 1e6
print(f"{CONFIG.n_parameters / MILLION:.2f} million parameters", end=", ")
print(f"of which {CONFIG.layers} × {CONFIG.block_parameters / MILLION:.2f} in blocks\n")
run(replicated=replicated)

# %% [markdown]
# Weights and two moments, 12 bytes for each parameter, and 4 for its gradient, on every rank. This is what has to shrink.

# %% [markdown]
# ### Balise 1 · Shard by block, then the root · about 8 min
#
# **`shard(model, mesh)`**: one group for each of `model.blocks`, and one for all that is left (embedding, last norm, head),
# over the ranks of `mesh`. `fully_shard` works in place: each parameter becomes a `DTensor`, of which this rank holds its
# rows, and names stay as they are. Return the model. About 3 lines.
#
# **`prepare(model, mesh, shard, learning_rate)`**: shard with the function that is given, because later balises hand in
# others, and go on with the model that it returns. Make a `torch.optim.AdamW` with a weight decay of 0.1. Return
# `(model, optimizer)`. About 2 lines.
#
# <details><summary>Hint</summary>
#
# `fully_shard(module, mesh=mesh)` makes one group of all parameters below `module` **that are in no group yet**, and returns
# the module. So in which order? And it *replaces* the parameters by new ones: what must not have looked at them before?
# </details>


# %% tags=["balise-1"]
def shard(model, mesh):
    """Shard the model over the mesh in place, a group for each of `model.blocks` and one for the rest. Returns it."""
    # BEGIN SOLUTION
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
    # END SOLUTION


def prepare(model, mesh, shard, learning_rate):
    """Shard with `shard(model, mesh)` and make AdamW for it, weight decay 0.1. Returns (model, optimizer)."""
    # BEGIN SOLUTION
    model = shard(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    # END SOLUTION


# %%
tp.check(1, shard, prepare)

# %% [markdown]
# Now what one often sees: `fully_shard` around the model, once. The losses are the same. Guess before you run the next
# cells.

# %%
at_root = tp.predict(
    "Sharded by the root alone: what percentage of plain data parallelism's peak does a rank hold, here?", ...
)


# %%
def making(shard, **options):
    """A function for `profiled`: make the plain model, shard it with `shard(model, mesh, **options)`, and AdamW."""
    return lambda mesh: prepare(make_model(), mesh, functools.partial(shard, **options), LEARNING_RATE)


def shard_root_only(model, mesh):
    """The mistake: one group for everything."""
    return fully_shard(model, mesh=mesh)


run(root_only=making(shard_root_only), by_block=making(shard))
most = {name: sum(row["peak"].values()) for name, row in found.items()}
at_root.shows(
    100 * most["root_only"] / most["replicated"],
    "{:.0f} %",
    "The shards are small, but the whole model is gathered in one piece beside them, and activations are not shared out.",
)


# %% jupyter={"source_hidden": true}
def draw_step(axes, name, title):
    """Stack the bytes of each part over one step."""
    rows = found[name]["history"]
    values = [[row.get(part, 0) / MB for row in rows] for part in PARTS]
    place = [k / len(rows) for k in range(len(rows))]
    colours = (SHARDS, STATES, GRADIENTS, GATHERED, OTHERS)
    axes.stackplot(place, values, labels=PARTS, colors=colours, linewidth=0)
    axes.set(title=title, xlabel="one step, operation by operation", xlim=(0, 1), xticks=[])


if {"replicated", "root_only", "by_block"} <= found.keys():
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.3), sharey=True, layout="constrained")
    for axes, name in zip(panels, ("replicated", "root_only", "by_block")):
        draw_step(axes, name, name.replace("_", " "))
    panels[0].set_ylabel("MB of living tensors, rank 0")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    plt.show()

# %% [markdown]
# By the root alone, the whole model is gathered in one piece and stays until backward is through; then a whole gradient
# stands beside it, before it is spread (the step near the end). By block, what is gathered is the root's group, and one
# block for a moment. ("Activations" are also temporary tensors and gradients that are not spread yet.) Two ranks only halve
# the shards; on 64 they would be a 64th, and what is gathered as large as here.
#
# The price is in the last columns: a block travels twice in a step, what stays whole travels once.
#
# ### Balise 2 · Mixed precision, told to the groups · about 5 min
#
# A policy belongs to a group. It names up to three dtypes: `param_dtype`, to which the shards are cast before they travel,
# and in which the layers compute; `reduce_dtype`, in which the gradients of all ranks are added up; `output_dtype`, to
# which is cast what the group's module returns. The shards stay float32, and so do the gradients and states beside them.
#
# bfloat16 halves what travels and what is computed with, and keeps 8 significant bits of each number. That is enough to
# multiply, and too little where many numbers are added up: over all ranks, or over the vocabulary, in the loss of the
# logits that the model returns.
#
# In **`shard_mixed(model, mesh)`** the groups of balise 1 are given. Write their policies: `policy` for each block, `last`
# for the root. Which dtypes in each, and where do the two differ? About 2 lines.
#
# <details><summary>Hint</summary>
#
# `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=..., output_dtype=...)`; what is left out stays as it comes: the sum
# is made in the gradients' dtype. The logits leave the model through one module only. What a block returns goes to
# the next block, or to the norm and the head, which belong to the root's group and cast nothing on the way in.
# </details>


# %% tags=["balise-2"]
def shard_mixed(model, mesh):
    """Shard as `shard`; compute and gather in bf16, reduce and update in float32, float32 logits. Returns the model."""
    # BEGIN SOLUTION
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # END SOLUTION
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # BEGIN SOLUTION
    last = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    # END SOLUTION
    return fully_shard(model, mesh=mesh, mp_policy=last)


# %%
tp.check(2, shard_mixed)

# %% [markdown]
# Guess before you run the next cells: the bytes that travel.

# %%
half = tp.predict("How many times as much as in float32 does a rank send in a step with these policies?", ...)

# %%
run("by_block", mixed=making(shard_mixed))
if found["by_block"]["sent"]:  # a single GPU sends nothing
    half.shows(
        found["mixed"]["sent"] / found["by_block"]["sent"],
        "× {:.2f}",
        "What is gathered travels in bfloat16, but the gradients still travel in float32.",
    )

# %% [markdown]
# Half the bytes in what is gathered. Activations fall by less, as logits and loss stay in float32. The shards have not
# shrunk: they are the float32 *master weights* of mixed precision, and here they cost $1/N$. Not everything has units
# for bf16: some processors do, and Tensor Cores from the A100 on.
#
# ### Balise 3 · Compute activations again · about 5 min
#
# Sharding does nothing for activations. Recomputation does: a segment of the model keeps only its input, and runs forward
# once more when backward comes to it. One segment for everything would save nothing, because all its activations
# would be there again at once. A block is a good segment, and not all blocks have to be one.
#
# **`shard_recomputed(model, mesh, every=1)`**: make segments of the blocks 0, `every`, 2·`every`, …; the others stay as they
# are, and all parameters keep their names, by which checkpoints find them. The groups, which are made afterwards, are given.
# About 2 lines.
#
# <details><summary>Hint</summary>
#
# `checkpoint_wrapper(block)` *returns a new module* around the block, and changes nothing in the model: who calls it?
# `model.blocks` takes an index, as a list does.
# </details>


# %% tags=["balise-3"]
def shard_recomputed(model, mesh, every=1):
    """Shard as `shard`; blocks 0, every, 2·every, … keep only their input and compute again. Returns the model."""
    # BEGIN SOLUTION
    for index in range(0, len(model.blocks), every):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    # END SOLUTION
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# %%
tp.check(3, shard_recomputed)

# %% [markdown]
# Guess before you run the next cells: each block runs forward twice in a step now.

# %%
once_more = tp.predict("How many all-gathers more does a step have when all blocks run again?", ...)

# %%
run("by_block", second_again=making(shard_recomputed, every=2), every_again=making(shard_recomputed))
once_more.shows(
    found["every_again"]["gathers"] - found["by_block"]["gathers"],
    "{:.0f}",
    "Backward gathers a block in any case, and it runs again while it is whole.",
)

# %% [markdown]
# The same losses, far fewer activations. The price is one more forward of these blocks, a third of the computing more if
# all do it. The peak is now in backward, where one block is whole beside the root's group: it shows under "gathered".
#
# ### Balise 4 · What stays gathered between forward and backward · about 5 min
#
# Each block is gathered twice in a step. If there is memory to spare, a block can stay whole from forward to backward, and
# travel once. Write **`shard_kept(model, mesh, kept)`**: groups as in balise 1, of which `kept` blocks (0 to all) stay whole
# after forward, and the others are freed. Which ones? All of them save one all-gather each, but not all of them hold their
# memory equally long: choose those that hold it for the shortest time. After backward, none is whole. The root's call is
# given. About 3 lines.
#
# <details><summary>Hint</summary>
#
# Backward begins where forward ends. `fully_shard(..., reshard_after_forward=...)` takes a truth value for each group: is it
# *freed*? (A number means something else: shard over fewer ranks.) Mind `kept == 0`: `blocks[-0:]` is all blocks.
# </details>


# %% tags=["balise-4"]
def shard_kept(model, mesh, kept):
    """Shard as `shard`; `kept` blocks stay whole between forward and backward. Returns the model."""
    # BEGIN SOLUTION
    first = len(model.blocks) - kept
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=index < first)
    # END SOLUTION
    return fully_shard(model, mesh=mesh)


# %%
tp.check(4, shard_kept)

# %%
KEPT = (CONFIG.layers // 2, CONFIG.layers)
run("by_block", **{f"kept_{kept}": making(shard_kept, kept=kept) for kept in KEPT})

# %% jupyter={"source_hidden": true}
names = {0: "by_block"} | {kept: f"kept_{kept}" for kept in KEPT}
rows = [(kept, found[name]) for kept, name in names.items() if name in found]
if len(rows) == len(names):
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9), layout="constrained")
    numbers = [kept for kept, _ in rows]
    left.plot(numbers, [row["peak"]["gathered"] / MB for _, row in rows], "o-", color=GATHERED)
    left.set(title="memory", ylabel="gathered at the peak, MB")
    right.plot(numbers, [row["sent"] / MB for _, row in rows], "o-", color="#555555")
    right.set(title="communication", ylabel="sent by a rank in a step, MB")
    for axes, what in ((left, [row["peak"]["gathered"] for _, row in rows]), (right, [row["sent"] for _, row in rows])):
        axes.set(xlabel=f"blocks kept whole, of {CONFIG.layers}", ylim=(0, 1.1 * max(what) / MB or 1), xticks=numbers)
    plt.show()

# %% [markdown]
# A straight trade: each block kept costs its 4 bytes a parameter, and saves one all-gather of them. With all blocks kept, this
# is ZeRO stage 2 in what it sends: two thirds for the blocks. It is for slow networks and memory that is left.
#
# ### Balise 5 · Shards in the CPU's memory · further · about 7 min
#
# When even the shards are too many, they can live in the memory of the host. In a step,
#
# ```
# host   shards, updated by AdamW  ←  shards of the gradients
#        ↓ copied for each gather     ↑ copied once
# GPU    gather, forward, free, gather, backward, reduce-scatter
# ```
#
# Write the groups of **`shard_offloaded(model, mesh, pin)`**; the policy is given. `pin` asks for page-locked memory, so that
# copies overlap with computing; it needs a GPU. Which groups must be offloaded? It is tempting to leave the root's
# shards (embedding, head) on the GPU, as they are large and used at both ends. What else would stay there with them? About 3
# lines.
#
# <details><summary>Hint</summary>
#
# `fully_shard(..., offload_policy=policy)`, for each group by itself. AdamW's moments and the gradients lie where their shards
# lie: 16 bytes a parameter in all.
# </details>


# %% tags=["balise-5"]
def shard_offloaded(model, mesh, pin):
    """Shard as `shard`; shards, gradients, optimizer in CPU memory, page-locked if `pin`. Returns the model."""
    policy = CPUOffloadPolicy(pin_memory=pin)  # an object; it pins unless it is told not to
    # BEGIN SOLUTION
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)
    # END SOLUTION


# %%
tp.check(5, shard_offloaded)

# %%
if FULL:
    run("by_block", offloaded=making(shard_offloaded, pin=True))
else:
    print("The shards are in the CPU's memory already: without a GPU there is nothing to measure here.")

# %% [markdown]
# What does it cost? Per step and rank, the shards go up the link to the GPU twice (forward, backward; the root's only once,
# which the estimate below leaves aside) in float32, and the gradients down once. Then the CPU updates the shard: how long does one core take here, with
# `fused=True`, in one pass over memory? All else is an *estimate*: rates are assumptions.

# %%
weights = nn.Parameter(torch.zeros(10_000_000))
weights.grad = torch.ones_like(weights)
threads, optimizer, times = torch.get_num_threads(), torch.optim.AdamW([weights], fused=True), []
torch.set_num_threads(1)
for _ in range(7):  # the first makes the states
    start = time.perf_counter()
    optimizer.step()
    times.append((time.perf_counter() - start) / weights.numel())
torch.set_num_threads(threads)
UPDATE = min(times)  # seconds of a core for a parameter
print(f"measured: {1e9 * UPDATE:.1f} s of one core for the update of a billion parameters")

# %%
LINK, SPEED = 25e9, 0.4 * planner.H100.bfloat16  # bytes/s between host and GPU, FLOP/s reached by the GPU: assumptions
SEQUENCE = 2048  # tokens
print("estimate: Llama 7B on 8 GPUs, float32 shards in host memory, bf16 compute\n")
moved = 3 * 4 * LLAMA_7B.n_parameters / 8  # bytes
print(f"over the link: {moved / 1e9:.1f} GB in a step, {moved / LINK:.2f} s; saved on the GPU: ", end="")
print(f"{planner.state_bytes(LLAMA_7B.n_parameters, 8, 3, mixed_precision=False).total / 1e9:.1f} GB")
cores = 8  # of the host for each GPU; more help only where its memory is fast enough
print(f"update of the shard on {cores} cores: {UPDATE * LLAMA_7B.n_parameters / 8 / cores:.2f} s")
for sequences in (1, 4, 16):
    computing = sequences * SEQUENCE * LLAMA_7B.flops_per_token(SEQUENCE) / SPEED
    print(f"{sequences:>3} sequences of {SEQUENCE} tokens a GPU: {computing:5.2f} s of computing")

# %% [markdown]
# With few tokens in a step the link is the bottleneck; with many it can hide behind computing, where the memory is pinned.
# The update comes on top, after backward. One trap on a GPU: clipping the gradients' norm now runs a collective on *CPU*
# tensors, which NCCL does not carry. Start the process group with both, `init_process_group("cpu:gloo,cuda:nccl")`.
# Another trap, on CPUs too: the norm of a sharded gradient is a `DTensor`. `.item()` of `p.grad.norm()`, or of what `clip_grad_norm_`
# returns for `norm_type=inf`, gives the norm of this rank's shard alone. Call `full_tensor()` first.

# %% [markdown]
# ## A model that is never whole
#
# So far each rank made the whole model and then cut it. A model of 70 billion parameters is 280 GB in float32: no rank can
# make it first. Tensors on the **meta device** have a shape and a dtype, and no memory.

# %% tags=["setup"]
import tempfile
import warnings

import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore

make_plain = functools.partial(Llama, SMALL)  # on the device that is the default one, without a seed

# %% [markdown]
# ### Balise 6 · Born in shards · further · about 9 min
#
# Without memory a model can be made whole, cut, and only then be given memory: for its shards alone. Write
# `build_sharded(make_plain, mesh, seed)` so that at no time a rank holds more than its shards and one whole block.
# `make_plain()` makes a plain model; its method `init_weights()` fills all parameters and the rotary tables in place, with
# random numbers from this rank's generator. The memory is to be on `mesh.device_type`.
#
# The seed decides the weights: the same seed and number of ranks, the same weights. But on a CPU each rank fills its rows from its
# own generator: what happens if all set the same seed? (On GPUs `DTensor` wants one seed of all.) `return model` is given. About
# 6 lines.
#
# <details><summary>Hint</summary>
#
# `with torch.device("meta"):` around the making; `shard` works on the meta device; `model.to_empty(device=...)` gives memory
# without values, to what there is *then*. `mesh.get_local_rank()` tells the ranks apart.
# </details>


# %% tags=["balise-6"]
def build_sharded(make_plain, mesh, seed):
    """Make a model that is sharded before it has memory. Returns it, filled by `init_weights`."""
    # BEGIN SOLUTION
    with torch.device("meta"):
        model = make_plain()
    shard(model, mesh)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(seed + (mesh.get_local_rank() if mesh.device_type == "cpu" else 0))
    model.init_weights()
    # END SOLUTION
    return model


# %%
tp.check(6, build_sharded)


# %%
def bytes_to_build(*makers):
    """On a rank, for each `make`: most bytes held while a sharded model is made, and bytes of its shards."""
    warnings.filterwarnings("ignore", message="DTensor random operators")
    mesh, found = make_mesh(), []
    for make in makers:
        with measure.ShardBytes() as live:
            model = make(mesh)
        found.append((live.peak, measure.shard_bytes(model)))
    return found


def cut_afterwards(mesh):
    return shard(make_model(SMALL), mesh)


def born_in_shards(mesh):
    return build_sharded(make_plain, mesh, seed=0)


for n in (2, 4):
    built = launch.ranks(bytes_to_build, cut_afterwards, born_in_shards, n=n)[0]
    for name, sizes in zip(("whole, then cut", "born in shards"), built):
        peak, kept = map(measure.human_bytes, sizes)
        print(f"{n} ranks, {name:<16} {peak:>9} at the peak, {kept:>9} kept")

# %% [markdown]
# With more ranks the first figure stays above the size of the model, the second one falls with the shards. On GPUs `DTensor`
# keeps the random numbers of shards apart by itself: with its first ones it gives all ranks the generator's state of rank 0,
# and there the seeds are to be equal. A checkpoint of a model that was trained before takes the place of
# `init_weights`; the rotary tables, which are in no checkpoint, have to be filled even so.

# %% [markdown]
# ## Checkpoints of shards
#
# `torch.save` on rank 0 needs the whole model there, and all other ranks wait. `torch.distributed.checkpoint` lets each
# rank write the shards it has, into one folder, and writes down in `.metadata` which rows lie where. A job with another
# number of ranks reads the rows *it* needs.

# %% [markdown]
# ### Balise 7 · Saved on 4 ranks, loaded on 2 · further · about 9 min
#
# The state of a training is a nested dictionary of tensors and numbers: weights, AdamW's moments and learning rate, the
# step. `dcp`, that is `torch.distributed.checkpoint`, saves one; and *loads into one that is there*: it fills the tensors in
# place, and what has no place is not read. A new AdamW has no moments yet. So who makes the places?
# `get_state_dict(model, optimizer)` returns both states, with a place for everything, and puts no parameter together.
#
# - **`save_checkpoint(folder, model, optimizer, step)`**, on all ranks: everything into one checkpoint. About 2 lines.
# - **`load_checkpoint(folder, model, optimizer)`**, on *any* number of ranks, for a new model and a new optimizer: make a
#   `state` with all places, and let `dcp` fill it. Given is the end, which hands its parts back. About 3 lines.
#
# <details><summary>Hint</summary>
#
# `dcp.save(state, checkpoint_id=folder)`, `dcp.load(state, checkpoint_id=folder)`. The keys are those that the given lines
# use: `"model"`, `"optimizer"`, `"step"`.
# </details>


# %% tags=["balise-7"]
def save_checkpoint(folder, model, optimizer, step):
    """All ranks write model, optimizer and step into one checkpoint, each its shards."""
    # BEGIN SOLUTION
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": step}, checkpoint_id=folder)
    # END SOLUTION


def load_checkpoint(folder, model, optimizer):
    """All ranks read what belongs into their shards. Returns the step that was saved."""
    # BEGIN SOLUTION
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    # END SOLUTION
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


# %%
tp.check(7, save_checkpoint, load_checkpoint)


# %%
def some_losses(model, optimizer, steps):
    """Mean losses over all ranks of steps on the same 8 sequences a step, whatever the number of ranks."""
    losses = []
    for step in steps:
        length = SMALL.max_length
        starts = torch.randint(len(TOKENS) - length, (8, 1), generator=torch.Generator().manual_seed(step))
        mine = starts[dist.get_rank() :: dist.get_world_size()]
        loss = train_step(model, optimizer, TOKENS[mine + torch.arange(length + 1)].to(launch.device()))
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def train_and_save(folder):
    warnings.simplefilter("ignore")
    model, optimizer = prepare(build_sharded(make_plain, make_mesh(), 0), None, lambda model, _: model, LEARNING_RATE)
    some_losses(model, optimizer, range(2))
    save_checkpoint(folder, model, optimizer, 2)
    return some_losses(model, optimizer, range(2, 4))


def load_and_train(folder):
    warnings.simplefilter("ignore")
    model, optimizer = prepare(build_sharded(make_plain, make_mesh(), 1), None, lambda model, _: model, 1.0)
    step = load_checkpoint(folder, model, optimizer)
    return some_losses(model, optimizer, range(step, step + 2))


# %%
with tempfile.TemporaryDirectory() as folder:
    there = launch.ranks(train_and_save, folder, n=4)[0]
    files = {file.name: file.stat().st_size for file in sorted(Path(folder).iterdir())}
    here = launch.ranks(load_and_train, folder, n=2)[0]
for name, size in files.items():
    print(f"{name:<14} {measure.human_bytes(size):>9}")
print("4 ranks went on with losses ", " ".join(f"{loss:.6f}" for loss in there))
print("2 ranks, from the checkpoint", " ".join(f"{loss:.6f}" for loss in here))

# %% [markdown]
# `.metadata` is written last: a folder without it is a checkpoint that was never finished. So give each checkpoint a folder
# of its own, and delete the one before when the new one is complete. `dcp.async_save` copies the shards and writes them
# while training goes on; its ranks agree through the CPU meanwhile, so beside NCCL it wants a backend for that, too:
# `init_process_group("cpu:gloo,cuda:nccl")`.

# %% [markdown]
# ## Several micro-batches a step
#
# A batch that does not fit is cut into micro-batches, their gradients add up, and one step follows. With DDP, `no_sync()`
# saves all exchanges but the last. Sharded, there is a choice to make: between two micro-batches a rank keeps *either*
# its part of the gradients, exchanged each time, *or* all of them, exchanged once.

# %% [markdown]
# ### Balise 8 · Accumulate, exchange once · further · about 10 min
#
# Here you write the second: `accumulate(model, micro_batches, optimizer)` makes *one* step that equals a step on all
# sequences at once. `micro_batches` is a list of token tensors `(b_i, s + 1)`; the last one may have fewer sequences, and
# `language_loss` is a mean over its own: what is each one's weight in the whole mean?
#
# Given: the number of all `sequences`, and what is before and after the loop. Write the loop: one micro-batch after the
# other, its gradients kept, and exchanged with the last one alone. Add this rank's mean loss up in `total`, detached. About
# 7 lines.
#
# <details><summary>Hint</summary>
#
# `model.set_requires_gradient_sync(False)` on the root tells all modules below to keep their gradients, `True` to exchange
# them; `model.set_is_last_backward(False)` spares them the tidying up after a backward that is not the last.
# </details>


# %% tags=["balise-8"]
def accumulate(model, micro_batches, optimizer):
    """One optimizer step on all micro-batches, with one exchange of gradients. Returns this rank's mean loss."""
    sequences = sum(len(tokens) for tokens in micro_batches)
    optimizer.zero_grad()
    total = 0.0
    # BEGIN SOLUTION
    for number, tokens in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        loss = language_loss(model, tokens) * len(tokens) / sequences
        loss.backward()
        total += loss.detach()
    # END SOLUTION
    optimizer.step()
    return total


# %%
tp.check(8, accumulate)


# %%
def accumulate_exchanging(model, micro_batches, optimizer):
    """The same for equal micro-batches, with an exchange after each."""
    optimizer.zero_grad()
    for tokens in micro_batches:
        (language_loss(model, tokens) / len(micro_batches)).backward()
    optimizer.step()


def volume_of(log):
    """{collective: bytes handed in}"""
    volume = {}
    for call in log.entries():
        volume[call["name"]] = volume.get(call["name"], 0) + call["bytes"]
    return volume


def prices_of(*steps, micro_batches=4):
    """On a rank, for each `step`: most bytes held in it, {collective: bytes handed in}."""
    batches, found = [rank_batch(k)[:1] for k in range(micro_batches)], []
    with measure.ShardBytes() as live:
        model, optimizer = prepare(make_model(), make_mesh(), shard, LEARNING_RATE)
        train_step(model, optimizer, batches[0])  # the optimizer makes its states
        for step in steps:
            optimizer.zero_grad()
            live.reset_peak()
            with measure.Communications() as log:
                step(model, batches, optimizer)
            found.append((live.peak, volume_of(log)))
    return found


prices = launch.ranks(prices_of, accumulate, accumulate_exchanging, n=RANKS, timeout=120)[0]
for name, (peak, volume) in zip(("one exchange", "an exchange each time"), prices):
    sent = ", ".join(f"{kind} {measure.human_bytes(size)}" for kind, size in sorted(volume.items()))
    print(f"{name:<22} peak of a rank {measure.human_bytes(peak):>9}; handed in: {sent}")

# %% [markdown]
# One exchange saves three of four reduce-scatters and costs memory: **all** gradients, whole and in float32, on every
# rank, until the last micro-batch. Where they do not fit, exchange each time. The all-gathers are paid for every micro-batch
# either way.

# %% [markdown]
# ## Shards within a node, replicas over nodes
#
# Over 1,024 GPUs, each all-gather of a block is a ring of 1,024 ranks through the slow links between nodes. *Hybrid*
# sharding cuts the model over the GPUs of a node only, and keeps a replica on each node. The gathers stay inside; between
# nodes travels one all-reduce of a rank's shard of the gradients. The price: shards are as large as if there were one
# node.


# %% jupyter={"source_hidden": true}
def draw_mesh():
    figure, axes = plt.subplots(figsize=(6.5, 2.3), layout="constrained")
    colours = ["#0072B2", "#A65E00"]
    for rank in range(4):
        node, part = divmod(rank, 2)
        x, y = 3 * node + part, 0
        axes.add_patch(plt.Rectangle((x, y), 0.8, 0.8, color=colours[part]))
        axes.text(x + 0.4, 0.4, f"rank {rank}\npart {part}", ha="center", va="center", color="white", fontsize=9)
    for node in range(2):
        axes.text(3 * node + 0.9, 1.25, f"node {node}: a whole replica", ha="center", fontsize=9)
        axes.annotate("", (3 * node + 1.4, 0.9), (3 * node + 0.4, 0.9), arrowprops={"arrowstyle": "<->"})
        axes.text(3 * node + 0.9, 1.0, "gather, reduce-scatter", ha="center", fontsize=8)
    for part in range(2):
        y = -0.25 - 0.35 * part
        axes.annotate("", (3.4 + part, y), (0.4 + part, y), arrowprops={"arrowstyle": "<->", "color": colours[part]})
    axes.text(2.4, -0.17, "all-reduce of gradient parts", ha="center", fontsize=8)
    axes.set(xlim=(-0.2, 5.0), ylim=(-0.8, 1.6))
    axes.axis("off")
    plt.show()


draw_mesh()

# %% [markdown]
# ### Balise 9 · Hybrid sharding · further · about 5 min
#
# `shard_hybrid(model, replicas)`: `replicas` copies of the model, each cut over `shards` neighbouring ranks, which sit on one
# node. `init_device_mesh(device_type, shape, mesh_dim_names=...)` lays the ranks into a table, row by row:
#
# ```
# shape (2, 4):   0 1 2 3         shape (4, 2):   0 1
#                 4 5 6 7                         2 3
#                                                 4 5
#                                                 6 7
# ```
#
# Over such a mesh, `fully_shard` cuts along each row, and copies down each column. Which table is that of two nodes with four
# GPUs each? Which shape is it for any `replicas` and `shards`? Make the mesh, make the groups of balise 1 over it, and
# return the model. The refusal of a number that does not divide the ranks is given. About 2 lines.
#
# <details><summary>Hint</summary>
#
# `launch.device().type` is the kind of device. `fully_shard` wants the two dimensions to have names, which you choose. You
# have a function that makes the groups over a mesh.
# </details>


# %% tags=["balise-9"]
def shard_hybrid(model, replicas):
    """Shard the model over groups of neighbouring ranks, `replicas` of them. Returns the model."""
    shards, rest = divmod(dist.get_world_size(), replicas)
    if rest:
        raise ValueError(f"{replicas} replicas do not divide {dist.get_world_size()} ranks")
    # BEGIN SOLUTION
    mesh = init_device_mesh(launch.device().type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    return shard(model, mesh)
    # END SOLUTION


# %%
tp.check(9, shard_hybrid)


# %%
def kept_and_sent(*numbers):
    """On a rank, for each number of replicas: bytes kept between steps, {collective: bytes handed in} of a step."""
    found = []
    for replicas in numbers:
        model = make_model(SMALL)
        model = shard(model, make_mesh()) if replicas == 1 else shard_hybrid(model, replicas)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        with measure.Communications() as log:
            train_step(model, optimizer, rank_batch(0, SMALL.max_length))
        optimizer.zero_grad()
        found.append((measure.shard_bytes(model, optimizer), volume_of(log)))
    return found


for replicas, (kept, volume) in zip((1, 2), launch.ranks(kept_and_sent, 1, 2, n=4)[0]):
    sent = ", ".join(f"{kind} {measure.human_bytes(size)}" for kind, size in sorted(volume.items()))
    ranks = f"replicas {replicas}, ranks for each {4 // replicas}"
    print(f"{ranks}: keeps {measure.human_bytes(kept):>9}; hands in {sent}")

# %% [markdown]
# Read the second line as two nodes of two ranks: the gathers and the reduce-scatters stay on a node, and the all-reduce,
# the only message between nodes, carries half the gradients. `fully_shard` copies nothing between replicas at the start:
# they must be built with the same numbers.

# %% [markdown]
# ## From this machine to billions
#
# Most bytes of a step can be known without a GPU and without the memory: with **fake tensors** the very same code runs,
# `fully_shard`, autograd and AdamW included, in a group of ranks that are not there, and nothing is computed. First a
# prediction where it can be checked: four layers on two ranks.


# %%
def peak_of_steps(live, kind, mesh, config, sequences, length, cut):
    """Most bytes of a step of a sharded model and AdamW, the optimizer's states being there already."""
    warnings.simplefilter("ignore")
    with torch.device(kind):
        model, optimizer = prepare(Llama(config), mesh, cut, LEARNING_RATE)
        tokens = torch.zeros(sequences, length + 1, dtype=torch.long)
    for _ in range(2):
        live.track(model, optimizer, tokens).reset_peak()
        train_step(model, optimizer, tokens)
    return live.peak


def measured_peak(*case):
    kind, mesh = launch.device().type, make_mesh()
    with measure.ShardBytes() as live:
        return kind, peak_of_steps(live, kind, mesh, *case)


def predicted_peaks(kind, world_size, cases):
    """The same on fake tensors, as rank 0 of a world that is not there; cases: (config, sequences, length, cut).

    Several processes take turns at the cases: {number of the case: bytes}.
    """
    mine = range(dist.get_rank(), len(cases), dist.get_world_size())
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh, found = init_device_mesh(kind, (world_size,)), {}
    for number in mine:
        with FakeTensorMode(), measure.ShardBytes(fake=True) as live:
            found[number] = peak_of_steps(live, kind, mesh, *cases[number])
    return found


# %%
FOUR = LlamaConfig(vocab_size=1024, width=128, heads=8, kv_heads=2, layers=4, max_length=64)
case = (FOUR, 4, 64, shard)
kind, measured = launch.ranks(measured_peak, *case, n=2)[0]
predicted = launch.ranks(predicted_peaks, kind, 2, [case], n=1)[0][0]
print(f"peak of a rank: measured {measured:,} bytes, predicted {predicted:,} bytes")

# %% [markdown]
# Then a model that fits nowhere here: the shape of Llama 2 7B (Touvron et al. 2023), 6.7 billion parameters on 64 ranks,
# one sequence of 2,048 tokens each, in float32. All its layers are alike: past the first few, each adds the same bytes.
# So three and four layers tell what 32 need.


# %%
def seven_billion(layers):
    return LlamaConfig(32_000, width=4096, heads=32, layers=layers, max_length=2048, ffn_width=11_008)


whole = seven_billion(32).n_parameters
states = planner.state_bytes(whole, 64, 3, mixed_precision=False).total
print(f"predicted: {whole / 1e9:.2f} billion parameters on 64 ranks, states by formula {states / 1e9:.1f} GB a rank")
cuts = {"as in balise 1": shard, "recomputed, balise 3": shard_recomputed}
cases = [(seven_billion(layers), 1, 2048, cut) for layers in (3, 4) for cut in cuts.values()]
first, second = launch.ranks(predicted_peaks, kind, 64, cases, n=2, timeout=200)
peaks = first | second
for number, name in enumerate(cuts):
    layer = peaks[number + 2] - peaks[number]
    print(f"{name:<22} peak {(peaks[number] + 29 * layer) / 1e9:5.1f} GB: {layer / 1e9:.2f} GB for each layer")

# %% [markdown]
# Sharding makes the states small, not the activations: on 64 ranks they are what is left, and recomputation (or cutting
# layers and sequences themselves, as pipeline and tensor parallelism do) is what helps. The rest is the group that is
# gathered, and the head with its logits. Not counted here: the library's own memory, fragments in the allocator, and a
# GPU's fused kernels, which keep less than the CPU's.

# %% [markdown]
# ## `torch.compile` on top · further
#
# Compile each **block**, then shard. The hooks that gather and reshard are Python, and a graph cannot go through them: a
# compiled block lies between two of them and has no break inside. Equal blocks share one graph. Here a stand-in for the
# compiler counts the graphs that it is handed.


# %%
def compiled_graphs(whole):
    """On a rank: the number of operations in each graph that torch.compile captures in a step."""
    warnings.simplefilter("ignore")
    torch.compiler.reset()  # nothing is known from the run before
    graphs = []

    def counting(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = Llama(FOUR).to(launch.device())
    for block in [] if whole else model.blocks:
        block.compile(backend=counting)
    shard(model, make_mesh())
    if whole:
        model.compile(backend=counting)
    train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2, 17, dtype=torch.long, device=launch.device())
    )
    return graphs


def both_ways():
    return {"each block": compiled_graphs(whole=False), "the whole model": compiled_graphs(whole=True)}


for name, graphs in launch.ranks(both_ways, n=1)[0].items():
    print(f"compiled {name}: graphs with {graphs} operations")

# %% [markdown]
# One graph either way: eight or eighty equal blocks are compiled once. Of the whole model, too, only the block was
# captured; what stands around the hooks is left to Python.


# %%
def race_compiled():
    models = {"plain": make_model(), "blocks compiled": make_model()}
    for block in models["blocks compiled"].blocks:
        block.compile()
    steps = {}
    for name, model in models.items():
        optimizer = prepare(model, make_mesh(), shard, LEARNING_RATE)[1]
        steps[name] = functools.partial(train_step, model, optimizer, rank_batch(0))
    return measure.race(steps, repeats=10, warmup=2, calls=1, device=launch.device())


if FULL:
    print(launch.ranks(race_compiled, n=RANKS, timeout=400)[0])
else:
    print("not raced here: compiling one block takes longer than this notebook may")

# %% [markdown]
# ## DeepSpeed's ZeRO · further
#
# The library that brought ZeRO asks for the stage in a JSON configuration. Same model, same batches, same AdamW; where
# `deepspeed` is installed (extra `frameworks`) the next cells train at stages 1, 2 and 3 beside
# `fully_shard`, and demand equal losses (to 1e-3). Three traps: some versions clip at 1.0 unless you set it to 0; an
# optimizer that is not on its list (Adam and AdamW are) needs `zero_allow_untested_optimizer`; and its buckets are for
# billions, 500 million numbers each, unless you say less.


# %%
def with_deepspeed(stage):
    deepspeed = frameworks.quiet_deepspeed()
    model, bucket = make_model(), CONFIG.block_parameters
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens):
        loss = language_loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def with_fully_shard(_stage):
    return functools.partial(train_step, *prepare(make_model(), make_mesh(), shard, LEARNING_RATE))


# %%
def losses_time_memory(make, stage, steps=6):
    """On a rank: losses, median seconds of a step, most bytes held in a step."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    losses, seconds = [], []
    with measure.ShardBytes() as live:
        step = make(stage)
        losses += [step(rank_batch(k)).item() for k in range(2)]
        live.reset_peak()
        losses.append(step(rank_batch(2)).item())
    for k in range(3, steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(rank_batch(k)).item())
        seconds.append(time.perf_counter() - start)
    return losses, sorted(seconds)[len(seconds) // 2], live.peak


rows = {}
if frameworks.here("deepspeed"):
    runs = {"fully_shard": (with_fully_shard, 3)} | {f"DeepSpeed, stage {s}": (with_deepspeed, s) for s in (1, 2, 3)}
    ours = None
    for name, (make, stage) in runs.items():
        losses, seconds, peak = launch.ranks(losses_time_memory, make, stage, n=RANKS, timeout=120)[0]
        ours = ours or losses
        worst = max(abs(a - b) for a, b in zip(ours, losses))
        assert worst < 1e-3, f"{name}: the losses differ by {worst}"
        rows[name] = seconds, peak, worst
    recorded.note("14_fsdp", "deepspeed", rows, on_cpu=True)
else:
    rows = recorded.instead("deepspeed", "14_fsdp", "deepspeed") or rows
for name, (seconds, peak, worst) in rows.items():
    print(
        f"{name:<20} step {measure.human_seconds(seconds):>9}, peak {measure.human_bytes(peak):>9}, losses differ by {worst:.1e}"
    )

# %% [markdown]
# ## Measured again
#
# What one rank holds at the peak of a step, for each thing that you told `fully_shard`, in the one picture that you began with.

# %% jupyter={"source_hidden": true}
shown = [name for name in ("replicated", "root_only", "by_block", "mixed", "every_again") if name in found]
if shown:
    figure, axes = plt.subplots(figsize=(8.5, 0.6 + 0.45 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    for part, colour in zip(PARTS, (SHARDS, STATES, GRADIENTS, GATHERED, OTHERS)):
        widths = [found[name]["peak"][part] / MB for name in shown]
        axes.barh(shown, widths, left=left, color=colour, label=part, height=0.65)
        left = [start + width for start, width in zip(left, widths)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.0f} MB", va="center", fontsize=9)
    axes.set(xlabel="MB of living tensors at the peak of a step, rank 0", xlim=(0, 1.12 * max(left)))
    axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name in shown])
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    plt.show()

# %% [markdown]
# ## Race
#
# The native API is what you have used all along. So the race is between ways to use it: your groups by block, one group
# for every linear layer, one for everything, and plain data parallelism, each step in turn in the same processes.


# %%
def shard_every_layer(model, mesh):
    """The other mistake: a group for each linear layer."""
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def race_on_ranks(makers, rounds):
    """On a rank: the steps of each, in turn."""
    torch.set_num_threads(1)
    mesh, tokens, steps = make_mesh(), rank_batch(0), {}
    for name, make in makers.items():
        steps[name] = functools.partial(train_step, *make(mesh), tokens)
    return measure.race(steps, repeats=rounds, warmup=1, calls=1, device=launch.device())


makers = {
    "by block": making(shard),
    "every layer": making(shard_every_layer),
    "root only": making(shard_root_only),
    "replicated": replicated,
}
race = launch.ranks(race_on_ranks, makers, 20 if FULL else 3, n=RANKS, timeout=300)[0]
print(recorded.line("14_fsdp", "race"))
if FULL:
    recorded.note("14_fsdp", "race", {f"{RANKS} ranks": race.medians})
race

# %% [markdown]
# On a CPU sharding buys no time: it costs some, for messages, copies and bookkeeping in Python, which is why the groups
# must not be small. What it buys is memory, and with it a larger model or batch. On GPUs, gathering the next block runs
# beside computing this one: how many tokens hide it, the next cell estimates.
#
# ## Past this machine · further
#
# How many ranks does a model need, and how many tokens must each of them have in a step, so that computing hides the network?
# The next cell is an *estimate*: weights travel in bf16 and gradients in float32, as in balise 2, every block is recomputed,
# a GPU has 80 GB, computes 400 TFLOP/s, sends 300 GB/s to the others of its node of 8, and 25 GB/s to other nodes,
# through a network card of its own. (NCCL runs rings through all cards of a node at once. Here the time inside the nodes
# and the time between them are added, so it can do better.) These rates are assumptions. Activations are not counted.

# %%
MODELS = {
    "7B": LLAMA_7B,
    "13B": LlamaConfig(32_000, width=5120, heads=40, layers=40, max_length=2048, ffn_width=13_824),
    "70B": LlamaConfig(32_000, width=8192, heads=64, kv_heads=8, layers=80, max_length=4096, ffn_width=28_672),
}
INSIDE, BETWEEN = planner.Link(5e-6, 300e9), planner.Link(10e-6, 25e9)  # latencies in seconds, bytes a second


def network_seconds(model, ranks):
    """Of a step: a block is gathered twice, the root once, in bf16; gradients are spread in float32."""
    total, root = 0.0, model.n_parameters - model.layers * model.block_parameters
    for groups, numbers, gathers in ((model.layers, model.block_parameters, 2), (1, root, 1)):
        place = ranks // 8, 8, INSIDE, BETWEEN
        gathering = gathers * planner.hierarchical_all_gather(2 * numbers, *place)
        total += groups * (gathering + planner.hierarchical_reduce_scatter(4 * numbers, *place))
    return total


# %%
print("estimate\n")
print("model   GPUs   shards   whole for a moment   fits 80 GB   network in a step   tokens a GPU to hide it")
for name, model in MODELS.items():
    for ranks in (8, 64, 512):
        shards = planner.state_bytes(model.n_parameters, ranks, 3, mixed_precision=False).total  # float32 masters
        whole = 2 * (model.n_parameters - (model.layers - 2) * model.block_parameters)  # root and two blocks, bf16
        network = network_seconds(model, ranks)
        tokens = network * SPEED / (4 / 3 * model.flops_per_token(2048))
        print(f"{name:>5} {ranks:>6} {shards / 1e9:>5.1f} GB {whole / 1e9:>17.1f} GB", end=" ")
        print(f"{'yes' if shards + whole < 80e9 else 'no':>12} {network:>17.2f} s {tokens:>25,.0f}")

# %% [markdown]
# Between nodes the network's time grows slowly with the number of ranks, and not at all with the tokens: the weights travel
# twice, and their gradients weigh as much again. Both it and the computing grow with the model, so the tokens needed hardly
# depend on the model either. The cure is more tokens a GPU (a larger batch, which has its own price), a sharding group that stays inside a node (hybrid
# sharding), or cutting the model in another way besides.

# %%
tp.progress()

# %% [markdown]
# ## Three questions
#
# <details><summary>Somebody shards a model with one call on the root, sees the losses of the single process, and is content. The job dies of
# memory at ten times the size. What was overlooked?</summary>
#
# One group is gathered in one piece and stays whole until backward is through. Between steps each rank holds 1/N, but at the
# peak every rank holds the whole model, and in backward a whole gradient too. Look at the peak, not at what is left after it.
# </details>
#
# <details><summary>With the policy of balise 2, which tensors are in bf16, and how long do they live?</summary>
#
# The gathered copies of the weights, for as long as a group is whole, and activations and their gradients, until backward
# has used them. Nothing in bf16 survives the step: shards, reduced gradients and moments are float32.
# </details>
#
# <details><summary>A step on 64 GPUs spends half of its time waiting for all-gathers, and a third of the memory is free. Name three
# things to try.</summary>
#
# Keep blocks whole after forward (one of the two all-gathers goes). More tokens in a step: the network's time stays,
# and hides behind more computing. (Recomputation switched off takes the free memory too, but saves computing, not
# waiting: there is less to hide behind.) Shard inside a node and replicate between nodes. And before all that: are the
# weights gathered in bf16?
# </details>
#
# ## To remember
#
# `fully_shard` works in groups: what is in one is gathered in one message, is whole at the same time, and has one policy. Blocks
# first, then the root, then the optimizer. Precision, recomputation, what stays whole, where shards live, when gradients are
# exchanged and over which ranks: each is one argument, and each is seen in bytes held and bytes sent, never in the loss. A
# model begins on the meta device, and its checkpoint belongs to no number of ranks. Next: when blocks on all ranks are still
# too much traffic, give each rank *some of the blocks*: the pipeline.
