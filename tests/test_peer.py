"""comm="peer": ranks that read each other's memory compute what the process group's ranks do."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import signal
import time
import weakref
from collections import Counter

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from training import Record, Wrapped, adamw, assert_same_bits, kSteps, train

import zshard
from zshard import discovery, peer
from zshard.comm import Comm
from zshard.master import Master
from zshard.wrap import schedule_of

kStrategies = ["zero1", "zero2", "zero3", "ddp"]
kPrecisions = {
    "fp32": None,
    "bf16": zshard.Precision.bf16(),
    "bf16/bf16": zshard.Precision.bf16(reduce=torch.bfloat16),
    "split": zshard.Precision.bf16(master="split"),
}
kSteady = ("all_gather", "reduce_scatter", "all_reduce", "agree")


def transport_of(model: torch.nn.Module) -> str:
    return "peer" if schedule_of(model).comm.shards.in_memory else "group"


def trained(
    rank: int, comm: str, strategy: str, precision: str, mesh: object = None, accumulate: int = 2
) -> tuple[Record, Counter[str], Counter[str]]:
    model = zshard.wrap(
        models.build("odd_parameters"),
        comm=comm,
        strategy=strategy,
        precision=kPrecisions[precision],
        mesh=mesh,
    )
    assert transport_of(model) == ("group" if comm == "group" else "peer")
    data = models.batches("odd_parameters", kSteps * accumulate, rank)
    if kPrecisions[precision] is not None:
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
@pytest.mark.parametrize("precision", kPrecisions)
@pytest.mark.parametrize("strategy", kStrategies)
def test_both_transports_compute_the_same_bits_and_shared_memory_sends_none(
    strategy: str, precision: str, world_size: int
) -> None:
    for group, shared in run_ranks(on_both, world_size, strategy, precision):
        assert_same_bits(shared[0], group[0])
        assert shared[1] == group[1], "the volume that other ranks needed"
        assert sum(group[2].values()) > 0
        assert {op: shared[2][op] for op in kSteady} == dict.fromkeys(kSteady, 0)


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
    model = zshard.wrap(plain, comm=comm, precision=kPrecisions[precision])
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


# --- who can --------------------------------------------------------------------------------------


def out_of_reach(rank: int, world_size: int, comm: str) -> str:
    """Rank 2 is on another host, as far as it can tell."""
    if rank == 2:
        discovery._check = lambda place: "no such process here"
    try:
        return transport_of(zshard.wrap(models.build("odd_parameters"), comm=comm))
    except zshard.WrapError as error:
        return str(error)


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment stands in for it."""
    monkeypatch.setenv("ZSHARD_COMM", "auto")


@pytest.mark.usefixtures("auto")
def test_a_rank_out_of_reach_is_named_on_every_rank_and_auto_takes_the_group() -> None:
    assert run_ranks(out_of_reach, 3, "auto") == ["group"] * 3
    for said in run_ranks(out_of_reach, 3, "peer"):
        assert "comm='peer': rank 2 of 3" in said
        assert "no such process here" in said
        assert "comm='group'" in said


def out_of_reach_in_one_replica(rank: int, world_size: int) -> str:
    if rank == 3:
        discovery._check = lambda place: "no such process here"
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(models.build("odd_parameters"), comm="peer", mesh=mesh)
    dist.barrier()
    return str(raised.value)


def test_a_rank_out_of_reach_is_named_on_the_ranks_of_all_replicas() -> None:
    for said in run_ranks(out_of_reach_in_one_replica, 4, timeout=20):
        assert "comm='peer': rank 1 (global rank 3) of 2" in said
        assert "no such process here" in said


def chosen(rank: int, world_size: int, comm: str) -> str:
    return transport_of(zshard.wrap(models.build("odd_parameters"), comm=comm))


@pytest.mark.usefixtures("auto")
def test_auto_takes_shared_memory_where_every_rank_can() -> None:
    assert run_ranks(chosen, 3, "auto") == ["peer"] * 3
    assert run_ranks(chosen, 3, "group") == ["group"] * 3


def said_of(rank: int, world_size: int, variable: str, comm: str) -> str:
    if rank == 1:
        os.environ["ZSHARD_COMM"] = variable
    with pytest.raises(zshard.Error) as raised:
        chosen(rank, world_size, comm)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.usefixtures("auto")
def test_ranks_that_ask_for_different_transports_are_refused_on_every_rank() -> None:
    for said in run_ranks(said_of, 2, "group", "auto"):
        assert said.startswith("MismatchError: the ranks ask for different transports")
        assert "('auto', 'group')" in said


def test_a_variable_that_names_no_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSHARD_COMM", "pear")
    for said in run_ranks(said_of, 2, "pear", "auto"):
        assert said == "InputError: ZSHARD_COMM='pear': expected 'auto', 'group' or 'peer'"


def test_one_rank_needs_no_transport() -> None:
    assert chosen(0, 1, "peer") == "group"
    with pytest.raises(zshard.InputError, match="'auto', 'group' or 'peer'"):
        zshard.wrap(models.build("odd_parameters"), comm="pear")


def let_go(rank: int, world_size: int) -> list[bool]:
    """Whether what is lent, and the group, are there; and whether they have gone."""
    gc.collect()
    gc.disable()
    group = dist.new_group(list(range(world_size)))
    shards = Comm(group, torch.device("cpu"), "peer").shards
    shards.empty(1 << 20, torch.float32)
    held = [weakref.ref(shards), weakref.ref(group)]
    before = [ref() is not None for ref in held]
    del shards
    dist.destroy_process_group(group)
    del group
    gc.enable()
    return before + [ref() is None for ref in held]


def test_what_is_lent_goes_at_once_and_no_cycle_keeps_the_group() -> None:
    assert run_ranks(let_go, 2) == [[True] * 4] * 2


def with_little_memory(rank: int, world_size: int, where: str) -> tuple[str, int]:
    """Files, those in memory too, may grow to 4 MiB; or the last rank's node has no pages left."""
    if where == "file" and rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    if where == "pages" and rank == 1:

        def reserve(opened: int, begin: int, nbytes: int) -> None:
            if nbytes > 4 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = reserve
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(torch.nn.Linear(2048, 2048), comm="peer")
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(each) for each in descriptors if os.path.islink(each)]
    return str(raised.value), sum("memfd:zshard" in name for name in names)


@pytest.mark.parametrize(("where", "rank", "error"), [("file", 0, "EFBIG"), ("pages", 1, "ENOSPC")])
def test_too_little_memory_is_an_error_on_every_rank_that_says_how_much_is_needed(
    where: str, rank: int, error: str
) -> None:
    shard = 4 * (2048 * 2048 + 2048) // 2
    for said, left_open in run_ranks(with_little_memory, 2, where):
        assert f"rank {rank} of 2: no shared memory" in said
        assert os.strerror(getattr(errno, error)) in said
        needed = int(said.split("needs ")[1].split()[0])
        assert shard <= needed < shard + 16384, "in whole pages"
        assert left_open == 0
