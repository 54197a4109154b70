"""Where every parameter lies in a unit's flat buffer, and which part of it a rank owns.

Offsets and sizes are csrc/layout.h's; what of them lies in a range is worked out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import _C
from .errors import InputError


class Segment(NamedTuple):
    """One parameter's range in its flat buffer, in elements."""

    offset: int  # a multiple of 32 elements, so that views keep the alignment torch allocates with
    numel: int
    shape: torch.Size  # the parameter's global shape
    stride: tuple[int, ...]  # dense strides: the segment keeps the parameter's own memory order
    permuted: bool  # whether that order is another than that of the dimensions

    @classmethod
    def of(cls, param: torch.Tensor, offset: int) -> Segment:
        """``param``'s segment from ``offset`` on."""
        stride = dense_stride(param)
        # Dimensions of size 1 or less have no place in memory, so their strides decide nothing.
        strides = [s for s, n in zip(stride, param.shape, strict=True) if n > 1]
        permuted = strides != sorted(strides, reverse=True)
        return cls(offset, param.numel(), param.shape, stride, permuted)

    def require_shape(self, tensor: torch.Tensor, name: str) -> None:
        """Raise InputError if ``tensor``, to be parameter ``name``'s values, has another shape."""
        if tensor.shape != self.shape:
            raise InputError(
                f"{name}: cannot copy a tensor of shape {tuple(tensor.shape)} into a parameter of "
                f"shape {tuple(self.shape)}"
            )

    def physical(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` (of ``shape``) with its dimensions in the segment's memory order."""
        return tensor.permute(self.order) if self.permuted else tensor

    def view_of(self, full: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of its flat buffer ``full`` (N * S,)."""
        # as_strided counts from the start of the storage, which other flats may share.
        offset = full.storage_offset() + self.offset
        return torch.as_strided(full, self.shape, self.stride, offset)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest in memory."""
        return memory_order(self.stride)


class Range(NamedTuple):
    """Elements [begin, end) of a flat buffer."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Elements in the range."""
        return self.end - self.begin

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The range's elements of a flat tensor, as a view."""
        return tensor[self.begin : self.end]


class Local(NamedTuple):
    """The part of a segment that lies in a range of the flat buffer, counted in two ways."""

    at: Range  # from the first element of that range
    elements: Range  # from the first element of the segment


@dataclass(frozen=True)
class Layout:
    """The segments of one flat buffer, cut into ``world_size`` shards of equal size.

    With replicas (HSDP) a shard is itself a whole number of equal, aligned pieces, one a replica.
    """

    segments: tuple[Segment, ...]
    shard_size: int  # S, elements
    world_size: int  # N
    replicas: int = 1

    @classmethod
    def of(cls, params: Sequence[torch.Tensor], world_size: int, replicas: int = 1) -> Layout:
        """Lay ``params`` out in order."""
        flat = _C.flat_layout([p.numel() for p in params], world_size * replicas)
        segments = tuple(Segment.of(p, at) for p, at in zip(params, flat.offsets, strict=True))
        return cls(segments, flat.shard_size * replicas, world_size, replicas)

    @property
    def numel(self) -> int:
        """Elements of the full buffer, N * S, padding included."""
        return self.shard_size * self.world_size

    @property
    def padding(self) -> int:
        """Elements of the full buffer that belong to no parameter."""
        return self.padding_in(self.whole)

    def padding_in(self, within: Range) -> int:
        """Elements of ``within`` that belong to no parameter."""
        used = (self.local(index, within).at.numel for index in range(len(self.segments)))
        return within.numel - sum(used)

    @property
    def whole(self) -> Range:
        """All of the flat buffer."""
        return Range(0, self.numel)

    def shard(self, rank: int) -> Range:
        """The shard of ``rank``."""
        return Range(rank * self.shard_size, (rank + 1) * self.shard_size)

    def piece(self, replica: int) -> Range:
        """The part of a shard that ``replica`` sums over the replicas, counted from the shard."""
        size = self.shard_size // self.replicas
        return Range(replica * size, (replica + 1) * size)

    def local(self, index: int, within: Range) -> Local:
        """The part of segment ``index`` inside ``within``, perhaps empty."""
        segment = self.segments[index]
        begin = min(max(segment.offset, within.begin), within.end)
        end = min(max(segment.offset + segment.numel, begin), within.end)
        skip = min(max(begin - segment.offset, 0), segment.numel)
        at = Range(begin - within.begin, end - within.begin)
        return Local(at, Range(skip, skip + at.numel))


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(stride)), key=lambda d: (-stride[d], d)))


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill one block of memory, else contiguous ones."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= size
    return tuple(tensor.stride())


def aligned(nbytes: int) -> int:
    """What begins behind ``nbytes`` begins where torch's allocators would put it, at 64 bytes."""
    return -(-nbytes // 64) * 64
