"""Backward, unit by unit: from the first gradient that reaches an output to the last reduction.

[Note: one step] in schedule.py has the order of events.

[Note: after an exception]
The exception is this rank's alone: the others do not know of it, and are in the pass still. Five
words say who ends what:
abort: this rank leaves the pass. No program is learned from it, on any rank.
abandon: this rank lets go of what it had under way. Before, it takes part in what is left of the
  pass, without gradients, and tells the others at its end.
drop: the gradients are gone, on every rank, as the others hear of it.
reset: all of that, for one model, with its units SHARDED again (``Schedule.reset``).
forget: all ranks at once begin anew, after [Note: giving up] in recovery.py: no collective is left
  to take part in, and what was learned is gone, too.

[Note: whether a backward is under way]
Autograd holds a callback for its end for as long as it runs, so a weak reference to that tells. But
where a thread of autograd's own runs it, as for a GPU, and it raises, the caller goes on while that
thread holds on for some milliseconds: who is outside of every backward knows that this one is over.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch

from ..errors import MismatchError, StateError
from ..training_state import TrainingState, inside_backward
from ..unit import State, Unit
from .double_backward import refuse_graph_of_gradients, refuse_graph_through
from .forward_log import Forward, ForwardLog
from .interrupted import Interrupted
from .meeting import Intent
from .misplaced import refuse_overwritten, refuse_unexpected
from .outcome import Ending
from .recomputation import Recomputation

if TYPE_CHECKING:
    from ..schedule import Schedule

# Those of all models on several ranks that have begun and not ended, in that order.
_BEGUN: WeakKeyDictionary[Backward, None] = WeakKeyDictionary()


class Backward:
    """Runs the units of one model through backward.

    Autograd enters it by ``reached``, where a unit's backward is about to run, and by
    ``leaf_grad_arrived``, behind each parameter's gradient; whichever comes first begins it. It is
    left by ``_finish`` at autograd's end, or by ``abandon`` after an exception.

    Attributes:
        current: the unit whose backward was announced last.
        forwards: what the next backward may go through.
        sync: False inside no_sync, where gradients stay on the leaves.
        recomputation: what of the backward under way is run again.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._units, self._root = schedule, schedule.units, schedule.root
        self._executor, self._agreement = schedule.executor, schedule.agreement
        self._reducer = schedule.reducer
        self._trained_changed = False  # whether parameters were (un)frozen since the last backward
        # One rank has nobody to meet, and other threads may train other models.
        self._begun = WeakKeyDictionary[Backward, None]() if self._executor.alone else _BEGUN
        self.current: Unit | None = None
        self.sync = True
        self._reduces = True  # whether the backward under way does, or else the last
        self._lost = False  # whether one inside no_sync has raised, and the others do not know
        self._end: ref[partial[None]] | None = None
        self.forwards, self.recomputation = ForwardLog(), Recomputation()
        self._interrupted = Interrupted(schedule)  # by the backward under way
        self._agreement.before_meeting = self._bring_others_back
        self._reducer.on_strayed = self._agreement.expect_other_ways

    def reached(self, unit: Unit, index: int, forward: Forward) -> None:
        """A gradient has reached an output of ``unit``, whose backward is about to run.

        Args:
            index: of the output among the unit's; forward: that it came from.
        """
        refuse_graph_through(unit)
        self._begin(f"{unit.index}.{index}", forward)
        self.forwards.reached.add(forward)
        if unit is self.current and unit.state is State.GATHERED:
            return  # another output of the same call
        self.current = unit
        self.recomputation.announce(unit)
        self._executor.end_backward()
        # Autograd runs nodes in the reverse of forward's order, so a unit beside this one has
        # nothing left to compute. One around it has; one inside may share its output tensor.
        for other in self._schedule.in_use_beside(unit):
            self._release(other)
        self._schedule.obtain(unit)
        self._executor.enter("backward", unit)
        self._agreement.look_ahead()

    def recomputed(self, unit: Unit) -> None:
        """Activation checkpointing has run the forward of ``unit`` again."""
        for due in self.recomputation.note(unit):
            self._schedule.obtain(due)

    def _begin(self, first: str, forward: Forward | None = None) -> None:
        """Begin a backward, if it has not begun.

        Args:
            first: where it has come to first; other losses come to other outputs, or forwards.
        """
        if self._executor.state is TrainingState.BACKWARD:
            if not self.raised:
                return
            self._schedule.reset()  # this is another backward
        self._schedule.require_values("a backward")
        self._reducer.read_outcome()  # what ended the last one elsewhere, before the others are met
        self._apply_trained_changes()
        # Beside what is reduced already, one rank holds nothing back: a plain model, too, adds one
        # gradient after the other to what is there.
        self._reduces = self.sync or (self._executor.alone and self._schedule.totals.has_gradients)
        self._interrupted = Interrupted(self._schedule)
        others = [each._agreement for each in self._begun if each is not self and not each.raised]
        for other in others:
            other.make_way()
        about = self._about(first, forward)
        with self._schedule.comm.awaited("the beginning of a backward", but=(Exception,)):
            self._meet(about)
            self._agreement.go_beside(others)
            self._executor.enter_state(TrainingState.BACKWARD)
        self._begun[self] = None
        self.forwards.begin_backward()
        self.current = None
        self.recomputation.begin()
        for unit in self._units:
            unit.fired.clear()
            unit.give_way()  # what forward has left gathered
        if self._root.state is State.GATHERED:
            self._root.install()  # a checkpointed region may be of the root's own modules
        if self._reduces:
            self._reducer.start()
            there_already = [flat.grads.present for flat in self._schedule.flats]
            what, updates = "which gradients a backward adds to", self._schedule.updates
            updates.note_many(what, there_already, of_gradients=True)
        self._finish_at_the_end()

    def _about(self, first: str, forward: Forward | None) -> str:
        """What this backward's program depends on; may differ between ranks."""
        # With what is there: something may have come between, and freed what forward had left.
        there, passed_over = self._executor.gathered_units, self._units_passed_over()
        return f"{self.forwards.about(forward)};{first};{there};{passed_over}"

    def _meet(self, about: str) -> None:
        """Begin together with the other ranks, with room for what is to be reduced."""
        intent = Intent.BACKWARD if self._reduces else Intent.HOLD
        label = "a backward" if self._reduces else "a backward inside no_sync"
        try:
            self._agreement.begin(intent, about, label)
        except MismatchError:  # the step is over
            self._executor.release_all()
            raise
        if not self._reduces:
            return
        try:
            self._reducer.make_room()
        except Exception:
            self._agreement.abort()
            self._agreement.abandon()
            raise

    def _finish_at_the_end(self) -> None:
        """Queue ``_finish`` for the end of this backward, if it does not raise."""
        end = partial(self._finish)  # a new object; see [Note: whether a backward is under way]
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._end = ref(end, self._give_params_back)

    def _units_passed_over(self) -> str:
        """The units of which this backward makes no gradient, by number.

        A part of the graph may have been detached, or a loss left out, that was not before. Which
        of a unit's parameters get a gradient changes nothing of what is gathered.
        """
        units = self._units
        passed_over = [u for u in units if not any(f.full.will_be_reached() for f in u.flats)]
        return " ".join(str(unit.index) for unit in passed_over)

    def leaf_grad_arrived(self, unit: Unit) -> None:
        """Free and reduce ``unit``, one of whose leaves got its gradient, if that was the last."""
        refuse_graph_of_gradients(unit)
        self._begin(f"{unit.index}")
        if self._reduces and not self._agreement.note_gradient(unit):
            self._schedule.reset(Ending.STRAYED)
            refuse_unexpected(unit)
        if unit.slot_bytes and unit.state is State.SHARDED:
            refuse_overwritten(unit)
        # The root's reduction is the last in any case, and nothing would hide it.
        if unit is self._root or not unit.all_fired:
            return
        unit.fired.clear()  # in another reentrant checkpoint they come once more
        self._executor.end_backward(unit)
        if unit.may_free_early:
            self._release(unit)
            self.recomputation.end(unit)
        if self._reduces:
            self._agreement.ready(unit)
        self._executor.resume_backward()

    def _release(self, unit: Unit) -> None:
        """Free ``unit``, if nobody has written to its parameters."""
        self._executor.check_unwritten(unit)
        self._executor.release(unit)

    def _close(self) -> None:
        """Free every unit, and take part in what is left; nothing more of this backward comes."""
        self._executor.end_backward()
        for unit in self._units:
            if unit not in self._interrupted.units:
                self._release(unit)
        self._agreement.finish()

    def _finish(self) -> None:
        """Free every unit and complete the reductions."""
        # From the last to the first, as other ranks may be in the midst of the last.
        for each in reversed(list(self._begun)):
            each._close()
            if each is self:
                break
        if self._reduces:
            with self._schedule.comm.awaited("the end of a backward"):
                self._executor.end_reductions(Ending.LOST if self._lost else Ending.WELL)
                self._lost = False
                self._executor.enter_state(TrainingState.IDLE)  # or a reset would end it once more
        else:
            for flat in self._reducer.trained_flats:
                flat.grads.hold_back()
            self._executor.enter_state(TrainingState.IDLE)
        self._begun.pop(self, None)
        self.forwards.end_backward()
        try:
            if self._reduces:
                self._reducer.run_hooks()
        finally:  # the forwards go on, if only to be left by what a hook has raised
            self._interrupted.go_on()
        self._schedule.kept_views.warn()

    # --- exceptions ------------------------------------------------------------------------------

    def _give_params_back(self, end: ref[partial[None]]) -> None:
        """Put the sharded parameters back for user code, should the backward have raised."""
        for unit in self._units:
            if self._executor.state is not TrainingState.BACKWARD or end is not self._end:
                return  # it has ended well, or another thread has gone on meanwhile
            unit.uninstall()

    @property
    def raised(self) -> bool:
        """Whether the last backward ended in an exception, and nothing was run since.

        See [Note: whether a backward is under way].
        """
        if self._executor.state is not TrainingState.BACKWARD:
            return False
        return not inside_backward() or self._end is None or self._end() is None

    def _bring_others_back(self) -> None:
        """Reset models whose backward raised, before a meeting: they take part in what is left.

        Where it did not raise, that came first. (Not so of one backward through several models,
        after which all go on only if it has raised on every rank: then each does this here.)
        """
        for each in [b for b in self._begun if b is not self and b.raised]:
            if not each._schedule.comm.is_over:  # else nobody is there
                each._schedule.reset()

    def require_gradients(self) -> None:
        """Read what the last backward's reduction said.

        Raises:
            StateError: if it ended in an exception, so that only some gradients are there; inside
                a forward or backward; if the parameters hold no valid values.
        """
        what = "clipping, unscaling or an optimizer's step"
        self._schedule.require_values(what)
        if self.raised:
            raise StateError(
                "the last backward raised an exception, and its gradients are incomplete. Run it "
                "again, or skip the step: zshard.reset(model), then zero_grad()."
            )
        self._schedule.require_idle(what)
        self._reducer.read_outcome()

    def before_set_trained(self, name: str) -> None:
        """Note that the parameter ``name`` is being frozen or unfrozen.

        Raises:
            StateError: inside a forward or backward.
        """
        if self.raised:
            self._schedule.reset()  # while it reduces what the others do
        if self._executor.state is not TrainingState.IDLE:
            what = "requires_grad cannot change inside a forward or backward"
            raise StateError(f"{name}: {what}; change it between steps")
        self._trained_changed = True

    def _apply_trained_changes(self) -> None:
        """Note which parameters were frozen and unfrozen since."""
        if self._trained_changed:
            self._reducer.find_trained()
            self._agreement.forget_trained()
            self._trained_changed = False

    def forget(self) -> None:
        """Forget what the next backward would go through."""
        self._executor.leave_all()
        self._executor.enter_state(TrainingState.IDLE)
        self._begun.pop(self, None)
        self.forwards.forget()
        self._lost = False

    def abandon(self, ending: Ending) -> None:
        """Leave the forward or backward under way; see [Note: after an exception]."""
        self._end = None
        self._interrupted.forget()
        self._begun.pop(self, None)  # else the meetings below would bring it back once more
        self._bring_others_back()  # what has raised inside a forward comes before its end
        self._agreement.abort()
        self._executor.leave_all()
        for flat in self._reducer.trained_flats:
            flat.grads.drop_leaves()
        reduces = self._executor.state is TrainingState.BACKWARD and self._reduces
        if self._executor.state is TrainingState.BACKWARD and not reduces:
            # A micro-batch is missing on this rank, and the others are not there to be told.
            self._lost = self._executor.has_peers
            for flat in self._reducer.trained_flats:
                flat.grads.forget_held_back()
        if self._executor.has_peers and self._executor.state is not TrainingState.IDLE:
            self._agreement.finish()
            if reduces:
                self._executor.end_reductions(ending)
                self._lost = False
                self._reducer.read_outcome()
        elif self._executor.state is TrainingState.BACKWARD:
            self._reducer.drop()
        self.forwards.end_backward()
