"""The context of `zshard.trace`: what begins and ends with it, whatever happens inside."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, simulated
from steps import build, one_step
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint
from traced import bytes_by_op, check, trained

import zshard
from zshard.tag import Tag
from zshard.tracing.records import Event
from zshard.unit import Unit
from zshard.wrap import schedule_of


def after(rank: int, world_size: int, strategy: str) -> None:
    model, step = trained(strategy=strategy)
    with zshard.trace(model) as trace:
        step(rank, 2)

    def counts() -> list[object]:
        times = [(t.began, t.ended, t.complete) for t in trace.transfers]
        return [[*trace.events], [*trace.spans], len(trace.stalls), times, trace.seconds]

    seen = counts()
    step(rank, 3)
    assert counts() == seen
    check(trace)
    with zshard.trace(model) as second:  # its first stalls are for what the last step has begun
        step(rank, 4)
    check(second)
    assert len(second.events) == len(trace.events)
    assert counts() == seen


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_nothing_is_recorded_after_the_context_and_a_second_one_stands_alone(strategy: str) -> None:
    run_ranks(after, 2, strategy)


def cleared(rank: int, world_size: int, strategy: str) -> None:
    model, step = trained(strategy=strategy)
    with zshard.trace(model) as one:
        step(rank, 2)
        step(rank, 3)
    with zshard.trace(model) as trace:
        step(rank, 4)
        trace.clear()
        assert not trace.events and not trace.transfers and not trace.stalls
        step(rank, 5)
    assert [*trace.events] == [*one.events][len(one.events) // 2 :]
    check(trace)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_clear_leaves_what_comes_after(strategy: str) -> None:
    run_ranks(cleared, 2, strategy)


def test_events_can_be_read_while_more_are_recorded() -> None:
    model, step = trained()
    step(0, 2)  # the order of collectives is known from here on
    with zshard.trace(model) as trace:
        step(0, 3)
        seen = [*trace.events]
        step(0, 4)
    assert seen and [*trace.events] == seen * 2
    check(trace)


def test_what_only_an_ended_trace_can_tell_is_refused_inside_the_context() -> None:
    model, step = trained()
    with zshard.trace(model) as trace:
        for read in (trace.summary, lambda: trace.save("t.json"), lambda: trace.plot("t.png")):
            with pytest.raises(zshard.StateError, match="below the with block"):
                read()
        with (
            pytest.raises(zshard.StateError, match="Blocks is being traced already"),
            zshard.trace(model),
        ):
            pass
        step(0, 2)
    assert trace.events and trace.ended
    with pytest.raises(zshard.StateError, match="has ended"):
        trace.clear()


def raising(rank: int, world_size: int, where: str) -> None:
    model, step = trained()

    def fail(*_: object) -> None:
        raise ValueError("user code")

    module = model.blocks[1].up
    with (
        pytest.raises((ValueError, zshard.Error)),
        zshard.trace(model) as trace,
    ):
        if where == "forward":
            module.register_forward_hook(fail)
        elif where == "backward":
            module.register_full_backward_hook(fail)
        step(rank, 2)
    check(trace)
    name = (where, "blocks.1")
    assert name in trace.events
    module._forward_hooks.clear()
    module._backward_hooks.clear()
    zshard.reset(model)
    with zshard.trace(model) as again:
        step(rank, 3)
    check(again)
    phases = [phase for phase, _ in again.events]
    assert phases.count("forward") == phases.count("backward") == phases.count("pack") == 4


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_inside_the_context_leaves_a_trace_that_can_be_read(
    where: str, world_size: int
) -> None:
    run_ranks(raising, world_size, where)


def recovered(rank: int, world_size: int) -> None:
    """Exceptions that are caught inside the context, and the steps that follow."""
    model, step = trained()

    def fail(*_: object) -> None:
        raise ValueError("user code")

    with zshard.trace(model) as trace:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 9))
        hook = model.blocks[1].up.register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="user code"):
            one_step(model, rank, 2)
        hook.remove()
        raised = [e for e in trace.events if e.phase == "backward"][-1]
        step(rank, 3)
    check(trace)
    roots = [e for e in trace.events if e == ("forward", "root")]
    assert len(roots) == 3 and raised.ended <= roots[-1].began
    assert all(one.ended <= after.began for one, after in pairwise(roots))
    last = roots[-1]
    inside = [e for e in trace.events if e == ("forward", "blocks.0")][-1]
    assert last.began < inside.began <= inside.ended < last.ended


def test_phases_after_an_exception_are_timed_as_always() -> None:
    recovered(0, 1)
    run_ranks(recovered, 2)


def two(rank: int, world_size: int) -> None:
    (one, step_one), (other, step_other) = trained(), trained(strategy="zero2")
    with zshard.trace(one) as first, zshard.trace(other) as second:
        step_one(rank, 2)
        step_other(rank, 2)
        step_one(rank, 3)
    check(first)
    check(second)
    assert len([e for e in first.events if e.phase == "step"]) == 2
    assert len([e for e in second.events if e.phase == "step"]) == 1


def test_two_models_are_traced_at_once_each_on_its_own() -> None:
    run_ranks(two, 2)


def different_ways(rank: int, world_size: int) -> list[tuple[str, int]]:
    """The last step goes through one block on rank 1, and through all on rank 0."""
    model, step = trained()
    stats = zshard.stats(model)
    stats.reset()
    with zshard.trace(model) as trace:
        for number in range(2, 5):
            model.order = (1,) if rank == 1 and number == 4 else (0, 1, 2)
            try:
                step(rank, number)
            except zshard.StateError:
                zshard.reset(model)
        sent = stats.sent_bytes.copy()
    check(trace)
    assert +bytes_by_op(trace) == +sent
    return [(event.unit, event.bytes) for event in trace.events if event.phase == "join"]


def test_a_gather_for_another_ranks_sake_is_a_join_with_its_bytes() -> None:
    first, second = run_ranks(different_ways, 2)
    assert "blocks.0" in dict(second)
    assert all(sent > 0 for _, sent in (*first, *second))


def no_tensor_is_kept(rank: int, world_size: int) -> bool:
    model, step = trained()
    with zshard.trace(model) as trace:
        step(rank, 2)
    memory = weakref.ref(schedule_of(model).units[1].flats[0].full.recv)
    watched = weakref.ref(model)
    del model, step
    gc.collect()
    return trace.ended and memory() is None and watched() is None


def test_a_trace_keeps_neither_the_model_nor_its_tensors() -> None:
    assert run_ranks(no_tensor_is_kept, 2) == [True, True]


def ends_under_way(rank: int, world_size: int) -> list[bool]:
    """End the trace while rank 1 has still to take part in the gather of blocks.0."""
    model, _ = trained()
    block, store = schedule_of(model).units[1], dist.distributed_c10d._get_default_store()
    with zshard.trace(model) as trace:
        if rank == 0:
            block.gather(Tag(0, "gather", "blocks.0"), move=True, evict=Unit.reshard)
    if rank == 0:
        store.set("ended", "")
    else:
        store.wait(["ended"])
        block.gather(Tag(0, "gather", "blocks.0"), move=True, evict=Unit.reshard)
    block.wait()
    block.reshard()
    check(trace)
    if rank == 0:
        assert "1 transfer had not ended" in str(trace.summary())
        assert trace.transfers[0].ended == trace.seconds
    return [transfer.complete for transfer in trace.transfers]


def test_a_transfer_that_has_not_ended_is_cut_and_said_to_be() -> None:
    assert run_ranks(ends_under_way, 2) == [[False], []]


def test_a_unit_that_another_one_pushes_out_is_seen_to_be_resharded() -> None:
    """Of two units in one checkpoint, each recomputation pushes out what was there."""
    with simulated(0, 2):
        model = zshard.wrap(nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), prefetch=0)
        with zshard.trace(model) as trace:
            x = torch.ones(2, 4)
            for first, second in (model[:2], model[2:]):
                x = checkpoint(lambda x, a=first, b=second: b(a(x)), x, use_reentrant=False)
            x.sum().backward()
    count = Counter((event.phase, event.unit) for event in trace.events)
    for unit in map(str, range(4)):
        assert count["reshard", unit] == count["gather", unit] > 0, (unit, count)


def test_the_profiler_shows_the_same_labels_as_ranges_where_they_end_in_one_place() -> None:
    model, step = trained()
    with profile() as profiled, zshard.trace(model) as trace:
        step(0, 2)
    # Ops have names such as zshard::pack_, without a unit.
    ranges = [e for e in profiled.events() if e.name.startswith("zshard::") and " " in e.name]
    assert sorted(e.name for e in ranges) == sorted(f"zshard::{e}" for e in trace.events)
    inside = {e.name: [child.name for child in e.cpu_children] for e in ranges}
    assert "zshard::pack_" in str(inside["zshard::pack blocks.1"])
    assert "zshard::adamw_" in str(inside["zshard::step root"])


def test_an_event_compares_and_pickles_as_a_pair() -> None:
    assert Event("gather", "root") == ("gather", "root")
    assert str(Event("gather", "root")) == "gather root"
    model = build()
    with zshard.trace(model) as trace:
        pass
    assert trace.events == [] and trace.summary().path[0].phase == "outside"


def stepped_by_torch(rank: int, world_size: int, strategy: str) -> None:
    model, _ = trained(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        one_step(model, rank, number)
        optimizer.step()
        optimizer.zero_grad()

    step(2)
    with zshard.trace(model) as trace:
        step(3)
        step(4)
    check(trace)
    events = [*trace.events]
    assert events[: len(events) // 2] == events[len(events) // 2 :]
    assert events[-1] == ("step", "root") and events.count(("step", "root")) == 2
    assert all(event.ended > event.began for event in trace.events if event.phase == "step")
    with profile() as shown:
        step(5)
    assert "zshard::step root" in {event.name for event in shown.events()}


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_a_step_of_another_optimizer_is_a_phase_as_well(strategy: str) -> None:
    run_ranks(stepped_by_torch, 2, strategy)


def test_a_step_that_has_raised_is_not_around_the_next() -> None:
    model, _ = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zshard.trace(model) as trace:
        one_step(model, 0, 2)
        optimizer.param_groups[0]["lr"] = "much"
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    check(trace)
    failed, whole = (event for event in trace.events if event.phase == "step")
    assert failed.ended <= whole.began
