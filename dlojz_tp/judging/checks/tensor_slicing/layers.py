"""Looks at what `exercise` reported of a sliced layer: its slices, result, gradients, traffic, training."""

from collections.abc import Callable

from dlojz_tp.judging.checking import close, mistake_of, tolerance
from dlojz_tp.judging.checking.looks import Look, silent
from dlojz_tp.judging.checks.tensor_slicing.common import SLACK, Form, as_plain
from dlojz_tp.judging.checks.tensor_slicing.tables import Idea
from dlojz_tp.judging.probes.shared_looks import mistake_look, recognised
from dlojz_tp.judging.probes.traffic import Call, on_the_wire, volume

HINTS = {
    "no-parameters": "The layer has no parameters. Assign an nn.Parameter, or a module that has parameters, to an "
                     "attribute of self.",
    "not-cut": "Every rank holds the whole {name}. Each rank should hold 1/{n} of it.",
    "wrong-dimension": "You cut {name} along the wrong dimension. A weight of nn.Linear has the shape (out, in): "
                       "its rows are output features.",
    "wrong-part": "{name} is rank {other}'s part, not this rank's. Rank 0 has the first part, rank 1 the next.",
    "bias-over-n": "You divide {name} by {n}. The result is right once, but every rank's part gets the whole "
                   "gradient, so after a step the bias has moved {n} times too far. Add the whole bias once, after "
                   "the sum.",
    "bias-cut": "You cut {name}. It is added to the result of the sum, so every rank needs all of it.",
    "part-not-trained": "{name} has requires_grad False, so it is never trained. Wrap the part in an nn.Parameter; "
                        "nn.Embedding.from_pretrained freezes unless you pass freeze=False.",
    "slice-lost": "No parameter holds this rank's part of {name}.",
    "slice-doubled": "You hold this rank's part of {name} twice.",
    "unknown-parameter": "{name} is not this rank's part of the plain layer: it has other values, or is not a "
                         "contiguous block.",
    "view-keeps-whole": "{name} is a view: it keeps {held} bytes of memory alive for its {size}. Clone the part.",
    "whole-kept": "The layer holds {held} bytes on this rank, but its parts of the parameters take only {size}. "
                  "Keep no reference to the plain layer or its weights.",
    "copy-aside": "Besides tensors, {held} bytes of numbers stay in memory after the layer is built, in a list, an "
                  "array or the like, here or in a global variable. A rank has no room for the whole weight in any "
                  "form: keep only its part.",
    "size-accepted": "{what} on {n} ranks cannot be split evenly, but you raised no error. Raise a ValueError when "
                     "the layer is built: later it would give wrong results, or wait forever.",
    "not-gathered": "The result has the shape {shape}, which is that of one rank's part. Put the parts of all "
                    "ranks side by side along the last dimension: gather, not sum.",
    "wrong-shape": "The result has the shape {shape}.",
    "wrong-order": "The parts are all there, but in the wrong order. Rank 0's part comes first, along the last "
                   "dimension.",
    "not-summed": "The ranks' results add up to the expected result: each is one term of the sum. Add them up.",
    "bias-every-rank": "The bias is in the result {n} times: each rank added it before the sum, or you summed the "
                       "bias itself. Add it once.",
    "bias-lost": "The bias is missing from the result.",
    "summed-too-often": "The result is {n} times too large: you summed something that was already whole on every rank.",
    "mean-not-sum": "You averaged the ranks' results. They are terms of a sum, so do not divide.",
    "output-wrong": "The result is not that of the uncut layer.",
    "layer-overwrites": "The layer changed its input, or the gradient that it received, in place.",
    "graph-lost": "The gradient of the input is missing (None).",
    "entrance-forgotten": "The gradients of the input differ between the ranks and add up to the expected "
                          "gradient: each rank knows only its own part of the work. At the entrance, copy `x` to "
                          "the ranks, with an all-reduce of the gradient.",
    "entrance-behind": "Each rank has only the gradient of its own part, {n} times too large: you call "
                       "`ranks.copy` after the layer. It belongs at the entrance, before you use `x`.",
    "entrance-twice": "The gradient of the input is {n} times too large: you added it up once too often.",
    "input-over-n": "The gradient of the input is {n} times too small: something after it is divided by the number "
                    "of ranks.",
    "input-gradient-wrong": "The result is right, but the gradient of the input is not.",
    "weight-without-gradient": "{name} gets no gradient on rank {rank}, so it is never trained there: the result "
                               "does not depend on it.",
    "weight-times-n": "The gradient of {name} is {n} times too large: in backward you added it up over the ranks, "
                      "although every rank already holds it whole.",
    "weight-over-n": "The gradient of {name} is {n} times too small. Add what every rank holds whole once, "
                     "undivided, after the sum.",
    "weight-partial": "The gradients of {name} differ between the ranks, although all ranks hold it whole: each "
                      "rank sees only its part.",
    "weight-gradient-wrong": "The result is right, but the gradient of {name} is not.",
    "too-many-collectives": "{found} {way}. {wanted} enough.",
    "too-much-volume": "You pass {found} bytes to collectives {way}, but {wanted} are enough.",
    "gathered-to-sum": "{name} sends every rank's numbers to every rank: {found} bytes {way}, where {wanted} are "
                       "enough. `ranks.sum` adds up while it sends.",
    "whole-product": "This rank computes {share:.0%} of the uncut layer's products, but its share is 1/{n}. "
                     "Multiply only by this rank's part, once, and put the results together, not the weights.",
    "steps-drift": "The first step is right, but the {step} is not.",
    "old-weights": "The parameters got other values, but the result did not follow. You compute it from something "
                   "else.",
}  # fmt: skip


def layer_looks(
    case: Callable, truth: Callable, calls: tuple, *, sent=(), known=(), named=lambda slug, got: slug, products=True
) -> list[Look]:
    """Looks at the report of `exercise`.

    case, truth: functions that return the case, and what `common.truth` gives for it. calls: (forward, backward) at
    most. sent: (forward, backward) bytes handed in at most. known: (slug, function of rank and size that gives the
    output of that mistake). named(slug, report): another hint for a mistake. products: whether the layer multiplies.
    """

    def mistake(find, part, kind=Look):
        """A look at what find(report, part of the case or of the truth) recognises."""

        def found(got):
            known = find(got, part())
            return known and (named(known[0], got), known[1])

        return recognised("", found, kind)

    def output(got):
        right = truth()["output"]
        about = {"expected": right, "got": got["output"], "n": got["size"]}
        return None if close(got["output"], right) else (_of_output(got, right, case(), known), about)

    looks = [
        Look("each rank holds only its part of the weights", "parameters", True, "no-parameters",
             holds=lambda parameters, _: len(parameters) > 0),
        mistake(_unknown, case),
        Look("", "frozen", [], "part-not-trained", fields=lambda names, due: silent(names, due) | {"name": names[0]}),
        mistake(_lost_or_doubled, case),
        recognised("", _views),
        recognised("", _kept),
        mistake_look("the result is that of the uncut layer, on every rank", "shape",
                     lambda at: _shapes(truth(), at[1]), _of_shape),
        recognised("", output),
        Look("the gradient of the input, and of each part of the weights", "changed", False, "layer-overwrites"),
        Look("", "no graph", False, "graph-lost"),
        mistake(_of_input, lambda: truth()["input gradient"]),
        recognised("", _idle),
        mistake(_of_weight, lambda: truth()["gradients"], Idea),
        mistake_look("each rank multiplies only its share", "products", lambda at: (truth()["products"], at[1]),
                     _of_products),
        *_traffic(f"{_times(calls[0])} forward, {_times(calls[1])} backward", "forward", calls[0], named, *sent[:1]),
        *_traffic("", "backward", calls[1], named, *sent[1:]),
        Look("the weights after some steps of training, then with other weights", "stopped", "", "steps-drift",
             fields=lambda step, due: silent(step, due) | {"step": "second", "where": step}),
        recognised("", lambda got: _later(got, truth())),
    ]  # fmt: skip
    return [look for look in looks if look.see != "products" or products]


def _times(n):
    return ("no communication", "one communication")[n] if n < 2 else f"{n} communications"


def _unknown(got, case):
    """The first parameter that is not this rank's part of anything: which mistake is it?"""
    plain, size = {name: p.detach() for name, p in case["plain"].named_parameters()}, got["size"]
    for name, value in got["parameters"].items():
        if name in got["matched"]:
            continue
        about = {"n": size, "where": f"parameter {name}"}
        for form in case["forms"]:
            about["name"] = " and ".join(form.covers)
            for other in range(size):
                if _same(value, form.of(plain, other, size)):
                    return "wrong-part", about | {"other": other}
            if _same(value, form.of(plain, 0, 1)):
                return "not-cut", about
            if form.dim is None and any(_same(value, form.of(plain, 0, 1) / n) for n in range(2, 5)):
                return "bias-over-n", about
            for dim in (0, 1):
                fits = all(plain[n].ndim > dim for n in form.covers)
                if fits and any(_same(value, Form(form.covers, dim).of(plain, other, size)) for other in range(size)):
                    return "wrong-dimension" if form.dim is not None else "bias-cut", about
        return "unknown-parameter", about | {"name": f"{name}, shape {tuple(value.shape)}"}
    return None


def _same(value, wanted):
    return (value.shape == wanted.shape and close(value, wanted)) or (
        value.ndim == 2 and value.t().shape == wanted.shape and close(value.t(), wanted)
    )


def _lost_or_doubled(got, case):
    covered = [name for form, _ in got["matched"].values() for name in form.covers]
    for name, _ in case["plain"].named_parameters():
        optional = got["rank"] and any(form.optional and name in form.covers for form in case["forms"])
        if covered.count(name) > 1 or not (name in covered or optional):
            return "slice-doubled" if name in covered else "slice-lost", {"name": name}
    return None


def _sizes(got):
    """Bytes of each parameter, and of the memory of those that keep more alive."""
    sizes = {name: value.numel() * value.element_size() for name, value in got["parameters"].items()}
    return sizes, {name: held for name, held in got["storage"].items() if held > sizes[name]}


def _views(got):
    sizes, views = _sizes(got)
    return next((("view-keeps-whole", {"name": n, "held": views[n], "size": sizes[n]}) for n in views), None)


def _kept(got):
    sizes, views = _sizes(got)
    much = got["held"] > sum((sizes | views).values()) + SLACK
    return ("whole-kept", {"held": got["held"], "size": sum(sizes.values())}) if much else None


def _shapes(truth, size):
    """Of the result, and of a rank's part of it."""
    *rows, width = truth["output"].shape
    return (*rows, width), (*rows, width // size)


def _of_shape(seen, due):
    right, of_part = due
    about = {"shape": seen, "expected": f"shape {right}", "got": f"shape {seen}"}
    return None if seen == right else ("not-gathered" if seen == of_part else "wrong-shape", about)


def _of_output(got, wanted, case, known):
    """The hint for a wrong result."""
    value, size, outputs = got["output"], got["size"], [one["output"] for one in got["all"]]
    names = "bias", "output.bias", "down.bias"
    bias = next((p.detach() for name, p in case["plain"].named_parameters() if name in names), 0.0)
    if size > 1 and not got["forward"] and _adds_up(outputs, wanted, bias):
        return "not-summed"
    for slug, mistake in known:
        if close(value, mistake(got["rank"], size)):
            return slug
    slug = mistake_of(value, {
        "bias-lost": wanted - bias, "bias-every-rank": wanted + (size - 1) * bias, "summed-too-often": size * wanted,
        "mean-not-sum": wanted / size, "mean-not-sum ": (wanted - bias) / size + bias,
    }, "").strip()  # fmt: skip
    if not slug and not all(close(one, outputs[0]) for one in outputs) and _adds_up(outputs, wanted, bias):
        slug = "not-summed"
    in_order = size == 1 or not close(value.sort(dim=-1).values, wanted.sort(dim=-1).values)
    return slug or ("output-wrong" if in_order else "wrong-order")


def _adds_up(outputs, wanted, bias):
    total = sum(outputs)
    return close(total, wanted) or close(total - (len(outputs) - 1) * bias, wanted)


def _of_input(got, right):
    """What is wrong with the gradient of the input; right: None where it has none."""
    if right is None or close(got.get("input gradient", right), right):  # without one, another rank stopped before it
        return None
    value, size, every = got["input gradient"], got["size"], [one.get("input gradient") for one in got["all"]]
    slug = "input-gradient-wrong"
    if size > 1 and all(one is not None for one in every):
        slug = mistake_of(value, {"entrance-twice": size * right, "input-over-n": right / size}, slug)
        if slug == "input-gradient-wrong":
            slug = mistake_of(sum(every), {"entrance-forgotten": right, "entrance-behind": size * right}, slug)
    return slug, {"n": size, "expected": right, "got": value}


def _idle(got):
    """What this rank holds whole and gets no gradient."""
    idle = [got["matched"][name][0] for name, value in got.get("gradients", {}).items() if value is None]
    idle = [form for form in idle if form.dim is None]
    return ("weight-without-gradient", {"name": " and ".join(idle[0].covers), "rank": got["rank"]}) if idle else None


def _of_weight(got, plain):
    """What is wrong with the first wrong gradient of a parameter. plain: the plain layer's gradients.

    First what all ranks hold whole: if one of these differs between them, the others are wrong for its sake.
    """
    rank, size = got["rank"], got["size"]
    gradients = got.get("gradients", {}).items()
    for name, value in sorted(gradients, key=lambda item: got["matched"][item[0]][0].dim is not None):
        form, transposed = got["matched"][name]
        right = form.of(plain, rank, size)
        about = {"name": " and ".join(form.covers), "rank": rank, "n": size, "expected": right, "got": value}
        if value is None:
            if form.dim is None:
                continue
            return "weight-without-gradient", about | {"expected": ""}
        if close(seen := as_plain(value, transposed, right), right):
            continue
        slug = mistake_of(
            seen, {"weight-times-n": size * right, "weight-over-n": right / size}, "weight-gradient-wrong"
        )
        agree = all(close(value, one["gradients"].get(name, value)) for one in got["all"])
        return "weight-partial" if slug == "weight-gradient-wrong" and form.dim is None and not agree else slug, about
    return None


def _traffic(claim, way, most, named, bytes=None):
    """Looks at the collectives of one way: `most` of them at most, with `bytes` handed in at most."""

    def about(found, wanted):
        return silent(found, wanted) | {"found": found, "wanted": wanted, "way": way}

    def too_many(calls, _):
        names = ", ".join(call.name for call in calls)
        return about(f"{len(calls)} collectives ({names})", f"{most} {'is' if most == 1 else 'are'}")

    def too_much(calls, most):
        return about(volume(calls), most)

    def gathered(calls, enough):
        return about(int(on_the_wire(calls)), int(enough)) | {"name": calls[0].name}

    def enough(at):
        return on_the_wire([Call("all_reduce", bytes, at[1])])

    looks = [
        Look(claim, way, most, "too-many-collectives", holds=lambda calls, most: len(calls) <= most, fields=too_many),
        Look("", way, bytes, named("too-much-volume", {}), holds=lambda calls, most: volume(calls) <= most,
             fields=too_much),
        Look("", way, enough, "gathered-to-sum",
             holds=lambda calls, enough: not calls or on_the_wire(calls) <= 1.05 * enough, fields=gathered),
    ]  # fmt: skip
    return looks[: 1 if bytes is None else 3]


def _of_products(mine, due):
    total, n = due
    if mine <= 1.25 * total / n:  # attention written out multiplies its scores too
        return None
    return "whole-product", silent(mine, due) | {"share": mine / total, "n": n}


def _later(got, truth):
    """The first step that is wrong, or the weights after the last, or the result with other weights."""
    if got["stopped"]:
        return None
    for step, (value, right) in enumerate(zip(got["later"], truth["later"], strict=True)):
        if not close(value, right, max(1e-7, 10 * tolerance(value.dtype))):
            return "steps-drift", {"step": ("second", "third")[step], "expected": right, "got": value}
    for name, value in got["trained"].items():
        form, transposed = got["matched"][name]
        right = form.of(truth["trained"], got["rank"], got["size"])
        if not close(as_plain(value, transposed, right), right, max(1e-7, 10 * tolerance(value.dtype))):
            return "steps-drift", {"step": "last", "expected": right, "got": value, "where": form.covers[0]}
    about = {"expected": truth["other"], "got": got["other"]}
    return None if close(got["other"], truth["other"]) else ("old-weights", about)
