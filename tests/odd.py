"""The models of the tests of odd forwards and scripts, plain and wrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zshard

INPUT = torch.linspace(-1.0, 1.0, 48).view(2, 3, 8)


class Stacked(nn.Module):
    """Six blocks, each a unit, and how they are put together."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pair(make: Callable[[], nn.Module], **arguments: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, zshard.wrap(copy.deepcopy(plain), **arguments)


def assert_same_grads(plain: nn.Module, wrapped: nn.Module) -> None:
    for name, param in plain.named_parameters():
        torch.testing.assert_close(zshard.full_grad(wrapped, name), param.grad)


class Clamped(nn.Linear):
    """Changes its weight in forward, where ``clamps``."""

    clamps = False

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Holder(nn.Module):
    """Has layers that a model calls, and is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
