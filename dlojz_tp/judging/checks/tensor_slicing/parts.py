"""What balises 2 to 6 share: a part of a linear layer by itself, and inputs of other shapes and precisions."""

import copy
from functools import partial

import torch
from torch import nn

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.checks.tensor_slicing.common import (
    ASIDE_AT,
    SLACK,
    exercise,
    noise,
    randomise,
    together,
)
from dlojz_tp.judging.checks.tensor_slicing.right_ranks import SequenceCheckRanks
from dlojz_tp.judging.checks.tensor_slicing.tables import pair, pairs, told
from dlojz_tp.judging.probes.memory import Alive, held_bytes
from dlojz_tp.judging.probes.networks import twin
from dlojz_tp.judging.probes.outside import look_later
from dlojz_tp.judging.probes.shared_looks import mistake_look
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


def trained(make, dim: int, Layer, case: dict, ranks) -> dict:  # noqa: N803
    """On a rank: the report of a part, and where it is right that of the layer as it is trained."""
    report = _one_part(make, dim, ranks) | {"stopped": "part"}
    if together(report["fine"]):
        report |= exercise(Layer, case, ranks, report["single"])
    return report


def _one_part(make, dim, ranks) -> dict:
    """On a rank: what column_part (dim 0) or row_part (dim 1) returns, and whether a layer can be made of it."""
    plain = linear(8)
    before = twin(plain)
    part = make(plain, ranks)
    kind = "nn.Linear" if isinstance(part, nn.Linear) else None if part is None else type(part).__name__
    found = {"kind": kind, "fine": False, "plain changed": _changed(plain, before)}
    if kind != "nn.Linear":
        return found
    found["meta"] = next((name for name, p in part.named_parameters() if p.is_meta), "")
    if found["meta"]:
        return found
    found |= {"part shape": tuple(part.weight.shape), "part dtype": part.weight.dtype}
    found |= {"weight": part.weight.detach().clone(), "row bias": dim == 1 and part.bias is not None}
    found["right"] = close(found["weight"], _share(before.weight, dim, ranks.rank, ranks.size))
    if found["right"] and not dim:
        found["bias"] = "none" if part.bias is None else part.bias.detach().clone()
        found["right"] = close(found["bias"], _share(before.bias, 0, ranks.rank, ranks.size))
    found["part frozen"] = next((n for n in ("weight", "bias") if getattr(part, n) is not None
                                 and not (getattr(part, n).requires_grad and getattr(part, n).is_leaf)), "")  # fmt: skip
    found["part held"] = held_bytes([part.weight.detach()])
    with Alive() as alive:
        again = make(linear(8), ranks)
        found["beside"] = alive.held(again, known=[ranks.stream, *again.parameters()])
    then = copy.deepcopy(part)
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    found["single"] = part.weight.dtype == torch.float32
    found["follows"] = ranks.size > 1 and _changed(part, then)  # with one rank, the part is all of it
    found["bias error"] = _bare(make, ranks)
    if ranks.size == ASIDE_AT:
        look_later(make, LARGE, ranks)
    found["fine"] = found["right"] and found["beside"] <= SLACK and not found["row bias"]
    return found


def _share(whole, dim, rank, size):
    return whole.detach().tensor_split(size, dim)[rank]


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


def looks(claim: str, dim: int) -> list[Look]:
    """Looks at the part in the report of `trained`."""
    name, which = (("column_part", "output"), ("row_part", "input"))[dim]

    def shapes(seen, due):
        about = {"name": name, "which": which, "inputs": INPUTS, "outputs": OUTPUTS, "shape": seen}
        return about | {"expected": f"shape {due}", "got": f"shape {seen}"}

    def share(key, where):
        return Look("", key, lambda at: _share(getattr(linear(8), key), dim, *at), "part-wrong-values",
                    fields={"name": name, "where": where})  # fmt: skip

    def bytes_kept(key, hint, more):
        def much(held, size):
            about = silent(held, size) | {"held": held, "size": size}
            return None if held <= (more or size) else (hint, about)

        return mistake_look("", key, lambda at: INPUTS * OUTPUTS * 8 // at[1], much)

    return [
        Look(claim, "kind", "nn.Linear", "part-not-linear", fields=told("kind", name=name)),
        Look("", "plain changed", False, "plain-changed", fields={"name": name}),
        Look("", "meta", "", "part-on-meta", fields=told("what")),
        Look("", "part shape", lambda at: tuple(_share(linear(8).weight, dim, *at).shape), "part-wrong-shape",
             fields=shapes),
        Look("", "part dtype", torch.float64, "part-dtype", fields=told("dtype")),
        Look("", "row bias", False, "row-part-bias"),
        share("weight", "the weight"),
        share("bias", "the bias"),
        bytes_kept("part held", "part-is-view", 0),
        bytes_kept("beside", "part-keeps-whole", SLACK),
        Look("", "follows", False, "part-follows"),
        Look("", "bias error", "", "part-bias", fields=told("error")),
        Look("", "part frozen", "", "part-frozen", fields=told("what")),
    ]  # fmt: skip


def odd_batches(Layer, plain, width, ranks) -> dict:  # noqa: N803
    """On a rank: {what: (found, wanted)} for inputs of other shapes, layouts and precisions."""
    found = {
        "a single sequence": run(Layer, plain, noise(1, 5, width, seed=40), ranks),
        "a transposed input": run(Layer, plain, noise(width, 3, 2, seed=41).permute(2, 1, 0), ranks),
    }
    still = twin(plain).eval()
    found["one in evaluation, after eval()"] = run(Layer, still, noise(2, 3, width, seed=45), ranks)
    single = twin(plain).float()
    found["float32"] = run(Layer, single, noise(2, 3, width, seed=43).float(), ranks)
    return found


def run(Layer, plain, x, ranks):  # noqa: N803
    """(found, wanted): the result of a new sliced layer, and the plain one's."""
    layer = Layer(twin(plain), ranks).train(plain.training)
    with torch.no_grad():
        return layer(x), plain(x)


def odd(claim: str) -> Look:
    """At what `odd_batches` found."""

    def like(found, wanted):
        exact = getattr(found, "dtype", None) == wanted.dtype
        return exact and close(found, wanted, 1e-4 if wanted.dtype == torch.float32 else None)

    return pairs(claim, "odd", "odd-batch", right=like)


def shorter(Layer, plain, x, ranks) -> tuple:  # noqa: N803
    """On a rank: (found, wanted) of one layer at its second call, with a token less than at its first."""
    layer = Layer(twin(plain), ranks)
    with torch.no_grad():
        layer(x)
        wanted = plain(x[:, :-1])
        try:
            return layer(x[:, :-1]).clone(), wanted
        except RuntimeError as error:  # on all ranks: what was made for another length does not fit
            return str(error).split("\n")[0], wanted


SHORTER = pair("", "shorter", "length-kept", "a shorter sequence")
LONGER_AT = 2  # ranks, where the layer itself has been looked at


def longer(Layer, plain, width, ranks, gathered=False) -> tuple:  # noqa: N803
    """On a rank: (found, wanted, error) with ranks that hold a part of the sequence between the sliced layers.

    gathered: the result is gathered, so it may be of the whole sequence.
    """
    x = noise(2, 2 * ranks.size, width, seed=44)
    layer = Layer(twin(plain), ranks.others(SequenceCheckRanks))
    with torch.no_grad():
        whole = plain(x)
        wanted = ranks.part(whole, 1).clone()
        try:
            found = layer(ranks.part(x, 1).clone())
        except Exception as error:
            return None, wanted, f"{type(error).__name__}: {error}".split("\n")[0]
    return found, whole if gathered and found.shape == whole.shape else wanted, ""


def _in_longer(seen, _):
    found, wanted, error = seen
    about = {"got": found, "expected": wanted, "error": error or "the result is wrong"}
    return None if not error and close(found, wanted) else ("sizes-before-copy", about)


LONGER = mistake_look(
    "a sequence that `ranks.copy` makes longer, and `ranks.sum` shorter again", "longer", None, _in_longer
)


def sizes(claim: str, what: str) -> Look:
    """At what came of sizes that do not divide, {size: error or ""}. what: that size in words, with {n}."""

    def accepted(errors, ranks):
        n = next((n for n in errors if not errors[n]), None)
        if n is None:
            return None
        return "size-accepted", silent(errors, ranks) | {"what": what.format(n=n), "n": ranks}

    return mistake_look(claim, "refused", lambda at: at[1], accepted)
