"""Balise 8: a run that goes on bitwise as if it had never been stopped."""

import contextlib
import copy
import functools
import itertools
import os
import random
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dlojz_tp.judging.checking.looks import Look, judged, tried
from dlojz_tp.judging.checks.learning_rate_and_large_batch.running_mean import RunningMean

ROWS, SIZE, TOTAL = 14, 4, 11  # four batches an epoch, the last one of two
STOPS = 6, 8  # in the middle of an epoch, and after its last batch


def _model():
    return nn.Sequential(nn.Linear(5, 6), RunningMean(6), nn.Dropout(0.2), nn.Linear(6, 3))


@functools.cache
def _data():
    g = torch.Generator().manual_seed(2)
    return torch.randn(ROWS, 5, generator=g), torch.randint(3, (ROWS,), generator=g)


def _parts(Batches):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {
        "network": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, TOTAL + 1),
        "scaler": torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3),
        "batches": Batches(*_data(), SIZE, seed=5),
    }


def _train(parts, until):
    """Train to this step; noise comes from three generators, and the mask of dropout from one of them."""
    model, optimizer, scheduler, scaler, batches = parts.values()
    while scheduler.last_epoch < until:
        for x, y in batches:
            x = x + 0.1 * torch.randn(5) + 0.1 * np.random.rand() + 0.1 * random.random()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if scheduler.last_epoch >= until:
                return


def _seed(seed):
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


def _states(parts):
    """{what: its state}, copied."""
    found = {name: part.state_dict() for name, part in parts.items()}
    found["random states of torch"] = torch.get_rng_state()
    found["random states of NumPy"] = [np.random.get_state()[1].tolist(), *np.random.get_state()[2:]]
    return copy.deepcopy(found | {"random states of Python": random.getstate()})


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _differ(one, other):
    return [what for what in one if not _same(one[what], other[what])]


class _Faulty:
    """A part that cannot be written: as a job that is killed while it saves."""

    def state_dict(self):
        return {"weights": torch.zeros(50_000), "file": Path(os.devnull).open()}


class _Drawing:
    """A part that draws random numbers while it is loaded, as one that makes its weights anew does."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        torch.rand(1), np.random.rand(), random.random()


class _Trapped:
    """A part from somewhere else: what is saved of it writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def state_dict(self):
        return {"weight": self}

    def __reduce__(self):
        return Path.write_text, (self.path, "run")


def observe_batches(Batches):
    """The batches of two epochs, read in parts; where it stands at each of them."""
    x, y = torch.arange(14.0)[:, None], torch.arange(14)
    batches = Batches(x, y, 4, seed=1)
    first, rest = _orders(batches)
    seen, places = [], []
    for k, (some, labels) in enumerate(batches):
        seen += labels.tolist() if (some[:, 0] == labels).all() else ["others"]
        places.append((batches.epoch, batches.done))
        if k == 1:
            break
    yield {"begun": seen, "places": places}
    then = []
    for _, labels in itertools.islice(batches, 5):
        seen += labels.tolist()
        then.append((batches.epoch, batches.done))
    yield {"rest": seen, "then": then[:1], "ended": (batches.epoch, batches.done)}
    yield {"next": [one for _, labels in itertools.islice(batches, 5) for one in labels.tolist()]}
    yield {"due": [first, rest]}


def _orders(batches):
    """The orders of the first two epochs, by the method that is given."""
    first = batches.order().tolist()
    other = copy.copy(batches)
    other.epoch = 1
    return first, other.order().tolist()


def observe(Batches, save_checkpoint, load_checkpoint):
    """What stands in a new set of parts after loading, and what comes of it; files that were half written, or traps."""
    _seed(0)
    whole = _parts(Batches)
    _train(whole, TOTAL)
    for stop, kind in zip(STOPS, (Path, str)):
        yield _resumed(Batches, save_checkpoint, load_checkpoint, stop, kind, _states(whole))
    yield _files(save_checkpoint, load_checkpoint)


def _resumed(Batches, save_checkpoint, load_checkpoint, stop, kind, due):
    """A run that is saved at this step, and goes on in new objects. due: the states at the end of one never stopped."""
    with tempfile.TemporaryDirectory(prefix="dlojz-resume-") as folder:
        path = kind(Path(folder) / "last.pt")
        _seed(0)
        parts = _parts(Batches)
        _train(parts, stop)
        before = _states(parts)
        save_checkpoint(path, **parts)
        found = {f"{stop} file": Path(path).exists(), f"{stop} changed": _differ(before, _states(parts))}
        if not found[f"{stop} file"]:
            return found
        _seed(1)
        parts = _parts(Batches)
        moved = kind(Path(folder) / "moved" / "here.pt")
        Path(moved).parent.mkdir()
        Path(path).rename(moved)
        try:
            load_checkpoint(moved, **parts)
        except FileNotFoundError as error:
            return found | {f"{stop} alone": str(error)}
        found[f"{stop} alone"] = ""
    found[f"{stop} loaded"] = _differ(before, _states(parts))
    raised = tried(_train, parts, TOTAL)
    return found | {f"{stop} resumed": [raised] if raised else _differ(due, _states(parts))}


def _files(save_checkpoint, load_checkpoint):
    """What is in the old file after a second save, and after one that fails; other parts; a file with a trap."""
    with tempfile.TemporaryDirectory(prefix="dlojz-resume-") as folder:
        path, link, ran = (Path(folder) / name for name in ("last.pt", "link", "ran"))
        parts = {"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 3)}

        def both(**given):
            save_checkpoint(path, **given)
            load_checkpoint(path, **parts)

        found = {"others": tried(lambda: both(**parts))}
        if found["others"] is not None:
            return found
        old = path.read_bytes()
        os.link(path, link)
        nn.init.zeros_(parts["student"].weight)
        with _noted(path) as noted:
            save_checkpoint(path, **parts)
        found |= {
            "taken": "taken" in noted,
            "elsewhere": "elsewhere" in noted,
            "fewer": tried(lambda: load_checkpoint(path, student=nn.Linear(2, 2))),
        }
        found["early"] = _draws(path, save_checkpoint, load_checkpoint)
        found |= {"in place": link.read_bytes() != old, "replaced": path.read_bytes() != old}
        old = path.read_bytes()
        failed = tried(lambda: save_checkpoint(path, **parts, faulty=_Faulty()))
        found |= {"failed": isinstance(failed, str), "half": not path.exists() or path.read_bytes() != old}
        tried(lambda: both(student=_Trapped(ran)))
        return found | {"trap": ran.exists()}


def _draws(path, save_checkpoint, load_checkpoint):
    """Whether random numbers go on elsewhere where a part draws some while it is loaded."""
    other = path.with_name("drawing.pt")
    save_checkpoint(other, drawing=_Drawing())
    due = torch.get_rng_state()
    load_checkpoint(other, drawing=_Drawing())
    return not torch.equal(torch.get_rng_state(), due)


@contextlib.contextmanager
def _noted(path):
    """Notes when the file at this path is "taken" away, or another one from "elsewhere" moved there."""
    noted, folder = set(), Path(os.path.realpath(path.parent))

    def noting(does):
        def do(first, *more, **options):
            if str(first) == str(path):
                noted.add("taken")
            if more and str(more[0]) == str(path) and folder not in Path(os.path.realpath(first)).parents:
                noted.add("elsewhere")
            return does(first, *more, **options)

        return do

    with contextlib.ExitStack() as stack:
        for name in ("remove", "unlink", "rename", "replace"):
            stack.enter_context(mock.patch.object(os, name, noting(getattr(os, name))))
        yield noted


def _what(seen, due):
    return {"what": ", ".join(seen), "got": "", "expected": ""}


def _not_loaded(seen, due):
    return "random-not-loaded" if all(one.startswith("random") for one in seen) else "part-not-loaded"


def _moved(seen, due):
    return {"got": str(seen), "expected": str(due)}


def _not_continued(seen, due):
    if seen[8:10] == ORDERS[1][:2]:
        return "left-is-ended"
    if seen[:14] == due:
        return "never-ends"
    return "begins-again" if seen[8:10] == due[:2] else "wrong-batches"


BATCHES = [
    Look("batches in the order of the epoch", "begun", lambda _: ORDERS[0][:8], "wrong-batches", fields=_moved),
    Look("it counts the batches that were handed out", "places", [(0, 1), (0, 2)], lambda seen, _: "wrong-count" if seen[0][1] else "counted-late", fields=_moved),
    Look("a second loop continues where the first stopped", "rest", lambda _: ORDERS[0],
         _not_continued, fields=_moved),
    Look("", "then", [(0, 3)], "wrong-count", fields=_moved),
    Look("at the end, the next epoch begins", "ended", (1, 0), "epoch-stays", fields=_moved),
    Look("", "next", lambda _: ORDERS[1], "wrong-batches", fields=_moved),
]  # fmt: skip
WHERE = {6: "saved in the middle of an epoch", 8: "saved after an epoch's last batch"}
CHECKPOINT = [
    *(look for stop in STOPS for look in (
        Look(f"a run {WHERE[stop]}", f"{stop} file", True, "no-file"),
        Look("", f"{stop} changed", [], "save-changes", fields=_what),
        Look("", f"{stop} alone", "", "not-one-file", fields="error"),
        Look("all of it is loaded into new objects", f"{stop} loaded", [], _not_loaded, fields=_what),
        Look("and the run continues bitwise as if it had never stopped", f"{stop} resumed", [], "goes-on-otherwise", fields=_what),
    )),
    Look("any parts", "others", None, "own-names", fields="error"),
    Look("a new file replaces the old one only when it is complete", "replaced", True, "no-file"),
    Look("", "half", False, "half-written"),
    Look("", "in place", False, "half-written"),
    Look("", "taken", False, "old-removed"),
    Look("", "elsewhere", False, "other-folder"),
    Look("", "early", False, "random-early"),
    Look("only the parts that are asked for", "fewer", None, "fewer-parts", fields="error"),
    Look("an error reaches the caller", "failed", True, "save-silent"),
    Look("and no code in the file is run", "trap", False, "runs-code"),
]  # fmt: skip


def _order(seed, epoch, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()


ORDERS = [_order(1, epoch, 14) for epoch in (0, 1)]


def balise_8(Batches, save_checkpoint, load_checkpoint):
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    yield from judged(BATCHES, observe_batches, Batches)
    yield from judged(CHECKPOINT, observe, Batches, save_checkpoint, load_checkpoint)
