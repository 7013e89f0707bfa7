"""What a GPU refuses: tensors of several devices in one operation, in CUDA's own words."""

import torch

from dlojz_tp.judging.pretend_gpu.memory import HOMES, Block, is_wild, real_device, tensors, written

# operations that take tensors of any devices
ANYWHERE = {
    "copy_", "_to_copy", "set_", "_copy_from", "is_same_size", "record_stream", "_has_compatible_shallow_copy_type",
    "_foreach_copy_", "is_pinned", "_pin_memory",
}  # fmt: skip
INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# TensorIterator takes numbers of the CPU (tensors without dimensions) beside tensors of a GPU
LISTS = ("_foreach", "_amp_foreach", "cat", "stack", "_cat")


def refuse_mixed(func, name, args, kwargs, found, tags) -> None:
    """Raise what CUDA raises if `found` (tags beside) lie on several devices.

    Source: c10/core/impl, common_device_check_failure; aten/src/ATen/TensorIterator.cpp, compute_types;
    aten/src/ATen/native/TensorAdvancedIndexing.cpp, "indices should be either on".
    """
    if name in ANYWHERE:
        return
    places = [_place(x, each) for x, each in zip(found, tags, strict=True)]
    on = {place for place in places if place not in (None, "cpu")}
    if not on or len(on) == 1 and "cpu" not in places:
        return
    if name in INDEXED:
        _refuse_index(name, found, places)
        return
    scalars = not name.startswith(LISTS)
    outputs = {id(x) for x in written(func, args, kwargs)}
    kept = [(place, x) for place, x in zip(places, found, strict=True)
            if place and (place != "cpu" or x.dim() or not scalars or id(x) in outputs)]  # fmt: skip
    seen = list(dict.fromkeys(place for place, _ in kept))
    if len(seen) < 2:
        return
    if torch.Tag.pointwise in func.tags or name.startswith("_foreach"):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {seen[0]} and {seen[1]}!"
        )
    argument = _argument(func, args, kwargs, next(x for place, x in kept if place == seen[1]))
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but got {argument} is on {seen[1]}, different from other "
        f"tensors on {seen[0]} (when checking argument in method wrapper_CUDA_{name})"
    )


def _place(x, tag) -> str | None:
    if type(tag) is Block:
        return f"cuda:{tag.index}"
    return None if real_device(x).type not in HOMES or is_wild(x) else "cpu"


def _refuse_index(name, found, places) -> None:
    """A GPU's tensor takes indices of the CPU, never the other way round; the values put in must be beside it."""
    put = "put" in name
    indices = places[1:-1] if put else places[1:]
    if any(place not in (None, "cpu", places[0]) for place in indices):
        raise RuntimeError(
            f"indices should be either on {'' if places[0] == 'cpu' else 'cpu or on '}the same device as the indexed "
            f"tensor ({places[0]})"
        )
    if put and places[-1] not in (None, places[0]) and (found[-1].dim() or places[-1] != "cpu"):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{places[0]} and {places[-1]}!"
        )


def indices_of_cpu(name, found, tags) -> list:
    """The indices that a GPU's tensor takes from the CPU: PyTorch copies them over, and blocks. A mask waits anyway."""
    indices = list(zip(found, tags, strict=True))[1 : -1 if "put" in name else None]
    return [x for x, tag in indices if _place(x, tag) == "cpu" and x.dtype not in (torch.bool, torch.uint8)]


def _argument(func, args, kwargs, odd) -> str:
    """The name of the argument that is on the odd device."""
    named = [*zip((a.name for a in func._schema.arguments), args, strict=False), *kwargs.items()]
    return next((name for name, value in named if any(x is odd for x in tensors([value]))), "tensors")
