"""comm="peer": ranks that read each other's memory compute what the process group's ranks do."""

from __future__ import annotations

import random
import time
from collections import Counter

import models
import pytest
import torch
from ranks import run_ranks
from steps import transport_of
from torch.distributed.device_mesh import init_device_mesh
from training import FEW_STEPS, Record, Wrapped, adamw, assert_same_bits, train

import zshard
from zshard.transports import peer
from zshard.units.master import Master
from zshard.wrap import schedule_of

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]
PRECISIONS = {
    "fp32": None,
    "bf16": zshard.Precision.bf16(),
    "bf16/bf16": zshard.Precision.bf16(reduce=torch.bfloat16),
    "split": zshard.Precision.bf16(master="split"),
}
STEADY = ("all_gather", "reduce_scatter", "all_reduce", "agree")


def trained(
    rank: int,
    comm: str,
    strategy: str,
    precision: str,
    mesh: object = None,
    accumulate: int = 2,
    device: str = "cpu",
) -> tuple[Record, Counter[str], Counter[str]]:
    model = zshard.wrap(
        models.build("odd_parameters"),
        comm=comm,
        strategy=strategy,
        precision=PRECISIONS[precision],
        mesh=mesh,
        device=torch.device(device),
    )
    assert transport_of(model) == ("group" if comm == "group" else "peer")
    data = [b.to(device) for b in models.batches("odd_parameters", FEW_STEPS * accumulate, rank)]
    if PRECISIONS[precision] is not None:
        data = [batch.bfloat16() for batch in data]
    zshard.stats(model).reset()
    optimizer = adamw(model) if precision != "split" else zshard.AdamW(model.parameters(), lr=1e-2)
    record = train(
        Wrapped(model), optimizer, data, clip=(0.1, 2.0), accumulate=accumulate, no_sync=True
    )
    record.gradients = [
        {name: None if grad is None else grad.float() for name, grad in grads.items()}
        for grads in record.gradients
    ]
    return record, zshard.stats(model).sent_bytes, zshard.stats(model).wire_bytes


def on_both(rank: int, world_size: int, strategy: str, precision: str) -> list[object]:
    return [trained(rank, comm, strategy, precision) for comm in ("group", "peer")]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_transports_compute_the_same_bits_and_shared_memory_sends_none(
    strategy: str, precision: str, world_size: int
) -> None:
    for group, shared in run_ranks(on_both, world_size, strategy, precision):
        assert_same_bits(shared[0], group[0])
        assert shared[1] == group[1], "the volume that other ranks needed"
        assert sum(group[2].values()) > 0
        assert {op: shared[2][op] for op in STEADY} == dict.fromkeys(STEADY, 0)


def in_replicas(rank: int, world_size: int, strategy: str) -> list[object]:
    mesh = init_device_mesh("cpu", (2, 2))
    return [trained(rank, comm, strategy, "bf16", mesh) for comm in ("group", "peer")]


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_replicas_go_through_the_group_and_shards_do_not(strategy: str) -> None:
    for group, shared in run_ranks(in_replicas, 4, strategy):
        assert_same_bits(shared[0], group[0])
        assert shared[1] == group[1]
        assert 0 < sum(shared[2].values()) < sum(group[2].values())


# --- order ----------------------------------------------------------------------------------------


def sleepy(rank: int, world_size: int, strategy: str, seed: int) -> Record:
    """Train, each rank asleep at other moments: before it reads, and before it writes again."""
    dice = random.Random(1000 * seed + rank)

    def delayed(name: str) -> None:
        real = getattr(peer.PeerRanks, name)

        def wrapper(*args: object, **kwargs: object) -> object:
            time.sleep(dice.choice((0, 0, 0, 0.003)))
            return real(*args, **kwargs)

        setattr(peer.PeerRanks, name, wrapper)

    for name in ("read", "release", "start_gather", "start_exchange", "reclaim"):
        delayed(name)
    return trained(rank, "peer", strategy, "fp32", accumulate=1)[0]


def one_micro_batch(rank: int, world_size: int, strategy: str) -> Record:
    return trained(rank, "group", strategy, "fp32", accumulate=1)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_a_rank_that_is_late_reads_what_the_others_lent_it_then(strategy: str, seed: int) -> None:
    expected = run_ranks(one_micro_batch, 3, strategy)
    for actual, wanted in zip(run_ranks(sleepy, 3, strategy, seed), expected, strict=True):
        assert_same_bits(actual, wanted)


def written_between_forwards(
    rank: int, world_size: int, comm: str, precision: str
) -> list[torch.Tensor]:
    """Only the write waits for the last gather's readers, and only the gather for the copies.

    Rank 0 reads late, and rank 1 casts late what it sends.
    """
    if rank == 0:
        read = peer.PeerRanks.read

        def late(*args: object) -> None:
            time.sleep(0.02)
            read(*args)

        peer.PeerRanks.read = late
    else:
        refresh = Master.refresh

        def slow(master: Master) -> None:
            time.sleep(0.02)
            refresh(master)

        Master.refresh = slow
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(3)))
    model = zshard.wrap(plain, comm=comm, precision=PRECISIONS[precision])
    seen = []
    with torch.no_grad():
        for _ in range(4):
            seen.append(model(torch.ones(2, 9)))
            for param in model.parameters():
                param.mul_(1.5)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_late_ranks_read_and_give_the_values_of_their_round(precision: str) -> None:
    expected = run_ranks(written_between_forwards, 2, "group", precision)
    shared = run_ranks(written_between_forwards, 2, "peer", precision)
    for ours, theirs in zip(shared, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def rewritten(rank: int, world_size: int) -> list[bool]:
    """Lend, and write again once it may be; rank 0 reads late what it has waited for."""
    ranks = schedule_of(zshard.wrap(torch.nn.Linear(3, 2), comm="peer")).comm.shards
    shard, packed = ranks.empty(64, torch.float32), ranks.empty(64 * world_size, torch.float32)
    full, everyone = torch.empty(64 * world_size), torch.arange(world_size)
    right = []
    for round_ in range(3):
        expected = (10 * round_ + everyone).repeat_interleave(64).float()
        shard.fill_(10 * round_ + rank)
        gather = ranks.start_gather(full.view(torch.uint8), shard.view(torch.uint8), lasting=False)
        time.sleep(0 if rank else 0.05)
        gather.wait()
        ranks.reclaim(shard)
        shard.fill_(-1)
        packed.copy_(expected + 100 * rank)
        ranks.start_exchange(packed, packed).wait()
        time.sleep(0 if rank else 0.05)
        total = ranks.rows_for_me(packed).sum(0)
        ranks.release(packed)
        ranks.reclaim(packed)
        packed.fill_(-1)
        wanted = sum(10 * round_ + rank + 100 * each for each in range(world_size))
        right += [torch.equal(full, expected), bool((total == wanted).all())]
    return right


def test_what_was_lent_may_be_written_once_all_have_read_it() -> None:
    assert run_ranks(rewritten, 3, timeout=20) == [[True] * 6] * 3
