"""The order of events of a training step: which unit is gathered, freed and reduced when.

[Note: one step]
Forward, for each unit as its module is called: wait for its gather, start the next unit's, compute,
reshard. The root, which encloses all others, stays gathered until the end of backward, and so does
the last unit of forward, which backward needs first. Backward, as the gradient reaches a unit's
output: reshard the unit before, wait, start the gather of the next one in reverse order, compute;
as its last gradient is there: reshard, pack, reduce. At the end: reduce what is left, in the fixed
order. The next unit is known from the order in which the last forward ran.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.autograd.profiler import record_function

from .comm import Comm, Tag
from .errors import StateError
from .param import Sharded
from .phase import EndOfBackward, Phase, inside_backward
from .pool import Pool
from .precision import Precision
from .reduction import Reducer
from .structure import cast_floating
from .trace import Trace
from .unit import State, Unit


class HoldsStates(Protocol):
    """An optimizer that can say what it holds."""

    def state_bytes(self, schedule: Schedule) -> int:
        """Bytes of its states of one wrapped model."""


class Schedule:
    """Runs the units of one wrapped model.

    Args:
        units: the unit map, the root first.
        prefetch: how many units are gathered ahead.
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
        self.precision, self.prefetch = precision, prefetch
        self.root = units[0]
        self.reducer = Reducer(units, comm, pool, device)
        self.phase = Phase.IDLE
        self.step = 0
        self.sync = True  # False inside no_sync: gradients stay on the leaves
        self.whole = False  # True inside full_params: the modules hold whole parameters
        self.trace: Trace | None = None
        self.optimizers: weakref.WeakSet[HoldsStates] = weakref.WeakSet()  # zshard's own
        self._order: list[Unit] = []  # units as the last forward called them
        self._recorded: list[Unit] = []
        self._handled: BaseException | None = None  # around the forward under way
        self._end: weakref.ref[EndOfBackward] | None = None
        self._gathered: list[str] = []  # labels, since the last reduction: must agree on all ranks
        self._cursor = 0  # in _order: forward, the next entry; backward, the last one met
        self._current: Unit | None = None  # whose backward was announced last
        for unit in units:
            unit.on_leaf_grad = self._leaf_grad
            for flat in unit.flats:
                flat.schedule = self
            self._hook(unit)

    def _hook(self, unit: Unit) -> None:
        # First among the pre-hooks and last among those set before wrap, so that these find the
        # parameters gathered.
        is_root = unit is self.root
        before = self._root_before if is_root else self._before_hook(unit)
        after = self._root_after if is_root else self._after_hook(unit)
        # torch.compile breaks its graph at the hooks: communication is not for it to trace.
        disable = torch.compiler.disable
        before, after = disable(before), disable(after)  # type: ignore[no-untyped-call]
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        unit.module.register_forward_hook(after, always_call=is_root)

    def _before_hook(self, unit: Unit) -> Callable[..., None]:
        return lambda module, args, kwargs: self._before(unit, (args, kwargs))

    def _after_hook(self, unit: Unit) -> Callable[..., object]:
        return lambda module, args, output: self._after(unit, output)

    # --- forward ---------------------------------------------------------------------------------

    def _root_before(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if self._bypassed():
            return None
        if not inside_backward():
            if self.phase is not Phase.IDLE:  # the last forward or backward raised
                self.reset()
            self.phase, self._handled = Phase.FORWARD, sys.exc_info()[1]
            self._recorded, self._cursor = [], 0
            self._forget_last_forward()
        self.root.remember_inputs((args, kwargs))
        self._obtain(self.root)
        self.note("forward", self.root)
        self._prefetch_forward()
        if self.precision.cast_inputs and self.precision.compute is not None:
            cast = cast_floating((args, kwargs), self.precision.compute)
            return cast  # type: ignore[return-value]
        return None

    def _root_after(self, module: nn.Module, args: object, output: object) -> object:
        if self._bypassed():
            return None
        if self.phase is Phase.FORWARD and sys.exc_info()[1] is not self._handled:
            self.reset()  # called while an exception leaves forward
            return None
        if self.precision.output is not None:
            output = cast_floating(output, self.precision.output)
        if self.phase is Phase.BACKWARD:  # all of the model is being recomputed
            self._watch(self.root, output)
            return output
        self.root.check_unwritten()
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
            self._order = self._recorded
        if not self._watch(self.root, output):
            for unit in self.units:
                self._release(unit)
        # Between forward and backward, user code must meet the sharded parameters everywhere.
        self.root.uninstall()
        return output

    def _before(self, unit: Unit, inputs: object) -> None:
        if self._bypassed():
            return
        unit.remember_inputs(inputs)
        self._obtain(unit)
        self.note("forward", unit)
        if self.phase is Phase.FORWARD:
            self._recorded.append(unit)
            if self._cursor < len(self._order) and self._order[self._cursor] is unit:
                self._cursor += 1
            self._prefetch_forward()

    def _after(self, unit: Unit, output: object) -> object:
        if self._bypassed() or unit.state is not State.GATHERED:
            return None
        unit.check_unwritten()
        output = unit.copy_lent(output)
        watched = self._watch(unit, output)
        if self.phase is Phase.BACKWARD:
            # Recomputed by activation checkpointing. Its backward follows soon, so it stays, but
            # gives way to the other units of a region that spans several.
            unit.in_use = unit is self._current
            return output
        last = self.phase is Phase.FORWARD and self._cursor == len(self._order) == len(
            self._recorded
        )
        if watched and last:
            unit.uninstall()
            unit.in_use = False  # it keeps its memory only as long as nobody needs it
        else:
            self._release(unit)
        return output

    def _watch(self, unit: Unit, output: object) -> bool:
        """Have backward announce itself when it reaches ``output``; whether it can."""
        own = unit.own_outputs(output)
        for tensor in own:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._before_backward(unit)
            )
        return bool(own)

    def _prefetch_forward(self) -> None:
        for unit in self._order[self._cursor : self._cursor + self.prefetch]:
            self._prefetch(unit)

    # --- backward --------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit) -> None:
        """The gradient has reached an output of ``unit``: its backward is about to run."""
        self._begin_backward()
        if unit is self._current and unit.state is State.GATHERED:
            return  # another output of the same call
        self._current = unit
        for other in self.units[1:]:
            # Autograd runs nodes in the reverse of forward's order, so a unit beside this one has
            # nothing left to compute. One around it has; one inside may share its output tensor.
            if other.in_use and not (other is unit or other.encloses(unit) or unit.encloses(other)):
                self._release(other)
        self._obtain(unit)
        self.note("backward", unit)
        before = self._order[: self._cursor]
        if unit in before:
            self._cursor = len(before) - 1 - before[::-1].index(unit)
        for ahead in self._order[max(self._cursor - self.prefetch, 0) : self._cursor][::-1]:
            self._prefetch(ahead)

    def _begin_backward(self) -> None:
        if self.phase is Phase.BACKWARD:
            if not self.backward_raised:
                return
            self.reset()  # this is another backward
        if torch.is_grad_enabled():
            raise StateError(
                "backward(create_graph=True) through a wrapped model: the gradients that zshard "
                "reduces have no graph of their own. Differentiate twice before zshard.wrap."
            )
        self.phase = Phase.BACKWARD
        self._cursor, self._current = len(self._order), None
        for unit in self.units:
            unit.fired.clear()
            unit.in_use = False  # what forward has left gathered may go
        if self.root.state is State.GATHERED:
            self.root.install()  # a checkpointed region may be of the root's own modules
        if self.sync:
            self.reducer.start()
        engine = torch.autograd.Variable._execution_engine
        end = EndOfBackward(self.end_backward)
        engine.queue_callback(end)
        self._end = weakref.ref(end)  # autograd holds the callback for as long as it runs

    def _leaf_grad(self, unit: Unit) -> None:
        self._begin_backward()
        if self.sync and self.reducer.has_reduced(unit):
            raise StateError(
                f"unit {unit.label!r}: a parameter got another gradient after the unit's gradients "
                "had been reduced. It is used in several reentrant checkpoints; pass "
                "use_reentrant=False to torch.utils.checkpoint."
            )
        # The root's reduction is the last in any case, and nothing would hide it.
        if unit is self.root or not unit.all_fired:
            return
        if unit.may_free_early:
            self._release(unit)
        if self.sync:
            self.reducer.unit_done(unit, self._tag("reduce", unit), self.note)

    def end_backward(self) -> None:
        """Free every unit and complete the reductions."""
        for unit in self.units:
            self._release(unit)
        if not self.sync:
            for flat in self.reducer.flats:
                flat.grads.hold_back()
        else:
            self.reducer.finish(self._tag("reduce", self.root), self.note, self._gathered)
            self._gathered = []
            self.step += 1
        self.phase = Phase.IDLE

    # --- units -----------------------------------------------------------------------------------

    def _obtain(self, unit: Unit) -> None:
        if unit.outdated and self.phase is not Phase.BACKWARD:
            self._reshard(unit)
        if unit.state is State.SHARDED:
            self._gather(unit)
        if unit.state is State.GATHERING:
            self.note("wait", unit)
            unit.wait()
        unit.install()
        unit.in_use = True

    def _gather(self, unit: Unit) -> None:
        self.note("gather", unit)
        self._gathered.append(unit.label)
        unit.gather(self._tag("gather", unit), move=self.phase is not Phase.BACKWARD)

    def _prefetch(self, unit: Unit) -> None:
        if unit.can_prefetch():
            self._gather(unit)

    def _release(self, unit: Unit) -> None:
        if unit.strategy.resident:
            unit.uninstall()
            unit.in_use = False
        else:
            self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if unit.state is not State.SHARDED:
            self.note("reshard", unit)
            unit.reshard()

    def renew(self) -> None:
        """After a step: start gathering the updated shards of units that stay whole.

        In the order of the forward that they hide under; each unit waits for its own.
        """
        for unit in dict.fromkeys((self.root, *self._order, *self.units)):
            if unit.strategy.resident and (unit.outdated or unit.state is State.SHARDED):
                self._reshard(unit)
                self._gather(unit)

    def _forget_last_forward(self) -> None:
        """Free what a forward without a backward has left gathered, or has an old value."""
        for unit in self.units:
            unit.in_use = False
            if unit.outdated:
                self._reshard(unit)
        self.renew()  # what has not been since the step: another library's optimizer took it

    def parameters(self) -> list[Sharded]:
        """Every sharded parameter, in the order of the units."""
        return [param for unit in self.units for flat in unit.flats for param in flat.params]

    @property
    def backward_raised(self) -> bool:
        """Whether the last backward ended in an exception, and nothing was run since."""
        return self.phase is Phase.BACKWARD and (self._end is None or self._end() is None)

    def require_gradients(self) -> None:
        """Take in what the last backward's reduction said.

        Raises:
            StateError: if it ended in an exception, so that only some gradients are there.
        """
        if self.backward_raised:
            raise StateError(
                "the last backward raised an exception, and its gradients are incomplete. Run it "
                "again, or skip the step: zshard.reset(model), then zero_grad()."
            )
        self.reducer.settle()

    def reset(self) -> None:
        """Bring every unit back to SHARDED after an exception, and drop unfinished gradients."""
        self.reducer.abandon()
        for unit in self.units:
            self._release(unit)
            for flat in unit.flats:
                for leaf in flat.leaves:
                    leaf.grad = None
        self.phase, self._current = Phase.IDLE, None

    # --- small things ----------------------------------------------------------------------------

    def _bypassed(self) -> bool:
        """Whether the modules hold whole parameters, so that there is nothing to gather."""
        if self.whole and torch.is_grad_enabled():
            raise StateError(
                "the model was called with gradients enabled inside zshard.full_params: gradients "
                "of whole parameters go nowhere. Call it under torch.no_grad(), or outside."
            )
        return self.whole

    def _tag(self, phase: str, unit: Unit) -> Tag:
        return Tag(self.step, phase, unit.label)

    def note(self, phase: str, unit: Unit) -> None:
        """Tell the trace, and the profiler, that ``phase`` begins for ``unit``."""
        if self.trace is not None:
            self.trace.add(phase, unit.label)
        if torch._C._autograd._profiler_enabled():
            with record_function(f"zshard::{phase} {unit.label}"):
                pass
