"""A disk that is full, read-only or not permitted: typed errors on every rank, nothing lost."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from adversity import (
    Run,
    local,
    patched,
    same,
    scratch,
)
from ranks import run_ranks
from torch import nn

import zshard


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


NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without privileges, which no permission binds."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
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


def refusing(call: str, path: Path, error: int = errno.EIO) -> AbstractContextManager[None]:
    """The system refuses ``call`` of ``path``."""
    real = getattr(os, call)

    def refuse(given: str, *args: int, **options: int) -> object:
        if str(given) == str(path):
            raise OSError(error, os.strerror(error))
        return real(given, *args, **options)

    return patched(**{call: refuse})


@pytest.mark.parametrize(
    ("call", "file"),
    [("lstat", "checkpoint.json"), ("open", "checkpoint.json"), ("open", "model.safetensors")],
)
def test_a_checkpoint_that_the_system_does_not_let_be_read_is_not_passed_over(
    call: str, file: str, tmp_path: Path
) -> None:
    """A script would begin anew, or go on from an older one, and save over what is there."""
    run, failed = Run(1), pytest.raises(zshard.CheckpointError, match=f"b/{file}: Input/output")
    for name in ("a", "b"):
        run.save(tmp_path / name, name)
    with refusing(call, tmp_path / "b" / file), failed:
        zshard.latest(tmp_path)
    assert zshard.latest(tmp_path) == str(tmp_path / "b")


@pytest.mark.parametrize("call", ["lstat", "open"])
def test_a_save_among_checkpoints_that_cannot_be_read_does_not_come_before_them(
    call: str, tmp_path: Path
) -> None:
    run, failed = Run(1), pytest.raises(zshard.CheckpointError, match=r"b/checkpoint\.json")
    for name in ("a", "b"):
        run.save(tmp_path / name, name)
    with refusing(call, tmp_path / "b" / "checkpoint.json"), failed:
        run.save(tmp_path / "c", "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    run.save(tmp_path / "c", "c")
    assert zshard.latest(tmp_path) == str(tmp_path / "c")


@pytest.mark.parametrize(
    ("call", "file", "error"),
    [("open", "model.safetensors", errno.EIO), ("lstat", "checkpoint.json", errno.EACCES)],
)
def test_keep_leaves_what_cannot_be_read_or_only_others_may_look_into(
    call: str, file: str, error: int, tmp_path: Path
) -> None:
    run = Run(1)
    for name in ("a", "b", "c"):
        run.save(tmp_path / name, name)
    with refusing(call, tmp_path / "b" / file, error):
        run.save(tmp_path / "d", "d", keep=2)
    assert sorted(os.listdir(tmp_path)) == ["b", "c", "d"]


def test_a_save_of_more_files_than_a_process_may_have_open_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zshard.checkpoint.writer, "FILE_BYTES", 100)
    model = zshard.wrap(nn.Sequential(*(nn.Linear(5, 5) for _ in range(32))))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, before[1]))
    try:
        zshard.save(tmp_path / "x", model)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(os.listdir(tmp_path / "x")) > 32
    zshard.load(tmp_path / "x", model)
