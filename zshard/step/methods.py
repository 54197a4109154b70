"""Methods of the model, other than forward, that gather parameters as forward does.

One that calls the model itself does so as often as it likes, so the others cannot know how many
forwards are to come. Therefore it ends with a meeting: a rank that has left it by an exception
brings that to the others' next one, which is the one at the end if no other is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import CommError, MismatchError
from ..training_state import TrainingState, calls_under_way, inside_backward
from .meeting import Intent

if TYPE_CHECKING:
    from ..schedule import Schedule


class Methods:
    """Runs such methods of one model.

    Attributes:
        running: the name of the one that is being run, or "".
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.running = ""
        self._call_the_model: set[str] = set()  # those that have done so
        self._called = False  # whether the one being run has

    def run(
        self,
        name: str,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Call a method of the model as its forward is called."""
        schedule = self._schedule
        inside = self.running or calls_under_way(schedule.model) > 0
        if inside or inside_backward():
            return function(*args, **kwargs)
        if schedule.bypassed():
            self.running = name
            try:
                return function(*args, **kwargs)
            finally:
                self.running = ""
        schedule.require_values(f"the method {name!r}")
        self._called = False
        try:
            begun = schedule.forward.root_pre_forward(schedule.model, args, kwargs)
            args, kwargs = begun or (args, kwargs)
            self.running = name
            output = function(*args, **kwargs)
        except BaseException as error:
            if not self.running and schedule.executor.state is TrainingState.IDLE:
                raise  # it was refused, and has begun nothing that is to be ended
            schedule.reset()
            told = isinstance(error, (MismatchError, CommError))  # all ranks
            if name in self._call_the_model and schedule.executor.has_peers and not told:
                with suppress(MismatchError):
                    self._meet("an exception in", name)
            raise
        finally:
            self.running = ""
        schedule.root.forward_io.begin()
        output = schedule.forward.root_post_forward(schedule.model, args, output)
        if self._called:
            try:
                self._meet("the end of", name)
            except MismatchError:  # the step is over
                schedule.executor.release_all()
                raise
        return output

    def enter_forward(self) -> None:
        """The method calls the model."""
        self._call_the_model.add(self.running)
        self._called = True
        self._schedule.agreement.finish()
        self._schedule.backward.forwards.begin()

    def leave_forward(self) -> None:
        """The model, which the method has called, has returned."""
        self._schedule.agreement.begin(Intent.METHOD, self.running, self.running)

    def _meet(self, how: str, name: str) -> None:
        what = f"{how} {name}"
        self._schedule.agreement.begin(Intent.METHOD, what, what, gathers=False)
