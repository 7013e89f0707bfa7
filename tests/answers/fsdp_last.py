"""Answers to balises 8 and 9 of 14_fsdp: several backwards a step, hybrid sharding."""

from tests.answers.bank import Bank

bank = Bank("14_fsdp", whole=True)

SYNC = "        model.set_requires_gradient_sync(last)\n"
LAST = "        model.set_is_last_backward(last)\n"
SCALE = " * len(tokens) / sequences"
STEP = "    optimizer.step()\n"

# balise 8
bank.slip(8, "reduced-each-time", (SYNC, ""))
bank.slip(8, "reduced-each-time", (SYNC + LAST, ""))
bank.slip(
    8,
    "reduced-each-time",
    (SYNC, "        for block in model.blocks[:1]:\n            block.set_requires_gradient_sync(last)\n"),
)
bank.slip(8, "reduced-each-time", (SYNC, "        model.blocks[0].set_requires_gradient_sync(last)\n"))
bank.slip(8, "root-told-alone", (SYNC, "        model.set_requires_gradient_sync(last, recurse=False)\n"))
bank.slip(8, "never-reduced", (SYNC, "        model.set_requires_gradient_sync(False)\n"))
bank.slip(8, "never-last", (LAST, "        model.set_is_last_backward(False)\n"))
bank.slip(8, "never-last", (LAST, "        model.set_is_last_backward(not last)\n"))
bank.slip(
    8,
    "never-last",
    (LAST, ""),
    ("    total = 0.0\n", "    total = 0.0\n    model.set_is_last_backward(is_last_backward=False)\n"),
    (STEP, "    model.set_is_last_backward(True)\n" + STEP),
    variant=True,
)
bank.slip(
    8,
    "never-reduced",
    (SYNC, ""),
    ("        loss.backward()\n", "        loss.backward()\n" + SYNC),
    ("    total = 0.0\n", "    total = 0.0\n    model.set_requires_gradient_sync(False)\n"),
)
bank.slip(8, "never-reduced", (SYNC, "        model.set_requires_gradient_sync(last and len(micro_batches) > 1)\n"))
bank.slip(8, "sync-left-off", (STEP, STEP + "    model.set_requires_gradient_sync(False)\n"))
bank.slip(
    8,
    "no-sync-is-ddp",
    (SYNC + LAST, ""),
    (
        "        loss.backward()\n",
        "        with torch.enable_grad() if last else model.no_sync():\n            loss.backward()\n",
    ),
)
bank.slip(8, "losses-added", (SCALE, ""))
bank.slip(8, "mean-of-means", (SCALE, " / len(micro_batches)"))
bank.slip(8, "averaged-twice", (SCALE, SCALE + " / dist.get_world_size()"))
bank.slip(
    8,
    "updates-between",
    (STEP, ""),
    ("        loss.backward()\n", "        loss.backward()\n        optimizer.step()\n"),
)
bank.slip(8, "no-update", (STEP, ""))
bank.slip(8, "old-gradients-kept", ("    optimizer.zero_grad()\n", ""))
bank.slip(8, "accumulated-wrongly", (SCALE, " / number"))
bank.slip(8, "nothing-returned", ("    return total\n", ""))
bank.slip(8, "loss-with-graph", ("loss.detach()", "loss"))
bank.slip(8, "loss-of-last", ("return total", "return loss.detach()"))
bank.slip(8, "loss-of-last", ("return total", "return loss.detach() * sequences / len(tokens)"))
bank.slip(8, "wrong-mean-loss", ("return total", "return total / len(micro_batches)"))
bank.slip(
    8,
    "loss-not-a-number",
    ("    total = 0.0\n", "    total = []\n"),
    ("total += loss.detach()", "total.append(loss.item())"),
)
bank.text(
    8,
    "one-large-batch",
    """
def accumulate(model, micro_batches, optimizer):
    optimizer.zero_grad()
    loss = language_loss(model, torch.cat(micro_batches))
    loss.backward()
    optimizer.step()
    return loss.detach()
""",
)
bank.text(
    8,
    "one-large-batch",
    """
def accumulate(model, micro_batches, optimizer):
    sequences = sum(len(tokens) for tokens in micro_batches)
    optimizer.zero_grad()
    loss = sum(language_loss(model, tokens) * len(tokens) for tokens in micro_batches) / sequences
    loss.backward()
    optimizer.step()
    return loss.detach()
""",
)
bank.text(
    8,
    "around-the-shards",
    """
def accumulate(model, micro_batches, optimizer):
    sequences = sum(len(tokens) for tokens in micro_batches)
    optimizer.zero_grad()
    total = 0.0
    with torch.no_grad():
        for tokens in micro_batches:
            total += language_loss(model, tokens) * len(tokens) / sequences
    for number, tokens in enumerate(micro_batches, 1):
        model.set_requires_gradient_sync(number == len(micro_batches))
        (language_loss(model, tokens) * len(tokens) / sequences).backward()
    optimizer.step()
    return total
""",
)

bank.text(
    8,
    None,
    '''
def accumulate(model, micro_batches, optimizer):
    """A sum over tokens; only what is needed is told."""
    count = sum(tokens[:, 1:].numel() for tokens in micro_batches)
    losses = []
    model.set_requires_gradient_sync(False)
    for i, tokens in enumerate(micro_batches):
        if i == len(micro_batches) - 1:
            model.set_requires_gradient_sync(True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses)
''',
)
bank.text(
    8,
    None,
    '''
def accumulate(model, micro_batches, optimizer):
    """Every module told by itself, the switch thrown between forward and backward."""
    parts = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
    *first, last = micro_batches
    total = sum(map(len, micro_batches))

    def run(tokens, exchange):
        loss = language_loss(model, tokens) * (len(tokens) / total)
        for part in parts:
            part.set_requires_gradient_sync(exchange, recurse=False)
        loss.backward()
        return loss.detach()

    optimizer.zero_grad(set_to_none=True)
    losses = [run(tokens, False) for tokens in first] + [run(last, True)]
    optimizer.step()
    return torch.stack(losses).sum()
''',
)
bank.text(
    8,
    None,
    '''
import contextlib


@contextlib.contextmanager
def no_exchange(model):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


def accumulate(model, micro_batches, optimizer):
    """A context as DDP has it; the parameters stay gathered between micro-batches."""
    weights = [len(tokens) / sum(map(len, micro_batches)) for tokens in micro_batches]
    optimizer.zero_grad()
    losses = torch.zeros(len(micro_batches), dtype=torch.float64)
    for i, tokens in enumerate(micro_batches):
        with no_exchange(model) if i + 1 < len(micro_batches) else contextlib.nullcontext():
            loss = language_loss(model, tokens)
            (weights[i] * loss).backward()
        losses[i] = weights[i] * loss.detach()
    optimizer.step()
    return losses.sum()
''',
)

# balise 9
MESH = 'init_device_mesh(launch.device().type, (replicas, shards), mesh_dim_names=("replicate", "shard"))'
TEST = "    if rest:\n        raise ValueError"
CUT = "    return shard(model, mesh)\n"

bank.slip(9, "nothing-returned", (CUT, "    shard(model, mesh)\n"))
bank.slip(9, "hybrid-another-module", (CUT, "    return shard(__import__('copy').deepcopy(model), mesh)\n"))
bank.slip(9, "hybrid-not-sharded", (CUT, "    return model\n"))
bank.slip(9, "hybrid-root-only", (CUT, "    return fully_shard(model, mesh=mesh)\n"))
TOGETHER = "    fully_shard(list(model.blocks), mesh=mesh)\n    return fully_shard(model, mesh=mesh)\n"
bank.slip(9, "blocks-together", (CUT, TOGETHER))
EACH_LAYER = "    for part in model.blocks.modules():\n        if isinstance(part, torch.nn.Linear):\n            fully_shard(part, mesh=mesh)\n"
bank.slip(9, "every-layer", (CUT, EACH_LAYER + CUT))
KEPT = "    for block in model.blocks:\n        fully_shard(block, mesh=mesh, reshard_after_forward=False)\n    return fully_shard(model, mesh=mesh)\n"
bank.slip(9, "kept-whole", (CUT, KEPT))
bank.slip(
    9,
    "hybrid-root-only",
    (CUT, "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n    return model\n"),
)
bank.slip(9, "flat-mesh", (MESH, "make_mesh()"))
bank.slip(
    9, "flat-mesh", (CUT, "    for part in [*model.blocks, model]:\n        fully_shard(part)\n    return model\n")
)
bank.slip(
    9,
    "root-on-flat-mesh",
    (CUT, "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n    return fully_shard(model)\n"),
)
bank.slip(
    9,
    "mesh-turned",
    (
        CUT,
        '    return shard(model, torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(shards, replicas).T.contiguous(), mesh_dim_names=("a", "b")))\n',
    ),
)
bank.slip(
    9,
    "all-replicated",
    (MESH, "init_device_mesh(launch.device().type, (replicas * shards, 1), mesh_dim_names=('a', 'b'))"),
)
bank.slip(
    9,
    "counts-swapped",
    ("(replicas, shards), mesh", "(shards, replicas), mesh"),
    (CUT, "    return shard(model, mesh)\n"),
)
bank.slip(9, "counts-swapped", ("(replicas, shards), mesh", "(2, dist.get_world_size() // 2), mesh"))
bank.slip(9, "mesh-fails", ("(replicas, shards), mesh", "(replicas, dist.get_world_size()), mesh"))
bank.slip(
    9,
    "mesh-fails",
    ("(replicas, shards), mesh", "(2, 2), mesh"),
    ("    mesh = ", "    if replicas == 1:\n        return shard(model, make_mesh())\n    mesh = "),
)
bank.slip(9, "uneven-replicas", (TEST, "    if False:\n        raise ValueError"))
bank.slip(9, "uneven-replicas", (TEST, "    if rest:\n        raise RuntimeError"))
bank.slip(9, "uneven-replicas", ("    if rest:\n", "    if replicas > dist.get_world_size():\n"))
bank.slip(9, "mesh-without-names", (', mesh_dim_names=("replicate", "shard")', ""))
bank.slip(9, "replicas-drift", (CUT, '    return shard(model, mesh["shard"])\n'))
bank.slip(
    9,
    "hybrid-trains-wrong",
    (
        CUT,
        "    model = shard(model, mesh)\n    model.set_gradient_divide_factor(1.0)\n    for block in model.blocks:\n        block.set_gradient_divide_factor(1.0)\n    return model\n",
    ),
)

bank.text(
    9,
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
    9,
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
    9,
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

bank.text(
    8,
    None,
    """
def accumulate(model, micro_batches, optimizer):
    weights = torch.tensor([float(len(tokens)) for tokens in micro_batches])  # float32
    weights /= weights.sum()
    total = torch.zeros(())
    for k, (weight, tokens) in enumerate(zip(weights, micro_batches)):
        model.set_requires_gradient_sync(k + 1 == len(micro_batches))
        loss = language_loss(model, tokens)
        (weight * loss).backward()
        total = total + weight * loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total
""",
)


# what only GPUs show
bank.slip(8, "total-not-on-gpu", ("    total = 0.0\n", "    total = torch.zeros(())\n"))
bank.slip(8, "total-not-on-gpu", ("    total = 0.0\n", "    total = torch.tensor(0.0, dtype=torch.float64)\n"))
bank.slip(
    8,
    "total-not-on-gpu",
    ("    total = 0.0\n", "    found = torch.zeros(1)\n"),
    ("        total += loss.detach()\n", "        found.add_(loss.detach())\n"),
    ("    return total", "    return found"),
    variant=True,
)
bank.slip(9, "mesh-elsewhere", ("launch.device().type", '"cpu"'))
bank.slip(9, None, ("launch.device().type", "next(model.parameters()).device.type"))
