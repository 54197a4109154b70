"""Memory that the ranks of one host share: allocated together, written by its owner, read by all.

An extent is a file without a name (memfd). The first rank makes it, and the others open it as one
of that process's descriptors, so there is never a name that a killed process could leave behind,
and the size of /dev/shm sets no limit. Every rank reserves its own part itself: its pages lie on
that rank's NUMA node, and a lack of memory is an error here, on every rank, instead of a signal at
the first write.

It is made in wrap: the mailbox and what is small (with the first model over a group), then with
each unit its shards or full buffers, then two reduce buffers if anything is trained. Later only
reduce buffers are made anew, as a backward begins: where they have to grow, as a larger unit is
trained, and after a reset, before which not all ranks may have made the same. A lack is found there
on all ranks, before anything has begun.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import NoReturn

import torch

from .. import _C
from ..errors import WrapError
from .arena import Arena, Extent, Window
from .groups import Ranks
from .processes import descriptor_path

_PRESENCE_BYTES = 64  # of each rank, at the start of a window: what _C.Rendezvous counts in
_SMALL = 1 << 20  # bytes: windows below this share extents of this size
# Bytes reserved at a time, in a millisecond or so. Older kernels undo a request when any signal
# comes, and it is made again: where a profiler's timer ticks a long one would never end.
_PIECE = 4 << 20


class NoSharedMemory(WrapError):
    """Told by every rank where one of them has too little memory to share."""


class SharedWindow(Window):
    """``nbytes`` of each rank; see [Note: arrivals and departures] in csrc/rendezvous.h.

    Args:
        parts: (N, part) uint8, the extent, of which the window begins at byte ``begin``.
    """

    rows: torch.Tensor  # (N, nbytes) uint8

    def __init__(self, parts: torch.Tensor, rank: int, begin: int, nbytes: int) -> None:
        data = begin + _PRESENCE_BYTES
        super().__init__(parts[:, data : data + nbytes], rank)
        size, stride = parts.shape
        self.presence = _C.Rendezvous(parts.data_ptr() + begin, stride, size, rank)


class SharedArena(Arena[SharedWindow]):
    """Windows in files without a name."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(_SMALL, overhead=_PRESENCE_BYTES)
        self._ranks = ranks

    def rewind(self) -> None:
        """Go back, and reset this rank's arrivals and departures; all ranks do so together."""
        self.go_back()
        for extent in self._extents.values():
            for begin in extent.begins:
                extent.own[begin : begin + _PRESENCE_BYTES].zero_()

    def allocate(self, part: int) -> Extent[SharedWindow]:
        """See ``Arena``; it is a NoSharedMemory that is raised."""
        ranks, problem = self._ranks, ""
        part = math.ceil(part / os.sysconf("SC_PAGESIZE")) * os.sysconf("SC_PAGESIZE")
        made = -1
        try:
            if ranks.rank == 0:
                made = os.memfd_create("zshard", os.MFD_CLOEXEC)
                os.ftruncate(made, part * ranks.size)
        except OSError as error:
            problem = str(error)
        path = str(ranks.all_gather_object(descriptor_path(made))[0])
        parts = torch.empty(0, device="cpu")
        try:
            if not problem:
                parts = _map(path, part, ranks)
        except (OSError, RuntimeError) as error:
            problem = str(error)
        found = ranks.first_problem(problem)
        if made >= 0:
            os.close(made)
        if found is not None:
            del parts  # an error keeps what its functions held
            _refuse(*found, part, ranks.size)
        return Extent(parts[ranks.rank], partial(SharedWindow, parts, ranks.rank))


def _map(path: str, part: int, ranks: Ranks) -> torch.Tensor:
    """(N, part) uint8, the shared file; this rank's part is reserved."""
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for begin in range(0, part, _PIECE):
            os.posix_fallocate(opened, ranks.rank * part + begin, min(_PIECE, part - begin))
    finally:
        os.close(opened)
    nbytes = part * ranks.size
    memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
    return memory.view(ranks.size, part)


def _refuse(who: str, problem: str, part: int, size: int) -> NoReturn:
    raise NoSharedMemory(
        f"{who}: no shared memory for comm='peer': {problem}. "
        f"Each of the {size} ranks needs {part} bytes more of this host's memory "
        f"({part * size} in all). "
        "Free some, raise the limit of the container or of the process (ulimit -f), or pass "
        "comm='group'."
    )
