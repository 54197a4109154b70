"""Process groups one after another: what was left under way in one is nothing to the next."""

from __future__ import annotations

import logging.handlers
import os
from datetime import timedelta
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import zshard
from zshard.step import debts
from zshard.wrap import schedule_of


def join(folder: str, name: str, rank: int, seconds: int = 20) -> None:
    """Make this process ``rank`` of the two of a new default group."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder, name)), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds)
    )
    dist.barrier()


def train(rank: int, comm: str) -> list[float]:
    """The norms of the gradients of two steps of a new model."""
    torch.manual_seed(0)
    model = zshard.wrap(models.build("blocks"), comm=comm)
    optimizer = zshard.AdamW(model.parameters())
    norms = []
    for batch in models.batches("blocks", 2, rank):
        models.loss_of(model, batch).backward()
        norms.append(float(zshard.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def replaced(process: int, world_size: int, folder: str, comm: str) -> list[list[float]]:
    """Process 2 takes the place of process 1, which wraps more models than it does."""
    norms = []
    if process < 2:
        join(folder, "first", process)
        norms += [train(process, comm), train(process, comm)]
        dist.destroy_process_group()
    if process != 1:
        join(folder, "second", min(process, 1))
        norms.append(train(min(process, 1), comm))
        dist.destroy_process_group()
    return norms


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_process_may_take_the_place_of_another_in_a_new_group(comm: str, tmp_path: Path) -> None:
    first, second, third = run_ranks(replaced, 3, str(tmp_path), comm, group=False)
    norms = first[0]
    assert first == [norms] * 3
    assert second == [norms] * 2
    assert third == [norms]


class Own(Exception):
    """A script's own."""


def raised_in_backward(rank: int, world_size: int, folder: str, comm: str) -> list[float]:
    """Rank 1's backward raises, and nobody resets the model, which is there to the end."""
    join(folder, "first", rank, seconds=5)
    model = zshard.wrap(models.build("blocks"), comm=comm)
    if rank == 1:

        def boom(module: nn.Module, *_: object) -> Tensor:
            raise Own

        model.blocks[1].register_full_backward_hook(boom)
    loss = models.loss_of(model, models.batches("blocks", 1, rank)[0])
    with pytest.raises(Own if rank == 1 else zshard.CommError):
        loss.backward()
    dist.destroy_process_group()
    join(folder, "second", rank)
    norms = train(rank, comm)
    dist.destroy_process_group()
    return norms


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_backward_that_raised_in_a_group_that_is_gone_is_not_brought_back(
    comm: str, tmp_path: Path
) -> None:
    first, second = run_ranks(raised_in_backward, 2, str(tmp_path), comm, group=False)
    assert first == second


def owes(rank: int, world_size: int, folder: str) -> list[float]:
    """Rank 1 owes the others a meeting of a model as the group goes."""
    join(folder, "first", rank)
    model = zshard.wrap(models.build("blocks"), comm="group")
    if rank == 1:
        debts.owe(schedule_of(model).agreement, schedule_of(model).comm, "the end of something")
    dist.destroy_process_group()
    join(folder, "second", rank)
    norms = train(rank, "group")
    dist.destroy_process_group()
    return norms


def test_no_meeting_is_owed_to_ranks_of_a_group_that_is_gone(tmp_path: Path) -> None:
    first, second = run_ranks(owes, 2, str(tmp_path), group=False)
    assert first == second


def warned_of_a_later_group(rank: int, world_size: int, folder: str) -> list[int]:
    """How many warnings have come behind each of three forwards, the last two in a group."""
    handler = logging.handlers.BufferingHandler(10)
    logging.getLogger("zshard").addHandler(handler)
    model, counts = zshard.wrap(nn.Linear(2, 2)), []
    for step in range(3):
        if step == 1:
            join(folder, "later", rank)
            zshard.wrap(nn.Linear(2, 2))(torch.ones(1, 2))
        model(torch.ones(1, 2))
        counts.append(sum("wrapped before" in record.getMessage() for record in handler.buffer))
    dist.destroy_process_group()
    return counts


def test_a_model_wrapped_before_its_group_is_told_of_once(tmp_path: Path) -> None:
    counts = run_ranks(warned_of_a_later_group, 2, str(tmp_path), group=False)
    assert counts == [[0, 1, 1]] * 2
