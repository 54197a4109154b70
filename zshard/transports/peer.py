"""Collectives over memory that the ranks of one host share: nothing is sent, ranks read each other.

To start one is to arrive: what this rank lends is complete, and may be read. To wait for it is to
wait until all have arrived, to read what this rank needs where it lies, and to depart. Before what
was lent is written again, all have to have departed. No thread works in between, so a rank waits
only for ranks that are behind it. Each buffer has a rendezvous of its own; ranks may wait for
different ones in different orders. Sums are made by the reader, in rank order.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import ops
from .arena import COPIED
from .in_memory import InMemoryRanks
from .messages import Work
from .neighbours import Neighbours
from .shared import SharedArena, SharedWindow


class PeerRanks(InMemoryRanks[SharedWindow]):
    """Ranks of one host that read each other's memory; one for each model."""

    read_by_waiter = True
    arena: SharedArena
    neighbours: Neighbours

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, neighbours: Neighbours
    ) -> None:
        super().__init__(group, device)
        self.neighbours = neighbours
        self.arena = SharedArena(weakref.proxy(self))

    # --- what is lent ----------------------------------------------------------------------------

    def sends(self, op: str) -> bool:
        """Nothing."""
        return False

    def attending(self) -> AbstractContextManager[None]:
        """As Neighbours."""
        return self.neighbours

    def reclaim(self, lent: torch.Tensor) -> None:
        """Wait until nobody reads ``lent`` any more."""
        if (found := self.arena.find(lent)) is not None:
            self.neighbours.wait(found[0].presence.await_departures)

    def release(self, lent: torch.Tensor) -> None:
        """Say that this rank has read what others lend where it lends ``lent``."""
        self.find(lent)[0].presence.depart()

    def rows_for_me(self, packed: torch.Tensor) -> torch.Tensor | None:
        """(N, S): what every rank has packed for this one, in this rank's ``packed`` (N * S,)."""
        window, begin = self.find(packed)
        rows = window.rows[:, begin : begin + packed.nbytes].view(packed.dtype)
        return rows.view(self.size, self.size, -1)[:, self.rank]

    # --- collectives -----------------------------------------------------------------------------

    def start_gather(
        self, full: torch.Tensor | None, shard: torch.Tensor, *, lasting: bool
    ) -> Work | None:
        """Lend ``shard`` (S,); what others lend is read when it is waited for."""
        if (found := self.arena.find(shard)) is None:
            parts = None if full is None else full.view(self.size, -1)

            def read(begin: int, rows: torch.Tensor) -> None:
                if parts is not None:
                    parts[:, begin : begin + rows.shape[1]].copy_(rows)

            self.neighbours.swap(shard, read)
            return None
        found[0].presence.arrive()
        return _Gather(self, full, shard)

    def read(self, full: torch.Tensor | None, shard: torch.Tensor) -> None:
        """End a gather: wait until all lend their shards, and copy them, if there is a ``full``."""
        window, begin = self.find(shard)
        with self.neighbours:
            self.neighbours.wait(window.presence.await_arrivals)
            if full is not None:
                ops.gather_cast_(full.view(COPIED), window.shards(begin, shard.nbytes))
            window.presence.depart()

    def start_exchange(self, chunks: torch.Tensor, packed: torch.Tensor) -> Work | None:
        """Lend ``packed``; ``chunks`` are the others', where they lie."""
        window, _ = self.find(packed)
        window.presence.arrive()
        return _Arrivals(self.neighbours, window)

    def start_all_reduce(self, value: torch.Tensor, *, maximum: bool) -> Work | None:
        """Start summing ``value`` in rank order (or taking its maximum), in place."""
        return self.neighbours.start_sum(value, maximum=maximum)

    def broadcast(self, value: torch.Tensor) -> None:
        """Replace ``value`` by the first rank's, in place."""
        flat = value.view(-1).view(torch.uint8)
        self.neighbours.swap(
            flat, lambda begin, rows: flat[begin : begin + rows.shape[1]].copy_(rows[0])
        )


class _Gather:
    def __init__(self, over: PeerRanks, full: torch.Tensor | None, shard: torch.Tensor) -> None:
        self._over, self._full = over, full  # (N * S,) uint8
        self._shard: torch.Tensor | None = shard  # (S,) uint8; until it is read

    def wait(self) -> bool:
        if self._shard is not None:  # else an exception has come behind that
            with self._over.neighbours:
                self._over.read(self._full, self._shard)
                self._shard = None
        return True


class _Arrivals(NamedTuple):
    over: Neighbours
    window: SharedWindow

    def wait(self) -> bool:
        self.over.wait(self.window.presence.await_arrivals)
        return True
