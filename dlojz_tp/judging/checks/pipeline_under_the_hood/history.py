"""Balise 9: what an asynchronous stage tells of its versions, and who makes its updates."""

import torch

from dlojz_tp.judging.checks.pipeline_under_the_hood.streams import RATE, N, batches, drive, stages_of


def versions(AsyncStage) -> list[dict]:  # noqa: N803
    """Of each of one, three and four stages: steps of its optimizer, its `history` and `version`."""
    found = []
    for p in (1, 3, 4):
        modules, (x, targets) = stages_of(p), batches(N)
        optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in modules]
        steps = [_steps(optimizer) for optimizer in optimizers]
        stages = [AsyncStage(*pair) for pair in zip(modules, optimizers, strict=True)]
        drive(stages, x, targets)
        found += [
            # anyone may count under another name
            {"p": p, "stage": s, "steps": len(steps[s]), "version": getattr(stage, "version", N),
             "history": getattr(stage, "history", None), "n": N, "where": f"stage {s} of {p}"}
            for s, stage in enumerate(stages)
        ]  # fmt: skip
    return found


def _steps(optimizer) -> list:
    """A list that gets an entry at each step of the optimizer."""
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def mistake(observed):
    """The first mistake of a stage, as a hint and its fields."""
    for told in observed["versions"]:
        # in a 1F1B stream, forward k comes after backward k - (p - s)
        truth = [(k, max(0, k - (told["p"] - 1 - told["stage"])), k) for k in range(N)]
        history, version = told["history"], told["version"]
        if not told["steps"]:
            return "optimizer-unused", told
        if not isinstance(history, list) or len(history) != N or any(len(tuple(h)) != 3 for h in history):
            return "history-missing", told | {"expected": truth, "got": history, "got_text": f"{history}"[:80]}
        for mine, wanted in zip(map(tuple, history), truth, strict=True):
            if mine != wanted:
                about = {"k": wanted[0], "expected_version": wanted[1], "expected_update": wanted[2]}
                return "history-wrong", told | about | {"expected": wanted, "got": mine}
        if version != N:
            return "version-stuck", told | {"expected": N, "got": version, "got_text": version}
    return None
