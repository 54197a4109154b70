"""What a model takes on a rank, and sends, by arithmetic: the bytes that wrap would come to.

Of each flat buffer from its layout, dtypes and strategy, with the code that wrap itself lays out
with; no tensor is made. tests/test_plan.py holds it against what ``zshard.memory`` and
``zshard.stats`` count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from ..layout import Layout, aligned
from ..precision import Dtypes
from ..strategy import Strategy
from ..transports.groups import chunk_rows
from ..units.sizes import FlatSizes

# Optimizers by name, and how many states, in the dtype of the master, each has of an element.
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}


@dataclass(frozen=True)
class Holding:
    """Bytes on a rank that last from step to step; padding is part of each.

    Attributes:
        parameters: compute-dtype copies and send buffers, whole or sharded as the strategy says.
        master: beside the parameters; 0 where the parameters are it.
        padding: the part of parameters and master that belongs to no parameter.
    """

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    optimizer: int = 0
    padding: int = 0

    @property
    def states(self) -> int:
        """All of them together."""
        return self.parameters + self.gradients + self.master + self.optimizer

    def __add__(self, other: Holding) -> Holding:
        return Holding(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class FlatPlan(FlatSizes):
    """A flat buffer before it has any memory; see ``Flat``."""

    layout: Layout
    dtypes: Dtypes
    strategy: Strategy
    trained: bool

    def holding(self, states: int) -> Holding:
        """What the buffer takes on the last rank, which has the padding at the end.

        Args:
            states: of the optimizer for an element; see ``OPTIMIZERS``.
        """
        layout, dtypes, last = self.layout, self.dtypes, self.layout.world_size - 1
        owned = self.owned_by(last)
        copy = layout.whole if self.stays else owned
        spare, beside = layout.padding_in(copy), dtypes.beside_bytes
        reduced = self.grads_of(last).numel if self.trained else 0
        return Holding(
            parameters=copy.numel * dtypes.compute.itemsize,
            gradients=reduced * dtypes.reduce.itemsize,
            master=owned.numel * beside,
            optimizer=owned.numel * states * dtypes.master.itemsize if self.trained else 0,
            padding=spare * dtypes.compute.itemsize + layout.padding_in(owned) * beside,
        )

    @property
    def pack_bytes(self) -> int:
        """Bytes that packing its gradients reads and writes."""
        return self.full_bytes + self.packed_bytes

    def sum_bytes(self, *, nccl: bool) -> int:
        """Bytes that the sum after the exchange reads and writes."""
        size = self.layout.world_size
        rows = chunk_rows(size, self.dtypes.reduce, nccl=nccl) if size > 1 else 1
        written = rows > 1  # a single row is read where it stays
        return self.rows_bytes(rows + written)

    def update_bytes(self, states: int) -> int:
        """Bytes that the optimizer's pass reads and writes."""
        dtypes, owned = self.dtypes, self.owned_by(0).numel
        copy = 0 if dtypes.split or dtypes.compute == dtypes.master else dtypes.compute.itemsize
        each = dtypes.reduce.itemsize + 2 * (1 + states) * dtypes.master.itemsize
        return owned * (each + copy) if self.trained else 0

    def chunk_bytes(self, *, nccl: bool) -> int:
        """Bytes that it takes of the buffer for what the other ranks send."""
        size, reduce = self.layout.world_size, self.dtypes.reduce
        return self.rows_bytes(chunk_rows(size, reduce, nccl=nccl)) if size > 1 else 0


@dataclass(frozen=True)
class SharedBuffers:
    """Bytes that all units share; see pool.py."""

    full: int  # of the full buffers that are there at once
    reduce: int  # of the two reduce buffers


def slot_bytes(flats: Sequence[FlatPlan]) -> int:
    """What a unit takes of a full buffer; 0 where its whole parameters stay."""
    return sum(aligned(flat.full_bytes) for flat in flats if not flat.stays)


def buffers_of(units: Sequence[Sequence[FlatPlan]], slots: int, *, nccl: bool) -> SharedBuffers:
    """What gathered units and reductions take; the root's flats come first, in no slot."""
    root, *inner = [slot_bytes(flats) for flats in units]
    gathered = root + slots * max(inner, default=0)
    return SharedBuffers(gathered, reduce_buffers_of(chain(*units), nccl=nccl))


def reduce_buffers_of(flats: Iterable[FlatPlan], *, nccl: bool) -> int:
    """Bytes of the two buffers that reductions of ``flats``, one at a time, take."""
    trained = [flat for flat in flats if flat.trained]
    sizes = [(flat.packed_bytes, flat.chunk_bytes(nccl=nccl)) for flat in trained]
    return sum(max(column) for column in zip((0, 0), *sizes, strict=True))


@dataclass(frozen=True)
class Collective:
    """Collectives of a step that are alike."""

    op: str  # all_gather or reduce_scatter
    unit: str
    phase: str  # gather (before forward or backward), reduce, or step
    bytes: int  # that a rank sends in one of them: the textbook volume
    count: int  # of them in a step


def collectives_of(
    label: str, flats: Sequence[FlatPlan], gathers: int, *, reduced: bool
) -> list[Collective]:
    """The collectives of a unit in a step.

    Args:
        gathers: how often whole parameters are gathered where they do not stay.
        reduced: whether backward makes a gradient of what is trained.
    """
    found: list[Collective] = []
    for flat in flats:
        layout, strategy = flat.layout, flat.strategy
        others = layout.world_size - 1
        if others == 0 or layout.numel == 0:
            continue
        updated = reduced and any(each.trained for each in flats)
        phase, count = ("step", int(updated)) if strategy.resident else ("gather", gathers)
        if count > 0 and not strategy.replicated:
            sent = layout.shard_size * flat.dtypes.compute.itemsize * others
            found.append(Collective("all_gather", label, phase, sent, count))
        if flat.trained and reduced:
            sent = layout.shard_size * flat.dtypes.reduce.itemsize * others
            found.append(Collective("reduce_scatter", label, "reduce", sent, 1))
            if strategy.replicated:
                found.append(Collective("all_gather", label, "reduce", sent, 1))
    return found
