"""A folder of checkpoints: which are kept, which is the newest, and what is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard


def plain() -> nn.Module:
    torch.manual_seed(0)
    return zshard.wrap(models.Blocks())


def keeping(rank: int, size: int, folder: str) -> None:
    model = plain()
    assert zshard.latest(f"{folder}/new") is None
    for step in (9, 10, 11, 2):
        zshard.save(f"{folder}/new/step-{step}", model, extra=step, keep=3)
        assert zshard.latest(f"{folder}/new") == f"{folder}/new/step-{step}"
    zshard.full_param(model, "inlet.weight")  # ranks meet
    if rank == 0:
        assert sorted(os.listdir(f"{folder}/new")) == ["step-10", "step-11", "step-2"]
        os.truncate(f"{folder}/new/step-2/model.safetensors", 100)
        os.makedirs(f"{folder}/new/user's")
    zshard.full_param(model, "inlet.weight")
    assert zshard.latest(f"{folder}/new") == f"{folder}/new/step-11"  # the newest that is whole
    zshard.full_param(model, "inlet.weight")
    zshard.save(f"{folder}/new/step-11", model, extra="again", keep=1)
    assert zshard.load(zshard.latest(f"{folder}/new"), model).extra == "again"
    if rank == 0:
        assert sorted(os.listdir(f"{folder}/new")) == ["step-11", "step-2", "user's"]


@pytest.mark.parametrize("size", [1, 2])
def test_keep_and_latest_go_by_the_order_of_saves(tmp_path: Path, size: int) -> None:
    run_ranks(keeping, size, str(tmp_path))


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path: Path) -> None:
    model = plain()
    zshard.save(tmp_path / "a", model, extra=1)
    (tmp_path / "link").symlink_to("a")
    zshard.save(tmp_path / "link", model, extra=2)
    assert (tmp_path / "link").is_symlink()
    assert zshard.load(tmp_path / "a", model).extra == 2
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]


def test_a_link_is_neither_counted_nor_deleted_by_keep(tmp_path: Path) -> None:
    model = plain()
    for step in range(4):
        zshard.save(tmp_path / f"step-{step}", model, keep=2)
        for link in ("best", "the-newest"):  # before and after the checkpoints in alphabetic order
            (tmp_path / link).unlink(missing_ok=True)
            (tmp_path / link).symlink_to(f"step-{step}")
    assert sorted(os.listdir(tmp_path)) == ["best", "step-2", "step-3", "the-newest"]
    assert zshard.latest(tmp_path) == str(tmp_path / "step-3")


def test_other_saves_into_the_same_folder_are_left_alone(tmp_path: Path) -> None:
    model = plain()
    dead, alive = (tmp_path / f".b.{digit * 32}.saving" for digit in "01")
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    from zshard.checkpoint import catalogue

    with catalogue.claimed(str(alive)):
        zshard.save(tmp_path / "a", model)
        assert sorted(os.listdir(tmp_path)) == [alive.name, "a"]
    zshard.save(tmp_path / "a", model)
    assert os.listdir(tmp_path) == ["a"]
