"""A folder of checkpoints: which are kept, which is the newest, and what is left alone."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import zshard
from zshard.checkpoint import catalogue, files
from zshard.training.output import check_output


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
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
    with os.scandir(os.fsencode(tmp_path.parent)) as entries:  # paths that are bytes
        (entry,) = (entry for entry in entries if entry.name == os.fsencode(tmp_path.name))
    assert zshard.latest(entry) == str(tmp_path / "step-3")


def test_other_saves_into_the_same_folder_are_left_alone(tmp_path: Path) -> None:
    model = plain()
    dead, alive = (tmp_path / f".b.{digit * 32}.saving" for digit in "01")
    dead.mkdir()
    (dead / "model.safetensors").touch()
    with catalogue.claimed(str(alive)):
        (alive / "model.safetensors").touch()
        zshard.save(tmp_path / "a", model)
        assert sorted(os.listdir(tmp_path)) == [alive.name, "a"]
    zshard.save(tmp_path / "a", model)
    assert os.listdir(tmp_path) == ["a"]


def test_names_of_saves_own_are_refused_and_line_breaks_allowed(tmp_path: Path) -> None:
    model = plain()
    for name in (".a.replaced", f".a.{'0' * 32}.saving", f".a.{'0' * 32}.deleted"):
        with pytest.raises(zshard.CheckpointError, match="name another folder"):
            zshard.save(tmp_path / name, model)
    name = "first\nsecond"
    (tmp_path / f".{name}.{'0' * 32}.saving").mkdir()
    zshard.save(tmp_path / name, model)
    assert os.listdir(tmp_path) == [name]


def test_a_save_that_begins_is_left_alone_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def between(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            catalogue.tidy(str(tmp_path / "another"))  # what any save beside it begins with
            done = real(*args)
            catalogue.tidy(str(tmp_path / "another"))
            calls.append(name)
            return done

        return call

    for name in ("make_folder", "rename"):
        monkeypatch.setattr(files, name, between(name, getattr(files, name)))
    zshard.save(tmp_path / "a", plain())
    zshard.save(tmp_path / "a", plain(), extra="new")
    assert calls == ["make_folder", *["rename"] * 2, "make_folder", *["rename"] * 3]
    assert os.listdir(tmp_path) == ["a"]
    assert zshard.load(tmp_path / "a", plain()).extra == "new"


def test_without_locks_a_save_removes_what_a_killed_one_of_its_name_has_left_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    left = [f".{name}.{'0' * 32}.{what}" for name in "ab" for what in ("saving", "starting")]
    for name in left:
        (tmp_path / name).mkdir()
    zshard.save(tmp_path / "a", plain())
    assert sorted(os.listdir(tmp_path)) == [*left[2:], "a"]


def replaced_while_read(rank: int, size: int, folder: str) -> None:
    load = importlib.import_module("zshard.checkpoint.load")  # not the function of that name
    model, new = plain(), plain(1)
    zshard.save(f"{folder}/a", model, extra="old")
    zshard.save(f"{folder}/b", new, extra="new")
    real = load.fill

    def fill(place: str, *rest: object) -> None:
        if rank == 0 and os.path.exists(f"{folder}/b"):
            os.rename(f"{folder}/a", f"{folder}/gone")
            os.rename(f"{folder}/b", f"{folder}/a")
        real(place, *rest)

    load.fill = fill
    assert zshard.load(f"{folder}/a", model).extra == "new"
    for name, _ in model.named_parameters():
        assert torch.equal(zshard.full_param(model, name), zshard.full_param(new, name))


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_loaded_anew(
    tmp_path: Path, size: int
) -> None:
    run_ranks(replaced_while_read, size, str(tmp_path))


def replaced_as_it_is_read_by_one(rank: int, size: int, folder: str) -> None:
    """Rank 1 has read the old manifest, and rank 0 reads the new one."""
    load = importlib.import_module("zshard.checkpoint.load")
    model, new = plain(), plain(1)
    zshard.save(f"{folder}/a", model, extra="old")
    zshard.save(f"{folder}/b", new, extra="new")
    real, first = load.read_manifest, [True]

    def read(place: str) -> object:
        at_first = bool(first and first.pop())
        if at_first and rank == 0:
            dist.barrier()
        manifest = real(place)
        if at_first and rank == 1:
            os.rename(f"{folder}/a", f"{folder}/gone")
            os.rename(f"{folder}/b", f"{folder}/a")
            dist.barrier()
        return manifest

    load.read_manifest = read
    assert zshard.load(f"{folder}/a", model).extra == "new"
    for name, _ in model.named_parameters():
        assert torch.equal(zshard.full_param(model, name), zshard.full_param(new, name))


def test_a_checkpoint_that_is_another_for_one_rank_is_loaded_anew_by_all(tmp_path: Path) -> None:
    run_ranks(replaced_as_it_is_read_by_one, 2, str(tmp_path))


def test_of_a_link_by_the_name_of_remains_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/kept").write_text("")
    link = tmp_path / f".a.{0:032x}.deleted"
    link.symlink_to(tmp_path / "data")
    zshard.save(tmp_path / "a", zshard.wrap(nn.Linear(2, 2)))
    assert not link.is_symlink() and os.listdir(tmp_path / "data") == ["kept"]


def loads_a_pipe(rank: int, size: int, folder: str, name: str) -> None:
    model = zshard.wrap(nn.Linear(2, 2))
    zshard.save(f"{folder}/a", model)
    os.unlink(f"{folder}/a/{name}")
    os.mkfifo(f"{folder}/a/{name}")
    with pytest.raises(zshard.CheckpointError, match=re.escape(name)):
        zshard.load(f"{folder}/a", model)
    assert zshard.latest(folder) is None


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    run_ranks(loads_a_pipe, 1, str(tmp_path), name, timeout=10, group=False)


def test_an_export_does_not_replace_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    model = plain()
    optimizer = zshard.AdamW(model.parameters())
    zshard.save(tmp_path / "a", model, optimizer)
    with pytest.raises(zshard.CheckpointError, match="go on from"):
        zshard.export(tmp_path / "a", model)
    assert zshard.load(tmp_path / "a", model, optimizer) == zshard.Loaded()


def test_a_buffer_whose_elements_share_memory_is_saved_and_refused_by_a_load(
    tmp_path: Path,
) -> None:
    module = torch.nn.Linear(3, 3)
    module.register_buffer("turned", torch.randn(300, 400).t())
    model = zshard.wrap(module)
    zshard.save(tmp_path / "a", model)
    wanted = module.turned.clone()
    module.turned.zero_()
    zshard.load(tmp_path / "a", model)
    assert torch.equal(module.turned, wanted)
    module.turned = torch.zeros(1, 300).expand(400, 300)
    zshard.save(tmp_path / "b", model)
    with pytest.raises(zshard.CheckpointError, match=r"turned: its elements share memory"):
        zshard.load(tmp_path / "b", model)
    assert model(torch.randn(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("url", ["s3://bucket/run", Path("gs://bucket/run")])
def test_a_url_is_not_taken_for_a_folder_on_this_machine(
    url: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    monkeypatch.chdir(tmp_path)
    calls = {
        "path": (zshard.save, zshard.export, zshard.load, lambda p, m: zshard.load_weights(m, p)),
        "folder": (lambda path, _: zshard.latest(path),),
        "--out": (lambda path, _: check_output(str(path)),),
    }
    for what, call in ((what, call) for what, several in calls.items() for call in several):
        with pytest.raises(zshard.InputError, match=rf"{what}='[sg][3s]:/.*is a URL"):
            call(url, model)
    assert os.listdir(tmp_path) == []
