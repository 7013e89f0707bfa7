"""Balise 7: a checkpoint that each rank writes its part of, loaded on other numbers of ranks."""

import contextlib
import math
import tempfile
import threading
import warnings
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checking.looks import Look, at_most, judged, silent, within
from dlojz_tp.judging.checks.fsdp.background import late_threads, wait_until
from dlojz_tp.judging.checks.fsdp.common import claimed, has_memory, of_each
from dlojz_tp.judging.checks.fsdp.watched import first_slug
from dlojz_tp.judging.probes.networks import mean_losses
from dlojz_tp.judging.probes.ranks import hung, world_after_world
from dlojz_tp.judging.probes.shared_looks import each_rank, recognised
from dlojz_tp.models import Llama, LlamaConfig, language_loss

# few shapes: DTensor works each out anew on every rank
CONFIG = LlamaConfig(vocab_size=90, width=16, heads=4, kv_heads=4, layers=1, max_length=8, ffn_width=16)
LARGEST = "token_embedding.weight"
END = {2: 4, 3: 3, 1: 3}  # the step at which training ends, in the worlds that load
RATE, STEP = 0.02, 4207  # what is saved; the new optimizer begins with other numbers


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
        if found["entries"] is None or not (_has_weights(found["entries"]) and _has_moments(found["entries"])):
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
    found["losses"] = _train(model, optimizer, range(2, END[size]))
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


def _unfinished(files):
    """The hint where the folder has no .metadata when saving ends."""
    if ".metadata" in files:
        return "still-writing"
    inside = [name.removesuffix(".metadata") for name in files if name.endswith("/.metadata")]
    if not inside:
        return "not-a-distributed-checkpoint"
    first = [name for name in files if name.startswith(inside[0])]
    if len(first) <= 2:
        return "folder-for-each-rank"
    return "another-folder" if len(first) == len(files) else "several-checkpoints"  # all ranks wrote into it


def _without_metadata(found):
    names = ", ".join(list(found["files"])[:4]) or "nothing"
    return _unfinished(found["files"]), {"found": names}


def _unequal(found):
    """The mistake where there are not four files, of one checkpoint that can be read, or one has most of the bytes."""
    data = [size for name, size in found["files"].items() if not name.endswith(".metadata")]
    most = max(data, default=0) / max(1, sum(data))
    right = found["entries"] is not None and len(data) >= 4 and most <= 0.5
    return not right and ("one-rank-writes", {"expected": "about a quarter each", "got": f"{most:.0%}"})


def _names(got, _):
    return {"expected": "", "got": ", ".join(list(got)[:3])}


WHOLE = CONFIG.vocab_size * CONFIG.width - 1  # fewer elements than a whole parameter's
SAVING = [  # at one rank after the other: where rank 0 writes alone, the others may be too early
    Look("4 ranks write one checkpoint together, each rank its own shards", lambda found: found["files"] is None, False,
         "nothing-in-folder"),
    recognised("", lambda found: not found["metadata"] and _without_metadata(found)),
    recognised("", lambda found: found["largest"] > WHOLE and ("gathered-to-save", {"rank": found["rank"]})),
    recognised("", _unequal),
    Look("", "entries", True, "weights-not-saved", holds=lambda got, _: _has_weights(got), fields=_names),
    Look("", "entries", True, "optimizer-not-saved", holds=lambda got, _: _has_moments(got), fields=_names),
]  # fmt: skip


def _put_together(ranks, key):
    return {
        name: torch.cat([r[key][name] for r in ranks]) if part.dim() else part for name, part in ranks[0][key].items()
    }


def _is_moment(name):
    return "exp_avg" in name or name.endswith(".step")


def _lost(loaded, saved):
    """The first name, weights before moments, under which something else has come back."""
    return next(
        (name for name in sorted(saved, key=_is_moment) if not close(loaded.get(name), saved[name], 1e-15)), None
    )


def _not_loaded(loaded, saved):
    name = _lost(loaded, saved)
    if _is_moment(name):
        return "moments-not-loaded"
    return "weights-rounded" if close(loaded.get(name), saved[name], 2e-2) else "weights-not-loaded"


def _of_lost(loaded, saved):
    name = _lost(loaded, saved)
    return {"name": name, "where": name, "expected": saved[name], "got": loaded.get(name, "none")}


def _loading(saved):
    """Looks in a world that loads. saved: the tensors, whole."""
    return [
        each_rank("", "read", lambda size: WHOLE if size > 1 else math.inf, "gathered-to-load", holds=at_most,
                  fields=silent),
        Look("", partial(_put_together, key="loaded"), saved, _not_loaded, fields=_of_lost,
             holds=lambda loaded, saved: _lost(loaded, saved) is None),
        each_rank("", of_each(lambda found: [found["step"]]), [STEP], "step-not-returned",
                  fields=lambda got, due: {"expected": due[0], "got": got[0]}),
        each_rank("", "rate", RATE, "learning-rate-not-loaded", holds=close),
    ]  # fmt: skip


TRAINING = [
    each_rank("training goes on as if it had never stopped", "losses", lambda size: _alone()[2 : END[size]],
              "resumed-otherwise", holds=within(1e-7)),
]  # fmt: skip


def balise_7(save_checkpoint, load_checkpoint):
    """Trained and saved on 4 ranks, loaded on 3, 2 and 1, trained on, and compared with one process."""
    claim = "weights, moments, learning rate and step come back, on 2, 3 and 1 ranks"
    with tempfile.TemporaryDirectory(prefix="dlojz-check-") as folder:
        yield SAVING[0].claim
        worlds = {"sizes": (4, 2, 3, 1), "known": ((hung, "some-wait"),), "timeout": 15}
        for size, ranks in world_after_world(_use, save_checkpoint, load_checkpoint, Path(folder), **worlds):
            where, seen = f"{size} ranks", partial(list, ranks)
            if size == 4:
                for rank, found in enumerate(ranks):
                    yield from judged(SAVING, partial(dict, found, rank=rank), where=f"rank {rank} of 4")
                saved = _put_together(ranks, "saved")
                yield claim
                continue
            yield from judged([*claimed(claim, _loading(saved)), *TRAINING], seen, at=size, where=where)
            claim = TRAINING[0].claim
