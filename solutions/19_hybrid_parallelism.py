# %% [markdown]
# # Hybrid parallelism: three dimensions, and the best compromise · about 165 min, core 25
#
# You have cut the batch (08, 09), the optimizer's states (13, 14), the layers' order (15, 16) and the layers themselves (17). Large
# models need them at once: some ranks share a layer, some hold other layers, some see other data. In this practical work you
# put the three together in one training step that equals one process, clip it by the norm of the whole model, and then choose: you
# compute what a rank holds and how long a step takes in **any** grid, search for the best, and hold your numbers
# against eight ranks here and ten published runs on up to 3,072 GPUs.
#
# **What you will gain.** 175 billion parameters on 1,024 H100s. The table below is an *estimate* of this repository's planner
# (`python -m dlojz_tp plan`): nothing in it was run.

# %% tags=["setup"]
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

from dlojz_tp import course, launch, measure, planner, todo
from dlojz_tp.models import Transformer, TransformerConfig, language_loss
from dlojz_tp.parallel import Axis, Entrance, Exit, Mesh, SlicedBlock, Stage, run_pipeline

tp = course.open("19_hybrid_parallelism")
tp

# %%
GPT3, H100S = planner.GPT(12288, 96, 96), planner.Cluster(planner.H100)  # sequences of 2,048 tokens; nodes of 8
LEAN = {"zero": 1, "recomputation": "full"}
best, *_, worst = (plan.layout for plan in planner.search(GPT3, H100S, 1024, 2048))
WAYS = {
    "data alone": planner.Layout(data=1024, micro_batches=2, recomputation="full"),
    "data alone, ZeRO 3": planner.Layout(data=1024, micro_batches=2, zero=3, recomputation="full"),
    "tensor in a node, and data": planner.Layout(8, data=128, micro_batches=16, sequence_parallel=True, **LEAN),
    "pipeline, and data": planner.Layout(pipeline=32, data=32, micro_batches=64, **LEAN),
    "all three, the worst that fits": worst,
    "all three, the best": best,
}
print("estimate: 175 billion parameters, 2,048 sequences a step, 1,024 H100s of 80 GB")
print(f"{'':<32}{'tensor × pipeline × data':>24}{'GB':>8}{'seconds a step':>17}")
for way, one in WAYS.items():
    size = planner.rank_memory(GPT3, one).total / 1e9
    step = f"{planner.step_time(GPT3, one, H100S).total:.1f}" if size < 72 else "does not fit"
    print(f"{way:<32}{f'{one.tensor} × {one.pipeline} × {one.data}':>24}{size:8,.0f}{step:>17}")

# %% [markdown]
# Three axes are not better by themselves: of those that fit, the slowest grid has three too, with too few micro-batches for
# its stages. By the end you will find the best one yourself.
#
# All sizes are here. With eight GPUs or more, each rank has one; else the ranks are processes on the CPU that share its cores.

# %% tags=["setup"]
if 0 < torch.cuda.device_count() < 8:
    os.environ[launch.place.ON_CPU] = "1"  # for all launches: no table mixes GPU and CPU
SMALL = TransformerConfig(vocab_size=512, width=128, heads=8, layers=4, max_length=32, tied_head=True)
BATCH = 16  # sequences of a step


def token_batch(step=0, length=SMALL.max_length):
    """Tokens (BATCH, length + 1) of a step, on this rank's device, the same on all ranks."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randint(SMALL.vocab_size, (BATCH, length + 1), generator=drawn).to(launch.device())


# %% [markdown]
# ## The idea
#
# Each rank has three coordinates. With $t$ tensor ranks, $p$ stages and $d$ data ranks, $N = t\,p\,d$, and in the numbering of this work
#
# $$\text{rank} = (\text{stage} \cdot d + \text{data}) \cdot t + \text{tensor}.$$
#
# Neighbouring ranks differ in their tensor coordinate, for tensor ranks talk most and need the fastest links. Megatron-LM numbers
# them so (its order is `tp-cp-ep-dp-pp`, the first counts up first); PyTorch's `init_device_mesh` counts up the *last* dimension
# first, so there the same mesh is `(p, d, t)`.
#
# | axis | what its ranks share | what travels | how often |
# |---|---|---|---|
# | tensor | each layer | activations, 4 all-reduces | in each layer, for each micro-batch |
# | pipeline | the layers | one activation, one gradient of it | at each cut, for each micro-batch |
# | data | the batch | the gradients of $1/(t\,p)$ of the model | once a step |


# %% jupyter={"source_hidden": true}
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
    ax.set(xlim=(-1.3, 6.8), ylim=(-1.6, 1.6), title="Eight ranks as 2 × 2 × 2: of one colour, the same parameters")
    ax.axis("off")
    plt.show()


draw_mesh()

# %% [markdown]
# A green arrow stands for two pipelines: rank 0 sends to rank 4, and rank 1 to rank 5.
#
# ## Baseline
#
# One process, the small model and a batch of random tokens: the loss, the norm and the time that all grids below start from.


# %%
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


baseline = launch.ranks(one_process, n=1, timeout=60)[0]
n = sum(p.numel() for p in Transformer(SMALL).parameters())
print(f"one process: {n:,} parameters, {16 * n / 1e6:.1f} MB of weights, gradients and AdamW's moments in float32")
for step, (loss, norm, seconds) in enumerate(baseline):
    print(f"step {step}: loss {loss:.5f}, norm {norm:.5f}, {1e3 * seconds:.0f} ms")

# %% [markdown]
# ### Balise 1 · A mesh of ranks · about 19 min
#
# A mesh gives each rank a **place**, one coordinate an axis. `sizes` is a dictionary, such as
# `{"pipeline": 2, "data": 3, "tensor": 4}`: the first axis is the outermost, and ranks count up along the **last** one first. Three
# functions, for any number of axes of any size, with no ranks running:
#
# - `place_of(rank, sizes)`: `{axis: coordinate}`, from 0. A rank that is not in the mesh: `ValueError`.
# - `rank_at(place, sizes)`: back again, whatever the order in `place`.
# - `groups(axes, sizes)`: all groups whose ranks differ in these axes only (a list of names), as a list of lists of ranks. Each
#   rank is in exactly one. Ranks count up in a group, and groups by their first rank. No axis at all: each rank alone.
#
# About 6, 4 and 6 lines.
#
# <details><summary>Hint</summary>
#
# Coordinates are digits: along the last axis `rank % size`, and `rank // size` is left for the others, as with tens and ones. For
# the groups: two ranks are in one if they agree in all *other* axes. A dictionary whose keys are those coordinates sorts them.
# </details>


# %% tags=["balise-1"]
def place_of(rank, sizes):
    """The coordinates of a rank: {axis: number}. sizes: {axis: ranks}, outermost first."""
    # BEGIN SOLUTION
    place, left = {}, rank
    for axis in reversed(sizes):
        left, place[axis] = divmod(left, sizes[axis])
    if left:  # below 0 for a negative rank
        raise ValueError(f"a mesh of {sizes} has no rank {rank}")
    return {axis: place[axis] for axis in sizes}
    # END SOLUTION


def rank_at(place, sizes):
    """The rank at these coordinates."""
    # BEGIN SOLUTION
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + place[axis]
    return rank
    # END SOLUTION


def groups(axes, sizes):
    """All groups of ranks that differ in `axes` only: a list of lists of ranks."""
    # BEGIN SOLUTION
    found = {}
    for rank in range(math.prod(sizes.values())):
        others = tuple(number for axis, number in place_of(rank, sizes).items() if axis not in axes)
        found.setdefault(others, []).append(rank)
    return list(found.values())
    # END SOLUTION


# %%
tp.check(1, place_of, rank_at, groups)

# %% [markdown]
# The order of the axes is a choice, and groups tell what it costs. In nodes of 8, which axes leave the node, and what does a GPU then
# send over the network in a step? The bytes along each axis are those of the best grid of the first table (*estimates*:
# rings, activations in 2 bytes, gradients in 4).

# %%
GRID = {"pipeline": 8, "data": 32, "tensor": 4}
TOKENS = 2048 * 2048 // GRID["data"]  # of a data rank, in a step
SENT = {
    "pipeline": 2 * TOKENS * 12288 * 2,  # an activation, a gradient
    "data": 2 * 31 / 32 * 4 * GPT3.n_parameters / (4 * 8),  # all-reduce of a rank's gradients
    "tensor": 4 * 96 / 8 * 2 * 3 / 4 * TOKENS * 12288 * 2,  # four all-reduces in each of its layers
}


def away(axis, sizes, node=8):
    """The share of neighbours in the axis's groups that are in different nodes."""
    pairs = [(a, b) for group in groups([axis], sizes) for a, b in zip(group, group[1:])]
    return sum(a // node != b // node for a, b in pairs) / len(pairs)


print("GB a step that a GPU sends along each axis: " + ", ".join(f"{axis} {n / 1e9:.0f}" for axis, n in SENT.items()))
print(f"\n{'outermost … innermost':<28}{'neighbours in another node':>34}{'GB over the network':>22}")
for order in itertools.permutations(GRID):
    shares = {axis: away(axis, {name: GRID[name] for name in order}) for axis in GRID}
    shown = ", ".join(f"{axis} {share:.0%}" for axis, share in shares.items())
    print(f"{', '.join(order):<24}{shown:>38}{sum(SENT[axis] * share for axis, share in shares.items()) / 1e9:22.0f}")

# %% [markdown]
# Tensor innermost, or the network carries several times as much. Data comes next: what room a node has left goes to
# those that send more. The pipeline is left with the slow links, and bears them.
#
# From here on, a rank asks its `Mesh`: `mesh.tensor`, `mesh.data` and `mesh.pipeline` are one axis each, with `rank` (this rank's
# coordinate), `size`, `ranks` (their numbers in the world) and `group` (for `dist.all_reduce(…, group=…)`). `mesh.ends` is the pair
# of first and last stage of this rank's pipeline; in between it is None. All ranks make all groups, as in practical work 17.


# %% tags=["setup"]
def joined(all_groups):
    """Make all groups, on all ranks; the `Axis` of the one that this rank is in, None if in none."""
    mine = None
    for members in all_groups:
        group = dist.new_group(members)
        mine = Axis(group) if dist.get_rank() in members else mine
    return mine


def make_mesh(sizes):
    """This rank's groups in a mesh of {"pipeline": p, "data": d, "tensor": t}, in this order or another."""
    axes = {axis: joined(groups([axis], sizes)) for axis in sizes}
    return Mesh(**axes, ends=joined([sorted({one[0], one[-1]}) for one in groups(["pipeline"], sizes)]))


# %% [markdown]
# ### Balise 2 · One step on three axes · further · about 23 min
#
# `dlojz_tp.parallel` has what you built in 15 and 17, for the ranks of one axis: `SlicedBlock(block, ranks)` is a block cut over
# tensor ranks; `Entrance(model, ranks)` holds a part of the embedding of words, and the positions; `Exit(model, ranks)` the last norm
# and a part of the head; `Stage(layers)` is a list of them, one behind the other. `run_pipeline(part, mesh, rows, n_micro_batches)`
# goes forward and backward through all stages of this rank's pipeline, adds to `p.grad`, and returns the rows' mean loss on the last
# stage, None elsewhere. Nothing of it knows of data ranks. Put them together:
#
# - `part_of(model, mesh)`: the `Stage` of this rank. `model` is a plain `Transformer`, the same on all ranks; its `model.blocks` are
#   shared out over the stages in order, as evenly as it goes (three on two stages: 1 and 2, or 2 and 1). The Entrance is on the first
#   stage, the Exit on the last.
# - `hybrid_step(part, mesh, tokens, n_micro_batches)`: `tokens` (b, s + 1) is the whole batch, on all ranks. Each data rank takes its
#   own rows, `tokens.tensor_split(…)`; the shares may differ by a row. Afterwards `p.grad` is that of the whole batch's **mean** loss,
#   on every rank for its own part. Return what `run_pipeline` returned. Gradients are None before; those of frozen parameters stay so.
#
# **Tied words.** With `model.config.tied_head` embedding and head are one weight, used twice: its gradient is the sum of both uses.
# `p.tied` marks it. On one stage it must be one parameter: give the Exit the Entrance's `words`. On several, first and last stage hold
# a copy each, and their gradients must come together. About 10 lines each.
#
# <details><summary>Hint</summary>
#
# Blocks `n · k // stages` to `n · (k + 1) // stages` are those of stage k. The tensor ranks have talked in `run_pipeline` already: what
# they hold in common has the same gradient on all of them. A mean over the batch is the sum over data ranks of each mean, times its
# rows over all rows. Which ranks are in `mesh.ends`?
# </details>


# %% tags=["balise-2"]
def part_of(model, mesh):
    """The `Stage` of this rank: its share of the plain model's layers, each cut over the tensor ranks."""
    # BEGIN SOLUTION
    stage, n_stages = mesh.pipeline.rank, mesh.pipeline.size
    begin, end = (len(model.blocks) * k // n_stages for k in (stage, stage + 1))
    layers = [SlicedBlock(model.blocks[k], mesh.tensor) for k in range(begin, end)]
    if stage == 0:
        layers.insert(0, Entrance(model, mesh.tensor))
    if stage == n_stages - 1:
        layers.append(Exit(model, mesh.tensor))
    if n_stages == 1 and model.config.tied_head:
        layers[-1].words = layers[0].words
    return Stage(layers)
    # END SOLUTION


def hybrid_step(part, mesh, tokens, n_micro_batches):
    """Gradients of the whole batch in p.grad; the loss of this pipeline's rows on its last stage, else None."""
    # BEGIN SOLUTION
    rows = tokens.tensor_split(mesh.data.size)[mesh.data.rank]
    loss = run_pipeline(part, mesh, rows, n_micro_batches)
    for p in part.parameters():
        if p.grad is not None:
            p.grad *= len(rows) / len(tokens)
            dist.all_reduce(p.grad, group=mesh.data.group)
            if p.tied and mesh.pipeline.size > 1:
                dist.all_reduce(p.grad, group=mesh.ends.group)
    return loss
    # END SOLUTION


# %%
tp.check(2, part_of, hybrid_step)

# %% [markdown]
# All later cells train through one function: mesh, part of the model, optimizer, and a function that does a whole step.


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
# ### Balise 3 · The norm and the loss over the grid · further · about 16 min
#
# To clip, each rank needs the norm of the **whole** model's gradient: one that clipped by its own part would scale it by another factor
# than its neighbours. No rank holds the whole, and some things are held more than once. The same for the loss: the last stages know it,
# each for its own rows.
#
# - `total_norm(part, mesh)`: the norm of all gradients, as after your `hybrid_step`, a number or a tensor, on every rank. Each
#   parameter counts once. `p.cut` says that other tensor ranks have other parts of it (else all hold it whole); `p.tied` marks words
#   that stand at both ends of a pipeline of several stages. `p.grad` may be None, and stays as it is.
# - `total_loss(loss, n_rows, mesh)`: the mean loss of the whole batch, on every rank. `loss` is what `hybrid_step` returned here, of
#   `n_rows` rows.
#
# About 8 and 5 lines.
#
# <details><summary>Hint</summary>
#
# Squares add up, norms do not. Which ranks hold the same gradient, and which one of them counts it? All ranks of a group call a
# collective, those too that have only a zero to add. Over a whole batch, send two numbers: the sum of losses times rows, and the rows.
# </details>


# %% tags=["balise-3"]
def total_norm(part, mesh):
    """The norm of the whole model's gradient, a tensor, the same on every rank."""
    # BEGIN SOLUTION
    square = torch.zeros((), dtype=next(part.parameters()).dtype, device=launch.device())
    for p in part.parameters():
        copy = (not p.cut and mesh.tensor.rank > 0) or (p.tied and mesh.pipeline.rank > 0)
        if p.grad is not None and not copy:
            square += p.grad.square().sum()
    dist.all_reduce(square, group=mesh.tensor.group)
    dist.all_reduce(square, group=mesh.pipeline.group)
    return square.sqrt()
    # END SOLUTION


def total_loss(loss, n_rows, mesh):
    """The mean loss of the whole batch, a tensor, the same on every rank."""
    # BEGIN SOLUTION
    known = loss is not None
    sums = torch.tensor([loss * n_rows, n_rows] if known else [0, 0], dtype=torch.float64, device=launch.device())
    dist.all_reduce(sums, group=mesh.data.group)
    dist.all_reduce(sums, group=mesh.pipeline.group)
    return sums[0] / sums[1]
    # END SOLUTION


# %%
tp.check(3, total_norm, total_loss)

# %% [markdown]
# ## Our grid beside PyTorch's · further
#
# Your step on 2 × 2 × 2, against one process and against PyTorch's own pieces in the same mesh: `init_device_mesh`,
# `parallelize_module` inside the layers, `fully_shard` over the data ranks, `Schedule1F1B` over the stages. None of these knows of a
# weight on two stages, so here the head is not tied.
#
# **Commit to a guess.** In one step of your grid (4 micro-batches), which axis does a rank send most bytes along, and how many times as
# many as along the one with the fewest? Write the order down, then run the cells.

# %%
guess = {"most": None, "least": None}  # "tensor", "pipeline", "data"


# %% tags=["setup"]
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
    """As `trainer`, of PyTorch's pieces: (stage, step)."""
    mesh = init_device_mesh(launch.device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    k, n = mesh["pipeline"].get_local_rank(), sizes["pipeline"]
    torch.manual_seed(0)
    stage = cut_by_torch(PlainStage(Transformer(config).to(launch.device()), k, n), mesh)
    runner = Schedule1F1B(
        PipelineStage(stage, k, n, launch.device(), group=mesh.get_group("pipeline")),
        n_micro_batches, loss_fn=lambda scores, due: F.cross_entropy(scores.flatten(0, 1), due.flatten()),
    )  # fmt: skip
    kinds = {}  # AdamW wants parameters of one mesh in a group
    for p in stage.parameters():
        kinds.setdefault(p.device_mesh, []).append(p)
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=1e-3)

    def step(tokens):
        optimizer.zero_grad()
        rows, losses = tokens.chunk(sizes["data"])[mesh["data"].get_local_rank()], []
        runner.step(*[rows[:, :-1]] * (k == 0), target=rows[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        return sum(losses).detach() / len(losses) if losses else None

    return stage, step


# %%
SIZES = {"pipeline": 2, "data": 2, "tensor": 2}
TWO_BLOCKS = replace(SMALL, layers=2, max_length=64, tied_head=False)


def bytes_sent(work):
    """{collective: bytes that this rank hands in} while it works."""
    with measure.Communications() as log:
        work()
    found = {}
    for entry in log.entries():
        if entry["kind"] != "phase" and entry["name"] != "recv":
            found[entry["name"]] = found.get(entry["name"], 0) + entry["bytes"]
    return found


def side_by_side():
    """On a rank: (losses and norms of both, this rank's bytes by axis, race)."""
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
    rows = batches[0].chunk(SIZES["data"])[mesh.data.rank]
    inside = bytes_sent(lambda: run_pipeline(part, mesh, rows, 4))
    whole = bytes_sent(lambda: ours(batches[0]))
    sent = {
        "tensor": inside["all_reduce"],
        "pipeline": inside["send"],
        "data": whole["all_reduce"] - inside["all_reduce"],
    }
    steps = {"yours": lambda: ours(batches[0]), "PyTorch's": lambda: theirs(batches[0])}
    return found, sent, measure.race(steps, 2, warmup=0, calls=1, device=launch.device())


alone = launch.ranks(one_process, TWO_BLOCKS, 2, n=1, timeout=60)[0]
sides = launch.ranks(side_by_side, n=8, timeout=240)
print(f"{'':<8}{'one process':>24}{'your grid':>24}{'PyTorch: loss':>18}{'norm, stage 0':>15}{'stage 1':>10}")
for step, (loss, norm, _) in enumerate(alone):
    (yours, total, torchs, first), last = sides[0][0][step], sides[-1][0][step][3]
    print(
        f"step {step}  {f'loss {loss:.5f}, norm {norm:.5f}':>24}{f'{yours:.5f}, {total:.5f}':>24}{torchs:18.5f}{first:15.5f}{last:10.5f}"
    )
print("\nbytes that rank 0 hands in, in a step: " + ", ".join(f"{axis} {n:,}" for axis, n in sides[0][1].items()))
print(f"\n{sides[0][2]}")

# %% [markdown]
# The same losses. PyTorch's norm is that of a stage: a `DTensor` knows of the axes that cut *it*, and no tensor is cut over a
# pipeline. The squares of the two stages add up to yours; who trains with these pieces writes that line by hand, as you did (torchtitan
# does). Most of PyTorch's time here is Python's: each operation on a `DTensor` first asks how its arguments are cut, which a tiny model
# on a CPU feels most; and it keeps 1/d of the parameters, which your grid does not.
#
# <details><summary>And your guess?</summary>
#
# Tensor ranks send most here, and pipelines least. A layer has four activations of $h$ numbers a token to sum, and $12 h^2 / t$ gradients
# a rank: for the $n$ tokens of a data rank in a step, tensor sends $n\,t / 3h$ times what data sends. Here that is $512 \cdot 2 / 384
# \approx 2.7$, and less with the embedding's gradients; in the grid of the first table $131{,}072 \cdot 4 / 36{,}864 \approx 14$. A cut in
# a pipeline is crossed once where each layer sums four times: it is last wherever a stage has a few layers.
# </details>

# %% [markdown]
# ## Which grid?
#
# The step is right on every grid. Which one is the best depends on two numbers: the bytes of the fullest rank, which must fit,
# and the seconds of a step. The planner (`python -m dlojz_tp plan`) predicts both. In the four balises that follow you write
# its heart yourself, in about 60 lines, and hold it against runs here and against ten published ones. That is the game's one
# rule: the fields of `planner.GPT` and `planner.Layout`, the cards and the collectives are given; what counts for you (such as
# `Layout.in_flight` and `GPT.flops`) is not.

# %% tags=["setup"]
MIXED = {  # bytes, bfloat16 with Adam, attention fused
    "parameter": 2, "gradient": 4, "optimizer": 12,  # of each parameter
    "whole": 10, "cut": 24,  # of a layer, for each token and channel: at norms and dropouts; between them, where heads are cut
    "input": 2,  # of a layer's input, for each token and channel
    "logit": 4,  # of each token and word
}  # fmt: skip

# %% [markdown]
# ### Balise 4 · The memory of a rank · further · about 23 min
#
# Each technique divides a part of its own. *Tensor* ranks share out matrices and what lies between them; norms, and biases
# behind a sum, are whole on each. A *pipeline* shares out layers, but its first stages keep micro-batches in flight. *ZeRO*
# shares out, over the data ranks, the optimizer's states (1), gradients as well (2), parameters as well (3).
#
# `stage_parameters(model, layout, stage)` returns two numbers: the parameters that a rank of this stage computes with, and those
# of one layer. A layer has $12h^2 + 7h$ that are cut over `layout.tensor` ranks, and $6h$ that are not. The first stage has
# the words, $Vh$, cut, and the positions, $sh$, whole. The last has the last norm, $2h$, whole, and the words too: its head. Where
# one stage is both, they are held once.
#
# `rank_memory(model, layout, stage, widths)` returns a dict of bytes, `widths` being a table such as `MIXED`:
#
# - `"parameters"`, `"gradients"`, `"optimizer"`: shared out as `layout.zero` says;
# - `"gathered"`: with ZeRO 2 and 3 and several data ranks, one layer's gradients before they are shared out; with ZeRO 3 also
#   one layer's parameters. Else 0;
# - `"activations"`: of all micro-batches in flight, $m$ with `"GPipe"`; with `"1F1B"` as many as there are stages from this one
#   on, at most $m$. What is `"whole"` is cut only if `layout.sequence_parallel`. With `layout.recomputation == "full"`
#   a layer keeps its input alone (a `"whole"` thing); on top of all inputs, one layer of one micro-batch, the one that is being
#   computed again, has everything. The last stage adds the logits of one micro-batch, cut.
#
# About 5 and 14 lines.
#
# <details><summary>Hint</summary>
#
# `layout` has `tensor, pipeline, data, micro_batch, micro_batches, schedule, zero, recomputation, sequence_parallel`; `model` has
# `width, layers, sequence, vocabulary`. Compute one layer's bytes for one micro-batch first, then multiply.
# </details>


# %% tags=["balise-4"]
def stage_parameters(model, layout, stage):
    """(parameters that a rank of the stage computes with, those of one layer of it)."""
    # BEGIN SOLUTION
    h, t = model.width, layout.tensor
    first, last = stage == 0, stage == layout.pipeline - 1
    layer = (12 * h * h + 7 * h) / t + 6 * h
    ends = model.vocabulary * h / t * (first or last) + model.sequence * h * first + 2 * h * last
    return model.layers // layout.pipeline * layer + ends, layer
    # END SOLUTION


def rank_memory(model, layout, stage, widths):
    """{"parameters", "gradients", "optimizer", "gathered", "activations"}: bytes of a rank of a pipeline stage."""
    # BEGIN SOLUTION
    n, layer = stage_parameters(model, layout, stage)
    t, d, m, zero = layout.tensor, layout.data, layout.micro_batches, layout.zero
    found = {"parameters": n * widths["parameter"] / (d if zero >= 3 else 1)}
    found["gradients"] = n * widths["gradient"] / (d if zero >= 2 else 1)
    found["optimizer"] = n * widths["optimizer"] / (d if zero >= 1 else 1)
    at_once = widths["gradient"] * (zero >= 2) + widths["parameter"] * (zero >= 3)
    found["gathered"] = layer * at_once * (d > 1)

    tokens, whole = model.sequence * layout.micro_batch, t if layout.sequence_parallel else 1
    everything = tokens * model.width * (widths["whole"] / whole + widths["cut"] / t)
    full = layout.recomputation == "full"
    kept = tokens * model.width * widths["input"] / whole if full else everything
    in_flight = m if layout.schedule == "GPipe" else min(m, layout.pipeline - stage)
    logits = tokens * model.vocabulary / t * widths["logit"] * (stage == layout.pipeline - 1)
    found["activations"] = in_flight * (model.layers // layout.pipeline) * kept + full * everything + logits
    return found
    # END SOLUTION


# %%
tp.check(4, stage_parameters, rank_memory)

# %% [markdown]
# ## Predicted beside measured
#
# Six grids of the same 8 ranks train the same small model, three steps each. Each rank counts the bytes of its
# living tensors, and rank 0 looks at the clock. The bytes are those of float32 on a processor, so `HERE` takes the place
# of `MIXED`. A block of ours keeps two norms' inputs and outputs (whole: $4 \times 4$ bytes a token and channel), and queries,
# keys, values, the attention's output and both sides of the GELU, each four times as wide (cut: $12 \times 4$).

# %% tags=["setup"]
SMALL_GPT = planner.GPT(128, 4, 8, sequence=32, vocabulary=512)  # the same, as the planner knows it
GRIDS = (1, 1, 8), (1, 2, 4), (1, 4, 2), (2, 2, 2), (4, 2, 1), (8, 1, 1)  # tensor, pipeline, data
SIX = [planner.Layout(t, p, d, BATCH // d // (2 * p), 2 * p) for t, p, d in GRIDS]  # micro-batches: twice the stages
HERE = {"parameter": 4, "gradient": 4, "optimizer": 8, "whole": 16, "cut": 48, "input": 4, "logit": 16}


# %%
def quickest_of(work, times):
    """Seconds of `work` on all ranks together, the least of so many times."""
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


# %% [markdown]
# **Commit to a guess.** Data parallelism alone, 8 pipelines of one stage, holds the whole model on each rank. Which share of its bytes
# does a rank need in 8 tensor ranks: more than 1/8, or less? And in 4 stages × 2, more than 1/4? Then run the cell.


# %%
def beside(model, layout, stage):
    """What our step holds besides: outputs kept until their message has arrived; one layer's gradients for a moment."""
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
    print("the fullest rank\ntensor × pipeline × data   predicted   measured    error   share of the first")
    whole = max(rank[0][0] for rank in walked())
    for k, layout in enumerate(SIX):
        parts, peak = predicted(layout), max(rank[k][0] for rank in walked())
        total = sum(parts.values())
        print(
            f"{name_of(layout):>24} {total / 1e6:8.2f} MB {peak / 1e6:7.2f} MB {total / peak - 1:+8.1%} {peak / whole:15.1%}"
        )


show_memory()


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
# <details><summary>And your guess?</summary>
#
# More, both times. The 8 tensor ranks take a micro-batch of 8 sequences together where each data rank took one of its own: what
# lies between the norms is cut into 8, but norms keep all of it. In a pipeline the first stage holds the embedding besides its
# layers, and as many micro-batches in flight as there are stages: a quarter of the layers keeps nearly as much as all of
# them did. Pipelines share out states, not activations.
# </details>

# %% [markdown]
# ### Balise 5 · The time of a step · further · about 30 min
#
# Five things take a rank's time: what it computes, the sums over its tensor ranks, waiting for the other stages (the
# bubble), their messages, and the gradients' way over the data ranks. Only what nothing hides counts.
#
# `stage_time(model, layout, cluster)` returns two numbers: the seconds that one micro-batch takes on one stage, forward and
# backward, for (computing, sums over tensor ranks). For each layer:
#
# - a forward has $24bsh^2 + 4bs^2h$ operations, a backward twice as many; recomputation `"full"` adds a forward. The $t$ ranks
#   share them, each at `cluster.products * cluster.peak` operations a second;
# - what is no product moves `planner.layer_bytes(model, layout, again=True)` bytes `cluster.traffic` times through the memory,
#   `cluster.card.bandwidth` bytes a second; 4/3 as often with recomputation `"full"`;
# - two all-reduces of $2bsh$ bytes in forward, two in backward, two more with `"full"`: `planner.all_reduce(size, t,
#   cluster.inside(t))`. With `layout.overlap`, each of backward's two runs beside the product for a weight's gradient,
#   $2bs \cdot 3h \cdot h / t$ operations (queries, keys, values) and $2bs \cdot 4h \cdot h / t$: what is shorter is hidden.
#
# `data_time(n, layout, cluster, beside)` returns the seconds for the gradients of a rank's `n` parameters: a reduce-scatter
# of $4n$ bytes, then an all-gather of as many with ZeRO 0, else of $2n$ (the parameters). `hierarchical_reduce_scatter` of the planner
# has nodes; an all-gather takes as long. Tensor ranks are neighbours, so `gcd(data, node // tensor)` ranks of the group share a node.
# With `layout.overlap`, `beside` seconds of it are hidden.
#
# `step_time(model, layout, cluster)` returns a dict of seconds, for $m$ micro-batches, $p$ stages, $v$ chunks:
#
# - `"compute"` and `"tensor"`: $m$ times the stage's; to each micro-batch's computing add the head, $6bshV/t$ operations;
# - `"bubble"`: $(p - 1) / v$ times what a micro-batch takes on a stage (both numbers, without the head);
# - `"pipeline"`: a message takes $2bsh/t$ bytes, over `cluster.between` if the layout's ranks are more than a node, else over
#   `cluster.inside(2)`: latency + bytes / bandwidth. $2(p - 1)$ of them are waited for, without overlap $2mv$ more; with one stage, none;
# - `"data"`: for the first stage's parameters, beside 2/3 of what one micro-batch computes on a stage (its backward).
#
# About 9, 4 and 10 lines.
#
# <details><summary>Hint</summary>
#
# `link.latency`, `link.bandwidth`. `planner.hierarchical_reduce_scatter(size, nodes, ranks_per_node, cluster.inside(ranks_per_node),
# cluster.between)`. `layout.chunks` is v. Each rank counts its own operations, so all of them divide by t.
# </details>


# %% tags=["balise-5"]
def stage_time(model, layout, cluster):
    """(seconds of computing, seconds of waiting for tensor ranks): one micro-batch on one stage, forward and backward."""
    # BEGIN SOLUTION
    s, b, h, t = model.sequence, layout.micro_batch, model.width, layout.tensor
    full, speed = layout.recomputation == "full", cluster.products * cluster.peak
    products = (4 if full else 3) * (24 * b * s * h**2 + 4 * b * s**2 * h) / t / speed
    moved = (4 / 3 if full else 1) * cluster.traffic * planner.layer_bytes(model, layout, again=True)
    total = planner.all_reduce(2 * b * s * h, t, cluster.inside(t))
    hidden = sum(min(total, 2 * b * s * n * h * h / t / speed) for n in (3, 4)) if layout.overlap else 0
    layers = model.layers // layout.pipeline
    return layers * (products + moved / cluster.card.bandwidth), layers * ((6 if full else 4) * total - hidden)
    # END SOLUTION


def data_time(n, layout, cluster, beside):
    """Seconds of waiting for the data ranks: n parameters of a rank, `beside` seconds to hide behind."""
    # BEGIN SOLUTION
    near = math.gcd(layout.data, cluster.node // layout.tensor)
    links = cluster.inside(near), cluster.between
    sizes = 4 * n, (2 if layout.zero else 4) * n
    seconds = sum(planner.hierarchical_reduce_scatter(size, layout.data // near, near, *links) for size in sizes)
    return max(0.0, seconds - beside) if layout.overlap else seconds
    # END SOLUTION


def step_time(model, layout, cluster):
    """{"compute", "tensor", "bubble", "pipeline", "data"}: seconds of a step, in parts that add up."""
    # BEGIN SOLUTION
    tokens, t = model.sequence * layout.micro_batch, layout.tensor
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    compute, tensor = stage_time(model, layout, cluster)
    head = 6 * tokens * model.width * model.vocabulary / t / cluster.products / cluster.peak
    link = cluster.inside(2) if layout.ranks <= cluster.node else cluster.between
    message = link.latency + 2 * tokens * model.width / t / link.bandwidth
    waited = 0 if p == 1 else 2 * (p - 1) + (0 if layout.overlap else 2 * m * v)
    n = stage_parameters(model, layout, 0)[0]
    found = {"compute": m * (compute + head), "tensor": m * tensor, "pipeline": waited * message}
    found["bubble"] = (p - 1) / v * (compute + tensor)
    found["data"] = data_time(n, layout, cluster, 2 / 3 * compute)
    return found
    # END SOLUTION


# %%
tp.check(5, stage_time, data_time, step_time)


# %%
def show_times():
    """Where a step of 175 billion parameters goes on 1,024 H100s, by grid; the planner's seconds beside yours."""
    model, cluster = planner.GPT(12288, 96, 96), planner.Cluster(planner.H100)
    names = ("compute", "tensor", "bubble", "pipeline", "data")
    print(
        "estimate: 1,536 sequences a step\ntensor × pipeline × data   seconds  "
        + " ".join(f"{n:>9}" for n in names)
        + "   planner"
    )
    for t, p, d in ((1, 32, 32), (2, 16, 32), (4, 8, 32), (8, 8, 16), (8, 2, 64)):
        layout = planner.Layout(t, p, d, 1, 1536 // d, zero=1, sequence_parallel=t > 1)
        parts = step_time(model, layout, cluster)
        total = sum(parts.values())
        shares = " ".join(f"{parts[name] / total:9.1%}" for name in names)
        print(f"{name_of(layout):>24} {total:9.2f}   {shares} {planner.step_time(model, layout, cluster).total:9.2f}")


show_times()

# %% [markdown]
# More tensor ranks wait longer for their sums, more stages for each other, more data ranks for their gradients: each axis
# has its own price, and the cheapest grid is a compromise. The planner counts more (the optimizer's update, what a fused
# attention computes again), hides a little more, and says nearly the same.


# %% tags=["setup"]
def divisors(n):
    """All whole numbers that divide n, in order."""
    return [k for k in range(1, n + 1) if n % k == 0]


# %% [markdown]
# ### Balise 6 · The search · further · about 17 min
#
# `search(model, gpus, batch, node, memory, seconds, usable)` returns all layouts that divide and fit, the quickest first:
# a list of `(seconds, bytes, layout)`. Of equally quick ones the one that takes fewer bytes comes first. `memory(layout)` and
# `seconds(layout)` are functions that predict; `usable` is what a rank may take, in bytes. The layouts to try:
#
# - $t \cdot p \cdot d$ is `gpus`; $t$ divides the heads, and a node of `node` GPUs (or all GPUs, if they are fewer): tensor
#   ranks must not be torn over nodes; $p$ divides the layers;
# - $d$ divides `batch`, in sequences; of what is left for a pipeline, any number that divides it is the micro-batch, the rest
#   the number of micro-batches;
# - recomputation `"none"` and `"full"`. `zero=1` where $d > 1$, else 0; `sequence_parallel` where $t > 1$; the rest as it is.
#
# Where there is none, raise `planner.NoLayout` with a sentence: either that nothing divides, or how much the leanest layout
# takes, in GB (10⁹ bytes) with one decimal. About 12 lines.
#
# <details><summary>Hint</summary>
#
# `planner.Layout(tensor, pipeline, data, micro_batch, micro_batches, zero=…, recomputation=…, sequence_parallel=…)`. Two
# layouts have no order: sort by a `key`.
# </details>


# %% tags=["balise-6"]
def search(model, gpus, batch, node, memory, seconds, usable):
    """[(seconds, bytes, layout)] of all layouts that divide and fit, the quickest first."""
    # BEGIN SOLUTION
    layouts = [
        planner.Layout(t, p, d, b, batch // d // b, zero=int(d > 1), recomputation=kind, sequence_parallel=t > 1)
        for t in divisors(math.gcd(model.heads, min(node, gpus), gpus))
        for p in divisors(math.gcd(model.layers, gpus // t))
        for d in [gpus // t // p]
        if batch % d == 0
        for b in divisors(batch // d)
        for kind in ("none", "full")
    ]
    if not layouts:
        raise planner.NoLayout(f"no layout divides {gpus} GPUs, {model.layers} layers and a batch of {batch}")
    sizes = [memory(layout) for layout in layouts]
    found = [(seconds(layout), size, layout) for size, layout in zip(sizes, layouts) if size <= usable]
    if not found:
        raise planner.NoLayout(f"no layout fits: the leanest takes {min(sizes) / 1e9:.1f} GB")
    return sorted(found, key=lambda one: one[:2])
    # END SOLUTION


# %%
tp.check(6, search)

# %% [markdown]
# ## Predicted order, measured order
#
# Can a model that was made for 1,024 GPUs rank the six grids on this machine? It needs three numbers of it: a message's latency,
# a link's bandwidth, and what a rank computes while 7 others compute beside it. One thing is different here: our
# step sends each gradient by itself, a message a tensor, and here a message costs more than its bytes. So `data_time` is asked tensor by
# tensor. How good is the order? Spearman's rank correlation says it: 1 for the same order, 0 for none, −1 for the reverse.


# %%
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
    """Predicted seconds of a step of the small model: float32, nothing hidden, a message a gradient (sums as in bfloat16)."""
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
    print("tensor × pipeline × data   predicted   measured   what is predicted to cost most")
    for layout, parts, took in sorted(zip(SIX, guesses, seconds), key=lambda row: row[2]):
        most = max(parts, key=parts.get)
        print(f"{name_of(layout):>24} {1e3 * sum(parts.values()):8.0f} ms {1e3 * took:7.0f} ms   {most}")
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
# A prediction that is wrong in its seconds can still be right in its order, and choosing needs the order alone. Two things this machine
# has that the model has not: 8 ranks share its cores, so a rank that waits in the bubble lends its core to the others; and
# a sum waits for the rank that got a core last. Both make sums dearer and bubbles cheaper than predicted. On GPUs of one's own
# neither is there.

# %% [markdown]
# ### Balise 7 · The published table · further · about 14 min
#
# In 2021 the authors of Megatron-LM published ten runs, of 1.7 to 1,008 billion parameters, on 32 to 3,072 A100s. How well
# does your model foretell them? It has two constants that no data sheet knows: the share of the peak that `products` reach, and
# how often activations go through the memory (`traffic`). Choose them so that two of the runs come out; the other eight then
# are a test.
#
# - `paper_flops(model, batch)`: the operations of a step on `batch` sequences as the paper counts them, recomputation
#   included: $96\,B s l h^2 \left(1 + \frac{s}{6h} + \frac{V}{16lh}\right)$.
# - `fit_constants(seconds, measured)`: `seconds(k, products, traffic)` is what your model predicts for run k, 0 or 1, and
#   `measured` what these two took. Return `(products, traffic)` with which both come out, within 0.5 %. For one layout, seconds are
#   linear in 1 / products and in traffic, with a constant part: what is sent. But `seconds` is that of the quickest of several layouts, and another
#   one may be the quickest with other constants. Call `seconds` 2,000 times at most.
#
# About 2 and 8 lines.
#
# <details><summary>Hint</summary>
#
# Newton's method: with x = 1 / products and y = traffic, ask for the seconds at (x, y), a little farther in x and a little farther in
# y; solve two equations for two steps (`torch.linalg.solve`, float64); go there, and again. Begin at (1, 1), for instance.
# </details>


# %% tags=["balise-7"]
def paper_flops(model, batch):
    """Operations of a step on `batch` sequences, each layer's forward computed twice."""
    # BEGIN SOLUTION
    s, h, layers = model.sequence, model.width, model.layers
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + model.vocabulary / (16 * layers * h))
    # END SOLUTION


def fit_constants(seconds, measured):
    """(products, traffic) with which seconds(k, products, traffic) is measured[k], for k = 0 and 1."""
    # BEGIN SOLUTION
    x, step = torch.ones(2, dtype=torch.float64), 1e-3
    for _ in range(10):
        here, right, up = (
            torch.tensor([seconds(k, 1 / at[0].item(), at[1].item()) for k in (0, 1)], dtype=torch.float64)
            for at in (x, x + torch.tensor([step, 0]), x + torch.tensor([0, step]))
        )
        slopes = torch.stack([right - here, up - here], 1) / step
        x = x + torch.linalg.solve(slopes, torch.tensor(measured, dtype=torch.float64) - here)
    return 1 / x[0].item(), x[1].item()
    # END SOLUTION


# %%
tp.check(7, paper_flops, fit_constants)

# %% [markdown]
# The first and the last row give the constants. The paper says neither micro-batch nor chunks: for each run the
# quickest are taken. Nothing overlaps in these runs, and the attention is not fused.


# %%
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
    cluster = planner.Cluster(planner.A100, products=max(1e-3, min(products, 1)), traffic=max(0.0, traffic))
    return min(sum(step_time(run.model, layout, cluster).values()) for layout in known(run) if layout.micro_batch <= 64)


@functools.cache
def published():
    """(products, traffic, [(run, predicted TFLOP/s and GPU)])."""
    rows, ends = planner.MEGATRON, [planner.MEGATRON[0], planner.MEGATRON[-1]]
    measured = [paper_flops(run.model, run.batch) / run.gpus / run.tflops / 1e12 for run in ends]
    constants = fit_constants(lambda k, products, traffic: seconds_of(ends[k], products, traffic), measured)
    found = [paper_flops(run.model, run.batch) / seconds_of(run, *constants) / run.gpus / 1e12 for run in rows]
    return *constants, list(zip(rows, found))


def show_table():
    products, traffic, rows = published()
    print(f"products {products:.3f} of the peak, activations {traffic:.2f} times through the memory (from two rows)")
    print(" billions  counted    GPUs   TFLOP/s   predicted    error")
    for k, (run, found) in enumerate(rows):
        counted = stage_parameters(run.model, planner.Layout(), 0)[0] / 1e9
        left = f"{run.billions:9.1f} {counted:8.1f} {run.gpus:7} {run.tflops:9} {found:11.1f} "
        print(left + ("  (chosen so)" if k in (0, len(rows) - 1) else f"{found / run.tflops - 1:+8.1%}"))
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
    ax.plot([billions[0], billions[-1]], [rows[0][1], rows[-1][1]], "s", color="C0", label="chosen so")
    ax.set(xlabel="billions of parameters (32 to 3,072 A100s)", ylabel="TFLOP/s a GPU", ylim=(100, 180))
    ax.set(title="Ten runs of Megatron-LM, two constants", xticks=billions, xticklabels=[f"{x:g}" for x in billions])
    ax.minorticks_off()
    ax.tick_params(axis="x", labelsize=8)
    ax.legend(fontsize=9, frameon=False)
    plt.show()


draw_table()

# %% [markdown]
# Two numbers foretell eight runs, but the last line printed keeps us modest: all were tuned by experts, each grid for its
# model, and came out so close together that one number for all of them is not far off. A layout that nobody would choose is a harder
# test: `python benchmarks/plan.py` has some, from the same paper.

# %% [markdown]
# ## Past this machine · further
#
# 1,024 H100s in nodes of 8: 175 billion parameters with 1,536 sequences a step, and 1,000 billion with 3,072. Your search, with
# your memory and your seconds, tries all grids (estimates, with the constants of 2021's A100s).
#
# **Commit to a guess.** The network between the nodes gets twice as fast, and nothing else. By how many per cent is a step
# of the 175 billion quicker: 0, 2, 10 or 40? And if it is the links inside the nodes instead?


# %%
LARGE = {"175B": (planner.GPT(12288, 96, 96), 1536), "1T": (planner.GPT(25600, 128, 160), 3072)}
FASTER = {"as it is": (), "network × 2": ("network",), "links × 2": ("link",), "both × 2": ("network", "link")}


def found_for(name, faster=()):
    """(what `search` finds on 1,024 H100s, the cluster), these of a card's bandwidths being twice as high."""
    card = replace(planner.H100, **{key: 2 * getattr(planner.H100, key) for key in faster})
    (model, batch), cluster = LARGE[name], planner.Cluster(card)

    def memory(layout):
        return max(sum(rank_memory(model, layout, stage, MIXED).values()) for stage in {0, layout.pipeline - 1})

    def seconds(layout):
        return sum(step_time(model, layout, cluster).values())

    return search(model, 1024, batch, cluster.node, memory, seconds, 0.9 * card.memory), cluster


def show_large():
    for name, (model, batch) in LARGE.items():
        plans, cluster = found_for(name)
        print(
            f"\n{name}, {batch} sequences: {len(plans)} layouts fit\n   t ×  p ×   d  micro-batch  recomputed   seconds   GB    MFU"
        )
        for seconds, size, layout in plans[:4] + plans[-1:]:
            mfu = model.flops(batch) / seconds / 1024 / cluster.peak
            grid = f"{layout.tensor:4} × {layout.pipeline:2} × {layout.data:3} {layout.micro_batch:8} {layout.recomputation:>14}"
            print(
                f"{grid} {seconds:12.1f} {size / 1e9:5.0f} {mfu:6.1%}{'   the slowest' if layout is plans[-1][2] else ''}"
            )
        best = planner.search(model, cluster, 1024, batch)[0]
        one = best.layout
        print(
            f"the planner, which also tries chunks and ZeRO 2 and 3: {name_of(one)}, {one.chunks} chunks, {best.time.total:.1f} s"
        )


show_large()


# %%
def show_faster():
    print("       bandwidths      t ×  p ×   d   seconds   quicker   compute tensor bubble   data")
    for name, (model, _) in LARGE.items():
        for words, faster in FASTER.items():
            plans, cluster = found_for(name, faster)
            seconds, _, layout = plans[0]
            first = found_for(name)[0][0][0]
            parts = step_time(model, layout, cluster)
            shares = " ".join(f"{parts[part] / seconds:6.1%}" for part in ("compute", "tensor", "bubble", "data"))
            grid = f"{layout.tensor:4} × {layout.pipeline:2} × {layout.data:3}"
            print(f"{name:>5} {words:>12} {grid} {seconds:9.2f} {first / seconds - 1:9.1%}    {shares}")


show_faster()


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

# %% [markdown]
# <details><summary>And your guess?</summary>
#
# Little, either way. Gradients travel once a step and mostly beside computing, and the tensor ranks' sums are hidden in part by
# the products beside them: at so many sequences a step a good grid has made communication small already. Faster links
# also move the best grid: with more tensor ranks for the same price there are fewer stages, or fewer data ranks of more
# micro-batches each, and what is gained is bubble. The larger model gains least. Cut the batch to a quarter, and look again.
# </details>

# %% [markdown]
# ## Questions
#
# <details><summary>Why is the pipeline's axis the outermost in the mesh, and not the data ranks'?</summary>
#
# What crosses a cut is one activation for a micro-batch, from one rank to one: it bears the slowest links there are. Gradients are more
# bytes, in all-reduces between all data ranks, though they hide behind backward. With few nodes the other order can win; Megatron
# has an option for it. Count, do not believe: the bytes of a step over each link, as the cell after balise 1 does.
# </details>
#
# <details><summary>ZeRO 3 also shares out the parameters, and 1,024 data ranks fit without any other axis. Why is that not the end of it?</summary>
#
# Each data rank needs a row of its own: with 1,024 of them, a batch has at least 1,024 sequences, more than the training may bear.
# And it gathers the parameters for each micro-batch, however few tokens that has; the first table says what that costs. Where batches
# are large and links quick it is a good answer, and the simplest.
# </details>
#
# <details><summary>Two tensor ranks draw other dropout masks for what both hold whole. What happens, and which of your numbers shows it?</summary>
#
# Their activations differ from there on, and with them the gradients of norms and biases: the copies drift apart, and no error comes.
# The loss looks fine for a long time. The norm does not tell either, for it counts one copy. Compare the copies themselves now and
# then: a checksum of all that is not cut, over the tensor group.
# </details>
#
# <details><summary>A run on 2 × 4 × 128 breaks down, and you get 512 GPUs to go on. What must be in the checkpoint?</summary>
#
# The parameters in a form that knows nothing of the grid, or for each piece which part of which parameter it is: then any other grid
# can load it. Optimizer states belong to it, cut in the same way, and with ZeRO over data ranks as well. Half of the data ranks: with
# the batch and its order of rows as before, each takes twice as many micro-batches, and the same run goes on.
# </details>

# %% [markdown]
# ## In one paragraph
#
# A mesh gives each rank a place, and each axis its groups: tensor ranks next to each other, for they talk in every layer; stages
# farthest apart, for they send least. One step on all three is one process's step, if each sum runs over the ranks that hold different
# terms of it, and over no others: data ranks for gradients, both ends for tied words, all but copies for the norm. Which grid is best is
# a question of arithmetic: bytes of a rank, seconds of a step, then a search over all that divides and fits. Two constants
# from two runs foretell the others closely enough to choose. What is cut further costs communication, what is not cut does not
# fit: the best grid cuts no more than it must, and inside a node first.

# %%
tp.progress()
