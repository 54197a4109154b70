"""Makes the events of a trace of what the schedule told it; see [Note: what a trace holds]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .clock import Stamp
from .records import Event, Stall, Transfer

# What was told: the name of a method of Phases, and its arguments.
Told = tuple[Any, ...]

# The streams of phases whose work is not the compute stream's, which only issues it.
LANES = {"gather": "gather", "join": "gather", "reduce": "reduce"}


class Phases:
    """The events so far, and which of them are under way.

    Attributes:
        events, spans: as ``Trace`` has them.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.spans: list[Event] = []
        self._open: list[Event] = []  # of the compute stream, outermost first
        self._backward: Event | None = None  # the one under way
        self._latest: dict[tuple[str, str], Event] = {}  # what transfers belong to

    def take(self, told: Iterable[Told]) -> None:
        """Go on with what was told since, in its order."""
        for name, *facts in told:
            getattr(self, name)(*facts)

    def enter(self, phase: str, unit: str, now: Stamp) -> None:
        """``phase`` of ``unit`` begins; what is for a lane is issued, and its transfers follow."""
        event = Event(phase, unit)
        event.first = now
        self.events.append(event)
        if (stream := LANES.get(phase)) is not None:
            event.stream, event.last = stream, now
            self._latest[stream, unit] = event
            return
        self._open.append(event)
        if phase == "backward":
            self._backward = event

    def leave(self, phase: str, unit: str, now: Stamp) -> None:
        """``phase`` of ``unit`` ends, and what has begun within it; if it is under way."""
        name, last = (phase, unit), None
        if name in self._open:
            while last != name:
                last = self._open.pop()
                last.last = now

    def leave_all(self, now: Stamp) -> None:
        """Whatever is under way ends."""
        if self._open:
            self.leave(*self._open[0], now)
        self._backward = None

    def end_backward(self, unit: str | None, now: Stamp) -> None:
        """The backward under way ends; with ``unit``, if it is that unit's."""
        backward = self._backward
        if backward is not None and unit in (None, backward.unit):
            self.leave(*backward, now)
            self._backward = None

    def resume_backward(self, unit: str, now: Stamp) -> None:
        """Backward goes on in ``unit``, if it is in no other."""
        if self._backward is None:
            event = self._backward = Event("backward", unit)
            event.first = now
            self.spans.append(event)
            self._open.append(event)

    def span(self, phase: str, unit: str, stream: str, first: Stamp, last: Stamp) -> None:
        """What is no event of the schedule was done."""
        event = Event(phase, unit)
        event.stream, event.first, event.last = stream, first, last
        self.spans.append(event)

    def issue(self, transfer: Transfer) -> None:
        """A transfer is issued, for the latest phase of its name."""
        transfer.event = self._latest.get((transfer.phase, transfer.unit))

    def begin_stall(self, stall: Stall) -> None:
        """The compute stream waits, within what is under way."""
        stall.inside = self._open[-1] if self._open else None
