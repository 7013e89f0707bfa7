"""Balise 1: a timed run, on a clock that moves only while the training or the evaluation works."""

from dataclasses import dataclass

import torch
from torch import nn

from dlojz_tp.judging.checking.looks import Look, Value, judged, silent

READ = 7.0  # seconds that the first reading of data takes
TRAINING, EVALUATION = [16.0, 20.0, 12.0, 24.0, 18.0], [5.0, 3.0, 6.0, 4.0, 8.0]  # seconds of the parts of each run
ENOUGH = 20  # calls of train or evaluate in a run of five parts: the answer would go on for ever


class Stopped(BaseException):
    """Ends an answer that would go on for ever."""


@dataclass
class Case:
    """A run: the accuracy after each part, and how many parts are needed. at_call: train(seed) itself reads data."""

    accuracies: tuple
    target: float
    parts: int
    at_call: bool
    seed: int
    start: float = 0.0  # what the clock says before the run

    def __str__(self):
        return f"accuracies {', '.join(map(str, self.accuracies))}; target {self.target}"

    def ends(self):
        return [READ + sum(TRAINING[:k]) + sum(EVALUATION[:k]) for k in range(1, self.parts + 1)]


REACHED = [
    Case((0.25, 0.5, 0.75, 0.8), 0.5, 2, False, 11, 60.0),  # exactly
    Case((0.2, 0.5, 0.7, 0.9, 0.95), 0.65, 3, False, 7, 1000.0),
    Case((0.3, 0.8, 0.4, 0.9), 0.75, 2, True, 0, -40.0),
    Case((0.9, 0.92, 0.95), 0.85, 1, True, 123),
    Case((0.6, 0.4, 0.5, 0.625, 0.8), 0.62, 4, True, 5, 3.5),
    Case((0.1, 0.2, 0.61), 0.6, 3, False, 41, 250.0),  # in the last part
]
NEVER = [Case((0.1, 0.4, 0.3), 0.9, 3, False, 3, 500.0), Case((0.3, 0.85, 0.8, 0.7), 0.9, 4, True, 19)]
CASES = REACHED + NEVER


class Run:
    """What `timed_run` is given in one case. It notes all calls, and the model's modes meanwhile."""

    def __init__(self, case):
        self.case, self.now, self.asked = case, case.start, False
        self.seeds, self.trained, self.evaluated, self.modes = [], 0, [], {"training": True, "evaluation": True}

    def clock(self):
        self.asked = True
        return self.now

    def train(self, seed="nothing"):
        self.seeds.append(seed)
        if len(self.seeds) > ENOUGH:
            raise Stopped
        self.now += READ if self.case.at_call else 0
        return self._parts()

    def _parts(self):
        self.now += 0 if self.case.at_call else READ
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
        model.register_buffer("parts", torch.tensor(0))  # a copy of the model knows as well how far it was trained
        for seconds in TRAINING[: len(self.case.accuracies)]:
            self.modes["training"] &= all(layer.training for layer in model.modules())
            self.now += seconds
            self.trained += 1
            model.parts += 1
            yield model

    def evaluate(self, model):
        self.evaluated.append(int(model.parts))
        if len(self.evaluated) > ENOUGH:
            raise Stopped
        self.modes["evaluation"] &= not any(layer.training for layer in model.modules())
        self.now += EVALUATION[int(model.parts) - 1]
        return self.case.accuracies[int(model.parts) - 1]

    def calls(self):
        """What is wrong with the calls, in words: "" if nothing is."""
        if self.seeds != [self.case.seed]:
            given = f"called with {', '.join(map(str, self.seeds[:3]))}" if self.seeds else "not called"
            return f"train was {given}, but the seed was {self.case.seed}"
        if self.evaluated != list(range(1, len(self.evaluated) + 1)):
            return (
                "evaluate was called after these numbers of parts of the training: "
                f"{', '.join(map(str, self.evaluated[:6]))}"
            )
        return ""


def returned(timed_run, case):
    """The run, and what came back: (seconds, curve), None, or in words what else."""
    run, got = Run(case), None
    try:
        got = timed_run(run.train, run.evaluate, case.target, case.seed, clock=run.clock)
    except (StopIteration, Stopped) as error:
        got = type(error).__name__
    try:
        seconds, curve = got
        pairs = [curve[k] for k in range(len(curve))]  # a list: can be indexed, and read again
        return run, (float(seconds), [float(end) for end, _ in pairs], [float(accuracy) for _, accuracy in pairs])
    except (TypeError, ValueError, LookupError):
        return run, None if got is None else got if isinstance(got, str) else "no pair"


def observe(timed_run):
    """Calls, modes and parts trained; then what came back."""
    runs, found = zip(*(returned(timed_run, case) for case in CASES))
    yield {"calls": next(filter(None, (run.calls() for run in runs)), ""), "parts": [run.trained for run in runs],
           "evaluation": all(run.modes["evaluation"] for run in runs),
           "training": all(run.modes["training"] for run in runs), "asked": all(run.asked for run in runs)}  # fmt: skip
    words = [one if one is None or isinstance(one, str) else "a pair" for one in found]
    yield {"forms": words[: len(REACHED)],
           "never": [f"{one[0]:g} s" if word == "a pair" else str(one) for one, word in zip(found, words)][len(REACHED) :]}  # fmt: skip
    seconds, ends, accuracies = zip(*found)
    yield {"accuracies": list(accuracies), "ends": sum(ends, []), "seconds": list(seconds[: len(REACHED)])}


def of_case(cases, unit=""):
    """Fields: the first case that differs."""

    def fields(seen, due):
        case, got, true = next((case, a, b) for case, a, b in zip(cases, seen, due) if a != b)
        return {"where": f"{case}", "expected": f"{true}{unit}", "got": f"{got}{unit}"}

    return fields


def parts_hint(seen, due):
    """Where only the run goes on in which an accuracy equals the target, the comparison is the mistake."""
    return "above-only" if seen[1:] == due[1:] and seen[0] > due[0] else "other-end"


ENDS = [case.ends() for case in CASES]
EVALUATIONS = [f"{case}; evaluation {k}" for case in CASES for k in range(1, case.parts + 1)]
LOOKS = [
    Look("one training with its own seed, each model evaluated once", "calls", "", "calls", fields=lambda seen, _: {"what": seen, "expected": "", "got": ""}),
    Look("the training ends at the target", "parts", [case.parts for case in CASES], parts_hint, fields=of_case(CASES, " parts")),
    Look("evaluation in evaluation mode, training in training mode", "evaluation", True, "evaluated-in-training"),
    Look("", "training", True, "left-in-evaluation"),
    Look("the seconds and a curve", "forms", ["a pair"] * len(REACHED), "run-form", fields=silent),
    Look("measured with the given clock", "asked", True, "own-clock"),
    Look("a run that never reaches the target", "never", ["inf s"] * len(NEVER), "unreached", fields=of_case(NEVER)),
    Look("each evaluation's accuracy", "accuracies", [list(case.accuracies[: case.parts]) for case in CASES], "wrong-curve", fields=of_case(CASES)),
    Value("each evaluation's end", "ends", sum(ENDS, []), "wrong-seconds", fields=of_case(EVALUATIONS, " s")),
    Value("the seconds of the run", "seconds", [ends[-1] for ends in ENDS[: len(REACHED)]], "wrong-seconds", fields=of_case(REACHED, " s")),
]  # fmt: skip


def balise_1(timed_run):
    yield from judged(LOOKS, observe, timed_run)
