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

import weakref
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from .. import ops
from ..streams import Mark, compute_waits, mark_here
from .arena import COPIED, Window
from .in_memory import InMemoryRanks
from .messages import Work
from .standing import Standing
from .symmetric_memory import Allocator, SymmetricArena, TorchAllocator

# Channels of barriers. What is mailed is gathered on any lane, so it has one of its own.
_GATHERS, _REDUCTIONS, _MAIL = 0, 1, 2


class SymmetricRanks(InMemoryRanks[Window]):
    """Ranks of one host whose GPUs read each other's memory; one for each model.

    Args:
        allocator: None for torch's.
    """

    arena: SymmetricArena
    _standing: Standing

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, allocator: Allocator | None = None
    ) -> None:
        super().__init__(group, device)
        self.find_hosts()  # in an object of its own: what it waits for goes through the group
        self.arena = SymmetricArena(weakref.proxy(self), allocator or TorchAllocator())
        self._read: dict[int, Mark] = {}  # by address: when the last gather of it had been read
        self._mailbox: torch.Tensor | None = None  # for what was not made by `empty`

    # --- what is lent ----------------------------------------------------------------------------

    def sends(self, op: str) -> bool:
        """What is small, and what the host is told."""
        return op not in ("all_gather", "reduce_scatter")

    def attending(self) -> AbstractContextManager[None]:
        """See [Note: a collective over symmetric memory]."""
        return self._standing

    def reclaim(self, lent: torch.Tensor) -> None:
        """Stall the compute stream until nobody reads ``lent`` any more."""
        with self._standing:
            compute_waits(self._read.pop(lent.data_ptr(), None))

    def release(self, lent: torch.Tensor) -> None:
        """Say that this rank has read what others lend where it lends ``lent``."""
        if self._standing.failed:
            return  # the barrier would meet the others' one before
        with self._standing:
            self.arena.barrier(_REDUCTIONS)

    def rows_for_me(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """N x (S,): what every rank has packed for this one, in its ``packed`` (N * S,)."""
        window, begin = self.find(packed)
        step = packed.nbytes // self.size
        mine = slice(begin + self.rank * step, begin + (self.rank + 1) * step)
        return [row[mine].view(packed.dtype) for row in window.rows]

    # --- collectives -----------------------------------------------------------------------------

    def start_gather(
        self, full: torch.Tensor | None, shard: torch.Tensor, *, lasting: bool
    ) -> Work | None:
        """Copy what every rank lends where this one lends ``shard`` (S,) into ``full`` (N * S,)."""
        channel = _GATHERS
        if self.arena.find(shard) is None:
            channel, shard = _MAIL, self._mail(shard)
        window, begin = self.find(shard)
        self.arena.barrier(channel)
        if full is not None:
            ops.gather_cast_(full.view(COPIED), window.shards(begin, shard.nbytes))
        self.arena.barrier(channel)
        self._read[shard.data_ptr()] = mark_here(self.device)
        return None

    def _mail(self, shard: torch.Tensor) -> torch.Tensor:
        """A copy that the other ranks can read; they have read what was there before."""
        if self._mailbox is None or self._mailbox.nbytes < shard.nbytes:
            if self._mailbox is not None:
                self.give_back(self._mailbox)
            with torch.inference_mode(False):  # it outlives a first use there
                self._mailbox = self.empty(shard.nbytes, torch.uint8)
        return self._mailbox[: shard.nbytes].copy_(shard)

    def start_exchange(self, chunks: torch.Tensor, packed: torch.Tensor) -> Work | None:
        """Lend ``packed``; what others lend is read where it lies, before ``release``."""
        self.arena.barrier(_REDUCTIONS)
        return None
