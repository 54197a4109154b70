"""The order of events of a training step: which unit is gathered, freed and reduced when.

[Note: one step]
Forward, for each unit as its module is called: wait for its gather, start the next unit's, compute,
reshard. The root, which encloses all others, stays gathered until the end of backward, and the last
unit of forward until backward, which needs it first, is done with it. Backward, as the gradient
reaches a unit's output: reshard the unit before, wait, start the gather of the next one in reverse
order, compute; as its last gradient is there: reshard, pack, reduce. At the end: reduce what is
left. What comes next is known from the last time, see [Note: one agreed order]. In the code:

    a unit's forward    ForwardHooks._pre_forward: Schedule.obtain (Agreement.need ->
                        Executor.gather -> Unit.gather -> Comm.all_gather; Executor.wait;
                        Unit.install), and Agreement.look_ahead, which gathers the next unit
    after it            ForwardHooks._post_forward: Executor.release -> Unit.reshard
    backward is there   Backward.reached, a hook of the unit's outputs: as before a forward
    its last gradient   FullBuffer's hooks of leaves -> Unit.leaf_grad_arrived ->
                        Backward.leaf_grad_arrived: Agreement.ready -> Executor.reduce ->
                        Reducer.reduce -> PendingReduction
    end of backward     Backward._finish -> Executor.end_reductions -> Reducer.finish;
                        Reducer.read_outcome where anybody asks
    step                FusedOptimizer.step: Bucket -> ops.adamw_; Flat.updated; Schedule.renew
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .comm import Comm
from .errors import StateError
from .param import Sharded
from .precision import Precision
from .step.agreement import Agreement
from .step.backward import Backward
from .step.debts import owe
from .step.executor import Executor
from .step.forward import ForwardHooks
from .step.meeting import Intent
from .step.methods import Methods
from .step.module_buffers import ModuleBuffers
from .step.outcome import Ending
from .step.reduction import Reducer
from .step.updates import Updates
from .structure import Structure
from .training_state import TrainingState, inside_backward, modules_called
from .unit import State, Unit
from .units.kept_views import KeptViews
from .units.pool import Pool

_LIVE: weakref.WeakKeyDictionary[Schedule, None] = weakref.WeakKeyDictionary()


def live() -> list[Schedule]:
    """Those of all wrapped models, made at once: other threads may wrap more meanwhile."""
    return [schedule for each in _LIVE.keyrefs() if (schedule := each()) is not None]


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
        # In this order: each is made with those before it that it uses.
        self.model, self.units, self.comm, self.pool = model, tuple(units), comm, pool
        self.flats = tuple(flat for unit in units for flat in unit.flats)
        self.precision, self.root, self.device = precision, units[0], device
        self.updates = Updates(self.flats, comm)
        self.reducer = Reducer(self.flats, comm, pool, self.updates, device)
        self.totals = self.reducer.totals
        callable_alone = [(unit.name, unit.module) for unit in units]
        self.module_buffers = ModuleBuffers(callable_alone, comm)
        self.structure = Structure(callable_alone)
        self.executor = Executor(units, comm, self.reducer)
        self.agreement = Agreement(units, comm, prefetch, self.executor, self.reset)
        self._used: dict[Unit, bool] = {}  # at least those in use
        self.whole = False  # True inside full_params: the modules hold whole parameters
        # Why the parameters hold no valid values, and the remedy; alike on every rank. "" if valid.
        self.unusable = ""
        self.lacks_group = False  # whether it runs on one rank as there was no process group
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # zshard's own
        self.methods = Methods(self)
        self.kept_views = KeptViews(model, units, pool)
        self.backward = Backward(self)
        for unit in self.units:
            for flat in unit.flats:
                flat.belong_to(unit, self)
        self.forward = ForwardHooks(self)
        _LIVE[self] = None

    # --- units -----------------------------------------------------------------------------------

    def obtain(self, unit: Unit) -> None:
        """Gather ``unit``, wait, and put its whole parameters into the modules."""
        # In backward the old values stay, so that autograd refuses the graph that was made of them.
        if unit.outdated and self.executor.state is not TrainingState.BACKWARD:
            self.executor.reshard(unit)
        if unit.state is State.SHARDED or unit in self.agreement.prefetched:
            self.agreement.need(unit)
            self.executor.await_readers(unit)
        self.executor.wait(unit)
        self._used[unit] = True
        unit.begin_use()

    def in_use_beside(self, unit: Unit) -> list[Unit]:
        """Units in use that are neither ``unit`` nor around it nor inside."""
        self._used = {used: True for used in self._used if used.in_use}
        return [
            used
            for used in self._used
            if used is not unit and not used.encloses(unit) and not unit.encloses(used)
        ]

    def renew(self, behind_step_on: Iterable[torch.Tensor] | None = None) -> None:
        """Start gathering updated shards of units that stay whole, in the next forward's order.

        Args:
            behind_step_on: the parameters of an optimizer. Where others have gradients, too, their
                step is to come, and it or the next forward renews the units.
        """
        in_order = dict.fromkeys((self.root, *self.forward.order, *self.units))
        due = [unit for unit in in_order if unit.strategy.resident and unit.outdated]
        if not due or (behind_step_on is not None and not self.totals.covers(behind_step_on)):
            return
        for unit in due:
            self.executor.reshard(unit)
            if unit.strategy.replicated:  # every rank has made the same update
                self.executor.gather(unit)
        due = [unit for unit in due if unit.state is State.SHARDED]
        if not due:
            return
        about, label = " ".join(unit.label for unit in due), "a gather of updated parameters"
        with self.comm.awaited(label):
            self.agreement.begin(Intent.RENEW, about, label)
            for unit in due:
                if unit.state is State.SHARDED:  # not gathered for another rank's sake meanwhile
                    self.agreement.need(unit)
            self.agreement.finish()

    def parameters(self) -> list[Sharded]:
        """Every sharded parameter, in the order of the units."""
        return [param for flat in self.flats for param in flat.params]

    def put_sharded(self) -> None:
        """Put the sharded parameters back into the modules, where whole ones were lent."""
        for unit in self.units:
            unit.put_params({flat: flat.params for flat in unit.flats})

    def reset(self, ending: Ending = Ending.RAISED) -> None:
        """Reshard every unit after an exception, and drop the gradients.

        The other ranks may be in the middle of the forward or backward, so this one takes part in
        what is left of it, without gradients, and tells them.

        Args:
            ending: of the backward, if one is under way.
        """
        self.forward.alone.leave_unseen()
        self.backward.abandon(ending)
        self.reducer.abandon()
        self.agreement.abandon()
        for unit in self.units:
            self.executor.drop(unit)
            unit.give_slot_back()  # if the exception came as it was about to be gathered
        self.executor.enter_state(TrainingState.IDLE)

    # --- what may be called now ------------------------------------------------------------------

    def bypassed(self) -> bool:
        """Whether the modules hold whole parameters, so that there is nothing to gather.

        Raises:
            StateError: if so, and the script has called them with gradients enabled. (A forward may
                enable them for itself, to make forces.)
        """
        if self.whole and torch.is_grad_enabled() and not self._called_inside():
            raise StateError(
                "the model was called with gradients enabled inside zshard.full_params: gradients "
                "of whole parameters are lost. Call it under torch.no_grad(), or outside."
            )
        return self.whole

    def _called_inside(self) -> bool:
        """Whether what is called now is so in a method, or in a call of another unit, or itself.

        Of this model, or of another one that is inside ``full_params``, too.
        """
        whole = [schedule for schedule in live() if schedule.whole]
        modules = {unit.module for schedule in whole for unit in schedule.units}
        in_method = any(schedule.methods.running for schedule in whole)
        # Of which a recomputation has none on its stack, where autograd has a thread of its own.
        recomputed = inside_backward() and self.executor.state is TrainingState.IDLE
        return in_method or recomputed or sum(each in modules for each in modules_called()) > 1

    def require_values(self, what: str) -> None:
        """Raise StateError, on every rank, if ``what`` would use parameters without values."""
        if self.unusable:
            raise StateError(f"{what} is refused: {self.unusable}")

    def require_idle(self, what: str) -> None:
        """Raise StateError inside a forward or backward."""
        if self.executor.state is not TrainingState.IDLE:
            raise StateError(
                f"{what} can only be called between steps, and the model is "
                f"{self.executor.state.value}. If an exception has left it there, call "
                "zshard.reset(model) first."
            )

    @contextmanager
    def before_call(self, what: str) -> Iterator[None]:
        """A context behind which every rank comes to ``begin_call(what)``.

        One that an exception leads past it comes there late; see debts.py.
        """
        try:
            yield
        except BaseException:
            if self.comm.world_size > 1:
                owe(self.agreement, self.comm, what)
            raise

    def begin_call(
        self,
        what: str,
        *,
        unusable_ok: bool = False,
        in_modules: bool = False,
        buffers: bool = False,
    ) -> None:
        """Make sure that all ranks make the same collective call, after the same changes.

        Args:
            unusable_ok: the call is one that brings valid values.
            in_modules: it puts others into the modules in the place of the sharded parameters.
            buffers: it shows persistent buffers, which are those of rank 0 from here on.

        Raises:
            MismatchError: on every rank, if they do not, or have other ``buffers``.
            StateError: inside a forward or backward; if the parameters hold no valid values; with
                ``in_modules``, if a parameter was replaced.
        """
        if not unusable_ok:
            self.require_values(what)
        if self.backward.raised or self.forward.alone.leave_unseen():
            self.reset()
        self.require_idle(what)
        if in_modules:
            for unit in self.units:
                unit.require_parameters()
        tally, ask = self.updates.tally(), buffers and self.module_buffers.ask("")
        messages = self.agreement.begin(
            Intent.CALL, what, what, gathers=False, tally=tally, buffers=ask
        )
        if not unusable_ok:
            self.updates.check([message.tally for message in messages])
        if any(message.buffers for message in messages):
            self.module_buffers.broadcast(self.executor.step)
