"""Balise 5: the two memory formats by hand, against the strides of real tensors."""

import torch

from dlojz_tp.checking import Wrong, close
from dlojz_tp.checks.tensor_cores_channels_last.numbers import several
from dlojz_tp.probes.operations import Operations

HINTS = {
    "not-four-strides": "Strides are four numbers, in the order N, C, H, W, whatever the order in memory.",
    "strides-as-listed-nhwc": "These are the right numbers in the order N, H, W, C. The shape stays N, C, H, W, and so do the "
    "strides: the second one belongs to the channel.",
    "shape-not-strides": "These are sizes. A stride is the distance, in elements, to the next index of that dimension.",
    "height-for-width": "A step down skips a whole row. Its length is the *width*, and height and width differ here.",
    "format-ignored": "You return the same strides for both formats.",
    "channels-forgotten": "In channels_last the channels of a pixel are next to each other, so a step to the right "
                          "skips all of them.",
    "strides-in-bytes": "PyTorch counts strides in elements, not in bytes.",
    "wrong-strides": "These strides are not those of a {format} tensor.",
    "not-a-set": "Return a set: a tensor can be in neither, one or both of the formats.",
    "both-formats": "This tensor is in both formats: with one channel, or one pixel, the two orders are the same.",
    "size-one-counts": "The stride of a dimension of size 1 is never used, so it can have any value. Ignore such "
                       "dimensions.",
    "one-stride-looked-at": "A single stride is not enough: these elements have gaps, or another order. All "
                            "dimensions longer than 1 must fit.",
    "formats-exchanged": "You have swapped the two names.",
    "wrong-formats": "You return the wrong formats for this tensor.",
    "input-returned": "This is still the input's own memory, and its format has not changed.",
    "shape-permuted": "The shape has changed. A channels_last tensor still has the shape N, C, H, W: only its "
                      "strides differ.",
    "still-contiguous": "The elements are still in the old order. permute alone only makes a view: you have to "
                        "move the elements.",
    "memory-reread": "The strides are right, but you have not moved the elements. The old memory is read in a new "
                     "order and gives other values.",
    "memory-format-asked": "You ask PyTorch for the format ({error}). Here you do by hand what it does.",
    "copied-twice": "You copy the elements {n} times. Once is enough.",
    "copy-elsewhere": "Here x is not in the CPU's memory, and you make no copy on its device ({error}). Create the "
                      "copy where x is, with device=x.device or a method of x, without NumPy.",
    "wrong-copy": "The copy has other values than the input.",
    "input-changed": "You change the input, its values or its strides. Other code that holds it sees another tensor.",
    "dtype-not-kept": "The copy has another dtype than the input.",
}  # fmt: skip
SHAPES = [(2, 3, 4, 5), (7, 64, 9, 6), (1, 3, 224, 200), (5, 1, 6, 7), (4, 8, 1, 1), (1, 1, 1, 1), (3, 5, 1, 8)]


def balise_5(strides_of, formats_of, channels_last_copy):
    """Shapes with dimensions of size 1; views with gaps; a copy that moves each element once."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    yield "strides of a contiguous tensor"
    for shape in SHAPES:
        _strides(strides_of, shape, False)
    yield "strides of a channels_last tensor, in the order N, C, H, W"
    for shape in SHAPES:
        _strides(strides_of, shape, True)
    yield "a format is recognised by its strides"
    for tensor in (_tensor((2, 3, 4, 5), False), _tensor((2, 3, 4, 5), True), _tensor((1, 6, 7, 5), True)):
        _formats(formats_of, tensor)
    yield "one channel, or one pixel: both formats"
    for shape in ((5, 1, 6, 7), (4, 8, 1, 1), (1, 1, 1, 1)):
        _formats(formats_of, _tensor(shape, False))
        _formats(formats_of, _tensor(shape, True))
    yield "views with gaps or another order: neither"
    nhwc, nchw = _tensor((2, 6, 4, 5), True), _tensor((2, 6, 4, 5), False)
    for view in (nhwc[:, :3], nchw[:, :, ::2], nchw.transpose(2, 3), nhwc[..., 1:], nchw[:, ::2], nhwc.transpose(0, 1),
                 nchw[:, :, :, :1], nhwc[:1], nchw[:, :1], nchw[1:, 2:3, :, :]):  # fmt: skip
        _formats(formats_of, view)
    yield "the copy has the same shape and values, and the other order in memory"
    for shape in SHAPES[:3]:
        _copy(channels_last_copy, _values(shape))
    yield "each element is moved once, without asking PyTorch for the format"
    _one_move(channels_last_copy)
    yield "views, one channel, one pixel, half precision"
    base = _values((3, 4, 6, 5))
    for x in (base[:, ::2], base.transpose(2, 3), base[:1], _values((4, 8, 1, 1)), _values((5, 1, 6, 7)),
              base.bfloat16(), base.to(memory_format=torch.channels_last), base.long(),
              base.to(memory_format=torch.channels_last)[:, :2],  # channels lie side by side, pixels farther apart
              base.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1),  # channels first, then the height
              _values((5, 1, 6, 7)).transpose(2, 3)):  # fmt: skip
        _copy(channels_last_copy, x)
    yield "on the device of x, whichever that is"
    try:
        got = channels_last_copy(torch.empty(2, 3, 4, 5, device="meta"))
        elsewhere = "" if got.is_meta else f"the copy is on {got.device}"
    except Exception as error:
        elsewhere = f"{type(error).__name__}: {error}".split("\n")[0]
    if elsewhere:
        raise Wrong("copy-elsewhere", error=elsewhere)


def _tensor(shape, channels_last):
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, device="meta", memory_format=wanted)


def _values(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(6))


def _strides(strides_of, shape, channels_last):
    got = strides_of(tuple(shape), channels_last)
    truth = _tensor(shape, channels_last).stride()
    where = f"shape {shape}, {'channels_last' if channels_last else 'contiguous'}"
    got = several(got, 4, "not-four-strides", str(truth))
    got = tuple(int(s) if float(s).is_integer() else s for s in got)
    if got == truth:
        return
    n, c, h, w = shape
    mistakes = {
        "format-ignored": _tensor(shape, not channels_last).stride(),
        "strides-as-listed-nhwc": (h * w * c, w * c, c, 1),
        "shape-not-strides": shape,
        "height-for-width": (c * h * w, 1, h * c, c) if channels_last else (c * h * w, h * w, h, 1),
        "channels-forgotten": (c * h * w, 1, w, 1),
        "strides-in-bytes": tuple(4 * s for s in truth),
    }
    also = {"shape-not-strides": (n, h, w, c), "channels-forgotten": (c * h * w, 1, w, c)}
    slug = next((slug for slug, value in (*mistakes.items(), *also.items()) if got == value), "wrong-strides")
    name = "channels_last" if channels_last else "contiguous"
    raise Wrong(slug, expected=str(truth), got=str(got), where=where, format=name)


def _formats(formats_of, tensor):
    shape, strides = tuple(tensor.shape), tensor.stride()
    kinds = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    truth = {name for name, kind in kinds.items() if tensor.is_contiguous(memory_format=kind)}
    got = formats_of(shape, strides)
    if got is None:
        raise Wrong("nothing-returned")
    if not isinstance(got, set | frozenset | list | tuple) or any(x not in list(kinds) for x in got):
        raise Wrong("not-a-set", expected=str(truth or "an empty set"), got=got)
    got = set(got)
    if got == truth:
        return
    slug = "wrong-formats"
    if len(truth) == 2:
        # the plain strides of this shape have only themselves in their favour; a look at them tells the mistake
        slug = "both-formats" if len(got) == 1 else "size-one-counts"
    elif not truth:
        slug = "one-stride-looked-at"
    elif 1 in shape and not got:
        slug = "size-one-counts"
    elif not got & truth and len(got) == 1:
        slug = "formats-exchanged"
    raise Wrong(slug, expected=str(truth or "neither: an empty set"), got=str(got or "an empty set"),
                where=f"shape {shape}, strides {strides}")  # fmt: skip


def _copy(channels_last_copy, x):
    before, strides = x.clone(), x.stride()
    got = channels_last_copy(x)
    if got is None:
        raise Wrong("nothing-returned")
    where = f"shape {tuple(x.shape)}, strides {strides}"
    if not isinstance(got, torch.Tensor) or got.shape != x.shape:
        shape = tuple(got.shape) if isinstance(got, torch.Tensor) else got
        raise Wrong("shape-permuted", expected=tuple(x.shape), got=shape, where=where)
    if got.dtype != x.dtype:
        raise Wrong("dtype-not-kept", expected=x.dtype, got=got.dtype, where=where)
    if not close(x, before, 0.0) or x.stride() != strides:
        raise Wrong("input-changed", where=where)
    in_format = got.is_contiguous(memory_format=torch.channels_last)
    if not close(got, before, 0.0):
        raise Wrong("memory-reread" if in_format else "wrong-copy", expected=before, got=got, where=where)
    if not in_format:
        slug = "input-returned" if got is x or got.data_ptr() == x.data_ptr() else "still-contiguous"
        truth = _tensor(x.shape, True).stride()
        raise Wrong(slug, expected=f"strides {truth}", got=f"strides {got.stride()}", where=where)


def _one_move(channels_last_copy):
    x = _values((2, 6, 4, 5))
    for given in (x, x[:, ::2], x.to(memory_format=torch.channels_last)):
        _moves_of(channels_last_copy, given)


def _moves_of(channels_last_copy, x):
    with Operations() as operations:
        channels_last_copy(x)
    asked = [(name, kwargs) for name, _, _, kwargs, _ in operations.log if kwargs.get("memory_format") in
             (torch.channels_last, torch.channels_last_3d) and str(kwargs.get("device")) != "meta"]  # fmt: skip
    if asked:
        raise Wrong("memory-format-asked", error="memory_format=torch.channels_last", got=asked[0][0])
    moves = [out for name, _, _, _, out in operations.log
             if out and out[1] >= x.numel() and name in _MOVING]  # fmt: skip
    if len(moves) > 1:
        raise Wrong("copied-twice", n=len(moves))


_MOVING = {"aten.clone", "aten.copy_", "aten._to_copy", "aten.copy", "aten.cat", "aten.stack", "aten.add", "aten.mul"}
