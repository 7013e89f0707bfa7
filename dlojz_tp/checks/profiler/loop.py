"""Balise 1: a profiled loop, judged by the trace that it writes and by the weights that it leaves."""

import contextlib
import json
import os
import stat
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import record_function

from dlojz_tp.checking import Wrong, close
from dlojz_tp.probes.networks import batches, network, plain_steps

HINTS = {
    "no-trace": "There is no trace in the given folder. Does on_trace_ready call export_chrome_trace with a path "
                "in that folder?",
    "step-not-called": "Nothing was recorded, because you never told the profiler that a step had ended. Call its "
                       "step() at the end of each step.",
    "no-warmup": "The profiler has no warm-up step, so the first recorded step would include what it does at its "
                 "own start.",
    "trace-name": "Put the trace directly in the folder, as one file with a name that ends in .json: the cells "
                  "below look for that.",
    "trace-elsewhere": "You wrote a trace to {place}. It belongs in the given folder, and nowhere else.",
    "not-json": "The file in the folder cannot be read as a trace: {error}.",
    "not-private": "Other users can look into the folder: its mode is {mode}. A trace shows paths and names. "
                   "Create the folder with mode 0o700.",
    "steps-unmarked": "The trace has no steps: without a schedule, the profiler records everything and marks no steps.",
    "too-many-steps": "You recorded {n} steps instead of {wanted}. The rest of a long loader must not be recorded.",
    "too-few-steps": "You recorded {n} steps instead of {wanted}. Do you call step() once per step, and use `active`?",
    "warmup-recorded": "The recording starts with step {first}, counted from 0. The first step waits and the "
                       "second warms up, so it should start with step 2. (And step() is called at the end of a "
                       "step, not at its start.)",
    "recorded-late": "The recording starts with step {first}, counted from 0. After one step that waits and one "
                     "that warms up, it should start with step 2.",
    "recorded-again": "The cycle of waiting, warming up and recording started again, and later steps ({first} to "
                      "{last}) replaced the first ones. Set how often it repeats.",
    "label-missing": "The label {name!r} is in {n} of {wanted} steps.",
    "label-misplaced": "The label {name!r} doesn't cover {what}. It measures what is inside its `with` block.",
    "label-too-wide": "The label {name!r} also covers {what}, so its time is not that of a single part.",
    "step-inside": "You call the profiler's step() in the middle of a step, so the update of one step is recorded "
                   "in the next. Call it at the end of each step.",
    "step-in-label": "You call the profiler's step() inside the label {name!r}, so the label ends in the next "
                     "step. Call it after the last label of a step.",
    "folder-there": "Your code fails when the folder already exists. It may or may not exist: exist_ok=True.",
    "forward-again": "You called `forward` {n} times for {wanted} batches. Once per batch is enough.",
    "batch-not-trained": "You trained on {n} of {wanted} batches. Only the recording ends; the loop goes on.",
    "weights-still": "The weights did not change. Do you call the optimizer's step() after backward() and before "
                     "you clear the gradients?",
    "gradients-add-up": "The weights are those of a loop that never clears its gradients: they add up from one "
                        "step to the next.",
    "weights-differ": "After the loop, the weights differ from those of a plain loop over the same batches.",
    "profiler-not-returned": "Return the profiler: its key_averages() are needed next.",
}

LABELS = ("loading", "forward", "backward", "optimizer")
CLEARING = "the clearing of the gradients"
MARKS = {  # what has to lie under which label
    "loading": "the loader's work",
    "forward": "the network",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
}


def balise_1(profiled_loop):
    """A long loader, one that just suffices, a second call, another number of steps."""
    data = batches(*[4] * 10)
    with _somewhere() as place:
        yield "one trace in the given folder, which others cannot open"
        run = _Run(profiled_loop, data, place / "profile", active=3)
        mode = stat.S_IMODE((place / "profile").stat().st_mode)
        if mode & 0o077:
            raise Wrong("not-private", mode=oct(mode), expected="0o700", got=oct(mode))
        yield "steps 2, 3 and 4 are recorded, and no others"
        if run.calls > len(data):
            raise Wrong("forward-again", n=run.calls, wanted=len(data))
        run.right_steps(3)
        yield "each of them has its four labels around the right lines"
        run.right_labels(3)
        yield "the loop trains on every batch as a plain loop does"
        _trained(run, data)
        yield "it returns the profiler"
        if not all(callable(getattr(run.returned, name, None)) for name in ("key_averages", "step")):
            raise Wrong("profiler-not-returned", got=run.returned)
        yield "another number of steps, and a folder that already exists"
        nested = place / "below" / "second"
        nested.mkdir(parents=True, mode=0o700)
        for _ in range(2):
            run = _Run(profiled_loop, batches(*[3] * 9), nested, active=5)
        run.right_steps(5)
        run.right_labels(5)
        yield "a loader that ends with the last active step"
        run = _Run(profiled_loop, batches(*[3] * 4), place / "short", active=2)
        run.right_steps(2)
        yield "one step alone"
        _Run(profiled_loop, batches(*[3] * 5), place / "one", active=1).right_steps(1)


@contextlib.contextmanager
def _somewhere():
    """A private temporary folder, which is also the working directory, so that nothing is left about."""
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):
        before = os.umask(0o022)
        try:
            yield Path(made).resolve()
        finally:
            os.umask(before)


@contextlib.contextmanager
def _profiler_ends():
    """An answer that fails between start() and stop() must not leave a profiler running in the notebook."""
    try:
        yield
    finally:
        if torch.autograd._profiler_enabled():
            torch.autograd._disable_profiler()


class _Run:
    """One call of the answer on a network and a loader that leave marks in the trace."""

    def __init__(self, profiled_loop, data, folder, active):
        self.active, self.calls, self.gradients = active, 0, []
        self.model = _labelled(network())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        start = Path.cwd()
        seen = set(_files(start))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")  # of the profiler: where it is not stepped, and others
            try:
                with _profiler_ends():
                    self.returned = profiled_loop(self.model, _Loader(data), optimizer, self._forward, folder, active)
            except FileExistsError as error:
                raise Wrong("folder-there", got=f"FileExistsError: {error}") from error
        if any("using warmup" in str(warning.message) for warning in said):
            raise Wrong("no-warmup")
        found = _files(folder)
        elsewhere = sorted(set(_files(start)) - seen - set(found))
        if elsewhere:
            raise Wrong("trace-elsewhere", place=str(elsewhere[0].relative_to(start)), got=str(elsewhere[0].name))
        if not found:
            raise Wrong("step-not-called" if _unstepped(self.returned) else "no-trace")
        newest = max(found, key=lambda path: path.stat().st_mtime_ns)
        if newest.suffix != ".json" or newest.parent != Path(folder):
            raise Wrong("trace-name", expected="NAME.json", got=str(newest.relative_to(folder)))
        self._read(newest)

    def _forward(self, model, images, labels):
        self.calls += 1
        with record_function(f"check: forward {self.calls - 1}"):
            loss = F.cross_entropy(model(images), labels)
        if loss.requires_grad:
            loss.register_hook(self._backward)
        return loss

    def _backward(self, gradient):
        with record_function("check: backward"):
            return gradient * 1.0

    def _read(self, path):
        try:
            events = json.loads(path.read_text())["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Wrong("not-json", error=f"{type(error).__name__}: {error}"[:200], got=path.name) from error
        spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("user_annotation", "cpu_op")]
        self.spans = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in spans]
        self.steps = sorted(int(name[13:]) for name, *_ in self.spans if name.startswith("ProfilerStep#"))
        self.recorded = sorted(int(name[15:]) for name, *_ in self.spans if name.startswith("check: forward "))

    def right_steps(self, wanted):
        got = self.recorded
        if not got:
            raise Wrong("too-few-steps", n=0, wanted=wanted)
        if not self.steps:
            raise Wrong("steps-unmarked", got=f"{len(got)} steps in the trace")
        expected = list(range(2, 2 + wanted))
        if got == expected:
            return
        fields = {"n": len(got), "wanted": wanted, "first": got[0], "last": got[-1]}
        slug = "too-many-steps" if len(got) > wanted else "too-few-steps"
        if got[0] >= 2 + wanted:
            slug = "recorded-again"
        elif len(got) == wanted or got[0] < 2 and wanted <= len(got) <= wanted + 2:
            slug = "warmup-recorded" if got[0] < 2 else "recorded-late"
        raise Wrong(slug, expected=f"steps {expected}", got=f"steps {got}", **fields)

    def right_labels(self, wanted):
        marks = {
            "loading": self._all("check: loading"),
            "forward": [s for s in self.spans if s[0].startswith("check: forward")],
            "backward": self._all("check: backward"),
            "optimizer": [s for s in self.spans if s[0].startswith("Optimizer.step")],
        }
        for name in LABELS:
            labels = self._all(name)
            if len(labels) < wanted:
                raise Wrong("label-missing", name=name, n=len(labels), wanted=wanted)
        for name in LABELS:
            for mark in marks[name]:
                if not any(_inside(mark, label) for label in self._all(name)) and self._in_steps(mark):
                    raise Wrong("label-misplaced", name=name, what=MARKS[name])
        for name in LABELS:
            covered = [mark for mark in marks[name] if any(_inside(mark, label) for label in self._all(name))]
            if len(covered) < wanted:
                raise Wrong("label-misplaced", name=name, what=MARKS[name])
        cleared = [s for s in self.spans if s[0].startswith(("Optimizer.zero_grad", "check: zero_grad"))]
        inside = [mark for mark in cleared if any(_inside(mark, label) for label in self._all("optimizer"))]
        if cleared and len(inside) < wanted:
            raise Wrong("label-misplaced", name="optimizer", what=CLEARING)
        for name in LABELS:
            for other in LABELS:
                for mark in marks[other]:
                    if other != name and any(_inside(mark, label) for label in self._all(name)):
                        raise Wrong("label-too-wide", name=name, what=MARKS[other])
        for step in (span for span in self.spans if span[0].startswith("ProfilerStep#")):
            for name in LABELS:
                if any(step[1] <= s[1] < step[2] - 1e-3 and not _inside(s, step) for s in self._all(name)):
                    raise Wrong("step-in-label", name=name)
            forward, update = ([m for m in marks[name] if _inside(m, step)] for name in ("forward", "optimizer"))
            if forward and update and update[-1][1] < forward[0][1]:
                raise Wrong("step-inside")

    def _all(self, name):
        return [span for span in self.spans if span[0] == name]

    def _in_steps(self, mark):
        """Whether it began in a recorded step: the profiler may also see a little of what lies around."""
        return any(_inside(mark, span) for span in self.spans if span[0].startswith("ProfilerStep#"))


def _labelled(model):
    """The model, with a mark in the trace where its gradients are cleared; an optimizer leaves one by itself."""
    clear = model.zero_grad

    def zero_grad(set_to_none=True):
        with record_function("check: zero_grad"):
            clear(set_to_none)

    model.zero_grad = zero_grad
    return model


class _Loader:
    """Batches, with a mark in the trace where each is made."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        for images, labels in self.data:
            with record_function("check: loading"):
                batch = images.clone(), labels.clone()
            yield batch


def _inside(inner, outer):
    # a microsecond is left for the rounding of the file
    return outer[1] - 1e-3 <= inner[1] and inner[2] <= outer[2] + 1e-3


def _files(folder):
    if not folder.is_dir():
        return []
    return [path for path in folder.rglob("*") if path.is_file() and path.name.endswith((".json", ".json.gz"))]


def _unstepped(profiler):
    return getattr(profiler, "step_num", None) == 0


def _trained(run, data):
    if run.calls < len(data):
        raise Wrong("batch-not-trained", n=run.calls, wanted=len(data))
    truth, _ = plain_steps(network(), data)
    for (name, got), wanted in zip(run.model.named_parameters(), truth.parameters(), strict=True):
        if not close(got, wanted, 1e-4):
            added, _ = plain_steps(network(), data, add_up=True)
            slug = "gradients-add-up" if _alike(run.model, added) else "weights-differ"
            slug = "weights-still" if _alike(run.model, network()) else slug
            raise Wrong(slug, expected=wanted.float(), got=got, where=f"{name} after {len(data)} steps")


def _alike(model, other):
    return all(close(p, q, 1e-4) for p, q in zip(model.parameters(), other.parameters(), strict=True))
