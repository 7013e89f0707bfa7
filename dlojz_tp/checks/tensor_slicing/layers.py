"""Judge what `exercise` reported of a sliced layer: its slices, result, gradients, traffic, training."""

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_slicing.common import SLACK, Form, as_plain
from dlojz_tp.probes.traffic import Call, on_the_wire, volume

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


def judge_layer(every, truth, case, *, calls=None, sizes_of=None, known=None):
    """Yield what is looked at in the reports of `exercise`, raise Wrong where one fails.

    every: list of (size of the group, rank in it, report), the largest first. truth: what `common.truth` gives. calls: (forward, backward) at most.
    sizes_of: (world size) -> (forward, backward) bytes handed in at most. known: (slug, function of rank and size that gives
    the output of that mistake).
    """
    yield "each rank holds only its part of the weights"
    for size, rank, got in every:
        _slices(got, case, rank, size)
    yield "the result is that of the uncut layer, on every rank"
    for size, rank, got in every:
        _output(got, truth, case, rank, size, every, known or ())
    yield "the gradient of the input, and of each part of the weights"
    for size, rank, got in every:
        if got[0]["changed"]:
            raise Wrong("layer-overwrites", where=f"rank {rank} of {size}")
    for size, rank, got in every:
        _gradients(got, truth, case, rank, size, every)
    if truth[0]["products"]:
        yield "each rank multiplies only its share"
        for size, rank, got in every:
            share, whole = got[0]["products"], truth[0]["products"]
            if share > 1.25 * whole / size:  # attention written out multiplies its scores too
                raise Wrong("whole-product", share=share / whole, n=size, where=f"rank {rank} of {size}")
    if calls:
        yield f"{_times(calls[0])} forward, {_times(calls[1])} backward"
        for size, rank, got in every:
            _traffic(got[0], calls, sizes_of(size) if sizes_of else None, f"rank {rank} of {size}", size)
    yield "the weights after some steps of training, then with other weights"
    for size, rank, got in every:
        _training(got, truth, rank, size)


def _times(n):
    return ("no communication", "one communication")[n] if n < 2 else f"{n} communications"


def _slices(got, case, rank, size):
    where = f"rank {rank} of {size}"
    whole = {name: p.detach() for name, p in case["plain"].named_parameters()}
    if not got["parameters"]:
        raise Wrong("no-parameters", where=where)
    for name, value in got["parameters"].items():
        if name not in got["matched"]:
            _name_mistake(name, value, case["forms"], whole, rank, size)
    if got["frozen"]:
        raise Wrong("part-not-trained", name=got["frozen"][0], where=where)
    covered = [name for form, _ in got["matched"].values() for name in form.covers]
    for name in whole:
        if name not in covered:
            optional = any(form.optional and name in form.covers for form in case["forms"])
            if not (optional and rank):
                raise Wrong("slice-lost", name=name, where=where)
        elif covered.count(name) > 1:
            raise Wrong("slice-doubled", name=name, where=where)
    sizes = {name: value.numel() * value.element_size() for name, value in got["parameters"].items()}
    for name, held in got["storage"].items():
        if held > sizes[name]:
            raise Wrong("view-keeps-whole", name=name, held=held, size=sizes[name], where=where)
    if got["held"] > sum(sizes.values()) + SLACK:
        raise Wrong("whole-kept", held=got["held"], size=sum(sizes.values()), where=where)


def _name_mistake(name, value, forms, whole, rank, size):
    """Raise Wrong for a parameter that is not this rank's part of anything: which mistake is it?"""
    where = f"rank {rank} of {size}, parameter {name}"
    for form in forms:
        held = " and ".join(form.covers)
        for other in range(size):
            if _same(value, form.of(whole, other, size)):
                raise Wrong("wrong-part", name=held, other=other, where=where)
        if _same(value, form.of(whole, 0, 1)):
            raise Wrong("not-cut", name=held, n=size, where=where)
        if form.dim is None and any(_same(value, form.of(whole, 0, 1) / n) for n in range(2, 5)):
            raise Wrong("bias-over-n", name=held, n=size, where=where)
        for dim in (0, 1):
            fits = all(whole[n].ndim > dim for n in form.covers)
            if fits and any(_same(value, Form(form.covers, dim).of(whole, other, size)) for other in range(size)):
                raise Wrong("wrong-dimension" if form.dim is not None else "bias-cut", name=held, where=where)
    raise Wrong("unknown-parameter", name=f"{name}, shape {tuple(value.shape)}", where=where)


def _same(value, wanted):
    return (value.shape == wanted.shape and close(value, wanted)) or (
        value.ndim == 2 and value.t().shape == wanted.shape and close(value.t(), wanted)
    )


def _output(got, truth, case, rank, size, every, known):
    where, value, wanted = f"rank {rank} of {size}", got[0]["output"], truth[0]["output"]
    if value is None:
        raise Wrong("nothing-returned", where=where)
    if not isinstance(value, torch.Tensor) or value.shape != wanted.shape:
        shape = tuple(getattr(value, "shape", ()))
        part = shape == (*wanted.shape[:-1], wanted.shape[-1] // size)
        raise Wrong("not-gathered" if part else "wrong-shape", shape=shape, where=where, expected=f"shape {tuple(wanted.shape)}",
                    got=f"shape {shape}")  # fmt: skip
    if close(value, wanted):
        return
    bias = next(
        (p.detach() for n, p in case["plain"].named_parameters() if n in ("bias", "output.bias", "down.bias")), None
    )
    outputs = [report[0]["output"] for n, _, report in every if n == size]
    slug = next((s for s, mistake in known if close(value, mistake(rank, size))), None)
    if size > 1 and not got[0]["forward"] and _adds_up(outputs, wanted, bias):
        slug = "not-summed"
    if slug is None:
        slug = "output-wrong"
        if bias is not None and close(value, wanted - bias):
            slug = "bias-lost"
        elif size > 1 and bias is not None and close(value, wanted + (size - 1) * bias):
            slug = "bias-every-rank"
        elif size > 1 and close(value, size * wanted):
            slug = "summed-too-often"
        elif size > 1 and any(close(value, (wanted - b) / size + b) for b in (0, bias) if b is not None):
            slug = "mean-not-sum"
        elif size > 1 and not all(close(o, outputs[0]) for o in outputs) and _adds_up(outputs, wanted, bias):
            slug = "not-summed"
        elif size > 1 and close(value.sort(dim=-1).values, wanted.sort(dim=-1).values):
            slug = "wrong-order"
    raise Wrong(slug, n=size, expected=wanted, got=value, where=where)


def _adds_up(outputs, wanted, bias):
    total, n = sum(outputs), len(outputs) - 1
    return close(total, wanted) or (bias is not None and close(total - n * bias, wanted))


def _gradients(got, truth, case, rank, size, every):
    where, run, wanted = f"rank {rank} of {size}", got[0], truth[0]
    reports = [report for n, _, report in every if n == size]
    if wanted["input gradient"] is not None:
        value, right = run["input gradient"], wanted["input gradient"]
        if value is None:
            raise Wrong("graph-lost", where=where)
        if not close(value, right):
            slug = "input-gradient-wrong"
            if size > 1 and all(r[0]["input gradient"] is not None for r in reports):
                if close(value, size * right):
                    slug = "entrance-twice"
                elif close(value, right / size):
                    slug = "input-over-n"
                elif close(total := sum(r[0]["input gradient"] for r in reports), right):
                    slug = "entrance-forgotten"
                elif close(total, size * right):
                    slug = "entrance-behind"
            raise Wrong(slug, n=size, expected=right, got=value, where=where)
    # first what all ranks hold whole: if one of these differs between them, the others are wrong for its sake
    for name, value in sorted(run["gradients"].items(), key=lambda item: got["matched"][item[0]][0].dim is not None):
        form, transposed = got["matched"][name]
        right, held = form.of(wanted["gradients"], rank, size), " and ".join(form.covers)
        if value is None:
            raise Wrong("weight-without-gradient", name=held, rank=rank, where=where)
        if close(as_plain(value, transposed, right), right):
            continue
        slug = "weight-gradient-wrong"
        if size > 1 and close(as_plain(value, transposed, right), size * right):
            slug = "weight-times-n"
        elif size > 1 and close(as_plain(value, transposed, right), right / size):
            slug = "weight-over-n"
        elif form.dim is None and not all(close(value, r[0]["gradients"].get(name, value)) for r in reports):
            slug = "weight-partial"
        raise Wrong(slug, name=held, n=size, expected=right, got=value, where=where)


def _traffic(run, most, volumes, where, size):
    """Refuse more than `most` (forward, backward) collectives, or more bytes than `volumes`."""
    for k, way in enumerate(("forward", "backward")):
        sent = run[way] if size > 1 else []
        if len(sent) > most[k]:
            named = ", ".join(call.name for call in sent)
            enough = f"{most[k]} {'is' if most[k] == 1 else 'are'}"
            raise Wrong(
                "too-many-collectives", found=f"{len(sent)} collectives ({named})", way=way, wanted=enough, where=where
            )
        if volumes and volume(sent) > volumes[k]:
            raise Wrong("too-much-volume", found=volume(sent), wanted=volumes[k], way=way, where=where)
        if volumes and sent:
            found, enough = (
                on_the_wire([call._replace(group=size) for call in sent]),
                on_the_wire([Call("all_reduce", volumes[k], size)]),
            )
            if found > 1.05 * enough:
                name = sent[0].name
                raise Wrong("gathered-to-sum", name=name, found=int(found), wanted=int(enough), way=way, where=where)


def _training(got, truth, rank, size):
    where = f"rank {rank} of {size}"
    if got["stopped"]:
        raise Wrong("steps-drift", step="second", where=f"{where}, {got['stopped']}")
    for step in range(1, sum(isinstance(key, int) for key in truth)):
        if not close(got[step]["output"], truth[step]["output"], 1e-7):
            raise Wrong("steps-drift", step=("second", "third")[step - 1], expected=truth[step]["output"],
                        got=got[step]["output"], where=where)  # fmt: skip
    for name, value in got["trained"].items():
        form, transposed = got["matched"][name]
        right = form.of(truth["trained"], rank, size)
        if not close(as_plain(value, transposed, right), right, 1e-7):
            raise Wrong("steps-drift", step="last", expected=right, got=value, where=f"{where}, {form.covers[0]}")
    if not close(got["other"], truth["other"]):
        raise Wrong("old-weights", expected=truth["other"], got=got["other"], where=where)


def refuse_sizes(every, key, what):
    """Raise Wrong where a size that does not divide was accepted; reports hold {what was tried: error or ""} in `key`."""
    for size, rank, got in every:
        for n, error in got[key].items():
            if not error:
                raise Wrong("size-accepted", what=what.format(n=n), n=size, where=f"rank {rank} of {size}")
