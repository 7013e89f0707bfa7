"""Living bytes where storages are resized in place, and what a rank of a sharded model holds."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlojz_tp import launch, measure


def test_a_resized_storage_is_followed():
    with measure.ShardBytes() as live:
        x = torch.zeros(1000)
        assert live.live == 4000
        x.untyped_storage().resize_(0)
        y = torch.ones(10)
        assert live.live == 40
        x.untyped_storage().resize_(4000)
        live.reset_peak()
        assert live.live == live.peak == 4040
        assert live.parts_at_peak["gathered"] == 4000
        del x, y
    assert live.live == 0


def test_the_bytes_of_shared_storages_count_once():
    layer = nn.Linear(10, 10)
    assert measure.shard_bytes(layer, layer.weight, [layer.weight]) == 440


def _sharded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    live = measure.ShardBytes(record=True)
    for _ in range(3):
        with live.track(model, optimizer):
            live.history.clear()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    gathered = [row.get("gathered", 0) for row in live.history]
    return measure.shard_bytes(model), measure.shard_bytes(optimizer), max(gathered), gathered[-1]


def test_a_sharded_model_gathers_a_layer_at_a_time_and_frees_it():
    layer = 64 * 64 * 4
    for parameters, states, most, left in launch.ranks(_sharded, n=2):
        assert parameters == 4 * layer // 2
        assert 8 * layer // 2 <= states <= 8 * layer // 2 + 64  # Adam's step counters
        assert layer <= most <= 2 * layer
        assert left == 0
