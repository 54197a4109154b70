"""More elements than 32 bits count, on a GPU (9 GB); a CPU would take minutes, and has fewer."""

from __future__ import annotations

import pytest
import torch
from ops_check import devices
from torch import Tensor

from zshard import ops

BORDERS = {"cpu": 1 << 20, "cuda": 1 << 31}
ENDS = slice(8192), slice(-8192, None)  # what is compared; the border is in the latter


def source_on(device: str) -> Tensor:
    """bf16, with 5 elements more than the border; zeros but for what is compared."""
    source = torch.zeros(BORDERS[device] + 5, dtype=torch.bfloat16, device=device)
    for end in ENDS:
        source[end].normal_()
    return source


def assert_equal_at_the_ends(actual: Tensor, expected: Tensor) -> None:
    for end in ENDS:
        wanted = expected[end].to(actual.dtype)
        torch.testing.assert_close(actual[end], wanted, rtol=0, atol=0)


@devices
def test_a_cast_reaches_past_2_to_the_31(device: str) -> None:
    source = source_on(device)
    out = torch.full_like(source, torch.nan, dtype=torch.float16)
    ops.cast_(out, source)
    assert_equal_at_the_ends(out, source)


@devices
def test_a_pack_reaches_past_2_to_the_31(device: str) -> None:
    source = source_on(device)
    out = torch.full_like(source, torch.nan)
    ops.pack_(out, [source[:3], source[3:]], [0, 3])
    assert_equal_at_the_ends(out, source)


@devices
def test_a_reduction_reaches_past_2_to_the_31(device: str) -> None:
    source = source_on(device)
    out = torch.full_like(source, torch.nan)
    stats = torch.zeros(2, dtype=torch.float64, device=device)
    ops.reduce_(out, source.unsqueeze(0), stats=stats)
    assert_equal_at_the_ends(out, source)
    squares = sum(float(part.double().square().sum()) for part in source.split(1 << 26))
    assert stats.tolist() == pytest.approx([squares, 0.0], rel=1e-12)
