"""Balise 9: copy, sum and gather within a group of a larger world."""

import contextlib

import torch
import torch.distributed as dist

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import AS_GROUP, AS_OP, noise, on_ranks, together
from dlojz_tp.checks.tensor_slicing.layouts import group_of
from dlojz_tp.probes.traffic import Traffic, on_the_wire
from dlojz_tp.probes.withheld import Withheld

# ways to cut a world of four; every rank is in one group of each
WORLD = 4
LAYOUTS = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((1,), (0, 2, 3))
SHAPE = (4, 3)
BETWEEN = "backward of copy, another group's forward in between"

HINTS = {
    "rank-of-world": "`rank` is not this rank's number in the group. Among the ranks {members}, it is {rank}: use "
                     "dist.get_rank(group).",
    "size-of-world": "`size` is the size of the world. The group has {size} ranks: use dist.get_world_size(group).",
    "place-in-group": "`rank` and `size` must be those within the group, here {rank} of {size}.",
    "group-not-kept": "Keep the group as `group`: later cells use it.",
    "group-forgotten": "You use a group that you did not keep. backward reads ctx.group, so forward has to keep it "
                       "(ctx.group = group). The methods read self.group.",
    "own-random-lost": "`own_random` gives the ranks {members} the same random numbers, or changes the random "
                       "numbers drawn outside it. The one of `Ranks` is already right.",
    "index-of-world": "An index is out of range: {error}. Within the group, a rank has the number "
                      "dist.get_rank(group), and there are dist.get_world_size(group) ranks.",
    "forward-over-world": "In forward, {name} adds up over all ranks of the world. Only the group holds the parts "
                          "of one model: pass `group=` to the collective.",
    "backward-over-world": "Forward is right, but in backward {name} adds up over all ranks of the world. Keep the "
                           "group in `ctx` for backward.",
    "group-not-in-ctx": "This is right while only one group is in use. If another group is used before backward, "
                        "copy adds up over that other group. Keep the group in `ctx`, which is separate for each "
                        "call, not in the class or a global.",
    "gather-over-world": "`gather` puts the parts of all ranks of the world side by side, not only those of the group.",
    "group-not-summed": "{name} gave this rank's own values {way}. They must be added up over the group.",
    "group-mean": "This is the mean over the group. Parts are added up, without a division.",
    "group-summed-twice": "{name} also adds up {way}, where nothing has to travel. Look at balise 1 again.",
    "gradient-for-group": "backward returns one value for each argument of forward: the gradient of x, and None "
                          "for arguments without a gradient, such as the group. Here: {error}",
    "rank-of-peer": "PyTorch looked for a rank that is not in the group. src and dst are numbers in the *world*, "
                    "and so is the argument of dist.get_group_rank. To index, use the rank in the *group*.",
    "group-in-place": "{what} was overwritten. Others may still need the tensor: reduce a copy.",
    "group-layout": "The result is right for contiguous tensors, but wrong for transposed ones. Make them "
                    "contiguous before the collective.",
    "sent-beyond-group": "The values are right, but {name} ran in a group of {found} ranks, and the group has "
                         "{size}. The other ranks wait for nothing.",
    "group-sent-twice": "{name} calls {n} collectives {way}. One is enough.",
    "group-sends-back": "The values are right, but {name} calls {call} {way}, where nothing has to travel. See the "
                        "drawing of balise 1.",
    "group-sent-too-much": "{name} moves {sent} bytes per rank {way}, but {least} are enough. An all-gather "
                           "followed by a sum sends every part to every rank. An all-reduce avoids that.",
    "gather-dimension": "`gather` always puts the parts side by side along the last dimension, whatever `dim` is.",
    "group-not-waited": "You start a collective (async_op=True) but do not wait for it, so the result still holds "
                        "the old numbers. Call wait() on the handle that it returns, then use the result.",
    "group-wrong": "{name}: {what} is not what it should be.",
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


def balise_9(GroupRanks):  # noqa: N803
    """copy, sum and gather in groups of neighbours and others, in worlds of 1 to 4 ranks; each group has its own data."""
    yield "rank and size are those in the group; each rank has its own random numbers"
    every = each_layout(on_ranks(_use, GroupRanks, known=KNOWN, sizes=(WORLD,))[WORLD])
    for where, rank, got in every:
        _place(got, rank, where)
    _random(every)
    for name, way in (("sum", "the sum over the group forward"), ("copy", "the sum over the group backward")):
        yield f"{name}: {way}, nothing the other way"
        for where, rank, got in every:
            with named_if_running(got):
                _values(name, got, rank, where)
    yield "gather: the parts of the group, in its order; part: this rank's own"
    for where, rank, got in every:
        with named_if_running(got):
            _gathered(got, rank, where)
    yield "transposed tensors, float32, a second call; inputs are not changed"
    for where, _, got in every:
        if got["overwritten"]:
            raise Wrong("group-in-place", what=got["overwritten"], where=where)
        for what, (found, wanted) in got["odd"].items():
            if not close(found, wanted):
                slug = "gather-dimension" if "along dim 0" in what else "group-layout"
                slug = "group-not-in-ctx" if what == BETWEEN else slug
                raise Wrong(slug, expected=wanted, got=found, where=f"{where}, {what}")
    yield "one collective each, only in the group"
    for where, _, got in every:
        _frugal(got, where)


@contextlib.contextmanager
def named_if_running(got):
    """Inside, what is wrong is named after the collectives that nobody waited for, if there were any."""
    try:
        yield
    except Wrong as wrong:
        if got["left"] and wrong.slug != "nothing-returned":
            wrong.slug = "group-not-waited"
        raise


def _x(rank, seed=0):
    return noise(*SHAPE, seed=10 * seed + rank)


def each_layout(ranks) -> list[tuple]:
    """(where, rank in the world, report) of what each rank found in each layout; the layouts one after the other."""
    return [
        (f"rank {rank} of {len(ranks)}, group of the ranks {list(got['members'])}", rank, got)
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
        if not together(in_group(found[-1])):
            break
    if len(found) == len(LAYOUTS) and together(in_group(found[-1])):
        first, second = (GroupRanks(group_of(layout)[0]) for layout in LAYOUTS[:2])
        x = noise(*SHAPE, seed=8).requires_grad_()
        y = first.copy(x * 1)
        second.copy(x * 1)
        y.backward(_x(dist.get_rank(), 4))
        wanted = sum(_x(r, 4) for r in found[0]["members"])
        found[0]["odd"][BETWEEN] = None if x.grad is None else x.grad.clone(), wanted
    return found


def in_group(got) -> bool:
    """Whether there are results, and all collectives stayed in the group: only then are groups of different sizes safe."""
    calls = [call for ways in got["calls"].values() for way in ways for call in way]
    results = [value[0] == "values" for value in got.values() if isinstance(value, tuple) and isinstance(value[0], str)]
    return len(results) > 0 and all(results) and all(call.group <= len(got["members"]) for call in calls)


def _use_in(GroupRanks, layout):  # noqa: N803
    rank = dist.get_rank()
    group, members = group_of(layout)
    ranks = GroupRanks(group)
    found = {"members": members, "world": dist.get_world_size(), "overwritten": "", "odd": {}, "calls": {}, "left": 0}
    found["place"] = getattr(ranks, "rank", None), getattr(ranks, "size", None)
    if not together(found["place"] == (members.index(rank), len(members))):
        return found
    table = noise(12, 12, seed=5)
    found["kept"], found["random"] = getattr(ranks, "group", None) is group, _drawn(ranks)
    found["part"] = [ranks.part(table, dim).clone() for dim in (0, 1)]
    for name in ("sum", "copy", "gather"):
        seed = ("sum", "copy", "gather").index(name)
        x, upstream = _x(rank, seed), noise(4, 3 * (len(members) if name == "gather" else 1), seed=77)
        if name == "copy":
            x, upstream = noise(*SHAPE, seed=66), _x(rank, seed)
        given, sent = x.clone().requires_grad_(), upstream.clone()
        held = given * 1
        with Withheld() as running, Traffic() as forward:
            y = getattr(ranks, name)(held)
            value = y.detach().clone() if isinstance(y, torch.Tensor) else y
        found["left"] += running.left()
        if not together(isinstance(y, torch.Tensor)):
            found[name] = "not a tensor", type(y).__name__, None
            continue
        if not together(value.shape == upstream.shape):
            found[name] = "shape", value, None
            continue
        with Withheld() as running, Traffic() as backward:
            y.backward(sent)
            found[name] = "values", value, None if given.grad is None else given.grad.clone()
        found["left"] += running.left()
        found["calls"][name] = forward.calls, backward.calls
        if not torch.equal(held.detach(), x):
            found["overwritten"] = f"the x given to {name}"
        if not torch.equal(sent, upstream):
            found["overwritten"] = f"the gradient that came in to the backward of {name}"
    if all(found[name][0] == "values" for name in ("sum", "copy")):
        _odd(ranks, members, rank, found["odd"])
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


def _random(every):
    """Raise Wrong where two ranks of a group draw alike inside, or differently outside."""
    for where, _, got in every:
        if not got["kept"]:
            raise Wrong("group-not-kept", where=where)
        drawn = got["random"]
        peers = [other["random"] for _, _, other in every if other["members"] == got["members"] and other is not got]
        alike = any(close(other[k], drawn[k]) for other in peers for k in (0, 2))
        if alike or close(drawn[0], drawn[2]) or not all(close(other[1], drawn[1]) for other in peers):
            raise Wrong("own-random-lost", members=list(got["members"]), where=where)


def _odd(ranks, members, rank, odd):
    wanted = sum(_x(r, 4) for r in members).t()
    x = _x(rank, 4).t()  # each rank has another layout: only contiguous memory means the same everywhere
    x = x.contiguous() if members.index(rank) % 2 else x
    odd["sum of a transposed tensor"] = ranks.sum(x).clone(), wanted
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


def _place(got, rank, where):
    members, place = got["members"], got["place"]
    wanted = members.index(rank), len(members)
    if place == wanted:
        return
    fields = {"expected": f"rank {wanted[0]} of {wanted[1]}", "got": f"rank {place[0]} of {place[1]}", "where": where}
    slug = "place-in-group"
    if place[1] == got["world"] != wanted[1]:
        slug = "size-of-world"
    if place[0] == rank != wanted[0]:
        slug = "rank-of-world"
    raise Wrong(slug, rank=wanted[0], size=wanted[1], members=list(members), **fields)


def _values(name, got, rank, where):
    kind, value, gradient = got[name]
    if kind == "not a tensor":
        raise Wrong(
            "nothing-returned" if value == "NoneType" else "group-wrong", name=name, what="the result", where=where
        )
    members, world, seed = got["members"], range(got["world"]), ("sum", "copy").index(name)
    constant, own = noise(*SHAPE, seed=77 if name == "sum" else 66), _x(rank, seed)
    total, over_world = sum(_x(r, seed) for r in members), sum(_x(r, seed) for r in world)
    reduced, plain = (value, gradient) if name == "sum" else (gradient, value)
    way, other = ("forward", "backward") if name == "sum" else ("backward", "forward")
    for what, found, wanted in ((way, reduced, total), (other, plain, constant)):
        if found is not None and close(found, wanted):
            continue
        slug, n = "group-wrong", len(members)
        if found is None:
            pass
        elif what == other and (close(found, wanted * n) or close(found, wanted * len(world))):
            slug = "group-summed-twice"
        elif what == way and close(found, over_world):
            slug = f"{way}-over-world"
        elif what == way and n > 1 and close(found, own):
            slug = "group-not-summed"
        elif what == way and (close(found, total / n) or close(found, over_world / len(world))):
            slug = "group-mean"
        text = f"the {'value' if what == 'forward' else 'gradient'}"
        raise Wrong(slug, name=name, way=what, what=text, expected=wanted, got=found, where=f"{where}, {what}")


def _gathered(got, rank, where):
    members = got["members"]
    table, mine = noise(12, 12, seed=5), members.index(rank)
    for dim, part in enumerate(got["part"]):
        wanted = table.tensor_split(len(members), dim)[mine]
        if not close(part, wanted):
            raise Wrong("group-wrong", name="part", what="the part", expected=wanted, got=part, where=where)
    _, value, gradient = got["gather"]
    wanted = torch.cat([_x(r, 2) for r in members], 1)
    if not isinstance(value, torch.Tensor) or not close(value, wanted):
        everyone = torch.cat([_x(r, 2) for r in range(got["world"])], 1)
        slug = "gather-over-world" if close(value, everyone) else "group-wrong"
        raise Wrong(slug, name="gather", what="the result", expected=wanted, got=value, where=where)
    wanted = noise(4, 3 * len(members), seed=77).chunk(len(members), 1)[mine]
    if gradient is None or not close(gradient, wanted):
        slug = "group-wrong" if gradient is None or not close(gradient, len(members) * wanted) else "group-summed-twice"
        fields = {"name": "gather", "what": "the gradient", "way": "backward"}
        raise Wrong(slug, expected=wanted, got=gradient, where=where, **fields)


def _frugal(got, where):
    size, one = len(got["members"]), torch.Size(SHAPE).numel() * 8
    most = {
        "sum": (2 * (size - 1) / size * one, 0),
        "copy": (0, 2 * (size - 1) / size * one),
        "gather": (2 * (size - 1) * one, 0),
    }
    for name, both in got["calls"].items():
        for way, calls, least in zip(("forward", "backward"), both, most[name], strict=True):
            fields = {"name": name, "way": way, "where": f"{where}, {way}"}
            for call, _, ranks, *_ in calls:
                if ranks > size:
                    raise Wrong("sent-beyond-group", **fields | {"name": f"{call} of {name}"}, found=ranks, size=size)
                if size > 1 and not least:
                    raise Wrong("group-sends-back", call=call, **fields)
            if size > 1 and len(calls) > 1 and not halves(calls):
                raise Wrong("group-sent-twice", n=len(calls), **fields)
            if on_the_wire(calls) > 1.05 * least + 64:
                raise Wrong("group-sent-too-much", sent=int(on_the_wire(calls)), least=int(least), **fields)
