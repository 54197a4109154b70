"""The order of events of a training step: which unit is gathered, freed and reduced when.

[Note: one step]
Forward, for each unit as its module is called: wait for its gather, start the next unit's, compute,
reshard. The root, which encloses all others, stays gathered until the end of backward, and so does
the last unit of forward, which backward needs first. Backward, as the gradient reaches a unit's
output: reshard the unit before, wait, start the gather of the next one in reverse order, compute;
as its last gradient is there: reshard, pack, reduce. At the end: reduce what is left. What comes
next is known from the last time, see [Note: one agreed order].
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .agreement import Agreement
from .backward import Backward
from .buffers import Buffers
from .comm import Comm
from .crew import Crew
from .errors import CommError, MismatchError, StateError
from .hooks import ModuleHook
from .meeting import Ask
from .methods import Methods
from .param import Sharded
from .phase import Phase, calls_under_way, inside_backward
from .pool import Pool
from .precision import Precision
from .reduction import Reducer
from .structure import Structure, cast_floating
from .unit import State, Unit
from .updates import Updates

LIVE: weakref.WeakSet[Schedule] = weakref.WeakSet()  # of all wrapped models


class Schedule:
    """Runs the units of one wrapped model.

    Args:
        units: the unit map, the root first.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        comm: Comm,
        pool: Pool,
        precision: Precision,
        prefetch: int,
        device: torch.device,
    ) -> None:
        self.model, self.units, self.comm, self.pool = model, tuple(units), comm, pool
        self.flats = tuple(flat for unit in units for flat in unit.flats)
        self.precision, self.root, self.device = precision, units[0], device
        self.reducer = Reducer(units, comm, pool, device)
        self.buffers = Buffers(model, comm)
        self.structure = Structure(model)
        self.crew = Crew(units, comm, self.reducer)
        self.agreement = Agreement(units, comm, prefetch, self.crew, self.reset)
        self.whole = False  # True inside full_params: the modules hold whole parameters
        # Why the parameters hold no valid values, and the remedy; alike on every rank. "" if valid.
        self.unusable = ""
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # zshard's own
        self._order: list[Unit] = []  # units as the last forward called them
        self._kept: Unit | None = None  # that may turn out to be the last of forward
        self.updates = Updates(units, comm)
        self.methods = Methods(self)
        self.backward = Backward(units, self.crew, self.agreement, self.reducer, self)
        for flat in self.flats:
            flat.schedule = self
            flat.before_set_trained = self.backward.before_set_trained
        for unit in units:
            self._hook(unit)
        LIVE.add(self)

    def _hook(self, unit: Unit) -> None:
        # First among the pre-hooks and last among the hooks, so that users' find the parameters
        # gathered; ``Unit.let_hooks_see`` takes care of those set after wrap.
        is_root = unit is self.root
        before = self.root_before if is_root else partial(self._before, unit)
        after = self.root_after if is_root else partial(self._after, unit)
        unit.module.register_forward_pre_hook(ModuleHook(before), prepend=True, with_kwargs=True)
        handle = unit.module.register_forward_hook(ModuleHook(after), always_call=True)
        unit.last_hook = handle.id

    # --- forward ---------------------------------------------------------------------------------

    def root_before(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Begin a forward of the model, or a method."""
        if self.bypassed():
            return None
        self.require_values("a forward")
        self.root.let_hooks_see()
        if self.crew.phase is Phase.FORWARD and calls_under_way(self.model) > 1:
            return None  # the model calls itself
        self.root.handled = id(sys.exc_info()[1])
        if self.methods.running:  # a forward inside one of the model's other methods
            self.methods.enter_forward()
            self.agreement.begin(Ask.FORWARD, self.crew.gathered, "a forward")
        elif not inside_backward():
            if self.crew.phase is not Phase.IDLE:  # the last forward or backward raised
                self.reset()
            self.reducer.settle()  # a failure elsewhere must not show in the middle of a backward
            self.structure.check_unchanged()
            self._forget_last_forward()
            self._begin_forward()
            kind = self.device.type
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                # A cast that it keeps belongs to a graph of an earlier forward of that context.
                torch.clear_autocast_cache()
            self.crew.turn_to(Phase.FORWARD)
            self._order, self._kept = [], None
        # Else activation checkpointing recomputes all of the model, and the phase is BACKWARD.
        self.root.passage.enter((args, kwargs))
        self.obtain(self.root)
        self.crew.enter("forward", self.root)
        self.agreement.look_ahead()
        if self.precision.cast_inputs and self.precision.compute is not None:
            cast = cast_floating((args, kwargs), self.precision.compute)
            return cast  # type: ignore[return-value]
        return None

    def _begin_forward(self) -> None:
        word = 2 * self.updates.word() + self.buffers.ask()  # the latter in the lowest bit
        words = self.agreement.begin(Ask.FORWARD, self.crew.gathered, "a forward", word=word)
        self.updates.check([word >> 1 for word in words])
        self.backward.forwards.begin()
        if any(word & 1 for word in words):
            self.buffers.broadcast(self.crew.step)

    def root_after(self, module: nn.Module, args: object, output: object) -> object:
        """End a forward of the model, or a method; also where an exception leaves it."""
        if self.bypassed():
            return None
        if self.crew.phase is Phase.FORWARD and calls_under_way(self.model) > 1:
            return output
        self.crew.leave(self.root)
        leaving = id(sys.exc_info()[1]) != self.root.handled  # called while an exception leaves
        if self.methods.running:
            if leaving and isinstance(sys.exc_info()[1], (MismatchError, CommError)):
                return None  # the others are in no meeting any more; `run_method` settles it
            self.agreement.finish()
            self.backward.forwards.note(self.agreement.needed, self.crew.gathered)
            self.methods.leave_forward()
            return output
        if self.crew.phase is Phase.FORWARD and leaving:
            self.reset()
            return None
        if self.precision.output is not None:
            output = cast_floating(output, self.precision.output)
        if self.crew.phase is Phase.BACKWARD:  # all of the model is being recomputed
            self._watch(self.root, output)
            return output
        self.root.check_unwritten()
        output = self.root.copy_lent(output)
        if self.crew.phase is Phase.FORWARD:
            self.agreement.finish()
            self.backward.forwards.note(self.agreement.needed, self.crew.gathered, self._order)
            self.crew.turn_to(Phase.IDLE)
        if not self._watch(self.root, output):
            for unit in self.units:
                self.crew.release(unit)
        # Between forward and backward, user code must meet the sharded parameters everywhere.
        self.root.uninstall()
        return output

    def _before(self, unit: Unit, module: nn.Module, *inputs: object) -> None:
        if self.bypassed():
            return
        self.require_values(f"a forward of {unit.label}")
        unit.let_hooks_see()
        unit.handled = id(sys.exc_info()[1])
        unit.passage.enter(inputs)
        if self.crew.phase is Phase.FORWARD:
            self._order.append(unit)
            self._keep(None)
        alone = self._is_called_alone(unit)
        if alone:
            self.agreement.begin(Ask.CALL, unit.label, f"a forward of {unit.label} alone")
            self.backward.forwards.begin()
        self.obtain(unit)
        self.crew.enter("forward", unit)
        if alone:
            self.agreement.finish()
            self.backward.forwards.note(self.agreement.needed, "")
        else:
            self.agreement.look_ahead()

    def _after(self, unit: Unit, module: nn.Module, args: object, output: object) -> object:
        if self.bypassed():
            return None
        if id(sys.exc_info()[1]) != unit.handled:
            # Called while an exception leaves the forward. Inside the root's that is the root's to
            # settle, and activation checkpointing ends its recomputations by one.
            if self.crew.phase is Phase.IDLE and not inside_backward():
                unit.passage.forget()
                self.crew.release(unit)
            return None
        if unit.state is not State.GATHERED:
            return None
        self.crew.leave(unit)
        output = unit.hand_out(args, output)
        watched = self._watch(unit, output)
        if self.crew.phase is Phase.BACKWARD:
            # Recomputed by activation checkpointing. Its backward follows soon, so it stays, but
            # gives way to the other units of a region that spans several.
            unit.in_use = unit is self.backward.current
            return output
        if watched and self.crew.phase is Phase.FORWARD and self.agreement.may_be_last:
            unit.uninstall()
            unit.in_use = False  # it keeps its memory only as long as nobody needs it
            self._keep(unit)
        else:
            self.crew.release(unit)
        return output

    def _keep(self, unit: Unit | None) -> None:
        """Let ``unit`` stay for backward, which needs it first, in place of another."""
        kept, self._kept = self._kept, unit
        if kept is not None and kept is not unit and not kept.in_use:
            self.crew.release(kept)

    def _watch(self, unit: Unit, output: object) -> bool:
        """Have backward announce itself when it reaches ``output``; whether it can."""
        own = unit.passage.leave(output)
        for index, tensor in enumerate(own):
            reached = partial(self.backward.reached, unit, index, self.backward.forwards.current)
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        return bool(own)

    def _is_called_alone(self, unit: Unit) -> bool:
        """Whether ``unit``'s module was called outside of the root's forward."""
        outside = self.crew.phase is Phase.IDLE and not inside_backward()
        return outside and not any(u.in_use and u.encloses(unit) for u in self.units)

    # --- units -----------------------------------------------------------------------------------

    def obtain(self, unit: Unit) -> None:
        """Have the whole parameters in the modules."""
        # In backward the old values stay, so that autograd refuses the graph that was made of them.
        if unit.outdated and self.crew.phase is not Phase.BACKWARD:
            self.crew.reshard(unit)
        if unit.state is State.SHARDED or self.agreement.is_ahead(unit):
            self.agreement.need(unit)
        self.crew.wait(unit)
        unit.install()
        unit.in_use = True

    def renew(self) -> None:
        """Start gathering updated shards of units that stay whole, in the next forward's order."""
        in_order = dict.fromkeys((self.root, *self._order, *self.units))
        resident = [unit for unit in in_order if unit.strategy.resident]
        due = [u for u in resident if u.outdated or u.state is State.SHARDED]
        if not due:
            return
        if self.backward.raised:
            self.reset()
        for unit in due:
            self.crew.reshard(unit)
            if unit.strategy.replicated:  # every rank has made the same update
                self.crew.gather(unit)
        due = [unit for unit in due if unit.state is State.SHARDED]
        if not due:
            return
        about = " ".join(unit.label for unit in due)
        self.agreement.begin(Ask.RENEW, about, "a gather of updated parameters")
        for unit in due:
            if unit.state is State.SHARDED:  # not gathered for another rank's sake meanwhile
                self.agreement.need(unit)
        self.agreement.finish()

    def _forget_last_forward(self) -> None:
        """Free what a forward without a backward has left gathered, or has an old value."""
        for unit in self.units:
            unit.in_use = False
            if unit.outdated:
                self.crew.reshard(unit)
        self.renew()  # what has not been since the step: another library's optimizer took it

    def parameters(self) -> list[Sharded]:
        """Every sharded parameter, in the order of the units."""
        return [param for flat in self.flats for param in flat.params]

    def reset(self, strayed: bool = False) -> None:
        """Bring every unit back to SHARDED after an exception, and drop the gradients.

        The other ranks may be in the middle of the forward or backward, so this one takes part in
        what is left of it, without gradients, and tells them.

        Args:
            strayed: the exception is that backward took another way than before.
        """
        self.backward.abandon(strayed)
        self.reducer.abandon()
        self.agreement.abandon()
        for unit in self.units:
            self.crew.release(unit)
        self.crew.turn_to(Phase.IDLE)

    # --- what may be called now ------------------------------------------------------------------

    def bypassed(self) -> bool:
        """Whether the modules hold whole parameters, so that there is nothing to gather."""
        if self.whole and torch.is_grad_enabled():
            raise StateError(
                "the model was called with gradients enabled inside zshard.full_params: gradients "
                "of whole parameters are lost. Call it under torch.no_grad(), or outside."
            )
        return self.whole

    def require_values(self, what: str) -> None:
        """Raise StateError, on every rank, if ``what`` would use parameters without values."""
        if self.unusable:
            raise StateError(f"{what} is refused: {self.unusable}")

    def begin_call(self, what: str, *, unusable_ok: bool = False) -> None:
        """Make sure that all ranks make the same collective call, after the same changes.

        Args:
            unusable_ok: the call is one that brings valid values.

        Raises:
            MismatchError: on every rank, if they do not.
            StateError: inside a forward or backward; if the parameters hold no valid values.
        """
        if not unusable_ok:
            self.require_values(what)
        if self.backward.raised:
            self.reset()
        if self.crew.phase is not Phase.IDLE:
            raise StateError(
                f"{what} can only be called between steps, and the model is "
                f"{self.crew.phase.value}. If an exception has left it there, call "
                "zshard.reset(model) first."
            )
        word = self.updates.word()
        words = self.agreement.begin(Ask.CALL, what, what, gathers=False, word=word)
        if not unusable_ok:
            self.updates.check(words)
