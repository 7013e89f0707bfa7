"""Balise 12: sequence parallelism: all-gather and reduce-scatter in the place of each all-reduce."""

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import IN_PLACE, on_ranks
from dlojz_tp.checks.tensor_slicing.group_functions import KNOWN as GROUP_KNOWN
from dlojz_tp.checks.tensor_slicing.group_functions import WORLD, each_layout, named_if_running
from dlojz_tp.checks.tensor_slicing.sequence_ranks import COMMON, SHAPE, own_gradients, part_of, use, x_of
from dlojz_tp.probes.traffic import on_the_wire

HINTS = {
    "sequence-unchanged": "`{name}` returned a tensor of the same shape. A rank holds s / N tokens outside the "
                          "sliced layers and s inside: copy makes the sequence whole, sum cuts it.",
    "sequence-dimension": "You put the parts together, or cut them, along another dimension. The sequence is "
                          "dimension 1 of (b, s, d).",
    "sequence-over-world": "All ranks of the world took part in {name}. Only the group holds this sequence.",
    "slice-without-sum": "In backward, each rank kept its part of *its own* gradient. Every rank used the whole "
                         "sequence in its own slice of the layer, so add up the gradients before you cut them.",
    "scatter-backward-local": "The backward of sum returns only this rank's part of the gradient. Each rank needs "
                              "the gradient of all tokens: gather the parts.",
    "sequence-not-summed": "sum returns this rank's own values, cut. Add up the ranks' partial results.",
    "sequence-mean": "This is a mean over the ranks: you divide by {n}. Parts are added up, without a division.",
    "sequence-times-n": "The gradient of {name} is {n} times too large: you added it up, but it should only be "
                        "gathered.",
    "reduced-then-cut": "The numbers are right, but {name} moves {sent} bytes per rank {way}, where {least} are "
                        "enough. An all-reduce followed by a cut throws away most of what it sends. A "
                        "reduce-scatter avoids that.",
    "padded-then-summed": "The numbers are right, but {name} moves {sent} bytes per rank {way}, where {least} are "
                          "enough. An all-reduce of parts padded with zeros sends twice as much as an all-gather "
                          "of the parts.",
    "common-gathered": "The gradients are right, but sum_common_gradients moves {sent} bytes per rank, where an "
                       "all-reduce moves {least}. Gathering first and then adding up sends every rank's gradients "
                       "to every rank.",
    "sequence-uneven": "{size} ranks do not divide a sequence of {length} tokens, but the answer was {error}. "
                       "Raise a ValueError (`self.part` does).",
    "sequence-shape": "backward returned a gradient of another shape than its input: {error}",
    "common-silent": "The gradients in `parameters` are still this rank's own: they come only from this rank's tokens.",
    "common-mean": "You divide these gradients by the number of ranks. Each comes from other tokens of the *same* "
                   "loss, so they are parts of a sum.",
    "common-over-world": "You added up the gradients over the whole world, but the other groups see other data.",
    "common-cut": "You called ranks.{name} for these gradients. In SequenceRanks it works on a sequence: it would "
                  "cut them, or put them side by side. Each rank needs their whole sum: use an all-reduce over "
                  "ranks.group.",
    "common-no-gradient": "A frozen or unused parameter has p.grad None. Leave it out.",
    "sequence-wrong": "{name}: {what} is not what it should be.",
}  # fmt: skip
KNOWN = (
    ("Dimension out of range", "sequence-dimension"),
    *GROUP_KNOWN,
    ("returned an invalid gradient", "sequence-shape"),
    *IN_PLACE,
    ("'NoneType'", "common-no-gradient"),
    ("Expected parameter `tensor`", "common-no-gradient"),
)


def balise_12(SequenceRanks, sum_common_gradients):  # noqa: N803
    """copy and sum of SequenceRanks, the gradients of what is common, and a layer between them; in groups of 1 to 4."""
    every = each_layout(on_ranks(use, SequenceRanks, sum_common_gradients, known=KNOWN, sizes=(WORLD,))[WORLD])
    yield "copy: in forward the whole sequence, in backward this rank's part of the sum"
    for where, rank, got in every:
        with named_if_running(got):
            _copied(got["copy"], got, rank, where)
    yield "sum: in forward this rank's part of the sum, in backward the whole sequence"
    for where, rank, got in every:
        with named_if_running(got):
            _summed(got["sum"], got, rank, where)
    yield "one token per rank, a batch of one, float32, transposed tensors"
    for where, _, got in every:
        for what, (found, wanted) in got["odd"].items():
            if not close(found, wanted):
                raise Wrong("sequence-wrong", name=what, what="the result", expected=wanted, got=found, where=where)
    yield "no more bytes than an all-gather and a reduce-scatter need"
    for where, _, got in every:
        _frugal(got, where)
    yield "a sequence that does not divide is refused"
    for where, _, got in every:
        if got["uneven"] not in ("", "ValueError"):
            size = len(got["members"])
            raise Wrong("sequence-uneven", size=size, length=2 * size + 1, error=got["uneven"], where=where)
    yield "gradients of parameters that all ranks hold: added up over the group"
    for where, rank, got in every:
        with named_if_running(got):
            _common(got["common"], got, rank, where)
    yield "a norm and a sliced pair between copy and sum: the uncut layer's values and gradients"
    for where, _, got in every:
        for what, (found, wanted) in got["layer"].items():
            if found is None or not close(found, wanted):
                raise Wrong("sequence-wrong", name="the layer", what=what, expected=wanted, got=found, where=where)


def _copied(found, got, rank, where):
    members, world = got["members"], got["world"]
    kind, value, gradient = found
    whole = x_of(members[0], 1)
    if not isinstance(value, torch.Tensor):
        raise Wrong("nothing-returned", where=where)
    if kind == "shape" or not close(value, whole):
        part = part_of(whole, members, rank)
        slug = "sequence-unchanged" if value.shape == part.shape != whole.shape else "sequence-wrong"
        along = [torch.cat([part_of(whole, members, r) for r in members], dim) for dim in (0, 2)]
        if any(close(value, other) for other in along) or value.numel() == whole.numel() and value.shape != whole.shape:
            slug = "sequence-dimension"
        if value.shape[1] == part.shape[1] * world != whole.shape[1]:
            slug = "sequence-over-world"
        raise Wrong(slug, name="copy", what="the result", expected=whole, got=value, where=f"{where}, forward")
    total = part_of(sum(x_of(r, 3) for r in members), members, rank)
    over_world = part_of(sum(x_of(r, 3) for r in range(world)), members, rank)
    _gradient("copy", gradient, total, where, {
        "slice-without-sum": part_of(x_of(rank, 3), members, rank),
        "sequence-over-world": over_world, "sequence-mean": total / len(members),
    }, len(members))  # fmt: skip


def _summed(found, got, rank, where):
    members, world, n = got["members"], got["world"], len(got["members"])
    kind, value, gradient = found
    if not isinstance(value, torch.Tensor):
        raise Wrong("nothing-returned", where=where)
    total = sum(x_of(r, 4) for r in members)
    wanted = part_of(total, members, rank)
    if kind == "shape" or not close(value, wanted):
        over_world = sum(x_of(r, 4) for r in range(world))
        slug = "sequence-wrong"
        if value.shape == total.shape != wanted.shape:
            slug = "sequence-unchanged"
        elif value.numel() == wanted.numel() and value.shape != wanted.shape:
            slug = "sequence-dimension"
        elif (
            close(value, part_of(over_world, members, rank)) or value.shape[1] * world == SHAPE[1] != value.shape[1] * n
        ):
            slug = "sequence-over-world"
        elif close(value, part_of(x_of(rank, 4), members, rank)):
            slug = "sequence-not-summed"
        elif close(value, wanted / n):
            slug = "sequence-mean"
        raise Wrong(slug, name="sum", what="the result", n=n, expected=wanted, got=value, where=f"{where}, forward")
    whole, mine = x_of(members[0], 2), torch.zeros(SHAPE, dtype=torch.float64)
    part_of(mine, members, rank).copy_(part_of(whole, members, rank))
    repeated = torch.cat([part_of(whole, members, rank)] * n, 1)
    _gradient("sum", gradient, whole, where, {
        "scatter-backward-local": mine, "scatter-backward-local ": repeated, "sequence-times-n": whole * n,
        "sequence-times-n ": whole * world, "sequence-mean": whole / n,
    }, n)  # fmt: skip


def _gradient(name, got, wanted, where, mistakes, n):
    if got is not None and close(got, wanted):
        return
    slug = next((s.strip() for s, value in mistakes.items() if got is not None and close(got, value)), "sequence-wrong")
    raise Wrong(slug, name=name, what="the gradient", n=n, expected=wanted, got=got, where=f"{where}, backward")


def _frugal(got, where):
    n = len(got["members"])
    least = (n - 1) / n * torch.Size(SHAPE).numel() * 8
    for name, both in got["calls"].items():
        for way, calls in zip(("forward", "backward"), both, strict=True):
            if (sent := on_the_wire(calls)) > 1.05 * least + 64:
                padded = (name, way) in (("copy", "forward"), ("sum", "backward"))
                slug = "padded-then-summed" if padded else "reduced-then-cut"
                raise Wrong(slug, name=name, sent=int(sent), least=int(least), way=way, where=where)


def _common(found, got, rank, where):
    members, n = got["members"], len(got["members"])
    if found[2] is not None and found[2].count_nonzero():
        raise Wrong("sequence-wrong", name="a parameter without a gradient", what="p.grad", got=found[2], where=where)
    for k, value in enumerate(found[:2]):
        wanted = sum(own_gradients(r)[k] for r in members)
        if value is not None and close(value, wanted):
            continue
        over_world = sum(own_gradients(r)[k] for r in range(got["world"]))
        known = [("common-silent", own_gradients(rank)[k]), ("common-mean", wanted / n), ("common-over-world", over_world)]
        known += [("common-mean", total / got["world"]) for total in (over_world, wanted)]
        slug = next((slug for slug, one in known if value is not None and close(value, one)), "sequence-wrong")
        fields = {"name": "a common parameter", "what": "the gradient", "n": n}
        raise Wrong(slug, expected=wanted, got=value, where=where, **fields)
    least = 2 * (n - 1) / n * COMMON
    if (sent := on_the_wire(got["common calls"])) > 1.4 * least + 16:
        raise Wrong("common-gathered", sent=int(sent), least=int(least), where=where)
