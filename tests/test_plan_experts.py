"""Plans of experts that torch multiplies at once, as a mixture of transformers' does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_bytes import peak_of
from torch import nn

import zshard


class Experts(nn.Module):
    """The first takes two of sixteen tokens, the next three, the last the rest."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.ones(3, 16, 24))
        self.register_buffer("ends", torch.tensor([2, 5, 16], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows:  # of x are tokens
            return F.grouped_mm(x, self.weight, offs=self.ends)
        return F.grouped_mm(self.weight.mT, x.mT, offs=self.ends)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("precision", [zshard.Precision(), zshard.Precision.bf16()])
def test_grouped_products_are_counted_in_every_dtype(
    precision: zshard.Precision, rows: bool
) -> None:
    batch = torch.ones(16, 16, requires_grad=True)
    planned = zshard.plan(Experts(rows), 1, precision=precision, batch=batch)
    assert planned.flops == 3 * 2 * 16 * 16 * 24  # forward, and the gradients of both
    model = zshard.wrap(Experts(rows), precision=precision)
    assert planned.activations.bytes == peak_of(lambda: model(batch).float().mean().backward())
