"""The order of events of a step, and its cost: collectives, bytes, live buffers, allocations."""

from __future__ import annotations

import random
import time

import models
import pytest
import torch
from models import Block, Blocks
from ranks import run_ranks
from torch import Tensor, nn

import zshard
from zshard.comm import Tag
from zshard.unit import State
from zshard.wrap import schedule_of

# One step of Blocks (three blocks and a root) once the order is known, at every N.
kForward = """
gather root, wait root, forward root, gather blocks.0,
wait blocks.0, forward blocks.0, gather blocks.1, reshard blocks.0,
wait blocks.1, forward blocks.1, gather blocks.2, reshard blocks.1,
wait blocks.2, forward blocks.2
"""
kBackward = """
backward root,
backward blocks.2, gather blocks.1, reshard blocks.2, pack blocks.2, reduce blocks.2,
wait blocks.1, backward blocks.1, gather blocks.0, reshard blocks.1, pack blocks.1, reduce blocks.1,
wait blocks.0, backward blocks.0, reshard blocks.0, pack blocks.0, reduce blocks.0,
reshard root, pack root, reduce root, step root
"""
kUnits = ("root", "blocks.0", "blocks.1", "blocks.2")


def events(text: str) -> list[tuple[str, ...]]:
    return [tuple(event.split()) for event in text.replace("\n", " ").split(",") if event.strip()]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def one_step(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = models.loss_of(model, batch(rank, step))
    loss.backward()
    return loss.detach()


def build(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return zshard.wrap(Blocks(), **options)


def recorded_step(rank: int, world_size: int, prefetch: int) -> list[tuple[str, str]]:
    model = build(prefetch=prefetch)
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, rank, 0)
    with zshard.trace(model) as trace:
        one_step(model, rank, 1)
        optimizer.step()
    return [tuple(event) for event in trace.events]


def test_a_step_is_this_list_of_events_on_one_rank() -> None:
    assert recorded_step(0, 1, 1) == events(kForward + "," + kBackward)


def test_a_step_is_the_same_list_on_every_one_of_two_ranks() -> None:
    assert run_ranks(recorded_step, 2, 1) == [events(kForward + "," + kBackward)] * 2


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
        *events(kForward),
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
        assert calls == {"all_gather": 1 + 2 * 3 - 1, "reduce_scatter": 4, "all_reduce": 1}
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
        seen.append({u.flats[0].base.data_ptr() for u in units})
    # The root's slot and the two that blocks take in turn.
    return len(seen[1]) == 3 and seen[1] == seen[2]


def test_units_are_gathered_into_the_same_memory_every_step() -> None:
    assert all(run_ranks(reuse_memory, 2))


def test_a_transition_that_the_table_does_not_list_is_refused_by_name() -> None:
    unit = schedule_of(build()).units[1]
    with pytest.raises(zshard.StateError, match=r"blocks\.0.*SHARDED.*cannot become SHARDED"):
        unit.reshard()
    unit.gather(Tag(0, "gather", "x"), move=True)
    unit.wait()
    assert unit.state is State.GATHERED
    with pytest.raises(zshard.StateError, match=r"GATHERED.*cannot become GATHERED"):
        unit.wait()


def jittered_losses(rank: int, world_size: int, seed: int | None) -> list[Tensor]:
    """Losses of six steps in which every collective of every rank starts at a random time."""
    model = build(prefetch=2)
    delays = random.Random(f"{seed}-{rank}")
    if seed is not None:
        schedule_of(model).comm.interpose = lambda op, tag: time.sleep(delays.choice([0, 0.003]))
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        losses.append(one_step(model, rank, step))
        zshard.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_the_timing_of_collectives_does_not_change_a_bit() -> None:
    expected = run_ranks(jittered_losses, 2, None)
    for seed in range(3):
        assert run_ranks(jittered_losses, 2, seed) == expected


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


class Leaky(Block):
    """Keeps an activation of its inside, for someone to differentiate behind its back."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.up(x))
        return x + self.down(self.kept)


def backward_behind_the_units_back(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = Blocks()
    model.blocks = nn.ModuleList(Leaky() for _ in range(3))
    zshard.wrap(model)
    out = model(batch(rank, 0))
    kept = model.blocks[0].kept
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        kept.sum().backward()  # its input's gradient needs blocks.0.up.weight, long resharded
    del out, kept
    return str(caught.value)


def test_a_graph_never_reads_a_weight_that_is_not_there() -> None:
    run_ranks(backward_behind_the_units_back, 2)


def outlived_graph(rank: int, world_size: int) -> None:
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    loss = models.loss_of(model, batch(rank, 0))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_through_updated_weights_is_refused_as_in_plain_torch(world_size: int) -> None:
    if world_size == 1:
        outlived_graph(0, 1)
    else:
        run_ranks(outlived_graph, world_size)


def steps_around_an_exception(rank: int, world_size: int, where: str | None) -> list[Tensor]:
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    losses = [one_step(model, rank, 0)]
    optimizer.step()
    optimizer.zero_grad()
    if where is not None:

        def fail(*_: object) -> None:
            raise ValueError("user code")

        if where == "forward":
            handle = model.blocks[1].up.register_forward_hook(fail)
        else:
            handle = model.blocks[1].up.register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="user code"):
            one_step(model, rank, 7)
        handle.remove()
    losses.append(one_step(model, rank, 1))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(one_step(model, rank, 2))
    return losses


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_an_exception_equals_that_of_an_undisturbed_run(where: str) -> None:
    expected = run_ranks(steps_around_an_exception, 2, None)
    assert run_ranks(steps_around_an_exception, 2, where) == expected


def test_no_pass_over_the_gradients_applies_the_clip_factor_where_the_step_does() -> None:
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, 0, 0)
    buffers = [u.flats[0].grad_buffer() for u in schedule_of(model).units]
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


class Routed(Blocks):
    """Blocks of which each rank runs a subset of its own, as experts are run."""

    def __init__(self, rank: int) -> None:
        super().__init__(order=(0, 1 + rank))


def different_subsets(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = zshard.wrap(Routed(rank))
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    one_step(model, rank, 0)
    before = {name: shard.clone() for name, shard in zshard.local_shards(model).items()}
    with pytest.raises(zshard.MismatchError) as caught:
        optimizer.step()
    assert all(torch.equal(before[name], s) for name, s in zshard.local_shards(model).items())
    return str(caught.value)


def test_ranks_that_gathered_different_units_are_told_before_the_step() -> None:
    for message in run_ranks(different_subsets, 2):
        assert "rank 0 'blocks.1', rank 1 'blocks.2'" in message


def test_between_forward_and_backward_the_modules_hold_sharded_parameters() -> None:
    model = build()
    params = list(model.parameters())
    for step in range(2):
        loss = models.loss_of(model, batch(0, step))
        assert all(now is before for now, before in zip(model.parameters(), params, strict=True))
        model.zero_grad()
        loss.backward()
    torch.manual_seed(0)
    plain = Blocks()
    one_step(plain, 0, 1)
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad), name


class Written(Block):
    """Changes its weight in forward, as some quantisers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_parameter_written_in_forward_is_an_error_and_not_lost() -> None:
    model = Blocks()
    model.blocks = nn.ModuleList(Written() for _ in range(2))
    zshard.wrap(model)
    with pytest.raises(zshard.StateError, match=r"forward changed one of blocks\.0.*in place"):
        model(batch(0, 0))


class Prompt(nn.Module):
    """A unit whose output is a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self) -> Tensor:
        return self.weight.t()


class Prompted(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Prompt(), Prompt()])

    def forward(self, x: Tensor) -> Tensor:
        first, second = (prompt() for prompt in self.prompts)
        return super().forward(x @ first) + super().forward(x @ second)


def prompted_loss(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    plain = Prompted()
    torch.manual_seed(0)
    model = zshard.wrap(Prompted())
    return one_step(model, rank, 0), one_step(plain, rank, 0)


def test_a_view_of_a_parameter_may_leave_its_unit() -> None:
    for ours, theirs in run_ranks(prompted_loss, 2):
        assert torch.equal(ours, theirs)
