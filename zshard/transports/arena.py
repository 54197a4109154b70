"""Memory that ranks lend each other, and where in it a tensor lies.

An extent is allocated by all ranks together and has a part for each of them, which that rank writes
and all others read. Every rank asks for the same windows in the same order, so a window has the
same place in every part. Small windows share extents; a large one has an extent for itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ..layout import aligned
from .groups import Rows

COPIED = torch.float32  # any dtype of the ops: a shard's bytes are copied, 64 or a multiple


class Window:
    """``nbytes`` of each rank.

    Args:
        rows: N x (nbytes,) uint8, of every rank, where this rank can read them.

    Attributes:
        own: (nbytes,) uint8, this rank's.
        whole: it is a full buffer on every rank, of which each lends its own shard.
    """

    rows: Rows

    def __init__(self, rows: Rows, rank: int) -> None:
        self.rows, self.own, self.whole = rows, rows[rank], False
        self._rank = rank
        self._shards: dict[tuple[int, int], list[torch.Tensor]] = {}

    def shards(self, begin: int, nbytes: int) -> list[torch.Tensor]:
        """N x (nbytes / 4,) ``COPIED``: every rank's shard, where this one's is from ``begin``."""
        if (known := self._shards.get((begin, nbytes))) is None:
            step = nbytes if self.whole else 0
            begins = [begin + (rank - self._rank) * step for rank in range(len(self.rows))]
            known = self._shards[begin, nbytes] = [
                row[at : at + nbytes].view(COPIED)
                for row, at in zip(self.rows, begins, strict=True)
            ]
        return known


W = TypeVar("W", bound=Window)


class Extent(Generic[W]):
    """Memory that was allocated together, and the windows that lie in it.

    Args:
        own: (part,) uint8, this rank's part.
        cut: makes the window of which a part's bytes from ``begin`` on are taken:
            ``cut(begin, nbytes)``.
    """

    def __init__(self, own: torch.Tensor, cut: Callable[[int, int], W]) -> None:
        self.own, self.begins, self.taken = own, list[int](), 0
        self.windows: list[W] = []
        self._cut = cut

    def take(self, nbytes: int, needed: int) -> W:
        """A new window of ``nbytes``, which takes ``needed``; the caller has seen their room."""
        window = self._cut(self.taken, nbytes)
        self.begins.append(self.taken)
        self.windows.append(window)
        self.taken += needed
        return window

    def keep(self, count: int) -> None:
        """Forget all windows but the first ``count``; what the others took is zeros again."""
        if count < len(self.begins):
            self.taken = self.begins[count]
        del self.begins[count:], self.windows[count:]
        self.own[self.taken :].zero_()


class Arena(ABC, Generic[W]):
    """The windows of one group of ranks. Every rank makes the same calls in the same order.

    Args:
        small: bytes of an extent that windows share.
        overhead: bytes of a part that a window takes besides its own.
    """

    def __init__(self, small: int, overhead: int = 0) -> None:
        self._small, self._overhead = small, overhead
        self._extents: dict[int, Extent[W]] = {}  # by address
        self._open: Extent[W] | None = None  # with room for small windows
        self.settle()

    @abstractmethod
    def allocate(self, part: int) -> Extent[W]:
        """A new extent with ``part`` bytes or more for each rank, of zeros.

        Raises:
            WrapError: on every rank, if there is not enough memory on any.
        """

    def window(self, nbytes: int) -> W:
        """A new window, of zeros.

        Raises:
            WrapError: on every rank, if there is not enough memory on any.
        """
        needed = self._needed(nbytes)
        if needed >= self._small:
            return self._extend(needed).take(nbytes, needed)
        if not self.has_room(nbytes):
            self._open = self._extend(self._small)
        assert self._open is not None
        return self._open.take(nbytes, needed)

    def find(self, tensor: torch.Tensor) -> tuple[W, int] | None:
        """The window that this rank's ``tensor`` lies in, and the byte of it that it starts at."""
        extent = self._extents.get(tensor.untyped_storage().data_ptr())
        if extent is None or tensor.numel() == 0:
            return None
        place = tensor.data_ptr() - extent.own.data_ptr()
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
        return self._open is not None and self._open.taken + self._needed(nbytes) <= self._small

    def settle(self) -> None:
        """Have ``go_back`` keep the windows that there are now."""
        count = 0 if self._open is None else len(self._open.windows)
        self._settled = dict(self._extents), self._open, count

    def go_back(self) -> None:
        """Forget what was made since ``settle``: some ranks may have made more than others."""
        extents, self._open, count = self._settled
        self._extents = dict(extents)
        if self._open is not None:
            self._open.keep(count)

    def close(self) -> None:
        """Free everything; what somebody still holds goes with that."""
        self._extents.clear()
        self._open = None
        self.settle()

    def _needed(self, nbytes: int) -> int:
        """Bytes of a part that a window takes."""
        return aligned(self._overhead + nbytes)

    def _extend(self, part: int) -> Extent[W]:
        extent = self.allocate(part)
        self._extents[extent.own.untyped_storage().data_ptr()] = extent
        return extent
