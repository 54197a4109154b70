"""A checkpoint by torch.distributed.checkpoint moves to and from FSDP2, optimizer states too."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sides import Side, load, load_sides, plain, save, save_sides
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def fsdp2(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain(case, "before")
    blocks = model.blocks if hasattr(model, "blocks") else []
    for block in blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


SHARED = ["blocks", "frozen", "tied_in_one_unit"]


def fsdp2_saves(rank: int, world_size: int, folder: Path) -> None:
    for case in SHARED:
        save(*fsdp2(case), folder / case)


def fsdp2_loads(rank: int, world_size: int, folder: Path, names: list[str]) -> list[str]:
    wrong = []
    for case, name in ((case, name) for case in SHARED for name in names):
        model, optimizer = fsdp2(case)
        wrong += load(model, optimizer, folder / f"{case} {name}")
        models.loss_of(model, models.batches(case, 1, rank)[0]).backward()
        optimizer.step()  # also with steps that were counted in int64
    return wrong


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (3, 2)])
def test_a_checkpoint_moves_to_and_from_fsdp2(ours: int, theirs: int, tmp_path: Path) -> None:
    kinds = {
        "torch": ("zero3", "fp32"),
        "zshard": ("zero1", "split") if ours == 2 else ("zero3", "bf16"),
    }
    sides = {f"{c} {o}": Side(c, *kinds[o], o) for c in SHARED for o in kinds}
    run_ranks(fsdp2_saves, theirs, tmp_path)
    loads = [(side.case, side) for side in sides.values()]
    for wrong in run_ranks(load_sides, ours, loads, tmp_path):
        assert wrong == []
    run_ranks(save_sides, ours, sides, tmp_path)
    for wrong in run_ranks(fsdp2_loads, theirs, tmp_path, list(kinds)):
        assert wrong == []
