"""What the checks over ranks share: meshes, a tiny transformer in float64, and what each rank holds of it."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp.judging.probes.networks import twin
from dlojz_tp.judging.probes.seeded import seeded
from dlojz_tp.models import Transformer, TransformerConfig, language_loss
from dlojz_tp.parallel import Axis, Entrance, Exit, Mesh, SlicedBlock, Stage

LAYERS, VOCABULARY, LENGTH = 5, 12, 5
#           (pipeline, data, tensor), tied head
MESHES = {
    4: [((2, 2, 1), True), ((1, 2, 2), True), ((2, 1, 2), False), ((1, 4, 1), False), ((2, 1, 2), True)],
    3: [((3, 1, 1), True)],
}


def told(shape, tied) -> str:
    """A mesh and the model's head in words: the `at` and the `where` of a look."""
    return "pipeline {} × data {} × tensor {}".format(*shape) + ", tied head" * tied


def place(rank: int, shape) -> tuple[int, int, int]:
    """Coordinates of a rank: tensor counts up first."""
    _, d, t = shape
    return rank // (d * t), rank // t % d, rank % t


def mesh_of(rank: int, shape, join=lambda members: None) -> Mesh:
    """The mesh of a rank; join(members) makes a group and gives it, on all ranks in one order."""
    world, own = range(shape[0] * shape[1] * shape[2]), place(rank, shape)
    found = []
    for axis in range(3):
        others = [k for k in range(3) if k != axis]
        teams = {tuple(place(r, shape)[k] for k in others): [] for r in world}
        for r in world:
            teams[tuple(place(r, shape)[k] for k in others)].append(r)
        found.append([_axis(members, join, rank) for members in teams.values()])
    pipelines = [axis.ranks for axis in found[0]]
    ends = [_axis(sorted({members[0], members[-1]}), join, rank) for members in pipelines]
    mine = [next((axis for axis in some if rank in axis.ranks), None) for some in (*found, ends)]
    assert mine[0].rank == own[0]
    return Mesh(tensor=mine[2], data=mine[1], pipeline=mine[0], ends=mine[3])


def _axis(members, join, rank) -> Axis:
    axis = Axis.__new__(Axis)  # without a process group where no rank runs
    axis.group, axis.ranks, axis.size = join(members), members, len(members)
    axis.rank = members.index(rank) if rank in members else None
    return axis


def joined(shape) -> Mesh:
    """On a rank: its mesh, with process groups."""
    dist.barrier()  # new_group asks a file again and again where another rank is: who waits for ever shall be seen to
    return mesh_of(dist.get_rank(), shape, dist.new_group)


@cache
def own(tied: bool) -> Transformer:
    """The model, float64; the positions and a norm's bias are frozen. The check's own: give answers a copy."""
    config = TransformerConfig(VOCABULARY, width=8, heads=2, layers=LAYERS, max_length=LENGTH, tied_head=tied)
    with seeded(4):
        model = Transformer(config).double()
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
    model.position_embedding.weight.requires_grad_(False)
    model.blocks[1].norm_attention.bias.requires_grad_(False)
    return model


for _tied in (True, False):
    own(_tied)  # once where ranks are forked, not once a rank


def plain(tied: bool) -> Transformer:
    """A copy of the model."""
    return twin(own(tied))


def batch(rows: int) -> torch.Tensor:
    """Tokens (rows, LENGTH + 1)."""
    return torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(rows))


def pieces(model: Transformer, tensor: Axis) -> dict[str, nn.Module]:
    """All layers of the model in order, cut over the tensor ranks."""
    blocks = {f"block {k}": SlicedBlock(block, tensor) for k, block in enumerate(model.blocks)}
    return {"Entrance": Entrance(model, tensor), **blocks, "Exit": Exit(model, tensor)}


def part(model: Transformer, mesh: Mesh) -> Stage:
    """What a rank holds."""
    stage, n = mesh.pipeline.rank, mesh.pipeline.size
    entrance, *blocks, head = pieces(model, mesh.tensor).values()
    layers = blocks[len(blocks) * stage // n : len(blocks) * (stage + 1) // n]
    if stage == 0:
        layers = [entrance, *layers]
    if stage == n - 1:
        layers = [*layers, head]
    if n == 1 and model.config.tied_head:
        head.words = entrance.words
    return Stage(layers)


def gradients(tied: bool, rows: int, mesh: Mesh) -> torch.Tensor:
    """Those of `part(...)` for the whole batch, in one vector."""
    return torch.cat([p.detach().flatten() for p in part(truth(tied, rows)[2], mesh).parameters()])


@cache
def truth(tied: bool, rows: int) -> tuple[float, float, Transformer]:
    """Loss of the whole batch, norm of its gradient, and a model whose weights are the gradients (0 where frozen)."""
    model = plain(tied)
    loss = language_loss(model, batch(rows))
    loss.backward()
    with torch.no_grad():
        square = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    return loss.item(), square.sqrt().item(), model


@cache
def share_loss(tied: bool, rows: int, n: int, k: int) -> float:
    """The mean loss of the k-th of n shares of the rows."""
    return language_loss(own(tied), batch(rows).tensor_split(n)[k]).item()
