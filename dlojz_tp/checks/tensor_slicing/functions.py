"""Balise 1: the two conjugate functions of tensor parallelism."""

from collections import Counter

import torch
import torch.distributed as dist

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import by_world, noise, together
from dlojz_tp.checks.tensor_slicing.group_functions import halves
from dlojz_tp.probes.traffic import Call, Traffic, on_the_wire
from dlojz_tp.probes.withheld import Withheld

HINTS = {
    "copy-changes": "In forward, CopyToRanks must return its input: all ranks already hold the same x. Yours "
                    "returns something else.",
    "copy-communicates": "CopyToRanks sends something in forward. It should communicate only in backward.",
    "no-reduce-backward": "The gradient of CopyToRanks is only this rank's gradient. Each rank used x for another "
                          "part of the work, so their gradients must be added up.",
    "not-summed-forward": "SumOverRanks returned this rank's own x. Forward must return the sum over the ranks.",
    "doubled-backward": "The gradient of SumOverRanks is {n} times too large, because you added it up over the "
                        "ranks. Every rank already holds the whole gradient of the sum, and d(sum)/dx is 1.",
    "swapped": "You swapped the two: CopyToRanks communicates in backward, SumOverRanks in forward.",
    "mean-instead": "This is the mean over the ranks. Partial results are added up, without a division.",
    "rank-zero-only": "Rank 0 has the sum, but rank {rank} does not. reduce() and gather() give the result to one "
                      "rank, all_reduce() to all.",
    "operand-overwritten": "{what} was overwritten: all_reduce works in place. Others may still need the tensor (a "
                           "tanh keeps its output for backward, a residual shares its gradient). Reduce a copy.",
    "reduced-not-returned": "You called an all-reduce, but the result is this rank's own {what}. Return the "
                            "reduced tensor, and wait for it if the call is asynchronous.",
    "sum-not-waited": "The result changed after you returned it: the all-reduce was not finished yet. Wait for it.",
    "layout-mixed": "The result is right for contiguous tensors, but wrong for transposed or expanded ones. A "
                    "collective sends the memory in its stored order. Make the tensor contiguous first.",
    "dtype-changed": "The result has the dtype {dtype}, which is not that of the input.",
    "too-much-sent": "{name} calls {calls} {way}. One all-reduce of the input is enough. Gathering everything and "
                     "adding it up here sends more, and holds every rank's tensor at once.",
    "sum-sends-back": "SumOverRanks calls {call} in backward, but nothing has to travel there: every rank already "
                      "holds the gradient of the sum.",
    "functions-wrong": "{what} is not what it should be.",
}  # fmt: skip


def balise_1(CopyToRanks, SumOverRanks):  # noqa: N803
    """Each function by itself, then both around a sliced sum; on 1 to 4 ranks."""
    yield "CopyToRanks: the same value forward, nothing sent"
    yield from by_world(_judge, _both, CopyToRanks, SumOverRanks)


def _judge(size, ranks):
    for rank, got in enumerate(ranks):
        _forward_of_copy(got["copy"], rank, size)
    yield "CopyToRanks backward: the sum of the ranks' gradients, in one all-reduce"
    for rank, got in enumerate(ranks):
        _backward_of_copy(got["copy"], rank, size)
    yield "SumOverRanks forward: the sum of the ranks' tensors, in one all-reduce"
    for rank, got in enumerate(ranks):
        _forward_of_sum(got["sum"], rank, size)
    yield "SumOverRanks backward: the gradient unchanged, nothing sent"
    for rank, got in enumerate(ranks):
        _backward_of_sum(got["sum"], rank, size)
    yield "inputs stay unchanged, and results do not change later"
    for rank, got in enumerate(ranks):
        for name in ("copy", "sum"):
            if got[name]["overwritten"]:
                raise Wrong("operand-overwritten", what=got[name]["overwritten"], where=f"rank {rank} of {size}")
            if got[name]["later"]:
                raise Wrong("sum-not-waited", where=f"rank {rank} of {size}")
    yield "transposed and expanded tensors, half precision, a number"
    for rank, got in enumerate(ranks):
        for name, (found, wanted) in got["odd"].items():
            _odd(name, found, wanted, f"rank {rank} of {size}, {name}")
    yield "both around two halves of a network: the gradients are those of the whole network"
    for rank, got in enumerate(ranks):
        for what, (found, wanted) in got["network"].items():
            if not close(found, wanted):
                slug = "operand-overwritten" if what == "gradient after a tanh" else "functions-wrong"
                raise Wrong(slug, what=f"the {what}", expected=wanted, got=found, where=f"rank {rank} of {size}")


def _own(rank, seed=0, shape=(3, 5)):
    return noise(*shape, seed=10 * seed + rank)


def _total(size, seed=0, shape=(3, 5)):
    return sum(_own(rank, seed, shape) for rank in range(size))


def _both(CopyToRanks, SumOverRanks):  # noqa: N803
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {
        "copy": _alone(CopyToRanks, noise(3, 5, seed=99), _own(rank, 1)),
        "sum": _alone(SumOverRanks, _own(rank, 2), noise(3, 5, seed=98)),
    }
    fine = all(isinstance(got["output"], torch.Tensor) and not got["overwritten"] for got in found.values())
    if not together(fine):
        return found  # what overwrites its input would end the process with the cases that follow
    found["odd"] = _odd_cases(CopyToRanks, SumOverRanks, rank, size)
    found["network"] = _network(CopyToRanks, SumOverRanks, rank, size)
    return found


def _alone(function, value, gradient):
    for _ in range(2):  # a second call is like the first
        x, g = value.clone().requires_grad_(), gradient.clone()
        before = x * 1
        with Withheld() as running, Traffic() as forward:
            y = function.apply(before)
        now = y.detach().clone() if isinstance(y, torch.Tensor) else y
        left = running.left()
        if not isinstance(y, torch.Tensor) or y.shape != value.shape:
            return {
                "forward": forward.calls,
                "output": now,
                "backward": [],
                "gradient": None,
                "overwritten": "",
                "later": 0,
                "left": left,
            }
        later = not torch.equal(now, y.detach())
        overwritten = "" if torch.equal(before.detach(), value) else "The tensor that was handed in"
        with Withheld() as running, Traffic() as backward:
            y.backward(g)
        got = x.grad.clone() if x.grad is not None else None
        left = left + running.left()
        later = later or (got is not None and not torch.equal(got, x.grad))
        overwritten = overwritten or ("" if torch.equal(g, gradient) else "The gradient that came in")
    return {
        "forward": forward.calls, "output": now, "backward": backward.calls, "gradient": got,
        "overwritten": overwritten, "later": later, "left": left,
    }  # fmt: skip


def _odd_cases(CopyToRanks, SumOverRanks, rank, size):  # noqa: N803
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = _own(rank, 3).to(dtype)
        wanted = sum(_own(k, 3).to(dtype).double() for k in range(size)).to(dtype)
        found[f"{str(dtype).removeprefix('torch.')} forward"] = (SumOverRanks.apply(x), wanted)
    # each rank has another layout: only contiguous memory means the same everywhere
    x = _own(rank, 4)
    x = x.t().contiguous().t() if rank % 2 == 0 else x
    found["a transposed tensor forward"] = (SumOverRanks.apply(x), _total(size, 4))
    x = _own(rank, 5).requires_grad_()
    (CopyToRanks.apply(x).sum() * (rank + 1)).backward()
    found["an expanded gradient"] = (x.grad, torch.full((3, 5), size * (size + 1) / 2).double())
    x = _own(rank, 6).requires_grad_()
    g = _own(rank, 7)
    CopyToRanks.apply(x).backward(g.t().contiguous().t() if rank % 2 == 0 else g)
    found["a transposed gradient"] = (x.grad, _total(size, 7))
    x = torch.tensor(2.0 + rank, dtype=torch.float64)
    found["a number"] = (SumOverRanks.apply(x), torch.tensor(sum(2.0 + k for k in range(size)), dtype=torch.float64))
    # last: who skips the sum where it has nothing to add leaves the others waiting
    x = _own(rank, 8).requires_grad_()
    CopyToRanks.apply(x).backward(_own(rank, 9) * (rank > 0))
    found["a gradient that is zero on rank 0"] = (x.grad, _total(size, 9) - _own(0, 9))
    return {
        name: (value.detach() if isinstance(value, torch.Tensor) else value, w) for name, (value, w) in found.items()
    }


def _network(CopyToRanks, SumOverRanks, rank, size):  # noqa: N803
    """y = x + Σ tanh(x A_r): the residual shares its gradient, tanh keeps its output."""
    weights = [noise(5, 5, seed=50 + k) for k in range(size)]
    x, mine = noise(3, 5, seed=49).requires_grad_(), weights[rank].clone().requires_grad_()
    (x + SumOverRanks.apply(torch.tanh(CopyToRanks.apply(x) @ mine))).square().sum().backward()
    x2, whole = noise(3, 5, seed=49).requires_grad_(), [w.clone().requires_grad_() for w in weights]
    (x2 + sum(torch.tanh(x2 @ w) for w in whole)).square().sum().backward()
    return {"gradient after a tanh": (mine.grad, whole[rank].grad), "gradient of the input": (x.grad, x2.grad)}


def _forward_of_copy(got, rank, size):
    where, value = f"rank {rank} of {size}", noise(3, 5, seed=99)
    if got["output"] is None:
        raise Wrong("nothing-returned", where=where)
    if size > 1 and got["forward"]:
        raise Wrong(
            "swapped" if close(got["output"], size * value) and not got["backward"] else "copy-communicates",
            where=where,
        )
    if not close(got["output"], value):
        raise Wrong("copy-changes", expected=value, got=got["output"], where=where)


def _backward_of_copy(got, rank, size):
    where, wanted = f"rank {rank} of {size}", _total(size, 1)
    if got["gradient"] is None:
        raise Wrong("nothing-returned", where=f"{where}, CopyToRanks.backward")
    if size > 1 and close(got["gradient"], _own(rank, 1)):
        _own_came_back(got, "backward", "no-reduce-backward", wanted, got["gradient"], where)
    _compare(got["gradient"], wanted, got, "CopyToRanks", "backward", rank, size)


def _own_came_back(got, way, slug, wanted, value, where):
    if got["overwritten"]:
        slug = "operand-overwritten"
    elif got["later"] or got["left"]:
        slug = "sum-not-waited"
    elif any(call.name in ("reduce", "gather") for call in got[way]):
        slug = "rank-zero-only"
    elif any(call.name in ("all_reduce", "reduce_scatter") for call in got[way]):
        slug = "reduced-not-returned"
    what = "tensor" if way == "forward" else "gradient"
    raise Wrong(slug, what=what if slug == "reduced-not-returned" else got["overwritten"], expected=wanted, got=value, where=where,
                rank=where.split()[1])  # fmt: skip


def _forward_of_sum(got, rank, size):
    where, wanted = f"rank {rank} of {size}", _total(size, 2)
    if got["output"] is None:
        raise Wrong("nothing-returned", where=where)
    if size > 1 and close(got["output"], _own(rank, 2)):
        _own_came_back(got, "forward", "not-summed-forward", wanted, got["output"], where)
    _compare(got["output"], wanted, got, "SumOverRanks", "forward", rank, size)


def _compare(value, wanted, got, name, way, rank, size):
    where = f"rank {rank} of {size}"
    if not close(value, wanted):
        slug = "functions-wrong"
        if got["later"] or got["left"]:
            slug = "sum-not-waited"
        elif size > 1 and close(value, wanted / size):
            slug = "mean-instead"
        elif any(call.name in ("reduce", "gather") for call in got[way]):
            slug = "rank-zero-only"
        raise Wrong(slug, what=f"What {name} gives {way}", rank=rank, expected=wanted, got=value, where=where)
    sent = on_the_wire(got[way])
    too_much = sent > 1.05 * on_the_wire([Call("all_reduce", wanted.numel() * 8, size)]) + 64
    if size > 1 and (too_much or got[way][0][0] == "all_gather" or (len(got[way]) > 1 and not halves(got[way]))):
        calls = ", ".join(f"{n} × {call}" for call, n in Counter(call.name for call in got[way]).items())
        raise Wrong("too-much-sent", name=name, calls=calls, way=way, where=where, got=str([call[:2] for call in got[way]]))


def _backward_of_sum(got, rank, size):
    where, wanted = f"rank {rank} of {size}", noise(3, 5, seed=98)
    if got["gradient"] is None:
        raise Wrong("nothing-returned", where=f"{where}, the backward of SumOverRanks")
    if size > 1 and close(got["gradient"], size * wanted):
        raise Wrong("doubled-backward", n=size, expected=wanted, got=got["gradient"], where=where)
    if got["backward"] and size > 1:
        raise Wrong("sum-sends-back", call=got["backward"][0].name, expected=wanted, got=got["gradient"], where=where)
    if not close(got["gradient"], wanted):
        slug = "mean-instead" if close(got["gradient"], wanted / size) else "functions-wrong"
        raise Wrong(slug, what="The gradient of SumOverRanks", expected=wanted, got=got["gradient"], where=where)


def _odd(name, found, wanted, where):
    if not isinstance(found, torch.Tensor):
        raise Wrong("functions-wrong", what=f"The result for {name}", expected=wanted, got=found, where=where)
    if found.dtype != wanted.dtype:
        raise Wrong("dtype-changed", dtype=str(found.dtype).removeprefix("torch."), where=where)
    if not close(found, wanted, 0.04 if wanted.dtype == torch.bfloat16 else None):
        slug = "layout-mixed" if "transposed" in name or "expanded" in name else "functions-wrong"
        raise Wrong(slug, what=f"The result for {name}", expected=wanted, got=found, where=where)
