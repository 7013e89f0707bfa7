"""Results by shape: the second time from memory, and the same as the first time."""

import pytest
import torch
from torch.nn import functional as F

from dlojz_tp.modelled_gpu import on_card, shapes

aten = torch.ops.aten
X, ROW, WHOLE = (torch.empty(size, device="meta") for size in ((6, 4), (4,), (6, 4)))
CALLS = {
    "sum of both": (aten.add.Tensor, (X, ROW)),
    "a number": (aten.mul.Tensor, (X, 0.5)),
    "whole numbers and a fraction": (aten.mul.Tensor, (WHOLE.long(), 0.5)),
    "of another dtype": (aten._to_copy.default, (X,), {"dtype": torch.bfloat16}),
    "turned": (aten.exp.default, (X.t(),)),
    "several results": (aten.native_layer_norm.default, (X, [4], ROW, ROW, 1e-5)),
    "a mask": (aten.convolution_backward.default, (torch.empty(2, 3, 8, 8, device="meta"),
               torch.empty(2, 5, 8, 8, device="meta"), torch.empty(3, 5, 3, 3, device="meta"),
               [3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True])),
    "in place": (aten.addcmul_.default, (X, WHOLE, WHOLE), {"value": 0.1}),
}  # fmt: skip


def listed(out):
    return out if isinstance(out, tuple) else (out,)


def described(out):
    def one(x):
        return x.shape, x.stride(), x.dtype, x.device, x.untyped_storage().nbytes()

    return type(out), [x if x is None else one(x) for x in listed(out)]


@pytest.mark.parametrize("name", CALLS)
def test_the_second_result_comes_from_memory_and_is_the_same(name, monkeypatch):
    monkeypatch.setattr(shapes, "_seen", {})
    (func, args, *more), made = CALLS[name], []
    kwargs = more[0] if more else {}

    def make():
        made.append(name)
        return func(*args, **kwargs)

    first, second, again = (shapes.result(func, args, kwargs, make) for _ in range(3))
    assert made == [name] and described(first) == described(second) == described(func(*args, **kwargs))
    if func is aten.addcmul_.default:
        assert first is second is X
    else:
        tensors = [x for out in (first, second, again) for x in listed(out) if x is not None]
        assert len({x.untyped_storage()._cdata for x in tensors}) == len(tensors)


@pytest.mark.parametrize(("func", "args", "kwargs"), [
    (aten.view.default, (X, [4, 6]), {}),
    (aten._unsafe_view.default, (X, [4, 6]), {}),
    (aten.unsafe_split.Tensor, (X, 2), {}),
    (aten.zeros.default, ([2],), {"device": "meta"}),
    (aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}),
])  # fmt: skip
def test_what_shares_memory_or_has_values_is_made_each_time(func, args, kwargs, monkeypatch):
    monkeypatch.setattr(shapes, "_seen", {})
    made = [shapes.result(func, args, kwargs, lambda: func(*args, **kwargs)) for _ in range(2)]
    assert made[0] is not made[1] and shapes._seen == {}


def test_what_changes_its_own_shape_is_called_each_time(monkeypatch):
    monkeypatch.setattr(shapes, "_seen", {})
    for _ in range(2):
        x = torch.empty(6, 1, device="meta")
        assert shapes.result(aten.squeeze_.default, (x,), {}, x.squeeze_).shape == (6,)


@pytest.mark.parametrize("change", [lambda x: x[:3], lambda x: x.t(), lambda x: x.half()])
def test_other_tensors_have_other_results(change, monkeypatch):
    monkeypatch.setattr(shapes, "_seen", {})
    for x in (X, change(X)):
        out = shapes.result(aten.neg.default, (x,), {}, lambda x=x: aten.neg.default(x))
        assert described(out) == described(aten.neg.default(x))


def test_dimensions_and_the_default_dtype_count(monkeypatch):
    monkeypatch.setattr(shapes, "_seen", {})
    found = [shapes.result(aten.sum.dim_IntList, (X, [k]), {}, lambda k=k: X.sum(k)).shape for k in (0, 1)]
    assert found == [(4,), (6,)]
    whole, found = X.long(), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(shapes.result(aten.mul.Tensor, (whole, 0.5), {}, lambda: whole * 0.5).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]


def trained(clock):
    """(bytes held most, seconds) of steps whose shapes are new, then known."""
    layer, found = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.LayerNorm(1024)).cuda(), []
    optimizer, x = torch.optim.AdamW(layer.parameters(), foreach=False), torch.randn(64, 256, device="cuda")
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        begin = clock.host
        F.mse_loss(layer(x), layer(x).detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        found.append((torch.cuda.max_memory_allocated(), clock.host - begin))
    return found


def test_known_shapes_change_neither_memory_nor_time():
    _, second, *known = on_card(trained).result
    for memory, seconds in known:
        assert memory == second[0] and seconds == pytest.approx(second[1], rel=1e-6)


def sparse(clock):
    weight, x = torch.randn(64, 64, device="cuda"), torch.randn(64, 8, device="cuda")
    return tuple((weight.to_sparse_csr() @ x).shape), torch.equal(x, x)


def test_a_sparse_matrix_multiplies_and_nothing_is_equal():
    assert on_card(sparse).result == ((64, 8), False)
