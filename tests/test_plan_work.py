"""What a rehearsed step is made of where modules, or ops of torch, have ways of their own."""

from __future__ import annotations

import pytest
import torch
from live_bytes import peak_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard


class Listed(nn.Linear):
    """Finds its weight, and a buffer, in a list of its own."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.register_buffer("shift", torch.zeros(3))
        self.held = [self.weight, self.shift]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, shift = self.held
        return x @ weight + shift


@pytest.mark.parametrize("precision", [zshard.Precision(), zshard.Precision.bf16()])
def test_a_parameter_that_is_found_in_a_list_gets_no_gradient(precision: zshard.Precision) -> None:
    model = nn.Sequential(Listed(), Listed())
    model[1].weight.grad = given = torch.ones(3, 3)
    planned = zshard.plan(model, 2, precision=precision, batch=torch.empty(4, 3))
    assert planned.flops == 5 * 2 * 4 * 3 * 3  # no gradient of the input
    assert model[0].weight.grad is None and model[1].weight.grad is given
    assert torch.equal(given, torch.ones(3, 3))


class Recomputed(Listed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.matmul, x, self.held[0], use_reentrant=True)  # no function of torch


def test_a_gradient_that_a_parameter_gets_all_the_same_is_none_of_the_models() -> None:
    model = nn.Sequential(Recomputed(), Recomputed())
    model[1].weight.grad = given = torch.ones(3, 3)
    zshard.plan(model, 2, batch=torch.empty(4, 3))
    assert model[0].weight.grad is None and model[1].weight.grad is given
    assert torch.equal(given, torch.ones(3, 3))


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
def test_the_products_of_an_lstm_are_counted(options: dict[str, object]) -> None:
    model = Recurrent(16, 24, **options)
    planned = zshard.plan(model, 2, batch=torch.empty(7, 5, 16, requires_grad=True))
    elements = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert planned.flops == 3 * 2 * 7 * 5 * elements  # forward, and the gradients of both


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("units", ["model", "layer"])
def test_sparse_gradients_are_alive_until_they_are_packed(
    kind: type[nn.Embedding] | type[nn.EmbeddingBag], units: str
) -> None:
    batch = torch.zeros(4, 8, dtype=torch.int64)
    model = nn.Sequential(kind(300, 16, sparse=True), nn.Linear(16, 4))
    planned = zshard.plan(model, 1, batch=batch, units=units).activations
    zshard.wrap(model, units=units)
    assert planned.bytes == peak_of(lambda: model(batch).mean().backward()) > 300 * 16 * 4


def test_a_sum_of_sparse_gradients_has_the_elements_of_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16, sparse=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table(tokens) + self.table(tokens + 1)

    model, batch = Twice(), torch.zeros(4, 8, dtype=torch.int64)
    planned = zshard.plan(model, 1, batch=batch).activations
    zshard.wrap(model)
    assert planned.bytes == peak_of(lambda: model(batch).mean().backward())
