"""reduce_: sums in rank order, and statistics that depend on positions alone."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from ops_check import F, assert_same, check, devices, odd, refuses, stats
from torch import Tensor

from zshard import ops, reference

SIZES = [0, 1, 7, 4095, 4096, 4097, 10_007]


def chunks_of(world_size: int, numel: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """(W, numel) chunks, each `start` elements longer in memory than it is."""
    return torch.randn(world_size, numel + start).to(dtype)[:, start:]


@devices
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("chunk_dtype", F)
@pytest.mark.parametrize("acc_dtype", F)
def test_reduce_sums_in_rank_order(
    device: str, acc_dtype: torch.dtype, chunk_dtype: torch.dtype, accumulate: bool
) -> None:
    for world_size in (1, 2, 3, 8):
        for numel in SIZES:
            for start in (0, 3):
                acc = odd(numel, acc_dtype, start)
                chunks = chunks_of(world_size, numel, chunk_dtype, start)
                check("reduce_", device, acc, chunks, 1 / 3, accumulate, stats())
                check("reduce_", device, acc, chunks, 1.0, accumulate)


@devices
@pytest.mark.parametrize("start", [0, 16])
@pytest.mark.parametrize("acc_dtype", F)
def test_reduce_into_a_large_buffer(device: str, acc_dtype: torch.dtype, start: int) -> None:
    numel = 2_200_003
    for accumulate in (False, True):
        acc, chunks = odd(numel, acc_dtype, start), chunks_of(3, numel, torch.bfloat16, start)
        check("reduce_", device, acc, chunks, 0.5, accumulate, stats())


@devices
def test_reduce_float64(device: str) -> None:
    acc, chunks = torch.randn(9001).double(), torch.randn(3, 9001, dtype=torch.float64)
    check("reduce_", device, acc, chunks, 1 / 3, True, stats())
    huge = torch.full((2, 5000), 1e200, dtype=torch.float64)  # finite, but its square is not
    found = stats().to(device)
    ops.reduce_(torch.empty(5000, dtype=torch.float64, device=device), huge.to(device), stats=found)
    assert found.tolist() == [math.inf, 0.0]


@devices
@pytest.mark.parametrize("dtype", [*F, torch.float64])
def test_reduce_measures_what_lies_there(device: str, dtype: torch.dtype) -> None:
    for numel in (*SIZES, 8192 * 3 + 5):
        for start in (0, 3):
            acc = odd(numel, dtype, start)
            check("reduce_", device, acc, acc.view(1, -1), stats=stats())
            check("reduce_", device, acc, acc.view(1, -1))
            check("reduce_", device, acc, acc.view(1, -1), 0.5, True, stats())


def test_measuring_does_not_write(tmp_path: Path) -> None:
    np.save(tmp_path / "values.npy", np.arange(10_000, dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no tensors that cannot be written
        acc = torch.from_numpy(np.load(tmp_path / "values.npy", mmap_mode="r"))
    ops.reduce_(acc, acc[None], stats=(found := stats()))  # a write would be a signal
    assert found.tolist() == [sum(i**2 for i in range(10_000)), 0.0]


@devices
def test_a_row_may_be_acc_itself(device: str) -> None:
    rows = torch.randn(4, 5000)
    for rank in range(4):
        check("reduce_", device, rows[rank], rows, 0.5, stats=stats())


@devices
@pytest.mark.parametrize("where", [0, 4095, 4096, 9999])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_value_that_is_not_finite_raises_the_flag(device: str, value: float, where: int) -> None:
    chunks = torch.randn(2, 10_000)
    chunks[:, where] = value  # twice 3e38 is infinite too
    found = stats().to(device)
    ops.reduce_(torch.empty(10_000, device=device), chunks.to(device), stats=found)
    assert found[1].item() == 1.0
    assert not math.isfinite(found[0].item())


@devices
def test_the_flag_is_about_what_is_stored(device: str) -> None:
    acc = torch.empty(100, dtype=torch.float16, device=device)
    found = stats().to(device)
    ops.reduce_(acc, torch.full((2, 100), 40_000.0, device=device), stats=found)
    assert found[1].item() == 1.0  # 80000 is no fp16
    ops.reduce_(acc, torch.full((2, 100), 40_000.0, device=device), 0.5, stats=found)
    assert found.tolist() == [100 * 40_000.0**2, 0.0]


@devices
def test_large_squares_do_not_overflow(device: str) -> None:
    found = stats().to(device)
    ops.reduce_(
        torch.empty(5000, device=device), torch.full((1, 5000), 2e38, device=device), stats=found
    )
    assert found[1].item() == 0.0
    assert found[0].item() == pytest.approx(5000 * 4e76, rel=1e-6)


def test_the_sum_of_squares_is_the_exact_one_within_double_rounding() -> None:
    acc, found = torch.empty(20_011), stats()
    ops.reduce_(acc, torch.randn(2, 20_011) * 1e3, stats=found)
    exact = sum(Fraction(x) ** 2 for x in acc.tolist())
    assert abs(Fraction(found[0].item()) - exact) < exact * Fraction(2) ** -48


@devices
@pytest.mark.parametrize("step", [1, 2, 4, 64, 1024, 4096])
def test_squares_are_added_in_the_order_of_the_reference(device: str, step: int) -> None:
    """Few values, of magnitudes far apart: of many alike, the last roundings hide the others."""
    for first in range(0, 4096, 64):
        values = torch.zeros(5 * 4096 + 100)
        few = values[first : first + 4 * step : step]
        few.copy_(torch.randn(4) * 2.0 ** torch.randint(-6, 6, (4,)))
        check("reduce_", device, values, values[None], stats=stats())
        check("reduce_", device, torch.empty_like(values), values[None], 0.5, stats=stats())


def test_statistics_have_the_same_bits_for_any_number_of_threads() -> None:
    chunks = torch.randn(2, 4_500_001)  # more blocks than lanes
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            acc, found = torch.empty(4_500_001), stats()
            ops.reduce_(acc, chunks, 0.5, stats=found)
            results.append(found)
    finally:
        torch.set_num_threads(before)
    assert_same(torch.stack(results), results[0].expand(4, 2).contiguous())
    assert_same(results[0][0], reference.sum_of_squares(acc))


def test_errors_give_values_and_remedy() -> None:
    acc, chunks = torch.empty(6), torch.randn(2, 6)
    refuses("reduce_", acc, chunks[:, :5], match=["chunks is", "shape (2, 5)", "(W, 6)"])
    refuses("reduce_", acc, chunks[:0], match=["chunks is", "W >= 1"])
    refuses("reduce_", acc, chunks[0], match=["chunks is", "shape (6,)"])
    refuses("reduce_", acc, torch.randn(6, 2).t(), match=["strides (1, 2)", "stride 1 along"])
    refuses("reduce_", acc, chunks[:1].expand(2, 6), match=["strides (0, 1)", "not overlap"])
    refuses("reduce_", acc, chunks.int(), match=["chunks is", "float32, bfloat16"])
    refuses("reduce_", acc, chunks.double(), match=["chunks is float64", "only into float64"])
    refuses("reduce_", chunks, chunks, match=["acc is", "1-D"])
    flat = torch.randn(20)
    rows = flat[:12].view(2, 6)
    refuses("reduce_", flat[5:11], rows, match=["chunks[0] and acc share memory", "the very row"])
    refuses("reduce_", flat[7:13], rows, match=["chunks[1] and acc share memory", "pass a copy"])
    half = flat.view(torch.float16)
    refuses("reduce_", half[:6], rows, match=["chunks[0] and acc share memory", "in its dtype"])
    ops.reduce_(flat[6:12], flat.as_strided((2, 6), (14, 1)))  # between the rows
    refuses("reduce_", acc, chunks, stats=torch.zeros(2), match=["stats is", "must be float64"])
    refuses("reduce_", acc, chunks, stats=stats()[:1], match=["stats has 1 elements", "2"])
