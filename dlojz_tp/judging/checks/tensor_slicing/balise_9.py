"""Balise 9: copy, sum and gather within a group of a larger world."""

import torch
import torch.distributed as dist

from dlojz_tp.judging.checking import close, mistake_of
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.checks.tensor_slicing.all_reduce_halves import halves
from dlojz_tp.judging.checks.tensor_slicing.common import noise, on_ranks, together
from dlojz_tp.judging.checks.tensor_slicing.group_functions import (
    KNOWN,
    LAYOUTS,
    WORLD,
    each_layout,
    gives,
    in_group,
    use_both_ways,
)
from dlojz_tp.judging.checks.tensor_slicing.layouts import group_of
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each, pairs, told
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.judging.probes.traffic import on_the_wire

SHAPE = (4, 3)
NAMES = "sum", "copy", "gather"
ADDS_UP = ("sum", "forward"), ("copy", "backward")
BETWEEN = "backward of copy, another group's forward in between"


def _x(rank, seed=0):
    return noise(*SHAPE, seed=10 * seed + rank)


def _use(GroupRanks):  # noqa: N803
    found = []
    for layout in LAYOUTS:
        found.append(_use_in(GroupRanks, layout))
        if not together(in_group(found[-1], NAMES)):
            return found
    first, second = (GroupRanks(group_of(layout)[0]) for layout in LAYOUTS[:2])
    x = noise(*SHAPE, seed=8).requires_grad_()
    y = first.copy(x * 1)
    second.copy(x * 1)
    y.backward(_x(dist.get_rank(), 4))
    wanted = sum(_x(r, 4) for r in found[0]["members"])
    found[0]["odd"][BETWEEN] = None if x.grad is None else x.grad.clone(), wanted
    return found


def _use_in(GroupRanks, layout):  # noqa: N803
    rank = dist.get_rank()
    group, members = group_of(layout)
    ranks, mine, n = GroupRanks(group), members.index(rank), len(members)
    found = {"members": members, "overwritten": "", "odd": {}, "calls": {}, "left": 0}
    found["given"] = getattr(ranks, "rank", None), getattr(ranks, "size", None)
    if not together(found["given"] == (mine, n)):
        return found
    table = noise(12, 12, seed=5)
    found["kept"], found["random"] = getattr(ranks, "group", None) is group, _drawn(ranks)
    parts = [(ranks.part(table, dim).clone(), table.tensor_split(n, dim)[mine]) for dim in (0, 1)]
    found["part"] = {f"dim {dim}": both for dim, both in enumerate(parts)}
    for seed, name in enumerate(NAMES):
        x, upstream = _x(rank, seed), noise(4, 3 * (n if name == "gather" else 1), seed=77)
        if name == "copy":
            x, upstream = noise(*SHAPE, seed=66), x
        use_both_ways(ranks, name, x, upstream, found)
    if {"sum", "copy"} <= found["calls"].keys():
        found["odd"] = _odd(ranks, members, rank)
    return found


def _drawn(ranks):
    """What is drawn inside `own_random`, outside, inside again."""
    state = torch.get_rng_state()
    torch.manual_seed(21)
    with ranks.own_random():
        found = [torch.rand(4)]
    found.append(torch.rand(4))
    with ranks.own_random():
        found.append(torch.rand(4))
    torch.set_rng_state(state)
    return found


def _odd(ranks, members, rank):
    wanted = sum(_x(r, 4) for r in members).t()
    x = _x(rank, 4).t()  # each rank has another layout: only contiguous memory means the same everywhere
    x = x.contiguous() if members.index(rank) % 2 else x
    odd = {"sum of a transposed tensor": (ranks.sum(x).clone(), wanted)}
    odd["sum in float32"] = ranks.sum(_x(rank, 4).float()).clone(), wanted.t().float()
    odd["sum of an expanded row"] = ranks.sum(_x(rank, 4)[:1].expand(4, 3)).clone(), wanted.t()[:1].expand(4, 3)
    x = noise(*SHAPE, seed=8).requires_grad_()
    upstream = _x(rank, 4) if members.index(rank) % 2 else _x(rank, 4).t().contiguous().t()
    ranks.copy(x).backward(upstream)
    odd["gradient of copy, transposed"] = None if x.grad is None else x.grad.clone(), wanted.t()
    x, upstream = _x(rank, 4).requires_grad_(), noise(4 * len(members), 3, seed=78)
    whole = ranks.gather(x, 0)
    odd["gather along dim 0"] = whole.detach().clone(), torch.cat([_x(r, 4) for r in members])
    if whole.shape == upstream.shape:
        whole.backward(upstream)
    own = upstream.chunk(len(members))[members.index(rank)]
    odd["gradient of gather along dim 0"] = None if x.grad is None else x.grad.clone(), own
    whole = ranks.gather(_x(rank, 4).t(), 0).clone()
    odd["gather of a transposed tensor, dim 0"] = whole, torch.cat([_x(r, 4).t() for r in members])
    return odd


def _misplaced(got):
    members, (rank, size) = got["members"], got["given"]
    mine, n = members.index(got["rank"]), len(members)
    if (rank, size) == (mine, n):
        return None
    slug = "size-of-world" if size == got["size"] != n else "place-in-group"
    slug = "rank-of-world" if rank == got["rank"] != mine else slug
    text = {"expected": f"rank {mine} of {n}", "got": f"rank {rank} of {size}"}
    return slug, text | {"rank": mine, "size": n, "members": list(members)}


def _alike(got):
    """Whether two ranks of a group draw alike inside, or differently outside."""
    drawn = got["random"]
    peers = [one["random"] for one in got["all"] if one["members"] == got["members"] and one["place"] != got["place"]]
    alike = any(close(other[k], drawn[k]) for other in peers for k in (0, 2)) or close(drawn[0], drawn[2])
    if alike or not all(close(other[1], drawn[1]) for other in peers):
        return "own-random-lost", {"members": list(got["members"])}
    return None


def _due(name, way, rank, members):
    """What a function gives one way on a rank, in a group of these members."""
    seed, n = NAMES.index(name), len(members)
    if (name, way) in ADDS_UP:
        return sum(_x(r, seed) for r in members)
    if (name, way) == ("gather", "forward"):
        return torch.cat([_x(r, seed) for r in members], 1)
    if name == "gather":
        return noise(4, 3 * n, seed=77).chunk(n, 1)[members.index(rank)]
    return noise(*SHAPE, seed=66 if name == "copy" else 77)


def _gives(claim, name, way):
    def due(got, members=None):
        return _due(name, way, got["rank"], members or got["members"])

    def mistake(value, wanted, got):
        n, world, over_world = len(got["members"]), got["size"], due(got, range(got["size"]))
        known = {"group-summed-twice": wanted * n, "group-summed-twice ": wanted * world}
        if (name, way) == ("gather", "forward"):
            known = {"gather-over-world": over_world}
        if (name, way) in ADDS_UP:
            known = {f"{way}-over-world": over_world, "group-not-summed": due(got, [got["rank"]]),
                     "group-mean": wanted / n, "group-mean ": over_world / world}  # fmt: skip
        return mistake_of(value, known, "")

    return gives(claim, name, way, due, mistake)


def _wasteful(got):
    """The first collective beyond the group, that has nothing to carry, or one too many; too many bytes."""
    size, one = len(got["members"]), torch.Size(SHAPE).numel() * 8
    reduced = 2 * (size - 1) / size * one
    most = {"sum": (reduced, 0), "copy": (0, reduced), "gather": (2 * (size - 1) * one, 0)}
    for name, both in got["calls"].items():
        for way, calls, least in zip(("forward", "backward"), both, most[name], strict=True):
            about, sent = {"name": name, "way": way, "size": size, "n": len(calls), "where": way}, on_the_wire(calls)
            for call in calls:
                if call.group > size:
                    return "sent-beyond-group", about | {"name": f"{call.name} of {name}", "found": call.group}
                if size > 1 and not least:
                    return "group-sends-back", about | {"call": call.name}
            if size > 1 and len(calls) > 1 and not halves(calls):
                return "group-sent-twice", about
            if sent > 1.05 * least + 64:
                return "group-sent-too-much", about | {"sent": int(sent), "least": int(least)}
    return None


def _of_odd(what):
    if what == BETWEEN:
        return "group-not-in-ctx"
    return "gather-dimension" if "along dim 0" in what else "group-layout"


LOOKS = [
    recognised("rank and size are those in the group", _misplaced),
    Look("the group is kept; each rank has its own random numbers", "kept", True, "group-not-kept"),
    recognised("", _alike),
    _gives("sum: the sum over the group forward, nothing the other way", "sum", "forward"),
    _gives("", "sum", "backward"),
    _gives("copy: the sum over the group backward, nothing the other way", "copy", "forward"),
    _gives("", "copy", "backward"),
    pairs("gather: the parts of the group, in its order; part: this rank's own", "part", "group-wrong",
          about=lambda dim: {"name": f"part, {dim}", "what": "the result"}),
    _gives("", "gather", "forward"),
    _gives("", "gather", "backward"),
    Look("transposed tensors, float32, a second call; inputs are not changed", "overwritten", "", "group-in-place",
         fields=told("what")),
    pairs("", "odd", _of_odd),
    recognised("one collective each, only in the group", _wasteful),
]  # fmt: skip


def balise_9(GroupRanks):  # noqa: N803
    """copy, sum and gather in groups of neighbours and others of a world of 4 ranks; each group has its own data."""
    yield LOOKS[0].claim
    yield from at_each(LOOKS, each_layout(on_ranks(_use, GroupRanks, known=KNOWN, sizes=(WORLD,))[WORLD]))
