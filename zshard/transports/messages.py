"""Collectives over gloo made of messages: every row goes straight to the rank that needs it.

All of them are posted at once, so that both directions of every connection are busy, and no thread
waits for them; [Note: the ways of gloo] in groups.py says when that is the fastest way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

# Where the tags of messages start and wrap around, away from those that users' own messages have.
_FIRST_TAG, _LAST_TAG = 1 << 29, 1 << 30


class Work(Protocol):
    """What the backend returns for a collective, or for one message."""

    def wait(self) -> bool:
        """Block until it is complete."""


class Together(NamedTuple):
    """Operations under way that are one collective."""

    works: list[Work]

    def wait(self) -> bool:
        """Block until all of them are complete."""
        return all([work.wait() for work in self.works])


def works_of(work: Work | None) -> list[Work]:
    """The operations that are one collective; none where there is nothing to wait for."""
    if work is None:
        return []
    return work.works if isinstance(work, Together) else [work]


class Messenger:
    """Sends rows between the ranks of a gloo ``group``; every rank makes the same calls in order.

    Args:
        rank: this rank's place in the group; size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group, self._rank = group, rank
        # Each rank starts with another peer, so that not all of them send to the same one.
        self._after = [(rank + distance) % size for distance in range(1, size)]
        # Not itertools.cycle, which keeps all that it has given.
        self._tags = chain.from_iterable(repeat(range(_FIRST_TAG, _LAST_TAG)))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Together:
        """Start gathering every rank's ``shard`` (S,) into ``full`` (N * S,), on the CPU."""
        return self._swap(full, shard, lambda rank: shard)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Together:
        """Start sending row r of ``sent`` (N * S,) to rank r; ``received`` is by sender."""
        rows = sent.view(len(self._after) + 1, -1)
        return self._swap(received, rows[self._rank], lambda rank: rows[rank])

    def _swap(
        self, into: torch.Tensor, own: torch.Tensor, row_for: Callable[[int], torch.Tensor]
    ) -> Together:
        tag = next(self._tags)
        rows = into.view(len(self._after) + 1, -1)
        # What is expected is said first: gloo sends at once to who has said so.
        works: list[Work] = [self._group.recv([rows[r]], r, tag) for r in reversed(self._after)]
        works += [self._group.send([row_for(r)], r, tag) for r in self._after]
        if rows[self._rank].data_ptr() != own.data_ptr():
            rows[self._rank].copy_(own)
        return Together(works)
