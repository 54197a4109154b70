"""A module's first persistent buffer, registered after wrap, and its last, deleted again."""

from __future__ import annotations

import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import one_step

import zshard


def registered_later(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())
    before = one_step(model, rank, 0)
    block = model.blocks[1]
    block.register_buffer("seen", torch.full((3,), rank))
    one_step(model, rank, 1)
    assert block.seen.tolist() == [0, 0, 0]
    block.register_buffer("seen", torch.ones(3 + rank))
    with pytest.raises(zshard.MismatchError, match=r"blocks\.1\.seen"):
        one_step(model, rank, 2)
    block.register_buffer("seen", torch.full((3,), rank))  # training is not taken to change it
    one_step(model, rank, 2)
    if rank == 1:
        del block.seen
    with pytest.raises(zshard.MismatchError, match=r"blocks\.1\.seen"):
        one_step(model, rank, 2)
    if rank == 0:
        del block.seen
    assert torch.equal(one_step(model, rank, 0), before)


def test_a_modules_first_buffer_may_be_registered_after_wrap() -> None:
    run_ranks(registered_later, 2)
