"""Units that are called outside of the root's forward: each such call is a pass of its own.

It is one from the call to its end, with the units inside. What begins within (a backward, another
unit called alone) ends it before: what its forward then still needs is gathered at meetings.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import MismatchError
from ..training_state import TrainingState, inside_backward
from ..unit import Unit

if TYPE_CHECKING:
    from ..schedule import Schedule


class CalledAlone:
    """The units of one model that are being called alone."""

    def __init__(self, schedule: Schedule) -> None:
        # With the calls inside of each, and what it had needed as others began there, as text.
        self._schedule, self._under_way = schedule, dict[Unit, str]()

    def would_be(self, unit: Unit) -> bool:
        """Whether a call of ``unit``'s module is outside of any other's forward."""
        outside = self._schedule.executor.state is TrainingState.IDLE and not inside_backward()
        around = (each for each in self._schedule.units if each.encloses(unit))
        return outside and not any(each.in_use for each in around)

    @property
    def so_far(self) -> str:
        """What a backward through the calls under way depends on."""
        return ";".join(self._under_way.values())

    def note(self, what: str) -> None:
        """Note ``what`` has come inside of the calls under way: another call, or its needs."""
        for unit, before in self._under_way.items():
            if unit.in_use:  # else an exception has left it, or a backward is within
                self._under_way[unit] = f"{before} {what}"

    def begin(self, unit: Unit) -> None:
        """Note that such a call has begun its pass."""
        self._under_way[unit] = ""

    def end(self, unit: Unit) -> None:
        """End the call of ``unit``, if it was such a one.

        Raises:
            MismatchError: on every rank, if another has begun something else.
        """
        before = self._under_way.get(unit, "")
        if self._forget(unit):
            agreement, gathered = self._schedule.agreement, self._schedule.executor.gathered_units
            agreement.finish()
            self._schedule.backward.forwards.note(f"{before};{agreement.needed}", gathered)

    def leave(self, unit: Unit) -> None:
        """As ``end``, behind an exception; see [Note: after an exception] in backward.py."""
        agreement = self._schedule.agreement
        if self.would_be(unit):
            # Also before it has begun, where the others may have, and behind a read within.
            agreement.abort(in_forward=True)
        if self._forget(unit) and not self._schedule.comm.broken:
            with suppress(MismatchError):  # this rank's own exception comes first
                agreement.finish()

    def _forget(self, unit: Unit) -> bool:
        """Whether a pass of its own is to be ended: none if a backward within has raised."""
        under_way = self._under_way.pop(unit, None) is not None
        return under_way and self._schedule.executor.state is TrainingState.IDLE
