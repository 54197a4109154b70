"""Forwards that enable gradients themselves, in a script that has disabled them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn


class Enabling(nn.Linear):
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class InBlocks(Stacked):
    def __init__(self) -> None:
        super().__init__(lambda: Enabling(8, 8))


class InTheModel(Stacked):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x).tanh())


def enabled(rank: int, world_size: int, comm: str) -> None:
    makes: list[Callable[[], nn.Module]] = [InBlocks, InTheModel]
    for make in makes:
        plain, wrapped = pair(make, comm=comm)
        for _ in range(2):
            for model in (plain, wrapped):
                model.zero_grad()
                with torch.no_grad():
                    output = model(INPUT)
                output.square().sum().backward()
            assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_backward_goes_through_a_forward_that_enabled_gradients_itself(comm: str) -> None:
    run_ranks(enabled, 2, comm)
