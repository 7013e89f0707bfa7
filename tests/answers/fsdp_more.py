"""Answers to balises 6 and 7 of 14_fsdp: born in shards, checkpoints of shards."""

import torch

from tests.answers.bank import Bank

bank = Bank("14_fsdp", whole=True)

META = '    with torch.device("meta"):\n        model = make_plain()\n'
EMPTY = "    model.to_empty(device=mesh.device_type)\n"
SEED = '    torch.manual_seed(seed + (mesh.get_local_rank() if mesh.device_type == "cpu" else 0))\n'
FILL = "    model.init_weights()\n"
CUT = "    shard(model, mesh)\n"

# balise 6
bank.slip(6, "nothing-returned", ("    return model\n", ""))
bank.slip(6, "no-model-back", ("    return model\n", "    return model.state_dict()\n"))
bank.slip(6, "made-in-memory", (META, "    model = make_plain()\n"))
bank.slip(6, "made-in-memory", (META, "    model = make_plain()\n"), (EMPTY, ""), (SEED + FILL, ""))
bank.slip(6, "made-in-memory", (META, '    model = make_plain().to("meta")\n'))
bank.slip(
    6,
    "made-in-memory",
    (META, '    with torch.device("cpu" if mesh.get_local_rank() == 0 else "meta"):\n        model = make_plain()\n'),
)
bank.slip(6, "still-on-meta", (EMPTY, ""))
bank.slip(
    6,
    "another-model",
    (META, META + "        model = Llama(LlamaConfig(vocab_size=8, width=8, heads=2))\n"),
)
bank.slip(6, "meta-not-sharded", (CUT, ""))
bank.slip(6, "meta-not-sharded", (CUT, "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n"))
bank.slip(6, "meta-root-only", (CUT, "    fully_shard(model, mesh=mesh)\n"))
bank.slip(6, "emptied-too-early", (CUT + EMPTY, EMPTY + CUT))
bank.slip(6, "emptied-too-early", (CUT + EMPTY + SEED + FILL, EMPTY + SEED + FILL + CUT))
bank.slip(6, "never-filled", (FILL, ""))
bank.slip(6, "never-filled", (EMPTY + SEED + FILL, SEED + FILL + EMPTY))
bank.slip(
    6,
    "tables-never-filled",
    (
        FILL,
        "    for name, p in model.named_parameters():\n"
        '        small = (2 * len(model.blocks)) ** 0.5 if name.endswith(("output.weight", "down.weight")) else 1.0\n'
        "        nn.init.normal_(p, std=0.02 / small) if p.dim() > 1 else nn.init.ones_(p)\n",
    ),
)
bank.slip(6, "not-as-init-weights", (FILL, FILL + "    for p in model.parameters():\n        nn.init.normal_(p)\n"))
bank.slip(
    6, "not-as-init-weights", (FILL, FILL + "    for p in model.parameters():\n        nn.init.normal_(p, std=0.02)\n")
)
bank.slip(6, None, (SEED, "    torch.manual_seed(seed + mesh.get_local_rank())\n"))
bank.slip(6, "shards-repeat", (SEED, "    torch.manual_seed(seed)\n"))
bank.slip(6, "shards-repeat", (SEED, "    torch.manual_seed(seed + (mesh.get_local_rank() > 0))\n"))
bank.slip(6, "shards-repeat", (SEED, "    torch.manual_seed(seed + (mesh.get_local_rank() + 1) // 2)\n"))
bank.slip(6, "shards-repeat", (SEED, "    torch.manual_seed(seed * (mesh.get_local_rank() + 1))\n"))
bank.slip(6, None, (SEED, "    torch.manual_seed(1000 * seed + mesh.get_local_rank())\n"))
bank.slip(6, "seed-without-effect", (SEED, "    torch.manual_seed(mesh.get_local_rank())\n"))
bank.slip(6, "seed-without-effect", (SEED, "    torch.seed()\n"))
bank.slip(
    6,
    "meta-model-computes-wrong",
    (
        CUT,
        "    for part in [*model.blocks, model]:\n        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))\n",
    ),
)
bank.slip(6, "grad-flag-lost", (FILL, FILL + "    model.requires_grad_(True)\n"))
bank.slip(
    6,
    "blocks-repeat",
    (
        FILL,
        FILL
        + "    for block in model.blocks:\n"
        + "        torch.manual_seed(seed + mesh.get_local_rank())\n"
        + "        nn.init.normal_(block.attention.query.weight, std=0.02)\n",
    ),
)

bank.text(
    6,
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
    6,
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
    6,
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
    6,
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

# balise 7
STATE = '{"model": weights, "optimizer": states, "step": step}'
SAVE = f"    dcp.save({STATE}, checkpoint_id=folder)\n"
GET = "    weights, states = get_state_dict(model, optimizer)\n"
LOAD = "    dcp.load(state, checkpoint_id=folder)\n"
SET = '    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])\n'

bank.slip(7, "nothing-in-folder", (SAVE, ""))
bank.slip(7, "nothing-in-folder", (SAVE, SAVE.replace("=folder", '=str(folder) + "-step"')))
bank.slip(7, "still-writing", (SAVE, SAVE.replace("dcp.save(", "dcp.async_save(")))
bank.slip(7, "folder-for-each-rank", (SAVE, SAVE.replace("=folder", '=Path(folder) / f"rank{dist.get_rank()}"')))
bank.slip(
    7,
    "not-a-distributed-checkpoint",
    (
        SAVE,
        f'    Path(folder).mkdir(exist_ok=True)\n    torch.save({STATE}, Path(folder) / f"{{dist.get_rank()}}.pt")\n',
    ),
)
bank.slip(
    7,
    "not-a-distributed-checkpoint",
    (
        SAVE,
        "    if dist.get_rank() == 0:\n        Path(folder).mkdir(exist_ok=True)\n"
        f'        torch.save({STATE}, Path(folder) / "checkpoint.pt")\n    dist.barrier()\n',
    ),
)
FULL_STATE = (
    "    from torch.distributed.checkpoint.state_dict import StateDictOptions\n\n"
    "    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))\n"
)
bank.slip(7, "gathered-to-save", (GET + SAVE, FULL_STATE + SAVE))
bank.slip(
    7,
    "gathered-to-save",
    (GET + SAVE, GET + "    weights = {name: value.full_tensor() for name, value in weights.items()}\n" + SAVE),
)
bank.slip(
    7,
    "one-rank-writes",
    (
        SAVE,
        "    if dist.get_rank() == 0:\n    "
        + SAVE.replace("=folder", "=folder, no_dist=True")
        + "    dist.barrier()\n",
    ),
)
bank.slip(
    7,
    "several-checkpoints",
    (
        SAVE,
        '    dcp.save({"model": weights, "step": step}, checkpoint_id=Path(folder) / "model")\n'
        '    dcp.save({"optimizer": states}, checkpoint_id=Path(folder) / "optimizer")\n',
    ),
)
bank.slip(7, "another-folder", (SAVE, SAVE.replace("=folder", '=f"{folder}/{step}"')))
bank.slip(7, "another-folder", (SAVE, SAVE.replace("=folder", '=Path(folder) / "last" / "checkpoint"')), variant=True)
bank.slip(7, "optimizer-not-saved", (SAVE, SAVE.replace('"optimizer": states, ', "")))
bank.slip(7, "weights-not-saved", (SAVE, SAVE.replace('"model": weights, ', "")))
bank.slip(7, "step-not-returned", ('    return state["step"]\n', "    return state\n"))
bank.slip(7, "weights-not-loaded", (LOAD, ""))
TRAINED_ONLY = GET.replace(
    "optimizer)", "optimizer, options=torch.distributed.checkpoint.state_dict.StateDictOptions(ignore_frozen_params=True))"
)
bank.slip(
    7,
    "weights-not-loaded",
    (GET + SAVE, TRAINED_ONLY + SAVE),
    (GET + "    state", TRAINED_ONLY + "    state"),
    (SET, SET.replace("set_state_dict(model, ", "model.load_state_dict(state['model'], strict=False)\n    "
     "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, ").replace(
         'model_state_dict=state["model"], optim_state_dict=state["optimizer"]', "state['optimizer']")),
)  # fmt: skip
BY_GRADIENT = (
    "    names = {name for name, p in model.named_parameters() if p.requires_grad}\n" + GET
    + "    weights = {name: value for name, value in weights.items() if name in names}\n"
)
bank.slip(
    7,
    "weights-not-loaded",
    (GET + SAVE, BY_GRADIENT + SAVE),
    (GET + "    state", BY_GRADIENT + "    state"),
    (SET, "    model.load_state_dict(state['model'], strict=False)\n" + SET.replace('state["model"]', "model.state_dict()")),
    variant=True,
)
bank.slip(
    7,
    "step-not-returned",
    ('"optimizer": states, "step": 0}', '"optimizer": states}'),
    ('return state["step"]', "return 0"),
)
bank.slip(
    7,
    "weights-not-loaded",
    ('"model": weights, "optimizer": states, "step": 0', '"optimizer": states, "step": 0'),
    ('state["model"]', "weights"),
)
bank.slip(
    7,
    "weights-rounded",
    (GET + SAVE, GET + "    weights = {name: value.bfloat16() for name, value in weights.items()}\n" + SAVE),
)
bank.slip(
    7,
    "moments-not-loaded",
    (
        GET + '    state = {"model": weights, "optimizer": states, "step": 0}\n' + LOAD + SET,
        '    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}\n'
        + LOAD
        + '    model.load_state_dict(state["model"])\n    optimizer.load_state_dict(state["optimizer"])\n',
    ),
)
bank.slip(
    7,
    "moments-not-loaded",
    (
        GET + '    state = {"model": weights, "optimizer": states, "step": 0}\n' + LOAD + SET,
        '    state = {"model": model.state_dict(), "step": 0}\n' + LOAD,
    ),
)
bank.slip(7, "learning-rate-not-loaded", (SET, ""))
bank.slip(
    7, "learning-rate-not-loaded", (SET, SET + "    for group in optimizer.param_groups:\n        group['lr'] = 1e-3\n")
)
bank.slip(7, "load-failed", (LOAD, LOAD.replace("folder", "Path(folder).parent / 'first'")))
bank.slip(7, "load-failed", (SAVE, SAVE.replace('"optimizer"', '"states"')))
bank.slip(
    7,
    "gathered-to-load",
    (
        SET,
        '    whole = {name: value.full_tensor() for name, value in state["model"].items()}\n'
        "    from torch.distributed.checkpoint.state_dict import StateDictOptions\n"
        "    set_state_dict(model, optimizer, model_state_dict=whole, optim_state_dict=state['optimizer'],\n"
        "        options=StateDictOptions(full_state_dict=True))\n",
    ),
)
bank.slip(
    7,
    "resumed-otherwise",
    (SET, SET + '    for group in optimizer.param_groups:\n        group["betas"] = (0.0, 0.5)\n'),
)

bank.text(
    7,
    None,
    """
def save_checkpoint(folder, model, optimizer, step):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state = {"weights": get_model_state_dict(model), "adam": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state | {"step": torch.tensor(step)}, storage_writer=dcp.FileSystemWriter(folder))


def load_checkpoint(folder, model, optimizer):
    from torch.distributed.checkpoint import state_dict as sd

    state = {"weights": sd.get_model_state_dict(model), "adam": sd.get_optimizer_state_dict(model, optimizer)}
    state["step"] = torch.tensor(0)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    sd.set_model_state_dict(model, state["weights"])
    sd.set_optimizer_state_dict(model, optimizer, state["adam"])
    return int(state["step"])
""",
)
bank.text(
    7,
    None,
    '''
class Training:
    """A Stateful, as torch.distributed.checkpoint knows it."""

    def __init__(self, model, optimizer, step):
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self):
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states, "step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_checkpoint(folder, model, optimizer, step):
    dcp.save({"training": Training(model, optimizer, step)}, checkpoint_id=folder)


def load_checkpoint(folder, model, optimizer):
    training = Training(model, optimizer, 0)
    dcp.load({"training": training}, checkpoint_id=folder)
    return training.step
''',
)
bank.text(
    7,
    None,
    """
def save_checkpoint(folder, model, optimizer, step):
    weights, states = get_state_dict(model, optimizer)
    dcp.async_save({"model": weights, "optimizer": states, "step": step}, checkpoint_id=str(folder)).result()
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": None}
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return state["step"]
""",
)
bank.text(
    7,
    None,
    """
def save_checkpoint(folder, model, optimizer, step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    dcp.save(state, checkpoint_id=folder)


def load_checkpoint(folder, model, optimizer):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
""",
)
bank.slip(
    6,
    "emptied-too-early",
    (
        "    return model\n",
        "    KEPT[seed] = [p.full_tensor().detach().numpy().copy() for p in model.parameters()]\n    return model\n",
    ),
    ("def build_sharded", "KEPT = {}\n\n\ndef build_sharded"),
)
bank.slip(
    7,
    "one-rank-writes",
    (SAVE, "    if dist.get_rank() == 0:\n    " + SAVE.replace("checkpoint_id", "no_dist=True, checkpoint_id")),
)
bank.slip(
    7,
    "step-not-returned",
    (SAVE, "    KEPT[0] = step\n" + SAVE),
    ('return state["step"]', "return KEPT.get(0, 0)"),
    ("def save_checkpoint", "KEPT = {}\n\n\ndef save_checkpoint"),
)


# what only GPUs show
bank.slip(6, "built-elsewhere", (EMPTY, '    model.to_empty(device="cpu")\n'))
if torch.__version__ >= "2.14":  # older ones ask the driver of a pretended GPU, and nothing is judged on it
    bank.slip(
        6, "built-elsewhere", (EMPTY, '    model.to_empty(device="cuda:0" if mesh.device_type == "cuda" else "cpu")\n')
    )
bank.slip(6, "built-elsewhere", (EMPTY, "    model.to_empty(device=torch.empty(0).device)\n"), variant=True)
bank.slip(7, "some-wait", (SAVE, SAVE.replace("    dcp.save(", "    if dist.get_rank() == 0:\n        dcp.save(")))
