"""Balise 10: every rank writes its shard; the checkpoint counts once all are there, and loads on any number of ranks."""

import tempfile
from pathlib import Path

import torch

from dlojz_tp.judging.checking.borrowed import Borrowed
from dlojz_tp.judging.checking.looks import Look, at_most, judged, nothing, silent
from dlojz_tp.judging.checks.zero_under_the_hood.checkpoint_ranks import (
    HEAD,
    NEW,
    OLD,
    bytes_of_rank,
    load_again,
    parts_of,
    save,
)
from dlojz_tp.judging.checks.zero_under_the_hood.worlds import on_ranks
from dlojz_tp.judging.probes.crash_images import LATEST, content
from dlojz_tp.judging.probes.shared_looks import each_rank

HINTS = {
    "not-saved": "After save_shards, load_shards must return what was saved; {got}.",
    "nothing-written": "After save_shards the folder does not exist: nothing was written. Another job finds only "
    "what is on disk.",
    "gathered-to-save": "Rank {rank} sent {sent} bytes to save. Nothing has to be sent: each rank writes what it has.",
    "whole-storage-saved": "{got} bytes were written for {expected} bytes of values. A shard is a view of a larger "
    "tensor, and torch.save writes the whole memory under a view. Save a clone.",
    "saved-again-by-all": "{got} bytes were written for {expected} bytes of values. Does every rank write "
    "everything, or one rank write its part twice?",
    "returned-too-early": "Rank {rank} returned from save_shards before the checkpoint was complete. It could end "
    "the job, or load.",
    "marked-too-early": "The checkpoint was declared complete while a rank was still writing: a crash at that "
    "moment leaves a checkpoint with a hole. Write all files first, then wait at a barrier, "
    "then write the mark.",
    "old-checkpoint-lost": "The save of step {new} was cut short {when}. The checkpoint of step {old} must then "
    "load, but load_shards returned {got}.",
    "half-new": "The save of step {new} was cut short {when}, and load_shards returned parts of it: neither the "
    "old checkpoint nor the new one.",
    "interrupted-unloadable": "The save of step {new} was cut short {when}. The checkpoint of step {old} must then "
    "load, but load_shards failed: {error}. Write under another name or in a separate folder, "
    "rename what is complete, and mark the checkpoint last.",
    "leftover-mixed": "An earlier save of the same step, on 4 ranks, was cut short. Then {size} ranks saved it "
    "completely, and load_shards mixed the two: write all files anew, and read only the files "
    "that the mark names.",
    "leftover-refused": "An earlier save of the same step, on 4 ranks, was cut short. Then {size} ranks could not "
    "save it ({error}). A save may overwrite what a killed job has left.",
    "written-over": "A complete step was saved a second time. That save was cut short, and what loads now is not "
    "the complete checkpoint. Either its files were overwritten (use a folder with another name), "
    "or the new checkpoint counted before all of its files were new (don't check for files: wait "
    "for the ranks).",
    "no-checkpoint-not-none": "In a folder without a checkpoint (or without the folder), load_shards must return "
    "None: {error}",
    "not-a-pair": "load_shards must return a pair: the step, and a dictionary of this rank's shards. It returned "
    "{got}.",
    "wrong-step": "load_shards must return the newest step that was saved.",
    "names-differ": "The shards have different names from those that were saved.",
    "old-sizes": "A shard has {got} elements on {size} ranks; {expected} are expected. Take the length without "
    "padding, then cut and pad it anew for the current number of ranks.",
    "dtype-changed": "A shard came back in a different dtype from the one it was saved in.",
    "wrong-part": "The shard is not this rank's part of the tensor that was saved.",
    "reads-everything": "On 4 ranks, the number that saved, rank {rank} opened {got} files. A thousand ranks would "
    "open a million files, which is too many even if they are mapped: open only the files that "
    "hold some of this rank's part.",
    "still-the-file": "After load_shards, the values of {name} change when the file does: the shard is the mapped "
    "file and has no memory of its own. Copy what you take from a file that is opened with "
    "mmap=True.",
    "checkpoint-borrowed": "torch.distributed.checkpoint does this work for you, in the next practical work. Here "
    "you write it yourself: a file for each rank, then the mark.",
    "whole-in-memory": "While loading, a rank holds {got} bytes; all shards together have {expected}. Sharding is "
    "meant to avoid that: take your part of a file, then release the file.",
    "unsafe-load": "A checkpoint of tensors and numbers loads with weights_only=True; without it, a file can run "
    "arbitrary code.",
    "objects-saved": "A file does not load with weights_only=True: {error}",
}


KNOWN = ((Borrowed, "checkpoint-borrowed"),)
OWN = bytes_of_rank(4)
WHOLE = 4 * OWN


def observe(save_shards, load_shards, place):
    """Saved on 4 ranks while copies of the folder show what a crash would leave; then loaded on 1, 2, 3 and 4."""
    (place / "images").mkdir()
    saved = on_ranks(save, save_shards, load_shards, place, known=KNOWN, sizes=(4,))[4]
    yield {key: [rank[key] for rank in saved] for key in saved[0]}
    images = _different(place / "images")
    paths = [path for path, _ in images]
    others = on_ranks(load_again, save_shards, load_shards, place, paths, known=KNOWN, sizes=(4, 3, 1, 2))
    ranks = [(rank, size, found) for size in others for rank, found in enumerate(others[size])]
    loads = [(path, text, rank, got) for rank, found in enumerate(others[2])
             for (path, text), got in zip(images, found["images"], strict=True)]  # fmt: skip
    cut = sorted((load for load in loads if not load[1].startswith("returned")), key=lambda load: load[1] != LATEST)
    yield {
        "again": [_misfit(found["loaded"], rank, size) for rank, size, found in ranks],
        "cut": [_either(got, rank, text, saved[0]["files of old"], path) for path, text, rank, got in cut],
        "early": [("returned-too-early", {"rank": int(text.split()[-1])}) for _, text, _, got in loads
                  if text.startswith("returned") and not (isinstance(got, tuple) and got[0] == NEW)],
        "leftover": [_misfit(found["leftover"], rank, size, 1) for rank, size, found in ranks if "leftover" in found],
        "over": [_misfit(found["over"], rank, size, 1) for rank, size, found in ranks if found.get("over") is not None],
        "none": [("no-checkpoint-not-none", {"error": got.get("error") if isinstance(got, dict) else f"it returned {got}"[:60]})
                 for got in others[1][0]["none"] if got is not None],
    }  # fmt: skip


def _different(folder: Path) -> list[tuple[Path, str]]:
    """The images that differ, each with what happened next; the ones taken on return are all kept."""
    found = {}
    for image in sorted(folder.iterdir()):
        text = image.name.split(" ", 1)[1]
        key = text if text.startswith("returned") else content(image)
        if key not in found or text == LATEST:
            found[key] = image, text
    return list(found.values())


def _misfit(got, rank, size, attempt=0, step=NEW):
    """(slug, fields) of what is wrong with what a rank has loaded; None where nothing is."""
    due, about = parts_of(step, rank, size, attempt), {"size": size, "where": f"rank {rank} of {size}"}
    error = got.get("error", "") if isinstance(got, dict) else ""
    if got is None or error:
        objects = any(words in error for words in ("weights_only", "WeightsUnpickler", "Weights only"))
        return "objects-saved" if objects else "not-saved", about | {"got": error or "it returned None", "error": error}
    if not isinstance(got, tuple | list) or len(got) != 2 or not isinstance(got[1], dict):
        return "not-a-pair", about | {"got": type(got).__name__}
    found, shards = got
    if isinstance(found, bool) or found != step:
        return "wrong-step", about | {"expected": step, "got": found}
    if set(shards) != set(due):
        return "names-differ", about | {"expected": ", ".join(due), "got": ", ".join(map(str, shards))}
    for name, part in due.items():
        value = shards[name] if isinstance(shards[name], torch.Tensor) else torch.tensor([])
        for slug, wanted, came in (
            ("old-sizes", part.numel(), value.numel()),
            ("dtype-changed", str(part.dtype), str(value.dtype)),
            ("wrong-part", part, value.reshape(-1)),
        ):
            if not (torch.equal(came, wanted) if slug == "wrong-part" else came == wanted):
                return slug, about | {"expected": wanted, "got": came, "where": f"{about['where']}, {name}"}
    return None


def _either(got, rank, text, before, image):
    """As `_misfit`: both checkpoints are right, but nothing else. before: the files of the old one, names and bytes."""
    about = {"old": OLD, "new": NEW, "when": text, "where": f"rank {rank} of 2", "got": "None"}
    # at most the mark has changed: the files of the old checkpoint are there, but no longer the ones that count
    late = len(set(before) - set(content(image))) <= 1
    if isinstance(got, dict) and "error" in got:
        early = late and "FileNotFound" in got["error"]
        return "marked-too-early" if early else "interrupted-unloadable", about | {"error": got["error"]}
    step = got[0] if isinstance(got, tuple | list) and len(got) == 2 else None
    if step not in (OLD, NEW):
        return "old-checkpoint-lost", about | {"got": step}
    wrong = _misfit(got, rank, 2, step=step)
    return wrong and ("marked-too-early" if late and text == LATEST and step == NEW else "half-new", about | wrong[1])


def _wrongs(claim, see, hint=None):
    """A look at what is wrong: (slug, fields), or None for nothing. hint: in the place of the slug."""

    def first(seen):
        return next(wrong for wrong in seen if wrong)

    def slug(seen, due):
        return hint or first(seen)[0]

    def fields(seen, due):
        return silent(seen, due) | first(seen)[1]

    return Look(claim, see, [], slug, holds=nothing, fields=fields)


def _too_much(got, due):
    return "whole-storage-saved" if got[0] > 8 * due else "saved-again-by-all"


def _own_part(got, due):
    return got[0] <= 1.2 * due + got[1] * HEAD


LOOKS = [
    _wrongs("saved and loaded on 4 ranks: each writes and reads its own part",
            lambda seen: [_misfit(got, rank, 4) for rank, got in enumerate(seen["loaded"])]),
    each_rank("", "written", WHOLE, _too_much, holds=_own_part, fields=lambda got, _: {"got": got[0]}),
    each_rank("", "sent", OWN // 2, "gathered-to-save", holds=at_most, fields="sent"),
    each_rank("", "unsafe", False, "unsafe-load"),
    each_rank("", "files", 2, "reads-everything", holds=at_most),
    each_rank("", "mapped", "", "still-the-file", fields=lambda got, _: {"name": got, "got": ""}),
    each_rank("", "peak", 0.9 * WHOLE, "whole-in-memory", holds=at_most, fields={"expected": WHOLE}),
    _wrongs("loaded on 1, 2 and 3 ranks: cut and padded anew", "again"),
    _wrongs("cut short at any moment, a save leaves the old checkpoint or the new one", "cut"),
    _wrongs("all ranks return once the checkpoint is complete", "early"),
    _wrongs("an older attempt on a different number of ranks is not mixed in", "leftover", "leftover-mixed"),
    _wrongs("a complete step is saved again and cut short: the complete checkpoint loads", "over", "written-over"),
    _wrongs("no checkpoint, no folder: None", "none"),
]  # fmt: skip


def balise_10(save_shards, load_shards):
    with tempfile.TemporaryDirectory(prefix="dlojz-check-") as name:
        yield from judged(LOOKS, observe, save_shards, load_shards, Path(name))
