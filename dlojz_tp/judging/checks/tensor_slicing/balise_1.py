"""Balise 1: the two conjugate functions of tensor parallelism."""

from collections import Counter

import torch
import torch.distributed as dist

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.checks.tensor_slicing.all_reduce_halves import halves
from dlojz_tp.judging.checks.tensor_slicing.common import by_world, noise, together
from dlojz_tp.judging.checks.tensor_slicing.tables import Idea, at_each, pair, told, whole
from dlojz_tp.judging.probes.shared_looks import mistake_look
from dlojz_tp.judging.probes.traffic import Call, Traffic, on_the_wire
from dlojz_tp.judging.probes.withheld import Withheld

COPIED, PASSED = noise(3, 5, seed=99), noise(3, 5, seed=98)  # the input of CopyToRanks, the gradient of SumOverRanks


def _own(rank, seed=0, shape=(3, 5)):
    return noise(*shape, seed=10 * seed + rank)


def _total(size, seed=0, shape=(3, 5)):
    return sum(_own(rank, seed, shape) for rank in range(size))


def _both(CopyToRanks, SumOverRanks):  # noqa: N803
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = {
        "copy": _alone(CopyToRanks, COPIED, _own(rank, 1)),
        "sum": _alone(SumOverRanks, _own(rank, 2), PASSED),
    }
    found = {f"{name} {key}": value for name, got in seen.items() for key, value in got.items()}
    late = any(got["overwritten"] or got["later"] for got in seen.values())
    if not together(not late and all(isinstance(got["forward"], torch.Tensor) for got in seen.values())):
        return found  # these would end the process with the cases that follow, or fail them by chance
    return found | _odd_cases(CopyToRanks, SumOverRanks, rank, size) | _network(CopyToRanks, SumOverRanks, rank, size)


def _alone(function, value, gradient):
    """What a function gives once all that it sends has arrived; `later`: whether that is not what it gave at first."""

    def calls(traffic):
        return traffic.calls if dist.get_world_size() > 1 else []

    for _ in range(2):  # a second call is like the first
        x, g = value.clone().requires_grad_(), gradient.clone()
        before, kept = x * 1, []
        before.register_hook(kept.append)
        with Withheld() as running, Traffic() as forward:
            y = function.apply(before)
        first = y.detach().clone() if isinstance(y, torch.Tensor) else y
        left = running.left()
        found = {
            "forward": y.detach().clone() if isinstance(y, torch.Tensor) else y, "sent forward": calls(forward),
            "backward": None, "sent backward": [], "overwritten": "", "later": False, "left": left,
        }  # fmt: skip
        if not isinstance(y, torch.Tensor) or y.shape != value.shape:
            return found
        found["later"] = not torch.equal(first, found["forward"])
        found["overwritten"] = "" if torch.equal(before.detach(), value) else "The tensor that was handed in"
        with Withheld() as running, Traffic() as backward:
            y.backward(g)
        found |= {"sent backward": calls(backward), "left": left + running.left()}
        if x.grad is not None:
            found["backward"] = kept[-1].detach().clone()
            found["later"] |= not torch.equal(found["backward"], x.grad)
        if not torch.equal(g, gradient):
            found["overwritten"] = found["overwritten"] or "The gradient that came in"
    return found


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
    # last: a rank that skips the sum, as it has nothing to add, leaves the others waiting
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


def _only(claim, name, way, due, hint, **more):
    """A look at a value that is the one due, with nothing sent. hint, more: the hint for the value, and its fields."""
    value, sent, back = f"{name} {way}", f"{name} sent {way}", f"{name} sent backward"

    def slug(got, due):
        n = got["size"]
        if got[value] is None:
            return "nothing-returned"
        if way == "backward" and n > 1 and close(got[value], n * due):
            return "doubled-backward"
        if got[sent] and way == "backward":
            return "sum-sends-back"
        if got[sent]:
            return "swapped" if close(got[value], n * due) and not got[back] else "copy-communicates"
        return "mean-instead" if way == "backward" and close(got[value], due / n) else hint

    def fields(got, due):
        about = more | {"got": got[value], "n": got["size"], "call": ", ".join(call.name for call in got[sent][:1])}
        return about | (silent(got, due) if got[sent] and way == "forward" else {})

    return Look(claim, whole, due, slug, holds=lambda got, due: close(got[value], due) and not got[sent], fields=fields)


def _summed(claim, name, way, seed, unsummed):
    """Looks at a sum over the ranks. seed: of what each rank has; unsummed: the hint for that alone."""
    title, key = {"copy": "CopyToRanks", "sum": "SumOverRanks"}[name], f"{name} {way}"

    def due(at):
        return _total(at[1], seed)

    def hint(got, total):
        value, size, names = got[key], got["size"], {call.name for call in got[f"{name} sent {way}"]}
        own = size > 1 and close(value, _own(got["rank"], seed))
        if value is None:
            return "nothing-returned"
        if own and got[f"{name} overwritten"]:
            return "operand-overwritten"
        if got[f"{name} later"] or got[f"{name} left"]:
            return "sum-not-waited"
        if size > 1 and close(value, total / size):
            return "mean-instead"
        if names & {"reduce", "gather"}:
            return "rank-zero-only"
        if own:
            return "reduced-not-returned" if names & {"all_reduce", "reduce_scatter"} else unsummed
        return "functions-wrong"

    def fields(got, total):
        what = {"operand-overwritten": got[f"{name} overwritten"],
                "reduced-not-returned": "tensor" if way == "forward" else "gradient"}  # fmt: skip
        what = what.get(hint(got, total), f"What {title} gives {way}")
        return {"what": what, "rank": got["rank"], "got": got[key]}

    def frugal(got, total):
        sent = got[f"{name} sent {way}"]
        enough = 1.05 * on_the_wire([Call("all_reduce", total.numel() * 8, got["size"])]) + 64
        one = len(sent) < 2 or halves(sent)
        return not sent or (on_the_wire(sent) <= enough and sent[0].name != "all_gather" and one)

    def calls(got, _):
        sent = got[f"{name} sent {way}"]
        named = ", ".join(f"{n} × {call}" for call, n in Counter(call.name for call in sent).items())
        return {"name": title, "calls": named, "way": way, "expected": "", "got": str([call[:2] for call in sent])}

    return [
        Idea(claim, whole, due, hint, holds=lambda got, total: close(got[key], total), fields=fields),
        Look("", whole, due, "too-much-sent", holds=frugal, fields=calls),
    ]


def _odd(claim, name, slug, tol=None):
    """Looks at (found, wanted) of an odd case."""
    what = f"The result for {name}"

    def other_dtype(both, _):
        found, wanted = both
        if getattr(found, "dtype", None) == wanted.dtype:
            return None
        dtype = str(getattr(found, "dtype", "")).removeprefix("torch.")
        about = {"got": found, "expected": wanted, "where": name, "what": what, "dtype": dtype}
        return "dtype-changed" if dtype else "functions-wrong", about

    return [mistake_look(claim, name, None, other_dtype), pair("", name, slug, name, what, tol)]


LOOKS = [
    _only("CopyToRanks: the same value forward, nothing sent", "copy", "forward", COPIED, "copy-changes"),
    *_summed("CopyToRanks backward: the sum of the ranks' gradients, in one all-reduce", "copy", "backward", 1,
             "no-reduce-backward"),
    *_summed("SumOverRanks forward: the sum of the ranks' tensors, in one all-reduce", "sum", "forward", 2,
             "not-summed-forward"),
    _only("SumOverRanks backward: the gradient unchanged, nothing sent", "sum", "backward", PASSED, "functions-wrong",
          what="The gradient of SumOverRanks"),
    Look("inputs stay unchanged, and results do not change later", "copy overwritten", "", "operand-overwritten",
         fields=told("what")),
    Look("", "copy later", False, "sum-not-waited"),
    Look("", "sum overwritten", "", "operand-overwritten", fields=told("what")),
    Look("", "sum later", False, "sum-not-waited"),
    *_odd("transposed and expanded tensors, half precision, a number", "float32 forward", "functions-wrong"),
    *_odd("", "bfloat16 forward", "functions-wrong", 0.04),
    *_odd("", "a transposed tensor forward", "layout-mixed"),
    *_odd("", "an expanded gradient", "layout-mixed"),
    *_odd("", "a transposed gradient", "layout-mixed"),
    *_odd("", "a number", "functions-wrong"),
    *_odd("", "a gradient that is zero on rank 0", "functions-wrong"),
    pair("both around two halves of a network: the gradients are those of the whole network", "gradient after a tanh",
         "operand-overwritten", "", "the gradient after a tanh"),
    pair("", "gradient of the input", "functions-wrong", "", "the gradient of the input"),
]  # fmt: skip


def _judge(size, ranks):
    yield from at_each(LOOKS, [(size, rank, got) for rank, got in enumerate(ranks)])


def balise_1(CopyToRanks, SumOverRanks):  # noqa: N803
    """Each function by itself, then both around a sliced sum; on 1 to 4 ranks."""
    yield LOOKS[0].claim
    yield from by_world(_judge, _both, CopyToRanks, SumOverRanks)
