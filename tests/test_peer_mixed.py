"""Two models over one group, one over each transport: they train, and ranks find each other."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard.transports.per_group import per_group
from zshard.wrap import schedule_of


def pair(first: str, second: str, mesh: object = None) -> list[nn.Module]:
    """Two models wrapped in this order."""
    wrapped = [
        zshard.wrap(models.build("odd_parameters"), comm=c, mesh=mesh) for c in (first, second)
    ]
    kinds = [schedule_of(model).comm.shards.in_memory for model in wrapped]
    assert kinds == [comm == "peer" for comm in (first, second)]
    return wrapped


def alternates(rank: int, world_size: int, first: str, second: str) -> list[torch.Tensor]:
    """A step of each in turn; then the one's forward and backward inside the other's step."""
    both = pair(first, second)
    optimizers = [zshard.AdamW(model.parameters(), lr=1e-2) for model in both]
    seen = []
    for step, batch in enumerate(models.batches("odd_parameters", 6, rank)):
        if step < 3:
            losses = []
            for model, optimizer in zip(both, optimizers, strict=True):
                losses.append(model(batch).square().mean())
                losses[-1].backward()
                zshard.clip_grad_norm_(model, 0.1)
                optimizer.step()
        else:
            losses = [model(batch).square().mean() for model in both]
            for loss in losses[:: 1 if step % 2 else -1]:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        seen += [loss.detach() for loss in losses]
    return seen + [v for model in both for v in zshard.state_dict(model).values()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("first", "second"), [("group", "peer"), ("peer", "group")])
def test_a_model_over_each_transport_train_alternately_to_the_same_bits(
    first: str, second: str, world_size: int
) -> None:
    mixed = run_ranks(alternates, world_size, first, second, timeout=40)
    wanted = run_ranks(alternates, world_size, "group", "group", timeout=40)
    for ours, theirs in zip(mixed, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))


def in_different_models(rank: int, world_size: int, first: str, second: str, hsdp: bool) -> str:
    mesh = init_device_mesh("cpu", (2, 2)) if hsdp else None
    both, batch = pair(first, second, mesh), models.batches("odd_parameters", 1, 0)[0]
    for model in both:
        model(batch)
    with pytest.raises(zshard.MismatchError) as raised:
        both[rank % 2](batch)
    loss = both[0](batch).square().mean() + both[1](batch).square().mean()
    loss.backward()
    return str(raised.value)


@pytest.mark.parametrize("hsdp", [False, True])
@pytest.mark.parametrize(("first", "second"), [("group", "peer"), ("peer", "group")])
def test_ranks_that_run_different_ones_of_them_are_told_so(
    first: str, second: str, hsdp: bool
) -> None:
    for said in run_ranks(in_different_models, 4 if hsdp else 2, first, second, hsdp, timeout=30):
        assert "rank 0: a forward, of wrapped model" in said
        assert "rank 1: a forward, of wrapped model" in said


def outlives(rank: int, world_size: int) -> list[bool]:
    """What shares memory goes, on each rank at another time; the other model goes on."""
    gc.disable()
    both, batch = pair("group", "peer"), models.batches("odd_parameters", 1, 0)[0]
    losses = []
    for step in range(3):
        if step == rank:
            del both[1:]
            gc.collect()
        losses.append(both[0](batch).square().mean())
        losses[-1].backward()
    again = zshard.wrap(models.build("odd_parameters"), comm="peer")
    again(batch).square().mean().backward()
    both[0](batch).square().mean().backward()
    return [bool(loss.isfinite()) for loss in losses]


def test_one_of_them_may_be_deleted_at_another_time_on_every_rank() -> None:
    assert run_ranks(outlives, 3, timeout=30) == [[True] * 3] * 3


def leaves(rank: int, world_size: int, number: int) -> tuple[str, str]:
    """Where a rank has given up that an exception took out of a collective of one of the two."""
    models = pair("peer", "group")
    comms = [schedule_of(model).comm for model in models]
    comms[number].give_up(KeyboardInterrupt, "a test")
    assert comms[0].shards.neighbours is comms[1].shards.neighbours is not None
    return comms[0].shards.neighbours.failed, per_group(dist.group.WORLD).standing.failed


def test_a_rank_that_has_left_one_of_the_group_has_left_the_memory_too() -> None:
    why = "KeyboardInterrupt was raised in it during a test"
    assert run_ranks(leaves, 2, 0) == [(why, "")] * 2
    assert run_ranks(leaves, 2, 1) == [(why, why)] * 2


def dies(rank: int, world_size: int, first: str, second: str, at: object, folder: str) -> None:
    both = pair(first, second)

    def interpose(op: str, tag: object) -> None:
        if op == at:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for step, batch in enumerate(models.batches("odd_parameters", 3, rank)):
            if (rank, step) == (1, 1):
                schedule_of(both[(first, second).index("group")]).comm.interpose = interpose
            for number, model in enumerate(both):
                loss = model(batch).square().mean()
                if (rank, step, number) == (1, 1, at):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
    except zshard.CommError as error:
        Path(folder, str(rank)).write_text(str(error))
        os._exit(0)  # the group's end would wait for a send that gloo has forgotten


@pytest.mark.parametrize("at", [0, 1, "all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("first", "second"), [("group", "peer"), ("peer", "group")])
def test_a_rank_killed_in_either_is_named(
    first: str, second: str, at: object, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(dies, 3, first, second, at, str(tmp_path), grace=8)
    assert "rank 1 was killed by SIGKILL" in str(caught.value)
    for rank in (0, 2):
        assert f"rank {rank} left no result and exited with status 0" in str(caught.value)
        said = (tmp_path / str(rank)).read_text()
        assert re.search(r"rank 1 \(process \d+\) has ended\. It was seen last at", said), said
