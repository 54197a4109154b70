"""Forwards that a backward has begun inside of, and that go on after it.

[Note: a backward inside a forward]
``torch.autograd.grad`` of what a unit has made (forces, normals of a surface), or a ``backward`` of
its own (test-time training), cuts the forward that it is called in, as another model's pass does;
see [Note: one agreed order] in program.py. It may push the units whose forwards are under way out
of their memory, and takes them out of use in any case. At its end they are put back, gathered anew
where that is needed, and the forward goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..training_state import TrainingState
from ..units.forward_io import ForwardIO
from .meeting import Intent

if TYPE_CHECKING:
    from ..schedule import Schedule


class Interrupted:
    """The forwards under way in one model, as a backward is about to begin; none as a rule.

    Attributes:
        units: whose forwards they are, the outermost first.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._in_forward = schedule.executor.state is TrainingState.FORWARD
        # Outside of a forward of its own the root is in use for a backward to come.
        outside = () if self._in_forward else (schedule.root,)
        self.units = [u for u in schedule.units if u.in_use and u not in outside]
        schedule.executor.interrupted = self.units
        self._forward_ios = [unit.forward_io for unit in self.units]
        for unit in self.units:
            unit.forward_io = ForwardIO()  # freeing the unit drops this one's inputs
        if self._in_forward:
            schedule.agreement.cut()
        if self.units:
            needed = f"{schedule.forward.alone.so_far};{schedule.agreement.needed}"
            order = schedule.forward.order if self._in_forward else ()
            schedule.backward.forwards.note(needed, schedule.executor.gathered_units, order)

    def forget(self) -> None:
        """Let go of the forwards, and of what went into them: an exception has left them."""
        self.units.clear()
        self._forward_ios.clear()

    def go_on(self) -> None:
        """Put back what the forwards need, after the backward.

        Raises:
            StateError: if that has raised an exception on another rank.
        """
        if not self.units:
            return
        schedule, label = self._schedule, "the rest of a forward"
        if self._in_forward:
            schedule.executor.enter_state(TrainingState.FORWARD)
        schedule.reducer.read_outcome()
        with schedule.comm.awaited(label):
            if self._in_forward:
                schedule.agreement.resume()
            else:
                first, about = self.units[0].index, schedule.executor.gathered_units
                schedule.agreement.begin(Intent.ALONE, about, label, unit=first)
            for unit, forward_io in zip(self.units, self._forward_ios, strict=True):
                schedule.obtain(unit)
                unit.forward_io = forward_io
        self.forget()
