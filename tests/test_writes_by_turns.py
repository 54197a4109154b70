"""Whole parameters that ranks have written by turns, each while another gathers them anew."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import one_step
from test_writes_in_backward import Rewrites
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


class WritesAndRaises(Rewrites):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.writes:
            raise zshard.StateError("refused by itself")
        return out


def written_root() -> tuple[nn.Module, nn.Module]:
    model = WritesRoot()
    return model, model


def written_block() -> tuple[nn.Module, nn.Module]:
    model = Blocks(block=WritesAndRaises)
    return model, model.blocks[1]


MODELS = [written_root, written_block]
TURNS = [((0,), (1,)), ((0,), (0, 1), (1,))]  # who writes, step by step


def read_late() -> None:
    """Have this rank read late what others may go on to write meanwhile."""
    finish_gathers = Unit._finish_gathers

    def late(unit: Unit) -> None:
        if unit._gathers:
            time.sleep(0.1)
        finish_gathers(unit)

    Unit._finish_gathers = late  # type: ignore[method-assign]


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
    if rank == 0:
        read_late()
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


def written_where_it_joined(rank: int, world_size: int, comm: str) -> None:
    torch.manual_seed(0)
    model = Blocks(block=WritesAndRaises)
    zshard.wrap(model, strategy="zero2", precision=zshard.Precision.bf16(), comm=comm)
    before = one_step(model, rank, 0)
    if rank == 1:
        read_late()
    # Each writes another block; then each gathers its own, and rank 0 goes on to the other's.
    for written in ((0, 1), (1, None)):
        for index, block in enumerate(model.blocks):
            block.writes = index == written[rank]
        with pytest.raises((zshard.StateError, zshard.MismatchError)):
            one_step(model, rank, 0)
        for block in model.blocks:
            block.writes = False
    assert torch.equal(one_step(model, rank, 0), before)


@pytest.mark.parametrize("comm", ["peer", "group"])
def test_nor_what_it_writes_behind_a_gather_that_it_has_only_joined(comm: str) -> None:
    run_ranks(written_where_it_joined, 2, comm)
