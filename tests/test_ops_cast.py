"""cast_ and the split master: every 16-bit pattern, and the 32-bit ones that matter."""

from __future__ import annotations

import pytest
import torch
from ops_check import F, assert_same, check, devices, odd, refuses
from torch import Tensor

from zshard import InputError, ops


def patterns() -> Tensor:
    """Return fp32 values: all upper halves, each with the lower halves where rounding turns."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    bits = torch.cat([upper + low for low in lower])
    return bits.to(torch.int32).view(torch.float32)


@devices
@pytest.mark.parametrize("out_dtype", F)
def test_cast_rounds_every_pattern_to_nearest_even(device: str, out_dtype: torch.dtype) -> None:
    check("cast_", device, torch.empty(9 * 2**16, dtype=out_dtype), patterns())


@devices
@pytest.mark.parametrize("out_dtype", F)
@pytest.mark.parametrize("src_dtype", [torch.bfloat16, torch.float16])
def test_cast_reads_every_16_bit_pattern(
    device: str, src_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    src = torch.arange(-(2**15), 2**15).to(torch.int16).view(src_dtype)
    check("cast_", device, torch.empty(2**16, dtype=out_dtype), src)


@devices
@pytest.mark.parametrize("src_dtype", F)
@pytest.mark.parametrize("out_dtype", F)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 2047, 2049, 100_003, 3_000_001])
def test_cast_at_any_size_and_alignment(
    device: str, numel: int, out_dtype: torch.dtype, src_dtype: torch.dtype
) -> None:
    for out_start, src_start in [(0, 0), (1, 0), (0, 3), (5, 5)]:
        check("cast_", device, odd(numel, out_dtype, out_start), odd(numel, src_dtype, src_start))


@devices
def test_cast_to_and_from_float64(device: str) -> None:
    wide = torch.randn(5001, dtype=torch.float64)
    check("cast_", device, torch.empty(5001), wide)
    check("cast_", device, wide, odd(5001, torch.float32))
    check("cast_", device, torch.empty_like(wide), wide)


@devices
def test_split_matches_the_reference_and_join_restores_every_bit(device: str) -> None:
    scattered = torch.randint(-(2**31), 2**31, (2**20 + 5,)).to(torch.int32).view(torch.float32)
    for src in (patterns(), scattered[1:]):
        hi = torch.zeros(src.numel() + 3, dtype=torch.bfloat16)[3:]
        lo = torch.zeros(src.numel(), dtype=torch.int16)
        check("split_master_", device, hi, lo, src)
        moved = [t.to(device) for t in (torch.zeros_like(src), hi, lo)]
        ops.join_master_(*moved)
        assert_same(moved[0].cpu().view(torch.int32), src.contiguous().view(torch.int32))
        check("join_master_", device, torch.zeros_like(src), hi, lo)


@devices
def test_the_upper_plane_shows_what_the_master_is(device: str) -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, -0x400000], dtype=torch.int32)
    for src in (quiet.view(torch.float32), torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])):
        hi = torch.zeros(4, dtype=torch.bfloat16, device=device)
        ops.split_master_(hi, torch.zeros(4, dtype=torch.int16, device=device), src.to(device))
        assert_same(hi.cpu(), src.bfloat16())


def test_split_rounds_half_up() -> None:
    src = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF], dtype=torch.int32)
    hi, lo = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    ops.split_master_(hi, lo, src.view(torch.float32))
    assert hi.view(torch.int16).tolist() == [0x3F81, 0x3F82, 0x3F80]
    assert lo.tolist() == [-0x8000, -0x8000, 0x7FFF]


def test_errors_give_values_and_remedy() -> None:
    x, half = torch.empty(6), torch.empty(6, dtype=torch.bfloat16)
    lo = torch.empty(6, dtype=torch.int16)
    refuses("cast_", x, x[:5], match=["src has 5 elements", "must have 6"])
    refuses("cast_", x.view(2, 3), x, match=["out is float32 of shape (2, 3)", "1-D"])
    refuses("cast_", x, lo, match=["src is int16", "convert"])
    refuses("cast_", half, x.double(), match=["src is float64", "go through float32"])
    refuses("cast_", x, half.to("meta"), match=["cpu and meta", "one device"])
    refuses("split_master_", x, lo, x, match=["hi is float32", "must be bfloat16"])
    refuses("split_master_", half, half, x, match=["lo is bfloat16", "must be int16"])
    refuses("split_master_", half[:3], lo, x, match=["hi has 3 elements", "must have 6"])
    refuses("join_master_", half, half, lo, match=["out is bfloat16", "must be float32"])


@devices
def test_tensors_that_share_memory_are_refused(device: str) -> None:
    wide = torch.randn(64, device=device)
    narrow, lo = wide.view(torch.bfloat16), torch.empty(64, dtype=torch.int16, device=device)
    with pytest.raises(InputError, match="src and out share memory"):
        ops.cast_(wide, narrow[64:])
    with pytest.raises(InputError, match="src and out share memory"):
        ops.cast_(wide[1:], wide[:-1])
    with pytest.raises(InputError, match="hi and src share memory"):
        ops.split_master_(narrow[:64], lo, wide)
    with pytest.raises(InputError, match="lo and out share memory"):
        ops.join_master_(wide, torch.empty_like(narrow[:64]), wide.view(torch.int16)[64:])
    with pytest.raises(InputError, match="hi and lo share memory"):
        ops.split_master_(lo.view(torch.bfloat16), lo, wide)
    before = wide.clone()
    ops.cast_(wide, wide)  # it is there already
    assert torch.equal(wide, before)
