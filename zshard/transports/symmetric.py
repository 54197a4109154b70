"""Collectives over memory that the GPUs of one host share: torch's symmetric memory.

[Note: a collective over symmetric memory]
On its lane: a barrier, after which what every rank lends is complete; one kernel, which reads it
where it lies; a barrier, after which it may be written again. Nothing blocks the host. All gathers
are on one lane and all reductions on another, in one order on all ranks, and each lane has a
channel of barriers for itself. The kernel between the barriers of a reduction is the caller's sum.

A rank that does not come has the barriers of the others trap at the group's timeout, which ends
their CUDA contexts: later calls raise, and name what was called, not who was missing. Nor does one
come again that an exception has taken from between two barriers, out of a signal's handler say: its
next barrier would meet the others' one before, and what is read be torn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from .. import ops
from ..errors import WrapError
from ..layout import aligned
from ..streams import Mark, compute_waits, mark_here
from .groups import Ranks
from .messages import Work
from .neighbours import Missed, timeout_of

_Made = TypeVar("_Made")
# Channels of barriers. What is mailed is gathered on any lane, so beside what others lend.
_GATHERS, _REDUCTIONS, _MAIL = 0, 1, 2
# At least: a mapping of GPU memory is a multiple of 2 MiB, some of which torch keeps for signals.
_EXTENT_BYTES = (2 << 20) - (64 << 10)
_COPIED = torch.float32  # any dtype of the ops: a shard's bytes are copied, 64 or a multiple


class Extent(NamedTuple):
    """Memory that was allocated together.

    Attributes:
        rows: N x (nbytes,) uint8, of every rank, where this rank can read them.
        barrier: enqueues a meeting of all ranks, on a channel of its own.
    """

    rows: list[torch.Tensor]
    barrier: Callable[[int], None]


class Allocator(Protocol):
    """What makes extents."""

    def allocate(self, nbytes: int, ranks: Ranks) -> torch.Tensor:
        """This rank's row, of zeros."""

    def join(self, own: torch.Tensor, ranks: Ranks) -> Extent:
        """The extent of which ``own`` is this rank's row; all ranks call it together."""


class TorchAllocator:
    """torch.distributed._symmetric_memory."""

    def allocate(self, nbytes: int, ranks: Ranks) -> torch.Tensor:
        """See ``Allocator``."""
        from torch._C._distributed_c10d import _SymmetricMemory  # not every build has it

        # Not `torch.distributed._symmetric_memory.empty`, which may give part of what a pool holds.
        own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, ranks.device)
        return own.zero_()

    def join(self, own: torch.Tensor, ranks: Ranks) -> Extent:
        """See ``Allocator``."""
        from torch.distributed import _symmetric_memory  # loads much that only this needs

        group = ranks.group
        assert group is not None
        handle = _symmetric_memory.rendezvous(own, group)
        if handle is None:
            raise RuntimeError("torch's rendezvous has found no memory of the other ranks")
        rows = [handle.get_buffer(rank, own.shape, torch.uint8) for rank in range(ranks.size)]
        rows[ranks.rank] = own  # which has the memory live on
        milliseconds = round(timeout_of(group, ranks.device).total_seconds() * 1e3)
        return Extent(rows, lambda channel: handle.barrier(channel, milliseconds))


class _Part(NamedTuple):
    """What ``empty`` gave, in every rank's row of ``extent``."""

    extent: Extent
    begin: int  # byte
    whole: bool  # it is a full buffer, of which every rank lends its own shard


class _Attendance:
    """A context in which an exception leaves a collective half done: none is begun after it."""

    def __init__(self) -> None:
        self._failed = ""

    def __enter__(self) -> None:
        if self._failed:
            raise Missed(
                f"{self._failed} was raised on this rank between two barriers of an earlier one; "
                "start the processes anew, from the last checkpoint"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is not None and not self._failed:
            self._failed = kind.__name__


class SymmetricRanks(Ranks):
    """Ranks of one host whose GPUs read each other's memory; one for each model."""

    in_memory = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        allocator: Allocator | None = None,  # None: torch's
    ) -> None:
        super().__init__(group, device)
        self._allocator = allocator or TorchAllocator()
        self._parts: dict[int, list[_Part]] = {}  # by address of an extent, in order
        self._meeting = self._open = self._extend(_EXTENT_BYTES)  # whose barriers all use
        self._taken = 0  # of the extent with room for more
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}  # by address and bytes
        self._read: dict[int, Mark] = {}  # by address: when the last gather of it had been read
        self._mailbox: torch.Tensor | None = None  # for what was not made by `empty`
        self._attendance = _Attendance()

    # --- what is lent ----------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, *, whole: bool = False) -> torch.Tensor:
        """(numel,) that the other ranks can read. All ranks have to ask for the same."""
        nbytes = numel * dtype.itemsize
        needed = aligned(nbytes)
        extent, begin = self._open, self._taken
        if needed >= _EXTENT_BYTES:
            extent, begin = self._extend(needed), 0
        else:
            if begin + needed > _EXTENT_BYTES:
                extent, begin = self._extend(_EXTENT_BYTES), 0
            self._open, self._taken = extent, begin + needed
        own = extent.rows[self.rank]
        self._parts[own.data_ptr()].append(_Part(extent, begin, whole))
        return own[begin : begin + nbytes].view(dtype)

    def _extend(self, nbytes: int) -> Extent:
        own = self._together(nbytes, lambda: self._allocator.allocate(nbytes, self))
        extent = self._together(nbytes, lambda: self._allocator.join(own, self))
        self._parts[extent.rows[self.rank].data_ptr()] = []
        return extent

    def _together(self, nbytes: int, make: Callable[[], _Made]) -> _Made:
        """What ``make`` makes; an error on all ranks where it raises on one."""
        made, problem = [], ""
        try:
            made.append(make())
        except RuntimeError as error:
            problem = str(error) or type(error).__name__
        if (found := self.first_problem(problem)) is not None:
            who, what = found
            raise WrapError(
                f"{who} of {self.size}: no symmetric memory of {nbytes} bytes for comm='peer': "
                f"{what}. Every rank needs a GPU of its own on one host, which "
                "CUDA_VISIBLE_DEVICES does not hide from the others; or pass comm='group'."
            )
        return made[0]

    def sends(self, op: str) -> bool:
        """What is small, and what the host is told."""
        return op not in ("all_gather", "reduce_scatter")

    def attending(self) -> AbstractContextManager[None]:
        """See [Note: a collective over symmetric memory]."""
        return self._attendance

    def reclaim(self, lent: torch.Tensor) -> None:
        """Stall the compute stream until nobody reads ``lent`` any more."""
        with self._attendance:
            compute_waits(self._read.pop(lent.data_ptr(), None))

    def release(self, lent: torch.Tensor) -> None:
        """Say that this rank has read what others lend where it lends ``lent``."""
        with self._attendance:
            self._meeting.barrier(_REDUCTIONS)

    def give_back(self, lent: torch.Tensor) -> None:
        """Free an extent that ``lent`` has for itself; what is small stays."""
        if aligned(lent.nbytes) < _EXTENT_BYTES:
            return
        # Not there: a buffer that ranks do not read each other's of.
        if self._parts.pop(lent.untyped_storage().data_ptr(), None) is not None:
            for key in [key for key in self._views if key[0] == lent.data_ptr()]:
                del self._views[key]

    def rows_for_me(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """N x (S,): what every rank has packed for this one, in its ``packed`` (N * S,)."""
        part = self._find(packed)
        assert part is not None, "every buffer that is exchanged is made by `empty`"
        step = packed.nbytes // self.size
        rows = self._rows(part, packed, [self.rank * step] * self.size, step)
        return [row.view(packed.dtype) for row in rows]

    def _find(self, lent: torch.Tensor) -> _Part | None:
        """The part that ``lent`` lies in, if ``empty`` made it."""
        parts = self._parts.get(lent.untyped_storage().data_ptr())
        if not parts:
            return None
        begin = lent.data_ptr() - parts[0].extent.rows[self.rank].data_ptr()
        return parts[bisect_right(parts, begin, key=lambda part: part.begin) - 1]

    def _rows(
        self, part: _Part, lent: torch.Tensor, offsets: Sequence[int], nbytes: int
    ) -> list[torch.Tensor]:
        """N x (nbytes,): of every rank's row, from where ``lent`` begins in this one's."""
        rows = part.extent.rows
        begin = lent.data_ptr() - rows[self.rank].data_ptr()
        places = zip(rows, offsets, strict=True)
        return [row[begin + offset :][:nbytes] for row, offset in places]

    # --- collectives -----------------------------------------------------------------------------

    def start_gather(
        self, full: torch.Tensor, shard: torch.Tensor, *, lasting: bool
    ) -> Work | None:
        """Copy what every rank lends where this one lends ``shard`` (S,) into ``full`` (N * S,)."""
        with self._attendance:
            channel = _GATHERS
            if self._find(shard) is None:
                channel, shard = _MAIL, self._mail(shard)
            self._meeting.barrier(channel)
            ops.gather_cast_(full.view(_COPIED), self._shards(shard))
            self._meeting.barrier(channel)
            self._read[shard.data_ptr()] = mark_here(self.device)
        return None

    def _mail(self, shard: torch.Tensor) -> torch.Tensor:
        """A copy that the other ranks can read; they have read what was there before."""
        if self._mailbox is None or self._mailbox.nbytes < shard.nbytes:
            if self._mailbox is not None:
                self.give_back(self._mailbox)
            self._mailbox = self.empty(shard.nbytes, torch.uint8)
        return self._mailbox[: shard.nbytes].copy_(shard)

    def _shards(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """N x (S,): every rank's."""
        key = shard.data_ptr(), shard.nbytes
        if (found := self._views.get(key)) is None:
            part = self._find(shard)
            assert part is not None
            step = shard.nbytes if part.whole else 0
            offsets = [(rank - self.rank) * step for rank in range(self.size)]
            rows = self._rows(part, shard, offsets, shard.nbytes)
            found = self._views[key] = [row.view(_COPIED) for row in rows]
        return found

    def start_exchange(
        self, chunks: torch.Tensor, packed: torch.Tensor, dtype: torch.dtype
    ) -> Work | None:
        """Lend ``packed``; what others lend is read where it lies, before ``release``."""
        with self._attendance:
            self._meeting.barrier(_REDUCTIONS)
        return None
