"""The order of events of a step, and its cost: collectives, bytes, live buffers, allocations."""

from __future__ import annotations

import random
import time

import pytest
import torch
from ops_check import devices
from ranks import run_ranks
from steps import batch, build, one_step
from torch import Tensor

import zshard
from zshard.tag import Tag
from zshard.training_state import TrainingState
from zshard.unit import State, Unit
from zshard.wrap import schedule_of

# One step of Blocks (three blocks and a root) once the order is known, at every N.
FORWARD = """
gather root, wait root, forward root, gather blocks.0,
wait blocks.0, forward blocks.0, gather blocks.1, reshard blocks.0,
wait blocks.1, forward blocks.1, gather blocks.2, reshard blocks.1,
wait blocks.2, forward blocks.2
"""
BACKWARD = """
backward root, gather blocks.1,
backward blocks.2, reshard blocks.2, pack blocks.2, reduce blocks.2,
wait blocks.1, backward blocks.1, gather blocks.0, reshard blocks.1, pack blocks.1, reduce blocks.1,
wait blocks.0, backward blocks.0, reshard blocks.0, pack blocks.0, reduce blocks.0,
reshard root, pack root, reduce root, step root
"""


def events(text: str) -> list[tuple[str, ...]]:
    return [tuple(event.split()) for event in text.replace("\n", " ").split(",") if event.strip()]


def recorded_step(
    rank: int, world_size: int, prefetch: int, device: str = "cpu"
) -> list[tuple[str, str]]:
    model = build(prefetch=prefetch, device=device)
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, rank, 0)
    with zshard.trace(model) as trace:
        one_step(model, rank, 1)
        optimizer.step()
    return [tuple(event) for event in trace.events]


@devices
def test_a_step_is_this_list_of_events_on_one_rank(device: str) -> None:
    assert recorded_step(0, 1, 1, device) == events(FORWARD + "," + BACKWARD)


@devices
def test_a_step_is_the_same_list_on_every_one_of_two_ranks(device: str) -> None:
    assert run_ranks(recorded_step, 2, 1, device) == [events(FORWARD + "," + BACKWARD)] * 2


def test_without_prefetch_every_gather_is_waited_for_at_once() -> None:
    for trace in run_ranks(recorded_step, 2, 0):
        gathers = [i for i, (phase, _) in enumerate(trace) if phase == "gather"]
        assert [trace[i + 1] for i in gathers] == [("wait", trace[i][1]) for i in gathers]


def test_evaluation_reshards_everything_and_packs_nothing() -> None:
    model = build()
    one_step(model, 0, 0)
    with zshard.trace(model) as trace, torch.no_grad():
        model(batch(0, 1))
    assert [tuple(event) for event in trace.events] == [
        *events(FORWARD),
        *events("reshard blocks.2, reshard root"),
    ]


def live_and_allocations(rank: int, world_size: int, prefetch: int) -> tuple[int, int, int]:
    model = build(prefetch=prefetch)
    pool = schedule_of(model).pool
    optimizer = zshard.AdamW(model.parameters())
    for step in range(5):
        one_step(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            before = pool.allocations
    return pool.peak_live, before, pool.allocations


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_live_full_buffers_reach_and_never_exceed_one_plus_prefetch(prefetch: int) -> None:
    for peak, _, _ in run_ranks(live_and_allocations, 2, prefetch):
        assert peak == 1 + prefetch


def test_a_steady_state_step_allocates_no_buffer() -> None:
    for _, before, after in run_ranks(live_and_allocations, 2, 1):
        assert 0 < before == after


def count(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int], list[int]]:
    model = build()
    stats = zshard.stats(model)
    one_step(model, rank, 0)
    stats.reset()
    one_step(model, rank, 1)
    shards = [u.flats[0].layout.shard_size for u in schedule_of(model).units]
    return dict(stats.calls), dict(stats.sent_bytes), shards


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_sends_the_textbook_volume(world_size: int) -> None:
    for calls, sent, (root, *blocks) in run_ranks(count, world_size):
        # The root, and the last block, stay gathered between forward and backward.
        gathers = 1 + 2 * 3 - 1
        assert calls == {"all_gather": gathers, "reduce_scatter": 4, "all_reduce": 1, "agree": 2}
        others = world_size - 1
        assert sent["all_gather"] == 4 * others * (root + 2 * sum(blocks) - blocks[-1])
        assert sent["reduce_scatter"] == 4 * others * (root + sum(blocks))


def test_one_rank_communicates_nothing() -> None:
    calls, sent, _ = count(0, 1)
    assert not calls and not sent


def reuse_memory(rank: int, world_size: int) -> bool:
    model = build()
    units = schedule_of(model).units
    seen: list[set[int]] = []
    for step in range(3):
        one_step(model, rank, step)
        seen.append({u.flats[0].full.base.data_ptr() for u in units})
    # The root's slot and the two that blocks take in turn.
    return len(seen[1]) == 3 and seen[1] == seen[2]


def test_units_are_gathered_into_the_same_memory_every_step() -> None:
    assert all(run_ranks(reuse_memory, 2))


def test_a_transition_that_the_table_does_not_list_is_refused_by_name() -> None:
    unit = schedule_of(build()).units[1]
    with pytest.raises(zshard.StateError, match=r"blocks\.0.*SHARDED.*cannot become SHARDED"):
        unit.reshard()
    unit.gather(Tag(0, "gather", "x"), move=True, evict=Unit.reshard)
    unit.wait()
    assert unit.state is State.GATHERED
    with pytest.raises(zshard.StateError, match=r"GATHERED.*cannot become GATHERED"):
        unit.wait()


def test_a_phase_that_cannot_follow_another_is_refused_by_name() -> None:
    executor = schedule_of(build()).executor
    executor.enter_state(TrainingState.FORWARD)
    with pytest.raises(zshard.StateError, match=r"FORWARD .*cannot begin.*in the root's forward"):
        executor.enter_state(TrainingState.FORWARD)
    executor.enter_state(TrainingState.BACKWARD)
    with pytest.raises(zshard.StateError, match=r"FORWARD .*cannot begin.*in a backward"):
        executor.enter_state(TrainingState.FORWARD)
    executor.enter_state(TrainingState.IDLE)
    assert executor.state is TrainingState.IDLE


def delay(device: str, delays: random.Random) -> None:
    """Have what comes next begin late: on the host, or on the current stream."""
    if device == "cpu":
        time.sleep(delays.choice([0, 0.003]))
    else:
        torch.cuda._sleep(delays.choice([0, 5_000_000]))  # cycles, some 3 ms


def jittered_losses(rank: int, world_size: int, seed: int | None, device: str) -> list[Tensor]:
    """Losses of six steps in which collectives and layers begin at random times."""
    model = build(prefetch=2, device=device)
    delays = random.Random(f"{seed}-{rank}")
    if seed is not None:
        schedule_of(model).comm.interpose = lambda op, tag: delay(device, delays)
        for block in model.blocks:
            block.down.register_forward_pre_hook(lambda *_: delay(device, delays))
            block.down.register_full_backward_pre_hook(lambda *_: delay(device, delays))
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        losses.append(one_step(model, rank, step))
        zshard.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.cpu() for loss in losses]


@devices
def test_the_timing_of_collectives_and_layers_does_not_change_a_bit(device: str) -> None:
    expected = run_ranks(jittered_losses, 2, None, device)
    for seed in range(3):
        assert run_ranks(jittered_losses, 2, seed, device) == expected


def failing_gather(rank: int, world_size: int) -> str:
    model = build()
    one_step(model, rank, 0)

    def fail(op: str, tag: Tag) -> None:
        if tag == Tag(1, "gather", "blocks.1"):
            raise RuntimeError("connection closed by peer")

    schedule_of(model).comm.interpose = fail
    with pytest.raises(zshard.CommError) as caught:
        one_step(model, rank, 1)
    return str(caught.value)


def test_a_failing_collective_names_rank_operation_phase_unit_and_step() -> None:
    for rank, message in enumerate(run_ranks(failing_gather, 2)):
        assert f"rank {rank} of 2: all_gather in gather of unit 'blocks.1' in step 1" in message
        assert "connection closed by peer" in message


def test_no_pass_over_the_gradients_applies_the_clip_factor_where_the_step_does() -> None:
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, 0, 0)
    buffers = [u.flats[0].grads.owned() for u in schedule_of(model).units]
    before = [buffer.clone() for buffer in buffers]
    norm = zshard.clip_grad_norm_(model, 1e-3)
    assert norm > 1e-3
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    assert all(map(torch.equal, buffers, before))
    one_step(model, 0, 0)
    zshard.clip_grad_norm_(model, 1e-3)
    grad = zshard.full_grad(model, "outlet.bias")  # someone looks: now it is applied
    assert grad is not None and float(grad.abs().max()) <= 1e-3
