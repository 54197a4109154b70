"""The record of what the schedule did: the phases of every unit, in order."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """The beginning of a phase for a unit."""

    phase: str  # gather, wait, forward, backward, reshard, pack, reduce or step
    unit: str


class Trace:
    """Events in the order in which they were issued.

    Attributes:
        events: the list, oldest first.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, phase: str, unit: str) -> None:
        """Append one event."""
        self.events.append(Event(phase, unit))
