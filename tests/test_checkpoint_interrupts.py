"""Ctrl-C on one rank in the middle of a save or a load: the others hear of it, and go on alike."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import zshard
from zshard.checkpoint.peers import Peers

T = TypeVar("T")
VICTIM = 1


class Interrupt:
    """Has Ctrl-C arrive behind this rank's part of one stage, or behind all ranks'."""

    def __init__(self, at: int = -1, *, alone: bool = True) -> None:
        self.at, self.alone, self.stages, self.real = at, alone, 0, Peers.gather

    def __enter__(self) -> Interrupt:
        Peers.gather = lambda peers, stage: self.gather(peers, stage)
        return self

    def __exit__(self, *_: object) -> None:
        Peers.gather = self.real

    def gather(self, peers: Peers, stage: Callable[[], T]) -> list[T]:
        if self.alone:
            return self.real(peers, lambda: self.run(stage))
        return self.run(lambda: self.real(peers, stage))

    def run(self, stage: Callable[[], T]) -> T:
        made = stage()
        self.stages += 1
        if self.stages - 1 == self.at:
            raise KeyboardInterrupt
        return made


def saved(folder: str, comm: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zshard.wrap(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), comm=comm)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    zshard.save(f"{folder}/whole", model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (KeyboardInterrupt, zshard.Error) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def interrupted(
    rank: int, world_size: int, folder: str, comm: str, kind: str
) -> list[tuple[str, str, str, bool]]:
    """For each stage: how the call ended, and a reset, a step and a load after it."""
    model, optimizer = saved(folder, comm)
    wanted = zshard.state_dict(model, all_ranks=True)
    calls = {
        "save": lambda: zshard.save(f"{folder}/other", model, optimizer),
        "load": lambda: zshard.load(f"{folder}/whole", model, optimizer),
        "load_weights": lambda: zshard.load_weights(model, f"{folder}/whole"),
        "export": lambda: zshard.export(f"{folder}/exported", model),
    }
    found = []
    for at in itertools.count():
        with Interrupt(at if rank == VICTIM else -1):
            ended = outcome(calls[kind])
        if not ended:
            return found
        reset = outcome(lambda: zshard.reset(model))
        stepped = outcome(lambda: step(model, optimizer))
        same = False
        if comm == "peer":
            zshard.load(f"{folder}/whole", model, optimizer)
            now = zshard.state_dict(model, all_ranks=True)
            same = all(torch.equal(now[name], wanted[name]) for name in wanted)
        found.append((ended, reset, stepped, same))
        if comm == "group":
            return found
    raise AssertionError("unreachable")


@pytest.mark.parametrize("kind", ["save", "load", "load_weights", "export"])
def test_over_shared_memory_all_ranks_go_on_after_a_reset(kind: str, tmp_path: Path) -> None:
    own, other = (
        found for found in reversed(run_ranks(interrupted, 2, str(tmp_path), "peer", kind))
    )
    assert len(own) == len(other) >= 3
    for (ended, *rest), (heard, *others) in zip(own, other, strict=True):
        assert ended == "KeyboardInterrupt: "
        assert "KeyboardInterrupt was raised in it during " in heard and "rank 1 " in heard
        assert rest == others, "both can take a step, or neither"
        assert rest[0] == "" and rest[2]
    assert any("failed halfway" in stepped for _, _, stepped, _ in own) == kind.startswith("load")


def test_over_the_process_group_the_rank_takes_part_in_nothing_more(tmp_path: Path) -> None:
    other, own = run_ranks(interrupted, 2, str(tmp_path), "group", "load")
    assert own[0][0] == "KeyboardInterrupt: "
    assert "KeyboardInterrupt was raised in it during load(" in own[0][2]
    assert "CommError" in other[0][0]


def interrupted_behind_the_last_stage(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer = saved(folder, "peer")
    with Interrupt() as counted:
        zshard.load(f"{folder}/whole", model, optimizer)
    with Interrupt(counted.stages - 1 if rank == VICTIM else -1, alone=False):
        ended = outcome(lambda: zshard.load(f"{folder}/whole", model, optimizer))
    first = outcome(lambda: step(model, optimizer)) if rank != VICTIM else ""
    zshard.reset(model)
    second = outcome(lambda: step(model, optimizer))
    zshard.load(f"{folder}/whole", model, optimizer)
    return [ended, first, second, outcome(lambda: step(model, optimizer))]


def test_a_load_that_has_ended_on_some_ranks_alone_counts_on_none(tmp_path: Path) -> None:
    other, own = run_ranks(interrupted_behind_the_last_stage, 2, str(tmp_path))
    assert (own[0], other[0]) == ("KeyboardInterrupt: ", "")
    assert "KeyboardInterrupt was raised in it during load(" in other[1]
    assert own[2] == other[2] and "failed halfway" in own[2]
    assert own[3] == other[3] == ""


def test_a_save_that_ctrl_c_has_ended_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zshard.save(tmp_path / "a", zshard.wrap(nn.Linear(3, 2)))
    assert os.listdir(tmp_path) == []


def loads_after_a_backward(
    rank: int, world_size: int, comm: str, how: str, folder: str
) -> list[str]:
    """A script whose ranks agree on whether one has failed, and then load."""
    model = zshard.wrap(nn.Linear(3, 2), init="broadcast", comm=comm)
    optimizer = zshard.AdamW(model.parameters())
    zshard.save(f"{folder}/a", model, optimizer)
    done = []
    for step in range(3):
        failed = torch.zeros(())
        try:
            out = model(torch.ones(2, 3))
            if (rank, step) == (0, 0):
                out.register_hook(lambda _: 1 / 0)
            out.sum().backward()
        except ZeroDivisionError:
            failed += 1
            zshard.reset(model)
        dist.all_reduce(failed)
        if not failed:
            optimizer.step()
            optimizer.zero_grad()
            done.append("stepped")
        else:
            strict = how.endswith("strict")
            if how.startswith("weights"):
                zshard.load_weights(model, f"{folder}/a", strict=strict)
            else:
                zshard.load(f"{folder}/a", model, optimizer, strict=strict)
            done.append("loaded")
    return done


@pytest.mark.parametrize("how", ["all strict", "weights strict", "all there", "weights there"])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_after_a_load_a_backward_that_raised_on_another_rank_is_no_news(
    comm: str, how: str, tmp_path: Path
) -> None:
    done = run_ranks(loads_after_a_backward, 2, comm, how, str(tmp_path), timeout=15)
    assert done == [["loaded", "stepped", "stepped"]] * 2
