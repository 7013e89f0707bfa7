"""Races of 13: a training step of a small Llama on two ranks, with stage 1 and with stage 3."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dlojz_tp.judging.contest import Contest, device
from dlojz_tp.models import Llama, LlamaConfig, language_loss

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


def _model():
    size = (
        {"width": 1024, "heads": 16, "layers": 8}
        if device().type == "cuda"
        else {"width": 128, "heads": 4, "layers": 3}
    )
    torch.manual_seed(0)
    return Llama(LlamaConfig(1000, max_length=64, **size)).to(device())


def _step(model, optimizer):
    torch.manual_seed(1000 + dist.get_rank())
    tokens = torch.randint(1000, (4, 33), device=device())

    def step():
        optimizer.zero_grad()
        language_loss(model, tokens).backward()
        optimizer.step()

    return step


def stage_1(ShardedOptimizer):  # noqa: N803
    model = _model()
    return _step(model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS))


def stage_3(_, ShardedParameters):  # noqa: N803
    model = _model()
    layers = [model.token_embedding, *model.blocks, model.norm, model.head]
    return _step(model, ShardedParameters(layers, torch.optim.AdamW, **OPTIONS))


def redundancy():
    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    return _step(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS))


def fully():
    model = _model()
    for layer in (*model.blocks, model):
        fully_shard(layer)
    return _step(model, torch.optim.AdamW(model.parameters(), **OPTIONS))


RACES = {
    3: Contest("ZeroRedundancyOptimizer", stage_1, redundancy, ranks=2),
    5: Contest("fully_shard", stage_3, fully, ranks=2),
}
