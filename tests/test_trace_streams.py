"""A trace where streams are what is timed, as on CUDA: on a model of streams whose time is work.

An op takes a unit of the time of the stream that it is given to; a stream that waits for another's
event goes on at that event's time. The collectives run on the lanes, as NCCL's do.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import stream_model
import torch
from ranks import run_ranks
from steps import build, one_step
from test_schedule import BACKWARD, FORWARD, events
from traced import check

import zshard
from zshard.calls import session
from zshard.tracing.clock import Clock
from zshard.tracing.trace import Trace
from zshard.wrap import schedule_of

pytestmark = pytest.mark.usefixtures("over_the_group")  # GPUs go over it


class TimedEvent(stream_model.Event):
    """A point in a stream's work, and its time."""

    time: float


class TimedStream(stream_model.Stream):
    """A stream whose every op takes a millisecond."""

    def __init__(self, name: str, model: stream_model.Model) -> None:
        super().__init__(name, model)
        self._now, self._counted = 0.0, 0

    @property
    def now(self) -> float:
        self._now += self.clock[self] - self._counted
        self._counted = self.clock[self]
        return self._now

    def record_event(self) -> TimedEvent:
        event = TimedEvent(dict(self.clock))
        event.time = self.now
        return event

    def wait_event(self, event: stream_model.Event) -> None:
        assert isinstance(event, TimedEvent)
        self._now = max(self.now, event.time)
        super().wait_event(event)


class Timing:
    """torch.Event(device, enable_timing=True)."""

    made = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        Timing.made += 1

    def record(self, stream: TimedStream) -> None:
        self.time = stream.now

    def elapsed_time(self, other: Timing) -> float:
        return other.time - self.time


def on_streams(rank: int, world_size: int, strategy: str) -> tuple[Trace, int]:
    """The trace of a step, and how many timing events a second one has taken more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_model, "Stream", TimedStream)
        model = stream_model.Model(patch)
        trained = build(strategy=strategy)
        comm = schedule_of(trained).comm
        comm.shards.nccl, comm.shards._gloo = True, False  # one row of sums, on the lane
        patch.setattr(torch, "Event", Timing)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(session, "Clock", lambda device: Clock(torch.device("cuda")))
        optimizer = zshard.AdamW(trained.parameters())
        with model:
            one_step(trained, rank, 0)
            optimizer.step()
            with zshard.trace(trained) as trace:
                one_step(trained, rank, 1)
                optimizer.step()
                made = Timing.made
                trace.clear()
                one_step(trained, rank, 2)
                optimizer.step()
                more = Timing.made - made
        model.end()
    return trace, more


def look(rank: int, world_size: int, strategy: str) -> None:
    trace, more = on_streams(rank, world_size, strategy)
    check(trace)
    assert more == 0, more  # timing events are used again
    lanes = [t for t in trace.transfers if t.op in ("all_gather", "reduce_scatter")]
    assert lanes and all(t.complete and t.began < t.ended for t in lanes)
    for name in ("gather", "reduce"):
        own = [t for t in lanes if t.lane == name]
        assert all(a.ended <= b.began for a, b in pairwise(own))
    sums = [span for span in trace.spans if span.phase == "sum"]
    assert len(sums) == 4 and all(s.stream == "reduce" and s.began < s.ended for s in sums)
    for span, transfer in zip(sums, [t for t in lanes if t.op == "reduce_scatter"], strict=True):
        assert transfer.ended <= span.began
    # Whatever waits on a lane holds no compute up: a stall ends no earlier than what it waited for.
    for stall in trace.stalls:
        if stall.transfer in lanes:
            assert stall.ended >= stall.transfer.ended or stall.seconds == 0
    if strategy == "zero3":
        assert [*trace.events] == events(FORWARD + "," + BACKWARD)
        waited = {(s.phase, s.unit) for s in trace.stalls if s.transfer in lanes}
        landed = [s for s in trace.stalls if s.op == "reduce_scatter"]
        assert len(landed) == 4  # not those where the reduce lane waits for itself
        assert waited >= {("gather", "blocks.0"), ("reduce", "blocks.2"), ("reduce", "root")}


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_lanes_are_timed_on_their_own_streams(strategy: str) -> None:
    run_ranks(look, 2, strategy)


def test_one_rank_has_sums_on_the_reduce_stream_and_no_transfers() -> None:
    trace, _ = on_streams(0, 1, "zero3")
    check(trace)
    assert not trace.transfers
    assert {span.stream for span in trace.spans if span.phase == "sum"} == {"reduce"}
