"""What `kernels.Watched` tells of kernels whose traffic is known, and what Triton's compiler says of them."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from dlojz_tp.measure import compiled_kernels, kernels

TOP = 3


@triton.jit
def double(x, y, n, stride, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + lane, 2 * tl.load(x + lane * stride, mask=lane < n), mask=lane < n)


@triton.jit
def double_without_mask(x, y, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + lane, 2 * tl.load(x + lane))


@triton.jit
def row_softmax(x, y, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + lane, mask=lane < n, other=-float("inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * n + lane, value / tl.sum(value, 0), mask=lane < n)


@triton.jit
def tile_product(a, b):
    return tl.dot(a, b)


@triton.jit
def matmul(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        sums += tile_product(left, tl.load(b + (start + k)[:, None] * N + n[None, :]))
    tl.store(c + m[:, None] * N + n[None, :], sums)


@triton.jit
def add_all(x, total, ATOMIC: tl.constexpr):
    value = tl.load(x + tl.program_id(0))
    if ATOMIC:
        tl.atomic_add(total, value)
    else:
        tl.store(total, tl.load(total) + value)


@triton.jit
def sum_without_other(x, y, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(y, tl.sum(tl.load(x + lane, mask=lane < n), 0))


@triton.jit
def keep_if_positive(x, y, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(y + lane, lane, mask=(lane < 3) & (tl.load(x) > 0))


@triton.jit
def store_a_global(y):
    tl.store(y, TOP)


@triton.jit
def store_from_a_list(y):
    for one in [1, 2]:
        if one == 2:
            break
        tl.store(y, one)


def test_each_element_once():
    x = torch.arange(100.0)
    with kernels.Watched() as seen:
        y = torch.empty(100)
        double[(4,)](x, y, 100, 1, BLOCK=32)
    torch.testing.assert_close(y, 2 * x)
    assert seen.reads(x).eq(1).all() and seen.writes(y).eq(1).all()
    assert seen.read_bytes() == seen.written_bytes() == seen.read_bytes(x) == seen.distinct_bytes(x) == 400
    assert seen.writes(x).sum() == seen.reads(y).sum() == 0 and not seen.raced(y).any()
    assert seen.sectors() == 2 * 13  # 400 bytes, from the start of a sector
    assert (seen.launches[0].kernel, seen.launches[0].grid) == ("double", (4, 1, 1))
    assert seen.launches[0].constants == {"BLOCK": 32}


def test_a_stride_costs_sectors_and_no_bytes():
    x = torch.arange(256.0)[::8]
    with kernels.Watched() as seen:
        double[(1,)](x, y := torch.empty(32), 32, 8, BLOCK=32)
    torch.testing.assert_close(y, 2 * x)
    assert seen.read_bytes(x) == 128
    assert (seen.sectors(x), seen.sectors(y)) == (32, 4)
    assert seen.reads(x).eq(1).all() and seen.reads(x).shape == (32,)


def test_elements_between_those_of_a_view_are_outside():
    x = torch.arange(64.0)[::2]
    with kernels.Watched() as seen:
        double[(1,)](x, torch.empty(32), 32, 1, BLOCK=32)
    first = seen.outside[0]
    assert (first.tensor, first.element, first.count, first.between) == ("x", 1, 16, True)


def test_what_nobody_wrote_is_nan():
    with kernels.Watched() as seen:
        y = torch.empty(100)
        double[(3,)](torch.arange(100.0), y, 100, 1, BLOCK=32)
    assert seen.writes(y).tolist() == [1] * 96 + [0] * 4
    assert y[96:].isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("far", [0, 1 << 40])
def test_a_wild_pointer_is_never_touched(far):
    x, y = torch.arange(40.0), torch.zeros(40)
    with pytest.raises(kernels.WildPointer, match=r"Program \(1, 0, 0\) of .* reads `x \+ 40`, outside of `x`"):
        double_without_mask[(2,)](x, y, BLOCK=32)
    with kernels.Watched() as seen:
        double[(1,)](x, y, far + 64, far + 1, BLOCK=64)
    assert {(one.kind, one.tensor) for one in seen.outside} == {("read", "x"), ("write", "y")}
    if not far:
        assert seen.outside[0].count == seen.outside[1].count == 24
    assert y[0] == 0


def test_a_tensor_beside_another_is_outside_of_it():
    both = torch.zeros(64)
    with kernels.Watched() as seen:
        double[(1,)](both[:32].clone(), both[32:].clone(), 40, 1, BLOCK=64)
    assert [(one.kind, one.tensor, one.element, one.count) for one in seen.outside] == [
        ("read", "x", 32, 8),
        ("write", "y", 32, 8),
    ]


def test_a_view_is_inside_of_itself():
    x = torch.arange(64.0)
    with kernels.Watched() as seen:
        double[(1,)](x[8:40], x[40:], 32, 1, BLOCK=32)  # the last eight are y's no more
    assert [(one.tensor, one.element, one.count) for one in seen.outside] == [("x", 56, 8)]


def test_no_element_is_no_harm():
    x, y = torch.empty(0), torch.empty(0)
    double[(1,)](x, y, 0, 1, BLOCK=32)
    double[(0,)](x, y, 0, 1, BLOCK=32)


def test_bytes_of_a_product_are_those_of_its_tiles():
    a, b = torch.randn(64, 96), torch.randn(96, 128)
    with kernels.Watched() as seen:
        c = torch.empty(64, 128)
        matmul[(2, 2)](a, b, c, 128, 96, BM=32, BN=64, BK=32)
    torch.testing.assert_close(c, a @ b, atol=1e-4, rtol=1e-4)
    assert seen.read_bytes() == 4 * 64 * 128 * 96 // 32 + 4 * 64 * 128 * 96 // 64
    assert seen.distinct_bytes() == 4 * (a.numel() + b.numel())
    assert seen.dots == [kernels.Dot(32, 64, 32, "fp32", "fp32")] * 12
    # by the number of a program, its first dimension runs fastest: two programs at once share columns of b
    assert seen.at_once(2) == [4 * (64 * 96 + 96 * 64)] * 2


@pytest.mark.parametrize("atomic", [True, False])
def test_a_race(atomic):
    x, total = torch.arange(10.0), torch.zeros(1)
    with kernels.Watched() as seen:
        add_all[(10,)](x, total, ATOMIC=atomic)
    assert total == 45 and seen.writes(total) == 10
    assert seen.raced(total).item() is not atomic
    assert not seen.raced(x).any()


def test_idle_programs():
    with kernels.Watched() as seen:
        double[(7,)](torch.ones(100), torch.empty(100), 100, 1, BLOCK=32)
    assert seen.idle() == 3


def test_launches_do_not_race_with_each_other():
    x = torch.ones(32)
    with kernels.Watched() as seen:
        for _ in range(2):
            double[(1,)](x, x, 32, 1, BLOCK=32)
    assert x.eq(4).all() and seen.writes(x).eq(2).all() and not seen.raced(x).any()


def test_programs_in_another_order():
    order = []

    def noted(programs):
        order.extend(reversed(programs))
        return order

    x = torch.randn(5, 7)
    with kernels.Watched(noted) as seen:
        row_softmax[(5,)](x, y := torch.empty(5, 7), 7, BLOCK=8)
    assert order == [4, 3, 2, 1, 0]
    torch.testing.assert_close(y, x.softmax(1))
    assert seen.reads(x).eq(1).all()


def test_a_masked_lane_without_other_is_undefined():
    x, y = torch.ones(40), torch.zeros(1)
    sum_without_other[(1,)](x, y, 40, BLOCK=64)
    assert y.isinf()


@pytest.mark.parametrize("value, written", [(1.0, 3), (-1.0, 0)])
def test_a_comparison_of_scalars_is_a_mask(value, written):
    with kernels.Watched() as seen:
        keep_if_positive[(1,)](torch.tensor([value]), y := torch.empty(8), BLOCK=8)
    assert seen.writes(y).sum() == written


def test_a_launch_says_what_is_wrong_with_it():
    x, y = torch.ones(8), torch.zeros(8)
    with pytest.raises(TypeError, match="a grid is a tuple|A grid is a tuple"):
        double[8](x, y, 8, 1, BLOCK=8)
    with pytest.raises(TypeError, match="no argument WIDTH"):
        double[(1,)](x, y, 8, 1, BLOCK=8, WIDTH=4)
    double[lambda meta: (triton.cdiv(8, meta["BLOCK"]),)](x, y, 8, 1, BLOCK=8, num_warps=2)
    assert y.eq(2).all()


def test_a_tensor_without_values_is_told():
    with FakeTensorMode():
        x = torch.empty(8)
    with pytest.raises(RuntimeError, match="double needs values"):
        double[(1,)](x, x, 8, 1, BLOCK=8)


def test_a_kernel_cannot_be_called_from_outside():
    double[(1,)](torch.ones(8), torch.ones(8), 8, 1, BLOCK=8)
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        tile_product(1, 2)


def test_what_the_compiler_refuses():
    launches = []
    for kernel, arguments in ((store_a_global, ()), (store_from_a_list, ()), (double, (torch.ones(8), 8, 1, 8))):
        with kernels.Watched() as seen:
            kernel[(1,)](*[torch.ones(8), *arguments])
        launches += seen.launches
    a_global, a_list, nothing = map(compiled_kernels.refused, launches)
    assert a_global.startswith("line 2 of store_a_global: ") and "TOP" in a_global
    assert a_list.startswith("line 2 of store_from_a_list: ")
    assert nothing == ""


def test_what_a_kernel_takes_of_a_card():
    a = torch.randn(64, 64, dtype=torch.float16)
    with kernels.Watched() as seen:
        matmul[(1, 1)](a, a, torch.empty(64, 64), 64, 64, BM=64, BN=64, BK=64)
    one, three = (compiled_kernels.taken(seen.launches[0], num_stages=stages) for stages in (1, 3))
    assert 0 < one.shared <= 2 * 64 * 64 * 2 < three.shared
    assert 0 < one.registers <= 255 and one.spilled == 0


def test_the_environment_may_ask_for_the_interpreter():
    call = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "once or race or order",
    ]
    done = subprocess.run(call, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
