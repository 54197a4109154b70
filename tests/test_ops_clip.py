"""clip_factor_: the norm and the factor that torch's clipping has, in one launch."""

from __future__ import annotations

import math

import pytest
import torch
from ops_check import assert_same, check, devices, refuses

from zshard import ops

SQUARES = [0.0, 1e-320, 1e-12, 0.09, 1.0, 7.0, 1e60, 1e300, math.inf, math.nan]
WIDTHS = [torch.float32, torch.float64]


def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype)


@devices
@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 0.3, 1.0, 1e30, math.inf])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_norm_and_factor_have_the_references_bits(
    device: str, dtype: torch.dtype, max_norm: float
) -> None:
    for value in SQUARES:
        for scale in (None, one(2.0**-16, dtype), one(-0.3, dtype), one(math.nan, dtype)):
            outputs = one(-1.0, dtype), one(-1.0, dtype)
            check("clip_factor_", device, *outputs, one(value, torch.float64), max_norm, scale)


@devices
def test_the_reference_rounds_every_root_once(device: str) -> None:
    for value in torch.logspace(-12, 12, 2001, dtype=torch.float64).tolist():  # torch.sqrt: 1 in 80
        outputs = one(-1.0, torch.float64), one(-1.0, torch.float64)
        check("clip_factor_", device, *outputs, one(value, torch.float64), 1.0)


@devices
@pytest.mark.parametrize("dtype", WIDTHS)
def test_the_factor_is_what_torchs_clipping_multiplies_by(device: str, dtype: torch.dtype) -> None:
    for norm in torch.logspace(-8, 8, 400, dtype=dtype).to(device):
        grad = torch.ones(1, dtype=dtype, device=device)
        parameter = torch.nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad
        torch.nn.utils.clip_grads_with_norm_([parameter], 0.3, norm)
        factor, found = torch.empty_like(grad), torch.empty_like(grad)
        ops.clip_factor_(factor, found, norm.double().square().view(1), 0.3)
        assert_same(factor.cpu(), grad.cpu())
        assert_same(found.cpu(), norm.view(1).cpu())


def test_other_shapes_and_dtypes_are_refused() -> None:
    squares = one(1.0, torch.float64)
    for arguments, match in (
        ((torch.ones(2), one(1.0), squares), ["factor has 2 elements, but must have 1"]),
        ((torch.ones(()), one(1.0), squares), ["factor", "1-D"]),
        ((one(1.0), one(1.0, torch.float64), squares), ["norm", "float32"]),
        ((one(1.0, torch.float64), one(1.0), squares), ["norm", "float64"]),
        ((one(1.0, torch.bfloat16), one(1.0), squares), ["factor", "float32"]),
        ((one(1.0), one(1.0), one(1.0)), ["squares", "float64"]),
        ((squares, one(1.0, torch.float64), squares), ["squares and factor share memory"]),
        ((one(1.0), one(1.0), squares.to("meta")), ["cpu", "meta"]),
    ):
        refuses("clip_factor_", *arguments, 1.0, match=match)
    a, b = one(1.0), one(1.0)
    refuses("clip_factor_", a, a, squares, 1.0, match=["norm and factor share memory"])
    refuses("clip_factor_", a, b, squares, 1.0, b, match=["scale and norm share memory"])
    refuses("clip_factor_", a, b, squares, 1.0, squares, match=["scale", "float32"])
