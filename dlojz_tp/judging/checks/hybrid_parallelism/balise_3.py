"""Balise 3: the norm of the whole gradient and the loss of the whole batch, each part of them counted once."""

import torch
import torch.distributed as dist

from dlojz_tp.judging.checking.compare import close
from dlojz_tp.judging.checking.looks import Look, Value, judged, silent, within
from dlojz_tp.judging.checks.hybrid_parallelism import grid
from dlojz_tp.judging.probes.ranks import hung, killed_by, world_after_world

ROWS = 7  # shares of 4 and 3 on two data ranks
TIMES = (
    (1, 1),
    (3, 1),
    (1, 3),
)  # the gradients as they are; those of tied words, and of what is whole, three times as large


def observe(total_norm, total_loss):
    """On a rank, for each mesh: the norm of gradients that are given, then the loss."""
    for shape, tied in grid.MESHES[dist.get_world_size()]:
        mesh = grid.joined(shape)
        part, due = (grid.part(model, mesh).float() for model in (grid.own(tied), grid.truth(tied, ROWS)[2]))
        norms, same = [], True
        for words, whole in TIMES:
            given = [q.detach() * (words if q.tied else 1 if q.cut else whole) for q in due.parameters()]
            for p, q in zip(part.parameters(), given):
                p.grad = q.clone() if p.requires_grad else None
            norms.append(total_norm(part, mesh))
            same = same and all(
                p.grad is None if not p.requires_grad else p.grad is not None and torch.equal(p.grad, q)
                for p, q in zip(part.parameters(), given)
            )
        yield {"norm form": _form(norms[0]), "norm": [_number(norm) for norm in norms], "same": same}
        n_rows = len(grid.batch(ROWS).tensor_split(mesh.data.size)[mesh.data.rank])
        last = mesh.pipeline.rank == mesh.pipeline.size - 1
        loss = grid.share_loss(tied, ROWS, mesh.data.size, mesh.data.rank)
        loss = total_loss(torch.tensor(loss) if last else None, n_rows, mesh)
        yield {"loss form": _form(loss), "loss": _number(loss)}


def _norms(tied):
    """The truth: one process's norm with each of TIMES."""
    found = []
    for words, whole in TIMES:
        square = 0
        for name, p in grid.truth(tied, ROWS)[2].named_parameters():
            is_words = name in ("token_embedding.weight", "head.weight")
            is_whole = "norm" in name or "position" in name or name.endswith(("output.bias", "down.bias"))
            square += ((words if tied and is_words else whole if is_whole else 1) * p.detach()).square().sum().item()
        found.append(square**0.5)
    return found


def _on_some(seen, due):
    """Whether a number is right on all ranks or on none."""
    return len({close(one, true, 1e-5) for one, true in zip(seen, due)}) == 1


def _form(value):
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return "a tensor"
    return "nothing" if value is None else f"a Python {type(value).__name__}"


def _number(value):
    return float(value) if _form(value) == "a tensor" else 0.0


AT = {
    grid.told(shape, tied): (tied, torch.Size(shape).numel()) for some in grid.MESHES.values() for shape, tied in some
}


def _all(value):
    """A look's `due`: on each rank what `value(tied head)` gives."""
    return lambda at: [value(AT[at][0])] * AT[at][1]


def _whose(seen, due):
    """The ranks that have nothing, or another thing."""
    wrong = [str(rank) for rank, one in enumerate(seen) if one != "a tensor"]
    return {"ranks": ", ".join(wrong), "got": seen[int(wrong[0])], "expected": "a tensor"}


def _first(seen, due):
    """Of all norms the first one that is wrong somewhere, on each rank; and the ranks where it is right."""
    k = next(k for k in range(len(TIMES)) if not close([one[k] for one in seen], [one[k] for one in due], 1e-5))
    return {"expected": due[0][k], "got": [one[k] for one in seen], "ranks": _right(seen, due)}


def _right(seen, due):
    """The ranks with the right number, in words."""
    return ", ".join(str(rank) for rank, (one, true) in enumerate(zip(seen, due)) if close(one, true, 1e-5))


LOOKS = {
    "norm": [
        Look("total_norm: a one-number tensor on every rank",
             "norm form", _all(lambda tied: "a tensor"), "number-missing", fields=_whose),
        Look("the norm of one process, on every rank", "norm", _all(_norms), "norm-on-some", holds=_on_some, fields=_first),
        Value("", "norm", _all(_norms), "wrong-norm", holds=within(1e-5), fields=_first),
        Look("the gradients stay as they are", "same", _all(lambda tied: True), "gradients-changed", fields=silent),
    ],
    "loss": [
        Look("total_loss: a one-number tensor on every rank",
             "loss form", _all(lambda tied: "a tensor"), "number-missing", fields=_whose),
        Look("the mean loss of the whole batch, on every rank", "loss", _all(lambda tied: grid.truth(tied, ROWS)[0]), "loss-on-some",
             holds=_on_some, fields=lambda seen, due: {"ranks": _right(seen, due), "expected": due[0]}),
        Value("", "loss", _all(lambda tied: grid.truth(tied, ROWS)[0]), "wrong-loss",
              holds=within(1e-5)),
    ],
}  # fmt: skip
KNOWN = (
    (hung, "totals-waiting"), (killed_by("SIGABRT"), "totals-waiting"), ("Connection closed", "totals-waiting"),
    ("'NoneType' object has no attribute 'group'", "totals-waiting"), (("NoneType", "in total_norm"), "norm-none"),
    ("NoneType", "loss-none"),
)  # fmt: skip


def balise_3(total_norm, total_loss):
    yield LOOKS["norm"][0].claim
    turns = {
        size: [(grid.told(shape, tied), what) for shape, tied in grid.MESHES[size] for what in LOOKS] for size in (4, 3)
    }
    for size, ranks in world_after_world(observe, total_norm, total_loss, known=KNOWN, sizes=tuple(turns)):
        at, what = turns[size].pop(0)
        yield from judged(LOOKS[what], lambda seen=ranks: seen, at=at, where=at)
