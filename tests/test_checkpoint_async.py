"""Asynchronous saves beside what else may happen: other ranks' arguments, ends, slow disks."""

from __future__ import annotations

import gc
import os
import re
import time
import weakref
from datetime import timedelta
from pathlib import Path
from threading import Event

import models
import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, build, content, train
from ranks import run_ranks
from torch import nn

import zshard
from zshard.checkpoint import peers, writer
from zshard.transports.control import control_group, groups_made, timeout_of
from zshard.wrap import schedule_of


def started(rank: int, **options: object) -> tuple[nn.Module, zshard.AdamW]:
    """A model whose optimizer has states."""
    model = build(0, **options)
    optimizer = zshard.AdamW(model.parameters())
    train(model, optimizer, rank, range(1))
    return model, optimizer


def on_one_rank(rank: int, size: int, folder: str) -> None:
    model, _ = started(rank)
    zshard.save(f"{folder}/a", model, extra="old")
    with pytest.raises(zshard.MismatchError, match="asynchronous=True"):
        zshard.save(f"{folder}/a", model, extra="new", asynchronous=rank == 0)
    assert os.listdir(folder) == ["a"]
    assert zshard.load(f"{folder}/a", model).extra == "old"


def test_a_save_that_is_asynchronous_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    run_ranks(on_one_rank, 2, str(tmp_path))


def without_group(rank: int, size: int, folder: str) -> None:
    model, optimizer = started(rank)
    real = os.pwrite

    def slow(*args: object) -> int:
        time.sleep(0.01)
        return real(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", slow)
        handle = zshard.save(f"{folder}/a", model, optimizer, asynchronous=True)
        dist.destroy_process_group()
        assert not handle.done()
        handle.wait()
    assert os.listdir(folder) == ["a"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end


def test_a_save_under_way_outlives_the_process_group(tmp_path: Path) -> None:
    run_ranks(without_group, 2, str(tmp_path))
    model, optimizer = started(0)
    zshard.load(tmp_path / "a", model, optimizer)


def test_what_is_written_is_the_copy_not_what_training_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = started(0)
    zshard.save(tmp_path / "wanted", model, optimizer)
    trained, real = Event(), os.pwrite

    def held(*args: object) -> int:
        assert trained.wait(60)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", held)
    handle = zshard.save(tmp_path / "a", model, optimizer, asynchronous=True)
    train(model, optimizer, 0, range(1, 2))
    trained.set()
    handle.wait()
    assert_same(content(tmp_path / "a"), content(tmp_path / "wanted"), "the copy")


def test_when_it_has_ended_neither_the_copy_nor_the_model_is_held(tmp_path: Path) -> None:
    model, optimizer = started(0)
    handle = zshard.save(tmp_path / "a", model, optimizer, asynchronous=True)
    copies = [weakref.ref(task.held) for task in handle._writer._tasks]
    handle.wait()
    gc.collect()
    assert copies and not any(copy() for copy in copies)
    assert handle.written_bytes == handle.total_bytes > 0
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_while_it_is_written_the_model_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ignored=["1.weight"])
    gone, real = Event(), os.pwrite

    def held(*args: object) -> int:
        assert gone.wait(60)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", held)
    handle = zshard.save(tmp_path / "a", model, asynchronous=True)
    masters = [flat.master for flat in schedule_of(model).flats]
    refs = [weakref.ref(each) for each in (model, *model.parameters(), *masters)]
    del model, masters
    gc.collect()
    there = [ref() for ref in refs]
    gone.set()
    handle.wait()
    assert there == [None] * len(refs)


def test_a_failure_is_logged_and_kept_for_the_next_save_that_can_tell_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = started(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "broken")))
        handle = zshard.save(tmp_path / "a", model, asynchronous=True)
        while not handle.done():
            time.sleep(0.01)
    assert re.search("the asynchronous save failed: .*broken", caplog.text)
    with zshard.full_params(model), pytest.raises(zshard.StateError):
        zshard.save(tmp_path / "a", model)
    hook = model.blocks[1].register_forward_hook(lambda *_: zshard.save(tmp_path / "a", model))
    with pytest.raises(zshard.StateError, match="between steps"):
        model(torch.randn(4, 3))
    hook.remove()
    with pytest.raises(zshard.CheckpointError, match="broken"):
        zshard.save(tmp_path / "a", model)
    zshard.save(tmp_path / "a", model)


def two_models(rank: int, size: int, folder: str) -> None:
    models = {"actor": build(0), "critic": build(1)}
    for step in range(3):
        for name, model in models.items():  # the second while the first's is being written
            zshard.save(f"{folder}/{name}-{step}", model, extra=step, asynchronous=True)
        zshard.save(f"{folder}/both-{step}", models["critic"])
    for name, model in models.items():
        assert zshard.load(f"{folder}/{name}-2", model).extra == 2


def test_the_saves_of_two_models_do_not_meet_each_other(tmp_path: Path) -> None:
    run_ranks(two_models, 2, str(tmp_path))


def late(rank: int, size: int, folder: str, waits: bool) -> None:
    model, other = (started(rank)[0] for _ in range(2))
    real, delays = os.pwrite, [4 * rank]

    def slow(*args: object) -> int:
        time.sleep(delays.pop() if delays else 0)
        return real(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", slow)
        # In the background alone: all else may take its time.
        patch.setattr(peers, "timeout_of", lambda *_: timedelta(seconds=2))
        handle = zshard.save(f"{folder}/a", model, asynchronous=True)
        behind = zshard.save(f"{folder}/b", other, asynchronous=True)
        with pytest.raises(zshard.CommError):
            behind.wait()
        with pytest.raises(zshard.CommError):
            handle.wait() if waits else zshard.save(f"{folder}/a", model)  # which tells of it, once
        dist.barrier()
        zshard.save(f"{folder}/a", model, extra="again", asynchronous=True).wait()
    assert zshard.load(f"{folder}/a", model).extra == "again"


@pytest.mark.parametrize("waits", [True, False])
def test_after_a_rank_was_too_slow_for_one_the_next_works(tmp_path: Path, waits: bool) -> None:
    run_ranks(late, 2, str(tmp_path), waits)


def forgotten_on_one(rank: int, size: int, folder: str) -> None:
    """One rank alone has seen its background group fail, and makes another with all."""
    model, _ = started(rank)
    for name in "ab":
        zshard.save(f"{folder}/{name}", model, asynchronous=True).wait()
        if rank == 1:
            peers.Background._made.clear()


def test_a_group_that_one_rank_has_given_up_is_made_anew_by_all(tmp_path: Path) -> None:
    run_ranks(forgotten_on_one, 2, str(tmp_path), timeout=60)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def no_memory_for_the_copy(rank: int, size: int, folder: str) -> None:
    model, _ = started(rank)

    def refused(of: object) -> None:
        raise RuntimeError("not enough memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(writer, "snapshot", refused)
        mine = RuntimeError if rank == 1 else zshard.CheckpointError
        with pytest.raises(mine, match="not enough memory"):
            zshard.save(f"{folder}/a", model, asynchronous=True)
    zshard.save(f"{folder}/b", model, asynchronous=True).wait()
    assert os.listdir(folder) == ["b"]


def test_a_copy_that_one_rank_cannot_make_is_told_to_all_before_anything_is_written(
    tmp_path: Path,
) -> None:
    run_ranks(no_memory_for_the_copy, 2, str(tmp_path))


def in_pairs(rank: int, size: int, folder: str) -> None:
    """Asynchronous saves of models on two of three ranks, each two, and then on all three."""
    for ranks in ([0, 1], [1, 2], [0, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            model = zshard.wrap(models.build("blocks"), mesh=group)
            zshard.save(f"{folder}/{ranks}", model, asynchronous=True).wait()
    zshard.save(f"{folder}/all", zshard.wrap(models.build("blocks")), asynchronous=True).wait()


def test_ranks_that_are_in_different_numbers_of_groups_save_together(tmp_path: Path) -> None:
    run_ranks(in_pairs, 3, str(tmp_path), timeout=60)
    assert sorted(os.listdir(tmp_path)) == ["[0, 1]", "[0, 2]", "[1, 2]", "all"]


def beside(rank: int, size: int) -> list[list[int]]:
    """The control groups of a group of two, of which one is in another group too."""
    dist.new_group([0])
    pairs = [dist.new_group([0, 1], timedelta(seconds=limit)) for limit in (30, 9)]
    made = []
    if rank < 2:
        groups = [control_group(pair, torch.device("cpu")) for pair in pairs]
        made = [dist.get_process_group_ranks(group) for group in groups]
    assert groups_made() == len(made)
    dist.barrier(dist.new_group())  # what the ranks make together is called alike by all still
    return made


def without_a_group(rank: int, size: int, folder: str) -> str:
    model, _ = started(rank)

    def refused(*_: object) -> None:
        raise RuntimeError("Connection refused")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(zshard.CommError) as caught:
        patch.setattr(peers, "make_group", refused)
        zshard.save(f"{folder}/a", model, asynchronous=True)
    return str(caught.value)


def test_a_group_that_cannot_be_made_is_an_error_that_names_the_save(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(without_a_group, 2, str(tmp_path))):
        assert re.match(rf"rank {rank} .* new_group in .*save\(.*/a, .*Connection refused", said)


def over_groups_of_two_timeouts(rank: int, size: int) -> list[float]:
    """Seconds after which a save in the background gives up."""
    found = []
    for seconds in (30, 50):
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        comm = schedule_of(zshard.wrap(nn.Linear(2, 2), mesh=group)).comm
        background = peers.Background(comm, "save")
        found.append(timeout_of(background._group, torch.device("cpu")).total_seconds())
    return found


def test_a_save_in_the_background_has_the_timeout_of_its_models_group() -> None:
    assert run_ranks(over_groups_of_two_timeouts, 2) == [[30, 50]] * 2


def test_a_control_group_is_made_by_ranks_that_are_in_different_numbers_of_groups() -> None:
    assert run_ranks(beside, 3, timeout=60) == [[[0, 1]] * 2, [[0, 1]] * 2, []]


def in_a_fork(rank: int, size: int, folder: str) -> None:
    model, optimizer = started(rank)
    halt, real = Event(), os.pwrite

    def held(*args: object) -> int:
        assert halt.wait(60)
        return real(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", held)
        handle = zshard.save(f"{folder}/a", model, optimizer, asynchronous=True)
        assert isinstance(handle, zshard.SaveHandle)
        if (child := os.fork()) == 0:
            status = 1
            try:
                for ask in (handle.wait, handle.done):
                    with pytest.raises(zshard.StateError, match=r"a\) goes on in the process that"):
                        ask()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        halt.set()
        handle.wait()
    status = 1
    if (child := os.fork()) == 0:
        try:
            handle.wait()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert os.listdir(folder) == ["a"]


def test_a_forked_process_does_not_wait_for_what_the_rank_still_writes(tmp_path: Path) -> None:
    run_ranks(in_a_fork, 1, str(tmp_path))


def test_a_lazily_conjugated_buffer_without_dimensions_is_copied_too(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("one", torch.tensor(9 + 10j).conj())
    model = zshard.wrap(module)
    zshard.save(tmp_path / "a", model, asynchronous=True).wait()
    model.one.zero_()
    zshard.load(tmp_path / "a", model)
    assert model.one == 9 - 10j
