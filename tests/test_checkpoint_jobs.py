"""Jobs that save to, prune and read one folder at once; what comes between is put there by hand."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zshard
from zshard.checkpoint import catalogue, files, inspect
from zshard.checkpoint.peers import Peers

loading = importlib.import_module("zshard.checkpoint.load")  # not the function of that name


def model() -> nn.Module:
    return zshard.wrap(nn.Linear(2, 2))


def once_before(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, other: Callable[..., object]
) -> None:
    """Have ``other``, another job, come before the first call of ``module.name`` that it returns
    anything but False for."""
    original = getattr(module, name)
    waiting = [other]

    def call(*args: object, **kwargs: object) -> object:
        if waiting:
            this = waiting.pop()
            if this(*args) is False:
                waiting.append(this)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize(("theirs_keeps", "left"), [(1, {"a"}), (None, {"a", "b"})])
def test_of_two_saves_that_keep_one_the_newer_stays_and_none_removes_itself(
    theirs_keeps: int | None, left: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = model(), model()
    zshard.save(tmp_path / "old", ours)

    def other_job(*_: object) -> None:
        zshard.save(tmp_path / "a", theirs, keep=theirs_keeps)

    once_before(monkeypatch, catalogue, "prune", other_job)
    zshard.save(tmp_path / "b", ours, keep=1)
    assert set(os.listdir(tmp_path)) == left and zshard.latest(tmp_path) == str(tmp_path / "a")


def test_a_checkpoint_replaced_as_it_was_to_be_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = model(), model()
    for name in ("last", "b-0", "b-1"):
        zshard.save(tmp_path / name, ours)

    def other_job(place: str) -> bool:
        if os.path.basename(place) != "last":
            return False
        zshard.save(tmp_path / "last", theirs, extra="new")
        return True

    once_before(monkeypatch, catalogue, "_others_in", other_job)
    zshard.save(tmp_path / "b-2", ours, keep=2)
    assert zshard.load(zshard.latest(tmp_path), theirs).extra == "new"
    assert sorted(os.listdir(tmp_path)) == ["b-1", "b-2", "last"]


def test_what_another_job_has_deleted_already_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model()
    for name in ("a", "b", "c"):
        zshard.save(tmp_path / name, ours)

    def other_job(place: str) -> bool:
        if os.path.basename(place) != "a":
            return False
        os.rename(place, tmp_path / ".a.elsewhere")
        return True

    once_before(monkeypatch, catalogue, "_others_in", other_job)
    zshard.save(tmp_path / "d", ours, keep=1)
    assert sorted(os.listdir(tmp_path)) == [".a.elsewhere", "d"]


def test_one_that_cannot_be_deleted_is_told_of_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model()
    zshard.save(tmp_path / "a", ours)
    rename = catalogue.files.rename

    def refusing(old: str, new: str) -> None:
        if new.endswith(".deleted"):
            raise zshard.CheckpointError(f"{new}: Permission denied")
        rename(old, new)

    monkeypatch.setattr(catalogue.files, "rename", refusing)
    with pytest.raises(zshard.CheckpointError, match=r"b is saved, but .* Permission denied"):
        zshard.save(tmp_path / "b", ours, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_the_rest_of_a_checkpoint_half_removed_is_not_put_back(tmp_path: Path) -> None:
    ours = model()
    (tmp_path / ".last.replaced").mkdir()
    (tmp_path / ".last.replaced" / "model.safetensors").write_bytes(b"rest")
    zshard.save(tmp_path / "b", ours)
    assert not (tmp_path / "last").exists()
    zshard.save(tmp_path / "last", ours)
    assert sorted(os.listdir(tmp_path)) == ["b", "last"]


def test_a_load_between_the_two_renames_of_a_replacement_finds_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model()
    zshard.save(tmp_path / "last", ours, extra="whole")

    def other_job(*_: object) -> None:
        os.rename(tmp_path / "last", catalogue.replaced(str(tmp_path / "last")))

    once_before(monkeypatch, loading, "check_files", other_job)
    assert zshard.load(tmp_path / "last", ours).extra == "whole"
    assert not (tmp_path / "last").exists()
    assert zshard.load_weights(ours, tmp_path / "last") == zshard.Loaded()


def test_a_checkpoint_replaced_as_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model()
    zshard.save(tmp_path / "last", ours, extra=1)

    def other_job(*_: object) -> None:
        with torch.no_grad():
            ours.weight.mul_(2)
        zshard.save(tmp_path / "last", ours, extra=2)

    with monkeypatch.context() as patched:
        once_before(patched, inspect, "fill", other_job)
        assert inspect.verify(str(tmp_path / "last"), lambda _: None) == []
    with monkeypatch.context() as patched:
        once_before(patched, inspect, "check_files", other_job)
        summary = inspect.summarize(str(tmp_path / "last"))
    assert summary.problems == [] and summary.extra == 2


def test_what_is_replaced_faster_than_it_is_read_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model()
    zshard.save(tmp_path / "last", ours)
    check_files = inspect.check_files

    def other_job(*args: object) -> None:
        with torch.no_grad():
            ours.weight.mul_(2)
        zshard.save(tmp_path / "last", ours)
        check_files(*args)

    monkeypatch.setattr(inspect, "check_files", other_job)
    with pytest.raises(zshard.CheckpointError, match="was replaced each of the 5 times"):
        inspect.summarize(str(tmp_path / "last"))


def test_a_checkpoint_that_is_cut_and_was_not_replaced_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model()
    zshard.save(tmp_path / "last", ours)
    os.truncate(tmp_path / "last/model.safetensors", 100)
    looks, check_files = [], loading.check_files
    monkeypatch.setattr(
        loading, "check_files", lambda *given: (looks.append(1), check_files(*given))
    )
    with pytest.raises(zshard.CheckpointError, match="has 100 bytes"):
        zshard.load(tmp_path / "last", ours)
    assert len(looks) == 1


def test_a_load_that_has_lost_a_rank_waits_for_none_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, stages = model(), []
    zshard.save(tmp_path / "last", ours)

    def lost(*_: object) -> None:
        stages.append(1)
        raise zshard.CommError("rank 1 has ended")

    monkeypatch.setattr(Peers, "gather", lost)
    with pytest.raises(zshard.CommError, match="rank 1 has ended"):
        zshard.load(tmp_path / "last", ours)
    assert len(stages) == 1


def test_a_folder_that_another_job_makes_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once_before(monkeypatch, os, "mkdir", lambda folder, *_: os.makedirs(folder))
    zshard.save(tmp_path / "run/last", model(), extra=1)
    assert zshard.load(tmp_path / "run/last", model()).extra == 1


def test_a_load_of_what_is_replaced_faster_than_it_is_read_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, looks = model(), []
    zshard.save(tmp_path / "last", ours)

    def cut(*_: object) -> None:
        looks.append(1)
        assert len(looks) < 5
        zshard.save(tmp_path / "last", ours)
        raise zshard.CheckpointError("was cut short")

    monkeypatch.setattr(loading, "_ATTEMPTS", 3)
    monkeypatch.setattr(loading, "check_files", cut)
    with pytest.raises(zshard.CheckpointError, match="was cut short"):
        zshard.load(tmp_path / "last", ours)
    assert len(looks) == 3


def test_what_a_save_may_have_to_put_back_is_not_removed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = model(), model()
    zshard.save(tmp_path / "a", ours, extra="old")
    sync, others = files.sync_folder, [lambda: zshard.save(tmp_path / "b", theirs)]

    def fails_behind_another_job(folder: str) -> None:
        if others and (tmp_path / ".a.replaced").exists():
            others.pop()()
            raise zshard.CheckpointError("it broke")
        sync(folder)

    monkeypatch.setattr(files, "sync_folder", fails_behind_another_job)
    with pytest.raises(zshard.CheckpointError, match="it broke"):
        zshard.save(tmp_path / "a", ours, extra="new")
    assert zshard.load(tmp_path / "a", ours).extra == "old" and not others
