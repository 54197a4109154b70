"""What a script asks of a wrapped model as it trains: no_sync, method, trace, reset and stats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from torch import nn

from ..errors import CommError, InputError, StateError
from ..step.debts import settle
from ..tracing.clock import Clock
from ..tracing.recorder import Recorder
from ..tracing.trace import Trace
from ..training_state import TrainingState, calls_under_way
from ..transports.counters import CommStats
from ..wrap import schedule_of
from .recovery import given_up_in, recover


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them, as in DDP.

    Each rank adds up its own whole gradients, which costs their full size in memory (none where
    the strategy keeps whole gradient buffers); the first backward outside the context reduces the
    sum. Every rank has to use it for the same backwards.

    Raises:
        MismatchError: in the backward, on every rank, if only some ranks use it for that.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> with zshard.no_sync(model):
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> zshard.full_grad(model, "bias")
        tensor([6., 6.])
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
        WrapError: if the model is not wrapped.

    Example:
        >>> class Scorer(nn.Linear):
        ...     def score(self, x):
        ...         return self(x).softmax(-1)
        >>> model = zshard.wrap(Scorer(4, 2))
        >>> score = zshard.method(model, "score")
        >>> model.score(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    schedule = schedule_of(model)
    function = getattr(model, name, None) if isinstance(name, str) else None
    if name == "forward":
        raise InputError(
            "zshard.method: forward gathers already; call the model itself, model(...)"
        )
    if not callable(function) or isinstance(function, nn.Module):
        raise InputError(
            f"zshard.method: {type(model).__name__} has no method {name!r} to be called in place "
            "of forward"
        )
    if hasattr(function, "__zshard_method__"):
        return cast(Callable[..., Any], function)

    @functools.wraps(function)
    def gathered(*args: object, **kwargs: object) -> object:
        return schedule.methods.run(name, function, args, kwargs)

    gathered.__zshard_method__ = True  # type: ignore[attr-defined]
    setattr(model, name, gathered)
    return gathered


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what the model does for the length of the context: phases, transfers, stalls, times.

    Ranks may trace on their own. At the end collectives under way are waited for, a second at most,
    and on CUDA what the GPU has still to do.

    Yields:
        The trace, to be read behind the context.

    Raises:
        StateError: if the model is being traced already.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> with zshard.trace(model) as recorded:
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> [event.phase for event in recorded.events]
        ['gather', 'wait', 'forward', 'backward', 'reshard', 'pack', 'reduce']
        >>> recorded.save("rank-0.json")
    """
    schedule = schedule_of(model)
    comm = schedule.comm
    if comm.recorder is not None:
        raise StateError(f"this {type(model).__name__} is being traced already: end that trace")
    recorder = comm.recorder = Recorder(Clock(schedule.device))
    recorded = Trace(
        recorder,
        rank=comm.world_rank,
        world=comm.world_size,
        units=[unit.label for unit in schedule.units],
        model=type(model).__name__,
    )
    linger = False
    try:
        yield recorded
        linger = True
    finally:
        comm.recorder = None
        recorder.end(linger=linger)


def reset(model: nn.Module) -> None:
    """Bring the model back to the sharded state after an exception in forward or backward.

    A backward that did not end takes with it all gradients of its step, also those of the backwards
    before it, and on the ranks that hear of it only here (else their next use of gradients says
    so). After an exception outside of a backward those stay, as a plain model's do; ``zero_grad``
    drops them. Also done by the next forward. After an exception inside ``full_params(write=True)``
    it waits for the others to come to the end of theirs.

    Over shared memory (``comm="peer"``) an exception may leave a collective half done: Ctrl-C,
    while a rank waits. It has given up then, and the others get a CommError that says so. This call
    brings them back if every rank makes it, and drops all gradients of all models over the group.

    Raises:
        CommError: if a rank does not come before the group's timeout; with replicas (HSDP), or
            where a model over the process group may be in the middle of a collective, too.
        MismatchError: on every rank, if some had made the step's update and some not.
        StateError: inside a forward or backward.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> try:
        ...     model(torch.ones(3, 5))
        ... except RuntimeError:
        ...     zshard.reset(model)
        >>> model(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    schedule = schedule_of(model)
    state = schedule.executor.state
    if state is TrainingState.BACKWARD and not schedule.backward.raised:
        raise StateError(
            "zshard.reset was called inside a backward, which would go on without the gradients "
            "that are dropped. Raise an exception there, and call it behind the backward."
        )
    if state is TrainingState.FORWARD and calls_under_way(model) > 0:
        raise StateError(
            "zshard.reset was called inside a forward, which would go on with parameters that are "
            "sharded again. Raise an exception there, and call it behind the forward."
        )
    if (there := given_up_in(schedule)) is None:
        try:
            schedule.reset()
            settle()
            with suppress(StateError):  # another rank's backward has raised, as this call says
                schedule.reducer.read_outcome()
            return
        except CommError:
            if (there := given_up_in(schedule)) is None:
                raise
    recover(schedule, there)


def stats(model: nn.Module) -> CommStats:
    """The counters of the model's collectives: calls, bytes, and seconds the host waited.

    They are live, of this rank alone, and count from wrap on.

    Raises:
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> counted = zshard.stats(model)
        >>> counted.calls["reduce_scatter"], counted.sent_bytes["reduce_scatter"]  # one rank alone
        (0, 0)
    """
    return schedule_of(model).comm.stats
