"""Race of 17: forward and backward of a feed-forward cut over two ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dlojz_tp.judging.checks.tensor_slicing.right_ranks import CheckRanks
from dlojz_tp.judging.contest import Contest, device
from dlojz_tp.models import FeedForward


def _turn(cut):
    """cut(plain feed-forward): the one that is cut."""
    width, rows = (1024, 4096) if device().type == "cuda" else (256, 512)
    torch.manual_seed(0)
    layer = cut(FeedForward(width, 4 * width).to(device()))
    x = torch.randn(1, rows, width, device=device(), requires_grad=True)

    def turn():
        for p in (x, *layer.parameters()):
            p.grad = None
        layer(x).sum().backward()

    return turn


def yours(ColumnRow):  # noqa: N803
    return _turn(lambda plain: ColumnRow(plain, CheckRanks()))


def theirs():
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    return _turn(lambda plain: parallelize_module(plain, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}))


RACES = {6: Contest("parallelize_module", yours, theirs, ranks=2)}
