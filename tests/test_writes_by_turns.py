"""Whole parameters that ranks have written by turns, each while another gathers them anew."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from models import Block, Blocks
from ranks import run_ranks
from steps import one_step
from torch import Tensor, nn

import zshard
from zshard.unit import Unit


class WritesRoot(Blocks):
    """One whose root is seen to be written at the end of the whole forward."""

    writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.inlet.weight.add_(1)
                self.outlet.weight.add_(1)
        return super().forward(x)


class WritesAndRaises(Block):
    writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.up.weight.add_(1)
                self.down.weight.add_(1)
            raise zshard.StateError("refused by itself")
        return super().forward(x)


def written_root() -> tuple[nn.Module, nn.Module]:
    model = WritesRoot()
    return model, model


def written_block() -> tuple[nn.Module, nn.Module]:
    model = Blocks(block=WritesAndRaises)
    return model, model.blocks[1]


MODELS = [written_root, written_block]
TURNS = [((0,), (1,)), ((0,), (0, 1), (1,))]  # who writes, step by step


def by_turns(
    rank: int,
    world_size: int,
    make: Callable[[], tuple[nn.Module, nn.Module]],
    turns: tuple[tuple[int, ...], ...],
    comm: str,
) -> None:
    torch.manual_seed(0)
    model, writer = make()
    zshard.wrap(model, strategy="zero2", precision=zshard.Precision.bf16(), comm=comm)
    before = one_step(model, rank, 0)
    finish_gathers = Unit._finish_gathers

    def late(unit: Unit) -> None:
        if unit._gathers:
            time.sleep(0.1)
        finish_gathers(unit)

    if rank == 0:  # others may go on, and write what it is about to read
        Unit._finish_gathers = late  # type: ignore[method-assign]
    for writers in turns:
        writer.writes = rank in writers
        with pytest.raises(zshard.StateError if rank in writers else zshard.MismatchError):
            one_step(model, rank, 0)
    writer.writes = False
    assert torch.equal(one_step(model, rank, 0), before)


@pytest.mark.parametrize("comm", ["peer", "group"])
@pytest.mark.parametrize("turns", TURNS, ids=str)
@pytest.mark.parametrize("make", MODELS, ids=lambda each: each.__name__)
def test_what_another_rank_has_written_by_mistake_is_gathered_by_none(
    make: Callable[[], tuple[nn.Module, nn.Module]],
    turns: tuple[tuple[int, ...], ...],
    comm: str,
) -> None:
    run_ranks(by_turns, 2, make, turns, comm)
