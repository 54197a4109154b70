"""Checkpoints of a model whose parameters were replaced or removed after wrap are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard
from zshard.checkpoint import inventory
from zshard.layout import Range


def build() -> nn.Module:
    return zshard.wrap(nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 50)), units="model")


def replace(model: nn.Module) -> None:
    model[1].weight = nn.Parameter(torch.zeros(50, 70))


def remove(model: nn.Module) -> None:
    model[1].bias = None


def add(model: nn.Module) -> None:
    model[0].extra = nn.Parameter(torch.zeros(2))


def calls(model: nn.Module, path: Path) -> list[Callable[[], object]]:
    return [
        lambda: zshard.save(path.parent / "b", model, keep=1),
        lambda: zshard.export(path.parent / "c", model),
        lambda: zshard.load(path, model),
        lambda: zshard.load_weights(model, path),
    ]


def refused(
    rank: int,
    world_size: int,
    folder: Path,
    change: Callable[[nn.Module], None],
    on: tuple[int, ...],
) -> None:
    model = build()
    zshard.save(folder / "a", model, keep=1)
    before = zshard.full_param(model, "0.weight")
    if rank in on:
        change(model)
    for call in calls(model, folder / "a"):
        with pytest.raises(zshard.Error, match="wrap"):
            call()
    assert zshard.latest(folder) == str(folder / "a")
    fresh = build()
    zshard.load(folder / "a", fresh)
    assert torch.equal(zshard.full_param(fresh, "0.weight"), before)


@pytest.mark.parametrize("change", [replace, remove, add])
@pytest.mark.parametrize("on", [(0,), (1,), (0, 1)])
def test_a_changed_model_is_neither_saved_nor_loaded(
    tmp_path: Path, change: Callable[[nn.Module], None], on: tuple[int, ...]
) -> None:
    run_ranks(refused, 2, tmp_path, change, on)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def save_with_a_gap(rank: int, world_size: int, folder: Path) -> None:
    """A save in which a rank leaves out what it owns, as only a defect could have it."""
    model = build()
    zshard.save(folder / "a", model, keep=1)
    if rank == 1:
        inventory.saved_range = lambda flat, segment: Range(0, 0)
    with pytest.raises(zshard.CheckpointError, match=r"no rank has some of the elements of [01]\."):
        zshard.save(folder / "b", model, keep=1)


def test_a_save_that_lacks_a_part_never_becomes_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_with_a_gap, 2, tmp_path)
    assert zshard.latest(tmp_path) == str(tmp_path / "a")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
