"""What a user reads from a wrapped model while it trains, and switches for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, cast

import torch
from torch import nn

from .comm import CommStats
from .errors import InputError
from .flat import Flat
from .schedule import Schedule
from .trace import Trace
from .wrap import schedule_of


class Bytes(TypedDict):
    """Bytes that this rank holds, by what they are for; padding is part of each."""

    parameters: int  # compute-dtype copies and send buffers, whole or sharded as the strategy says
    gradients: int  # gradient buffers that are allocated
    master: int  # masters beside the parameters; 0 where the parameters are it
    optimizer: int  # states of zshard's optimizers that have taken a step
    states: int  # the sum of the above
    full_buffers: int  # memory that gathered units share
    reduce_buffers: int
    padding: int  # the part of parameters and master that belongs to no parameter


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
    before, schedule.backward.sync = schedule.backward.sync, False
    try:
        yield
    finally:
        schedule.backward.sync = before


def method(model: nn.Module, name: str) -> Callable[..., Any]:
    """Make the method ``name`` of ``model`` gather parameters as forward does, and return it.

    For methods that use parameters without going through ``model(...)``, such as an ``encode`` that
    calls submodules. Inputs and outputs are cast, and backward works, as for forward; the method
    may call the model itself. Every rank has to call it.

    Raises:
        InputError: if the model has no such method.
    """
    schedule = schedule_of(model)
    function = getattr(model, name, None)
    if not callable(function) or name == "forward":
        raise InputError(
            f"zshard.method: {type(model).__name__} has no method {name!r} to be called in place "
            "of forward"
        )
    if hasattr(function, "__zshard_method__"):
        return cast(Callable[..., Any], function)

    @functools.wraps(function)
    def gathered(*args: object, **kwargs: object) -> object:
        return schedule.run_method(name, function, args, kwargs)

    gathered.__zshard_method__ = True  # type: ignore[attr-defined]
    setattr(model, name, gathered)
    return gathered


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record the phases of every unit, in order, for the length of the context."""
    schedule = schedule_of(model)
    recorded = schedule.crew.trace = Trace()
    try:
        yield recorded
    finally:
        schedule.crew.trace = None


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

    Counted from zshard's own buffers; activations, and the states of other libraries' optimizers,
    are not among them.
    """
    schedule = schedule_of(model)
    now = _held(schedule)
    # Slots and reduce buffers are kept once allocated, and so are gradient buffers.
    return Memory(now=now, peak=now)


def _held(schedule: Schedule) -> Bytes:
    flats = [flat for unit in schedule.units for flat in unit.flats]
    parameters = sum(_copy_of(flat).nbytes for flat in flats)
    gradients = sum(flat.grads.nbytes for flat in flats)
    master = sum(flat.master.nbytes for flat in flats)
    optimizer = sum(each.state_bytes(schedule) for each in schedule.optimizers)
    return Bytes(
        parameters=parameters,
        gradients=gradients,
        master=master,
        optimizer=optimizer,
        states=parameters + gradients + master + optimizer,
        full_buffers=schedule.pool.slot_bytes,
        reduce_buffers=schedule.pool.scratch_bytes,
        padding=sum(_padding(flat) for flat in flats),
    )


def _copy_of(flat: Flat) -> torch.Tensor:
    """What the compute dtype's values are kept in: the full buffer, or what is sent."""
    return flat.master.send if flat.resident is None else flat.resident


def _padding(flat: Flat) -> int:
    copy = _copy_of(flat)
    owned = flat.padding if flat.resident is None else flat.layout.padding
    per_element = flat.master.nbytes // max(flat.owned.numel, 1)
    return owned * copy.element_size() + flat.padding * per_element
