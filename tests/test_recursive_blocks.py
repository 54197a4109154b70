"""Units whose forward calls itself: one call of the unit, whatever goes on inside."""

from __future__ import annotations

import models
import pytest
import torch
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zshard


class Again(nn.Module):
    """Uses its weights behind the inner call as well as before it."""

    checkpointed = False
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            if self.fails:
                raise ValueError("user code")
            return x
        x = self.down(x).tanh()
        if self.checkpointed:
            x = checkpoint(self, self.up(x), depth - 1, use_reentrant=False)
        else:
            x = self(self.up(x), depth - 1)
        return x + self.up(self.down(x))


def build(checkpointed: bool) -> models.Blocks:
    torch.manual_seed(0)
    model = models.Blocks(block=Again)
    for block in model.blocks:
        block.checkpointed = checkpointed
    return model


def trained(rank: int, world_size: int, strategy: str, checkpointed: bool) -> list[bool]:
    """Whether losses and gradients are the plain model's, or DDP's."""
    plain = run = build(checkpointed)
    if world_size > 1:
        run = DistributedDataParallel(plain)
    wrapped = zshard.wrap(build(checkpointed), strategy=strategy)
    same = []
    for step in range(3):
        with torch.no_grad():
            wrapped(batch(rank, step))
        wrapped.blocks[0].fails = step == 1
        if wrapped.blocks[0].fails:
            with pytest.raises(ValueError, match="user code"):
                wrapped(batch(rank, step))
            wrapped.blocks[0].fails = False
        losses = [models.loss_of(model, batch(rank, step)) for model in (run, wrapped)]
        for loss in losses:
            loss.backward()
        same.append(torch.equal(*losses))
        same += [
            torch.equal(param.grad, zshard.full_grad(wrapped, name))
            for name, param in plain.named_parameters()
        ]
        plain.zero_grad()
        wrapped.zero_grad()
    return same


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_block_that_calls_itself_has_ddps_bits(strategy: str, checkpointed: bool) -> None:
    assert all(trained(0, 1, strategy, checkpointed))
    assert all(map(all, run_ranks(trained, 2, strategy, checkpointed)))
