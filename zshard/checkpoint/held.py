"""A tensor of which this rank holds a range: what checkpoints read from and write into.

A range is [begin, end) in elements of the tensor in its memory order; see ``Segment.order``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..digest import digest
from ..layout import Range
from ..units.flat import Flat

_PUT_AS = {  # what torch's index_put_ takes in the place of what it does not
    torch.float8_e8m0fnu: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


class Part:
    """A tensor, and the range of it that is here.

    Attributes:
        shape: of the whole tensor; dtype: that it is stored in.
        order: its dimensions from the slowest to the fastest in memory.
        here: the range that this rank holds; mine: the part of that which it saves, so that every
            element is saved by one rank.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        order: tuple[int, ...],
        here: Range,
        mine: Range,
    ) -> None:
        self.shape, self.dtype, self.order = shape, dtype, order
        self.here, self.mine = here, mine


class Source(Part, ABC):
    """A tensor that is saved."""

    @abstractmethod
    def read(self, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end), 1-D, of ``dtype``; perhaps a view."""


class Sink(Part, ABC):
    """A tensor that is loaded. Values come 1-D, on the CPU, and are cast as ``copy_`` does.

    Attributes:
        obstacle: why it cannot be loaded; "" if it can.
    """

    obstacle = ""

    @abstractmethod
    def store(self, begin: int, values: torch.Tensor) -> None:
        """Make ``values`` the elements from ``begin`` on."""

    @abstractmethod
    def scatter(self, at: torch.Tensor, values: torch.Tensor) -> None:
        """Make ``values`` the elements ``at`` (1-D int64), all of which are here."""

    def memory(self) -> torch.Tensor | None:
        """The range that is here, to be written directly: 1-D, of ``dtype``, on the CPU."""
        return None


class Held(Source, Sink):
    """A tensor of the model or the optimizer."""


class HeldMaster(Held):
    """A sharded parameter, by its master; stored in its own dtype, or in the master's."""

    def __init__(self, flat: Flat, segment: int, mine: Range, dtype: torch.dtype) -> None:
        place, local = flat.layout.segments[segment], flat.local(segment)
        super().__init__(place.shape, dtype, place.order, local.elements, mine)
        self._master, self._shift = flat.master, local.at.begin - local.elements.begin

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Of the master, in the dtype that is stored."""
        return self._master.read(begin + self._shift, end + self._shift).to(self.dtype)

    def store(self, begin: int, values: torch.Tensor) -> None:
        """Round to the dtype that is stored, as the plain parameter would be."""
        self._master.store(begin + self._shift, values.to(self.dtype))

    def scatter(self, at: torch.Tensor, values: torch.Tensor) -> None:
        """Round to the dtype that is stored."""
        self._master.scatter(at + self._shift, values.to(self.dtype))

    def memory(self) -> torch.Tensor | None:
        """The master itself, where it is of the dtype that is stored."""
        values = self._master.values
        if values is None or not values.is_cpu or values.dtype != self.dtype:
            return None
        return values[self.here.begin + self._shift : self.here.end + self._shift]


class HeldSlice(Held):
    """A slice of a tensor, as a tensor of its own: 1-D, from element ``here.begin`` on."""

    def __init__(
        self, local: torch.Tensor, shape: torch.Size, order: tuple[int, ...], skip: int, mine: Range
    ) -> None:
        here = Range(skip, skip + local.numel())
        super().__init__(shape, local.dtype, order, here, mine)
        self._local = local

    def read(self, begin: int, end: int) -> torch.Tensor:
        """A view of the slice."""
        return self._local[begin - self.here.begin : end - self.here.begin]

    def store(self, begin: int, values: torch.Tensor) -> None:
        """Into the slice."""
        begin -= self.here.begin
        self._local[begin : begin + values.numel()].copy_(values)

    def scatter(self, at: torch.Tensor, values: torch.Tensor) -> None:
        """Into the slice."""
        local = self._local
        local[(at - self.here.begin).to(local.device)] = values.to(local.device, local.dtype)

    def memory(self) -> torch.Tensor | None:
        """The slice itself."""
        return self._local if self._local.is_cpu and self._local.is_contiguous() else None


class HeldWhole(Held):
    """A tensor that every rank has whole, in C order; the first saves it."""

    def __init__(self, tensor: torch.Tensor, *, saves: bool) -> None:
        here = Range(0, tensor.numel())
        order = tuple(range(tensor.ndim))
        super().__init__(tensor.shape, tensor.dtype, order, here, here if saves else Range(0, 0))
        self._tensor = tensor.detach()
        # Memory in another order is read and written by index, so that none of it is copied whole.
        # So is memory whose numbers are not yet the tensor's (torch's lazy conj()).
        as_is = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self._flat = self._tensor.view(-1) if as_is else None
        overlap = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.obstacle = "its elements share memory (expand); clone it" if overlap else ""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """A view, or a copy where memory is in another order."""
        if self._flat is not None:
            return self._flat[begin:end]
        values = self._tensor[self._index(torch.arange(begin, end, device="cpu"))]
        return values.resolve_conj().resolve_neg().view(-1)  # of a 0-d tensor it is 0-d

    def digest(self) -> str:
        """A checksum of its values."""
        return digest(self._tensor)

    def store(self, begin: int, values: torch.Tensor) -> None:
        """Into the tensor."""
        if self._flat is not None:
            self._flat[begin : begin + values.numel()].copy_(values)
        else:
            self.scatter(torch.arange(begin, begin + values.numel(), device="cpu"), values)

    def scatter(self, at: torch.Tensor, values: torch.Tensor) -> None:
        """Into the tensor."""
        tensor, values = self._tensor, values.to(self._tensor.device, self.dtype)
        if tensor.is_conj():  # index_put_ would write to memory what is read conjugated
            tensor, values = tensor.conj(), values.conj_physical()
        if put_as := _PUT_AS.get(self.dtype):
            tensor, values = tensor.view(put_as), values.view(put_as)
        tensor[self._index(at)] = values

    def _index(self, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.unravel_index(at.to(self._tensor.device), self.shape)

    def memory(self) -> torch.Tensor | None:
        """The tensor itself, where memory is in C order, on the CPU."""
        if self._flat is None or not self._flat.is_cpu:
            return None
        torch.autograd.graph.increment_version(self._tensor)  # which reading into memory does not
        return self._flat


def snapshot(of: Source) -> HeldSlice:
    """A copy of what a rank saves of another tensor, on the CPU."""
    values = of.read(*of.mine).to("cpu", copy=True)  # even on the CPU a copy of its own
    return HeldSlice(values, of.shape, of.order, of.mine.begin, of.mine)
