# %% [markdown] tags=["slide"]
# # Hybrid parallelism: three dimensions, and the best compromise · about 100 min, core 50
#
# You have cut the batch (08, 09), the optimizer states (13, 14), the stack of layers (15, 16) and the layers themselves
# (17). Now you combine three of these cuts in one training step, with the same result as on one process, and search for
# the best **grid**: how many ranks each cut gets.
#
# **What you will gain.** Memory, counted on eight ranks here. And time, *estimated* for a model of 175 billion
# parameters on 1,024 H100s: with the worst grid that fits, a step takes 20 times as long as with the best.

# %% tags=["setup"] jupyter={"source_hidden": true}
import functools
import itertools
import logging
import math
import os
import time
import warnings
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dlojz_tp import course, launch, measure, planner, report, todo
from dlojz_tp.models import Transformer, TransformerConfig, language_loss
from dlojz_tp.parallel import Axis, Entrance, Exit, Mesh, SlicedBlock, Stage, run_pipeline

tp = course.open("19_hybrid_parallelism")
tp

# %% tags=["slide"] jupyter={"source_hidden": true}
GPT3, H100S = planner.GPT(12288, 96, 96), planner.Cluster(planner.H100)  # sequences of 2,048 tokens; nodes of 8
LEAN = {"zero": 1, "recomputation": "full"}
USABLE = 0.9 * planner.H100.memory / 1e9  # GB
best, *_, worst = (plan.layout for plan in planner.search(GPT3, H100S, 1024, 2048, kept_free=0.1))
WAYS = {
    "data alone": planner.Layout(data=1024, micro_batches=2, recomputation="full"),
    "data alone, ZeRO 3": planner.Layout(data=1024, micro_batch=2, zero=3, recomputation="full"),
    "tensor in a node, and data": planner.Layout(8, data=128, micro_batches=16, sequence_parallel=True, **LEAN),
    "pipeline, and data": planner.Layout(pipeline=32, data=32, micro_batches=64, **LEAN),
    "all three, the worst that fits": worst,
    "all three, the best": best,
}
print("estimate: 175 billion parameters, 2,048 sequences a step, 1,024 H100s of 80 GB")
rows = []
for way, one in WAYS.items():
    size, grid = planner.rank_memory(GPT3, one).total / 1e9, f"{one.tensor} × {one.pipeline} × {one.data}"
    rows.append([way, grid, size, planner.step_time(GPT3, one, H100S).total if size < USABLE else None])
report.table({"": "{}", "tensor × pipeline × data": "{}", "GB a GPU": "{:,.0f}", "seconds a step": "{:.1f}"}, rows)
print("—: does not fit")

# %% tags=["setup"] jupyter={"source_hidden": true}
if 0 < torch.cuda.device_count() < 8:
    os.environ[launch.place.ON_CPU] = "1"  # for all launches: no table mixes GPU and CPU
SMALL = TransformerConfig(vocab_size=512, width=128, heads=8, layers=4, max_length=32, tied_head=True)
BATCH = 16  # sequences of a step


def token_batch(step=0, length=SMALL.max_length):
    """Tokens (BATCH, length + 1) of a step, on this rank's device, the same on all ranks."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randint(SMALL.vocab_size, (BATCH, length + 1), generator=drawn).to(launch.device())


# %% [markdown] tags=["slide"]
# ## The idea
#
# Each rank has three coordinates. With $t$ tensor ranks, $p$ stages and $d$ data ranks, $N = t\,p\,d$, and
#
# $$\text{rank} = (\text{stage} \cdot d + \text{data}) \cdot t + \text{tensor}.$$
#
# Neighbouring ranks differ in their tensor coordinate, because tensor ranks exchange the most and need the fastest
# links.
#
# | axis | its ranks divide | what travels | how often |
# |---|---|---|---|
# | tensor | each layer | activations, 4 all-reduces | in each layer, for each micro-batch |
# | pipeline | the layers | an activation and its gradient | at each cut, for each micro-batch |
# | data | the batch | the gradients of $1/(t\,p)$ of the model | once a step |


# %% tags=["slide"] jupyter={"source_hidden": true}
def draw_mesh(p=2, d=2, t=2):
    colours = ("#9ECAE1", "#FDD0A2", "#A1D99B", "#DADAEB")
    _, ax = plt.subplots(figsize=(8, 3.3), layout="constrained")
    for rank in range(p * d * t):
        stage, data, tensor = rank // (d * t), rank // t % d, rank % t
        x, y, at = 3.2 * stage + 1.1 * tensor, -1.5 * data, -0.15 if data else 0.95
        ax.add_patch(plt.Rectangle((x, y), 1, 0.8, facecolor=colours[2 * stage + tensor], edgecolor="black"))
        ax.text(x + 0.5, y + 0.4, f"rank {rank}", ha="center", va="center", fontsize=10)
        if tensor == 0:
            ax.annotate(
                "", (x + 1.55, y + at), (x + 0.5, y + at), arrowprops={"arrowstyle": "<->", "color": "C0", "lw": 2}
            )
            if stage + 1 < p:
                ax.annotate(
                    "", (x + 3.2, y + 0.4), (x + 2.1, y + 0.4), arrowprops={"arrowstyle": "<->", "color": "C2", "lw": 2}
                )
        if data + 1 < d:
            ax.annotate("", (x + 0.5, y - 0.7), (x + 0.5, y), arrowprops={"arrowstyle": "<->", "color": "C1", "lw": 2})
    for k in range(p):
        ax.text(3.2 * k + 1.05, 1.3, f"stage {k}", ha="center", fontsize=11)
    for k, rows in enumerate(("rows 0–7", "rows 8–15")):
        ax.text(-0.15, 0.4 - 1.5 * k, f"data {k}\n{rows}", ha="right", va="center", fontsize=10)
    for k, (words, colour) in enumerate((("tensor", "C0"), ("pipeline", "C2"), ("data", "C1"))):
        ax.text(5.6, 0.4 - 0.55 * k, f"↔ {words}", color=colour, fontsize=11, va="center")
    ax.set(xlim=(-1.3, 6.8), ylim=(-1.6, 1.6), title="Eight ranks as 2 × 2 × 2: same colour, same parameters")
    ax.axis("off")
    plt.show()


draw_mesh()

# %% [markdown]
# ## The baseline
#
# One process trains a small model. It holds 16 bytes a parameter: weight, gradient and AdamW's two moments.


# %% jupyter={"source_hidden": true}
def one_process(config=SMALL, steps=3):
    """On a rank: [(loss, norm of the gradient, seconds)] of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # without a GPU, a core stands for a device
    model, found = Transformer(config).to(launch.device()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        tokens, begin = token_batch(step, config.max_length), time.perf_counter()
        optimizer.zero_grad()
        loss = language_loss(model, tokens)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        found.append((loss.item(), norm.item(), time.perf_counter() - begin))
    return found


# %%
baseline = launch.ranks(one_process, n=1, timeout=60)[0]
n = sum(p.numel() for p in Transformer(SMALL).parameters())
print(f"one process: {n:,} parameters, {16 * n / 1e6:.1f} MB; losses", *(f"{loss:.5f}" for loss, _, _ in baseline))

# %% [markdown]
# ### Balise 1 · A mesh of ranks · about 13 min
#
# A mesh gives each rank a **place**, one coordinate per axis, like the digits of a number. `sizes` says how many ranks
# each axis has, the outermost axis first. In `{"pipeline": 2, "data": 3, "tensor": 4}`:
#
# ```
# rank 17 = (1 · 3 + 1) · 4 + 1        pipeline 1, data 1, tensor 1
# ```
#
# - `place_of(rank, sizes)` reverses the given `rank_at`. Fill `place`. In the end, `left` must hold what remains: 0 if
#   the mesh has this rank.
# - A **group** consists of the ranks that differ in some axes and agree in all others. `groups(axes, sizes)` returns
#   all groups for a list of `axes`, as lists of ascending ranks. Fill `found`, whose keys are what the ranks of a group
#   have in common.
#
# <details><summary>Hint</summary>
#
# `divmod(17, 10)` is `(1, 7)`: what is left, then the last digit. For the groups, go through all ranks. The key is a
# tuple of the coordinates that are *not* in `axes`, and `found.setdefault(key, []).append(rank)` collects the ranks.
# </details>


# %% tags=["balise-1"]
def place_of(rank, sizes):
    """The coordinates of a rank: {axis: number}. sizes: {axis: ranks}, outermost first."""
    place, left = {}, rank
    # BEGIN SOLUTION
    for axis in reversed(sizes):
        left, place[axis] = divmod(left, sizes[axis])
    # END SOLUTION
    if left:  # below 0 for a negative rank
        raise ValueError(f"a mesh of {sizes} has no rank {rank}")
    return {axis: place[axis] for axis in sizes}


def rank_at(place, sizes):
    """The rank at these coordinates."""
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + place[axis]
    return rank


def groups(axes, sizes):
    """All groups of ranks that differ in `axes` only: a list of lists of ranks."""
    found = {}
    # BEGIN SOLUTION
    for rank in range(math.prod(sizes.values())):
        others = tuple(number for axis, number in place_of(rank, sizes).items() if axis not in axes)
        found.setdefault(others, []).append(rank)
    # END SOLUTION
    return list(found.values())


# %%
tp.check(1, place_of, rank_at, groups)

# %% [markdown]
# The order of the axes is a choice. With the first table's best grid and nodes of 8, how much crosses the network?
# (*Estimates*: ring collectives, activations in 2 bytes, gradients in 4.)

# %% jupyter={"source_hidden": true}
GRID = {"pipeline": 8, "data": 32, "tensor": 4}
TOKENS = 2048 * 2048 // GRID["data"]  # of a data rank, in a step
SENT = {
    "pipeline": 2 * TOKENS * 12288 * 2 // GRID["tensor"],  # an activation, a gradient; each tensor rank sends its part
    "data": 2 * 31 / 32 * 4 * GPT3.n_parameters / (4 * 8),  # all-reduce of a rank's gradients
    "tensor": 4 * 96 / 8 * 2 * 3 / 4 * TOKENS * 12288 * 2,  # four all-reduces in each of its layers
}


def away(axis, sizes, node=8):
    """The share of neighbours in the axis's groups that are in different nodes."""
    pairs = [(a, b) for group in groups([axis], sizes) for a, b in zip(group, group[1:])]
    return sum(a // node != b // node for a, b in pairs) / len(pairs)


rows = []
for order in itertools.permutations(GRID):
    shares = {axis: away(axis, {name: GRID[name] for name in order}) for axis in GRID}
    rows.append([", ".join(order), *shares.values(), sum(SENT[axis] * share for axis, share in shares.items()) / 1e9])
print("share of neighbours in different nodes, by axis; GB that a GPU sends over the network in a step")
report.table({"outermost … innermost": "{}"} | dict.fromkeys(GRID, "{:.0%}") | {"GB": "{:.0f}"}, rows)

# %% [markdown]
# With the tensor axis anywhere but innermost, the network carries several times as much.
#
# From here on, a rank has a `Mesh`: the axes `mesh.tensor`, `mesh.data` and `mesh.pipeline` have `rank` (this rank's
# coordinate), `size` and `group` (for `dist.all_reduce(…, group=…)`). `mesh.ends` is the pair of the first and last
# stages.


# %% tags=["setup"]
def joined(all_groups):
    """Create all groups (every rank calls this). Returns the `Axis` of this rank's group, None if it is in none."""
    mine = None
    for members in all_groups:
        group = dist.new_group(members)
        mine = Axis(group) if dist.get_rank() in members else mine
    return mine


def make_mesh(sizes):
    """This rank's groups in a mesh of {"pipeline": p, "data": d, "tensor": t}; the axes may come in any order."""
    axes = {axis: joined(groups([axis], sizes)) for axis in sizes}
    return Mesh(**axes, ends=joined([sorted({one[0], one[-1]}) for one in groups(["pipeline"], sizes)]))


# %% [markdown]
# ### Balise 2 · One step on three axes · about 15 min
#
# From practical works 15 and 17, you have `SlicedBlock(block, ranks)`, which cuts a block over the ranks of an axis,
# and `Entrance` and `Exit`, the embedding and the head. `run_pipeline` goes forward and backward through all stages and
# leaves in `p.grad` the gradient of the mean loss of the rows *it gets*.
#
# - `part_of(model, mesh)` returns this rank's `Stage`. Cut each of its blocks, from `begin` to `end`.
# - **Tied words.** With `model.config.tied_head`, embedding and head are one weight with two uses. On a single stage,
#   let the Exit use the Entrance's `words`. With several, the first and the last each hold a copy, whose `p.tied` is
#   True.
# - `hybrid_step`: from `tokens`, the whole batch, take this data rank's `rows`, as `tensor_split` cuts them. Then turn
#   each `p.grad` into the gradient of the whole batch's **mean** loss, and add up the tied copies' gradients.
#
# <details><summary>Hint</summary>
#
# `tokens.tensor_split(n)` gives n shares. The mean over the batch is a sum over data ranks: each rank's mean times its
# share of the rows. `run_pipeline` has already summed over the tensor ranks. If there are several stages, the ranks
# with tied copies form `mesh.ends.group`.
# </details>


# %% tags=["balise-2", "slide-mistake=tied-averaged"]
def part_of(model, mesh):
    """The `Stage` of this rank: its share of the plain model's layers, each cut over the tensor ranks."""
    stage, n_stages = mesh.pipeline.rank, mesh.pipeline.size
    begin, end = (len(model.blocks) * k // n_stages for k in (stage, stage + 1))
    # layers: this stage's blocks, cut
    # BEGIN SOLUTION
    layers = [SlicedBlock(model.blocks[k], mesh.tensor) for k in range(begin, end)]
    # END SOLUTION
    if stage == 0:
        layers.insert(0, Entrance(model, mesh.tensor))
    if stage == n_stages - 1:
        layers.append(Exit(model, mesh.tensor))
    # a tied head on the embedding's stage: the same weight
    # BEGIN SOLUTION
    if n_stages == 1 and model.config.tied_head:
        layers[-1].words = layers[0].words
    # END SOLUTION
    return Stage(layers)


def hybrid_step(part, mesh, tokens, n_micro_batches):
    """Puts the batch's gradients into p.grad. Returns the loss of this rank's rows; before the last stage, None."""
    # rows: this data rank's
    # BEGIN SOLUTION
    rows = tokens.tensor_split(mesh.data.size)[mesh.data.rank]
    # END SOLUTION
    loss = run_pipeline(part, mesh, rows, n_micro_batches)
    for p in part.parameters():
        if p.grad is not None:
            # BEGIN SOLUTION
            p.grad *= len(rows) / len(tokens)
            dist.all_reduce(p.grad, group=mesh.data.group)
            if p.tied and mesh.pipeline.size > 1:
                dist.all_reduce(p.grad, group=mesh.ends.group)
            # END SOLUTION
    return loss


# %%
tp.check(2, part_of, hybrid_step)


# %% tags=["setup"]
def trainer(sizes, config, n_micro_batches=1, dtype=torch.float32):
    """On a rank: (mesh, part, step) for a mesh of `sizes`; step(tokens) trains on tokens (b, s + 1) of the whole batch."""
    torch.manual_seed(0)  # the same weights on all ranks
    torch.set_num_threads(1)  # without a GPU, a core stands for a device
    mesh = make_mesh(sizes)
    part = part_of(Transformer(config).to(launch.device(), dtype), mesh)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

    def step(tokens):
        optimizer.zero_grad()
        loss = hybrid_step(part, mesh, tokens, n_micro_batches)
        optimizer.step()
        return loss

    return mesh, part, step


# %% [markdown]
# ## Measure again
#
# The same model and batches, on 2 × 2 × 2 ranks:

# %%
AXES = ("tensor", "pipeline", "data")
most = tp.predict("In a step on 2 × 2 × 2 ranks, along which axis does rank 0 send the most bytes?", ..., choices=AXES)

# %% jupyter={"source_hidden": true}
SIZES = {"pipeline": 2, "data": 2, "tensor": 2}


def bytes_sent(work):
    """{operation: bytes that this rank gives to it} during `work()`."""
    with measure.Communications() as log:
        work()
    found = {}
    for entry in log.entries():
        if entry["kind"] != "phase" and entry["name"] != "recv":
            found[entry["name"]] = found.get(entry["name"], 0) + entry["bytes"]
    return found


def on_the_grid():
    """On a rank: (its loss of each step, None before the last stage; bytes that it holds; that it sends, by axis)."""
    mesh, part, step = trainer(SIZES, SMALL, 4)
    losses = [step(token_batch(k)) for k in range(3)]
    rows = token_batch(0).tensor_split(SIZES["data"])[mesh.data.rank]
    inside = bytes_sent(lambda: run_pipeline(part, mesh, rows, 4))
    whole = bytes_sent(lambda: step(token_batch(0)))
    tied = sum(4 * p.numel() for p in part.parameters() if p.tied)
    sums = whole["all_reduce"] - inside["all_reduce"]
    sent = {"tensor": inside["all_reduce"], "pipeline": inside["send"], "data": sums - tied, "tied words": tied}
    return (
        [None if loss is None else loss.item() for loss in losses],
        16 * sum(p.numel() for p in part.parameters()),
        sent,
    )


# %% tags=["slide"]
ranks = launch.ranks(on_the_grid, n=8, timeout=120)
last = [losses for losses, _, _ in ranks if losses[0] is not None]  # of the last stages
held, sent = ranks[0][1:]
print("losses: one process", *(f"{loss:.5f}" for loss, _, _ in baseline))
print("        your grid  ", *(f"{sum(step) / len(last):.5f}" for step in zip(*last)))
print(f"one process holds {16 * n / 1e6:.1f} MB, rank 0 holds {held / 1e6:.1f} MB: {16 * n / held:.1f} times less")
report.table({"rank 0 sends, along": "{}", "bytes a step": "{:,}"}, list(sent.items()))
most.shows(
    max(AXES, key=sent.get),
    why="Each layer sums four activations per token; gradients travel only once a step. More tokens mean more sums.",
)

# %% [markdown]
# Tensor and pipeline ranks divide the weights. The two data ranks hold the same weights, unless ZeRO shards them.
#
# ### Balise 3 · The norm and the loss over the grid · further · about 12 min
#
# To clip gradients, each rank needs the norm of the **whole** model's gradient.
#
# - `total_norm(part, mesh)`: each parameter counts once. If `p.cut`, the other tensor ranks hold other parts of it; if
#   not, they hold copies. If `p.tied`, both ends of a pipeline hold it. Write `copy`, True where another rank counts
#   this gradient, and the sums over the ranks that hold other parts.
# - `total_loss(loss, n_rows, mesh)`: only last stages have a `loss`, the mean of their own `n_rows` rows. `sums` holds
#   this rank's two numbers. Sum them over the ranks, and return the whole batch's mean.
#
# <details><summary>Hint</summary>
#
# Data ranks hold the same gradient, but different rows. All ranks of a group must call a collective, even those that
# add zero. Let the first tensor rank and the first stage do the counting.
# </details>


# %% tags=["balise-3"]
def total_norm(part, mesh):
    """The norm of the whole model's gradient, a tensor, the same on every rank."""
    square = torch.zeros((), dtype=next(part.parameters()).dtype, device=launch.device())
    for p in part.parameters():
        # copy: True where another rank counts this gradient
        # BEGIN SOLUTION
        copy = (not p.cut and mesh.tensor.rank > 0) or (p.tied and mesh.pipeline.rank > 0)
        # END SOLUTION
        if p.grad is not None and not copy:
            square += p.grad.square().sum()
    # BEGIN SOLUTION
    dist.all_reduce(square, group=mesh.tensor.group)
    dist.all_reduce(square, group=mesh.pipeline.group)
    # END SOLUTION
    return square.sqrt()


def total_loss(loss, n_rows, mesh):
    """The mean loss of the whole batch, a tensor, the same on every rank."""
    known = loss is not None  # two numbers to add up: a sum of losses, and the rows in it
    sums = torch.tensor([loss * n_rows, n_rows] if known else [0, 0], dtype=torch.float64, device=launch.device())
    # BEGIN SOLUTION
    dist.all_reduce(sums, group=mesh.data.group)
    dist.all_reduce(sums, group=mesh.pipeline.group)
    return sums[0] / sums[1]
    # END SOLUTION


# %%
tp.check(3, total_norm, total_loss)

# %% [markdown]
# ### Your grid and PyTorch's · further
#
# PyTorch has `parallelize_module`, `fully_shard` and `Schedule1F1B`. None of them ties a weight across two stages, so
# here the head is untied.

# %% tags=["setup"] jupyter={"source_hidden": true}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class PlainStage(nn.Module):
    """A stage of the plain model, for PyTorch to cut: tokens or activations in, activations or scores out."""

    def __init__(self, model, k, n):
        super().__init__()
        self.words, self.positions = (model.token_embedding, model.position_embedding) if k == 0 else (None, None)
        self.blocks = model.blocks[len(model.blocks) * k // n : len(model.blocks) * (k + 1) // n]
        self.exit = nn.Sequential(model.norm, model.head) if k == n - 1 else None

    def forward(self, x):
        if self.words is not None:
            x = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.exit is None else self.exit(x)


def cut_by_torch(stage, mesh):
    """The stage, its layers cut over the tensor ranks of PyTorch's mesh and its parameters over the data ranks."""
    columns, rows = (
        ("attention.query", "attention.key", "attention.value", "feed_forward.up"),
        ("attention.output", "feed_forward.down"),
    )
    for block in stage.blocks:
        block.attention.heads //= mesh["tensor"].size()
        parallelize_module(
            block, mesh["tensor"], {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel() for n in rows}
        )
    if stage.words is not None:
        parallelize_module(stage, mesh["tensor"], {"words": RowwiseParallel(input_layouts=Replicate())})
    if stage.exit is not None:
        parallelize_module(stage, mesh["tensor"], {"exit.1": ColwiseParallel(output_layouts=Replicate())})
    for module in (*stage.blocks, stage):
        fully_shard(module, mesh=mesh["data"])
    return stage


def torch_trainer(sizes, config, n_micro_batches):
    """Like `trainer`, but made of PyTorch's pieces: (stage, step)."""
    mesh = init_device_mesh(launch.device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    k, n = mesh["pipeline"].get_local_rank(), sizes["pipeline"]
    torch.manual_seed(0)
    stage = cut_by_torch(PlainStage(Transformer(config).to(launch.device()), k, n), mesh)
    runner = Schedule1F1B(
        PipelineStage(stage, k, n, launch.device(), group=mesh.get_group("pipeline")),
        n_micro_batches, loss_fn=lambda scores, due: F.cross_entropy(scores.flatten(0, 1), due.flatten()),
    )  # fmt: skip
    kinds = {}  # AdamW wants a group of its own for the parameters of each mesh
    for p in stage.parameters():
        kinds.setdefault(p.device_mesh, []).append(p)
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=1e-3)

    def step(tokens):
        optimizer.zero_grad()
        rows, losses = tokens.chunk(sizes["data"])[mesh["data"].get_local_rank()], []
        # contiguous: torch 2.11 wants the strides of its first input
        runner.step(*[rows[:, :-1].contiguous()] * (k == 0), target=rows[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        return sum(losses).detach() / len(losses) if losses else None

    return stage, step


# %% jupyter={"source_hidden": true}
TWO_BLOCKS = replace(SMALL, layers=2, max_length=64, tied_head=False)


def side_by_side():
    """On a rank: (losses and norms of both, race)."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped")  # the scores are a view; nobody changes them
    logging.getLogger("torch.distributed.tensor").setLevel("ERROR")  # sums over two axes, one after the other
    n_rows, batches = BATCH // SIZES["data"], [token_batch(step, 64) for step in range(2)]
    mesh, part, ours = trainer(SIZES, TWO_BLOCKS, 4)
    stage, theirs = torch_trainer(SIZES, TWO_BLOCKS, 4)
    found = []
    for tokens in batches:
        loss, torchs = (total_loss(step(tokens), n_rows, mesh) for step in (ours, theirs))
        square = sum(p.grad.norm().full_tensor() ** 2 for p in stage.parameters())
        found.append([float(x) for x in (loss, total_norm(part, mesh), torchs, square.sqrt())])
    steps = {"yours": lambda: ours(batches[0]), "PyTorch's": lambda: theirs(batches[0])}
    return found, measure.race(steps, 2, warmup=0, calls=1, device=launch.device())


alone = launch.ranks(one_process, TWO_BLOCKS, 2, n=1, timeout=60)[0]
sides = launch.ranks(side_by_side, n=8, timeout=240)
rows = []
for step, (loss, norm, _) in enumerate(alone):
    (yours, total, torchs, first), last = sides[0][0][step], sides[-1][0][step][3]
    rows += [[f"loss, step {step}", loss, yours, torchs, None], [f"norm, step {step}", norm, total, first, last]]
numbers = dict.fromkeys(("one process", "your grid", "PyTorch, stage 0", "stage 1"), "{:.5f}")
report.table({"": "{}"} | numbers, rows)
print(f"\n{sides[0][1]}")

# %% [markdown]
# PyTorch's norm is that of one stage. The two stages' squared norms add up to yours squared.
#
# ## Which grid?
#
# Two numbers decide: the bytes of the fullest rank, which must fit, and the seconds of a step. Balise 6 uses
# predictions of both, your own (balises 4 and 5) or the course's. Use the fields of `planner.GPT` and `planner.Layout`,
# not their methods. A parameter takes 18 bytes, since gradients are added up in float32.

# %% tags=["setup"] jupyter={"source_hidden": true}
MIXED = {  # bytes, bfloat16 with Adam, attention fused
    "parameter": 2, "gradient": 4, "optimizer": 12,  # of each parameter
    "whole": 10, "cut": 24,  # of a layer, for each token and channel: kept by norms and dropouts; by the cut matrices
    "input": 2,  # of a layer's input, for each token and channel
    "logit": 4,  # of each token and word
}  # fmt: skip

# %% [markdown]
# ### Balise 4 · The memory of a rank · further · about 13 min
#
# Complete `rank_memory`, in bytes. `widths` is a table such as `MIXED`.
#
# - `"parameters"`, `"gradients"` and `"optimizer"` of the stage's `n` parameters. Over the `d` data ranks, ZeRO shards
#   the optimizer states (`zero` 1), then the gradients too (2), then the parameters too (3).
# - `kept`: what one layer keeps of one micro-batch. This is `everything`, or with recomputation (`full`) only its
#   input, `tokens · width` numbers, cut over `sharing` ranks.
# - `in_flight`: all `m` micro-batches with `"GPipe"`; with `"1F1B"` as many as there are stages from this one on, at
#   most `m`.
# - `"activations"`: what all layers keep of the micro-batches in flight, plus `logits`. With `full`, add `everything`
#   of the one layer being recomputed.
#
# <details><summary>Hint</summary>
#
# `layout` has `schedule` and `pipeline`, the number of stages. A stage has `model.layers // layout.pipeline` layers.
# Each number of a layer's input takes `widths["input"]` bytes.
# </details>


# %% tags=["balise-4"]
def stage_parameters(model, layout, stage):
    """(parameters that a rank of the stage computes with, how many of them are in one layer)."""
    h, t = model.width, layout.tensor
    first, last = stage == 0, stage == layout.pipeline - 1
    layer = (12 * h * h + 7 * h) / t + 6 * h  # matrices, whole vectors
    ends = model.vocabulary * h / t * (first or last) + model.sequence * h * first + 2 * h * last
    return model.layers // layout.pipeline * layer + ends, layer


def rank_memory(model, layout, stage, widths):
    """{"parameters", "gradients", "optimizer", "gathered", "activations"}: bytes of a rank of a pipeline stage."""
    n, layer = stage_parameters(model, layout, stage)
    t, d, m, zero = layout.tensor, layout.data, layout.micro_batches, layout.zero
    # found: a dict with the bytes of the three
    # BEGIN SOLUTION
    found = {"parameters": n * widths["parameter"] / (d if zero >= 3 else 1)}
    found["gradients"] = n * widths["gradient"] / (d if zero >= 2 else 1)
    found["optimizer"] = n * widths["optimizer"] / (d if zero >= 1 else 1)
    # END SOLUTION
    # given: for a moment, one layer's gradients (with ZeRO 3, parameters too) are whole
    at_once = widths["gradient"] * (zero >= 2) + widths["parameter"] * (zero >= 3)
    found["gathered"] = layer * at_once * (d > 1)

    tokens, sharing = model.sequence * layout.micro_batch, t if layout.sequence_parallel else 1
    everything = tokens * model.width * (widths["whole"] / sharing + widths["cut"] / t)
    full = layout.recomputation == "full"
    # kept: what one layer keeps of a micro-batch; in_flight: how many micro-batches
    # BEGIN SOLUTION
    kept = tokens * model.width * widths["input"] / sharing if full else everything
    in_flight = m if layout.schedule == "GPipe" else min(m, layout.pipeline - stage)
    # END SOLUTION
    logits = tokens * model.vocabulary / t * widths["logit"] * (stage == layout.pipeline - 1)
    # BEGIN SOLUTION
    found["activations"] = in_flight * (model.layers // layout.pipeline) * kept + full * everything + logits
    # END SOLUTION
    return found


# %%
tp.check(4, stage_parameters, rank_memory)

# %% [markdown]
# ### Predicted and measured memory · further
#
# Six grids of 8 ranks train the small model, and each rank counts the bytes of its live tensors.

# %% tags=["setup"] jupyter={"source_hidden": true}
SMALL_GPT = planner.GPT(128, 4, 8, sequence=32, vocabulary=512)  # the same, as the planner knows it
GRIDS = (1, 1, 8), (1, 2, 4), (1, 4, 2), (2, 2, 2), (4, 2, 1), (8, 1, 1)  # tensor, pipeline, data
SIX = [planner.Layout(t, p, d, BATCH // d // (2 * p), 2 * p) for t, p, d in GRIDS]  # micro-batches: twice the stages
HERE = {"parameter": 4, "gradient": 4, "optimizer": 8, "whole": 16, "cut": 48, "input": 4, "logit": 16}


# %% jupyter={"source_hidden": true}
def quickest_of(work, times):
    """Seconds until all ranks have done `work`: the least of `times` tries."""
    found = []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        work()
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return min(found)


def walk(layouts):
    """On a rank: [(peak bytes of a step, seconds of a step)] for each layout."""
    torch.manual_seed(0)
    tokens, found = torch.randint(512, (BATCH, 33)).to(launch.device()), []
    for layout in layouts:
        sizes = {"pipeline": layout.pipeline, "data": layout.data, "tensor": layout.tensor}
        _, part, step = trainer(sizes, SMALL, layout.micro_batches)
        with measure.LiveBytes().track(part) as live:
            step(tokens)  # makes the optimizer's states
            live.reset_peak()
            step(tokens)
        found.append((live.peak, quickest_of(lambda: step(tokens), 1)))  # noqa: B023  (called at once)
    return found


@functools.cache
def walked():
    """[[(peak, seconds) of each layout] of each rank], measured once."""
    return launch.ranks(walk, SIX, n=8, timeout=240)


# %%
eighth = tp.predict("What share of the bytes of a data rank (1 × 1 × 8) does a tensor rank (8 × 1 × 1) need?", ...)


# %% jupyter={"source_hidden": true}
def beside(model, layout, stage):
    """What else our step holds: outputs until their message has arrived; one layer's gradients for a moment."""
    tokens, h, t = model.sequence * layout.micro_batch, model.width, layout.tensor
    in_flight = min(layout.micro_batches, layout.pipeline - stage)
    sent = 4 * tokens * h * in_flight * (stage < layout.pipeline - 1)
    return sent + (4 + 16 / t) * tokens * h + 16 * h * h / t


def predicted(layout):
    """Parts of the fullest rank's bytes."""
    stages = [
        rank_memory(SMALL_GPT, layout, k, HERE) | {"beside": beside(SMALL_GPT, layout, k)}
        for k in range(layout.pipeline)
    ]
    return max(stages, key=lambda parts: sum(parts.values()))


def name_of(layout):
    return f"{layout.tensor} × {layout.pipeline} × {layout.data}"


def show_memory():
    rows, whole = [], max(rank[0][0] for rank in walked())
    for k, layout in enumerate(SIX):
        total, peak = sum(predicted(layout).values()), max(rank[k][0] for rank in walked())
        rows.append([name_of(layout), total / 1e6, peak / 1e6, total / peak - 1, peak / whole])
    columns = {"predicted MB": "{:.2f}", "measured MB": "{:.2f}", "error": "{:+.1%}", "share of the first": "{:.0%}"}
    report.table({"fullest rank": "{}"} | columns, rows)


show_memory()
eighth.shows(
    max(rank[-1][0] for rank in walked()) / max(rank[0][0] for rank in walked()),
    "{:.2f}",
    "A tensor rank keeps the inputs of the norms whole, for 8 sequences at once. A data rank keeps those of one sequence.",
)


# %% jupyter={"source_hidden": true}
def draw_memory():
    bars, bottoms = [predicted(layout) for layout in SIX], [0.0] * len(SIX)
    _, ax = plt.subplots(figsize=(7.5, 3), layout="constrained")
    for part in ("parameters", "gradients", "optimizer", "activations", "beside"):
        sizes = [bar[part] / 1e6 for bar in bars]
        ax.barh(range(len(SIX)), sizes, left=bottoms, label=part, height=0.6)
        bottoms = [a + b for a, b in zip(bottoms, sizes)]
    peaks = [max(rank[k][0] for rank in walked()) / 1e6 for k in range(len(SIX))]
    ax.plot(peaks, range(len(SIX)), "k|", markersize=18, markeredgewidth=2, label="measured")
    ax.set(yticks=range(len(SIX)), yticklabels=[name_of(one) for one in SIX], xlabel="MB of the fullest rank")
    ax.set(ylabel="tensor × pipeline × data", title="Where a rank's bytes go, predicted and measured")
    ax.invert_yaxis()
    ax.legend(fontsize=9, frameon=False)
    plt.show()


draw_memory()

# %% [markdown]
# ### Balise 5 · The time of a step · further · about 13 min
#
# - `stage_time` predicts the time of one micro-batch on one stage. `products` is the time of a layer's matrix products.
#   A forward has $24bsh^2 + 4bs^2h$ operations, a backward twice as many, and recomputation (`full`) adds a forward.
#   The $t$ ranks share them, each at `speed`. Return (computing, waiting for sums) for all `layers`. Besides its
#   products, a layer moves `moved` bytes at the card's `bandwidth`. Its all-reduces, two in forward and two in
#   backward, take `total` seconds each; subtract `hidden` once.
# - `step_time`: `"compute"` and `"tensor"` are $m$ times those of a stage. The head adds `head` seconds of computing
#   per micro-batch. `"pipeline"` is the time of `waited` messages. `"bubble"` is the time of $p - 1$ micro-batches on a
#   stage, without the head, divided by the number of chunks $v$. `"data"` is `data_time`, where `beside` is 2/3 of
#   `stage_time`'s computing.
#
# <details><summary>Hint</summary>
#
# Moving takes `moved / cluster.card.bandwidth` seconds. With `full`, the forward's two all-reduces are repeated. A
# micro-batch in the bubble takes `compute + tensor`.
# </details>


# %% tags=["balise-5"]
def stage_time(model, layout, cluster):
    """(seconds of computing, seconds of waiting for tensor ranks): one micro-batch on one stage, forward and backward."""
    s, b, h, t = model.sequence, layout.micro_batch, model.width, layout.tensor
    full, speed = layout.recomputation == "full", cluster.products * cluster.peak
    # BEGIN SOLUTION
    products = (4 if full else 3) * (24 * b * s * h**2 + 4 * b * s**2 * h) / t / speed
    # END SOLUTION
    # given: bytes moved; seconds of an all-reduce; seconds of backward's all-reduces that weight gradients hide
    moved = (4 / 3 if full else 1) * cluster.traffic * planner.layer_bytes(model, layout, again=True)
    total = planner.all_reduce(2 * b * s * h, t, cluster.inside(t))
    hidden = sum(min(total, 2 * b * s * n * h * h / t / speed) for n in (3, 4)) if layout.overlap else 0
    layers = model.layers // layout.pipeline
    # BEGIN SOLUTION
    return layers * (products + moved / cluster.card.bandwidth), layers * ((6 if full else 4) * total - hidden)
    # END SOLUTION


def data_time(n, layout, cluster, beside):
    """Seconds that a rank waits for the gradients of its n parameters; with overlap, `beside` seconds fewer."""
    # given: a reduce-scatter of the gradients, an all-gather; `near` ranks of the group share a node
    near = math.gcd(layout.data, cluster.node // layout.tensor)
    links = cluster.inside(near), cluster.between
    sizes = 4 * n, (2 if layout.zero else 4) * n
    seconds = sum(planner.hierarchical_reduce_scatter(size, layout.data // near, near, *links) for size in sizes)
    return max(0.0, seconds - beside) if layout.overlap else seconds


def step_time(model, layout, cluster):
    """{"compute", "tensor", "bubble", "pipeline", "data"}: seconds of a step, in parts that add up."""
    tokens, t = model.sequence * layout.micro_batch, layout.tensor
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    compute, tensor = stage_time(model, layout, cluster)
    head = 6 * tokens * model.width * model.vocabulary / t / cluster.products / cluster.peak
    link = cluster.inside(2) if layout.ranks <= cluster.node else cluster.between
    message = link.latency + 2 * tokens * model.width / t / link.bandwidth
    waited = 0 if p == 1 else 2 * (p - 1) + (0 if layout.overlap else 2 * m * v)
    n = stage_parameters(model, layout, 0)[0]
    # BEGIN SOLUTION
    found = {"compute": m * (compute + head), "tensor": m * tensor, "pipeline": waited * message}
    found["bubble"] = (p - 1) / v * (compute + tensor)
    found["data"] = data_time(n, layout, cluster, 2 / 3 * compute)
    # END SOLUTION
    return found


# %%
tp.check(5, stage_time, data_time, step_time)


# %% jupyter={"source_hidden": true}
def show_times():
    """Where the seconds of a step go, for 175 billion parameters on 1,024 H100s; the last column is the planner's."""
    model, cluster = planner.GPT(12288, 96, 96), planner.Cluster(planner.H100)
    names = ("compute", "tensor", "bubble", "pipeline", "data")
    rows = []
    for t, p, d in ((1, 32, 32), (2, 16, 32), (4, 8, 32), (8, 8, 16), (8, 2, 64)):
        layout = planner.Layout(t, p, d, 1, 1536 // d, zero=1, sequence_parallel=t > 1)
        parts = step_time(model, layout, cluster)
        total = sum(parts.values())
        shares = [parts[name] / total for name in names]
        rows.append([name_of(layout), total, *shares, planner.step_time(model, layout, cluster).total])
    columns = {"estimate": "{}", "seconds": "{:.2f}"} | dict.fromkeys(names, "{:.1%}") | {"planner": "{:.2f}"}
    report.table(columns, rows)


show_times()

# %% [markdown]
# With more tensor ranks, sums take longer. With more stages, the bubble grows. With more data ranks, gradients take
# longer. The planner also counts the attention kernel's own speed, the weights read for each micro-batch, and the wait
# for the slowest rank.


# %% tags=["setup"]
def divisors(n):
    """All whole numbers that divide n, in order."""
    return [k for k in range(1, n + 1) if n % k == 0]


# %% [markdown]
# ### Balise 6 · The search · about 14 min
#
# So few grids **divide** everything evenly and **fit** that you can try them all. Write
#
# - `grids`, a list of the `(t, p, d)` that divide.
# - `found`, the layouts that fit. `sizes` has their bytes.
# - the sorted list.
#
# **Write all of it:** `tp.open_task(6)` gives you only the name and the docstring. Find every layout that divides and
# fits, the quickest first, or say why there is none.
#
# <details><summary>Hint</summary>
#
# `divisors(math.gcd(a, b))` are the numbers that divide both. Layouts can't be compared, so sort by a `key`.
# </details>


# %% tags=["balise-6"]
def search(model, gpus, batch, node, memory, seconds, usable):
    """A sorted list of (seconds, bytes, layout): all layouts that divide and fit, each once, the quickest first.

    model: has `heads` and `layers`. batch: sequences of a step. node: GPUs of a node. memory(layout): its bytes.
    seconds(layout): its time. usable: a layout of at most this many bytes fits.

    A grid of t tensor, p pipeline and d data ranks divides if t · p · d is gpus; t divides the heads, and also `node`,
    or gpus if they are fewer; p divides the layers; and d divides batch. Its layouts are planner.Layout(t, p, d, b, m)
    with d · b · m = batch, for micro-batches of b sequences, each once with recomputation="none" and once with "full".
    zero is 1 if d > 1, else 0. sequence_parallel is t > 1. `divisors(n)` is the list of the numbers that divide n.

    Of equally quick layouts, the one with fewer bytes comes first. Layouts themselves can't be compared. If no layout
    divides, raise planner.NoLayout(message). If none fits, raise it with a message that says the bytes of the leanest
    one, in GB (1e9 bytes) with one decimal. Don't call planner.search or its parts.
    """
    # BEGIN SOLUTION
    grids = [
        (t, p, d)
        for t in divisors(math.gcd(model.heads, min(node, gpus), gpus))
        for p in divisors(math.gcd(model.layers, gpus // t))
        for d in [gpus // t // p]
        if batch % d == 0
    ]
    # END SOLUTION
    # given: for each grid, all sizes b of a micro-batch, with and without recomputation
    layouts = [
        planner.Layout(t, p, d, b, batch // d // b, zero=int(d > 1), recomputation=kind, sequence_parallel=t > 1)
        for t, p, d in grids
        for b in divisors(batch // d)
        for kind in ("none", "full")
    ]
    if not layouts:
        raise planner.NoLayout(f"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}")
    sizes = [memory(layout) for layout in layouts]
    # BEGIN SOLUTION
    found = [(seconds(layout), size, layout) for size, layout in zip(sizes, layouts) if size <= usable]
    # END SOLUTION
    if not found:
        raise planner.NoLayout(f"no layout fits: the leanest takes {min(sizes) / 1e9:.1f} GB")
    # BEGIN SOLUTION
    return sorted(found, key=lambda one: one[:2])
    # END SOLUTION


# %%
tp.check(6, search)

# %% [markdown]
# Now search for layouts on 1,024 H100s, for 175 billion and for 1,000 billion parameters:

# %% jupyter={"source_hidden": true}
LARGE = {"175B": (planner.GPT(12288, 96, 96), 1536), "1T": (planner.GPT(25600, 128, 160), 3072)}
FASTER = {"unchanged": (), "network × 2": ("network",), "links × 2": ("link",), "both × 2": ("network", "link")}


def found_for(name, faster=()):
    """(what `search` finds on 1,024 H100s, the cluster); `faster` names the bandwidths of a card to double."""
    card = replace(planner.H100, **{key: 2 * getattr(planner.H100, key) for key in faster})
    (model, batch), cluster = LARGE[name], planner.Cluster(card)

    def memory(layout):
        return max(sum(rank_memory(model, layout, stage, MIXED).values()) for stage in {0, layout.pipeline - 1})

    def seconds(layout):
        return sum(step_time(model, layout, cluster).values())

    return search(model, 1024, batch, cluster.node, memory, seconds, 0.9 * card.memory), cluster


def show_large():
    """For each model: how many layouts fit, the quickest ones and the slowest."""
    for name, (model, batch) in LARGE.items():
        plans, cluster = found_for(name)
        rows = []
        for seconds, size, layout in [*plans[:4], plans[-1]]:
            mfu = model.flops(batch) / seconds / 1024 / cluster.peak
            rows.append([name_of(layout), layout.micro_batch, layout.recomputation, seconds, size / 1e9, mfu])
        print(f"\nestimate, {name}, {batch} sequences: {len(plans)} layouts fit, the last row is the slowest")
        columns = {"t × p × d": "{}", "micro-batch": "{}", "recomputed": "{}"}
        report.table(columns | {"seconds": "{:.1f}", "GB": "{:.0f}", "MFU": "{:.1%}"}, rows)
        best = planner.search(model, cluster, 1024, batch)[0]
        one = best.layout
        also = f"{name_of(one)}, {one.chunks} chunks, {best.time.total:.1f} s"
        print(f"the planner, which also tries chunks and ZeRO 2 and 3: {also}")


# %%
show_large()

# %% [markdown]
# ### Predicted order, measured order · further
#
# Do your predictions rank the six grids correctly on this machine? A rank correlation of 1 means the same order, −1 the
# reverse.


# %% jupyter={"source_hidden": true}
def machine():
    """On a rank: (latency of a message, bytes a second of a link, operations a second of a rank), all 8 ranks busy."""
    torch.set_num_threads(1)
    small, large = torch.zeros(1, device=launch.device()), torch.zeros(2**18, device=launch.device())
    x, w = torch.randn(128, 128, device=launch.device()), torch.randn(128, 512, device=launch.device())
    dist.all_reduce(small)
    latency = quickest_of(lambda: [dist.all_reduce(small) for _ in range(5)], 3) / 5 / 14  # 2 · 7 messages
    seconds = quickest_of(lambda: [dist.all_reduce(large) for _ in range(2)], 3) / 2
    computing = quickest_of(lambda: [x @ w for _ in range(100)], 3) / 100
    return latency, 14 / 8 * 4 * 2**18 / max(seconds - 14 * latency, 1e-6), 2 * 128 * 128 * 512 / computing


@functools.cache
def this_machine():
    """This machine as a cluster of one node with 8 ranks."""
    latency, link, speed = launch.ranks(machine, n=8, timeout=60)[0]
    card = replace(planner.H100, name="here", bfloat16=speed, link=link)
    return planner.Cluster(card, latency=latency, products=1, traffic=0)


def seconds_here(layout, cluster):
    """Predicted seconds of the small model's step: nothing hidden, one message per gradient, tensor sums in 2 bytes."""
    layout = replace(layout, overlap=False)
    tensors = 16 * (SMALL.layers // layout.pipeline) + (4 if layout.pipeline == 1 else 2)  # of the first stage
    n = stage_parameters(SMALL_GPT, layout, 0)[0]
    way = tensors * data_time(n / tensors, layout, cluster, 0)
    return step_time(SMALL_GPT, layout, cluster) | {"data": way}


def spearman(a, b):
    """The correlation of two lists' ranks."""
    ranks = torch.tensor([[sorted(values).index(value) for value in values] for values in (a, b)], dtype=torch.float64)
    return torch.corrcoef(ranks)[0, 1].item()


def show_order():
    cluster, seconds = this_machine(), [one[1] for one in walked()[0]]
    print(f"measured here: {1e6 * cluster.latency:.0f} µs a message, {cluster.card.link / 1e6:.0f} MB/s a link, "
          f"{cluster.peak / 1e9:.1f} GFLOP/s a rank of 8")  # fmt: skip
    guesses = [seconds_here(layout, cluster) for layout in SIX]
    rows = []
    for layout, parts, took in sorted(zip(SIX, guesses, seconds), key=lambda row: row[2]):
        rows.append([name_of(layout), 1e3 * sum(parts.values()), 1e3 * took, max(parts, key=parts.get)])
    columns = {"t × p × d": "{}", "predicted ms": "{:.0f}", "measured ms": "{:.0f}", "predicted to cost most": "{}"}
    report.table(columns, rows)
    print(f"rank correlation {spearman([sum(parts.values()) for parts in guesses], seconds):+.2f}")


show_order()


# %% jupyter={"source_hidden": true}
def draw_order():
    guesses, seconds = [seconds_here(layout, this_machine()) for layout in SIX], [one[1] for one in walked()[0]]
    totals, rows = [sum(parts.values()) for parts in guesses], range(len(SIX))
    order = sorted(rows, key=lambda k: seconds[k])
    _, axes = plt.subplots(1, 2, figsize=(8.5, 2.9), sharey=True, layout="constrained")
    for ax, values, title in zip(axes, (totals, seconds), ("predicted", "measured")):
        ax.barh(rows, [1e3 * values[k] for k in order], color="C0" if title == "predicted" else "C1")
        places = {k: 1 + sorted(rows, key=lambda j: values[j]).index(k) for k in order}  # noqa: B023  (used at once)
        for row, k in enumerate(order):
            ax.text(1e3 * values[k], row, f" {places[k]}", va="center")
        ax.set(xlabel="ms a step", title=f"{title}, with its rank", xlim=(0, 1.12e3 * max(values)))
    axes[0].set(yticks=rows, yticklabels=[name_of(SIX[k]) for k in order], ylabel="tensor × pipeline × data")
    axes[0].invert_yaxis()
    plt.show()


draw_order()

# %% [markdown]
# ### Balise 7 · The published table · further · about 9 min
#
# Megatron-LM's authors published ten runs on 32 to 3,072 A100s (2021). Two constants of your prediction are in no data
# sheet: the share of the peak that matrix products reach (`products`), and how often activations go through memory
# (`traffic`). Fit them to two runs. The other eight are the test.
#
# In `fit_constants(seconds, measured)`, `seconds(k, products, traffic)` predicts run k, 0 or 1. With Newton's method,
# find $x_0 = 1 / \mathrm{products}$ and $x_1 = \mathrm{traffic}$. `here`, `right` and `up` are the seconds of both runs
# at $x$, one `step` along $x_0$, and one along $x_1$. Write
#
# - `slopes`, 2 × 2: a row for each run, a column for each of $x_0$ and $x_1$.
# - the move of `x` that, according to the slopes, adds the missing `measured` − `here` seconds.
#
# <details><summary>Hint</summary>
#
# Column j of the slopes is how both times change along $x_j$. The move is `torch.linalg.solve(slopes, missing)`,
# where `missing` is `measured`, as a tensor, minus `here`.
# </details>


# %% tags=["balise-7"]
def paper_flops(model, batch):
    """Operations of a step on `batch` sequences, each layer's forward computed twice."""
    s, h, layers = model.sequence, model.width, model.layers
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + model.vocabulary / (16 * layers * h))


def fit_constants(seconds, measured):
    """(products, traffic) with which seconds(k, products, traffic) is measured[k], for k = 0 and 1."""
    x, step = torch.ones(2, dtype=torch.float64), 1e-3
    for _ in range(10):
        here, right, up = (
            torch.tensor([seconds(k, 1 / at[0].item(), at[1].item()) for k in (0, 1)], dtype=torch.float64)
            for at in (x, x + torch.tensor([step, 0]), x + torch.tensor([0, step]))
        )
        # BEGIN SOLUTION
        slopes = torch.stack([right - here, up - here], 1) / step
        x = x + torch.linalg.solve(slopes, torch.tensor(measured, dtype=torch.float64) - here)
        # END SOLUTION
    return 1 / x[0].item(), x[1].item()


# %%
tp.check(7, paper_flops, fit_constants)

# %% [markdown]
# The constants are fitted to the first and last rows. Predictions use the quickest micro-batch size and number of
# chunks.


# %% jupyter={"source_hidden": true}
def known(run):
    """All layouts that agree with what is known of a published run."""
    t, p = run.only["tensor"], run.only["pipeline"]
    d, layers = run.gpus // t // p, run.model.layers // p
    for b in divisors(run.batch // d):
        m = run.batch // d // b
        for v in divisors(layers) if p > 1 and m % p == 0 else [1]:
            schedule = "interleaved" if v > 1 else "1F1B"
            yield planner.Layout(t, p, d, b, m, schedule, v, recomputation="full", overlap=False)


def seconds_of(run, products, traffic):
    """Predicted seconds of a run: those of the quickest layout."""
    constants = {"products": max(1e-3, min(products, 1)), "traffic": max(0.0, traffic)}
    cluster = planner.Cluster(planner.A100, **constants, links=1)  # what links lose is in the two constants
    return min(sum(step_time(run.model, layout, cluster).values()) for layout in known(run) if layout.micro_batch <= 64)


@functools.cache
def published():
    """(products, traffic, [(run, predicted TFLOP/s per GPU)])."""
    rows, ends = planner.MEGATRON, [planner.MEGATRON[0], planner.MEGATRON[-1]]
    measured = [paper_flops(run.model, run.batch) / run.gpus / run.tflops / 1e12 for run in ends]
    constants = fit_constants(lambda k, products, traffic: seconds_of(ends[k], products, traffic), measured)
    found = [paper_flops(run.model, run.batch) / seconds_of(run, *constants) / run.gpus / 1e12 for run in rows]
    return *constants, list(zip(rows, found))


def show_table():
    products, traffic, rows = published()
    print(f"products reach {products:.3f} of the peak, activations go through memory {traffic:.2f} times (by two rows)")
    errors = [None, *(found / run.tflops - 1 for run, found in rows[1:-1]), None]
    columns = {"billions": "{:.1f}", "GPUs": "{}", "TFLOP/s published": "{}", "predicted": "{:.1f}", "error": "{:+.1%}"}
    report.table(columns, [[run.billions, run.gpus, run.tflops, found, e] for (run, found), e in zip(rows, errors)])
    worst = max(abs(found / run.tflops - 1) for run, found in rows[1:-1])
    flat = (rows[0][0].tflops + rows[-1][0].tflops) / 2
    plain = max(abs(flat / run.tflops - 1) for run, _ in rows[1:-1])
    print(f"largest error of the other eight: {worst:.1%}; with {flat:.0f} for all rows it would be {plain:.1%}")


show_table()


# %% jupyter={"source_hidden": true}
def draw_table():
    _, _, rows = published()
    _, ax = plt.subplots(figsize=(7.5, 3), layout="constrained")
    billions = [run.billions for run, _ in rows]
    ax.semilogx(billions, [run.tflops for run, _ in rows], "o", color="C1", label="published")
    ax.semilogx(billions, [found for _, found in rows], "-", color="C0", label="predicted")
    ax.plot([billions[0], billions[-1]], [rows[0][1], rows[-1][1]], "s", color="C0", label="fitted")
    ax.set(xlabel="billions of parameters (32 to 3,072 A100s)", ylabel="TFLOP/s a GPU", ylim=(100, 180))
    ax.set(title="Ten runs of Megatron-LM, two constants", xticks=billions, xticklabels=[f"{x:g}" for x in billions])
    ax.minorticks_off()
    ax.tick_params(axis="x", labelsize=8)
    ax.legend(fontsize=9, frameon=False)
    plt.show()


draw_table()

# %% [markdown]
# ## Beyond this machine · further
#
# Run your search again, with bandwidths twice as high:

# %%
quicker = tp.predict(
    "If the network between nodes is twice as fast, by what % is the best step of the 175B model faster?", ...
)


# %% jupyter={"source_hidden": true}
def show_faster():
    rows, names = [], ("compute", "tensor", "bubble", "data")
    for name, (model, _) in LARGE.items():
        for words, faster in FASTER.items():
            plans, cluster = found_for(name, faster)
            seconds, _, layout = plans[0]
            first = found_for(name)[0][0][0]
            parts = step_time(model, layout, cluster)
            shares = [parts[part] / seconds for part in names]
            rows.append([name, words, name_of(layout), seconds, first / seconds - 1, *shares])
    columns = {"model": "{}", "bandwidths": "{}", "t × p × d": "{}", "seconds": "{:.2f}", "quicker": "{:.1%}"}
    report.table(columns | dict.fromkeys(names, "{:.1%}"), rows)


show_faster()
one_network, two_networks = (found_for("175B", faster)[0][0][0] for faster in FASTER.values() if "link" not in faster)
quicker.shows(
    100 * (one_network / two_networks - 1),
    "{:.1f} %",
    "Only gradients, once a step, and the few activations at cuts use the network. Tensor ranks sum inside a node.",
)


# %% jupyter={"source_hidden": true}
def draw_large():
    _, axes = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    for ax, name in zip(axes, LARGE):
        plans, _ = found_for(name)
        for kind, colour in (("none", "C0"), ("full", "C1")):
            of = [(size / 1e9, seconds) for seconds, size, layout in plans if layout.recomputation == kind]
            ax.scatter(*zip(*of), s=14, alpha=0.7, color=colour, label=f"recomputation {kind}")
        seconds, size, layout = plans[0]
        ax.plot(size / 1e9, seconds, "*", color="C2", markersize=13, label="the quickest")
        ax.text(size / 1e9, 0.8 * seconds, name_of(layout), ha="center", fontsize=9)
        ax.set(title=f"{name} on 1,024 H100s (estimate)", xlabel="GB of the fullest GPU", ylabel="seconds a step")
        ax.set(yscale="log", ylim=(0.7 * seconds, None))
        ax.yaxis.set_major_formatter("{x:.0f}")
        ax.yaxis.set_minor_formatter("")
    axes[1].legend(fontsize=9, frameon=False, loc="upper left")
    axes[1].set(yticks=[50, 100, 200])
    plt.show()


draw_large()

# %% [markdown] tags=["slide"]
# ## Three questions
#
# <details><summary>Why is the pipeline's axis the outermost in the mesh, and not the data axis?</summary>
#
# At a cut, one rank sends one activation per micro-batch to one other rank, so even slow links will do. Gradients take
# more bytes, in all-reduces between all data ranks. Llama 3 put its data axis outermost: its gradients travel while the
# ranks still compute.
# </details>
#
# <details><summary>With ZeRO 3, the model fits on 1,024 data ranks without another axis. Why isn't that enough?</summary>
#
# Each data rank needs at least one sequence, and a batch of 1,024 may be too large to train well. It also gathers the
# parameters for every micro-batch, however small. With large batches and fast links, ZeRO 3 is a good, simple choice.
# </details>
#
# <details><summary>A run on 2 × 4 × 128 fails, and only 512 GPUs remain. What must be in the checkpoint?</summary>
#
# For each piece, optimizer states included: which part of which parameter it is. Then any other grid can load it. Half
# as many data ranks can keep the same batches in the same order if each takes twice as many micro-batches.
# </details>
#
# ## To remember
#
# A mesh gives each rank a place, and each axis its groups. One step on three axes equals one process's step if each sum
# runs over the ranks that hold different terms of it, and over no others. The bytes of a rank and the seconds of a step
# can be computed, so search for the best grid before you train.

# %%
tp.progress()
