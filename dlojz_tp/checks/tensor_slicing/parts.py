"""What balises 2 to 6 share: a part of a linear layer by itself, and inputs of other shapes and precisions."""

import copy
from functools import partial

import torch
from torch import nn

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import ASIDE_AT, SLACK, noise, randomise
from dlojz_tp.checks.tensor_slicing.right_ranks import SequenceCheckRanks
from dlojz_tp.probes.memory import Alive, held_bytes
from dlojz_tp.probes.outside import look_later
from dlojz_tp.works.balise import BaliseNotDone

INPUTS, OUTPUTS = 12, 24
LARGE = partial(nn.Linear, 256, 512)

HINTS = {
    "part-not-linear": "{name} returned {kind}. It must return an nn.Linear.",
    "plain-changed": "{name} changed the linear layer that it was given, but the whole layer is still needed. "
                     "Leave it unchanged, and return a new one.",
    "part-wrong-shape": "The part of a linear layer from {inputs} to {outputs} features has a weight of shape "
                        "{shape}. It is stored as (out, in): {name} splits the {which} features.",
    "part-wrong-values": "The weight or the bias of {name} is not this rank's share of the layer. Rank 0 has the "
                         "first share.",
    "part-bias": "{error} The layer has no bias, so its part must have none either (linear.bias is None).",
    "row-part-bias": "row_part returns a bias. Each rank would add it to its own term of the sum: keep the bias "
                     "outside.",
    "part-is-view": "The part's weight is a view: it keeps {held} bytes in memory for a part of {size}. Clone it.",
    "part-keeps-whole": "Besides its share of {size} bytes, the part keeps {held} bytes alive. Keep no reference "
                        "to the plain layer.",
    "part-follows": "The part shares its memory with the plain layer: if one changes, so does the other. Clone it.",
    "part-dtype": "The part has the dtype {dtype}, but the layer here is torch.float64. Use the layer's own dtype "
                  "(and device).",
    "part-on-meta": "The part's {what} is still on the device \"meta\", which holds no numbers, so copy_ into it "
                    "does nothing. Assign a new nn.Parameter instead.",
    "part-frozen": "The part's {what} is not trained. Wrap the tensor in a new nn.Parameter.",
    "sizes-before-copy": "This fails when `ranks.copy` makes the sequence longer and `ranks.sum` cuts it again, as "
                         "in balise 12: {error}. Pass (b, s, d) to both of them, and read sizes after ranks.copy.",
    "length-kept": "The same layer fails or is wrong when it is called again with a shorter sequence. What forward "
                   "makes for one length (a mask, positions) does not fit another length: make it again in each "
                   "call.",
    "odd-batch": "Your answer is right for an input of shape (b, s, d), but wrong for {what}.",
}  # fmt: skip


def linear(seed, outputs=OUTPUTS, bias=True):
    """A linear layer in float64 with random weights."""
    return randomise(nn.Linear(INPUTS, outputs, bias=bias), seed)


def one_part(make, dim: int, ranks) -> dict:
    """On a rank: what column_part (dim 0) or row_part (dim 1) returns, and whether it is fine."""
    plain = linear(8)
    before = copy.deepcopy(plain)
    part = make(plain, ranks)
    found = {"kind": type(part).__name__, "fine": False, "plain changed": _changed(plain, before)}
    if not isinstance(part, nn.Linear) or found["plain changed"]:
        return found
    found["meta"] = next((name for name, p in part.named_parameters() if p.is_meta), "")
    if found["meta"]:
        return found
    wanted = plain.weight.detach().tensor_split(ranks.size, dim)[ranks.rank].clone()
    found |= {"weight": part.weight.detach().clone(), "wanted": wanted, "row bias": dim == 1 and part.bias is not None}
    found["right"] = close(found["weight"], wanted)
    if found["right"] and not dim:
        bias = plain.bias.detach().tensor_split(ranks.size)[ranks.rank].clone()
        found |= {"bias": None if part.bias is None else part.bias.detach().clone(), "bias wanted": bias}
        found["right"] = part.bias is not None and close(part.bias, bias)
    found["frozen"] = next((n for n in ("weight", "bias") if getattr(part, n) is not None
                            and not (getattr(part, n).requires_grad and getattr(part, n).is_leaf)), "")  # fmt: skip
    found["held"] = held_bytes([part.weight.detach()])
    with Alive() as alive:
        again = make(linear(8), ranks)
        found["beside"] = alive.held(again, known=[ranks.stream, *again.parameters()])
    then = copy.deepcopy(part)
    with torch.no_grad():
        plain.weight.zero_()
        plain.bias.zero_()
    found["follows"] = ranks.size > 1 and _changed(part, then)  # with one rank, the part is all of it
    found["bias error"] = _bare(make, ranks)
    if ranks.size == ASIDE_AT:
        look_later(make, LARGE, ranks)
    faults = ("row bias", "frozen", "follows", "bias error")
    fits = found["held"] <= wanted.numel() * 8 and part.weight.dtype == wanted.dtype
    fits = fits and found["beside"] <= SLACK
    found["fine"] = found["right"] and fits and not any(found[fault] for fault in faults)
    return found


def _changed(plain, before) -> bool:
    now, then = plain.state_dict(), before.state_dict()
    return now.keys() != then.keys() or not all(torch.equal(now[name], then[name]) for name in then)


def _bare(make, ranks) -> str:
    try:
        part = make(linear(9, bias=False), ranks)
        return "" if part.bias is None else "It was given a bias."
    except BaliseNotDone:
        raise
    except Exception as error:
        return f"It fails: {type(error).__name__}: {error}."


def judge_part(got, dim: int, where: str) -> None:
    """Raise Wrong where `one_part` found a fault."""
    name, which = (("column_part", "output"), ("row_part", "input"))[dim]
    if got["kind"] == "NoneType":
        raise Wrong("nothing-returned", where=where)
    if got["plain changed"]:
        raise Wrong("plain-changed", name=name, where=where)
    if got.get("meta"):
        raise Wrong("part-on-meta", what=got["meta"], where=where)
    if "weight" not in got:
        raise Wrong("part-not-linear", name=name, kind=got["kind"], where=where)
    weight, wanted = got["weight"], got["wanted"]
    if weight.shape != wanted.shape:
        shape = tuple(weight.shape)
        raise Wrong("part-wrong-shape", name=name, which=which, inputs=INPUTS, outputs=OUTPUTS, shape=shape, where=where,
                    expected=f"shape {tuple(wanted.shape)}", got=f"shape {shape}")  # fmt: skip
    if weight.dtype != wanted.dtype:
        raise Wrong("part-dtype", dtype=weight.dtype, where=where)
    if got["row bias"]:
        raise Wrong("row-part-bias", where=where)
    if not got["right"]:
        shown = (got["bias wanted"], got["bias"]) if "bias" in got else (wanted, weight)
        where += ", the bias" if "bias" in got else ", the weight"
        raise Wrong("part-wrong-values", name=name, expected=shown[0], got=shown[1], where=where)
    if got["held"] > weight.numel() * 8:
        raise Wrong("part-is-view", held=got["held"], size=weight.numel() * 8, where=where)
    if got["beside"] > SLACK:
        raise Wrong("part-keeps-whole", held=got["beside"], size=weight.numel() * 8, where=where)
    if got["follows"]:
        raise Wrong("part-follows", where=where)
    if got["bias error"]:
        raise Wrong("part-bias", error=got["bias error"], where=where)
    if got["frozen"]:
        raise Wrong("part-frozen", what=got["frozen"], where=where)


def odd_batches(Layer, plain, width, ranks) -> dict:  # noqa: N803
    """On a rank: {what: (found, wanted)} for inputs of other shapes, layouts and precisions."""
    found = {
        "a single sequence": run(Layer, plain, noise(1, 5, width, seed=40), ranks),
        "a transposed input": run(Layer, plain, noise(width, 3, 2, seed=41).permute(2, 1, 0), ranks),
    }
    still = copy.deepcopy(plain).eval()
    found["one in evaluation, after eval()"] = run(Layer, still, noise(2, 3, width, seed=45), ranks)
    single = copy.deepcopy(plain).float()
    found["float32"] = run(Layer, single, noise(2, 3, width, seed=43).float(), ranks)
    return found


def run(Layer, plain, x, ranks):  # noqa: N803
    """(found, wanted): the result of a new sliced layer, and the plain one's."""
    layer = Layer(copy.deepcopy(plain), ranks).train(plain.training)
    with torch.no_grad():
        return layer(x), plain(x)


def judge_odd(cases, where: str) -> None:
    """Raise Wrong for the first of `odd_batches` that is not right."""
    for what, (found, wanted) in cases.items():
        dtype = getattr(found, "dtype", None)
        if dtype != wanted.dtype or not close(found, wanted, 1e-4 if wanted.dtype == torch.float32 else None):
            raise Wrong("odd-batch", what=what, expected=wanted, got=found, where=f"{where}, {what}")


def shorter(Layer, plain, x, ranks) -> tuple:  # noqa: N803
    """On a rank: (found, wanted) of one layer at its second call, with a token less than at its first."""
    layer = Layer(copy.deepcopy(plain), ranks)
    with torch.no_grad():
        layer(x)
        wanted = plain(x[:, :-1])
        try:
            return layer(x[:, :-1]).clone(), wanted
        except RuntimeError as error:  # on all ranks: what was made for another length does not fit
            return str(error).split("\n")[0], wanted


def judge_shorter(got, where: str) -> None:
    """Raise Wrong where the result of `shorter` is not right."""
    found, wanted = got
    if not close(found, wanted):
        raise Wrong("length-kept", expected=wanted, got=found, where=f"{where}, a shorter sequence")


LONGER = "a sequence that `ranks.copy` makes longer, and `ranks.sum` shorter again"
LONGER_AT = 2  # ranks, where the layer itself has been looked at


def longer(Layer, plain, width, ranks, gathered=False) -> tuple:  # noqa: N803
    """On a rank: (found, wanted, error) with ranks that hold a part of the sequence between the sliced layers.

    gathered: the result is gathered, so it may be of the whole sequence.
    """
    x = noise(2, 2 * ranks.size, width, seed=44)
    layer = Layer(copy.deepcopy(plain), ranks.others(SequenceCheckRanks))
    with torch.no_grad():
        whole = plain(x)
        wanted = ranks.part(whole, 1).clone()
        try:
            found = layer(ranks.part(x, 1).clone())
        except Exception as error:
            return None, wanted, f"{type(error).__name__}: {error}".split("\n")[0]
    return found, whole if gathered and found.shape == whole.shape else wanted, ""


def judge_longer(every):
    """Yield the claim for each report that has `longer`; raise Wrong where its result is not right."""
    for size, rank, got in every:
        if "longer" in got:
            yield LONGER
            found, wanted, error = got["longer"]
            if error or not close(found, wanted):
                fields = {"expected": wanted, "got": found, "where": f"rank {rank} of {size}"}
                raise Wrong("sizes-before-copy", error=error or "the result is wrong", **fields)
