"""comm="peer": an exception that a signal's handler raises while a rank waits for others."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard import ops
from zshard.tag import Tag
from zshard.transports.groups import Ranks
from zshard.transports.messages import Work
from zshard.transports.neighbours import Neighbours
from zshard.wrap import schedule_of

VICTIM = 1


class Interrupt:
    """Has a signal arrive in one wait of this process, counted from now on."""

    def __init__(self, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.kind = kind
        self.waits, self.at, self.real = 0, -1, Neighbours.wait
        Neighbours.wait = lambda over, wait: self.wait(over, wait)

    def wait(self, over: Neighbours, wait: Callable[[float], int]) -> None:
        self.waits += 1
        if self.waits - 1 == self.at:
            signal.signal(signal.SIGINT, self.handle)
            self.real(over, lambda seconds: os.kill(os.getpid(), signal.SIGINT))
        else:
            self.real(over, wait)

    def handle(self, *_: object) -> None:
        raise self.kind

    def end(self) -> None:
        Neighbours.wait = self.real


def updates(model: nn.Module) -> int:
    """How often parameters were changed."""
    return sum(flat.version for unit in schedule_of(model).units for flat in unit.flats)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    zshard.clip_grad_norm_(model, 0.1)
    optimizer.step()


def interrupted(
    rank: int, world_size: int, strategy: str, steps: int
) -> list[tuple[str, bool, int]]:
    """Every wait of so many ``steps`` is interrupted once; the step is repeated after a reset.

    Returns:
        For each: how that ended, whether the model is the same in the end, and how many changes of
        parameters had been made before the reset.
    """
    data = models.batches("odd_parameters", 3, rank)
    before_that = 2 - steps

    def run(at: int) -> tuple[int, str, dict[str, torch.Tensor], int]:
        model = zshard.wrap(models.build("odd_parameters"), comm="peer", strategy=strategy)
        optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
        for batch in data[:before_that]:
            step(model, optimizer, batch)
        interrupt = Interrupt()
        interrupt.at = at if rank == VICTIM else -1
        seen, made = "", 0
        for batch in data[before_that:]:
            waits, before = interrupt.waits, updates(model)
            try:
                step(model, optimizer, batch)
            except (KeyboardInterrupt, zshard.CommError) as error:
                if not isinstance(error, KeyboardInterrupt):
                    assert "rank 1 (process" in str(error)
                    assert "left the collectives: KeyboardInterrupt was raised in it" in str(error)
                seen, made = type(error).__name__, updates(model)
                try:
                    zshard.reset(model)
                except zshard.MismatchError:
                    interrupt.end()
                    return waits, "torn", {}, made
                if made == before:  # else it came as far as that
                    step(model, optimizer, batch)
        interrupt.end()
        return waits, seen, zshard.state_dict(model), made

    waits, _, wanted, _ = run(-1)
    everyone: list[int] = [0] * world_size
    dist.all_gather_object(everyone, waits)
    waits = everyone[VICTIM]
    found = []
    for at in range(waits):
        _, seen, state, made = run(at)
        same = all(torch.equal(state[name], wanted[name]) for name in state)
        found.append((seen, same, made))
    return found


@pytest.mark.parametrize(
    ("strategy", "world_size", "steps"), [("zero3", 2, 2), ("zero3", 3, 1), ("zero1", 2, 1)]
)
def test_after_an_interrupt_in_any_wait_all_ranks_are_brought_back(
    strategy: str, world_size: int, steps: int
) -> None:
    ranks = run_ranks(interrupted, world_size, strategy, steps, timeout=200)
    assert len(ranks[0]) > 8
    for each in zip(*ranks, strict=True):
        ends, same, made = zip(*each, strict=True)
        if len(set(made)) > 1:
            assert set(ends) == {"torn"}, "some ranks have made the step, on every rank the same"
        else:
            assert ends[VICTIM] == "KeyboardInterrupt"
            assert {end for rank, end in enumerate(ends) if rank != VICTIM} == {"CommError"}
            assert all(same)
    assert sum(end != "torn" for end, _, _ in ranks[0]) > len(ranks[0]) // 2


def interrupted_in_an_op(rank: int, world_size: int, op: str) -> list[str]:
    """The exception is raised as ``op`` returns, which nothing waits in."""
    model = zshard.wrap(models.build("odd_parameters"), comm="peer")
    batch = models.batches("odd_parameters", 1, rank)[0]
    model(batch).square().mean().backward()
    real = getattr(ops, op)

    def interrupts(*args: object) -> None:
        real(*args)
        setattr(ops, op, real)
        raise KeyboardInterrupt

    if rank == VICTIM:
        setattr(ops, op, interrupts)
    said = []
    try:
        model(batch).square().mean().backward()
        zshard.clip_grad_norm_(model, 1.0)
    except (KeyboardInterrupt, zshard.CommError) as error:
        said.append(f"{type(error).__name__}: {error}")
    zshard.reset(model)
    model(batch).square().mean().backward()
    said.append(str(float(zshard.clip_grad_norm_(model, 1.0))))
    return said


@pytest.mark.parametrize("op", ["gather_cast_", "pack_", "reduce_"])
def test_an_interrupt_between_waits_is_told_at_once(op: str) -> None:
    ranks = run_ranks(interrupted_in_an_op, 2, op, timeout=30)
    assert ranks[VICTIM][0].startswith("KeyboardInterrupt")
    assert "rank 1" in ranks[0][0] and "has left the collectives" in ranks[0][0]
    assert ranks[0][1] == ranks[1][1], "the next step is whole"


def interrupted_behind_a_read(rank: int, world_size: int) -> list[int]:
    """What rank 0 reads of rank 1 in the gather after one that it has waited for twice."""
    comm = schedule_of(zshard.wrap(nn.Linear(3, 2), comm="peer")).comm
    lent, full = comm.empty(64, torch.uint8), torch.empty(128, dtype=torch.uint8)
    real = comm.shards.wait

    def interrupts(work: Work) -> None:
        real(work)
        comm.shards.wait = real
        raise KeyboardInterrupt

    for number in range(3):
        comm.reclaim(lent, Tag(None, "gather"))
        lent.fill_(10 * number + rank)
        if number == 2:
            break
        gather = comm.all_gather(full, lent, Tag(None, "gather"))
        if rank == 0 and number == 0:
            comm.shards.wait = interrupts
            with pytest.raises(KeyboardInterrupt):
                gather.wait()
        elif rank == 0:
            time.sleep(0.5)  # rank 1 has read, and is about to write
        gather.wait()
    return full[::64].tolist()


def test_memory_that_a_rank_reads_after_an_interrupt_is_not_written_before() -> None:
    assert run_ranks(interrupted_behind_a_read, 2, timeout=20) == [[10, 11]] * 2


class Alarm(Exception):
    """What a handler raises that is not a KeyboardInterrupt."""


def goes_on(rank: int, world_size: int, kind: type[BaseException]) -> list[str]:
    """The exception is caught, and the next steps taken without a reset; then with one."""
    model = zshard.wrap(models.build("odd_parameters"), comm="peer")
    batch = models.batches("odd_parameters", 1, rank)[0]
    model(batch).square().mean().backward()
    interrupt = Interrupt(kind)
    interrupt.at = 1 if rank == VICTIM else -1
    said = []
    for _ in range(3):
        try:
            model(batch).square().mean().backward()
        except (kind, zshard.CommError) as error:
            said.append(f"{type(error).__name__}: {error}")
    interrupt.end()
    zshard.reset(model)
    model(batch).square().mean().backward()
    return said


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Alarm])
def test_a_rank_that_goes_on_without_a_reset_is_refused_and_so_are_the_others(
    kind: type[BaseException],
) -> None:
    for rank, said in enumerate(run_ranks(goes_on, 3, kind, timeout=30)):
        assert len(said) == 3
        why = f"{kind.__name__} was raised in it during a collective"
        if rank == VICTIM:
            assert said[0].startswith(kind.__name__)
        else:
            assert re.search(rf"rank 1 \(process \d+\) has left the collectives: .*{why}", said[0])
        for later in said[1:]:
            assert "this rank has left the collectives" in later
            assert "call zshard.reset(model) on every rank" in later


def interrupted_in_reset(rank: int, world_size: int) -> list[str]:
    """The second Ctrl-C comes in the reset after the first, and the reset is tried again."""
    model = zshard.wrap(models.build("odd_parameters"), comm="peer")
    batch = models.batches("odd_parameters", 1, rank)[0]
    interrupt = Interrupt()
    interrupt.at = 1 if rank == VICTIM else -1
    with pytest.raises((KeyboardInterrupt, zshard.CommError)):
        model(batch).square().mean().backward()
    interrupt.end()
    said = []
    if rank == VICTIM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "all_gather_object", lambda *_: interrupt.handle())
            with pytest.raises(KeyboardInterrupt):
                zshard.reset(model)
    dist.barrier()
    for _ in range(2):
        with pytest.raises(zshard.CommError) as raised:
            zshard.reset(model)
        said.append(str(raised.value))
    return said


def test_a_rank_that_leaves_a_reset_half_done_is_named_by_those_that_follow() -> None:
    """What is left of its collective would be taken for the next one's."""
    for said in run_ranks(interrupted_in_reset, 3, timeout=30):
        assert len(said) == 2
        for each in said:
            assert re.search(r"rank 1 \(process \d+\) has left a reset half done", each)
            assert "start the processes anew" in each


def resets_of_two(rank: int, world_size: int) -> str:
    """Each rank resets another model, of those that meet in other memory."""
    given_up = []
    for _ in range(world_size):
        given_up.append(zshard.wrap(nn.Linear(2, 2), comm="peer"))
        schedule_of(given_up[-1]).comm.shards.neighbours.give_up("for a test")
    with pytest.raises(zshard.CommError) as raised:
        zshard.reset(given_up[rank])
    return str(raised.value)


def test_resets_of_models_in_other_memory_are_not_taken_for_one() -> None:
    for said in run_ranks(resets_of_two, 2, timeout=30):
        assert "a rank is in another collective of the process group, not in a reset" in said


def noted(rank: int, world_size: int) -> int:
    neighbours = schedule_of(zshard.wrap(nn.Linear(2, 2), comm="peer")).comm.shards.neighbours
    assert neighbours is not None
    for save in range(3000):
        neighbours.note("agree", Tag(save, "save", about=f"save(step-{save})"))
    return len(neighbours._texts)


def test_what_is_noted_of_thousands_of_saves_is_not_kept() -> None:
    assert max(run_ranks(noted, 2)) <= 1024


def leaves(rank: int, world_size: int, folder: str) -> None:
    model = zshard.wrap(models.build("odd_parameters"), comm="peer")
    batch = models.batches("odd_parameters", 1, rank)[0]
    interrupt = Interrupt()
    interrupt.at = 3 if rank == VICTIM else -1
    try:
        model(batch).square().mean().backward()
    except zshard.CommError as error:
        # One after the other: that of the first fails, which is not to be what the last is told.
        while rank == 2 and not Path(folder, "0").exists():
            time.sleep(0.01)
        with pytest.raises(zshard.CommError) as raised:
            zshard.reset(model)
        Path(folder, str(rank)).write_text(f"{error}\n{raised.value}")


def test_where_the_rank_ends_the_others_are_told_and_a_reset_says_that_it_cannot(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run_ranks(leaves, 3, str(tmp_path), timeout=30, grace=20)
    for rank in (0, 2):
        first, second = (tmp_path / str(rank)).read_text().split("\n", 1)
        assert re.search(r"rank 1 \(process \d+\) has (left the collectives|ended)", first)
        assert "reset of unit 'root'" in second
        assert re.search(r"rank 1 \(process \d+\) has", second)


def cannot(rank: int, world_size: int, how: str) -> str:
    """The process group may be in the middle of something, too."""
    mesh = init_device_mesh("cpu", (2, 2)) if how == "replicas" else None
    model = zshard.wrap(models.build("odd_parameters"), comm="peer", mesh=mesh)
    other = zshard.wrap(models.build("odd_parameters"), comm="group") if mesh is None else None
    if mesh is not None and rank not in (0, 1):
        return ""  # another replica, which goes by the process group's timeout
    Interrupt().at = 0 if rank == VICTIM else -1
    with pytest.raises((KeyboardInterrupt, zshard.CommError)):
        model(models.batches("odd_parameters", 1, rank)[0])
    with pytest.raises(zshard.CommError) as raised:
        zshard.reset(model)
    del other
    return str(raised.value)


@pytest.mark.parametrize("how", ["another model", "replicas"])
def test_a_reset_that_could_meet_another_collective_is_refused(how: str) -> None:
    world_size = 4 if how == "replicas" else 2
    for rank, said in enumerate(run_ranks(cannot, world_size, how, timeout=30)[:2]):
        assert f"rank {rank} of {world_size} cannot be brought back" in said
        assert "Start the processes anew" in said
