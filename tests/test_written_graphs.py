"""A graph made behind a write in place, which was refused, reads no other values than it wrote."""

from __future__ import annotations

import pytest
import torch
from models import Block, Blocks
from ranks import run_ranks
from steps import batch, one_step
from torch import Tensor

import zshard


class Counts(Block):
    """Writes to a weight that it then uses, and keeps what it has made of it."""

    writes = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.writes):
                self.up.weight.mul_(1.0)
        self.kept = self.up(x)
        return x + self.down(self.kept)


def reads_what_it_wrote(rank: int, world_size: int, comm: str, writes: int, updates: int) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks(block=Counts), comm=comm, prefetch=0)
    first = model.blocks[0]
    first.writes = writes
    with pytest.raises(zshard.StateError, match=r"changed one of blocks\.0"):
        model(batch(rank, 0))
    kept, first.writes = first.kept, 0
    for _ in range(updates):
        zshard.mark_updated(model)
    if updates:
        model(batch(rank, 0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    zshard.reset(model)
    one_step(model, rank, 1)


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize(("writes", "updates"), [(1, 0), (3, 1)])
def test_a_graph_behind_writes_reads_nothing_else(comm: str, writes: int, updates: int) -> None:
    run_ranks(reads_what_it_wrote, 2, comm, writes, updates)
