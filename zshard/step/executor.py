"""Carries out what is decided elsewhere: gathers, reshards and reductions of units.

Each gets its tag, its record in the trace and its range in the profiler here, so those who decide,
the schedule and the agreement, need not know of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd.profiler import record_function

from ..comm import Comm
from ..errors import StateError
from ..tag import Tag
from ..training_state import NEXT_STATES, TrainingState
from ..unit import State, Unit
from .outcome import Ending
from .reduction import Reducer

_NOTHING = nullcontext()


class Executor:
    """Gathers, frees and reduces units; when, the schedule and the agreement decide.

    Attributes:
        state: where in a step the model is; ``enter_state`` alone changes it.
        step: backwards that were reduced so far.
        interrupted: units whose forwards the backward under way is inside of; see interrupted.py.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, reducer: Reducer) -> None:
        self._units, self._root, self._comm, self._reducer = tuple(units), units[0], comm, reducer
        self.state = TrainingState.IDLE
        self.step = 0
        self.interrupted: Sequence[Unit] = ()

    def enter_state(self, state: TrainingState) -> None:
        """Change the model's state.

        Raises:
            StateError: if what it is in cannot lead there.
        """
        if state not in NEXT_STATES[self.state]:
            raise StateError(
                f"{state.name} ({state.value}) cannot begin while the model is "
                f"{self.state.value}. Call zshard.reset(model) first."
            )
        self.state = state

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self._comm.world_size == 1

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to be reached."""
        return self._comm.world_size > 1 and not self._comm.broken

    @property
    def gathered_units(self) -> str:
        """The units that need no gather now, as text."""
        return " ".join(unit.label for unit in self._units if unit.state is not State.SHARDED)

    def gather(self, unit: Unit) -> None:
        """Start gathering what this rank needs, or will."""
        tag = self._tag("gather", unit)
        with self._comm.awaited("the gather", unit.label), self.doing("gather", unit):
            try:
                move = self.state is not TrainingState.BACKWARD
                _check_at_rest(unit)
                unit.gather(tag, move=move, evict=self.reshard)
            except StateError:
                unit.join(tag, evict=self._evict)  # the other ranks are in it
                raise

    def join(self, unit: Unit) -> None:
        """Take part in a gather that this rank does not need."""
        if unit.strategy.resident and unit.state is State.SHARDED:
            self.gather(unit)  # it will be needed, and lies where it has to
        elif self._comm.size > 1:
            with self._comm.awaited("the gather", unit.label), self.doing("join", unit):
                unit.join(self._tag("gather", unit), evict=self._evict)
        self.await_readers(unit)

    def _evict(self, unit: Unit) -> bool:
        """Free ``unit``, if it is not in use and not being gathered, to be used at once."""
        at_rest = unit.state is State.GATHERED and not unit.in_use
        # A backward reads the weights of a unit inside of whose forward it is, unannounced.
        at_rest = at_rest and unit not in self.interrupted
        if at_rest:
            self.reshard(unit)
        return at_rest

    def await_readers(self, unit: Unit) -> None:
        """Wait until no rank reads what stays here, which a forward may write before it is refused.

        To be called behind gathers in the middle of a pass; behind others the ranks meet.
        """
        if unit.strategy.resident:
            for flat in unit.flats:
                unit.before_send_written(flat)

    def wait(self, unit: Unit) -> None:
        """Wait for the gather under way, if there is one."""
        if unit.state is State.GATHERING:
            with self.doing("wait", unit):
                self.check_unwritten(unit)  # on one rank, where the values stay
                unit.wait()

    def check_unwritten(self, unit: Unit) -> None:
        """As ``unit.check_unwritten``, for little where nobody has: a graph's node may have."""
        if any(flat.full.written for flat in unit.flats):
            unit.check_unwritten()

    def has_new_gradients(self, index: int) -> bool:
        """Whether this rank has gradients of unit ``index`` to be reduced."""
        return any(any(flat.grads.ready()) for flat in self._units[index].flats)

    def has_old_gradients(self, index: int) -> bool:
        """Whether it has reduced ones, which the next are added to."""
        return any(any(flat.grads.present) for flat in self._units[index].flats)

    def reduce(self, unit: Unit) -> None:
        """Reduce the gradients that are there."""
        with self._comm.awaited("the reduction", unit.label):
            self._reducer.reduce(unit, self._tag("reduce", unit), self.doing)

    def end_reductions(self, ending: Ending) -> None:
        """Complete the reductions, and tell the ranks what came out; see ``Reducer.finish``."""
        tag = self._tag("reduce", self._root)
        with self._comm.awaited("the end of a backward"):
            self._reducer.finish(tag, ending)
        self.step += 1

    def release(self, unit: Unit) -> None:
        """End a unit's use: free the whole parameters where the strategy does not keep them."""
        if unit.strategy.resident:
            unit.end_use()
        else:
            self.reshard(unit)

    def release_all(self) -> None:
        """End every unit's use."""
        for unit in self._units:
            self.release(unit)

    def drop(self, unit: Unit) -> None:
        """End a unit's use after an exception, of which a write to it may be the cause.

        Also where the strategy keeps whole parameters, the next use begins with the master's.
        """
        if any([flat.full.note_writes() for flat in unit.flats]):
            self.reshard(unit)
        self.release(unit)
        if unit.state is State.SHARDED:
            for flat in unit.flats:
                flat.full.forget_writes()

    def reshard(self, unit: Unit) -> None:
        """Free the whole parameters, if they are there."""
        if unit.state is not State.SHARDED:
            with self.doing("reshard", unit):
                unit.reshard()

    # --- what the trace and the profiler are told ------------------------------------------------

    def enter(self, phase: str, unit: Unit) -> None:
        """A forward or backward of ``unit`` begins; ``leave`` or ``end_backward`` ends it.

        To the profiler it is a mark: what begins in one hook may end on another thread, or never.
        """
        if (recorder := self._comm.recorder) is not None:
            recorder.enter(phase, unit.label)
        if _profiled():
            with record_function(f"zshard::{phase} {unit.label}"):
                pass

    def leave(self, unit: Unit) -> None:
        """The forward of ``unit`` has ended, if one was under way."""
        if (recorder := self._comm.recorder) is not None:
            recorder.leave("forward", unit.label)

    def leave_all(self) -> None:
        """The forward or backward under way was left by an exception."""
        if (recorder := self._comm.recorder) is not None:
            recorder.leave_all()

    def end_backward(self, unit: Unit | None = None) -> None:
        """The backward under way has ended; with ``unit``, if it is of that."""
        if (recorder := self._comm.recorder) is not None:
            recorder.end_backward(None if unit is None else unit.label)

    def resume_backward(self) -> None:
        """What autograd comes to now is the root's, if no other unit's backward is under way."""
        if (recorder := self._comm.recorder) is not None:
            recorder.resume_backward(self._root.label)

    def doing(self, phase: str, unit: Unit) -> AbstractContextManager[None]:
        """A context that is ``phase`` of ``unit``; of a gather or reduce, the issuing of it."""
        recorder = self._comm.recorder
        inside = _NOTHING if recorder is None else recorder.phase(phase, unit.label)
        return _shown(f"zshard::{phase} {unit.label}", inside) if _profiled() else inside

    def _tag(self, phase: str, unit: Unit) -> Tag:
        return Tag(self.step, phase, unit.label)


def _check_at_rest(unit: Unit) -> None:
    """Make sure that nobody has written to a whole parameter since the unit was used.

    On one rank the values stay, and a backward, which may be of something else, may read them.

    Raises:
        StateError: if somebody has; once, as the unit then begins with the master's values.
    """
    written = [flat.full for flat in unit.flats if flat.full.written]
    if written:
        try:
            unit.check_unwritten()
        finally:
            for full in written:
                full.forget_writes()


@contextmanager
def _shown(name: str, inside: AbstractContextManager[None]) -> Iterator[None]:
    """``inside``, as a range of torch.profiler."""
    with inside, record_function(name):
        yield


def _profiled() -> bool:
    return bool(torch._C._autograd._profiler_enabled())
