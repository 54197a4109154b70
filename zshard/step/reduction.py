"""Gradients: packed and reduced unit by unit, in the order that the ranks have agreed on.

Order of events for each trainable flat buffer: pack (one pass over the gradients, which are freed),
exchange, and one pass that sums the ranks' chunks in rank order, accumulates, and leaves the sum of
squares and a non-finite flag (pending_reduction.py). An exchange is in flight under the next unit's
backward, until its buffer is needed; on CPU, until the next one begins. After the last one a small
all-reduce tells every rank what came out (outcome.py): the global sum of squares, whether anything
is not finite, which parameters have a gradient on any rank, and which ranks' backward has raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch

from ..comm import Comm
from ..errors import StateError
from ..tag import Tag
from ..transports.refusal import attempt, raise_together
from ..unit import Unit
from ..units.flat import Flat
from ..units.pool import Pool, Scratch
from .outcome import Ending, Outcome, OutcomeSum
from .pending_reduction import PendingReduction, ReduceBuffers
from .totals import Totals
from .updates import Updates

Doing = Callable[[str, Unit], AbstractContextManager[None]]  # ``Executor.doing``


class Reducer:
    """Reduces the gradients of ``flats``, all that a model has, into their shards."""

    def __init__(
        self,
        flats: Sequence[Flat],
        comm: Comm,
        pool: Pool,
        updates: Updates,
        device: torch.device,
    ) -> None:
        self._flats = flats
        self.trained_flats: list[Flat] = []  # those with anything to be trained
        self._comm, self._pool, self._updates = comm, pool, updates
        self.on_strayed: Callable[[], None] = lambda: None  # set by the backward
        self._in_flight: list[PendingReduction] = []  # that use reduce buffers, in order
        self._apart: PendingReduction | None = None  # the last that uses no reduce buffer
        self._pending: list[PendingReduction] = []  # of this backward
        # Views of the pool's memory and of the gradients', either of which changes only where
        # ``find_trained`` empties these.
        self._buffers: dict[Flat, ReduceBuffers] = {}
        self._landing: dict[Flat, ReduceBuffers] = {}  # see ``landing_in``
        # Of every flat buffer, whether trained or not: the sum of squares, the non-finite flag.
        self._stats = torch.zeros(len(self._flats), 2, dtype=torch.float64, device=device)
        self._stats_of = dict(zip(self._flats, self._stats.unbind(), strict=True))
        self._present: dict[Flat, list[bool]] = {}
        self._ending = Ending.WELL  # of the last backward
        self._outcome: OutcomeSum | None = None  # until ``read_outcome`` has taken it in
        self.totals = Totals(self._flats, self.read_outcome)
        self.find_trained()

    def find_trained(self) -> None:
        """Find out what there is to reduce: at first, and after parameters were (un)frozen."""
        self.trained_flats = [flat for flat in self._flats if flat.requires_grad]
        self._stats.zero_()
        self._buffers.clear()
        self._landing.clear()
        self._pool.reserve_scratch(scratch_sizes(self.trained_flats, self._comm))
        for flat in self._flats:
            if not flat.requires_grad and not any(flat.grads.present):
                flat.grads.free()

    def make_room(self) -> None:
        """Make the reduce buffers if they are shared memory, which all ranks have to make together.

        Raises:
            Error: on every rank, if one of them has not enough memory; the next backward tries
                again.
        """
        if not (self._comm.shards.in_memory and self._pool.lacks_scratch):
            return
        tag = Tag(None, "backward", about="memory")
        failure, told = attempt(self._pool.make_scratch, self._comm, tag)
        if told:
            self._pool.drop_scratch()  # some ranks may have made what others have not
            raise_together(failure, told, self._comm.global_ranks)

    # --- one backward ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a backward; the outcome of the last one has been read."""
        self._present.clear()

    def finish(self, tag: Tag, ending: Ending) -> None:
        """End a backward: complete the reductions, and start telling the ranks what came out."""
        while self._in_flight:
            self._in_flight.pop(0).land()
        if self._apart is not None:
            self._apart.land()  # and with it those before it on the reduce lane
            self._apart = None
        while self._pending:
            self._pending[0].wait()
            self._pending.pop(0)
        self._ending = ending
        # Of those no rank has a gradient, as ``Pass`` says. (Where there are none at all, nobody
        # takes the sums in, and torch.func lets nobody write them.)
        left = [stats for flat, stats in self._stats_of.items() if flat not in self._present]
        if self._present and left:
            torch._foreach_zero_(left)
        none = {flat: [False] * len(flat.names) for flat in self.trained_flats}
        present = chain.from_iterable((none | self._present).values())
        stats = self._stats.sum(0)
        self._outcome = OutcomeSum(stats, ending, present, self._comm)
        self._outcome.start(tag._replace(about="norm"))

    def read_outcome(self) -> None:
        """Read the result of the last backward's all-reduce, if that has not been done.

        Raises:
            StateError: if the backward has raised an exception on another rank.
        """
        if self._outcome is None:
            return
        self._outcome.wait()
        found, self._outcome = self._outcome.outcome(), None
        if self._present:  # else that backward has made no gradients, and none have changed
            self.totals.take(found)
        left_out = set(self._flats) - set(self.trained_flats)  # frozen as the backward began
        if any(any(flat.grads.present) for flat in left_out):
            self.totals.forget()  # what came out is not of all gradients
        present = iter(found.present)
        for flat in self.trained_flats:
            flat.grads.arrived = [next(present) for _ in flat.names]
            flat.grads.present = [
                new or had for new, had in zip(flat.grads.arrived, flat.grads.present, strict=True)
            ]
        if found.strays > 0:
            self.on_strayed()
        if found.failures > 0:
            self._drop(found)

    def run_hooks(self) -> None:
        """Call the users' post-accumulate hooks, now that reduced gradients can be read."""
        hooked = [
            (flat, index)
            for flat in self.trained_flats
            for index, hooks in enumerate(flat.hooks)
            if hooks.after_reduction
        ]
        if not hooked:
            return
        self.read_outcome()
        for flat, index in hooked:
            if flat.grads.arrived[index]:
                for hook in flat.hooks[index].after_reduction.in_order():
                    hook(flat.params[index])

    def drop(self) -> None:
        """Forget every gradient, and what was known of them."""
        for flat in self._flats:
            flat.grads.drop()
        self.totals.forget()
        self._updates.forget_gradients()

    def _drop(self, found: Outcome) -> None:
        self.drop()
        if not self._ending.without_gradients:
            single = found.failures == 1
            who = self._comm.name(found.failed_ranks) if single else f"{found.failures} ranks"
            raise StateError(
                f"on {who} a backward of this step (the last one, or one inside no_sync) raised an "
                "exception, or took another way than before. The step's gradients are dropped on "
                "every rank. Repeat the step."
            )

    def reduce(self, unit: Unit, tag: Tag, doing: Doing) -> None:
        """Pack what gradients there are of ``unit``, and start reducing them."""
        # Here, as a backward that reduces nothing leaves the factor to the optimizer.
        self.totals.apply_scale()
        for flat in unit.flats:
            if flat.requires_grad:
                # The other ranks come to this as well: who leaves it has to say so.
                with self._comm.shards.attending():
                    buffers = self._buffers_of(flat)
                    # In order, up to the last one that is in the way: another may lie before it.
                    while not all(pending.leaves_free(buffers) for pending in self._in_flight):
                        self._in_flight.pop(0).land()
                    self._comm.reclaim(buffers.packed, tag)
                    with doing("pack", unit):
                        self._present[flat] = flat.grads.ready()
                        flat.grads.pack(buffers.packed, buffers.scale_packed)
                    with doing("reduce", unit):
                        stats = self._stats_of[flat]
                        pending = PendingReduction(flat, buffers, stats, self._comm, tag)
                    if buffers.apart:
                        self._apart = pending
                    else:
                        self._in_flight.append(pending)
                    self._pending.append(pending)

    def _buffers_of(self, flat: Flat) -> ReduceBuffers:
        if (buffers := self._buffers.get(flat)) is None:
            index = self.trained_flats.index(flat)
            buffers = self._buffers[flat] = ReduceBuffers.of(flat, self._comm, self._pool, index)
        if (room := flat.grads.room()) is None:
            return buffers
        if flat not in self._landing:
            self._landing[flat] = buffers.landing_in(room)
        return self._landing[flat]

    def abandon(self) -> None:
        """Forget a backward that did not finish; see [Note: after an exception] in backward.py."""
        for pending in self._pending:
            pending.abandon()
        self._forget_pending()

    def forget(self) -> None:
        """Drop all gradients, as all ranks do, and what is not known of them yet.

        The reduce buffers, too: some ranks may have made them larger, and others not yet.
        """
        self._forget_pending()
        self._outcome = None
        for flat in self._flats:
            flat.grads.drop_leaves()
        self.drop()
        self.totals.drop_scale()
        self._buffers.clear()
        self._landing.clear()
        self._pool.drop_scratch()

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._in_flight.clear()
        self._apart = None


def scratch_sizes(flats: Sequence[Flat], comm: Comm) -> dict[Scratch, int]:
    """Bytes of the reduce buffers that all of ``flats`` take turns in."""
    sizes = [ReduceBuffers.bytes_of(flat, comm) for flat in flats]
    names = sizes[0] if sizes else {}
    return {name: max(each[name] for each in sizes) for name in names}
