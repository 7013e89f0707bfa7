"""What looks at a training on ranks: whether anything is sent, whether numbers are equal, which differ first."""

import torch

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.checks.zero_under_the_hood.common import TOLERANCE


def differing(parameters, word):
    """The fields of a look at such parameters, by name, in (ranks, steps, n): they name what differs first."""

    def fields(seen, due):
        wrong = ~torch.isclose(seen, due, rtol=TOLERANCE, atol=TOLERANCE)
        rank, step, _ = wrong.nonzero()[0].tolist()
        parts = wrong[rank, step].split([p.numel() for p in parameters.values()])
        names = [name for name, part in zip(parameters, parts, strict=True) if part.any()]
        return {"rank": rank, "steps": step + 1, "name": names[0], "names": ", ".join(names[:4]), "word": word,
                "expected": due[rank, step][wrong[rank, step]][:4], "got": seen[rank, step][wrong[rank, step]][:4],
                "where": f"rank {rank} of {len(seen)}, {names[0]}, {word}"}  # fmt: skip

    return fields


def equal(seen, due):
    return close(seen, due, TOLERANCE)


def travels(case):
    """Look whether each of several ranks sends anything."""
    return Look("the gradients of an odd-sized model: a shard of the mean on each rank", f"{case} sent", 0,
                "nothing-travels", holds=_each_sends, fields=_sends_nothing)  # fmt: skip


def _each_sends(seen, due):
    return len(seen) == 1 or min(seen) > 0


def _sends_nothing(seen, due):
    return silent(seen, due) | {"rank": seen.index(0)}
