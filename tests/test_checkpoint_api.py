"""What save, load, keep and latest accept and refuse: a typed error on every rank, nothing lost."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import models
import numpy
import pytest
import torch
from checkpoints import plain, train
from ranks import run_ranks
from torch import nn

import zshard
from zshard.checkpoint import catalogue

_ENDLESS: list[object] = []
_ENDLESS.append(_ENDLESS)


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        (torch.zeros(2), r"extra is a Tensor"),
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\] is a set"),
        ({"best": float("inf")}, r"extra\['best'\] is inf"),
        ({1: "a"}, "has the key 1"),
        (b"bytes", "extra is a bytes"),
        (signal.SIGINT, "extra is a Signals"),
        (numpy.str_("text"), "extra is a str_"),
        (["\ud800"], r"extra\[0\] has text that is no Unicode"),
        ({"n": 10**5000}, r"extra cannot be written as JSON: .*\(4300"),
        (_ENDLESS, "extra cannot be written as JSON: .*recursion"),
    ],
)
def test_extra_that_json_does_not_give_back_is_refused_before_anything_is_written(
    tmp_path: Path, extra: object, where: str
) -> None:
    model, _ = plain()
    with pytest.raises(zshard.InputError, match=where):
        zshard.save(tmp_path / "a", model, extra=extra)
    assert os.listdir(tmp_path) == []


def test_extra_comes_back(tmp_path: Path) -> None:
    model, _ = plain()
    extra = {"step": 3, "x": [1.5, None, True, {"ü": "text\n"}], "t": (1, 2), "big": 2**80}
    extra["loss"] = numpy.float64(0.25)
    zshard.save(tmp_path / "a", model, extra=extra)
    assert zshard.load(tmp_path / "a", model).extra == {**extra, "t": [1, 2]}


def differing(rank: int, size: int, folder: str) -> list[str]:
    model, optimizer = plain()
    calls: list[Callable[[], object]] = [
        lambda: zshard.save(f"{folder}/{rank}", model),
        lambda: zshard.save(f"{folder}/a", model, extra=rank),
        lambda: zshard.save(f"{folder}/a", model, keep=rank + 1),
        lambda: zshard.save(f"{folder}/a", model, optimizer if rank else None),
        lambda: zshard.save(f"{folder}/a", model, rng=bool(rank)),
        lambda: zshard.save(f"{folder}/a", model, extra=set() if rank else None),
        lambda: zshard.load(f"{folder}/{rank}", model),
        lambda: zshard.load(f"{folder}/a", model, optimizer if rank else None),
        lambda: zshard.load(f"{folder}/a", model, strict=bool(rank)),
        lambda: zshard.load(f"{folder}/a", model, rng=bool(rank)),
    ]
    seen = []
    for call in calls:
        with pytest.raises(zshard.Error) as raised:
            call()
        seen.append(f"{type(raised.value).__name__}: {raised.value}")
    assert os.listdir(folder) == []
    train(model, optimizer, rank, range(1))  # goes on
    zshard.save(f"{folder}/a", model)
    return seen


def test_ranks_that_differ_in_what_they_ask_for_all_get_an_error(tmp_path: Path) -> None:
    first, second = run_ranks(differing, 2, str(tmp_path))
    kinds = [text.split(":")[0] for text in first]
    assert kinds == [*["MismatchError"] * 5, "InputError", *["MismatchError"] * 4]
    assert kinds == [text.split(":")[0] for text in second]
    assert f"{tmp_path}/0" in first[0] and f"{tmp_path}/1" in first[0]
    assert "extra is a set" in second[5] and "rank 1: extra is a set" in first[5]


def no_checkpoint(rank: int, size: int, folder: str) -> None:
    model, optimizer = plain()
    before = zshard.full_param(model, "inlet.weight")
    Path(folder, "file").touch()
    os.makedirs(f"{folder}/things/inside", exist_ok=True)
    for path, words in {
        "gone": "does not exist",
        "file": "a file",
        "things": r"no checkpoint.json.*zshard\.latest",
    }.items():
        with pytest.raises(zshard.CheckpointError, match=f"{folder}/{path}.*{words}"):
            zshard.load(f"{folder}/{path}", model, optimizer)
    with pytest.raises(zshard.CheckpointError, match=f"{folder}/file: is a file"):
        zshard.save(f"{folder}/file", model)
    with pytest.raises(zshard.CheckpointError, match=f"{folder}/things: .*other things in it"):
        zshard.save(f"{folder}/things", model)
    with pytest.raises(zshard.CheckpointError, match=f"{folder}/file: Not a directory"):
        zshard.save(f"{folder}/file/a", model)
    for bad in (None, 3, "", "/", b"bytes", "a\0b", "\ud800"):
        with pytest.raises(zshard.InputError, match="path="):
            zshard.save(bad, model)  # type: ignore[arg-type]
    with pytest.raises(zshard.InputError, match=r"path=None.*zshard\.latest"):
        zshard.load(zshard.latest(folder), model)  # type: ignore[arg-type]
    with pytest.raises(zshard.InputError, match="folder=None"):
        zshard.latest(None)  # type: ignore[arg-type]
    for bad in ("a\0b", "\ud800"):
        with pytest.raises(zshard.CheckpointError, match=r"null (byte|character)|surrogates"):
            zshard.latest(bad)
    for keep in (0, -1, True, 1.5):
        with pytest.raises(zshard.InputError, match="keep="):
            zshard.save(f"{folder}/a", model, keep=keep)  # type: ignore[arg-type]
    with pytest.raises(zshard.InputError, match=r"expected a torch\.optim\.Optimizer"):
        zshard.save(f"{folder}/a", model, "adam")  # type: ignore[arg-type]
    with pytest.raises(zshard.InputError, match=r"a parameter of shape .* does not have"):
        zshard.save(f"{folder}/a", model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(zshard.WrapError, match="not wrapped"):
        zshard.save(f"{folder}/a", nn.Linear(2, 2))
    assert torch.equal(zshard.full_param(model, "inlet.weight"), before)
    assert sorted(os.listdir(folder)) == ["file", "things"]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_no_checkpoint_is_neither_loaded_nor_overwritten(tmp_path: Path, size: int) -> None:
    run_ranks(no_checkpoint, size, str(tmp_path))


def things_inside(rank: int, size: int, folder: str) -> None:
    model, _ = plain()
    zshard.save(f"{folder}/1", model)
    if rank == 0:
        Path(folder, "1/notes.md").touch()
    zshard.save(f"{folder}/2", model)
    zshard.save(f"{folder}/2/inner", model)
    for path, there in ("1", "notes.md"), ("2", "inner"):
        for write in zshard.save, zshard.export:
            with pytest.raises(zshard.CheckpointError, match=f"{folder}/{path}: .*: {there}; move"):
                write(f"{folder}/{path}", model)
    zshard.save(f"{folder}/3", model, keep=1)
    zshard.save(f"{folder}/4", model, keep=1)


def test_what_others_put_into_a_checkpoint_is_not_deleted_with_it(tmp_path: Path) -> None:
    run_ranks(things_inside, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "4"]
    assert (tmp_path / "1/notes.md").exists() and (tmp_path / "2/inner/checkpoint.json").exists()


def test_latest_finds_a_checkpoint_that_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = plain()
    zshard.save(tmp_path / "a", model)
    whole_id = catalogue.whole_id

    def replaced_before_it_is_read(target: str) -> None:
        monkeypatch.setattr(catalogue, "whole_id", whole_id)
        zshard.save(tmp_path / "a", model)

    monkeypatch.setattr(catalogue, "whole_id", replaced_before_it_is_read)
    assert zshard.latest(tmp_path) == str(tmp_path / "a")


def other_models(rank: int, size: int, folder: str) -> None:
    model, optimizer = plain()
    train(model, optimizer, rank, range(2))
    zshard.save(f"{folder}/a", model, optimizer)

    torch.manual_seed(1)
    changed = models.Blocks()
    changed.inlet = nn.Linear(3, 7, bias=False)
    changed.blocks[0].up = nn.Linear(7, 11)
    changed.blocks[0].down = nn.Linear(11, 7)
    changed.blocks[1].norm.weight.data = changed.blocks[1].norm.weight.data.double()
    changed.added = nn.Parameter(torch.ones(3))
    other = zshard.wrap(changed)
    before = zshard.full_param(other, "outlet.weight")
    problems = [
        "inlet.bias: not in the model",
        r"blocks.0.up.weight: of shape \(13, 7\), and \(11, 7\) in the model",
        r"blocks.0.down.weight: of shape \(7, 13\)",
        "blocks.1.norm.weight: of torch.float32, and torch.float64 in the model",
        "added: missing",
    ]
    for strict in (True, False):
        with pytest.raises(zshard.CheckpointError) as raised:
            zshard.load(f"{folder}/a", other, strict=strict)
        text = str(raised.value)
        for problem in problems if strict else problems[1:-1]:
            assert re.search(problem, text), (problem, text)
    assert torch.equal(zshard.full_param(other, "outlet.weight"), before)

    fits = models.Blocks()
    fits.inlet = nn.Linear(3, 7, bias=False)
    fits.added = nn.Parameter(torch.ones(3))
    other = zshard.wrap(fits)
    states = zshard.AdamW(other.parameters())
    loaded = zshard.load(f"{folder}/a", other, states, strict=False)
    assert loaded.missing == ["added", "the optimizer's state of added"]
    assert loaded.unexpected == ["inlet.bias", "the optimizer's state of inlet.bias"]
    name = "outlet.weight"
    assert torch.equal(zshard.full_param(other, name), zshard.full_param(model, name))
    assert torch.equal(zshard.full_param(other, "added"), torch.ones(3))


@pytest.mark.parametrize("size", [1, 2])
def test_what_does_not_fit_is_listed_whole_and_changes_nothing(tmp_path: Path, size: int) -> None:
    run_ranks(other_models, size, str(tmp_path))


class WithExtraState(nn.Linear):
    """A module with a state that is no tensor."""

    def __init__(self, state: object) -> None:
        super().__init__(3, 3)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def test_the_extra_state_of_modules_is_kept(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Sequential(WithExtraState({"seen": 3}), nn.ReLU()))
    zshard.save(tmp_path / "a", model)
    model[0].state = None
    zshard.load(tmp_path / "a", model)
    assert model[0].state == {"seen": 3}
    model[0].state = object()
    with pytest.raises(zshard.InputError, match=r"0._extra_state \(get_extra_state\) is a object"):
        zshard.save(tmp_path / "a", model)


def test_extra_state_that_is_missing_or_unexpected_is_listed(tmp_path: Path) -> None:
    with_one, without = (
        zshard.wrap(nn.Sequential(module, nn.ReLU()))
        for module in (WithExtraState(3), nn.Linear(3, 3))
    )
    zshard.save(tmp_path / "with", with_one)
    zshard.save(tmp_path / "without", without)
    with pytest.raises(zshard.CheckpointError, match=r"0\._extra_state: missing there"):
        zshard.load(tmp_path / "without", with_one)
    with pytest.raises(zshard.CheckpointError, match=r"0\._extra_state: not in the model"):
        zshard.load(tmp_path / "with", without)
    assert zshard.load(tmp_path / "without", with_one, strict=False).missing == ["0._extra_state"]
    assert zshard.load(tmp_path / "with", without, strict=False).unexpected == ["0._extra_state"]
    assert with_one[0].state == 3


def test_the_manifest_is_json(tmp_path: Path) -> None:
    model, optimizer = plain()
    zshard.save(tmp_path / "a", model, optimizer, extra={"step": 3})
    manifest = json.loads((tmp_path / "a/checkpoint.json").read_text())
    assert manifest["format"] == 1 and manifest["checkpoint"]["extra"] == {"step": 3}
    assert manifest["checkpoint"]["tensors"]["model"]["inlet.weight"]["shape"] == [7, 3]


def test_a_save_or_load_inside_a_forward_or_full_params_is_refused(tmp_path: Path) -> None:
    model, _ = plain()
    zshard.save(tmp_path / "a", model, extra=1)
    hook = model.blocks[1].register_forward_hook(lambda *_: zshard.save(tmp_path / "a", model))
    with pytest.raises(zshard.StateError, match=r"save\(.*\) can only be called between steps"):
        model(torch.randn(4, 3))
    hook.remove()
    with zshard.full_params(model, write=True):
        for call in (zshard.save, zshard.load, zshard.export):
            with pytest.raises(zshard.StateError, match=r"full_params, whose changes"):
                call(tmp_path / "a", model)
    assert zshard.load(tmp_path / "a", model).extra == 1


def from_disks_of_their_own(rank: int, world_size: int, folder: str) -> list[str]:
    model = zshard.wrap(nn.Linear(3, 2), init="broadcast")
    for disk in range(world_size):
        zshard.save(f"{folder}/{disk}/x", model, extra=disk)
    for module in ("load", "weights"):
        found = importlib.import_module(f"zshard.checkpoint.{module}")
        found.absolute = lambda path, **_: f"{folder}/{rank}/x"
    said = []
    for call in (lambda: zshard.load("/x", model), lambda: zshard.load_weights(model, "/x")):
        with pytest.raises(zshard.Error) as caught:
            call()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    model(torch.ones(2, 3))
    return said


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    for said in run_ranks(from_disks_of_their_own, 2, str(tmp_path)):
        assert "CheckpointError: /x: the ranks found different checkpoints there" in said[0]
        assert "MismatchError" in said[1] and "found other tensors there" in said[1]


def text_for_flags(rank: int, world_size: int, folder: str) -> list[str]:
    model = zshard.wrap(nn.Linear(3, 2), init="broadcast")
    zshard.save(folder, model)
    said = []
    for call in (
        lambda: zshard.save(folder, model, rng="no"),
        lambda: zshard.save(folder, model, asynchronous="no"),
        lambda: zshard.load(folder, model, strict="no" if rank == 0 else False),
        lambda: zshard.load_weights(model, folder, strict="no" if rank == 0 else False),
    ):
        with pytest.raises(zshard.Error) as caught:
            call()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    zshard.load(folder, model)
    return said


def test_text_where_a_flag_belongs_is_refused_on_every_rank(tmp_path: Path) -> None:
    own, other = run_ranks(text_for_flags, 2, str(tmp_path / "saved"))
    for said in (own, other):
        assert "InputError" in said[0] and "rng='no': expected True or False" in said[0]
        assert "asynchronous='no': expected True or False" in said[1]
        assert "MismatchError" in said[2] and "strict='no'" in said[2]
        assert "InputError" in said[3] and "strict='no': expected" in said[3]


def test_paths_that_are_no_text_and_folders_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    odd = os.path.join(tmp_path, os.fsdecode(b"a\xff"))
    zshard.save(odd, model)
    assert zshard.latest(tmp_path) == odd
    zshard.load(odd, zshard.wrap(nn.Linear(3, 2)))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for call in (zshard.save, zshard.load, zshard.export):
        with pytest.raises(zshard.InputError, match="'x': there is no current folder"):
            call("x", model)
