"""Balise 6: a network without layout conversions, against its plain forward pass in float64."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_cores_channels_last.layouts import Layouts, layout
from dlojz_tp.probes.operations import Operations, copies

HINTS = {
    "other-parameters": "Mended must have the parameters of the given network, with the same names, and no others to "
                        "train: the network's weights will be loaded into it.",
    "prepare-returns-model": "prepare() must return the model, an nn.Module.",
    "model-copied": "prepare() returns another model and leaves the given one as it was, so an optimizer made "
                    "before would train the old one. Module.to() converts in place.",
    "not-prepared": "No parameter is in channels_last after prepare(). Modules also have .to(memory_format=…).",
    "parameter-left": "{name} has 4 dimensions and is still contiguous, so it meets channels_last tensors in each "
                      "step. Convert the whole model, not only its convolutions and not only the outermost modules.",
    "weights-replaced": "prepare() changes the values or the names of the parameters. Only their strides may change.",
    "frozen-otherwise": "After prepare(), other parameters require a gradient than before: either frozen ones "
                        "learn, or trainable ones are frozen.",
    "parameters-replaced": "The model has new parameters, so an optimizer made before would train the old ones. "
                           "Convert them in place, as Module.to() does.",
    "pair-of-tensors": "to_device() must return (images, labels).",
    "images-permuted": "The shape of the images has changed. channels_last only affects the strides: the shape "
                       "stays N, C, H, W.",
    "images-contiguous": "The images come out contiguous, so the first convolution has to reorder them.",
    "labels-have-no-channels": "Only tensors with 4 dimensions have channels. Leave the labels' format alone "
                               "({error}).",
    "images-changed": "The values or the dtype of the images or labels have changed.",
    "left-on-cpu": "Images and labels are not both on `device`: {error}",
    "copy-blocks": "Your copy makes the CPU wait until it is done. With non_blocking=True the CPU can go on.",
    "converted-before-copy": "You reorder the images on the CPU, into new memory that is not pinned, so the copy "
                             "to a GPU waits, and the CPU has done the work. Pass device and memory_format to "
                             ".to() together, or reorder after the copy.",
    "images-converted-twice": "The images are reordered {n} times on the way. Once is enough, and none is needed "
                              "if they come in channels_last.",
    "view-fails": "A .view() asks for an order that is not in memory. With channels_last, dimensions N and C "
                  "cannot be merged, and neither can C and H. ({error})",
    "norm-differs": "norm() gives other values. It must normalise the channels of each pixel.",
    "blur-differs": "blur() gives other values. It must smooth each channel separately, with the same kernel.",
    "forward-differs": "The logits differ from those of the given network.",
    "norm-converts": "norm() still reorders its input or its output. Look at the strides of "
    "x.permute(0, 2, 3, 1) when x is in channels_last: there is nothing left to copy.",
    "blur-converts": "blur() still reorders. Merging batch and channels needs the contiguous order; a convolution "
                     "with groups smooths each channel separately without merging.",
    "forward-converts": "The forward pass still reorders: {error}. A .contiguous() without memory_format asks for the old "
    "format, and so do some reshapes.",
    "view-with-gaps": "{name}() returns strides of neither format (a view with gaps, or rows and columns swapped), "
                      "so the next convolution has to copy it first.",
    "blur-computes-more": "blur() does {factor:.0f} times as many operations as it needs. Either it mixes all "
                          "channels with a kernel that is almost all zeros (use groups), or it computes pixels and "
                          "throws them away (use the stride).",
    "loops": "The number of operators grows with the {what}, so there is a Python loop. Let one operator do all "
             "the work.",
    "gradients-differ": "The gradient of {name} differs from that of the given network.",
    "backward-converts": "The backward pass copies into another order: {error}.",
}  # fmt: skip
CLASSES, SIZE = 7, 12
_COPIES = {"aten.clone", "aten._to_copy", "aten.copy_"}
_NAMES = {"stem.weight", "bn.weight", "bn.bias", "position", "body.weight", "body.bias", "ln.weight", "ln.bias",
          "deep.weight", "deep.bias", "head.weight", "head.bias"}  # fmt: skip


def balise_6(Mended, prepare, to_device):  # noqa: N803  (the first answer is a class)
    """The copy, the parts, the whole forward pass, the gradients; at each the conversions are counted."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    yield "prepare() puts everything with 4 dimensions into channels_last, and changes no value"
    _prepared(Mended, prepare, nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    model = _prepared(Mended, prepare)
    yield "to_device() returns the images in channels_last, reordered once, and the labels"
    _copies(to_device)
    yield "norm() and blur() give the same values, with no more operations"
    _parts(model)
    yield "the logits are those of the given network, in float64"
    state = {name: value.detach().double() for name, value in model.state_dict().items()}
    images, labels = _batch()
    double = _prepared(Mended, prepare).double()
    got = _call(double, images.double().to(memory_format=torch.channels_last))
    truth = _plain(state, images.double())
    if not close(got, truth, 1e-7):
        raise Wrong("forward-differs", expected=truth, got=got)
    yield "no loop in Python: the number of operators does not grow"
    _work(model)
    yield "no conversion is left in norm(), in blur() and in the forward pass"
    _no_conversion(model)
    yield "the gradients are those of the given network, and the backward pass converts nothing"
    _gradients(_prepared(Mended, prepare), state, images, labels)


def _make(Mended):  # noqa: N803
    torch.manual_seed(0)
    model = Mended(CLASSES, SIZE)
    missing = _NAMES - set(model.state_dict() if isinstance(model, nn.Module) else ())
    if missing:
        raise Wrong("other-parameters", expected="those of Given", got=f"missing: {', '.join(sorted(missing))}")
    with torch.no_grad():
        for p in (p for name, p in model.named_parameters() if name in _NAMES):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


def _prepared(Mended, prepare, inner=None):  # noqa: N803
    """A model after prepare(), looked at; `inner` is one more module, two levels down."""
    model = _make(Mended)
    if inner is not None:
        model.add_module("more", nn.Sequential(inner))
    frozen = next(model.parameters()).requires_grad_(False)
    learns = [p.requires_grad for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = list(model.parameters())
    given, model = model, prepare(model)
    if model is None:
        raise Wrong("nothing-returned")
    if not isinstance(model, nn.Module):
        raise Wrong("prepare-returns-model", got=model)
    after = model.state_dict()
    if after.keys() != before.keys() or not all(close(after[name], before[name], 0.0) for name in before):
        raise Wrong("weights-replaced")
    if model is not given:
        raise Wrong("model-copied", expected="the model that was given", got="another object")
    if any(p is not q for p, q in zip(held, model.parameters())):
        raise Wrong("parameters-replaced")
    if [p.requires_grad for p in model.parameters()] != learns:
        raise Wrong("frozen-otherwise")
    frozen.requires_grad_(True)
    left = [name for name, value in after.items() if layout(value) == "contiguous"]
    if left and not any(layout(value) == "channels_last" for value in after.values()):
        raise Wrong("not-prepared", got=f"{left[0]}: strides {after[left[0]].stride()}")
    if left:
        raise Wrong("parameter-left", got=f"strides {after[left[0]].stride()}", name=left[0])
    return model


def _batch(n=3):
    generator = torch.Generator().manual_seed(8)
    images = torch.randn(n, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(CLASSES, (n,), generator=generator)


def _moved(to_device, images, labels, device):
    try:
        got = to_device(images, labels, device)
    except (RuntimeError, AssertionError) as error:
        text = str(error).split("\n")[0]
        if "rank 4" in text:
            raise Wrong("labels-have-no-channels", error=text) from error
        if "cuda" in text.lower() or "NVIDIA" in text:
            raise Wrong("left-on-cpu", error=text) from error
        raise
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, tuple | list) or len(got) != 2 or not all(isinstance(x, torch.Tensor) for x in got):
        raise Wrong("pair-of-tensors", expected="(images, labels)", got=got)
    return got


def _copies(to_device):
    images, labels = _batch(5)
    for given, allowed in ((images, 1), (images.to(memory_format=torch.channels_last), 0)):
        with Layouts() as seen:
            got, got_labels = _moved(to_device, given, labels, torch.device("cpu"))
        if got.shape != images.shape:
            raise Wrong("images-permuted", expected=tuple(images.shape), got=tuple(got.shape))
        if not close(got, images, 0.0) or not close(got_labels, labels) or got.dtype != images.dtype:
            raise Wrong("images-changed", expected=images, got=got)
        if layout(got) != "channels_last":
            raise Wrong("images-contiguous", expected="channels_last", got=f"strides {got.stride()}")
        if len(seen.conversions) > allowed:
            raise Wrong("images-converted-twice", got=str(seen.conversions[-1]), n=len(seen.conversions))
    with Operations() as operations:
        got = _moved(to_device, images, labels, torch.device("meta"))
    for name, tensor in zip(("images", "labels"), got, strict=True):
        if tensor.device.type != "meta":
            raise Wrong("left-on-cpu", error=f"{name} on {tensor.device}")
    if layout(got[0]) != "channels_last":
        raise Wrong("images-contiguous", expected="channels_last on the device", got=f"strides {got[0].stride()}")
    if any(name in _COPIES and out[2] == "cpu" and out[1] == images.numel() for name, *_, out in operations.log):
        raise Wrong("converted-before-copy")
    if not all(copies(operations, "cpu", "meta")):
        raise Wrong("copy-blocks")


def _call(part, *inputs):
    """Call a part of the answer; a view that cannot be is named."""
    try:
        got = part(*inputs)
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        if "view size is not compatible" in text:
            raise Wrong("view-fails", error=text.split(".")[0]) from error
        raise
    if got is None:
        raise Wrong("nothing-returned")
    return got


def _features(n=2, channels=24, size=10):
    x = torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(9))
    return x.to(memory_format=torch.channels_last)


def _parts(model):
    x = _features()
    state = {name: value.detach().double() for name, value in model.state_dict().items()}
    for name, truth in (("norm", _norm(state, x.double())), ("blur", _blur(x.double()))):
        with torch.no_grad():
            got = _call(getattr(model, name), x)
        if not close(got, truth, 1e-4):
            raise Wrong(f"{name}-differs", expected=truth.float(), got=got, where=f"{name}(), input {tuple(x.shape)}")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.blur(x)
    flop, needed = counter.get_total_flops(), 2 * 9 * x.numel() // 4
    if flop > 1.5 * needed:
        raise Wrong("blur-computes-more", expected=f"{needed:,} FLOP", got=f"{flop:,} FLOP", factor=flop / needed)


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


def _no_conversion(model):
    images, x = _batch()[0].to(memory_format=torch.channels_last), _features()
    for name in ("norm", "blur"):
        with Layouts() as seen:
            got = _call(getattr(model, name), x)
        if seen.conversions:
            raise Wrong(f"{name}-converts", expected="0 conversions", got=_listed(seen.conversions))
        if not got.is_contiguous(memory_format=torch.channels_last):
            slug = f"{name}-converts" if layout(got) == "contiguous" else "view-with-gaps"
            raise Wrong(slug, expected="output in channels_last", got=f"strides {got.stride()}", name=name)
    with Layouts() as seen:
        _call(model, images)
    if seen.conversions:
        raise Wrong("forward-converts", expected="0 conversions", got=_listed(seen.conversions),
                    error=f"{len(seen.conversions)} conversions")  # fmt: skip


def _listed(conversions):
    return "\n".join(str(conversion) for conversion in conversions[:4])


def _work(model):
    x = _features()
    for what, larger in (("batch", _features(n=6)), ("size of the image", _features(size=20))):
        for part in (model.norm, model.blur):
            counts = []
            for features in (x, larger):
                with Operations() as operations, torch.no_grad():
                    part(features)
                counts.append(operations.total)
            if counts[1] > counts[0]:
                raise Wrong("loops", expected=f"{counts[0]} operators", got=f"{counts[1]}", what=what)
    with Operations() as operations, torch.no_grad():
        model.blur(x)
    if operations.total > x.shape[1]:
        raise Wrong("loops", expected="a few operators", got=f"{operations.total}", what="channels")


def _gradients(model, state, images, labels):
    for value in state.values():
        value.requires_grad_(value.is_floating_point())
    F.cross_entropy(_plain(state, images.double()), labels).backward()
    images = images.to(memory_format=torch.channels_last)
    loss = F.cross_entropy(_call(model, images), labels)
    with Layouts() as seen:
        loss.backward()
    for name, p in model.named_parameters():
        wanted = state[name].grad
        if name not in _NAMES and not p.requires_grad:
            continue
        if name not in _NAMES:
            raise Wrong("other-parameters", expected="those of Given", got=f"{name} is new")
        if p.grad is None or not close(p.grad, wanted, 1e-4):
            raise Wrong(
                "gradients-differ", expected=wanted.float(), got=p.grad if p.grad is not None else "none", name=name
            )
    if seen.conversions:
        raise Wrong("backward-converts", expected="0 conversions", got=_listed(seen.conversions),
                    error=f"{len(seen.conversions)} conversions")  # fmt: skip
