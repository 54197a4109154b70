"""Memory that the GPUs of one host share: torch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch

from .arena import Arena, Extent, Window
from .control import timeout_of
from .groups import Ranks
from .shared import NoSharedMemory

_Made = TypeVar("_Made")
# At least: a mapping of GPU memory is a multiple of 2 MiB, some of which torch keeps for signals.
_EXTENT_BYTES = (2 << 20) - (64 << 10)


class Joined(NamedTuple):
    """Memory that was allocated together.

    Attributes:
        rows: N x (nbytes,) uint8, of every rank, where this rank can read them.
        barrier: enqueues a meeting of all ranks, on a channel of its own.
    """

    rows: list[torch.Tensor]
    barrier: Callable[[int], None]


class Allocator(Protocol):
    """Where the memory comes from."""

    def allocate(self, nbytes: int, ranks: Ranks) -> torch.Tensor:
        """This rank's row, of zeros."""

    def join(self, own: torch.Tensor, ranks: Ranks) -> Joined:
        """The memory of which ``own`` is this rank's row; all ranks call it together."""


class TorchAllocator:
    """torch.distributed._symmetric_memory."""

    def allocate(self, nbytes: int, ranks: Ranks) -> torch.Tensor:
        """See ``Allocator``."""
        from torch._C._distributed_c10d import _SymmetricMemory  # not every build has it

        # Not `torch.distributed._symmetric_memory.empty`, which may give part of what a pool holds.
        own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, ranks.device)
        return own.zero_()

    def join(self, own: torch.Tensor, ranks: Ranks) -> Joined:
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
        return Joined(rows, lambda channel: handle.barrier(channel, milliseconds))


class SymmetricArena(Arena[Window]):
    """Windows in symmetric memory.

    Raises:
        NoSharedMemory: on every rank, if there is none on any.
    """

    def __init__(self, ranks: Ranks, allocator: Allocator) -> None:
        super().__init__(_EXTENT_BYTES)
        self._ranks, self._allocator = ranks, allocator
        self._first: Joined | None = None
        self.window(0)  # in the first extent, whose barriers all use

    def barrier(self, channel: int) -> None:
        """Enqueue a meeting of all ranks on the current stream."""
        assert self._first is not None
        self._first.barrier(channel)

    def allocate(self, part: int) -> Extent[Window]:
        """See ``Arena``."""
        own = self._together(part, lambda: self._allocator.allocate(part, self._ranks))
        joined = self._together(part, lambda: self._allocator.join(own, self._ranks))
        self._first = self._first or joined
        rows, rank = joined.rows, self._ranks.rank
        return Extent(rows[rank], lambda begin, n: Window([row[begin:][:n] for row in rows], rank))

    def _together(self, nbytes: int, make: Callable[[], _Made]) -> _Made:
        """What ``make`` makes; an error on all ranks where it raises on one."""
        made, problem = [], ""
        try:
            made.append(make())
        except RuntimeError as error:
            problem = str(error) or type(error).__name__
        if (found := self._ranks.first_problem(problem)) is not None:
            who, what = found
            raise NoSharedMemory(
                f"{who}: no symmetric memory of {nbytes} bytes for "
                f"comm='peer': {what}. Every rank needs a GPU of its own on one host, which "
                "CUDA_VISIBLE_DEVICES does not hide from the others; or pass comm='group'."
            )
        return made[0]
