"""Forwards that change parameters of units still to come, as momentum encoders do."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard


class Momentum(nn.Module):
    """MoCo's two encoders (He et al. 2020): the key's weights follow the query's, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.ModuleList(nn.Linear(6, 6) for _ in range(4)) for _ in range(2))
        self.key.requires_grad_(False)

    def forward(self, x: Tensor, follows: bool) -> Tensor:
        a = b = x
        for layer in self.query:
            a = layer(a).tanh()
        with torch.no_grad():
            pairs = zip(self.query.parameters(), self.key.parameters(), strict=True)
            for query, key in pairs if follows else ():
                key.data = key.data * 0.5 + query.data * 0.5
            for layer in self.key:
                b = layer(b).tanh()
        return (a - b - 1).square().mean()


def train(rank: int, world_size: int, options: dict[str, object] | None, skips: int) -> list[float]:
    """Train, and return the losses; the plain model's without options.

    Args:
        skips: the rank whose key does not follow in one of the steps; -1 for none.
    """
    torch.manual_seed(0)
    model: nn.Module = Momentum()
    if options is not None:
        model = zshard.wrap(model, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.3)
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 6, generator=generator), step != 2 or rank != skips)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_unit_that_was_gathered_ahead_is_gathered_anew(
    size: int, strategy: str, prefetch: int
) -> None:
    options = {"strategy": strategy, "prefetch": prefetch}
    plain = train(0, 1, None, -1)
    for losses in run_ranks(train, size, options, -1):
        assert losses == plain


def change_on_one(rank: int, world_size: int, comm: str) -> str:
    with pytest.raises(zshard.MismatchError) as caught:
        train(rank, world_size, {"comm": comm}, 1)
    return str(caught.value)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_change_on_some_ranks_is_an_error_on_all(comm: str) -> None:
    for said in run_ranks(change_on_one, 2, comm, timeout=20):
        assert "the ranks have changed" in said
