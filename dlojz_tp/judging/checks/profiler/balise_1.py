"""Balise 1: a profiled loop, judged by the trace that it writes and by the weights that it leaves."""

import contextlib
import gzip
import json
import os
import stat
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import record_function

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most, judged, within
from dlojz_tp.judging.probes.networks import batches, network, plain_steps

LABELS = ("loading", "forward", "backward", "optimizer")
CLEARING = "the clearing of the gradients"
MARKS = {  # what has to lie under which label
    "loading": "the loader's work",
    "forward": "the network",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
}


def observe(profiled_loop, place):
    """A long loader, a second call with another number of steps, a loader that just suffices, a single step."""
    yield {"profile": _run(profiled_loop, batches(*[4] * 10), place / "profile", 3)}
    yield _twice(profiled_loop, batches(*[3] * 14), place / "below", 5)
    yield {"short": _run(profiled_loop, batches(*[3] * 4), place / "short", 2)}
    yield {"one": _run(profiled_loop, batches(*[3] * 6), place / "one", 1)}


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


def _twice(profiled_loop, data, place, active):
    """Two calls with a folder that exists; after a mistake there, one with a new folder."""
    there = place / "second"
    there.mkdir(parents=True, mode=0o700)
    try:
        first, again = (_run(profiled_loop, data, there, active) for _ in range(2))
        return {"there": "", "first": first, "again": again}
    except FileExistsError as error:
        other = _run(profiled_loop, data, place / "third", active)
        return {"there": f"FileExistsError: {error}", "first": other, "again": other}


class _Forward:
    """The forward pass of the loop; it and its backward pass leave marks in the trace."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, images, labels):
        self.calls += 1
        with record_function(f"check: forward {self.calls - 1}"):
            loss = F.cross_entropy(model(images), labels)
        if loss.requires_grad:
            loss.register_hook(self._backward)
        return loss

    def _backward(self, gradient):
        with record_function("check: backward"):
            return gradient * 1.0


def _run(profiled_loop, data, folder, active):
    """One call of the answer: what it returns, what it has done to the weights, where its trace is and what is in it."""
    model, forward, start = _labelled(network()), _Forward(), Path.cwd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = set(_files(start))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # of the profiler: where it is not stepped, and others
        with _profiler_ends():
            returned = profiled_loop(model, _Loader(data), optimizer, forward, folder, active)
    found = _files(folder)
    elsewhere = sorted(set(_files(start)) - before - set(found))
    report = {
        "cold": any("using warmup" in str(warning.message) for warning in said), "calls": forward.calls,
        "elsewhere": str(elsewhere[0].relative_to(start)) if elsewhere else "",
        "trace": "a trace" if found or elsewhere else "no step" if getattr(returned, "step_num", None) == 0 else "none",
        "mode": stat.S_IMODE(folder.stat().st_mode) if folder.exists() else 0,
        "weights": [p.detach().clone() for p in model.parameters()],
        "profiler": all(callable(getattr(returned, name, None)) for name in ("key_averages", "step")),
    }  # fmt: skip
    if not (found or elsewhere):
        return report
    newest = max(found or elsewhere, key=lambda path: path.stat().st_mtime_ns)
    right = newest in elsewhere or (newest.suffix == ".json" and newest.parent == Path(folder))
    report["name"] = "NAME.json" if right else str(newest.relative_to(folder))
    try:
        data = newest.read_bytes()
        events = json.loads(gzip.decompress(data) if newest.suffix == ".gz" else data)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return report | {"error": f"{type(error).__name__}: {error}"[:200]}
    for path in elsewhere:  # a second call may write it again
        path.unlink()
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("user_annotation", "cpu_op")]
    return report | {"error": ""} | _steps_and_labels([(e["name"], e["ts"], e["ts"] + e["dur"]) for e in spans])


def _steps_and_labels(spans):
    """What spans of a trace, (name, begin, end), say of its steps; of each label, what it should cover, and covers."""
    starting = lambda *names: [span for span in spans if span[0].startswith(names)]  # noqa: E731
    marks = {
        "loading": starting("check: loading"), "forward": starting("check: forward"),
        "backward": starting("check: backward"), "optimizer": starting("Optimizer.step"),
    }  # fmt: skip
    steps, cleared = starting("ProfilerStep#"), starting("Optimizer.zero_grad", "check: zero_grad")
    labels = {name: [span for span in spans if span[0] == name] for name in LABELS}
    inside = lambda mark, some: any(_inside(mark, one) for one in some)  # noqa: E731
    covered = {
        (name, other): [inside(mark, labels[name]) for mark in marks[other]] for name in LABELS for other in LABELS
    }
    updates = [[[m for m in marks[name] if _inside(m, step)] for name in ("forward", "optimizer")] for step in steps]
    return {
        "steps": {"marked": bool(steps), "recorded": sorted(int(span[0][15:]) for span in marks["forward"])},
        "labels": {name: len(labels[name]) for name in LABELS},
        # the profiler may also see a little of what lies around the steps
        "outside": [name for name in LABELS if any(inside(m, steps) and not inside(m, labels[name]) for m in marks[name])],
        "covered": {name: sum(covered[name, name]) for name in LABELS},
        "cleared": sum(inside(mark, labels["optimizer"]) for mark in cleared) if cleared else None,
        "wide": [(name, other) for (name, other), some in covered.items() if other != name and any(some)],
        "over the end": [name for step in steps for name in LABELS for s in labels[name]
                         if step[1] <= s[1] < step[2] - 1e-3 and not _inside(s, step)],
        "update first": any(update[-1][1] < forward[0][1] for forward, update in updates if forward and update),
    }  # fmt: skip


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


def _weights_slug(seen, _):
    added, _ = plain_steps(network(), batches(*[4] * 10), add_up=True)
    known = {"weights-still": network(), "gradients-add-up": added}
    return next(
        (slug for slug, model in known.items() if close(seen, list(model.parameters()), 1e-4)), "weights-differ"
    )


def _steps_slug(seen, due):
    got, wanted = seen["recorded"], len(due)
    if got and not seen["marked"]:
        return "steps-unmarked"
    if got and got[0] >= 2 + wanted:
        return "recorded-again"
    if got and (len(got) == wanted or got[0] < 2 and wanted <= len(got) <= wanted + 2):
        return "warmup-recorded" if got[0] < 2 else "recorded-late"
    return "too-many-steps" if len(got) > wanted else "too-few-steps"


def _of(run, what):
    """A look's `see`: one thing that is told of a run."""
    return lambda o: o[run][what]


def _steps(claim, run, wanted):
    """The look at which steps a run has recorded."""

    def fields(seen, due):
        got = seen["recorded"]
        return {"n": len(got), "wanted": wanted, "first": (got or [0])[0], "last": (got or [0])[-1]}

    return Look(claim, _of(run, "steps"), list(range(2, 2 + wanted)), _steps_slug, fields=fields,
                holds=lambda seen, due: seen["marked"] and seen["recorded"] == due)  # fmt: skip


def _form(claim, run):
    """Looks at where the trace of a run is."""
    return [
        Look(claim, _of(run, "cold"), False, "no-warmup"),
        Look("", _of(run, "elsewhere"), "", "trace-elsewhere", fields="place"),
        Look("", _of(run, "trace"), "a trace", lambda seen, _: "no-trace" if seen == "none" else "step-not-called"),
        Look("", _of(run, "name"), "NAME.json", "trace-name"),
        Look("", _of(run, "error"), "", "not-json", fields="error"),
    ]


def _few(seen, due):
    """Fields of the first label of which there are too few."""
    name = next(name for name in LABELS if seen[name] < due)
    return {"name": name, "n": seen[name], "wanted": due, "what": MARKS[name]}


def _labels(claim, run, wanted):
    """Looks at the labels of a run's steps."""
    enough = lambda seen, due: min(seen.values()) >= due  # noqa: E731
    return [
        Look(claim, _of(run, "labels"), wanted, "label-missing", holds=enough, fields=_few),
        Look("", _of(run, "outside"), [], "label-misplaced",
             fields=lambda seen, _: {"name": seen[0], "what": MARKS[seen[0]]}),
        Look("", _of(run, "covered"), wanted, "label-misplaced", holds=enough, fields=_few),
        Look("", _of(run, "cleared"), wanted, "label-misplaced", holds=lambda seen, due: seen is None or seen >= due,
             fields={"name": "optimizer", "what": CLEARING}),
        Look("", _of(run, "wide"), [], "label-too-wide",
             fields=lambda seen, _: {"name": seen[0][0], "what": MARKS[seen[0][1]]}),
        Look("", _of(run, "over the end"), [], "step-in-label", fields=lambda seen, _: {"name": seen[0]}),
        Look("", _of(run, "update first"), False, "step-inside"),
    ]  # fmt: skip


def _calls(seen, due):
    return {"n": seen, "wanted": due}


def _octal(seen, due):
    return {"mode": oct(seen), "expected": oct(due), "got": oct(seen)}


LOOKS = [
    *_form("one trace in the given folder, which others cannot open", "profile"),
    Look("", _of("profile", "mode"), 0o700, "not-private", holds=lambda seen, _: not seen & 0o077, fields=_octal),
    Look("steps 2, 3 and 4 are recorded, and no others", _of("profile", "calls"), 10, "forward-again",
         holds=at_most, fields=_calls),
    _steps("", "profile", 3),
    *_labels("each of them has its four labels around the right lines", "profile", 3),
    Look("the loop trains on every batch as a plain loop does", _of("profile", "calls"), 10, "batch-not-trained",
         fields=_calls),
    Look("", _of("profile", "weights"), lambda _: list(plain_steps(network(), batches(*[4] * 10))[0].parameters()),
         _weights_slug, holds=within(1e-4)),
    Look("it returns the profiler", _of("profile", "profiler"), True, "profiler-not-returned"),
    Look("another number of steps, and a folder that already exists", "there", "", "folder-there"),
    *_form("", "first"), *_form("", "again"), _steps("", "again", 5), *_labels("", "again", 5),
    *_form("a loader that ends with the last active step", "short"), _steps("", "short", 2),
    *_form("one step alone", "one"), _steps("", "one", 1),
]  # fmt: skip


def balise_1(profiled_loop):
    with _somewhere() as place:
        yield from judged(LOOKS, observe, profiled_loop, place)
