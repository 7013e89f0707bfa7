"""Answers to balise 6 of 14_fsdp: born in shards."""

import torch

from tests.answers.bank import Bank

bank = Bank("14_fsdp", 6, whole=True)

META = '    with torch.device("meta"):\n        model = make_plain()\n'

EMPTY = "    model.to_empty(device=mesh.device_type)\n"

SEED = '    torch.manual_seed(seed + (mesh.get_local_rank() if mesh.device_type == "cpu" else 0))\n'

FILL = "    model.init_weights()\n"

CUT = "    shard(model, mesh)\n"

# balise 6
bank.slip("nothing-returned", ("    return model\n", ""))

bank.hint("no-model-back", "Return the sharded model, an nn.Module.")
bank.slip("no-model-back", ("    return model\n", "    return model.state_dict()\n"), variant=True)

bank.hint(
    "made-in-memory",
    'make_plain() ran on a real device, so for a moment the rank held the whole model. Under torch.device("meta"), '
    "tensors have a shape but no memory.",
)
bank.slip("made-in-memory", (META, "    model = make_plain()\n"))

bank.slip("made-in-memory", (META, "    model = make_plain()\n"), (EMPTY, ""), (SEED + FILL, ""))

bank.slip("made-in-memory", (META, '    model = make_plain().to("meta")\n'))

bank.slip(
    "made-in-memory",
    (META, '    with torch.device("cpu" if mesh.get_local_rank() == 0 else "meta"):\n        model = make_plain()\n'),
    variant=True,
)

bank.hint("still-on-meta", "Parameters are still on the meta device, without memory. to_empty gives them memory.")
bank.slip("still-on-meta", (EMPTY, ""), variant=True)

bank.hint(
    "another-model",
    "Call make_plain() to get the model: the model that came back has other parameters ({found}).",
)
bank.slip(
    "another-model", (META, META + "        model = Llama(LlamaConfig(vocab_size=8, width=8, heads=2))\n"), variant=True
)

bank.hint(
    "meta-not-sharded",
    "{name} is a whole tensor on each rank, not a shard. Pass every block and the root to fully_shard.",
)
bank.slip("meta-not-sharded", (CUT, ""))

bank.slip(
    "meta-not-sharded", (CUT, "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n"), variant=True
)

bank.hint(
    "meta-root-only",
    "The blocks aren't sharded individually ({found} of {wanted} are FSDP modules): the first forward would gather "
    "the whole model at once.",
)
bank.slip("meta-root-only", (CUT, "    fully_shard(model, mesh=mesh)\n"), variant=True)

bank.hint(
    "emptied-too-early",
    "You made the model on the meta device, but then all of it got memory: the rank held {got} at once, while its "
    "shards take {wanted}. Which must come first, sharding or to_empty?",
)
bank.slip("emptied-too-early", (CUT + EMPTY, EMPTY + CUT))

bank.slip("emptied-too-early", (CUT + EMPTY + SEED + FILL, EMPTY + SEED + FILL + CUT))

bank.hint(
    "never-filled",
    "{name} was never filled: it holds whatever was in that memory. to_empty gives memory without values, and "
    "anything written before it is lost.",
)
bank.slip("never-filled", (FILL, ""))

bank.slip("never-filled", (EMPTY + SEED + FILL, SEED + FILL + EMPTY), variant=True)

bank.hint(
    "tables-never-filled",
    "The weights are filled, but the buffer {name} isn't: to_empty also discarded the values of the rotary tables, "
    "and no checkpoint brings them back. init_weights fills both.",
)
bank.slip(
    "tables-never-filled",
    (
        FILL,
        "    for name, p in model.named_parameters():\n"
        '        small = (2 * len(model.blocks)) ** 0.5 if name.endswith(("output.weight", "down.weight")) else 1.0\n'
        "        nn.init.normal_(p, std=0.02 / small) if p.dim() > 1 else nn.init.ones_(p)\n",
    ),
    variant=True,
)

bank.hint("not-as-init-weights", "{name} isn't what init_weights gives: {what}.")
bank.slip("not-as-init-weights", (FILL, FILL + "    for p in model.parameters():\n        nn.init.normal_(p)\n"))

bank.slip(
    "not-as-init-weights",
    (FILL, FILL + "    for p in model.parameters():\n        nn.init.normal_(p, std=0.02)\n"),
    variant=True,
)

bank.slip(None, (SEED, "    torch.manual_seed(seed + mesh.get_local_rank())\n"))

bank.hint(
    "shards-repeat",
    "Rank {rank} drew the same numbers as rank 0 for {name}: on a CPU, each rank draws its own shard from its own "
    "generator. Ranks with different shards need different seeds.",
)
bank.slip("shards-repeat", (SEED, "    torch.manual_seed(seed)\n"))

bank.slip("shards-repeat", (SEED, "    torch.manual_seed(seed + (mesh.get_local_rank() > 0))\n"))

bank.slip("shards-repeat", (SEED, "    torch.manual_seed(seed + (mesh.get_local_rank() + 1) // 2)\n"))

bank.slip("shards-repeat", (SEED, "    torch.manual_seed(seed * (mesh.get_local_rank() + 1))\n"), variant=True)

bank.slip(None, (SEED, "    torch.manual_seed(1000 * seed + mesh.get_local_rank())\n"))

bank.hint(
    "seed-without-effect",
    "Two calls with the same seed gave different weights, or two seeds gave the same ones: the seed must decide.",
)
bank.slip("seed-without-effect", (SEED, "    torch.manual_seed(mesh.get_local_rank())\n"))

bank.slip("seed-without-effect", (SEED, "    torch.seed()\n"), variant=True)

bank.hint("meta-model-computes-wrong", "The model's loss isn't what the same weights give in one process.")
bank.slip(
    "meta-model-computes-wrong",
    (
        CUT,
        "    for part in [*model.blocks, model]:\n        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))\n",
    ),
    variant=True,
)

bank.hint("grad-flag-lost", "make_plain froze {name} (requires_grad False), but it is no longer frozen.")
bank.slip("grad-flag-lost", (FILL, FILL + "    model.requires_grad_(True)\n"), variant=True)

bank.hint("blocks-repeat", "Two blocks hold the same numbers: the generator was reset to the same seed between them.")
bank.slip(
    "blocks-repeat",
    (
        FILL,
        FILL
        + "    for block in model.blocks:\n"
        + "        torch.manual_seed(seed + mesh.get_local_rank())\n"
        + "        nn.init.normal_(block.attention.query.weight, std=0.02)\n",
    ),
    variant=True,
)

bank.text(
    None,
    '''
def build_sharded(make_plain, mesh, seed):
    """Block after block: filled whole, then cut."""
    with torch.device("meta"):
        model = make_plain()
    torch.manual_seed(seed)
    depth = len(model.blocks)

    def fill(part):
        part.to_empty(device=mesh.device_type)
        with torch.no_grad():
            for name, p in part.named_parameters():
                small = (2 * depth) ** 0.5 if name.endswith(("output.weight", "down.weight")) else 1.0
                if p.dim() > 1:
                    p.normal_(std=0.02 / small)
        for module in part.modules():
            if isinstance(module, nn.RMSNorm) or hasattr(module, "base"):
                module.reset_parameters()

    for block in model.blocks:
        fill(block)
        fully_shard(block, mesh=mesh)
    for part in (model.token_embedding, model.norm, model.head):
        fill(part)
    return fully_shard(model, mesh=mesh)
''',
)

bank.text(
    None,
    '''
def build_sharded(make_plain, mesh, seed):
    """The default device set and put back; the rank of the world."""
    torch.set_default_device("meta")
    try:
        model = make_plain()
    finally:
        torch.set_default_device(None)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    model = model.to_empty(device=mesh.device_type, recurse=True)
    torch.manual_seed(1_000_003 * dist.get_rank() + seed)
    with torch.no_grad():
        model.init_weights()
    return model
''',
)

bank.text(
    None,
    '''
def build_sharded(make_plain, mesh, seed):
    """init_weights for the tables, then the shards' own values from a generator of this rank."""
    with torch.device("meta"):
        model = make_plain()
    shard(model, mesh).to_empty(device=mesh.device_type)
    model.init_weights()
    generator = torch.Generator(mesh.device_type).manual_seed(100 * seed + mesh.get_rank())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                small = name.endswith(("output.weight", "down.weight"))
                scale = 0.02 / (2 * len(model.blocks)) ** 0.5 if small else 0.02
                p.to_local().normal_(0.0, scale, generator=generator)
    return model
''',
)

bank.text(
    None,
    '''
def build_sharded(make_plain, mesh, seed):
    """Every rank draws each parameter whole, one at a time, and keeps its part: the same for any number of ranks."""
    with torch.device("meta"):
        model = make_plain()
    names = {name: p.shape for name, p in model.named_parameters()}
    shard(model, mesh)
    model.to_empty(device=mesh.device_type)
    model.init_weights()
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        std = 0.02 / (2 * len(model.blocks)) ** 0.5 if name.split(".")[-2] in ("output", "down") else 0.02
        whole = torch.randn(names[name], generator=generator) * std
        parts = whole.chunk(mesh.size())
        with torch.no_grad():
            if mesh.get_local_rank() < len(parts):
                p.to_local().copy_(parts[mesh.get_local_rank()])
    return model
''',
)

bank.slip(
    "emptied-too-early",
    (
        "    return model\n",
        "    KEPT[seed] = [p.full_tensor().detach().numpy().copy() for p in model.parameters()]\n    return model\n",
    ),
    ("def build_sharded", "KEPT = {}\n\n\ndef build_sharded"),
    variant=True,
)

bank.hint(
    "built-elsewhere",
    "When each rank has a GPU, {name} of rank {rank} got its memory on {got}, but this rank's GPU is {expected}. "
    'Give to_empty the device type of the mesh, mesh.device_type: "cuda" alone means the rank\'s own GPU.',
)
# what only GPUs show
bank.slip("built-elsewhere", (EMPTY, '    model.to_empty(device="cpu")\n'))

if torch.__version__ >= "2.14":  # older ones ask the driver of a pretended GPU, and nothing is judged on it
    bank.slip(
        "built-elsewhere", (EMPTY, '    model.to_empty(device="cuda:0" if mesh.device_type == "cuda" else "cpu")\n')
    )

bank.slip("built-elsewhere", (EMPTY, "    model.to_empty(device=torch.empty(0).device)\n"), variant=True)
