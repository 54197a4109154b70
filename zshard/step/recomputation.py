"""What activation checkpointing recomputes together, and who has to be gathered again behind it."""

from __future__ import annotations

from ..unit import State, Unit


class Recomputation:
    """Forwards that are run again inside one backward.

    A region of several units recomputes all of them before autograd goes on in the one that was
    announced. There are no more full buffers than 1 + prefetch, so a later unit of the region may
    push an earlier one out. If that is the announced one, nothing else would gather it again.
    """

    def __init__(self) -> None:
        # The unit whose backward was announced last, those around it, and who shares its output.
        self._announced: list[Unit] = []
        self._again: set[Unit] = set()  # recomputed since then
        self._running: list[Unit] = []  # whose forwards are under way again, one inside the other

    def announce(self, unit: Unit) -> None:
        """The backward of ``unit`` is about to run."""
        self._again.clear()
        self._announced = [u for u in self._announced if u.encloses(unit) or unit.encloses(u)]
        self._announced.append(unit)

    def end(self, unit: Unit) -> None:
        """The backward of ``unit`` is over, and it was freed."""
        self._announced = [other for other in self._announced if other is not unit]

    def begin(self) -> None:
        """Another backward begins."""
        self._announced.clear()
        self._running.clear()

    def enter(self, unit: Unit) -> None:
        """A forward of ``unit`` begins again."""
        self._running.append(unit)

    def leave(self, unit: Unit) -> None:
        """That forward has ended, also in an exception."""
        while self._running and self._running.pop() is not unit:
            pass

    def note(self, unit: Unit) -> list[Unit]:
        """``unit`` was recomputed; the units that have to be gathered again.

        Empty as long as a unit around it computes, which they might push out.
        """
        self._again.add(unit)
        if unit not in self._announced:
            unit.give_way()  # to the others of the region
        if self._running:
            return []
        return [u for u in self._announced if u in self._again and u.state is State.SHARDED]
