"""Calls and ranks that fail in a save: typed errors on every rank, the old checkpoint stays."""

from __future__ import annotations

import errno
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adversity import (
    OPERATIONS,
    SCENES,
    Run,
    States,
    fork,
    join,
    patched,
    same,
    scratch,
    wait,
)
from ranks import run_ranks

import zshard

ERRORS = {
    **dict.fromkeys(("open", "pwrite", "mkdir"), errno.ENOSPC),
    **dict.fromkeys(("fsync", "rename", "unlink", "rmdir", "close"), errno.EIO),
}

READING = ("open", "close")
STUBBORN = ("unlink", "rmdir", "rename", *READING)


@contextmanager
def failing(at: int, *, goes_on: bool = False) -> Iterator[list[str]]:
    """Have the operation of that number fail; yields the names of those before and of that.

    Args:
        goes_on: all of its kind fail from then on, as on a disk that is full.
    """
    done: list[str] = []

    def tapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            done.append(name)
            if len(done) == at or (goes_on and len(done) > at and done[at - 1] == name):
                if name == "close":
                    real(*args, **options)
                raise OSError(ERRORS[name], os.strerror(ERRORS[name]), str(args[0]))
            return real(*args, **options)

        return call

    with patched(**{name: tapped(name, getattr(os, name)) for name in OPERATIONS}):
        yield done


@pytest.mark.parametrize("goes_on", [False, True], ids=["once", "from_then_on"])
@pytest.mark.parametrize("name", ["new", "replace", "keep"])
def test_a_failure_of_any_operation_is_a_typed_error_and_the_next_save_works(
    name: str, goes_on: bool
) -> None:
    scene, states = SCENES[name], States("old", "older", "new", "next")
    at, failed = 0, set()
    with scratch() as base:
        while True:
            at += 1
            folder = base / str(at)
            scene.build(folder, states)
            text = ""
            with failing(at, goes_on=goes_on) as done:
                try:
                    states.save("new", folder / scene.target, keep=scene.keep)
                except zshard.CheckpointError as error:
                    text = str(error)
            if len(done) < at:
                assert not text
                break
            kind = done[at - 1]
            story = f"{kind}, operation {at}: {text}"
            now = scene.check(folder, states, {"new"})
            if text:
                failed.add(kind)
                assert str(folder) in text and os.strerror(ERRORS[kind]) in text, story
                assert now != "new" or "is saved, but" in text, story
            else:
                assert now == "new", story
            # What cannot be removed or renamed stays; what cannot be read is not pruned.
            if "is saved, but" not in text and not (goes_on and kind in STUBBORN):
                expected = set(scene.before) | ({scene.target} if now else set())
                if now == "new" and scene.keep == 1 and kind not in READING:
                    expected = {scene.target}
                found = set(os.listdir(folder))
                assert found == expected or (kind in READING and now and found < expected), story
            scene.check_next_save(folder, states)
    assert failed >= {"open", "pwrite", "fsync", "mkdir", "rename"}, failed
    print(f"{name}: {at - 1} cases")


def fail_one_rank(rank: int, world_size: int, base: str, which: int, call: str) -> list[str]:
    """Rank ``which`` meets EIO at each of its fsyncs (or other calls) in turn."""
    run, folder, errors = Run(1), Path(base, "folder"), []
    if rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    run.save(folder / "x", "old")
    old = run.bits()
    real, made = getattr(os, call), [0]
    for number in range(1, 1 << 10):
        run.step(number)
        made[0] = 0

        def fail(*args: Any, number: int = number) -> Any:
            made[0] += 1
            if made[0] == number:
                if call == "close":
                    real(*args)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        try:
            with patched(**{call: fail}) if rank == which else nullcontext():
                run.save(folder / "x", f"{number}")
        except zshard.CheckpointError as error:
            errors.append(str(error))
        else:
            break
        torch.distributed.barrier()
        assert os.listdir(folder) == ["x"]
        assert run.load(folder / "x") == "old"
        assert same(run.bits(), old)
    assert run.load(folder / "x") == str(number)
    return errors


@pytest.mark.parametrize(("call", "least"), [("fsync", 2), ("pwrite", 3), ("open", 2)])
@pytest.mark.parametrize("which", [0, 1])
def test_an_input_output_error_on_one_rank_is_told_on_both(
    which: int, call: str, least: int
) -> None:
    with scratch() as base:
        errors = run_ranks(fail_one_rank, 2, str(base), which, call)
    assert len(errors[0]) == len(errors[1]) >= least
    for own, others in zip(errors[which], errors[1 - which], strict=True):
        assert "Input/output error" in own and str(base) in own
        assert others == f"rank {which}: {own}"


def test_what_another_job_removes_at_the_same_time_is_no_failure() -> None:
    scene, states = SCENES["replace and keep"], States("old", "older", "new", "next")
    real, calls = os.unlink, [0]

    def remove_after_another(path: str) -> None:
        calls[0] += 1
        real(path)
        real(path)

    with scratch() as base:
        scene.build(base / "folder", states)
        with patched(unlink=remove_after_another):
            states.save("new", base / "folder" / "x", keep=1)
        assert os.listdir(base / "folder") == ["x"]
        assert states.at(base / "folder" / "x") == "new"
    assert calls[0] >= 6


def test_a_checkpoint_that_lost_its_manifest_does_not_give_way_to_the_one_it_replaced() -> None:
    states = States("old", "new")
    with scratch() as base:
        states.save("old", base / "x")
        states.save("new", base / "y")
        (base / "x").rename(base / ".x.replaced")
        (base / "y").rename(base / "x")
        (base / "x" / "checkpoint.json").unlink()
        with pytest.raises(zshard.CheckpointError, match="is not a zshard checkpoint"):
            states.at(base / "x")
        with pytest.raises(zshard.CheckpointError, match="a folder with other things in it"):
            states.save("new", base / "x")
        assert zshard.latest(base) is None
        (base / "x").rename(base / "damaged")
        assert states.at(base / "x") == "old"


# --- calls that do less than they are asked to ---------------------------------------------------


def test_short_writes_make_the_same_bytes_and_short_reads_the_same_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "5" * 2 * count)
    write, read, calls = os.pwrite, os.preadv, [0, 0]

    def write_short(descriptor: int, data: memoryview, offset: int) -> int:
        calls[0] += 1
        return write(descriptor, data[: calls[0] % 7 + 1], offset)

    def read_short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls[1] += 1
        return read(descriptor, [buffers[0][: calls[1] % 7 + 1]], offset)

    states = States("a")
    with scratch() as base:
        states.save("a", base / "whole")
        with patched(pwrite=write_short):
            states.save("a", base / "short")
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (base / "whole" / name).read_bytes() == (base / "short" / name).read_bytes()
        with patched(preadv=read_short):
            assert states.at(base / "short") == "a"
        assert min(calls) > 100
        with (
            patched(pwrite=lambda *args: 0),
            pytest.raises(zshard.CheckpointError, match="nothing"),
        ):
            states.save("a", base / "never")
        assert sorted(os.listdir(base)) == ["short", "whole"]


# --- a peer that dies in the background ----------------------------------------------------------


def save_in_background(rank: int, folder: Path, store: Path, writes: int) -> int:
    join(rank, store)
    run = Run(1)
    run.save(folder / "x", "old")
    run.step(2)
    real, made = os.pwrite, [0]

    def die(*args: Any) -> int:
        made[0] += 1
        if made[0] == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    with patched(pwrite=die) if rank == 1 else nullcontext():
        handle = run.save(folder / "x", "new", asynchronous=True)
        try:
            handle.wait()
        except zshard.CommError as error:
            assert handle.done() and "lost another rank" in str(error)
            assert re.search(r"rank 1 \(process \d+\) has ended", str(error)), error
            assert os.listdir(folder) == ["x"], "the save of the dead left something"
            return 3
    return 0


def kill_in_background(rank: int, world_size: int) -> int:
    states, writes = States("other"), 0
    states.expected["old"] = Run(1).bits()
    with scratch() as base:
        while True:
            writes += 1
            folder, store = base / str(writes), base / f"store{writes}"
            folder.mkdir()
            children = [fork(save_in_background, r, folder, store, writes) for r in range(2)]
            ended = [wait(pid) for pid in children]
            if ended == [0, 0]:
                return writes - 1
            assert ended == [3, -signal.SIGKILL]
            assert states.at(folder / "x") == "old"


def test_a_peer_that_dies_in_an_asynchronous_save_gives_the_other_a_typed_error() -> None:
    (cases,) = run_ranks(kill_in_background, 1, group=False, timeout=120.0)
    assert cases > 2
    print(f"{cases} cases")


def waited_for_by_one(rank: int, world_size: int, base: str) -> None:
    run = Run(1)
    real = os.fsync

    def refused(descriptor: int) -> None:
        if rank == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    for waiters in ((0,), (0, 1), ()):
        with patched(fsync=refused):
            handle = run.save(Path(base, "x"), "new", asynchronous=True)
            while not handle.done():
                time.sleep(0.01)
        if rank in waiters:
            with pytest.raises(zshard.CheckpointError, match="Input/output error"):
                handle.wait()
        if waiters != (0, 1):  # then all have been told
            with pytest.raises(zshard.CheckpointError, match="Input/output error"):
                run.save(Path(base, "x"), "next")
        run.save(Path(base, "x"), "next")


def test_a_failure_that_only_one_rank_has_waited_for_is_told_to_both_by_the_next_save() -> None:
    with scratch() as base:
        run_ranks(waited_for_by_one, 2, str(base))


@pytest.mark.parametrize("call", ["lstat", "unlink"])
def test_remains_of_another_checkpoint_that_must_stay_are_in_no_saves_way(call: str) -> None:
    """As another user's in a folder that many share."""
    real = getattr(os, call)

    def refuse(path: str) -> object:
        if ".b.replaced/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    with scratch() as folder:
        run = Run(1)
        for name in ("a", "b"):
            run.save(folder / name, name)
        (folder / "a").rename(folder / ".b.replaced")
        with patched(**{call: refuse}):
            run.save(folder / "c", "c")
            with pytest.raises(zshard.CheckpointError, match=r"\.b\.replaced.*: Permission denied"):
                run.save(folder / "b", "new")
        assert sorted(os.listdir(folder)) == [".b.replaced", "b", "c"]
        assert (run.load(folder / "b"), run.load(folder / "c")) == ("b", "c")
        run.save(folder / "b", "new")
        assert sorted(os.listdir(folder)) == ["b", "c"]
