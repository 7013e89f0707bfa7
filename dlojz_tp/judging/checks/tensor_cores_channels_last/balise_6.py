"""Balise 6: a network without layout conversions, against its plain forward pass in float64."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most, judged, silent
from dlojz_tp.measure.layouts import Layouts, layout
from dlojz_tp.measure.operations import Operations, copies

CLASSES, SIZE = 7, 12
FLOP = 2 * 9 * 24 * 10 * 10 // 2  # that blur() needs
COPIES = {"aten.clone", "aten._to_copy", "aten.copy_"}
NAMES = {"stem.weight", "bn.weight", "bn.bias", "position", "body.weight", "body.bias", "ln.weight", "ln.bias",
         "deep.weight", "deep.bias", "head.weight", "head.bias"}  # fmt: skip
PARTS, PAIR = ("norm", "blur"), "a pair of tensors"
COPY_ERRORS = {"rank 4": "labels-have-no-channels", "cuda": "left-on-cpu", "nvidia": "left-on-cpu"}
VIEW_ERRORS = ("view size is not compatible",)


def observe(Mended, prepare, to_device):  # noqa: N803  (the first answer is a class)
    """The model, the copy, the parts, the whole forward pass, the gradients; at each the conversions are counted."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    prepared = functools.partial(_prepared, Mended, prepare)
    yield from prepared("deep", nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    model = yield from prepared("model")
    yield from _copies(to_device)
    state = {name: value.detach().double() for name, value in model.state_dict().items()}
    x, due = _features(), {"norm": functools.partial(_norm, state), "blur": _blur}
    for name in PARTS:
        with torch.no_grad():
            got = _called(VIEW_ERRORS, getattr(model, name), x)
        yield {name: (got, due[name](x.double()))}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.blur(x)
    yield {"flop": counter.get_total_flops()}
    images, labels = _batch()
    double = (yield from prepared("double")).double()
    got = _called(VIEW_ERRORS, double, images.double().to(memory_format=torch.channels_last))
    yield {"logits": (got, _plain(state, images.double()))}
    for what, larger in (("batch", _features(n=6)), ("size of the image", _features(size=20))):
        yield {what: [-_operators(part, x) + _operators(part, larger) for part in (model.norm, model.blur)]}
    yield {"channels": _operators(model.blur, x)}
    last = images.to(memory_format=torch.channels_last)
    for name, part, given in (("norm", model.norm, x), ("blur", model.blur, x), ("forward", model, last)):
        with Layouts() as seen:
            got = part(given)
        yield {("conversions", name): seen.conversions, ("out", name): got}
    yield from _gradients((yield from prepared("gradients")), state, images, labels)


def _prepared(Mended, prepare, key, inner=None):  # noqa: N803
    """A model after prepare(), looked at; `inner` is one more module, two levels down."""
    torch.manual_seed(0)
    model = Mended(CLASSES, SIZE)
    yield {("missing", key): sorted(NAMES - set(model.state_dict() if isinstance(model, nn.Module) else ()))}
    with torch.no_grad():
        for p in (p for name, p in model.named_parameters() if name in NAMES):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    if inner is not None:
        model.add_module("more", nn.Sequential(inner))
    next(model.parameters()).requires_grad_(False)
    learns = [p.requires_grad for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given, held, model = model, list(model.parameters()), prepare(model)
    yield {("kind", key): model if model is None else isinstance(model, nn.Module)}
    after = model.state_dict()
    kept = after.keys() == before.keys() and all(close(after[name], before[name], 0.0) for name in before)
    yield {("kept", key): kept}
    other = {
        "model-copied": model is not given,
        "parameters-replaced": any(p is not q for p, q in zip(held, model.parameters())),
        "frozen-otherwise": [p.requires_grad for p in model.parameters()] != learns,
    }
    yield {
        ("other", key): [what for what in other if other[what]],
        ("strides", key): {name: (layout(one), one.stride()) for name, one in after.items()},
    }
    for p, free in zip(model.parameters(), [True, *learns[1:]]):
        p.requires_grad_(free)
    return model.to(memory_format=torch.channels_last)


def _batch(n=3):
    generator = torch.Generator().manual_seed(8)
    images = torch.randn(n, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(CLASSES, (n,), generator=generator)


def _copies(to_device):
    """On the CPU images of both formats; on the meta device."""
    images, labels = _batch(5)
    for key, given in (("contiguous", images), ("channels_last", images.to(memory_format=torch.channels_last))):
        with Layouts() as seen:
            got = _called(COPY_ERRORS, to_device, given, labels, torch.device("cpu"))
        yield {("pair", key): _pair(got), ("moved", key): got, ("twice", key): seen.conversions}
    with Operations() as operations:
        got = _called(COPY_ERRORS, to_device, images, labels, torch.device("meta"))
    yield {("pair", "meta"): _pair(got), ("moved", "meta"): got}
    yield {"not there": [f"{name} on {one.device}" for name, one in zip(("images", "labels"), got) if not one.is_meta]}
    made = [out[1:3] for name, *_, out in operations.log if name in COPIES]
    yield {"before": (images.numel(), "cpu") in made, "waits": not all(copies(operations, "cpu", "meta"))}


def _pair(got):
    if isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(x, torch.Tensor) for x in got):
        return PAIR
    return got if got is None or isinstance(got, str) else type(got).__name__


def _called(known, part, *given):
    """What a part of the answer gives; in words, an error that is known for one of these."""
    try:
        return part(*given)
    except (RuntimeError, AssertionError) as error:
        text = str(error).split("\n")[0]
        if not any(word in text.lower() for word in known):
            raise
        return text


def _features(n=2, channels=24, size=10):
    x = torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(9))
    return x.to(memory_format=torch.channels_last)


def _operators(part, x):
    with Operations() as operations, torch.no_grad():
        part(x)
    return operations.total


def _norm(state, x):
    mean = x.mean(1, keepdim=True)
    spread = ((x - mean) ** 2).mean(1, keepdim=True)
    scale, shift = (state[f"ln.{name}"].reshape(1, -1, 1, 1) for name in ("weight", "bias"))
    return (x - mean) / (spread + 1e-5).sqrt() * scale + shift


def _blur(x):
    """Every second pixel of x, smoothed with 1 2 1 in both directions, by shifted sums."""
    around = F.pad(x, (1, 1, 1, 1))
    h, w = x.shape[-2:]
    parts = [
        (2 - abs(i - 1)) * (2 - abs(j - 1)) / 16 * around[..., i : i + h, j : j + w] for i in range(3) for j in range(3)
    ]
    return sum(parts)[..., ::2, ::2]


def _plain(state, images):
    """The given network's forward pass, in training mode."""
    x = F.conv2d(images, state["stem.weight"], padding=1)
    x = F.relu(F.batch_norm(x, None, None, state["bn.weight"], state["bn.bias"], training=True)) + state["position"]
    x = F.relu(_norm(state, F.conv2d(x, state["body.weight"], state["body.bias"], padding=1)))
    x = F.relu(F.conv2d(_blur(x), state["deep.weight"], state["deep.bias"], padding=1))
    return x.mean((2, 3)) @ state["head.weight"].T + state["head.bias"]


def _gradients(model, state, images, labels):
    """Of each parameter that learns: (name, its gradient, the due one); the conversions of the backward pass."""
    for value in state.values():
        value.requires_grad_(value.is_floating_point())
    F.cross_entropy(_plain(state, images.double()), labels).backward()
    loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
    with Layouts() as seen:
        loss.backward()
    found = [
        (name, p.grad, state[name].grad) for name, p in model.named_parameters() if name in NAMES or p.requires_grad
    ]
    yield {"gradients": found, ("conversions", "backward"): seen.conversions}


def _is_prepared(claim, key):
    def left(seen):
        return [name for name, (kind, _) in seen.items() if kind == "contiguous"]

    def left_hint(seen, _):
        return "parameter-left" if any(kind == "channels_last" for kind, _ in seen.values()) else "not-prepared"

    def left_fields(seen, _):
        name = left(seen)[0]
        return {"name": name, "expected": "channels_last", "got": f"{name}: strides {seen[name][1]}"}

    return [
        Look(claim, ("missing", key), [], "other-parameters",
             fields=lambda seen, _: {"got": f"missing: {', '.join(seen)}"}),
        Look("", ("kind", key), True, "prepare-returns-model"), Look("", ("kept", key), True, "weights-replaced"),
        Look("", ("other", key), [], lambda seen, _: seen[0], fields=silent),
        Look("", ("strides", key), {}, left_hint, holds=lambda seen, _: not left(seen), fields=left_fields),
    ]  # fmt: skip


def _is_pair(claim, key):
    def hint(seen, _):
        return next((slug for word, slug in COPY_ERRORS.items() if word in seen.lower()), "pair-of-tensors")

    return Look(claim, ("pair", key), PAIR, hint, fields="error")


def _copied(claim, key, most):
    def kept(seen, due):
        return close(seen[0], due[0], 0.0) and close(seen[1], due[1]) and seen[0].dtype == due[0].dtype

    images = ("moved", key)
    return [
        _is_pair(claim, key),
        Look("", lambda o: tuple(o[images][0].shape), (5, 3, SIZE, SIZE), "images-permuted"),
        Look("", images, lambda _: _batch(5), "images-changed", holds=kept),
        Look("", lambda o: layout(o[images][0]), "channels_last", "images-contiguous"),
        Look("", ("twice", key), most, "images-converted-twice", holds=lambda seen, due: len(seen) <= due,
             fields=_listed),
    ]  # fmt: skip


def _alike(claim, key, tol, hint):
    """A look at (what a part of the answer gives, what it must give)."""

    def slug(seen, _):
        return "nothing-returned" if seen[0] is None else "view-fails" if isinstance(seen[0], str) else hint

    def fields(seen, _):
        return {"expected": seen[1].float(), "got": seen[0], "error": str(seen[0]).split(".")[0]}

    return Look(claim, key, "as the given network", slug, holds=lambda seen, _: close(*seen, tol), fields=fields)


def _grows(claim, what):
    return Look(claim, what, 0, "loops", holds=at_most, fields={"what": what})


def _more(seen, _):
    return {"factor": seen / FLOP, "expected": f"{FLOP:,} FLOP", "got": f"{seen:,} FLOP"}


def _listed(seen, _):
    got = "\n".join(map(str, seen[:4]))
    return {"n": len(seen), "error": f"{len(seen)} conversions", "expected": "0 conversions", "got": got}


def _converts(claim, name):
    return Look(claim, ("conversions", name), [], f"{name}-converts", fields=_listed)


def _in_format(name):
    def hint(seen, _):
        return f"{name}-converts" if layout(seen) == "contiguous" else "view-with-gaps"

    def fields(seen, _):
        return {"name": name, "expected": "output in channels_last", "got": f"strides {seen.stride()}"}

    last = {"memory_format": torch.channels_last}
    return Look("", ("out", name), "", hint, holds=lambda seen, _: seen.is_contiguous(**last), fields=fields)


def _other(seen):
    """The first parameter whose gradient is another, or that is new: (name, gradient, due one)."""
    return next((one for one in seen if one[0] not in NAMES or one[1] is None or not close(*one[1:], 1e-4)), None)


def _gradient_hint(seen, _):
    return "gradients-differ" if _other(seen)[0] in NAMES else "other-parameters"


def _gradient_fields(seen, _):
    name, got, due = _other(seen)
    if name not in NAMES:
        return {"got": f"{name} is new"}
    return {"name": name, "expected": due.float(), "got": "none" if got is None else got}


LOOKS = [
    *_is_prepared("prepare() puts everything with 4 dimensions into channels_last, and changes no value", "deep"),
    *_is_prepared("", "model"),
    *_copied("to_device() returns the images in channels_last, reordered once, and the labels", "contiguous", 1),
    *_copied("", "channels_last", 0), _is_pair("", "meta"),
    Look("", "not there", [], "left-on-cpu", fields=lambda seen, _: {"error": seen[0]}),
    Look("", lambda o: layout(o["moved", "meta"][0]), "channels_last", "images-contiguous"),
    Look("", "before", False, "converted-before-copy"), Look("", "waits", False, "copy-blocks"),
    _alike("norm() and blur() give the same values, with no more operations", "norm", 1e-4, "norm-differs"),
    _alike("", "blur", 1e-4, "blur-differs"),
    Look("", "flop", 1.5 * FLOP, "blur-computes-more", holds=at_most, fields=_more),
    *_is_prepared("the logits are those of the given network, in float64", "double"),
    _alike("", "logits", 1e-7, "forward-differs"),
    _grows("no loop in Python: the number of operators does not grow", "batch"), _grows("", "size of the image"),
    Look("", "channels", 24, "loops", holds=at_most, fields={"what": "channels"}),
    _converts("no conversion is left in norm(), in blur() and in the forward pass", "norm"), _in_format("norm"),
    _converts("", "blur"), _in_format("blur"), _converts("", "forward"),
    *_is_prepared("the gradients are those of the given network, and the backward pass converts nothing", "gradients"),
    Look("", "gradients", "those of Given", _gradient_hint, holds=lambda seen, _: not _other(seen),
         fields=_gradient_fields),
    _converts("", "backward"),
]  # fmt: skip


def balise_6(Mended, prepare, to_device):  # noqa: N803
    yield from judged(LOOKS, observe, Mended, prepare, to_device)
