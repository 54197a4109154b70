"""A range of a tensor's elements, in memory order, as the boxes that it covers.

[Note: a range is a few boxes] A rank holds elements [begin, end) of a tensor, counted in memory
order; formats that store N-D tensors in parts know boxes, (offsets, sizes). A range of whole rows
is one box. Where it begins or ends inside a row there is a rest in front and one behind, each a
range of one row: the same question with a dimension less. That makes at most 2 * ndim - 1 boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..layout import Segment

_OffsetsAndSizes = tuple[tuple[int, ...], tuple[int, ...]]


class Box(NamedTuple):
    """Elements of a tensor that fill a box, and a range in its memory order."""

    offsets: tuple[int, ...]  # by dimension of the tensor
    sizes: tuple[int, ...]
    begin: int  # elements of the tensor that lie before the box in memory order

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    def view_of(self, segment: Segment, elements: torch.Tensor) -> torch.Tensor:
        """``elements`` (numel,), in memory order, in the box's shape."""
        order = segment.order
        return elements.view([self.sizes[d] for d in order]).permute(_inverse(order))


def boxes_of(segment: Segment, begin: int, end: int) -> list[Box]:
    """Elements [begin, end) of ``segment``, in memory order, as boxes in that order.

    An empty range has none.
    """
    order = segment.order
    back = _inverse(order)
    found: list[Box] = []
    for offsets, sizes in _boxes([segment.shape[d] for d in order], begin, end):
        box = Box(tuple(offsets[d] for d in back), tuple(sizes[d] for d in back), begin)
        found.append(box)
        begin += box.numel
    return found


def _boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[_OffsetsAndSizes]:
    """The boxes of [begin, end) in a contiguous tensor; see [Note: a range is a few boxes]."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        yield from _in_row(inner, last, begin - last * row, end - last * row)
        return
    yield from _in_row(inner, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from _in_row(inner, last, 0, end - last * row)


def _in_row(inner: Sequence[int], row: int, begin: int, end: int) -> Iterator[_OffsetsAndSizes]:
    for offsets, sizes in _boxes(inner, begin, end):
        yield (row, *offsets), (1, *sizes)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda place: order[place]))
