"""What a script takes from a parameter, by .data and detach(), and writes to later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zshard

BF16 = zshard.Precision.bf16()


@pytest.mark.parametrize("precision", [None, BF16])
@pytest.mark.parametrize("kind", ["data", "detach"])
def test_an_alias_taken_in_inference_mode_may_be_written_outside_of_it(
    kind: str, precision: zshard.Precision | None
) -> None:
    model = zshard.wrap(nn.Linear(3, 2), precision=precision)
    with torch.inference_mode():
        alias = model.weight.data if kind == "data" else model.weight.detach()
    alias.fill_(2.0)
    model.bias.data.zero_()
    assert torch.equal(zshard.full_param(model, "weight"), torch.full((2, 3), 2.0))
    assert model(torch.ones(1, 3)).tolist() == [[6.0, 6.0]]
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(zshard.full_grad(model, "weight"), torch.ones(2, 3))
