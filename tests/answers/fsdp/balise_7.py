"""Answers to balise 7 of 14_fsdp: saved on 4 ranks, loaded on 2."""

from tests.answers.bank import Bank

bank = Bank("14_fsdp", 7, whole=True)

# balise 7
STATE = '{"model": weights, "optimizer": states, "step": step}'

SAVE = f"    dcp.save({STATE}, checkpoint_id=folder)\n"

GET = "    weights, states = get_state_dict(model, optimizer)\n"

LOAD = "    dcp.load(state, checkpoint_id=folder)\n"

SET = '    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])\n'

bank.hint("nothing-in-folder", "After save_checkpoint, the folder doesn't exist.")
bank.slip("nothing-in-folder", (SAVE, ""))

bank.slip("nothing-in-folder", (SAVE, SAVE.replace("=folder", '=str(folder) + "-step"')), variant=True)

bank.hint(
    "still-writing",
    "save_checkpoint returned before the checkpoint was complete (its .metadata is written last). Wait for it.",
)
bank.slip("still-writing", (SAVE, SAVE.replace("dcp.save(", "dcp.async_save(")), variant=True)

bank.hint(
    "folder-for-each-rank",
    "Each rank wrote its own checkpoint ({found}). All ranks must give the same folder: together they write one "
    "checkpoint.",
)
bank.slip(
    "folder-for-each-rank", (SAVE, SAVE.replace("=folder", '=Path(folder) / f"rank{dist.get_rank()}"')), variant=True
)

bank.hint(
    "not-a-distributed-checkpoint",
    "The folder holds {found} and no .metadata, so torch.distributed.checkpoint can't read it. A shard written by "
    "torch.save fits only this number of ranks.",
)
bank.slip(
    "not-a-distributed-checkpoint",
    (
        SAVE,
        f'    Path(folder).mkdir(exist_ok=True)\n    torch.save({STATE}, Path(folder) / f"{{dist.get_rank()}}.pt")\n',
    ),
)

bank.slip(
    "not-a-distributed-checkpoint",
    (
        SAVE,
        "    if dist.get_rank() == 0:\n        Path(folder).mkdir(exist_ok=True)\n"
        f'        torch.save({STATE}, Path(folder) / "checkpoint.pt")\n    dist.barrier()\n',
    ),
    variant=True,
)

FULL_STATE = (
    "    from torch.distributed.checkpoint.state_dict import StateDictOptions\n\n"
    "    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))\n"
)

bank.hint(
    "gathered-to-save",
    "Rank {rank} assembled a whole parameter to save it. The checkpoint takes the shards as they are.",
)
bank.slip("gathered-to-save", (GET + SAVE, FULL_STATE + SAVE))

bank.slip(
    "gathered-to-save",
    (GET + SAVE, GET + "    weights = {name: value.full_tensor() for name, value in weights.items()}\n" + SAVE),
    variant=True,
)

bank.hint(
    "one-rank-writes",
    "One rank wrote {got} of the bytes. Each rank must write its own shards: all ranks call save together.",
)
bank.slip(
    "one-rank-writes",
    (
        SAVE,
        "    if dist.get_rank() == 0:\n    "
        + SAVE.replace("=folder", "=folder, no_dist=True")
        + "    dist.barrier()\n",
    ),
)

bank.hint(
    "several-checkpoints",
    "Model, optimizer and step are in separate checkpoints ({found}). If a job ends in between, one of them may be "
    "older than the others: put everything into one dictionary and save it once.",
)
bank.slip(
    "several-checkpoints",
    (
        SAVE,
        '    dcp.save({"model": weights, "step": step}, checkpoint_id=Path(folder) / "model")\n'
        '    dcp.save({"optimizer": states}, checkpoint_id=Path(folder) / "optimizer")\n',
    ),
    variant=True,
)

bank.hint(
    "another-folder",
    "The checkpoint is below the folder that was given ({found}). load_checkpoint knows only that folder: write "
    "directly into it.",
)
bank.slip("another-folder", (SAVE, SAVE.replace("=folder", '=f"{folder}/{step}"')))

bank.slip("another-folder", (SAVE, SAVE.replace("=folder", '=Path(folder) / "last" / "checkpoint"')), variant=True)

bank.hint(
    "optimizer-not-saved",
    "The checkpoint has no optimizer state (AdamW's moments). Without it, training continues, but differently.",
)
bank.slip("optimizer-not-saved", (SAVE, SAVE.replace('"optimizer": states, ', "")), variant=True)

bank.hint("weights-not-saved", "The checkpoint doesn't contain the model's weights.")
bank.slip("weights-not-saved", (SAVE, SAVE.replace('"model": weights, ', "")), variant=True)

bank.hint(
    "step-not-returned",
    "load_checkpoint must return the step that save_checkpoint was given with this checkpoint.",
)
bank.slip("step-not-returned", ('    return state["step"]\n', "    return state\n"))

bank.hint(
    "weights-not-loaded",
    "After load_checkpoint, the model doesn't have the saved weights: {name} differs. Save and load frozen "
    "parameters too.",
)
bank.slip("weights-not-loaded", (LOAD, ""))

TRAINED_ONLY = GET.replace(
    "optimizer)",
    "optimizer, options=torch.distributed.checkpoint.state_dict.StateDictOptions(ignore_frozen_params=True))",
)

bank.slip("weights-not-loaded",
    (GET + SAVE, TRAINED_ONLY + SAVE),
    (GET + "    state", TRAINED_ONLY + "    state"),
    (SET, SET.replace("set_state_dict(model, ", "model.load_state_dict(state['model'], strict=False)\n    "
     "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, ").replace(
         'model_state_dict=state["model"], optim_state_dict=state["optimizer"]', "state['optimizer']")),
)  # fmt: skip

BY_GRADIENT = (
    "    names = {name for name, p in model.named_parameters() if p.requires_grad}\n"
    + GET
    + "    weights = {name: value for name, value in weights.items() if name in names}\n"
)

bank.slip(
    "weights-not-loaded",
    (GET + SAVE, BY_GRADIENT + SAVE),
    (GET + "    state", BY_GRADIENT + "    state"),
    (
        SET,
        "    model.load_state_dict(state['model'], strict=False)\n"
        + SET.replace('state["model"]', "model.state_dict()"),
    ),
    variant=True,
)

bank.slip(
    "step-not-returned",
    ('"optimizer": states, "step": 0}', '"optimizer": states}'),
    ('return state["step"]', "return 0"),
)

bank.slip(
    "weights-not-loaded",
    ('"model": weights, "optimizer": states, "step": 0', '"optimizer": states, "step": 0'),
    ('state["model"]', "weights"),
)

bank.hint(
    "weights-rounded",
    "The loaded weights are close to the saved ones but not equal: were they saved in a smaller dtype?",
)
bank.slip(
    "weights-rounded",
    (GET + SAVE, GET + "    weights = {name: value.bfloat16() for name, value in weights.items()}\n" + SAVE),
    variant=True,
)

bank.hint(
    "moments-not-loaded",
    "The weights are back, but AdamW's moments aren't. dcp.load reads into what you give it: the optimizer's state "
    "must be in there, and a new optimizer's state_dict() has no place for the moments yet (get_state_dict makes "
    "one).",
)
bank.slip(
    "moments-not-loaded",
    (
        GET + '    state = {"model": weights, "optimizer": states, "step": 0}\n' + LOAD + SET,
        '    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}\n'
        + LOAD
        + '    model.load_state_dict(state["model"])\n    optimizer.load_state_dict(state["optimizer"])\n',
    ),
)

bank.slip(
    "moments-not-loaded",
    (
        GET + '    state = {"model": weights, "optimizer": states, "step": 0}\n' + LOAD + SET,
        '    state = {"model": model.state_dict(), "step": 0}\n' + LOAD,
    ),
    variant=True,
)

bank.hint(
    "learning-rate-not-loaded",
    "The learning rate is the new optimizer's, not the saved one. It is part of the optimizer's state, which you "
    "must give back to the optimizer.",
)
bank.slip("learning-rate-not-loaded", (SET, ""))

bank.slip(
    "learning-rate-not-loaded",
    (SET, SET + "    for group in optimizer.param_groups:\n        group['lr'] = 1e-3\n"),
    variant=True,
)

bank.hint("load-failed", "load_checkpoint failed when {size} ranks load what 4 ranks saved: {error}")
bank.slip("load-failed", (LOAD, LOAD.replace("folder", "Path(folder).parent / 'first'")))

bank.slip("load-failed", (SAVE, SAVE.replace('"optimizer"', '"states"')), variant=True)

bank.hint(
    "gathered-to-load",
    "Rank {rank} assembled a whole parameter to load it. Each rank reads only what belongs in its shards.",
)
bank.slip(
    "gathered-to-load",
    (
        SET,
        '    whole = {name: value.full_tensor() for name, value in state["model"].items()}\n'
        "    from torch.distributed.checkpoint.state_dict import StateDictOptions\n"
        "    set_state_dict(model, optimizer, model_state_dict=whole, optim_state_dict=state['optimizer'],\n"
        "        options=StateDictOptions(full_state_dict=True))\n",
    ),
    variant=True,
)

bank.hint("resumed-otherwise", "Loaded on {size} ranks, training doesn't continue as it would have without the break.")
bank.slip(
    "resumed-otherwise",
    (SET, SET + '    for group in optimizer.param_groups:\n        group["betas"] = (0.0, 0.5)\n'),
    variant=True,
)

bank.text(
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
    "one-rank-writes",
    (SAVE, "    if dist.get_rank() == 0:\n    " + SAVE.replace("checkpoint_id", "no_dist=True, checkpoint_id")),
    variant=True,
)

bank.slip(
    "step-not-returned",
    (SAVE, "    KEPT[0] = step\n" + SAVE),
    ('return state["step"]', "return KEPT.get(0, 0)"),
    ("def save_checkpoint", "KEPT = {}\n\n\ndef save_checkpoint"),
    variant=True,
)

bank.hint(
    "some-wait",
    "Some ranks wait for others that don't come ({error}): saving and loading are collective, so all ranks must call "
    "them together.",
)
bank.slip(
    "some-wait", (SAVE, SAVE.replace("    dcp.save(", "    if dist.get_rank() == 0:\n        dcp.save(")), variant=True
)
