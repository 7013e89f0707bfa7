"""Balise 9: copy, sum and gather within a group of a larger world."""

import torch
import torch.distributed as dist

from dlojz_tp.judging.checking import close, mistake_of
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.checks.tensor_slicing.common import AS_GROUP, AS_OP, noise, on_ranks, together
from dlojz_tp.judging.checks.tensor_slicing.layouts import group_of
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each, pairs, told, whole
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.judging.probes.traffic import Traffic, on_the_wire
from dlojz_tp.judging.probes.withheld import Withheld

# ways to cut a world of four; every rank is in one group of each
WORLD = 4
LAYOUTS = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((1,), (0, 2, 3))
SHAPE = (4, 3)
NAMES = "sum", "copy", "gather"
ADDS_UP = ("sum", "forward"), ("copy", "backward")
BETWEEN = "backward of copy, another group's forward in between"

HINTS = {
    "group-forgotten": "You use a group that you did not keep. backward reads ctx.group, so forward has to keep it "
                       "(ctx.group = group). The methods read self.group.",
    "index-of-world": "An index is out of range: {error}. Within the group, a rank has the number "
                      "dist.get_rank(group), and there are dist.get_world_size(group) ranks.",
    "gradient-for-group": "backward returns one value for each argument of forward: the gradient of x, and None "
                          "for arguments without a gradient, such as the group. Here: {error}",
    "rank-of-peer": "PyTorch looked for a rank that is not in the group. src and dst are numbers in the *world*, "
                    "and so is the argument of dist.get_group_rank. To index, use the rank in the *group*.",
    "group-not-waited": "You start a collective (async_op=True) but do not wait for it, so the result still holds "
                        "the old numbers. Call wait() on the handle that it returns, then use the result.",
}  # fmt: skip
KNOWN = (
    AS_OP,
    AS_GROUP,
    ("has no attribute 'group'", "group-forgotten"),
    ("returned an incorrect number of gradients", "gradient-for-group"),
    ("returned a gradient different than None", "gradient-for-group"),
    ("is not part of group", "rank-of-peer"),
    ("is not registered", "rank-of-peer"),
    ("IndexError", "index-of-world"),
)


def _x(rank, seed=0):
    return noise(*SHAPE, seed=10 * seed + rank)


def each_layout(ranks) -> list[tuple]:
    """What each rank found in each layout, the layouts one after the other, as `at_each` takes it."""
    return [
        (len(ranks), rank, got | {"place": f"rank {rank} of {len(ranks)}, group of the ranks {list(got['members'])}"})
        for layout in zip(*ranks, strict=True)
        for rank, got in enumerate(layout)
    ]


def halves(calls) -> bool:
    """Whether these are the two halves of an all-reduce."""
    return [call[0] for call in calls] == ["reduce_scatter", "all_gather"]


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


def in_group(got, names) -> bool:
    """Whether all gave results and no collective left the group: only then are groups of different sizes safe."""
    calls = [call for ways in got["calls"].values() for way in ways for call in way]
    return got["calls"].keys() == {*names} and all(call.group <= len(got["members"]) for call in calls)


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


def use_both_ways(ranks, name, x, upstream, found) -> None:
    """Call a function of `ranks`; `found` takes (name, way): what it gives; its calls, what it left running, overwrote.

    What isn't a tensor of the shape of `upstream` has no backward and no calls.
    """
    given, sent = x.clone().requires_grad_(), upstream.clone()
    held = given * 1
    with Withheld() as running, Traffic() as forward:
        y = getattr(ranks, name)(held)
        found[name, "forward"] = y.detach().clone() if isinstance(y, torch.Tensor) else y and type(y).__name__
    found["left"] += running.left()
    if not together(isinstance(y, torch.Tensor) and y.shape == upstream.shape):
        return
    with Withheld() as running, Traffic() as backward:
        y.backward(sent)
        found[name, "backward"] = None if given.grad is None else given.grad.clone()
    found["left"] += running.left()
    found["calls"][name] = forward.calls, backward.calls
    if not torch.equal(held.detach(), x):
        found["overwritten"] = f"the x given to {name}"
    if not torch.equal(sent, upstream):
        found["overwritten"] = f"the gradient that came in to the backward of {name}"


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


def gives(claim, name, way, due, mistake, wrong="group-wrong") -> Look:
    """A look at what a function gives one way, see `use_both_ways`. due(report): the truth.

    mistake(tensor, truth, report): the hint for another one, or "". wrong: the hint then.
    """
    key = name, way

    def holds(got, _):
        return key not in got or close(got[key], due(got))

    def hint(got, _):
        if got[key] is None:
            return "nothing-returned"
        if got["left"]:
            return "group-not-waited"
        slug = mistake(got[key], due(got), got) if isinstance(got[key], torch.Tensor) else ""
        return slug.strip() or wrong

    def fields(got, _):
        what = "the result" if way == "forward" else "the gradient"
        about = {"name": name, "way": way, "what": what, "n": len(got["members"]), "where": way}
        return about | {"expected": due(got), "got": got[key]}

    return Look(claim, whole, None, hint, holds=holds, fields=fields)


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
