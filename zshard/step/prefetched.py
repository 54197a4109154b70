"""What was gathered ahead of its need."""

from __future__ import annotations

from ..unit import State, Unit
from .executor import Executor


class Prefetched:
    """Units that are gathered, or being gathered, and not needed yet; in order.

    Args:
        most: how many.
    """

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor, self._most = executor, most
        self._units: list[Unit] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._units)

    def __contains__(self, unit: object) -> bool:
        """Whether ``unit`` is one of them."""
        return unit in self._units

    def has_room(self, unit: Unit) -> bool:
        """Whether ``unit`` may be gathered ahead now."""
        return len(self._units) < self._most and unit.can_prefetch()

    def gather(self, unit: Unit) -> None:
        """Start the gather of ``unit``."""
        self._units.append(unit)
        self._executor.gather(unit)

    def take(self, unit: Unit) -> bool:
        """Take ``unit`` out, and free those before it; False if it has to be gathered."""
        if unit not in self._units or unit.state is State.SHARDED:  # outdated meanwhile
            return False
        while (skipped := self._units.pop(0)) is not unit:
            self._executor.release(skipped)
        return True

    def discard(self) -> None:
        """Free them all."""
        while self._units:
            self._executor.release(self._units.pop(0))

    def clear(self) -> None:
        """Have none; they are freed by others."""
        self._units.clear()
