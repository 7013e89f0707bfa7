"""What answers to balises 2, 3, 4, 5 share."""

from torch.distributed.fsdp import fully_shard


def plain(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)
