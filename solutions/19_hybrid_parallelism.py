# %% [markdown]
# # Hybrid parallelism: three dimensions, and the best compromise
#
# Placeholder of the opening.

# %% tags=["setup"]
import math

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz_tp import course, data, launch, measure, planner, report, scale, todo
from dlojz_tp.models import Transformer, TransformerConfig, language_loss
from dlojz_tp.parallel import Axis, Entrance, Exit, Mesh, SlicedBlock, Stage, run_pipeline

tp = course.open("19_hybrid_parallelism")
tp

# %% tags=["setup"]
FULL = scale() == "full"

# %% [markdown]
# ## The idea
#
# Placeholder.

# %% [markdown]
# ## Baseline
#
# Placeholder.

# %% [markdown]
# ### Balise 1 · A mesh of ranks
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
# ### Balise 2 · One step on three axes
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
# ### Balise 3 · The norm and the loss over the grid
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
# ## Our grid beside PyTorch's
#
# Placeholder after balise 3.

# %% [markdown]
# ## Which grid?
#
# The step is right on every grid. Which one is the best depends on two numbers: the bytes of the fullest rank, which must fit,
# and the seconds of a step. The planner (`python -m dlojz_tp plan`) predicts both. In the four balises that follow you write
# its heart yourself, in about 60 lines, and hold it against runs here and against ten published ones. That is the game's one
# rule: `planner.GPT`, `planner.Layout`, the cards and the collectives are given; the functions that you are to write are not.

# %% tags=["setup"]
MIXED = {  # bytes, bfloat16 with Adam, attention fused
    "parameter": 2, "gradient": 4, "optimizer": 12,  # of each parameter
    "whole": 10, "cut": 24,  # of a layer, for each token and channel: at norms and dropouts; between them, where heads are cut
    "input": 2,  # of a layer's input, for each token and channel
    "logit": 4,  # of each token and word
}  # fmt: skip

# %% [markdown]
# ### Balise 4 · The memory of a rank
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
#   a layer keeps its input alone (a `"whole"` thing), and one layer, the one that is being computed again, has everything.
#   The last stage adds the logits of one micro-batch, cut.
#
# About 5 and 14 lines, 15 minutes.
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
# Placeholder after balise 4.

# %% [markdown]
# ### Balise 5 · The time of a step
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
# of $4n$ bytes, then an all-gather of as many with ZeRO 0, of $2n$ with 1 (the parameters). `hierarchical_reduce_scatter` of the planner
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
# About 9, 4 and 10 lines, 20 minutes.
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


# %% tags=["setup"]
def divisors(n):
    """All whole numbers that divide n, in order."""
    return [k for k in range(1, n + 1) if n % k == 0]


# %% [markdown]
# ### Balise 6 · The search
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
# takes, in GB (10⁹ bytes) with one decimal. About 12 lines, 10 minutes.
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
# Placeholder after balise 6.

# %% [markdown]
# ### Balise 7 · The published table
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
# About 2 and 8 lines, 10 minutes.
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
# ## Past this machine
#
# Placeholder.

# %% [markdown]
# ## Questions
#
# Placeholder.

# %% [markdown]
# ## In one paragraph
#
# Placeholder.

# %%
tp.progress()
