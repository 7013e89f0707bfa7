"""Answers to balise 7 of 09_ddp: a checkpoint that survives."""

import contextlib
import io
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.answers.bank import Bank

bank = Bank("09_ddp", 7)

# balise 7
WRITE = "            torch.save(state, partial)\n            partial.replace(path)  # atomic: readers see the old file or the new one\n"

STATE = '{"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}'

TRY = "        try:\n" + WRITE + "        except (OSError, RuntimeError) as error:\n            outcome = [error]\n"

TELL = (
    "    dist.broadcast_object_list(outcome)  # the others wait for the file here, and learn of a failure\n"
    "    if outcome[0] is not None:\n        raise outcome[0]\n"
)

PLAIN = WRITE.replace("            ", "        ")  # nothing caught

bank.hint("nothing-saved", "No file was written to `path`.")
bank.slip("nothing-saved", (WRITE, "            torch.save(state, partial)\n"), variant=True)

bank.hint("all-ranks-write", "Rank {rank} wrote the file too. Several writers damage a file: only rank 0 may write.")
bank.slip(
    "all-ranks-write",
    ("if dist.get_rank() == 0:", "if True:"),
    ('Path(f"{path}.partial")', 'Path(f"{path}.partial{dist.get_rank()}")'),
    variant=True,
)

ZERO = "    if dist.get_rank() == 0:\n"

bank.hint("no-barrier", "Rank {rank} returned before the file was there. It might load, or end the job, too early: "
          "wait for rank 0.")  # fmt: skip
bank.slip("no-barrier", (TELL, ""), (TRY, PLAIN))

bank.slip("no-barrier", (TELL, ""), (TRY, PLAIN), (ZERO, "    dist.barrier()\n" + ZERO))

bank.slip("no-barrier", (TELL, "    dist.barrier(async_op=True)\n"), (TRY, PLAIN), variant=True)

bank.hint("others-left-waiting", "Writing failed on rank 0, and rank 1 waits until the group's time limit for a "
          "message that rank 0 never sends. Tell the other ranks whether it worked, so that they "
          "raise too.")  # fmt: skip
bank.slip("others-left-waiting", (TELL, "    dist.barrier()\n"), (TRY, PLAIN))

bank.slip("others-left-waiting", (TELL, "    dist.all_reduce(torch.ones(1))\n"), (TRY, PLAIN))

bank.slip("others-left-waiting", ("            outcome = [error]", "            raise error"), variant=True)

bank.slip(None, (TELL, ""), (TRY, "        try:\n" + WRITE + "        finally:\n            dist.barrier()\n    else:\n        dist.barrier()\n"))  # fmt: skip

bank.hint("whole-module-pickled", "The file does not load with weights_only=True, because it holds Python objects. "
          "Save state_dicts and plain numbers.")  # fmt: skip
bank.slip("whole-module-pickled", ("network.state_dict()", "network"), variant=True)

bank.hint("old-file-lost", "Writing failed half-way (the disk was full), and the old checkpoint is gone too. Write "
          "to another file in the same folder, and move it into place when it is complete.")  # fmt: skip
bank.slip("old-file-lost", (WRITE, "            torch.save(state, path)\n"))

bank.slip("old-file-lost", (WRITE, "            Path(path).unlink(missing_ok=True)\n" + WRITE), variant=True)

bank.hint("copied-into-place", "You write the complete file a second time, over the old one. If this stops half-way, "
          "the checkpoint is damaged: move the new file into place (Path.replace).")  # fmt: skip
bank.slip(
    "copied-into-place",
    ("        partial.replace(path)", "        shutil.copyfile(partial, path)"),
    ("def save_checkpoint", "import shutil\n\n\ndef save_checkpoint"),
)

bank.slip(
    "copied-into-place",
    ("        partial.replace(path)", "        Path(path).write_bytes(partial.read_bytes())"),
    variant=True,
)

bank.hint("failure-hidden", "Writing failed, but save_checkpoint raised no error. Let the error through.")
bank.slip(
    "failure-hidden",
    ("            outcome = [error]", "            print(error)"),
    variant=True,
)

bank.hint("module-prefix", "The names in the file start with 'module.', so it loads only into a wrapped network. "
          "Save the state of the network inside.")  # fmt: skip
bank.slip(
    "module-prefix",
    ("network = model.module if isinstance(model, DDP) else model\n        state", "network = model\n        state"),
    variant=True,
)

bank.hint("epoch-forgotten", "load_checkpoint must return the number of epochs already done.")
bank.slip("epoch-forgotten", ('    return state["epoch"]', '    return state["epoch"] + 1'))

bank.slip("epoch-forgotten", ('    return state["epoch"]', "    return 2"), variant=True)

bank.hint("loaded-onto-other", "Where each rank has a GPU, rank {rank} loads {got} bytes onto the GPU of rank "
          "{other}. torch.load puts a tensor back where it was saved, and on a second node the GPU numbers start at "
          "0 again. Two ranks then fill that GPU, and if it doesn't exist, loading fails. Set map_location to the "
          "network's device, or to the CPU.")  # fmt: skip
bank.slip("loaded-onto-other", ("map_location=device, ", ""))

bank.slip("loaded-onto-other", ("map_location=device", "map_location=torch.device('cuda', 0) if torch.cuda.is_available() else device"))  # fmt: skip

bank.hint("unsafe-load", "With weights_only=False, a file can run any code while it loads. This file holds tensors "
          "and plain numbers, which load with weights_only=True.")  # fmt: skip
bank.slip("unsafe-load", ("weights_only=True", "weights_only=False"), variant=True)

bank.hint("optimizer-forgotten", "The first losses after resuming are right, but later ones are not. The optimizer's "
          "state (momentum, learning rate) is part of the checkpoint.")  # fmt: skip
bank.slip("optimizer-forgotten", ('    optimizer.load_state_dict(state["optimizer"])\n', ""))

bank.hint("parameters-replaced", "{name} is another object after loading, but the optimizer still holds the old one "
          "and would update that. Write into the existing parameters, without assign=True.")  # fmt: skip
bank.slip(
    "parameters-replaced",
    ('network.load_state_dict(state["model"])', 'network.load_state_dict(state["model"], assign=True)'),
    variant=True,
)

bank.slip(
    "optimizer-forgotten",
    (STATE, '{"model": network.state_dict(), "epoch": epoch}'),
    ('    optimizer.load_state_dict(state["optimizer"])\n', ""),
    variant=True,
)

bank.hint("buffers-forgotten", "The parameters were restored, but the buffers were not. state_dict() has both.")
bank.slip(
    "buffers-forgotten",
    (STATE, '{"model": dict(network.named_parameters()), "optimizer": optimizer.state_dict(), "epoch": epoch}'),
    ('network.load_state_dict(state["model"])', 'network.load_state_dict(state["model"], strict=False)'),
    variant=True,
)

bank.hint("weights-forgotten", "After loading, the network doesn't have the weights that were saved.")
bank.slip("weights-forgotten", ('    network.load_state_dict(state["model"])\n', ""), variant=True)

bank.hint("ranks-resume-apart", "After loading, the ranks have different states. Every rank has to load.")
bank.slip(
    "ranks-resume-apart",
    (
        "    if not Path(path).exists():",
        "    if dist.is_initialized() and dist.get_rank() > 0:\n        return 2\n    if not Path(path).exists():",
    ),
)

bank.hint("no-file-no-zero", "If there is no file, load_checkpoint must change nothing and return 0: {error}")
bank.slip("no-file-no-zero", ("    if not Path(path).exists():\n        return 0\n", ""))

bank.slip("no-file-no-zero", ("        return 0\n", "        return None\n"), variant=True)

bank.hint("resume-wrong", "When resumed on {size} ranks, the losses are not those of the uninterrupted run.")
bank.slip(
    "resume-wrong",
    (
        '    optimizer.load_state_dict(state["optimizer"])\n',
        '    optimizer.load_state_dict(state["optimizer"])\n    optimizer.param_groups[0]["lr"] /= dist.get_world_size() + 1 if dist.is_initialized() else 1\n    model.register_forward_hook(lambda m, _, out: out * 1.01)\n',
    ),
    variant=True,
)


def save_checkpoint(path, model, optimizer, epoch):
    """One flat dictionary of tensors, synced to the disk, moved into place; then a message instead of a barrier."""
    module = getattr(model, "module", model)
    done = torch.zeros(1)
    try:
        if dist.get_rank() == 0:
            temporary = f"{os.fspath(path)}.{os.getpid()}"
            with open(temporary, "wb") as file:
                torch.save([epoch, module.state_dict(), optimizer.state_dict()], file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)  # noqa: PTH104
            done += 1
    finally:
        dist.broadcast(done, src=0)
    if not done:
        raise OSError(f"rank 0 could not write {path}")


def load_checkpoint(path, model, optimizer):
    module = getattr(model, "module", model)
    try:
        epoch, weights, moments = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return 0
    module.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    return epoch


bank.several(None, save_checkpoint, load_checkpoint)

bank.slip(
    None,
    ('Path(f"{path}.partial")', 'Path(path).with_suffix(".new")'),
    ('"epoch": epoch}', '"epoch": torch.tensor(epoch)}'),
    ('return state["epoch"]', 'return int(state["epoch"])'),
)

bank.slip(None, ("    if not Path(path).exists():", "    dist.barrier()\n    if not Path(path).exists():"))

bank.slip(
    "rank-failed",
    ("network = model.module if isinstance(model, DDP) else model\n    device", "network = model\n    device"),
)


def save_from_memory(path, model, optimizer, epoch):
    """Made in memory, written to a file with a name of its own, moved; a barrier, whatever came of it."""
    with contextlib.ExitStack() as leaving:
        leaving.callback(dist.barrier)
        if dist.get_rank() > 0:
            return
        content = io.BytesIO()
        weights = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        torch.save({"weights": weights, "moments": optimizer.state_dict(), "epochs": epoch}, content)
        number, name = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)))  # noqa: PTH100, PTH120
        try:
            with os.fdopen(number, "wb") as file:
                file.write(content.getvalue())
            shutil.move(name, path)
        except OSError:
            os.unlink(name)  # noqa: PTH108
            raise


def load_and_broadcast(path, model, optimizer):
    """Rank 0 reads, the others receive."""
    box = [None]
    if dist.get_rank() == 0 and os.path.isfile(path):  # noqa: PTH113
        box = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    getattr(model, "module", model).load_state_dict(box[0]["weights"])
    optimizer.load_state_dict(box[0]["moments"])
    return box[0]["epochs"]


bank.several(None, save_from_memory, load_and_broadcast)


def save_and_tell(path, model, optimizer, epoch):
    """What went wrong on rank 0 is raised on all ranks."""
    problem = [None]
    if dist.get_rank() == 0:
        new = Path(path).with_name(f".{Path(path).name}.new")
        state = [epoch, getattr(model, "module", model).state_dict(), optimizer.state_dict()]
        try:
            torch.save(state, str(new))
            new.rename(path)
        except Exception as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, 0)
    if problem[0]:
        raise RuntimeError(f"not saved: {problem[0]}")


bank.several(None, save_and_tell, load_checkpoint)

# a moment without a checkpoint, a file from elsewhere, one rank that restores
REPLACE = "            partial.replace(path)"

PARTIAL = 'Path(f"{path}.partial")'

bank.hint("away-for-a-moment", "The old file was {how} before the new one had its name. A process that is killed "
          "between the two leaves no checkpoint at `path`. Path.replace puts the new file in the place of the old "
          "one in a single operation.")  # fmt: skip
bank.slip(
    "away-for-a-moment",
    (REPLACE, "            if os.path.isfile(path):\n                os.unlink(path)\n" + REPLACE),
)

bank.slip(
    "away-for-a-moment",
    (REPLACE, '            if path.exists():\n                path.rename(f"{path}.old")\n' + REPLACE),
    variant=True,
)

bank.slip(None, (REPLACE, '            Path(f"{path}.old").unlink(missing_ok=True)\n            if path.exists():\n                os.link(path, f"{path}.old")\n' + REPLACE))  # fmt: skip

bank.hint("written-elsewhere", "You wrote the new file in {folder}. If that is another file system, the file is "
          "copied instead of moved, and a copy may stop half-way. Write it into the folder of `path`.")  # fmt: skip
bank.slip(
    "written-elsewhere",
    ("def save_checkpoint", "import shutil\nimport tempfile\n\n\ndef save_checkpoint"),
    (PARTIAL, "Path(tempfile.mkdtemp()) / path.name"),
    ("partial.replace(path)", "shutil.move(partial, path)"),
    variant=True,
)

bank.slip(None, (PARTIAL, "path.parent / 'new' / path.name"), ("        try:", "        partial.parent.mkdir(exist_ok=True)\n        try:"))  # fmt: skip

bank.slip(
    "ranks-resume-apart",
    (
        "    if not Path(path).exists():",
        "    first = not dist.is_initialized() or dist.get_rank() == 0\n    if not (first and Path(path).exists()):",
    ),
    variant=True,
)

bank.slip(
    "loaded-onto-other",
    ("map_location=device", 'map_location=f"cuda:{dist.get_rank()}" if device.type == "cuda" else device'),
    variant=True,
)
