"""Nothing touches memory that another stream may still be using; see stream_model.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from ranks import run_ranks
from steps import build, one_step
from stream_model import Model
from test_symmetric import Double, take
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard import streams
from zshard.step.pending_reduction import PendingReduction
from zshard.transports import symmetric

pytestmark = pytest.mark.usefixtures("over_the_group")  # GPUs go over it, unless told otherwise


@contextmanager
def modelled(options: dict[str, object]) -> Iterator[tuple[Model, nn.Module]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = Model(monkeypatch)
        trained = build(**options)
        with model:
            yield model, trained
        model.end()


def training(
    rank: int, world_size: int, options: dict[str, object], replicas: int = 1
) -> tuple[list[str], int]:
    """Train for four steps, one of them in two parts; the races, and the accesses on lanes."""
    if replicas > 1:
        options = options | {"mesh": init_device_mesh("cpu", (replicas, world_size // replicas))}
    with modelled(options) as (model, trained):
        optimizer = zshard.AdamW(trained.parameters())
        for step in range(4):
            if step == 2:
                with zshard.no_sync(trained):
                    one_step(trained, rank, step)
            one_step(trained, rank, step)
            zshard.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                trained(torch.zeros(1, 3))
    return sorted(set(model.races)), model.on_lanes


OPTIONS = {
    "zero3": {},
    "zero3, two units ahead": {"prefetch": 2},
    "zero2": {"strategy": "zero2"},
    "zero1": {"strategy": "zero1"},
    "ddp": {"strategy": "ddp"},
    "bf16": {"precision": zshard.Precision.bf16(reduce=torch.bfloat16)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_streams_of_a_step_are_in_order(name: str) -> None:
    for races, on_lanes in run_ranks(training, 2, OPTIONS[name]):
        assert races == []
        assert on_lanes > 50


def test_the_streams_are_in_order_with_replicas() -> None:
    for races, _ in run_ranks(training, 4, {}, 2):
        assert races == []


def test_the_streams_are_in_order_on_one_rank() -> None:
    assert training(0, 1, {})[0] == []


def over_symmetric(
    rank: int, world_size: int, strategy: str, replicas: int, lost: bool
) -> tuple[list[str], int]:
    """As ``training``; a pack that ``lost`` a wait goes into a buffer that may be in use."""
    take(Double())
    with pytest.MonkeyPatch.context() as monkeypatch:
        here = lambda device: streams.current_stream(device).record_event()  # noqa: E731
        monkeypatch.setattr(symmetric, "mark_here", here)
        if lost:
            monkeypatch.setattr(PendingReduction, "leaves_free", lambda self, buffers: True)
        options = {"strategy": strategy, "comm": "peer"}
        return training(rank, world_size, options, replicas)


@pytest.mark.parametrize(("strategy", "replicas"), [("zero3", 1), ("ddp", 1), ("zero3", 2)])
def test_the_streams_are_in_order_over_symmetric_memory(strategy: str, replicas: int) -> None:
    for races, on_lanes in run_ranks(over_symmetric, 2 * replicas, strategy, replicas, False):
        assert races == []
        assert on_lanes > 50


def test_a_reduce_buffer_that_is_in_use_shows() -> None:
    for races, _ in run_ranks(over_symmetric, 2, "zero3", 1, True):
        assert any("zshard::pack_" in race for race in races)


def in_another_order(rank: int, world_size: int) -> list[str]:
    """Blocks that follow one another in backward, and whose reduce buffer is the same one."""
    take(Double())
    with pytest.MonkeyPatch.context() as monkeypatch:
        here = lambda device: streams.current_stream(device).record_event()  # noqa: E731
        monkeypatch.setattr(symmetric, "mark_here", here)
        with modelled({"comm": "peer"}) as (model, trained):
            trained.order = (0, 2, 1)
            for step in range(2):
                one_step(trained, rank, step)
    return sorted(set(model.races))


def test_a_reduce_buffer_is_waited_for_whichever_reduction_has_it() -> None:
    assert run_ranks(in_another_order, 2) == [[]] * 2


def test_on_one_rank_too_where_another_lands_in_its_shard() -> None:
    """A unit without gradients so far is packed into its shard, those after it into one buffer."""
    with modelled({}) as (model, trained):
        for trained.order in ((0, 1), (0, 1, 2)):  # the second adds to what blocks 0 and 1 have
            one_step(trained, 0, 0)
    assert sorted(set(model.races)) == []


def waited_for(rank: int, world_size: int, comm: str) -> list[int]:
    """Reductions that the compute stream waits for, as each of four begins and at the end."""
    take(Double())
    waits: list[int] = [0]
    with modelled({"comm": comm}) as (_, trained), pytest.MonkeyPatch.context() as monkeypatch:
        land, pack = PendingReduction.land, PendingReduction.__init__

        def begin(self: PendingReduction, *args: object) -> None:
            waits.append(0)
            pack(self, *args)

        def wait(self: PendingReduction) -> None:
            waits[-1] += 1
            land(self)

        monkeypatch.setattr(PendingReduction, "__init__", begin)
        monkeypatch.setattr(PendingReduction, "land", wait)
        one_step(trained, rank, 0)
    return waits


@pytest.mark.parametrize(("comm", "waits"), [("group", [0, 1, 1, 1, 1]), ("peer", [0, 0, 1, 1, 2])])
def test_a_pack_waits_only_for_the_reduction_whose_buffer_it_takes(
    comm: str, waits: list[int]
) -> None:
    assert run_ranks(waited_for, 2, comm) == [waits] * 2


def interrupted(rank: int, world_size: int, options: dict[str, object]) -> list[str]:
    """What may come between the steps, and instead of them; the races."""

    def fail(*_: object) -> None:
        raise ValueError("user code")

    with modelled(options) as (model, trained):
        optimizer = zshard.AdamW(trained.parameters())
        for step in range(8):
            trained.order = (0, 2) if step == 2 + rank else (0, 1, 2)
            hook = trained.blocks[1].up.register_full_backward_hook(fail)
            if step != 5:
                hook.remove()
            with pytest.raises(ValueError, match="user") if step == 5 else nullcontext():
                one_step(trained, rank, step)
            hook.remove()
            if step == 5:
                zshard.reset(trained)
                continue
            zshard.clip_grad_norm_(trained, 0.5, 2.0 if step else 3.0)
            optimizer.step()
            optimizer.step()  # while what the first has written may be under way
            for shard in zshard.local_shards(trained).values() if step == 1 else ():
                shard.mul_(0.5)
            zshard.mark_updated(trained)
            zshard.full_grad(trained, "inlet.weight")
            with zshard.full_params(trained, write=step == 3):
                for param in trained.parameters():
                    param.detach().mul_(0.5)
            optimizer.zero_grad()
    return sorted(set(model.races))


@pytest.mark.parametrize("name", ["zero3", "zero2", "zero1", "ddp"])
def test_the_streams_are_in_order_whatever_comes_between_steps(name: str) -> None:
    assert run_ranks(interrupted, 2, OPTIONS[name]) == [[]] * 2


def test_they_are_on_one_rank_which_has_nobody_to_end_a_backward_with() -> None:
    assert interrupted(0, 1, {}) == []


def careless(rank: int, world_size: int, lost: str) -> list[str]:
    """Train where a function of zshard.streams does nothing."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if lost == "compute_waits":
            for module in ("transports.handle", "step.pending_reduction"):
                monkeypatch.setattr(f"zshard.{module}.compute_waits", lambda mark: None)
        else:
            monkeypatch.setattr(streams.Lane, lost, lambda lane: lane.stream)
        return training(rank, world_size, {})[0]


@pytest.mark.parametrize("lost", ["compute_waits", "after_compute"])
def test_a_wait_that_is_left_out_shows(lost: str) -> None:
    for races in run_ranks(careless, 2, lost):
        assert any("zshard::pack_" in race for race in races)
