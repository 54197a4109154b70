"""Units that run a backward of their own inside their forward, as test-time training does."""

from __future__ import annotations

import pytest
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn

import zshard

STEPS = 3


class Adapts(nn.Linear):
    """Where ``adapts``, makes a gradient of its own, after what it is to return."""

    adapts = False

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        if self.adapts:
            super().forward(x.detach()).square().mean().backward()
        return y


def both_sides(rank: int, world_size: int, strategy: str, comm: str) -> None:
    for at in (0, 3, 5):
        plain, wrapped = pair(lambda: Stacked(Adapts), strategy=strategy, comm=comm)
        for model in (plain, wrapped):
            model.blocks[at].adapts = True
        for alone in (False, True) * STEPS:
            for model in (plain, wrapped):
                model.zero_grad()
                forward = model.blocks[at] if alone else model
                forward(INPUT).square().mean().backward()
            assert_same_grads(plain, wrapped)


@pytest.mark.parametrize(("world_size", "comm"), [(1, "auto"), (2, "group"), (2, "peer")])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_unit_may_run_a_backward_before_it_returns(
    strategy: str, world_size: int, comm: str
) -> None:
    run_ranks(both_sides, world_size, strategy, comm)


class Keeps(nn.Linear):
    """Returns a view of its weight that it has had from before a backward."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        row = self.weight[0]
        super().forward(x.detach()).square().mean().backward()
        return row


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keeps(), Keeps()])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.blocks[0](x) + self.blocks[1](x)


def returns_a_view(rank: int, world_size: int, strategy: str) -> None:
    plain, wrapped = pair(Weighted, strategy=strategy)
    if strategy == "zero3" and world_size > 1:
        with pytest.raises(zshard.ShardedAccessError, match=r"unit 'blocks\.0': .* a view of one"):
            wrapped(INPUT)
        return
    for model in (plain, wrapped):
        model(INPUT).square().mean().backward()
    assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_a_view_whose_memory_that_backward_has_given_back_is_refused(
    strategy: str, world_size: int
) -> None:
    run_ranks(returns_a_view, world_size, strategy)
