"""Balise 9: what an asynchronous stage tells of its versions, and who makes its updates."""

import torch

from dlojz_tp.checking import Wrong
from dlojz_tp.checks.pipeline_under_the_hood.streams import RATE, N, batches, drive, stages_of

HINTS = {
    "history-missing": "After each backward, history gets (micro-batch, version of its forward, version that it "
                       "updates); here it is {got_text}.",
    "history-wrong": "Micro-batch {k} on stage {stage} of {p} ran forward after {expected_version} updates, and "
                     "its own update came after {expected_update}. So history gets ({k}, {expected_version}, "
                     "{expected_update}), but here it has {got}. Note the version in forward, and add one after "
                     "each step.",
    "optimizer-unused": "The optimizer that you were given has made no step. Its state (momentum, for example) and "
                        "its options matter: let it make the update.",
    "version-stuck": "After {n} updates, `version` is {got_text} on stage {stage} of {p}. It must count the updates.",
}  # fmt: skip


def versions(AsyncStage):  # noqa: N803
    """One, three and four stages: steps of the optimizer, `history` and `version` of each."""
    for p in (1, 3, 4):
        modules, (x, targets) = stages_of(p), batches(N)
        optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in modules]
        steps = [_steps(optimizer) for optimizer in optimizers]
        stages = [AsyncStage(*pair) for pair in zip(modules, optimizers, strict=True)]
        drive(stages, x, targets)
        for s, stage in enumerate(stages):
            history, where = getattr(stage, "history", None), f"stage {s} of {p}"
            if not steps[s]:
                raise Wrong("optimizer-unused", where=where)
            # in a 1F1B stream, forward k comes after backward k - (p - s)
            truth = [(k, max(0, k - (p - 1 - s)), k) for k in range(N)]
            if not isinstance(history, list) or len(history) != N or any(len(tuple(h)) != 3 for h in history):
                raise Wrong("history-missing", expected=truth, got=history, got_text=f"{history}"[:80], where=where)
            for mine, wanted in zip(history, truth, strict=True):
                if tuple(mine) != wanted:
                    raise Wrong("history-wrong", expected=wanted, got=tuple(mine), where=where, k=wanted[0], stage=s, p=p,
                                expected_version=wanted[1], expected_update=wanted[2])  # fmt: skip
            got = getattr(stage, "version", N)  # who counts under another name may
            if got != N:
                raise Wrong("version-stuck", expected=N, got=got, got_text=got, n=N, stage=s, p=p, where=where)


def _steps(optimizer) -> list:
    """A list that gets an entry at each step of the optimizer."""
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps
