"""comm="peer": what one rank does on its own, and the others do not wait for."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import zshard
from zshard.tag import Tag
from zshard.transports.standing import Missed
from zshard.wrap import schedule_of


def uneven() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 40), nn.Linear(40, 2))


def stepped(strategy: str) -> nn.Module:
    model = zshard.wrap(uneven(), comm="peer", strategy=strategy, units="layer")
    optimizer = zshard.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def looks_alone(rank: int, world_size: int, strategy: str) -> int:
    model = stepped(strategy)
    names = len(zshard.local_shards(model)) if rank == 0 else 0
    dist.barrier()
    return names


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_one_rank_alone_may_take_its_shards_after_a_step(strategy: str) -> None:
    assert run_ranks(looks_alone, 2, strategy, timeout=20) == [6, 0]


def writes_alone(rank: int, world_size: int, strategy: str) -> str:
    model = stepped(strategy)
    with pytest.raises(zshard.MismatchError) as raised:
        if rank == 0:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2.0)
        model(torch.ones(2, 3))
    return str(raised.value)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_write_by_one_rank_alone_is_refused_and_not_waited_for(strategy: str) -> None:
    for said in run_ranks(writes_alone, 2, strategy, timeout=20):
        assert "the ranks" in said


def unfreezes_alone(rank: int, world_size: int) -> list[float]:
    """Rank 0 trains the largest unit, is refused, and freezes it again."""
    model = zshard.wrap(uneven(), comm="peer", units="layer")

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()

    def train_largest(value: bool) -> None:
        for param in model[1].parameters():
            param.requires_grad_(value)

    train_largest(False)
    step()
    if rank == 0:
        train_largest(True)
    with pytest.raises(zshard.MismatchError, match=r"on ranks \[0\] alone"):
        step()
    zshard.reset(model)
    if rank == 0:
        train_largest(False)
    model.zero_grad()
    step()
    train_largest(True)
    step()
    grad = zshard.full_grad(model, "1.bias")
    assert grad is not None
    return grad.tolist()


def test_reduce_buffers_that_one_rank_alone_has_sized_are_made_by_all_or_none() -> None:
    first, second = run_ranks(unfreezes_alone, 2, timeout=20)
    assert first == second
    assert len(first) == 40


def thaws(rank: int, world_size: int) -> list[int]:
    """Bytes of this rank's shared memory as units are unfrozen, the smallest first."""
    sizes = (600, 801, 1200)
    model = nn.ModuleList(nn.Linear(size, size) for size in sizes)
    model.requires_grad_(False)
    zshard.wrap(nn.Sequential(*model), comm="peer", units="layer", init="trust")
    found = []
    for thawed in range(1, 4):
        for index, unit in enumerate(model):
            unit.requires_grad_(index < thawed)
        sum(
            unit(torch.ones(1, size)).sum() for unit, size in zip(model, sizes, strict=True)
        ).backward()
        with open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps if "memfd:zshard" in line]
        found.append(sum(int(end, 16) - int(begin, 16) for begin, end in spans))
    return found


def test_reduce_buffers_that_grew_leave_no_shared_memory_behind() -> None:
    for found in run_ranks(thaws, 2, timeout=30):
        growth = [after - before for before, after in pairwise(found)]
        for step, (small, large) in zip(growth, ((600, 801), (801, 1200)), strict=True):
            buffers = 2 * 2 * 4 * ((large * large + large) - (small * small + small))
            assert abs(step - buffers) < 1 << 16, "two buffers of two ranks have grown in place"


def waits_for_the_last_rank(rank: int, world_size: int) -> float:
    """Seconds that a rank says it has waited in a backward whose gradients come late from one."""
    model = zshard.wrap(uneven(), strategy="ddp", comm="peer")
    last = rank == world_size - 1

    def interpose(op: str, tag: Tag) -> None:
        if last and (op, tag.phase) == ("all_gather", "reduce"):
            time.sleep(0.1)

    schedule_of(model).comm.interpose = interpose
    zshard.stats(model).reset()
    model(torch.ones(2, 3)).sum().backward()
    return zshard.stats(model).exposed_seconds


def test_what_passes_the_mailbox_is_waited_for() -> None:
    assert run_ranks(waits_for_the_last_rank, 2)[0] > 0.05


def sums_behind_each_other(
    rank: int, world_size: int, at_once: bool, reset: bool
) -> list[list[float]]:
    """Two sums of one size; the last rank reads late, and all read at once or at the end.

    Behind a ``reset`` that has found another one under way.
    """
    model = zshard.wrap(nn.Linear(3, 2), comm="peer")
    comm, tag, sums, handles = schedule_of(model).comm, Tag(None, "sum"), [], []
    if reset:
        comm.all_reduce(torch.ones(3), tag, comm.shards)
        with pytest.raises((KeyboardInterrupt, zshard.CommError)):
            if rank == 0:
                with comm.shards.neighbours:
                    raise KeyboardInterrupt
            comm.all_gather_words([0], tag)
        zshard.reset(model)
    for factor in (1.0, 10.0):
        sums.append(torch.full((3,), factor * (rank + 1)))
        handles.append(comm.all_reduce(sums[-1], tag, comm.shards))
        if rank == world_size - 1:
            time.sleep(0.1)
        if at_once:
            handles.pop().wait()
    for handle in handles:
        handle.wait()
    return [each.tolist() for each in sums]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_rank_that_is_late_sums_what_the_others_gave_then(at_once: bool, reset: bool) -> None:
    found = run_ranks(sums_behind_each_other, 3, at_once, reset, timeout=10)
    assert found == [[[6.0] * 3, [60.0] * 3]] * 3


def sums_after_one_of_a_rank_alone(rank: int, world_size: int) -> list[list[float]]:
    """Sums of two sizes behind a reset, before which only rank 0 had come to the second."""
    model = zshard.wrap(nn.Linear(3, 2), comm="peer")
    comm, tag = schedule_of(model).comm, Tag(None, "sum")
    with pytest.raises((KeyboardInterrupt, zshard.CommError)):
        if rank > 0:
            with comm.shards.neighbours:
                raise KeyboardInterrupt
        comm.all_reduce(torch.ones(3), tag, comm.shards).wait()
    zshard.reset(model)
    sums = [torch.full((numel,), rank + 1.0) for numel in (40, 3)]
    for value in sums:
        comm.all_reduce(value, tag, comm.shards).wait()
    return [each.unique().tolist() for each in sums]


def test_after_a_reset_sums_of_any_size_meet_again() -> None:
    assert run_ranks(sums_after_one_of_a_rank_alone, 3, timeout=10) == [[[6.0]] * 2] * 3


def sums_without_room(rank: int, world_size: int) -> tuple[int, int, list[float]]:
    """Extents of shared memory before and after a sum for which the first has no room; it."""
    model = zshard.wrap(nn.Linear(3, 2), comm="peer")
    comm, value = schedule_of(model).comm, torch.full((512,), rank + 1.0)
    arena = comm.shards.neighbours._arena
    while arena.has_room(value.nbytes):
        arena.window(value.nbytes)
    before = len(arena._extents)
    comm.all_reduce(value, Tag(None, "sum"), comm.shards).wait()
    return before, len(arena._extents), value.unique().tolist()


def test_no_sum_asks_for_memory_after_wrap() -> None:
    for before, after, total in run_ranks(sums_without_room, 3):
        assert before == after and total == [6.0]


def of_several_pieces(rank: int, world_size: int) -> list[object]:
    comm = schedule_of(zshard.wrap(nn.Linear(3, 2), comm="peer")).comm
    return comm.all_gather_object(list(range(rank, 500_000)), Tag(None, "call"))


def test_an_object_larger_than_the_mailbox_is_passed_in_pieces() -> None:
    wanted = [list(range(rank, 500_000)) for rank in range(2)]
    assert run_ranks(of_several_pieces, 2) == [wanted] * 2


def waits_in_a_row(rank: int, world_size: int) -> str:
    """What rank 0 is told, which waits for rank 1, which has waited for rank 2 for too long."""
    neighbours = schedule_of(zshard.wrap(nn.Linear(3, 2), comm="peer")).comm.shards.neighbours
    neighbours._seconds = 0.1 if rank == 1 else 60
    said = ""
    if rank < 2:
        with pytest.raises(Missed) as raised:
            neighbours.wait(lambda seconds: time.sleep(seconds) or rank + 1)
        said = str(raised.value)
    dist.barrier()
    return said


def test_who_waits_for_a_rank_that_has_given_up_is_told_for_whom_that_has_waited() -> None:
    said = run_ranks(waits_in_a_row, 3, timeout=20)[0]
    assert re.match(r"rank 1 .* has left the collectives: rank 2 .* has not come for 0\.1 s", said)


def stands_still(rank: int, world_size: int) -> list[list[int]]:
    """Rank 0 has found that rank 1 is late, and looks why only when that has come and gone."""
    comm = schedule_of(zshard.wrap(nn.Linear(3, 2), comm="peer")).comm
    neighbours, store = comm.shards.neighbours, dist.distributed_c10d._get_default_store()
    look = neighbours._problem

    def look_later(late: int, *, out_of_time: bool) -> str:
        store.set("late", "")
        while not neighbours._processes.ended():
            time.sleep(0.01)
        return look(late, out_of_time=out_of_time)

    if rank == 0:
        neighbours._problem = look_later
    else:
        store.wait(["late"])
    return comm.all_gather_words([rank], Tag(None, "call"))


def test_a_rank_that_came_and_went_while_another_was_stopped_is_not_missed() -> None:
    assert run_ranks(stands_still, 2, timeout=20) == [[[0], [1]]] * 2


def in_two_collectives(rank: int, world_size: int) -> tuple[str, list[list[int]]]:
    """What a rank is told that passes words where another passes an object; and words, later."""
    model = zshard.wrap(nn.Linear(3, 2), comm="peer")
    comm = schedule_of(model).comm
    tag = Tag(None, f"call {rank}")
    with pytest.raises(zshard.CommError) as raised:
        if rank == 2:
            comm.all_gather_object("text", tag)
        else:
            comm.all_gather_words([rank, 7], tag)
    with pytest.raises(
        zshard.CommError, match=r"this rank has left .* it is in another collective"
    ):
        comm.all_gather_words([rank], tag)
    zshard.reset(model)
    return str(raised.value), comm.all_gather_words([rank], tag)


def test_ranks_that_pass_unlike_things_through_the_mailbox_are_told() -> None:
    for rank, (said, words) in enumerate(run_ranks(in_two_collectives, 3)):
        assert "so it is in another collective" in said or "has left the collectives" in said
        other = 0 if rank == 2 else 2
        assert f"rank {other} (process " in said
        assert words == [[0], [1], [2]]
