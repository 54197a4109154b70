"""comm="peer": a rank that dies or stops is named on the others, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from adversity import SCRATCH
from ranks import RankFailure, run_ranks
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard.tag import Tag
from zshard.transports import shared
from zshard.units import gradient
from zshard.wrap import schedule_of

VICTIM = 1
# By what it is doing: inside wrap, between collectives, or as it is about to start one.
PHASES = [
    *("wrap", "forward", "backward", "pack", "clip", "step"),
    *("gather", "reduce", "agree", "norm"),
]


def shared_files() -> set[str]:
    """Of all processes, but for the folders that tests which run at the same time make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(SCRATCH)}


def mapped() -> set[int]:
    """Inodes that living processes have mapped of it, as tests that run at the same time do."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended
            lines = [line.split() for line in maps.read_text().splitlines() if "/dev/shm/" in line]
            found |= {int(fields[4]) for fields in lines}
    return found


def left_since(before: set[str]) -> set[str]:
    """What is new, and nobody's."""
    new, in_use = shared_files() - before, mapped()
    left = set()
    for name in new:
        with suppress(FileNotFoundError):
            if os.stat(f"/dev/shm/{name}").st_ino not in in_use:
                left.add(name)
    return left


def assert_none_left(before: set[str]) -> None:
    deadline = time.monotonic() + 5  # other processes' come and go
    while left := left_since(before):
        assert time.monotonic() < deadline, f"shared memory is left: {left}"
        time.sleep(0.05)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(model: torch.nn.Module, optimizer: torch.optim.Optimizer, phase: str) -> None:
    """Have the next ``phase`` be the last thing that this rank does."""
    schedule = schedule_of(model)
    if phase in ("gather", "reduce", "agree", "norm"):

        def interpose(op: str, tag: Tag) -> None:
            at = "agree" if op == "agree" else "norm" if op == "all_reduce" else tag.phase
            if at == phase:
                die()

        schedule.comm.interpose = interpose
    elif phase == "forward":
        schedule.units[1].module.register_forward_pre_hook(die)
    elif phase == "backward":
        schedule.units[1].module.register_full_backward_pre_hook(die)
    elif phase == "pack":
        gradient.ops.pack_ = die
    elif phase == "clip":
        schedule.totals.scale_by = die
    elif phase == "step":
        optimizer.step = die


def dies(rank: int, world_size: int, phase: str, folder: str) -> None:
    if phase == "wrap" and rank == VICTIM:
        allocated = shared.SharedArena.allocate

        def allocate(arena: shared.SharedArena, part: int) -> object:
            return die() if part > shared._SMALL else allocated(arena, part)

        shared.SharedArena.allocate = allocate
    try:
        model = zshard.wrap(models.build("odd_parameters"), comm="peer")
        if phase == "wrap":
            large = zshard.wrap(torch.nn.Linear(1024, 1024), comm="peer")
            del large
        optimizer = zshard.AdamW(model.parameters())
        for step, batch in enumerate(models.batches("odd_parameters", 4, rank)):
            if step == 2 and rank == VICTIM:
                arm(model, optimizer, phase)
            model(batch).square().mean().backward()
            zshard.clip_grad_norm_(model, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    except zshard.CommError as error:
        Path(folder, f"{phase}.{rank}").write_text(str(error))


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_at_any_phase_is_named_on_the_others_at_once(
    phase: str, tmp_path: Path
) -> None:
    before = shared_files()
    with pytest.raises(RankFailure) as caught:  # the others have 2 s from then on
        run_ranks(dies, 3, phase, str(tmp_path))
    story = str(caught.value)
    assert "rank 1 was killed by SIGKILL" in story
    assert "rank 0 returned" in story
    assert "rank 2 returned" in story
    for rank in (0, 2):
        said = (tmp_path / f"{phase}.{rank}").read_text()
        assert f"rank {rank} of 3" in said
        if phase == "wrap":  # which goes through the process group
            assert "wrap" in said or "all_gather_object" in said
        else:
            assert re.search(r"rank 1 \(process \d+\) has ended\. It was seen last at", said), said
            assert re.search(r"\w+ of unit '.+'.* in step \d+ failed", said), said
    assert_none_left(before)


def stops(rank: int, world_size: int, folder: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=30))
    model = zshard.wrap(models.build("odd_parameters"), comm="peer", mesh=group)
    neighbours = schedule_of(model).comm.shards.neighbours
    assert neighbours._seconds == 30
    try:
        for step, batch in enumerate(models.batches("odd_parameters", 3, rank)):
            if step == 1 and rank == VICTIM:
                os.kill(os.getpid(), signal.SIGSTOP)
            if step == 1:
                neighbours._seconds = 2  # not before: what came late then would be named
            model(batch).square().mean().backward()
    except zshard.CommError as error:
        Path(folder, str(rank)).write_text(str(error))
        pid = int(re.findall(r"rank 1 \(process (\d+)\)", str(error))[0])
        dist.barrier(dist.new_group([0, 2], use_local_synchronization=True))
        os.kill(pid, signal.SIGKILL)  # the right one, or the test outlives its deadline


def test_a_rank_that_is_stopped_is_named_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(stops, 3, str(tmp_path), timeout=30)
    assert "rank 1 was killed by SIGKILL" in str(caught.value)
    for rank in (0, 2):
        said = (tmp_path / str(rank)).read_text()
        missed = "is alive but has not come for 2 s. It was seen last at"
        assert missed in said or "has left the collectives: rank 1 (process" in said, said


def dies_in_its_replica(rank: int, world_size: int, folder: str) -> None:
    model = zshard.wrap(
        models.build("odd_parameters"), comm="peer", mesh=init_device_mesh("cpu", (2, 2))
    )
    try:
        for step, batch in enumerate(models.batches("odd_parameters", 3, rank)):
            if step == 1 and rank == 3:
                die()
            model(batch).square().mean().backward()
    except zshard.CommError as error:
        Path(folder, str(rank)).write_text(str(error))


def test_a_rank_killed_in_a_replica_is_named_by_its_number_among_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(dies_in_its_replica, 4, str(tmp_path))
    said = (tmp_path / "2").read_text()
    assert "rank 2 of 4" in said
    assert re.search(r"rank 3 \(process \d+\) has ended", said), said


def loses_its_replica(rank: int, world_size: int, folder: str) -> None:
    model = zshard.wrap(
        models.build("odd_parameters"), comm="peer", mesh=init_device_mesh("cpu", (2, 2))
    )
    told = Path(folder, "told")

    def interpose(op: str, tag: Tag) -> None:
        if op == "all_reduce":
            raise RuntimeError("Connection closed by peer")  # as gloo says it

    schedule_of(model).comm.interpose = interpose if rank == VICTIM else None
    with pytest.raises(zshard.CommError) as raised:
        for batch in models.batches("odd_parameters", 2, rank):
            model(batch).square().mean().backward()
            zshard.clip_grad_norm_(model, 1e-3)
    if rank == 0:
        told.write_text(str(raised.value))
    if rank == VICTIM:
        deadline = time.monotonic() + 20
        while not told.exists() and time.monotonic() < deadline:  # it lives on, and waits for none
            time.sleep(0.02)
        with pytest.raises(zshard.CommError, match="cannot be brought back"):
            zshard.reset(model)


def test_a_rank_whose_collective_with_a_replica_has_failed_tells_those_that_share_its_memory(
    tmp_path: Path,
) -> None:
    run_ranks(loses_its_replica, 4, str(tmp_path), timeout=40)
    said = (tmp_path / "told").read_text()
    assert re.search(r"rank 1 \(process \d+\) has left the collectives: all_reduce in", said), said
    assert "Connection closed by peer" in said
