"""Units that write to what they are given: to all of it, or to a view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn


class Adding(nn.Linear):
    """Adds to its input in place."""

    def __init__(self, of_a_view: bool) -> None:
        super().__init__(8, 8)
        self.of_a_view = of_a_view

    def forward(self, x: Tensor) -> Tensor:
        added = super().forward(x.clone()).tanh()
        if self.of_a_view:
            x[..., :4].add_(added[..., :4])
        else:
            x.add_(added)
        return x


class Whole(Stacked):
    def __init__(self) -> None:
        super().__init__(lambda: Adding(of_a_view=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh())


class Half(Stacked):
    def __init__(self) -> None:
        super().__init__(lambda: Adding(of_a_view=True))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh())


class Given(Half):
    """Gives its units views of what it goes on with itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        for block in self.blocks:
            block(x[:])
        return x


def written(rank: int, world_size: int, make: Callable[[], nn.Module], comm: str) -> None:
    plain, wrapped = pair(make, comm=comm)
    for _ in range(2):
        for model in (plain, wrapped):
            model.zero_grad()
            model(INPUT).square().sum().backward()
        assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("make", [Whole, Half, Given])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_inputs_that_units_write_to_have_their_gradients(
    comm: str, make: Callable[[], nn.Module]
) -> None:
    run_ranks(written, 2, make, comm)
