"""Balise 5: the two memory formats by hand, against the strides of real tensors."""

import torch

from dlojz_tp.judging.checking import close
from dlojz_tp.judging.checking.looks import Look, at_most, judged, shape, silent, tried, within
from dlojz_tp.judging.checks.tensor_cores_channels_last.numbers import of_each, read, several
from dlojz_tp.measure.operations import Operations

KINDS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SHAPES = [(2, 3, 4, 5), (7, 64, 9, 6), (1, 3, 224, 200), (5, 1, 6, 7), (4, 8, 1, 1), (1, 1, 1, 1), (3, 5, 1, 8)]
STRIDES = {
    "strides of a contiguous tensor": [(size, False) for size in SHAPES],
    "strides of a channels_last tensor, in the order N, C, H, W": [(size, True) for size in SHAPES],
}
LAST = torch.channels_last, torch.channels_last_3d
MOVING = {"aten.clone", "aten.copy_", "aten._to_copy", "aten.copy", "aten.cat", "aten.stack", "aten.add", "aten.mul"}


def _tensor(size, channels_last):
    return torch.empty(size, device="meta", memory_format=KINDS["channels_last" if channels_last else "contiguous"])


def _sizes(*tensors):
    return [(tuple(one.shape), one.stride()) for one in tensors]


NCHW, NHWC = _tensor((2, 6, 4, 5), False), _tensor((2, 6, 4, 5), True)
FORMATS = {  # (shape, strides)
    "a format is recognised by its strides":
        _sizes(_tensor((2, 3, 4, 5), False), _tensor((2, 3, 4, 5), True), _tensor((1, 6, 7, 5), True)),
    "one channel, or one pixel: both formats":
        _sizes(*(_tensor(size, last) for size in ((5, 1, 6, 7), (4, 8, 1, 1), (1, 1, 1, 1)) for last in (False, True))),
    "views with gaps or another order: neither": _sizes(
        NHWC[:, :3], NCHW[:, :, ::2], NCHW.transpose(2, 3), NHWC[..., 1:], NCHW[:, ::2], NHWC.transpose(0, 1),
        NCHW[:, :, :, :1], NHWC[:1], NCHW[:, :1], NCHW[1:, 2:3, :, :],
    ),
}  # fmt: skip


def _values(size):
    return torch.randn(size, dtype=torch.float32, generator=torch.Generator().manual_seed(6))


PLAIN = {  # cases are functions of (3, 4, 6, 5)
    "the copy has the same shape and values, and the other order in memory":
        [lambda _, size=size: _values(size) for size in SHAPES[:3]],
}  # fmt: skip
MOVES = {"each element is moved once, without asking PyTorch for the format": [0, 1, 2]}
VIEWS = {
    "views, one channel, one pixel, half precision": [
        lambda x: x[:, ::2], lambda x: x.transpose(2, 3), lambda x: x[:1], lambda _: _values((4, 8, 1, 1)),
        lambda _: _values((5, 1, 6, 7)), lambda x: x.bfloat16(), lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.long(),
        lambda x: x.to(memory_format=torch.channels_last)[:, :2],  # channels lie side by side, pixels farther apart
        lambda x: x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1),  # channels first, then the height
        lambda _: _values((5, 1, 6, 7)).transpose(2, 3),
    ],
}  # fmt: skip


def _given(case):
    return case(_values((3, 4, 6, 5)))


def observe(strides_of, formats_of, channels_last_copy):
    """Strides; names of formats; copies, what becomes of the input, and what moves."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other; judge() puts the number back
    for case in sum(STRIDES.values(), []):
        yield {case: read(strides_of(*case))}
    for case in sum(FORMATS.values(), []):
        got = formats_of(*case)
        yield {case: tuple(got) if isinstance(got, list) else got}
    for case in sum(PLAIN.values(), []):
        yield _copied(channels_last_copy, case)
    x = _values((2, 6, 4, 5))
    for k, one in enumerate((x, x[:, ::2], x.to(memory_format=torch.channels_last))):
        with Operations() as operations:
            channels_last_copy(one)
        log = [(name, kwargs, out) for name, _, _, kwargs, out in operations.log]
        asked = [name for name, of, _ in log if of.get("memory_format") in LAST and str(of.get("device")) != "meta"]
        moves = [name for name, _, out in log if out and out[1] >= one.numel() and name in MOVING]
        yield {("asked", k): asked, ("moves", k): len(moves)}
    for case in sum(VIEWS.values(), []):
        yield _copied(channels_last_copy, case)
    yield {"elsewhere": tried(_elsewhere, channels_last_copy)}


def _copied(channels_last_copy, case):
    x = _given(case)
    strides, got = x.stride(), channels_last_copy(x)
    return {
        ("copy", case): got,
        ("given", case): x,
        ("kept", case): close(x, _given(case), 0.0) and x.stride() == strides,
    }


def _elsewhere(channels_last_copy):
    """In words, where the copy of a tensor on the meta device is, if it isn't there."""
    got = channels_last_copy(torch.empty(2, 3, 4, 5, device="meta"))
    return "" if got.is_meta else f"the copy is on {got.device}"


def _strides(claim, case):
    (n, c, h, w), channels_last = case
    truth, where = _tensor(*case).stride(), f"shape {case[0]}, {_name(channels_last)}"
    mistakes = [
        ("format-ignored", _tensor(case[0], not channels_last).stride()),
        ("strides-as-listed-nhwc", (h * w * c, w * c, c, 1)),
        ("shape-not-strides", case[0]),
        ("height-for-width", (c * h * w, 1, h * c, c) if channels_last else (c * h * w, h * w, h, 1)),
        ("channels-forgotten", (c * h * w, 1, w, 1)),
        ("strides-in-bytes", tuple(4 * one for one in truth)),
        ("shape-not-strides", (n, h, w, c)), ("channels-forgotten", (c * h * w, 1, w, c)),
    ]  # fmt: skip

    def hint(seen, _):
        return next((slug for slug, value in mistakes if seen == value), "wrong-strides")

    yield several(claim, case, 4, "not-four-strides", str(truth))
    yield Look("", case, truth, hint, fields=lambda *_: {"where": where, "format": _name(channels_last)})


def _name(channels_last):
    return "channels_last" if channels_last else "contiguous"


def _formats(claim, case):
    tensor = torch.empty_strided(*case, device="meta")
    truth = {name for name, kind in KINDS.items() if tensor.is_contiguous(memory_format=kind)}

    def fields(seen, _):
        words = {"expected": str(truth or "neither: an empty set"), "got": str(seen or "an empty set")}
        return words | {"where": f"shape {case[0]}, strides {case[1]}"}

    def is_set(seen, _):
        return isinstance(seen, set | frozenset | tuple) and all(one in list(KINDS) for one in seen)

    def hint(seen, due):
        if len(due) == 2:
            # the plain strides of this shape have only themselves in their favour; a look at them tells the mistake
            return "both-formats" if len(seen) == 1 else "size-one-counts"
        if not due:
            return "one-stride-looked-at"
        if 1 in case[0] and not seen:
            return "size-one-counts"
        return "formats-exchanged" if not seen & due and len(seen) == 1 else "wrong-formats"

    yield Look(claim, case, str(truth or "an empty set"), "not-a-set", holds=is_set)
    yield Look("", lambda o: {*o[case]}, truth, hint, fields=fields)


def _copy(claim, case):
    x = _given(case)
    where = {"where": f"shape {tuple(x.shape)}, strides {x.stride()}"}

    def look(see, due, hint, **more):
        return Look("", see, due, hint, fields=where, **more)

    def memory(o):
        moved = o["copy", case].data_ptr() != o["given", case].data_ptr()
        return "channels_last" if _in_format(o["copy", case]) else "still contiguous" if moved else "the input's own"

    def value_hint(seen, _):
        return "memory-reread" if _in_format(seen) else "wrong-copy"

    yield Look(claim, lambda o: shape(o["copy", case]), tuple(x.shape), "shape-permuted")
    yield look(lambda o: o["copy", case].dtype, x.dtype, "dtype-not-kept")
    yield look(("kept", case), True, "input-changed")
    yield look(("copy", case), lambda _: _given(case), value_hint, holds=within(0.0))
    hints = {"still contiguous": "still-contiguous", "the input's own": "input-returned"}
    yield look(memory, "channels_last", lambda seen, _: hints[seen])


def _in_format(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _once(claim, k):
    fields = {"error": "memory_format=torch.channels_last"}
    yield Look(claim, ("asked", k), [], "memory-format-asked", fields=fields)
    yield Look("", ("moves", k), 1, "copied-twice", holds=at_most, fields="n")


LOOKS = [
    *of_each(STRIDES, _strides), *of_each(FORMATS, _formats), *of_each(PLAIN, _copy), *of_each(MOVES, _once),
    *of_each(VIEWS, _copy),
    Look("on the device of x, whichever that is", "elsewhere", "", "copy-elsewhere",
         fields=lambda seen, due: {"error": seen} | silent(seen, due)),
]  # fmt: skip


def balise_5(strides_of, formats_of, channels_last_copy):
    yield from judged(LOOKS, observe, strides_of, formats_of, channels_last_copy)
