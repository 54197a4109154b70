"""A model of blocks of which each rank runs its own, as experts are."""

from __future__ import annotations

from collections.abc import Sequence

import models
import torch
from models import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BLOCKS = 5
DETACHED = -1  # in a path


class Experts(nn.Module):
    """Blocks of which those run that ``path`` says, where DETACHED detaches what came before.

    Args:
        reentrant: in one reentrant checkpoint, of which nobody can tell what it makes.
        frozen: all but the blocks.
        spare: every other block has a parameter that never gets a gradient.
    """

    def __init__(self, reentrant: bool, frozen: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, models.WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outlet = nn.Linear(models.WIDTH, 1)
        if frozen:
            self.inlet.requires_grad_(False)
            self.outlet.requires_grad_(False)
        if spare:
            for block in list(self.blocks)[::2]:
                block.spare = nn.Parameter(torch.ones(2))
        self.path: Sequence[int] = ()
        self.reentrant = reentrant

    def forward(self, data: Tensor) -> Tensor:
        x = self.inlet(data)
        if self.reentrant:
            return self.outlet(checkpoint(self.run, x, data, use_reentrant=True))
        return self.outlet(self.run(x, data))

    def run(self, x: Tensor, data: Tensor) -> Tensor:
        for block in self.path:
            x = x.detach() if block == DETACHED else self.blocks[block](x)
        return x + 0.0 * data.sum()  # a backward comes here, if only for the data
