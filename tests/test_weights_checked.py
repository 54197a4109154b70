"""load_weights of what zshard has written: the checksums beside it are those that are checked."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zshard
from zshard.checkpoint import writer


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


def in_shards(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model saved into several files."""
    monkeypatch.setattr(writer, "FILE_BYTES", 100)
    model = build(seed)
    zshard.save(folder, model)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return model


def test_every_file_of_an_index_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = in_shards(tmp_path / "one", 1, monkeypatch)
    model = build(2)
    zshard.load_weights(model, tmp_path / "one")
    for name, value in zshard.state_dict(there).items():
        assert torch.equal(zshard.state_dict(model)[name], value), name
    shard = next(iter(sorted((tmp_path / "one").glob("model-*.safetensors"))))
    values = load_file(shard)
    save_file({name: value + 1 for name, value in values.items()}, shard)  # this one is another's
    zshard.load_weights(model, tmp_path / "one")
    flip(sorted((tmp_path / "one").glob("model-*.safetensors"))[-1])
    with pytest.raises(zshard.CheckpointError, match="are damaged"):
        zshard.load_weights(model, tmp_path / "one")


def test_files_of_two_saves_are_not_loaded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("one", "other")):
        in_shards(tmp_path / name, seed, monkeypatch)
    shard = sorted((tmp_path / "one").glob("model-*.safetensors"))[-1]
    shutil.copy(tmp_path / "other" / shard.name, shard)
    model = build(3)
    before = zshard.state_dict(model)
    with pytest.raises(zshard.CheckpointError, match="are of 2 saves, mixed"):
        zshard.load_weights(model, tmp_path / "one")
    for name, value in zshard.state_dict(model).items():
        assert torch.equal(before[name], value), name


def test_a_file_that_was_changed_and_kept_its_id_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    zshard.export(tmp_path, build(1))
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    save_file({**load_file(path), "more": torch.ones(3)}, path, metadata)
    model = build(2)
    for strict in (True, False):
        with pytest.raises(zshard.CheckpointError, match=r"is not where checkpoint\.json be"):
            zshard.load_weights(model, tmp_path, strict=strict)
    (tmp_path / "checkpoint.json").unlink()
    assert zshard.load_weights(model, tmp_path, strict=False).unexpected == ["more"]


def test_an_id_of_a_save_that_is_no_text_is_damage_of_the_header(tmp_path: Path) -> None:
    zshard.export(tmp_path, zshard.wrap(nn.Linear(2, 4)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        re.sub(rb'"zshard_save":"(\w{30})\w+"', rb'"zshard_save":["\1"]', path.read_bytes())
    )
    with pytest.raises(zshard.CheckpointError, match="header is damaged: zshard_save is a list"):
        zshard.load_weights(zshard.wrap(nn.Linear(2, 4)), tmp_path)


@pytest.mark.parametrize(("was", "now"), [("F32", "I32"), ("[4,2]", "[2,4]")])
def test_a_header_that_tells_another_kind_or_shape_of_the_same_bytes_is_refused(
    was: str, now: str, tmp_path: Path
) -> None:
    zshard.export(tmp_path, zshard.wrap(nn.Linear(2, 4)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(was.encode(), now.encode(), 1))
    with pytest.raises(zshard.CheckpointError, match=r"is not where checkpoint\.json be"):
        zshard.load_weights(zshard.wrap(nn.Linear(2, 4)), tmp_path)


def test_copies_of_a_tied_weight_may_lie_in_other_orders(tmp_path: Path) -> None:
    untied = nn.ModuleDict({"a": nn.Linear(3, 4, bias=False), "b": nn.Linear(3, 4, bias=False)})
    with torch.no_grad():
        untied["b"].weight = nn.Parameter(untied["a"].weight.t().contiguous().t())
    zshard.save(tmp_path / "whole", zshard.wrap(untied, units="model"))
    tied = nn.ModuleDict({"a": nn.Linear(3, 4, bias=False), "b": nn.Linear(3, 4, bias=False)})
    tied["b"].weight = tied["a"].weight
    zshard.load_weights(zshard.wrap(tied, units="model"), tmp_path / "whole")
    assert torch.equal(zshard.full_param(tied, "a.weight"), zshard.full_param(untied, "a.weight"))


def loads_copies(rank: int, world_size: int, folder: str) -> bool:
    untied, tied = (nn.ModuleDict({n: nn.Linear(9, 9, bias=False) for n in "ab"}) for _ in range(2))
    untied.requires_grad_(False)["b"].weight.copy_(untied["a"].weight)
    tied["b"].weight = tied["a"].weight
    zshard.save(f"{folder}/a", zshard.wrap(untied, init="broadcast"))
    zshard.load_weights(zshard.wrap(tied, init="broadcast"), f"{folder}/a")
    return zshard.full_param(tied, "a.weight").equal(zshard.full_param(untied, "b.weight"))


def test_copies_of_a_tied_weight_that_several_ranks_have_written_are_compared(
    tmp_path: Path,
) -> None:
    assert run_ranks(loads_copies, 3, str(tmp_path)) == [True] * 3


@pytest.mark.parametrize(
    "other",
    [torch.ones(3, 4).bfloat16(), torch.ones(3, 4).half().view(torch.bfloat16), torch.ones(4, 3)],
    ids=["equal in another dtype", "the same bytes in another dtype", "another shape"],
)
def test_copies_of_a_tied_weight_in_another_dtype_or_shape_are_refused(
    other: torch.Tensor, tmp_path: Path
) -> None:
    tied = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    model = zshard.wrap(tied, units="model")
    one = torch.ones(3, 4).to(torch.float32 if other.dtype == torch.float32 else torch.half)
    save_file({"a.weight": one, "b.weight": other}, tmp_path / "copies.safetensors")
    before = zshard.full_param(model, "a.weight").clone()
    with pytest.raises(zshard.CheckpointError, match=r"a\.weight and b\.weight are one tensor"):
        zshard.load_weights(model, tmp_path / "copies.safetensors")
    assert torch.equal(zshard.full_param(model, "a.weight"), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight", torch.ones(2, 3, dtype=torch.int64)), ("count", torch.tensor(2.5))],
)
def test_only_floating_point_tensors_are_cast_and_only_to_such(
    name: str, value: torch.Tensor, tmp_path: Path
) -> None:
    plain = nn.Linear(3, 2, bias=False)
    plain.register_buffer("count", torch.tensor(3))
    save_file({**plain.state_dict(), name: value}, tmp_path / "other.safetensors")
    model = zshard.wrap(plain)
    with pytest.raises(zshard.CheckpointError, match=rf"{name}: of torch\.\w+, and torch"):
        zshard.load_weights(model, tmp_path / "other.safetensors")


def test_an_index_that_says_another_file_than_a_tensor_is_in_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "a.safetensors")
    save_file({"weight": torch.zeros(2, 3), "bias": torch.ones(2)}, tmp_path / "b.safetensors")
    index = {"weight": "b.safetensors", "bias": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(zshard.CheckpointError, match=r"says that bias are in it, and they are not"):
        zshard.load_weights(zshard.wrap(nn.Linear(3, 2)), tmp_path)


def test_damaged_checksums_are_no_leave_to_go_on_without(tmp_path: Path) -> None:
    zshard.save(tmp_path / "one", build(1))
    flip(tmp_path / "one/checkpoint.json")
    with pytest.raises(zshard.CheckpointError, match=r"checkpoint\.json"):
        zshard.load_weights(build(2), tmp_path / "one")


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e8m0fnu, "bfloat16"])
def test_an_export_in_a_dtype_that_weights_would_be_lost_in_is_refused(
    tmp_path: Path, dtype: object
) -> None:
    with pytest.raises(zshard.InputError, match=r"dtype=.*expected one of floating-point numbers"):
        zshard.export(tmp_path / "a", zshard.wrap(nn.Linear(3, 2)), dtype=dtype)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


def test_an_export_in_another_dtype_leaves_whole_numbers_as_they_are(tmp_path: Path) -> None:
    plain = nn.Linear(3, 2)
    plain.register_buffer("position", torch.tensor([0, 257]))
    zshard.export(tmp_path / "a", zshard.wrap(plain), dtype=torch.bfloat16)
    stored = load_file(tmp_path / "a/model.safetensors")
    assert stored["weight"].dtype == torch.bfloat16
    assert stored["position"].dtype == torch.int64 and stored["position"].tolist() == [0, 257]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(3, 3))
    zshard.export(tmp_path / "a", model)
    with pytest.raises(zshard.InputError, match=r"rename makes two tensors of .* 'weight'"):
        zshard.load_weights(model, tmp_path / "a", rename=lambda name: "weight")


def test_what_strict_does_not_refuse_is_not_put_down_to_it(tmp_path: Path) -> None:
    zshard.save(tmp_path / "a", zshard.wrap(nn.Linear(3, 3, bias=False)))
    for model, told in ((nn.Linear(3, 4, bias=False), False), (nn.Linear(3, 3), True)):
        with pytest.raises(zshard.CheckpointError, match="does not fit") as error:
            zshard.load(tmp_path / "a", zshard.wrap(model))
        assert ("(strict=False allows" in str(error.value)) == told
