"""A model that some ranks have changed and others not: not read or saved, and mended by a load."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from steps import build, one_step
from torch import nn

import zshard
from zshard.wrap import schedule_of

READS: dict[str, Callable[[nn.Module, str], object]] = {
    "state_dict": lambda model, folder: zshard.state_dict(model),
    "full_param": lambda model, folder: zshard.full_param(model, "inlet.bias"),
    "full_params": lambda model, folder: zshard.full_params(model).__enter__(),
    "save": lambda model, folder: zshard.save(f"{folder}/torn", model),
    "export": lambda model, folder: zshard.export(f"{folder}/torn", model),
}


def reads_torn(rank: int, world_size: int, read: str, strategy: str, folder: str) -> str:
    model = build(strategy=strategy)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    one_step(model, rank, 0)
    if rank == 0:
        optimizer.step()
    with pytest.raises(zshard.MismatchError) as caught:
        READS[read](model, folder)
    assert not os.path.exists(f"{folder}/torn")
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("read", READS)
def test_a_torn_model_is_not_read_or_saved(read: str, strategy: str, tmp_path: Path) -> None:
    for said in run_ranks(reads_torn, 2, read, strategy, str(tmp_path)):
        assert "the ranks have changed" in said and "The model is torn" in said


def saves_torn(rank: int, world_size: int, save: str, folder: str) -> None:
    model = build()
    one_step(model, rank, 0)
    if rank == 0:
        zshard.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(zshard.MismatchError, match="left out on some ranks"):
        one_step(model, rank, 1)
    for step in range(2):
        with pytest.raises(zshard.MismatchError, match=r"is refused\. The model is torn"):
            READS[save](model, folder)
        one_step(model, rank, step)
    assert not os.path.exists(f"{folder}/torn")


@pytest.mark.parametrize("save", ["save", "export", "state_dict"])
def test_no_later_save_takes_the_parts_of_a_torn_model(save: str, tmp_path: Path) -> None:
    run_ranks(saves_torn, 2, save, str(tmp_path))


def load_nothing(path: str, model: nn.Module) -> None:
    zshard.load_weights(model, path, strict=False, rename=lambda name: None)


def load_weights_in_parts(path: str, model: nn.Module) -> None:
    with pytest.raises(zshard.MismatchError):
        zshard.full_param(model, "inlet.bias")
    for inlet in (True, False):
        rename = partial(only, inlet)
        zshard.load_weights(model, path, strict=False, rename=rename)


def only(inlet: bool, name: str) -> str | None:
    return name if name.startswith("inlet") == inlet else None


def load_without_states(path: str, model: nn.Module) -> None:
    loaded = zshard.load(path, model, zshard.AdamW(model.parameters()), strict=False)
    assert loaded.missing == ["the optimizer's states"]


def torch_load(path: str, model: nn.Module, *, average: bool = False) -> None:
    with pytest.raises(zshard.MismatchError):
        zshard.full_param(model, "inlet.bias")
    values = {name: p.clone() if average else p for name, p in model.state_dict().items()}
    with pytest.raises(dcp.api.CheckpointException, match=r"is refused\. The model is torn"):
        dcp.save(values, checkpoint_id=f"{path}-torn")
    dcp.load(values, checkpoint_id=path)


def write_whole(path: str, model: nn.Module) -> None:
    with pytest.raises(zshard.MismatchError, match="as it began"):
        zshard.full_params(model, write=True).__enter__()
    with zshard.full_params(model, write=True):
        nn.init.ones_(model.inlet.bias)


def load_values(path: str, model: nn.Module, *, but: str = "") -> None:
    with pytest.raises(zshard.MismatchError):
        zshard.full_param(model, "inlet.bias")
    whole = {name: torch.ones(p.shape) for name, p in model.named_parameters() if name != but}
    model.load_state_dict(whole, strict=False)


LOADS: dict[str, Callable[[str, nn.Module], object]] = {
    "load": zshard.load,
    "load_weights": lambda path, model: zshard.load_weights(model, path),
    "part": load_nothing,
    "part of the values": partial(load_values, but="inlet.bias"),
    "values": load_values,
    "whole": write_whole,
    "all, not strictly": lambda path, model: zshard.load(path, model, strict=False),
    "all but the optimizer's states": load_without_states,
    "in parts": load_weights_in_parts,
    "torch's": torch_load,
    "part, torch's of an average": partial(torch_load, average=True),
}


SAVES: dict[str, Callable[[str, nn.Module], object]] = {
    "load_weights": zshard.export,
    "torch's": lambda path, model: dcp.save(model.state_dict(), checkpoint_id=path),
}
SAVES["part, torch's of an average"] = SAVES["torch's"]


def mended(rank: int, world_size: int, load: str, folder: str) -> list[str]:
    """Tear the model, load, and train on; what was said."""
    model = build()
    path = f"{folder}/whole"
    SAVES.get(load, zshard.save)(path, model)
    one_step(model, rank, 0)
    if rank == 0:
        zshard.SGD(model.parameters(), lr=0.1).step()
    said = []
    for act in (
        lambda: LOADS[load](path, model),
        lambda: one_step(model, rank, 1),
        lambda: one_step(model, rank, 2),
        lambda: zshard.save(f"{folder}/mended", model),
    ):
        try:
            act()
        except zshard.MismatchError:
            said.append("torn")
        else:
            said.append("ok")
    return said


@pytest.mark.parametrize("load", LOADS)
def test_a_load_of_everything_mends_a_torn_model(load: str, tmp_path: Path) -> None:
    step = "torn" if load == "part" else "ok"
    save = "torn" if load.startswith("part") else "ok"
    assert run_ranks(mended, 2, load, str(tmp_path)) == [["ok", step, "ok", save]] * 2


def masters_mended(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = zshard.wrap(nn.Linear(8, 8).bfloat16(), strategy="ddp", init="broadcast")
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    if rank == 0:
        zshard.SGD(model.parameters(), lr=0.001).step()
    with pytest.raises(zshard.MismatchError, match="The model is torn"):
        zshard.full_params(model, write=True).__enter__()
    with zshard.full_params(model, write=True):
        for param in model.parameters():
            dist.broadcast(param.detach(), 0)
    return {name: shard.clone() for name, shard in zshard.local_shards(model).items()}


def test_the_masters_of_torn_replicas_are_alike_when_they_are_mended() -> None:
    one, other = run_ranks(masters_mended, 2)
    for name, master in one.items():
        assert torch.equal(master, other[name])


def interrupted_mend(rank: int, world_size: int, folder: str) -> None:
    model = build()
    one_step(model, rank, 0)
    if rank == 0:
        zshard.SGD(model.parameters(), lr=0.1).step()
    updates = schedule_of(model).updates
    with pytest.raises(zshard.MismatchError):
        one_step(model, rank, 1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(updates, "mended", interrupt)
        with suppress(KeyboardInterrupt), zshard.full_params(model, write=True):
            nn.init.ones_(model.inlet.bias)
    with pytest.raises(zshard.MismatchError, match="have changed the parameters differently"):
        one_step(model, rank, 2)
    for _ in range(2):
        with pytest.raises(zshard.MismatchError, match=r"is refused\. The model is torn"):
            zshard.save(f"{folder}/torn", model)
    with zshard.full_params(model, write=True):
        nn.init.ones_(model.inlet.bias)
    zshard.save(f"{folder}/mended", model)


def test_a_model_that_some_ranks_have_not_finished_to_mend_is_torn_on_all(tmp_path: Path) -> None:
    run_ranks(interrupted_mend, 2, str(tmp_path))


def fails_on_one(rank: int, world_size: int, folder: str) -> None:
    load = importlib.import_module("zshard.checkpoint.load")  # not the function of that name
    model = build()
    zshard.save(f"{folder}/a", model)

    def fails(*_: object) -> None:
        raise zshard.CheckpointError("broken")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(load, "fill", fails)
        with pytest.raises(zshard.CheckpointError, match="broken"):
            zshard.load(f"{folder}/a", model)
    zshard.load(f"{folder}/a", model, strict=False)
    for step in range(2):
        one_step(model, rank, step)


def test_a_load_that_failed_on_one_rank_alone_tears_no_model_that_is_loaded_after_it(
    tmp_path: Path,
) -> None:
    run_ranks(fails_on_one, 2, str(tmp_path))


def deleted_on_one(rank: int, world_size: int, folder: str) -> None:
    load = importlib.import_module("zshard.checkpoint.load")
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    zshard.save(f"{folder}/a", model, optimizer)

    def fails(*_: object) -> None:
        raise zshard.CheckpointError("broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "fill", fails)
        with pytest.raises(zshard.CheckpointError, match="broken"):
            zshard.load(f"{folder}/a", model, optimizer)
    if rank == 0:
        del optimizer
    with pytest.raises(zshard.StateError, match="states of the AdamW"):
        zshard.load(f"{folder}/a", model)


def test_a_torn_optimizer_that_only_some_ranks_still_have_is_told_of_on_all(tmp_path: Path) -> None:
    run_ranks(deleted_on_one, 2, str(tmp_path))


def renames(rank: int, world_size: int, folder: str) -> str:
    model = build()
    zshard.export(f"{folder}/whole", model)
    before = zshard.full_param(model, "inlet.bias")

    def rename(name: str) -> str | None:
        return None if (rank == 1 and name == "inlet.bias") else name

    with pytest.raises(zshard.MismatchError) as caught:
        zshard.load_weights(model, f"{folder}/whole", strict=False, rename=rename)
    assert torch.equal(before, zshard.full_param(model, "inlet.bias"))
    with pytest.raises(zshard.MismatchError, match="other arguments"):
        zshard.load_weights(model, f"{folder}/whole", strict=rank == 0)
    return str(caught.value)


def test_weights_that_ranks_name_differently_are_not_loaded(tmp_path: Path) -> None:
    for said in run_ranks(renames, 2, str(tmp_path)):
        assert "load_weights" in said and "Nothing has changed" in said


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_a_forward_after_a_load_is_of_what_was_loaded(strategy: str, tmp_path: Path) -> None:
    def wrapped() -> nn.Module:
        precision = zshard.Precision.bf16()
        return zshard.wrap(nn.Linear(3, 2), strategy=strategy, precision=precision)

    saved, model, x = wrapped(), wrapped(), torch.randn(4, 3)
    zshard.save(tmp_path / "a", saved)
    with torch.no_grad():
        before, wanted = model(x), saved(x)
        zshard.load(tmp_path / "a", model)
        assert torch.equal(model(x), wanted) and not torch.equal(before, wanted)


def loads_behind_a_step(rank: int, world_size: int, folder: str) -> list[bool]:
    """Of each unit: whether its gather was under way before a load, and as that began to write."""
    load = importlib.import_module("zshard.checkpoint.load")
    model = build(strategy="zero2", comm="group")
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    zshard.save(f"{folder}/a", model)
    one_step(model, rank, 0)
    optimizer.step()
    units, real = schedule_of(model).units, load.fill
    seen = [bool(unit._gathers) for unit in units]

    def fill(*args: object) -> None:
        seen.extend(bool(unit._gathers) for unit in units)
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "fill", fill)
        zshard.load(f"{folder}/a", model)
    return seen


def test_a_load_writes_nothing_that_a_gather_still_sends(tmp_path: Path) -> None:
    assert run_ranks(loads_behind_a_step, 2, str(tmp_path)) == [[True] * 4 + [False] * 4] * 2


def test_a_part_of_a_model_is_not_loaded_where_a_failed_load_has_left_no_values(
    tmp_path: Path,
) -> None:
    part = zshard.wrap(nn.Sequential(nn.Linear(3, 3)))
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    zshard.save(tmp_path / "part", part)
    zshard.save(tmp_path / "whole", model)
    file = tmp_path / "whole/model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(zshard.CheckpointError, match="are damaged"):
        zshard.load(tmp_path / "whole", model)
    file.write_bytes(whole)
    for load, given in (
        (zshard.load, (tmp_path / "part", model)),
        (zshard.load_weights, (model, tmp_path / "part")),
    ):
        with pytest.raises(zshard.CheckpointError, match=r"1\.weight: missing there"):
            load(*given, strict=False)
        with pytest.raises(zshard.StateError, match="failed halfway"):
            model(torch.ones(1, 3))
    zshard.load(tmp_path / "whole", model)
    assert zshard.load(tmp_path / "part", model, strict=False).missing == ["1.weight", "1.bias"]
    model(torch.ones(1, 3))
