"""Which way gloo moves large rows."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from steps import all_by_messages, build, one_step

import zshard
from zshard.comm import Comm
from zshard.tag import Tag
from zshard.transports.messages import Messenger


def ways(rank: int, world_size: int, strategy: str, hosts: int) -> Counter[str]:
    """How the second step moved its rows, every one of them large, on so many hosts."""
    all_by_messages(rank % hosts)
    used: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (dist, "broadcast"),
            (dist, "all_to_all_single"),
            (Messenger, "all_gather"),
            (Messenger, "all_to_all"),
        ):
            real, label = getattr(owner, name), f"{owner.__name__.rpartition('.')[2]}.{name}"

            def counted(*args, real=real, label=label, **kwargs):  # type: ignore[no-untyped-def]
                rows = (each for each in args if isinstance(each, torch.Tensor))
                used[label] += any(each.dtype != torch.int64 for each in rows)  # as words are
                return real(*args, **kwargs)

            patch.setattr(owner, name, counted)
        model = build(strategy=strategy, comm="group")
        optimizer = zshard.AdamW(model.parameters())
        for step in range(2):
            used.clear()
            one_step(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
    return +used


def test_ranks_of_one_host_broadcast_and_those_of_several_send_messages() -> None:
    for used in run_ranks(ways, 2, "zero3", 1):
        assert set(used) == {"distributed.broadcast", "distributed.all_to_all_single"}
    for used in run_ranks(ways, 2, "zero3", 2):
        assert set(used) == {"Messenger.all_gather", "Messenger.all_to_all"}


def test_what_is_gathered_after_a_step_is_left_to_gloo_on_several_hosts_too() -> None:
    for used in run_ranks(ways, 2, "zero2", 2):
        assert set(used) == {"distributed.broadcast", "Messenger.all_to_all"}


def gathered(rank: int, world_size: int, hosts: int) -> list[list[int]]:
    """A gather of large rows, from a shard that lies apart and from one in its place."""
    all_by_messages(rank % hosts)
    comm, shard = Comm(None, torch.device("cpu"), "group"), torch.full((64,), rank + 1).byte()
    apart, inside = (torch.zeros(world_size, 64, dtype=torch.uint8) for _ in range(2))
    inside[rank] = shard
    for full, own in ((apart, shard), (inside, inside[rank])):
        comm.all_gather(full.view(-1), own, Tag(None, "gather")).wait()
    return [full.unique(dim=1).flatten().tolist() for full in (apart, inside)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_large_rows_come_whole_from_wherever_they_lie(hosts: int) -> None:
    assert run_ranks(gathered, 3, hosts) == [[[1, 2, 3]] * 2] * 3


def test_messages_take_no_memory_that_stays() -> None:
    row = torch.zeros(64, dtype=torch.uint8)
    messenger = Messenger(None, rank=0, size=1)  # type: ignore[arg-type]  # which nobody asks
    messenger.all_gather(row, row)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            messenger.all_gather(row, row)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10_000
