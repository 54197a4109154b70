"""`zshard.trace`: what is recorded of transfers, stalls and phases, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from ranks import run_ranks
from steps import all_by_messages, one_step
from traced import bytes_by_op, calls_by_op, check, trained

import zshard
from zshard.tag import Tag
from zshard.wrap import schedule_of

STRATEGIES = ["zero3", "zero2", "zero1", "ddp"]


def test_an_event_is_its_phase_and_unit_and_knows_more() -> None:
    model, step = trained()
    with zshard.trace(model) as trace:
        step(0, 2)
    event = trace.events[0]
    assert event == ("gather", "root") == tuple(event) == (event.phase, event.unit)
    assert (event[0], event[1], event.stream, event.bytes) == ("gather", "root", "gather", 0)
    check(trace)
    forward = trace.events[trace.events.index(("forward", "root"))]
    inner = trace.events[trace.events.index(("forward", "blocks.1"))]
    assert forward.stream == "compute"
    assert forward.began < inner.began < inner.ended < forward.ended
    backward = trace.events[trace.events.index(("backward", "blocks.1"))]
    pack = trace.events[trace.events.index(("pack", "blocks.1"))]
    following = trace.events[trace.events.index(("backward", "blocks.0"))]
    assert forward.ended < backward.began < backward.ended <= pack.began < pack.ended
    assert pack.ended < following.began
    backwards = [e for e in trace.events if e.phase == "backward"]
    assert all(one.ended <= after.began for one, after in pairwise(backwards))
    assert [span for span in trace.spans if span.phase == "sum"] == [
        ("sum", unit) for unit in ("blocks.2", "blocks.1", "blocks.0", "root")
    ]


def counted(rank: int, world_size: int, strategy: str, messages: bool) -> None:
    if messages:
        all_by_messages(rank)
    model, step = trained(strategy=strategy)
    stats = zshard.stats(model)
    stats.reset()
    with zshard.trace(model) as trace:
        step(rank, 2)
        with zshard.no_sync(model):
            one_step(model, rank, 3)
        step(rank, 4)
        sent, calls = stats.sent_bytes.copy(), stats.calls.copy()
    check(trace)
    assert +bytes_by_op(trace) == +sent
    assert calls_by_op(trace) == calls
    # Over shared memory the next forward reads what was gathered after the step.
    assert all(transfer.complete or transfer.by_waiter for transfer in trace.transfers)
    gathers = [t for t in trace.transfers if t.op == "all_gather"]
    assert all(t.exact for t in gathers) or messages
    of_events = sum(event.bytes for event in trace.events)
    assert of_events == sent["all_gather"] + sent["reduce_scatter"]
    for event in trace.events:
        if event.bytes:
            own = [t for t in trace.transfers if t.event is event]
            assert event.began == min(t.began for t in own)
            assert event.ended == max(t.ended for t in own)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transfers_have_the_bytes_and_calls_that_stats_counts(strategy: str) -> None:
    run_ranks(counted, 2, strategy, False)


def test_messages_have_the_end_that_a_wait_has_found() -> None:
    run_ranks(counted, 2, "zero3", True)


def replicated(rank: int, world_size: int) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    model, step = trained(mesh=mesh)
    stats = zshard.stats(model)
    stats.reset()
    with zshard.trace(model) as trace:
        step(rank, 2)
        sent = stats.sent_bytes.copy()
    check(trace)
    assert +bytes_by_op(trace) == +sent
    assert trace.rank == rank and trace.world == 4
    reduces = [e for e in trace.events if e.phase == "reduce"]
    for event in reduces:  # over the shards, over the replicas, and what follows
        assert len([t for t in trace.transfers if t.event is event]) == 3


def test_a_reduction_over_replicas_has_all_of_its_transfers() -> None:
    run_ranks(replicated, 4)


def delayed(rank: int, world_size: int) -> tuple[str, float, float, float]:
    """Hold the gathers of blocks.1 up on rank 1; what a rank's trace says of that."""
    model, step = trained()

    def interpose(op: str, tag: Tag) -> None:
        if rank == 1 and (op, tag.unit) == ("all_gather", "blocks.1"):
            time.sleep(0.3)

    schedule_of(model).comm.interpose = interpose
    with zshard.trace(model) as trace:
        step(rank, 2)
    check(trace)
    summary = trace.summary()
    unit = next(each for each in summary.units if each.unit == "blocks.1")
    # Over shared memory a gather is the work of the rank that waits for it.
    waiting = "wait" if schedule_of(model).comm.shards.in_memory else "gather"
    phase = "issue" if rank == 1 else waiting
    on_path = sum(leg.seconds for leg in summary.path if leg[:2] == (phase, "blocks.1"))
    return max(trace.stalls, key=lambda s: s.seconds).unit, unit.stalled, unit.exposed, on_path


def test_a_gather_that_is_held_up_is_a_stall_on_its_unit_and_on_the_critical_path() -> None:
    first, second = run_ranks(delayed, 2)
    longest, stalled, exposed, on_path = first
    assert longest == "blocks.1" and stalled > 0.15 and exposed > 0.15 and on_path > 0.3
    assert second[3] > 0.3  # there it is the starting of the transfer that took so long


def what_waits(rank: int, world_size: int) -> None:
    model, step = trained()
    with zshard.trace(model) as trace:
        step(rank, 2)
    for stall in trace.stalls:
        transfer = stall.transfer
        if transfer is None:  # others read what this rank lent
            assert stall.op == "reclaim"
            continue
        assert (stall.op, stall.phase, stall.unit) == (transfer.op, transfer.phase, transfer.unit)
        if transfer.phase == "gather":
            assert stall.inside == ("wait", transfer.unit)
    waited = {id(stall.transfer) for stall in trace.stalls if stall.op != "reclaim"}
    assert waited == {id(transfer) for transfer in trace.transfers}  # each is waited for
    summary = trace.summary()
    assert sum(delay.times for delay in summary.stalls) == len(trace.stalls)
    assert {delay.on for delay in summary.stalls} >= {"gather root", "agree a forward"}
    assert summary.exposed_percent > 0


def test_stalls_say_what_waited_on_what() -> None:
    run_ranks(what_waits, 2)


def test_without_communication_nothing_is_exposed_and_nothing_is_divided_by_nothing() -> None:
    model, step = trained()
    with zshard.trace(model) as trace:
        step(0, 2)
    total = trace.summary().total
    assert (total.bytes, total.seconds, total.exposed, total.gb_per_s) == (0, 0, 0, 0)
    assert total.overlap_percent is None and total.compute == pytest.approx(trace.seconds)


def held_up_in_memory(rank: int, world_size: int, strategy: str) -> set[str]:
    model, step = trained(strategy=strategy, comm="peer")
    shards = schedule_of(model).comm.shards

    def held_up(call: Callable[..., object]) -> Callable[..., object]:
        def later(*given: object, **options: object) -> object:
            time.sleep(2e-3)
            return call(*given, **options)

        return later

    shards.reclaim = held_up(shards.reclaim)
    shards.start_gather = held_up(shards.start_gather)  # which ddp waits in
    before = zshard.stats(model).exposed_seconds
    with zshard.trace(model) as trace:
        step(rank, 2)
    check(trace)
    exposed = zshard.stats(model).exposed_seconds - before
    assert 0 < exposed <= sum(stall.seconds for stall in trace.stalls) + 1e-6
    return {stall.op for stall in trace.stalls if stall.seconds >= 2e-3}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_wait_for_shared_memory_is_a_stall(strategy: str) -> None:
    expected = {"reclaim", "all_gather"} if strategy == "ddp" else {"reclaim"}
    for ops in run_ranks(held_up_in_memory, 2, strategy):
        assert ops >= expected
