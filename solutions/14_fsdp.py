# %% [markdown] tags=["slide"]
# # Fully sharded data parallelism with PyTorch · about 115 min, core 55
#
# `fully_shard` is PyTorch's ZeRO stage 3. Each rank keeps a part (*shard*) of every parameter, of its gradient and of
# the optimizer's states, and gathers a layer only while it computes with it. The call is one line. How you call it
# decides how much it saves: which modules form a group, in which dtypes they travel, what is kept and what is fetched
# again. A mistake is silent, because the losses stay right.
#
# **What you will gain.** Fewer *megabytes held by a rank* at the peak of a step, measured here on four ranks. The price
# is measured, too: megabytes sent.

# %% tags=["setup"] jupyter={"source_hidden": true}
import contextlib
import dataclasses
import functools
import random
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

from dlojz_tp import course, data, frameworks, launch, measure, planner, recorded, report, scale, todo
from dlojz_tp.models import Llama, LlamaConfig, language_loss

tp = course.open("14_fsdp")
tp

# %% tags=["setup"] jupyter={"source_hidden": true}
GPUS = torch.cuda.device_count()
FULL = scale() == "full" and GPUS >= 1
RANKS = min(4, GPUS) if FULL else 4
TIMED = RANKS if FULL else 2  # ranks of what is timed: no more than there are cores
TEXT = data.code_text()  # the source of Python's standard library, as tokens
SMALL = LlamaConfig(TEXT.vocab_size, width=128, heads=8, kv_heads=2, layers=4, max_length=64)
CONFIG = LlamaConfig(TEXT.vocab_size, width=2048, heads=16, kv_heads=8, layers=16, max_length=1024) if FULL else SMALL
LENGTH = CONFIG.max_length  # tokens of a sequence
BATCH = 4 if FULL else 2  # sequences of a step on each rank
STEPS = 20 if FULL else 4
LEARNING_RATE = 3e-4 if FULL else 1e-3
TOKENS = TEXT.train[300_000:400_000].clone()  # all that travels to the ranks
MB = 1e6

# %% [markdown] tags=["slide"]
# ## The idea
#
# A *group* is a set of parameters that travels together: one all-gather makes it whole, and one reduce-scatter
# distributes its gradients. With $\Psi$ parameters on $N$ ranks, in float32 with AdamW, a rank always holds
# $16\,\Psi/N$ bytes. To these, add the activations $A$ and the groups that are whole at the moment: the *root's*
# (everything outside the blocks), one block, and perhaps the next:
#
# $$M \;=\; \frac{16\,\Psi}{N} \;+\; 4\,(\psi_\text{root} + 2\,\psi_\text{block}) \;+\; A$$

# %% tags=["slide"] jupyter={"source_hidden": true}
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
# The model is a small decoder like Llama, in plain PyTorch. All ranks draw the same weights and see different batches.
# The baseline is plain data parallelism (DDP), which keeps everything on every rank.


# %% tags=["setup"] jupyter={"source_hidden": true}
def make_mesh():
    """All ranks in one line: a DeviceMesh of one dimension."""
    return init_device_mesh(launch.device().type, (dist.get_world_size(),))


def make_model(config=CONFIG):
    """The plain decoder on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    return Llama(config).to(launch.device())


def rank_batch(step, length=LENGTH):
    """Tokens of a step, (BATCH, length + 1), on this rank's device, different on each rank."""
    return data.batch_of_text(TOKENS, BATCH, length + 1, 1000 * step + dist.get_rank()).to(launch.device())


# %% tags=["setup"]
def train_step(model, optimizer, tokens):
    """One step. Returns the loss of this rank's batch, detached."""
    optimizer.zero_grad()
    loss = language_loss(model, tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


# %% tags=["setup"] jupyter={"source_hidden": true}
PARTS = ("parameters", "optimizer states", "gradients", "gathered", "activations")


def ring_bytes(entry, n):
    """Bytes that each of n ranks sends for one collective, with a ring. entry: one of measure.Communications."""
    factor = {"all_gather": n - 1, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}
    return factor.get(entry["name"], 0) * entry["bytes"]


def watched_step(model, optimizer, steps):
    """Run `steps`; the last counts. Returns ({part: bytes} at the peak, those after each operation, collectives)."""
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


def profiled(make):
    """On a rank: train what `make(mesh)` returns. Returns a dictionary: losses, bytes by part, collectives."""
    torch.set_num_threads(1)  # on a CPU, each rank is one core's worth
    model, optimizer = make(make_mesh())
    watched = 3 if isinstance(model, DDP) else 2  # DDP rearranges its buckets in its second step
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


def profile_all(makers):
    """On a rank: {name: profile} of each `make` in turn."""
    return {name: profiled(make) for name, make in makers.items()}


def run(*known, **makers):
    """Profile each on RANKS ranks and keep rank 0's figures in `found`; print them below those of `known` names."""
    found.update(launch.ranks(profile_all, makers, n=RANKS, timeout=300)[0])
    rows = []
    for name in [name for name in (*known, *makers) if name in found]:
        row, peak = found[name], found[name]["peak"]
        parts = [peak[part] / MB for part in PARTS]
        rows.append((name, *parts, sum(parts), row["sent"] / MB, row["gathers"], row["losses"][-1]))
    columns = {"MB at the peak": "{}"} | dict.fromkeys((*PARTS, "all", "MB sent"), "{:.1f}")
    report.table(columns | {"gathers": "{}", "loss": "{:.3f}"}, rows)


found = {}


# %%
def replicated(mesh):
    """Plain data parallelism: everything on every rank."""
    model = DDP(make_model(), gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)


print(
    f"{CONFIG.n_parameters / 1e6:.2f} million parameters, "
    f"{CONFIG.layers} × {CONFIG.block_parameters / 1e6:.2f} in blocks"
)
run(replicated=replicated)

# %% [markdown]
# Each parameter costs 16 bytes on every rank: weight, gradient and two moments.
#
# ### Balise 1 · Shard by block, then the root · about 12 min
#
# **`shard(model, mesh)`**: make one group for each of `model.blocks`, and one for all other parameters (embedding, last
# norm, head), over the ranks of `mesh`. `fully_shard` works in place: it turns each parameter into a `DTensor`, of
# which this rank keeps some rows. The names stay the same. Return the model. About 3 lines.
#
# **`prepare(model, mesh, shard, learning_rate)`**: shard with the function that is passed in (later balises pass
# others), and use the model that it returns. Make a `torch.optim.AdamW` with a weight decay of 0.1. Return
# `(model, optimizer)`. About 2 lines.
#
# <details><summary>Hint</summary>
#
# `fully_shard(module, mesh=mesh)` makes one group of all parameters in `module` **that are in no group yet**, and
# returns the module. So in which order do you call it? It also *replaces* the parameters with new ones. What must never
# see the old ones?
# </details>


# %% tags=["balise-1", "slide-mistake=root-first"]
def shard(model, mesh):
    """Shard the model over the mesh in place: a group for each of `model.blocks` and one for the rest. Returns it."""
    # BEGIN SOLUTION
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
    # END SOLUTION


def prepare(model, mesh, shard, learning_rate):
    """Shard with `shard(model, mesh)` and make AdamW for it, with weight decay 0.1. Returns (model, optimizer)."""
    # BEGIN SOLUTION
    model = shard(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    # END SOLUTION


# %%
tp.check(1, shard, prepare)

# %% [markdown]
# A frequent mistake is to call `fully_shard` once, on the whole model.

# %%
at_root = tp.predict("With one group for the whole model, what percentage of DDP's peak does a rank hold here?", ...)


# %%
def making(shard, **options):
    """A function for `profiled`: make the plain model, shard it with `shard(model, mesh, **options)`, make AdamW."""
    return lambda mesh: prepare(make_model(), mesh, functools.partial(shard, **options), LEARNING_RATE)


def shard_root_only(model, mesh):
    """The mistake: one group for everything."""
    return fully_shard(model, mesh=mesh)


run(root_only=making(shard_root_only), by_block=making(shard))
most = {name: sum(row["peak"].values()) for name, row in found.items()}
at_root.shows(
    100 * most["root_only"] / most["replicated"],
    "{:.0f} %",
    "The shards are small, but a rank also holds the whole gathered model, and activations are not sharded.",
)


# %% tags=["slide"] jupyter={"source_hidden": true}
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
    panels[0].set_ylabel("MB of live tensors, rank 0")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    plt.show()

# %% [markdown]
# With one group, the whole model is gathered and stays whole until the end of backward, when the whole gradient is in
# memory too. With a group for each block, only the root's group and one block are whole at a time. The price is in the
# columns *MB sent* and *gathers*: each block is gathered twice.
#
# ### Balise 2 · Mixed precision, a policy for each group · about 12 min
#
# A policy belongs to a group and names up to three dtypes. `param_dtype`: the shards are cast to it before they travel,
# and the layers compute in it. `reduce_dtype`: the gradients of all ranks are added up in it. `output_dtype`: the
# output of the group's module is cast to it. The shards, their gradients and the states stay float32.
#
# bfloat16 halves the bytes and keeps 8 significant bits. That is enough for products, but not for sums of many numbers:
# over all ranks, or over the vocabulary in the loss.
#
# **`shard_mixed(model, mesh)`**: make the groups of balise 1 with one policy for the blocks and another for the root
# (`mp_policy=`). Where do the two differ? About 5 lines.
#
# <details><summary>Hint</summary>
#
# `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=..., output_dtype=...)`; without `reduce_dtype`, gradients are
# added up in their own dtype. The logits leave the model through one module only. The output of a block goes to the
# next block, or to the norm and the head, which belong to the root's group and do not cast their input.
# </details>


# %% tags=["balise-2"]
def shard_mixed(model, mesh):
    """Shard like `shard`: bf16 for gathers and products, float32 for sums, updates and logits. Returns the model."""
    # BEGIN SOLUTION
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    last = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=last)
    # END SOLUTION


# %%
tp.check(2, shard_mixed)

# %%
half = tp.predict("By what factor do these policies change the bytes that a rank sends in a step?", ...)

# %%
run("by_block", mixed=making(shard_mixed))
if found["by_block"]["sent"]:  # a single GPU sends nothing
    half.shows(
        found["mixed"]["sent"] / found["by_block"]["sent"],
        "× {:.2f}",
        "The gathered weights travel in bfloat16, but the gradients still travel in float32.",
    )

# %% [markdown]
# The gathered bytes halve. Activations shrink less, because logits and loss stay float32. The shards stay as large as
# before: they are the float32 *master weights*, which cost only $1/N$ here.
#
# ### Balise 3 · Recompute activations · about 11 min
#
# Sharding does not shrink activations. Activation checkpointing does: a segment of the model keeps only its input, and
# runs forward again when backward reaches it. A block is a good segment, and not every block has to be one.
#
# **`shard_recomputed(model, mesh, every=1)`**: make segments of the blocks 0, `every`, 2·`every`, …; leave the others
# unchanged. Then make the groups of balise 1. About 5 lines.
#
# <details><summary>Hint</summary>
#
# `checkpoint_wrapper(block)` *returns a new module* around the block, and changes nothing in the model. So where do you
# store it? You can assign to an entry of `model.blocks`, as in a list. The parameters keep their names.
# </details>


# %% tags=["balise-3"]
def shard_recomputed(model, mesh, every=1):
    """Shard like `shard`; blocks 0, every, 2·every, … keep only their input and run again. Returns the model."""
    # BEGIN SOLUTION
    for index in range(0, len(model.blocks), every):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
    # END SOLUTION


# %%
tp.check(3, shard_recomputed)

# %%
once_more = tp.predict("How many more all-gathers does a step need when every block runs forward twice?", ...)

# %%
run("by_block", second_again=making(shard_recomputed, every=2), every_again=making(shard_recomputed))
once_more.shows(
    found["every_again"]["gathers"] - found["by_block"]["gathers"],
    "{:.0f}",
    "Backward gathers each block anyway, and the second forward runs while the block is whole.",
)

# %% [markdown]
# The losses are the same; these blocks run forward twice. The peak is now in backward, where one block is whole together
# with the root's group, so *gathered* grows.
#
# ### Balise 4 · What stays gathered between forward and backward · about 10 min
#
# If there is memory to spare, a block can stay whole from forward to backward. It is then gathered only once.
#
# **`shard_kept(model, mesh, kept)`**: make the groups of balise 1, but let `kept` blocks (0 to all) stay whole after
# forward. Each of them saves one all-gather, but some hold their memory longer than others. Choose those that hold it
# for the shortest time. After backward, none is whole. About 4 lines.
#
# <details><summary>Hint</summary>
#
# Backward begins where forward ends. `fully_shard(..., reshard_after_forward=...)` takes a boolean for each group: is
# it *freed* after forward? (A number means something else: shard over fewer ranks.) Mind `kept == 0`: `blocks[-0:]` is
# all blocks.
# </details>


# %% tags=["balise-4"]
def shard_kept(model, mesh, kept):
    """Shard like `shard`; `kept` blocks stay whole between forward and backward. Returns the model."""
    # BEGIN SOLUTION
    first = len(model.blocks) - kept
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=index < first)
    return fully_shard(model, mesh=mesh)
    # END SOLUTION


# %%
tp.check(4, shard_kept)

# %%
KEPT = (CONFIG.layers // 2, CONFIG.layers)
run("by_block", **{f"kept_{kept}": making(shard_kept, kept=kept) for kept in KEPT})

# %% [markdown]
# Each kept block costs 4 bytes per parameter and saves one all-gather. This pays off when the network is slow and
# memory is free.
#
# ### Balise 5 · Shards in the CPU's memory · further · about 9 min
#
# When even the shards are too large for the GPU, they can stay in the memory of the host:
#
# ```
# host   shards, updated by AdamW  ←  shards of the gradients
#        ↓ copied for each gather     ↑ copied once
# GPU    gather, forward, free, gather, backward, reduce-scatter
# ```
#
# **`shard_offloaded(model, mesh, pin)`**: make the groups; the policy is given. Page-locked memory (`pin`) lets copies
# overlap with computing and needs a GPU. It is tempting to leave the root's shards on the GPU, because they are used at
# both ends of a step. What else would stay there with them? About 3 lines.
#
# <details><summary>Hint</summary>
#
# `fully_shard(..., offload_policy=policy)`, for each group separately. AdamW's moments and the gradients stay with
# their shards: 16 bytes a parameter in all.
# </details>


# %% tags=["balise-5"]
def shard_offloaded(model, mesh, pin):
    """Shard like `shard`; keep shards, gradients, moments in CPU memory, page-locked if `pin`. Returns the model."""
    policy = CPUOffloadPolicy(pin_memory=pin)  # it pins memory by default
    # BEGIN SOLUTION
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)
    # END SOLUTION


# %%
tp.check(5, shard_offloaded)

# %% jupyter={"source_hidden": true}
LLAMA_7B = LlamaConfig(32_000, width=4096, heads=32, layers=32, max_length=2048, ffn_width=11_008)  # published sizes
if FULL:
    run("by_block", offloaded=making(shard_offloaded, pin=True))
else:
    print("Without a GPU there is nothing to measure: the shards are in the CPU's memory already.")
print("estimate: Llama 7B on 8 GPUs, a link of 25 GB/s to the host, 40 % of an H100's bf16 FLOP/s")
moved, saved = (
    3 * 4 * LLAMA_7B.n_parameters / 8,
    planner.state_bytes(LLAMA_7B.n_parameters, 8, 3, mixed_precision=False),
)
print(
    f"a step moves {moved / 1e9:.1f} GB over the link, {moved / 25e9:.2f} s; "
    f"saved on the GPU: {saved.total / 1e9:.1f} GB"
)
for sequences in (1, 4, 16):
    computing = sequences * 2048 * LLAMA_7B.flops_per_token(2048) / (0.4 * planner.H100.bfloat16)
    print(f"{sequences:>3} sequences of 2048 tokens per GPU: {computing:5.2f} s of computing")

# %% [markdown]
# With few tokens in a step the link is the bottleneck; with many, the copies overlap with computation.
#
# ## A model that is never whole
#
# So far, each rank has made the whole model and then cut it. With 70 billion parameters, 280 GB in float32, none can.
# Tensors on the **meta device** have a shape and a dtype, but no memory.

# %% tags=["setup"] jupyter={"source_hidden": true}
import tempfile
import warnings

import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore

make_plain = functools.partial(Llama, SMALL)  # on the default device, without a seed

# %% [markdown]
# ### Balise 6 · Born in shards · further · about 12 min
#
# Make the model without memory, cut it, and then allocate memory only for its shards. Write
# `build_sharded(make_plain, mesh, seed)` so that a rank never holds more than its shards and one whole block.
# `make_plain()` makes a plain model. Its method `init_weights()` fills all parameters and the rotary tables in place,
# with random numbers from this rank's generator. The memory has to be on `mesh.device_type`.
#
# The same seed and number of ranks must give the same weights. But on a CPU each rank fills its rows from its own
# generator. What happens if all ranks set the same seed? (On GPUs, `DTensor` expects one seed for all.) About 6 lines.
#
# <details><summary>Hint</summary>
#
# Call `make_plain` inside `with torch.device("meta"):`. `shard` also works on the meta device.
# `model.to_empty(device=...)` allocates memory without values for the tensors that exist *then*.
# `mesh.get_local_rank()` tells the ranks apart.
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


# %% jupyter={"source_hidden": true}
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


rows = []
for n in (2, 4):
    built = launch.ranks(bytes_to_build, cut_afterwards, born_in_shards, n=n)[0]
    rows += [(n, name, *sizes) for name, sizes in zip(("whole, then cut", "born in shards"), built)]
report.table({"ranks": "{}", "made": "{}", "peak": measure.human_bytes, "kept": measure.human_bytes}, rows)

# %% [markdown]
# ## Checkpoints of shards
#
# `torch.save` on rank 0 needs the whole model there. With `torch.distributed.checkpoint` (`dcp`), each rank writes its
# shards into one folder, and `.metadata` records which rows are where. A job with a different number of ranks reads the
# rows *it* needs.
#
# ### Balise 7 · Saved on 4 ranks, loaded on 2 · further · about 11 min
#
# The state of a training run is a nested dictionary: weights, AdamW's moments and learning rate, the step. `dcp` saves
# this dictionary, and *loads into an existing one*: it fills the tensors in place and skips everything that has no
# place there. A new AdamW has no moments yet. `get_state_dict(model, optimizer)` returns both states, with a place for
# everything.
#
# - **`save_checkpoint(folder, model, optimizer, step)`**, on all ranks: write everything into one checkpoint. About 2
#   lines.
# - **`load_checkpoint(folder, model, optimizer)`**, on *any* number of ranks, for a new model and a new optimizer: make
#   a `state` with a place for everything, and let `dcp` fill it. About 3 lines.
#
# <details><summary>Hint</summary>
#
# `dcp.save(state, checkpoint_id=folder)`, `dcp.load(state, checkpoint_id=folder)`. The given lines use the keys
# `"model"`, `"optimizer"` and `"step"`.
# </details>


# %% tags=["balise-7"]
def save_checkpoint(folder, model, optimizer, step):
    """Write model, optimizer and step into one checkpoint. Each rank writes its own shards."""
    # BEGIN SOLUTION
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": step}, checkpoint_id=folder)
    # END SOLUTION


def load_checkpoint(folder, model, optimizer):
    """Load model and optimizer in place. Each rank reads what its shards need. Returns the saved step."""
    # BEGIN SOLUTION
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    # END SOLUTION
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


# %%
tp.check(7, save_checkpoint, load_checkpoint)


# %% jupyter={"source_hidden": true}
def some_losses(model, optimizer, steps):
    """Mean losses over all ranks; a step has the same 8 sequences for any number of ranks."""
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


with tempfile.TemporaryDirectory() as folder:
    there = launch.ranks(train_and_save, folder, n=4)[0]
    files = {file.name: file.stat().st_size for file in sorted(Path(folder).iterdir())}
    here = launch.ranks(load_and_train, folder, n=2)[0]
report.table({"file": "{}", "size": measure.human_bytes}, list(files.items()))
print("losses on 4 ranks, uninterrupted:      ", " ".join(f"{loss:.6f}" for loss in there))
print("losses on 2 ranks, from the checkpoint:", " ".join(f"{loss:.6f}" for loss in here))

# %% [markdown]
# `.metadata` is written last: a folder without it is an unfinished checkpoint. So write each checkpoint into a new
# folder, and delete the previous one afterwards.
#
# ### How often to save · further
#
# A step needs all ranks, so one failure stops the job. On 16,384 GPUs, Llama 3's training failed unexpectedly 419 times
# in 54 days (arXiv 2407.21783): every 3.1 hours. On $N$ times as many, the time $M$ between failures is $N$ times
# shorter. A failure costs all work since the last checkpoint, and each checkpoint costs a time $\delta$. The best
# interval between two is Young's (1974), or Daly's (2006) if $\delta$ isn't small:
#
# $$\tau_\text{Young} = \sqrt{2\,\delta M}, \qquad \tau_\text{Daly} = \sqrt{2\,\delta M}\,\Big(1 + \tfrac13 \sqrt{\tfrac{\delta}{2M}}
# + \tfrac19\,\tfrac{\delta}{2M}\Big) - \delta$$
#
# A simulation draws failures at random. A checkpoint takes 3 minutes and a restart 10 (both assumed).


# %%
def hours_taken(work, interval, save, between, restart, seed):
    """Simulated hours until `work` hours are done and saved; failures come at random, `between` hours apart on average."""
    drawn = random.Random(seed)
    now, kept, failure = 0.0, 0.0, drawn.expovariate(1 / between)
    while kept < work:
        part = min(interval, work - kept)
        if failure >= now + part + save:
            now, kept = now + part + save, kept + part
        else:  # all work since the last checkpoint is lost
            now = failure + restart
            failure = now + drawn.expovariate(1 / between)
    return now


# %% jupyter={"source_hidden": true}
def show_intervals(save=3 / 60, restart=10 / 60, work=500):
    times, rows = (1 / 4, 1 / 2, 1, 2, 4), []
    for gpus in (1024, 4096, 16_384, 65_536):
        between = 54 * 24 / 419 * 16_384 / gpus
        young = (2 * save * between) ** 0.5
        share = save / (2 * between)
        daly = young * (1 + share**0.5 / 3 + share / 9) - save
        taken = [[hours_taken(work, daly * k, save, between, restart, seed) for seed in range(5)] for k in times]
        lost = [1 - work / (sum(each) / len(each)) for each in taken]
        rows.append((gpus, between, 60 * young, 60 * daly, *lost))
    heads = {"GPUs": "{:,}", "hours between failures": "{:.1f}", "Young, min": "{:.0f}", "Daly, min": "{:.0f}"}
    names = ("time lost at τ/4", "τ/2", "τ (Daly)", "2τ", "4τ")
    report.table(heads | dict.fromkeys(names, "{:.1%}"), rows)


show_intervals()

# %% [markdown]
# The lost time is least near $\tau$, and flat around it. A shorter $\delta$ helps: `dcp.async_save` copies the state,
# and a thread writes the copy while training goes on. Give the thread its own process group: in a common one, its
# messages mix with training's, and both hang.


# %%
def train_on_after(save, model, optimizer, folder, steps=4):
    """On a rank: (seconds until save(state, folder) returns, seconds of a step meanwhile). The files are whole at the end."""
    weights, states = get_state_dict(model, optimizer)
    measure.synchronize(launch.device())
    dist.barrier()
    start = time.perf_counter()
    writing = save({"model": weights, "optimizer": states}, folder)
    waited = time.perf_counter() - start
    for step in range(steps):
        train_step(model, optimizer, rank_batch(step, SMALL.max_length))
    measure.synchronize(launch.device())
    a_step = (time.perf_counter() - start - waited) / steps
    if hasattr(writing, "result"):
        writing.result()
    return waited, a_step


def saved_both_ways(folder):
    """On a rank: {way: what `train_on_after` measures}, the last of three rounds: the first one makes the buffers."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, optimizer = prepare(make_model(WIDER), make_mesh(), shard, LEARNING_RATE)
    train_step(model, optimizer, rank_batch(0, SMALL.max_length))
    apart, found = dist.new_group(backend="gloo"), {}
    ways = {
        "dcp.save": lambda state, place: dcp.save(state, checkpoint_id=place),
        "dcp.async_save": lambda state, place: dcp.async_save(state, checkpoint_id=place, process_group=apart),
    }
    for _ in measure.rounds(3):
        for name, save in ways.items():
            found[name] = train_on_after(save, model, optimizer, f"{folder}/{name}")
    return found


# %% jupyter={"source_hidden": true}
WIDER = dataclasses.replace(SMALL, width=1024 if FULL else 256)
with tempfile.TemporaryDirectory() as folder:
    waits = launch.ranks(saved_both_ways, folder, n=TIMED, timeout=120)[0]
columns = {"": "{}", "training waits": measure.human_seconds, "each of four steps after it": measure.human_seconds}
report.table(columns, [(name, *row) for name, row in waits.items()])

# %% [markdown]
# On a CPU the thread takes time from the steps; next to a GPU the host has cores to spare.
#
# <details><summary>A job of 512 ranks hangs. Which rank is missing?</summary>
#
# PyTorch's *flight recorder* keeps the last collectives of each process. `TORCH_FR_BUFFER_SIZE` says how many (older
# versions: `TORCH_NCCL_TRACE_BUFFER_SIZE`). With `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, each rank writes its record to a file
# when a collective times out, and `torchfrtrace` finds the one that some ranks entered and others didn't
# ([tutorial](https://docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html)).
# </details>
#
# <details><summary>A job doesn't fail, but all of its steps are 20 % slower than yesterday. How do you find the straggler?</summary>
#
# All ranks have the same step time, because each waits for the slowest. So compare how long they wait *inside* the
# collectives: a straggler arrives last and waits least. If its link is slow, its process groups are the slowest: Llama
# 3's team looked at these first (arXiv 2407.21783). Take the node out, and resume from the last checkpoint.
# </details>
#
# ## Several micro-batches a step
#
# ### Balise 8 · Accumulate, exchange once · further · about 14 min
#
# A batch that does not fit is cut into micro-batches, and their gradients add up. A rank can exchange gradients after
# every micro-batch and keep only its shard, *or* keep all gradients and exchange them once. Write the second version,
# the loop over the micro-batches. `language_loss` gives the mean of one micro-batch: what is its weight in the mean
# over all sequences? Add up this rank's mean loss in `total`. About 7 lines.
#
# **Write all of it:** `tp.open_task(8)` gives you only the name and the docstring. Make one step on uneven micro-batches
# equal to a step on all sequences, with one exchange.
#
# <details><summary>Hint</summary>
#
# `model.set_requires_gradient_sync(False)` on the root tells all modules inside it to keep their gradients, `True` to
# exchange them. `model.set_is_last_backward(False)` skips the cleanup after a backward that is not the last.
# </details>


# %% tags=["balise-8"]
def accumulate(model, micro_batches, optimizer):
    """One optimizer step that equals a step on all sequences together, with one exchange of gradients.

    model: sharded by `fully_shard`, first its blocks, then itself; it averages gradients over the ranks.
    micro_batches: this rank's list of token tensors (b_i, s + 1). The last one may have fewer sequences.
    `language_loss(model, tokens)` is the mean loss () of one micro-batch: it counts by its share of the sequences.
    Gradients of an earlier step count for nothing. Each micro-batch has its own forward and backward, one after
    another, so that only one graph is in memory.

    model.set_requires_gradient_sync(False) makes backward keep gradients, and True makes it exchange them. They are
    exchanged in the last backward alone, and a plain backward after this step exchanges again. The last backward must
    wait for its exchange. set_is_last_backward(False) skips this wait for the others; set it to True for the last.
    Returns this rank's mean loss over all its sequences: () on the device of the losses, without a graph.
    """
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


# %% jupyter={"source_hidden": true}
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


KINDS = ("all_gather", "reduce_scatter", "all_reduce")
prices = launch.ranks(prices_of, accumulate, accumulate_exchanging, n=RANKS, timeout=120)[0]
rows = [
    (name, peak, *(volume.get(kind, 0) for kind in KINDS[:2]))
    for name, (peak, volume) in zip(("one exchange", "an exchange each time"), prices)
]
report.table({"peak, then bytes handed in": "{}"} | dict.fromkeys(("peak", *KINDS[:2]), measure.human_bytes), rows)

# %% [markdown]
# One exchange saves three of four reduce-scatters, but each rank holds **all** float32 gradients until the last
# micro-batch.
#
# ## Shards within a node, replicas over nodes
#
# On 1,024 GPUs, each all-gather is a ring of 1,024 ranks over the slow links between nodes. *Hybrid* sharding cuts the
# model over the GPUs of one node and keeps a replica on each node. Between nodes, only gradient shards travel, in an
# all-reduce. The price is memory: the shards are as large as on a single node.


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
    axes.text(2.4, -0.17, "all-reduce of gradient shards", ha="center", fontsize=8)
    axes.set(xlim=(-0.2, 5.0), ylim=(-0.8, 1.6))
    axes.axis("off")
    plt.show()


draw_mesh()

# %% [markdown]
# ### Balise 9 · Hybrid sharding · further · about 8 min
#
# `shard_hybrid(model, replicas)` makes `replicas` copies of the model, each cut over `shards` neighbouring ranks on one
# node. `init_device_mesh(device_type, shape, mesh_dim_names=...)` puts the ranks into a table, row by row:
#
# ```
# shape (2, 4):   0 1 2 3         shape (4, 2):   0 1
#                 4 5 6 7                         2 3
#                                                 4 5
#                                                 6 7
# ```
#
# Over a mesh with two dimensions, `fully_shard` cuts the model along each row and keeps copies down each column. Which
# shape is right for any `replicas` and `shards`? Make the mesh, make the groups of balise 1 over it, and return the
# model. About 2 lines.
#
# <details><summary>Hint</summary>
#
# `launch.device().type` is the device type. `fully_shard` needs names for the two dimensions; you choose them. You
# already have a function that makes the groups over a mesh.
# </details>


# %% tags=["balise-9"]
def shard_hybrid(model, replicas):
    """Shard the model over each of `replicas` groups of neighbouring ranks. Returns the model."""
    shards, rest = divmod(dist.get_world_size(), replicas)
    if rest:
        raise ValueError(f"{replicas} replicas do not divide {dist.get_world_size()} ranks")
    # BEGIN SOLUTION
    mesh = init_device_mesh(launch.device().type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    return shard(model, mesh)
    # END SOLUTION


# %%
tp.check(9, shard_hybrid)


# %% jupyter={"source_hidden": true}
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


rows = [
    (replicas, 4 // replicas, kept, *(volume.get(kind, 0) for kind in KINDS))
    for replicas, (kept, volume) in zip((1, 2), launch.ranks(kept_and_sent, 1, 2, n=4)[0])
]
columns = {"replicas": "{}", "ranks for each": "{}"} | dict.fromkeys(("keeps", *KINDS), measure.human_bytes)
report.table(columns, rows)

# %% [markdown]
# Read the second row as two nodes of two ranks. Only the all-reduce travels between the nodes, and each rank hands in
# half of the gradients. Give all replicas the same weights: `fully_shard` doesn't copy them.
#
# ## DeepSpeed's ZeRO · further
#
# DeepSpeed, which introduced ZeRO, reads the stage from a JSON configuration. Where it is installed (extra
# `frameworks`), the same model trains at stages 1, 2 and 3. There are three traps. Some versions clip gradients at 1.0
# unless you set 0. An optimizer that isn't on DeepSpeed's list needs `zero_allow_untested_optimizer`. A bucket holds 500
# million numbers by default.


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


# %% jupyter={"source_hidden": true}
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
        losses, seconds, peak = launch.ranks(losses_time_memory, make, stage, n=TIMED, timeout=120)[0]
        ours = ours or losses
        worst = max(abs(a - b) for a, b in zip(ours, losses))
        assert worst < 1e-3, f"{name}: the losses differ by {worst}"
        rows[name] = seconds, peak, worst
    recorded.note("14_fsdp", "deepspeed", rows, on_cpu=True)
else:
    rows = recorded.instead("deepspeed", "14_fsdp", "deepspeed") or rows
columns = {"six steps": "{}", "step": measure.human_seconds, "peak": measure.human_bytes, "losses differ by": "{:.1e}"}
report.table(columns, [(name, *row) for name, row in rows.items()])

# %% [markdown]
# ## Race
#
# Race different groupings: one group for each block, one for each linear layer, one for everything. Plain data
# parallelism races too.


# %%
def shard_every_layer(model, mesh):
    """The other mistake: a group for each linear layer."""
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# %% jupyter={"source_hidden": true}
def race_on_ranks(makers, rounds):
    """On a rank: race one training step of each `make`."""
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
race = launch.ranks(race_on_ranks, makers, 20 if FULL else 3, n=TIMED, timeout=300)[0]
print(recorded.line("14_fsdp", "race"))
if FULL:
    recorded.note("14_fsdp", "race", {f"{TIMED} ranks": race.medians})
race

# %% [markdown]
# On a CPU, sharding costs time for messages, copies and Python calls, most of all with small groups.
#
# ## Measured again
#
# Balises 2 and 3 together, compared with where you started:


# %%
def shard_together(model, mesh):
    """Every block recomputes its activations, in bf16."""
    for index in range(len(model.blocks)):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    return shard_mixed(model, mesh)


run("replicated", "by_block", together=making(shard_together))

# %% tags=["slide"] jupyter={"source_hidden": true}
shown = [name for name in ("replicated", "root_only", "by_block", "mixed", "every_again", "together") if name in found]
if shown:
    figure, axes = plt.subplots(figsize=(8.5, 0.6 + 0.45 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    for part, colour in zip(PARTS, (SHARDS, STATES, GRADIENTS, GATHERED, OTHERS)):
        widths = [found[name]["peak"][part] / MB for name in shown]
        axes.barh(shown, widths, left=left, color=colour, label=part, height=0.65)
        left = [start + width for start, width in zip(left, widths)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.0f} MB", va="center", fontsize=9)
    axes.set(xlabel="MB of live tensors at the peak of a step, rank 0", xlim=(0, 1.12 * max(left)))
    axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name in shown])
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    plt.show()

# %% [markdown]
# ## Past this machine · further
#
# With **fake tensors**, the same code runs on ranks that don't exist and computes nothing, but counts most of a step's
# bytes. First comes a prediction that you can check here, then one for Llama 2 7B (Touvron et al., 2023) on 64 ranks,
# with one sequence of 2,048 tokens each, in float32. Runs with three and four of its identical layers give the bytes of
# all 32.


# %% jupyter={"source_hidden": true}
def peak_of_steps(live, kind, mesh, config, sequences, length, cut):
    """Most bytes of a step of a sharded model and AdamW, once the optimizer's states exist."""
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
    """The same on fake tensors, as rank 0 of a world that doesn't exist; cases: (config, sequences, length, cut).

    Several processes share the cases. Each returns {number of the case: bytes} of its own.
    """
    mine = range(dist.get_rank(), len(cases), dist.get_world_size())
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh, found = init_device_mesh(kind, (world_size,)), {}
    for number in mine:
        with FakeTensorMode(), measure.ShardBytes(fake=True) as live:
            found[number] = peak_of_steps(live, kind, mesh, *cases[number])
    return found


FOUR = LlamaConfig(vocab_size=1024, width=128, heads=8, kv_heads=2, layers=4, max_length=64)
case = (FOUR, 4, 64, shard)
kind, measured = launch.ranks(measured_peak, *case, n=2)[0]
predicted = launch.ranks(predicted_peaks, kind, 2, [case], n=1)[0][0]
print(f"four layers on two ranks, peak: measured {measured:,} bytes, predicted {predicted:,} bytes\n")


def seven_billion(layers):
    return LlamaConfig(32_000, width=4096, heads=32, layers=layers, max_length=2048, ffn_width=11_008)


states = [planner.state_bytes(LLAMA_7B.n_parameters, n, 3, mixed_precision=False).total / 1e9 for n in (1, 64)]
print(
    f"predicted: {LLAMA_7B.n_parameters / 1e9:.2f} billion parameters, "
    f"states {states[0]:.0f} GB, on 64 ranks {states[1]:.1f} GB"
)
cuts = {"as in balise 1": shard, "recomputed, balise 3": shard_recomputed}
cases = [(seven_billion(layers), 1, 2048, cut) for layers in (3, 4) for cut in cuts.values()]
first, second = launch.ranks(predicted_peaks, kind, 64, cases, n=2, timeout=200)
peaks = first | second
layers = [peaks[number + 2] - peaks[number] for number in range(len(cuts))]
rows = [(name, (peaks[k] + 29 * layers[k]) / 1e9, layers[k] / 1e9) for k, name in enumerate(cuts)]
report.table({"on 64 ranks": "{}", "peak, GB": "{:.1f}", "each layer, GB": "{:.2f}"}, rows)

# %% [markdown]
# On 64 ranks the states are small; most of the bytes are activations. Recomputation shrinks them. The libraries' own
# memory and fragmentation are not counted.

# %%
tp.progress()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Somebody shards a model with one call on the root and sees the right losses. At ten times the size, the job runs
# out of memory. What went wrong?</summary>
#
# The single group is gathered in one piece and stays whole through backward. Between steps each rank holds 1/N, but at
# the peak every rank holds the whole model, and a whole gradient too. Look at the peak, not at what is left after it.
# </details>
#
# <details><summary>With the policy of balise 2, which tensors are in bf16, and how long do they live?</summary>
#
# The gathered copies of the weights, as long as a group is whole; activations and their gradients, until backward has
# used them. Nothing in bf16 survives the step: shards, reduced gradients and moments are float32.
# </details>
#
# <details><summary>A step on 64 GPUs spends half of its time waiting for all-gathers, and a third of the memory is free. Name three
# things to try.</summary>
#
# Keep blocks whole after forward: one of the two all-gathers disappears. Put more tokens into a step: the time on the
# network stays the same and overlaps with more computing. Shard inside a node and replicate between nodes. And before
# all that: are the weights gathered in bf16?
# </details>
#
# ## To remember
#
# `fully_shard` works in groups: a group is gathered in one message, is freed as a whole, and has one policy. Shard the
# blocks first, then the root, then make the optimizer. Precision, recomputation, what stays whole and where shards
# live: each takes one argument or wrapper. You see their effect in bytes held and bytes sent, never in the loss. Next:
# a **pipeline** gives each rank *some of the blocks*.
