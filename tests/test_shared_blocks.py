"""A unit that is called several times in a row and hands on what another one made."""

from __future__ import annotations

import copy

import pytest
import torch
from odd import assert_same_grads
from ranks import run_ranks
from torch import Tensor, nn

import zshard


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).tanh())


class Decoder(nn.Module):
    """A layer that attends to a memory, and returns it for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.out((self.query(x) + self.key(memory)).tanh()), memory


class Translator(nn.Module):
    """The memory's gradient comes to the encoder through every call of the one decoder."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.encoder = nn.ModuleList(Encoder() for _ in range(3))
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        for _ in range(self.calls):
            x, memory = self.decoder(x, memory)
        return x


def trained(rank: int, world_size: int, calls: int, strategy: str) -> None:
    torch.manual_seed(0)
    plain = Translator(calls)
    model = zshard.wrap(copy.deepcopy(plain), strategy=strategy, units=[Encoder, Decoder])
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(torch.linspace(-1.0, 1.0 + step, 32).view(4, 8)).square().mean().backward()
        assert_same_grads(plain, model)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_what_a_unit_hands_on_is_not_its_own(calls: int, strategy: str) -> None:
    trained(0, 1, calls, strategy)
    run_ranks(trained, 2, calls, strategy)
