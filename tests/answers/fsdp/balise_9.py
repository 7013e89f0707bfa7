"""Answers to balise 9 of 14_fsdp: hybrid sharding."""

from tests.answers.bank import Bank

bank = Bank("14_fsdp", 9, whole=True)

# balise 9
MESH = 'init_device_mesh(launch.device().type, (replicas, shards), mesh_dim_names=("replicate", "shard"))'

TEST = "    if rest:\n        raise ValueError"

CUT = "    return shard(model, mesh)\n"

bank.slip("nothing-returned", (CUT, "    shard(model, mesh)\n"))

bank.hint("hybrid-another-module", "Return the model that you were given, sharded in place.")
bank.slip("hybrid-another-module", (CUT, "    return shard(__import__('copy').deepcopy(model), mesh)\n"), variant=True)

bank.hint("hybrid-not-sharded", "{name} is a whole tensor on rank {rank}, not a shard.")
bank.slip("hybrid-not-sharded", (CUT, "    return model\n"), variant=True)

bank.hint(
    "hybrid-root-only",
    "{found} of {wanted} modules are sharded: pass each block and the root to fully_shard, with the mesh.",
)
bank.slip("hybrid-root-only", (CUT, "    return fully_shard(model, mesh=mesh)\n"))

TOGETHER = "    fully_shard(list(model.blocks), mesh=mesh)\n    return fully_shard(model, mesh=mesh)\n"

bank.slip("blocks-together", (CUT, TOGETHER))

EACH_LAYER = "    for part in model.blocks.modules():\n        if isinstance(part, torch.nn.Linear):\n            fully_shard(part, mesh=mesh)\n"

bank.slip("every-layer", (CUT, EACH_LAYER + CUT))

KEPT = "    for block in model.blocks:\n        fully_shard(block, mesh=mesh, reshard_after_forward=False)\n    return fully_shard(model, mesh=mesh)\n"

bank.slip("kept-whole", (CUT, KEPT))

bank.slip(
    "hybrid-root-only",
    (CUT, "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n    return model\n"),
    variant=True,
)

bank.hint(
    "flat-mesh",
    "{name} is sharded over all {size} ranks: nothing is replicated. Give fully_shard a mesh of two dimensions.",
)
bank.slip("flat-mesh", (MESH, "make_mesh()"))

bank.slip(
    "flat-mesh",
    (CUT, "    for part in [*model.blocks, model]:\n        fully_shard(part)\n    return model\n"),
    variant=True,
)

bank.hint(
    "root-on-flat-mesh",
    "The blocks are right, but {name} is sharded over all {size} ranks: the root needs the mesh too.",
)
bank.slip(
    "root-on-flat-mesh",
    (CUT, "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n    return fully_shard(model)\n"),
    variant=True,
)

bank.hint(
    "mesh-turned",
    "Ranks 0 and 1, neighbours on a node, hold the same part of {name}, while ranks 0 and {shards} hold different "
    "parts: the mesh dimensions are the wrong way round. The first one replicates, the second one shards.",
)
bank.slip(
    "mesh-turned",
    (
        CUT,
        '    return shard(model, torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(shards, replicas).T.contiguous(), mesh_dim_names=("a", "b")))\n',
    ),
    variant=True,
)

bank.hint(
    "all-replicated",
    "With {replicas} replicas on {size} ranks, each rank should hold 1/{wanted}. Here each rank holds everything.",
)
bank.slip(
    "all-replicated",
    (MESH, "init_device_mesh(launch.device().type, (replicas * shards, 1), mesh_dim_names=('a', 'b'))"),
    variant=True,
)

bank.hint(
    "counts-swapped",
    "With {replicas} replicas on {size} ranks, a parameter should have {wanted} parts. Here it has {found}.",
)
bank.slip(
    "counts-swapped",
    ("(replicas, shards), mesh", "(shards, replicas), mesh"),
    (CUT, "    return shard(model, mesh)\n"),
)

bank.slip("counts-swapped", ("(replicas, shards), mesh", "(2, dist.get_world_size() // 2), mesh"), variant=True)

bank.hint(
    "mesh-fails",
    "With {replicas} replicas on {size} ranks, shard_hybrid failed. Does the mesh have as many places as there are "
    "ranks, and the ranks' device type?",
)
bank.slip("mesh-fails", ("(replicas, shards), mesh", "(replicas, dist.get_world_size()), mesh"))

bank.slip(
    "mesh-fails",
    ("(replicas, shards), mesh", "(2, 2), mesh"),
    ("    mesh = ", "    if replicas == 1:\n        return shard(model, make_mesh())\n    mesh = "),
    variant=True,
)

bank.hint("uneven-replicas", "{size} ranks can't be divided into {replicas} replicas: raise a ValueError.")
bank.slip("uneven-replicas", (TEST, "    if False:\n        raise ValueError"))

bank.slip("uneven-replicas", (TEST, "    if rest:\n        raise RuntimeError"))

bank.slip("uneven-replicas", ("    if rest:\n", "    if replicas > dist.get_world_size():\n"), variant=True)

bank.hint(
    "mesh-without-names",
    "fully_shard needs names for the dimensions of a 2D mesh: set mesh_dim_names to any two words.",
)
bank.slip("mesh-without-names", (', mesh_dim_names=("replicate", "shard")', ""), variant=True)

bank.hint("replicas-drift", "After a step, the replicas have different weights: their gradients were never averaged.")
bank.slip("replicas-drift", (CUT, '    return shard(model, mesh["shard"])\n'), variant=True)

bank.hint("hybrid-trains-wrong", "After a step, the weights differ from those of one process on the whole batch.")
bank.slip(
    "hybrid-trains-wrong",
    (
        CUT,
        "    model = shard(model, mesh)\n    model.set_gradient_divide_factor(1.0)\n    for block in model.blocks:\n        block.set_gradient_divide_factor(1.0)\n    return model\n",
    ),
    variant=True,
)

bank.text(
    None,
    '''
def shard_hybrid(model, replicas):
    """A DeviceMesh from a table of ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    world_size = dist.get_world_size()
    if world_size % replicas:
        raise ValueError("uneven")
    mesh = DeviceMesh(launch.device().type, torch.arange(world_size).reshape(replicas, -1), mesh_dim_names=("outer", "inner"))
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    return model
''',
)

bank.text(
    None,
    '''
def shard_hybrid(model, replicas):
    """The dimensions made in the other order of names, then put in the order that fully_shard wants."""
    n = dist.get_world_size()
    if replicas > n or n % replicas != 0:
        raise ValueError(f"{n} ranks")
    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (replicas, n // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    for block in reversed(model.blocks):
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"], reshard_after_forward=True)
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    return model
''',
)

bank.text(
    None,
    '''
def shard_hybrid(model, replicas):
    """One replica needs no second dimension."""
    n = dist.get_world_size()
    if n % replicas:
        raise ValueError
    if replicas == 1:
        return shard(model, make_mesh())
    return shard(model, init_device_mesh(launch.device().type, (replicas, n // replicas), mesh_dim_names=("r", "s")))
''',
)

bank.hint(
    "mesh-elsewhere",
    "When each rank has a GPU, the shards are on {got}. Make the mesh with launch.device().type, not with a word "
    "that fits only this machine.",
)
bank.slip("mesh-elsewhere", ("launch.device().type", '"cpu"'), variant=True)

bank.slip(None, ("launch.device().type", "next(model.parameters()).device.type"))
