"""Balise 7: a checkpoint that each rank writes its part of, loaded on other numbers of ranks."""

import contextlib
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.fsdp.background import late_threads, wait_until
from dlojz_tp.checks.fsdp.common import has_memory
from dlojz_tp.checks.fsdp.watched import first_slug
from dlojz_tp.models import Llama, LlamaConfig, language_loss
from dlojz_tp.probes.networks import mean_losses
from dlojz_tp.probes.ranks import hung, world_after_world

HINTS = {
    "some-wait": "Some ranks wait for others that don't come ({error}): saving and loading are collective, so all "
                 "ranks must call them together.",
    "nothing-in-folder": "After save_checkpoint, the folder doesn't exist.",
    "still-writing": "save_checkpoint returned before the checkpoint was complete (its .metadata is written last). "
                     "Wait for it.",
    "folder-for-each-rank": "Each rank wrote its own checkpoint ({found}). All ranks must give the same folder: "
                            "together they write one checkpoint.",
    "several-checkpoints": "Model, optimizer and step are in separate checkpoints ({found}). If a job ends in "
                           "between, one of them may be older than the others: put everything into one dictionary "
                           "and save it once.",
    "another-folder": "The checkpoint is below the folder that was given ({found}). load_checkpoint knows only "
                      "that folder: write directly into it.",
    "not-a-distributed-checkpoint": "The folder holds {found} and no .metadata, so torch.distributed.checkpoint "
                                    "can't read it. A shard written by torch.save fits only this number of ranks.",
    "gathered-to-save": "Rank {rank} assembled a whole parameter to save it. The checkpoint takes the shards as "
                        "they are.",
    "one-rank-writes": "One rank wrote {got} of the bytes. Each rank must write its own shards: all ranks call "
                       "save together.",
    "optimizer-not-saved": "The checkpoint has no optimizer state (AdamW's moments). Without it, training "
                           "continues, but differently.",
    "weights-not-saved": "The checkpoint doesn't contain the model's weights.",
    "gathered-to-load": "Rank {rank} assembled a whole parameter to load it. Each rank reads only what belongs in "
                        "its shards.",
    "step-not-returned": "load_checkpoint must return the step that save_checkpoint was given with this checkpoint.",
    "weights-not-loaded": "After load_checkpoint, the model doesn't have the saved weights: {name} differs. Save "
                          "and load frozen parameters too.",
    "weights-rounded": "The loaded weights are close to the saved ones but not equal: were they saved in a smaller "
                       "dtype?",
    "moments-not-loaded": "The weights are back, but AdamW's moments aren't. dcp.load reads into what you give it: "
                          "the optimizer's state must be in there, and a new optimizer's state_dict() has no place "
                          "for the moments yet (get_state_dict makes one).",
    "learning-rate-not-loaded": "The learning rate is the new optimizer's, not the saved one. It is part of the "
                                "optimizer's state, which you must give back to the optimizer.",
    "resumed-otherwise": "Loaded on {size} ranks, training doesn't continue as it would have without the break.",
    "load-failed": "load_checkpoint failed when {size} ranks load what 4 ranks saved: {error}",
}  # fmt: skip

# few shapes: DTensor works each out anew on every rank
CONFIG = LlamaConfig(vocab_size=90, width=16, heads=4, kv_heads=4, layers=1, max_length=8, ffn_width=16)
LARGEST = "token_embedding.weight"
RATE, STEP = 0.02, 4207  # what is saved; the new optimizer begins with other numbers


def balise_7(save_checkpoint, load_checkpoint):
    """Trained and saved on 4 ranks, loaded on 3, 2 and 1, trained on, and compared with one process."""
    with tempfile.TemporaryDirectory(prefix="dlojz-check-") as folder:
        yield "4 ranks write one checkpoint together, each rank its own shards"
        both = save_checkpoint, load_checkpoint
        for size, ranks in world_after_world(
            _use, *both, Path(folder), sizes=(4, 2, 3, 1), known=((hung, "some-wait"),), timeout=15
        ):
            if size == 4:
                for rank, found in enumerate(ranks):
                    _right_saving(rank, found)
                saved = _put_together(ranks, "saved")
                yield "weights, moments, learning rate and step come back, on 2, 3 and 1 ranks"
                continue
            _right_loading(size, ranks, saved)
            if size == 2:
                yield "training goes on as if it had never stopped"
            for rank, found in enumerate(ranks):
                due, where = _alone()[2 : 2 + len(found["losses"])], f"rank {rank} of {size}"
                if not close(found["losses"], due, 1e-7):
                    raise Wrong("resumed-otherwise", expected=due, got=found["losses"], where=where, size=size)


def _model(seed):
    torch.manual_seed(seed)
    model = Llama(CONFIG).double()
    model.blocks[0].feed_forward.up.weight.requires_grad_(False)
    return model


def _made(seed, rate):
    model = _model(seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)


def _train(model, optimizer, steps):
    """Losses of some steps on 12 sequences, of which each rank takes its part."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shares = (torch.randint(90, (12, 7), generator=torch.Generator().manual_seed(step))[rank::size] for step in steps)
    return mean_losses(optimizer, (language_loss(model, tokens) for tokens in shares))


@cache
def _alone():
    model = _model(0)
    return _train(model, torch.optim.AdamW(model.parameters(), lr=RATE), range(4))


class _Largest(TorchDispatchMode):
    """The most elements of a plain floating tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if has_memory(tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return out


def _use(save_checkpoint, load_checkpoint, folder):
    """On a rank: in a world of 4 train and save, in every other one load. What was seen, as plain values."""
    warnings.simplefilter("ignore")
    found, size = {}, dist.get_world_size()
    if size == 4:
        model, optimizer = _made(0, RATE)
        _train(model, optimizer, range(2))
        first = folder / "first"
        threads = threading.active_count()
        with _Largest() as largest, late_threads():
            save_checkpoint(first, model, optimizer, STEP)
            found["metadata"] = (first / ".metadata").exists()
        writes = not found["metadata"] and threading.active_count() > threads
        if first_slug("still-writing" if writes else ""):  # on any rank: else some would wait for it in a barrier
            found["metadata"] = False
            wait_until(lambda: threading.active_count() <= threads)  # it also talks: a collective would get in its way
            found["files"] = _files(first)
            return found
        found["largest"], found["saved"] = largest.elements, _state(model, optimizer)
        dist.barrier()
        found["files"] = _files(first)
        found["entries"] = _entries(first)
        dist.barrier()
        if found["entries"] is None or not _has_weights(found["entries"]) or not _has_moments(found["entries"]):
            return found
        if dist.get_rank() == 0:
            first.rename(folder / "moved")  # a checkpoint is where it is, not where it was
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().mul_(0.5)
        save_checkpoint(folder / "second", model, optimizer, STEP + 1)  # what an answer keeps in memory is this now
        return found
    if not (folder / "moved").exists():
        return found
    model, optimizer = _made(5, 0.5)
    try:
        with _Largest() as largest:
            found["step"] = load_checkpoint(folder / "moved", model, optimizer)
    except (KeyError, ValueError, FileNotFoundError, RuntimeError, dist.checkpoint.api.CheckpointException) as error:
        cause = error if not hasattr(error, "failures") else next(iter(error.failures.values()))[0]
        raise Wrong("load-failed", size=size, error=f"{type(cause).__name__}: {cause}".split("\n")[0][:200]) from error
    found["read"], found["loaded"] = largest.elements, _state(model, optimizer)
    found["rate"] = float(optimizer.param_groups[0]["lr"])
    found["losses"] = _train(model, optimizer, range(2, 4 if size == 2 else 3))
    return found


def _state(model, optimizer):
    """{name: the rank's shard}, weights and moments."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.to_local().detach().clone()
        for key, value in optimizer.state.get(p, {}).items():
            value = value.to_local() if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = torch.as_tensor(value).detach().clone()
    return found


def _files(folder):
    if not folder.exists():
        return None
    return {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}


def _entries(folder):
    """Of each tensor in the checkpoint, how many elements its largest piece has."""
    with contextlib.suppress(Exception):
        metadata = FileSystemReader(folder).read_metadata()
        return {
            name: max(piece.sizes.numel() for piece in entry.chunks)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    return None


def _has_weights(entries):
    return any(name.endswith(LARGEST) for name in entries)


def _has_moments(entries):
    return any("exp_avg" in name for name in entries)


def _right_saving(rank, found):
    where = f"rank {rank} of 4"
    if found["files"] is None:
        raise Wrong("nothing-in-folder", where=where)
    names = ", ".join(list(found["files"])[:4]) or "nothing"
    if not found["metadata"]:
        if ".metadata" in found["files"]:
            raise Wrong("still-writing", where=where)
        inside = [name for name in found["files"] if name.endswith("/.metadata")]
        slug = "folder-for-each-rank" if inside else "not-a-distributed-checkpoint"
        first = [name for name in found["files"] if inside and name.startswith(inside[0].removesuffix(".metadata"))]
        if len(first) > 2:  # all ranks wrote into it
            slug = "another-folder" if len(first) == len(found["files"]) else "several-checkpoints"
        raise Wrong(slug, where=where, found=names)
    whole = CONFIG.vocab_size * CONFIG.width
    if found["largest"] >= whole:
        raise Wrong("gathered-to-save", where=where, rank=rank)
    data = [size for name, size in found["files"].items() if not name.endswith(".metadata")]
    if found["entries"] is None or len(data) < 4 or max(data) > 0.5 * sum(data):
        got = f"{max(data, default=0) / max(1, sum(data)):.0%}"
        raise Wrong("one-rank-writes", where="world of 4", got=got, expected="about a quarter each")
    if not _has_weights(found["entries"]):
        raise Wrong("weights-not-saved", where=where, got=", ".join(list(found["entries"])[:3]))
    if not _has_moments(found["entries"]):
        raise Wrong("optimizer-not-saved", where=where, got=", ".join(list(found["entries"])[:3]))


def _put_together(ranks, key):
    return {
        name: torch.cat([r[key][name] for r in ranks]) if part.dim() else part for name, part in ranks[0][key].items()
    }


def _right_loading(size, ranks, saved):
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}"
        if size > 1 and found["read"] >= CONFIG.vocab_size * CONFIG.width:
            raise Wrong("gathered-to-load", where=where, rank=rank)
    loaded = _put_together(ranks, "loaded")
    for name in sorted(saved, key=lambda name: "exp_avg" in name or name.endswith(".step")):
        value, wanted = loaded.get(name), saved[name]
        if value is not None and close(value, wanted, 1e-15):
            continue
        where = f"world of {size}, {name}"
        if "exp_avg" in name or name.endswith(".step"):
            raise Wrong("moments-not-loaded", expected=wanted, got="none" if value is None else value, where=where)
        slug = "weights-rounded" if close(value, wanted, 2e-2) else "weights-not-loaded"
        raise Wrong(slug, expected=wanted, got=value, where=where, name=name)
    for rank, found in enumerate(ranks):
        where = f"rank {rank} of {size}"
        if isinstance(found["step"], bool) or found["step"] != STEP:
            raise Wrong("step-not-returned", expected=STEP, got=found["step"], where=where)
        if not close(found["rate"], RATE):
            raise Wrong("learning-rate-not-loaded", expected=RATE, got=found["rate"], where=where)
