"""Units that return their own parameter as the values of a tensor without memory of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

AT = torch.arange(8)


def coordinates(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.stack([AT, AT.flip(0)]), values, (8, 8))


def rows(values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(torch.arange(9), AT.flip(0), values, (8, 8))


def jagged(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values.view(8, 1), torch.tensor([0, 3, 8]))


class Weights(nn.Module):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.values, self.make = nn.Parameter(torch.rand(8)), make

    def forward(self) -> Tensor:
        return self.make(self.values)


class Weighted(Stacked):
    """Uses what the units return when all have returned, and others lie where they have lain."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda: Weights(make))

    def forward(self, x: Tensor) -> Tensor:
        for weights in [block() for block in self.blocks]:
            if weights.is_nested:
                x = x * weights.values().view(8)
            else:
                x = torch.sparse.mm(weights, x.reshape(-1, 8).t()).t()
        return x


def returns_values(rank: int, world_size: int, make: Callable[[Tensor], Tensor]) -> None:
    plain, wrapped = pair(lambda: Weighted(make), prefetch=0)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(INPUT), plain(INPUT))
    for model in (plain, wrapped):
        model(INPUT).square().mean().backward()
    assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("make", [coordinates, rows, jagged])
def test_a_unit_may_return_a_sparse_or_nested_tensor_of_its_parameter(
    make: Callable[[Tensor], Tensor],
) -> None:
    run_ranks(returns_values, 2, make)


class Distributed(nn.Linear):
    """Takes and returns a DTensor, as a tensor-parallel layer does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def forward(self, x: Tensor) -> Tensor:
        local = x.to_local() if isinstance(x, DTensor) else x
        made: Tensor = DTensor.from_local(super().forward(local), self.mesh, [Replicate()])
        return made


def returns_dtensors(rank: int, world_size: int) -> None:
    plain, wrapped = pair(lambda: nn.Sequential(Distributed(), Distributed()))
    for model in (plain, wrapped):
        model(INPUT).to_local().square().mean().backward()
    assert_same_grads(plain, wrapped)


def test_a_unit_may_return_a_dtensor() -> None:
    run_ranks(returns_dtensors, 2)
