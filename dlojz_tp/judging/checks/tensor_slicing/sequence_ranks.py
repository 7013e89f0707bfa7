"""What balise 12 does on the ranks: an answer's functions in groups of 1 to 4, and a layer between them."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from dlojz_tp.judging.checking import Wrong, close
from dlojz_tp.judging.checks.tensor_slicing.common import noise, together
from dlojz_tp.judging.checks.tensor_slicing.group_functions import LAYOUTS, in_group, use_both_ways
from dlojz_tp.judging.checks.tensor_slicing.layouts import group_of
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.judging.probes.withheld import Withheld
from dlojz_tp.measure.communications import SPACES

SHAPE = (12, 12, 12)  # batch, sequence, width: a cut along any of them is possible
NAMES = "copy", "sum"
COMMON = (12 + 3) * 8  # bytes of the common gradients in one dtype
SUMMED = ("a common parameter", "transposed"), ("a common parameter", "in float32")
GROUPS = *LAYOUTS[:-1], ((0,), (1,), (2,), (3,)), LAYOUTS[-1]  # those of different sizes last: see `use`


def x_of(rank, seed=0, shape=SHAPE):
    """What a rank holds, its own for each rank and seed."""
    return noise(*shape, seed=500 + 10 * seed + rank)


def part_of(x, members, rank):
    """The tokens of `rank` among `members`."""
    return x.chunk(len(members), 1)[members.index(rank)]


def use(SequenceRanks, sum_common_gradients):  # noqa: N803
    """On a rank: a report of each layout of this world into groups."""
    found = []
    for layout in GROUPS:
        found.append(_use_in(SequenceRanks, sum_common_gradients, layout))
        if not together(in_group(found[-1], NAMES)):  # parts of different sizes would end a process in gloo
            break
    return found


def _use_in(SequenceRanks, sum_common_gradients, layout):  # noqa: N803
    group, members = group_of(layout)
    rank, size = dist.get_rank(), len(members)
    ranks, found = SequenceRanks(group), {"members": members, "calls": {}, "left": 0}
    whole, part = x_of(members[0], 1), part_of(x_of(members[0], 2), members, rank)
    use_both_ways(ranks, "copy", part_of(whole, members, rank), x_of(rank, 3), found)
    use_both_ways(ranks, "sum", x_of(rank, 4), part, found)
    if len(found["calls"]) < len(NAMES):
        return found
    found |= {"uneven": _uneven(ranks, size) if size > 1 else "ValueError", "odd": _odd(ranks, members, rank)}
    parameters = [nn.Parameter(torch.zeros(4, 3).double().t()), *(nn.Parameter(torch.zeros(n)) for n in (3, 2))]
    parameters[0].grad, parameters[1].grad = own_gradients(rank)
    with _for_sequences_alone(ranks), Withheld() as running, Traffic() as log:
        sum_common_gradients(parameters, ranks)
        found |= {key: settled(p.grad) for key, p in zip((*SUMMED, "no gradient"), parameters, strict=True)}
    found["common calls"] = log.calls
    found["left"] += running.left()
    if together(all(close(found[key], due) for key, due in zip(SUMMED, common_gradients(members), strict=True))):
        found["layer"] = _layer(ranks, sum_common_gradients, members, rank)
    return found


class _Reached(Exception):  # noqa: N818  (it says how far a call came)
    """A collective was called."""


class _NoCollective(TorchDispatchMode):
    """Inside, a collective raises _Reached: gloo ends the process where the parts have different sizes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket._qualified_op_name.split("::")[0] in SPACES:
            raise _Reached("nothing: the collective was called with parts of different sizes")
        return func(*args, **(kwargs or {}))


def _uneven(ranks, size):
    """ "ValueError" where a sequence of 2 size + 1 tokens is refused; else what happened, in words."""
    try:
        with _NoCollective():
            ranks.sum(torch.zeros(1, 2 * size + 1, 2))
    except Exception as error:
        clear = isinstance(error, ValueError | AssertionError)
        return (
            "ValueError" if clear else str(error) if isinstance(error, _Reached) else f"{type(error).__name__}: {error}"
        )
    return "nothing: it was accepted"


def _odd(ranks, members, rank):
    one = (1, len(members), 3)
    total = sum(x_of(r, 5, one) for r in members)
    odd = {"sum, one token a rank": (ranks.sum(x_of(rank, 5, one)).detach().clone(), part_of(total, members, rank))}
    whole = x_of(members[0], 6, one)
    odd["copy, one token a rank"] = ranks.copy(part_of(whole, members, rank).clone()).detach().clone(), whole
    odd["sum in float32"] = (
        ranks.sum(x_of(rank, 5, one).float()).detach().clone(),
        part_of(total, members, rank).float(),
    )
    found = ranks.sum(x_of(rank, 5, one).transpose(0, 2)).detach().clone()
    odd["sum of a transposed tensor"] = found, part_of(total.transpose(0, 2), members, rank)
    found = ranks.copy(part_of(whole.transpose(0, 2), members, rank)).detach().clone()
    return odd | {"copy of a transposed tensor": (found, whole.transpose(0, 2))}


def own_gradients(rank):
    """Gradients of two common parameters, transposed and in float32."""
    return noise(4, 3, seed=700 + rank).t(), noise(3, seed=800 + rank).float()


def common_gradients(members):
    """Their sums over these ranks."""
    return [sum(parts) for parts in zip(*map(own_gradients, members), strict=True)]


@contextlib.contextmanager
def _for_sequences_alone(ranks):
    """Inside, `copy` and `sum` of `ranks` are not for use."""

    def refusing(name):
        def refuse(*_, **__):
            raise Wrong("common-cut", name=name)

        return refuse

    before = dict(vars(ranks))
    vars(ranks).update({name: refusing(name) for name in NAMES})
    try:
        yield
    finally:
        for name in NAMES:
            vars(ranks).pop(name)
            if name in before:
                setattr(ranks, name, before[name])


def _layer(ranks, sum_common_gradients, members, rank):
    """norm -> copy -> up (columns) -> gelu -> down (rows) -> sum -> + bias, with a residual; and the uncut layer."""
    size = len(members)
    norm, up, down = nn.LayerNorm(12).double(), nn.Linear(12, 24).double(), nn.Linear(24, 12).double()
    for k, p in enumerate((*norm.parameters(), *up.parameters(), *down.parameters())):
        p.data.copy_(noise(*p.shape, seed=900 + k) / 4)
    x, upstream = x_of(members[0], 7), x_of(members[0], 8)
    given = x.clone().requires_grad_()
    y = given + down(F.gelu(up(norm(given))))
    y.backward(upstream)
    truth = {"norm": norm.weight.grad, "bias": down.bias.grad}
    wanted_up, wanted_down = up.weight.grad.chunk(size, 0), down.weight.grad.chunk(size, 1)
    place = members.index(rank)
    norm.zero_grad()
    weights = up.weight.chunk(size, 0), up.bias.chunk(size, 0), down.weight.chunk(size, 1)
    w_up, b_up, w_down = (parts[place].detach().clone().requires_grad_() for parts in weights)
    bias = down.bias.detach().clone().requires_grad_()
    mine = part_of(x, members, rank).clone().requires_grad_()
    z = mine + ranks.sum(F.linear(F.gelu(F.linear(ranks.copy(norm(mine)), w_up, b_up)), w_down)) + bias
    z.backward(part_of(upstream, members, rank).clone())
    sum_common_gradients([*norm.parameters(), bias], ranks)
    pairs = {
        "the output": (z.detach(), part_of(y.detach(), members, rank)),
        "the input's gradient": (mine.grad, part_of(given.grad, members, rank)),
        "the gradient of the first slice": (w_up.grad, wanted_up[place]),
        "the gradient of the second slice": (w_down.grad, wanted_down[place]),
        "the norm's gradient": (norm.weight.grad, truth["norm"]),
        "the bias's gradient": (bias.grad, truth["bias"]),
    }
    return {what: (settled(got), wanted) for what, (got, wanted) in pairs.items()}


def settled(value):
    """A copy of a tensor, or None. A functional collective that nobody has waited for is waited for here."""
    return None if value is None else value.clone()
