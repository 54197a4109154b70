"""How often each unit of a rehearsed step is gathered: the runtime's rules without its tensors.

The rules are those of ``Unit.gather`` (who gets which slot, and who gives way), ``ForwardHooks``
(what a forward leaves), ``Backward.reached`` and ``Recomputation``. Prefetching changes none of
it: what is gathered ahead is what would be needed next.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_STEPS = 3  # until every unit has found its slot


class Event(enum.Enum):
    """What a step comes to."""

    FORWARD = "a unit's module is called"
    OUTPUT = "and has returned what backward will come to"
    OUTPUT_APART = "and has returned, and no backward will come to it"
    BACKWARD = "backward begins"
    AGAIN = "a unit's module is called again, in backward"
    OUTPUT_AGAIN = "and has returned, or was left as soon as all was there"
    REACHED = "backward comes to an output of a unit"
    COMPLETE = "all gradients of a unit are there, and nothing reads its weights any more"


class Happening(NamedTuple):
    """An event, and its unit by index."""

    event: Event
    unit: int


class Gathers(NamedTuple):
    """What a step gathers, in steady state."""

    counts: list[int]  # how often, of each unit
    slots: int  # buffers that it takes, beside the root's


def gathers_of(
    happenings: Sequence[Happening],
    parents: Sequence[int | None],
    in_slots: Sequence[bool],
    prefetch: int,
) -> Gathers:
    """Of a step.

    Args:
        happenings: in it, but for the root's, which is gathered once.
        parents: of each unit, the one around it; the root is the first unit.
        in_slots: whether a unit has to be gathered; else its whole parameters stay, or it has none.
    """
    step = _Step(parents, in_slots, prefetch)
    counts = [step.run(happenings) for _ in range(_STEPS)][-1]
    return Gathers([1, *counts[1:]], step.slots)


def one_call_each(parents: Sequence[int | None]) -> list[Happening]:
    """A step in which forward comes to every unit once, in their order."""
    inside: list[list[int]] = [[] for _ in parents]
    for index, parent in enumerate(parents):
        if parent is not None:
            inside[parent].append(index)

    def forward(index: int) -> Iterator[Happening]:
        yield Happening(Event.FORWARD, index)
        for each in inside[index]:
            yield from forward(each)
        yield Happening(Event.OUTPUT, index)

    def backward(index: int) -> Iterator[Happening]:
        yield Happening(Event.REACHED, index)
        for each in reversed(inside[index]):
            yield from backward(each)
        yield Happening(Event.COMPLETE, index)

    there = [happening for each in inside[0] for happening in forward(each)]
    back = [happening for each in reversed(inside[0]) for happening in backward(each)]
    return [*there, Happening(Event.BACKWARD, 0), *back]


class _Unit:
    """A unit as it runs: ``home`` is the slot that it keeps."""

    def __init__(self, parent: _Unit | None, in_slot: bool) -> None:
        self.parent, self.in_slot = parent, in_slot
        self.count = 0  # of its gathers in this step
        self.home: int | None = None
        self.gathered = self.in_use = False

    def encloses(self, other: _Unit) -> bool:
        above = other.parent
        return above is not None and (above is self or self.encloses(above))


class _Step:
    """Runs the events of a step."""

    def __init__(
        self, parents: Sequence[int | None], in_slots: Sequence[bool], prefetch: int
    ) -> None:
        self._units: list[_Unit] = []
        for parent, in_slot in zip(parents, in_slots, strict=True):  # parents come first
            self._units.append(_Unit(None if parent is None else self._units[parent], in_slot))
        slots = min(1 + prefetch, sum(in_slots[1:]))
        self._owners: list[_Unit | None] = [None] * slots
        self._next = 0

    @property
    def slots(self) -> int:
        """How many there are by now."""
        return len(self._owners)

    def run(self, happenings: Sequence[Happening]) -> list[int]:
        """One step; how often it gathers each unit."""
        self._kept: _Unit | None = None
        self._backward = False
        self._announced: list[_Unit] = []
        self._again: set[_Unit] = set()
        self._running: list[_Unit] = []
        for event, index in happenings:
            unit = self._units[index]
            if event is Event.FORWARD:
                self._keep(None)
                self._obtain(unit)
            elif event is Event.OUTPUT:
                unit.in_use = False
                self._keep(unit)
            elif event is Event.OUTPUT_APART:
                self._free(unit)
            elif event is Event.BACKWARD:
                self._backward = True
                for each in self._units:
                    each.in_use = False
            elif event is Event.AGAIN:
                self._obtain(unit)
                self._running.append(unit)
            elif event is Event.OUTPUT_AGAIN:
                self._recomputed(unit)
            elif event is Event.REACHED:
                self._reached(unit)
            elif event is Event.COMPLETE:
                self._free(unit)
                self._announced = [each for each in self._announced if each is not unit]
        counts = [unit.count for unit in self._units]
        for unit in self._units:
            self._free(unit)
            unit.count = 0
        return counts

    def _reached(self, unit: _Unit) -> None:
        self._again.clear()
        self._announced = [u for u in self._announced if u.encloses(unit) or unit.encloses(u)]
        self._announced.append(unit)
        for each in [each for each in self._units if each.in_use and each is not unit]:
            if not each.encloses(unit) and not unit.encloses(each):
                self._free(each)
        self._obtain(unit)

    def _recomputed(self, unit: _Unit) -> None:
        self._running.remove(unit)
        self._again.add(unit)
        if unit not in self._announced:
            unit.in_use = False
        for each in self._announced:
            if not self._running and each in self._again and not each.gathered:
                self._obtain(each)

    def _keep(self, unit: _Unit | None) -> None:
        kept, self._kept = self._kept, unit
        if kept is not None and kept is not unit and not kept.in_use:
            self._free(kept)

    def _obtain(self, unit: _Unit) -> None:
        if not unit.gathered:
            unit.count += 1
            if unit.in_slot:
                self._take_slot(unit)
            unit.gathered = True
        unit.in_use = True

    def _take_slot(self, unit: _Unit) -> None:
        owner = None if unit.home is None else self._owners[unit.home]
        if owner is not None and (self._backward or not owner.in_use):
            self._free(owner)
            owner = None
        if unit.home is None or owner is not None:
            unit.home = self._free_slot()
        self._owners[unit.home] = unit

    def _free_slot(self) -> int:
        count = len(self._owners)
        for step in range(count):
            slot = (self._next + step) % count
            if self._owners[slot] is None:
                self._next = (slot + 1) % count
                return slot
        self._owners.append(None)
        return count

    def _free(self, unit: _Unit) -> None:
        unit.gathered = unit.in_use = False
        if unit.home is not None and self._owners[unit.home] is unit:
            self._owners[unit.home] = None
