"""Functions of an answer within groups of a larger world: each called both ways, its result and errors judged."""

import torch

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.checks.tensor_slicing.common import AS_GROUP, AS_OP, together
from dlojz_tp.judging.checks.tensor_slicing.tables import whole
from dlojz_tp.judging.probes.traffic import Traffic
from dlojz_tp.judging.probes.withheld import Withheld

# ways to cut a world of four; every rank is in one group of each
WORLD = 4
LAYOUTS = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((1,), (0, 2, 3))

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


def each_layout(ranks) -> list[tuple]:
    """What each rank found in each layout, the layouts one after the other, as `at_each` takes it."""
    return [
        (len(ranks), rank, got | {"place": f"rank {rank} of {len(ranks)}, group of the ranks {list(got['members'])}"})
        for layout in zip(*ranks, strict=True)
        for rank, got in enumerate(layout)
    ]


def in_group(got, names) -> bool:
    """Whether all gave results and no collective left the group: only then are groups of different sizes safe."""
    calls = [call for ways in got["calls"].values() for way in ways for call in way]
    return got["calls"].keys() == {*names} and all(call.group <= len(got["members"]) for call in calls)


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
