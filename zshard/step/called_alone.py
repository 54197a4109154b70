"""Units that are called outside of the root's forward: each such call is a pass of its own.

It is one from the call to its end, with the units inside. What begins within (a backward, another
unit called alone) ends it before: what its forward then still needs is gathered at meetings.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import MismatchError
from ..training_state import TrainingState, calls_under_way, inside_backward
from ..unit import Unit

if TYPE_CHECKING:
    from ..schedule import Schedule


@dataclass
class _Call:
    """One that is under way."""

    so_far: str = ""  # the calls inside, as text
    thread: int = field(default_factory=threading.get_ident)


class CalledAlone:
    """The units of one model that are being called alone."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._under_way: dict[Unit, _Call] = {}

    def would_be(self, unit: Unit) -> bool:
        """Whether a call of ``unit``'s module is outside of any other's forward."""
        outside = self._schedule.executor.state is TrainingState.IDLE and not inside_backward()
        around = (each for each in self._schedule.units if each.encloses(unit))
        return outside and not any(each.in_use for each in around)

    @property
    def so_far(self) -> str:
        """What a backward through the calls under way depends on."""
        return ";".join(call.so_far for call in self._under_way.values())

    def note(self, unit: Unit) -> None:
        """Note that ``unit`` is called inside of the calls under way."""
        for call in self._under_way.values():
            call.so_far += f" {unit.index}"

    def begin(self, unit: Unit) -> None:
        """Note that such a call has begun its pass."""
        self._under_way[unit] = _Call()

    def end(self, unit: Unit) -> None:
        """End the call of ``unit``, if it was such a one.

        Raises:
            MismatchError: on every rank, if another has begun something else.
        """
        if (call := self._forget(unit)) is not None:
            agreement, gathered = self._schedule.agreement, self._schedule.executor.gathered_units
            agreement.finish()
            self._schedule.backward.forwards.note(f"{call.so_far};{agreement.needed}", gathered)

    def leave(self, unit: Unit) -> None:
        """As ``end``, behind an exception; see [Note: after an exception] in backward.py."""
        agreement = self._schedule.agreement
        if self.would_be(unit):
            # Also before it has begun, where the others may have, and behind a read within.
            agreement.abort(in_forward=True)
        if self._forget(unit) is not None and not self._schedule.comm.broken:
            with suppress(MismatchError):  # this rank's own exception comes first
                agreement.finish()

    def leave_unseen(self, begins: Unit | None = None) -> bool:
        """Leave the calls that an exception has ended of which no hook is told, such as Ctrl-C.

        Args:
            begins: a unit of which another call has just begun.

        Returns:
            Whether there were any; then the model is to be reset.
        """
        here = threading.get_ident()  # the others' calls are not on this thread's stack
        left = [
            unit
            for unit, call in self._under_way.items()
            if call.thread == here and calls_under_way(unit.module) == int(unit is begins)
        ]
        for unit in reversed(left):
            self.leave(unit)
        return bool(left)

    def _forget(self, unit: Unit) -> _Call | None:
        """The call of ``unit``, if its pass is to be ended: not if a backward within has raised."""
        call = self._under_way.pop(unit, None)
        return call if self._schedule.executor.state is TrainingState.IDLE else None
