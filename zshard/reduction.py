"""Gradients: packed and reduced unit by unit, in one order on every rank.

Order of events for each trainable flat buffer: pack (one pass over the gradients, which are freed),
exchange, and one pass that sums the ranks' chunks in rank order, accumulates, and leaves the sum
of squares and a non-finite flag. One exchange is in flight at a time, under the next unit's
backward. After the last one a single small all-reduce tells every rank the global sum of squares,
whether anything is not finite, and which parameters have a gradient on any rank.

[Note: the desync guard]
Ranks that gather different units at the same time get wrong numbers without any error from the
backend. So the all-reduce also carries a 16-bit mark of the order of gathers, and its square: if
N times the sum of squares is not the square of the sum, the marks differ, and every rank knows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from . import ops
from .comm import Comm, Handle, Tag
from .errors import MismatchError
from .flat import Flat
from .param import Sharded
from .pool import Pool
from .streams import Mark, compute_waits
from .unit import Unit

Note = Callable[[str, Unit], None]


class _InFlight(NamedTuple):
    """A reduction whose exchange has been started."""

    flat: Flat
    stats: torch.Tensor  # (2,) float64: sum of squares, non-finite flag
    chunks: torch.Tensor  # (C, S) reduce dtype
    handle: Handle | None  # None at N = 1
    mark: Mark  # of the post-reduce pass, where that is already enqueued (CUDA)
    scale: float


class _Buffers(NamedTuple):
    """The two reduce buffers as one flat uses them."""

    packed: torch.Tensor  # (N * S,) reduce dtype
    sent: torch.Tensor  # the same as bytes
    chunks: torch.Tensor  # (C, S) reduce dtype; at N = 1 the packed gradients themselves
    received: torch.Tensor  # the same as bytes


class Reducer:
    """Reduces the gradients of ``units`` (the unit map, outermost first) into their shards."""

    def __init__(self, units: Sequence[Unit], comm: Comm, pool: Pool, device: torch.device) -> None:
        # Backward meets units in about the reverse of the unit map's order. The order is fixed, so
        # ranks that use different subsets of the units still issue the same collectives.
        self._order = [unit for unit in reversed(units) if unit.trainable]
        self.flats = [f for unit in self._order for f in unit.flats if f.requires_grad]
        self._comm, self._pool, self._device = comm, pool, device
        self._next = 0
        self._ready: set[Unit] = set()
        self._reduced: set[Unit] = set()
        self._in_flight: _InFlight | None = None
        self._buffers: dict[Flat, _Buffers] = {}
        self._stats = torch.zeros(len(self.flats), 2, dtype=torch.float64, device=device)
        self._present: list[bool] = []
        self._gathered: list[str] = []
        # (4 + parameters,) float64, being all-reduced: squares' sum, non-finite, guard, presence.
        self._summary: torch.Tensor | None = None
        self._summary_handle: Handle | None = None
        self._sum_of_squares: torch.Tensor | None = None  # 0-d float64, of all gradients
        self._non_finite: torch.Tensor | None = None  # 0-d float64, of the last reduction
        self.grad_scale: torch.Tensor | None = None  # (1,) fp32, still to be applied
        self.unscales = False  # whether grad_scale takes a loss scale away
        reduced = [f.layout.numel * f.dtypes.reduce.itemsize for f in self.flats]
        rows = [
            nbytes * comm.chunks(flat.dtypes.reduce) // comm.size
            for nbytes, flat in zip(reduced, self.flats, strict=True)
            if comm.size > 1
        ]
        pool.reserve_scratch(packed=max(reduced, default=0), chunks=max(rows, default=0))
        for flat in self.flats:
            flat.on_grad_query = self.settle
            flat.on_grad_access = self.apply_scale
            flat.on_grad_change = self.forget_norm

    # --- one backward ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a backward: what was left lazy from the last one is settled."""
        self.settle()
        if any(any(flat.has_grad) for flat in self.flats):
            self.apply_scale()
        self.grad_scale, self.unscales = None, False
        self._next = 0
        self._ready.clear()
        self._reduced.clear()
        self._present.clear()

    def unit_done(self, unit: Unit, tag: Tag, note: Note) -> None:
        """Reduce ``unit`` and those after it in the order that were only waiting for it."""
        self._ready.add(unit)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            following = self._order[self._next]
            self._reduce(following, tag._replace(unit=following.label), note)
            self._next += 1

    def has_reduced(self, unit: Unit) -> bool:
        """Whether ``unit``'s gradients of this backward have been packed already."""
        return unit in self._reduced

    def finish(self, tag: Tag, note: Note, gathered: Sequence[str]) -> None:
        """End a backward: reduce what is left, and start telling the ranks what came out.

        Args:
            gathered: labels of the units gathered since the last reduction, in order.
        """
        for unit in self._order[self._next :]:
            self.unit_done(unit, tag, note)
        self._land()
        # See [Note: the desync guard].
        self._gathered = list(gathered)
        mark = zlib.crc32("\n".join(gathered).encode()) & 0xFFFF
        told = torch.tensor([mark, mark * mark, *self._present], dtype=torch.float64)
        self._summary = torch.cat((self._stats.sum(0), told.to(self._device)))
        if self._comm.size > 1 and self.flats:
            tag = tag._replace(phase="reduce", unit="norm")
            self._summary_handle = self._comm.all_reduce(self._summary, tag)

    def settle(self) -> None:
        """Take in what the last backward's all-reduce said, if that has not been done."""
        if self._summary is None:
            return
        if self._summary_handle is not None:
            self._summary_handle.wait()
        summary, self._summary, self._summary_handle = self._summary, None, None
        self._sum_of_squares, self._non_finite = summary[:2]
        marks, squares, *present = summary[2:].tolist()
        if squares * self._comm.size != marks * marks:
            self._raise_desync()
        flags = iter(present)
        for flat in self.flats:
            flat.has_grad = [next(flags) > 0 or had for had in flat.has_grad]

    def _raise_desync(self) -> None:
        """Say which units the ranks gathered instead of each other's; every rank comes here."""
        everyone = self._comm.all_gather_object(self._gathered, Tag(0, "reduce", "norm"))
        rows = list(zip_longest(*everyone, fillvalue="nothing"))  # type: ignore[call-overload]
        first = next(row for row in rows if len(set(row)) > 1)
        seen = ", ".join(f"rank {rank} {label!r}" for rank, label in enumerate(first))
        for flat in self.flats:
            flat.has_grad = [False] * len(flat.has_grad)
        raise MismatchError(
            f"the ranks gathered different units at the same time: {seen}. The last forward and "
            "backward are wrong on every rank, and their gradients are dropped. Every rank has to "
            "run the same units in the same order."
        )

    def _reduce(self, unit: Unit, tag: Tag, note: Note) -> None:
        self._reduced.add(unit)
        for flat in unit.flats:
            if flat.requires_grad:
                self._land()  # its buffers are used again
                note("pack", unit)
                self._present += flat.present()
                flat.grad_buffer()  # allocated here, on the compute stream
                buffers = self._buffers_of(flat)
                # fp32 is divided before the sum, as DDP does, so that N = 2 has DDP's bits; 16-bit
                # gradients after it, in fp32, so that the division rounds nothing away.
                early = flat.dtypes.reduce in (torch.float32, torch.float64)
                mean = 1.0 / self._comm.size
                flat.pack(buffers.packed, mean if early else 1.0)
                note("reduce", unit)
                self._exchange(flat, buffers, 1.0 if early else mean, tag)

    def _exchange(self, flat: Flat, buffers: _Buffers, scale: float, tag: Tag) -> None:
        stats = self._stats[self.flats.index(flat)]
        handle = None
        if self._comm.size > 1 and flat.layout.numel > 0:
            handle = self._comm.exchange(buffers.received, buffers.sent, flat.dtypes.reduce, tag)
        flight = _InFlight(flat, stats, buffers.chunks, handle, None, scale)
        if self._device.type == "cuda":  # nothing blocks the host, so the lane goes straight on
            with self._comm.reduce_lane.after_compute():
                self._post(flight)
            flight = flight._replace(mark=self._comm.reduce_lane.mark())
        self._in_flight = flight

    def _post(self, flight: _InFlight) -> None:
        """The post-reduce pass: sum in rank order, accumulate, sum of squares, non-finite flag."""
        if flight.handle is not None:
            flight.handle.wait()
        accumulate = flight.flat.prepare_sum()
        acc = flight.flat.grad_buffer()
        ops.reduce_(acc, flight.chunks, flight.scale, accumulate, flight.stats)

    def _land(self) -> None:
        """Complete the reduction in flight."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        if self._device.type == "cuda":
            compute_waits(flight.mark)
        else:
            self._post(flight)

    def _buffers_of(self, flat: Flat) -> _Buffers:
        """The views of the two reduce buffers that ``flat`` uses, made once."""
        if (buffers := self._buffers.get(flat)) is None:
            dtype, size = flat.dtypes.reduce, flat.layout.shard_size
            sent = self._pool.scratch("packed", flat.layout.numel * dtype.itemsize)
            packed, received, rows = sent.view(dtype), sent, 1
            if self._comm.size > 1:
                rows = self._comm.chunks(dtype)
                received = self._pool.scratch("chunks", rows * size * dtype.itemsize)
            chunks = received.view(dtype).view(rows, size)
            buffers = self._buffers[flat] = _Buffers(packed, sent, chunks, received)
        return buffers

    def abandon(self) -> None:
        """Forget a backward that did not finish; its exchange still ends before the buffers do."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            compute_waits(flight.mark)
            if flight.handle is not None:
                flight.handle.wait()
        self._next = len(self._order)

    # --- what is known of the gradients ----------------------------------------------------------

    @property
    def sum_of_squares(self) -> torch.Tensor | None:
        """0-d float64, of all gradients on all ranks; None if they were changed since."""
        self.settle()
        return self._sum_of_squares

    @property
    def non_finite(self) -> torch.Tensor | None:
        """0-d float64, not 0 if any gradient is not finite; None if they were changed since."""
        self.settle()
        return None if self._sum_of_squares is None else self._non_finite

    def covers(self, params: Iterable[Sharded]) -> bool:
        """Whether ``params`` include every parameter that has a gradient."""
        given = {id(param) for param in params}
        return all(
            id(param) in given
            for flat in self.flats
            for param, present in zip(flat.params, flat.has_grad, strict=True)
            if present
        )

    def apply_scale(self) -> None:
        """Multiply the gradients by the factor that zshard's optimizers apply on the fly."""
        self.settle()
        if self.grad_scale is not None:
            for flat in self.flats:
                if any(flat.has_grad):
                    flat.grad_buffer().mul_(self.grad_scale)
            self.grad_scale, self.unscales = None, False

    def scale_by(self, factor: torch.Tensor, *, unscales: bool = False) -> None:
        """Have the gradients multiplied by ``factor``, 0-d fp32, before anybody sees them.

        Args:
            unscales: this is the inverse of a loss scale; see ``Flat.before_grad_access``.
        """
        if self._sum_of_squares is not None:
            # Here, not where the factor is applied: one rank may look at a gradient while the
            # others do not, and all have to agree on the bits of the next clip factor.
            self._sum_of_squares = self._sum_of_squares * factor.double() ** 2
        factor = factor.view(1)
        self.grad_scale = factor if self.grad_scale is None else self.grad_scale * factor
        self.unscales = self.unscales or unscales

    def forget_norm(self) -> None:
        """Note that gradients may have changed since the reduction."""
        self.settle()
        self._sum_of_squares = None
