"""Forwards that enable gradients themselves, in a script that has disabled them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn

import zshard


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


class GivesAForce(InTheModel):
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x)[0]

    @torch.enable_grad()
    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2


def assert_goes_through(plain: nn.Module, wrapped: nn.Module) -> None:
    for model in (plain, wrapped):
        model.zero_grad()
        with torch.no_grad():
            output = model(INPUT)
        output.square().sum().backward()
    assert_same_grads(plain, wrapped)


def enabled(rank: int, world_size: int, comm: str) -> None:
    makes: list[Callable[[], nn.Module]] = [InBlocks, InTheModel]
    for make in makes:
        plain, wrapped = pair(make, comm=comm)
        for _ in range(2):
            assert_goes_through(plain, wrapped)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_backward_goes_through_a_forward_that_enabled_gradients_itself(comm: str) -> None:
    run_ranks(enabled, 2, comm)


class Ordered(InBlocks):
    """Runs its blocks in an order of the moment."""

    order: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def ordered(rank: int, world_size: int, comm: str) -> None:
    plain, wrapped = pair(Ordered, comm=comm)
    for order in ((0, 1, 2), (1, 0, 2), (0, 1, 0, 2), (1, 0, 2)):
        plain.order = wrapped.order = order
        assert_goes_through(plain, wrapped)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_such_forwards_may_go_other_ways_each_time(comm: str) -> None:
    run_ranks(ordered, 2, comm)


def forces(rank: int, world_size: int) -> None:
    plain, wrapped = pair(GivesAForce)
    twice = zshard.method(wrapped, "twice")
    with torch.no_grad():
        expected = plain(INPUT)
        assert torch.equal(wrapped(INPUT), expected)
        with zshard.full_params(wrapped):
            if rank == 0:
                assert torch.equal(wrapped(INPUT), expected)
                assert torch.equal(twice(INPUT), expected * 2)
            assert torch.equal(wrapped.blocks[0](INPUT), plain.blocks[0](INPUT))
    with zshard.full_params(wrapped), pytest.raises(zshard.StateError, match="enabled inside"):
        wrapped.blocks[0](INPUT)
    with zshard.full_params(wrapped), pytest.raises(zshard.StateError, match="enabled inside"):
        twice(INPUT)


def test_a_model_that_makes_forces_is_evaluated_with_whole_parameters() -> None:
    run_ranks(forces, 2)


class Guided(nn.Linear):
    """Adds the gradient of another model, which is not a submodule."""

    def __init__(self, guide: nn.Module) -> None:
        super().__init__(8, 8)
        self._guide = [guide]

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self._guide[0](at).sum(), at)
        return super().forward(x) + force


def guided(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    guide = zshard.wrap(InTheModel())
    model = zshard.wrap(Guided(guide))
    with torch.no_grad():
        expected = model(INPUT)
        with zshard.full_params(model), zshard.full_params(guide):
            assert torch.equal(model(INPUT), expected)
    with zshard.full_params(guide), pytest.raises(zshard.StateError, match="enabled inside"):
        model(INPUT)  # in a step


def test_so_is_one_that_takes_them_of_another_model() -> None:
    run_ranks(guided, 2)
