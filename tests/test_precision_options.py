"""What the shorthands of Precision are told of inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zshard


class Notes(nn.Module):
    """Notes the dtype of its input, and returns something in that of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return self.weight * 2.0


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("output", [None, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("short", "compute"),
    [(zshard.Precision.bf16, torch.bfloat16), (zshard.Precision.fp16, torch.float16)],
)
def test_inputs_and_outputs_are_cast_as_a_shorthand_is_told(
    short: Callable[..., zshard.Precision],
    compute: torch.dtype,
    output: torch.dtype | None,
    casts: bool,
) -> None:
    model = zshard.wrap(Notes(), precision=short(output=output, cast_inputs=casts))
    out = model(torch.ones(3))
    assert model.seen == (compute if casts else torch.float32)
    assert out.dtype == (output or compute)


def test_gradients_of_batch_normalisation_are_reduced_in_the_dtype_of_the_others() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    zshard.wrap(model, precision=zshard.Precision.bf16(reduce=torch.bfloat16))
    model(torch.randn(5, 3)).float().square().sum().backward()
    for name, _ in model.named_parameters():
        grad = zshard.full_grad(model, name)
        assert grad is not None and grad.dtype == torch.bfloat16, name


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(3, affine=True), nn.BatchNorm2d(3)], ids=str)
def test_normalisation_computes_in_float64_with_the_others(norm: nn.Module) -> None:
    plain = nn.Sequential(nn.Conv2d(2, 3, 1), copy.deepcopy(norm))
    model, x = copy.deepcopy(plain), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    for buffer in (each for each in model.buffers() if each.is_floating_point()):
        buffer.data = buffer.double()
    fp64 = zshard.Precision(compute=torch.float64, reduce=torch.float64)
    assert torch.equal(zshard.wrap(model, precision=fp64)(x), plain.double()(x))


def test_a_model_with_float64_beside_fp32_may_compute_in_bf16() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    zshard.wrap(model, precision=zshard.Precision.bf16())
    dtypes = [zshard.full_param(model, name).dtype for name in ("0.weight", "1.weight")]
    assert dtypes == [torch.float32, torch.float64]


def test_a_parameter_that_is_written_before_a_step_on_others_has_the_new_values_behind_it() -> None:
    model = zshard.wrap(nn.Linear(4, 2), precision=zshard.Precision.bf16())
    optimizer = zshard.SGD([model.weight], lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        model.bias.fill_(3.0)
    optimizer.step()
    assert model(torch.zeros(1, 4)).tolist() == [[3.0, 3.0]]
