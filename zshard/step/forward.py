"""Forward, unit by unit: what happens before and after each call of a unit's module.

[Note: one step] in schedule.py has the order of events.

[Note: what a call of the root may be]
A forward of its own, which begins a pass and ends it. Or, by what it is found in: one inside
``full_params``, where there is nothing to gather; the model that calls itself, in a forward that is
under way; one inside one of the model's other methods, of whose pass it is a part (methods.py);
one that activation checkpointing makes again, inside a backward, whose pass goes on. A call of a
unit inside is what the root's around it is; or it is alone, outside of any call of the root; or, of
a unit that calls itself, a part of the unit's call around it.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from ..containers import cast_floating
from ..errors import CommError, MismatchError, StateError
from ..hooks import ModuleHook, have_dynamo_look_at_hooks
from ..training_state import TrainingState, calls_under_way, inside_backward
from ..transports.mesh import warn_of_later_group
from ..unit import State, Unit
from .called_alone import CalledAlone
from .forward_log import Forward
from .meeting import Intent

if TYPE_CHECKING:
    from ..schedule import Schedule


class ForwardHooks:
    """The hooks around the forwards of one wrapped model's units.

    Attributes:
        order: units as the last forward called them; alone: those that are called outside of one.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._units, self._root = schedule.units, schedule.root
        self._executor, self._agreement = schedule.executor, schedule.agreement
        self._backward, self.alone = schedule.backward, CalledAlone(schedule)
        self.order: list[Unit] = []
        self._kept: Unit | None = None  # that may turn out to be the last of forward
        self._call_themselves: set[Unit] = set()  # whose forwards were seen to do so
        self._last_hooks: dict[Unit, int] = {}  # ids of those that end a unit's forward
        weak = weakref.ref(self)
        self._refs = [_UnitRef(weak, u.index, u.label, u.strategy.resident) for u in self._units]
        for unit in self._units:
            self._hook(unit)

    def _hook(self, unit: Unit) -> None:
        # First among the pre-hooks and last among the hooks, so that users' find the parameters
        # gathered; ``_let_hooks_see`` takes care of those set after wrap.
        is_root = unit is self._root
        before = self.root_pre_forward if is_root else partial(self._pre_forward, unit)
        after = self.root_post_forward if is_root else partial(self._post_forward, unit)
        unit.module.register_forward_pre_hook(ModuleHook(before), prepend=True, with_kwargs=True)
        hook = ModuleHook(after)
        handle = unit.module.register_forward_hook(hook, with_kwargs=not is_root, always_call=True)
        self._last_hooks[unit] = handle.id

    def _let_hooks_see(self, unit: Unit) -> None:
        """Move the hook that frees ``unit`` behind those that the user has set since.

        Raises:
            StateError: if the user has removed it.
        """
        hooks, last = unit.module._forward_hooks, self._last_hooks[unit]
        if last not in hooks:
            raise StateError(
                f"the forward hooks of unit {unit.label!r}, a {type(unit.module).__name__}, were "
                "removed, zshard's with them. Remove hooks by the handles that their registration "
                "has returned."
            )
        if next(reversed(hooks)) != last:
            hooks[last] = hooks.pop(last)

    def root_pre_forward(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Begin a forward of the model, or a method; see [Note: what a call of the root may be]."""
        schedule = self._schedule
        if schedule.bypassed():
            return None
        schedule.require_values("a forward")
        have_dynamo_look_at_hooks()
        self._let_hooks_see(self._root)
        if self._is_nested():
            return None
        self._root.forward_io.begin()
        if schedule.methods.running:
            schedule.methods.enter_forward()
            label = f"a forward inside {schedule.methods.running}"
            self._agreement.begin(Intent.CALLED, self._executor.gathered_units, label)
            self._forget_casts()
        elif not inside_backward():
            with schedule.comm.awaited("the beginning of a forward"):
                self._begin()
        schedule.obtain(self._root)
        self._root.forward_io.enter((args, kwargs))  # behind obtain, which may drop them
        self._executor.enter("forward", self._root)
        self._agreement.look_ahead()
        if schedule.precision.cast_inputs:
            return cast_floating((args, kwargs), schedule.precision.compute)  # type: ignore[return-value]
        return None

    def _begin(self) -> None:
        """Begin a forward of its own, together with the other ranks."""
        schedule = self._schedule
        if self._executor.state is not TrainingState.IDLE or self.alone.leave_unseen():
            schedule.reset()  # the last forward or backward raised
        self._look_first(self._root)
        self._forget_last_forward()
        self._meet(self._root, Intent.FORWARD, "a forward")
        self._executor.enter_state(TrainingState.FORWARD)
        self.order, self._kept = [], None

    def _look_first(self, unit: Unit) -> None:
        """Before a forward of ``unit`` by itself: whether it can be what all ranks begin."""
        if self._schedule.lacks_group and dist.group.WORLD is not None:
            self._schedule.lacks_group = False
            warn_of_later_group()
        self._schedule.reducer.read_outcome()  # a failure elsewhere must not show in mid-backward
        self._schedule.structure.check_unchanged(unit.name)

    def _meet(self, unit: Unit, intent: Intent, label: str) -> None:
        """Begin a forward of ``unit`` by itself: with the same parameters, and the same buffers."""
        schedule = self._schedule
        tally, ask = schedule.updates.tally(), schedule.module_buffers.ask(unit.name)
        about = self._executor.gathered_units
        messages = self._agreement.begin(
            intent, about, label, unit=unit.index, tally=tally, buffers=ask
        )
        try:
            schedule.updates.check([message.tally for message in messages])
            if any(message.buffers for message in messages):
                schedule.module_buffers.broadcast(self._executor.step, unit.name)
        except MismatchError:  # on every rank: there is no forward that another model's may cut
            self._agreement.forgo_learning()
            self._agreement.abandon()
            raise
        self._backward.forwards.begin()
        self._forget_casts()

    def _forget_casts(self) -> None:
        """Have autocast cast anew: what it keeps belongs to a graph of an earlier forward."""
        kind = self._schedule.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            torch.clear_autocast_cache()

    def root_post_forward(self, module: nn.Module, args: object, output: object) -> object:
        """End a forward of the model, or a method; also where an exception leaves it."""
        schedule = self._schedule
        if schedule.bypassed():
            return None
        if self._is_nested():
            return output
        self._executor.leave(self._root)
        raised = self._root.forward_io.raised
        if schedule.methods.running:
            return self._end_in_method(raised, output)
        if raised and self._executor.state is not TrainingState.BACKWARD:
            if self._executor.state is TrainingState.FORWARD:
                schedule.reset()
            elif inside_backward():  # a recomputation, before that has come to this model
                self._executor.release_all()
            return None  # else it was refused, and has begun nothing that is to be ended
        if self._executor.state is TrainingState.BACKWARD:  # all of the model is being recomputed
            output = cast_floating(output, schedule.precision.output)
            self._watch(self._root, output)
            return output
        return self._end(output)

    def _end_in_method(self, raised: bool, output: object) -> object:
        """End a forward that a method of the model has called, and may call again."""
        if raised and isinstance(sys.exc_info()[1], (MismatchError, CommError)):
            return None  # the others are in no meeting any more; `Methods.run` settles it
        self._agreement.finish()
        self._backward.forwards.note(self._agreement.needed, self._executor.gathered_units)
        self._schedule.methods.leave_forward()
        return output

    def _end(self, output: object) -> object:
        """End what ``_begin`` has begun, or a method."""
        try:
            self._root.check_unwritten()
            output = cast_floating(output, self._schedule.precision.output)  # may lack memory
            output = self._root.copy_views(output)
        except BaseException:
            self._schedule.reset()
            raise
        if self._executor.state is TrainingState.FORWARD:
            try:
                self._agreement.finish()
            except MismatchError:  # on every rank: of a forward around this one; both are over
                self._executor.enter_state(TrainingState.IDLE)
                self._schedule.reset()
                raise
            gathered = self._executor.gathered_units
            self._backward.forwards.note(self._agreement.needed, gathered, self.order)
            self._executor.enter_state(TrainingState.IDLE)
        if not self._watch(self._root, output):
            self._executor.release_all()
            self._schedule.kept_views.warn()
        # Between forward and backward, user code must meet the sharded parameters everywhere.
        self._root.uninstall()
        return output

    def _pre_forward(self, unit: Unit, module: nn.Module, *inputs: object) -> None:
        schedule = self._schedule
        if schedule.bypassed():
            return
        if unit.in_use and calls_under_way(module) > 1:
            self._call_themselves.add(unit)
            return  # a part of the call around it
        if self._backward.raised or self.alone.leave_unseen(unit):
            schedule.reset()
        schedule.require_values(f"a forward of {unit.label}")
        have_dynamo_look_at_hooks()
        self._let_hooks_see(unit)
        unit.forward_io.begin()
        if self._executor.state is TrainingState.FORWARD:
            self.order.append(unit)
            self._keep(None)
        self.alone.note(unit)
        if self.alone.would_be(unit):
            label = f"a forward of {unit.label} alone"
            with schedule.comm.awaited(label):
                self._look_first(unit)
                self._meet(unit, Intent.ALONE, label)
                self.alone.begin(unit)
        schedule.obtain(unit)
        unit.forward_io.enter(inputs)  # behind obtain, which may drop them
        self._executor.enter("forward", unit)
        if self._executor.state is TrainingState.BACKWARD:
            self._backward.recomputation.enter(unit)
        self._agreement.look_ahead()

    def _post_forward(
        self, unit: Unit, module: nn.Module, args: object, kwargs: object, output: object
    ) -> object:
        if self._schedule.bypassed():
            return None
        if unit in self._call_themselves and calls_under_way(module) > 1:
            return None
        self._backward.recomputation.leave(unit)
        if unit.forward_io.raised:
            self._end_raised(unit, (args, kwargs), output)
            return None
        if unit.state is not State.GATHERED:
            self.alone.end(unit)
            return None
        self._executor.leave(unit)
        try:
            output = unit.hand_out((args, kwargs), output)
        except BaseException:  # which the model may catch: the use has ended
            if self._executor.state is not TrainingState.BACKWARD:
                self._executor.drop(unit)
                self.alone.leave(unit)
            raise
        watched = self._watch(unit, output)
        if self._executor.state is TrainingState.BACKWARD:
            self._backward.recomputed(unit)  # whose own backward follows soon, so it stays
            return output
        in_forward = self._executor.state is TrainingState.FORWARD
        self._release(unit, keep=watched and in_forward and self._agreement.may_be_last)
        self.alone.end(unit)
        return output

    def _end_raised(self, unit: Unit, inputs: object, output: object) -> None:
        """End a forward of ``unit`` that an exception has left."""
        error = sys.exc_info()[1]
        if self._executor.state is TrainingState.BACKWARD:
            if isinstance(error, _StopRecomputationError):
                self._backward.recomputed(unit)
            return
        # The model may catch the exception, and go on with what that or a hook has kept.
        self._executor.leave(unit)
        carried = (error, getattr(error, "args", ()))
        # Where a weight is in it, this raises: torch makes that a warning, and all stays.
        unit.hand_out((inputs, carried), None)
        self._watch(unit, (output, carried))
        self._release(unit, keep=self._executor.state is TrainingState.FORWARD)
        self.alone.leave(unit)

    def _release(self, unit: Unit, *, keep: bool) -> None:
        if keep:
            unit.end_use()  # it keeps its memory only as long as nobody needs it
            self._keep(unit)
        else:
            self._executor.release(unit)

    def _keep(self, unit: Unit | None) -> None:
        """Let ``unit`` stay for backward, which needs it first, in place of another."""
        kept, self._kept = self._kept, unit
        if kept is not None and kept is not unit and not kept.in_use:
            self._executor.release(kept)

    def _watch(self, unit: Unit, output: object) -> bool:
        """Hook ``output``, so that backward announces itself there; whether it can be hooked."""
        own = unit.forward_io.leave(output)
        ref, forward = self._refs[unit.index], self._backward.forwards.current
        if own:
            forward.holds = self
        for index, tensor in enumerate(own):
            tensor.register_hook(partial(_reached, ref, index, forward))  # type: ignore[no-untyped-call]
        return bool(own)

    def _is_nested(self) -> bool:
        """Whether the model calls itself in a forward that is under way."""
        in_forward = self._executor.state is TrainingState.FORWARD
        return in_forward and calls_under_way(self._schedule.model) > 1

    def _forget_last_forward(self) -> None:
        """Free what a forward without a backward has left gathered, or has an old value."""
        for unit in self._units:
            unit.give_way()
            if unit.outdated:
                self._executor.reshard(unit)
        self._schedule.renew()  # what no step has: of another library, or of a part


class _UnitRef(NamedTuple):
    """A unit, as hooks on its outputs hold it; see ``Forward.holds``."""

    hooks: weakref.ref[ForwardHooks]
    number: int  # in the unit map
    label: str
    resident: bool  # see ``Strategy``


def _reached(ref: _UnitRef, index: int, forward: Forward, grad: torch.Tensor) -> None:
    """``grad`` has reached output ``index`` of a unit, of ``forward``."""
    if (hooks := ref.hooks()) is not None:
        hooks._backward.reached(hooks._units[ref.number], index, forward)
    elif not ref.resident:
        raise StateError(
            f"another backward has come to unit {ref.label!r} of a model that was deleted, with "
            "its parameters. Keep the model until the last backward through it has ended."
        )
