"""A file system that fails: typed errors on every rank, the old checkpoint, and nothing else."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adversity import (
    Run,
    States,
    fork,
    join,
    kOperations,
    kScenes,
    local,
    patched,
    same,
    scratch,
    wait,
)
from ranks import run_ranks
from torch import nn

import zshard

kErrors = {
    **dict.fromkeys(("open", "pwrite", "mkdir"), errno.ENOSPC),
    **dict.fromkeys(("fsync", "rename", "unlink", "rmdir", "close"), errno.EIO),
}

kReading = ("open", "close")
kStubborn = ("unlink", "rmdir", "rename", *kReading)


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
                raise OSError(kErrors[name], os.strerror(kErrors[name]), str(args[0]))
            return real(*args, **options)

        return call

    with patched(**{name: tapped(name, getattr(os, name)) for name in kOperations}):
        yield done


@pytest.mark.parametrize("goes_on", [False, True], ids=["once", "from_then_on"])
@pytest.mark.parametrize("name", ["new", "replace", "keep"])
def test_a_failure_of_any_operation_is_a_typed_error_and_the_next_save_works(
    name: str, goes_on: bool
) -> None:
    scene, states = kScenes[name], States("old", "older", "new", "next")
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
                assert str(folder) in text and os.strerror(kErrors[kind]) in text, story
                assert now != "new" or "is saved, but" in text, story
            else:
                assert now == "new", story
            # What cannot be removed or renamed stays; what cannot be read is not pruned.
            if "is saved, but" not in text and not (goes_on and kind in kStubborn):
                expected = set(scene.before) | ({scene.target} if now else set())
                if now == "new" and scene.keep == 1 and kind not in kReading:
                    expected = {scene.target}
                found = set(os.listdir(folder))
                assert found == expected or (kind in kReading and now and found < expected), story
            scene.check_next_save(folder, states)
    assert failed >= {"open", "pwrite", "fsync", "mkdir", "rename"}, failed
    print(f"{name}: {at - 1} cases")


# --- two ranks -----------------------------------------------------------------------------------


class Wide(nn.Module):
    """Three quarters of a megabyte, so that a disk of one and a half is full at the second save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(449, 449))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 449)).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> torch.Tensor:
    return local(model.weight).clone()


def run_command(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@contextmanager
def small_disk(nbytes: int, *, real: bool = True) -> Iterator[tuple[Path, bool]]:
    """A folder on a disk of that size, and whether it is one: mounting takes privileges."""
    with scratch() as base:
        place = base / "disk"
        place.mkdir()
        mounted = (
            real
            and os.geteuid() == 0
            and run_command(*("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(place)))
        )
        try:
            yield place, mounted
        finally:
            if mounted:
                assert run_command("umount", "-l", str(place))


@contextmanager
def budget(folder: Path, nbytes: int) -> Iterator[None]:
    """Have writes fail once ``folder`` has that many bytes, where no small disk can be mounted."""
    real = os.pwrite

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        used = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
        if used + len(data) > nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with patched(pwrite=write):
        yield


def fill_disk(
    rank: int, world_size: int, folder: str, limit: int | None, asynchronous: bool
) -> tuple[str, str]:
    place = Path(folder, "x")
    torch.manual_seed(3)
    model = zshard.wrap(Wide())
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    full = nullcontext() if limit is None else budget(Path(folder), limit)
    with full:
        zshard.save(place, model, optimizer)
        old = weights(model)
        step(model, optimizer)
        new = weights(model)
        assert not torch.equal(old, new)
        with pytest.raises(zshard.CheckpointError) as raised:
            handle = zshard.save(place, model, optimizer, asynchronous=asynchronous)
            step(model, optimizer)  # goes on meanwhile
            assert handle is not None
            handle.wait()
        error = str(raised.value)
        torch.distributed.barrier()
        assert os.listdir(folder) == ["x"], "the failed save left something"
        step(model, optimizer)  # training goes on
        later = weights(model)
        zshard.load(place, model, optimizer)
        assert torch.equal(weights(model), old)
        step(model, optimizer)
        assert torch.equal(weights(model), new)
        # What is not told by wait() is told by the next save, and once.
        if asynchronous:
            handle = zshard.save(place, model, optimizer, asynchronous=True)
            with pytest.raises(zshard.CheckpointError):
                zshard.save(place, model, optimizer)
    torch.distributed.barrier()
    if rank == 0 and limit is None:
        assert run_command("mount", "-o", "remount,size=8m", folder)
    torch.distributed.barrier()
    zshard.save(place, model, optimizer)
    step(model, optimizer)
    zshard.load(place, model, optimizer)
    assert torch.equal(weights(model), new) and not torch.equal(new, later)
    assert os.listdir(folder) == ["x"]
    return error, str(place)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("real", [True, False], ids=["tmpfs", "refused_writes"])
def test_a_full_disk_is_told_on_both_ranks_and_costs_only_that_save(
    real: bool, asynchronous: bool
) -> None:
    size = 3 << 19
    with small_disk(size, real=real) as (folder, mounted):
        limit = None if mounted else size
        out = run_ranks(fill_disk, 2, str(folder), limit, asynchronous)
    for error, _ in out:
        assert "No space left on device" in error and ".saving/" in error, error
        assert str(folder) in error


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


kNobody = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without privileges, which no permission binds."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(kNobody)
    try:
        yield
    finally:
        os.seteuid(0)


def meet_permissions(rank: int, world_size: int, base: str) -> dict[str, str]:
    run, folder = Run(1), Path(base, "folder")
    if rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    run.save(folder / "x", "old")
    old = run.bits()
    run.step(2)

    def error_of(action: Callable[[], object]) -> str:
        torch.distributed.barrier()
        with as_nobody(), pytest.raises(zshard.CheckpointError) as raised:
            action()
        torch.distributed.barrier()
        assert os.listdir(folder) == ["x"]
        run.step(3)  # training goes on
        return str(raised.value)

    def as_owner(mode: int, path: Path) -> None:
        if rank == 0:
            path.chmod(mode)

    errors = {}
    as_owner(0o555, folder)
    errors["folder"] = error_of(lambda: run.save(folder / "y", "new"))
    errors["replace"] = error_of(lambda: run.save(folder / "x", "new"))
    as_owner(0o755, folder)
    as_owner(0o000, folder / "x" / "optimizer.safetensors")
    errors["optimizer.safetensors"] = error_of(lambda: run.load(folder / "x"))
    as_owner(0o644, folder / "x" / "optimizer.safetensors")
    torch.distributed.barrier()
    assert run.load(folder / "x") == "old"
    assert same(run.bits(), old)
    run.save(folder / "y", "new")
    assert run.load(folder / "y") == "new"
    return errors


def test_a_folder_or_file_without_permission_is_told_on_both_ranks() -> None:
    with scratch() as base:
        base.chmod(0o755)
        for errors in run_ranks(meet_permissions, 2, str(base)):
            for what, error in errors.items():
                assert "Permission denied" in error and str(base / "folder") in error, error
                assert what not in ("optimizer.safetensors",) or what in error


def save_read_only(rank: int, world_size: int, folder: str, mounted: bool) -> str:
    run, place = Run(1), Path(folder, "x")
    run.save(place, "old")
    run.step(2)
    torch.distributed.barrier()
    if rank == 0 and mounted:
        assert run_command("mount", "-o", "remount,ro", folder)
    torch.distributed.barrier()

    def refuse(path: str, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    disk = nullcontext() if mounted else patched(mkdir=refuse)
    with disk, pytest.raises(zshard.CheckpointError) as raised:
        run.save(place, "new")
    torch.distributed.barrier()
    assert run.load(place) == "old"
    if rank == 0 and mounted:
        assert run_command("mount", "-o", "remount,rw", folder)
    torch.distributed.barrier()
    run.save(place, "next")
    assert os.listdir(folder) == ["x"]
    return str(raised.value)


def test_a_read_only_file_system_is_told_on_both_ranks_and_can_be_loaded_from() -> None:
    with small_disk(1 << 20) as (folder, mounted):
        for error in run_ranks(save_read_only, 2, str(folder), mounted):
            assert "Read-only file system" in error and str(folder) in error


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
