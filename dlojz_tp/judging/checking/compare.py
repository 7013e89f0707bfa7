"""Compare with a truth: tolerances by dtype, short descriptions, the nearest known mistake."""

import torch

# About eight times the rounding error of a sum of a hundred terms; half precisions round at every operation.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tolerance(dtype: torch.dtype) -> float:
    """The relative and absolute error allowed for values of `dtype`; 0 for integers and booleans."""
    return _TOLERANCE.get(dtype, 0.0)


def close(got, expected, tol: float | None = None) -> bool:
    """True if `got` equals `expected` within the tolerance of the coarser dtype (or `tol`), shapes included.

    Takes tensors, numbers, and lists or tuples of them. NaN and infinities must be in the same places.
    """
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(close(g, e, tol) for g, e in zip(got, expected, strict=True))
        )
    python_float = tolerance(torch.float32) if isinstance(got, float) or isinstance(expected, float) else 0.0
    try:
        got, expected = (_tensor(value) for value in (got, expected))
    except (TypeError, ValueError, RuntimeError):
        return False
    if got.shape != expected.shape:
        return False
    if tol is None:
        tol = max(tolerance(got.dtype), tolerance(expected.dtype), python_float)
    got, expected = got.cpu().double(), expected.cpu().double()
    return torch.allclose(got, expected, rtol=tol, atol=tol, equal_nan=True)


def _tensor(value):
    """A Python float in its full precision; `as_tensor` would round it to float32."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.as_tensor(value).detach()


def mistake_of(got, mistakes: dict[str, object], default: str, tol: float | None = None) -> str:
    """The name of the first known mistake whose value equals `got`, else `default`.

    mistakes: {slug: the value that this mistake gives, or a function that returns it}.
    """
    for slug, value in mistakes.items():
        if close(got, value() if callable(value) else value, tol):
            return slug
    return default


def describe(value) -> str:
    """A short text for a value: small tensors in full, large ones by shape, dtype, range; those in lists as numbers."""
    if isinstance(value, torch.Tensor):
        shape = "×".join(str(n) for n in value.shape) or "scalar"
        kind = str(value.dtype).removeprefix("torch.")
        if value.device.type == "meta":
            return f"tensor {shape} {kind} on {value.device}"
        if value.numel() == 1:
            return f"{value.item():.6g} ({kind} tensor, shape {tuple(value.shape)})"
        if value.numel() <= 8:
            return f"{_round(value.tolist())} ({kind} tensor)"
        if value.numel() and not value.is_complex():
            low, high = value.double().min().item(), value.double().max().item()
            return f"tensor {shape} {kind}, from {low:.4g} to {high:.4g}"
        return f"tensor {shape} {kind}"
    text = _inside(value)
    return text if len(text) <= 200 else text[:197] + "…"


def _inside(value) -> str:
    """As `describe`, for an item of a list, tuple or dictionary."""
    if isinstance(value, torch.Tensor):
        few = value.device.type != "meta" and value.numel() <= 8
        return _inside(value.tolist()) if few else describe(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if type(value) is list:
        return f"[{', '.join(map(_inside, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_inside, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_inside(one)}' for key, one in value.items())}}}"
    return repr(value)


def side_by_side(expected, got) -> tuple[str, str]:
    """Both where they are farthest apart, for tensors of one shape; nothing for all else: it would tell as little."""
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple) and len(expected) == len(got):
        return next((side_by_side(a, b) for a, b in zip(expected, got) if not close(a, b)), ("", ""))
    if not (isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor) and expected.shape == got.shape):
        return "", ""
    if expected.is_meta or got.is_meta or expected.is_complex() or not expected.numel():
        return "", ""
    gap = (expected.detach().cpu().double() - got.detach().cpu().double()).abs().flatten()
    at = tuple(int(n) for n in torch.unravel_index(gap.argmax(), expected.shape))
    values = [one[at].item() for one in (expected, got)]
    digits = 6 if f"{values[0]:.6g}" != f"{values[1]:.6g}" else 12
    return tuple(f"{value:.{digits}g} at {list(at)}" for value in values)


def _round(value):
    if isinstance(value, list):
        return [_round(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
