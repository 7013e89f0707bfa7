"""Run a stage of a transformer: micro-batches forward and backward, messages to the neighbours."""

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz_tp import launch
from dlojz_tp.planner import gpipe, one_f_one_b

from .axis import Mesh
from .sliced import Stage, sliced_loss

SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b}


def run_pipeline(
    part: Stage, mesh: Mesh, rows: Tensor, n_micro_batches: int = 1, schedule: str = "1F1B"
) -> Tensor | None:
    """Forward and backward of these rows through the stages of this rank's pipeline; gradients add up in `p.grad`.

    Call it on all ranks of the pipeline, with the same rows. rows: tokens (b, s + 1), of which the model reads the
    first s and foretells the last s. n_micro_batches: b at most are made; they differ by a row where b does not divide.
    Returns the mean loss of the rows on the last stage, detached; None on the others.
    """
    axis, n_micro_batches, works, kept, total = mesh.pipeline, min(n_micro_batches, len(rows)), [], {}, None
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    before, behind = None if first else axis.ranks[axis.rank - 1], None if last else axis.ranks[axis.rank + 1]
    batches, dtype = rows.tensor_split(n_micro_batches), next(part.parameters()).dtype
    for kind, k in SCHEDULES[schedule](axis.size, n_micro_batches)[axis.rank]:
        if kind == "F":
            tokens = batches[k]
            x = tokens[:, :-1]
            if not first:
                x = _received((*x.shape, part.width), dtype, before, "activations", k).requires_grad_()
            y = part(x)
            if last:
                y = sliced_loss(y.flatten(0, 1), tokens[:, 1:].flatten(), mesh.tensor) * (len(tokens) / len(rows))
                total = y.detach() if total is None else total + y.detach()
            kept[k] = x, y, [] if last else [_sent(y.detach(), behind, "activations", k)]
        else:
            x, y, sent = kept.pop(k)
            gradient = None if last else _received(y.shape, dtype, behind, "gradients", k)
            for work in sent:
                work.wait()  # has arrived, since the gradient is here: lets go of the output's memory
            if y.requires_grad:  # else all of it is frozen
                y.backward(gradient)
            if not first:
                works.append(_sent(x.grad, before, "gradients", k))
            del x, y, gradient
    for work in works:
        work.wait()
    return total


def _sent(tensor: Tensor, peer: int, lane: str, k: int) -> dist.Work:
    return dist.isend(tensor.contiguous(), peer, group=launch.lane(lane), tag=k)


def _received(shape: tuple, dtype: torch.dtype, peer: int, lane: str, k: int) -> Tensor:
    buffer = torch.empty(shape, dtype=dtype, device=launch.device())
    dist.recv(buffer, peer, group=launch.lane(lane), tag=k)
    return buffer
