"""Memory that the ranks of one host share: allocated together, written by its owner, read by all.

An extent is a file without a name (memfd) of one part for each rank. The first rank makes it, and
the others open it as one of that process's descriptors, so there is never a name that a killed
process could leave behind, and the size of /dev/shm sets no limit. Every rank reserves its own part
itself: its pages lie on that rank's NUMA node, and a lack of memory is an error here, on every
rank, instead of a signal at the first write. All ranks ask for the same windows in the same order,
so a window has the same place in every part.

It is made in wrap: the mailbox and what is small (with the first model over a group), then with
each unit its shards or full buffers, then two reduce buffers if anything is trained. Later only
reduce buffers that have to grow are made anew, as the first backward begins that trains a larger
unit. A lack is found there on all ranks, before anything has begun.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from typing import NoReturn

import torch

from .. import _C
from ..errors import WrapError
from .groups import Ranks
from .processes import descriptor_path

_PRESENCE_BYTES = 64  # of each rank, at the start of a window: what _C.Rendezvous counts in
_SMALL = 1 << 20  # bytes: windows below this share extents of this size


class NoSharedMemory(WrapError):
    """Told by every rank where one of them has too little memory to share."""


class Window:
    """``nbytes`` of each rank; see [Note: arrivals and departures] in csrc/rendezvous.h.

    Attributes:
        rows: (N, nbytes) uint8, of every rank; own: (nbytes,), this rank's.
        whole: it is a full buffer on every rank, of which each lends its own shard.
    """

    def __init__(self, parts: torch.Tensor, begin: int, nbytes: int, rank: int) -> None:
        data = begin + _PRESENCE_BYTES
        self.rows = parts[:, data : data + nbytes]
        self.own, self.whole = self.rows[rank], False
        size, stride = parts.shape
        self.presence = _C.Rendezvous(parts.data_ptr() + begin, stride, size, rank)


class _Extent:
    """One file: its memory (N, part), and how much of a part is taken."""

    def __init__(self, parts: torch.Tensor) -> None:
        self.parts, self.taken = parts, 0
        self.begins: list[int] = []
        self.windows: list[Window] = []

    def take(self, nbytes: int, rank: int) -> Window:
        """A new window; the caller has seen that there is room."""
        window = Window(self.parts, self.taken, nbytes, rank)
        self.begins.append(self.taken)
        self.windows.append(window)
        self.taken += _needed(nbytes)
        return window


class Arena:
    """The windows of one group of ranks. Every rank makes the same calls in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._extents: dict[int, _Extent] = {}  # by address
        self._open: _Extent | None = None  # with room for small windows

    def window(self, nbytes: int) -> Window:
        """A new window, of zeros.

        Raises:
            NoSharedMemory: on every rank, if there is not enough memory on any.
        """
        needed = _needed(nbytes)
        if needed > _SMALL:
            return self._extend(needed).take(nbytes, self._ranks.rank)
        if self._open is None or self._open.taken + needed > _SMALL:
            self._open = self._extend(_SMALL)
        return self._open.take(nbytes, self._ranks.rank)

    def find(self, tensor: torch.Tensor) -> tuple[Window, int] | None:
        """The window that this rank's ``tensor`` lies in, and the byte of it that it starts at."""
        extent = self._extents.get(tensor.untyped_storage().data_ptr())
        if extent is None or tensor.numel() == 0:
            return None
        part = extent.parts[self._ranks.rank]
        place = tensor.data_ptr() - part.data_ptr()
        window = extent.windows[bisect_right(extent.begins, place) - 1]
        return window, tensor.data_ptr() - window.own.data_ptr()

    def give_back(self, tensor: torch.Tensor) -> None:
        """Free an extent that ``tensor`` has for itself; what is small stays."""
        address = tensor.untyped_storage().data_ptr()
        extent = self._extents.get(address)
        if extent is not None and extent is not self._open and len(extent.windows) == 1:
            del self._extents[address]

    def has_room(self, nbytes: int) -> bool:
        """Whether a small window takes no more memory than there is."""
        return self._open is not None and self._open.taken + _needed(nbytes) <= _SMALL

    def rewind(self) -> None:
        """Reset this rank's arrivals and departures everywhere; all ranks do so together."""
        for extent in self._extents.values():
            own = extent.parts[self._ranks.rank]
            for begin in extent.begins:
                own[begin : begin + _PRESENCE_BYTES].zero_()

    def close(self) -> None:
        """Free everything; what somebody still holds goes with that."""
        self._extents.clear()
        self._open = None

    def _extend(self, part: int) -> _Extent:
        """A new extent with ``part`` bytes for each rank."""
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
        extent = self._extents[parts.data_ptr()] = _Extent(parts)
        return extent


def _needed(nbytes: int) -> int:
    """Bytes of a part that a window takes."""
    return math.ceil((_PRESENCE_BYTES + nbytes) / 64) * 64


def _map(path: str, part: int, ranks: Ranks) -> torch.Tensor:
    """(N, part) uint8, the shared file; this rank's part is reserved."""
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(opened, ranks.rank * part, part)
    finally:
        os.close(opened)
    with torch.inference_mode(False):  # it outlives a first use there
        nbytes = part * ranks.size
        memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
        return memory.view(ranks.size, part)


def _refuse(who: str, problem: str, part: int, size: int) -> NoReturn:
    raise NoSharedMemory(
        f"{who} of {size}: no shared memory for comm='peer': {problem}. "
        f"Each of the {size} ranks needs {part} bytes more of this host's memory "
        f"({part * size} in all). "
        "Free some, raise the limit of the container or of the process (ulimit -f), or pass "
        "comm='group'."
    )
