"""Balise 12: sequence parallelism: all-gather and reduce-scatter in the place of each all-reduce."""

from functools import partial

import torch

from dlojz_tp.judging.checking import mistake_of
from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.checks.tensor_slicing.common import IN_PLACE, on_ranks
from dlojz_tp.judging.checks.tensor_slicing.group_functions import KNOWN as GROUP_KNOWN
from dlojz_tp.judging.checks.tensor_slicing.group_functions import WORLD, each_layout, gives
from dlojz_tp.judging.checks.tensor_slicing.sequence_ranks import (
    COMMON,
    SHAPE,
    SUMMED,
    common_gradients,
    own_gradients,
    part_of,
    use,
    x_of,
)
from dlojz_tp.judging.checks.tensor_slicing.tables import at_each, pairs, told
from dlojz_tp.judging.probes.shared_looks import recognised
from dlojz_tp.judging.probes.traffic import on_the_wire

KNOWN = (
    ("Dimension out of range", "sequence-dimension"),
    *GROUP_KNOWN,
    ("returned an invalid gradient", "sequence-shape"),
    *IN_PLACE,
    ("'NoneType'", "common-no-gradient"),
    ("Expected parameter `tensor`", "common-no-gradient"),
)


def _whole(seed, got):
    """The sequence of a group."""
    return x_of(got["members"][0], seed)


def _mine(x, got):
    return part_of(x, got["members"], got["rank"])


def _total(seed, got, ranks=None):
    """This rank's tokens of the sum over its group, or over these ranks."""
    return _mine(sum(x_of(r, seed) for r in ranks or got["members"]), got)


def _of_form(given, over_world, shape, due):
    """The hint for a result of another shape. given: the input's; over_world: tokens, had all ranks taken part."""
    if shape == given != due:
        return "sequence-unchanged"
    if shape[1:2] == (over_world,) != due[1:2]:
        return "sequence-over-world"
    return "sequence-dimension" if shape != due and shape.numel() == due.numel() else ""


def _of_copy(value, whole, got):
    part = _mine(whole, got).shape
    return _of_form(part, part[1] * got["size"], value.shape, whole.shape)


def _of_sum(value, wanted, got):
    known = {"sequence-over-world": _total(4, got, range(got["size"])), "sequence-mean": wanted / len(got["members"]),
             "sequence-not-summed": _mine(x_of(got["rank"], 4), got)}  # fmt: skip
    return _of_form(SHAPE, SHAPE[1] // got["size"], value.shape, wanted.shape) or mistake_of(value, known, "")


def _of_copy_backward(value, wanted, got):
    return mistake_of(value, {
        "slice-without-sum": _mine(x_of(got["rank"], 3), got), "sequence-mean": wanted / len(got["members"]),
        "sequence-over-world": _total(3, got, range(got["size"])),
    }, "")  # fmt: skip


def _of_sum_backward(value, whole, got):
    n, alone = len(got["members"]), torch.zeros_like(whole)
    _mine(alone, got).copy_(_mine(whole, got))
    return mistake_of(value, {
        "scatter-backward-local": alone, "scatter-backward-local ": torch.cat([_mine(whole, got)] * n, 1),
        "sequence-times-n": whole * n, "sequence-times-n ": whole * got["size"], "sequence-mean": whole / n,
    }, "")  # fmt: skip


def _of_common(k, value, wanted, got):
    over_world, n = common_gradients(range(got["size"]))[k], len(got["members"])
    return mistake_of(value, {
        "common-silent": own_gradients(got["rank"])[k], "common-mean": wanted / n, "common-over-world": over_world,
        "common-mean ": over_world / got["size"], "common-mean  ": wanted / got["size"],
    }, "")  # fmt: skip


def _wasteful(got):
    n = len(got["members"])
    least = (n - 1) / n * torch.Size(SHAPE).numel() * 8
    for name, both in got["calls"].items():
        for way, calls in zip(("forward", "backward"), both, strict=True):
            if (sent := on_the_wire(calls)) > 1.05 * least + 64:
                padded = (name, way) in (("copy", "forward"), ("sum", "backward"))
                about = {"name": name, "sent": int(sent), "least": int(least), "way": way}
                return "padded-then-summed" if padded else "reduced-then-cut", about
    return None


def _gathered(got):
    n, sent = len(got["members"]), on_the_wire(got["common calls"])
    least = 2 * (n - 1) / n * COMMON
    return ("common-gathered", {"sent": int(sent), "least": int(least)}) if sent > 1.4 * least + 16 else None


def _accepted(got):
    size, error = len(got["members"]), got["uneven"]
    about = {"size": size, "length": 2 * size + 1, "error": error}
    return None if error == "ValueError" else ("sequence-uneven", about)


_gives = partial(gives, wrong="sequence-wrong")
LOOKS = [
    _gives("copy: in forward the whole sequence, in backward this rank's part of the sum", "copy", "forward",
           partial(_whole, 1), _of_copy),
    _gives("", "copy", "backward", partial(_total, 3), _of_copy_backward),
    _gives("sum: in forward this rank's part of the sum, in backward the whole sequence", "sum", "forward",
           partial(_total, 4), _of_sum),
    _gives("", "sum", "backward", partial(_whole, 2), _of_sum_backward),
    pairs("one token per rank, a batch of one, float32, transposed tensors", "odd", "sequence-wrong",
          about=lambda name: {"name": name, "what": "the result"}),
    recognised("no more bytes than an all-gather and a reduce-scatter need", _wasteful),
    recognised("a sequence that does not divide is refused", _accepted),
    Look("gradients of parameters that all ranks hold: added up over the group", "no gradient", None, "sequence-wrong",
         holds=lambda gradient, _: gradient is None or not gradient.count_nonzero(),
         fields=told(name="a parameter without a gradient", what="p.grad")),
    *(_gives("", *key, lambda got, k=k: common_gradients(got["members"])[k], partial(_of_common, k))
      for k, key in enumerate(SUMMED)),
    recognised("", _gathered),
    pairs("a norm and a sliced pair between copy and sum: the uncut layer's values and gradients", "layer",
          "sequence-wrong", about=lambda what: {"name": "the layer", "what": what}),
]  # fmt: skip


def balise_12(SequenceRanks, sum_common_gradients):  # noqa: N803
    """copy and sum of SequenceRanks, the gradients of what is common, and a layer between them; in groups of 1 to 4."""
    yield LOOKS[0].claim
    every = each_layout(on_ranks(use, SequenceRanks, sum_common_gradients, known=KNOWN, sizes=(WORLD,))[WORLD])
    yield from at_each(LOOKS, every)
