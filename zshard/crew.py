"""What is done to units, and told to the trace: the hands of the schedule and of the agreement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.profiler import record_function

from .comm import Comm, Tag
from .errors import StateError
from .phase import Phase
from .reduction import Reducer
from .trace import Trace
from .unit import State, Unit


class Crew:
    """Gathers, frees and reduces units; decides nothing.

    Attributes:
        phase: where in a step the model is.
        step: backwards that were reduced so far.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, reducer: Reducer) -> None:
        self._root, self._comm, self._reducer = units[0], comm, reducer
        self.phase = Phase.IDLE
        self.step = 0
        self.trace: Trace | None = None

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to be reached."""
        return self._comm.world > 1 and not self._comm.broken

    def gather(self, unit: Unit) -> None:
        """Start gathering what this rank needs, or will."""
        self.note("gather", unit)
        tag = self._tag("gather", unit)
        try:
            unit.gather(tag, move=self.phase is not Phase.BACKWARD)
        except StateError:
            unit.join(tag)  # the other ranks are in it
            raise

    def join(self, unit: Unit) -> None:
        """Take part in a gather that this rank does not need."""
        if unit.strategy.resident and unit.state is State.SHARDED:
            self.gather(unit)  # it will be needed, and lies where it has to
        elif self._comm.size > 1:
            self.note("join", unit)
            unit.join(self._tag("gather", unit))

    def wait(self, unit: Unit) -> None:
        """Have the whole parameters there, if they are on the way."""
        if unit.state is State.GATHERING:
            self.note("wait", unit)
            unit.wait()

    def reduce(self, unit: Unit) -> None:
        """Reduce the gradients that are there."""
        self._reducer.reduce(unit, self._tag("reduce", unit), self.note)

    def end_reductions(self, *, failed: bool = False, strayed: bool = False) -> None:
        """Complete the reductions, and tell the ranks what came out."""
        tag = self._tag("reduce", self._root)
        self._reducer.finish(tag, failed=failed, strayed=strayed)
        self.step += 1

    def release(self, unit: Unit) -> None:
        """End a unit's use: free the whole parameters where the strategy does not keep them."""
        if unit.strategy.resident:
            unit.uninstall()
            unit.in_use = False
        else:
            self.reshard(unit)

    def reshard(self, unit: Unit) -> None:
        """Give up the whole parameters, if they are there."""
        if unit.state is not State.SHARDED:
            self.note("reshard", unit)
            unit.reshard()

    def note(self, phase: str, unit: Unit) -> None:
        """Tell the trace, and the profiler, that ``phase`` begins for ``unit``."""
        if self.trace is not None:
            self.trace.add(phase, unit.label)
        if torch._C._autograd._profiler_enabled():
            with record_function(f"zshard::{phase} {unit.label}"):
                pass

    def _tag(self, phase: str, unit: Unit) -> Tag:
        return Tag(self.step, phase, unit.label)
