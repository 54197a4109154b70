"""What a user reads from a wrapped model while it trains, and switches for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from torch import nn

from .comm import CommStats
from .flat import Flat
from .schedule import Schedule
from .trace import Trace
from .wrap import schedule_of


class Bytes(TypedDict):
    """Bytes that this rank holds, by what they are for."""

    parameters: int  # send buffers in the compute dtype, where they are not the master
    gradients: int  # gradient shards that are allocated
    master: int  # the masters; where the compute dtype is the master's, they are the parameters
    full_buffers: int  # memory of the gathered units
    reduce_buffers: int
    padding: int  # part of the above that belongs to no parameter


class Memory(TypedDict):
    """The result of ``memory``."""

    now: Bytes
    peak: Bytes


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them, as in DDP.

    Each rank adds up its own whole gradients, which costs their full size in memory; the first
    backward outside the context reduces the sum.
    """
    schedule = schedule_of(model)
    before, schedule.sync = schedule.sync, False
    try:
        yield
    finally:
        schedule.sync = before


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record the phases of every unit, in order, for the length of the context."""
    schedule = schedule_of(model)
    recorded = schedule.trace = Trace()
    try:
        yield recorded
    finally:
        schedule.trace = None


def reset(model: nn.Module) -> None:
    """Bring the model back to the sharded state after an exception in forward or backward.

    Gradients that were not reduced yet are dropped. Also done by the next forward.
    """
    schedule_of(model).reset()


def stats(model: nn.Module) -> CommStats:
    """The counters of the model's collectives: calls, bytes, and seconds the host waited."""
    return schedule_of(model).comm.stats


def memory(model: nn.Module) -> Memory:
    """Bytes that this rank holds for the model's parameters now, and at the peak so far.

    Counted from zshard's own buffers; what the optimizer and the activations take is not theirs.
    """
    schedule = schedule_of(model)
    now = _held(schedule)
    # Slots and reduce buffers are kept once allocated, and so are gradient shards.
    return Memory(now=now, peak=now)


def _held(schedule: Schedule) -> Bytes:
    flats = [flat for unit in schedule.units for flat in unit.flats]
    return Bytes(
        parameters=sum(_nbytes(flat, flat.dtypes.compute) for flat in flats if _casts(flat)),
        gradients=sum(_nbytes(flat, flat.dtypes.reduce) for flat in flats if flat.grad is not None),
        master=sum(_nbytes(flat, flat.dtypes.master) for flat in flats),
        full_buffers=schedule.pool.slot_bytes,
        reduce_buffers=schedule.pool.scratch_bytes,
        padding=sum(flat.local_padding * flat.dtypes.master.itemsize for flat in flats),
    )


def _nbytes(flat: Flat, dtype: object) -> int:
    return flat.layout.shard_size * dtype.itemsize  # type: ignore[attr-defined, no-any-return]


def _casts(flat: Flat) -> bool:
    return flat.send is not flat.master
