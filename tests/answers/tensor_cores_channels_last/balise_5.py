"""Answers to balise 5 of 03_tensor_cores_channels_last."""

import torch

from tests.answers.bank import Bank

bank = Bank("03_tensor_cores_channels_last", 5)


def strides_of(shape, channels_last):
    """From the fastest dimension to the slowest."""
    strides, step = [0] * 4, 1
    for d in (1, 3, 2, 0) if channels_last else (3, 2, 1, 0):
        strides[d], step = step, step * shape[d]
    return strides


def formats_of(shape, strides):
    found = set()
    for name, order in (("channels_last", (1, 3, 2, 0)), ("contiguous", (3, 2, 1, 0))):
        step = 1
        for d in order:
            if shape[d] > 1 and strides[d] != step:
                break
            step *= shape[d]
        else:
            found.add(name)
    return found


def channels_last_copy(x):
    n, c, h, w = x.shape
    y = x.new_empty(x.numel()).as_strided(x.shape, strides_of(x.shape, True))
    y.copy_(x)
    return y


bank.several(None, strides_of, formats_of, channels_last_copy)


def strides_of_made(shape, channels_last):
    kind = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, device="meta", memory_format=kind).stride()


def formats_of_made(shape, strides):
    x = torch.empty_strided(shape, strides, device="meta")
    kinds = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    return {name for name, kind in kinds.items() if x.is_contiguous(memory_format=kind)}


def nhwc_storage(x):
    n, c, h, w = x.shape
    y = torch.empty(n, h, w, c, dtype=x.dtype, device=x.device)
    y[:] = x.movedim(1, -1)
    return y.movedim(-1, 1)


bank.several(None, strides_of_made, formats_of_made, nhwc_storage)
# the copy of the first answer asks strides_of, which here asks PyTorch, on the meta device
bank.several(None, strides_of_made, formats_of_made, lambda x: torch.empty_strided(
    x.shape, strides_of_made(x.shape, True), dtype=x.dtype, device=x.device).copy_(x))  # fmt: skip


def by_formula(shape, channels_last):
    n, c, h, w = shape
    if not channels_last:
        return c * h * w, h * w, w, 1
    return h * w * c, 1, w * c, c


def as_list(shape, strides):
    def fits(wanted):
        return all(s == w for size, s, w in zip(shape, strides, wanted) if size != 1)

    return [name for name in ("contiguous", "channels_last") if fits(by_formula(shape, name == "channels_last"))]


bank.several(None, by_formula, as_list, lambda x: torch.einsum("nchw->nhwc", x).clone(
    memory_format=torch.contiguous_format).permute(0, 3, 1, 2))  # fmt: skip


def empty_strided(x):
    return torch.empty_strided(x.shape, by_formula(x.shape, True), dtype=x.dtype, device=x.device).copy_(x)


bank.several(None, by_formula, lambda shape, strides: frozenset(as_list(shape, strides)), empty_strided)
bank.several(None, by_formula, as_list, lambda x: torch.stack(x.unbind(1), -1).permute(0, 3, 1, 2))


PLAIN = """
def strides_of(shape, channels_last):
    n, c, h, w = shape
    return (c * h * w, 1, c * w, c) if channels_last else (c * h * w, h * w, w, 1)

def formats_of(shape, strides):
    found = set()
    for name in ("contiguous", "channels_last"):
        due = strides_of(shape, name == "channels_last")
        if all(a == b for size, a, b in zip(shape, strides, due) if size > 1):
            found.add(name)
    return found

def channels_last_copy(x):
    y = torch.empty_strided(x.shape, strides_of(x.shape, True), dtype=x.dtype, device=x.device)
    y.copy_(x)
    return y
"""
bank.text(None, PLAIN)


# ------------------------------------------------- wrong strides


def strides(slug, last=lambda n, c, h, w: (h * w * c, 1, w * c, c), plain=lambda n, c, h, w: (c * h * w, h * w, w, 1)):
    def strides_of(shape, channels_last):
        return (last if channels_last else plain)(*shape)

    bank.several(slug, strides_of, formats_of, channels_last_copy)


bank.hint("not-four-strides", "Strides are four numbers, in the order N, C, H, W, whatever the order in memory.")
strides("not-four-strides", plain=lambda n, c, h, w: c * h * w)
strides("nothing-returned", plain=lambda n, c, h, w: None)
bank.variant(
    "not-four-strides",
    PLAIN,
    ("return (c * h * w, 1, c * w, c) if channels_last else (c * h * w, h * w, w, 1)", "return c * h * w"),
)

bank.hint(
    "strides-as-listed-nhwc",
    "These are the right numbers in the order N, H, W, C. The shape stays N, C, H, W, and so do the strides: the "
    "second one belongs to the channel.",
)
strides("strides-as-listed-nhwc", last=lambda n, c, h, w: (h * w * c, w * c, c, 1))
bank.variant("strides-as-listed-nhwc", PLAIN, ("(c * h * w, 1, c * w, c)", "(h * w * c, w * c, c, 1)"))

bank.hint(
    "shape-not-strides",
    "These are sizes. A stride is the distance, in elements, to the next index of that dimension.",
)
strides("shape-not-strides", plain=lambda n, c, h, w: (n, c, h, w))
strides("shape-not-strides", last=lambda n, c, h, w: (n, h, w, c))
bank.variant("shape-not-strides", PLAIN, ("(c * h * w, 1, c * w, c)", "(n, h, w, c)"))

bank.hint(
    "height-for-width",
    "A step down skips a whole row. Its length is the *width*, and height and width differ here.",
)
strides("height-for-width", plain=lambda n, c, h, w: (c * h * w, h * w, h, 1))
strides("height-for-width", last=lambda n, c, h, w: (c * h * w, 1, h * c, c))
bank.variant("height-for-width", PLAIN, ("h * w, w, 1)", "h * w, h, 1)"))

bank.hint("format-ignored", "You return the same strides for both formats.")
strides("format-ignored", last=lambda n, c, h, w: (c * h * w, h * w, w, 1))
bank.variant("format-ignored", PLAIN, ("(c * h * w, 1, c * w, c) if channels_last else ", ""))

bank.hint(
    "channels-forgotten",
    "In channels_last the channels of a pixel are next to each other, so a step to the right skips all of them.",
)
strides("channels-forgotten", last=lambda n, c, h, w: (c * h * w, 1, w, 1))
strides("channels-forgotten", last=lambda n, c, h, w: (c * h * w, 1, w, c))
bank.variant("channels-forgotten", PLAIN, ("1, c * w, c)", "1, w, c)"))

bank.hint("strides-in-bytes", "PyTorch counts strides in elements, not in bytes.")
strides("strides-in-bytes", plain=lambda n, c, h, w: (4 * c * h * w, 4 * h * w, 4 * w, 4))
bank.variant("strides-in-bytes", PLAIN, ("(c * h * w, h * w, w, 1)", "tuple(4 * s for s in (c * h * w, h * w, w, 1))"))

bank.hint("wrong-strides", "These strides are not those of a {format} tensor.")
strides("wrong-strides", plain=lambda n, c, h, w: (1, n, n * c, n * c * h))
strides("wrong-strides", last=lambda n, c, h, w: (c * h * w, 1, c, h * c))
bank.variant("wrong-strides", PLAIN, ("(c * h * w, 1, c * w, c)", "(c * h * w, c, c * w, 1)"))


# ------------------------------------------------- wrong formats


def formats(slug):
    return lambda formats_of: bank.several(slug, strides_of, formats_of, channels_last_copy) or formats_of


bank.hint("not-a-set", "Return a set: a tensor can be in neither, one or both of the formats.")
bank.variant("not-a-set", PLAIN, ("return found", "return sorted(found)[0] if found else None"))


@formats("not-a-set")
def formats_of_bool(shape, strides):
    return strides[1] == 1


@formats("not-a-set")
def formats_of_name(shape, strides):
    return next(iter(formats_of(shape, strides)), None) or "none"


@formats("nothing-returned")
def formats_of_nothing(shape, strides):
    formats_of(shape, strides)


bank.hint(
    "both-formats",
    "This tensor is in both formats: with one channel, or one pixel, the two orders are the same.",
)
bank.variant("both-formats", PLAIN, ("found.add(name)", "return {name}"))


@formats("both-formats")
def formats_of_first(shape, strides):
    found = formats_of(shape, strides)
    return {"contiguous"} if "contiguous" in found else found


@formats("both-formats")
def formats_of_last(shape, strides):
    found = formats_of(shape, strides)
    return {"channels_last"} if "channels_last" in found else found


@formats("both-formats")
def formats_exactly(shape, strides):
    return {name for name in ("contiguous", "channels_last") if tuple(strides) == by_formula(shape, name[1] == "h")}


bank.hint(
    "size-one-counts",
    "The stride of a dimension of size 1 is never used, so it can have any value. Ignore such dimensions.",
)
bank.variant("size-one-counts", PLAIN, ("if size > 1", "if size > 1 or shape[0] == 1"))


@formats("size-one-counts")
def formats_both_or_exact(shape, strides):
    n, c, h, w = shape
    if c == 1 or h == w == 1:
        expected = [by_formula(shape, last) for last in (False, True)]
        return {"contiguous", "channels_last"} if tuple(strides) in expected else set()
    return {name for name in ("contiguous", "channels_last") if tuple(strides) == by_formula(shape, name[1] == "h")}


bank.hint(
    "one-stride-looked-at",
    "A single stride is not enough: these elements have gaps, or another order. All dimensions longer than 1 must fit.",
)
bank.variant(
    "one-stride-looked-at",
    PLAIN,
    ("all(a == b for size, a, b in zip(shape, strides, due) if size > 1)", "strides[1] == due[1] or shape[1] == 1"),
)


@formats("one-stride-looked-at")
def formats_by_one(shape, strides):
    found = {"contiguous"} if shape[3] == 1 or strides[3] == 1 else set()
    return found | ({"channels_last"} if shape[1] == 1 or strides[1] == 1 else set())


@formats("one-stride-looked-at")
def formats_by_order(shape, strides):
    long = [d for d in range(4) if shape[d] > 1]
    order = sorted(long, key=lambda d: -strides[d])
    found = {"contiguous"} if order == [d for d in (0, 1, 2, 3) if d in long] else set()
    return found | ({"channels_last"} if order == [d for d in (0, 2, 3, 1) if d in long] else set())


bank.hint("formats-exchanged", "You have swapped the two names.")
bank.variant("formats-exchanged", PLAIN, ('name == "channels_last"', 'name == "contiguous"'))


@formats("formats-exchanged")
def formats_reversed(shape, strides):
    names = {"contiguous": "channels_last", "channels_last": "contiguous"}
    return {names[name] for name in formats_of(shape, strides)}


bank.hint("wrong-formats", "You return the wrong formats for this tensor.")
bank.variant("wrong-formats", PLAIN, ("    return found", '    return {"contiguous", "channels_last"}'))


@formats("wrong-formats")
def formats_always(shape, strides):
    return {"contiguous", "channels_last"}


# ------------------------------------------------- wrong copies


def copying(slug):
    return lambda copy: bank.several(slug, strides_of, formats_of, copy) or copy


@copying("nothing-returned")
def copy_nothing(x):
    x.permute(0, 2, 3, 1).contiguous()


bank.hint("input-returned", "This is still the input's own memory, and its format has not changed.")
bank.variant("input-returned", PLAIN, ("    y.copy_(x)\n    return y", "    return x"))


@copying("input-returned")
def copy_input(x):
    return x


@copying("input-returned")
def copy_permuted_twice(x):
    return x.permute(0, 2, 3, 1).permute(0, 3, 1, 2)


bank.hint(
    "shape-permuted",
    "The shape has changed. A channels_last tensor still has the shape N, C, H, W: only its strides differ.",
)
bank.variant("shape-permuted", PLAIN, ("return y", "return y.permute(0, 2, 3, 1)"))


@copying("shape-permuted")
def copy_permute(x):
    return x.permute(0, 2, 3, 1)


@copying("shape-permuted")
def copy_nhwc(x):
    return x.permute(0, 2, 3, 1).contiguous()


bank.hint(
    "still-contiguous",
    "The elements are still in the old order. permute alone only makes a view: you have to move the elements.",
)
bank.variant("still-contiguous", PLAIN, ("strides_of(x.shape, True), dtype", "strides_of(x.shape, False), dtype"))


@copying("still-contiguous")
def copy_clone(x):
    return x.clone()


@copying("still-contiguous")
def copy_back(x):
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous()


bank.hint(
    "memory-reread",
    "The strides are right, but you have not moved the elements. The old memory is read in a new order and gives "
    "other values.",
)
bank.variant("memory-reread", PLAIN, ("y.copy_(x)", "y = x.as_strided(y.shape, y.stride())"))


@copying("memory-reread")
def copy_as_strided(x):
    return x.as_strided(x.shape, strides_of(x.shape, True))


@copying("memory-reread")
def copy_view(x):
    n, c, h, w = x.shape
    return x.clone().view(n, h, w, c).permute(0, 3, 1, 2)


bank.hint("memory-format-asked", "You ask PyTorch for the format ({error}). Here you do by hand what it does.")
bank.variant("memory-format-asked", PLAIN, ("y.copy_(x)", "y = x.contiguous(memory_format=torch.channels_last)"))


@copying("memory-format-asked")
def copy_library(x):
    return x.to(memory_format=torch.channels_last)


@copying("memory-format-asked")
def copy_contiguous(x):
    return x.contiguous(memory_format=torch.channels_last)


@copying("memory-format-asked")
def copy_empty_like(x):
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


bank.hint("copied-twice", "You copy the elements {n} times. Once is enough.")
bank.variant("copied-twice", PLAIN, ("y.copy_(x)", "y.copy_(x.clone())"))


@copying("copied-twice")
def copy_twice(x):
    return x.clone().permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@copying("copied-twice")
def copy_tidied(x):
    """One move where x is contiguous, two where it is not."""
    return x.contiguous().movedim(1, 3).contiguous().movedim(3, 1)


bank.hint("wrong-copy", "The copy has other values than the input.")
bank.variant("wrong-copy", PLAIN, ("    y.copy_(x)\n    return y", "    return 2 * x"))


@copying("wrong-copy")
def copy_zeros(x):
    return torch.zeros_like(x)


@copying("wrong-copy")
def copy_turned(x):
    return x.flip(2)


bank.hint(
    "copy-elsewhere",
    "Here x is not in the CPU's memory, and you make no copy on its device ({error}). Create the copy where x is, "
    "with device=x.device or a method of x, without NumPy.",
)
bank.variant("copy-elsewhere", PLAIN, (", device=x.device", ""))


@copying("copy-elsewhere")
def copy_on_cpu(x):
    n, c, h, w = x.shape
    return torch.empty(n, h, w, c, dtype=x.dtype).permute(0, 3, 1, 2).copy_(x)


@copying("copy-elsewhere")
def copy_by_numpy(x):
    return torch.from_numpy(x.permute(0, 2, 3, 1).float().numpy().copy()).to(x.dtype).permute(0, 3, 1, 2)


bank.hint(
    "input-changed",
    "You change the input, its values or its strides. Other code that holds it sees another tensor.",
)
bank.variant("input-changed", PLAIN, ("    return y", "    x.zero_()\n    return y"))


@copying("input-changed")
def copy_in_place(x):
    y = channels_last_copy(x)
    x.zero_()
    return y


bank.hint("dtype-not-kept", "The copy has another dtype than the input.")
bank.variant("dtype-not-kept", PLAIN, ("dtype=x.dtype", "dtype=torch.float32"))


@copying("dtype-not-kept")
def copy_float(x):
    return torch.empty(x.numel()).as_strided(x.shape, strides_of(x.shape, True)).copy_(x)


@copying("memory-reread")
def copy_ignores_strides(x):
    """Reads x's memory in the order of a contiguous tensor: wrong for views."""
    n, c, h, w = x.shape
    flat = x.as_strided((n * c * h * w,), (1,))
    return flat.view(n, c, h, w).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


bank.slip("input-changed", ("return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)",
          "x.data = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)\n    return x"))  # fmt: skip

RETURNED = "    return x.permute(0, 2, 3, 1)"
bank.slip("input-returned", (RETURNED, "    if x.stride(1) == 1:\n        return x\n" + RETURNED))
bank.slip("input-returned", (RETURNED, "    if x.shape[1] == 1:\n        return x\n" + RETURNED))
