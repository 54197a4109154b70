"""load_weights of what zshard has written: the checksums beside it are those that are checked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zshard


def build(seed: int) -> nn.Module:
    model = models.build("odd_parameters")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(seed)
    return zshard.wrap(model)


def flip(path: Path) -> None:
    """Change one bit of the file's last tensor."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


WRITERS: dict[str, Callable[[Path, nn.Module], object]] = {
    "save": zshard.save,
    "export": zshard.export,
}


@pytest.mark.parametrize("named", ["", "model.safetensors"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_damaged_tensor_is_refused_and_an_undamaged_one_loaded(
    writer: str, named: str, tmp_path: Path
) -> None:
    there = build(1)
    WRITERS[writer](tmp_path / "whole", there)
    model = build(2)
    assert zshard.load_weights(model, tmp_path / "whole" / named) == zshard.Loaded()
    for name, value in zshard.state_dict(there).items():
        assert torch.equal(zshard.state_dict(model)[name], value), name
    flip(tmp_path / "whole" / "model.safetensors")
    with pytest.raises(zshard.CheckpointError, match=r"tensor .*model\.safetensors.* are damaged"):
        zshard.load_weights(model, tmp_path / "whole" / named)
    with pytest.raises(zshard.StateError, match="failed halfway"):
        zshard.full_param(model, next(name for name, _ in model.named_parameters()))


def test_files_that_others_have_written_there_are_loaded(tmp_path: Path) -> None:
    """As save_pretrained does, into the folder of an export."""
    zshard.export(tmp_path, build(1))
    values = {name: value + 1 for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(values, tmp_path / "model.safetensors")
    model = build(2)
    zshard.load_weights(model, tmp_path)
    for name, param in model.named_parameters():
        assert torch.equal(zshard.full_param(model, name), values[name].to(param.dtype)), name


@pytest.mark.parametrize("beside", ["nothing", "another save"])
def test_a_file_away_from_its_checksums_is_loaded_unchecked(beside: str, tmp_path: Path) -> None:
    there = build(1)
    zshard.save(tmp_path / "one", there)
    zshard.save(tmp_path / "other", build(3))
    (tmp_path / "away").mkdir()
    shutil.copy(tmp_path / "one/model.safetensors", tmp_path / "away")
    if beside == "another save":
        shutil.copy(tmp_path / "other/checkpoint.json", tmp_path / "away")
    model = build(2)
    zshard.load_weights(model, tmp_path / "away")
    for name, value in zshard.state_dict(there).items():
        assert torch.equal(zshard.state_dict(model)[name], value), name


def test_damaged_checksums_are_no_leave_to_go_on_without(tmp_path: Path) -> None:
    zshard.save(tmp_path / "one", build(1))
    flip(tmp_path / "one/checkpoint.json")
    with pytest.raises(zshard.CheckpointError, match=r"checkpoint\.json"):
        zshard.load_weights(build(2), tmp_path / "one")
