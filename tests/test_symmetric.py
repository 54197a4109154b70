"""comm="peer" on GPUs: its order of barriers and reads, with memory that ranks share on the CPU.

`torch.distributed._symmetric_memory` takes a GPU; here an extent lies in zshard's own shared memory
and a barrier blocks the host. All else is the code that GPUs run.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_peer import PRECISIONS, STEADY, STRATEGIES, on_both, trained
from torch.distributed.device_mesh import init_device_mesh
from training import Record, assert_close, assert_same_bits

import zshard
from zshard import ops
from zshard.comm import Comm
from zshard.tag import Tag
from zshard.transports import symmetric_memory, transport
from zshard.transports.groups import Ranks
from zshard.transports.shared import SharedArena
from zshard.transports.symmetric import SymmetricRanks
from zshard.transports.symmetric_memory import Joined
from zshard.wrap import schedule_of

DEADLINE = 30.0  # seconds of a barrier


class Double:
    """An allocator of shared memory of the host, whose barriers block.

    Args:
        at_barrier: called before each and after it.
    """

    def __init__(self, at_barrier: Callable[[], None] = lambda: None) -> None:
        self._at_barrier, self.made = at_barrier, list[int]()
        self.channels: set[int] = set()  # that barriers were on

    def allocate(self, nbytes: int, ranks: Ranks) -> torch.Tensor:
        self.made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def join(self, own: torch.Tensor, ranks: Ranks) -> Joined:
        arena = SharedArena(ranks)
        rows = arena.window(own.numel()).rows
        channels = [arena.window(64) for _ in range(3)]

        def barrier(channel: int) -> None:
            self._at_barrier()
            self.channels.add(channel)
            presence = channels[channel].presence
            assert presence.await_departures(DEADLINE) < 0
            presence.arrive()
            assert presence.await_arrivals(DEADLINE) < 0, "a rank does not come to this barrier"
            presence.depart()
            self._at_barrier()

        return Joined([torch.frombuffer(row.numpy(), dtype=torch.uint8) for row in rows], barrier)


def take(double: Double) -> None:
    """Have this process's models go over what GPUs go over."""
    transport.PeerRanks = lambda group, device, there: SymmetricRanks(group, device, double)


def over_symmetric(rank: int, world_size: int, strategy: str, precision: str) -> list[object]:
    take(Double())
    return on_both(rank, world_size, strategy, precision)


CASES = [
    *((strategy, precision, 2) for strategy in STRATEGIES for precision in ("fp32", "bf16/bf16")),
    *(("zero3", precision, 3) for precision in PRECISIONS),
    *((strategy, "split", 3) for strategy in ("zero2", "ddp")),
]


@pytest.mark.parametrize(("strategy", "precision", "world_size"), CASES)
def test_bits_are_those_of_the_group_and_no_shard_is_sent(
    strategy: str, precision: str, world_size: int
) -> None:
    for group, shared in run_ranks(over_symmetric, world_size, strategy, precision):
        assert_same_bits(shared[0], group[0])
        assert shared[1] == group[1], "the volume that other ranks needed"
        in_memory = {op: 0 for op in ("all_gather", "reduce_scatter")}
        assert {op: shared[2][op] for op in STEADY} == {
            op: group[2][op] for op in STEADY
        } | in_memory


def channels_of(rank: int, world_size: int, strategy: str) -> set[int]:
    take(double := Double())
    model = zshard.wrap(torch.nn.Linear(4, 4), comm="peer", strategy=strategy)
    double.channels.clear()
    model(torch.ones(1, 4)).sum().backward()
    return double.channels


@pytest.mark.parametrize(("strategy", "channels"), [("zero3", {0, 1}), ("ddp", {1, 2})])
def test_a_gather_of_gradients_shares_no_barrier_with_one_of_parameters(
    strategy: str, channels: set[int]
) -> None:
    """The two may be under way at a time, on different streams."""
    assert run_ranks(channels_of, 2, strategy) == [channels] * 2


def in_replicas(rank: int, world_size: int) -> list[object]:
    take(Double())
    mesh = init_device_mesh("cpu", (2, 2))
    return [trained(rank, comm, "zero3", "bf16", mesh) for comm in ("group", "peer")]


def test_replicas_go_through_the_group() -> None:
    for group, shared in run_ranks(in_replicas, 4):
        assert_same_bits(shared[0], group[0])
        assert shared[2]["reduce_scatter"] < group[2]["reduce_scatter"]


def sleepy(rank: int, world_size: int, strategy: str, seed: int) -> Record:
    dice = random.Random(1000 * seed + rank)
    take(Double(lambda: time.sleep(dice.choice((0, 0, 0, 0.003)))))
    return trained(rank, "peer", strategy, "fp32", accumulate=1)[0]


def one_micro_batch(rank: int, world_size: int, strategy: str) -> Record:
    return trained(rank, "group", strategy, "fp32", accumulate=1)[0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_ranks_that_are_late_at_other_barriers(strategy: str, seed: int) -> None:
    expected = run_ranks(one_micro_batch, 3, strategy)
    for actual, wanted in zip(run_ranks(sleepy, 3, strategy, seed), expected, strict=True):
        assert_same_bits(actual, wanted)


def rewritten(rank: int, world_size: int) -> list[bool]:
    """Lend, read, and write again at once, each rank late at other moments."""
    dice = random.Random(rank)
    double = Double(lambda: time.sleep(dice.choice((0, 0.003))))
    ranks = SymmetricRanks(dist.group.WORLD, torch.device("cpu"), double)
    shard, packed = ranks.empty(64, torch.float32), ranks.empty(64 * world_size, torch.float32)
    full, everyone = torch.empty(64 * world_size), torch.arange(world_size)
    right = []
    for round_ in range(20):
        shard.fill_(10 * round_ + rank)
        ranks.start_gather(full.view(torch.uint8), shard.view(torch.uint8), lasting=False)
        ranks.reclaim(shard)
        expected = (10 * round_ + everyone).repeat_interleave(64)
        shard.fill_(-1.0)
        packed.copy_(expected + 100 * rank)
        ranks.start_exchange(packed, packed)
        total = torch.stack(ranks.rows_for_me(packed)).sum(0)
        ranks.release(packed)
        packed.fill_(-1.0)
        wanted = sum(10 * round_ + rank + 100 * each for each in range(world_size))
        right += [torch.equal(full, expected.float()), bool((total == wanted).all())]
    return right


def test_what_was_lent_may_be_written_once_it_was_read() -> None:
    assert run_ranks(rewritten, 3) == [[True] * 40] * 3


def held_up(rank: int, world_size: int) -> float:
    take(Double())
    schedule = schedule_of(zshard.wrap(torch.nn.Linear(4, 4), comm="peer"))
    before = schedule.comm.stats.exposed_seconds
    schedule.comm.reclaim(schedule.flats[0].sent, Tag(0, "step", "root"))
    return schedule.comm.stats.exposed_seconds - before


def test_no_host_is_held_up_where_a_stream_waits_to_write_what_was_lent() -> None:
    assert run_ranks(held_up, 2) == [0.0, 0.0]


def made(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """What `empty` makes of many sizes: the extents' bytes; and sizes that another rank reads."""
    double = Double()
    ranks = SymmetricRanks(dist.group.WORLD, torch.device("cpu"), double)
    wrong = []
    megabyte, half = 1 << 20, symmetric_memory._EXTENT_BYTES // 2
    lent = [
        ranks.empty(numel, torch.uint8)
        for numel in (64, 100, 2 * half, half, 5 * megabyte, half - 64, 128, 64)
    ]
    for index, each in enumerate(lent):
        each.fill_(16 * rank + index)
    for index, each in enumerate(lent):
        n = each.numel() // 64 * 64
        full = torch.empty(world_size * n, dtype=torch.uint8)
        ranks.start_gather(full, each[:n], lasting=False)
        expected = torch.arange(world_size).mul(16).add(index).repeat_interleave(n)
        if not torch.equal(full, expected.to(torch.uint8)):
            wrong.append(index)
    ranks.give_back(lent[4])
    ranks.give_back(torch.empty(3 * megabyte, dtype=torch.uint8))  # of the pool's own, never lent
    return double.made, wrong


def test_all_rows_are_read_where_nccl_would_sum_them() -> None:
    ranks = SymmetricRanks.__new__(SymmetricRanks)  # whose constructor needs GPUs
    ranks.size, ranks.nccl = 4, True
    assert ranks.row_count(torch.float32) == ranks.row_count(torch.bfloat16) == 4


def test_what_is_lent_shares_extents_and_overlaps_nothing() -> None:
    small, five = symmetric_memory._EXTENT_BYTES, 5 << 20
    for extents, wrong in run_ranks(made, 2):
        assert extents == [small, small, five, small]
        assert wrong == []


def read_in_inference_mode(rank: int, world_size: int) -> bool:
    take(Double())  # masters are mailed
    model = torch.nn.Linear(999, 1111)
    zshard.wrap(model, comm="peer", precision=zshard.Precision.bf16(), init="broadcast")
    there = torch.inference_mode()(zshard.full_param)(model, "weight")
    return there.equal(zshard.full_param(model, "weight"))


def test_what_is_mailed_in_inference_mode_first_is_mailed_outside_later() -> None:
    assert run_ranks(read_in_inference_mode, 2) == [True, True]


class Stingy(Double):
    """It gives one rank no extent of more than ``most`` bytes."""

    def __init__(self, rank: int, where: str, most: int) -> None:
        super().__init__()
        self._refused, self._most = (rank, where), most

    def refuse(self, where: str, nbytes: int) -> None:
        if (dist.get_rank(), where) == self._refused and nbytes > self._most:
            raise RuntimeError("no room" if where == "join" else "")

    def allocate(self, nbytes: int, ranks: Ranks) -> torch.Tensor:
        self.refuse("allocate", nbytes)
        return super().allocate(nbytes, ranks)

    def join(self, own: torch.Tensor, ranks: Ranks) -> Joined:
        extent = super().join(own, ranks)
        self.refuse("join", own.numel())
        return extent


def without_memory(rank: int, world_size: int, where: str, mesh: tuple[int, ...], most: int) -> str:
    take(Stingy(1, where, most))
    model = torch.nn.Linear(2048, 2048)
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(model, comm="peer", mesh=init_device_mesh("cpu", mesh))
    dist.barrier()  # the end of a rank would tell the others as well
    return str(raised.value)


@pytest.mark.parametrize("most", [0, 4 << 20])
@pytest.mark.parametrize(("where", "mesh"), [("allocate", (2,)), ("join", (2,)), ("join", (2, 2))])
def test_memory_that_one_rank_does_not_get_is_an_error_on_every_rank(
    where: str, mesh: tuple[int, ...], most: int
) -> None:
    for said in run_ranks(without_memory, 2 * len(mesh), where, mesh, most, timeout=20):
        assert said.startswith("rank 1: no symmetric memory of ")
        why = "no room" if where == "join" else "RuntimeError"
        assert f"comm='peer': {why}." in said and "comm='group'" in said


def interrupted(rank: int, world_size: int, op: str) -> list[str]:
    """A step in the middle of which every rank is interrupted; a reset, and another step."""
    take(Double())
    model = zshard.wrap(torch.nn.Linear(4, 4), comm="peer")
    says = []
    for interrupt in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if interrupt:
                patch.setattr(Comm if op == "all_gather" else ops, op, raise_interrupt)
            try:
                model(torch.ones(1, 4)).sum().backward()
                zshard.full_grad(model, "weight")
            except (KeyboardInterrupt, zshard.CommError) as error:
                says.append(f"{type(error).__name__}: {error}")
        with contextlib.suppress(zshard.Error):
            zshard.reset(model)
    return says


def raise_interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("op", "where"),
    [
        ("gather_cast_", "a collective"),
        ("reduce_peers_", "a collective"),
        ("all_gather", "the gather of unit 'root'"),
    ],
)
def test_nothing_is_read_after_an_exception_before_or_between_barriers(op: str, where: str) -> None:
    """The rank's next barrier would meet the other ranks' barrier before that."""
    for first, then in run_ranks(interrupted, 2, op):
        assert first == "KeyboardInterrupt: "
        assert then.startswith("CommError: rank ")
        assert f"KeyboardInterrupt was raised in it during {where}" in then


def on_one_gpu(rank: int, world_size: int, precision: str) -> list[Record]:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    # A GPU can be added to a multicast object once, and the other ranks would wait for the second.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    return [
        trained(rank, "peer", strategy, precision, device="cuda:0")[0].cpu()
        for strategy in STRATEGIES
    ]


def in_the_group(rank: int, world_size: int, precision: str) -> Record:
    return trained(rank, "group", "zero3", precision)[0]


if torch.cuda.is_available():

    @pytest.mark.cuda
    @pytest.mark.parametrize("world_size", [2, 4])
    @pytest.mark.parametrize("precision", ["fp32", "bf16/bf16", "split"])
    def test_ranks_of_one_gpu_train_alike_in_every_strategy(
        precision: str, world_size: int
    ) -> None:
        # The ranks' kernels take turns, and a barrier's spins until the others have had theirs.
        found = run_ranks(on_one_gpu, world_size, precision, timeout=40)
        for (first, *others), cpu in zip(
            found, run_ranks(in_the_group, world_size, precision), strict=True
        ):
            for other in others:
                assert_same_bits(other, first)
            if precision != "fp32":
                # AdamW's first steps are as long as the learning rate, whatever the gradient's
                # size: one that is nearly 0 may have another sign in bf16, and lead elsewhere.
                first, cpu = first.before_any_step(), cpu.before_any_step()
            assert_close(first, cpu, 1e-3 if precision == "fp32" else 0.1)
